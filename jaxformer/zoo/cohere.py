"""Command R, R+ and A: parallel branches, one LayerNorm without bias, scaled tied logits."""

from dataclasses import replace
from typing import Unpack

from jaxformer import config as c
from jaxformer.zoo.llama import LlamaOptions, llama

NORM = c.LayerNorm(eps=1e-5, parameters="scale")


def cohere(*, multiplier: float, **sizes: Unpack[LlamaOptions]) -> c.TransformerConfig:
    """SwiGLU, heads of 128, no biases anywhere.

    References:
        Cohere, Command R: Retrieval Augmented Generation at Production Scale, 2024
        Cohere, Command A: An Enterprise-Ready Large Language Model, 2025. arXiv:2504.00698,
        section 2
    """
    return replace(
        llama(vocab_size=256_000, **sizes),
        block="parallel_shared_norm",
        norm=NORM,
        head=c.LMHead(tied=True, multiplier=multiplier),
    )


def rope(base: float) -> c.Rope:
    """RoPE over neighbouring feature pairs."""
    return c.Rope(base=base, pairing="neighbours")


PRESETS = {
    "command-r": cohere(
        model_dim=8192,
        num_layers=40,
        num_heads=64,
        hidden_dim=22_528,
        positions=(rope(8_000_000.0),),
        multiplier=0.0625,
    ),
    "command-r-plus": cohere(
        model_dim=12_288,
        num_layers=64,
        num_heads=96,
        num_kv_heads=8,
        hidden_dim=33_792,
        positions=(rope(75_000_000.0),),
        multiplier=0.8333333333333334,
        qk_norm=c.QKNorm(norm=NORM, over="each_head"),
    ),
    "command-a": cohere(  # three narrow layers with rotations, then a wide one with no positions
        model_dim=12_288,
        num_layers=64,
        num_heads=96,
        num_kv_heads=8,
        hidden_dim=36_864,
        positions=(*(rope(50_000.0),) * 3, None),
        multiplier=0.25,
        windows=(4096, 4096, 4096, None),
    ),
}
