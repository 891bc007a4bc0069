"""Rows of several parts: of a corpus, of a mixture, of shards that are read while a run trains."""

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Int64

from jaxformer.data.corpus import NoTextError
from jaxformer.data.rows import PackedRow, PackedRows
from jaxformer.data.tokenizers import Tokenizer, bos_token_id

MAX_ROWS = 1 << 48  # of all epochs together
SHARDS_AHEAD = 1  # shards that are opened before they are read


class ShardSize(NamedTuple):
    """Numbers of rows, documents, bytes and targets of a shard; see `PackedRows`."""

    num_rows: int
    num_documents: int
    num_bytes: int
    num_targets: int


class PartedRows:
    """Rows of several parts, numbered one after another.

    Attributes:
        row_length: Inputs of a row.
        end_of_text: The token that fills the last row of a part.
        bos_token_id: Token that replaces the end of text before a document, or None.
        epoch: Number of rows of an epoch; None if it is not known.
        digest: SHA-256 of all that determines a batch.
    """

    row_length: int
    end_of_text: int
    bos_token_id: int | None
    epoch: int | None
    digest: str
    _counted: "Iterable[AnyRows | ShardSize]"  # have the totals of each part

    def __len__(self) -> int:
        raise NotImplementedError

    def is_ready(self, index: Sequence[int] | np.ndarray) -> bool:
        """Whether these rows can be read without waiting for a file of a store."""
        raise NotImplementedError

    def _locate(self, index: np.ndarray) -> "Iterator[tuple[np.ndarray, AnyRows, np.ndarray]]":
        """Yield which of these rows a part has, the part, and their numbers in it, part by part."""
        raise NotImplementedError

    @property
    def num_documents(self) -> int:
        """Number of documents; in a stream, of the shards opened so far, as the other totals."""
        return sum(part.num_documents for part in self._counted)

    @property
    def num_bytes(self) -> int:
        """Bytes of the text with loss, without special tokens."""
        return sum(part.num_bytes for part in self._counted)

    @property
    def num_targets(self) -> int:
        """Number of targets with loss."""
        return sum(part.num_targets for part in self._counted)

    def __getitem__(self, index: Sequence[int] | np.ndarray) -> PackedRow:
        tokens = np.empty((len(index), self.row_length + 1), np.int32)
        rows = PackedRow(tokens, *np.empty((2, len(index), self.row_length), np.int32))
        for which, part, numbers in self._locate(np.asarray(index, np.int64)):
            for array, values in zip(rows, part[numbers], strict=True):
                array[which] = values
        return rows

    def loss_mask_at(self, index: Sequence[int] | np.ndarray) -> Bool[np.ndarray, "rows T"]:
        """Loss mask of the rows with these indices."""
        loss_mask = np.empty((len(index), self.row_length), bool)
        for which, part, numbers in self._locate(np.asarray(index, np.int64)):
            loss_mask[which] = part.loss_mask_at(numbers)
        return loss_mask


AnyRows: TypeAlias = PackedRows | PartedRows


class ConcatenatedRows(PartedRows):
    """Rows of several parts of one corpus, or of several corpora that are drawn by weight.

    Attributes:
        parts: Rows of each part, all of the same length.
        weights: Relative number of rows drawn from each part, which then has epochs of its own;
            None draws from all rows alike.
    """

    def __init__(self, parts: Sequence[AnyRows], weights: Sequence[float] | None = None):
        """Join the parts.

        Raises:
            ValueError: Rows of the parts have different lengths.
        """
        if len(lengths := {part.row_length for part in parts}) != 1:
            raise ValueError(
                f"Rows of several parts must have one row_length; got {sorted(lengths)}."
            )
        self.parts, self.weights = tuple(parts), None if weights is None else tuple(weights)
        self._counted = self.parts
        self.row_length, self.end_of_text = parts[0].row_length, parts[0].end_of_text
        self.bos_token_id = parts[0].bos_token_id
        self._ends = np.cumsum([len(part) for part in parts])
        content = [part.digest for part in parts], [*map(float, weights or ())]
        self.digest = hashlib.sha256(repr(content).encode()).hexdigest()
        self.epoch = self._epoch()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def is_ready(self, index: Sequence[int] | np.ndarray) -> bool:
        """Whether these rows can be read without waiting for a file of a store."""
        located = self._locate(np.asarray(index, np.int64))
        return all(part.is_ready(numbers) for _, part, numbers in located)

    def _epoch(self) -> int | None:
        """Number of rows to draw until every row of every part is drawn at least once.

        With exact weights; `Batches` rounds them to a percent of the smallest.
        """
        if any(part.epoch is None for part in self.parts):
            return None
        if self.weights is None:
            return len(self)
        weights = [Fraction(str(weight)) for weight in self.weights]
        parts = zip(self.parts, weights, strict=True)
        return max(math.ceil(len(part) * sum(weights) / weight) for part, weight in parts)

    def _locate(self, index: np.ndarray) -> Iterator[tuple[np.ndarray, AnyRows, np.ndarray]]:
        places = np.searchsorted(self._ends, index, side="right")
        for place in np.unique(places).tolist():
            which, part = places == place, self.parts[place]
            yield which, part, index[which] - (self._ends[place] - len(part))


