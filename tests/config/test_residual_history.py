"""Options that read earlier layers, against their definitions in float64, layer after layer."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import config as c
from jaxformer import zoo

L, D = 5, 6
RNG = np.random.default_rng(0)
X0, MATRICES = RNG.normal(size=(2, 3, D)), 0.5 * RNG.normal(size=(L, D, D))
KIND = c.MultiHead(num_heads=2, num_kv_heads=2, head_dim=4)


def layer(i, x):
    return x @ MATRICES[i]


def made(option):
    """Parameters of each layer, and of the model."""
    rng = np.random.default_rng(1)
    draw = lambda declared: {k: rng.normal(size=x.shape) for k, x in declared.items()}  # noqa: E731
    return [draw(option.parameters(D)) for _ in range(L)], draw(option.model_parameters(D))


def as_arrays(params):
    return {name: np.float32(x) for name, x in params.items()}


def through(option, layers, of_model):
    """The stream at the end, by the option."""
    x0 = jnp.asarray(X0, jnp.float32)
    state = option.begin(x0, as_arrays(of_model))
    for i, params in enumerate(layers):
        place = c.Place(jnp.int32(i), "layer", KIND, x0)
        x, held = option.read(state, as_arrays(params), place)
        y = jnp.asarray(layer(i, np.float64(x)), jnp.float32)
        state = option.write(state, held, y, as_arrays(params), place)
    return option.end(state, as_arrays(of_model))


def of_embedding_skip(layers, of_model):
    x = X0
    for i, p in enumerate(layers):
        x = layer(i, p["stream_weight"] * x + p["embedding_weight"] * X0)
    return x


def of_average(layers, of_model):
    outputs, x = [X0], X0
    weights = [of_model["weights"], *(p["weights"] for p in layers)]
    for i in range(L):
        outputs.append(layer(i, x))
        x = outputs[-1] + sum(w[i] * y for w, y in zip(weights, outputs, strict=False))
    return x


def of_skips(layers, of_model):
    outputs, x = [], X0
    for i in range(L):
        sender = L - 1 - i
        if sender < i:
            x = x + layers[sender]["weight"] * outputs[sender]
        x = layer(i, x)
        outputs.append(x)
    return x


OPTIONS = {
    "embedding skip": (c.EmbeddingSkip(), of_embedding_skip),
    "average": (c.DepthWeightedAverage(num_layers=L), of_average),
    "skips": (c.UNetSkips(num_layers=L), of_skips),
}


@pytest.mark.parametrize("option, by_hand", OPTIONS.values(), ids=OPTIONS)
def test_what_layers_read_of_earlier_ones(option, by_hand):
    params = made(option)
    expected = by_hand(*params)
    np.testing.assert_allclose(through(option, *params), expected, rtol=1e-4, atol=1e-5)


def normed(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.slow
def test_attention_over_sums_of_blocks():
    """Blocks of two layers, of two branches each."""
    option = c.AttentionResiduals(num_layers=L, block_layers=2)
    (layers, of_model), later = made(option), made(option)[0][::-1]

    def mean(vectors, query):
        keys = normed(np.stack(vectors))
        weights = np.exp(keys @ query / np.sqrt(D))
        return (weights[..., None] * keys).sum(0) / weights.sum(0)[..., None]

    blocks, total, x0 = [], X0, jnp.asarray(X0, jnp.float32)
    state, steps = option.begin(x0, {}), {}
    for branch in ("attention", "feed_forward"):
        place = partial(c.Place, branch=branch, attention=KIND)
        steps[branch] = (
            jax.jit(lambda s, p, i, place=place: option.read(s, p, place(i))),
            jax.jit(lambda s, h, y, p, i, place=place: option.write(s, h, y, p, place(i))),
        )
    for i in range(L):
        for branch, params in (("attention", layers[i]), ("feed_forward", later[i])):
            is_first = branch == "attention"
            x = mean([*blocks, total], params["query"]) if i or not is_first else X0
            y = layer(i, x)
            if is_first and i % 2 == 0:
                blocks, total = [*blocks, total], y
            else:
                total = total + y
            read, held = steps[branch][0](state, as_arrays(params), i)
            np.testing.assert_allclose(read, x, rtol=1e-4, atol=1e-5)
            state = steps[branch][1](state, held, np.float32(y), as_arrays(params), i)
    assert len(blocks) == 3 == state[1].shape[-2]
    end = mean([*blocks, total], of_model["query"])
    np.testing.assert_allclose(option.end(state, as_arrays(of_model)), end, rtol=1e-4, atol=1e-5)


def test_a_history_has_the_layers_of_the_model():
    config = replace(zoo.get("llama-2-7b"), residual=c.DepthWeightedAverage(num_layers=32))
    assert config.tiny().residual == c.DepthWeightedAverage(num_layers=2)
    with pytest.raises(ValueError, match=r"UNetSkips\(num_layers=7\) needs stacks .*; got 32"):
        replace(config, residual=c.UNetSkips(num_layers=7))
