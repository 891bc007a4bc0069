import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.jitted_functions import F

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("basics.json").read_text())
GOLDEN = GOLDEN["sampling"]
LOGITS = np.float32(GOLDEN["logits"])
TOKENS = np.int32(GOLDEN["tokens"])
SEEN = (TOKENS[..., None] == np.arange(13)).any(axis=1)
PROCESSORS = {
    "temperature_0.7": lambda x: F.scale_by_temperature(x, 0.7),
    "top_k_4": lambda x: F.keep_top_k(x, 4),
    "top_p_0.6": lambda x: F.keep_top_p(x, 0.6),
    "top_p_0.9": lambda x: F.keep_top_p(x, 0.9),
    "top_p_0.01": lambda x: F.keep_top_p(x, 0.01),
    "min_p_0.1": lambda x: F.keep_min_p(x, 0.1),
    "repetition_1.3": lambda x: F.penalise_repetition(
        x, np.broadcast_to(SEEN, (*x.shape[:-2], 3, 13)), 1.3
    ),
}
TRUNCATIONS = {name: f for name, f in PROCESSORS.items() if name[:4] in ("top_", "min_")}


def is_kept(logits):
    return np.isfinite(np.asarray(logits, np.float32))


@pytest.mark.parametrize("name", PROCESSORS)
def test_sampling_matches_transformers(name):
    np.testing.assert_allclose(PROCESSORS[name](LOGITS), GOLDEN[name], rtol=1e-6)


@pytest.mark.parametrize("name", PROCESSORS)
def test_sampling_of_a_batch_is_that_of_each_row(name):
    batch = jnp.stack([LOGITS, LOGITS[:, ::-1]])
    one_by_one = jnp.stack([PROCESSORS[name](x) for x in batch])
    np.testing.assert_allclose(PROCESSORS[name](batch), one_by_one, rtol=1e-6)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(x=st.lists(st.integers(-40, 40), min_size=7, max_size=7), p=st.floats(0.01, 1.0))
def test_top_p_keeps_the_fewest_tokens_that_hold_p(x, p):
    x = np.array(x) / 8.0  # with ties
    probabilities = np.exp(x) / np.exp(x).sum()
    mass_above = np.array([probabilities[x > value].sum() for value in x])
    if np.all(np.abs(mass_above - p) > 1e-5):  # not within rounding of the edge
        result = F.keep_top_p(np.float32(x), p)
        np.testing.assert_array_equal(is_kept(result), mass_above < p)
        np.testing.assert_array_equal(np.asarray(result)[mass_above < p], x[mass_above < p])


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(x=st.lists(st.integers(-40, 40), min_size=7, max_size=7), k=st.integers(1, 7))
def test_top_k_keeps_what_fewer_than_k_exceed(x, k):
    x = np.array(x) / 8.0
    above = np.array([np.sum(x > value) for value in x])
    np.testing.assert_array_equal(is_kept(F.keep_top_k(np.float32(x), k)), above < k)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(x=st.lists(st.integers(-40, 40), min_size=7, max_size=7), p=st.floats(0.01, 1.0))
def test_min_p_compares_with_the_likeliest(x, p):
    x = np.array(x) / 8.0
    ratio = np.exp(x - x.max())
    if np.all(np.abs(ratio - p) > 1e-5):
        np.testing.assert_array_equal(is_kept(F.keep_min_p(np.float32(x), p)), ratio >= p)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(13)), shift=st.floats(-50, 50, width=32))
@pytest.mark.parametrize("name", TRUNCATIONS)
def test_truncations_ignore_the_order_of_tokens_and_a_shift(name, order, shift):
    order = np.asarray(order)
    expected = is_kept(TRUNCATIONS[name](LOGITS))
    np.testing.assert_array_equal(is_kept(TRUNCATIONS[name](LOGITS[:, order])), expected[:, order])
    np.testing.assert_array_equal(is_kept(TRUNCATIONS[name](LOGITS + shift)), expected)


def test_the_widest_settings_change_nothing():
    for result in (
        F.scale_by_temperature(LOGITS, 1.0),
        F.keep_top_k(LOGITS, 13),
        F.keep_top_p(LOGITS, 1.0),
        F.penalise_repetition(LOGITS, SEEN, 1.0),
        F.penalise_repetition(LOGITS, jnp.zeros_like(SEEN), 2.0),
    ):
        np.testing.assert_array_equal(result, LOGITS)
    tail = np.array([0.0, 0.0, -200.0])  # whose probability rounds to 0
    np.testing.assert_array_equal(F.keep_top_p(tail, 1.0), tail)


def test_the_narrowest_settings_leave_the_likeliest_token():
    best = np.asarray(LOGITS) == np.asarray(LOGITS).max(-1, keepdims=True)
    for result in (F.keep_top_k(LOGITS, 1), F.keep_top_p(LOGITS, 1e-9), F.keep_min_p(LOGITS, 1.0)):
        np.testing.assert_array_equal(is_kept(result), best)


def test_ties_with_the_last_kept_token_stay():
    x = np.array([1.0, 3.0, 1.0, 1.0, -2.0])
    expected = [True, True, True, True, False]
    np.testing.assert_array_equal(is_kept(F.keep_top_k(x, 2)), expected)
    np.testing.assert_array_equal(is_kept(F.keep_top_p(x, 0.75)), expected)  # 3.0 alone holds 0.71
    np.testing.assert_array_equal(is_kept(F.keep_min_p(np.zeros(5), 1.0)), True)


