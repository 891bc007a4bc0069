"""The module of each attention kind; `HybridHeads`, which has several side by side."""

from functools import reduce
from operator import add
from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.attention.core import AttentionModule
from jaxformer.layers.attention.custom_mixer import CustomMixer
from jaxformer.layers.attention.decay import DecayAttention
from jaxformer.layers.attention.differential import DifferentialAttention
from jaxformer.layers.attention.latent import LatentAttention
from jaxformer.layers.attention.linear_attention import LinearAttention
from jaxformer.layers.attention.multi_head import MultiHeadAttention
from jaxformer.layers.attention.rg_lru import RGLRU
from jaxformer.layers.attention.rwkv import ChannelMixing, TimeMixing
from jaxformer.layers.attention.selective_scan import SelectiveScan
from jaxformer.layers.attention.shared_kv import SharedKVAttention
from jaxformer.layers.attention.short_convolution import ShortConvolutionMixer
from jaxformer.layers.cache import NO_STATE, LayerState


class HybridHeads(AttentionModule):
    """Attention kinds that read the same x, and the sum of their outputs; `config.HybridHeads`."""

    attention: c.HybridHeads

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: tuple[Any, ...], state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Apply each kind with its inputs; returns the sum, and their new caches in the state."""
        outputs, caches = [], []
        for i, kind in enumerate(self.attention.kinds):
            module = ATTENTION_MODULES.get(type(kind), CustomMixer)(
                self.config,
                kind,
                self.runtime,
                self.causal,
                keep_partial_sums=True,
                name=f"kind_{i}",
            )
            cache = None if state.cache is None else state.cache[i]
            y, new = module(x, inputs[i], state._replace(cache=cache))
            outputs.append(y)
            caches.append(new.cache)
        y = reduce(add, outputs)
        if not self.keep_partial_sums:
            y = F.reduce_from_tensor_parallel(y, self.runtime.mesh_axes.tensor)
        return y, state if state.cache is None else state._replace(cache=tuple(caches))


ATTENTION_MODULES: dict[type, type[AttentionModule]] = {  # a custom mixer has CustomMixer
    c.MultiHead: MultiHeadAttention,
    c.SharedKV: SharedKVAttention,
    c.Differential: DifferentialAttention,
    c.Latent: LatentAttention,
    c.Decay: DecayAttention,
    c.LinearAttention: LinearAttention,
    c.SelectiveScan: SelectiveScan,
    c.RGLRU: RGLRU,
    c.TimeMixing: TimeMixing,
    c.ChannelMixing: ChannelMixing,
    c.ShortConvolution: ShortConvolutionMixer,
    c.HybridHeads: HybridHeads,
}
