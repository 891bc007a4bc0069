"""What a training run shows while it runs: a live display, or plain lines where there is none."""

import io
import math
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat

from jaxformer.extras import missing

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 60
SMOOTHING = 0.9
REFRESH_SECONDS = 0.1


def sparkline(values: Sequence[float | int], width: int) -> str:
    """Draw numbers as a row of bars, the lowest for the least and the highest for the greatest.

    Args:
        values: The numbers, in order.
        width: Characters at most. More numbers than that are averaged in groups of nearly equal
            size; fewer take one character each.

    Returns:
        The row. A group without a finite number is shown as "×", equal numbers as low bars.

    Raises:
        ValueError: `width` is less than 1.
    """
    if width < 1:
        raise ValueError(f"A sparkline is at least 1 character wide, got {width}.")
    count = min(width, len(values))
    size = len(values)
    groups = [values[size * i // count : size * (i + 1) // count] for i in range(count)]
    finite = [[v for v in group if math.isfinite(v)] for group in groups]
    means = [sum(v / len(group) for v in group) if group else math.nan for group in finite]
    present = [mean for mean in means if not math.isnan(mean)]
    low, high = min(present, default=0.0), max(present, default=0.0)
    span = high / 2 - low / 2  # of halves, since the greatest floats have no finite difference

    def bar(mean: float) -> str:
        if math.isnan(mean):
            return "×"
        height = (mean / 2 - low / 2) / span if span else 0.0
        return BARS[round(height * (len(BARS) - 1))]

    return "".join(map(bar, means))


def format_count(count: float | int) -> str:
    """Write a number with three digits and a unit: k, M, B (10^9) or T (10^12).

    Args:
        count: Any number.

    Returns:
        For example "999", "1.23k", "12.3M" or "70.0B".
    """
    if not math.isfinite(count):
        return str(count)
    rounded = float(f"{count:.3g}")  # first, so that 999,950 is 1.00M and not 1000k
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= unit:
            scaled = rounded / unit
            decimals = max(0, 2 - math.floor(math.log10(abs(scaled))))
            return f"{scaled:.{decimals}f}{suffix}"
    return f"{rounded:g}"


def format_duration(seconds: float | int) -> str:
    """Write a time with its two greatest units.

    Args:
        seconds: The time in seconds.

    Returns:
        For example "4.2s", "42s", "2m 05s", "3h 07m" or "2d 04h".

    Raises:
        ValueError: The time is negative or not finite.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"A duration is finite and not negative, got {seconds} seconds.")
    if round(seconds, 1) < 10:
        return f"{seconds:.1f}s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    days, rest_hours = divmod(hours, 24)
    if days:
        return f"{days}d {rest_hours:02d}h"
    if hours:
        return f"{hours}h {rest_minutes:02d}m"
    return f"{minutes}m {rest_seconds:02d}s" if minutes else f"{rest_seconds}s"


class _Snapshot(NamedTuple):
    """What is known after the latest update; None is what nobody has reported."""

    step: int
    loss: float | None = None
    smooth: float = 0.0
    weight: float = 0.0
    history: tuple[float, ...] = ()
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    utilisation: float | None = None
    bits_per_byte: float | None = None
    seconds_left: float | None = None


class Progress:
    """Show how far a run is and how it goes.

    A terminal gets a display that stays in place: the title, a bar, the latest numbers and the
    curve of the loss. Anything else (a file, a pipe, a notebook, a build server) gets one plain
    line at most every `interval` seconds, without control codes.

        with Progress(1_000, title="llama, 12.3M parameters") as progress:
            progress.update(1, loss=6.2, tokens_per_second=4_900.0, utilisation=0.4)
            progress.note("A sample: once upon")

    Args:
        total_steps: Steps in the whole run.
        start_step: Steps that were done before, in a resumed run.
        title: One line above everything else.
        interval: Seconds between plain lines.
        stream: Where to write; None is standard output.
        clock: Seconds, from any start.

    Raises:
        ValueError: `total_steps` is less than 1, or `start_step` is outside of 0 to it.
        ImportError: The stream is a terminal and rich is not installed.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        title: str = "",
        interval: float | int = 10,
        stream: io.TextIOBase | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total_steps < 1 or not 0 <= start_step <= total_steps:
            raise ValueError(
                f"A run has at least 1 step and starts within them: got {total_steps} steps, "
                f"starting from step {start_step}."
            )
        self._total, self._title, self._interval, self._clock = total_steps, title, interval, clock
        self._stream: Any = sys.stdout if stream is None else stream
        self._now = _Snapshot(start_step)
        self._first: tuple[int, float] | None = None
        self._shown, self._shown_at = self._now, -math.inf
        self._live = _live(self._stream)

    def __enter__(self) -> "Progress":
        """Begin to show."""
        if self._live is not None:
            self._live.start()
        elif self._title:
            self._print(self._title)
        return self

    def __exit__(self, *exception: object) -> None:
        """Show the last state and give the terminal back."""
        if self._now != self._shown:
            self._show()
        if self._live is not None:
            self._live.stop()

    def update(
        self,
        step: int,
        *,
        loss: SupportsFloat | None = None,
        tokens_per_second: SupportsFloat | None = None,
        utilisation: SupportsFloat | None = None,
        learning_rate: SupportsFloat | None = None,
        bits_per_byte: SupportsFloat | None = None,
    ) -> None:
        """Report what is known after `step`; a number that is left out keeps its last value.

        Args:
            step: Steps done so far.
            loss: Training loss in nats per token. Shown smoothed; not finite, shown as it is.
            tokens_per_second: Tokens trained on in one second, on all devices.
            utilisation: Model FLOP utilisation (MFU), as a fraction of the machine's peak.
            learning_rate: The optimizer's step size.
            bits_per_byte: Latest held-out result, in bits per byte of text.
        """
        at = self._clock()
        if self._first is None:
            self._first = (step, at)  # from here, because the first step also compiles
        news: dict[str, SupportsFloat | None] = {
            "learning_rate": learning_rate,
            "tokens_per_second": tokens_per_second,
            "utilisation": utilisation,
            "bits_per_byte": bits_per_byte,
        }
        known: dict[str, Any] = {k: float(v) for k, v in news.items() if v is not None}
        now = self._now._replace(**known)
        if loss is not None:
            now = _with_loss(now, float(loss))
        first_step, first_at = self._first
        if step > first_step:
            pace = (at - first_at) / (step - first_step)
            now = now._replace(seconds_left=pace * max(0, self._total - step))
        self._now = now._replace(step=step)
        if at - self._shown_at >= (self._interval if self._live is None else REFRESH_SECONDS):
            self._shown_at = at
            self._show()

    def note(self, text: str) -> None:
        """Print `text` on lines of its own, above the bar where there is one."""
        if self._live is not None:
            self._live.console.print(_printable(text, "utf-8"), markup=False, highlight=False)
        else:
            self._print(text)

    def _show(self) -> None:
        self._shown = self._now
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
        else:
            parts = [f"{name} {text}" for name, text in _columns(self._now)]
            self._print("  ".join([f"step {self._now.step:,}/{self._total:,}", *parts]))

    def _print(self, text: str) -> None:
        if self._stream is not None:  # Python has none where standard output is closed
            print(printable(text, self._stream), file=self._stream, flush=True)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._now
        bar = Table.grid(padding=(0, 2))
        drawn = ProgressBar(total=self._total, completed=now.step, width=40)
        share = f"{100 * now.step // self._total}%"
        bar.add_row(drawn, f"{now.step:,}/{self._total:,}", share)
        numbers = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name, _ in _columns(now):
            numbers.add_column(name)
        numbers.add_row(*(text for _, text in _columns(now)))
        curve = Text(sparkline(now.history, HISTORY), style="cyan", overflow="crop", no_wrap=True)
        return Group(Text(self._title, style="bold"), bar, numbers, curve)


def _with_loss(now: _Snapshot, loss: float) -> _Snapshot:
    history = (*now.history, loss)[-HISTORY:]
    if not math.isfinite(loss):  # one NaN would stay in the mean for ever
        return now._replace(loss=loss, history=history)
    smooth = SMOOTHING * now.smooth + (1 - SMOOTHING) * loss
    weight = SMOOTHING * now.weight + (1 - SMOOTHING)
    return now._replace(loss=loss, history=history, smooth=smooth, weight=weight)


def _columns(now: _Snapshot) -> list[tuple[str, str]]:
    """Name and text of every number that is known."""
    loss = now.loss
    if loss is not None and math.isfinite(loss):
        loss = now.smooth / now.weight
    columns = [
        ("loss", loss, lambda v: f"{v:.4f}"),
        ("learning rate", now.learning_rate, lambda v: f"{v:.2e}"),
        ("tokens/s", now.tokens_per_second, format_count),
        ("MFU", now.utilisation, lambda v: f"{v:.1%}"),
        ("held-out bits/byte", now.bits_per_byte, lambda v: f"{v:.3f}"),
        ("time left", now.seconds_left, format_duration),
    ]
    return [(name, text(value)) for name, value, text in columns if value is not None]


def printable(text: str, stream: Any) -> str:
    """Replace what a terminal would obey instead of show, and what its encoding cannot hold."""
    return _printable(text, getattr(stream, "encoding", None) or "utf-8")


def _printable(text: str, encoding: str) -> str:
    shown = "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c
        for c in text
    )
    return shown.encode(encoding, "replace").decode(encoding)


def _live(stream: Any) -> Any:
    """Rich's live display, or None where plain lines are right."""
    if (
        stream is None
        or not stream.isatty()
        or "CI" in os.environ
        or os.environ.get("TERM", "") in ("", "dumb")
    ):
        return None
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ImportError(missing(error)) from error
    console = Console(file=stream)
    if console.is_jupyter or not console.is_terminal or not console.encoding.startswith("utf"):
        return None
    return Live(console=console, auto_refresh=False)
