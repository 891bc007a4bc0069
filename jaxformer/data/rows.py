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
from collections.abc import Iterator
from dataclasses import dataclass, replace
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

    @property
    def epoch(self) -> int:
        """Number of rows of an epoch."""
        return len(self)

    def __len__(self) -> int:
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
        segments = (np.arange(1, len(places) + 1) - before_row).astype(np.int32)
        segments = np.repeat(segments, in_segment)
        positions = np.arange(len(segments), dtype=np.int32)
        positions -= np.repeat(places.astype(np.int32), in_segment)
        arrays = [x.reshape(len(begins), length) for x in (segments, positions)]
        missing = self._missing(begins)
        for row in np.flatnonzero(missing):
            for x in arrays:
                x[row, length - missing[row] :] = 0
        return PackedRow(*(x.reshape(*numbers.shape, x.shape[-1]) for x in (tokens, *arrays)))

    def loss_mask_at(self, index: RowIndex) -> Bool[np.ndarray, "*rows T"]:
        """Loss mask of the rows with these indices."""
        numbers = self._numbers(index)
        begins = self.first_input + numbers.reshape(-1) * self.row_length
        if self.loss_mask is None:
            num_inputs = self.row_length - self._missing(begins)
            loss_mask = np.arange(self.row_length) < num_inputs[:, None]
        else:
            loss_mask = self._read(self.loss_mask, begins, self.row_length, False)
        return loss_mask.reshape(*numbers.shape, self.row_length)

    def is_ready(self, index: RowIndex) -> bool:
        """Whether these rows can be read without waiting: always."""
        return True

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
        missing = self._missing(begins)
        if len(begins) and not missing.any():
            return _windows(array, begins, width)
        rows = np.full((len(begins), width), fill, array.dtype)
        for count in np.unique(missing).tolist():
            is_short, length = missing == count, width - count
            rows[is_short, :length] = _windows(array, begins[is_short], length)
        return rows

    def _missing(self, begins: np.ndarray) -> np.ndarray:
        """Number of inputs that fill each row."""
        end = self.first_input + self.num_inputs
        return np.maximum(begins + self.row_length - end, 0)

    def _numbers(self, index: RowIndex) -> np.ndarray:
        """Numbers of the rows with these indices."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        numbers = np.asarray(index)
        if numbers.dtype == bool:
            (numbers,) = np.nonzero(numbers)
        if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
            raise IndexError(f"Rows are indexed by integers or booleans; got {numbers.dtype}.")
        numbers, count = numbers.astype(np.int64, copy=False), len(self)
        if numbers.size:
            smallest = numbers.min()
            if smallest < -count or numbers.max() >= count:
                raise IndexError(f"There are {count} rows; got the index {index}.")
            if smallest < 0:
                numbers = np.where(numbers < 0, numbers + count, numbers)
        return numbers


def _windows(
    array: CheckedFile | Shaped[np.ndarray, " N"], begins: np.ndarray, width: int
) -> Shaped[np.ndarray, "R W"]:
    """The `width` numbers from each index on."""
    if isinstance(array, CheckedFile):
        return array.windows(begins, width)
    return np.lib.stride_tricks.sliding_window_view(array, width)[begins]
