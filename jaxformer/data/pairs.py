"""Batches of (source, target) texts for an encoder-decoder, sorted by length."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int32

from jaxformer.checks import require
from jaxformer.data.batches import check_step
from jaxformer.data.tokenizers import Tokenizer


class Pair(NamedTuple):
    """Source text and target text."""

    source: str
    target: str


class PairBatch(NamedTuple):
    """A batch of padded sources and targets, for teacher forcing.

    Attributes:
        source: Encoder input.
        source_segments: 1 for tokens of a source, 0 for padding.
        tokens: Decoder input: a start token, then the targets before the last.
        targets: Target text and end of text.
        loss_mask: True if the target has loss: up to and including the end of text.
    """

    source: Int32[np.ndarray, "B S"]
    source_segments: Int32[np.ndarray, "B S"]
    tokens: Int32[np.ndarray, "B T"]
    targets: Int32[np.ndarray, "B T"]
    loss_mask: Bool[np.ndarray, "B T"]


class PaddedLengths(NamedTuple):
    """Padded lengths of sources and targets.

    Attributes:
        source: Increasing; a batch has the smallest that fits its longest source.
        target: Length of targets, including the end of text.
    """

    source: tuple[int, ...]
    target: int


class PairBatches:
    """Infinite batches of pairs of similar length; ``batches[step]`` is a pure function of step.

    The pairs of every `group` batches are sorted by source length and split into batches, whose
    order is shuffled. A group depends on its index only, so a run resumes at the next step.

    References:
        Vaswani et al., Attention Is All You Need, 2017, section 5.1 (batches of sentences
            of about one length). arXiv:1706.03762
    """

    def __init__(
        self,
        get_pair: Callable[[int], Pair],
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        lengths: PaddedLengths,
        group: int = 1,
    ):
        """Set up the batches.

        Args:
            get_pair: Pure function of an index from 0 that returns a pair.
            tokenizer: Tokenizer of sources and targets.
            batch_size: Pairs of a batch.
            lengths: Padded lengths.
            group: Number of batches that are sorted together.

        Raises:
            ValueError: A number is below 1, or the source lengths are not increasing.
        """
        _check_arguments(batch_size, lengths)
        require(group >= 1, f"group must be at least 1; got {group}.")
        self._pair, self._tokenizer, self._lengths = get_pair, tokenizer, lengths
        self._batch_size, self._group = batch_size, group
        # Kept, as the next step is usually in the same group.
        self._latest: tuple[int, list[list[Pair]]] = (-1, [])

    def __getitem__(self, step: SupportsIndex) -> PairBatch:
        group_index, index_in_group = divmod(check_step(step), self._group)
        if self._latest[0] != group_index:
            self._latest = (group_index, self._load_group(group_index))
        pairs = self._latest[1][index_in_group]
        return make_pair_batch(pairs, self._tokenizer, lengths=self._lengths)

    def __iter__(self) -> Iterator[PairBatch]:
        return map(self.__getitem__, count())

    def _load_group(self, number: int) -> list[list[Pair]]:
        """Draw one group of pairs, sort it by source length, cut it into shuffled batches."""
        size, count = self._batch_size, self._batch_size * self._group
        pairs = [self._pair(i) for i in range(number * count, (number + 1) * count)]
        pairs.sort(key=lambda pair: len(pair.source))
        order = np.random.default_rng(number).permutation(self._group)
        return [pairs[batch_index * size : (batch_index + 1) * size] for batch_index in order]


def evaluation_pair_batches(
    pairs: Sequence[Pair], tokenizer: Tokenizer, *, batch_size: int, lengths: PaddedLengths
) -> Iterator[PairBatch]:
    """Yield every pair once, in order, in batches of equal shape.

    The last batch is filled with copies of its last pair, without loss.

    Args:
        pairs: Pairs to iterate over.
        tokenizer: Tokenizer of sources and targets.
        batch_size: Pairs of a batch.
        lengths: Padded lengths.

    Returns:
        An iterator of ``ceil(len(pairs) / batch_size)`` batches.

    Raises:
        ValueError: There are no pairs, the batch size is below 1, or a text is too long.
    """
    _check_arguments(batch_size, lengths)
    require(len(pairs) > 0, "There are no pairs to make batches of.")

    def padded_batch(first: int) -> PairBatch:
        batch_pairs = list(pairs[first : first + batch_size])
        is_real_row = np.arange(batch_size) < len(batch_pairs)
        batch_pairs += [batch_pairs[-1]] * (batch_size - len(batch_pairs))
        batch = make_pair_batch(batch_pairs, tokenizer, lengths=lengths)
        return batch._replace(loss_mask=batch.loss_mask & is_real_row[:, None])

    return map(padded_batch, range(0, len(pairs), batch_size))


def make_pair_batch(
    pairs: Sequence[Pair], tokenizer: Tokenizer, *, lengths: PaddedLengths
) -> PairBatch:
    """Tokenize and pad pairs.

    The tokenizer's end of text ends targets, pads both sides, and starts the decoder input.

        targets = [y_1, ..., y_n, end, end, ...]
        tokens  = [end, y_1, ..., y_n, end, ...]

    Args:
        pairs: At least one pair.
        tokenizer: Tokenizer of sources and targets.
        lengths: Padded lengths.

    Returns:
        The batch, in the order of the pairs.

    Raises:
        ValueError: A text is longer than its padded length, or a source has no tokens.
    """
    end = tokenizer.end_of_text
    sources = tokenizer.encode_batch([pair.source for pair in pairs])
    encoded = tokenizer.encode_batch([pair.target for pair in pairs])
    targets = [np.append(ids, end) for ids in encoded]
    for pair, ids in zip(pairs, sources, strict=True):
        require(len(ids) > 0, f"A source has no tokens; its target is {pair.target!r}.")
    longest = max(map(len, sources))
    width = next((length for length in lengths.source if length >= longest), lengths.source[-1])
    source, is_source_token = _pad(sources, width, end, what="source")
    target, mask = _pad(targets, lengths.target, end, what="target")
    return PairBatch(
        source=source,
        source_segments=is_source_token.astype(np.int32),
        tokens=np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=end),
        targets=target,
        loss_mask=mask,
    )


def _pad(
    rows: Sequence[np.ndarray], length: int, fill: int, *, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Rows padded to one length, and the mask of real tokens."""
    lengths = np.array([len(row) for row in rows])
    if lengths.max() > length:
        raise ValueError(
            f"The longest {what} has {lengths.max()} tokens, more than the padded length {length}."
        )
    is_token = np.arange(length) < lengths[:, None]
    padded = np.full(is_token.shape, fill, np.int32)
    padded[is_token] = np.concatenate(rows)
    return padded, is_token


def _check_arguments(batch_size: int, lengths: PaddedLengths) -> None:
    require(batch_size >= 1, f"batch_size must be at least 1; got {batch_size}.")
    source = lengths.source
    rising = all(a < b for a, b in zip((0, *source), source, strict=False))
    if not source or not rising or lengths.target < 1:
        raise ValueError(
            f"Lengths must be at least 1, and source lengths increasing; got {source} for sources "
            f"and {lengths.target} for targets."
        )
