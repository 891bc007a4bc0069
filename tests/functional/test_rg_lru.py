"""The real-gated linear recurrent unit against its recurrence in NumPy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer import functional
from tests.functional.jitted_functions import F

ROWS, T, C = 6, 37, 5


def loop(x, *, first, segments=None, valid=None):
    """One token at a time, in float64: the outputs, and the states after the last."""
    x = {name: np.float64(array) for name, array in x.items()}
    rows, length = x["x"].shape[:2]
    valid = np.ones((rows, length), bool) if valid is None else valid
    segments = np.zeros((rows, length)) if segments is None else segments
    state, document = x["initial_state"].copy(), np.full(rows, np.nan)
    output = np.zeros(x["x"].shape)
    for t in range(length):
        real = valid[:, t]
        starts = real & ~np.isnan(document) & (segments[:, t] != document)
        document = np.where(real, segments[:, t], document)
        state[starts] = 0
        a = np.exp(-x["rate"] * x["decay_gate"][:, t])
        root = np.where(first[:, t, None], 1, np.sqrt(1 - a**2))
        new = a * state + root * x["input_gate"][:, t] * x["x"][:, t]
        state = np.where(real[:, None], new, state)
        output[:, t] = state
    return output, state


def draw(seed=0, *, rows=ROWS, length=T):
    rng = np.random.default_rng(seed)

    def gates():
        return np.float32(rng.random((rows, length, C)))

    return dict(
        x=np.float32(rng.normal(size=(rows, length, C))),
        input_gate=gates(),
        decay_gate=gates(),
        rate=np.float32([1e-3, 0.1, 1, 8, 100]),
        initial_state=np.float32(rng.normal(size=(rows, C))),
    )


def draw_documents(seed=0, *, rows=ROWS, length=T):
    """Documents that begin with a token of their own, and padding."""
    rng = np.random.default_rng(seed)
    first, valid = rng.random((rows, length)) < 0.1, rng.random((rows, length)) < 0.8
    return dict(first=first, segments=np.cumsum(first, axis=1), valid=valid | first)


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 256])
def test_chunks_of_any_size_are_the_loop(chunk_size):
    x, documents = draw(), draw_documents()
    expected, state = loop(x, **documents)
    actual = F.rg_lru(**x, **documents, chunk_size=chunk_size)
    real = documents["valid"][..., None]
    np.testing.assert_allclose(np.where(real, actual.output, 0), expected * real, atol=2e-6)
    np.testing.assert_allclose(actual.state, state, atol=2e-6)


@pytest.mark.slow
def test_gradients_are_the_loops():
    """Along a random direction of each input, by central differences of the loop in float64."""
    x, documents, weights = draw(1), draw_documents(1), draw(3)
    real, rng = documents["valid"][..., None], np.random.default_rng(2)

    @jax.jit
    def gradients(x):
        def total(x):
            result = functional.rg_lru(**x, **documents, chunk_size=8)
            output = jnp.sum(jnp.where(real, result.output, 0) * weights["x"])
            return output + jnp.sum(result.state * weights["initial_state"])

        return jax.grad(total)(x)

    def total(x):
        output, state = loop(x, **documents)
        return np.sum(output * real * weights["x"]) + np.sum(state * weights["initial_state"])

    x64 = {name: np.float64(array) for name, array in x.items()}
    for name, gradient in gradients(x).items():
        direction = rng.normal(size=gradient.shape) * np.abs(x64[name])
        step = 1e-6 * direction
        expected = total(x64 | {name: x64[name] + step}) - total(x64 | {name: x64[name] - step})
        actual = np.sum(np.float64(gradient) * direction)
        bound = np.sqrt(np.sum(np.float64(gradient * direction) ** 2))
        np.testing.assert_allclose(actual / bound, expected / 2e-6 / bound, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_without_decay_nothing_enters_and_gradients_are_numbers():
    """A gate of 0 keeps the state, as the limit of the recurrence does."""
    x = draw() | dict(decay_gate=np.zeros((ROWS, T, C), np.float32))
    actual = F.rg_lru(**x)
    np.testing.assert_array_equal(actual.output, np.repeat(x["initial_state"][:, None], T, axis=1))
    gradients = jax.jit(jax.grad(lambda x: functional.rg_lru(**x).output.sum()))(x)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.slow
def test_the_variance_of_the_state_is_that_of_the_inputs():
    """After a long text of independent inputs, whatever the decay."""
    rng = np.random.default_rng(0)
    x, one = np.float32(rng.normal(size=(4000, 200, 1))), np.ones((4000, 200, 1), np.float32)
    for rate in (0.05, 0.5, 3.0):
        states = F.rg_lru(x, one, one, np.float32([rate])).state
        assert 0.93 < np.var(states) < 1.07


@pytest.mark.slow
def test_devices_that_share_the_sequence_hand_states_along():
    x, documents = draw(rows=2, length=32), draw_documents(rows=2, length=32)
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,), devices=jax.devices()[:4])
    order = functional.zigzag_order(32, 4)
    whole = {name: x[name] for name in ("rate", "initial_state")}
    tokens = {name: array for name, array in (x | documents).items() if name not in whole}

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "context"), P()), out_specs=P("context"))
    def run(tokens, whole):
        result = functional.rg_lru(**tokens, **whole, chunk_size=3, axis_name="context")
        return jnp.swapaxes(result.output, 0, 1), result.state[None]

    output, states = run({name: array[:, order] for name, array in tokens.items()}, whole)
    output = jnp.swapaxes(output, 0, 1)[:, np.argsort(order)]
    expected, state = loop(x, **documents)
    real = documents["valid"][..., None]
    np.testing.assert_allclose(np.where(real, output, 0), expected * real, atol=2e-6)
    for last in states:
        np.testing.assert_allclose(last, state, atol=2e-6)


@pytest.mark.slow
def test_a_sequence_in_parts_is_the_whole():
    x, first = draw(), np.arange(T)[None] == 0
    whole = F.rg_lru(**x, first=first)
    rate, state, parts = x.pop("rate"), x.pop("initial_state"), []
    for part in (slice(0, 1), slice(1, 20), slice(20, T)):
        tokens = {name: array[:, part] for name, array in x.items()}
        output, state = F.rg_lru(**tokens, rate=rate, first=first[:, part], initial_state=state)
        parts.append(output)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole.output, atol=2e-6)
    np.testing.assert_allclose(state, whole.state, atol=2e-6)


def test_bfloat16_in_and_out_float32_inside():
    halves = {name: jnp.asarray(array, jnp.bfloat16) for name, array in draw(rows=1).items()}
    actual = F.rg_lru(**halves)
    assert actual.output.dtype == jnp.bfloat16 and actual.state.dtype == np.float32
    expected = F.rg_lru(**{name: np.float32(array) for name, array in halves.items()})
    np.testing.assert_array_equal(actual.state, expected.state)


def test_wrong_chunks():
    with pytest.raises(ValueError, match="chunk_size must be at least 1; got 0"):
        functional.rg_lru(**draw(rows=1), chunk_size=0)
