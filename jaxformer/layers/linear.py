"""Linear layer with tensor-parallel reduction of its output."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.config import Initialiser
from jaxformer.config.parameter import read_axes
from jaxformer.layers.initializers import initializer
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import parameter


class Linear(nn.Module):
    """Linear layer over the last axes, summed over tensor-parallel devices if sharded.

    `axes` say what they count, and `inputs` how many numbers each input axis has on all devices
    together; None takes those of x. Where the inputs are shared out, so are the sums
    over them, which are then added up; with `parts` the caller does that, of several at once.
    """

    features: tuple[int, ...]
    initial: Initialiser
    mode: Mode
    axes: str = "features -> features"
    inputs: tuple[int, ...] | None = None
    bias: bool = False
    divisor: float = 1.0  # of the initial values
    parts: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        logical_axes = read_axes(self.axes)
        init_fn = initializer(self.initial, axes=logical_axes.inputs, divisor=self.divisor)
        shape = (*(self.inputs or x.shape[-logical_axes.inputs :]), *self.features)
        dtype = self.mode.dtype
        kernel = parameter(self, "kernel", init_fn, shape, self.axes, self.mode, dtype=dtype)
        y = F.linear(x.astype(dtype), kernel, axes=logical_axes.inputs)
        tensor = self.mode.axes.tensor if logical_axes.names[0] in ("heads", "hidden") else None
        if not self.parts:
            y = F.sum_parts(y, tensor)
        if self.bias:
            # Whole
            bias_axes = " ".join(logical_axes.names[logical_axes.inputs :]).replace(
                "model", "features"
            )
            zeros = nn.initializers.zeros
            bias = parameter(self, "bias", zeros, self.features, bias_axes, self.mode)
            if self.parts and tensor is not None:  # it is added once
                bias = jnp.where(jax.lax.axis_index(tensor) == 0, bias, 0)
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y
