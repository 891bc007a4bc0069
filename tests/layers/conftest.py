from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer.config import GLU, MultiHead, Rope, TransformerConfig

BASE = TransformerConfig(
    vocab_size=31,
    model_dim=14,
    num_layers=3,
    attention=MultiHead(num_heads=4, num_kv_heads=2, head_dim=6, positions=(Rope(),)),
    feed_forward=(GLU(hidden_dim=11),),
)


@pytest.fixture
def config():
    """Build a small config from `BASE` by changing fields; `attention` is a dict of changes."""

    def change(attention=None, **fields):
        return replace(BASE, attention=replace(BASE.attention, **(attention or {})), **fields)

    return change


@pytest.fixture
def tokens():
    return jax.random.randint(jax.random.key(5), (2, 7), 0, BASE.vocab_size)


def draw(shapes):
    """Random parameters of these shapes, norms and biases included; numpy compiles nothing."""
    rng = np.random.default_rng(0)

    def leaf(path, x):
        name = path[-1].key
        noise = rng.normal(size=x.shape)
        if name == "kernel":
            noise *= 0.35
        elif name != "embedding":
            noise = 0.2 * noise + (name == "scale")
        return jnp.asarray(noise, x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@pytest.fixture
def randomise():
    """Random parameters for a module called with the given arguments."""

    def make(module, *example, **arguments):
        shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *example, **arguments))
        return draw(shapes["params"])

    return make


@pytest.fixture
def build(tokens, randomise):
    """Random parameters of a config's model, and the function from tokens to logits."""

    def make(config, example=tokens, **arguments):
        model = Transformer(config)
        params = randomise(model, example, **arguments)
        compiled = jax.jit(model.apply, static_argnames="deterministic")

        def run(tokens, params=params, **arguments):
            return compiled({"params": params}, tokens, **arguments)

        return params, run

    return make


@pytest.fixture
def influence(build):
    """How much each output position of a config depends on each input token's vector."""

    def measure(config, tokens, **arguments):
        config = replace(config, head=replace(config.head, tied=False))  # only the input may vary
        params, run = build(config, tokens, **arguments)
        table = params["embedding"]["tokens"]["embedding"]
        # Every token gets a row of its own, so that a gradient by row is one by place.
        places = jnp.arange(tokens.size).reshape(tokens.shape)
        rows = table[tokens].reshape(-1, table.shape[-1])

        def logits(rows):
            own = jax.tree.map(lambda x: x, params)
            own["embedding"]["tokens"]["embedding"] = table.at[: len(rows)].set(rows)
            return run(places, own, **arguments).sum(axis=-1).reshape(-1)

        return jnp.abs(jax.jit(jax.jacobian(logits))(rows)).sum(axis=-1)

    return measure
