"""Corpora in stores, which are read file by file while a run trains."""

import contextlib
import hashlib
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from jaxformer.data.chat_templates import ChatTemplate
from jaxformer.data.corpus import (
    AnyDocument,
    CorpusSize,
    Documents,
    NoTextError,
    Packed,
    TextFiles,
    documents,
)
from jaxformer.data.corpus_cache import PartName, SplitSource, check_recorded
from jaxformer.data.dataset_splits import training_files
from jaxformer.data.instructions import Instructions
from jaxformer.data.mixed_rows import AnyRows
from jaxformer.data.packing import FORMAT_VERSION, METADATA, pack
from jaxformer.data.rows import PackedRows, empty_rows
from jaxformer.data.stores import StoreFile, download, fetch_files, is_store, list_store
from jaxformer.data.streamed_rows import ShardSize, StreamedRows
from jaxformer.data.temporary_folders import delete_unused, temporary_folder, use_folder
from jaxformer.data.tokenization import Progress
from jaxformer.data.tokenized_source import (
    PART_NAME,
    TOKEN_SUFFIXES,
    TokenizedSource,
    open_parts,
    part_name,
    sorted_parts,
    with_bytes,
)
from jaxformer.data.tokenizer_loading import TOKENIZER_FILES
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.json_files import json_digest

T = TypeVar("T")
MIN_SHARD_BYTES = 1 << 26  # smaller files are read together


