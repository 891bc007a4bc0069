"""Grok-1: a mixture of 8 experts with sandwich norms and capped scores."""

import math

from jaxformer import config as c


def grok_1() -> c.TransformerConfig:
    """2 of 8 experts, weighed by a softmax over all 8; logits divided by sqrt(3), tied.

    References:
        xAI, Open Release of Grok-1, 2024. github.com/xai-org/grok-1
    """
    moe = c.MoE(
        expert=c.GLU(hidden_dim=32_768, activation="gelu_tanh"),
        num_experts=8,
        top_k=2,
        router=c.Router(renormalise=False),
    )
    return c.TransformerConfig(
        vocab_size=131_072,
        model_dim=6144,
        num_layers=64,
        attention=c.MultiHead(num_heads=48, num_kv_heads=8, head_dim=128, logit_softcap=30.0),
        feed_forward=(moe,),
        norm=c.RMSNorm(eps=1e-5),
        norm_placement="sandwich",
        embedding=c.Embedding(scale=math.sqrt(6144)),
        head=c.LMHead(tied=True, multiplier=3**-0.5),
    )


PRESETS = {"grok-1": grok_1()}
