"""SIGINT, SIGTERM and SIGHUP: finish the step, save, exit with status 128 + signal."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

# SIGHUP is sent when the terminal closes; Windows does not have it.
SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
MAX_DEFERRED = 2  # the next signal ends the process at once

Handler = Callable[[int, FrameType | None], None]
_raised: list[int] = []  # signals inside `raise_on_signals`


class Interrupted(KeyboardInterrupt):
    """Raised after a signal; `status` is the exit status (130, 143 or 129)."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # as shells have it


class DeferredSignals:
    """Signals received while they were deferred.

    Attributes:
        stop_requested: The last result of `should_stop`.
    """

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self.stop_requested = False
        self._numbers = list(numbers)

    def should_stop(self, step: int) -> bool:
        """Whether to stop after this step; the same on all processes."""
        if jax.process_count() > 1:
            self.stop_requested = multihost_utils.reached_preemption_sync_point(step)
        else:
            self.stop_requested = bool(self._numbers)
        return self.stop_requested

    def to_error(self) -> Interrupted:
        """The exception for the first signal."""
        return Interrupted((self._numbers or [signal.SIGTERM])[0])

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: record the signal, and exit at the third."""
        self._numbers.append(number)
        if len(self._numbers) > MAX_DEFERRED:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        name, num_left = signal.Signals(number).name, MAX_DEFERRED + 1 - len(self._numbers)
        # Not print, which is not reentrant.
        message = f"\n{name}: exiting after the next save ({num_left} more: exit at once).\n"
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(2, message.encode())


@contextlib.contextmanager
def defer_signals() -> Iterator[DeferredSignals]:
    """Defer SIGINT, SIGTERM and SIGHUP; the third signal kills the process.

    A signal whose `Interrupted` was lost counts too: Python ignores exceptions in callbacks of the
    garbage collector, and JAX has such a callback.
    """
    signals = DeferredSignals(_raised)
    with _install_handlers(signals.handle):
        yield signals


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise `Interrupted` on SIGINT, SIGTERM and SIGHUP.

    In a run of several processes nothing is raised, as all must stop at the same step: JAX handles
    SIGTERM and notifies the other processes, and the other two signals are turned into SIGTERM.
    """
    try:
        with _install_handlers(_raise_interrupted):
            yield
    finally:
        _raised.clear()


def _raise_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    _raised.append(number)
    raise Interrupted(number)


def _send_sigterm(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _install_handlers(handler: Handler) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()  # others can install none
    handlers: dict[int, Handler] = dict.fromkeys(SIGNALS, handler) if is_main else {}
    if jax.process_count() > 1 and is_main:
        handlers = {n: _send_sigterm for n in SIGNALS if n != signal.SIGTERM}
    # A background process may have been started with a signal ignored.
    handlers = {n: h for n, h in handlers.items() if signal.getsignal(n) != signal.SIG_IGN}
    previous = {number: signal.signal(number, each) for number, each in handlers.items()}
    try:
        yield
    finally:
        for number, each in previous.items():
            signal.signal(number, each)
