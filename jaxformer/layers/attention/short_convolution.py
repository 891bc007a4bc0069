"""Gated short convolution module; its cache holds the last inputs of the convolution."""

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.attention.core import AttentionModule
from jaxformer.layers.cache import NO_STATE, LayerState
from jaxformer.layers.convolution import Convolution


class ShortConvolutionMixer(AttentionModule):
    """Gated causal convolution; see `config.ShortConvolution`. Heads are sharded over `tensor`."""

    attention: c.ShortConvolution

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: c.MixerInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Convolve the gated values; returns the output and the new state."""
        cfg, runtime = self.attention, self.runtime
        heads = cfg.num_heads, cfg.head_dim
        x = F.copy_to_tensor_parallel(x, runtime.mesh_axes.tensor)

        def project(name: str) -> Float[Array, "*batch T N H"]:
            return self.projection("value", heads, bias="in", name=name)(x)

        gated = project("input_gate") * project("value")
        convolution = Convolution(
            *heads, cfg.width, runtime, bias="convolution" in cfg.biases, name="convolution"
        )
        mixed, cache = convolution(gated, inputs, state.cache, state.cache_update)
        mixed = project("output_gate") * mixed
        y = self.output_projection(heads, name="out")(mixed)
        return y, state._replace(cache=cache)
