"""A folder is one run's at a time, whatever ends the run."""

import os
import subprocess
import sys
import threading

import pytest

from experiments import ablate, benchmark
from experiments.locks import held
from experiments.training_run import new_folder
from tests.experiments.processes import ROOT

HOLDER = """
import sys
from pathlib import Path
from experiments.locks import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder "run"."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_holder_is_named(holder, tmp_path):
    message = (
        rf"run is in use by process {holder.pid} on \S+, since \S+ \S+ \S+:\n  (.*\n)+"
        "Wait for it, end it, or pass another --output"
    )
    with pytest.raises(ValueError, match=message), held(tmp_path / "run"):
        pytest.fail("both hold it")


def test_a_holder_that_was_killed_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / "lock").exists()
    with held(tmp_path / "run"):
        (tmp_path / "run" / "result").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result"]


def test_a_folder_into_which_nothing_came_goes(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "ours"):
        with held(tmp_path / name):
            assert (tmp_path / name / "lock").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_next_holder_is_not_misled_by_a_lock_that_was_removed(tmp_path, monkeypatch):
    """It opened the file of the one before, which ends and removes it before it is locked."""
    before, opened = held(tmp_path / "run"), os.open
    before.__enter__()
    (tmp_path / "run" / "result").touch()

    def late(*arguments):
        number = opened(*arguments)
        monkeypatch.undo()
        before.__exit__(None, None, None)
        return number

    monkeypatch.setattr(os, "open", late)
    with held(tmp_path / "run"):
        with pytest.raises(ValueError, match="in use by process"), held(tmp_path / "run"):
            pytest.fail("both hold it")


def test_names_are_taken_by_making_them(tmp_path):
    found = []

    def take():
        found.append(new_folder(str(tmp_path / "run"), 1).name)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"run-{i}" for i in range(1, 9)]


@pytest.mark.parametrize(
    "main, asked",
    [
        (ablate.main, lambda folder: ablate.Ablation(axis="norm", size="smoke", output=folder)),
        (benchmark.main, lambda folder: benchmark.Benchmark(preset="smoke", output=folder)),
    ],
    ids=["study", "benchmark"],
)
def test_whatever_writes_into_a_folder_holds_it(main, asked, tmp_path):
    with held(tmp_path), pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
        main(asked(tmp_path))
