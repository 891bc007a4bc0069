"""Results as Markdown tables."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.statistics import Estimate, estimate, paired_difference
from experiments.study_results import Numbers

NOTHING = "—"
NOTE = (
    "± is half the 95 % confidence interval of the mean over seeds, of a difference taken seed by "
    "seed; spread is the standard deviation of the seeds. Intervals are of each line alone: of "
    "twenty lines that differ in nothing one is expected to leave zero out. They are of this text "
    "and this recipe, whose rate and start were chosen with the first arm's choices: none was "
    "tuned for another arm. The loss at first is that of the first training batch: how large "
    "branches are beside token vectors at the start may differ, and with it how far there is to go."
)


class Column(NamedTuple):
    """A heading, and what stands under it for an arm."""

    heading: str
    cell: Callable[[Numbers], str]


def markdown(columns: Sequence[Column], arms: Sequence[Numbers]) -> str:
    """One row for each arm; the first column to the left, the others to the right."""
    rows = [[column.cell(numbers) for column in columns] for numbers in arms]
    rule = [":---", *(["---:"] * (len(columns) - 1))]
    lines = [[column.heading for column in columns], rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values(numbers: Numbers, name: str) -> list[float]:
    """One number for each seed; NaN for one that came to nothing."""
    return [math.nan if x is None else x for x in numbers[name]]


def mean_and_interval(name: str, digits: int = 3) -> Callable[[Numbers], str]:
    """The mean over the seeds and half the width of its interval of 95 %."""
    return lambda numbers: shown(estimate(values(numbers, name)), digits)


def first_loss(numbers: Numbers) -> str:
    """Of the first batch, before any update: the mean over the seeds."""
    found = estimate(values({"first": [losses[0] for losses in numbers["train"]]}, "first"))
    return NOTHING if math.isnan(found.mean) else f"{found.mean:.2f}"


def deviation(name: str, digits: int = 3) -> Callable[[Numbers], str]:
    """The standard deviation of the seeds."""

    def cell(numbers: Numbers) -> str:
        found = estimate(values(numbers, name)).deviation
        return NOTHING if math.isnan(found) else f"{found:.{digits}f}"

    return cell


def difference_from(name: str, other: Numbers, digits: int = 3) -> Callable[[Numbers], str]:
    """The mean of the differences from another arm, seed by seed, and its interval."""

    def cell(numbers: Numbers) -> str:
        if numbers is other:
            return "0"
        pairs = paired_difference(values(numbers, name), values(other, name))
        return shown(pairs, digits, sign="+")

    return cell


def shown(found: Estimate, digits: int, sign: str = "") -> str:
    """For example 2.712 ± 0.004."""
    if math.isnan(found.mean):
        return NOTHING
    return f"{found.mean:{sign}.{digits}f} ± {found.half_width:.{digits}f}"
