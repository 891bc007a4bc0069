"""Sinusoids, ALiBi and T5 biases."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.jitted_functions import F

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("positions.json").read_text())
LAYOUTS = ["interleaved", "halves", "tensor2tensor"]


def sinusoid(length, dim, **options):
    return F.sinusoidal_positions(np.arange(length), dim, **options)


def sinusoid64(positions, dim, base=10_000.0):
    """The paper's formula, feature by feature, in float64."""
    i = np.arange(dim) // 2
    phases = np.asarray(positions, np.float64)[..., None] / base ** (2 * i / dim)
    return np.where(np.arange(dim) % 2, np.cos(phases), np.sin(phases))


# Sinusoids: values


def test_sinusoid_matches_the_formula_in_float64():
    """inventory row 27: even features sin, odd features cos, of pos / 10000 ** (2 i / d)."""
    positions = np.array([[0, 1, 7], [40, 2000, 3]])
    actual = F.sinusoidal_positions(np.asarray(positions), 10)
    assert actual.shape == (2, 3, 10) and actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, sinusoid64(positions, 10), atol=2e-4)
    np.testing.assert_allclose(actual[0], sinusoid64(positions[0], 10), atol=1e-6)
    other = F.sinusoidal_positions(np.asarray(positions), 10, base=50.0)
    np.testing.assert_allclose(other, sinusoid64(positions, 10, base=50.0), atol=2e-4)


@pytest.mark.parametrize("layout", ["halves", "tensor2tensor"])
def test_sinusoid_layouts_match_released_models(layout):
    """Marian's table and that of FSMT, which is tensor2tensor's."""
    expected = np.asarray(GOLDEN["sinusoids"][layout])
    np.testing.assert_allclose(sinusoid(7, 6, layout=layout), expected, atol=1e-6)


def test_sinusoid_layouts_are_different_tables():
    tables = [sinusoid(7, 6, layout=layout) for layout in LAYOUTS]
    np.testing.assert_array_equal(tables[0][:, ::2], tables[1][:, :3])
    np.testing.assert_array_equal(tables[0][:, 1::2], tables[1][:, 3:])
    assert np.abs(tables[1] - tables[2]).max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoid_order_of_sine_and_cosine(layout):
    """inventory row 34: the other solution, (cos m theta, sin m theta); both depend on m only."""
    sin_first, cos_first = (sinusoid(5, 8, layout=layout, sin_first=s) for s in (True, False))
    if layout == "interleaved":
        np.testing.assert_array_equal(cos_first[:, ::2], sin_first[:, 1::2])
        np.testing.assert_array_equal(cos_first[:, 1::2], sin_first[:, ::2])
        theta = 10_000.0 ** (-np.arange(4) / 4)
        m_theta = np.arange(5)[:, None] * theta
        np.testing.assert_allclose(cos_first[:, ::2], np.cos(m_theta), atol=1e-6)
        np.testing.assert_allclose(cos_first[:, 1::2], np.sin(m_theta), atol=1e-6)
    else:
        np.testing.assert_array_equal(cos_first, jnp.roll(sin_first, 4, axis=-1))


def test_sinusoid_documents_example():
    """inventory row 92: PE(0..2) for d = 4; cos 0.01 and cos 0.02 were printed cut, not rounded."""
    printed = [[0, 1, 0, 1], [0.841, 0.540, 0.010, 0.999], [0.909, -0.416, 0.020, 0.999]]
    actual = sinusoid(3, 4)
    np.testing.assert_allclose(actual, printed, atol=1e-3)
    np.testing.assert_allclose(actual[1:, 3], [0.99995, 0.99980], atol=1e-6)


def test_sinusoid_added_to_embeddings():
    """inventory row 93: "I love AI"; 1.699 and 1.499 were printed cut from 1.69995 and 1.4998."""
    words = np.array([[1.0, 0.5, -1.0, 0.3], [0.8, -0.2, 0.3, 0.7], [0.1, 0.9, -0.4, 0.5]])
    printed = [[1.0, 1.5, -1.0, 1.3], [1.641, 0.340, 0.310, 1.699], [1.009, 0.484, -0.380, 1.499]]
    actual = words + sinusoid(3, 4)
    np.testing.assert_allclose(actual, printed, atol=1e-3)
    np.testing.assert_allclose(actual[1:, 3], [1.69995, 1.4998], atol=1e-5)


