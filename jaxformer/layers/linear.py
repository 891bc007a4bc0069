"""Linear layer with tensor-parallel reduction of its output."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
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
    None takes that of x. If the inputs are sharded, the outputs are partial sums, which are reduced
    over devices; with `keep_partial_sums` the caller reduces them, together with others.
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
        logical_axes = parse_logical_axes(self.logical_axes)
        init_fn = initializer(
            self.kernel_init, num_input_axes=logical_axes.num_input_axes, divisor=self.init_divisor
        )
        shape = (*(self.input_shape or x.shape[-logical_axes.num_input_axes :]), *self.features)
        if logical_axes.names[0] in ("heads", "hidden"):
            x = sow_and_perturb(self, logical_axes.names[0], x)
        dtype = self.runtime.dtype
        kernel = sharded_parameter(
            self, "kernel", init_fn, shape, self.logical_axes, self.runtime, dtype=dtype
        )
        x, lora = x.astype(dtype), self.runtime.lora_of(self.path)
        split = logical_axes.num_input_axes
        if lora is None or not lora.fits(math.prod(shape[:split]), math.prod(shape[split:])):
            y = F.linear(x, kernel, axes=logical_axes.num_input_axes)
        else:
            y = adapt_output(self, lora, x, kernel, shape, self.logical_axes, self.runtime)
        tensor = (
            self.runtime.mesh_axes.tensor if logical_axes.names[0] in ("heads", "hidden") else None
        )
        if not self.keep_partial_sums:
            y = F.reduce_from_tensor_parallel(y, tensor)
        if self.bias:
            # The bias is not sharded over fsdp.
            bias_axes = " ".join(logical_axes.names[logical_axes.num_input_axes :]).replace(
                "model", "features"
            )
            zeros = nn.initializers.zeros
            bias = sharded_parameter(self, "bias", zeros, self.features, bias_axes, self.runtime)
            if self.keep_partial_sums and tensor is not None:  # the caller sums over devices
                bias = jnp.where(jax.lax.axis_index(tensor) == 0, bias, 0)
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y
