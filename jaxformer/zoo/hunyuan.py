"""Hunyuan A13B and 3: QK-norm and many experts.

The module of Hunyuan 3 that predicts a second token is left out.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.deepseek import experts_by_sigmoid, shared_experts, with_experts
from jaxformer.zoo.llama import llama

NORM = c.RMSNorm(eps=1e-5)


def hunyuan_a13b() -> c.TransformerConfig:
    """8 of 64 experts and a shared one, QK-norm after RoPE, tied.

    References:
        Tencent, Hunyuan-A13B Technical Report, 2025. github.com/Tencent-Hunyuan/Hunyuan-A13B
    """
    body = llama(
        vocab_size=128_167,
        model_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=3072,
        scaling=c.NTKScaling(factor=1000.0),
        qk_norm=c.QKNorm(norm=NORM, over="head", placement="after_rope"),
        tied=True,
    )
    shared = shared_experts(1, hidden_dim=3072)
    experts = c.MoE(expert=c.GLU(hidden_dim=3072), num_experts=64, top_k=8, shared=shared)
    return replace(body, feed_forward=(experts,))


def hunyuan_3() -> c.TransformerConfig:
    """8 of 192 experts by sigmoid and a selection bias, and a shared one.

    References:
        Tencent, Hy3 preview, 2026. huggingface.co/tencent/Hy3-preview
    """
    moe = experts_by_sigmoid(192, 8, hidden_dim=1536, scale=2.826)
    body = llama(
        vocab_size=120_832,
        model_dim=4096,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        hidden_dim=13_312,
        base=11_158_840.0,
        qk_norm=c.QKNorm(norm=NORM, over="head"),
    )
    return with_experts(body, moe)


PRESETS = {"hunyuan-a13b": hunyuan_a13b(), "hunyuan-3": hunyuan_3()}
YEARS = {"hunyuan-a13b": 2025, "hunyuan-3": 2026}