@pytest.mark.parametrize("dim", [4, 6, 512])
def test_sinusoid_of_the_second_word(dim):
    """inventory row 94: "am" at position 1: sin 1, cos 1, then sin and cos of 10000 ** (-2 / d)."""
    phase = 10_000.0 ** (-2 / dim)
    expected = [np.sin(1), np.cos(1), np.sin(phase), np.cos(phase)]
    np.testing.assert_allclose(sinusoid(2, dim)[1, :4], expected, atol=1e-6)


def test_absolute_positions_documents_example():
    """inventory row 49: "dog bites man" plus a learned vector per position."""
    words = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]])
    table = np.array([[9.0, 9.1, 9.2, 9.3], [8.0, 8.1, 8.2, 8.3], [7.0, 7.1, 7.2, 7.3]])
    expected = [[9.1, 9.3, 9.5, 9.7], [8.5, 8.7, 8.9, 9.1], [7.9, 8.1, 8.3, 8.5]]
    actual = words + F.learned_positions(table, np.arange(3))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


# Sinusoids: laws


def test_sinusoid_rows_are_distinct():
    """inventory row 28: no two of 4096 rows are alike, and nothing about them is learned."""
    rows = np.unique(np.round(sinusoid(4096, 8), 4), axis=0)
    assert len(rows) == 4096
    one_pair = np.unique(np.round(sinusoid(4096, 2), 3), axis=0)
    assert len(one_pair) < 4096  # one pair alone does come round


def test_sinusoid_shift_is_a_clockwise_rotation():
    """inventory row 29: PE(i + delta) = M PE(i) with M = [[c, s], [-s, c]], in (sin, cos) order.

    In the other order the matrix is transposed: the rotation is then counter-clockwise.
    """
    delta, theta = 3, 10_000.0 ** (-2 / 6)
    c, s = np.cos(delta * theta), np.sin(delta * theta)
    clockwise = np.array([[c, s], [-s, c]])
    for sin_first, matrix in [(True, clockwise), (False, clockwise.T)]:
        pair = np.asarray(sinusoid(12, 6, sin_first=sin_first))[:, 2:4]
        np.testing.assert_allclose(pair[delta:], pair[:-delta] @ matrix.T, atol=1e-6)
        assert np.abs(pair[delta:] - pair[:-delta] @ matrix).max() > 0.1


