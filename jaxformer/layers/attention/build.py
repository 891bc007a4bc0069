"""Build the attention module of each attention kind."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer.layers.attention.custom_mixer import CustomMixer
from jaxformer.layers.attention.decay import DecayAttention
from jaxformer.layers.attention.latent import LatentAttention
from jaxformer.layers.attention.multi_head import MultiHeadAttention
from jaxformer.layers.attention.shared_kv import SharedKVAttention
from jaxformer.layers.runtime import RuntimeConfig

AttentionModule = Callable[..., tuple[Float[Array, "*batch T D"], Any]]
MODULES: dict[type, Callable[..., AttentionModule]] = {
    c.MultiHead: MultiHeadAttention,
    c.SharedKV: SharedKVAttention,
    c.Latent: LatentAttention,
    c.Decay: DecayAttention,
}


def build_attention(
    config: c.TransformerConfig,
    layer: c.LayerConfig,
    runtime: RuntimeConfig,
    causal: bool,
    *,
    keep_partial_sums: bool,
) -> AttentionModule:
    """Build the self-attention module of a layer, as submodule "attention" of the caller."""
    module = MODULES.get(type(layer.attention), CustomMixer)
    return module(
        config,
        layer.attention,
        layer.positions,
        runtime,
        causal,
        keep_partial_sums=keep_partial_sums,
        name="attention",
    )