class ShardedSource:
    """The shards of a corpus in a store, of which a bounded number is on the disk.

    Attributes:
        source: The source.
        names: Names of the shards.
        first: Name of the shard with the held-out text.
        key: Digest of all that determines the held-out text and that of the tokenizer.
        num_files: Number of files.
        num_bytes: Bytes of all files, compressed ones as they are.
    """

    def __init__(
        self,
        source: TextFiles | Instructions | Packed,
        shards: Mapping[str, list[StoreFile]],
        *,
        folder: Path,
        template: ChatTemplate | None = None,
        seed: int = 0,
        held_out: float = 0.05,
        max_bytes: int | None = None,
        recorded: Mapping[str, Any] | None = None,
        buffer_bytes: int = 20_000_000_000,
    ):
        """Compare the files with those of an earlier start.

        Args:
            source: The source.
            shards: Files of each shard.
            folder: Folder of caches.
            template: Chat template, for instructions.
            seed: Random seed of the order of shards and rows.
            held_out: Fraction of the text to hold out: of the size of all files, but at most half
                of the shard that it is taken of.
            max_bytes: Maximum number of bytes to hold out.
            recorded: The `record` of an earlier start.
            buffer_bytes: Maximum number of bytes of tokenized shards on the disk, besides those
                that are in use.

        Raises:
            ValueError: A file has changed since the run began.
        """
        self._files, self._template, self._seed = shards, template, seed
        self.source: Any = source  # of the types that a subclass takes
        self._folder, self._buffer_bytes = folder.absolute(), buffer_bytes
        self.names = tuple(shards)
        self._versions = {x.name: x.version for files in shards.values() for x in files}
        known = recorded or {"files": self._versions}
        check_recorded(source.path, known.get("files", known), self._versions)
        self._sizes = {name: ShardSize(*size) for name, size in known.get("sizes", {}).items()}
        sizes = {name: sum(x.size or 0 for x in files) for name, files in shards.items()}
        self.num_files, self.num_bytes = len(self._versions), sum(sizes.values())
        large = [name for name, size in sizes.items() if size >= self.num_bytes / len(sizes)]
        self.first = min(large, key=lambda name: hashlib.sha256(name.encode()).digest())
        share = max(held_out, min(0.5, held_out * len(self.names)))
        self._share: dict[str, Any] = {"held_out": share, "max_bytes": max_bytes}
        self.key = json_digest([self.shard_key(self.first), self._share])

    @property
    def record(self) -> dict[str, Any]:
        """Version of each file, and the sizes of the shards that have been read."""
        return {"files": self._versions, "sizes": dict(self._sizes)}

    def shard_key(self, name: str) -> str:
        """Digest of all that determines the text of a shard."""
        options = {k: x for k, x in asdict(self.source).items() if k != "suffixes"}
        kind, files = type(self.source).__name__, self._files[name]
        key = json_digest([FORMAT_VERSION, kind, options, [(x.name, x.version) for x in files]])
        return key if self._template is None else json_digest([key, self._template.key])

    def lazy(self, part: PartName) -> Documents:
        """The documents of a part of the shard with the held-out text."""
        return self._first_shard.lazy(part)

    def pack(
        self, part: PartName, tokenizer: Tokenizer, *, row_length: int, on_progress: Progress = None
    ) -> AnyRows:
        """A stream for training, or the rows of the held-out text; see `AnySource`."""
        if part == "held_out":
            return self._first_shard.pack(
                part, tokenizer, row_length=row_length, on_progress=on_progress
            )
        keys = [self.shard_key(name) for name in self.names]
        return StreamedRows(
            self.names,
            partial(self._open_rows, tokenizer, row_length),
            seed=self._seed,
            sizes=self._sizes,
            digest=json_digest([self.key, keys, tokenizer.to_json(), row_length]),
            empty=empty_rows(tokenizer, row_length),
        )

    @property
    def _first_shard(self) -> SplitSource | TokenizedSource:
        """The shard with the held-out text."""
        raise NotImplementedError

    def _open_rows(self, tokenizer: Tokenizer, row_length: int, name: str) -> PackedRows:
        """The rows of a shard to train on."""
        raise NotImplementedError

    def _open_in_buffer(self, key: str, open_folder: Callable[[Path], T]) -> T:
        """Open the folder of a shard, which is not deleted while what was opened is used."""
        folder = self._folder / "shards" / json_digest(key)[:32]
        with contextlib.ExitStack() as locks:
            with contextlib.suppress(OSError):  # a disk that cannot be written is read
                locks.enter_context(use_folder(folder))
            opened = open_folder(folder)
            weakref.finalize(opened, locks.pop_all().close)
        self._delete_oldest(folder.parent)
        return opened

    def _delete_oldest(self, folder: Path) -> None:
        """Delete the oldest shards that exceed the buffer and that no process uses."""
        shards = list[tuple[float, int, Path]]()
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # others delete meanwhile
                shards.append((path.stat().st_mtime, _folder_size(path), path))
        excess = sum(size for _, size, _ in shards) - self._buffer_bytes
        for _, size, path in sorted(shards):
            if excess > 0 and delete_unused(path):
                excess -= size


