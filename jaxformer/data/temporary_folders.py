"""Folders that other processes may delete unless they are locked."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"  # in a folder that is in use


@contextlib.contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """Folder beside `final`, which is deleted at the end, as are those of killed processes."""
    for folder in final.parent.glob(f".{final.name}.*"):
        if fcntl is not None and (folder / LOCK).exists():
            delete_unused(folder)
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(8)}")
    try:
        with use_folder(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def use_folder(folder: Path) -> IO[str]:
    """Create a folder and lock it against `delete_unused`, until the returned file is closed."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / LOCK, "w")  # noqa: SIM115
        except (FileNotFoundError, FileExistsError):  # deleted meanwhile
            if folder.is_file():
                raise
            continue
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_lock(lock, folder):
            with contextlib.suppress(OSError):
                os.utime(folder)
            return lock
        lock.close()


def delete_unused(folder: Path) -> bool:
    """Delete a folder unless a process uses it; returns whether it is gone."""
    try:
        with open(folder / LOCK, "a") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_lock(lock, folder):
                return False
            # At once, so that nobody begins to use what is half deleted.
            deleted = folder.with_name(f".deleted.{secrets.token_hex(8)}")
            folder.rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _is_lock(lock: IO[str], folder: Path) -> bool:
    """Whether an open file is the lock of a folder, not of one at its place that was deleted."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK))
    except FileNotFoundError:
        return False
