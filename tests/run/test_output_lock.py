"""An output folder is locked by one run at a time, however that run ends."""

import errno
import fcntl
import os
import subprocess
import sys
import threading

import pytest

from experiments import ablate
from experiments.benchmark import run as benchmark
from jaxformer.run.output_folder import lock_folder, new_folder
from tests.run.processes import ROOT

HOLDER = """
import sys
from pathlib import Path
from jaxformer.run.output_folder import lock_folder
with lock_folder(Path(sys.argv[1])):
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


@pytest.mark.slow
def test_the_holder_is_named(holder, tmp_path):
    message = (
        rf"run is locked by process {holder.pid} on \S+\. Wait until it ends, stop it, or pass"
    )
    with pytest.raises(ValueError, match=message), lock_folder(tmp_path / "run"):
        pytest.fail("both hold it")


@pytest.mark.slow
def test_a_holder_that_was_killed_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / ".lock").exists()
    with lock_folder(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text().startswith(f"{os.getpid()} on ")


def test_an_empty_output_folder_is_removed(tmp_path):
    with lock_folder(tmp_path / "mine"), lock_folder(tmp_path / "ours"):
        (tmp_path / "ours" / "result").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_is_no_folder(name, tmp_path):
    (tmp_path / "file").touch()
    message = f"^output must name a folder; .*{name} is a file, or in one.$"
    with pytest.raises(ValueError, match=message), lock_folder(tmp_path / name):
        pytest.fail("it would begin")


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def unknown(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unknown)
    with lock_folder(tmp_path / "run"), lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "result").touch()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "result"]


def test_names_are_taken_by_making_them(tmp_path):
    names = []

    def take():
        names.append(new_folder(str(tmp_path / "run"), 1).name)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == [f"run-{i}" for i in range(1, 9)]


@pytest.mark.parametrize(
    "main, options_in",
    [
        (ablate.main, lambda folder: ablate.Ablation(axis="norm", size="smoke", output=folder)),
        (benchmark.main, lambda folder: benchmark.Benchmark(preset="smoke", output=folder)),
    ],
    ids=["study", "benchmark"],
)
def test_whatever_writes_into_a_folder_holds_it(main, options_in, tmp_path):
    with (
        lock_folder(tmp_path),
        pytest.raises(ValueError, match=f"locked by process {os.getpid()} on"),
    ):
        main(options_in(tmp_path))
