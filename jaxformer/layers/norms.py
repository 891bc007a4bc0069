"""Normalisation: a gain and a bias around one pure function."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F


class Norm(nn.Module):
    """`F.layer_norm` or `F.rms_norm` with what the configuration says is learned.

    With `heads` the input is [..., heads, width] and every head has its own parameters.
    """

    config: c.Norm
    heads: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        cfg = self.config
        shape = x.shape[-1:] if self.heads is None else (self.heads, x.shape[-1])
        scale = bias = None
        if cfg.parameters != "none":
            start = nn.initializers.constant(1.0 - cfg.scale_offset)
            scale = self.param("scale", start, shape, jnp.float32) + cfg.scale_offset
        if cfg.parameters == "scale_bias":
            bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return self.function()(x, scale, bias)

    def function(self):
        """The pure function of (x, scale, bias)."""
        match self.config:
            case c.LayerNorm(eps=eps):
                return partial(F.layer_norm, eps=eps)
            case c.RMSNorm(eps=eps, eps_position=position):
                return partial(F.rms_norm, eps=eps, eps_position=position)
