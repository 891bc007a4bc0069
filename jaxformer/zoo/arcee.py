"""Arcee: AFM 4.5B, Llama with ReLU squared and no gate; Trinity Mini, experts and gated heads."""

import math
from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.deepseek import experts_by_sigmoid
from jaxformer.zoo.llama import llama


def arcee() -> c.TransformerConfig:
    """20 heads, 4 for keys and values; YaRN.

    References:
        Arcee AI, AFM-4.5B, 2025. huggingface.co/arcee-ai/AFM-4.5B
    """
    body = llama(
        vocab_size=128_004,
        model_dim=2560,
        num_layers=36,
        num_heads=20,
        num_kv_heads=4,
        hidden_dim=18_432,
        scaling=c.Yarn(factor=20.0, original_max_length=4096),
    )
    return replace(body, feed_forward=(c.MLP(hidden_dim=18_432, activation="relu_squared"),))


def trinity_mini() -> c.TransformerConfig:
    """Three layers with RoPE and a window of 2048, then one without positions that sees all.

    Heads have a gate for each feature; after two dense layers, 8 of 128 experts and a shared one.

    References:
        Singh et al., Arcee Trinity Large Technical Report, 2026. arXiv:2602.17004, section 2
    """
    norm, rope = c.RMSNorm(eps=1e-5), c.Rope()
    moe = experts_by_sigmoid(128, 8, hidden_dim=1024, scale=2.826)
    return c.TransformerConfig(
        vocab_size=200_192,
        model_dim=2048,
        num_layers=32,
        attention=c.MultiHead(
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            positions=(rope, rope, rope, None),
            windows=(2048, 2048, 2048, None),
            qk_norm=c.QKNorm(norm=norm),
            output_gate=c.OutputGate(),
        ),
        feed_forward=(c.GLU(hidden_dim=6144),) * 2 + (moe,) * 30,
        norm=norm,
        norm_placement="sandwich",
        embedding=c.Embedding(scale=math.sqrt(2048)),
    )


PRESETS = {"arcee-4.5b": arcee(), "trinity-mini": trinity_mini()}
YEARS = dict.fromkeys(PRESETS, 2025)
