"""Rotary positions."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import functional
from tests.functional.jitted_functions import F

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("positions.json").read_text())
PAIRINGS = ["halves", "neighbours"]


def rotations(positions, head_dim):
    return F.rope_rotations(np.asarray(positions), F.rope_frequencies(head_dim))


def turn(x, position, pairing="halves"):
    """Rotate one vector to one position."""
    return F.rotate(x[None, None], rotations([position], x.shape[0]), pairing=pairing)[0, 0]


def score(q, k, m, n, pairing="halves"):
    return float(turn(q, m, pairing) @ turn(k, n, pairing))


def dense(position, head_dim):
    """The block-diagonal matrix of the lectures (neighbours), which the library never builds."""
    angles = position * 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    matrix = np.zeros((head_dim, head_dim))
    for j, (c, s) in enumerate(zip(np.cos(angles), np.sin(angles), strict=True)):
        matrix[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[c, -s], [s, c]]
    return matrix


# The plane


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_of_the_plane(pairing):
    """inventory row 40: [[cos, -sin], [sin, cos]] turns (x0, x1) counter-clockwise."""
    alpha, x = 0.7, np.array([[2.0, -1.0], [0.0, 3.0]])
    matrix = np.array([[np.cos(alpha), -np.sin(alpha)], [np.sin(alpha), np.cos(alpha)]])
    r = F.rope_rotations(np.array([alpha]), np.array([1.0]))
    actual = F.rotate(np.float32(x)[None], r, pairing=pairing)
    np.testing.assert_allclose(actual[0], x @ matrix.T, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(alpha=st.floats(-9, 9, width=32), beta=st.floats(-9, 9, width=32))
def test_products_see_the_difference_of_angles(alpha, beta):
    """inventory row 41: <R_alpha a, R_beta b> = <R_(alpha - beta) a, b>."""
    a, b = np.array([[[2.0, -1.0]]]), np.array([[[0.5, 3.0]]])

    def by(angle, x):
        return F.rotate(x, F.rope_rotations(np.array([angle], jnp.float32), np.array([1.0])))

    left, right = jnp.vdot(by(alpha, a), by(beta, b)), jnp.vdot(by(alpha - beta, a), b)
    np.testing.assert_allclose(left, right, atol=2e-5)


# Frequencies and rotations


@pytest.mark.parametrize("head_dim, base", [(2, 10_000.0), (10, 10_000.0), (128, 500_000.0)])
def test_frequencies_in_float64(head_dim, base):
    """inventory rows 56, 119: pair k = 1 ... d / 2 turns by i / base ** ((2 k - 2) / d) at position
    i: the width of the head is in the exponent, not that of the model."""
    k = np.arange(1, head_dim // 2 + 1)
    actual = F.rope_frequencies(head_dim, base=base)
    assert actual.shape == (head_dim // 2,) and actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, base ** -((2 * k - 2) / head_dim), rtol=6e-8)
    i = 7
    phases = np.angle(F.rope_rotations(np.array([i]), actual)[0])
    expected = i / base ** ((2 * k - 2) / head_dim)
    np.testing.assert_allclose(np.exp(1j * phases), np.exp(1j * expected), atol=1e-6)


def test_larger_base_is_slower():
    """inventory row 138: the base sets how slowly the pairs turn (all but the first)."""
    slow, fast = F.rope_frequencies(10, base=500_000.0), F.rope_frequencies(10)
    assert slow[0] == fast[0] == 1 and np.all(slow[1:] < fast[1:])


def test_long_wavelengths_are_never_completed_in_training():
    """inventory row 116: periodicity does not let RoPE extrapolate: at d = 128, 18 of 64 pairs have
    a wavelength above 4096 tokens, the slowest 54,410, so new lengths bring new phases."""
    wavelengths = 2 * np.pi / np.asarray(F.rope_frequencies(128))
    assert np.count_nonzero(wavelengths > 4096) == 18
    np.testing.assert_allclose(wavelengths.max(), 54_410, rtol=1e-4)


def test_rotations_never_fade():
    """inventory row 135: sine and cosine do not tend to zero with the position; they are a point of
    the unit circle everywhere."""
    r = rotations([0, 1, 10**4, 10**6, 2**31 - 1], 16)
    np.testing.assert_allclose(np.abs(r), 1.0, rtol=1e-6)
    far = rotations(np.arange(10**6, 10**6 + 20), 16)
    assert far.real[:, 0].max() > 0.9 and far.real[:, 0].min() < -0.9


def test_rotations_compose():
    """inventory row 121: R_m R_n = R_(m + n), R_(-m) is the transpose, R_n^T R_m = R_(m - n)."""
    both = rotations([3], 16) * rotations([4], 16)
    np.testing.assert_allclose(both, rotations([7], 16), atol=1e-6)
    np.testing.assert_array_equal(rotations([-3], 16), jnp.conj(rotations([3], 16)))
    np.testing.assert_allclose(
        jnp.conj(rotations([4], 16)) * rotations([9], 16), rotations([5], 16), atol=1e-6
    )


def test_rotations_take_any_positions():
    """inventory row 62: packed, offset, repeated positions, in any shape."""
    packed = rotations([[0, 1, 2, 0, 1], [900, 901, 902, 903, 904]], 8)
    assert packed.shape == (2, 5, 4) and packed.dtype == jnp.complex64
    np.testing.assert_array_equal(packed[0, 3:], packed[0, :2])
    np.testing.assert_array_equal(packed[1], rotations(np.arange(900, 905), 8))


def test_rotations_need_no_table():
    """inventory row 61: computed on the fly, there is nothing to save and no end to run over. A
    cached table of eight rows would give NaN by jnp.take at row nine, or the last row by index."""
    table = jnp.asarray(rotations(np.arange(8), 6))
    nine = np.array([9])
    assert np.all(np.isnan(jnp.take(table, nine, axis=0).real))
    np.testing.assert_array_equal(table[nine], table[7:])
    expected = np.exp(9j * 10_000.0 ** (-np.arange(3) / 3))
    np.testing.assert_allclose(rotations(nine, 6)[0], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "bfloat16", "float16", "float32"])
def test_positions_of_any_dtype(dtype):
    actual = rotations(np.arange(100).astype(dtype), 6)
    np.testing.assert_array_equal(actual, rotations(np.arange(100), 6))


@pytest.mark.parametrize(
    "position, least, most",
    [(4_000, 0.0, 3e-4), (131_000, 1e-3, 1e-2), (1_000_000, 1e-2, 1e-1), (10_000_000, 0.1, 2.0)],
)
def test_precision_of_phases(position, least, most):
    """inventory rows 117, 131: only m - n matters in exact arithmetic; in float32 the cosine is off
    by up to 1e-2 near 131,000, 1e-1 near a million, and is noise at ten million."""
    positions = position + np.arange(71)
    exact = np.cos(np.outer(positions, 10_000.0 ** (-np.arange(64) / 64)))
    error = np.abs(rotations(positions, 128).real - exact)
    assert least < error.max() < most
    assert error[:, 32:].max() < most / 50  # the slow half of the pairs


def test_bfloat16_positions_count_to_256():
    """inventory row 117: past 256 bfloat16 has no odd numbers, so two tokens share a position."""
    r = rotations(np.array([256, 257], jnp.int32).astype(jnp.bfloat16), 8)
    np.testing.assert_array_equal(r[0], r[1])


def test_rope_has_the_precision_of_sinusoids():
    """inventory rows 128, 137: RoPE is no more stable than sinusoids: its numbers are the same."""
    positions = np.array([0, 1, 5000, 10**6])
    r = rotations(positions, 16)
    table = F.sinusoidal_positions(positions, 16, layout="halves", sin_first=False)
    np.testing.assert_array_equal(np.concatenate([r.real, r.imag], axis=-1), table)


# Rotating features


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotate_matches_released_models(pairing):
    """Llama (halves) and Cohere (neighbours), as transformers computes them."""
    x = jnp.sin(np.arange(48.0)).reshape(3, 2, 8)
    actual = F.rotate(x, rotations(GOLDEN["rotated"]["positions"], 8), pairing=pairing)
    np.testing.assert_allclose(actual, np.asarray(GOLDEN["rotated"][pairing]), atol=2e-5)


def test_partial_rotation_matches_gptj():
    x = jnp.sin(np.arange(48.0)).reshape(3, 2, 8)
    actual = F.rotate(x, rotations(GOLDEN["rotated"]["positions"], 4), pairing="neighbours")
    np.testing.assert_allclose(actual, np.asarray(GOLDEN["rotated"]["gptj"]), atol=2e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_partial_rotation_turns_the_first_features(normal, pairing):
    x, r = normal(2, 5, 3, 10), rotations(np.arange(5), 4)
    actual = F.rotate(x, r, pairing=pairing)
    np.testing.assert_array_equal(actual[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(actual[..., :4], F.rotate(x[..., :4], r, pairing=pairing))


def test_rotate_equals_the_dense_matrix(normal):
    """inventory rows 43, 45, 118: z_j = x_(2j-1) + i x_2j (counted from 1) is the neighbours
    pairing; the pairs are (x_2i, x_2i+1), not (x_i, x_i+1), and make R block diagonal."""
    x = normal(4, 3, 8)
    for t, position in enumerate([0, 1, 6, 300]):
        actual = F.rotate(x[t][None], rotations([position], 8), pairing="neighbours")[0]
        np.testing.assert_allclose(actual, x[t] @ dense(position, 8).T, atol=2e-5)


def test_rotate_is_complex_multiplication(normal):
    """inventory rows 44, 133: (x_r + i x_i)(cos + i sin) expanded, even features real and odd ones
    imaginary; the complex form agrees with the real one, bit for bit in bfloat16."""
    x, positions = normal(5, 3, 8, dtype="bfloat16"), np.arange(5)
    phases = np.outer(positions, F.rope_frequencies(8)).astype(np.float32)[:, None]
    even, odd = np.asarray(x, np.float32)[..., ::2], np.asarray(x, np.float32)[..., 1::2]
    cos, sin = np.cos(phases), np.sin(phases)
    real = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(5, 3, 8)
    wide = F.rotate(x.astype(jnp.float32), rotations(positions, 8), pairing="neighbours")
    np.testing.assert_allclose(wide, real, atol=1e-6)
    narrow = F.rotate(x, rotations(positions, 8), pairing="neighbours")
    np.testing.assert_array_equal(narrow, np.asarray(real).astype(jnp.bfloat16))


def test_pairings_differ_by_a_permutation(normal):
    """inventory row 43: halves and neighbours are one rotation of permuted features."""
    x, r = normal(5, 3, 8), rotations(np.arange(5), 8)
    order = np.arange(8).reshape(2, 4).T.ravel()  # halves -> neighbours
    halves = F.rotate(x, r, pairing="halves")
    neighbours = F.rotate(x[..., order], r, pairing="neighbours")
    np.testing.assert_allclose(neighbours, halves[..., order], atol=1e-6)
    assert np.abs(F.rotate(x, r, pairing="neighbours") - halves).max() > 0.1


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_each_pair_has_its_own_angle(pairing):
    """inventory rows 42, 57: at position m pair j turns by m theta_j, one angle per pair. Pair
    indices go from fast to slow; features do so with neighbours only, for in the halves layout the
    front half of the vector has one feature of every pair, the slowest included."""
    m, theta = 3, np.asarray(F.rope_frequencies(8))
    turned = np.stack([turn(e, m, pairing) for e in np.eye(8)])
    cosines = np.cos(m * (np.tile(theta, 2) if pairing == "halves" else np.repeat(theta, 2)))
    np.testing.assert_allclose(np.diag(turned), cosines, atol=1e-6)
    speed_of_feature = np.arccos(np.diag([turn(e, 1, pairing) for e in np.eye(8)]))
    assert np.all(np.diff(speed_of_feature) <= 1e-3) == (pairing == "neighbours")


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_position_zero_is_the_identity(normal, pairing, dtype):
    """inventory row 50: R(x, 0) is x, bit for bit."""
    x = normal(2, 3, 3, 8, dtype=dtype)
    actual = F.rotate(x, rotations([0, 0, 0], 8), pairing=pairing)
    assert actual.dtype == x.dtype
    np.testing.assert_array_equal(actual, x)


def test_rope_adds_nothing_and_multiplies_no_matrix():
    """inventory rows 50, 60, 140: no position vector is added, no d x d matrix is built; the work
    is a few operations per feature, linear in x."""
    x = np.zeros((5, 3, 8))

    def rope(x):
        return functional.rotate(x, rotations(np.arange(5), 8))

    names = {e.primitive.name for e in jax.make_jaxpr(rope)(x).eqns}
    assert "mul" in names and not names & {"dot_general", "add", "add_any", "scatter"}
    np.testing.assert_array_equal(rope(x), x)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotate_keeps_lengths(normal, pairing):
    """inventory row 58: a rotation keeps the length of every vector."""
    x = normal(2, 7, 3, 16)
    y = F.rotate(x, rotations(np.arange(7), 16), pairing=pairing)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_conjugate_undoes_the_rotation(normal, pairing):
    x, r = normal(2, 7, 3, 16), rotations(np.arange(7), 10)
    back = F.rotate(F.rotate(x, r, pairing=pairing), jnp.conj(r), pairing=pairing)
    np.testing.assert_allclose(back, x, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (1, 1, 5), (2, 1, 5), (2, 3, 5)])
@pytest.mark.slow(but=["shape0", "shape4"])
def test_rotations_are_shared_by_the_batch(normal, shape):
    """Rotations without the axes of the batch, or with ones in their place, serve all of it."""
    x = normal(2, 3, 5, 4, 6)
    positions = np.arange(np.prod(shape)).reshape(shape)
    r = rotations(positions, 6)
    actual = F.rotate(x, r)
    repeated = np.broadcast_to(r, (2, 3, 5, 3))
    for b in np.ndindex(2, 3):
        np.testing.assert_array_equal(actual[b], F.rotate(x[b], repeated[b]))


# Scores


@pytest.mark.parametrize("pairing", PAIRINGS)
@settings(max_examples=20, deadline=None)
@given(m=st.integers(0, 500), n=st.integers(0, 500), shift=st.integers(0, 500))
def test_scores_depend_on_the_distance_only(pairing, m, n, shift):
    """inventory row 46: <R_m q, R_n k> = q^T R_(n - m) k."""
    rng = np.random.default_rng(0)
    q, k = (np.float32(rng.normal(size=8)) for _ in range(2))
    moved = score(q, k, m + shift, n + shift, pairing)
    np.testing.assert_allclose(moved, score(q, k, m, n, pairing), atol=2e-3)
    np.testing.assert_allclose(moved, q @ turn(k, n - m, pairing), atol=2e-3)


def test_score_of_dog_and_man(normal):
    """inventory row 51: the score of "dog" at 0 and "man" at 2 is a matter of -2 alone."""
    q, k = normal(4), normal(4)
    np.testing.assert_allclose(score(q, k, 5, 7), score(q, k, 0, 2), atol=1e-5)
    np.testing.assert_allclose(score(q, k, 100, 102), score(q, k, 0, 2), atol=1e-4)
    assert abs(score(q, k, 0, 3) - score(q, k, 0, 2)) > 1e-2


def test_rope_is_position_and_nothing_else(normal):
    """inventory row 47: between tokens at one position RoPE changes no score."""
    q, k = normal(8), normal(8)
    for position in (0, 3, 90):
        np.testing.assert_allclose(score(q, k, position, position), q @ k, atol=1e-5)


def test_rotated_scores_are_no_function_of_the_plain_score():
    """inventory row 52: R(a) . R(b) is bilinear in a and b, not a product of a . b and R(a - b):
    features at right angles have a plain score of zero, and rotated ones that differ."""
    a, b, c = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([0.0, -2.0])
    assert a @ b == a @ c == 0
    np.testing.assert_allclose(score(a, b, 1, 0), np.sin(1), rtol=1e-5)
    np.testing.assert_allclose(score(a, c, 1, 0), -2 * np.sin(1), rtol=1e-5)


def test_rotated_scores_are_not_scores_plus_positions():
    """inventory row 134: not Q K^T + relative information, but the real part of the sum of
    q_j conj(k_j) e^(i (m - n) theta_j); what rotation adds doubles with q, so it is no term of the
    positions."""
    q, k, m, n = np.arange(1.0, 9), np.arange(8.0, 0, -1), 9, 4
    added = score(q, k, m, n) - float(q @ k)
    np.testing.assert_allclose(score(2 * q, k, m, n) - float(2 * q @ k), 2 * added, rtol=1e-4)
    assert abs(added) > 0.1
    z_q, z_k = (np.asarray(x[:4]) + 1j * np.asarray(x[4:]) for x in (q, k))
    turns = np.exp(1j * (m - n) * 10_000.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(score(q, k, m, n), np.sum(z_q * z_k.conj() * turns).real, atol=1e-5)


def test_row_vectors_turn_the_other_way(normal):
    """inventory rows 115, 120: row vectors, q R_m, turn by -theta; scores are relative still.

    With R = [[c, -s], [s, c]] the printed [[c, s], [-s, c]] is R_(n - m), not R_(m - n)."""
    q, k = np.asarray(normal(8), np.float64), np.asarray(normal(8), np.float64)
    rows = [(q @ dense(m, 8)) @ (k @ dense(n, 8)) for m, n in [(5, 2), (9, 6)]]
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-9)
    columns = (dense(5, 8) @ q) @ (dense(2, 8) @ k)
    assert abs(rows[0] - columns) > 1e-2
    np.testing.assert_allclose(q @ dense(3, 8), dense(-3, 8) @ q, atol=1e-12)

    product = (dense(2, 2).T @ dense(5, 2)).round(9)
    c, s = np.cos(3), np.sin(3)
    np.testing.assert_allclose(product, [[c, -s], [s, c]], atol=1e-8)
    assert np.abs(product - np.array([[c, s], [-s, c]])).max() > 0.1


# Dtypes, gradient, errors


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rotate_keeps_dtype_and_rounds_once(normal, dtype):
    x = normal(5, 3, 8).astype(dtype)
    y = F.rotate(x, rotations(np.arange(5), 8))
    assert y.dtype == x.dtype
    wide = F.rotate(x.astype(jnp.float32), rotations(np.arange(5), 8))
    np.testing.assert_array_equal(y, wide.astype(dtype))


def test_rotate_survives_large_values():
    x = np.full((1, 1, 2), 4e4, jnp.float16)
    y = F.rotate(x, F.rope_rotations(np.array([np.pi / 4], jnp.float32), np.array([1.0])))
    np.testing.assert_allclose(y[0, 0, 0], 0, atol=100)
    assert np.all(np.isfinite(F.rotate(x.astype(jnp.float32) * 1e30, rotations([3], 2))))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotate_gradient_is_the_inverse_rotation(normal, pairing):
    """A rotation's transpose is its inverse, so gradients turn back by the conjugate."""
    x, weight, r = normal(5, 3, 8), normal(5, 3, 8), rotations(np.arange(5), 6)
    gradient = jax.grad(lambda x: jnp.vdot(weight, F.rotate(x, r, pairing=pairing)))(x)
    np.testing.assert_allclose(gradient, F.rotate(weight, jnp.conj(r), pairing=pairing), atol=1e-6)


def test_gradient_in_the_frequencies():
    positions, frequencies = np.array([0, 2, 5]), np.array([1.0, 0.1])
    gradient = jax.grad(lambda f: F.rope_rotations(positions, f).real.sum())(frequencies)
    p, f = np.array([0, 2, 5])[:, None], np.array([1.0, 0.1])
    np.testing.assert_allclose(gradient, np.sum(-p * np.sin(p * f), axis=0), rtol=1e-5)


def test_rope_errors():
    for head_dim in (7, 0):
        with pytest.raises(ValueError, match=f"must be even; got {head_dim}"):
            F.rope_frequencies(head_dim)
    with pytest.raises(ValueError, match="5 rotations need a head_dim of at least 10; got 8"):
        F.rotate(np.zeros((2, 3, 8)), rotations([0, 1], 10))
    with pytest.raises(ValueError, match="pairing must be one of .*'halves'.*; got 'thirds'"):
        F.rotate(np.zeros((2, 3, 8)), rotations([0, 1], 8), pairing="thirds")
