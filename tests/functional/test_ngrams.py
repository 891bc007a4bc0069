"""Hashed n-grams against Python's integers: ids, documents, padding, parts of a text, devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer import functional
from tests.functional.jitted_functions import F

LARGEST = 2**63 - 1  # a multiplier, and a prime below 2 ** 28
CASES = {  # ids below, multipliers, rows of each head
    "small": (31, (3, 5, 7), (2, 3, 5, 7)),
    "as released": (
        248_320,
        (26_482_379_182_377, 37_142_857_142_855, 1_000_000_000_001),
        (20_000_003, 20_000_023, 20_000_033, 20_000_047),
    ),
    "largest": (2, (LARGEST, LARGEST - 2), (2**28 - 57, 1)),
    "wide ids": (2**31 - 1, (2**32 - 1, 2**32 + 1, 2**31 - 1, 1), (2**28, 65_537, 11)),
}


def by_hand(tokens, count, segments, valid, previous):
    """Recent tokens one by one, and the last ones: lists of what a document has had so far."""
    recent, last = np.full((*tokens.shape, count), -1), np.full((len(tokens), count - 1), -1)
    for row in range(len(tokens)):
        had, document = [x for x in previous[row] if x >= 0], None
        for t in np.flatnonzero(valid[row]):
            if document is not None and segments[row, t] != document:
                had = []
            document = segments[row, t]
            had.append(tokens[row, t])
            latest = had[::-1][:count]
            recent[row, t, : len(latest)] = latest
        for k, token in enumerate(had[::-1][: count - 1]):
            last[row, count - 2 - k] = token
    return recent, last


def ids_by_hand(recent, multipliers, vocab_sizes, start):
    """Ids of the n-grams of one token, in integers without limit."""
    tokens = [int(recent[0])]
    for token in recent[1 : len(multipliers)]:
        has_ended = tokens[1:] and tokens[-1] == start
        tokens.append(start if has_ended or token == -1 else int(token))
    mixed, ids, heads = tokens[0] * multipliers[0], [], len(vocab_sizes) // (len(multipliers) - 1)
    for k in range(1, len(multipliers)):
        mixed ^= tokens[k] * multipliers[k]
        for head in range(heads * (k - 1), heads * k):
            ids.append(mixed % vocab_sizes[head] + sum(vocab_sizes[:head]))
    return ids


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ids(case):
    below, multipliers, sizes = case
    recent = np.random.default_rng(0).integers(0, below, (2, 9, len(multipliers)), np.int32)
    recent[:, ::2, -1], recent[1, ::3, 1] = -1, 1  # before the text, and the token that ends it
    actual = F.ngram_ids(recent, multipliers, sizes, start_token=1)
    expected = [[ids_by_hand(x, multipliers, sizes, 1) for x in row] for row in recent]
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == np.int32


def test_a_document_ends_with_its_last_token():
    """The token that ends a text is of this text; what comes after it sees nothing of the text."""
    ids = partial(F.ngram_ids, multipliers=(3, 5, 7), vocab_sizes=(101, 103), start_token=1)
    recent = F.recent_tokens(np.array([4, 5, 1, 6, 7]), 3)[0]
    other = F.recent_tokens(np.array([8, 9, 1, 6, 7]), 3)[0]
    np.testing.assert_array_equal(ids(recent)[3:], ids(other)[3:])
    assert (ids(recent)[2] != ids(other)[2]).all()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("given", ["", "segments", "valid", "segments and valid"])
def test_recent_tokens(given, count):
    rng = np.random.default_rng(count)
    tokens, previous = rng.integers(0, 50, (5, 11)), rng.integers(0, 50, (5, count - 1))
    previous[0], previous[1, : count // 2] = -1, -1
    segments, valid = np.sort(rng.integers(0, 4, (5, 11))), rng.random((5, 11)) < 0.6
    valid[2] = False
    masks = {name: x for name, x in dict(segments=segments, valid=valid).items() if name in given}
    actual, last = F.recent_tokens(tokens, count, previous=previous, **masks)
    everywhere = dict(segments=np.zeros_like(tokens), valid=np.ones(tokens.shape, bool)) | masks
    expected, after = by_hand(tokens, count, previous=previous, **everywhere)
    counted = everywhere["valid"]
    np.testing.assert_array_equal(actual[counted], expected[counted])
    np.testing.assert_array_equal(last, after)


def test_a_text_in_parts_is_the_whole():
    tokens = np.arange(7)
    whole, last = F.recent_tokens(tokens, 4)
    before, parts = None, []
    for part in (tokens[:1], tokens[1:2], tokens[2:]):
        recent, before = F.recent_tokens(part, 4, previous=before)
        parts.append(recent)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(before, last)


@pytest.mark.parametrize("masked", [False, True])
def test_recent_tokens_of_a_sharded_sequence(masked):
    """Each of four devices has an early and a late part, shorter than the n-gram."""
    order = functional.zigzag_order(8, 4)
    mesh = jax.make_mesh((4,), ("parts",), (AxisType.Auto,), devices=jax.devices()[:4])
    tokens = np.random.default_rng(0).integers(0, 50, (3, 8))
    segments = np.sort(np.random.default_rng(1).integers(0, 3, (3, 8))) if masked else tokens * 0
    function = lambda x, y: functional.recent_tokens(  # noqa: E731
        x, 4, segments=y if masked else None, axis_name="parts"
    )
    spec = P(None, "parts")
    sharded = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=(spec, P()), check_vma=False)
    )
    actual, last = sharded(tokens[:, order], segments[:, order])
    expected, after = F.recent_tokens(tokens, 4, segments=segments)
    np.testing.assert_array_equal(actual, expected[:, order])
    np.testing.assert_array_equal(last, after)


def test_gates():
    """In float64; the gradient is finite where a score is zero."""
    rng = np.random.default_rng(0)
    query, key = (np.float32(rng.normal(size=(2, 5, 3, 7))) for _ in range(2))
    value = np.float32(rng.normal(size=(2, 5, 7)))
    query[0, 0] = 0
    scores = np.sum(np.float64(query) * key, axis=-1) / 7**0.5
    roots = np.sign(scores) * np.sqrt(np.maximum(np.abs(scores), 1e-6))
    expected = value[..., None, :] / (1 + np.exp(-roots))[..., None]
    np.testing.assert_allclose(F.gate_ngrams(query, key, value), expected, atol=1e-6)
    narrow = F.gate_ngrams(*(jnp.bfloat16(x) for x in (query, key, value)))
    assert narrow.dtype == jnp.bfloat16
    slopes = jax.jit(jax.grad(lambda *x: jnp.sum(functional.gate_ngrams(*x) ** 2), (0, 1, 2)))
    assert all(np.isfinite(x).all() for x in slopes(query, key, value))


def test_wrong_sizes():
    with pytest.raises(ValueError, match=r"count - 1 tokens, \(2, 3\); got \(2, 1\)"):
        functional.recent_tokens(np.zeros((2, 5), np.int32), 4, previous=np.zeros((2, 1), np.int32))
    with pytest.raises(ValueError, match="each of 3 multipliers; got 2"):
        functional.ngram_ids(np.zeros((5, 2), np.int32), (1, 3, 5), (7, 11), start_token=0)
