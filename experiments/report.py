"""Write experiments/README.md from the stored results of studies and benchmarks.

    python -m experiments.report

Tables and pictures are made anew from the JSON; nothing in them is written by hand. What README.md
and the guides say of a kept run or benchmark stands between two comments and is renewed as well:

    <!-- results/NAME -->
    <!-- end of results/NAME -->
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments import rope_placement
from experiments.benchmark.report import markdown_sections, plot_cases, speed_summary
from experiments.command_line import parse_args, readable_errors
from experiments.pretrain import RUNS
from experiments.studies.plots import plot_extra_metrics, plot_losses
from experiments.studies.results import STUDY_KEYS, THROUGHPUT_FILE, ResultDict, read_json
from experiments.studies.sizes import ABLATION_SIZES
from experiments.studies.tables import ablation_report
from experiments.studies.variants import AXES, make_variants
from experiments.training.plot import plot_run
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.progress import format_count, format_duration, format_times

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (HERE.parent / "README.md", *sorted((HERE / "guides").glob("*.md")))
STUDIES_HEADER = """\
# Studies

Written by `python -m experiments.report` from the JSON in `results`; findings are in
[LOG.md](LOG.md).

All variants of a study are trained alike but for one choice: the same text in the same order for
each seed, the same number of updates and, unless that is what differs, the same schedule. A
difference is the mean over seeds of the difference from the first variant, seed by seed, with its
interval of 95 % by Student's t: where the interval holds zero, these seeds do not tell the two
apart. Losses are nats per token of held-out text.

These were trained with version 0.1's split of the text, which held out whole documents by a digest
of their names; since then the share is exact by length, so a new run holds out other text.

Each study runs at several sizes: `--size smoke` (minutes, to see that it works), `--size cpu` (the
results below; `--size untied` is the same with a head of its own), and `--size gpu` (about 100M
parameters).
`--run NAME` varies a run of `experiments.pretrain` instead. A study that is interrupted goes on
where it was when the same command is given again.

    python -m experiments.rope_placement --size cpu
    python -m experiments.ablate --axis position --size cpu      # one of {axes}

"""
SPEED_HEADER = """
# Speed

Programs take turns, each in a process of its own; a ratio is the median over rounds of the first
one's time divided by another's in the same round, with the least and the most. Of a peak: products
that the model needs, none counted twice, as a share of what square matrices reach on all cores or
devices; bytes of parameters and cache that must be read, of what plain copies reach. Peaks were
measured in turn with the case, under the same load, and the best round counts. The first round has
all before it: imports, parameters, compilation. Working space is what the compiler of ours asks for
beside arguments and results, the process what the whole of it had at most.

A machine is called quiet when fewer than one process ran on average in the minute before the start.
To measure again on such a machine, and renew every table and picture, here and in the top README:

    python -m experiments.benchmark --preset peers --output experiments/results/benchmark-peers
    python -m experiments.report
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Options: the results folder and the files to write.

    Attributes:
        results: Folder of studies and benchmarks; their tables and pictures are written into it.
        readme: The file to write.
    """

    results: Path = RESULTS
    readme: Path = HERE / "README.md"

    def __post_init__(self):
        if not self.results.is_dir():
            raise ValueError(f"results must name a folder; {self.results} is none.")


def main(
    results: Path = RESULTS, readme: Path = HERE / "README.md", pages: Sequence[Path] = PAGES
) -> None:
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
    for page in pages if results == RESULTS else ():
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
            raise ValueError(f"{begin} stands without {end} after it.")
        if marker:
            page = f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def run_snippet(folder: Path) -> str:
    """Plot a kept run; returns its snippet."""
    lines = read_json_lines(folder / "metrics.jsonl")
    plot_run(folder / "run.png", lines, gzip=lines[-1]["gzip_bits_per_byte"])
    return run_summary(folder)


def run_summary(folder: Path) -> str:
    """One sentence: the result of a kept run and its duration."""
    lines = read_json_lines(folder / "metrics.jsonl")
    last, first = lines[-1], lines[0]
    return (
        f"`Held-out text: {last['final_held_out_bits_per_byte']:.3f} bits per byte; gzip -9 needs "
        f"{last['gzip_bits_per_byte']:.3f}.` It took {last['time'] - first['time']:.0f} seconds "
        f"from update {first['step']} to the end of the last evaluation, after update "
        f"{last['step']}."
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
            f"{folder / THROUGHPUT_FILE} has no turns of {', '.join(missing)}; all variants take "
            "turns "
            f"together, so measure them anew with\n  {command_text}"
        )
    results = [{**numbers, "speeds": speeds[numbers["variant"]["name"]]} for numbers in results]
    table = make_table(results)
    (folder / "table.md").write_text(table)
    plot_losses(folder / "plot.png", results, title=title)
    plot_extra_metrics(folder / "more.png", results, length=study["length"])
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
        return f"Where rotary positions act ({study['size']})", order, rope_placement.format_report
    axis = study["study"].removeprefix("ablate_")
    run = {**RUNS, **ABLATION_SIZES}[study["size"]]
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
            f"{study['study']} ({study['size']}) has {len(names)} of {len(study['variants'])} "
            "variants; "
            f"without {', '.join(missing)}. Finish it with\n  {command_text}"
        )
    return [results[names.index(name)] for name in study["variants"]]


def provenance(study: ResultDict, results: list[ResultDict]) -> str:
    """How to reproduce the results: command, commit and machine."""
    machine = results[0]["machine"]
    seconds = sum(n["seconds"] + n["compile_seconds"] + n["measure_seconds"] for n in results)
    dates = sorted({numbers["date"] for numbers in results})
    model = results[0]["variant"]["model"]
    return (
        f"{results[0]['parameters']:,} parameters ({model['num_layers']} layers of width "
        f"{model['model_dim']}, a vocabulary of {model['vocab_size']:,}) in the first variant; "
        "each "
        f"run saw {study['tokens']:,} tokens ({study['steps']:,} updates of {study['batch_size']} "
        f"rows of {study['length']}; {format_times(study['epochs'])} through the text) of the "
        f"{study['corpus']}; {len(study['seeds'])} seeds; "
        f"{study['held_out_tokens']:,} held-out tokens. {format_duration(seconds)} on "
        f"{machine['devices']} device(s) of {machine['cores']} cores ({machine['device']}, "
        f"{machine['processor']}), with jax {machine['jax']}, "
        f"{' to '.join(dates)}; "
        f"{format_count(study['tokens'] * len(study['seeds']) * len(results))} "
        "tokens in all."
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
