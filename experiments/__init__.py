"""Programs that train, measure and report; each is started with `python -m experiments.NAME`."""

import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
UNREAD = 141  # and where `head` or a pager stops reading what is printed
TRACEBACK = "JAXFORMER_TRACEBACK"  # the variable that asks for one


def leave(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C during the imports, which take seconds; see `command_line.readable_errors`."""
    os.write(2, b"\nInterrupted.\n")
    os._exit(INTERRUPTED)


def explain(kind: Any, error: BaseException, trace: Any) -> None:
    """Say which extra is missing; of any other error, what Python says."""
    if isinstance(error, ImportError) and not os.environ.get(TRACEBACK):
        from jaxformer.extras import missing

        print(f"error: {missing(error)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def remark(unraisable: Any) -> None:
    """Say what Python says, but of the other writes of a save that failed, which end after it."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


if sys.argv[0] == "-m":  # so Python has it while it looks for the program that was named
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    sys.excepthook = explain
    sys.unraisablehook = remark
    for name in ("absl", "asyncio"):  # what Orbax logs of a save that fails, which is told anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)
