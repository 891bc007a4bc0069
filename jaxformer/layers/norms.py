"""Norm module: scale and bias around `F.layer_norm` or `F.rms_norm`."""

from collections.abc import Callable
from functools import partial

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.parameter import read_axes
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import mesh_axis, parameter


class Norm(nn.Module):
    """LayerNorm or RMSNorm, with the parameters its option asks for.

    With `heads` the input is [..., heads, width] and every head has its own parameters. `axes` say
    what those of the parameters count, and `width` how many features there are on all devices.
    """

    config: c.Norm
    mode: Mode = Mode()
    heads: int | None = None
    axes: str | None = None
    width: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        cfg = self.config
        num_features = self.width or x.shape[-1]
        shape = (num_features,) if self.heads is None else (self.heads, num_features)
        logical_axes = self.axes or " ".join(["features"] * len(shape))

        def learned(name: str, start: Callable) -> Float[Array, "..."]:
            value = parameter(self, name, start, shape, logical_axes, self.mode)
            return F.varying(value, *F.varies_over(x))  # before it is as large as x

        scale = bias = None
        if cfg.parameters != "none":
            init_fn = nn.initializers.constant(1.0 - cfg.scale_offset)
            scale = learned("scale", init_fn) + cfg.scale_offset
        if cfg.parameters == "scale_bias":
            bias = learned("bias", nn.initializers.zeros)
        axis_name = None
        if self.heads is None:
            axis_name = mesh_axis(read_axes(logical_axes).names[-1], num_features, self.mode.axes)
        return self.function()(x, scale, bias, axis_name=axis_name)

    @nn.nowrap
    def function(self):
        """Return the pure norm function of (x, scale, bias)."""
        match self.config:
            case c.LayerNorm(eps=eps):
                return partial(F.layer_norm, eps=eps)
            case c.RMSNorm(eps=eps, eps_position=position):
                return partial(F.rms_norm, eps=eps, eps_position=position)
