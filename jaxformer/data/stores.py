"""Reads files of the Hugging Face hub and of object stores, by the filesystems of fsspec."""

import errno
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from jaxformer.data.dataset_splits import training_files
from jaxformer.data.records import data_suffix
from jaxformer.extras import import_extra
from jaxformer.json_files import json_digest

T = TypeVar("T")
CHUNK_BYTES = 1 << 23  # of one request
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between tries; each pause doubles
LEFT_OUT = "README.md"  # which describes a dataset on the hub
POLL_SECONDS = 0.2
MAX_PAUSES = 60.0, 900.0  # seconds of pauses without progress: of a listing, of reading a file
# What tells a version of a file from another, in the order of preference.
VERSION_FIELDS = (
    "blob_id", "xet_hash", "ETag", "etag", "md5Hash", "generation", "LastModified",
    "Last-Modified", "mtime", "created",
)  # fmt: skip
# Packages with the filesystems that fsspec has not itself.
PACKAGES = {"hf": "huggingface_hub", "gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}
PACKAGES |= dict.fromkeys(("http", "https"), "aiohttp")
FATAL = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
FATAL_ERRNO = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
TEMPORARY_STATUS = (408, 425, 429)  # of the codes between 400 and 499


@dataclass(frozen=True)
class StoreFile:
    """A file of a store.

    Attributes:
        filesystem: Filesystem of fsspec.
        path: Path in it.
        name: Path relative to the folder of the corpus.
        size: Bytes; None if the store does not know it.
        version: Changes with the content.
    """

    filesystem: Any
    path: str
    name: str
    size: int | None
    version: str

    @property
    def url(self) -> str:
        """Address of the file."""
        return str(self.filesystem.unstrip_protocol(self.path))


def is_store(path: str) -> bool:
    """Whether a path is the address of a store.

    Args:
        path: A path, or an address such as ``hf://datasets/NAME`` or ``gs://bucket/folder``.

    Returns:
        Whether it has a scheme.
    """
    return re.match(r"\w[\w+.-]*://", path) is not None


def open_filesystem(url: str) -> tuple[Any, str]:
    """Filesystem of an address, without what it remembers, and the path in it.

    Raises:
        ValueError: The address names no folder, or its store is of an unknown kind.
        ImportError: ``fsspec`` or the filesystem of this store is not installed.
    """
    fsspec = import_extra("fsspec")
    scheme, _, rest = url.partition("://")
    if not rest.strip("/") or (scheme in PACKAGES and rest.startswith("/")):
        raise ValueError(f"{url} names no folder; pass {scheme}://NAME/FOLDER.")
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ValueError as error:
        raise ValueError(f"{url}: {str(error).removesuffix('.')}.") from error
    except ImportError as error:
        package = PACKAGES.get(scheme, scheme)
        raise ImportError(
            f"{url} needs a package that is not installed: pip install {package}"
        ) from error
    filesystem.invalidate_cache()
    return filesystem, path


def list_store(url: str, suffixes: Sequence[str] | None = None) -> dict[str, StoreFile]:
    """List the files of an address.

    Args:
        url: Address of a file or a folder, or a pattern such as ``hf://datasets/NAME/*.parquet``.
        suffixes: Suffixes of the files of a folder to include, without README.md; ``.json`` files
            need a pattern. Validation and test files are left out, see `training_files`. None
            includes all files.

    Returns:
        The files by name, sorted.

    Raises:
        ValueError: There is none, the store cannot be read, or it is of an unknown kind.
        ImportError: ``fsspec`` or the filesystem of this store is not installed.
    """
    if url.startswith(("http:", "https:")) and url.endswith("/"):
        raise ValueError(f"{url}: a web server has no folders; pass a file or a pattern.")
    filesystem, path = open_filesystem(url)
    is_pattern = any(character in path for character in "*?[")

    def find() -> tuple[bool, dict[str, dict[str, Any]]]:
        if is_pattern and not filesystem.exists(path):
            infos = filesystem.glob(path, detail=True)
            infos = {k: info for k, info in infos.items() if info["type"] == "file"}
        elif (info := filesystem.info(path))["type"] == "file":
            return False, {path: info}
        else:
            infos = dict(filesystem.find(path, detail=True))
        # Web servers list names alone.
        complete = {k: x if x.get("size") else filesystem.info(k) for k, x in infos.items()}
        return is_pattern, complete

    is_pattern, infos = with_retries(find, url, MAX_PAUSES[0])
    root = path.rstrip("/")
    if is_pattern or list(infos) == [path]:
        parts = PurePosixPath(path).parts
        first = next((i for i, x in enumerate(parts) if any(c in x for c in "*?[")), -1)
        root = str(PurePosixPath(*parts[:first]))
    names = {k: k.removeprefix(root).lstrip("/") for k in sorted(infos)}
    if suffixes is not None and not is_pattern and list(infos) != [path]:
        names = _of_corpus(names, [suffix.lower() for suffix in suffixes])
    if not names:
        is_any = is_pattern or suffixes is None
        reason = "matches" if is_any else f"has the suffix {' or '.join(suffixes or ())}"
        raise ValueError(f"{url} has no text: no file there {reason}.")
    training_names = set(names.values())
    if suffixes is not None:
        training_names &= {*training_files(list(names.values()), url)}
    return {
        name: StoreFile(filesystem, k, name, infos[k].get("size"), _version(infos[k]))
        for k, name in names.items()
        if name in training_names
    }


def download(file: StoreFile, target: Path, check_stop: Callable[[], None]) -> None:
    """Copy a file of a store to a local one, trying again where the connection ends.

    Args:
        file: The file.
        target: The local file.
        check_stop: Called before each chunk; an error of it ends the download.

    Raises:
        ValueError: The store cannot be read, or the file has changed since it was listed.
        OSError: The local file cannot be written.
    """
    with open(target, "wb") as local:
        for chunk in _read_ahead(_chunks(file, check_stop), check_stop):
            try:
                local.write(chunk)
            except OSError as error:
                raise OSError(
                    error.errno, f"Downloading {file.url} to {target.parent} failed: {error}"
                ) from error

    def version() -> str:
        file.filesystem.invalidate_cache()
        return _version(file.filesystem.info(file.path))

    if with_retries(version, file.url, MAX_PAUSES[1], check_stop) != file.version:
        raise ValueError(
            f"{file.url} has changed since the run began. Restore it, or start a new run."
        )


def _read_ahead(chunks: Iterator[bytes], check_stop: Callable[[], None]) -> Iterator[bytes]:
    """Read in a daemon thread, so that a stalled connection does not delay `check_stop`."""
    read: queue.Queue[bytes | Exception | None] = queue.Queue(2)

    def run() -> None:
        try:
            for chunk in chunks:
                read.put(chunk)
            read.put(None)
        except Exception as error:
            read.put(error)

    threading.Thread(target=run, daemon=True).start()
    while True:
        check_stop()
        try:
            item = read.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item


def fetch_files(url: str, names: Sequence[str], folder: Path) -> Path:
    """Copy small files of a folder of a store, those that exist, to a local folder."""
    filesystem, path = open_filesystem(url)

    def fetch(name: str) -> bytes | None:
        return bytes(filesystem.cat(name)) if filesystem.exists(name) else None

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        content = with_retries(partial(fetch, f"{path}/{name}"), url, MAX_PAUSES[0])
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).write_bytes(content)
    return folder