def test_sinusoid_is_a_number_in_base_beta():
    """inventory row 35: like digits of n in base beta = 10000 ** (2 / d), but of period 2 pi."""
    digits = [12_345 // 10**m % 10 for m in range(5)]
    assert digits == [5, 4, 3, 2, 1]
    n, d = np.arange(9), 8
    beta = 10_000.0 ** (2 / d)
    waves = [wave(n / beta**k) for k in range(d // 2) for wave in (np.cos, np.sin)]
    actual = F.sinusoidal_positions(np.asarray(n), d, sin_first=False)
    np.testing.assert_allclose(actual, np.stack(waves, axis=-1), atol=1e-6)


def test_sinusoid_wavelength():
    """inventory row 105: pos / w is a phase; the frequency is 1 / w, the wavelength 2 pi w."""
    dim, positions = 6, np.array([0.0, 1.0, 2.5])
    for i, w in enumerate(10_000.0 ** (np.arange(3) / 3)):
        later = F.sinusoidal_positions(positions + 2 * np.pi * w, dim)
        now = F.sinusoidal_positions(positions, dim)
        np.testing.assert_allclose(
            later[:, 2 * i : 2 * i + 2], now[:, 2 * i : 2 * i + 2], atol=1e-4
        )


def test_sinusoid_turns_faster_in_wider_models():
    """inventory row 106: at fixed i a larger d makes features faster: 100 positions of i = 1 turn
    74.99 radians at d = 64 and 96.47 at d = 512. What gets finer is the spacing of frequencies."""
    for dim, phase in [(64, 74.9894), (512, 96.4662)]:
        actual = F.sinusoidal_positions(np.array([100]), dim)[0, 2:4]
        np.testing.assert_allclose(actual, [np.sin(phase), np.cos(phase)], atol=1e-4)
    narrow, wide = F.rope_frequencies(64), F.rope_frequencies(512)
    assert wide[1] > narrow[1] and wide[1] / wide[0] > narrow[1] / narrow[0]


def test_sinusoid_index_counts_pairs():
    """inventory rows 104, 127: i = 0 ... d / 2 - 1 counts pairs; the last feature is 2 i + 1."""
    dim = 10
    last = dim // 2 - 1
    assert sinusoid(3, dim).shape[-1] == 2 * last + 2
    slowest = 2 / 10_000.0 ** (2 * last / dim)
    np.testing.assert_allclose(
        sinusoid(3, dim)[2, -2:], [np.sin(slowest), np.cos(slowest)], atol=1e-6
    )


def test_sinusoid_waves_slow_down_along_the_features():
    """inventory rows 128, 132: a picture of the table shows waves, each pair slower than the last.

    There is nothing to learn in it: it is a function of positions and numbers alone.
    """
    table = np.asarray(sinusoid(512, 16))
    crossings = [np.count_nonzero(np.diff(np.sign(table[1:, 2 * i]))) for i in range(8)]
    wavelengths = 2 * np.pi * 10_000.0 ** (np.arange(8) / 8)
    np.testing.assert_allclose(crossings, 2 * 511 / wavelengths, atol=1)
    assert crossings[:6] == sorted(crossings[:6], reverse=True) and crossings[7] == 0


def test_sinusoid_products_do_not_fall_steadily():
    """inventory row 129: <PE(0), PE(n)> is no falling function of n: it first rises at 12 (d = 128)
    and goes below zero, to -1.82 within 2048 positions."""
    table = np.asarray(sinusoid(2048, 128), np.float64)
    products = table @ table[0]
    assert np.argmax(np.diff(products) > 0) + 1 == 12
    np.testing.assert_allclose(products.min(), -1.82, atol=0.01)
    np.testing.assert_allclose(products[0], 64)


def test_sinusoid_products_are_relative_until_projected(normal):
    """inventory rows 38, 110, 130: of the four terms of <v + PE(i), u + PE(j)>, <v, u> has no
    position and <PE(i), PE(j)> is relative: the sum of cos((i - j) w). With matrices in between, as
    in attention, that is no longer so, and the scores do hold positions, not content only."""
    table, v, u = sinusoid(20, 8), normal(8), normal(8)
    i, j, shift = 3, 7, 11
    total = jnp.vdot(v + table[i], u + table[j])
    terms = [jnp.vdot(v, u), jnp.vdot(v, table[j]), jnp.vdot(table[i], u)]
    terms.append(jnp.vdot(table[i], table[j]))
    np.testing.assert_allclose(total, sum(terms), rtol=1e-5)

    relative = np.sum(np.cos((i - j) * 10_000.0 ** (-np.arange(4) / 4)))
    np.testing.assert_allclose(terms[3], relative, rtol=1e-5)
    np.testing.assert_allclose(table[i + shift] @ table[j + shift], relative, rtol=1e-5)
    between = jnp.diag(np.eye(8)[0])  # W_q^T W_k
    before, after = (table[i + s] @ between @ table[j + s] for s in (0, shift))
    assert abs(before - after) > 0.5


def test_sinusoid_products_through_a_diagonal_matrix():
    """inventory row 33: with p_m^T H p_n and H diagonal the result is a function of m - n only if
    the entries of each pair are equal; otherwise a term cos((m + n) theta) stays."""
    p, theta = np.asarray(sinusoid(20, 6), np.float64), 10_000.0 ** (-np.arange(3) / 3)
    equal, unequal = np.repeat([0.3, -1.0, 2.0], 2), np.tile([1.0, 0.0], 3)

    def g(diagonal, m, n):
        return p[m] @ (diagonal * p[n])

    np.testing.assert_allclose(g(equal, 1, 0), g(equal, 6, 5), atol=1e-6)
    assert abs(g(unequal, 1, 0) - g(unequal, 6, 5)) > 0.2
    for m, n in [(1, 0), (6, 5)]:
        expected = np.sum(np.cos((m - n) * theta) - np.cos((m + n) * theta)) / 2
        np.testing.assert_allclose(g(unequal, m, n), expected, atol=1e-6)


def attend(query, x):
    """One softmax-attention head without projections, masks or positions."""
    return jax.nn.softmax(x @ query) @ x


def test_positions_break_the_symmetry(normal):
    """inventory rows 30, 31: without a mask f(x, y) = f(y, x), and f(x + p0, y + p1) is not.

    What a causal mask does to it is in the tests of attention.
    """
    query, x = normal(6), normal(2, 6)
    positions = sinusoid(2, 6)
    np.testing.assert_allclose(attend(query, x), attend(query, x[::-1]), atol=1e-6)
    there, back = attend(query, x + positions), attend(query, x[::-1] + positions)
    assert np.abs(there - back).max() > 0.1


def test_positions_to_second_order(normal):
    """inventory row 32: up to terms of third order in p the only one that holds both positions is
    p_m^T H p_n, H the mixed second derivative. So half of p leaves an eighth, 2^-3: the mean over
    64 draws (3.06; in 56 of them 2.7 to 3.3), since in one the third order may nearly cancel."""

    def remainders(query, x_m, x_n, p_m, p_n):
        def f(x_m, x_n):
            return jnp.sum(jnp.sin(attend(query, jnp.stack([x_m, x_n]))))

        H = jax.jacfwd(jax.grad(f, argnums=0), argnums=1)(x_m, x_n)

        def remainder(size):
            m, n = size * p_m, size * p_n
            both = f(x_m + m, x_n + n) - f(x_m + m, x_n) - f(x_m, x_n + n) + f(x_m, x_n)
            return jnp.abs(both - m @ H @ n)

        return remainder(0.1), remainder(0.05)

    large, small = jax.jit(jax.vmap(remainders))(*normal(5, 64, 4))
    slopes = np.log2(large / small)
    assert 2.7 < slopes.mean() < 3.3, slopes


def test_final_embedding_is_token_plus_position(normal):
    """inventory row 103: the input of the first block is token + position, sinusoid or learned."""
    tokens, table = normal(2, 5, 6), normal(7, 6)
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]])  # the second row is packed
    for encode in (lambda p: F.sinusoidal_positions(p, 6), lambda p: F.learned_positions(table, p)):
        difference = tokens + encode(positions) - tokens
        np.testing.assert_allclose(difference[1, 3:], difference[0, :2], atol=1e-6)


