"""The original Transformer (2017) for translation: encoder-decoder, post-norm, sinusoids, ReLU.

All projections have biases, as in most implementations; in tensor2tensor, queries, keys and values
had none. The vocabulary is the English-German one, "about 37000" byte pairs.
"""

from jaxformer import config as c
from jaxformer.zoo.gpt import GPT_2
from jaxformer.zoo.sizes import DEPTH, WIDTH, like, sized

# As GPT-2, except: an encoder too, post-norm, ReLU, sinusoids, and a scaled embedding.
# Vaswani et al., Attention Is All You Need, 2017. arXiv:1706.03762, section 3 and table 3
TRANSFORMER = like(
    GPT_2,
    vocab_size=37_000,
    feed_forward=(c.MLP(hidden_dim=1, activation="relu", bias=True),),
    topology=c.EncoderDecoder(num_encoder_layers=DEPTH),
    norm_placement="post",
    final_norm=False,
    embedding=c.Embedding(scale=WIDTH**0.5, positions=c.Sinusoid()),
)

PRESETS = {
    "transformer-base": sized(TRANSFORMER, 512, 6, heads=8),
    "transformer-big": sized(TRANSFORMER, 1024, 6, heads=16),
}
