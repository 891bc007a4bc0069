"""A folder belongs to one run at a time."""

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
PATIENCE = 2  # seconds for a holder to write who it is


@contextlib.contextmanager
def held(folder: Path, *, made: bool = False) -> Iterator[None]:
    """Hold a folder while the block runs.

    The system forgets the lock when its holder ends, however it ends. Left without having put
    anything into a folder that was made for it, the folder goes.

    Args:
        folder: Made where it is missing.
        made: Whether it was made for this already.

    Raises:
        ValueError: Another process holds it; says which.
    """
    ours = made or not folder.exists()
    number = _locked(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(number)
        with contextlib.suppress(OSError):
            if ours:
                folder.rmdir()


def _locked(folder: Path) -> int:
    """The open file that is the lock, with who holds it written into it."""
    file = folder / LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            number = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the folder went with a run that came to nothing
            continue
        try:
            _lock(number, folder)
            if _is_there(number, file):
                os.truncate(number, 0)
                os.write(number, json.dumps(_who()).encode())
                return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)  # its holder removed it while we waited; we lock the one that comes next


def _lock(number: int, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{folder} is in use by {_holder(number)}\nWait for it, end it, or pass another "
            "--output."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"The file system of {folder} has no locks ({error.strerror}): nothing keeps a second "
            "run out of it.",
            file=sys.stderr,
        )


def _is_there(number: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), os.stat(file))
    except FileNotFoundError:
        return False


def _who() -> dict[str, str | int]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.orig_argv),
    }


def _holder(number: int) -> str:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            who = json.loads(os.pread(number, 1 << 16, 0))
            return "process {process} on {host}, since {since}:\n  {command}".format(**who)
        except (ValueError, KeyError, TypeError):  # not yet written
            time.sleep(0.01)
    return "another process, which does not say who it is."