def mix_rows(parts: Sequence[AnyRows], weights: Sequence[float] | None = None) -> AnyRows:
    """Combine the rows of several corpora.

    Args:
        parts: Rows of each corpus, at least one.
        weights: Relative number of rows to draw from each; None is its number of rows.

    Returns:
        The rows of a single part unchanged, else `ConcatenatedRows` with weights.

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
    return ConcatenatedRows(parts, [len(part) for part in parts] if weights is None else weights)


class StreamedRows(PartedRows):
    """Rows of shards, numbered in the order in which a run reads them.

    An epoch has every shard once in a random order, and a shard every row once in a random order;
    epochs follow one another. The order depends on the seed and the shards alone, so that row ``i``
    is the same in every process and after every start. The next shard is opened in the background.

    Attributes:
        sizes: Sizes of the shards that have been opened, by name.
    """

    epoch = None  # the number of rows is not known before all shards are tokenized

    def __init__(
        self,
        names: Sequence[str],
        open_shard: Callable[[str], AnyRows],
        tokenizer: Tokenizer,
        *,
        row_length: int,
        seed: int,
        sizes: dict[str, ShardSize],
        digest: str,
    ):
        """Set up the stream; no shard is opened.

        Args:
            names: Names of the shards.
            open_shard: Opens a shard, or raises `NoTextError`; called in a thread.
            tokenizer: Tokenizer of the rows.
            row_length: Inputs of a row.
            seed: Random seed of the order.
            sizes: Sizes that are known from an earlier start. With them, a start opens only the
                shards that it reads.
            digest: SHA-256 of shards and tokenizer.
        """
        self._names, self._open_shard, self._seed = tuple(names), open_shard, seed
        self.sizes, self._counted, self.row_length = sizes, sizes.values(), row_length
        self.end_of_text, self.bos_token_id = tokenizer.end_of_text, bos_token_id(tokenizer)
        self.digest = hashlib.sha256(f"{digest} {seed}".encode()).hexdigest()
        self._thread: threading.Thread | None = None  # the last one
        self._shards = dict[int, Future[AnyRows]]()  # by their number in the stream
        self._ends = [0]  # of the shards in the stream, in rows

    def __len__(self) -> int:
        return MAX_ROWS

    def is_ready(self, index: Sequence[int] | np.ndarray) -> bool:
        """Whether the shards of these rows are open; else they are opened in the background."""
        while self._ends[-1] <= np.max(index, initial=-1):
            place = len(self._ends) - 1
            if self._name(place) not in self.sizes and not self._open_ahead(place).done():
                return False
            self._add_end()
        places = np.unique(np.searchsorted(self._ends, index, side="right") - 1)
        return all(self._open_ahead(place).done() for place in places.tolist())

    def _locate(self, index: np.ndarray) -> Iterator[tuple[np.ndarray, AnyRows, np.ndarray]]:
        while self._ends[-1] <= np.max(index, initial=-1):
            self._add_end()
        places = np.searchsorted(self._ends, index, side="right") - 1
        for place in np.unique(places).tolist():
            which, (begin, end) = places == place, self._ends[place : place + 2]
            epoch = place // len(self._names)
            numbers = permutation(end - begin, self._seed, epoch, self._name(place))
            yield which, self._shard(place), numbers[index[which] - begin]
        for place in [place for place in self._shards if (place < places).all()]:
            del self._shards[place]

    def _name(self, place: int) -> str:
        """Name of a shard in the stream."""
        epoch, number = divmod(place, len(self._names))
        return self._names[permutation(len(self._names), self._seed, epoch)[number]]

    def _add_end(self) -> None:
        """Append the end of the next shard of the stream."""
        place = len(self._ends) - 1
        if (name := self._name(place)) not in self.sizes:
            size = ShardSize(0, 0, 0, 0)
            with contextlib.suppress(NoTextError):
                rows = self._shard(place)
                counts = rows.num_documents, rows.num_bytes, rows.num_targets
                size = ShardSize(len(rows), *counts)
            self.sizes[name] = size
        self._ends.append(self._ends[-1] + self.sizes[name].num_rows)
        if len(self._ends) > len(self._names) and not self._ends[-1]:
            raise ValueError(f"None of the {len(self._names)} files has a row of text.")

    def _shard(self, place: int) -> AnyRows:
        try:
            return self._open_ahead(place).result()
        except Exception:
            del self._shards[place]
            raise

    def _open_ahead(self, place: int) -> Future[AnyRows]:
        """Open a shard and the next ones in the background."""
        for number in range(place, place + 1 + SHARDS_AHEAD):
            if number not in self._shards:
                self._shards[number] = self._open_in_thread(self._name(number))
        return self._shards[place]

    def _open_in_thread(self, name: str) -> Future[AnyRows]:
        """Open a shard after the one before it; the end of the process ends the thread."""
        future, previous = Future[AnyRows](), self._thread

        def run() -> None:
            if previous is not None:
                previous.join()
            try:
                future.set_result(self._open_shard(name))
            except Exception as error:
                future.set_exception(error)

        self._thread = threading.Thread(target=run, name="reading ahead")
        self._thread.start()
        return future


@functools.lru_cache(maxsize=8)
def permutation(count: int, *key: object) -> Int64[np.ndarray, " N"]:
    """Random order of `count` items; the same for a key on every machine."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    bits = np.random.Philox(key=np.frombuffer(digest[:16], "<u8"))
    return np.argsort(bits.random_raw(count), kind="stable")