def test_truncations_leave_forbidden_tokens_forbidden():
    x = np.array([0.5, -jnp.inf, 2.0, -jnp.inf])
    for result in (F.keep_top_k(x, 3), F.keep_top_p(x, 0.99), F.keep_min_p(x, 0.01)):
        np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_sampling_keeps_dtype_and_survives_extreme_logits(name, dtype):
    x = np.where(np.arange(13) == 2, 3e4, np.full((3, 13), -3e4)).astype(dtype)
    result = PROCESSORS[name](x)
    assert result.dtype == dtype
    np.testing.assert_array_equal(np.argmax(result, -1), 2)
    assert not np.any(np.isnan(result))


@pytest.mark.parametrize("name", PROCESSORS)
def test_sampling_passes_the_gradient_of_what_it_keeps(name):
    chosen = jnp.argmax(LOGITS, -1)
    loss = lambda x: F.token_cross_entropy(PROCESSORS[name](x), chosen).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(LOGITS)
    assert np.all(np.isfinite(gradient))
    if name in TRUNCATIONS:
        expected = jax.nn.softmax(TRUNCATIONS[name](LOGITS)) - jax.nn.one_hot(chosen, 13)
        np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_temperature_raises_probabilities_to_a_power():
    p = jax.nn.softmax(LOGITS)
    powers = p ** (1 / 0.7)
    expected = powers / jnp.sum(powers, -1, keepdims=True)
    cooled = F.scale_by_temperature(LOGITS, 0.7)
    np.testing.assert_allclose(jax.nn.softmax(cooled), expected, rtol=1e-5)


def test_repetition_penalty_by_hand():
    """Positive logits are divided, negative ones multiplied, so both lose; zero stays."""
    x, seen = np.array([2.0, -2.0, 0.0, 2.0, -2.0]), np.array([True, True, True, False, False])
    np.testing.assert_allclose(F.penalise_repetition(x, seen, 1.25), [1.6, -2.5, 0.0, 2.0, -2.0])
    np.testing.assert_allclose(F.penalise_repetition(x, seen, 0.5), [4.0, -1.0, 0.0, 2.0, -2.0])


@pytest.mark.slow
def test_seen_tokens_marks_what_occurs():
    np.testing.assert_array_equal(F.seen_tokens(TOKENS, 13), SEEN)
    np.testing.assert_array_equal(F.seen_tokens(TOKENS[1], 13), SEEN[1])
    np.testing.assert_array_equal(F.seen_tokens(TOKENS[None], 13), SEEN[None])
    padded = jnp.concatenate([np.full((3, 2), -1), TOKENS, np.full((3, 1), 13)], axis=1)
    np.testing.assert_array_equal(F.seen_tokens(padded, 13), SEEN)
    assert not np.any(F.seen_tokens(np.zeros((2, 0), int), 13))


BAD = [
    (lambda: F.scale_by_temperature(LOGITS, 0.0), "temperature must be positive and finite; got 0"),
    (lambda: F.scale_by_temperature(LOGITS, math.inf), "finite; got inf"),
    (lambda: F.keep_top_k(LOGITS, 0), "k must be from 1 to the vocabulary size 13; got 0"),
    (lambda: F.keep_top_k(LOGITS, 14), "k must be from 1 to the vocabulary size 13; got 14"),
    (lambda: F.keep_top_p(LOGITS, 0.0), r"p must be in \(0, 1\]; got 0.0"),
    (lambda: F.keep_top_p(LOGITS, 1.1), r"p must be in \(0, 1\]; got 1.1"),
    (lambda: F.keep_min_p(LOGITS, -0.5), r"p must be in \(0, 1\]; got -0.5"),
    (lambda: F.keep_min_p(LOGITS, math.nan), r"p must be in \(0, 1\]; got nan"),
    (lambda: F.penalise_repetition(LOGITS, SEEN, -1.0), "penalty must be positive .* got -1.0"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[message for _, message in BAD])
def test_sampling_names_the_bad_number(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "dtype, temperature", [("float16", 0.1), ("float16", 1e-3), ("float32", 1e-40)]
)
@pytest.mark.parametrize("offset", [0.0, 50_000.0, -50_000.0])
def test_small_temperatures_do_not_overflow(dtype, temperature, offset):
    logits = np.asarray([offset, offset + 64, offset - 64, -jnp.inf], dtype)
    scaled = F.scale_by_temperature(logits, temperature)
    assert scaled.dtype == dtype
    exact = np.asarray(logits, np.float64)
    exact = (exact - exact.max()) / temperature
    exact = np.exp(exact) / np.exp(exact).sum()
    np.testing.assert_allclose(jax.nn.softmax(scaled.astype(jnp.float32)), exact, atol=1e-6)


def test_rows_that_do_not_overflow_are_divided():
    logits = np.asarray([[1.0, 2.0, -jnp.inf], [60_000.0, 59_968.0, 0.0]], "float16")
    scaled = F.scale_by_temperature(logits, 0.5)
    np.testing.assert_array_equal(scaled[0], [2, 4, -np.inf])
    np.testing.assert_array_equal(scaled[1], [0, -64, -np.inf])
    nothing = np.full((2,), -jnp.inf, "float16")
    np.testing.assert_array_equal(F.scale_by_temperature(nothing, 0.5), nothing)


def test_a_large_penalty_forbids_nothing():
    logits = np.asarray([-60_000.0, 60_000.0, -jnp.inf], "float16")
    actual = F.penalise_repetition(logits, np.ones(3, bool), 4.0)
    np.testing.assert_array_equal(actual, np.asarray([-65504.0, 15_000.0, -jnp.inf], "float16"))
    assert np.isfinite(F.penalise_repetition(logits[1:2], np.ones(1, bool), 1e-6)).all()
