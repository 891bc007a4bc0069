"""ERNIE 4.5, dense and with experts: Llama with neighbouring features rotated together."""

from jaxformer import config as c
from jaxformer.zoo.deepseek import shared_experts, with_experts


def ernie_4_5() -> c.TransformerConfig:
    """Heads twice as wide in all as the residual stream, 2 key-value heads, tied.

    References:
        Baidu ERNIE team, ERNIE 4.5 Technical Report, 2025
    """
    return c.TransformerConfig(
        vocab_size=103_424,
        model_dim=1024,
        num_layers=18,
        attention=c.MultiHead(
            num_heads=16,
            num_kv_heads=2,
            head_dim=128,
            positions=(c.Rope(base=500_000.0, pairing="neighbours"),),
        ),
        feed_forward=(c.GLU(hidden_dim=3072),),
        norm=c.RMSNorm(eps=1e-5),
        head=c.LMHead(tied=True),
    )


def ernie_4_5_moe() -> c.TransformerConfig:
    """6 of 64 experts, by softmax and a selection bias, and 2 shared ones after a dense layer.

    References:
        Baidu ERNIE team, ERNIE 4.5 Technical Report, 2025
    """
    moe = c.MoE(
        expert=c.GLU(hidden_dim=1536),
        num_experts=64,
        top_k=6,
        router=c.Router(selection_bias=True),
        shared=shared_experts(2, hidden_dim=1536),
    )
    body = c.TransformerConfig(
        vocab_size=103_424,
        model_dim=2560,
        num_layers=28,
        attention=c.MultiHead(
            num_heads=20,
            num_kv_heads=4,
            head_dim=128,
            positions=(c.Rope(base=500_000.0, pairing="neighbours"),),
        ),
        feed_forward=(moe,),
        norm=c.RMSNorm(eps=1e-5),
        head=c.LMHead(tied=True),
    )
    return with_experts(body, moe, first_dense=1, dense_dim=12_288)


PRESETS = {"ernie-4.5-0.3b": ernie_4_5(), "ernie-4.5-21b-a3b": ernie_4_5_moe()}
YEARS = dict.fromkeys(PRESETS, 2025)
