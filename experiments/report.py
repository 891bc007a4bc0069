"""Write experiments/README.md from the stored results of studies and benchmarks.

    python -m experiments.report

All tables and plots are generated from the JSON results. The summary of a stored run or benchmark
in README.md and the guides is also replaced, between these two comments:

    <!-- results/NAME -->
    <!-- end of results/NAME -->
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments import rope_placement
from experiments.benchmark.report import markdown_sections, plot_cases, speed_summary
from experiments.studies.plots import write_report
from experiments.studies.results import STUDY_KEYS, THROUGHPUT_FILE, ResultDict, read_json
from experiments.studies.sizes import ablation_sizes
from experiments.studies.tables import ablation_report
from experiments.studies.variants import AXES, make_variants
from jaxformer.run.command_line import parse_args, readable_errors
from jaxformer.run.plot import plot_run
from jaxformer.run.pretraining import RUNS
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.progress import format_count, format_duration

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (HERE.parent / "README.md", *sorted((HERE / "guides").glob("*.md")))
STUDIES_HEADER = """\
# Studies

Written by `python -m experiments.report` from the JSON in `results`; findings are in
[LOG.md](LOG.md).

The variants of a study differ in one choice. For each seed they share the text, its order, the
number of steps and, unless it is the choice under study, the learning-rate schedule. A difference
is the mean over seeds of the paired difference from the baseline (the first row), with its 95%
confidence interval by Student's t; where the interval contains zero, the difference is not
significant. Losses are in nats per token of held-out text.

All but `mixer` use the split of version 0.1, which held out whole documents by a hash of their
names. Newer versions hold out an exact fraction of the bytes, so a new run has other held-out text.

Each study has several sizes: `--size smoke` (a test of minutes), `--size cpu` (the results below),
`--size untied` (the same with an untied head) and `--size gpu` (about 100M parameters).
`--run NAME` varies a run of `experiments.pretrain` instead. The same command resumes an interrupted
study.

    python -m experiments.rope_placement --size cpu
    python -m experiments.ablate --axis position --size cpu      # one of {axes}

"""
SPEED_HEADER = """
# Speed

Each program runs in a separate process, and the rounds of all programs are interleaved. A ratio is
the median over rounds of the first program's time divided by another's in the same round, with
minimum and maximum. "Of peak FLOP/s" is the FLOPs of the model, without recomputation, relative to
matmuls of square matrices on all cores or devices; "of peak bandwidth" is the bytes of parameters
and cache that must be read, relative to plain copies. The peaks are the best of rounds interleaved
with rounds of the case. The first round includes imports, initialization and compilation. Temporary
memory is the compiler's estimate without arguments and results; peak memory counts the whole
process.

A machine is called idle if its load average in the minute before the start was below 1. To measure
again on an idle machine, and update all tables and plots, here and in the top README:

    python -m experiments.benchmark --preset peers --output experiments/results/benchmark-peers
    python -m experiments.report
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Options: the results folder and the files to write.

    Attributes:
        results: Folder of studies and benchmarks; their tables and plots are written into it.
        readme: Report to write.
    """

    results: Path = RESULTS
    readme: Path = HERE / "README.md"

    def __post_init__(self):
        if not self.results.is_dir():
            raise ValueError(f"results must name a folder; {self.results} is not a folder.")


def main(results: Path = RESULTS, readme: Path = HERE / "README.md") -> None:
    """Write the report, each study's tables and plots, and the snippets in the guides."""
    parts = [STUDIES_HEADER.format(axes=", ".join(AXES))]
    for folder in sorted(path.parent for path in results.glob("*/study.json")):
        parts.append(study_section(folder, readme.parent))
    if not list(results.glob("*-gpu/study.json")):
        parts.append("\nNo study of the size `gpu` has been run yet.\n")
    speeds = sorted(path.parent for path in results.glob("*/benchmark.json"))
    if speeds:
        parts.append(SPEED_HEADER)
    parts += [benchmark_section(folder, readme.parent) for folder in speeds]
    readme.write_text("\n".join(parts))
    studies = len(list(results.glob("*/study.json")))
    print(f"{readme}: {studies} studies, {len(speeds)} benchmarks.")
    snippets = result_snippets(results)
    for page in PAGES if results == RESULTS else ():
        page.write_text(replace_snippets(page.read_text(), snippets))


def result_snippets(results: Path) -> dict[str, str]:
    """Snippets for the guides, keyed by the folder name of the run or benchmark."""
    snippets = {
        path.parent.name: run_snippet(path.parent) for path in results.glob("*/metrics.jsonl")
    }
    for path in results.glob("*/benchmark.json"):
        snippets[path.parent.name] = speed_summary(read_json(path, "cases"))
    return snippets


def replace_snippets(page: str, snippets: Mapping[str, str]) -> str:
    """The page with the snippet of each result replaced between its comment markers."""
    for name, text in snippets.items():
        begin, end = f"<!-- results/{name} -->", f"<!-- end of results/{name} -->"
        head, marker, rest = page.partition(begin)
        if marker and end not in rest:
            raise ValueError(f"{begin} has no matching {end}.")
        if marker:
            page = f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def run_snippet(folder: Path) -> str:
    """Plot a stored run; returns its snippet."""
    lines = read_json_lines(folder / "metrics.jsonl")
    plot_run(folder / "run.png", lines, gzip=lines[-1]["gzip_bits_per_byte"])
    return run_summary(folder)


def run_summary(folder: Path) -> str:
    """Result and duration of a stored run, as text."""
    lines = read_json_lines(folder / "metrics.jsonl")
    last, first = lines[-1], lines[0]
    return (
        f"`Held-out loss: {last['final_held_out_bits_per_byte']:.3f} bits per byte (gzip -9: "
        f"{last['gzip_bits_per_byte']:.3f}).` From step {first['step']} to the end of the "
        f"evaluation at step {last['step']} it took {last['time'] - first['time']:.0f} seconds."
    )


