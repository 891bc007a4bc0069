"""Rearrangements against loops over single numbers, and back again bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from jaxformer.interop import transforms as t
from jaxformer.interop.families.llama_like import QUERY_AND_GATE
from jaxformer.interop.transforms import Rearrange, Scaled, SwapHeadHalves

D, N, K, H, F = 5, 6, 2, 3, 7
QKV = [(D, N, H), (D, K, H), (D, K, H)]


def numbered(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def split(transform, theirs, ours):
    """Ours, after checks that their shape was foreseen and that joining undoes splitting."""
    transform = Rearrange(transform) if isinstance(transform, str) else transform
    assert transform.hf_shape(ours) == theirs.shape
    parts = transform.from_hf(theirs, ours)
    assert [part.shape for part in parts] == list(ours)
    np.testing.assert_array_equal(transform.to_hf(parts), theirs)
    return parts


def test_same_and_flat():
    x = numbered((D,))
    np.testing.assert_array_equal(split(t.SAME, x, [(D,)])[0], x)
    assert split(t.SAME, numbered(()), [()])[0] == 0
    bias = numbered((N * H,))
    (ours,) = split(t.FLAT, bias, [(N, H)])
    assert ours[4, 2] == bias[4 * H + 2]
    (ours,) = split("x -> 1 x", numbered((1, F)), [(F,)])
    np.testing.assert_array_equal(ours, np.arange(F))


@pytest.mark.parametrize("outputs_first", [True, False])
def test_kernels(outputs_first):
    def of(matrix, i, o):
        return matrix[o, i] if outputs_first else matrix[i, o]

    size = (N * H, D) if outputs_first else (D, N * H)
    theirs = numbered(size)
    (ours,) = split(t.LINEAR if outputs_first else t.CONV1D, theirs, [(D, N, H)])
    for d in range(D):
        for n in range(N):
            for h in range(H):
                assert ours[d, n, h] == of(theirs, d, n * H + h)
    theirs = numbered(size[::-1])
    of_heads = t.LINEAR_OF_HEADS if outputs_first else t.CONV1D_OF_HEADS
    (ours,) = split(of_heads, theirs, [(N, H, D)])
    for d in range(D):
        for n in range(N):
            for h in range(H):
                assert ours[n, h, d] == of(theirs, n * H + h, d)


def test_fused_rows_and_columns():
    theirs = numbered(((N + 2 * K) * H, D))
    query, key, value = split(t.LINEAR, theirs, QKV)
    assert query[3, 4, 1] == theirs[4 * H + 1, 3]
    assert key[3, 1, 2] == theirs[N * H + 1 * H + 2, 3]
    assert value[0, 1, 2] == theirs[(N + K) * H + 1 * H + 2, 0]
    theirs = numbered((D, 3 * N * H))
    query, key, value = split(t.CONV1D, theirs, [(D, N, H)] * 3)
    assert query[3, 4, 1] == theirs[3, 4 * H + 1]
    assert key[3, 4, 1] == theirs[3, N * H + 4 * H + 1]
    assert value[3, 4, 1] == theirs[3, 2 * N * H + 4 * H + 1]
    biases = numbered(((N + 2 * K) * H,))
    _, key, _ = split(t.FLAT, biases, [(N, H), (K, H), (K, H)])
    assert key[1, 2] == biases[N * H + H + 2]


def test_constants_that_parameters_absorb():
    """Each part of a tensor times its own; 1 leaves the bits as they are."""
    theirs = numbered((N * H + F, D))
    scaled = Scaled(part=Rearrange(t.LINEAR), factors=(2.0, 1.0))
    heads, rest = split(scaled, theirs, [(D, N, H), (D, F)])
    assert heads[3, 4, 1] == 2 * theirs[4 * H + 1, 3]
    assert rest[3, 2] == theirs[N * H + 2, 3]
    narrow = theirs.astype(ml_dtypes.bfloat16)
    third = Scaled(part=Rearrange(t.LINEAR), factors=(1 / 3,)).from_hf(narrow, [(D, N * H + F)])[0]
    assert third.dtype == np.float32  # rounded once, when it is stored
    np.testing.assert_array_equal(third, np.float32(narrow).T * np.float32(1 / 3))
    as_it_was = Scaled(part=Rearrange(t.SAME), factors=(1.0,))
    kept = as_it_was.from_hf(narrow, [narrow.shape])[0]
    assert kept.dtype == narrow.dtype and kept.tobytes() == narrow.tobytes()


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_grouped_heads(groups):
    """Row of each output: group, then place in it (queries, key, value), then feature."""
    queries = N // groups
    theirs = numbered((groups * (queries + 2) * H, D))
    shapes = [(D, N, H), (D, groups, H), (D, groups, H)]
    query, key, value = split(t.BY_GROUP[0], theirs, shapes)
    biases = split(t.BY_GROUP[1], theirs[:, 0], [shape[1:] for shape in shapes])
    for group in range(groups):
        start = group * (queries + 2) * H
        for h in range(H):
            for place in range(queries):
                row = theirs[start + place * H + h]
                np.testing.assert_array_equal(query[:, group * queries + place, h], row)
                assert biases[0][group * queries + place, h] == row[0]
            np.testing.assert_array_equal(key[:, group, h], theirs[start + queries * H + h])
            np.testing.assert_array_equal(value[:, group, h], theirs[start + (queries + 1) * H + h])
            assert biases[2][group, h] == theirs[start + (queries + 1) * H + h, 0]


def test_keys_and_values_head_by_head():
    V = 4
    theirs = numbered((N * (H + V), D))
    key, value = split(t.LINEAR_BY_GROUP, theirs, [(D, N, H), (D, N, V)])
    for d, n in np.ndindex(D, N):
        start = n * (H + V)
        np.testing.assert_array_equal(key[d, n], theirs[start : start + H, d])
        np.testing.assert_array_equal(value[d, n], theirs[start + H : start + H + V, d])


def test_queries_and_gates_head_by_head():
    """Qwen 3 Next's q_proj: of each head the query, then the gate of its output."""
    theirs = numbered((2 * N * H, D))
    (paths, transform) = QUERY_AND_GATE.param_paths, QUERY_AND_GATE.transform
    assert paths == ("attention/query/kernel", "attention/output_gate/kernel")
    query, gate = split(transform, theirs, [(D, N, H)] * 2)
    for d, n in np.ndindex(D, N):
        np.testing.assert_array_equal(query[d, n], theirs[2 * n * H : (2 * n + 1) * H, d])
        np.testing.assert_array_equal(gate[d, n], theirs[(2 * n + 1) * H : 2 * (n + 1) * H, d])


