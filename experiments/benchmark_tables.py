"""What is said of a benchmark: tables, and a plot."""

import importlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.contest import Size
from experiments.contests import ABOUT, Task, Work, work
from experiments.study_plots import can_draw


@dataclass
class Found:
    """Of one contestant.

    Attributes:
        name: As the table calls it.
        seconds: Of each round.
        first: Seconds of all that comes before the first round that counts: imports, parameters,
            compilation, a round.
        working_bytes: Of a device beside arguments and results, as its compiler has it.
        devices: That it has.
        device: What they are.
        peak_bytes: Of the whole process, at most.
        missing: Why it does not take part.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    first: float | None = None
    working_bytes: int | None = None
    devices: int = 1
    device: str | None = None
    peak_bytes: int | None = None
    missing: str | None = None


def sections(results: Mapping[str, Any]) -> list[str]:
    """Of a benchmark in Markdown: how it was made, and each contest.

    Args:
        results: What benchmark.json holds.
    """
    size = Size(**results["size"])
    contests = {task: [Found(**one) for one in many] for task, many in results["contests"].items()}
    peak, parts = peak_of(contests.get("machine", []), size), [made(results)]
    for task, found in contests.items():
        parts.append(f"{ABOUT[task]}\n\n{table(task, found, amount_of(task, found, size), peak)}")
    return parts


US = "jaxformer"


def summary(results: Mapping[str, Any]) -> str:
    """How many times as fast as each other contestant ours is, in every contest where both are."""
    contests: dict[str, dict[str, float]] = {}
    for task, many in results["contests"].items():
        found = {one["name"]: Found(**one) for one in many if one["seconds"]}
        if US in found and task not in ("vocabulary", "rotary"):
            contests[task] = {
                name: statistics.median(ratios(found[US], other))
                for name, other in found.items()
                if not name.startswith(US)
            }
    names = list(dict.fromkeys(name for shares in contests.values() for name in shares))
    lines = [
        f"| times as fast as | {' | '.join(contests)} |",
        "|:---" + "|---:" * len(contests) + "|",
    ]
    for name in names:
        cells = [f"{x[name]:.2f}" if name in x else "" for x in contests.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def made(results: Mapping[str, Any]) -> str:
    """Where, when and with what it was measured."""
    machine, size = results["machine"], Size(**results["size"])
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    ran = [one for found in results["contests"].values() for one in found if one["seconds"]]
    on = sorted({one["device"] for one in ran if one["device"]})
    rounds = max((len(one["seconds"]) for one in ran), default=0)
    return (
        f"{size.num_layers} layers of width {size.model_dim}, {size.num_heads} heads, a gated "
        f"feed-forward of {size.hidden_dim}, {size.vocab_size:,} token ids, {size.batch_size} rows "
        f"of {size.length} tokens in training, {size.prompt} continued by {size.new_tokens} in "
        f"decoding; {size.dtype}. {rounds} rounds. {machine['cores']} cores "
        f"({machine['architecture']}, {machine['processor']}), devices: {', '.join(on) or 'cpu'}. "
        f"{versions}. {results['date']}."
    )


def amount_of(task: Task, found: Sequence[Found], size: Size) -> Work:
    """How much a round is, on the devices of ours."""
    return work(task, size, max((one.devices for one in found if one.seconds), default=1))


def peak_of(machine: Sequence[Found], size: Size) -> Work:
    """What the machine was seen to do in a second; nothing if nobody looked."""
    if not machine:
        return Work()
    products, copies = machine
    amount = amount_of("machine", machine, size)
    return Work(
        flops=share_of(products, amount.flops), bytes_moved=share_of(copies, amount.bytes_moved)
    )


def table(task: Task, found: Sequence[Found], amount: Work, peak: Work) -> str:
    """A contest as Markdown.

    Args:
        task: Its name.
        found: The baseline first.
        amount: Of a round.
        peak: FLOPs and bytes of a second that the machine can do, where that is known.
    """
    heads = [task, "seconds"]
    if amount.tokens is not None:
        heads.append("tokens/s")
    if amount.tokens is not None and peak.flops and amount.flops:
        heads.append("of peak FLOP/s")
    if amount.tokens is not None and peak.bytes_moved and amount.bytes_moved:
        heads.append("of peak bandwidth")
    baseline = next((one for one in found if one.seconds), None)
    beside = "" if baseline is None else f"times {baseline.name}"
    heads.append("a second" if task == "machine" else beside)
    heads += ["first round", "working space", "process"]
    lines = [f"| {' | '.join(heads)} |", "|:---" + "|---:" * (len(heads) - 1) + "|"]
    for number, one in enumerate(found):
        if baseline is None or not one.seconds:
            lines.append(f"| {one.name} | {one.missing} |" + " |" * (len(heads) - 2))
            continue
        middle, shares = statistics.median(one.seconds), sorted(ratios(one, baseline))
        cells = {
            task: one.name,
            "seconds": f"{middle:.3f}",
            "tokens/s": f"{(amount.tokens or 0) / middle:,.0f}",
            "of peak FLOP/s": percent(amount.flops, middle, peak.flops),
            "of peak bandwidth": percent(amount.bytes_moved, middle, peak.bytes_moved),
            "a second": each_second(amount, number, middle),
            beside: f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})",
            "first round": "" if one.first is None else f"{one.first:.1f} s",
            "working space": megabytes(one.working_bytes),
            "process": megabytes(one.peak_bytes),
        }
        lines.append(f"| {' | '.join(cells[head] for head in heads)} |")
    return "\n".join(lines)


def ratios(one: Found, baseline: Found) -> list[float]:
    """Of each round: how many times as fast as the baseline."""
    return [theirs / ours for ours, theirs in zip(one.seconds, baseline.seconds, strict=True)]


def share_of(one: Found, amount: float | None) -> float | None:
    """Of so much work, what was done in a second of the best round."""
    return amount / min(one.seconds) if amount is not None and one.seconds else None


def percent(amount: float | None, seconds: float, peak: float | None) -> str:
    """What was done in a second, of what could be."""
    return f"{amount / seconds / peak:.0%}" if amount and peak else ""


def each_second(amount: Work, number: int, seconds: float) -> str:
    """Of products first, of copies second."""
    if amount.flops is None or amount.bytes_moved is None:
        return ""
    if number == 0:
        return f"{amount.flops / seconds / 1e9:,.0f} GFLOP"
    return f"{amount.bytes_moved / seconds / 1e9:,.1f} GB"


def megabytes(count: int | None) -> str:
    """As a person reads it; compilers of others do not say."""
    return "" if count is None else f"{count / 1e6:,.0f} MB"


def plot_contests(path: Path, contests: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Speeds as multiples of the first contestant's, with the whole range of rounds.

    Without matplotlib nothing is drawn but a line that says what is missing.
    """
    shown = {task: found for task, found in contests.items() if task != "machine"}
    if not shown or not can_draw():
        return
    bars: list[tuple[str, list[float]]] = []
    for task, contestants in shown.items():
        found = [Found(**one) for one in contestants]
        baseline = next((one for one in found if one.seconds), None)
        for one in found:
            if baseline is not None and one.seconds:
                bars.append((f"{task}: {one.name}", sorted(ratios(one, baseline))))
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 0.3 * len(bars) + 1), layout="constrained")
    axes = figure.subplots()
    middles = [statistics.median(shares) for _, shares in bars]
    below = [middle - shares[0] for middle, (_, shares) in zip(middles, bars, strict=True)]
    above = [shares[-1] - middle for middle, (_, shares) in zip(middles, bars, strict=True)]
    ours = [name.endswith(f": {US}") for name, _ in bars]
    colours = ["tab:blue" if own else "lightgray" for own in ours]
    rows = range(len(bars))
    axes.barh(rows, middles, color=colours, xerr=(below, above), ecolor="k")
    axes.set_yticks(rows, [name for name, _ in bars])
    axes.invert_yaxis()
    axes.axvline(1.0, color="k", linewidth=0.5)
    axes.set_xlabel("times as fast as the first of its contest")
    figure.savefig(path, dpi=110)
