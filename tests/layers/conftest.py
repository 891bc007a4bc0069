from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from tests.small_models import BASE, jitted_forward, random_params, random_tree


@pytest.fixture
def config():
    """Build a small config from `BASE` by changing fields; `attention` is a dict of changes."""

    def change(attention=None, **fields):
        return replace(BASE, attention=replace(BASE.attention, **(attention or {})), **fields)

    return change


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(5), (2, 7), 0, BASE.vocab_size)


@pytest.fixture
def randomise():
    """Random parameters for a module called with the given arguments."""

    def make(module, *example, **arguments):
        shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *example, **arguments))
        return random_tree(shapes["params"])

    return make


@pytest.fixture
def build():
    """Random parameters of a config's model, and the function from tokens to logits."""

    def make(config):
        drawn_params, forward = random_params(config), jitted_forward(config)

        def run(tokens, params=drawn_params, **arguments):
            return forward(params, tokens, **arguments)

        return drawn_params, run

    return make


@pytest.fixture
def influence(build):
    """How much each output position of a config depends on each input token's vector."""

    def measure(config, tokens, **arguments):
        config = replace(config, head=replace(config.head, tied=False))  # only the input may vary
        params, run = build(config)
        table = params["embedding"]["tokens"]["embedding"]
        # Every token gets a row of its own, so that a gradient by row is one by place.
        places = jnp.arange(tokens.size).reshape(tokens.shape)
        rows = table[tokens].reshape(-1, table.shape[-1])

        def logits(rows):
            varied_params = jax.tree.map(lambda x: x, params)
            varied_params["embedding"]["tokens"]["embedding"] = table.at[: len(rows)].set(rows)
            return run(places, varied_params, **arguments).sum(axis=-1).reshape(-1)

        return jnp.abs(jax.jit(jax.jacobian(logits))(rows)).sum(axis=-1)

    return measure
