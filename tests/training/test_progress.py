import io
import math
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.training.progress import Progress, format_count, format_duration

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal and remembers what it is told."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8")

    def isatty(self):
        return True

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode()


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    return Terminal()


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0"),
        (7, "7"),
        (0.5, "0.5"),
        (999, "999"),
        (1_000, "1.00k"),
        (12_345_678, "12.3M"),
        (123_456, "123k"),
        (999_499, "999k"),
        (999_950, "1.00M"),
        (68_976_648_192, "69.0B"),
        (370e9, "370B"),
        (1.5e13, "15.0T"),
        (9.9e17, "990000T"),
        (-1_234, "-1.23k"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_format_count(count, text):
    assert format_count(count) == text


@settings(max_examples=20, deadline=None)
@given(st.floats(1, 9e14))
def test_format_count_is_right_to_three_digits(count):
    text = format_count(count)
    unit = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert math.isclose(float(text.rstrip("kMBT")) * unit, count, rel_tol=0.00501)


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0.0s"),
        (4.24, "4.2s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (125, "2m 05s"),
        (3_599.7, "1h 00m"),
        (11_220, "3h 07m"),
        (187_200, "2d 04h"),
    ],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize("seconds", [-1.5, math.nan, math.inf])
def test_format_duration_refuses(seconds):
    with pytest.raises(ValueError, match=f"finite and not negative; got {seconds} seconds"):
        format_duration(seconds)


def test_a_stream_that_is_no_terminal_gets_one_plain_line_an_interval():
    stream, clock = io.StringIO(), Clock()
    with Progress(1_000, title="tiny", interval=10, stream=stream, clock=clock) as progress:
        for step in range(1, 7):
            progress.update(
                step, loss=4.0, learning_rate=3e-4, tokens_per_second=4_900.0, mfu=0.4123
            )
            clock.now += 4.0
        progress.update(7, bits_per_byte=1.9304)
    assert stream.getvalue().splitlines() == [
        "tiny",
        "step 1/1,000  loss 4.0000  learning rate 3.00e-04  tokens/s 4.90k  MFU 41.2%",
        "step 4/1,000  loss 4.0000  learning rate 3.00e-04  tokens/s 4.90k  MFU 41.2%"
        "  time left 1h 06m",
        "step 7/1,000  loss 4.0000  learning rate 3.00e-04  tokens/s 4.90k  MFU 41.2%"
        "  held-out bits/byte 1.930  time left 1h 06m",
    ]


def test_plain_lines_stand_at_multiples_of_log_every_however_fast_the_steps_are():
    stream, clock = io.StringIO(), Clock()
    with Progress(64, log_every=20, interval=60, stream=stream, clock=clock) as progress:
        for step in range(1, 65):
            progress.update(step)
            progress.update(step, bits_per_byte=2.0)
    lines = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert lines == ["1/64", "20/64", "40/64", "60/64", "64/64"]


def test_the_last_state_is_printed_once():
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.update(1)
        progress.update(2)
    assert stream.getvalue() == "step 1/2\nstep 2/2  time left 0.0s\n"
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.update(2)
    assert stream.getvalue() == "step 2/2\n"


def test_time_left_counts_from_the_first_update_of_a_resumed_run():
    stream, clock = io.StringIO(), Clock()
    with Progress(100, start_step=90, interval=0, stream=stream, clock=clock) as progress:
        clock.now += 500  # compilation
        progress.update(91)
        clock.now += 12
        progress.update(95)
    assert stream.getvalue() == "step 91/100\nstep 95/100  time left 15s\n"


def test_the_first_line_of_a_resumed_run_has_the_mean_of_several_losses():
    stream, clock = io.StringIO(), Clock()
    with Progress(100, start_step=90, interval=10, stream=stream, clock=clock) as progress:
        for step, loss in ((91, 2.0), (92, 4.0)):
            clock.now += 5
            progress.update(step, loss=loss)
    assert stream.getvalue().startswith(f"step 92/100  loss {(0.09 * 2 + 0.1 * 4) / 0.19:.4f}  ")


def test_the_loss_is_smoothed_and_survives_a_number_that_is_not_finite():
    stream = io.StringIO()
    with Progress(9, interval=0, stream=stream, clock=Clock()) as progress:
        for step, loss in enumerate([2.0, 4.0, math.nan, 4.0], start=1):
            progress.update(step, loss=loss)
    losses = re.findall(r"loss (\S+)", stream.getvalue())
    second = (0.09 * 2 + 0.1 * 4) / 0.19
    fourth = (0.081 * 2 + 0.09 * 4 + 0.1 * 4) / 0.271
    assert losses == ["2.0000", f"{second:.4f}", "nan", f"{fourth:.4f}"]


def test_a_note_is_a_line_of_its_own_without_control_codes():
    stream = io.StringIO()
    with Progress(3, stream=stream) as progress:
        progress.print("a [b] \x1b[31mc\r\td\ne")
    assert stream.getvalue() == "a [b] \ufffd[31mc\ufffd\td\ne\n"


def test_a_note_never_fails_on_a_narrow_encoding():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Progress(3, stream=stream) as progress:
        progress.print("naïve \ud800")
    stream.flush()
    assert stream.buffer.getvalue() == b"na?ve ?\n"


def test_a_terminal_gets_a_bar(terminal):
    clock = Clock()
    with Progress(1_000, title="llama [tiny]", stream=terminal, clock=clock) as progress:
        for step, loss in enumerate([7.0, 6.0, 0.0], start=400):
            clock.now += 1.0
            progress.update(
                step,
                loss=loss,
                learning_rate=3e-4,
                tokens_per_second=4_900.0,
                mfu=0.4123,
                bits_per_byte=1.9304,
            )
        progress.print("sample [/b] of text")
    text = terminal.text()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for part in [
        "llama [tiny]",
        "402/1000",
        "loss",
        "learning rate",
        "tokens/s",
        "MFU",
        "held-out bits/byte",
        "time left",
        "3.00e-04",
        "4.90k",
        "41.2%",
        "1.930",
        "9m 58s",
        "sample [/b] of text",
    ]:
        assert part in shown, part
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor must come back"


@pytest.mark.parametrize("columns", [30, 45, 60, 80])
def test_a_bar_is_one_line_however_narrow_the_terminal_is(columns, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with Progress(1_000, stream=terminal, clock=Clock()) as progress:
        for step in range(400, 404):
            progress.update(step, loss=7.0, learning_rate=3e-4, tokens_per_second=4e3, mfu=0.4)
    assert "\x1b[1A" not in terminal.text(), "a cursor that goes up rewrites several lines"
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.text())
    lines = [line for line in re.split(r"[\r\n]", shown) if line.strip()]
    assert max(map(len, lines)) <= columns and "…" in lines[-1]
    assert columns < 60 or "loss 7.0000  time left" in lines[-1]  # first what matters most


def test_the_terminal_is_given_back_when_the_run_fails(terminal):
    with pytest.raises(KeyboardInterrupt), Progress(3, stream=terminal) as progress:
        progress.update(1, loss=1.0)
        raise KeyboardInterrupt
    assert terminal.text().count("\x1b[?25h") == 1


@pytest.mark.parametrize("name, value", [("CI", "true"), ("TERM", "dumb"), ("TERM", "")])
def test_a_build_server_and_a_dumb_terminal_get_plain_lines(terminal, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(3, title="t", stream=terminal) as progress:
        progress.update(1, loss=1.0)
    assert terminal.text() == "t\nstep 1/3  loss 1.0000\n"
    assert not CONTROL.search(terminal.text())


def test_a_terminal_without_rich_is_told_which_extra(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r"needs rich, .* pip install 'jaxformer\[train\]'"):
        Progress(3, stream=terminal)


@pytest.mark.parametrize("total, start", [(0, 0), (5, 6), (5, -1)])
def test_a_run_starts_within_its_steps(total, start):
    with pytest.raises(ValueError, match=f"got total_steps={total} and start_step={start}"):
        Progress(total, start_step=start)


def test_standard_output_is_the_default(capsys):
    with Progress(3) as progress:
        progress.update(1)
    assert capsys.readouterr().out == "step 1/3\n"
