"""Opens a corpus: text or tokens, in local files or in a store."""

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxformer.data.cached_files import cached_json
from jaxformer.data.chat_templates import ChatTemplate
from jaxformer.data.corpus import Documents, Packed, Source
from jaxformer.data.parted_rows import AnyRows, ConcatenatedRows, ShardSize, StreamedRows
from jaxformer.data.shard_files import StoreFiles, list_shards
from jaxformer.data.shards import HoldOut, PartName, Shard, TextShard, TokenShard
from jaxformer.data.temporary_folders import delete_unused, temporary_folder, use_folder
from jaxformer.data.tokenization import Progress
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.json_files import json_digest


class Corpus:
    """An opened corpus: text or tokens, local or in a store.

    Local files are one shard. Its rows are cached by the content of the files, so that the next
    start reads no text.

    A store has many shards: a file, several small files, or a part of a tokenized corpus. Each is
    copied, tokenized and deleted in the background of a run, so the disk has one or two shards of
    text and a bounded number of tokenized shards. One shard has the held-out text and the text that
    a tokenizer is trained on; a hash of the names chooses it among the shards of more than average
    size.

    Attributes:
        source: The source.
        shards: The shards, by name.
        first: Name of the shard with the held-out text and the text of the tokenizer.
        is_streamed: Whether its shards are in a store.
        key: Digest of all that determines the documents of both parts.
        record: What a run saves of it: the version of each file, and the sizes of the shards of a
            store that have been read. The next start passes it as `recorded`.
        num_bytes: Bytes of all files, compressed ones as they are.
    """

    def __init__(
        self,
        source: Source,
        *,
        folder: Path,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        held_out: float = 0.05,
        max_bytes: int | None = None,
        seed: int = 0,
        recorded: Mapping[str, Any] | None = None,
        buffer_bytes: int = 20_000_000_000,
    ):
        """List the files, and compare them with the files of an earlier start; no text is read.

        Args:
            source: The source.
            folder: Folder of caches.
            tokenizer: The tokenizer of the text of `Packed`.
            template: Chat template, for instructions.
            held_out: Fraction of the text to hold out, as in `split`; of tokens the last ones. In a
                store, of all shards together, but at most half of the one shard that has it.
            max_bytes: Maximum number of bytes to hold out; None is no limit. A token has about 4.
            seed: Random seed of the order of the shards of a store and of their rows.
            recorded: The `record` of an earlier start.
            buffer_bytes: Maximum number of bytes of tokenized shards of a store on the disk,
                besides the shards in use.

        Raises:
            ValueError: There is no file, one has changed since the run began, a part is missing, or
                the store cannot be read.
            OSError: A file cannot be read.
            ImportError: The filesystem of this store is not installed.
        """
        self.source, self._folder = source, folder.absolute()
        self._seed, self._buffer_bytes = seed, buffer_bytes
        known = None if recorded is None else recorded.get("files", {})
        files = list_shards(source, folder, known)
        versions = {k: version for x in files.values() for k, version in x.versions.items()}
        _check_recorded(source.path, known, versions)
        sizes = {name: ShardSize(*size) for name, size in (recorded or {}).get("sizes", {}).items()}
        self.record: dict[str, Any] = {"files": versions, "sizes": sizes}
        self.num_bytes = sum(x.num_bytes for x in files.values())
        large = [name for name, x in files.items() if x.num_bytes >= self.num_bytes / len(files)]
        self.first = min(large, key=lambda name: hashlib.sha256(name.encode()).digest())
        self.is_streamed = isinstance(files[self.first], StoreFiles)
        share = max(held_out, min(0.5, held_out * len(files)))
        read: Callable[..., Shard] = partial(TextShard, template=template)
        if isinstance(source, Packed):
            if tokenizer is None:
                raise ValueError(
                    f"The text of {source} is tokenized; pass its tokenizer: --tokenizer "
                    "FILE_OR_FOLDER."
                )
            read = partial(TokenShard, tokenizer=tokenizer)
        in_use, split_options = contextlib.ExitStack(), dict[str, Any]()
        weakref.finalize(self, in_use.close)
        split_options["hold_out"] = HoldOut(share, max_bytes)
        if self.is_streamed:
            copies = in_use.enter_context(temporary_folder(self._folder / "download"))
            split_options["copies"] = copies / "files"
        self.shards = dict[str, Shard]()
        for name, x in files.items():
            place = self._folder / "shards" / x.key[:32] if self.is_streamed else self._folder
            options = split_options if name == self.first else {}
            self.shards[name] = read(source=source, files=x, folder=place, **options)
        self.key = self.shards[self.first].key
        in_use.enter_context(self._lock(self.first))

    def documents(self, part: PartName) -> Documents:
        """The documents of a part, read when they are iterated over; of a store, of one shard."""
        return self.shards[self.first].documents(part)

    def pack(
        self, part: PartName, tokenizer: Tokenizer, *, row_length: int, on_progress: Progress = None
    ) -> AnyRows:
        """The rows of a part.

        Args:
            part: The part.
            tokenizer: Tokenizer; for tokens, the one they were made with.
            row_length: Inputs of a row.
            on_progress: As in `pack`; not called for tokens, nor for a stream.

        Returns:
            The rows; of a store, a stream for training.

        Raises:
            ValueError: A text or a shard cannot be read, a text cannot be encoded, or a part has no
                document; for a stream when it is read.
        """
        if part == "held_out" or not self.is_streamed:
            return self._open_rows(self.first, part, tokenizer, row_length, on_progress)

        def open_shard(name: str) -> AnyRows:
            own = part if name == self.first else None
            return self._open_rows(name, own, tokenizer, row_length, None)

        keys = [self.key, *(shard.files.key for shard in self.shards.values())]
        return StreamedRows(
            [*self.shards],
            open_shard,
            tokenizer,
            row_length=row_length,
            seed=self._seed,
            sizes=self.record["sizes"],
            digest=json_digest([keys, tokenizer.to_json(), row_length]),
        )

    def _open_rows(
        self,
        name: str,
        part: PartName | None,
        tokenizer: Tokenizer,
        row_length: int,
        on_progress: Progress,
    ) -> AnyRows:
        """Open rows of a shard, whose folder is not deleted while they are used."""
        with self._lock(name) as lock:
            parts = self.shards[name].pack(part, tokenizer, row_length, on_progress)
            for i, rows in enumerate(parts):
                if rows.num_targets and not rows.num_bytes:  # tokens of another program
                    num_bytes = round(self._bytes_per_token(tokenizer) * rows.num_targets)
                    parts[i] = replace(rows, num_bytes=num_bytes)
            opened: AnyRows = parts[0] if len(parts) == 1 else ConcatenatedRows(parts)
            weakref.finalize(opened, lock.pop_all().close)
        if self.is_streamed:
            self._delete_oldest()
        return opened

    def _bytes_per_token(self, tokenizer: Tokenizer) -> float:
        """Bytes per token of the held-out text, which is decoded once."""

        def measure() -> float:
            parts = self.shards[self.first].pack("held_out", tokenizer, 1, None)
            num_bytes = sum(len(x.text.encode()) for x in self.documents("held_out"))
            return num_bytes / sum(rows.num_targets for rows in parts)

        return cached_json(self._folder / "bytes_per_token", self.key, measure)

    def _lock(self, name: str) -> contextlib.ExitStack:
        """Lock the folder of a shard of a store until the stack is closed."""
        lock = contextlib.ExitStack()
        if self.is_streamed:
            with contextlib.suppress(OSError):  # a disk that cannot be written is read
                lock.enter_context(use_folder(self.shards[name].folder))
        return lock

    def _delete_oldest(self) -> None:
        """Delete the oldest shards that exceed the buffer and that no process uses."""
        shards = list[tuple[float, int, Path]]()
        for path in (self._folder / "shards").iterdir():
            with contextlib.suppress(FileNotFoundError):  # others delete meanwhile
                sizes = [x.stat().st_size for x in path.rglob("*") if x.is_file()]
                shards.append((path.stat().st_mtime, sum(sizes), path))
        excess = sum(size for _, size, _ in shards) - self._buffer_bytes
        for _, size, path in sorted(shards):
            if excess > 0 and delete_unused(path):
                excess -= size


def _check_recorded(
    path: str, recorded: Mapping[str, str] | None, files: Mapping[str, str]
) -> None:
    """Raise if the files of a text have other versions than when the run began."""
    if recorded is None or recorded == files:
        return
    words = {
        name: "is new" if name in files else "is missing" for name in recorded.keys() ^ files.keys()
    }
    both = recorded.keys() & files.keys()
    words |= {name: "has changed" for name in both if recorded[name] != files[name]}
    differences = ", ".join(f"{name} {word}" for name, word in sorted(words.items())[:3])
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    raise ValueError(
        f"The text of {path} is not that of the run: {differences}{more}. Restore it, or start a "
        "new run."
    )
