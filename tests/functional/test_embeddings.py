import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxformer import functional
from tests.functional.jitted_functions import F


def test_embed_is_the_one_hot_product(normal):
    """inventory row 81: the lookup is one_hot @ E, without the one-hot vectors."""
    table, tokens = normal(11, 5), np.array([[3, 0, 10], [7, 7, 1]])
    one_hot = np.eye(11)[np.asarray(tokens)]
    np.testing.assert_allclose(F.embed(table, tokens), one_hot @ np.asarray(table), rtol=1e-6)


@pytest.mark.parametrize("wrong", [-1, -11, -100, 11, 2**31 - 1])
def test_embed_of_a_wrong_id_is_loud(normal, wrong):
    """inventory row 81: plain indexing takes 11 and -1 for row 10; here both give NaN."""
    table, tokens = normal(11, 5), np.array([2, wrong, 3])
    rows = F.embed(table, tokens)
    np.testing.assert_array_equal(np.isnan(rows), [[False] * 5, [True] * 5, [False] * 5])
    assert np.all(np.isfinite(jax.device_put(table)[tokens]))


def test_embed_takes_any_batch_axes(normal):
    table, tokens = normal(11, 5), np.array([[3, 0, 10], [7, 7, 1]])
    assert F.embed(table, tokens[0, 1]).shape == (5,)
    one_by_one = [[F.embed(table, token) for token in row] for row in tokens]
    np.testing.assert_array_equal(F.embed(table, tokens), np.array(one_by_one))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("ids", ["int32", "uint8"])
def test_embed_keeps_the_dtype_of_its_table(normal, dtype, ids):
    table = normal(257, 5, dtype=dtype)
    rows = F.embed(table, np.array([127, 0], ids))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, table[np.array([127, 0])])


def test_embed_gradient_counts_its_tokens(normal):
    table, tokens = normal(7, 3), np.array([2, 5, 2, 2])
    gradient = np.asarray(jax.jit(jax.grad(lambda table: F.embed(table, tokens).sum()))(table))
    np.testing.assert_array_equal(gradient[:, 0], [0, 0, 3, 0, 0, 1, 0])
    check_grads(jax.jit(lambda t: F.embed(t, tokens)), (table,), 1, modes=["rev"], rtol=1e-2)


def test_embed_gradient_of_a_frequent_token_is_summed_in_float32():
    """In bfloat16 a sum of ones ends at 256, since 257 is rounded to it."""
    table, tokens = np.zeros((3, 2), "bfloat16"), np.full(1000, 1)
    gradient = jax.grad(lambda table: F.embed(table, tokens).astype("float32").sum())(table)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient.astype("float32"), [[0, 0], [1000, 1000], [0, 0]])


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_check_token_ids_names_the_first_wrong_id(kind):
    functional.check_token_ids(kind([[0, 10], [3, 7]]), 11)
    functional.check_token_ids(kind([[]]).astype("int32"), 11)
    with pytest.raises(ValueError, match=r"id 11 at position \(1, 0\) .* of 11: .* 0 to 10"):
        functional.check_token_ids(kind([[0, 10], [11, -5]]), 11)
    with pytest.raises(ValueError, match=r"id -1 at position \(0,\)"):
        functional.check_token_ids(kind([-1]), 11)


def test_check_token_ids_leaves_traced_arrays_alone():
    @jax.jit
    def embed(table, tokens):
        functional.check_token_ids(tokens, len(table))
        return F.embed(table, tokens)

    assert np.all(np.isnan(embed(np.ones((2, 3)), np.array([7]))))


def test_check_positions_names_the_first_wrong_one():
    functional.check_positions(np.array([[0, 1], [12, 3]]), 13)
    jax.jit(lambda positions: functional.check_positions(positions, 2))(np.arange(7))
    with pytest.raises(ValueError, match="Position 13 is out of range: .* from 0 to 12"):
        functional.check_positions(np.array([[0, 13], [-1, 3]]), 13)
    with pytest.raises(ValueError, match="Position -1 is out of range"):
        functional.check_positions(np.array(-1), 13)


