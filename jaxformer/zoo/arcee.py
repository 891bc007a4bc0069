"""Arcee's AFM 4.5B: Llama with ReLU squared and no gate."""

from dataclasses import replace

from jaxformer.config import MLP, TransformerConfig, Yarn
from jaxformer.zoo.llama import llama


def arcee() -> TransformerConfig:
    """20 heads, 4 for keys and values; YaRN.

    References:
        Arcee AI, AFM-4.5B, 2025. huggingface.co/arcee-ai/AFM-4.5B
    """
    body = llama(
        vocab_size=128_004,
        model_dim=2560,
        num_layers=36,
        num_heads=20,
        num_kv_heads=4,
        hidden_dim=18_432,
        scaling=Yarn(factor=20.0, original_max_length=4096),
    )
    return replace(body, feed_forward=(MLP(hidden_dim=18_432, activation="relu_squared"),))


PRESETS = {"arcee-4.5b": arcee()}
YEARS = dict.fromkeys(PRESETS, 2025)
