import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import functional as F
from jaxformer.layers import RotaryEmbedding

ROPE = RotaryEmbedding(theta=50.0, head_dim=6, max_length=11)


@jax.jit
def turn(x, positions):
    return ROPE.apply({}, x, positions)


def even_odd(x, positions):
    """The textbook formula on even and odd features, in float64."""
    x, positions = np.asarray(x, np.float64), np.asarray(positions, np.float64)
    angles = positions[..., None] * 50.0 ** (-np.arange(0, 6, 2) / 6)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned


def test_has_no_parameters(normal):
    """inventory row 59: RoPE as a class has no learnable parameters."""
    assert jax.eval_shape(ROPE.init, jax.random.key(0), normal(5, 6), jnp.arange(5)) == {}


@pytest.mark.slow
def test_tables_are_no_state_and_end_at_max_length(normal):
    """inventory row 61: no table is in the variables, hence in no checkpoint; a position beyond
    the last is refused, where indexing would clamp it and jnp.take give NaN."""
    x = normal(3, 6)
    _, variables = ROPE.apply({}, x, jnp.asarray([0, 5, 10]), mutable=True)
    assert not jax.tree.leaves(variables)
    with pytest.raises(ValueError, match="Position 11 is out of range: .* from 0 to 10"):
        ROPE.apply({}, x, jnp.asarray([0, 11, 12]))
    with pytest.raises(ValueError, match="Position -1 is out of range"):
        ROPE.apply({}, x, jnp.asarray([0, -1, 2]))


def test_even_odd_formula_and_functional_agree(normal):
    """RotaryEmbedding is `F.rotate` with neighbours paired."""
    x, positions = normal(2, 5, 6), jnp.arange(5)
    turned = turn(x, positions)
    np.testing.assert_allclose(turned, even_odd(x, positions), atol=1e-6)
    rotations = F.rope_rotations(positions, F.rope_frequencies(6, base=50.0))
    by_heads = jax.jit(lambda x: F.rotate(x, rotations, pairing="neighbours"))(x[..., None, :])
    np.testing.assert_array_equal(turned, by_heads[..., 0, :])


@pytest.mark.parametrize(
    "positions",
    [
        np.arange(5) + 6,
        np.asarray([4, 0, 3, 3, 1]),
        np.asarray([[0, 1, 2, 0, 1], [7, 8, 9, 0, 1]])[:, None],
        np.asarray([[[2, 3, 4, 5, 6]] * 3, [[0, 1, 2, 0, 1]] * 3]),
    ],
    ids=["offset", "permuted", "of a batch, for all heads", "of every head"],
)
def test_any_token_positions(normal, positions):
    """inventory row 62: positions are an argument: offset, permuted, packed, batched, and
    broadcast over the heads, [B, N, T, H] here."""
    x = normal(2, 3, 5, 6)
    turned = turn(x, jnp.asarray(positions, jnp.int32))
    np.testing.assert_allclose(turned, even_odd(x, positions), atol=1e-6)
    order = np.asarray([2, 0, 4, 1, 3])
    again = turn(x[..., order, :], jnp.asarray(positions[..., order], jnp.int32))
    np.testing.assert_allclose(again, turned[..., order, :], atol=1e-6)


def test_wrong_width(normal):
    with pytest.raises(ValueError, match="head_dim 6; got 8 features"):
        ROPE.apply({}, normal(5, 8), jnp.arange(5))


@pytest.mark.slow
def test_keeps_dtype_length_and_gradient(normal):
    x, positions = normal(5, 6), jnp.arange(5) + 3
    assert turn(x.astype(jnp.bfloat16), positions).dtype == jnp.bfloat16
    norms = jnp.linalg.norm(turn(x, positions), axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(x, axis=-1), rtol=1e-5)
    # The gradient of half the squared distance to zero is the input itself: lengths are kept.
    gradient = jax.jit(jax.grad(lambda x: jnp.square(turn(x, positions)).sum() / 2))(x)
    np.testing.assert_allclose(gradient, x, atol=1e-5)
