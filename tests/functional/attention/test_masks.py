from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.jitted_functions import F

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "attention.npz")
WAY = np.arange(5, dtype=np.int32)

# name: function, and the positions (or segments) of 2 sequences with 5 queries and 7 keys
QUERIES = np.int32([[0, 1, 2, 3, 4], [9, 10, 11, 12, 3]])
KEYS = np.int32([[0, 1, 2, 3, 4, 5, 6], [12, 3, 4, 9, 10, 11, 99]])
FUNCTIONS = {
    "causal": F.causal_mask,
    "window": lambda q, k: F.window_mask(q, k, 3, lookahead=1),
    "chunk": lambda q, k: F.chunk_mask(q, k, 3),
    "segment": F.segment_mask,
    "prefix": lambda q, k: F.prefix_mask(q, k, 4),
    "block_sparse": lambda q, k: F.block_sparse_mask(
        q, k, num_heads=3, block_size=2, local_blocks=1, stride=4
    ),
}


def picture(*rows):
    return np.array([[mark == "x" for mark in row] for row in rows])


def test_causal_mask_is_the_lower_triangle():
    np.testing.assert_array_equal(F.causal_mask(WAY, WAY), np.tri(5, dtype=bool))


def test_causal_mask_continues_from_a_cache():
    np.testing.assert_array_equal(
        F.causal_mask(np.array([3, 4]), np.array([4, 1, 2, 3, 9])), picture(".xxx.", "xxxx.")
    )


def test_window_counts_the_query_itself():
    np.testing.assert_array_equal(
        F.window_mask(WAY, WAY, 2), picture("x....", "xx...", ".xx..", "..xx.", "...xx")
    )
    np.testing.assert_array_equal(F.window_mask(WAY, WAY, 1), np.eye(5, dtype=bool))


def test_window_looks_ahead():
    symmetric = F.window_mask(WAY, WAY, 2, lookahead=1)
    np.testing.assert_array_equal(symmetric, picture("xx...", "xxx..", ".xxx.", "..xxx", "...xx"))


def test_window_matches_transformers():
    positions = np.arange(11)
    np.testing.assert_array_equal(F.window_mask(positions, positions, 3), GOLDEN["window_3"])


def test_segments_see_themselves_only():
    segments = np.array([1, 1, 2, 2, 2, 0, 0])
    np.testing.assert_array_equal(
        F.segment_mask(segments, segments),
        picture("xx.....", "xx.....", "..xxx..", "..xxx..", "..xxx..", ".....xx", ".....xx"),
    )


def test_prefix_is_seen_by_all():
    np.testing.assert_array_equal(
        F.prefix_mask(WAY, WAY, 3), picture("xxx..", "xxx..", "xxx..", "xxxx.", "xxxxx")
    )
    np.testing.assert_array_equal(F.prefix_mask(WAY, WAY, 0), F.causal_mask(WAY, WAY))


def test_prefix_length_of_each_sequence():
    lengths = np.array([4, 10])
    together = F.prefix_mask(QUERIES, KEYS, lengths)
    for row in range(2):
        np.testing.assert_array_equal(
            together[row], F.prefix_mask(QUERIES[row], KEYS[row], int(lengths[row]))
        )


def test_key_mask_is_one_row_for_all_queries():
    valid = np.array([[True, True, False], [True, False, False]])
    mask = F.key_padding_mask(valid)
    assert mask.shape == (2, 1, 3)
    queries = np.tile(np.arange(3), (2, 1))
    np.testing.assert_array_equal(
        F.causal_mask(queries, queries) & mask,
        [picture("x..", "xx.", "xx."), picture("x..", "x..", "x..")],
    )


