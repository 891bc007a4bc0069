"""Nemotron-4, with RoPE on half of each head; Nemotron 3 Nano, whose layers are one branch each."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.deepseek import SIGMOID
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.mamba import MAMBA_2_LAYER
from jaxformer.zoo.sizes import HEADS, like, sized

# As Llama, except: half of each head rotated, ReLU squared without a gate, LayerNorm stored as
# scale - 1.
# NVIDIA, Nemotron-4 340B Technical Report, 2024. arXiv:2406.11704, section 2.2 and table 1
RELU_SQUARED = c.MLP(hidden_dim=1, activation="relu_squared")
NEMOTRON_4 = like(
    LLAMA,
    vocab_size=256_000,
    feed_forward=(RELU_SQUARED,),
    norm=c.LayerNorm(eps=1e-5, scale_offset=1.0),
    positions=(c.Rope(fraction=0.5),),
)

# As Llama, except: layers of one branch each, of Mamba 2 (M), 6 of 128 experts and a shared one
# twice as wide (E), or attention without positions (*). The last 4 of 52 are as the first 4.
# NVIDIA, Nemotron 3 Nano, 2025. arXiv:2512.20848, section 2.1
LAYERS = "MEMEM*E" * 5 + "ME" * 3 + "M*E" + "ME" * 2
KINDS: dict[str, c.AttentionKind] = {
    "M": replace(MAMBA_2_LAYER, num_heads=8, num_key_heads=8, decay=c.StepDecay(min_step=1e-3)),
    "E": c.NoAttention(),
    "*": replace(HEADS, positions=(None,)),
}
EXPERTS = c.MoE(
    expert=RELU_SQUARED,
    num_experts=128,
    top_k=6,
    router=replace(SIGMOID, scale=2.5),
    shared=c.SharedExpert(expert=replace(RELU_SQUARED, hidden_dim=2)),
)
NEMOTRON_3 = like(
    LLAMA,
    vocab_size=131_072,
    attention=tuple(KINDS[letter] for letter in LAYERS),
    feed_forward=tuple(EXPERTS if letter == "E" else c.NoFeedForward() for letter in LAYERS),
)

PRESETS = {
    "nemotron-4-340b": sized(NEMOTRON_4, 18_432, 96, heads=96, kv=8),
    "nemotron-3-nano": sized(
        NEMOTRON_3, 2688, 52, heads=32, kv=2, head_dim=128, value_heads=64, hidden=1856
    ),
}
YEARS = {"nemotron-3-nano": 2025}
