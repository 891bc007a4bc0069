"""Plots of study results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies.results import ResultDict
from experiments.studies.statistics import estimate
from experiments.studies.tables import seed_values, with_nan
from jaxformer.run.plot import DPI, has_matplotlib, moving_average, new_figure

MAX_NAMED_CURVES = 4  # training curves with a colour and a label
COLOURS = ("black", "tab:blue", "tab:green", "tab:red")
NAME_HEIGHT = 0.065  # of a line's label, as a fraction of the panel


def write_report(
    folder: Path, variants: Sequence[ResultDict], table: str, *, title: str, length: int
) -> None:
    """Write the table and the plots of a study; see `plot_losses` and `plot_extra_metrics`."""
    (folder / "table.md").write_text(table)
    plot_losses(folder / "plot.png", variants, title=title)
    plot_extra_metrics(folder / "more.png", variants, length=length)


def plot_losses(path: Path, variants: Sequence[ResultDict], *, title: str) -> None:
    """Plot held-out losses relative to the baseline, the best on top, and the training curves.

    All variants train on the same batches, so the training curves are differences from the
    baseline; the curves of the best two variants and of the worst are labelled, the others gray.
    Without matplotlib a note is printed instead.

    Args:
        path: File to write.
        variants: Results of the variants, the baseline first.
        title: Title of the figure.
    """
    if not has_matplotlib():
        return
    figure, (left, right) = new_figure(2, title)
    first = seed_values(variants[0], "held_out")
    seeds = [
        [x - y for x, y in zip(seed_values(n, "held_out"), first, strict=True)] for n in variants
    ]
    estimates = [estimate(differences) for differences in seeds]
    order = sorted(
        range(len(variants)), key=lambda i: (not np.isfinite(estimates[i].mean), estimates[i].mean)
    )
    coloured = [i for i in order if i != 0]
    if len(coloured) >= MAX_NAMED_CURVES:
        coloured = [*coloured[: MAX_NAMED_CURVES - 2], coloured[-1]]
    colours = dict(zip([0, *coloured], COLOURS, strict=False))
    for row, i in enumerate(order):
        mean, _, half = estimates[i]
        if np.isfinite(mean):
            colour = colours.get(i, "0.5")
            left.errorbar(mean, row, xerr=half, fmt="o", color=colour, capsize=3)
            left.plot(seeds[i], [row] * len(seeds[i]), "|", color="k")
    left.axvline(0, color="0.6", zorder=0)
    left.set_yticks(range(len(variants)), [variants[i]["variant"]["name"] for i in order])
    left.invert_yaxis()
    left.locator_params("x", nbins=6)  # more would touch
    name = variants[0]["variant"]["name"]
    left.set_xlabel(f"held-out loss minus that of {name}, nats\n(mean, 95% interval, seeds)")
    _draw_training(right, variants, colours)
    figure.savefig(path, dpi=DPI)


def _draw_training(axes: Any, variants: Sequence[ResultDict], colours: Mapping[int, str]) -> None:
    curves = [np.nanmean(np.asarray(variant["train"], float), axis=0) for variant in variants]
    lines = []
    for i, variant in enumerate(variants):
        steps, line = variant["train_steps"], moving_average(curves[i] - curves[0], window=5)
        axes.plot(steps, line, color=colours.get(i, "0.65"), zorder=3 if i in colours else 1)
        if i in colours:
            lines.append((variant["variant"]["name"], steps[-1], line[-1], colours[i]))
    axes.set_xlabel("steps")
    axes.set_ylabel(f"training loss minus that of {variants[0]['variant']['name']}, nats")
    late = [(curve - curves[0])[len(curve) // 5 :] for curve in curves]
    low, high = np.nanmin(late), np.nanmax(late)
    if np.isfinite(high - low) and high > low:  # the start may be cut off
        axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    label_line_ends(axes, lines)


def label_line_ends(axes: Any, lines: Sequence[tuple[str, float, float, str]]) -> None:
    """Label lines at their right ends in their colours, moved apart where labels would overlap.

    Args:
        axes: Axes with the lines, their final scales and limits.
        lines: Name, last x, last y, and colour of each.
    """
    axes.get_ylim()  # computes the limits
    to_axes = axes.transScale + axes.transLimits
    line_ends = [(to_axes.transform((x, y))[1], *line) for line in lines for _, x, y, _ in [line]]
    line_ends = sorted((end for end in line_ends if np.isfinite(end[0])), key=lambda end: end[0])
    heights: list[float] = []
    for height, *_ in line_ends:
        heights.append(max(height, heights[-1] + NAME_HEIGHT if heights else 0.0))
    for i in reversed(range(len(heights))):  # labels above the panel move down
        ceiling = heights[i + 1] - NAME_HEIGHT if i + 1 < len(heights) else 1.0
        heights[i] = min(heights[i], ceiling)
    for height, (_, name, x, y, colour) in zip(heights, line_ends, strict=True):
        axes.annotate(
            name,
            (x, y),
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontsize=9,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "shrinkA": 0,
                "relpos": (0, 0.5),  # at the left of its name: it crosses no other
            },
        )


def plot_extra_metrics(path: Path, variants: Sequence[ResultDict], *, length: int) -> None:
    """Plot the extra metric of an ablation, if it has one: loss or recall by length, or gradient.

    Args:
        path: File to write.
        variants: Results of the variants, the baseline first.
        length: Row length of training in tokens.
    """
    metrics = {"at_lengths", "gradient_by_depth", "recall"} & variants[0].keys()
    if not has_matplotlib() or not metrics:
        return
    if "recall" in variants[0]:
        panels = _recall(variants)
        trained = variants[0]["recall_trained_length"]
        labels = {
            "xlabel": f"tokens of a document (training: up to {trained})",
            "ylabel": "share of correct answers, mean of seeds",
            "ylim": (-0.03, 1.03),
        }
    elif "at_lengths" in variants[0]:
        panels = _by_length(variants, length)
        labels = {
            "xlabel": f"row length in tokens (training: {length})",
            "ylabel": "held-out loss, nats per token",
        }
    else:
        panels = {"Before the first step": _by_depth(variants)}
        labels = {"xlabel": "layer", "ylabel": "gradient norm", "yscale": "log"}
    figure, all_axes = new_figure(len(panels), "")
    for axes, (title, lines) in zip(np.atleast_1d(all_axes), panels.items(), strict=True):
        ends = []
        for i, (name, (x, y)) in enumerate(lines.items()):
            axes.plot(x, y, marker=".", color=f"C{i}")  # of matplotlib's cycle of ten
            ends.append((name, x[-1], y[-1], f"C{i}"))
        axes.set(title=title, **labels)
        if "gradient_by_depth" not in variants[0]:
            axes.set_xscale("log", base=2)
        if "recall" in variants[0]:
            axes.axvline(variants[0]["recall_trained_length"], color="0.6", zorder=0)
            axes.set_xticks(x, x)
            axes.label_outer()
        label_line_ends(axes, ends)
    figure.savefig(path, dpi=DPI)


Line = tuple[Sequence[float], Sequence[float]]
Lines = dict[str, Line]


def _by_length(variants: Sequence[ResultDict], length: int) -> dict[str, Lines]:
    """Panels of loss by length: RoPE scalings, variants like the baseline, all others."""
    base = variants[0]["variant"]["name"]
    as_trained = {
        variant["variant"]["name"]: _finite_line(variant["at_lengths"]["as trained"], length)
        for variant in variants
    }
    panels: dict[str, Lines] = {
        f"{base}, scaled after training": {
            way: _finite_line(losses, length) for way, losses in variants[0]["at_lengths"].items()
        },
        f"{base} and its variants": {
            name: line for name, line in as_trained.items() if name.startswith(base)
        },
        f"{base} and other positions": {
            name: line
            for name, line in as_trained.items()
            if name == base or not name.startswith(base)
        },
    }
    finite = {
        title: {name: line for name, line in lines.items() if line[0]}
        for title, lines in panels.items()
    }
    return {title: lines for title, lines in finite.items() if len(lines) > 1}


def _finite_line(losses: Mapping[str, Sequence[float | None]], length: int) -> Line:
    """Row lengths and mean losses, where no seed diverged."""
    means = {
        int(times) * length: float(np.mean(with_nan(seeds))) for times, seeds in losses.items()
    }
    finite = {tokens: mean for tokens, mean in means.items() if np.isfinite(mean)}
    return list(finite), list(finite.values())


def _recall(variants: Sequence[ResultDict]) -> dict[str, Lines]:
    """A panel for each task, with the mean over the seeds."""
    return {
        task: {
            variant["variant"]["name"]: (
                [int(length) for length in variant["recall"][task]],
                [float(np.mean(seeds)) for seeds in variant["recall"][task].values()],
            )
            for variant in variants
        }
        for task in variants[0]["recall"]
    }


def _by_depth(variants: Sequence[ResultDict]) -> Lines:
    norms = {
        variant["variant"]["name"]: np.mean(
            np.asarray(variant["gradient_by_depth"], float), axis=0
        ).tolist()
        for variant in variants
        if "gradient_by_depth" in variant
    }
    return {name: (list(range(1, len(line) + 1)), line) for name, line in norms.items()}
