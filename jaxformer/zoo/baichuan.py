"""Baichuan 2: Llama at 7B, with ALiBi in place of RoPE at 13B, and a head of unit rows."""

from dataclasses import replace
from typing import Unpack

from jaxformer import config as c
from jaxformer.zoo.llama import LlamaSizes, llama


def baichuan_2(**sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """Heads of 128, as many for keys and values.

    References:
        Yang et al., Baichuan 2: Open Large-scale Language Models, 2023. arXiv:2309.10305, section 2
    """
    config = llama(vocab_size=125_696, eps=1e-6, **sizes)
    return replace(config, head=replace(config.head, unit_rows=True))


PRESETS = {
    "baichuan-2-7b": baichuan_2(model_dim=4096, num_layers=32, num_heads=32, hidden_dim=11_008),
    "baichuan-2-13b": baichuan_2(
        model_dim=5120, num_layers=40, num_heads=40, hidden_dim=13_696
    ).with_positions(c.Alibi()),
}