def test_sinusoid_beyond_training():
    """inventory rows 39, 136: a learned table has no row past its end; a sinusoid needs no length.

    That quality falls past the training length all the same is a matter of experiment.
    """
    table = np.ones((4, 6))
    assert np.all(np.isnan(F.learned_positions(table, np.array([4]))))
    far = np.array([4.0, 1e6, -3.0, 0.5])
    expected = sinusoid64(np.asarray(far), 6)
    np.testing.assert_allclose(F.sinusoidal_positions(far, 6), expected, atol=0.1)
    np.testing.assert_allclose(F.sinusoidal_positions(far[2:], 6), expected[2:], atol=1e-6)


# Sinusoids: dtypes, gradient, errors


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "bfloat16", "float16", "float32"])
def test_sinusoid_of_any_dtype_is_float32(dtype):
    actual = F.sinusoidal_positions(np.arange(100).astype(dtype), 6)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(actual, sinusoid(100, 6))


def test_sinusoid_gradient_in_the_position():
    """d sin(p w) / dp = w cos(p w): features of a pair are each other's derivatives."""
    features = lambda p: F.sinusoidal_positions(p[None], 6)[0]  # noqa: E731
    derivative = jax.jit(jax.jacfwd(features))(np.float32(0.7))
    sin, cos = np.asarray(sinusoid64(0.7, 6)).reshape(3, 2).T
    w = 10_000.0 ** (-np.arange(3) / 3)
    expected = np.stack([w * cos, -w * sin], axis=-1).ravel()
    np.testing.assert_allclose(derivative, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "dim, layout, message",
    [
        (7, "interleaved", "dim must be even and at least 2 for .*; got 7"),
        (0, "halves", "dim must be even and at least 2 for .*; got 0"),
        (2, "tensor2tensor", "dim must be even and at least 4 for .*; got 2"),
        (6, "zigzag", "layout must be one of .*interleaved.*; got 'zigzag'"),
    ],
)
def test_sinusoid_errors(dim, layout, message):
    """inventory row 104: features come in pairs, 2 i + 1 <= d - 1, so an odd d is an error."""
    with pytest.raises(ValueError, match=message):
        F.sinusoidal_positions(np.arange(3), dim, layout=layout)


