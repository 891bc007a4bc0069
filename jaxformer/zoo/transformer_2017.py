"""The original Transformer (Vaswani et al., 2017), for translation.

All projections have biases, as in most implementations; in tensor2tensor, queries, keys and values
had none. The vocabulary is the English-German one, "about 37000" byte pairs.
"""

import math
from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.gpt import gpt


def transformer_2017(*, model_dim: int, num_heads: int) -> c.TransformerConfig:
    """Original Transformer: 6 + 6 layers, post-norm, ReLU, sinusoids, one shared table.

    References:
        Vaswani et al., Attention Is All You Need, 2017. arXiv:1706.03762, section 3 and table 3
    """
    return replace(
        gpt(vocab_size=37_000, model_dim=model_dim, num_layers=6, num_heads=num_heads),
        feed_forward=(c.MLP(hidden_dim=4 * model_dim, activation="relu", bias=True),),
        topology=c.EncoderDecoder(num_encoder_layers=6),
        norm_placement="post",
        final_norm=False,
        embedding=c.Embedding(scale=math.sqrt(model_dim), positions=c.Sinusoid()),
    )


PRESETS = {
    "transformer-base": transformer_2017(model_dim=512, num_heads=8),
    "transformer-big": transformer_2017(model_dim=1024, num_heads=16),
}
