"""SmolLM3: Llama without positions in every fourth layer. SmolLM2 is a Llama."""

from jaxformer import config as c
from jaxformer.zoo.llama import llama


def smollm_3() -> c.TransformerConfig:
    """3B, 4 key-value heads, tied.

    References:
        Bakouch et al., SmolLM3: smol, multilingual, long-context reasoner, 2025
    """
    rope = c.Rope(base=5_000_000.0)
    return llama(
        vocab_size=128_256,
        model_dim=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=4,
        hidden_dim=11_008,
        eps=1e-6,
        tied=True,
    ).with_positions(rope, rope, rope, None)


PRESETS = {"smollm3-3b": smollm_3()}
YEARS = dict.fromkeys(PRESETS, 2025)