# All kinds of position


def score_sinusoid(q, k, i, j):
    p = F.sinusoidal_positions(np.array([i, j]), 6)
    return (q + p[0]) @ (k + p[1])


def score_learned(q, k, i, j):
    table = np.float32(np.random.default_rng(1).normal(size=(64, 6)))
    p = F.learned_positions(table, np.array([i, j]))
    return (q + p[0]) @ (k + p[1])


def score_alibi(q, k, i, j):
    return q @ k + F.alibi_bias(F.alibi_slopes(1), np.array([i]), np.array([j]))[0, 0, 0]


def score_t5(q, k, i, j):
    table = np.arange(32.0)[:, None]
    buckets = F.relative_position_buckets(np.array([[j - i]]), bidirectional=True)
    return q @ k + F.relative_position_bias(table, buckets)[0, 0, 0]


def score_rope(q, k, i, j):
    r = F.rope_rotations(np.array([i, j]), F.rope_frequencies(6))
    return F.rotate(q[None, None], r[:1])[0, 0] @ F.rotate(k[None, None], r[1:])[0, 0]


@pytest.mark.parametrize(
    "score, is_relative",
    [
        (score_sinusoid, False),
        (score_learned, False),
        (score_alibi, True),
        (score_t5, True),
        (score_rope, True),
    ],
)
def test_which_positions_are_relative(normal, score, is_relative):
    """inventory rows 36, 37: sine, absolute, relative and rotary positions all exist; a kind is
    relative if <f(x, i), f(y, j)> depends on i - j only."""
    q, k = normal(6), normal(6)
    here = score(q, k, 9, 4)
    moved = jnp.stack([score(q, k, 9 + s, 4 + s) for s in (1, 20, 50)])
    assert np.allclose(moved, here, atol=1e-4) is is_relative
    assert not np.allclose(score(q, k, 9, 5), here, atol=1e-4)  # but positions do matter


# ALiBi


@pytest.mark.parametrize("num_heads", sorted(map(int, GOLDEN["slopes"])))
def test_alibi_slopes_match_bloom(num_heads):
    expected = GOLDEN["slopes"][str(num_heads)]
    np.testing.assert_allclose(F.alibi_slopes(num_heads), expected, rtol=1e-6)


def test_alibi_slopes_of_any_number_of_heads():
    """inventory row 113: 2 ** (-8 h / n) holds for powers of two; else every other slope of the
    next series follows."""
    np.testing.assert_array_equal(F.alibi_slopes(8), 0.5 ** np.arange(1, 9))
    twelve = F.alibi_slopes(12)
    np.testing.assert_array_equal(twelve[:8], F.alibi_slopes(8))
    np.testing.assert_allclose(twelve[8:], [0.70711, 0.35355, 0.17678, 0.08839], atol=1e-5)
    assert np.abs(twelve - 2.0 ** (-8 * np.arange(1, 13) / 12)).max() > 0.1  # not the formula


def test_alibi_bias_is_the_distance():
    """inventory row 114: under a causal mask D_ij = -(i - j), a lower-triangular matrix."""
    positions = np.arange(4)
    bias = F.alibi_bias(np.array([0.5, 3.0]), positions, positions)
    lower = [[0, 0, 0, 0], [-1, 0, 0, 0], [-2, -1, 0, 0], [-3, -2, -1, 0]]
    np.testing.assert_array_equal(np.tril(bias[0]), 0.5 * np.array(lower))
    np.testing.assert_array_equal(bias[1], 6.0 * bias[0])
    np.testing.assert_array_equal(bias, bias.swapaxes(1, 2))


