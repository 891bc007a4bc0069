"""Plot of one run: training and held-out bits per byte."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

DPI = 90


def plot_run(path: Path, numbers: Sequence[Mapping[str, float]], *, gzip: float | None) -> None:
    """Plot bits per byte of a run: smoothed training loss and held-out loss.

    The last point, labelled with its value, is the loss of the complete held-out text.

    Args:
        path: File to write.
        numbers: The lines of metrics.jsonl; the last has `tokens_per_byte` of the training text,
            which converts its loss from nats per token to bits per byte.
        gzip: Bits per byte of the held-out text compressed by gzip, or None.
    """
    if not has_matplotlib():
        return
    figure, axes = new_figure(1, "Bits per byte of a run: training and held-out text")
    steps, losses = _series(numbers, "loss")
    _, ratio = _series(numbers, "tokens_per_byte")
    if len(ratio) and len(losses):
        bits = losses * ratio[-1] / np.log(2)
        axes.plot(steps, bits, color="0.6", linewidth=0.8, label="training, single batches")
        mean = moving_average(bits, window=max(1, len(bits) // 8))
        axes.plot(steps, mean, color="tab:blue", label="training, moving average")
    during_training, at_the_end = (
        _series(numbers, f"{part}held_out_bits_per_byte") for part in ("", "final_")
    )
    held_out = np.concatenate([during_training, at_the_end], axis=1)
    axes.plot(*held_out, "o-", color="tab:orange", label="held-out text, sample", markersize=5)
    axes.plot(*at_the_end, "o", color="tab:red", label="held-out text, complete", markersize=8)
    for step, value in at_the_end.T[-1:]:
        axes.annotate(
            f"{value:.3f}",
            (step, value),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color="tab:red",
            weight="bold",
        )
    if gzip is not None:
        axes.axhline(gzip, color="0.4", linestyle="--", linewidth=1, label=f"gzip -9: {gzip:.3f}")
    axes.set(xlabel="steps", ylabel="bits per byte")
    axes.margins(x=0.09, y=0.1)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=DPI)


def _series(numbers: Sequence[Mapping[str, float]], name: str) -> Any:
    """Steps and values of all metric lines that have this key: [2, lines]."""
    points = [(line["step"], line[name]) for line in numbers if line.get(name) is not None]
    return np.asarray(points, float).reshape(-1, 2).T


def moving_average(series: Any, *, window: int) -> Any:
    """Centred moving average; the window shrinks at both ends."""
    numbers, half = np.asarray(series, float), window // 2
    return np.array([numbers[max(0, i - half) : i + half + 1].mean() for i in range(len(numbers))])


@cache
def has_matplotlib() -> bool:
    """Whether matplotlib is installed; prints a note once if it is not."""
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        print("No plots without matplotlib: `pip install 'jaxformer[plots]'`.", file=sys.stderr)
        return False
    return True


def new_figure(count: int, title: str) -> Any:
    """A matplotlib figure with panels side by side, without a display."""
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(6.5 * count, 4.2), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, count)
