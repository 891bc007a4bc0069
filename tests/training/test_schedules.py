import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.training.schedules import (
    Constant,
    Cosine,
    InverseSquareRoot,
    Linear,
    WarmupStableDecay,
    make_schedule,
)

KINDS = [
    Constant(peak=0.3, warmup_steps=5),
    Linear(peak=0.3, warmup_steps=5, final_fraction=0.2),
    Cosine(peak=0.3, warmup_steps=5, final_fraction=0.2),
    InverseSquareRoot(peak=0.3, warmup_steps=5),
    WarmupStableDecay(peak=0.3, warmup_steps=5, decay_fraction=0.5, final_fraction=0.2),
    WarmupStableDecay(peak=0.3, warmup_steps=5, decay_fraction=0.5, shape="linear"),
]
by_kind = pytest.mark.parametrize("schedule", KINDS, ids=lambda s: type(s).__name__)


def rates(schedule, total, steps):
    return np.asarray([make_schedule(schedule, total)(step) for step in steps])


@by_kind
def test_the_first_update_moves_and_the_last_of_the_warm_up_has_the_peak(schedule):
    np.testing.assert_allclose(
        rates(schedule, 23, range(5)), [0.06, 0.12, 0.18, 0.24, 0.3], rtol=1e-6
    )


@by_kind
def test_no_update_has_a_rate_of_zero_and_none_exceeds_the_peak(schedule):
    values = rates(schedule, 23, range(23))
    assert np.all(values > 0) and np.all(values <= np.float32(0.3))
    assert np.all(np.diff(values[4:]) <= 0)


@by_kind
def test_traced_and_batched_steps_give_what_single_steps_give(schedule):
    schedule = make_schedule(schedule, 23)
    steps = jnp.arange(30)
    traced = jax.jit(jax.vmap(schedule))(steps)
    np.testing.assert_allclose(traced, [schedule(int(s)) for s in steps], rtol=1e-6)
    assert traced.dtype == jnp.float32 and schedule(3).dtype == jnp.float32


def test_constant_without_warm_up_is_the_peak_from_the_first_step():
    np.testing.assert_array_equal(
        rates(Constant(peak=0.5), 3, [0, 1, 2, 1_000_000]), np.full(4, 0.5, np.float32)
    )


def test_linear_falls_by_equal_amounts_to_its_final_value():
    values = rates(Linear(peak=1.0, warmup_steps=2, final_fraction=0.5), 6, range(1, 9))
    np.testing.assert_allclose(values, [1, 1, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5], rtol=1e-6)


def test_cosine_is_halfway_in_the_middle_and_symmetric_about_it():
    values = rates(Cosine(peak=2.0, warmup_steps=4, final_fraction=0.1), 24, range(4, 26))
    expected = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * min(i / 20, 1))) / 2) for i in range(22)]
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    np.testing.assert_allclose(values[10], 2 * 0.55, rtol=1e-6)
    np.testing.assert_allclose(values[:21] + values[20::-1], 2.2, rtol=1e-5)


def test_inverse_square_root_is_the_papers_rule_at_the_papers_numbers():
    rule = InverseSquareRoot(peak=(512 * 4000) ** -0.5, warmup_steps=4000)
    updates = [1, 2000, 4000, 16_000, 100_000]
    paper = [512**-0.5 * min(n**-0.5, n * 4000**-1.5) for n in updates]
    values = rates(rule, 100_000, [n - 1 for n in updates])
    np.testing.assert_allclose(values, paper, rtol=1e-6)
    np.testing.assert_allclose(values[2], 6.99e-4, rtol=1e-3)
    np.testing.assert_allclose(values[3], values[2] / 2, rtol=1e-6)


@pytest.mark.parametrize(
    "shape, expected",
    [
        ("linear", [1, 1, 0.8, 0.6, 0.4, 0.2, 0]),
        ("sqrt", [1, 1, *(1 - math.sqrt(i / 5) for i in (1, 2, 3, 4)), 0]),
    ],
)
def test_warmup_stable_decay_is_flat_until_its_fall(shape, expected):
    schedule = WarmupStableDecay(peak=1.0, warmup_steps=3, decay_fraction=0.25, shape=shape)
    values = rates(schedule, 20, range(2, 15))
    np.testing.assert_array_equal(values, np.ones(13, np.float32))
    np.testing.assert_allclose(rates(schedule, 20, range(14, 21)), expected, rtol=1e-6, atol=1e-7)


@given(st.integers(10, 100), st.integers(0, 70))
@settings(max_examples=10, deadline=None)
def test_a_longer_run_is_the_same_before_the_fall(total, step):
    schedule = WarmupStableDecay(peak=0.1, warmup_steps=5, decay_fraction=0.3)
    step = min(step, total - schedule.decay_steps(total))
    short, long = (make_schedule(schedule, n)(step) for n in (total, 10 * total))
    assert short == long


def test_late_steps_are_exact():
    late = InverseSquareRoot(peak=1.0, warmup_steps=1)
    np.testing.assert_allclose(rates(late, 2**31 - 1, [2**30]), [2.0**-15], rtol=1e-6)


@by_kind
def test_a_warm_up_as_long_as_the_run_is_only_a_warm_up(schedule):
    if isinstance(schedule, WarmupStableDecay):
        schedule = WarmupStableDecay(peak=0.3, warmup_steps=5, decay_fraction=0.0)
    np.testing.assert_allclose(rates(schedule, 5, range(5)), 0.06 * np.arange(1, 6), rtol=1e-6)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Constant(peak=0.0), "peak must be positive; got 0.0"),
        (lambda: Cosine(peak=-1.0), "peak must be positive; got -1.0"),
        (lambda: Linear(peak=float("nan")), "Linear.peak must be a finite float32 number; got nan"),
        (lambda: Linear(peak=1.0, warmup_steps=-3), "warmup_steps must be at least 0; got -3"),
        (lambda: Cosine(peak=1.0, final_fraction=1.5), "final_fraction must be .*; got 1.5"),
        (lambda: Linear(peak=1.0, final_fraction=-0.5), "final_fraction must be .*; got -0.5"),
        (
            lambda: WarmupStableDecay(peak=1.0, decay_fraction=2.0),
            r"decay_fraction must be in \[0, 1\]; got 2.0",
        ),
        (
            lambda: WarmupStableDecay(peak=1.0, final_fraction=2.0),
            r"final_fraction must be in \[0, 1\]; got 2.0",
        ),
        (
            lambda: InverseSquareRoot(peak=1.0, warmup_steps=0),
            "warmup_steps must be positive; got 0",
        ),
        (lambda: make_schedule(Constant(peak=1.0), 0), "total_steps must be at least 1; got 0"),
        (
            lambda: make_schedule(Cosine(peak=1.0, warmup_steps=11), 10),
            "warmup_steps=11 and 0 steps of decay do not fit into total_steps=10",
        ),
        (
            lambda: make_schedule(
                WarmupStableDecay(peak=1.0, warmup_steps=6, decay_fraction=0.5), 10
            ),
            "warmup_steps=6 and 5 steps of decay do not fit into total_steps=10",
        ),
    ],
)
def test_impossible_schedules_are_refused_with_their_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()
