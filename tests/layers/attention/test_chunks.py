"""Attention by chunks, with caches, packed rows and rows of different lengths."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from jaxformer import costs
from jaxformer import functional as F
from jaxformer.config import Chunks, QKNorm, QueryScaling
from jaxformer.layers import empty_cache
from tests.small_models import BASE, jitted_forward, random_params, rounding_error

SIZE, LENGTH = 3, 8
CHUNKED = replace(BASE.attention, windows=(Chunks(size=SIZE),), qk_norm=QKNorm())
GROWING = QueryScaling(beta=0.7, original_max_length=2, offset=1)
FULL = replace(BASE.attention, positions=(None,), query_scaling=GROWING)
ALONE = replace(BASE, attention=CHUNKED)
MIXED = replace(BASE, attention=(CHUNKED, FULL))
CONFIGS = {"chunks alone": ALONE, "beside full layers": MIXED}
TOKENS = np.random.default_rng(3).integers(0, BASE.vocab_size, (2, LENGTH))


@pytest.mark.slow
def test_chunks_are_texts_of_their_own():
    """RoPE sees distances only, so that a chunk does not know where it stands."""
    params, run = random_params(ALONE), jitted_forward(ALONE)
    parts = [run(params, TOKENS[:, i : i + SIZE]) for i in range(0, LENGTH, SIZE)]
    whole, bound = run(params, TOKENS), 3 * rounding_error(run, params, TOKENS)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=bound)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_cached_generation_is_the_whole_text_at_every_split(name):
    config = CONFIGS[name]
    params, run = random_params(config), jitted_forward(config)
    whole, bound = np.asarray(run(params, TOKENS)), 3 * rounding_error(run, params, TOKENS)
    for split in range(1, LENGTH):
        cache, logits = empty_cache(config, (2,), LENGTH), []
        for part in (TOKENS[:, :split], TOKENS[:, split:]):
            here, cache = run(params, part, cache=cache)
            logits.append(here)
        np.testing.assert_allclose(
            np.concatenate(logits, axis=1), whole, rtol=0, atol=bound, err_msg=f"{split}"
        )


@pytest.mark.slow
def test_a_ring_of_one_chunk_is_never_full():
    """Token by token, past its number of slots."""
    params, run = random_params(ALONE), jitted_forward(ALONE)
    whole, bound = np.asarray(run(params, TOKENS)), 3 * rounding_error(run, params, TOKENS)
    cache = empty_cache(ALONE, (2,), SIZE)
    assert {x.shape[-2] for x in jax.tree.leaves(cache.layers)} == {SIZE}
    for t in range(LENGTH):
        logits, cache = run(params, TOKENS[:, t : t + 1], cache=cache)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], rtol=0, atol=bound)


@pytest.mark.slow
def test_chunks_of_packed_documents_begin_with_them():
    params, run = random_params(MIXED), jitted_forward(MIXED)
    segments = np.array([[1] * 4 + [2] * 4, [1] * 5 + [2] * 3])
    positions = np.array([[0, 1, 2, 3] * 2, [0, 1, 2, 3, 4, 0, 1, 2]])
    packed = np.asarray(run(params, TOKENS, segments=segments, positions=positions))
    bound = 3 * rounding_error(run, params, TOKENS)
    for row, ids in enumerate(segments):
        for document in (1, 2):
            alone = run(params, TOKENS[row : row + 1, ids == document])
            np.testing.assert_allclose(packed[row, ids == document], alone[0], rtol=0, atol=bound)


@pytest.mark.slow
def test_rows_of_different_lengths_are_continued_as_each_alone():
    """A row's chunks begin with its own first token, whatever pads it."""
    params = random_params(MIXED)
    prompts = [[5, 1, 9, 3, 7], [7], [2, 8, 6, 4]]
    together = np.asarray(jaxformer.generate(MIXED, params, prompts, max_new_tokens=6))
    for row, prompt in zip(together, prompts, strict=True):
        alone = np.asarray(jaxformer.generate(MIXED, params, [prompt], max_new_tokens=6))[0]
        np.testing.assert_array_equal(row[: len(alone)], alone)
    assert len(np.unique(together[:, -6:])) > 3


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.slow(but=["xla"])
def test_implementations_agree(implementation):
    params, expected = random_params(MIXED), jitted_forward(MIXED)(random_params(MIXED), TOKENS)
    actual = jitted_forward(MIXED, attention_implementation=implementation)(params, TOKENS)
    np.testing.assert_allclose(actual, expected, atol=3e-6 * np.abs(expected).max())


def test_the_first_query_has_number_1():
    """Llama 4: 1 + beta ln(1 + floor((p + 1) / L))."""
    factors = [1 + 0.7 * np.log1p((p + 1) // 2) for p in range(6)]
    np.testing.assert_allclose(GROWING(jnp.arange(6)), factors, rtol=1e-6)
    np.testing.assert_allclose(
        GROWING(jnp.arange(6)), F.query_scale(jnp.arange(1, 7), beta=0.7, original_max_length=2)
    )


def test_sizes_are_those_of_a_window():
    wide = replace(BASE, attention=replace(CHUNKED, windows=(SIZE,)))
    assert costs.cache_bytes(ALONE, 100) == costs.cache_bytes(wide, 100)
    assert costs.cache_bytes(ALONE, 100) == costs.cache_bytes(BASE, SIZE)
    assert costs.forward_flops(ALONE, 100) == costs.forward_flops(wide, 100)
