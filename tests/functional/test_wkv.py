"""WKV against its sums in NumPy in float64."""

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
WHOLE = "rate", "bonus", "initial_state"  # not by token


def loop(x, *, segments=None, valid=None):
    """One token at a time, in float64: the outputs, and both sums after the last."""
    x = {name: np.float64(array) for name, array in x.items()}
    rows, length = x["key"].shape[:2]
    valid = np.ones((rows, length), bool) if valid is None else valid
    segments = np.zeros((rows, length)) if segments is None else segments
    numerator, denominator = sums(x["initial_state"])
    document, output = np.full(rows, np.nan), np.zeros(x["key"].shape)
    for t in range(length):
        real, value = valid[:, t], x["value"][:, t]
        starts = real & ~np.isnan(document) & (segments[:, t] != document)
        document = np.where(real, segments[:, t], document)
        numerator, denominator = (np.where(starts[:, None], 0, y) for y in (numerator, denominator))
        own, weight = np.exp(x["key"][:, t] + x["bonus"]), np.exp(x["key"][:, t])
        output[:, t] = (numerator + own * value) / (denominator + own)
        decay, kept = np.exp(-x["rate"]), real[:, None]
        numerator = np.where(kept, decay * numerator + weight * value, numerator)
        denominator = np.where(kept, decay * denominator + weight, denominator)
    return output, np.stack([numerator, denominator])


def sums(state):
    """Both sums of a state."""
    factor = np.exp(np.float64(state[..., 2]))
    return np.stack([state[..., 0] * factor, state[..., 1] * factor])


def draw(seed=0, *, rows=ROWS, length=T):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return np.float32(rng.normal(size=shape))

    return dict(
        key=2 * normal(rows, length, C),
        value=normal(rows, length, C),
        rate=np.float32([0, 0.1, 1, 8, 100]),
        bonus=normal(C),
        initial_state=np.stack(
            [normal(rows, C), np.abs(normal(rows, C)), normal(rows, C)], axis=-1
        ),
    )


