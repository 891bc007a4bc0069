import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import data
from jaxformer import functional as F
from jaxformer.data import (
    PaddedLengths,
    Pair,
    PairBatches,
    evaluation_pair_batches,
    make_pair_batch,
)

LETTERS = data.CharacterTokenizer("abcdefg")
END = LETTERS.end_of_text
SHORT_OR_LONG = PaddedLengths((3, 7), 5)


def numbered(index):
    """A source of 1 to 7 letters and a target of 1 to 4 that tell the number."""
    length = 1 + index * 5 % 7
    spelled = [LETTERS.decode([index // 7**i % 7]) for i in range(4)]
    return Pair("abcdefg"[:length], "".join(spelled)[: 1 + index % 4])


def batches(**how):
    how = {"batch_size": 4, "lengths": SHORT_OR_LONG, "group": 3, **how}
    return PairBatches(numbered, LETTERS, **how)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def texts(batch):
    """Pairs of a batch, read back from what the model sees."""
    sources = (
        row[: count.sum()] for row, count in zip(batch.source, batch.source_segments, strict=True)
    )
    targets = (
        row[: count.sum()] for row, count in zip(batch.targets, batch.loss_mask, strict=True)
    )
    return [Pair(*map(LETTERS.decode, pair)) for pair in zip(sources, targets, strict=True)]


# One batch


def test_a_batch_by_hand():
    batch = make_pair_batch([Pair("ab", "c"), Pair("gfe", "dcb")], LETTERS, lengths=SHORT_OR_LONG)
    assert batch.source.tolist() == [[0, 1, END], [6, 5, 4]]
    assert batch.source_segments.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.tokens.tolist() == [[END, 2, END, END, END], [END, 3, 2, 1, END]]
    assert batch.targets.tolist() == [[2, END, END, END, END], [3, 2, 1, END, END]]
    assert batch.loss_mask.tolist() == [[True, True, False, False, False], [True] * 4 + [False]]
    assert [x.dtype.name for x in batch] == ["int32"] * 4 + ["bool"]


def test_the_decoder_reads_the_targets_shifted_right():
    """As `F.shift_right` has it, which the tests of `functional` hold against its definition."""
    batch = batches()[2]
    np.testing.assert_array_equal(batch.tokens, F.shift_right(jnp.asarray(batch.targets), END))


def test_sources_take_the_first_length_that_holds_the_longest():
    widths = [
        make_pair_batch(
            [Pair("a", "b"), Pair(source, "b")], LETTERS, lengths=SHORT_OR_LONG
        ).source.shape
        for source in ("a", "abc", "abcd", "abcdefg")
    ]
    assert widths == [(2, 3), (2, 3), (2, 7), (2, 7)]


@pytest.mark.parametrize(
    "pair, message",
    [
        (Pair("abcdefga", "a"), "The longest source has 8 tokens, more than the padded length 7"),
        (Pair("a", "abcde"), "The longest target has 6 tokens, more than the padded length 5"),
        (Pair("", "abc"), "A source has no tokens; its target is 'abc'"),
        (
            Pair("a!", "abc"),
            r"Character '!' \(U\+0021\) at 1, in line 1 of the text, is not among the 7 of",
        ),
    ],
)
def test_a_text_that_does_not_fit_is_refused(pair, message):
    with pytest.raises(ValueError, match=message):
        make_pair_batch([Pair("a", "b"), pair], LETTERS, lengths=SHORT_OR_LONG)


# Batches of a run


def test_every_group_has_its_pairs_once_in_batches_of_similar_length():
    drawn, spans = batches(), []
    for group in range(4):
        some = [texts(drawn[3 * group + i]) for i in range(3)]
        assert sorted(sum(some, [])) == sorted(map(numbered, range(12 * group, 12 * group + 12)))
        spans += [[len(pair.source) for pair in batch] for batch in some]
        ordered = sorted(spans[-3:])
        assert all(max(a) <= min(b) for a, b in zip(ordered, ordered[1:], strict=False))
    shortest_first = [max(spans[i]) <= min(spans[i + 1]) for i in (0, 3, 6, 9)]
    assert not all(shortest_first), "the batches of a group are in order of length"
    assert {batch.source.shape for batch in map(drawn.__getitem__, range(12))} == {(4, 3), (4, 7)}


def test_without_groups_pairs_come_in_their_order_of_length_within_the_batch():
    drawn = batches(group=1)
    for step in range(3):
        expected = sorted(map(numbered, range(4 * step, 4 * step + 4)), key=lambda p: len(p.source))
        assert texts(drawn[step]) == expected


def test_seeking_is_iterating():
    whole = list(itertools.islice(batches(), 8))
    for step in (5, 0, 7, 2):
        assert equal(batches()[step], whole[step])
        assert equal(batches()[np.int32(step)], whole[step])


@pytest.mark.parametrize(
    "how, message",
    [
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"group": 0}, "group must be at least 1; got 0"),
        ({"lengths": PaddedLengths((), 5)}, r"got \(\) for sources and 5 for targets"),
        (
            {"lengths": PaddedLengths((7, 3), 5)},
            r"source lengths increasing; got \(7, 3\) for sources",
        ),
        (
            {"lengths": PaddedLengths((0, 3), 5)},
            r"Lengths must be at least 1, .* got \(0, 3\) for sources",
        ),
        ({"lengths": PaddedLengths((3,), 0)}, r"got \(3,\) for sources and 0 for targets"),
    ],
)
def test_what_cannot_be_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        batches(**how)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step must be at least 0; got -1"):
        batches()[-1]


# Batches of an evaluation


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_an_evaluation_has_every_pair_once_in_order_and_one_shape(count):
    pairs = [numbered(i) for i in range(count)]
    lengths = PaddedLengths((7,), 5)
    batches = list(evaluation_pair_batches(pairs, LETTERS, batch_size=4, lengths=lengths))
    assert len(batches) == -(-count // 4)
    assert {batch.source.shape for batch in batches} == {(4, 7)}
    real = np.concatenate([batch.loss_mask.any(axis=1) for batch in batches])
    assert real.tolist() == [True] * count + [False] * (len(real) - count)
    assert sum(map(texts, batches), [])[:count] == pairs


def test_an_evaluation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="There are no pairs to make batches of"):
        evaluation_pair_batches([], LETTERS, batch_size=4, lengths=SHORT_OR_LONG)
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        evaluation_pair_batches([numbered(0)], LETTERS, batch_size=0, lengths=SHORT_OR_LONG)