@pytest.mark.slow
def test_alibi_bias_equals_blooms_after_softmax(normal):
    """BLOOM adds slope * j instead, the same up to a number per query that softmax cancels."""
    scores, slopes, positions = normal(3, 5, 5), F.alibi_slopes(3), np.arange(5)
    causal = jnp.tri(5, dtype=bool)[None]
    ours = scores + F.alibi_bias(slopes, positions, positions)
    blooms = scores + np.broadcast_to(jnp.outer(slopes, np.arange(5.0))[:, None], (3, 5, 5))
    weights = [jax.nn.softmax(jnp.where(causal, s, -jnp.inf)) for s in (ours, blooms)]
    np.testing.assert_allclose(*weights, atol=1e-6)


def test_alibi_bias_of_a_batch_is_the_bias_of_each_text():
    slopes = F.alibi_slopes(3)
    queries, keys = np.array([[4, 5], [1, 2]]), np.array([[0, 1, 2, 3, 4], [7, 0, 1, 2, 9]])
    actual = F.alibi_bias(slopes, queries, keys)
    assert actual.shape == (2, 3, 2, 5) and actual.dtype == jnp.float32
    for b in range(2):
        np.testing.assert_array_equal(actual[b], F.alibi_bias(slopes, queries[b], keys[b]))
        for h, i, j in [(0, 1, 2), (2, 0, 4)]:
            expected = -slopes[h] * abs(int(queries[b, i]) - int(keys[b, j]))
            np.testing.assert_allclose(actual[b, h, i, j], expected, rtol=1e-6)


def test_alibi_bias_at_far_positions_is_exact():
    far = F.alibi_bias(np.array([1.0], jnp.bfloat16), np.array([10**6]), np.array([1, 999_999]))
    np.testing.assert_array_equal(far[0, 0], [-999_999, -1])


def test_alibi_gradient_in_the_slopes():
    q, k = np.array([3, 4]), np.array([0, 1, 2])
    gradient = jax.grad(lambda slopes: F.alibi_bias(slopes, q, k).sum())(np.array([0.5, 2.0]))
    np.testing.assert_allclose(gradient, -np.abs(np.subtract.outer(q, k)).sum() * np.ones(2))


def test_alibi_errors():
    with pytest.raises(ValueError, match="num_heads must be positive; got 0"):
        F.alibi_slopes(0)


# T5


def test_t5_buckets_documents_question():
    """inventory row 112: "learn when coding"; 32 buckets, distances up to 128."""
    both = F.relative_position_buckets(np.arange(-10, 11), bidirectional=True)
    expected = [8, 8, 8, 7, 6, 5, 4, 3, 2, 1, 0, 17, 18, 19, 20, 21, 22, 23, 24, 24, 24]
    np.testing.assert_array_equal(both, expected)
    distances = np.array([0, -1, -15, -16, -17, -64, -127, -128, -1000, 5])
    causal = F.relative_position_buckets(distances, bidirectional=False)
    np.testing.assert_array_equal(causal, [0, 1, 15, 16, 16, 26, 31, 31, 31, 0])


@pytest.mark.parametrize(
    "case",
    GOLDEN["buckets"],
    ids=lambda c: (
        f"{'both' if c['bidirectional'] else 'left'}-{c['num_buckets']}-{c['max_distance']}"
    ),
)
def test_t5_buckets_match_transformers(case):
    expected = np.repeat(*np.asarray(case["runs"]).T)
    options = {name: value for name, value in case.items() if name != "runs"}
    actual = F.relative_position_buckets(np.arange(-2000, 2001), **options)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(bidirectional=st.booleans(), num_buckets=st.integers(4, 40), room=st.integers(1, 500))
