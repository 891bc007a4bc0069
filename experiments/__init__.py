"""Command-line programs: train, evaluate, generate, export; `python -m experiments.NAME`."""

import logging
import os
import signal
import sys
from typing import Any

from jaxformer.errors import TRACEBACK, leave
from jaxformer.extras import missing


def explain(kind: Any, error: BaseException, trace: Any) -> None:
    """Print which extra a missing import needs; print any other exception as Python does."""
    if isinstance(error, ImportError) and not os.environ.get(TRACEBACK):
        print(f"error: {missing(error)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def remark(unraisable: Any) -> None:
    """Print an unraisable exception, unless it is another write of a save that already failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


if sys.argv[0] == "-m":  # so Python has it while it looks for the program that was named
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    sys.excepthook = explain
    sys.unraisablehook = remark
    for name in ("absl", "asyncio"):  # what Orbax logs of a save that fails, which is told anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)
