"""Study results as Markdown tables."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.studies.arms import WITHOUT_WARM_UP
from experiments.studies.measures import CHARACTERS, DEPTH, TIMES
from experiments.studies.results import Numbers
from experiments.studies.statistics import Estimate, estimate, paired_difference

NOTHING = "—"
SPEED = (
    "Speed is that of training, as a multiple of the first arm's in the same round: the median of "
    "some rounds in which all arms had a turn of a few updates, and the least and the most."
)
NEAR = 0.01  # models whose parameters differ by less are called equal
NOTE = (
    "± is half the 95 % confidence interval of the mean over seeds, of a difference taken seed by "
    "seed; spread is the standard deviation of the seeds. Intervals are of each line alone: of "
    "twenty lines that differ in nothing one is expected to leave zero out. They are of this text "
    "and this recipe, whose rate and start were chosen with the first arm's choices: none was "
    "tuned for another arm. The loss at first is that of the first training batch: how large "
    "branches are beside token vectors at the start may differ, and with it how far there is to go."
)


class Column(NamedTuple):
    """A table column: its heading, and a function from a result to the cell text."""

    heading: str
    cell: Callable[[Numbers], str]


def markdown(columns: Sequence[Column], arms: Sequence[Numbers]) -> str:
    """Markdown table, one row for each variant; all but the first column right-aligned."""
    rows = [[column.cell(numbers) for column in columns] for numbers in arms]
    rule = [":---", *(["---:"] * (len(columns) - 1))]
    lines = [[column.heading for column in columns], rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values(numbers: Numbers, name: str) -> list[float]:
    """Value of each seed; NaN for a diverged one."""
    return [math.nan if x is None else x for x in numbers[name]]


def mean_and_interval(name: str, digits: int = 3) -> Callable[[Numbers], str]:
    """Mean over the seeds and half-width of its 95% confidence interval."""
    return lambda numbers: shown(estimate(values(numbers, name)), digits)


def first_loss(numbers: Numbers) -> str:
    """Initial loss: mean over the seeds, first batch, before any update."""
    estimated = estimate(values({"first": [losses[0] for losses in numbers["train"]]}, "first"))
    return NOTHING if math.isnan(estimated.mean) else f"{estimated.mean:.2f}"


def deviation(name: str, digits: int = 3) -> Callable[[Numbers], str]:
    """Standard deviation over the seeds."""

    def cell(numbers: Numbers) -> str:
        std = estimate(values(numbers, name)).deviation
        return NOTHING if math.isnan(std) else f"{std:.{digits}f}"

    return cell


def difference_from(name: str, other: Numbers, digits: int = 3) -> Callable[[Numbers], str]:
    """Mean difference from another variant, paired by seed, with its interval."""

    def cell(numbers: Numbers) -> str:
        if numbers is other:
            return "0"
        pairs = paired_difference(values(numbers, name), values(other, name))
        return shown(pairs, digits, sign="+")

    return cell


def shown(found: Estimate, digits: int, sign: str = "") -> str:
    """Format an estimate, for example 2.712 ± 0.004."""
    if math.isnan(found.mean):
        return NOTHING
    return f"{found.mean:{sign}.{digits}f} ± {found.half_width:.{digits}f}"


# Of an ablation


def ablation_report(axis: str, found: list[Numbers]) -> str:
    """Tables of losses, throughput and extra metrics."""
    baseline = found[0]
    columns = [
        Column(axis, lambda numbers: numbers["arm"]["name"]),
        Column("held-out loss", mean_and_interval("held_out")),
        Column("spread", deviation("held_out")),
        Column("minus the first", difference_from("held_out", found[0])),
        *_beside_warm_up(found),
        Column("loss at first", first_loss),
        Column("parameters", lambda numbers: f"{numbers['parameters']:,}"),
        Column("speed", partial(_speed, found[0])),
        Column("updates left out", lambda numbers: str(numbers["skipped"])),
    ]
    parts = [markdown(columns, found), NOTE, SPEED, _sizes(found)]
    if "at_lengths" in baseline:
        parts.append(_lengths(found))
    if "gradient_by_depth" in baseline:
        parts.append(_depths(found))
    return "\n\n".join(parts) + "\n"


def _beside_warm_up(found: list[Numbers]) -> list[Column]:
    """Columns with the effect of warm-up, for variants that were trained with and without it."""
    by_name = {numbers["arm"]["name"]: numbers for numbers in found}
    pairs = {name: name.removesuffix(WITHOUT_WARM_UP) for name in by_name}

    def cell(numbers: Numbers) -> str:
        name = numbers["arm"]["name"]
        other = by_name.get(pairs[name])
        if other is None or other is numbers:
            return ""
        return difference_from("held_out", other)(numbers)

    any_pair = any(name != other for name, other in pairs.items())
    return [Column("minus with warm-up", cell)] if any_pair else []


def _speed(baseline: Numbers, numbers: Numbers) -> str:
    """Throughput relative to the baseline: median, minimum and maximum over the rounds."""
    pairs = zip(numbers["speeds"], baseline["speeds"], strict=True)
    times = sorted(throughput / other for throughput, other in pairs)
    if numbers is baseline:
        return f"{statistics.median(numbers['speeds']):,.0f} tokens/s"
    return f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"


def _sizes(found: list[Numbers]) -> str:
    """Note on the variants whose parameter counts differ."""
    first = found[0]["parameters"]
    shares = {n["arm"]["name"]: n["parameters"] / first - 1 for n in found}
    far = [f"{name} {share:+.1%}" for name, share in shares.items() if abs(share) > NEAR]
    if not far:
        return f"Parameters are equal within {NEAR:.0%}."
    return f"Parameters differ by more than {NEAR:.0%} from the first: {', '.join(far)}."


def _lengths(found: list[Numbers]) -> str:
    """Table of losses in longer rows, for each variant and RoPE scaling."""

    def as_trained(numbers: Numbers) -> Numbers:
        """Loss at the training length, where no scaling applies."""
        return {"1": numbers["at_lengths"]["as trained"]["1"]}

    def cell(times: int) -> Callable[[Numbers], str]:
        def shown(line: Numbers) -> str:
            losses = line["losses"].get(str(times))
            return NOTHING if losses is None else mean_and_interval("seeds")({"seeds": losses})

        return shown

    lines = [
        {"name": numbers["arm"]["name"], "way": way, "losses": {**as_trained(numbers), **losses}}
        for numbers in found
        for way, losses in numbers["at_lengths"].items()
    ]
    columns = [
        Column("position", lambda line: line["name"]),
        Column("read", lambda line: line["way"]),
        *(Column(f"{times} x", cell(times)) for times in TIMES),
    ]
    return (
        f"The first {CHARACTERS:,} characters of each held-out document, in rows of 1, 2, 4 and 8 "
        "times the length of training. At 1 x nothing is stretched. Positions begin anew with each "
        "document, and dynamic NTK and LongRoPE look at the length of a row's longest one, so in "
        "rows that two documents share they stretch by less than the others. "
        f"{NOTHING} stands where positions do not reach so far.\n\n{markdown(columns, lines)}"
    )


def _depths(found: list[Numbers]) -> str:
    """Ratio of the first to the last layer's gradient norm, as a geometric mean over seeds."""

    def ratios(numbers: Numbers) -> list[float]:
        layers = np.asarray(numbers["gradient_by_depth"], float)
        return [float(x) for x in np.log(layers[:, 0] / layers[:, -1])]

    def cell(numbers: Numbers) -> str:
        mean, _, half = estimate(ratios(numbers))
        with np.errstate(over="ignore"):  # two seeds may tell very little
            low, high = np.exp([mean - half, mean + half])
        return NOTHING if math.isnan(mean) else f"{math.exp(mean):,.2f} ({low:,.2f} to {high:,.2f})"

    lines = [numbers for numbers in found if "gradient_by_depth" in numbers]
    columns = [
        Column("placement", lambda numbers: numbers["arm"]["name"]),
        Column("first layer / last layer", cell),
    ]
    return (
        f"Norm of the gradient of a layer's kernels before the first update, with {DEPTH} layers, "
        "whose last products begin like the others (in training they begin smaller, by depth, "
        "which norms after branches would undo). Means over seeds of the logarithm, with intervals "
        "of 95 %.\n\n"
        f"{markdown(columns, lines)}"
    )
