"""Hunyuan A13B and 3: QK-norm and many experts.

The module of Hunyuan 3 that predicts a second token is left out.
"""

from jaxformer import config as c
from jaxformer.zoo.deepseek import experts_by_sigmoid, shared_experts, with_experts

NORM = c.RMSNorm(eps=1e-5)


def hunyuan_a13b() -> c.TransformerConfig:
    """8 of 64 experts and a shared one, QK-norm after RoPE, tied.

    References:
        Tencent, Hunyuan-A13B Technical Report, 2025. github.com/Tencent-Hunyuan/Hunyuan-A13B
    """
    return c.TransformerConfig(
        vocab_size=128_167,
        model_dim=4096,
        num_layers=32,
        attention=c.MultiHead(
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            positions=(c.Rope(scaling=c.NTKScaling(factor=1000.0)),),
            qk_norm=c.QKNorm(norm=NORM, over="head", placement="after_rope"),
        ),
        feed_forward=(
            c.MoE(
                expert=c.GLU(hidden_dim=3072),
                num_experts=64,
                top_k=8,
                shared=shared_experts(1, hidden_dim=3072),
            ),
        ),
        norm=NORM,
        head=c.LMHead(tied=True),
    )


def hunyuan_3() -> c.TransformerConfig:
    """8 of 192 experts by sigmoid and a selection bias, and a shared one.

    References:
        Tencent, Hy3 preview, 2026. huggingface.co/tencent/Hy3-preview
    """
    moe = experts_by_sigmoid(192, 8, hidden_dim=1536, scale=2.826)
    body = c.TransformerConfig(
        vocab_size=120_832,
        model_dim=4096,
        num_layers=80,
        attention=c.MultiHead(
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            positions=(c.Rope(base=11_158_840.0),),
            qk_norm=c.QKNorm(norm=NORM, over="head"),
        ),
        feed_forward=(moe,),
        norm=NORM,
    )
    return with_experts(body, moe, first_dense=1, dense_dim=13_312)


PRESETS = {"hunyuan-a13b": hunyuan_a13b(), "hunyuan-3": hunyuan_3()}
YEARS = {"hunyuan-a13b": 2025, "hunyuan-3": 2026}
