"""The causal convolution against NumPy in float64: documents, padding, and one call or several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.jitted_functions import F

B, C = 2, 5


def by_hand(x, kernel, bias, state, segments, valid):
    """One token at a time: the inputs of its document, padding left out."""
    K, (rows, T, _) = len(kernel), x.shape
    output, states = np.zeros(x.shape), []
    for b in range(rows):
        inputs = list(np.float64(state[b]))
        last = None
        for t in range(T):
            if not valid[b, t]:
                continue
            if last is not None and segments[b, t] != last:
                inputs = [np.zeros(C)] * (K - 1)
            last = segments[b, t]
            inputs.append(np.float64(x[b, t]))
            output[b, t] = bias + sum(kernel[j] * inputs[len(inputs) - K + j] for j in range(K))
        states.append(inputs[len(inputs) - (K - 1) :])
    return output, np.array(states)


@jax.jit
def with_and_without(x, kernel, bias, state, segments, valid):
    documents = dict(segments=segments)
    given = {}, documents, dict(valid=valid), dict(documents, valid=valid)
    return [F.causal_convolution(x, kernel, bias, initial_state=state, **more) for more in given]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), K=st.integers(2, 4), T=st.sampled_from([1, 2, 7]))
def test_outputs_and_state(seed, K, T):
    rng = np.random.default_rng(seed)
    x, kernel, bias, state = (
        np.float32(rng.normal(size=n)) for n in ((B, T, C), (K, C), (C,), (B, K - 1, C))
    )
    segments, valid = rng.integers(0, 2, (B, T)), rng.random((B, T)) < 0.7
    ones, everything = np.zeros((B, T), int), np.ones((B, T), bool)
    cases = [(ones, everything), (segments, everything), (ones, valid), (segments, valid)]
    results = with_and_without(x, kernel, bias, state, segments, valid)
    for actual, (documents, tokens) in zip(results, cases, strict=True):
        expected, last = by_hand(x, kernel, bias, state, documents, tokens)
        np.testing.assert_allclose(np.asarray(actual.output)[tokens], expected[tokens], atol=1e-5)
        np.testing.assert_array_equal(actual.state, np.float32(last))


def test_a_sequence_in_parts_is_the_whole():
    rng = np.random.default_rng(0)
    x, kernel = (np.float32(rng.normal(size=n)) for n in ((9, C), (4, C)))
    whole = F.causal_convolution(x, kernel)
    state, parts = None, []
    for part in (x[:1], x[1:3], x[3:]):
        result = F.causal_convolution(part, kernel, initial_state=state)
        parts.append(result.output)
        state = result.state
    np.testing.assert_allclose(np.concatenate(parts), whole.output, atol=1e-6)
    np.testing.assert_array_equal(state, whole.state)


def test_dilated_taps_are_taps_with_zeros_between():
    """In packed rows with padding, and in two calls."""
    rng = np.random.default_rng(0)
    x, kernel, state = (np.float32(rng.normal(size=n)) for n in ((B, 9, C), (3, C), (B, 4, C)))
    segments, valid = np.sort(rng.integers(0, 2, (B, 9))), rng.random((B, 9)) < 0.7
    wide = np.zeros((5, C), np.float32)
    wide[::2] = kernel
    given = dict(initial_state=state, segments=segments, valid=valid)
    actual = F.causal_convolution(x, kernel, dilation=2, **given)
    expected = F.causal_convolution(x, wide, **given)
    np.testing.assert_allclose(actual.output[valid], expected.output[valid], atol=1e-6)
    np.testing.assert_array_equal(actual.state, expected.state)
    first = F.causal_convolution(x[:, :4], kernel, dilation=2)
    rest = F.causal_convolution(x[:, 4:], kernel, dilation=2, initial_state=first.state)
    whole = F.causal_convolution(x, kernel, dilation=2).output
    parts = np.concatenate([first.output, rest.output], axis=1)
    np.testing.assert_allclose(parts, whole, atol=1e-6)


def test_gradients_are_those_of_the_sum():
    rng = np.random.default_rng(0)
    x, kernel, d_output = (np.float32(rng.normal(size=n)) for n in ((6, C), (3, C), (6, C)))
    segments = np.array([1, 1, 2, 2, 2, 2])

    def total(x, kernel):
        return jnp.sum(F.causal_convolution(x, kernel, segments=segments).output * d_output)

    d_x, d_kernel = jax.jit(jax.grad(total, argnums=(0, 1)))(x, kernel)
    expected_x, expected_kernel = np.zeros((6, C)), np.zeros((3, C))
    for t in range(6):
        for j in range(3):
            source = t - 2 + j
            if source >= 0 and segments[source] == segments[t]:
                expected_x[source] += kernel[j] * d_output[t]
                expected_kernel[j] += x[source] * d_output[t]
    np.testing.assert_allclose(d_x, expected_x, atol=1e-5)
    np.testing.assert_allclose(d_kernel, expected_kernel, atol=1e-5)


def test_bfloat16_stays_and_sums_are_float32():
    x = jnp.full((4, C), 1 / 3, jnp.bfloat16)
    result = F.causal_convolution(x, jnp.full((4, C), 1 / 3, jnp.bfloat16))
    assert result.output.dtype == result.state.dtype == jnp.bfloat16
    third = float(jnp.bfloat16(1 / 3))
    np.testing.assert_array_equal(result.output[-1, 0], jnp.bfloat16(4 * third**2))


def test_a_state_of_another_length():
    with pytest.raises(ValueError, match=r"\(K - 1\) \* dilation tokens, \(2, 5\); got \(3, 5\)"):
        F.causal_convolution(jnp.ones((4, C)), jnp.ones((3, C)), initial_state=jnp.ones((3, C)))
