"""Gopher and Chinchilla: GPT-2 with RMSNorm and Transformer-XL relative positions.

The papers do not name the activation; ReLU is from the lecture. Sharing of u and v across layers,
biases and tying are not published: here each layer has its own u and v, there are no other biases,
and the head is tied. The published totals need a W in every layer.
"""

from jaxformer import config as c
from jaxformer.zoo.gpt import GPT_2
from jaxformer.zoo.sizes import like, sized

# As GPT-2, except: RMSNorm, relative positions, ReLU, no biases.
# Rae et al., Scaling Language Models: Methods, Analysis & Insights from Training Gopher, 2021.
# arXiv:2112.11446, section 3.1
# Hoffmann et al., Training Compute-Optimal Large Language Models, 2022. arXiv:2203.15556,
# section 4.1
GOPHER = like(
    GPT_2,
    vocab_size=32_000,
    positions=(c.TransformerXL(),),
    biases=(),
    feed_forward=(c.MLP(hidden_dim=1, activation="relu"),),
    norm=c.RMSNorm(),
    embedding=c.Embedding(),
)

PRESETS = {
    "gopher-280b": sized(GOPHER, 16_384, 80, heads=128),
    "chinchilla-70b": sized(GOPHER, 8192, 80, heads=64),
}
