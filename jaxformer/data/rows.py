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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Int32, Integer


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

    The arrays are in memory or memory-mapped, with the smallest integer dtypes. These overflow in
    arithmetic, so pass ``rows[i]`` to a model instead.

    Attributes:
        segments: As in `PackedRow`, of all rows, as stored.
        positions: As in `PackedRow`, of all rows, as stored.
        tokens: As in `PackedRow`, of all rows, as stored.
        end_of_text: The token that fills the last row.
        num_documents: Number of documents.
        num_bytes: Bytes in UTF-8 of the text with loss, without special tokens, the denominator of
            bits per byte: ``sum of -log2 p(target) / num_bytes``.
        num_targets: Targets with loss: the documents' tokens and one end of text for each.
        loss_mask: Targets with loss: the answers of instructions. None if all targets have loss.
        bos_token_id: Token that replaces the end of text before a document in batches; None keeps
            the end of text.
    """

    segments: Integer[np.ndarray, "R T"]
    positions: Integer[np.ndarray, "R T"]
    tokens: Integer[np.ndarray, "R T+1"]
    end_of_text: int
    num_documents: int
    num_bytes: int
    num_targets: int
    loss_mask: Bool[np.ndarray, "R T"] | None = None
    bos_token_id: int | None = None

    @property
    def row_length(self) -> int:
        """Inputs of a row."""
        return self.segments.shape[1]

    @property
    def epoch(self) -> int:
        """Number of rows of an epoch."""
        return len(self)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | np.integer | list[int] | np.ndarray) -> PackedRow:
        arrays: tuple[Int32[np.ndarray, ...], ...] = tuple(
            array[index].astype(np.int32) for array in (self.tokens, self.segments, self.positions)
        )
        return PackedRow(*arrays)

    def loss_mask_at(
        self, index: int | np.integer | list[int] | np.ndarray
    ) -> Bool[np.ndarray, "*rows T"]:
        """Loss mask of the rows with these indices."""
        return np.array(
            self.segments[index] > 0 if self.loss_mask is None else self.loss_mask[index]
        )

    def take(self, index: list[int] | np.ndarray) -> "PackedRows":
        """The rows with these indices; totals such as num_bytes stay those of all rows."""
        loss_mask = None if self.loss_mask is None else self.loss_mask[index]
        return replace(self, **self[index]._asdict(), loss_mask=loss_mask)

    def digest(self) -> str:
        """SHA-256 of all that determines a batch: dtypes, shapes and all arrays."""
        digest = hashlib.sha256()
        extra_arrays = () if self.loss_mask is None else (self.loss_mask,)
        for array in (self.tokens, self.segments, self.positions, *extra_arrays):
            digest.update(f"{array.dtype.str} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        if self.bos_token_id not in (None, self.end_of_text):
            digest.update(f"{self.bos_token_id}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class MixedRows:
    """Rows of several corpora, numbered consecutively.

    Attributes:
        parts: Rows of each corpus, all of the same length.
        weights: Relative number of rows drawn from each part.
    """

    parts: tuple[PackedRows, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(lengths := {part.row_length for part in self.parts}) != 1:
            raise ValueError(f"Mixed rows must have one row_length; got {sorted(lengths)}.")

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
        """Number of rows to draw until every row of every part is drawn at least once.

        With exact weights; `Batches` rounds them to a percent of the smallest.
        """
        weights = [Fraction(str(weight)) for weight in self.weights]
        parts = zip(self.parts, weights, strict=True)
        return max(math.ceil(len(part) * sum(weights) / weight) for part, weight in parts)

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

    def take(self, index: list[int] | np.ndarray) -> "MixedRows":
        """The rows with these indices; totals such as num_bytes stay those of all rows."""
        of_parts, _ = self._locate(index)
        return MixedRows(tuple(part.take(own) for part, own in of_parts), self.weights)

    def digest(self) -> str:
        """SHA-256 of all that determines a batch, including weights."""
        part_digests = [
            (part.digest(), float(w)) for part, w in zip(self.parts, self.weights, strict=True)
        ]
        return hashlib.sha256(repr(part_digests).encode()).hexdigest()

    def _locate(
        self, index: list[int] | np.ndarray
    ) -> tuple[list[tuple[PackedRows, np.ndarray]], np.ndarray]:
        """(part, row indices in it) for each part, and the order that restores the index."""
        sizes = np.array([len(part) for part in self.parts])
        ends = np.cumsum(sizes)
        part_index = np.searchsorted(ends, index, side="right")
        index_in_part = np.asarray(index) - (ends - sizes)[part_index]
        order = np.argsort(np.argsort(part_index, kind="stable"))
        return [(part, index_in_part[part_index == i]) for i, part in enumerate(self.parts)], order


AnyRows: TypeAlias = PackedRows | MixedRows


def mix_rows(parts: Sequence[PackedRows], weights: Sequence[float] | None = None) -> AnyRows:
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


def pack_stream(
    stream: Integer[np.ndarray, " N"],
    starts: Bool[np.ndarray, " N"],
    *,
    row_length: int,
    end_of_text: int,
) -> PackedRow:
    """Cut a token stream into rows that overlap by one token, with segments and positions.

    ``tokens[i] = stream[i * row_length : (i + 1) * row_length + 1]``

    Args:
        stream: At least two tokens.
        starts: True at the first input of each document.
        row_length: Inputs of a row.
        end_of_text: Token that fills the last row.

    Returns:
        ``ceil((N - 1) / row_length)`` rows.
    """
    num_inputs = len(stream) - 1
    num_rows = -(-num_inputs // row_length)
    fill = num_rows * row_length - num_inputs
    filled = np.pad(stream, (0, fill), constant_values=end_of_text)
    tokens = np.lib.stride_tricks.sliding_window_view(filled, row_length + 1)[::row_length]
    starts_document = np.pad(starts[:num_inputs], (0, fill)).reshape(num_rows, row_length)
    starts_document[:, 0] = True
    columns = np.broadcast_to(np.arange(row_length), starts_document.shape)
    segments = np.cumsum(starts_document, axis=1)
    positions = columns - np.maximum.accumulate(np.where(starts_document, columns, 0), axis=1)
    is_input = (np.arange(starts_document.size) < num_inputs).reshape(starts_document.shape)
    return PackedRow(tokens, np.where(is_input, segments, 0), np.where(is_input, positions, 0))
