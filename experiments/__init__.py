"""Command-line programs: train, evaluate, generate, export; `python -m experiments.NAME`."""

import logging
import os
import signal
import sys
from typing import Any

from jaxformer.errors import TRACEBACK_VARIABLE, exit_on_interrupt
from jaxformer.extras import missing_extra_message


def print_error(kind: Any, error: BaseException, trace: Any) -> None:
    """Print which extra a missing import needs; print any other exception as Python does."""
    if isinstance(error, ImportError) and not os.environ.get(TRACEBACK_VARIABLE):
        print(f"error: {missing_extra_message(error)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def print_unraisable(unraisable: Any) -> None:
    """Print an unraisable exception, unless it is another write of a save that already failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


if sys.argv[0] == "-m":  # Python's value while it looks for the module to run
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_interrupt)
    sys.excepthook = print_error
    sys.unraisablehook = print_unraisable
    for name in ("absl", "asyncio"):  # Orbax also logs a failed save, whose error is printed anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)
