"""What is said of a benchmark: its tables."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.contest import Size
from experiments.contests import ABOUT, Task, Work, work
from experiments.machine_load import caption


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
    peaks = {
        task: [Found(**one) for one in many] for task, many in results.get("peaks", {}).items()
    }
    parts = [made(results)]
    for task, found in contests.items():
        peak = peak_of(peaks.get(task, contests.get("machine", [])), size)
        parts.append(f"{ABOUT[task]}\n\n{table(task, found, amount_of(task, found, size), peak)}")
    return parts


US = "jaxformer"


def summary(results: Mapping[str, Any]) -> str:
    """How many times as fast as each other contestant ours is, in every contest where both are.

    Under the table stands whether the machine was quiet.
    """
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
    return "\n".join([*lines, "", caption(results.get("load"))])


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
        f"{versions}. {results['date']}. {caption(results.get('load'))}"
    )


def amount_of(task: Task, found: Sequence[Found], size: Size) -> Work:
    """How much a round is, on the devices of ours."""
    return work(task, size, max((one.devices for one in found if one.seconds), default=1))


def peak_of(machine: Sequence[Found], size: Size) -> Work:
    """What the machine was seen to do in a second of its best round; nothing if nobody looked."""
    if len(machine) != 2:
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
    """What was done in a second, of what could be; more than that shows that it was no peak."""
    if not amount or not peak:
        return ""
    share = amount / seconds / peak
    return f"{share:.0%}" if share <= 1 else "peak not reached"


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