def test_t5_buckets_are_ordered_and_in_range(bidirectional, num_buckets, room):
    exact = num_buckets // 4 if bidirectional else num_buckets // 2
    distances = np.arange(0, -1000, -1, dtype=jnp.int16)
    buckets = np.asarray(
        F.relative_position_buckets(
            distances,
            bidirectional=bidirectional,
            num_buckets=num_buckets,
            max_distance=exact + room,
        )
    )
    last = (num_buckets // 2 if bidirectional else num_buckets) - 1
    assert np.all(np.diff(buckets) >= 0) and buckets[0] == 0
    np.testing.assert_array_equal(buckets[:exact], np.arange(exact))
    assert np.all(buckets[exact + room :] == last) and buckets.max() == last


def test_fire_is_its_formula_in_float64(normal):
    """At each pair, from near to far beyond the length from where distances are relative."""
    kernel, hidden_bias, out, out_bias = normal(1, 5), normal(5), normal(5, 3), normal(3)
    c, length = np.float32(-0.3), np.float32(-6.5)  # their sizes count, not their signs
    queries, keys = np.array([[0, 3, 9, 40_000], [1, 2, 6, 7]]), np.arange(5)
    actual = F.fire_bias(
        queries, keys, hidden_kernel=kernel, hidden_bias=hidden_bias,
        out_kernel=out, out_bias=out_bias, c=c, length=length,
    )  # fmt: skip
    assert actual.shape == (2, 3, 4, 5)
    wide = [np.asarray(x, np.float64) for x in (kernel, hidden_bias, out, out_bias)]
    for b, n, i, j in np.ndindex(*actual.shape):
        q, k = float(queries[b, i]), float(keys[j])
        scale = np.log(abs(float(c)) * max(q, 6.5) + 1) + 1e-6
        x = np.log(abs(float(c) * (q - k)) + 1) / scale
        expected = np.maximum(x * wide[0][0] + wide[1], 0) @ wide[2][:, n] + wide[3][n]
        np.testing.assert_allclose(actual[b, n, i, j], expected, rtol=2e-5, atol=2e-5)


def test_t5_bias_is_one_number_per_head_and_bucket(normal):
    """inventory row 111: each head has its own beta(i - j), as each has its own W_q and W_k."""
    table = normal(8, 3)
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    relative = positions[:, None, :] - positions[:, 1:3, None]
    buckets = F.relative_position_buckets(
        relative, bidirectional=True, num_buckets=8, max_distance=14
    )
    bias = F.relative_position_bias(table, buckets)
    per_row = F.t5_bias(table, positions[:, 1:3], positions, bidirectional=True, max_distance=14)
    np.testing.assert_array_equal(per_row, bias)
    assert bias.shape == (2, 3, 2, 5)
    for b, h, i, j in np.ndindex(*bias.shape):
        assert bias[b, h, i, j] == table[buckets[b, i, j], h]
    for b in range(2):
        np.testing.assert_array_equal(bias[b], F.relative_position_bias(table, buckets[b]))
    assert not np.array_equal(bias[:, 0], bias[:, 1])


def test_t5_bias_keeps_dtype_and_shows_missing_rows():
    bias = F.relative_position_bias(np.ones((4, 1), jnp.bfloat16), np.array([[3, 4, 31]]))
    assert bias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.isnan(bias)[0, 0], [False, True, True])


def test_t5_bias_gradient_counts_lookups():
    buckets = np.array([[0, 1, 1], [2, 1, 0]])
    gradient = jax.grad(lambda t: F.relative_position_bias(t, buckets).sum())(np.zeros((4, 2)))
    np.testing.assert_array_equal(gradient, np.repeat([[2], [3], [1], [0]], 2, axis=1))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bidirectional": True, "num_buckets": 3}, "num_buckets must be at least 4; got 3"),
        ({"bidirectional": False, "num_buckets": 1}, "num_buckets must be at least 2; got 1"),
        ({"bidirectional": False, "max_distance": 16}, "exceed the 16 distances .*; got 16"),
        ({"bidirectional": True, "max_distance": 5}, "exceed the 8 distances .*; got 5"),
    ],
)
def test_t5_errors(options, message):
    with pytest.raises(ValueError, match=message):
        F.relative_position_buckets(np.arange(3), **options)


# Transformer-XL


