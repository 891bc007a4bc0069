"""Files of a corpus that are read together: local files, or copies of files of a store."""

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

from jaxformer.data.corpus import NoTextError, Packed, Source, StandardLibrary, source_files
from jaxformer.data.dataset_splits import training_files
from jaxformer.data.file_digests import check_unchanged, file_digests, file_state
from jaxformer.data.packing import METADATA
from jaxformer.data.stores import StoreFile, download, fetch_files, is_store, list_store
from jaxformer.data.temporary_folders import temporary_folder
from jaxformer.data.tokenizer_loading import TOKENIZER_FILES
from jaxformer.json_files import json_digest

MIN_SHARD_BYTES = 1 << 26  # smaller files of text in a store are read together
PART_NAME = re.compile(r"part-(\d+)-of-(\d+)")
TOKEN_SUFFIXES = (".bin", ".parquet")  # of other programs


class LocalFiles:
    """Local files, whose digests are computed again only if their size or time has changed.

    Attributes:
        versions: SHA-256 of each file, by its name.
        key: Digest of the content of all, wherever they are.
        num_bytes: Their bytes, compressed ones as they are.
    """

    def __init__(
        self,
        list_files: Callable[[], Mapping[str, Path]],
        record: Path,
        recorded: Mapping[str, str] | None = None,
    ):
        """Digest the files that are new.

        Args:
            list_files: Lists the files by name.
            record: File with the digests of an earlier start.
            recorded: Versions when the run began. With them, files may be gone until they are read.

        Raises:
            ValueError: There is no file, or one changed while it was read.
            OSError: A file cannot be read.
        """
        self._list_files, self._files = list_files, dict[str, Path]()
        try:
            self._files |= list_files()
        except (ValueError, OSError):
            if recorded is None:  # else the text is gone, but the rows may be cached
                raise
        self._states = {path: file_state(path) for path in self._files.values()}
        self.versions = file_digests(self._files, record) if self._files else dict(recorded or {})
        self.key = json_digest(sorted(self.versions.items()))
        self.num_bytes = sum(state[0] for state in self._states.values())

    @contextlib.contextmanager
    def open(self, folder: Path, *, keep: bool) -> Iterator[Mapping[str, Path]]:
        """The files by name, where they are.

        Raises:
            ValueError: One has changed, which may also be the reason of another error.
        """
        try:
            yield self._files or self._list_files()
        except ValueError:
            self._check_unchanged()
            raise
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        for path, state in self._states.items():
            check_unchanged(path, state)


class StoreFiles:
    """Files of a store, which are copied when they are read.

    Attributes:
        versions: What changes with the content of each file, by its name.
        key: Digest of address and versions.
        num_bytes: Bytes of the files, compressed ones as they are.
    """

    def __init__(self, url: str, files: Sequence[StoreFile]):
        """Store the address of the corpus and the files."""
        self._files, self.versions = files, {file.name: file.version for file in files}
        self.key = json_digest([url, *self.versions.items()])
        self.num_bytes = sum(file.size or 0 for file in files)

    @contextlib.contextmanager
    def open(self, folder: Path, *, keep: bool) -> Iterator[Mapping[str, Path]]:
        """Copies by name, in a folder; unless they are kept, beside it and deleted at the end.

        Errors name the files by their address.

        Raises:
            ValueError: The store cannot be read, or a file has changed since it was listed.
        """
        with contextlib.ExitStack() as stack:
            paths, exists = self._paths(folder), folder.exists()
            if not exists or not self._are_complete(paths):
                if exists:
                    shutil.rmtree(folder, ignore_errors=True)
                temporary = stack.enter_context(temporary_folder(folder))
                copies = self._paths(temporary)
                for file in self._files:
                    copies[file.name].parent.mkdir(exist_ok=True)
                    download(file, copies[file.name], raise_if_exiting)
                if keep:
                    with contextlib.suppress(OSError):  # another process was faster
                        os.rename(temporary, folder)
                else:
                    paths = copies
            try:
                yield paths
            except ValueError as error:
                if keep:  # they may be damaged
                    shutil.rmtree(folder, ignore_errors=True)
                message = str(error)
                for file in self._files:
                    message = message.replace(str(paths[file.name]), file.url)
                kind = NoTextError if isinstance(error, NoTextError) else ValueError
                raise kind(message) from error

    def _paths(self, folder: Path) -> dict[str, Path]:
        """Paths of the copies: files that lie in one folder of the store do so here."""
        numbers, paths = dict[PurePosixPath, int](), dict[str, Path]()
        for file in self._files:
            path = PurePosixPath(file.name)
            number = numbers.setdefault(path.parent, len(numbers))
            paths[file.name] = folder / str(number) / path.name
        return paths

    def _are_complete(self, paths: Mapping[str, Path]) -> bool:
        return all(
            path.is_file() and file.size in (None, path.stat().st_size)
            for file, path in zip(self._files, paths.values(), strict=True)
        )


