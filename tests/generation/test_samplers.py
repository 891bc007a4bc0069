import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.generation import Greedy, Sample
from jaxformer.generation.samplers import filter_logits, sample_token

LOGITS = np.log(np.asarray([0.1, 0.5, 0.15, 0.25])).astype(np.float32)
NONE_SEEN = np.zeros(4, bool)


def probabilities(sampler, logits=LOGITS, seen=NONE_SEEN):
    """What `Sample` draws from, as probabilities."""
    function = jax.jit(lambda x, s: jax.nn.softmax(filter_logits(sampler, x, s), axis=-1))
    return function(jnp.asarray(logits), jnp.asarray(seen))


def test_greedy_is_the_argmax_and_ignores_key_and_text(normal):
    logits = normal(3, 7)
    for seed in range(2):
        token = sample_token(Greedy(), logits, logits > 0, jax.random.key(seed))
        np.testing.assert_array_equal(token, np.argmax(logits, axis=-1))


@pytest.mark.parametrize(
    "sampler, expected",
    [
        (Sample(), [0.1, 0.5, 0.15, 0.25]),
        (Sample(temperature=0.5), np.square([0.1, 0.5, 0.15, 0.25]) / 0.345),
        (Sample(top_k=2), [0, 2 / 3, 0, 1 / 3]),
        (Sample(top_k=9), [0.1, 0.5, 0.15, 0.25]),
        (Sample(top_p=0.8), [0, 5 / 9, 1.5 / 9, 2.5 / 9]),
        (Sample(top_p=0.4), [0, 1, 0, 0]),
        (Sample(min_p=0.4), [0, 2 / 3, 0, 1 / 3]),
        # Temperature comes before the nucleus: sharpened to 0.72 and 0.18, two tokens hold 0.8.
        (Sample(temperature=0.5, top_p=0.8), [0, 0.8, 0, 0.2]),
        # Top-k comes before the nucleus: of the two kept, the first holds two thirds.
        (Sample(top_k=2, top_p=0.6), [0, 1, 0, 0]),
    ],
)
def test_distribution_known_by_hand(sampler, expected):
    np.testing.assert_allclose(probabilities(sampler), expected, atol=1e-6)


def test_repetition_penalty_acts_on_raw_logits_of_seen_tokens():
    """Positive logits are divided, negative ones multiplied, and only then comes temperature."""
    logits, seen = np.asarray([2.0, -1.0, 2.0, -1.0], np.float32), np.arange(4) < 2
    sampler = Sample(repetition_penalty=1.6, temperature=0.5)
    expected = np.exp(2 * np.asarray([1.25, -1.6, 2.0, -1.0]))
    np.testing.assert_allclose(
        probabilities(sampler, logits, seen), expected / expected.sum(), rtol=1e-5
    )


def test_draws_follow_the_distribution():
    """20,000 draws: each frequency within five standard errors, at most 0.018."""
    sampler = Sample(temperature=0.8, top_k=3)
    logits = np.broadcast_to(LOGITS, (20_000, 4))
    draw = jax.jit(functools.partial(sample_token, sampler))
    tokens = draw(logits, np.zeros((20_000, 4), bool), jax.random.key(0))
    shares = np.bincount(tokens, minlength=4) / 20_000
    np.testing.assert_allclose(shares, probabilities(sampler), atol=0.018)
    assert shares[0] == 0


@pytest.mark.slow
def test_low_temperature_and_one_candidate_are_greedy(normal):
    logits, seen = normal(2, 3, 7), jnp.zeros((2, 3, 7), bool)
    best = jnp.argmax(logits, axis=-1)
    for sampler in (
        Sample(temperature=1e-4),
        Sample(top_k=1),
        Sample(top_p=1e-6),
        Sample(min_p=1.0),
    ):
        np.testing.assert_array_equal(sample_token(sampler, logits, seen, jax.random.key(1)), best)


@pytest.mark.slow
def test_rows_are_filtered_alone(normal):
    logits = normal(5, 7)
    sampler = Sample(top_k=4, top_p=0.7, min_p=0.05, repetition_penalty=1.3)
    seen = logits > 0.5
    batch = filter_logits(sampler, logits, seen)
    for row in range(5):
        np.testing.assert_allclose(filter_logits(sampler, logits[row], seen[row]), batch[row])


def test_keeps_dtype_and_masked_logits():
    logits = np.asarray([-np.inf, 1.0, 2.0], jnp.bfloat16)
    sampler = Sample(temperature=0.7, top_p=0.99, repetition_penalty=1.1)
    keep = jax.jit(functools.partial(filter_logits, sampler))
    kept_logits = np.asarray(keep(logits, np.asarray([True, True, False])))
    assert kept_logits.dtype == jnp.bfloat16
    assert kept_logits[0] == -np.inf and not np.isnan(kept_logits).any()


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(temperature=0.0), "temperature must be positive; got 0.0. .* Greedy"),
        (dict(temperature=-1.0), "temperature must be positive; got -1.0"),
        (dict(temperature=float("nan")), "temperature .* got nan"),
        (dict(top_k=0), "top_k must be positive; got 0"),
        (dict(top_k=2.5), "top_k must be an integer or None; got 2.5"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\]; got 0.0"),
        (dict(top_p=1.5), "top_p .* got 1.5"),
        (dict(min_p=-0.1), r"min_p must be in \(0, 1\]; got -0.1"),
        (dict(repetition_penalty=0.0), "repetition_penalty must be positive; got 0.0"),
    ],
)
def test_settings_without_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sample(**fields)


def test_samplers_are_values():
    assert hash(Sample(top_k=3)) == hash(Sample(top_k=3))
    assert replace(Sample(top_k=3), top_k=None) == Sample()
