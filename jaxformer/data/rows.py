"""Packed rows: layout, segment ids, positions and loss mask.

The stream is one end of text, then every document followed by one end of text::

    E a a a E b b E c c c c E

so an end of text is the last target of one document and the first input of the next; for a
tokenizer with a bos token, the first input is the bos token. The stream is cut into rows of
``row_length + 1`` tokens, each starting with the last token of the previous row. Inputs are
``row[:-1]``, targets ``row[1:]``; so every token of every document and every closing end of text is
a target exactly once. The context of a token starts with its document or its row.

Segments and positions belong to the inputs. Segments number the documents of a row from 1;
positions count from 0 at the end of text before a document, and from 0 at the start of a row. Only
the last row may be short: it is filled with end of text in segment 0, without loss.

Instructions are not split: one that does not fit in the rest of a row starts the next row, and the
rest is filled with end of text without loss. Only tokens of the answers have loss.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Int32, Integer, Shaped

from jaxformer.data.checked_files import CheckedFile

RowIndex: TypeAlias = int | np.integer | slice | list[int] | np.ndarray


class PackedRow(NamedTuple):
    """One row, or several with leading axes.

    Attributes:
        tokens: Inputs and the last target.
        segments: Document of each input within its row, from 1; 0 is padding.
        positions: Position of each input in its document; counts restart with each row.
    """

    tokens: Integer[np.ndarray, "*rows T+1"]
    segments: Integer[np.ndarray, "*rows T"]
    positions: Integer[np.ndarray, "*rows T"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """Packed documents; ``rows[i]`` is a `PackedRow` of int32, ``rows[[i, j]]`` several.

    Only the stream and the first input of each document are stored; segments and positions follow
    from them. With files, a block of them is checked when it is first read.

    Attributes:
        tokens: The stream, of which the rows may be a part.
        starts: Index in the stream of the first input of each document, increasing.
        document_bytes: Bytes of the text with loss of each document.
        num_inputs: Inputs without those that fill the last row.
        row_length: Inputs of a row.
        end_of_text: The token that fills the last row.
        num_documents: Number of documents.
        num_bytes: Bytes in UTF-8 of the text with loss, without special tokens, the denominator of
            bits per byte: ``sum of -log2 p(target) / num_bytes``.
        num_targets: Targets with loss: the documents' tokens and one end of text for each.
        digest: SHA-256 of all that determines a batch.
        tokenizer_digest: SHA-256 of the tokenizer's JSON.
        loss_mask: Targets with loss: the answers of instructions. None if all targets have loss.
        bos_token_id: Token that replaces the end of text before a document in batches; None keeps
            the end of text.
        first_input: Index in the stream of the first input of the rows.
        row_numbers: Numbers of the rows; None is all.
    """

    tokens: CheckedFile | Integer[np.ndarray, " N"]
    starts: Integer[np.ndarray, " D"]
    document_bytes: Integer[np.ndarray, " D"]
    num_inputs: int
    row_length: int
    end_of_text: int
    num_documents: int
    num_bytes: int
    num_targets: int
    digest: str = ""
    tokenizer_digest: str = ""
    loss_mask: CheckedFile | Bool[np.ndarray, " N-1"] | None = None
    bos_token_id: int | None = None
    first_input: int = 0
    row_numbers: Integer[np.ndarray, " R"] | None = None

    @property
    def epoch(self) -> int:
        """Number of rows of an epoch."""
        return len(self)

    def __len__(self) -> int:
        if self.row_numbers is not None:
            return len(self.row_numbers)
        return -(-self.num_inputs // self.row_length)

    def __getitem__(self, index: RowIndex) -> PackedRow:
        numbers, length = self._numbers(index), self.row_length
        begins = self.first_input + numbers.reshape(-1) * length
        tokens = self._read(self.tokens, begins, length + 1, self.end_of_text).astype(np.int32)
        first, stop = (np.searchsorted(self.starts, begins + at) for at in (0, length))
        counts, rows = stop - first, np.arange(len(begins))  # documents that start in each row
        documents = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        shifts = np.repeat(begins - rows * length, counts)
        # Where segments begin, in the rows one after another.
        places = np.union1d(rows * length, self.starts[documents] - shifts)
        in_segment = np.diff(places, append=len(begins) * length)
        before_row = np.searchsorted(places, rows * length)[places // length]
        segments = np.repeat(
            (np.arange(1, len(places) + 1) - before_row).astype(np.int32), in_segment
        )
        positions = np.arange(len(segments), dtype=np.int32)
        positions -= np.repeat(places.astype(np.int32), in_segment)
        arrays = [x.reshape(len(begins), length) for x in (segments, positions)]
        for row, fill in self._padding(begins):
            for x in arrays:
                x[row, length - fill :] = 0
        return PackedRow(*(x.reshape(*numbers.shape, x.shape[-1]) for x in (tokens, *arrays)))

    def loss_mask_at(self, index: RowIndex) -> Bool[np.ndarray, "*rows T"]:
        """Loss mask of the rows with these indices."""
        numbers = self._numbers(index)
        begins = self.first_input + numbers.reshape(-1) * self.row_length
        if self.loss_mask is None:
            loss_mask = np.ones((len(begins), self.row_length), bool)
            for row, fill in self._padding(begins):
                loss_mask[row, self.row_length - fill :] = False
        else:
            loss_mask = self._read(self.loss_mask, begins, self.row_length, False)
        return loss_mask.reshape(*numbers.shape, self.row_length)

    def take(self, index: list[int] | np.ndarray) -> "PackedRows":
        """The rows with these indices; totals such as num_bytes stay those of all rows."""
        numbers = self._numbers(index)
        digest = hashlib.sha256(self.digest.encode() + numbers.tobytes()).hexdigest()
        return replace(self, row_numbers=numbers, digest=digest)

    def check(self) -> None:
        """Check all blocks of the files.

        Raises:
            ValueError: One does not match its digest.
        """
        for array in (self.tokens, self.loss_mask):
            if isinstance(array, CheckedFile):
                array.read()

    def part(self, first: int, num_inputs: int) -> "PackedRows":
        """Rows of a part of the inputs; all text must have loss.

        Args:
            first: First input of the part, counted from that of these rows.
            num_inputs: Inputs of the part.

        Returns:
            The rows. A document that is cut has its bytes in proportion to its tokens.
        """
        first += self.first_input
        last = first + num_inputs
        begin, end = np.searchsorted(self.starts, (first, last))
        ends = np.append(self.starts, len(self.tokens) - 1)
        bytes_before = np.append(0, np.cumsum(self.document_bytes))
        return replace(
            self,
            first_input=first,
            num_inputs=num_inputs,
            num_documents=max(1, int(end - begin)),
            num_bytes=round(np.subtract(*np.interp((last, first), ends, bytes_before))),
            num_targets=num_inputs,
            digest=hashlib.sha256(f"{self.digest} {first} {num_inputs}".encode()).hexdigest(),
        )

    def documents(self) -> Iterator[Int32[np.ndarray, " N"]]:
        """Yield the tokens of each document or part of one, without ends of text."""
        last = self.first_input + self.num_inputs
        begin, end = np.searchsorted(self.starts, (self.first_input, last))
        places = np.union1d(self.starts[begin:end], self.first_input)
        for first, stop in zip(places.tolist(), [*places[1:].tolist(), last], strict=True):
            ids = _windows(self.tokens, np.array([first]), stop - first + 1)[0].astype(np.int32)
            yield ids[ids != self.end_of_text]

    def _read(self, array: Any, begins: np.ndarray, width: int, fill: int) -> np.ndarray:
        """The `width` numbers from each index on; those after the last input are `fill`."""
        is_full = begins + self.row_length <= self.first_input + self.num_inputs
        if len(begins) and is_full.all():
            return _windows(array, begins, width)
        rows = np.full((len(begins), width), fill, array.dtype)
        if is_full.any():
            rows[is_full] = _windows(array, begins[is_full], width)
        for row, missing in self._padding(begins):
            rows[row, : width - missing] = _windows(array, begins[[row]], width - missing)
        return rows

    def _padding(self, begins: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield each row that is not full, and the number of inputs that fill it."""
        missing = begins + self.row_length - self.first_input - self.num_inputs
        yield from ((row, int(missing[row])) for row in np.flatnonzero(missing > 0).tolist())

    def _numbers(self, index: RowIndex) -> np.ndarray:
        """Numbers of the rows with these indices."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        numbers = np.asarray(index)
        if numbers.dtype == bool:
            (numbers,) = np.nonzero(numbers)
        if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
            raise IndexError(f"Rows are indexed by integers or booleans; got {numbers.dtype}.")
        numbers = numbers.astype(np.int64)
        if np.any(numbers < -len(self)) or np.any(numbers >= len(self)):
            raise IndexError(f"There are {len(self)} rows; got the index {index}.")
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        return numbers if self.row_numbers is None else self.row_numbers[numbers]


def _windows(
    array: CheckedFile | Shaped[np.ndarray, " N"], begins: np.ndarray, width: int
) -> Shaped[np.ndarray, "R W"]:
    """The `width` numbers from each index on."""
    if isinstance(array, CheckedFile):
        return array.windows(begins, width)
    return np.lib.stride_tricks.sliding_window_view(array, width)[begins]


@dataclass(frozen=True, eq=False)
class ConcatenatedRows:
    """Rows of several parts of one corpus, numbered consecutively.

    Attributes:
        parts: Rows of each part, all of the same length.
    """

    parts: "tuple[PackedRows | ConcatenatedRows, ...]"

    def __post_init__(self) -> None:
        if len(lengths := {part.row_length for part in self.parts}) != 1:
            raise ValueError(
                f"Rows of several parts must have one row_length; got {sorted(lengths)}."
            )

    @property
    def row_length(self) -> int:
        """Inputs of a row."""
        return self.parts[0].row_length

    @property
    def end_of_text(self) -> int:
        """The token that fills the last row of a part."""
        return self.parts[0].end_of_text

    @property
    def bos_token_id(self) -> int | None:
        """Token that replaces the end of text before a document, or None."""
        return self.parts[0].bos_token_id

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return sum(part.num_documents for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the text with loss, without special tokens."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_targets(self) -> int:
        """Number of targets with loss."""
        return sum(part.num_targets for part in self.parts)

    @property
    def epoch(self) -> int:
        """Number of rows of an epoch."""
        return len(self)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: list[int] | np.ndarray) -> PackedRow:
        located, order = self._locate(index)
        rows = [part[own] for part, own in located]
        return PackedRow(*(np.concatenate(arrays)[order] for arrays in zip(*rows, strict=True)))

    def loss_mask_at(self, index: list[int] | np.ndarray) -> Bool[np.ndarray, "rows T"]:
        """Loss mask of the rows with these indices."""
        of_parts, back = self._locate(index)
        return np.concatenate([part.loss_mask_at(own) for part, own in of_parts])[back]

    def take(self, index: list[int] | np.ndarray) -> "AnyRows":
        """The rows with these indices, part by part; totals such as num_bytes stay those of all."""
        located, _ = self._locate(index)
        return replace(self, parts=tuple(part.take(own) for part, own in located))

    @property
    def digest(self) -> str:
        """SHA-256 of all that determines a batch."""
        return hashlib.sha256(repr([part.digest for part in self.parts]).encode()).hexdigest()

    def _locate(
        self, index: list[int] | np.ndarray
    ) -> tuple[list[tuple[Any, np.ndarray]], np.ndarray]:
        """(part, row indices in it) for each part, and the order that restores the index."""
        sizes = np.array([len(part) for part in self.parts])
        ends = np.cumsum(sizes)
        part_index = np.searchsorted(ends, index, side="right")
        index_in_part = np.asarray(index) - (ends - sizes)[part_index]
        order = np.argsort(np.argsort(part_index, kind="stable"))
        return [(part, index_in_part[part_index == i]) for i, part in enumerate(self.parts)], order


@dataclass(frozen=True, eq=False)
class MixedRows(ConcatenatedRows):
    """Rows of several corpora, numbered consecutively, which are drawn by weight.

    Attributes:
        weights: Relative number of rows drawn from each part.
    """

    weights: tuple[float, ...]

    @property
    def epoch(self) -> int:
        """Number of rows to draw until every row of every part is drawn at least once.

        With exact weights; `Batches` rounds them to a percent of the smallest.
        """
        weights = [Fraction(str(weight)) for weight in self.weights]
        parts = zip(self.parts, weights, strict=True)
        return max(math.ceil(len(part) * sum(weights) / weight) for part, weight in parts)

    @property
    def digest(self) -> str:
        """SHA-256 of all that determines a batch, including weights."""
        part_digests = [
            (part.digest, float(w)) for part, w in zip(self.parts, self.weights, strict=True)
        ]
        return hashlib.sha256(repr(part_digests).encode()).hexdigest()


AnyRows: TypeAlias = PackedRows | ConcatenatedRows


def mix_rows(parts: Sequence[AnyRows], weights: Sequence[float] | None = None) -> AnyRows:
    """Combine the rows of several corpora.

    Args:
        parts: Rows of each corpus, at least one.
        weights: Relative number of rows to draw from each; None is its number of rows.

    Returns:
        The rows of a single part unchanged, else `MixedRows`.

    Raises:
        ValueError: The parts have different row lengths.
    """
    if len(parts) == 1:
        return parts[0]
    return MixedRows(tuple(parts), tuple(map(len, parts) if weights is None else weights))
