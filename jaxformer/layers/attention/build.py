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


def build_attention(
    config: c.TransformerConfig,
    positions: c.Positions | None,
    runtime: RuntimeConfig,
    causal: bool,
    *,
    keep_partial_sums: bool,
) -> AttentionModule:
    """Build the self-attention module of a layer, as submodule "attention" of the caller.

    It is part of the module that calls this, under the name "attention".
    """
    match config.attention_kind:
        case c.MultiHead():
            return MultiHeadAttention(
                config,
                positions,
                runtime,
                causal,
                keep_partial_sums=keep_partial_sums,
                name="attention",
            )
        case c.SharedKV():
            return SharedKVAttention(
                config, positions, runtime, keep_partial_sums=keep_partial_sums, name="attention"
            )
        case c.Latent():
            return LatentAttention(
                config, positions, runtime, keep_partial_sums=keep_partial_sums, name="attention"
            )
        case c.Decay():
            return DecayAttention(
                config, runtime, keep_partial_sums=keep_partial_sums, name="attention"
            )
        case c.Mixer():
            return CustomMixer(
                config, runtime, keep_partial_sums=keep_partial_sums, name="attention"
            )
