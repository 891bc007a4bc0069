"""Linear layer with tensor-parallel reduction of its output."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import zeros
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.config import Initialiser
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.lora import adapt_output
from jaxformer.layers.parameters import initializer, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig, sow_and_perturb


class Linear(nn.Module):
    """Linear layer over the last axes, summed over tensor-parallel devices if sharded.

    `logical_axes` names the kernel's axes, and `input_shape` is the global size of each input axis;
    None takes the shape of x. If the inputs are sharded, the outputs are partial sums, which are
    reduced over devices; with `keep_partial_sums` the caller reduces them, together with others.
    """

    features: tuple[int, ...]
    kernel_init: Initialiser
    runtime: RuntimeConfig
    logical_axes: str = "features -> features"
    input_shape: tuple[int, ...] | None = None
    bias: bool = False
    init_divisor: float = 1.0  # of the initial values
    keep_partial_sums: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        axes, tensor, dtype = parse_logical_axes(self.logical_axes), None, self.runtime.dtype
        split = axes.num_input_axes
        init_fn = initializer(self.kernel_init, num_input_axes=split, divisor=self.init_divisor)
        shape = (*(self.input_shape or x.shape[-split:]), *self.features)
        if axes.names[0] in ("heads", "hidden"):
            x, tensor = sow_and_perturb(self, axes.names[0], x), self.runtime.mesh_axes.tensor
        options: Any = dict(dtype=dtype, adaptable=True)
        kernel = sharded_parameter(self, "kernel", init_fn, shape, self.logical_axes, **options)
        x, lora = x.astype(dtype), self.runtime.lora_of(self.path)
        if lora is None or not lora.fits(math.prod(shape[:split]), math.prod(shape[split:])):
            y = F.linear(x, kernel, axes=split)
        else:
            y = adapt_output(self, lora, x, kernel, shape, self.logical_axes)
        if not self.keep_partial_sums:
            y = F.reduce_from_tensor_parallel(y, tensor)
        if self.bias:
            bias = sharded_parameter(self, "bias", zeros, self.features, axes.bias_axes)
            if self.keep_partial_sums and tensor is not None:  # the caller sums over devices
                bias = jnp.where(jax.lax.axis_index(tensor) == 0, bias, 0)
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y
