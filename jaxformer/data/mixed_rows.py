"""Rows of several parts or several corpora, numbered consecutively."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from jaxformer.data.rows import Located, PackedRows, PartedRows
from jaxformer.data.streamed_rows import StreamedRows


@dataclass(frozen=True, eq=False)
class ConcatenatedRows(PartedRows):
    """Rows of several parts of one corpus, numbered consecutively.

    Attributes:
        parts: Rows of each part, all of the same length.
    """

    parts: "tuple[AnyRows, ...]"

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
    def epoch(self) -> int | None:
        """Number of rows of an epoch."""
        return len(self)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def take(self, index: list[int] | np.ndarray) -> "AnyRows":
        """The rows with these indices, part by part; totals such as num_bytes stay those of all."""
        located, _ = self._locate(index)
        return replace(self, parts=tuple(part.take(own) for part, own in located))

    @property
    def digest(self) -> str:
        """SHA-256 of all that determines a batch."""
        return hashlib.sha256(repr([part.digest for part in self.parts]).encode()).hexdigest()

    def _counts(self) -> "tuple[AnyRows, ...]":
        return self.parts

    def _locate(self, index: Sequence[int] | np.ndarray) -> Located:
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
    def epoch(self) -> int | None:
        """Number of rows to draw until every row of every part is drawn at least once.

        With exact weights; `Batches` rounds them to a percent of the smallest. None if a part is
        streamed, so that its number of rows is not known.
        """
        if any(part.epoch is None for part in self.parts):
            return None
        weights = [Fraction(str(weight)) for weight in self.weights]
        parts = zip(self.parts, weights, strict=True)
        return max(math.ceil(len(part) * sum(weights) / weight) for part, weight in parts)

    @property
    def digest(self) -> str:
        """SHA-256 of all that determines a batch, including weights."""
        parts = zip(self.parts, self.weights, strict=True)
        digests = [(part.digest, float(weight)) for part, weight in parts]
        return hashlib.sha256(repr(digests).encode()).hexdigest()


AnyRows: TypeAlias = PackedRows | ConcatenatedRows | StreamedRows


def mix_rows(parts: Sequence[AnyRows], weights: Sequence[float] | None = None) -> AnyRows:
    """Combine the rows of several corpora.

    Args:
        parts: Rows of each corpus, at least one.
        weights: Relative number of rows to draw from each; None is its number of rows.

    Returns:
        The rows of a single part unchanged, else `MixedRows`.

    Raises:
        ValueError: The parts have different row lengths, or weights are needed: the number of rows
            of a streamed part is not known.
    """
    if len(parts) == 1:
        return parts[0]
    if weights is None and any(part.epoch is None for part in parts):
        raise ValueError(
            "A mixture with a corpus of a store needs weights, as its number of rows is not known: "
            f"pass weights=({', '.join('1' * len(parts))}) or others."
        )
    return MixedRows(tuple(parts), tuple(map(len, parts) if weights is None else weights))
