"""T5, T5 v1.1 and mT5: encoder-decoder with relative position biases and no other biases.

Vocabularies are those of the released embeddings, padded beyond the tokenizer's 32,100 (T5) and
250,100 (mT5).
"""

from dataclasses import replace

from jaxformer import config as c

T5_VOCAB_SIZE = 32_128
MT5_VOCAB_SIZE = 250_112


def t5(
    *, model_dim: int, num_layers: int, num_heads: int, hidden_dim: int, head_dim: int = 64
) -> c.TransformerConfig:
    """T5 of 2019: RMSNorm, ReLU, logits from the token table after division by sqrt(model_dim).

    References:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
        Transformer, 2019. arXiv:1910.10683, sections 2.1 and 3.7
    """
    return c.TransformerConfig(
        vocab_size=T5_VOCAB_SIZE,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=c.MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            positions=(c.T5Bias(),),
            scale=1.0,
        ),
        feed_forward=(c.MLP(hidden_dim=hidden_dim, activation="relu"),),
        topology=c.EncoderDecoder(num_encoder_layers=num_layers),
        norm=c.RMSNorm(eps=1e-6),
        head=c.LMHead(tied=True, multiplier=model_dim**-0.5),
    )


def t5_v1_1(*, vocab_size: int = T5_VOCAB_SIZE, **sizes: int) -> c.TransformerConfig:
    """T5 v1.1 or mT5: GeGLU and an untied head.

    References:
        Shazeer, GLU Variants Improve Transformer, 2020. arXiv:2002.05202
        Xue et al., mT5: A Massively Multilingual Pre-trained Text-to-Text Transformer, 2020.
        arXiv:2010.11934, section 3.2
    """
    branch = c.GLU(hidden_dim=sizes["hidden_dim"], activation="gelu_tanh")
    return replace(t5(**sizes), vocab_size=vocab_size, feed_forward=(branch,), head=c.LMHead())


SIZES: dict[str, dict[str, int]] = {
    "small": {"model_dim": 512, "num_layers": 8, "num_heads": 6, "hidden_dim": 1024},
    "base": {"model_dim": 768, "num_layers": 12, "num_heads": 12, "hidden_dim": 2048},
    "large": {"model_dim": 1024, "num_layers": 24, "num_heads": 16, "hidden_dim": 2816},
    "xl": {"model_dim": 2048, "num_layers": 24, "num_heads": 32, "hidden_dim": 5120},
    "xxl": {"model_dim": 4096, "num_layers": 24, "num_heads": 64, "hidden_dim": 10_240},
}

PRESETS = {
    "t5-small": t5(model_dim=512, num_layers=6, num_heads=8, hidden_dim=2048),
    "t5-base": t5(model_dim=768, num_layers=12, num_heads=12, hidden_dim=3072),
    "t5-large": t5(model_dim=1024, num_layers=24, num_heads=16, hidden_dim=4096),
    "t5-3b": t5(model_dim=1024, num_layers=24, num_heads=32, hidden_dim=16_384, head_dim=128),
    "t5-11b": t5(model_dim=1024, num_layers=24, num_heads=128, hidden_dim=65_536, head_dim=128),
    **{f"t5-v1.1-{name}": t5_v1_1(**size) for name, size in SIZES.items()},
    **{f"mt5-{name}": t5_v1_1(vocab_size=MT5_VOCAB_SIZE, **size) for name, size in SIZES.items()},
}
