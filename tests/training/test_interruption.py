import errno
import os
import signal
import subprocess
import sys

import pytest

from jaxformer.training.interruption import Interrupted, deferred, raised

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
    before = {number: signal.signal(number, each) for number, each in chosen.items()}
    yield
    after = {number: signal.signal(number, each) for number, each in before.items()}
    assert after == chosen


@EACH
def test_a_raised_signal_names_its_exit_status(number):
    with raised(), pytest.raises(Interrupted, match=number.name) as caught:
        signal.raise_signal(number)
    assert caught.value.status == {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}[number.name]


@EACH
def test_deferred_signals_stop_at_the_next_question(number, capfd):
    with raised(), deferred() as signals:
        assert not signals.stops(1) and not signals.stopping
        signal.raise_signal(number)
        assert not signals.stopping
        assert signals.stops(2) and signals.stopping and signals.stops(3)
        signal.raise_signal(signal.SIGINT)
        assert signals.interrupted().status == 128 + number
    assert capfd.readouterr().err == (
        f"\n{number.name}: ending once the state is saved (2 more: at once).\n"
        "\nSIGINT: ending once the state is saved (1 more: at once).\n"
    )


def test_a_signal_that_the_process_ignores_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with raised(), deferred() as signals:
        signal.raise_signal(signal.SIGINT)
        assert not signals.stops(1)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch):
    def gone(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", gone)
    with deferred() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.stops(1)


IMPATIENT = """
import signal, sys
from jaxformer.training.interruption import deferred
signal.signal(signal.SIGINT, signal.default_int_handler)
with deferred():
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    print("still here", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("gone")
"""


def test_the_third_signal_ends_the_process_at_once():
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT], cwd=os.getcwd(), capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "still here\n"
    assert done.stderr.endswith("\nSIGINT: ending once the state is saved (1 more: at once).\n")
