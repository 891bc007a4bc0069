"""What comes before the imports of a program, which take seconds, can be interrupted and can fail.

Standard output and standard error are made to last: a reader that leaves, a terminal that hangs
up or a full disk ends what is shown, never what is done. What a terminal's encoding does not have
is shown as its number.
"""

import contextlib
import io
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
TRACEBACK = "JAXFORMER_TRACEBACK"  # the variable that asks for one
NAMES = {1: "stdout", 2: "stderr"}
LEFT = "printed.txt"


class Lasting(io.FileIO):
    """A stream of the process that takes another way where the first one is closed.

    Args:
        number: Its file descriptor, which then leads elsewhere, for whoever else writes to it too.
        reason: Why it is closed already; None: it is not.
    """

    def __init__(self, number: int, reason: str | None):
        super().__init__(number, "w", closefd=False)
        self._reason = reason
        self._ways: list[Path] = []

    def write(self, data: Any) -> int:
        while True:
            try:
                return super().write(data)
            except OSError as error:
                self._turn_to(self._ways.pop() if self._ways else None, str(error.strerror))

    def keep(self, folder: Path) -> None:
        """From the moment at which the stream is closed, write into a file of this folder."""
        self._ways = [folder / LEFT]
        if self._reason is not None:
            self._turn_to(self._ways.pop(), self._reason)

    def _turn_to(self, file: Path | None, reason: str) -> None:
        said, self._reason = "", reason
        try:
            other = os.open(file or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            if file is not None:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                said = f"{now}: {NAMES[self.fileno()]} is closed ({reason}); it goes on here.\n"
        except OSError:  # no folder, or no room in it
            other = os.open(os.devnull, os.O_WRONLY)
        os.dup2(other, self.fileno())
        os.close(other)
        with contextlib.suppress(OSError):
            os.write(self.fileno(), said.encode())


def start_process() -> None:
    """Prepare a process for its imports, and for what comes after."""
    closed = open_closed()
    for number, name in NAMES.items():
        reason = "it was so from the start" if number in closed else None
        setattr(sys, name, lasting(number, getattr(sys, name), reason))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    sys.excepthook = explain
    sys.unraisablehook = remark


def open_closed() -> list[int]:
    """Lead what is closed of input, output and errors nowhere, or the next file takes its place."""
    closed = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(number, True)
            closed.append(number)
    return closed


def lasting(number: int, before: Any, reason: str | None) -> io.TextIOWrapper:
    """A stream like the one before, which lasts; None was closed."""
    plain = before is None
    raw: Any = Lasting(number, reason)
    unbuffered = not plain and before.write_through
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding="utf-8" if plain else before.encoding,
        errors="backslashreplace",
        line_buffering=plain or before.line_buffering,
        write_through=unbuffered,
    )


def keep_printed(folder: Path) -> None:
    """What is printed after a stream was closed goes into a file of this folder."""
    for stream in (sys.stdout, sys.stderr):
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # of an unbuffered stream there is but the raw one
        if isinstance(raw, Lasting):
            raw.keep(folder)


def leave(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C while nothing is done yet that would have to be ended well."""
    with contextlib.suppress(OSError):
        os.write(2, b"\nInterrupted.\n")
    os._exit(INTERRUPTED)


def end_imports() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, as elsewhere."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.excepthook is explain:  # of a save that fails they log what Orbax raises besides
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def remark(unraisable: Any) -> None:
    """Say what Python says of an error that nobody can catch.

    But for the other writes of a save that failed, which come to an end after it.
    """
    late = isinstance(unraisable.exc_value, RuntimeError) and unraisable.object is None
    if not (late and str(unraisable.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say which extra is missing; of any other error, what Python says."""
    if isinstance(error, ImportError) and not os.environ.get(TRACEBACK):
        from jaxformer.extras import missing

        print(f"error: {missing(error)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
