import jax
import numpy as np
import pytest

from jaxformer import functional
from tests.functional.jitted_functions import F

T, S, N, K, H, FACTOR = 3, 5, 12, 4, 7, 0.37


@pytest.fixture
def arrays(normal):
    return normal(2, T, N, H), normal(2, S, K, H), normal(2, S, K, H)


def by_hand(query, key, value, factor):
    """One query of one pair at a time, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros((2, T, N // 2, 2 * H))
    for b, t, k, g in np.ndindex(2, T, K // 2, N // K):
        both = np.concatenate([value[b, :, 2 * k], value[b, :, 2 * k + 1]], axis=-1)
        for sign, of_pair in ((1.0, 0), (-factor, 1)):
            head = 2 * k + of_pair
            weights = np.exp(key[b, :, head] @ query[b, t, head * (N // K) + g] / np.sqrt(H))
            out[b, t, k * (N // K) + g] += sign * weights @ both / weights.sum()
    return out


def test_it_is_the_difference_of_two_softmaxes(arrays):
    expected = by_hand(*arrays, FACTOR)
    np.testing.assert_allclose(F.differential_attention(*arrays, FACTOR), expected, atol=2e-6)


def test_one_factor_of_equal_heads_leaves_nothing(arrays):
    query, key, value = arrays
    query = np.repeat(np.asarray(query)[..., :3, :], 4, axis=-2).reshape(2, T, K, 3, H)
    query = np.broadcast_to(query[..., :1, :, :], query.shape).reshape(2, T, N, H)
    key = np.broadcast_to(np.asarray(key)[..., :1, :], key.shape)
    left = F.differential_attention(query, key, value, 1.0)
    np.testing.assert_allclose(left, 0.0, atol=1e-6)


def test_gradient_of_the_factor_is_the_second_attention(arrays):
    def total(factor):
        return functional.differential_attention(*arrays, factor).sum()

    slope = jax.jit(jax.grad(total))(np.float32(FACTOR))
    expected = by_hand(*arrays, 1.0).sum() - by_hand(*arrays, 0.0).sum()
    np.testing.assert_allclose(slope, expected, rtol=1e-4)


def test_the_factor_is_the_papers(normal):
    queries, keys = normal(2, H), normal(2, H)
    for layer in (0, 3):
        initial = 0.8 - 0.6 * np.exp(-0.3 * layer)
        np.testing.assert_allclose(F.initial_differential_factor(layer), initial, rtol=1e-6)
        first, second = np.exp((np.float64(queries) * np.float64(keys)).sum(-1))
        actual = F.differential_factor(queries, keys, np.float32(initial))
        np.testing.assert_allclose(actual, first - second + initial, rtol=1e-5)


@pytest.mark.parametrize("heads, kv_heads", [(6, 3), (6, 4)])
def test_heads_without_a_pair_are_refused(normal, heads, kv_heads):
    key = normal(S, kv_heads, H)
    with pytest.raises(ValueError, match=f"got {heads} query heads and {kv_heads} key heads"):
        functional.differential_attention(normal(T, heads, H), key, key, 0.5)
