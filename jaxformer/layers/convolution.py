"""Short causal convolution of channels in heads, and its cache."""

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import zeros
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import ConvolutionCache
from jaxformer.layers.attention.core import local_kv_heads
from jaxformer.layers.cache import CacheUpdate, get_layer, set_layer
from jaxformer.layers.parameters import initializer, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig


class Convolution(nn.Module):
    """`F.causal_convolution` of [*batch, T, N, H]; heads are sharded over `tensor`.

    If `heads_axis` is "kv_heads", x has the heads that `local_kv_heads` leaves; if it is
    "features", every device has all heads.
    """

    num_heads: int
    head_dim: int
    width: int
    runtime: RuntimeConfig
    bias: bool = False
    heads_axis: str = "heads"
    dilation: int = 1
    kernel_init: c.Initialiser = c.FanIn()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T N H"],
        inputs: c.MixerInputs,
        cache: ConvolutionCache | None = None,
        cache_update: CacheUpdate | None = None,
    ) -> tuple[Float[Array, "*batch T N H"], ConvolutionCache | None]:
        """Convolve over time; returns the outputs and the new cache."""
        heads = self.num_heads, self.head_dim
        runtime = self.runtime
        kernel = sharded_parameter(
            self,
            "kernel",
            initializer(self.kernel_init),
            (self.width, *heads),
            f"features {self.heads_axis} features",
        )
        bias = None
        if self.bias:
            axes = f"{self.heads_axis} features"
            bias = sharded_parameter(self, "bias", zeros, heads, axes)
        if self.heads_axis == "kv_heads":
            kernel = local_kv_heads(kernel, self.num_heads, runtime)
            bias = None if bias is None else local_kv_heads(bias, self.num_heads, runtime)
        state = None
        if cache is not None:  # from [*batch, N, taps, H]
            state = jnp.swapaxes(get_layer(cache.inputs, cache_update), -3, -2)
            state = state.reshape(*state.shape[:-2], -1)
        result = F.causal_convolution(
            x.reshape(*x.shape[:-2], -1),
            kernel.reshape(self.width, -1),
            None if bias is None else bias.ravel(),
            dilation=self.dilation,
            initial_state=state,
            segments=inputs.segments,
            valid=inputs.valid,
            axis_name=runtime.mesh_axes.context,
        )
        output = result.output.reshape(x.shape)
        if cache is None:
            return output, None
        new = result.state.reshape(*result.state.shape[:-1], *x.shape[-2:])
        new = jnp.swapaxes(new, -3, -2).astype(cache.inputs.dtype)
        return output, ConvolutionCache(set_layer(cache.inputs, new, cache_update))
