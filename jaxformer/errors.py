"""How programs end on errors: a user's mistake prints one sentence, a bug its traceback."""

import contextlib
import difflib
import dis
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO

from jaxformer.extras import missing_extra_message

INTERRUPTED_STATUS = 130  # exit status after SIGINT, 128 + 2, as in shells
BROKEN_PIPE_STATUS = 141  # exit status after SIGPIPE, 128 + 13
TRACEBACK_VARIABLE = "JAXFORMER_TRACEBACK"  # environment variable that keeps the traceback
OWN_PACKAGES = ["jaxformer", "experiments", "__main__"]  # their messages are written for users
IMPORTED_MODULES: list[str] = []  # modules imported by --import


def own_command(program: str) -> str:
    """The command of a program, in the way in which this process was started."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    started = "" if spec is None else spec.name.removesuffix(".__main__")
    if started.startswith(("jaxformer.", "experiments.")):
        return f"python -m {started}"
    return f"python -m jaxformer {program}" if started == "jaxformer" else f"jaxformer {program}"


def described(description: str, program: str) -> str:
    """The description of a program with the command by which this process was started."""
    return description.replace(f"jaxformer {program}", own_command(program))


def prepare_imports() -> None:
    """Make Ctrl-C, missing extras and failed saves of this process readable from the imports on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_interrupt)
    sys.excepthook = _print_error
    sys.unraisablehook = _print_unraisable
    for name in ("absl", "asyncio"):  # Orbax also logs a failed save, whose error is printed anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _print_error(kind: Any, error: BaseException, trace: Any) -> None:
    """Print which extra a missing import needs; print any other exception as Python does."""
    if isinstance(error, ImportError) and not os.environ.get(TRACEBACK_VARIABLE):
        print(f"error: {missing_extra_message(error)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _print_unraisable(unraisable: Any) -> None:
    """Print an unraisable exception, unless it is another write of a save that already failed.

    A Ctrl-C that falls into a callback of the garbage collector, such as JAX's, comes again.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
    elif str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def exit_on_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C during the imports, which take seconds; see `readable_errors`."""
    os.write(2, b"\nInterrupted.\n")
    os._exit(INTERRUPTED_STATUS)


def exit_with_error(message: str) -> NoReturn:
    """End the process with a message on standard error, status 1."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the known names that resemble another one; empty if none does."""
    close = difflib.get_close_matches(name, list(known), cutoff=0.7)
    return f" Did you mean {' or '.join(close)}?" if close else ""


class PythonNote(str):
    """A note of an exception for callers from Python, which commands do not print."""


def with_fields(message: str) -> str:
    """A message that names flags, with the fields that they set, for callers from Python."""
    flags = dict.fromkeys(re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", message))
    return f"{message} (In Python: {', '.join(flags).replace('-', '_')}.)" if flags else message


@contextlib.contextmanager
def naming_fields() -> Iterator[None]:
    """If a block raises a ValueError that names flags, note the fields that they set."""
    try:
        yield
    except ValueError as error:
        notes = getattr(error, "__notes__", [])
        message = "\n".join([str(error), *notes])
        text = with_fields(message).removeprefix(message)
        if text and not any(isinstance(note, PythonNote) for note in notes):
            error.add_note(PythonNote(text.strip()))
        raise


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """End the process with the message and notes of an expected error instead of a traceback.

    On a broken pipe, as after ``| head``, it ends without a message.
    """
    try:
        if signal.getsignal(signal.SIGINT) is exit_on_interrupt:  # the imports are done
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            sys.stdout.flush()  # at exit, Python would print its own BrokenPipeError
    except KeyboardInterrupt as error:
        print("\n" + " ".join(["Interrupted.", *getattr(error, "__notes__", [])]), file=sys.stderr)
        raise SystemExit(getattr(error, "status", INTERRUPTED_STATUS)) from None
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        if isinstance(error, BrokenPipeError) and _is_broken_pipe(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            raise SystemExit(
                getattr(error.__context__, "code", None) or BROKEN_PIPE_STATUS
            ) from None
        bug = isinstance(error, ValueError) and unintended_error_location(error)
        if bug:
            error.add_note(f"This is a bug in the program, not an error in your input: {bug}.")
        if bug or os.environ.get(TRACEBACK_VARIABLE):
            raise
        message = missing_extra_message(error) if isinstance(error, ImportError) else str(error)
        notes = (x for x in getattr(error, "__notes__", []) if not isinstance(x, PythonNote))
        message = "\n".join([message, *notes])
        exit_with_error(f"{message}\n(Set {TRACEBACK_VARIABLE}=1 for the traceback.)")


def _is_broken_pipe(stream: TextIO) -> bool:
    """Whether the reading end of a pipe is closed; this writes an empty line to it."""
    try:
        print(file=stream, flush=True)
    except BrokenPipeError:
        return True
    return False


def unintended_error_location(error: BaseException) -> str | None:
    """Return the location of an error that no `raise` of this project or a user's module made.

    Returns:
        File, line and function; None if a `raise` statement of these modules made the error.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return None
    frame, code = trace.tb_frame, trace.tb_frame.f_code
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    ours = package in {*OWN_PACKAGES, *(name.partition(".")[0] for name in IMPORTED_MODULES)}
    if ours and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]:
        return None
    return f"{code.co_filename}:{trace.tb_lineno}, in {code.co_name}"