def xl_by_hand(query, kernel, queries, keys, base=10_000.0):
    """Pair by pair, in float64: what the query makes of the sinusoid of the distance."""
    query, kernel = np.asarray(query, np.float64), np.asarray(kernel, np.float64)
    width = kernel.shape[0]
    frequencies = base ** (-np.arange(0, width, 2) / width)
    bias = np.zeros((query.shape[1], len(queries), len(keys)))
    for i, j in np.ndindex(len(queries), len(keys)):
        phase = (queries[i] - keys[j]) * frequencies
        wave = np.concatenate([np.sin(phase), np.cos(phase)])
        bias[:, i, j] = np.einsum("nh,dnh,d->n", query[i], kernel, wave)
    return bias


@pytest.mark.parametrize("bidirectional", [False, True])
def test_transformer_xl_projects_the_sinusoid_of_the_distance(normal, bidirectional):
    query, kernel = normal(5, 3, 2), normal(6, 3, 2)
    queries, keys = np.arange(2, 7), np.asarray([4, 0, 1, 2, 3, 5, 6])
    actual = F.transformer_xl_bias(
        query,
        kernel,
        np.asarray(queries),
        np.asarray(keys),
        base=500.0,
        bidirectional=bidirectional,
    )
    expected = xl_by_hand(query, kernel, queries, keys, base=500.0)
    seen = np.ones((5, 7), bool) if bidirectional else keys <= queries[:, None]
    np.testing.assert_allclose(actual[:, seen], expected[:, seen], atol=1e-5)
    assert np.all(np.isfinite(actual))


def test_transformer_xl_depends_on_distances_only_and_rows_have_their_own(normal):
    query, kernel = normal(2, 4, 3, 2), normal(6, 3, 2)
    at = np.asarray([[0, 1, 2, 3], [7, 8, 9, 10]])
    both = F.transformer_xl_bias(query, kernel, at, at)
    shared = F.transformer_xl_bias(query, kernel, at[0], at[0])
    np.testing.assert_allclose(both, shared, atol=1e-6)
    alone = F.transformer_xl_bias(query[1], kernel, at[1], at[1])
    np.testing.assert_allclose(both[1], alone, atol=1e-6)


def test_transformer_xl_answers_nan_where_positions_have_gaps(normal):
    at = np.asarray([0, 1, 5])
    bias = F.transformer_xl_bias(normal(3, 1, 2), normal(4, 1, 2), at, at)
    np.testing.assert_array_equal(
        np.isnan(bias[0]), [[False] * 3, [False] * 3, [True, True, False]]
    )


@pytest.mark.slow
def test_transformer_xl_has_a_gradient(normal):
    query, kernel, at = normal(3, 1, 2), normal(4, 1, 2), np.arange(3)

    def f(kernel):
        return jnp.sum(jnp.sin(F.transformer_xl_bias(query, kernel, at, at)))

    step = normal(4, 1, 2)
    slope = (f(kernel + 1e-2 * step) - f(kernel - 1e-2 * step)) / 2e-2
    np.testing.assert_allclose(jnp.vdot(jax.grad(f)(kernel), step), slope, rtol=1e-2)


# Scale of queries


def test_query_scale_steps_at_multiples_of_the_training_length():
    positions = np.array([[-3, 0, 6, 7], [13, 14, 20, 700]])
    floors = np.array([[0, 0, 0, 1], [1, 2, 2, 100]])
    actual = F.query_scale(np.asarray(positions), beta=0.3, original_max_length=7)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, 1 + 0.3 * np.log(1.0 + floors), rtol=1e-6)
    with pytest.raises(ValueError, match=r"original_max_length must be positive; got 0\."):
        F.query_scale(jnp.asarray(positions), beta=0.3, original_max_length=0)


def test_query_power_is_a_power_of_the_number_of_keys():
    positions = np.array([[-3, 0, 6], [13, 20, 70_000]])
    actual = F.query_power(jnp.asarray(positions), exponent=0.3, length=7)
    assert actual.dtype == jnp.float32
    expected = (1 + np.array([[0, 1, 7], [14, 21, 70_001]]) / 7) ** 0.3
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"length must be positive; got 0\."):
        F.query_power(jnp.asarray(positions), exponent=0.3, length=0)
