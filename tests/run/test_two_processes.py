"""Two processes with two devices each train like one process with four."""

import json
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.translate import __main__ as translate
from jaxformer import data
from jaxformer.run import pretraining, text_generation
from jaxformer.run.command_line import parse_run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from tests.run.processes import (
    CORPUS_LINES,
    TINY_RUN_FLAGS,
    distributed_flags,
    free_port,
    start_python,
    wait_for_output,
)

PRETRAIN, GENERATE = (
    f"jaxformer.run.{name}" for name in ("pretraining:pretrain", "text_generation:generate")
)
TRANSLATE = "experiments.translate.__main__:main"
ROWS, STEPS, HALF = 8, 6, 3
SHARED = ("--mesh.data", "2", "--mesh.fsdp", "2")  # rows differ between processes
SPLIT = ("--mesh.context", "2", "--mesh.tensor", "2")  # all processes need all rows
TEXT = ["--checkpoint", "two", "--prompt", "7: the ", "--max-new-tokens", "9"]
RUN = [
    *TINY_RUN_FLAGS,
    *("--steps", str(STEPS), "--schedule-steps", str(STEPS)),
    *("--save-every", str(HALF), "--evaluate-every", "2"),
]
# Several programs for two processes, one after the other: JAX starts slowly. This leaves what each
# process read and fed, what it refused and what it found.
PROGRAMS = """
import importlib, json, os, sys
import numpy as np
from jaxformer.run.command_line import parse_run
from experiments.translate import __main__ as translate
from jaxformer import data, parallel

rank, runs = int(sys.argv[1]), json.loads(sys.argv[2])
join, joined, batches, asked = parallel.initialize_distributed, [], {}, []
parallel.initialize_distributed = lambda hosts: joined or joined.append(join(hosts))
batch_at, rows_at = data.Batches.__getitem__, data.PackedRows.__getitem__


def note_batch(self, step):
    before = len(asked)
    batch = batch_at(self, step)
    batches.update({f"{name}_{step}": x for name, x in batch._asdict().items()})
    batches[f"asked_{step}"] = np.concatenate(asked[before:])
    return batch


def note_rows(self, index):
    asked.append(np.atleast_1d(index))
    return rows_at(self, index)


data.Batches.__getitem__, data.PackedRows.__getitem__ = note_batch, note_rows
for name, folders, program, arguments in runs:
    os.chdir(folders[rank])
    batches.clear()
    module, _, function = program.partition(":")
    module, said = importlib.import_module(module), ""
    try:
        arguments += ["--hosts.process-id", str(rank)]
        found = getattr(module, function)(parse_run(module.RUNS, "", arguments))
    except ValueError as error:
        found, said = "", str(error)
    np.savez(f"{name}-{rank}.npz", said=said, found=str(found), **batches)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("hosts")
    for name, lines in (("here", CORPUS_LINES), ("there", CORPUS_LINES[:-1])):
        (place / name / "texts").mkdir(parents=True)
        (place / name / "texts" / "all.txt").write_text("".join(lines))
    return place


def one_process(place, output, *more):
    """A run by four of this process's devices."""
    by_one(place, pretraining.pretrain, [*RUN, "--output", output, *more])
    return place / "here" / output


def by_one(place, program, arguments):
    runs = sys.modules[program.__module__].RUNS
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place / "here")
        return program(parse_run(runs, "", [*arguments, "--devices", "4"]))


def cut(run, output):
    """A copy of a run that was stopped half way."""
    copy = run.with_name(output)
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").glob("[0-9]*"):
        if int(path.name) > HALF:
            shutil.rmtree(path)
    return copy


@pytest.fixture(scope="module")
def whole(place):
    """A run of one process from beginning to end."""
    return one_process(place, "whole", *SHARED)


