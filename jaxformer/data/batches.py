"""Batches as a pure function of (seed, step)."""

from collections.abc import Iterator
from itertools import count
from operator import index
from typing import NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int32

from jaxformer.checks import require
from jaxformer.data.parted_rows import MAX_ROWS, AnyRows, ConcatenatedRows
from jaxformer.extras import import_extra


class Batch(NamedTuple):
    """A batch of packed rows: inputs, targets, positions, segment ids and loss mask.

    Attributes:
        tokens: Input tokens.
        targets: The token after each input.
        positions: Position of each input in its document; counts restart with each row.
        segments: Document of each input within its row, from 1; 0 is padding.
        loss_mask: True if the target has loss: a token of the input's document or its closing end
            of text; in instructions only tokens of answers.
    """

    tokens: Int32[np.ndarray, "B T"]
    targets: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    segments: Int32[np.ndarray, "B T"]
    loss_mask: Bool[np.ndarray, "B T"]


class Batches:
    """Infinite batches of packed rows; ``batches[step]`` depends on arguments and step only.

    Every epoch has each row once, in a new order; a batch may span several epochs. Every step takes
    the same time to compute, so a run resumes at the next step. Iteration starts at step 0. Each
    part of a mixture has separate epochs, and batches have rows of each part by its weight.
    """

    def __init__(
        self,
        rows: AnyRows,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        local_rows: slice | None = None,
    ):
        """Set up the batches.

        Args:
            rows: Rows to draw from.
            batch_size: Rows of a global batch.
            seed: Random seed, from 0 to ``2**32 - 1``.
            shuffle: Whether to shuffle every epoch. `StreamedRows` have an order of their own.
            local_rows: Rows of each global batch to return, for one of several processes.

        Raises:
            ValueError: There are no rows, or a number is out of range.
            ImportError: ``grain`` is not installed.
        """
        _check_arguments(rows, batch_size)
        require(0 <= seed < 2**32, f"seed must lie between 0 and {2**32 - 1}; got {seed}.")
        grain = import_extra("grain")
        self._rows, self._batch_size, self._shuffles = rows, batch_size, shuffle
        self._index_shuffle = grain.experimental.index_shuffle
        # The seed that grain's `MapDataset.seed(seed).shuffle()` derives.
        self._seed = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
        self._local = slice(None) if local_rows is None else local_rows
        self._parts: tuple[AnyRows, ...] = (rows,)
        self._mixed = None
        if isinstance(rows, ConcatenatedRows) and rows.weights is not None:
            self._parts = rows.parts
            first = range(0, len(self._parts) * MAX_ROWS, MAX_ROWS)
            places = [grain.MapDataset.range(begin, begin + MAX_ROWS) for begin in first]
            self._mixed = grain.MapDataset.mix(places, rows.weights).batch(batch_size)

    def __getitem__(self, step: SupportsIndex) -> Batch:
        return _make_batch(self._rows, self._numbers(check_step(step)))

    def is_ready(self, step: int) -> bool:
        """Whether `self[step]` need not wait for a file of a store."""
        return self._rows.is_ready(self._numbers(step))

    def _numbers(self, step: int) -> np.ndarray:
        """Numbers of the local rows of a batch."""
        places, offset = self._places(step), 0
        numbers = np.empty_like(places)
        for number, part in enumerate(self._parts):
            is_of_part = places // MAX_ROWS == number
            numbers[is_of_part] = offset + self._row_numbers(part, places[is_of_part] % MAX_ROWS)
            offset += len(part)
        return numbers

    def _places(self, step: int) -> np.ndarray:
        """Places of the local rows in all epochs, by `MAX_ROWS` times the part."""
        if self._mixed is None:
            places = np.arange(step * self._batch_size, (step + 1) * self._batch_size)
        else:
            places = self._mixed[step]
        return places[self._local]

    def _row_numbers(self, part: AnyRows, places: np.ndarray) -> np.ndarray:
        """Rows at these places of all epochs of a part, one after another."""
        if part.epoch is None:  # a stream, which has an order of its own
            return places
        epochs, places = np.divmod(places, len(part))
        if not self._shuffles:
            return places
        seeds, last, rounds = (self._seed + epochs) % 2**32, len(part) - 1, 4
        pairs = zip(places.tolist(), seeds.tolist(), strict=True)
        return np.array([self._index_shuffle(x, last, seed, rounds) for x, seed in pairs], np.int64)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, count())


def evaluation_batches(
    rows: AnyRows,
    *,
    batch_size: int,
    local_rows: slice | None = None,
    index: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yield every row once, in order, in batches of equal shape.

    The last batch is filled with rows without loss.

    Args:
        rows: Rows to iterate over.
        batch_size: Rows of a batch.
        local_rows: Rows of each batch to return, for one of several processes.
        index: Numbers of the rows to iterate over; None is all.

    Returns:
        An iterator of ``ceil(len(index) / batch_size)`` batches.

    Raises:
        ValueError: There are no rows, or the batch size is below 1.
    """
    _check_arguments(rows, batch_size)
    local, end = slice(None) if local_rows is None else local_rows, rows.end_of_text
    numbers = np.arange(len(rows)) if index is None else index

    def padded_batch(first: int) -> Batch:
        places = np.arange(first, first + batch_size)[local]
        batch = _make_batch(rows, numbers[places[places < len(numbers)]])
        fill = ((0, len(places) - len(batch.tokens)), (0, 0))
        fields = zip(batch, (end, end, 0, 0, False), strict=True)
        return Batch(*(np.pad(x, fill, constant_values=value) for x, value in fields))

    return map(padded_batch, range(0, len(numbers), batch_size))


def check_step(step: SupportsIndex) -> int:
    """The number of a batch as an integer; raises a ValueError if it is below 0."""
    require((number := index(step)) >= 0, f"step must be at least 0; got {number}.")
    return number


def _check_arguments(rows: AnyRows, batch_size: int) -> None:
    require(len(rows) > 0, "There are no rows to draw batches from.")
    require(batch_size >= 1, f"batch_size must be at least 1; got {batch_size}.")


def _make_batch(rows: AnyRows, indices: np.ndarray) -> Batch:
    tokens, segments, positions = rows[indices]
    inputs = tokens[:, :-1]
    if rows.bos_token_id not in (None, rows.end_of_text):
        opens = (positions == 0) & (inputs == rows.end_of_text) & (segments > 0)
        inputs = np.where(opens, np.int32(rows.bos_token_id), inputs)
    return Batch(
        tokens=inputs,
        targets=tokens[:, 1:],
        positions=positions,
        segments=segments,
        loss_mask=rows.loss_mask_at(indices),
    )
