"""Tables and plot of a benchmark."""

import importlib
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.cases import ABOUT, Task, Work, work
from experiments.benchmark.turns import Found, Size
from experiments.training.plot import can_draw

US = "jaxformer"
COLOURS = {
    "jaxformer, as it is by default": "tab:blue",
    "jaxformer with another option": "lightskyblue",
    "others": "silver",
}
COLUMNS = 2


def sections(results: Mapping[str, Any]) -> list[str]:
    """A benchmark as Markdown: its setup, then one table for each case.

    Args:
        results: What benchmark.json holds.
    """
    size, parts = Size(**results["size"]), [made(results)]
    for task, many in results["cases"].items():
        measurements = [Found(**one) for one in many]
        peak_entries = results["peaks"].get(task, results["cases"].get("machine", []))
        peak = peak_of([Found(**one) for one in peak_entries], size)
        rows = table(task, measurements, amount_of(task, measurements, size), peak)
        parts.append(f"{ABOUT[task]}\n\n{rows}")
    return parts


def summary(results: Mapping[str, Any]) -> str:
    """Markdown table: speed of jaxformer relative to every other program, for each case."""
    cases: dict[str, dict[str, float]] = {}
    for task, many in results["cases"].items():
        by_name = {one["name"]: Found(**one) for one in many if one["seconds"]}
        if US in by_name and task not in ("vocabulary", "rotary"):
            cases[task] = {
                name: statistics.median(ratios(by_name[US], other))
                for name, other in by_name.items()
                if not name.startswith(US)
            }
    names = list(dict.fromkeys(name for shares in cases.values() for name in shares))
    lines = [f"| times as fast as | {' | '.join(cases)} |", "|:---" + "|---:" * len(cases) + "|"]
    for name in names:
        cells = [f"{x[name]:.2f}" if name in x else "" for x in cases.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", load(results)])


def made(results: Mapping[str, Any]) -> str:
    """Sizes, rounds, machine, package versions and date of a benchmark, as text."""
    machine, size = results["machine"], Size(**results["size"])
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    finished = [one for found in results["cases"].values() for one in found if one["seconds"]]
    on = sorted({one["device"] for one in finished if one["device"]})
    rounds = max((len(one["seconds"]) for one in finished), default=0)
    return (
        f"{size.num_layers} layers of width {size.model_dim}, {size.num_heads} heads, a gated "
        f"feed-forward of {size.hidden_dim}, {size.vocab_size:,} token ids, {size.batch_size} rows "
        f"of {size.length} tokens in training, {size.prompt} continued by {size.new_tokens} in "
        f"decoding; {size.dtype}. {rounds} rounds. {machine['cores']} cores "
        f"({machine['architecture']}, {machine['processor']}), devices: {', '.join(on) or 'cpu'}. "
        f"{versions}. {results['date']}. {load(results)}"
    )


def load(results: Mapping[str, Any]) -> str:
    """Sentence on the load average before the start; below 1 is called a quiet machine."""
    before = results["load"]
    kind = "a quiet machine" if before < 1 else f"a machine under load {before:.1f}"
    return f"Measured on {kind}: a load average of {before:.2f} in the minute before the start."


def amount_of(task: Task, found: Sequence[Found], size: Size) -> Work:
    """Work of one round on the devices that jaxformer used."""
    return work(task, size, max((one.devices for one in found if one.seconds), default=1))


def peak_of(machine: Sequence[Found], size: Size) -> Work:
    """Measured peak FLOP/s and bytes/s, from the best rounds; all None where not measured."""
    if len(machine) != 2:
        return Work()
    products, copies = machine
    amount = amount_of("machine", machine, size)
    return Work(
        flops=share_of(products, amount.flops), bytes_moved=share_of(copies, amount.bytes_moved)
    )


def table(task: Task, found: Sequence[Found], amount: Work, peak: Work) -> str:
    """Markdown table of one case.

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
    baseline = next((measurement for measurement in found if measurement.seconds), None)
    ratio_heading = "" if baseline is None else f"times {baseline.name}"
    heads.append("a second" if task == "machine" else ratio_heading)
    heads += ["first round", "working space", "peak memory"]
    lines = [f"| {' | '.join(heads)} |", "|:---" + "|---:" * (len(heads) - 1) + "|"]
    for number, measurement in enumerate(found):
        if baseline is None or not measurement.seconds:
            lines.append(
                f"| {measurement.name} | {measurement.missing} |" + " |" * (len(heads) - 2)
            )
            continue
        middle, shares = (
            statistics.median(measurement.seconds),
            sorted(ratios(measurement, baseline)),
        )
        cells = {
            task: measurement.name,
            "seconds": f"{middle:.3g}",
            "tokens/s": f"{(amount.tokens or 0) / middle:,.0f}",
            "of peak FLOP/s": percent(amount.flops, middle, peak.flops),
            "of peak bandwidth": percent(amount.bytes_moved, middle, peak.bytes_moved),
            "a second": each_second(amount, number, middle),
            ratio_heading: f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})",
            "first round": "" if measurement.first is None else f"{measurement.first:.1f} s",
            "working space": megabytes(measurement.working_bytes),
            "peak memory": megabytes(measurement.peak_bytes),
        }
        lines.append(f"| {' | '.join(cells[head] for head in heads)} |")
    return "\n".join(lines)


def ratios(one: Found, baseline: Found) -> list[float]:
    """Speed relative to the baseline program, for each round."""
    return [theirs / ours for ours, theirs in zip(one.seconds, baseline.seconds, strict=True)]


def share_of(one: Found, amount: float | None) -> float | None:
    """Amount per second of the fastest round; None without an amount or without rounds."""
    return amount / min(one.seconds) if amount is not None and one.seconds else None


def percent(amount: float | None, seconds: float, peak: float | None) -> str:
    """Rate as a percentage of the measured peak; "peak not reached" where it is above 100%."""
    if not amount or not peak:
        return ""
    share = amount / seconds / peak
    return f"{share:.0%}" if share <= 1 else "peak not reached"


def each_second(amount: Work, number: int, seconds: float) -> str:
    """Measured peak as text: GFLOP of the matmuls, or GB of the copies."""
    if amount.flops is None or amount.bytes_moved is None:
        return ""
    if number == 0:
        return f"{amount.flops / seconds / 1e9:,.0f} GFLOP"
    return f"{amount.bytes_moved / seconds / 1e9:,.1f} GB"


def megabytes(count: int | None) -> str:
    """Format bytes as MB; "" where the program's compiler does not report memory."""
    return "" if count is None else f"{count / 1e6:,.0f} MB"


def plot_cases(path: Path, cases: Mapping[Task, Sequence[Mapping[str, Any]]]) -> None:
    """Plot speeds relative to the first program, with the range over all rounds.

    Each case has a panel with its title, and all share a key of colours.

    Args:
        path: Of the picture.
        cases: What was found of each program, by case.
    """
    finished = {
        task: [Found(**one) for one in found if one["seconds"]]
        for task, found in cases.items()
        if task != "machine"
    }
    measured = {task: found for task, found in finished.items() if found}
    if not measured or not can_draw():
        return
    figures = importlib.import_module("matplotlib.figure")
    patches = importlib.import_module("matplotlib.patches")
    rows = -(-len(measured) // COLUMNS)
    figure = figures.Figure(figsize=(12, 0.7 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for panel, (task, found) in zip(panels, measured.items(), strict=False):
        draw_case(panel, task, found)
    for panel in list(panels)[len(measured) :]:
        panel.set_axis_off()
    key = [patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=key, loc="outside upper center", ncols=len(key), frameon=False)
    figure.savefig(path, dpi=80)


def draw_case(panel: Any, task: Task, found: Sequence[Found]) -> None:
    """Plot one case: one bar for each program, labelled with its value."""
    for row, one in enumerate(found):
        shares = sorted(ratios(one, found[0]))
        middle = statistics.median(shares)
        panel.barh(row, middle, color=colour_of(task, one.name))
        panel.plot([shares[0], shares[-1]], [row, row], color="k", linewidth=1.2)
        panel.annotate(
            f"{middle:.2f}",
            (max(shares[-1], middle), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    panel.set_yticks(range(len(found)), [one.name for one in found])
    panel.set_ylim(max(len(found), 3) - 0.4, -0.6)
    panel.margins(x=0.12)
    panel.set_xlim(left=0)
    panel.axvline(1.0, color="k", linewidth=0.6, linestyle=":")
    title = textwrap.wrap(f"{task}: {ABOUT[task].rstrip('.')}", 50)
    panel.set_title("\n".join(title), fontsize=10, loc="left")
    panel.set_xlabel(f"times as fast as {found[0].name}", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def colour_of(task: Task, name: str) -> str:
    """Bar colour of a program; cases of jaxformer alone use one colour."""
    alone = task in ("long", "vocabulary", "rotary", "remat", "compile")
    default, option, others = COLOURS.values()
    if name == US or (alone and name == "remat dots"):
        return default
    return option if alone or name.startswith(US) else others
