"""GPT to GPT-3, GPT-Neo: learned positions, biases; GPT-3 and GPT-Neo have a window in odd layers.

GPT-3's weights were never released. Its paper states that dense and locally banded layers
alternate, but neither their order nor the width of the band; here even layers are dense and odd
ones have a window of 256 tokens, as in GPT-Neo.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.sizes import DEPTH, HEADS, QKVO, WIDTH, like, sized

# Pre-norm, GeLU (its tanh form), a learned position table, biases, tied.
# Radford et al., Language Models are Unsupervised Multitask Learners, 2019
GPT_2 = c.TransformerConfig(
    vocab_size=50_257,
    model_dim=WIDTH,
    num_layers=DEPTH,
    attention=replace(HEADS, positions=(None,), biases=QKVO),
    feed_forward=(c.MLP(hidden_dim=1, bias=True),),
    norm=c.LayerNorm(),
    embedding=c.Embedding(positions=c.Learned(max_length=1024)),
    head=c.LMHead(tied=True),
)

# As GPT-2, except: post-norm, without a norm after the last layer.
# Radford et al., Improving Language Understanding by Generative Pre-Training, 2018
GPT_1 = like(
    GPT_2,
    vocab_size=40_478,
    norm_placement="post",
    final_norm=False,
    embedding=c.Embedding(positions=c.Learned(max_length=512)),
)

# As GPT-2, except: alternating global and local layers; the window is our assumption.
# Brown et al., Language Models are Few-Shot Learners, 2020. arXiv:2005.14165, section 2.1
GPT_3 = like(
    GPT_2, windows=(None, 256), embedding=c.Embedding(positions=c.Learned(max_length=2048))
)

# As GPT-3, except: unscaled scores, only output biases.
# Black et al., GPT-Neo: Large Scale Autoregressive Language Modeling with Mesh-Tensorflow, 2021.
# Zenodo 5297715
GPT_NEO = like(GPT_3, scale=1.0, biases=("out",))

PRESETS = {
    "gpt-1": sized(GPT_1, 768, 12, heads=12),
    "gpt-2-small": sized(GPT_2, 768, 12, heads=12),
    "gpt-2-medium": sized(GPT_2, 1024, 24, heads=16),
    "gpt-2-large": sized(GPT_2, 1280, 36, heads=20),
    "gpt-2-xl": sized(GPT_2, 1600, 48, heads=25),
    "gpt-3-175b": sized(GPT_3, 12_288, 96, heads=96),
    "gpt-neo-1.3b": sized(GPT_NEO, 2048, 24, heads=16),
    "gpt-neo-2.7b": sized(GPT_NEO, 2560, 32, heads=20),
}
YEARS = {"gpt-neo-1.3b": 2021, "gpt-neo-2.7b": 2021}
