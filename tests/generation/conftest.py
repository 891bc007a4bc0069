from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer.config import GLU, Embedding, Learned, MultiHead, TransformerConfig
from jaxformer.generation import decode

LEARNED = TransformerConfig(
    vocab_size=31,
    model_dim=14,
    num_layers=2,
    attention=MultiHead(num_heads=4, num_kv_heads=2, head_dim=6),
    feed_forward=(GLU(hidden_dim=11),),
    embedding=Embedding(positions=Learned(max_length=11)),
)


@pytest.fixture(scope="session")
def learned():
    """A config with eleven learned positions."""
    return LEARNED


@pytest.fixture(scope="session")
def config():
    """The same with rotary positions alone, so that any length works."""
    return replace(LEARNED, embedding=Embedding())


def draw(config):
    """Random parameters, large enough that the next token depends on the text."""
    rng = np.random.default_rng(0)
    tokens = jnp.zeros((1, 3), jnp.int32)
    init = Transformer(config).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), tokens))["params"]
    return jax.tree.map(lambda x: jnp.asarray(0.7 * rng.normal(size=x.shape), x.dtype), shapes)


@pytest.fixture(scope="session")
def params(config):
    return draw(config)


@pytest.fixture(scope="session")
def learned_params(learned):
    return draw(learned)


@pytest.fixture(scope="session")
def prompts():
    return jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 30]], jnp.int32)


@pytest.fixture(params=["a loop", pytest.param("layers of their own", marks=pytest.mark.slow)])
def form(request, monkeypatch):
    """How layers decode: as on GPUs and TPUs, where they are many, or as few do on a CPU."""
    if request.param == "a loop":
        monkeypatch.setattr(decode, "worth_unrolling", lambda config: False)
    return request.param
