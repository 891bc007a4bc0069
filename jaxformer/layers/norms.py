"""Norm module: scale and bias around `F.layer_norm` or `F.rms_norm`."""

from collections.abc import Callable

from flax import linen as nn
from flax.linen.initializers import constant, zeros
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.parameters import logical_to_mesh_axis, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig


class Norm(nn.Module):
    """LayerNorm or RMSNorm, with the parameters its option asks for.

    With `num_heads` the input is [..., heads, width] and every head has its own parameters.
    `logical_axes` names the axes of the parameters, and `num_features` is the global number of
    features.
    """

    config: c.Norm
    runtime: RuntimeConfig = RuntimeConfig()
    num_heads: int | None = None
    logical_axes: str | None = None
    num_features: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        cfg = self.config
        num_features = self.num_features or x.shape[-1]
        shape = (num_features,) if self.num_heads is None else (self.num_heads, num_features)
        logical_axes = self.logical_axes or " ".join(["features"] * len(shape))

        def norm_parameter(name: str, init_fn: Callable) -> Float[Array, "..."]:
            value = sharded_parameter(self, name, init_fn, shape, logical_axes)
            return F.pvary_like(value, x)  # before broadcasting

        scale = bias = None
        if cfg.parameters != "none":
            init_fn = constant(1.0 - cfg.scale_offset)
            scale = norm_parameter("scale", init_fn) + cfg.scale_offset
        if cfg.parameters == "scale_bias":
            bias = norm_parameter("bias", zeros)
        axis_name = logical_to_mesh_axis(
            parse_logical_axes(logical_axes).names[-1], num_features, self.runtime.mesh_axes
        )
        return cfg(x, scale, bias, axis_name=axis_name)
