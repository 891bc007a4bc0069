"""The selective scan against its recurrence in NumPy in float64, in chunks of any size."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer import functional
from tests.functional.jitted_functions import F

ROWS, T, C, M = 12, 37, 5, 3
CHUNKS = (1, 2, 5, 16, T, 256)  # in most the last chunk or the last block is not whole


def loop(x, *, segments=None, valid=None):
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
        decayed = np.exp(-x["step"][:, t, :, None] * x["rate"]) * state
        value = x["step"][:, t] * x["x"][:, t]
        written = value[..., None] * x["write"][:, t, None]
        state = np.where(real[:, None, None], decayed + written, state)
        output[:, t] = np.einsum("bcm,bm->bc", state, x["read"][:, t])
    return output, state


def draw(seed=0, *, rows=ROWS, length=T):
    """Steps of a row near 0, in between, and so long that nothing of the state is left."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return np.float32(rng.normal(size=(rows, *shape)))

    scale = np.resize([1e-4, 1.0, 30.0, 1e4], rows)[:, None, None]
    return dict(
        x=normal(length, C),
        step=np.float32(scale * rng.random((rows, length, C))),
        rate=np.float32(np.exp(rng.normal(size=(C, M)))),
        write=normal(length, M),
        read=normal(length, M),
        initial_state=normal(C, M),
    )


def draw_documents(seed=0, *, rows=ROWS, length=T):
    rng = np.random.default_rng(seed)
    starts, valid = rng.random((rows, length)) < 0.1, rng.random((rows, length)) < 0.8
    return dict(segments=np.cumsum(starts, axis=1), valid=valid)


def assert_close(actual, expected):
    """Relative to the largest number of a row, since long steps write large values."""
    axes = tuple(range(1, expected.ndim))
    scale = 1 + np.abs(expected).max(axis=axes, keepdims=True, initial=0)
    np.testing.assert_allclose(actual / scale, expected / scale, atol=2e-6)


@pytest.mark.slow
def test_chunks_of_any_size_are_the_loop():
    """Packed documents, padding, and a state that goes on."""
    x, documents = draw(), draw_documents()
    expected, state = loop(x, **documents)
    real = documents["valid"][..., None]
    for size in CHUNKS:
        actual = F.selective_scan(**x, **documents, chunk_size=size)
        assert_close(np.where(real, actual.output, 0), np.where(real, expected, 0))
        assert_close(actual.state, state)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 16])
def test_gradients_are_the_loops(chunk_size):
    """Along a random direction of each input, by central differences of the loop in float64."""
    x, documents = draw(1), draw_documents(1)
    x["step"] = x["step"] / (1 + 0.05 * x["step"])  # at most 20
    real = documents["valid"][..., None]
    rng, weights = np.random.default_rng(2), draw(3)

    @jax.jit
    def gradients(x):
        def total(x):
            result = functional.selective_scan(**x, **documents, chunk_size=chunk_size)
            output = jnp.sum(jnp.where(real, result.output, 0) * weights["x"])
            return output + jnp.sum(result.state * weights["initial_state"])

        return jax.grad(total)(x)

    def total(x):
        output, state = loop(x, **documents)
        total = np.sum(np.where(real, output, 0) * weights["x"])
        return total + np.sum(state * weights["initial_state"])

    x64 = {name: np.float64(array) for name, array in x.items()}
    for name, gradient in gradients(x).items():
        direction = rng.normal(size=gradient.shape) * np.minimum(1, np.abs(x64[name]))
        step = 1e-5 * direction
        expected = total(x64 | {name: x64[name] + step}) - total(x64 | {name: x64[name] - step})
        actual = np.sum(np.float64(gradient) * direction)
        bound = np.sqrt(np.sum(gradient**2) * np.sum(direction**2))
        np.testing.assert_allclose(actual / bound, expected / 2e-5 / bound, atol=1e-5, err_msg=name)


def test_mamba_by_its_second_algorithm():
    """A, B, C and Delta of the paper, a feature at a time, with states of its letters."""
    x = {name: np.float64(array[0]) for name, array in draw(rows=2).items() if name != "rate"}
    A = -np.float64(draw(rows=2)["rate"])
    expected = np.zeros((T, C))
    for c in range(C):
        h = np.zeros(M)
        for t in range(T):
            A_bar, B_bar = np.exp(x["step"][t, c] * A[c]), x["step"][t, c] * x["write"][t]
            h = A_bar * h + B_bar * x["x"][t, c]
            expected[t, c] = x["read"][t] @ h
    tokens = {name: np.float32(array) for name, array in x.items() if name != "initial_state"}
    actual = F.selective_scan(**tokens, rate=np.float32(-A))
    np.testing.assert_allclose(actual.output, expected, atol=1e-6)