def test_shift_right_by_hand():
    """inventory row 87: position t reads the true token t - 1; the first reads the start id."""
    targets = np.array([[4, 8, 6], [5, 2, 9]])
    np.testing.assert_array_equal(F.shift_right(targets, 0), [[0, 4, 8], [0, 5, 2]])
    np.testing.assert_array_equal(F.shift_right(targets[0], 1), [1, 4, 8])
    assert F.shift_right(np.zeros((2, 0), "int32"), 0).shape == (2, 0)
    narrow = F.shift_right(np.array([1, 2, 3], "uint8"), 300)  # an id that uint8 does not hold
    np.testing.assert_array_equal(narrow, [300, 1, 2])


@settings(max_examples=20, deadline=None)
@given(tokens=st.lists(st.integers(0, 50), min_size=5, max_size=5), t=st.integers(0, 4))
def test_shift_right_shows_no_target_to_its_own_position(tokens, t):
    """inventory row 87: the input up to t does not move with the targets from t on."""
    targets = np.asarray(tokens)
    changed = np.where(np.arange(5) >= t, 99, targets)
    shifted, expected = F.shift_right(changed, 1), F.shift_right(targets, 1)
    np.testing.assert_array_equal(shifted[: t + 1], expected[: t + 1])
    np.testing.assert_array_equal(expected[1:], targets[:-1])


def test_teacher_forcing_spares_training_the_errors_and_generation_not():
    """inventory row 88: "avoids error accumulation" holds in training only.

    A model that counts upwards and errs once: forced, one position is wrong; free, all after it.
    """
    truth = np.arange(1, 12)

    def model(token):
        return token + (2 if token == 4 else 1)

    forced = [model(int(token)) for token in F.shift_right(truth, 0)]
    free = [model(0)]
    while len(free) < len(truth):
        free.append(model(free[-1]))
    assert np.sum(forced != truth) == 1
    assert np.sum(free != truth) == 7


def test_learned_positions_look_up_rows(normal):
    table, positions = normal(13, 5), np.array([[0, 1, 2], [4, 0, 7]])
    expected = np.asarray(table)[np.asarray(positions)]
    np.testing.assert_array_equal(F.learned_positions(table, positions), expected)
    expected = np.asarray(table)[np.asarray(positions) + 2]  # OPT
    np.testing.assert_array_equal(F.learned_positions(table, positions, offset=2), expected)


def test_learned_positions_end_where_the_table_ends(normal):
    """inventory row 82: "now most use learnable positions" is outdated, the field moved to RoPE.

    A table has no row for a longer text, so a longer text gets NaN and never a repeated row.
    """
    table = normal(13, 5)
    rows = F.learned_positions(table, np.arange(9, 14), offset=2)
    np.testing.assert_array_equal(np.isnan(rows[:, 0]), [False, False, True, True, True])
    assert np.all(np.isnan(F.learned_positions(table, np.array([-1]))))


def test_learned_positions_gradient_reaches_the_rows_used(normal):
    table = normal(5, 3, dtype="bfloat16")
    used = lambda t: F.learned_positions(t, np.array([1, 1]), offset=2).sum()  # noqa: E731
    gradient = np.asarray(jax.jit(jax.grad(used))(table))
    assert gradient.dtype == "bfloat16"
    np.testing.assert_array_equal(gradient[:, 0].astype("float32"), [0, 0, 0, 2, 0])


@pytest.mark.parametrize("axis", [0, 1])
def test_unit_vectors_have_length_one(axis):
    x = np.random.default_rng(0).normal(0, 3, (5, 7)).astype(np.float32)
    x[2] = 0
    lengths = np.linalg.norm(x.astype(np.float64), axis=axis, keepdims=True)
    expected = x / np.where(lengths == 0, 1, lengths)
    np.testing.assert_allclose(F.unit_vectors(np.asarray(x), axis=axis), expected, rtol=1e-6)
    assert F.unit_vectors(np.asarray(x, jnp.bfloat16), axis=axis).dtype == jnp.bfloat16
    slope = jax.grad(lambda x: jnp.sum(F.unit_vectors(x, axis=axis)))(np.asarray(x))
    assert np.isfinite(slope).all()