class StreamedSource(ShardedSource):
    """A text in a store, such as ``hf://datasets/NAME``; like `CachedSource`.

    A shard, which is a file or several small ones, is downloaded, tokenized and deleted in the
    background of a run, so the disk has one or two shards of text and a bounded number of tokenized
    ones. Held-out text, and the text that a tokenizer is trained on, are of one shard, which a hash
    of the names chooses among those of more than average size.
    """

    def __init__(self, source: TextFiles | Instructions, **options: Any):
        """List the files.

        Args:
            source: The source.
            **options: Folder of caches and others, see `ShardedSource`.

        Raises:
            ValueError: There is no file, one has changed since the run began, or the store cannot
                be read.
            ImportError: The filesystem of this store is not installed.
        """
        super().__init__(source, _group(list_store(source.path, source.suffixes)), **options)
        self._lock, self._first_files = threading.Lock(), dict[str, Path]()
        self._closing = contextlib.ExitStack()
        weakref.finalize(self, self._closing.close)

    @cached_property
    def _first_shard(self) -> SplitSource:
        texts = self.documents(self.first)
        return SplitSource(texts, self.key, folder=self._folder, share=self._share)

    def documents(self, name: str) -> Documents:
        """The documents of a shard, which is downloaded when they are iterated over."""
        files = self._files[name]

        def read() -> Iterator[AnyDocument]:
            with self._local_files(name) as paths:
                texts = documents(self.source, template=self._template, files=paths)
                try:
                    for document in texts:
                        raise_if_exiting()
                        yield document
                except ValueError as error:
                    message = str(error)
                    for file in files:
                        message = message.replace(str(paths[file.name]), file.url)
                    kind = NoTextError if isinstance(error, NoTextError) else ValueError
                    raise kind(message) from error

        is_first, num_bytes = name == self.first, sum(file.size or 0 for file in files)
        size = CorpusSize(1, isinstance(self.source, Instructions), num_bytes)
        return Documents(read, None if is_first else lambda: size)

    def _open_rows(self, tokenizer: Tokenizer, row_length: int, name: str) -> PackedRows:
        """Tokenize a shard, or open its rows; of the first one without the held-out text."""
        key, texts = self.shard_key(name), self.documents(name)
        if name == self.first:
            key, texts = f"{self.key} train", self.lazy("train")

        def open_folder(folder: Path) -> PackedRows:
            try:
                return pack(texts, tokenizer, row_length=row_length, folder=folder, key=key)
            except NoTextError:
                return empty_rows(tokenizer, row_length)

        return self._open_in_buffer(key, open_folder)

    @contextlib.contextmanager
    def _local_files(self, name: str) -> Iterator[dict[str, Path]]:
        """Download a shard and delete it at the end; the first one at the end of the process."""
        if name != self.first:
            with self._download(name) as paths:
                yield paths
            return
        with self._lock:
            if not self._first_files:
                self._first_files |= self._closing.enter_context(self._download(name))
        yield self._first_files

    @contextlib.contextmanager
    def _download(self, name: str) -> Iterator[dict[str, Path]]:
        with temporary_folder(self._folder / "download") as folder:
            paths = dict[str, Path]()
            for number, file in enumerate(self._files[name]):
                paths[file.name] = folder / str(number) / PurePosixPath(file.name).name
                paths[file.name].parent.mkdir()
                download(file, paths[file.name], raise_if_exiting)
            yield paths


class StreamedTokens(ShardedSource):
    """A tokenized corpus in a store; like `TokenizedSource`.

    Its parts, or the files of another program, are downloaded one after another in the background
    of a run. The last documents of one of them, which a hash of the names chooses, are held out.
    """

    def __init__(self, source: Packed, tokenizer: Tokenizer, **options: Any):
        """List the shards.

        Args:
            source: The source.
            tokenizer: The tokenizer of the text.
            **options: Folder of caches and others, see `ShardedSource`.

        Raises:
            ValueError: There is no shard, one is missing or has changed since the run began, or the
                store cannot be read.
            ImportError: The filesystem of this store is not installed.
        """
        super().__init__(source, list_token_shards(source.path), **options)
        self._tokenizer = tokenizer

    @cached_property
    def _first_shard(self) -> TokenizedSource:
        def open_source(source: Packed, folder: Path) -> TokenizedSource:
            return TokenizedSource(source, self._tokenizer, folder=folder, **self._share)

        return self._open(self.first, open_source)

    def _open_rows(self, tokenizer: Tokenizer, row_length: int, name: str) -> PackedRows:
        if name == self.first:
            rows = self._first_shard.pack("train", tokenizer, row_length=row_length)
            assert isinstance(rows, PackedRows)  # of one part
            return rows

        def open_rows(source: Packed, folder: Path) -> PackedRows:
            (rows,) = open_parts(source, tokenizer, folder).values()
            rows = with_bytes(rows, self._first_shard.bytes_per_token)
            return replace(rows, row_length=row_length)

        return self._open(name, open_rows)

    def _open(self, name: str, open_source: Callable[[Packed, Path], T]) -> T:
        """Download a shard, unless it is in the buffer, and again if it is damaged there."""

        def open_folder(folder: Path) -> T:
            tokens = folder / "tokens"
            source = replace(self.source, path=str(tokens))
            if tokens.exists():
                try:
                    return open_source(source, folder)
                except ValueError:
                    shutil.rmtree(tokens, ignore_errors=True)
            with temporary_folder(tokens) as temporary:
                for file in self._files[name]:
                    path = temporary / _local_name(file.name)
                    path.parent.mkdir(exist_ok=True)
                    download(file, path, raise_if_exiting)
                with contextlib.suppress(OSError):  # another process was faster
                    os.rename(temporary, tokens)
            try:
                return open_source(source, folder)
            except ValueError as error:
                raise ValueError(f"{self.source.path}, {name}: {error}") from error

        return self._open_in_buffer(self.shard_key(name), open_folder)


