"""EXAONE 4: norms after the branches, QK-norm, RoPE only in the layers with a window."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import llama

ROPE = c.Rope(
    base=1_000_000.0,
    scaling=c.Llama3Scaling(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
    ),
)


def exaone_4() -> c.TransformerConfig:
    """32B: three layers with RoPE and a window of 4096, then one without positions that sees all.

    References:
        LG AI Research, EXAONE 4.0: Unified Large Language Models Integrating Non-reasoning and
        Reasoning Modes, 2025. arXiv:2507.11407, section 2.1
    """
    body = llama(
        vocab_size=102_400,
        model_dim=5120,
        num_layers=64,
        num_heads=40,
        num_kv_heads=8,
        hidden_dim=27_392,
        positions=(ROPE, ROPE, ROPE, None),
        windows=(4096, 4096, 4096, None),
        qk_norm=c.QKNorm(norm=c.RMSNorm(eps=1e-5), over="head"),
    )
    return replace(body, norm_placement="res_post")


PRESETS = {"exaone-4-32b": exaone_4()}
YEARS = dict.fromkeys(PRESETS, 2025)
