"""Tables and plot of a benchmark."""

import importlib
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.cases import (
    CASE_DESCRIPTIONS,
    CASES,
    JAXFORMER_MODULE,
    CaseName,
    WorkCounts,
    count_work,
)
from experiments.benchmark.runner import BenchmarkSize, Measurement
from jaxformer.parallel.chips import chip_from_device_kind
from jaxformer.run.plot import has_matplotlib

OUR_NAME = "jaxformer"
COLOURS = {
    "jaxformer, default options": "tab:blue",
    "jaxformer, other options": "lightskyblue",
    "other libraries": "silver",
}
COLUMNS = 2


def markdown_sections(results: Mapping[str, Any]) -> list[str]:
    """A benchmark as Markdown: its setup, then one table for each case.

    Args:
        results: The content of benchmark.json.
    """
    size, parts = BenchmarkSize(**results["size"]), [setup_text(results)]
    for task, many in results["cases"].items():
        measurements = [Measurement(**one) for one in many]
        peak_entries = results["peaks"].get(task, results["cases"].get("machine", []))
        peak = peak_rates([Measurement(**one) for one in peak_entries], size)
        rows = case_table(task, measurements, work_of(task, measurements, size), peak)
        parts.append(f"{CASE_DESCRIPTIONS[task]}\n\n{rows}")
    return parts


def speed_summary(results: Mapping[str, Any]) -> str:
    """Markdown table: speed of jaxformer relative to every other program, for each case."""
    cases: dict[str, dict[str, float]] = {}
    for task, many in results["cases"].items():
        by_name = {one["name"]: Measurement(**one) for one in many if one["seconds"]}
        if OUR_NAME in by_name and task not in ("vocabulary", "rotary"):
            cases[task] = {
                name: statistics.median(ratios(by_name[OUR_NAME], other))
                for name, other in by_name.items()
                if not name.startswith(OUR_NAME)
            }
    names = list(dict.fromkeys(name for shares in cases.values() for name in shares))
    lines = [f"| speed relative to | {' | '.join(cases)} |", "|:---" + "|---:" * len(cases) + "|"]
    for name in names:
        cells = [f"{x[name]:.2f}" if name in x else "" for x in cases.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", load_text(results)])


def setup_text(results: Mapping[str, Any]) -> str:
    """Sizes, rounds, machine, package versions and date of a benchmark, as text."""
    machine, size = results["machine"], BenchmarkSize(**results["size"])
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    finished = [
        one for measurements in results["cases"].values() for one in measurements if one["seconds"]
    ]
    on = sorted({one["device_kind"] for one in finished if one["device_kind"]})
    rounds = max((len(one["seconds"]) for one in finished), default=0)
    return (
        f"{size.num_layers} layers, model_dim {size.model_dim}, {size.num_heads} heads, gated "
        f"feed-forward of {size.hidden_dim}, vocabulary of {size.vocab_size:,}; training on "
        f"{size.batch_size} x {size.length} tokens; decoding {size.new_tokens} tokens after "
        f"{size.prompt}; {size.dtype}. {rounds} rounds. {machine['cores']} cores "
        f"({machine['architecture']}, {machine['processor']}), devices: {', '.join(on) or 'cpu'}. "
        f"{versions}. {results['date']}. {load_text(results)}"
    )


def load_text(results: Mapping[str, Any]) -> str:
    """Sentence on the load average before the start; below 1 the machine is called idle."""
    before = results["load"]
    kind = "an idle" if before < 1 else "a busy"
    return f"Measured on {kind} machine: load average {before:.2f} in the minute before the start."


def work_of(case: CaseName, measurements: Sequence[Measurement], size: BenchmarkSize) -> WorkCounts:
    """Work of one round on the devices that jaxformer used."""
    return count_work(
        case, size, max((one.num_devices for one in measurements if one.seconds), default=1)
    )


def peak_rates(machine: Sequence[Measurement], size: BenchmarkSize) -> WorkCounts:
    """Measured peak FLOP/s and bytes/s, from the best rounds; all None where not measured."""
    if len(machine) != 2:
        return WorkCounts()
    products, copies = machine
    amount = work_of("machine", machine, size)
    return WorkCounts(
        flops=best_rate(products, amount.flops), bytes_moved=best_rate(copies, amount.bytes_moved)
    )


def case_table(
    case: CaseName, measurements: Sequence[Measurement], counts: WorkCounts, peak: WorkCounts
) -> str:
    """Markdown table of one case.

    Args:
        case: The case.
        measurements: Measurements of the programs, the baseline first.
        counts: Work of one round.
        peak: Peak FLOP/s and bytes/s of the machine, if measured.
    """
    heads = [case, "seconds"]
    if counts.tokens is not None:
        heads.append("tokens/s")
    if counts.tokens is not None and peak.flops and counts.flops:
        heads.append("of peak FLOP/s")
    nominal = nominal_flops(measurements)
    if counts.flops and nominal:
        heads.append("of nominal FLOP/s")
    if counts.tokens is not None and peak.bytes_moved and counts.bytes_moved:
        heads.append("of peak bandwidth")
    baseline = next((measurement for measurement in measurements if measurement.seconds), None)
    ratio_heading = "" if baseline is None else f"speed relative to {baseline.name}"
    heads.append("per second" if case == "machine" else ratio_heading)
    heads += ["first round", "temporary memory", "peak memory"]
    lines = [f"| {' | '.join(heads)} |", "|:---" + "|---:" * (len(heads) - 1) + "|"]
    for number, measurement in enumerate(measurements):
        if baseline is None or not measurement.seconds:
            lines.append(
                f"| {measurement.name} | {measurement.skip_reason} |" + " |" * (len(heads) - 2)
            )
            continue
        middle, shares = (
            statistics.median(measurement.seconds),
            sorted(ratios(measurement, baseline)),
        )
        cells = {
            case: measurement.name,
            "seconds": f"{middle:.3g}",
            "tokens/s": f"{(counts.tokens or 0) / middle:,.0f}",
            "of peak FLOP/s": peak_share(counts.flops, middle, peak.flops),
            "of nominal FLOP/s": peak_share(counts.flops, middle, nominal),
            "of peak bandwidth": peak_share(counts.bytes_moved, middle, peak.bytes_moved),
            "per second": rate_text(counts, number, middle),
            ratio_heading: f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})",
            "first round": ""
            if measurement.first_seconds is None
            else f"{measurement.first_seconds:.1f} s",
            "temporary memory": format_megabytes(measurement.temp_bytes),
            "peak memory": format_megabytes(measurement.peak_bytes),
        }
        lines.append(f"| {' | '.join(cells[head] for head in heads)} |")
    return "\n".join(lines)