def _group(files: Mapping[str, StoreFile]) -> dict[str, list[StoreFile]]:
    """Shards of the files: files in order until they have `MIN_SHARD_BYTES`."""
    shards, size = list[list[StoreFile]](), MIN_SHARD_BYTES
    for file in files.values():
        if size >= MIN_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(file)
        size += MIN_SHARD_BYTES if file.size is None else file.size
    return {shard[0].name: shard for shard in shards}


def fetch_tokenizer(source: Packed, cache: Path) -> Path:
    """Folder of the tokenizer of a tokenized corpus; of one in a store, a copy in the cache.

    Args:
        source: The source.
        cache: Folder of caches.

    Returns:
        The folder. Tokens of other programs have no ``tokenizer.json`` in it.

    Raises:
        ValueError: The store cannot be reached.
        ImportError: The filesystem of this store is not installed.
    """
    if not is_store(source.path):
        return Path(source.path)
    folder = cache / "tokenizers" / json_digest(source.path)[:32]
    return fetch_files(source.path, TOKENIZER_FILES, folder)


def list_token_shards(url: str) -> dict[str, list[StoreFile]]:
    """List the shards of a tokenized corpus: parts, or files of another program with their index.

    Args:
        url: Address of a folder, a file or a pattern.

    Returns:
        Files of each shard, by its name.

    Raises:
        ValueError: There is none, or a part is missing.
    """
    files = list_store(url)
    paths = {PurePosixPath(name): file for name, file in files.items()}
    written = {path.parent for path in paths if path.name == METADATA}
    if written:
        parts = {path.name: path for path in written if PART_NAME.fullmatch(path.name)}
        if len({path.parent for path in written}) > 1 or len(parts) < len(written):
            raise ValueError(
                f"{url} has tokenized text in several folders; pass that of the parts."
            )
        return {
            name: [file for path, file in paths.items() if path.parent == parts[name]]
            for name in sorted_parts(parts, url)
        }
    shards = {
        str(path): [file, *filter(None, [paths.get(path.with_suffix(".idx"))])]
        for path, file in paths.items()
        if path.suffix in TOKEN_SUFFIXES
    }
    shards = {name: shards[name] for name in training_files(list(shards), url, always=True)}
    if not shards:
        raise ValueError(
            f"{url} has no tokenized text: neither parts that python -m jaxformer.data wrote nor "
            f"{' or '.join(TOKEN_SUFFIXES)} files."
        )
    return shards


def _local_name(name: str) -> str:
    """Name of a file of a shard in the folder of the shard, of which it is the only part."""
    path = PurePosixPath(name)
    return f"{part_name(1, 1)}/{path.name}" if PART_NAME.fullmatch(path.parent.name) else path.name


def _folder_size(path: Path) -> int:
    """Bytes of the files of a folder and its subfolders."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(os.path.join(folder, name)).st_size
    return size


def raise_if_exiting() -> None:
    """Raise if the process ends, so that its end does not wait for a thread that reads shards."""
    if not threading.main_thread().is_alive():
        raise RuntimeError("The process ends.")