@pytest.fixture(scope="module")
def runs(place, whole):
    """What two processes leave: of a run, stopped and resumed; of one's, resumed on another mesh.

    And of one that each was to train on another text.
    """
    cut(whole, "moved")
    here, there = str(place / "here"), str(place / "there")
    trained = [
        ("stopped", [here, here], [*SHARED, "--output", "two", "--steps", str(HALF)]),
        ("resumed", [here, here], [*SHARED, "--output", "two", "--resume"]),
        ("moved", [here, here], [*SPLIT, "--output", "moved", "--resume"]),
        ("differ", [here, there], [*SHARED, "--output", "differ"]),
    ]
    wanted = [(name, at, PRETRAIN, [*RUN, *more]) for name, at, more in trained]
    wanted.insert(3, ("text", [here, here], GENERATE, [*TEXT, "--mesh.tensor", "4"]))
    return by_two(place, wanted)


def by_two(place, wanted):
    """What two processes leave of programs: their names, folders, modules and arguments."""
    common = distributed_flags(free_port())
    wanted = [(name, at, module, [*more, *common]) for name, at, module, more in wanted]
    both = [
        start_python(place / "here", "-c", PROGRAMS, str(i), json.dumps(wanted)) for i in (0, 1)
    ]
    outputs = wait_for_output(both)
    assert [run.returncode for run in both] == [0, 0], outputs
    results = {}
    for name, folders, *_ in wanted:
        parts = [np.load(Path(at) / f"{name}-{rank}.npz") for rank, at in enumerate(folders)]
        results[name] = [dict(part) for part in parts]
    return results


def numbers(folder):
    """Of every update its loss and the norm of its gradient, and what held-out text needs."""
    lines = read_json_lines(folder / "metrics.jsonl")
    wanted = ("loss", "gradient_norm", "held_out_bits_per_byte", "final_held_out_bits_per_byte")
    figures = [
        (line["step"], name, line[name]) for line in lines for name in wanted if name in line
    ]
    return [(at, name, x) for at, name, x in figures if at == STEPS or not name.startswith("final")]


def parameters(folder):
    with Checkpoints(folder / "checkpoints") as checkpoints:
        assert checkpoints.latest_step() == STEPS
        file = folder / "checkpoints" / str(STEPS) / "description" / "metadata"
        arrays = json.loads(file.read_text())["arrays"]
        wanted = {p: jax.ShapeDtypeStruct(shape, dtype) for p, (dtype, shape, _) in arrays.items()}
        return jax.device_get(checkpoints.restore(STEPS, wanted))


def assert_same_run(actual, expected, *, atol=1e-7):
    of_actual, of_expected = numbers(actual), numbers(expected)
    assert [line[:2] for line in of_actual] == [line[:2] for line in of_expected]
    assert len(of_actual) == 2 * STEPS + 4
    np.testing.assert_allclose(
        [line[2] for line in of_actual], [line[2] for line in of_expected], rtol=1e-6
    )
    arrays, expected_arrays = parameters(actual), parameters(expected)
    assert arrays.keys() == expected_arrays.keys() and len(arrays) > 32
    for path, x in arrays.items():
        np.testing.assert_allclose(x, expected_arrays[path], rtol=1e-5, atol=atol, err_msg=path)


@pytest.mark.slow
def test_two_processes_that_stop_and_go_on_train_as_one_process(place, whole, runs):
    assert [str(part["said"]) for part in runs["resumed"]] == ["", ""]
    assert_same_run(place / "here" / "two", whole)


@pytest.mark.exhaustive
def test_one_process_goes_on_where_two_stopped(place, whole, runs):
    cut(place / "here" / "two", "taken-over")
    assert_same_run(one_process(place, "taken-over", *SHARED, "--resume"), whole)


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped_on_another_mesh(place, whole, runs):
    assert [str(part["said"]) for part in runs["moved"]] == ["", ""]
    assert_same_run(place / "here" / "moved", whole, atol=1e-5)