def nominal_flops(measurements: Sequence[Measurement]) -> float | None:
    """Published FLOP/s of the devices that jaxformer used; None if they are not in the table."""
    ours = next((one for one in measurements if one.device_kind is not None), None)
    if ours is None or (chip := chip_from_device_kind(ours.device_kind or "")) is None:
        return None
    return ours.num_devices * chip.peak_flops


def ratios(measurement: Measurement, baseline: Measurement) -> list[float]:
    """Speed relative to the baseline program, for each round."""
    return [
        theirs / ours for ours, theirs in zip(measurement.seconds, baseline.seconds, strict=True)
    ]


def best_rate(measurement: Measurement, counts: float | None) -> float | None:
    """Amount per second of the fastest round; None without an amount or without rounds."""
    return counts / min(measurement.seconds) if counts is not None and measurement.seconds else None


def peak_share(counts: float | None, seconds: float, peak: float | None) -> str:
    """Rate as a percentage of the measured peak; above 100% the measured peak was too low."""
    if not counts or not peak:
        return ""
    share = counts / seconds / peak
    return f"{share:.0%}" if share <= 1 else "> 100%"


def rate_text(counts: WorkCounts, number: int, seconds: float) -> str:
    """Measured peak as text: GFLOP of the matmuls, or GB of the copies."""
    if counts.flops is None or counts.bytes_moved is None:
        return ""
    if number == 0:
        return f"{counts.flops / seconds / 1e9:,.0f} GFLOP"
    return f"{counts.bytes_moved / seconds / 1e9:,.1f} GB"


def format_megabytes(count: int | None) -> str:
    """Format bytes as MB; "" where the program's compiler does not report memory."""
    return "" if count is None else f"{count / 1e6:,.0f} MB"


def plot_cases(path: Path, cases: Mapping[CaseName, Sequence[Mapping[str, Any]]]) -> None:
    """Plot speeds relative to the first program, with the range over all rounds.

    Each case has a panel; all share one legend.

    Args:
        path: File to write.
        cases: Measurements of the programs, by case.
    """
    finished = {
        task: [Measurement(**one) for one in measurements if one["seconds"]]
        for task, measurements in cases.items()
        if task != "machine"
    }
    measured = {task: measurements for task, measurements in finished.items() if measurements}
    if not measured or not has_matplotlib():
        return
    figures = importlib.import_module("matplotlib.figure")
    patches = importlib.import_module("matplotlib.patches")
    rows = -(-len(measured) // COLUMNS)
    figure = figures.Figure(figsize=(12, 0.7 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for panel, (task, measurements) in zip(panels, measured.items(), strict=False):
        draw_case(panel, task, measurements)
    for panel in list(panels)[len(measured) :]:
        panel.set_axis_off()
    key = [patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=key, loc="outside upper center", ncols=len(key), frameon=False)
    figure.savefig(path, dpi=80)


def draw_case(panel: Any, case: CaseName, measurements: Sequence[Measurement]) -> None:
    """Plot one case: one bar for each program, labelled with its value."""
    for row, one in enumerate(measurements):
        shares = sorted(ratios(one, measurements[0]))
        middle = statistics.median(shares)
        panel.barh(row, middle, color=bar_color(case, one.name))
        panel.plot([shares[0], shares[-1]], [row, row], color="k", linewidth=1.2)
        panel.annotate(
            f"{middle:.2f}",
            (max(shares[-1], middle), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    panel.set_yticks(range(len(measurements)), [one.name for one in measurements])
    panel.set_ylim(max(len(measurements), 3) - 0.4, -0.6)
    panel.margins(x=0.12)
    panel.set_xlim(left=0)
    panel.axvline(1.0, color="k", linewidth=0.6, linestyle=":")
    title = textwrap.wrap(f"{case}: {CASE_DESCRIPTIONS[case].rstrip('.')}", 50)
    panel.set_title("\n".join(title), fontsize=10, loc="left")
    panel.set_xlabel(f"speed relative to {measurements[0].name}", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def bar_color(case: CaseName, name: str) -> str:
    """Bar colour of a program; cases of jaxformer alone use one colour."""
    alone = all(program.function.startswith(JAXFORMER_MODULE) for program in CASES[case])
    default, option, peer = COLOURS.values()
    if name == OUR_NAME or (alone and name == "remat dots"):
        return default
    return option if alone or name.startswith(OUR_NAME) else peer
