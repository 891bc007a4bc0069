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
    _delete_abandoned(final)
    temporary, lock = _locked_folder(final)
    try:
        with lock:
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _locked_folder(final: Path) -> tuple[Path, IO[str]]:
    while True:
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(8)}")
        temporary.mkdir(parents=True)
        lock = open(temporary / LOCK, "w")  # noqa: SIM115
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (temporary / LOCK).exists():
            return temporary, lock
        lock.close()  # another process took it for abandoned before it was locked


def _delete_abandoned(final: Path) -> None:
    """Delete the folders of killed processes; one that runs has locked its folder."""
    for temporary in final.parent.glob(f".{final.name}.*"):
        with contextlib.suppress(OSError), open(temporary / LOCK) as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(temporary, ignore_errors=True)


def use_folder(folder: Path) -> IO[str] | None:
    """Create a folder and lock it against `delete_unused`, until the file is closed.

    Returns:
        The lock; None on a disk that cannot be written, where nothing is deleted either.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / LOCK, "w")  # noqa: SIM115
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError:
            return None
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)
        if (folder / LOCK).exists():
            with contextlib.suppress(OSError):
                os.utime(folder)
            return lock
        lock.close()


def delete_unused(folder: Path) -> bool:
    """Delete a folder unless a process uses it; returns whether it is gone."""
    try:
        with open(folder / LOCK) as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # At once, so that nobody begins to use what is half deleted.
            deleted = folder.with_name(f".deleted.{secrets.token_hex(8)}")
            folder.rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return False
    return True
