"""Results as pictures."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments.statistics import estimate
from experiments.study_results import Numbers
from experiments.study_tables import values


def plot_losses(path: Path, arms: Sequence[Numbers], *, title: str) -> None:
    """Held-out losses beside the baseline's, the lowest on top, and the curves of training.

    Without matplotlib nothing is drawn but a line that says what is missing.

    Args:
        path: Of the picture.
        arms: The baseline first.
        title: Over it.
    """
    if not can_draw():
        return
    figure, (left, right) = _figure(2, title)
    colours = _colours(len(arms))
    first = values(arms[0], "held_out")
    seeds = [[x - y for x, y in zip(values(n, "held_out"), first, strict=True)] for n in arms]
    found = [estimate(differences) for differences in seeds]
    order = sorted(range(len(arms)), key=lambda i: (not np.isfinite(found[i].mean), found[i].mean))
    for row, i in enumerate(order):
        mean, _, half = found[i]
        if np.isfinite(mean):
            left.errorbar(mean, row, xerr=half, fmt="o", color=colours[i], capsize=3)
            left.plot(seeds[i], [row] * len(seeds[i]), "|", color="k")
    left.axvline(0, color="0.8", zorder=0)
    left.set_yticks(range(len(arms)), [arms[i]["arm"]["name"] for i in order])
    left.invert_yaxis()
    name = arms[0]["arm"]["name"]
    left.set_xlabel(f"held-out loss minus that of {name}, nats\n(mean, 95 % interval, seeds)")
    for i, numbers in enumerate(arms):
        curve = np.nanmean(np.asarray(numbers["train"], float), axis=0)
        right.plot(numbers["train_steps"], curve, color=colours[i], label=numbers["arm"]["name"])
    right.set_xlabel("updates")
    right.set_ylabel("training loss")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def plot_run(path: Path, numbers: Sequence[Mapping[str, float]], *, gzip: float) -> None:
    """One run: the loss of training, and bits per byte of held-out text beside gzip's.

    Args:
        path: Of the picture.
        numbers: The lines of metrics.jsonl.
        gzip: Bits per byte of the held-out text.
    """
    if not can_draw():
        return
    figure, (left, right) = _figure(2, "")
    lines = [
        (left, "loss", "training"),
        (right, "held_out_bits_per_byte", "some of the held-out text"),
        (right, "final_held_out_bits_per_byte", "all of it"),
    ]
    for axes, name, label in lines:
        found = [(line["step"], line[name]) for line in numbers if name in line]
        steps, values_then = [step for step, _ in found], [value for _, value in found]
        axes.plot(steps, values_then, marker="" if name == "loss" else "o", label=label)
    right.axhline(gzip, color="0.5", linestyle="--", label="gzip -9")
    left.set(xlabel="updates", ylabel="training loss, nats per token")
    right.set(xlabel="updates", ylabel="bits per byte", title="held-out text")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=90)


@cache
def can_draw() -> bool:
    """Whether there is matplotlib; says so if not, once."""
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        print("No plots: `pip install -e '.[plots]'` brings matplotlib.", file=sys.stderr)
        return False
    return True


def _figure(count: int, title: str) -> Any:
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(5 * count, 4.2), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, count)


def _colours(count: int) -> list[Any]:
    matplotlib = importlib.import_module("matplotlib")
    return [matplotlib.colormaps["tab20"](i % 20) for i in range(count)]


def plot_more(path: Path, arms: Sequence[Numbers], *, length: int) -> None:
    """What an ablation measured beside the loss, if anything: by length or by depth.

    Args:
        path: Of the picture.
        arms: The baseline first.
        length: Tokens of a row in training.
    """
    if not can_draw() or not {"at_lengths", "gradient_by_depth"} & arms[0].keys():
        return
    figure, axes = _figure(1, "")
    if "at_lengths" in arms[0]:
        _draw_lengths(axes, arms, length)
    else:
        _draw_depths(axes, arms)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def _draw_lengths(axes: Any, arms: Sequence[Numbers], length: int) -> None:
    lines = [
        (f"{arm['arm']['name']}{'' if way == 'as trained' else f', {way}'}", way, losses)
        for arm in arms
        for way, losses in arm["at_lengths"].items()
        if way == "as trained" or arm is arms[0]
    ]
    for (name, way, losses), colour in zip(lines, _colours(len(lines)), strict=True):
        times = [int(t) for t in losses]
        means = [np.mean([np.nan if x is None else x for x in losses[str(t)]]) for t in times]
        style = "-" if way == "as trained" else "--"
        axes.plot([t * length for t in times], means, style, marker=".", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"tokens of a row (training: {length})")
    axes.set_ylabel("held-out loss, nats per token")


def _draw_depths(axes: Any, arms: Sequence[Numbers]) -> None:
    shown = [arm for arm in arms if "gradient_by_depth" in arm]
    for arm, colour in zip(shown, _colours(len(shown)), strict=True):
        norms = np.mean(np.asarray(arm["gradient_by_depth"], float), axis=0)
        axes.plot(range(1, len(norms) + 1), norms, color=colour, label=arm["arm"]["name"])
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("norm of the gradient at the start")
