"""Granite 3: Llama's design with constants on embedding, scores, branches and logits."""

from dataclasses import replace

from jaxformer.config import Embedding, LMHead, TransformerConfig
from jaxformer.zoo.llama import llama


def granite_3(
    *, model_dim: int, hidden_dim: int, score_scale: float, logits_scaling: float
) -> TransformerConfig:
    """Granite 3.3: 40 layers, 32 heads, 8 key-value heads, tied.

    References:
        Granite team, Granite 3.0 Language Models, 2024, section 2
    """
    body = llama(
        vocab_size=49_159,
        model_dim=model_dim,
        num_layers=40,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=hidden_dim,
        base=10_000_000.0,
    )
    return replace(
        body,
        attention=replace(body.multi_head, scale=score_scale),
        residual_multiplier=0.22,
        embedding=Embedding(scale=12.0),
        head=LMHead(tied=True, multiplier=1 / logits_scaling),
    )


PRESETS = {
    "granite-3.3-2b": granite_3(
        model_dim=2048, hidden_dim=8192, score_scale=1 / 64, logits_scaling=8.0
    ),
    "granite-3.3-8b": granite_3(
        model_dim=4096, hidden_dim=12_800, score_scale=1 / 128, logits_scaling=16.0
    ),
}
YEARS = dict.fromkeys(PRESETS, 2025)
