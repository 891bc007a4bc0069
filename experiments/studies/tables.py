"""Study results as Markdown tables."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.studies.extra_metrics import LENGTH_FACTORS, MAX_DOCUMENT_CHARACTERS, MIN_DEPTH
from experiments.studies.recall import NUM_TESTED
from experiments.studies.results import ResultDict
from experiments.studies.statistics import Estimate, estimate, paired_difference
from experiments.studies.variants import WITHOUT_WARM_UP

NO_VALUE = "—"
THROUGHPUT_NOTE = (
    "Speed is training throughput relative to the baseline: median, minimum and maximum over "
    "rounds in which every variant ran a few steps."
)
EQUAL_SIZE_TOLERANCE = 0.01  # of parameter counts that are reported as equal
NOTE = (
    "± is half of the 95% confidence interval of the mean over seeds (of differences paired by "
    "seed); std is the standard deviation over seeds. Intervals are not corrected for multiple "
    "comparisons: of twenty variants equal to the baseline, one is expected to have an interval "
    "without zero. Results hold for this text and recipe, whose learning rate and initialization "
    "were tuned for the baseline only. The initial loss is the loss of the first training batch; "
    "it differs between variants, as the initial size of branches relative to embeddings does."
)


class Column(NamedTuple):
    """A table column: its heading, and a function from a result to the cell text."""

    heading: str
    cell: Callable[[ResultDict], str]


def markdown(columns: Sequence[Column], results: Sequence[ResultDict]) -> str:
    """Markdown table, one row for each variant; all but the first column right-aligned."""
    rows = [[column.cell(numbers) for column in columns] for numbers in results]
    rule = [":---", *(["---:"] * (len(columns) - 1))]
    lines = [[column.heading for column in columns], rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_nan(values: Sequence[float | None]) -> list[float]:
    """Value of each seed; NaN for a diverged one."""
    return [math.nan if x is None else x for x in values]


def seed_values(numbers: ResultDict, name: str) -> list[float]:
    """Value of each seed of a result; NaN for a diverged one."""
    return with_nan(numbers[name])


def mean_and_interval(name: str, digits: int = 3) -> Callable[[ResultDict], str]:
    """Mean over the seeds and half-width of its 95% confidence interval."""
    return lambda numbers: mean_text(numbers[name], digits)


def mean_text(values: Sequence[float | None], digits: int = 3) -> str:
    """Mean over the seeds and half-width of its 95% confidence interval, as text."""
    return format_estimate(estimate(with_nan(values)), digits)


def initial_loss(numbers: ResultDict) -> str:
    """Initial loss: mean over the seeds, first batch, before any update."""
    estimated = estimate(with_nan([losses[0] for losses in numbers["train"]]))
    return NO_VALUE if math.isnan(estimated.mean) else f"{estimated.mean:.2f}"


def std_over_seeds(name: str) -> Callable[[ResultDict], str]:
    """Standard deviation over the seeds."""

    def cell(numbers: ResultDict) -> str:
        std = estimate(seed_values(numbers, name)).std
        return NO_VALUE if math.isnan(std) else f"{std:.3f}"

    return cell


def difference_from(name: str, other: ResultDict, digits: int = 3) -> Callable[[ResultDict], str]:
    """Mean difference from another variant, paired by seed, with its interval."""

    def cell(numbers: ResultDict) -> str:
        if numbers is other:
            return "0"
        pairs = paired_difference(seed_values(numbers, name), seed_values(other, name))
        return format_estimate(pairs, digits, sign="+")

    return cell


def format_estimate(estimated: Estimate, digits: int, sign: str = "") -> str:
    """Format an estimate, for example 2.712 ± 0.004."""
    if math.isnan(estimated.mean):
        return NO_VALUE
    return f"{estimated.mean:{sign}.{digits}f} ± {estimated.half_width:.{digits}f}"


# Of an ablation


def ablation_report(axis: str, results: list[ResultDict]) -> str:
    """Tables of losses, throughput and extra metrics."""
    baseline = results[0]
    columns = [
        Column(axis, lambda numbers: numbers["variant"]["name"]),
        Column("held-out loss", mean_and_interval("held_out")),
        Column("std", std_over_seeds("held_out")),
        Column("minus baseline", difference_from("held_out", results[0])),
        *_warmup_difference_columns(results),
        Column("initial loss", initial_loss),
        Column("parameters", lambda numbers: f"{numbers['parameters']:,}"),
        Column("speed", partial(_format_throughput, results[0])),
        Column("skipped steps", lambda numbers: str(numbers["skipped"])),
    ]
    parts = [markdown(columns, results), NOTE, THROUGHPUT_NOTE, _parameter_note(results)]
    if "at_lengths" in baseline:
        parts.append(_length_table(results))
    if "gradient_by_depth" in baseline:
        parts.append(_depth_table(results))
    if "recall" in baseline:
        parts.append(_recall_table(results))
    return "\n\n".join(parts) + "\n"


def _warmup_difference_columns(results: list[ResultDict]) -> list[Column]:
    """Columns with the effect of warm-up, for variants that were trained with and without it."""
    by_name = {numbers["variant"]["name"]: numbers for numbers in results}
    pairs = {name: name.removesuffix(WITHOUT_WARM_UP) for name in by_name}

    def cell(numbers: ResultDict) -> str:
        name = numbers["variant"]["name"]
        other = by_name.get(pairs[name])
        if other is None or other is numbers:
            return ""
        return difference_from("held_out", other)(numbers)

    any_pair = any(name != other for name, other in pairs.items())
    return [Column("effect of no warm-up", cell)] if any_pair else []


def _format_throughput(baseline: ResultDict, numbers: ResultDict) -> str:
    """Throughput relative to the baseline: median, minimum and maximum over the rounds."""
    pairs = zip(numbers["speeds"], baseline["speeds"], strict=True)
    times = sorted(throughput / other for throughput, other in pairs)
    if numbers is baseline:
        return f"{statistics.median(numbers['speeds']):,.0f} tokens/s"
    return f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"


def _parameter_note(results: list[ResultDict]) -> str:
    """Note on the variants whose parameter counts differ."""
    first = results[0]["parameters"]
    shares = {n["variant"]["name"]: n["parameters"] / first - 1 for n in results}
    far = [
        f"{name} {share:+.1%}"
        for name, share in shares.items()
        if abs(share) > EQUAL_SIZE_TOLERANCE
    ]
    tolerance = f"{EQUAL_SIZE_TOLERANCE:.0%}"
    if not far:
        return f"Parameter counts are equal within {tolerance}."
    return f"Parameter counts differ from the baseline by more than {tolerance}: {', '.join(far)}."


def _length_table(results: list[ResultDict]) -> str:
    """Table of losses in longer rows, for each variant and RoPE scaling."""

    def cell(times: str) -> Callable[[ResultDict], str]:
        return lambda line: mean_text(line[times]) if times in line else NO_VALUE

    lines = [
        # At the training length no scaling applies.
        {"way": way, **numbers, "1": numbers["at_lengths"]["as trained"]["1"], **losses}
        for numbers in results
        for way, losses in numbers["at_lengths"].items()
    ]
    columns = [
        Column("position", lambda line: line["variant"]["name"]),
        Column("RoPE scaling", lambda line: line["way"]),
        *(Column(f"{times} x", cell(str(times))) for times in LENGTH_FACTORS),
    ]
    return (
        f"Loss of the first {MAX_DOCUMENT_CHARACTERS:,} characters of each held-out document, in "
        "rows of 1, 2, 4 and 8 times the training length. At 1 x no RoPE scaling is applied. "
        "Positions restart with each document, and dynamic NTK and LongRoPE use the length of the "
        "longest document in a row, so they scale less than the others in rows of several "
        f"documents. {NO_VALUE}: the model has no positions for this length.\n\n"
        f"{markdown(columns, lines)}"
    )


def _depth_table(results: list[ResultDict]) -> str:
    """Ratio of the first to the last layer's gradient norm, as a geometric mean over seeds."""

    def ratios(numbers: ResultDict) -> list[float]:
        layers = np.asarray(numbers["gradient_by_depth"], float)
        return [float(x) for x in np.log(layers[:, 0] / layers[:, -1])]

    def cell(numbers: ResultDict) -> str:
        mean, _, half = estimate(ratios(numbers))
        with np.errstate(over="ignore"):  # two seeds may have a wide interval
            low, high = np.exp([mean - half, mean + half])
        return (
            NO_VALUE if math.isnan(mean) else f"{math.exp(mean):,.2f} ({low:,.2f} to {high:,.2f})"
        )

    lines = [numbers for numbers in results if "gradient_by_depth" in numbers]
    columns = [
        Column("placement", lambda numbers: numbers["variant"]["name"]),
        Column("first layer / last layer", cell),
    ]
    return (
        f"Gradient norm of each layer's kernels before the first step, with {MIN_DEPTH} layers. "
        "Here output projections are initialized like the others (in training they are scaled down "
        "by depth, which norms after the branches would undo). Geometric means over seeds, with "
        "95% intervals.\n\n"
        f"{markdown(columns, lines)}"
    )


