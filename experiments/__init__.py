"""Programs that train, measure and report; each is started with `python -m experiments.NAME`."""

import logging
import os
import signal
import sys
from typing import Any

from jaxformer.errors import TRACEBACK, leave
from jaxformer.extras import missing


def explain(kind: Any, error: BaseException, trace: Any) -> None:
    """Say which extra is missing; of any other error, what Python says."""
    if isinstance(error, ImportError) and not os.environ.get(TRACEBACK):
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
