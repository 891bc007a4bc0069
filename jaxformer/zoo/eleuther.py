"""GPT-J, GPT-NeoX and Pythia: parallel branches, RoPE on a quarter of each head.

Vocabularies are those of the released embeddings, padded beyond the tokenizer's 50,257 (GPT-J),
50,277 (GPT-NeoX) and 50,277 (Pythia).
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.gpt import gpt


def gpt_j() -> c.TransformerConfig:
    """One norm for both branches, neighbouring features paired, biases on feed-forward and head.

    References:
        Wang and Komatsuzaki, GPT-J-6B: A 6 Billion Parameter Autoregressive Language Model, 2021
    """
    return c.TransformerConfig(
        vocab_size=50_400,
        model_dim=4096,
        num_layers=28,
        attention=c.MultiHead(
            num_heads=16,
            num_kv_heads=16,
            head_dim=256,
            positions=(c.Rope(fraction=0.25, pairing="neighbours"),),
        ),
        feed_forward=(c.MLP(hidden_dim=16_384, activation="gelu_tanh", bias=True),),
        block="parallel_shared_norm",
        norm=c.LayerNorm(),
        head=c.LMHead(bias=True),
    )


def gpt_neox(
    *, model_dim: int, num_layers: int, num_heads: int, vocab_size: int, activation: str = "gelu"
) -> c.TransformerConfig:
    """A norm for each branch, halves of the head paired, biases everywhere but on the head.

    References:
        Black et al., GPT-NeoX-20B: An Open-Source Autoregressive Language Model, 2022.
        arXiv:2204.06745, section 2.1
        Biderman et al., Pythia, 2023. arXiv:2304.01373
    """
    body = gpt(
        vocab_size=vocab_size, model_dim=model_dim, num_layers=num_layers, num_heads=num_heads
    )
    return replace(
        body.with_positions(c.Rope(fraction=0.25)),
        feed_forward=(c.MLP(hidden_dim=4 * model_dim, activation=activation, bias=True),),
        block="parallel",
        embedding=c.Embedding(),
        head=c.LMHead(),
    )


PRESETS = {
    "gpt-j-6b": gpt_j(),
    "gpt-neox-20b": gpt_neox(
        model_dim=6144, num_layers=44, num_heads=64, vocab_size=50_432, activation="gelu_tanh"
    ),
    "pythia-70m": gpt_neox(model_dim=512, num_layers=6, num_heads=8, vocab_size=50_304),
    "pythia-160m": gpt_neox(model_dim=768, num_layers=12, num_heads=12, vocab_size=50_304),
    "pythia-410m": gpt_neox(model_dim=1024, num_layers=24, num_heads=16, vocab_size=50_304),
    "pythia-1b": gpt_neox(model_dim=2048, num_layers=16, num_heads=8, vocab_size=50_304),
    "pythia-1.4b": gpt_neox(model_dim=2048, num_layers=24, num_heads=16, vocab_size=50_304),
    "pythia-2.8b": gpt_neox(model_dim=2560, num_layers=32, num_heads=32, vocab_size=50_304),
    "pythia-6.9b": gpt_neox(model_dim=4096, num_layers=32, num_heads=32, vocab_size=50_432),
    "pythia-12b": gpt_neox(model_dim=5120, num_layers=36, num_heads=40, vocab_size=50_688),
}
