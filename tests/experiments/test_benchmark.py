"""Contests: who takes part, in which order, and what is said of them."""

import json
import os
import statistics
from dataclasses import asdict, replace

import jax
import pytest

from experiments import report
from experiments.benchmark import jaxformer_programs as ours
from experiments.benchmark import linen_programs as linen
from experiments.benchmark import run as benchmark
from experiments.benchmark.cases import (
    CARD_CASES,
    CASE_DESCRIPTIONS,
    CASES,
    JAXFORMER_MODULE,
    PEER_CASES,
    PRESETS,
    WorkCounts,
    count_work,
)
from experiments.benchmark.report import (
    COLOURS,
    case_table,
    load_text,
    markdown_sections,
    peak_share,
    plot_cases,
    ratios,
    speed_summary,
)
from experiments.benchmark.runner import Measurement, Program, run_interleaved

SMOKE = PRESETS["smoke"]
OTHERS = """
import os, signal, time

def slow(size, seconds):
    return lambda: time.sleep(seconds)

def dying(size, after, killed=False):
    left = [after]
    def one():
        left[0] -= 1
        if left[0] < 0 and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if left[0] < 0:
            raise MemoryError("no room for " + str(size.length))
    return one
"""


@pytest.mark.slow
def test_programs_take_turns(tmp_path, monkeypatch, capsys):
    """One is ten times as fast; one never comes; three end: before, in between, without a word."""
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(tmp_path)
    entries = (
        Program("first", "others:slow", (), {"seconds": 0.2}),
        Program("faster", "others:slow", (), {"seconds": 0.02}),
        Program("absent", "others:slow", ("no_such_module",)),
        Program("broken", "others:dying", (), {"after": 0}),
        Program("dying", "others:dying", (), {"after": 3}),
        Program("killed", "others:dying", (), {"after": 2, "killed": True}),
    )
    timings = {timing.name: timing for timing in run_interleaved("train", entries, SMOKE, 4)}
    assert statistics.median(ratios(timings["faster"], timings["first"])) > 2
    assert timings["absent"].skip_reason == "needs no_such_module"
    assert (
        timings["broken"].skip_reason
        == timings["dying"].skip_reason
        == "MemoryError: no room for 32"
    )
    assert timings["killed"].skip_reason.startswith("BrokenProcessPool: ")
    assert timings["dying"].seconds == [] and len(timings["first"].seconds) == 4
    assert timings["first"].peak_bytes > 1e6 and timings["first"].first_seconds >= 0.2
    assert "train, round 4/4: first 0." in capsys.readouterr().out
    text = case_table("train", list(timings.values()), WorkCounts(tokens=80), WorkCounts())
    assert "| train | seconds | tokens/s | speed relative to first |" in text
    assert "| absent | needs no_such_module |" in text
    nobody = [timings["broken"]]
    assert "| broken | MemoryError: no room for 32 |" in case_table(
        "train", nobody, WorkCounts(), WorkCounts()
    )


def test_tables_by_hand(tmp_path):
    timings = [
        Measurement("one", [2.0, 4.0, 2.0], first_seconds=9.0),
        Measurement("two", [1.0, 1.0, 4.0], temp_bytes=3_000_000),
    ]
    assert ratios(timings[1], timings[0]) == [2.0, 4.0, 0.5]
    lines = case_table(
        "train", timings, WorkCounts(100, 50.0), WorkCounts(flops=100.0)
    ).splitlines()
    assert lines[0].startswith(
        "| train | seconds | tokens/s | of peak FLOP/s | speed relative to one |"
    )
    assert lines[2] == "| one | 2 | 50 | 25% | 1.00 (1.00 to 1.00) | 9.0 s |  |  |"
    assert lines[3] == "| two | 1 | 100 | 50% | 2.00 (0.50 to 4.00) |  | 3 MB |  |"
    machine = case_table("machine", timings, WorkCounts(None, 4e9, 6e9), WorkCounts())
    assert "| 2 GFLOP |" in machine and "| 6.0 GB |" in machine
    plot_cases(tmp_path / "plot.png", {"train": [vars(timing) for timing in timings]})
    assert (tmp_path / "plot.png").stat().st_size > 1000


def results_of(**cases):
    """As a benchmark has them: seconds of each round by case and program."""
    return {
        "flags": "--preset smoke",
        "size": asdict(SMOKE),
        "machine": {"cores": 2, "architecture": "x86_64", "processor": "fast"},
        "versions": {"jax": "0.10"},
        "date": "2026-11-22",
        "load": 0.3,
        "peaks": {},
        "cases": {
            task: [
                vars(Measurement(name, seconds, device_kind="cpu"))
                for name, seconds in programs.items()
            ]
            for task, programs in cases.items()
        },
    }