def _recall_table(results: list[ResultDict]) -> str:
    """Table of the accuracy of recall by length, for each task and variant."""
    recall, trained = results[0]["recall"], results[0]["recall_trained_length"]
    lengths = list(next(iter(recall.values())))

    def cell(length: str) -> Callable[[ResultDict], str]:
        return lambda line: mean_text(line["recall"][line["task"]][length], 2)

    lines = [{"task": task, **numbers} for task in recall for numbers in results]
    columns = [
        Column("task", lambda line: line["task"]),
        Column("mixer", lambda line: line["variant"]["name"]),
        *(Column(length, cell(length)) for length in lengths),
        Column(f"cache of {lengths[-1]} tokens", lambda line: f"{line['cache_numbers']:,}"),
    ]
    return (
        "Share of the answers that are the most likely token, in documents of n tokens: n / 4 "
        "key-value pairs and then the keys, each to be answered by its value, or a string of "
        "n / 2 - 1 tokens to be repeated. Another training of each variant, on both tasks at once, "
        f"with the same seeds, optimizer and steps; its documents have up to {trained} tokens. "
        f"{NUM_TESTED} documents of each length. Any value of the document, whatever the key, is "
        "right in about 4 / n of the cases. The last column has the numbers that all layers keep "
        "for decoding.\n\n"
        f"{markdown(columns, lines)}"
    )
