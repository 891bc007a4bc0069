"""Mistral 7B, whose version 0.1 has a 4096-token window, Mixtral, and Ministral 3 (text)."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import llama

HIDDEN_DIM = 14_336


def mistral(*, base: float = 10_000.0, window: int | None = None) -> c.TransformerConfig:
    """Llama's design with 8 key-value heads and, in version 0.1, a window in every layer.

    References:
        Jiang et al., Mistral 7B, 2023. arXiv:2310.06825, section 2
    """
    return llama(
        vocab_size=32_000,
        model_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=HIDDEN_DIM,
        base=base,
        windows=(window,),
    )


def mixtral() -> c.TransformerConfig:
    """Mixtral 8x7B: Mistral with 8 experts per layer, top-2 routing, and no window.

    References:
        Jiang et al., Mixtral of Experts, 2024. arXiv:2401.04088, section 2
    """
    experts = c.MoE(expert=c.GLU(hidden_dim=HIDDEN_DIM), num_experts=8, top_k=2)
    return replace(mistral(base=1_000_000.0), feed_forward=(experts,))


def ministral_3() -> c.TransformerConfig:
    """Ministral 3 8B: no window, YaRN from 16,384 tokens on, queries that grow with the position.

    References:
        Mistral AI, Ministral 3, 2026. arXiv:2601.08584
    """
    length = 16_384
    return llama(
        vocab_size=131_072,
        model_dim=4096,
        num_layers=34,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=HIDDEN_DIM,
        base=1_000_000.0,
        scaling=c.Yarn(factor=16.0, original_max_length=length, attention_factor=1.0),
        query_scaling=c.QueryScaling(beta=0.1, original_max_length=length),
    )


PRESETS = {
    "mistral-7b": mistral(window=4096),
    "mixtral-8x7b": mixtral(),
    "ministral-3-8b": ministral_3(),
}
YEARS = {"ministral-3-8b": 2026}