def by_four_devices(x, documents):
    """Tokens in zigzag order over four devices, as of the whole arrays; a state per device."""
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,), devices=jax.devices()[:4])
    order = functional.zigzag_order(x["x"].shape[1], 4)
    whole = {name: x[name] for name in ("rate", "initial_state")}
    tokens = {name: array for name, array in (x | documents).items() if name not in whole}

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "context"), P()), out_specs=P("context"))
    def run(tokens, whole):
        result = functional.selective_scan(**tokens, **whole, chunk_size=3, axis_name="context")
        return jnp.swapaxes(result.output, 0, 1), result.state[None]

    output, states = run({name: array[:, order] for name, array in tokens.items()}, whole)
    return jnp.swapaxes(output, 0, 1)[:, np.argsort(order)], states


@pytest.mark.slow
def test_devices_that_share_the_sequence_hand_states_along():
    """The outputs, the last state and the gradients are those of one device."""
    x, documents = draw(rows=2, length=32), draw_documents(rows=2, length=32)
    documents["segments"][1] = 0
    documents["segments"][1, 4:12], documents["valid"][1, 4:12] = 9, False  # two parts of padding
    real, weights = documents["valid"][..., None], draw(3, rows=2, length=32)

    def whole(x):
        result = functional.selective_scan(**x, **documents)
        return result.output, result.state[None]

    def outputs_and_gradients(function):
        def total(x):
            output, states = function(x)
            output = jnp.where(real, output, 0)
            loss = jnp.sum(output * weights["x"])
            return loss + jnp.sum(states[-1] * weights["initial_state"]), (output, states)

        return jax.jit(jax.grad(total, has_aux=True))(x)

    gradients, (output, states) = outputs_and_gradients(lambda x: by_four_devices(x, documents))
    expected_gradients, (expected, expected_states) = outputs_and_gradients(whole)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    for state in states:
        np.testing.assert_allclose(state, expected_states[0], atol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected_gradients[name], atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_sequence_in_parts_is_the_whole():
    x = draw(rows=4)
    whole = F.selective_scan(**x, chunk_size=8)
    rate, state, parts = x.pop("rate"), x.pop("initial_state"), []
    for part in (slice(0, 1), slice(1, 20), slice(20, T)):
        tokens = {name: array[:, part] for name, array in x.items()}
        output, state = F.selective_scan(**tokens, rate=rate, initial_state=state)
        parts.append(output)
    assert_close(np.concatenate(parts, axis=1), np.asarray(whole.output))
    assert_close(state, np.asarray(whole.state))


def test_one_number_of_state_and_a_constant_step_is_decay_attention():
    x, step, rate = draw(rows=2), np.ones((2, T, C), np.float32), np.float32([0.1, 1, 2, 3, 9])
    ones = np.ones((2, T, 1), np.float32)
    actual = F.selective_scan(x["x"], step, rate[:, None], ones, ones)
    expected = F.decay_attention(x["x"][..., None], np.exp(-rate))
    np.testing.assert_allclose(actual.output, expected[..., 0], atol=2e-6)


@pytest.mark.slow
def test_memory_is_that_of_a_chunk():
    """The gradient keeps less than a third of what the states of all tokens would be."""
    length = 16_384
    shapes = dict(x=(length, 64), step=(length, 64), rate=(64, 16))
    shapes |= dict(write=(length, 16), read=(length, 16))
    x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    gradient = jax.jit(jax.grad(lambda x: functional.selective_scan(**x).output.sum()))
    memory = gradient.lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * length * 64 * 16 / 3


def test_no_tokens_leave_the_state_as_it_is():
    x = draw(rows=1, length=0)
    actual = F.selective_scan(**x)
    assert actual.output.shape == (1, 0, C)
    np.testing.assert_array_equal(actual.state, x["initial_state"])


@pytest.mark.slow
def test_bfloat16_in_and_out_float32_inside():
    x = draw(rows=1)
    halves = {name: jnp.asarray(array, jnp.bfloat16) for name, array in x.items()}
    actual = F.selective_scan(**halves)
    assert actual.output.dtype == jnp.bfloat16 and actual.state.dtype == np.float32
    expected = F.selective_scan(**{name: np.float32(array) for name, array in halves.items()})
    np.testing.assert_array_equal(actual.state, expected.state)


def test_wrong_chunks():
    with pytest.raises(ValueError, match="chunk_size must be at least 1; got 0"):
        functional.selective_scan(**draw(rows=1), chunk_size=0)