@pytest.mark.parametrize(
    "name, steps, shares",
    [
        ("stopped", range(HALF), [slice(0, 4), slice(4, 8)]),
        ("resumed", range(HALF, STEPS), [slice(0, 4), slice(4, 8)]),
        ("moved", range(HALF, STEPS), [slice(0, 8), slice(0, 8)]),
    ],
    ids=["shared", "shared, resumed", "split"],
)
@pytest.mark.slow
def test_each_process_reads_its_rows_and_no_others(place, runs, name, steps, shares, monkeypatch):
    monkeypatch.chdir(place / "here")
    text = pretraining.prepare_corpus(parse_run(pretraining.RUNS, "", RUN))
    indices, rows_at = [], data.PackedRows.__getitem__
    batches = data.Batches(text.train, batch_size=ROWS, seed=0)
    for step in steps:
        with monkeypatch.context() as patch:
            patch.setattr(
                data.PackedRows, "__getitem__", lambda s, i: indices.append(i) or rows_at(s, i)
            )
            expected = batches[step]
        for part, rows in zip(runs[name], shares, strict=True):
            np.testing.assert_array_equal(part[f"asked_{step}"], indices[-1][rows])
            for field, x in zip(expected._fields, expected, strict=True):
                np.testing.assert_array_equal(part[f"{field}_{step}"], x[rows])
    assert len(indices) == len(steps) and all(len(i) == ROWS for i in indices)


@pytest.mark.slow
def test_two_processes_write_the_text_that_one_does(place, runs):
    text = by_one(place, text_generation.generate, TEXT)
    assert text.startswith("7: the ") and len(text) > 10
    assert [str(part["found"]) for part in runs["text"]] == [text, text]


@pytest.mark.exhaustive
def test_two_processes_train_as_one_along_any_axis(place, whole):
    axes = ("data", "fsdp", "context", "tensor")
    meshes = {axis: ["--mesh.data", "1", f"--mesh.{axis}", "4"] for axis in axes}
    here = [str(place / "here")] * 2
    wanted = [
        (axis, here, PRETRAIN, [*RUN, *mesh, "--output", axis]) for axis, mesh in meshes.items()
    ]
    results = by_two(place, wanted)
    for axis in axes:
        assert [str(part["said"]) for part in results[axis]] == ["", ""]
        # Adam makes a step of the sign of a gradient that is zero but for rounding.
        assert_same_run(place / "here" / axis, whole, atol=1e-5)


@pytest.mark.exhaustive
def test_two_processes_translate_as_one_does(place):
    """Decoding on the mesh while they train, and at the end with an average of checkpoints."""
    arguments = [*("tiny", "--steps", "8", "--save-every", "4", "--evaluate-every", "4"), *SHARED]
    here = [str(place / "here")] * 2
    by_two(place, [("read", here, TRANSLATE, [*arguments, "--output", "read"])])
    by_one(place, translate.main, [*arguments, "--output", "read-by-one"])
    actual, expected = (
        read_json_lines(place / "here" / name / "metrics.jsonl") for name in ("read", "read-by-one")
    )
    timed = ("time", "tokens_per_second", "mfu")
    assert [sorted(line) for line in actual] == [sorted(line) for line in expected]
    assert {"exact_greedy", "final_exact_greedy", "final_exact_beam"} <= set().union(*actual)
    for line, other in zip(actual, expected, strict=True):
        for name in line.keys() - timed:
            assert line[name] == pytest.approx(other[name], rel=1e-5), (name, line)
    for name in ("tensorboard", "metrics.jsonl", "tokenizer.json"):
        assert (place / "here" / "read" / name).exists()


@pytest.mark.slow
def test_processes_that_read_other_texts_are_refused_before_anything_is_written(place, runs):
    both = [str(part["said"]) for part in runs["differ"]]
    assert both[0] == both[1]
    lines = both[0].splitlines()
    assert lines[0] == "The processes have different settings:"
    assert [re.sub("[0-9a-f]{64}", "DIGEST", line) for line in lines[1:]] == [
        f"  data.{name}: DIGEST in process 0, DIGEST in process 1" for name in ("held_out", "train")
    ]
    assert not (place / "here" / "differ" / "tokenizer.json").exists()
    assert not (place / "there" / "differ").exists()
