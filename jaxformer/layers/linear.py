"""A matrix product with its kernel."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.config import Initialiser
from jaxformer.layers.initializers import initializer
from jaxformer.layers.mode import Mode


class Linear(nn.Module):
    """`F.linear` over the last `axes` axes, to output axes `features`."""

    features: tuple[int, ...]
    initial: Initialiser
    mode: Mode
    axes: int = 1
    bias: bool = False
    divisor: float = 1.0  # of the initial values

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        draw = initializer(self.initial, axes=self.axes, divisor=self.divisor)
        shape = (*x.shape[-self.axes :], *self.features)
        kernel = self.param("kernel", draw, shape, jnp.float32).astype(self.mode.dtype)
        bias = None
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, self.features, jnp.float32)
            bias = bias.astype(self.mode.dtype)
        return F.linear(x.astype(self.mode.dtype), kernel, bias, axes=self.axes)
