"""Phi-3, Phi-3-small (another architecture) and Phi-4."""

from dataclasses import replace
from typing import Unpack

from jaxformer import config as c
from jaxformer.zoo.llama import LlamaSizes, llama
from jaxformer.zoo.projection_biases import QKVO

PHI_3_WINDOW = 2047
# Ids that Phi-3-small's tokenizer never produces, most of them padding of its vocabulary.
UNUSED_TOKEN_IDS = (100_256, 100_258, 100_259, 100_260, 100_264, 100_265, *range(100_267, 100_352))


def phi_3(**sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """Llama's design with a window in every layer: the versions for texts of 4096 tokens.

    References:
        Abdin et al., Phi-3 Technical Report, 2024. arXiv:2404.14219, section 2
    """
    return llama(vocab_size=32_064, windows=(PHI_3_WINDOW,), **sizes)


def phi_3_small() -> c.TransformerConfig:
    """Phi-3-small: clamped GEGLU, biases, alternating block-sparse and dense layers, muP scales.

    References:
        Abdin et al., Phi-3 Technical Report, 2024. arXiv:2404.14219, section 2
    """
    body = llama(
        vocab_size=100_352,
        model_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=14_336,
        base=1_000_000.0,
        windows=(c.BlockSparse(block_size=64, local_blocks=16, stride=8), None),
        scale=1 / 128,
        biases=QKVO,
    )
    return replace(
        body,
        feed_forward=(c.ClampedGEGLU(hidden_dim=14_336, limit=20.0, bias=True),),
        norm=c.LayerNorm(),
        embedding=c.Embedding(scale=10.0),
        head=c.LMHead(tied=True, multiplier=1 / 8, masked_ids=UNUSED_TOKEN_IDS),
    )


def phi_4() -> c.TransformerConfig:
    """Phi-3-medium's design with a larger vocabulary and no window.

    References:
        Abdin et al., Phi-4 Technical Report, 2024. arXiv:2412.08905, section 3
    """
    return llama(
        vocab_size=100_352,
        model_dim=5120,
        num_layers=40,
        num_heads=40,
        num_kv_heads=10,
        hidden_dim=17_920,
        base=250_000.0,
    )


PRESETS = {
    "phi-3-mini": phi_3(
        model_dim=3072, num_layers=32, num_heads=32, num_kv_heads=32, hidden_dim=8192
    ),
    "phi-3-small": phi_3_small(),
    "phi-3-medium": phi_3(
        model_dim=5120, num_layers=40, num_heads=40, num_kv_heads=10, hidden_dim=17_920
    ),
    "phi-4": phi_4(),
}