def draw_documents(seed=0, *, rows=ROWS, length=T):
    """Documents that begin with a token of their own, and padding."""
    rng = np.random.default_rng(seed)
    first, valid = rng.random((rows, length)) < 0.1, rng.random((rows, length)) < 0.8
    return dict(segments=np.cumsum(first, axis=1), valid=valid | first)


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 256])
def test_chunks_of_any_size_are_the_loop(chunk_size):
    x, documents = draw(), draw_documents()
    expected, last = loop(x, **documents)
    actual = F.wkv(**x, **documents, chunk_size=chunk_size)
    real = documents["valid"][..., None]
    np.testing.assert_allclose(np.where(real, actual.output, 0), expected * real, atol=2e-6)
    np.testing.assert_allclose(sums(actual.state), last, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_the_loops():
    """Along a random direction of each input, by central differences of the loop in float64."""
    x, documents, weights = draw(1), draw_documents(1), draw(3)["value"]
    real, rng = documents["valid"][..., None], np.random.default_rng(2)

    @jax.jit
    def gradients(x):
        def total(x):
            result = functional.wkv(**x, **documents, chunk_size=8)
            state = result.state[..., :2] * jnp.exp(result.state[..., 2:])
            output = jnp.where(real, result.output, 0)
            return jnp.sum(output * weights) + jnp.sum(jnp.log1p(state[..., 1]))

        return jax.grad(total)(x)

    def total(x):
        output, (_, denominator) = loop(x, **documents)
        return np.sum(output * real * weights) + np.sum(np.log1p(denominator))

    x64 = {name: np.float64(array) for name, array in x.items()}
    for name, gradient in gradients(x).items():
        direction = rng.normal(size=gradient.shape) * np.minimum(1, np.abs(x64[name]))
        step = 1e-6 * direction
        expected = total(x64 | {name: x64[name] + step}) - total(x64 | {name: x64[name] - step})
        actual = np.sum(np.float64(gradient) * direction)
        bound = np.sqrt(np.sum(np.float64(gradient * direction) ** 2))
        np.testing.assert_allclose(actual / bound, expected / 2e-6 / bound, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_keys_beyond_any_float_weigh_as_their_differences():
    """exp of these keys overflows float32 and float64; all numbers have few bits."""
    x = draw() | {"rate": np.float32([0, 0.125, 1, 8, 128]), "initial_state": None}
    x |= {name: np.round(64 * x[name]) / 64 for name in ("key", "bonus")}
    shift = np.float32([-2048, 0, 2048, 8192, -8192])
    moved, plain = F.wkv(**x | {"key": x["key"] + shift}), F.wkv(**x)
    np.testing.assert_allclose(moved.output, plain.output, atol=2e-6)
    same = dict(rate=np.zeros(1), bonus=np.zeros(1), value=np.float32([[1], [2], [6]]))
    equal = F.wkv(np.full((3, 1), 1e6, np.float32), **same).output
    np.testing.assert_allclose(equal[:, 0], [1, 1.5, 3], atol=1e-6)


def test_without_keys_and_decay_it_is_the_mean():
    value = draw()["value"]
    zero = np.zeros(C, np.float32)
    means = np.cumsum(np.float64(value), axis=1) / np.arange(1, T + 1)[:, None]
    actual = F.wkv(np.zeros_like(value), value, zero, zero).output
    np.testing.assert_allclose(actual, means, atol=1e-6)


@pytest.mark.slow
def test_devices_that_share_the_sequence_hand_states_along():
    """The outputs, the last state and the gradients are those of one device."""
    x, documents = draw(rows=2, length=32), draw_documents(rows=2, length=32)
    documents["segments"][1] = 0
    documents["segments"][1, 4:12], documents["valid"][1, 4:12] = 9, False  # two parts of padding
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,), devices=jax.devices()[:4])
    order, real = functional.zigzag_order(32, 4), documents["valid"][..., None]

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "context"), P()), out_specs=P("context"))
    def run(tokens, whole):
        result = functional.wkv(**tokens, **whole, chunk_size=3, axis_name="context")
        return jnp.swapaxes(result.output, 0, 1), result.state[None]

    def shared(x):
        tokens = {name: y[:, order] for name, y in (x | documents).items() if name not in WHOLE}
        output, states = run(tokens, {name: x[name] for name in WHOLE})
        return jnp.swapaxes(output, 0, 1)[:, np.argsort(order)], states

    def alone(x):
        result = functional.wkv(**x, **documents)
        return result.output, result.state[None]

    def outputs_and_gradients(function):
        def total(x):
            output, states = function(x)
            output = jnp.where(real, output, 0)
            return jnp.sum(output**2) + jnp.sum(states[-1, ..., 1] ** 2), (output, states)

        return jax.jit(jax.grad(total, has_aux=True))(x)

    gradients, (output, states) = outputs_and_gradients(shared)
    expected_gradients, (expected, expected_states) = outputs_and_gradients(alone)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    for state in states:
        np.testing.assert_allclose(state, expected_states[0], atol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected_gradients[name], atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_sequence_in_parts_is_the_whole():
    x = draw()
    whole = F.wkv(**x)
    more = {name: x.pop(name) for name in ("rate", "bonus")}
    state, parts = x.pop("initial_state"), []
    for part in (slice(0, 1), slice(1, 20), slice(20, T)):
        tokens = {name: array[:, part] for name, array in x.items()}
        output, state = F.wkv(**tokens, **more, initial_state=state)
        parts.append(output)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole.output, atol=2e-6)
    np.testing.assert_allclose(state, whole.state, atol=1e-5)


def test_bfloat16_in_and_out_float32_inside():
    halves = {name: jnp.asarray(array, jnp.bfloat16) for name, array in draw(rows=1).items()}
    actual = F.wkv(**halves)
    assert actual.output.dtype == jnp.bfloat16 and actual.state.dtype == np.float32
    expected = F.wkv(**{name: np.float32(array) for name, array in halves.items()})
    np.testing.assert_array_equal(actual.state, expected.state)


def test_wrong_chunks():
    with pytest.raises(ValueError, match="chunk_size must be at least 1; got 0"):
        functional.wkv(**draw(rows=1), chunk_size=0)
