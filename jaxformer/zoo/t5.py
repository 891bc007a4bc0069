"""T5, T5 v1.1 and mT5: encoder-decoder with relative position biases and no other biases.

Vocabularies are as large as the released embeddings, padded beyond the tokenizer's 32,100 (T5) and
250,100 (mT5).
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.sizes import DEPTH, HEADS, WIDTH, like, sized

# T5 of 2019: RMSNorm, ReLU, logits from the token table after division by sqrt(model_dim).
# Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer,
# 2019. arXiv:1910.10683, sections 2.1 and 3.7
T5 = c.TransformerConfig(
    vocab_size=32_128,
    model_dim=WIDTH,
    num_layers=DEPTH,
    attention=replace(HEADS, positions=(c.T5Bias(),), scale=1.0),
    feed_forward=(c.MLP(hidden_dim=1, activation="relu"),),
    topology=c.EncoderDecoder(num_encoder_layers=DEPTH),
    head=c.LMHead(tied=True, multiplier=WIDTH**-0.5),
)

# As T5, except: GeGLU and an untied head; mT5 has a larger vocabulary.
# Shazeer, GLU Variants Improve Transformer, 2020. arXiv:2002.05202
# Xue et al., mT5: A Massively Multilingual Pre-trained Text-to-Text Transformer, 2020.
# arXiv:2010.11934, section 3.2
T5_V1_1 = like(T5, feed_forward=(c.GLU(hidden_dim=1, activation="gelu_tanh"),), head=c.LMHead())
MT5 = like(T5_V1_1, vocab_size=250_112)
# Width, depth, heads of 64 features, hidden features
SIZES = {
    "small": (512, 8, 6, 1024),
    "base": (768, 12, 12, 2048),
    "large": (1024, 24, 16, 2816),
    "xl": (2048, 24, 32, 5120),
    "xxl": (4096, 24, 64, 10_240),
}

PRESETS = {
    "t5-small": sized(T5, 512, 6, heads=8),
    "t5-base": sized(T5, 768, 12, heads=12),
    "t5-large": sized(T5, 1024, 24, heads=16),
    "t5-3b": sized(T5, 1024, 24, heads=32, head_dim=128, hidden=16_384),
    "t5-11b": sized(T5, 1024, 24, heads=128, head_dim=128, hidden=65_536),
} | {
    f"{family}-{name}": sized(template, width, depth, heads=heads, head_dim=64, hidden=hidden)
    for family, template in (("t5-v1.1", T5_V1_1), ("mt5", MT5))
    for name, (width, depth, heads, hidden) in SIZES.items()
}
