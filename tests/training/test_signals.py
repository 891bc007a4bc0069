import errno
import gc
import os
import signal
import subprocess
import sys

import pytest

from jaxformer.training.signals import Interrupted, defer_signals, raise_on_signals

EACH = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name
)


@pytest.fixture(autouse=True)
def handlers():
    """Those of a process on a terminal, and the same ones afterwards."""
    chosen = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in chosen.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == chosen


@EACH
def test_a_raised_signal_names_its_exit_status(number):
    with raise_on_signals(), pytest.raises(Interrupted, match=number.name) as caught:
        signal.raise_signal(number)
    assert caught.value.status == {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}[number.name]


@EACH
def test_deferred_signals_stop_at_the_next_question(number, capfd):
    with raise_on_signals(), defer_signals() as signals:
        assert not signals.should_stop(1) and not signals.stop_requested
        signal.raise_signal(number)
        assert not signals.stop_requested
        assert signals.should_stop(2) and signals.stop_requested and signals.should_stop(3)
        signal.raise_signal(signal.SIGINT)
        assert signals.to_error().status == 128 + number
    assert capfd.readouterr().err == (
        f"\n{number.name}: exiting after the next save (2 more: exit at once).\n"
        "\nSIGINT: exiting after the next save (1 more: exit at once).\n"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_python_ignores_stops_the_training():
    """As in a callback of the garbage collector, from which no exception gets out."""
    interrupt = lambda phase, _: phase == "stop" and signal.raise_signal(signal.SIGINT)  # noqa: E731
    with raise_on_signals():
        gc.callbacks.append(interrupt)
        try:
            gc.collect(0)
        finally:
            gc.callbacks.remove(interrupt)
        with defer_signals() as signals:
            assert signals.should_stop(1) and signals.to_error().status == 130
    with raise_on_signals(), defer_signals() as signals:  # of a later run
        assert not signals.should_stop(1)


def test_a_signal_that_the_process_ignores_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with raise_on_signals(), defer_signals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert not signals.should_stop(1)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch):
    def gone(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", gone)
    with defer_signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.should_stop(1)


IMPATIENT = """
import signal, sys
from jaxformer.training.signals import defer_signals
signal.signal(signal.SIGINT, signal.default_int_handler)
with defer_signals():
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    print("still here", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("gone")
"""


@pytest.mark.slow
def test_the_third_signal_ends_the_process_at_once():
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT], cwd=os.getcwd(), capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "still here\n"
    assert done.stderr.endswith("\nSIGINT: exiting after the next save (1 more: exit at once).\n")