def benchmark_section(folder: Path, readme_folder: Path) -> str:
    """Report section of one benchmark: its command, tables and plot."""
    results = read_json(folder / "benchmark.json", "flags", "size", "machine", "cases")
    sections_text = markdown_sections(results)
    (folder / "table.md").write_text("\n\n".join(sections_text) + "\n")
    plot_cases(folder / "plot.png", results["cases"])
    command_text = f"{results['flags']} --output {folder.relative_to(readme_folder.parent)}"
    picture = f"![Speed]({(folder / 'plot.png').relative_to(readme_folder)})"
    parts = [f"`python -m experiments.benchmark {command_text}`", *sections_text, picture]
    return "\n\n".join(parts) + "\n"


def study_section(folder: Path, readme_folder: Path) -> str:
    """Report section of one study: its command, provenance, tables and plots."""
    study = read_json(folder / "study.json", *STUDY_KEYS)
    results = [read_json(path, "variant") for path in sorted((folder / "variants").glob("*.json"))]
    title, order, make_table = study_layout(study)
    command_text = rerun_command(study, order, folder.relative_to(readme_folder.parent))
    results = order_variants(study, results, command_text)
    speeds = read_json(folder / THROUGHPUT_FILE) if (folder / THROUGHPUT_FILE).exists() else {}
    if missing := [name for name in study["variants"] if name not in speeds]:
        raise ValueError(
            f"{folder / THROUGHPUT_FILE} has no measurements of {', '.join(missing)}. All variants "
            f"are timed together; measure them again with\n  {command_text}"
        )
    results = [{**numbers, "speeds": speeds[numbers["variant"]["name"]]} for numbers in results]
    table = make_table(results)
    write_report(folder, results, table, title=title, length=study["length"])
    pictures = [
        f"![{title}]({path.relative_to(readme_folder)})" for path in sorted(folder.glob("*.png"))
    ]
    parts = [
        f"\n## {title}",
        f"`{command_text}`",
        provenance(study, results),
        table.rstrip(),
        *pictures,
    ]
    return "\n\n".join(parts) + "\n"


def study_layout(study: ResultDict) -> tuple[str, list[str], Callable[[list[ResultDict]], str]]:
    """Title of a study, the order of its variants, and the function that formats its tables."""
    if study["study"] == "rope_placement":
        order = [setting.name for setting in rope_placement.SETTINGS]
        return f"RoPE placement ({study['size']})", order, rope_placement.format_report
    axis = study["study"].removeprefix("ablate_")
    run = {**RUNS, **ablation_sizes(axis)}[study["size"]]
    order = [variant.name for variant in make_variants(axis, run)] if axis in AXES else []
    title = f"Ablation: {axis} ({study['size']})"
    return title, order, partial(ablation_report, axis)


def order_variants(
    study: ResultDict, results: list[ResultDict], command_text: str
) -> list[ResultDict]:
    """Results in the order of the study's variants.

    Raises:
        ValueError: The study is not finished.
    """
    names = [numbers["variant"]["name"] for numbers in results]
    missing = [name for name in study["variants"] if name not in names]
    if missing:
        raise ValueError(
            f"{study['study']} ({study['size']}) has results of {len(names)} of "
            f"{len(study['variants'])} variants; missing: {', '.join(missing)}. Finish it with\n  "
            f"{command_text}"
        )
    return [results[names.index(name)] for name in study["variants"]]


def provenance(study: ResultDict, results: list[ResultDict]) -> str:
    """Model, data, duration, machine and versions of the results, as text."""
    machine = results[0]["machine"]
    seconds = sum(n["seconds"] + n["compile_seconds"] + n["measure_seconds"] for n in results)
    dates = sorted({numbers["date"] for numbers in results})
    model = results[0]["variant"]["model"]
    return (
        f"{results[0]['parameters']:,} parameters in the baseline ({model['num_layers']} layers, "
        f"model_dim {model['model_dim']}, vocabulary of {model['vocab_size']:,}). Each run: "
        f"{study['tokens']:,} tokens ({study['steps']:,} steps of {study['batch_size']} x "
        f"{study['length']}; epochs: {study['epochs']:g}) of the {study['corpus']}; "
        f"{len(study['seeds'])} seeds; {study['held_out_tokens']:,} held-out tokens. All runs: "
        f"{format_count(study['tokens'] * len(study['seeds']) * len(results))} tokens, "
        f"{format_duration(seconds)} on {machine['devices']} device(s) of {machine['cores']} cores "
        f"({machine['device']}, {machine['processor']}), jax {machine['jax']}, "
        f"{' to '.join(dates)}."
    )


def rerun_command(study: ResultDict, order: list[str], folder: Path) -> str:
    """The command that reproduces or resumes the study."""
    name, size = study["study"], study["size"]
    module = name if name == "rope_placement" else f"ablate --axis {name.removeprefix('ablate_')}"
    base = f"--run {size}" if size in RUNS else f"--size {size}"
    numbers = " ".join(
        f"--{flag.replace('_', '-')} {study[flag]}" for flag in ("steps", "batch_size", "length")
    )
    seeds = f"--seeds {len(study['seeds'])} --first-seed {study['seeds'][0]}"
    variants_text = " ".join(shlex.quote(variant) for variant in study["variants"][1:])
    variants = "" if study["variants"] == order else f" --variants {variants_text}"
    return f"python -m experiments.{module} {base} {numbers} {seeds}{variants} --output {folder}"


if __name__ == "__main__":
    with readable_errors():
        options = parse_args(Report, __doc__)
        main(options.results, options.readme)