def test_a_summary_by_hand():
    results = results_of(
        train={"a": [4.0, 3.0, 8.0], "b": [2.0, 1.0, 2.0], "c": [], "jaxformer": [2.0, 1.0, 2.0]},
        decode={"b": [3.0], "jaxformer, whole": [1.0], "jaxformer": [2.0]},
        machine={"products": [1.0], "copies": [1.0]},
    )
    assert speed_summary(results).splitlines() == [
        "| speed relative to | train | decode |",
        "|:---|---:|---:|",
        "| a | 3.00 |  |",
        "| b | 1.00 | 1.50 |",
        "",
        load_text(results),
    ]
    head, *cases = markdown_sections(results)
    assert "3 rounds. 2 cores (x86_64, fast), devices: cpu. jax 0.10. 2026-11-22." in head
    assert [text.splitlines()[0] for text in cases] == [
        CASE_DESCRIPTIONS[task] for task in ("train", "decode", "machine")
    ]
    share = count_work("train", SMOKE, 1).flops / 2.0 / (8 * 2 * 128**3)
    assert 0.1 < share < 0.9 and f"| {share:.0%} | 3.00" in cases[0].splitlines()[-1]


def test_shares_are_of_the_peak_of_the_same_rounds():
    """What the machine reached beside the case counts; without that, its own case."""
    results = results_of(
        train={"jaxformer": [2.0, 2.0]}, machine={"products": [1.0], "copies": [1.0]}
    )
    alone = count_work("train", SMOKE, 1).flops / 2.0 / (8 * 2 * 128**3)
    assert f"| {alone:.0%} |" in markdown_sections(results)[1]
    beside = [
        vars(Measurement(name, seconds)) for name, seconds in (("p", [4.0, 0.5]), ("c", [1.0, 1.0]))
    ]
    results["peaks"] = {"train": beside}
    assert f"| {alone / 2:.0%} |" in markdown_sections(results)[1]


def test_no_share_of_a_peak_is_above_it():
    assert peak_share(100.0, 2.0, 50.0) == "100%" and peak_share(100.0, 2.0, None) == ""
    assert peak_share(100.0, 2.0, 40.0) == "> 100%"


def test_only_a_quiet_machine_is_called_quiet():
    sentences = {before: load_text({"load": before}) for before in (0.3, 1.0)}
    start = "load average {:.2f} in the minute before the start."
    assert sentences[0.3] == f"Measured on an idle machine: {start.format(0.3)}"
    assert sentences[1.0] == f"Measured on a busy machine: {start.format(1)}"
    results = results_of(train={"a": [1.0], "jaxformer": [1.0]})
    assert (
        speed_summary(results).endswith(f"\n\n{sentences[0.3]}")
        and sentences[0.3] in markdown_sections(results)[0]
    )


def test_each_case_has_a_panel_with_its_title(tmp_path, monkeypatch):
    """A bar for each program, with its value; one key of colours outside the panels."""
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self)
    )
    results = results_of(
        train={"a": [4.0, 3.0], "jaxformer, whole": [2.0, 2.0], "jaxformer": [2.0, 1.5]},
        loss={"torch": [1.0], "jaxformer": [0.5]},
        remat={"gone": []},
        machine={"products": [1.0], "copies": [1.0]},
    )
    plot_cases(tmp_path / "plot.png", results["cases"])
    (figure,) = drawn
    train, loss = figure.axes
    assert train.get_title(loc="left") == f"train: {CASE_DESCRIPTIONS['train'].rstrip('.')}"
    assert loss.get_xlabel() == "speed relative to torch"
    assert [bar.get_width() for bar in train.patches] == [1.0, 1.75, 2.0]
    assert [text.get_text() for text in train.texts] == ["1.00", "1.75", "2.00"]
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()] == list(COLOURS)
    assert not any(panel.get_legend() for panel in figure.axes)


@pytest.mark.parametrize("preset, sizes", [("gpu", [1] * 5), ("smoke", [5])])
def test_on_a_gpu_each_program_has_all_of_its_memory(tmp_path, monkeypatch, preset, sizes):
    met = []

    def turns(task, entries, size, rounds, profiles):
        met.append(len(entries))
        return [Measurement(entry.name, [1.0] * rounds) for entry in entries]

    monkeypatch.setattr(benchmark, "run_interleaved", turns)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    options = benchmark.Benchmark(preset=preset, only=("loss",), output=tmp_path)
    results = json.loads((benchmark.main(options) / "benchmark.json").read_text())
    assert met == sizes and [len(results[at]["loss"]) for at in ("cases", "peaks")] == [3, 2]


@pytest.mark.slow
def test_a_card_has_its_own_cases_and_its_nominal_peak(tmp_path, monkeypatch):
    """FLOP/s of an update as a share of what the chip's makers publish, too."""

    def turns(task, entries, size, rounds, profiles):
        kind = {"device_kind": "NVIDIA H100 80GB HBM3"}
        return [Measurement(entry.name, [0.5] * rounds, **kind) for entry in entries]

    monkeypatch.setattr(benchmark, "run_interleaved", turns)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder = benchmark.main(benchmark.Benchmark(preset="h100", output=tmp_path))
    assert tuple(json.loads((folder / "benchmark.json").read_text())["cases"]) == CARD_CASES
    table = (folder / "table.md").read_text()
    share = count_work("train", PRESETS["h100"], 1).flops / 0.5 / 989e12
    (row,) = (line for line in table.splitlines() if line.startswith("| jaxformer, unrolled"))
    assert f"| {share:.0%} |" in row and "of nominal FLOP/s" in table
    assert table.count("of peak bandwidth") == 3


