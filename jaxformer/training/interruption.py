"""SIGINT, SIGTERM and SIGHUP: finish the step, save, exit with status 128 + signal."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

# SIGHUP: the terminal is gone. Windows has none.
SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
PATIENCE = 2  # signals that wait for the state to be saved; the next one does not

Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """Raised after a signal; `status` is the exit status (130, 143 or 129)."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # as shells have it


class Deferred:
    """Signals received while they were deferred.

    Attributes:
        stopping: What `stops` said last.
    """

    def __init__(self) -> None:
        self.stopping = False
        self._numbers: list[int] = []

    def stops(self, step: int) -> bool:
        """Whether to stop after this step; the same on all processes."""
        if jax.process_count() > 1:
            self.stopping = multihost_utils.reached_preemption_sync_point(step)
        else:
            self.stopping = bool(self._numbers)
        return self.stopping

    def interrupted(self) -> Interrupted:
        """The exception for the first signal."""
        return Interrupted((self._numbers or [signal.SIGTERM])[0])

    def note(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: record the signal, and exit at the third."""
        self._numbers.append(number)
        if len(self._numbers) > PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        name, num_left = signal.Signals(number).name, PATIENCE + 1 - len(self._numbers)
        # Not print, which cannot be called while it is itself interrupted.
        message = f"\n{name}: ending once the state is saved ({num_left} more: at once).\n"
        with contextlib.suppress(OSError):  # of a terminal that is gone
            os.write(2, message.encode())


@contextlib.contextmanager
def deferred() -> Iterator[Deferred]:
    """Defer SIGINT, SIGTERM and SIGHUP; the third signal kills the process."""
    signals = Deferred()
    with _handled(signals.note):
        yield signals


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise `Interrupted` on SIGINT, SIGTERM and SIGHUP.

    Where several processes train, a signal to one of them is for all, so none raises: JAX itself
    handles SIGTERM and tells the others, and the other two become SIGTERM.
    """
    with _handled(_raise):
        yield


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


def _terminate(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    handlers: dict[int, Handler] = dict.fromkeys(SIGNALS, handler)
    if jax.process_count() > 1:
        handlers = {n: _terminate for n in SIGNALS if n != signal.SIGTERM}
    # A process in the background may have been started so that it ignores one.
    handlers = {n: h for n, h in handlers.items() if signal.getsignal(n) != signal.SIG_IGN}
    previous = {number: signal.signal(number, each) for number, each in handlers.items()}
    try:
        yield
    finally:
        for number, each in previous.items():
            signal.signal(number, each)
