"""BLOOM: serial blocks, ALiBi, embedding norm; vocabulary padded from 250,680 to 250,880."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.gpt import gpt


def bloom(*, model_dim: int, num_layers: int, num_heads: int) -> c.TransformerConfig:
    """Pre-norm with biases everywhere but on the tied head.

    References:
        BigScience, BLOOM: A 176B-Parameter Open-Access Multilingual Language Model, 2022.
        arXiv:2211.05100, section 3.2
    """
    body = gpt(vocab_size=250_880, model_dim=model_dim, num_layers=num_layers, num_heads=num_heads)
    return replace(body.with_positions(c.Alibi()), embedding=c.Embedding(norm=c.LayerNorm()))


PRESETS = {
    "bloom-560m": bloom(model_dim=1024, num_layers=24, num_heads=16),
    "bloom-1b7": bloom(model_dim=2048, num_layers=24, num_heads=16),
    "bloom-7b1": bloom(model_dim=4096, num_layers=30, num_heads=32),
    "bloom-176b": bloom(model_dim=14_336, num_layers=70, num_heads=112),
}
