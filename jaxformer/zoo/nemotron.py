"""Nemotron-4, with RoPE on half of each head; Nemotron 3 Nano, whose layers are one branch each."""

from jaxformer import config as c
from jaxformer.zoo.mamba import NORM, mamba_2_layer

# Of Nemotron 3 Nano: M is Mamba 2, E experts, * attention. The last 4 of 52 are as the first 4.
LAYERS = "MEMEM*E" * 5 + "ME" * 3 + "M*E" + "ME" * 2


def nemotron_4() -> c.TransformerConfig:
    """The 340B model: heads of 192, 8 of them for keys and values, no biases, not tied.

    References:
        NVIDIA, Nemotron-4 340B Technical Report, 2024. arXiv:2406.11704, section 2.2 and table 1
    """
    return c.TransformerConfig(
        vocab_size=256_000,
        model_dim=18_432,
        num_layers=96,
        attention=c.MultiHead(
            num_heads=96, num_kv_heads=8, head_dim=192, positions=(c.Rope(fraction=0.5),)
        ),
        feed_forward=(c.MLP(hidden_dim=73_728, activation="relu_squared"),),
        norm=c.LayerNorm(eps=1e-5, scale_offset=1.0),
    )


def nemotron_3_nano() -> c.TransformerConfig:
    """Nemotron 3 Nano: 23 Mamba 2 layers, 23 of 128 experts, 6 of attention without positions.

    References:
        NVIDIA, Nemotron 3 Nano, 2025. arXiv:2512.20848, section 2.1
    """
    attention = c.MultiHead(num_heads=32, num_kv_heads=2, head_dim=128, positions=(None,))
    mamba = mamba_2_layer(num_heads=64, num_groups=8, min_step=1e-3)
    moe = c.MoE(
        expert=c.MLP(hidden_dim=1856, activation="relu_squared"),
        num_experts=128,
        top_k=6,
        router=c.Router(score="sigmoid", selection_bias=True, scale=2.5),
        shared=c.SharedExpert(expert=c.MLP(hidden_dim=3712, activation="relu_squared")),
    )
    kinds: dict[str, c.AttentionKind] = {"M": mamba, "*": attention, "E": c.NoAttention()}
    return c.TransformerConfig(
        vocab_size=131_072,
        model_dim=2688,
        num_layers=52,
        attention=tuple(kinds[letter] for letter in LAYERS),
        feed_forward=tuple(moe if letter == "E" else c.NoFeedForward() for letter in LAYERS),
        norm=NORM,
    )


PRESETS = {"nemotron-4-340b": nemotron_4(), "nemotron-3-nano": nemotron_3_nano()}
YEARS = {"nemotron-3-nano": 2025}
