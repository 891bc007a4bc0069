"""Gated short convolution module."""

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import ConvolutionCache
from jaxformer.layers.attention.core import make_output_projection
from jaxformer.layers.cache import CacheUpdate
from jaxformer.layers.convolution import Convolution
from jaxformer.layers.linear import Linear
from jaxformer.layers.runtime import RuntimeConfig


class ShortConvolutionMixer(nn.Module):
    """Gated causal convolution; see `config.ShortConvolution`. Heads are sharded over `tensor`."""

    config: c.TransformerConfig
    attention: c.ShortConvolution
    positions: None
    runtime: RuntimeConfig
    causal: bool = True
    keep_partial_sums: bool = False  # as in Linear

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        inputs: c.MixerInputs,
        cache: ConvolutionCache | None = None,
        cache_update: CacheUpdate | None = None,
    ) -> tuple[Float[Array, "*batch T D"], ConvolutionCache | None]:
        """Convolve the gated values; returns the output and the new cache."""
        cfg, init, runtime = self.attention, self.config.initialisation, self.runtime
        heads = cfg.num_heads, cfg.head_dim
        x = F.copy_to_tensor_parallel(x, runtime.mesh_axes.tensor)

        def project(name: str) -> Float[Array, "*batch T N H"]:
            return Linear(
                heads,
                init.value or init.projection,
                runtime,
                "model -> heads features",
                bias="in" in cfg.biases,
                name=name,
            )(x)

        gated = project("input_gate") * project("value")
        convolution = Convolution(
            *heads, cfg.width, runtime, bias="convolution" in cfg.biases, name="convolution"
        )
        mixed, cache = convolution(gated, inputs, cache, cache_update)
        mixed = project("output_gate") * mixed
        out = make_output_projection(
            self.config, cfg.biases, heads, runtime, self.keep_partial_sums, name="out"
        )
        return out(mixed), cache
