"""Progress display: rich's bar on a terminal, plain lines elsewhere."""

import io
import math
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any, SupportsFloat

from jaxformer.extras import import_extra

LOSS_EMA_DECAY = 0.9
DISPLAYED = {
    "loss": ("loss", lambda v: f"{v:.4f}"),
    "learning_rate": ("learning rate", lambda v: f"{v:.2e}"),
    "tokens_per_second": ("tokens/s", lambda v: format_count(v)),
    "step_seconds": ("s/step", lambda v: f"{v:.3g}"),
    "mfu": ("MFU", lambda v: f"{v:.1%}"),
    "bits_per_byte": ("held-out bits/byte", lambda v: f"{v:.3f}"),
    "seconds_left": ("time left", lambda v: format_duration(v)),
}

# On a terminal, which cuts what it has no room for.
BY_IMPORTANCE = (
    "loss", "seconds_left", "bits_per_byte", "tokens_per_second", "mfu", "learning_rate"
)  # fmt: skip


def format_count(count: float | int) -> str:
    """Format a number with three digits and a unit: k, M, B (10^9) or T (10^12).

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
    """Format a duration with its two largest units.

    Args:
        seconds: The duration in seconds.

    Returns:
        For example "4.2s", "42s", "2m 05s", "3h 07m" or "2d 04h".

    Raises:
        ValueError: The duration is negative or not finite.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"A duration must be finite and not negative; got {seconds} seconds.")
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


class Progress:
    """Shows step, metrics and remaining time of a run.

    On a terminal it is a bar with the latest metrics. Elsewhere (a file, a pipe, a notebook, a CI
    server) it is plain lines without control codes: of the first step of a new run, of every
    `log_every` steps, and of a step that ends `interval` seconds after the last line.

        with Progress(1_000, title="llama, 12.3M parameters") as progress:
            progress.update(1, loss=6.2, tokens_per_second=4_900.0, mfu=0.4)
            progress.print("A sample: once upon")

    Args:
        total_steps: Steps of the whole run.
        start_step: Step that a resumed run starts from.
        title: Line above the progress.
        log_every: Steps between plain lines.
        interval: Maximum number of seconds between plain lines, up to the length of a step.
        stream: Output stream; None is standard output.
        clock: Function that returns seconds.

    Raises:
        ValueError: `total_steps` is below 1, or `start_step` is not between 0 and `total_steps`.
        ImportError: The stream is a terminal and rich is not installed.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        title: str = "",
        log_every: int = 10,
        interval: float | int = 60,
        stream: io.TextIOBase | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total_steps < 1 or not 0 <= start_step <= total_steps:
            raise ValueError(
                "total_steps must be at least 1 and start_step between 0 and total_steps; got "
                f"total_steps={total_steps} and start_step={start_step}."
            )
        self._total, self._title, self._clock = total_steps, title, clock
        self._log_every, self._interval = log_every, interval
        self._stream: Any = sys.stdout if stream is None else stream
        self._step, self._numbers = start_step, dict[str, float]()
        self._smooth = self._weight = 0.0
        self._first: tuple[int, float] | None = None
        # A resumed run waits, so that its first line has the mean of several losses.
        self._status_printed, self._printed_at = True, clock() if start_step else -math.inf
        self._bar = _make_bar(self._stream)

    def __enter__(self) -> "Progress":
        """Print the title and start the bar."""
        if self._title:
            self.print(self._title)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._step, numbers="")
        return self

    def __exit__(self, *exception: object) -> None:
        """Show the last metrics and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
        elif not self._status_printed:
            self._print_status()

    def update(
        self,
        step: int,
        *,
        loss: SupportsFloat | None = None,
        tokens_per_second: SupportsFloat | None = None,
        step_seconds: SupportsFloat | None = None,
        mfu: SupportsFloat | None = None,
        learning_rate: SupportsFloat | None = None,
        bits_per_byte: SupportsFloat | None = None,
    ) -> None:
        """Show the metrics after `step`; omitted ones keep their last value.

        Args:
            step: Finished steps.
            loss: Training loss in nats per token, shown smoothed unless it is not finite.
            tokens_per_second: Training throughput of all devices.
            step_seconds: Seconds of a step.
            mfu: Model FLOPs utilization (MFU), as a fraction of the peak.
            learning_rate: Learning rate.
            bits_per_byte: Latest held-out loss, in bits per byte of text.
        """
        news = {
            "loss": None if loss is None else self._smoothed(float(loss)),
            "learning_rate": learning_rate,
            "tokens_per_second": tokens_per_second,
            "step_seconds": step_seconds,
            "mfu": mfu,
            "bits_per_byte": bits_per_byte,
        }
        self._numbers |= {name: float(v) for name, v in news.items() if v is not None}
        is_due = step % self._log_every == 0 and step != self._step
        now, self._step, self._status_printed = self._clock(), step, False
        if self._first is None:
            self._first = (step, now)  # from here, because the first step also compiles
        first_step, first_at = self._first
        if step > first_step:
            pace = (now - first_at) / (step - first_step)
            self._numbers["seconds_left"] = pace * max(0, self._total - step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=self._status_text(BY_IMPORTANCE))
        elif is_due or now - self._printed_at >= self._interval:
            self._printed_at = now
            self._print_status()

    def print(self, text: str) -> None:
        """Print `text` on separate lines, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(sanitize_text(text), markup=False, highlight=False)
        elif self._stream is not None:  # None if standard output is closed
            print(sanitize_text(text, self._stream), file=self._stream, flush=True)

    def _smoothed(self, loss: float) -> float:
        if not math.isfinite(loss):  # a NaN would stay in the mean forever
            return loss
        self._smooth = LOSS_EMA_DECAY * self._smooth + (1 - LOSS_EMA_DECAY) * loss
        self._weight = LOSS_EMA_DECAY * self._weight + (1 - LOSS_EMA_DECAY)
        return self._smooth / self._weight

    def _status_text(self, names: Iterable[str] = DISPLAYED) -> str:
        known = ((*DISPLAYED[name], self._numbers[name]) for name in names if name in self._numbers)
        return "  ".join(f"{word} {text(value)}" for word, text, value in known)

    def _print_status(self) -> None:
        self._status_printed = True
        self.print(f"step {self._step:,}/{self._total:,}  {self._status_text()}".rstrip())


def sanitize_text(text: str, stream: Any = None) -> str:
    """Replace control characters and what the stream cannot encode; None encodes as UTF-8."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    visible = "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c
        for c in text
    )
    return visible.encode(encoding, "replace").decode(encoding)


def _make_bar(stream: Any) -> Any:
    """A rich progress bar, or None if plain lines should be printed."""
    if stream is None or not stream.isatty():
        return None
    if "CI" in os.environ or os.environ.get("TERM", "") in ("", "dumb"):
        return None
    import_extra("rich")
    import rich.progress as bars
    from rich.console import Console
    from rich.table import Column

    console = Console(file=stream)
    if console.is_jupyter or not console.is_terminal or not console.encoding.startswith("utf"):
        return None
    # One line at every width: the lines of a wrapped bar would stay on the screen.
    cut = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return bars.Progress(
        bars.BarColumn(bar_width=10),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[numbers]}", markup=False, table_column=cut),
        console=console,
        expand=True,
    )