def store_has(url: str) -> bool:
    """Whether a store has a file."""
    filesystem, path = open_filesystem(url)

    return with_retries(lambda: bool(filesystem.exists(path)), url, MAX_PAUSES[0])


def upload(files: Sequence[Path], url: str) -> None:
    """Copy local files to a folder of a store, in this order."""
    filesystem, path = open_filesystem(url)

    def put(file: Path) -> None:
        filesystem.makedirs(path, exist_ok=True)
        filesystem.put_file(str(file), f"{path}/{file.name}")

    for file in files:
        with_retries(partial(put, file), f"{url}/{file.name}", MAX_PAUSES[1])


def with_retries(
    call: Callable[[], T],
    url: str,
    max_pauses: float,
    check_stop: Callable[[], None] = lambda: None,
) -> T:
    """Call a function of a store, trying again after growing pauses."""
    retries = _Retries(url, max_pauses, check_stop)
    while True:
        try:
            return call()
        except Exception as error:
            retries.wait(error)


class _Retries:
    """Waits after each error, for longer and longer, until all pauses exceed the maximum."""

    def __init__(self, url: str, max_pauses: float, check_stop: Callable[[], None]):
        self._url, self._max, self._check_stop = url, max_pauses, check_stop
        self.reset()

    def reset(self) -> None:
        self._pause, self._sum, self._count = FIRST_PAUSE, 0.0, 0

    def wait(self, error: Exception) -> None:
        """Wait, or raise a ValueError if trying again would not help."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        if not _is_temporary(error):
            raise ValueError(f"{self._url} cannot be reached: {reason}") from error
        if self._sum + self._pause > self._max:
            raise ValueError(
                f"{self._url} cannot be reached, after {self._count + 1} tries in {self._sum:.0f} "
                f"seconds: {reason}"
            ) from error
        logging.getLogger("jaxformer.data").warning(
            "%s: %s; trying again in %.0f s", self._url, reason, self._pause
        )
        until = time.monotonic() + self._pause
        while (remaining := until - time.monotonic()) > 0:
            self._check_stop()
            time.sleep(min(remaining, POLL_SECONDS))
        self._sum, self._count = self._sum + self._pause, self._count + 1
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _is_temporary(error: Exception) -> bool:
    """Whether an error may pass: of the network or the server, not of the address or the caller."""
    status = getattr(error, "status", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in TEMPORARY_STATUS
    if isinstance(error, (*FATAL, ImportError)) or getattr(error, "errno", None) in FATAL_ERRNO:
        return False
    # Each client has errors of its own; those of Python itself are of the network, or faults.
    is_of_client = type(error).__module__ != "builtins"
    return is_of_client or isinstance(error, OSError | EOFError | TimeoutError)


def _chunks(file: StoreFile, check_stop: Callable[[], None]) -> Iterator[bytes]:
    """Yield the bytes of a file, from where they ended when an error occurs."""
    retries, offset = _Retries(file.url, MAX_PAUSES[1], check_stop), 0
    while file.size is None or offset < file.size:
        try:
            with file.filesystem.open(file.path, "rb", block_size=CHUNK_BYTES) as remote:
                if offset:
                    remote.seek(offset)
                while chunk := remote.read(CHUNK_BYTES):
                    offset += len(chunk)
                    retries.reset()
                    yield chunk
            if file.size is None:
                return
            if offset < file.size:
                raise EOFError(f"it ended after {offset} of {file.size} bytes")
        except Exception as error:
            retries.wait(error)


def _of_corpus(names: dict[str, str], suffixes: Sequence[str]) -> dict[str, str]:
    """Files of a folder with one of the suffixes, without hidden ones and `LEFT_OUT`."""
    return {
        path: name
        for path, name in names.items()
        if (suffix := data_suffix(Path(name))) in suffixes
        and suffix != ".json"
        and PurePosixPath(name).name != LEFT_OUT
        and not any(part.startswith(".") for part in PurePosixPath(name).parts)
    }


def _version(info: dict[str, Any]) -> str:
    value = next((info[name] for name in VERSION_FIELDS if info.get(name) is not None), None)
    if isinstance(value, datetime):
        value = value.timestamp()
    if isinstance(value, float):  # fsspec has times in two forms
        value = round(value, 6)
    return json_digest([info.get("size"), str(value)])
