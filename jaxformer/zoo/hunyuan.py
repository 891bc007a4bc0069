"""Hunyuan 3: QK-norm and 192 experts; the module that predicts a second token is left out."""

from jaxformer.config import GLU, MoE, MultiHead, QKNorm, RMSNorm, Rope, Router, TransformerConfig
from jaxformer.zoo.deepseek import shared_experts, with_experts


def hunyuan_3() -> TransformerConfig:
    """8 of 192 experts by sigmoid and a bias of the choice, and a shared one.

    References:
        Tencent, Hy3 preview, 2026. huggingface.co/tencent/Hy3-preview
    """
    norm = RMSNorm(eps=1e-5)
    moe = MoE(
        expert=GLU(hidden_dim=1536),
        num_experts=192,
        top_k=8,
        router=Router(score="sigmoid", selection_bias=True, scale=2.826),
        shared=shared_experts(1, hidden_dim=1536),
    )
    body = TransformerConfig(
        vocab_size=120_832,
        model_dim=4096,
        num_layers=80,
        attention=MultiHead(
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            positions=(Rope(base=11_158_840.0),),
            qk_norm=QKNorm(norm=norm, over="head"),
        ),
        feed_forward=(moe,),
        norm=norm,
    )
    return with_experts(body, moe, first_dense=1, dense_dim=13_312)


PRESETS = {"hunyuan-3": hunyuan_3()}
YEARS = dict.fromkeys(PRESETS, 2026)
