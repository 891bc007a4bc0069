from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import functional as F

B, T, N, D = 2, 3, 4, 5
RNG = np.random.default_rng(0)
TOTAL, BLOCKS = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, T, N, D))
QUERY = RNG.normal(size=D)
QUERIES = np.float32(RNG.normal(size=(N + 1, D)))


@pytest.mark.parametrize("count", [0, 2, N])
def test_attention_over_depth(count):
    arrays = (np.float32(x) for x in (TOTAL, BLOCKS, QUERY))
    attend = jax.jit(partial(F.attend_to_depth, eps=1e-3))
    actual = attend(*arrays, num_blocks=jnp.int32(count))
    for at in np.ndindex(B, T):
        seen = np.stack([*BLOCKS[at][:count], TOTAL[at]])
        keys = seen / np.sqrt((seen**2).mean(-1, keepdims=True) + 1e-3)
        weights = np.exp(keys @ QUERY / np.sqrt(D))
        np.testing.assert_allclose(actual[at], weights @ keys / weights.sum(), atol=1e-5)


def last_mean(x, queries, attend, end):
    """Four layers, each of which writes a block, in a loop; and the mean of all."""
    blocks = later = jnp.zeros((B, T, N, D))

    def layer(carry, both):
        x, blocks, later = carry
        i, query = both
        y, later = attend(x, blocks, later, query, i)
        slot = (jnp.arange(N) == i).astype(x.dtype)
        blocks = blocks + jnp.einsum("n,btd->btnd", slot, x)
        return (x + jnp.sin(3 * y), blocks, later), None

    carry = x, blocks, later
    (x, blocks, later), _ = jax.lax.scan(layer, carry, (jnp.arange(N), queries[:-1]))
    return F.attend_to_depth(x, end(blocks, later), queries[-1], num_blocks=N)


def plain(total, blocks, later, query, num_blocks):
    return F.attend_to_depth(total, blocks, query, num_blocks=num_blocks), later


def gradient(attend, end):
    loss = lambda x, q: jnp.sum(jnp.cos(last_mean(x, q, attend, end)))  # noqa: E731
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(np.float32(TOTAL), QUERIES)


@pytest.mark.slow
def test_a_gradient_takes_the_blocks_from_the_end():
    expected = gradient(plain, lambda blocks, later: blocks)
    actual = gradient(F.attend_to_history, F.history_at_end)
    for one, other in zip(actual, expected, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_a_gradient_that_does_not_pass_the_end_is_no_number():
    of_nothing = gradient(F.attend_to_history, lambda blocks, later: blocks)
    assert all(np.isnan(x).any() for x in of_nothing)
