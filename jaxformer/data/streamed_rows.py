"""Rows of shards that are tokenized while a run trains."""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jaxformer.data.rows import Located, PackedRows, PartedRows

MAX_ROWS = 1 << 48  # of all epochs together
SHARDS_AHEAD = 1  # shards that are opened before they are read


class ShardSize(NamedTuple):
    """Numbers of rows, documents, bytes and targets of a shard; see `PackedRows`."""

    num_rows: int
    num_documents: int
    num_bytes: int
    num_targets: int


class StreamedRows(PartedRows):
    """Rows of shards, numbered in the order in which a run reads them.

    An epoch has every shard once in a random order, and a shard every row once in a random order;
    epochs follow one another. The order depends on the seed and the shards alone, so that row ``i``
    is the same in every process and after every start. The next shard is opened in the background.

    Attributes:
        sizes: Sizes of the shards that have been opened, by name.
        digest: SHA-256 of all that determines a batch.
        row_length: Inputs of a row.
        end_of_text: The token that fills the last row of a shard.
        bos_token_id: Token that replaces the end of text before a document, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        open_shard: Callable[[str], PackedRows],
        *,
        seed: int,
        sizes: dict[str, ShardSize],
        digest: str,
        empty: PackedRows,
    ):
        """Set up the stream; no shard is opened.

        Args:
            names: Names of the shards.
            open_shard: Opens a shard; called in a thread.
            seed: Random seed of the order.
            sizes: Sizes that are known from an earlier start. With them, a start opens only the
                shards that it reads.
            digest: SHA-256 of shards, tokenizer and seed.
            empty: No rows, but of this length and tokenizer.
        """
        self._names, self._open_shard, self._seed = tuple(names), open_shard, seed
        self.sizes, self._empty, self.row_length = sizes, empty, empty.row_length
        self.end_of_text, self.bos_token_id = empty.end_of_text, empty.bos_token_id
        self.digest = hashlib.sha256(f"{digest} {seed}".encode()).hexdigest()
        self._thread: threading.Thread | None = None  # the last one
        self._shards = dict[int, Future[PackedRows]]()  # by their number in the stream
        self._ends = list[int]()  # of the shards in the stream, in rows

    @property
    def epoch(self) -> None:
        """None: the number of rows is not known before all shards are tokenized."""
        return None

    def __len__(self) -> int:
        return MAX_ROWS

    def is_ready(self, index: Sequence[int] | np.ndarray) -> bool:
        """Whether the shards of these rows are open; else they are opened in the background."""
        for position in np.unique(np.asarray(index, np.int64)).tolist():
            while not self._ends or self._ends[-1] <= position:
                place = len(self._ends)
                name = self._epoch_and_name(place)[1]
                if name not in self.sizes and not self._open_ahead(place).done():
                    return False
                self._add_end()
            if not self._open_ahead(int(np.searchsorted(self._ends, position, "right"))).done():
                return False
        return True

    def _counts(self) -> Iterable[ShardSize]:
        return self.sizes.values()

    def _locate(self, index: Sequence[int] | np.ndarray) -> Located:
        positions = np.asarray(index, np.int64)
        order = np.argsort(np.argsort(positions, kind="stable"), kind="stable")
        if not len(positions):
            return [(self._empty, positions)], order
        positions = np.sort(positions, kind="stable")
        while not self._ends or self._ends[-1] <= positions[-1]:
            self._add_end()
        places = np.searchsorted(self._ends, positions, side="right")
        located = []
        for place in np.unique(places).tolist():
            begin = self._ends[place - 1] if place else 0
            epoch, name = self._epoch_and_name(place)
            numbers = permutation(self._ends[place] - begin, self._seed, epoch, name)
            located.append((self._shard(place), numbers[positions[places == place] - begin]))
        for place in [place for place in self._shards if place < places[0]]:
            del self._shards[place]
        return located, order

    def _epoch_and_name(self, place: int) -> tuple[int, str]:
        epoch, number = divmod(place, len(self._names))
        return epoch, self._names[permutation(len(self._names), self._seed, epoch)[number]]

    def _add_end(self) -> None:
        """Add the end of one more shard in the stream."""
        place = len(self._ends)
        _, name = self._epoch_and_name(place)
        if name not in self.sizes:
            rows = self._shard(place)
            counts = rows.num_documents, rows.num_bytes, rows.num_targets
            self.sizes[name] = ShardSize(len(rows), *counts)
        end = (self._ends[-1] if place else 0) + self.sizes[name].num_rows
        self._ends.append(end)
        if place + 1 == len(self._names) and not end:
            raise ValueError(f"None of the {len(self._names)} files has a row of text.")

    def _shard(self, place: int) -> PackedRows:
        try:
            return self._open_ahead(place).result()
        except Exception:
            del self._shards[place]
            raise

    def _open_ahead(self, place: int) -> Future[PackedRows]:
        """Open a shard and the next ones in the background."""
        for number in range(place, place + 1 + SHARDS_AHEAD):
            if number not in self._shards:
                _, name = self._epoch_and_name(number)
                self._shards[number] = self._open_in_thread(name)
        return self._shards[place]

    def _open_in_thread(self, name: str) -> Future[PackedRows]:
        """Open a shard when those before it are open; the end of the process ends the thread."""
        future, previous = Future[PackedRows](), self._thread

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
