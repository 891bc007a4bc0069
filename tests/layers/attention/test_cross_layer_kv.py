"""Layers that read keys and values of an earlier layer."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import inspect
from jaxformer.config import EncoderDecoder, LayerEmbedding, RMSNorm, Rope, SharedKV
from jaxformer.generation import unroll
from jaxformer.layers import empty_cache
from tests.small_models import BASE, jitted_forward, random_params

WINDOW = 4
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 9))
LOCAL = replace(BASE.attention, windows=(WINDOW,))
WIDE = replace(BASE.attention, head_dim=8, positions=(Rope(base=1e6),), value_norm=RMSNorm())


def reading(attention, **changes):
    return replace(attention, cross_layer_kv=True, value_norm=None, **changes)


def of(*kinds, first=(), num_layers):
    attention = (*first, *(kinds[i % len(kinds)] for i in range(num_layers - len(first))))
    return replace(BASE, num_layers=num_layers, attention=attention)


FIRST = of(reading(LOCAL), reading(WIDE), first=(LOCAL, WIDE, LOCAL, LOCAL), num_layers=9)
WITHIN = of(LOCAL, reading(LOCAL, num_heads=2), reading(LOCAL), num_layers=8)
CONFIGS = {
    "of the first layers": FIRST,
    "within a repetition": WITHIN,
    "with embeddings of layers": replace(FIRST, layer_embedding=LayerEmbedding(dim=5)),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def config(request):
    return request.param


@pytest.mark.slow
def test_a_layer_reads_the_last_layer_of_its_window():
    """Layers 4, 6 and 8 have the window; the last layer before them with keys of its own is 3."""
    params = random_params(FIRST)
    values = inspect.run(FIRST, params, TOKENS, record=("key", "value")).values
    assert "key" not in params["decoder"]["layers"]["layer_0"]["attention"]
    for arrays in values.values():
        for reader, source in {4: 3, 5: 1, 6: 3, 7: 1, 8: 3}.items():
            np.testing.assert_array_equal(arrays[reader], arrays[source])
        assert not np.array_equal(arrays[0], arrays[3])


@pytest.mark.slow
def test_a_text_in_parts_has_the_logits_of_the_whole(config):
    params, run = random_params(config), jitted_forward(config)
    whole = np.asarray(run(params, TOKENS))
    cache, logits = empty_cache(config, (2,), 9), []
    for start, stop in ((0, 3), (3, 8), (8, 9)):
        part, cache = run(params, TOKENS[:, start:stop], cache=cache)
        logits.append(part)
    np.testing.assert_allclose(np.concatenate(logits, 1), whole, atol=1e-5 * np.abs(whole).max())


def test_readers_cache_nothing():
    cache = empty_cache(FIRST, (2,), 9)
    assert [jax.tree.leaves(layer) for layer in cache.layers] == [[], []]
    assert len(jax.tree.leaves(cache.first_layers)) == 2 * 4


@pytest.mark.slow
def test_layers_may_stand_alone_and_in_a_loop(config):
    params = random_params(config)
    expected = np.asarray(jitted_forward(config)(params, TOKENS))
    bound = 1e-5 * np.abs(expected).max()
    logits = jitted_forward(config)(unroll(config, params), TOKENS)
    np.testing.assert_allclose(logits, expected, atol=bound)
    logits = jitted_forward(config, scan=False)(params, TOKENS)
    np.testing.assert_allclose(logits, expected, atol=bound)


@pytest.mark.slow
def test_gradients_do_not_depend_on_what_is_recomputed(config):
    def gradient(**options):
        run = jitted_forward(config, **options)
        return jax.grad(lambda params: (run(params, TOKENS) ** 2).mean())(random_params(config))

    expected = gradient()
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(expected))
    for remat in ("dots", "full"):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max()),
            gradient(remat=remat),
            expected,
        )


@pytest.mark.slow
def test_documents_of_a_row_stay_apart(config):
    params, run = random_params(config), jitted_forward(config)
    segments, positions = np.array([[1] * 5 + [2] * 4]), np.array([[*range(5), *range(4)]])
    packed = np.asarray(run(params, TOKENS[:1], segments=segments, positions=positions))
    for part in (slice(0, 5), slice(5, 9)):
        logits = run(params, TOKENS[:1, part])
        np.testing.assert_allclose(packed[:, part], logits, atol=1e-5 * np.abs(packed).max())


SOURCE = "Layer 1 reads keys and values of layer 0"
REFUSED = {
    "no layer of the window": (
        lambda: of(LOCAL, reading(WIDE), num_layers=4),
        "Layer 1 has cross_layer_kv and the window None, but no MultiHead layer before it has",
    ),
    "one projection": (
        lambda: of(SharedKV(num_heads=4, head_dim=6), reading(BASE.attention), num_layers=2),
        "Layer 1 has cross_layer_kv and the window None, but no MultiHead layer",
    ),
    "other heads": (
        lambda: of(LOCAL, reading(LOCAL, num_kv_heads=1), num_layers=2),
        f"{SOURCE}, so both need the same positions, num_kv_heads, head_dim and value_dim",
    ),
    "other positions": (
        lambda: of(LOCAL, reading(LOCAL, positions=(None,)), num_layers=2),
        f"{SOURCE}, so both need the same positions",
    ),
    "an encoder": (
        lambda: replace(WITHIN, topology=EncoderDecoder(num_encoder_layers=1)),
        "layer_embedding and cross_layer_kv need a Decoder or an Encoder",
    ),
    "a bias": (
        lambda: reading(LOCAL, biases=("key", "out")),
        r"needs no bias and no norm of these; got biases \['key'\] and value_norm None",
    ),
}


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