def test_interleaved():
    theirs = numbered((2 * F, D))
    gate, up = split(t.IN_TURN[0], theirs, [(D, F)] * 2)
    for f in range(F):
        np.testing.assert_array_equal(gate[:, f], theirs[2 * f])
        np.testing.assert_array_equal(up[:, f], theirs[2 * f + 1])
    _, up = split(t.IN_TURN[1], theirs[:, 0], [(F,)] * 2)
    np.testing.assert_array_equal(up, theirs[1::2, 0])
    stacked = numbered((N, D, 2 * F))
    gate, up = split("e i o -> e i (o +)", stacked, [(N, D, F)] * 2)
    for f in range(F):
        np.testing.assert_array_equal(gate[..., f], stacked[..., 2 * f])
        np.testing.assert_array_equal(up[..., f], stacked[..., 2 * f + 1])


def test_halves_of_heads():
    width = 4
    theirs = numbered((N * width, D))
    (ours,) = split(SwapHeadHalves(part=Rearrange(t.LINEAR)), theirs, [(D, N, width)])
    assert [ours[3, 2, h] for h in range(width)] == [theirs[2 * width + h, 3] for h in (2, 3, 0, 1)]
    (ours,) = split(SwapHeadHalves(part=Rearrange(t.FLAT)), numbered((N * width,)), [(N, width)])
    assert ours[1].tolist() == [6, 7, 4, 5]


@pytest.mark.parametrize("transposed", [True, False])
def test_experts_below_one_another(transposed):
    theirs = numbered((N * F, D))
    shape = (N, D, F) if transposed else (N, F, D)
    (ours,) = split("e i o -> (e o) i" if transposed else "e i o -> (e i) o", theirs, [shape])
    at = (4, 2, 6) if transposed else (4, 6, 2)
    assert ours[at] == theirs[4 * F + 6, 2]


def test_experts_behind_one_another():
    gate, up = split("e i o -> e +o i", numbered((N, 2 * F, D)), [(N, D, F)] * 2)
    theirs = numbered((N, 2 * F, D))
    assert gate[4, 2, 6] == theirs[4, 6, 2]
    assert up[4, 2, 6] == theirs[4, F + 6, 2]


def test_groups_that_are_not_heads():
    """Two heads of each of three groups: [queries | keys] of group 0, then of group 1, ..."""
    theirs = numbered((2 * N, D))
    first, second = split(Rearrange(t.LINEAR_BY_GROUP, groups=3), theirs, [(D, N)] * 2)
    for group, place in np.ndindex(3, 2):
        np.testing.assert_array_equal(first[:, 2 * group + place], theirs[4 * group + place])
        np.testing.assert_array_equal(second[:, 2 * group + place], theirs[4 * group + 2 + place])


def test_second_heads_of_pairs_behind_all_first():
    """Three pairs of key heads, each of which serves two queries."""
    theirs = numbered((12 * H, D))
    (ours,) = split(Rearrange("d (g 2 r) h -> (2 g r h) d", groups=3), theirs, [(D, 12, H)])
    for pair, second, query in np.ndindex(3, 2, 2):
        row = theirs[(6 * second + 2 * pair + query) * H + 1]
        np.testing.assert_array_equal(ours[:, 4 * pair + 2 * second + query, 1], row)


def test_taps_of_a_convolution():
    theirs = numbered((N * H + F, 1, 4))
    heads, rest = split(t.DEPTHWISE, theirs, [(4, N, H), (4, F)])
    assert heads[2, 4, 1] == theirs[4 * H + 1, 0, 2]
    assert rest[3, 5] == theirs[N * H + 5, 0, 3]


def test_a_kernel_is_split_without_a_copy():
    theirs = numbered((N * H, D))
    assert np.shares_memory(Rearrange(t.LINEAR).from_hf(theirs, [(D, N, H)])[0], theirs)


@pytest.mark.parametrize(
    ("kernel", "num_inputs", "expected"),
    [
        (t.LINEAR, 1, "rank *o -> (+*o) rank"),
        (t.LINEAR_OF_HEADS, 2, "rank d -> d rank"),
        (t.CONV1D, 1, "rank *o -> (+*o) rank"),
        (t.CONV1D_OF_HEADS, 2, "rank d -> d rank"),
        (t.LINEAR_BY_GROUP, 1, "rank (g r) *h -> (g +r *h) rank"),
        (t.IN_TURN[0], 1, "rank *o -> (*o +) rank"),
        ("e i o -> e +o i", 1, None),
        (t.DEPTHWISE, 1, None),
    ],
)
def test_outputs_of_a_kernel(kernel, num_inputs, expected):
    of_outputs = Rearrange(kernel).of_outputs(num_inputs)
    assert of_outputs == (expected and Rearrange(expected))
