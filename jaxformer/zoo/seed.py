"""Seed-OSS 36B: Llama with QKV biases and heads twice as wide in all as the residual stream."""

from jaxformer import config as c
from jaxformer.zoo.llama import llama
from jaxformer.zoo.projection_biases import QKV


def seed_oss() -> c.TransformerConfig:
    """80 heads of 128 at a width of 5120, 8 key-value heads.

    References:
        ByteDance Seed, Seed-OSS Open-Source Models, 2025. github.com/ByteDance-Seed/seed-oss
    """
    return llama(
        vocab_size=155_136,
        model_dim=5120,
        num_layers=64,
        num_heads=80,
        num_kv_heads=8,
        head_dim=128,
        hidden_dim=27_648,
        eps=1e-6,
        base=10_000_000.0,
        biases=QKV,
    )


PRESETS = {"seed-oss-36b": seed_oss()}
YEARS = dict.fromkeys(PRESETS, 2025)
