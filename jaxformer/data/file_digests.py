"""Digests of files, which are read again only if their size or time has changed."""

import contextlib
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

from jaxformer.json_files import read_json_with_checksum, write_json_with_checksum

# A file that changes again this soon may keep its time, so its digest is not recorded.
TIME_RESOLUTION_NS = 2 * 10**9


def file_digests(files: Mapping[str, Path], record: Path) -> dict[str, str]:
    """SHA-256 of each file.

    Args:
        files: Files by name.
        record: JSON file with size, time and digest of each, from an earlier call; updated.

    Returns:
        Digests in hexadecimal, by name.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file changed while it was read.
    """
    newest = time.time_ns() - TIME_RESOLUTION_NS
    known, entries = read_json_with_checksum(record) or {}, {}
    for name, path in files.items():
        state = file_state(path)
        size_and_time, digest = known.get(name, (None, ""))
        if size_and_time != state:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            check_unchanged(path, state)
        entries[name] = [state, digest]
    recorded = {name: entry for name, entry in entries.items() if max(entry[0][1:3]) < newest}
    if recorded != known:
        with contextlib.suppress(OSError):  # a cache that cannot be written can be read
            write_json_with_checksum(record, recorded)
    return {name: digest for name, (_, digest) in entries.items()}


def file_state(path: Path) -> list[int]:
    """Size, times of the content and of the inode, and number of the inode of a file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def check_unchanged(path: Path, state: list[int]) -> None:
    """Raise if a file has another size or time than before it was read."""
    if file_state(path) != state:
        raise ValueError(f"{path} changed while it was read; start again when it is complete.")
