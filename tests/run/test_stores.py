"""Addresses of object stores, which are looked at before anything is done."""

from dataclasses import replace
from pathlib import Path

import pytest
from etils import epath

from experiments import ablate
from experiments.benchmark.run import Benchmark
from experiments.translate import runs
from jaxformer.run import evaluation, exporting, pretraining, text_generation
from jaxformer.run.command_line import parse_args, parse_run
from jaxformer.run.loading import load_run
from jaxformer.run.object_store import local_path, storage_path
from jaxformer.run.output_folder import lock_folder, open_output_folder

PROGRAMS = {
    "pretrain": lambda *flags: parse_run(pretraining.RUNS, "", [*flags]),
    "translate": lambda *flags: parse_run(runs.RUNS, "", [*flags]),
    "export": lambda *flags: parse_run(exporting.RUNS, "", [*flags]),
    "generate": lambda *flags: parse_run(text_generation.RUNS, "", [*flags]),
    "evaluate": lambda *flags: parse_args(evaluation.Evaluate, "", ["x", *flags]),
    "ablate": lambda *flags: parse_args(ablate.Ablation, "", ["--axis", "norm", *flags]),
    "benchmark": lambda *flags: parse_args(Benchmark, "", [*flags]),
}


@pytest.mark.parametrize(
    "program, address, message",
    [
        *((program, "", "a path must not be empty; got ''.") for program in PROGRAMS),
        ("pretrain", "nope://b/run", "nope:// is not a supported store; use gs://, s3:// or az:/"),
        ("evaluate", "file:///x/run", "file:// is not a supported store; use gs://, s3:// or az"),
        ("generate", "gs://", "gs:// has no bucket; pass gs://bucket/run."),
    ],
)
def test_an_address_that_no_store_has_is_refused_by_its_flag(program, address, message, capsys):
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program]("--output", address)
    assert ended.value.code == 2
    output = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"Error parsing --output: {message}" in output


def test_a_path_is_read_as_it_is():
    for text in ("runs/a b", "None", ".", "gs://bucket/run", "12:30/run"):
        expected = None if text == "None" else Path(text)
        assert PROGRAMS["pretrain"]("--output", text).output == expected
    assert str(storage_path(Path("gs://bucket/run"))) == "gs://bucket/run"
    assert local_path(Path("gs://bucket/run")) == Path("runs/stores/gs/bucket/run")
    assert PROGRAMS["export"]("--output", "None").output == Path("None")


@pytest.fixture(scope="module")
def unreachable():
    """Stores of which one has no answer and the other may only be read."""

    @epath.register_path_cls("shut://")
    class Shut(epath.gpath.PosixGPath):
        def exists(self):
            raise RuntimeError("no credentials")  # of a library's own kind

        is_dir = exists

    @epath.register_path_cls("readonly://")
    class ReadOnly(epath.gpath.PosixGPath):
        def exists(self):
            return False

        def mkdir(self, **_):
            pass

        def write_bytes(self, _):
            raise PermissionError("may not write")


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(
    "address, message",
    [
        ("shut://b/run", "shut:/.*b/run cannot be written: no credentials$"),
        ("readonly://b/run", "readonly:/.*b/run cannot be written: may not write$"),
    ],
)
def test_a_store_that_takes_nothing_is_refused_before_anything_is_there(
    address, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = replace(pretraining.RUNS["tiny"], output=Path(address))
    with pytest.raises(ValueError, match=message), open_output_folder(run):
        pytest.fail("it would train")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unreachable")
def test_a_model_in_a_store_that_does_not_answer_is_refused():
    with pytest.raises(ValueError, match="cannot be read: no credentials$"):
        load_run(Path("shut://b/run"))


def test_outputs_that_need_a_local_folder_refuse_a_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "^gs://bucket/run is in an object store; pass a local folder instead.$"
    with pytest.raises(ValueError, match=message), lock_folder(Path("gs://bucket/run")):
        pytest.fail("it would begin")
    with pytest.raises(ValueError, match=message):
        exporting.export(exporting.Export(checkpoint=Path("x"), output=Path("gs://bucket/run")))
    assert not list(tmp_path.iterdir())
