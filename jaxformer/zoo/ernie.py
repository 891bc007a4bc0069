"""ERNIE 4.5, dense and with experts: Llama with neighbouring features rotated together."""

from typing import Unpack

from jaxformer import config as c
from jaxformer.zoo.deepseek import shared_experts, with_experts
from jaxformer.zoo.llama import LlamaSizes, llama


def ernie_4_5(**sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """Heads of 128 whatever the width, tied.

    References:
        Baidu ERNIE team, ERNIE 4.5 Technical Report, 2025
    """
    rope = c.Rope(base=500_000.0, pairing="neighbours")
    sizes["head_dim"] = 128
    return llama(vocab_size=103_424, positions=(rope,), tied=True, **sizes)


def ernie_4_5_moe() -> c.TransformerConfig:
    """6 of 64 experts, by softmax and a selection bias, and 2 shared ones after a dense layer."""
    moe = c.MoE(
        expert=c.GLU(hidden_dim=1536),
        num_experts=64,
        top_k=6,
        router=c.Router(selection_bias=True),
        shared=shared_experts(2, hidden_dim=1536),
    )
    body = ernie_4_5(model_dim=2560, num_layers=28, num_heads=20, num_kv_heads=4, hidden_dim=12_288)
    return with_experts(body, moe)


PRESETS = {
    "ernie-4.5-0.3b": ernie_4_5(
        model_dim=1024, num_layers=18, num_heads=16, num_kv_heads=2, hidden_dim=3072
    ),
    "ernie-4.5-21b-a3b": ernie_4_5_moe(),
}
YEARS = dict.fromkeys(PRESETS, 2025)
