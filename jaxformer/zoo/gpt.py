"""GPT, GPT-2, GPT-3 and GPT-Neo; the last two alternate global and local attention layers.

GPT-3's weights were never released. Its paper states that dense and locally banded layers
alternate, but neither their order nor the width of the band; here even layers are dense and odd
ones have a window of 256 tokens, as in GPT-Neo.
"""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.zoo.projection_biases import QKVO

LOCAL_WINDOW = 256


def gpt(
    *,
    model_dim: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 50_257,
    max_length: int = 1024,
    windows: tuple[c.Window, ...] = (None,),
) -> c.TransformerConfig:
    """GPT-2: pre-norm, GeLU (its tanh form), a learned position table, biases, tied.

    References:
        Radford et al., Language Models are Unsupervised Multitask Learners, 2019
    """
    return c.TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=c.MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=model_dim // num_heads,
            positions=(None,),
            windows=windows,
            biases=QKVO,
        ),
        feed_forward=(c.MLP(hidden_dim=4 * model_dim, activation="gelu_tanh", bias=True),),
        norm=c.LayerNorm(),
        embedding=c.Embedding(positions=c.Learned(max_length=max_length)),
        head=c.LMHead(tied=True),
    )


def gpt_1() -> c.TransformerConfig:
    """The first GPT: post-norm, without a norm after the last layer.

    References:
        Radford et al., Improving Language Understanding by Generative Pre-Training, 2018
    """
    body = gpt(model_dim=768, num_layers=12, num_heads=12, vocab_size=40_478, max_length=512)
    return replace(body, norm_placement="post", final_norm=False)


def gpt_3() -> c.TransformerConfig:
    """GPT-3: GPT-2 with alternating global and local layers; the window is our assumption.

    References:
        Brown et al., Language Models are Few-Shot Learners, 2020. arXiv:2005.14165, section 2.1
    """
    return gpt(
        model_dim=12_288, num_layers=96, num_heads=96, max_length=2048, windows=(None, LOCAL_WINDOW)
    )


def gpt_neo(*, model_dim: int, num_layers: int, num_heads: int) -> c.TransformerConfig:
    """GPT-Neo: alternating global and local layers, unscaled scores, only output biases.

    References:
        Black et al., GPT-Neo: Large Scale Autoregressive Language Modeling with Mesh-Tensorflow,
        2021. Zenodo 5297715
    """
    body = gpt(
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        max_length=2048,
        windows=(None, LOCAL_WINDOW),
    )
    attention: Any = body.attention
    return replace(body, attention=replace(attention, scale=1.0, biases=("out",)))


PRESETS = {
    "gpt-1": gpt_1(),
    "gpt-2-small": gpt(model_dim=768, num_layers=12, num_heads=12),
    "gpt-2-medium": gpt(model_dim=1024, num_layers=24, num_heads=16),
    "gpt-2-large": gpt(model_dim=1280, num_layers=36, num_heads=20),
    "gpt-2-xl": gpt(model_dim=1600, num_layers=48, num_heads=25),
    "gpt-3-175b": gpt_3(),
    "gpt-neo-1.3b": gpt_neo(model_dim=2048, num_layers=24, num_heads=16),
    "gpt-neo-2.7b": gpt_neo(model_dim=2560, num_layers=32, num_heads=20),
}
YEARS = {"gpt-neo-1.3b": 2021, "gpt-neo-2.7b": 2021}