@pytest.mark.slow
def test_a_benchmark_and_its_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0, 0))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder = tmp_path / "results" / "fast"
    options = benchmark.Benchmark(
        preset="smoke", only=("rotary",), rounds=2, profile=True, output=folder
    )
    assert benchmark.main(options) == folder
    output = capsys.readouterr().out
    load_sentence = "Measured on a busy machine: load average 3.00 in the minute before the start."
    assert "| in real numbers |" in output
    report.main(tmp_path / "results", tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert (folder / "table.md").read_text().rstrip() in text
    flags = f"--preset smoke --only rotary --rounds 2 --output {tmp_path.name}/results/fast"
    assert f"`python -m experiments.benchmark {flags}`" in text
    assert "![Speed](results/fast/plot.png)" in text
    results = json.loads((folder / "benchmark.json").read_text())
    assert results["load"] == 3.0 and load_sentence in text and results["peaks"] == {}
    timings = results["cases"]["rotary"]
    assert [len(timing["seconds"]) for timing in timings] == [2, 2]
    for name in ("in_real_numbers", "jaxformer"):
        tables = (folder / "profile" / f"rotary-{name}" / "profile.md").read_text()
        assert "| forward |" in tables and "| kernel |" in tables


KEPT = report.RESULTS / "benchmark-peers"


def test_the_tables_that_are_committed_are_those_of_the_json():
    """And both READMEs hold them."""
    results = json.loads((KEPT / "benchmark.json").read_text())
    assert set(results["cases"]) == set(PEER_CASES)
    assert all(timing["seconds"] for timings in results["cases"].values() for timing in timings)
    table = (KEPT / "table.md").read_text()
    assert table == "\n\n".join(markdown_sections(results)) + "\n"
    assert table.rstrip() in (report.HERE / "README.md").read_text()
    assert speed_summary(results) in (report.HERE.parent / "README.md").read_text()


def test_work_by_hand():
    """A model of width D with F hidden, L layers, V ids; B rows of T tokens."""
    size = replace(SMOKE, model_dim=8, num_heads=2, num_layers=3, hidden_dim=10, vocab_size=7)
    B, T, D, F, L, V = 2, 32, 8, 10, 3, 7
    layer = 4 * D * D + 3 * D * F
    products = 2 * T * (L * layer) + 2 * T * D * V
    pairs = L * 2 * 2 * T * T * D
    assert count_work("train", size, 2).flops == 3 * B * (products + pairs)
    assert count_work("prefill", size, 2).flops == B * (products + pairs - 2 * (T - 1) * D * V)
    read = L * layer + D * V + (2 * L + 1) * D
    cached = B * L * 2 * D * (size.prompt + size.new_tokens // 2)
    assert count_work("decode", size, 2).bytes_moved == size.new_tokens * 4 * (2 * read + cached)
    half = replace(size, dtype="bfloat16")
    assert count_work("decode", half, 1).bytes_moved == size.new_tokens * 2 * (read + cached)
    assert count_work("attention", size, 1).flops == 6 * B * T * T * D
    assert count_work("compile", size, 1) == WorkCounts()
    one = count_work("decode_1", size, 1)
    assert one.tokens == size.new_tokens and one.bytes_moved == size.new_tokens * 4 * (
        read + cached / B
    )
    experts = replace(size, moe_layers=3, num_experts=16, expert_dim=5)  # two of 16 for a token
    router = 2 * T * L * D * 16
    assert count_work("experts", experts, 1).flops == 3 * B * (products + pairs + router)


SELDOM = "remat none", "remat dots", "1 document a row"
OWN = [
    pytest.param(
        entry,
        id=f"{task}: {entry.name}",
        marks=pytest.mark.exhaustive if entry.name in SELDOM else (),
    )
    for task, entries in CASES.items()
    for entry in entries
    if entry.function.startswith(JAXFORMER_MODULE)
    and task not in ("machine", "long", "vocabulary", "compile", "decode_8", "decode_64")
]


@pytest.fixture
def as_in_a_process_of_its_own():
    """Linen and optax promote; our own functions are strict in their own tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("entry", OWN)
@pytest.mark.slow(but=["attention: jaxformer"])
def test_each_of_ours_does_a_round(entry, as_in_a_process_of_its_own):
    size = replace(SMOKE, batch_size=8)  # a row for each device
    program = getattr(ours, entry.function.split(":")[1])(size, **entry.options)
    program()
    program()  # what the first gave away, the second does not need
    assert getattr(program, "temp_bytes", 0) >= 0


@pytest.mark.parametrize("spread", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.slow
def test_linen_does_a_round(spread, as_in_a_process_of_its_own):
    program = linen.train_program(replace(SMOKE, batch_size=8), all_devices=spread)
    program()
    program()
    assert program.temp_bytes > 0


def test_each_case_is_described():
    assert set(CASE_DESCRIPTIONS) == set(CASES)


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="rounds must be positive; got 0"):
        benchmark.Benchmark(rounds=0)
