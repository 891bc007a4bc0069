"""Baichuan 2: Llama at 7B, with ALiBi in place of RoPE at 13B.

The rows of the released head are divided by their length before the product; a loaded model has
them divided already.
"""

from jaxformer import config as c
from jaxformer.zoo.llama import llama


def baichuan_2(*, model_dim: int, num_layers: int, hidden_dim: int) -> c.TransformerConfig:
    """Heads of 128, as many for keys and values.

    References:
        Yang et al., Baichuan 2: Open Large-scale Language Models, 2023. arXiv:2309.10305, section 2
    """
    return llama(
        vocab_size=125_696,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=model_dim // 128,
        hidden_dim=hidden_dim,
        eps=1e-6,
    )


PRESETS = {
    "baichuan-2-7b": baichuan_2(model_dim=4096, num_layers=32, hidden_dim=11_008),
    "baichuan-2-13b": baichuan_2(model_dim=5120, num_layers=40, hidden_dim=13_696).with_positions(
        c.Alibi()
    ),
}
