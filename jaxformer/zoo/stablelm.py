"""StableLM 2: LayerNorms and a quarter of each head rotated; parallel branches at 12B."""

from dataclasses import replace
from typing import Unpack

from jaxformer import config as c
from jaxformer.zoo.llama import LlamaOptions, llama
from jaxformer.zoo.projection_biases import QKV

NORM = c.LayerNorm(eps=1e-5)


def stablelm_2(**options: Unpack[LlamaOptions]) -> c.TransformerConfig:
    """Serial blocks.

    References:
        Bellagente et al., Stable LM 2 1.6B Technical Report, 2024. arXiv:2402.17834, section 3
    """
    options["positions"] = (c.Rope(fraction=0.25),)
    return replace(llama(vocab_size=100_352, **options), norm=NORM)


def stablelm_2_12b() -> c.TransformerConfig:
    """Both branches under one norm, and QK-norm with a scale for each head."""
    body = stablelm_2(
        model_dim=5120,
        num_layers=40,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=13_824,
        qk_norm=c.QKNorm(norm=replace(NORM, parameters="scale"), over="each_head"),
    )
    return replace(body, block="parallel_shared_norm")


PRESETS = {
    "stablelm-2-1.6b": stablelm_2(
        model_dim=2048, num_layers=24, num_heads=32, hidden_dim=5632, biases=QKV
    ),
    "stablelm-2-12b": stablelm_2_12b(),
}
YEARS = dict.fromkeys(PRESETS, 2024)
