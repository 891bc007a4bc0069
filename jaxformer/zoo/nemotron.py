"""Nemotron-4: squared ReLU, RoPE on half of each head, LayerNorm that stores scale - 1."""

from jaxformer.config import MLP, LayerNorm, MultiHead, Rope, TransformerConfig


def nemotron_4() -> TransformerConfig:
    """The 340B model: heads of 192, 8 of them for keys and values, no biases, not tied.

    References:
        NVIDIA, Nemotron-4 340B Technical Report, 2024. arXiv:2406.11704, section 2.2 and table 1
    """
    return TransformerConfig(
        vocab_size=256_000,
        model_dim=18_432,
        num_layers=96,
        attention=MultiHead(
            num_heads=96, num_kv_heads=8, head_dim=192, positions=(Rope(fraction=0.5),)
        ),
        feed_forward=(MLP(hidden_dim=73_728, activation="relu_squared"),),
        norm=LayerNorm(eps=1e-5, scale_offset=1.0),
    )


PRESETS = {"nemotron-4-340b": nemotron_4()}