@pytest.mark.parametrize(
    ("num_heads", "block", "local_blocks", "stride"), [(4, 4, 2, 3), (3, 2, 1, 7), (5, 3, 2, 2)]
)
def test_block_sparse_mask_matches_the_rule_pair_by_pair(num_heads, block, local_blocks, stride):
    positions = np.arange(23)
    mask = F.block_sparse_mask(
        positions,
        positions,
        num_heads=num_heads,
        block_size=block,
        local_blocks=local_blocks,
        stride=stride,
    )
    mask, step = np.asarray(mask), max(1, int(stride / num_heads))
    for n, t, s in np.ndindex(num_heads, 23, 23):
        near = t // block - s // block < local_blocks
        remote = (s // block + n * step + 1) % stride == 0
        assert mask[n, t, s] == (s <= t and (near or remote)), (n, t, s)


def test_block_sparse_heads_together_cover_the_past():
    positions = np.arange(29)
    mask = np.asarray(
        F.block_sparse_mask(
            positions, positions, num_heads=4, block_size=2, local_blocks=1, stride=4
        )
    )
    assert mask.sum(axis=(1, 2)).max() < np.tri(29).sum()
    np.testing.assert_array_equal(mask.any(axis=0), np.tri(29))


@settings(max_examples=15, deadline=None)
@given(window=st.integers(1, 9), start=st.integers(0, 1000))
def test_window_holds_the_latest_keys(window, start):
    positions = start + np.arange(7)
    mask = F.window_mask(positions, positions, window)
    causal = F.causal_mask(positions, positions)
    np.testing.assert_array_equal(np.sum(mask, axis=-1), np.minimum(window, 1 + np.arange(7)))
    np.testing.assert_array_equal(mask & causal, mask)
    if window >= 7:
        np.testing.assert_array_equal(mask, causal)


@settings(max_examples=15, deadline=None)
@given(segments=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_segments_are_an_equivalence(segments):
    mask = np.asarray(F.segment_mask(np.array(segments), np.array(segments)))
    assert mask.diagonal().all()
    np.testing.assert_array_equal(mask, mask.T)
    np.testing.assert_array_equal(mask, (mask.astype(int) @ mask.astype(int)) > 0)


@pytest.mark.parametrize("name", ["causal", "window", "segment"])
def test_only_distances_matter(name):
    mask = FUNCTIONS[name](QUERIES, KEYS)
    np.testing.assert_array_equal(FUNCTIONS[name](QUERIES + 100, KEYS + 100), mask)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slots_may_hold_keys_in_any_order(name):
    order = np.array([6, 2, 0, 5, 1, 4, 3])
    np.testing.assert_array_equal(
        FUNCTIONS[name](QUERIES, KEYS[:, order]), FUNCTIONS[name](QUERIES, KEYS)[..., order]
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [jnp.int16, jnp.int32])
@pytest.mark.slow
@pytest.mark.slow(but=["int16-causal", "int32-window"])
def test_a_batch_is_each_sequence(name, dtype):
    function = FUNCTIONS[name]
    together = function(QUERIES.astype(dtype), KEYS.astype(dtype))
    assert together.dtype == bool
    for row in range(2):
        np.testing.assert_array_equal(together[row], function(QUERIES[row], KEYS[row]))
    np.testing.assert_array_equal(function(QUERIES[None], KEYS[None])[0], together)


def test_chunks_begin_at_position_0():
    both = F.chunk_mask(WAY, WAY, 2)
    np.testing.assert_array_equal(both, picture("xx...", "xx...", "..xx.", "..xx.", "....x"))
    later = F.chunk_mask(np.array([6, 7]), np.array([3, 4, 5, 6, 7, 8, 9]), 4)
    np.testing.assert_array_equal(later, picture(".xxxx..", ".xxxx.."))
    np.testing.assert_array_equal(F.chunk_mask(WAY, WAY, 5), np.ones((5, 5), bool))


def test_a_chunk_has_a_token():
    with pytest.raises(ValueError, match=r"A chunk has at least 1 token; got 0\."):
        F.chunk_mask(WAY, WAY, 0)


def test_masks_survive_the_largest_positions():
    last = jnp.iinfo(jnp.int32).max
    positions = np.arange(-4, 1) + last
    np.testing.assert_array_equal(
        F.window_mask(positions, positions, 2), F.window_mask(WAY, WAY, 2)
    )
    assert not F.window_mask(WAY, np.array([last]), 4096).any()
    assert not F.chunk_mask(WAY, np.array([last]), 4096).any()


def test_window_names_the_bad_numbers():
    with pytest.raises(ValueError, match="at least 1 key .* got window 0 and lookahead 0"):
        F.window_mask(WAY, WAY, 0)
    with pytest.raises(ValueError, match="lookahead of at least 0; got window 3 and lookahead -1"):
        F.window_mask(WAY, WAY, 3, lookahead=-1)


def test_block_sparse_mask_names_the_bad_numbers():
    expected = "block_size, local_blocks and stride must be at least 1; got 2, 0, 3 and 4"
    with pytest.raises(ValueError, match=expected):
        F.block_sparse_mask(WAY, WAY, num_heads=2, block_size=0, local_blocks=3, stride=4)
