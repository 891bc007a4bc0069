"""Embeddings of each token for each layer."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import inspect
from jaxformer.config import AltUp, Embedding, LayerEmbedding, NoFeedForward, OtherStreams
from tests.small_models import BASE, jitted_forward, random_params

CONFIG = replace(
    BASE, layer_embedding=LayerEmbedding(dim=5, activation="silu"), embedding=Embedding(scale=3.0)
)
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 7))


def rms(x, scale):
    return scale * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.slow
def test_the_branch_is_its_equation():
    """In float64, from the stream before the branch, layer by layer."""
    params = random_params(CONFIG)
    trace = inspect.trace(CONFIG, params, TOKENS).decoder
    p, layers = (
        params["layer_embedding"],
        params["decoder"]["layers"]["layer_0"]["layer_embedding"],
    )
    x0 = 3.0 * np.float64(params["embedding"]["tokens"]["embedding"])[TOKENS]
    tables = np.float64(p["tokens"]["embedding"])[TOKENS].reshape(2, 7, 3, 5)
    projected = (x0 @ np.float64(p["projection"]["kernel"]) / np.sqrt(14)).reshape(2, 7, 3, 5)
    e = (rms(projected, np.float64(p["norm"]["scale"])) + np.sqrt(5) * tables) / np.sqrt(2)
    for i in range(3):
        stream = np.float64(trace.stream[i] - trace.branches["layer_embedding"][i])
        gate = stream @ np.float64(layers["gate"]["kernel"][i])
        y = (gate / (1 + np.exp(-gate)) * e[..., i, :]) @ np.float64(layers["down"]["kernel"][i])
        expected = rms(y, np.float64(layers["norm"]["scale"][i]))
        np.testing.assert_allclose(trace.branches["layer_embedding"][i], expected, atol=2e-5)


@pytest.mark.slow
def test_of_several_streams_the_first_is_read_and_the_others_get_the_branch():
    """In float64, from what `inspect` records; ids beyond the table have its first row."""
    option = replace(CONFIG.layer_embedding, vocab_size=20)
    residual = AltUp(num_streams=3, layer_embedding=OtherStreams())
    config = replace(CONFIG, residual=residual, layer_embedding=option, num_layers=1)
    params = random_params(config)
    values = inspect.run(config, params, TOKENS).values
    names = ("stream", "read_by_layer_embedding", "layer_embedding")
    state, read, branch = (np.float64(values[name][0]) for name in names)
    layer = jax.tree.map(lambda x: np.float64(x[0]), params["decoder"]["layers"]["layer_0"])
    first = layer["layer_embedding_residual"]["scale"] * state[..., 0, :]
    np.testing.assert_allclose(read, first, atol=2e-5)
    p = jax.tree.map(np.float64, params["layer_embedding"])
    x0 = 3.0 * np.float64(params["embedding"]["tokens"]["embedding"])[TOKENS]
    rows = p["tokens"]["embedding"][np.where(TOKENS < 20, TOKENS, 0)]
    projected = rms(x0 @ p["projection"]["kernel"] / np.sqrt(14), p["norm"]["scale"])
    own = layer["layer_embedding"]
    gate = first @ own["gate"]["kernel"]
    hidden = gate / (1 + np.exp(-gate)) * (projected + np.sqrt(5) * rows) / np.sqrt(2)
    expected = rms(hidden @ own["down"]["kernel"], own["norm"]["scale"])
    np.testing.assert_allclose(branch, expected, atol=2e-5)
    silent = jax.tree.map(np.array, params)
    silent["decoder"]["layers"]["layer_0"]["layer_embedding"]["norm"]["scale"][:] = 0
    before = np.float64(inspect.run(config, silent, TOKENS).values["stream"][0])
    added = np.stack([0 * branch, branch, branch], axis=-2)
    np.testing.assert_allclose(state - before, added, atol=2e-5)


def test_the_stream_is_the_sum_of_all_branches():
    trace = inspect.trace(CONFIG, random_params(CONFIG), TOKENS).decoder
    total = trace.embeddings + sum(x.sum(0) for x in trace.branches.values())
    np.testing.assert_allclose(trace.stream[-1], total, atol=1e-5)


def test_tokens_beyond_the_table_read_its_first_row():
    option = replace(CONFIG.layer_embedding, vocab_size=20)
    config = replace(CONFIG, layer_embedding=option)
    params, tokens = random_params(config), np.array([[3, 19, 20, 30]])
    table = np.array(params["layer_embedding"]["tokens"]["embedding"])
    assert table.shape[0] == 20
    whole = np.concatenate([table, np.repeat(table[:1], 11, axis=0)])
    other = params["layer_embedding"] | {"tokens": {"embedding": whole}}
    expected = jitted_forward(CONFIG)(params | {"layer_embedding": other}, tokens)
    np.testing.assert_allclose(jitted_forward(config)(params, tokens), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_embeddings_reach_their_layer(scan):
    """A pattern of two over seven layers, two of them first: in each group a layer has its own."""
    (feed_forward,) = CONFIG.feed_forward
    first, pattern = (feed_forward,) * 2, (NoFeedForward(), feed_forward)
    config = replace(CONFIG, num_layers=7, feed_forward=first + pattern * 2 + pattern[:1])
    assert config.segments("decoder") == (1, 2, 3, 0)
    params = random_params(config)
    run = jitted_forward(config, scan=scan)
    table = np.array(params["layer_embedding"]["tokens"]["embedding"])
    table[TOKENS[0, -1], 5 * 6 :] += 1.0  # of the last layer
    embeddings = params["layer_embedding"] | {"tokens": {"embedding": table}}
    changed = params | {"layer_embedding": embeddings}
    streams = [inspect.trace(config, p, TOKENS).decoder.stream for p in (params, changed)]
    np.testing.assert_array_equal(streams[0][:6], streams[1][:6])
    assert np.abs(streams[0][6] - streams[1][6])[0, -1].max() > 1e-3
    assert np.isfinite(run(params, TOKENS)).all()
