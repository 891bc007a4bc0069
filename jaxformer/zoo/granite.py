"""Granite 3 and 4: constants on embedding, scores, branches and logits; 4 is mostly Mamba 2."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import llama
from jaxformer.zoo.mamba import NORM, mamba_2_layer


def granite_3(
    *, model_dim: int, hidden_dim: int, score_scale: float, logits_scaling: float
) -> c.TransformerConfig:
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
        scale=score_scale,
    )
    return replace(
        body,
        residual_multiplier=0.22,
        embedding=c.Embedding(scale=12.0),
        head=c.LMHead(tied=True, multiplier=1 / logits_scaling),
    )


def granite_4_small() -> c.TransformerConfig:
    """Granite 4.0 H Small: attention without positions in 4 of 40 layers, 72 experts, tied.

    References:
        IBM, Granite 4.0, 2025 (model page)
    """
    attention = c.MultiHead(
        num_heads=32, num_kv_heads=8, head_dim=128, positions=(None,), scale=1 / 128
    )
    mamba = mamba_2_layer(num_heads=128)
    moe = c.MoE(
        expert=c.GLU(hidden_dim=768),
        num_experts=72,
        top_k=10,
        shared=c.SharedExpert(expert=c.GLU(hidden_dim=1536)),
    )
    return c.TransformerConfig(
        vocab_size=100_352,
        model_dim=4096,
        num_layers=40,
        attention=tuple(attention if i == 5 else mamba for i in range(10)),
        feed_forward=(moe,),
        norm=NORM,
        residual_multiplier=0.22,
        embedding=c.Embedding(scale=12.0),
        head=c.LMHead(tied=True, multiplier=1 / 16),
    )


PRESETS = {
    "granite-3.3-2b": granite_3(
        model_dim=2048, hidden_dim=8192, score_scale=1 / 64, logits_scaling=8.0
    ),
    "granite-3.3-8b": granite_3(
        model_dim=4096, hidden_dim=12_800, score_scale=1 / 128, logits_scaling=16.0
    ),
    "granite-4.0-h-small": granite_4_small(),
}
YEARS = dict.fromkeys(PRESETS, 2025)
