from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxformer.config import Embedding, Learned
from tests.small_models import BASE, random_params

LEARNED = replace(BASE, num_layers=2, embedding=Embedding(positions=Learned(max_length=11)))


@pytest.fixture(scope="session")
def learned():
    """A config with eleven learned positions."""
    return LEARNED


@pytest.fixture(scope="session")
def config():
    """The same with rotary positions alone, so that any length works."""
    return replace(LEARNED, embedding=Embedding())


@pytest.fixture(scope="session")
def params(config):
    return random_params(config)


@pytest.fixture(scope="session")
def learned_params(learned):
    return random_params(learned)


@pytest.fixture(scope="session")
def prompts():
    return jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 30]], jnp.int32)


@pytest.fixture(params=["a loop", pytest.param("layers of their own", marks=pytest.mark.slow)])
def form(request, monkeypatch):
    """How layers decode: as on TPUs, and where they are many, or as few do elsewhere."""
    if request.param == "a loop":
        monkeypatch.setattr("jaxformer.layers.layouts.MAX_COMPILED_LAYERS", 0)
    return request.param