def list_shards(
    source: Source, folder: Path, recorded: Mapping[str, str] | None
) -> "dict[str, LocalFiles] | dict[str, StoreFiles]":
    """Files of each shard, by its name. Local files are one shard, however many there are.

    Args:
        source: The source.
        folder: Folder of caches.
        recorded: Versions of the files when the run began.

    Raises:
        ValueError: There is no file, a part is missing, or the store cannot be read.
        OSError: A file cannot be read.
        ImportError: The filesystem of this store is not installed.
    """
    if not isinstance(source, StandardLibrary) and is_store(source.path):
        url = source.path
        if isinstance(source, Packed):
            files = list_store(url)
            shards = token_shards(files, url)
        else:
            files = list_store(url, source.suffixes)
            shards = _group(files)
        return {
            shard: StoreFiles(url, [files[x] for x in names]) for shard, names in shards.items()
        }
    place = json_digest([str(Path(source.path).resolve()), asdict(source)])[:32]
    record = folder / "files" / f"{place}.json"
    return {"": LocalFiles(partial(_local_files, source), record, recorded)}


def _group(files: Mapping[str, StoreFile]) -> dict[str, list[str]]:
    """Files of each shard: files in order until they have `MIN_SHARD_BYTES`."""
    shards, size = list[list[str]](), MIN_SHARD_BYTES
    for name, file in files.items():
        if size >= MIN_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += MIN_SHARD_BYTES if file.size is None else file.size
    return {shard[0]: shard for shard in shards}


def _local_files(source: Source) -> dict[str, Path]:
    """Local files of a source, by name; of parts their metadata, which has digests of the rest."""
    if not isinstance(source, Packed):
        return source_files(source)
    folder = Path(source.path)
    if folder.is_file():
        return {x.name: x for x in (folder, folder.with_suffix(".idx")) if x.exists()}
    files = [x for pattern in ("*", f"*/{METADATA}") for x in folder.glob(pattern) if x.is_file()]
    shards = token_shards([x.relative_to(folder).as_posix() for x in files], source.path)
    return {name: folder / name for name in chain.from_iterable(shards.values())}


def token_shards(names: Iterable[str], where: str) -> dict[str, list[str]]:
    """Group the files of a tokenized corpus: by part, or a token file with its index.

    Args:
        names: Files of the corpus.
        where: Its path or address.

    Returns:
        Files of each shard, by its name, in order; without validation and test files of other
        programs, see `training_files`.

    Raises:
        ValueError: There is none, or a part is missing.
    """
    paths = sorted(map(PurePosixPath, names))
    written = {path.parent for path in paths if path.name == METADATA}
    if written:
        parts = {path.name: path for path in written if PART_NAME.fullmatch(path.name)}
        if len({path.parent for path in written}) > 1 or len(parts) < len(written):
            raise ValueError(
                f"{where} has tokenized text in several folders; pass the one with the parts."
            )
        return {
            name: [str(path) for path in paths if path.parent == parts[name]]
            for name in sorted_parts(parts, where)
        }
    token_files = [str(path) for path in paths if path.suffix in TOKEN_SUFFIXES]
    if not token_files:
        raise ValueError(
            f"{where} has no tokenized text: neither parts that jaxformer data wrote nor "
            f"{' or '.join(TOKEN_SUFFIXES)} files."
        )
    indices = {str(path.with_suffix("")): str(path) for path in paths if path.suffix == ".idx"}
    return {
        name: [name, *filter(None, [indices.get(str(PurePosixPath(name).with_suffix("")))])]
        for name in training_files(token_files, where, always=True)
    }


def sorted_parts(names: Iterable[str], where: str) -> list[str]:
    """Names of parts in order.

    Raises:
        ValueError: One is missing, or they are parts of several corpora.
    """
    names = set(names)
    counts = {int(name.rpartition("-")[2]) for name in names}
    if len(counts) > 1:
        raise ValueError(
            f"{where} has parts of {' and of '.join(map(str, sorted(counts)))}; remove one kind."
        )
    (count,) = counts
    expected = [part_name(number, count) for number in range(1, count + 1)]
    if missing := [name for name in expected if name not in names]:
        raise ValueError(f"{where} lacks {', '.join(missing[:8])}; tokenize them first.")
    return expected


def part_name(number: int, count: int) -> str:
    """Name of the folder of a part, counted from 1."""
    return f"part-{number}-of-{count}"


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


def raise_if_exiting() -> None:
    """Raise if the process ends, so that its end does not wait for a thread that reads shards."""
    if not threading.main_thread().is_alive():
        raise RuntimeError("The process ends.")
