"""What two processes do if one is missing, has other settings, or is killed."""

import re
import shlex
import signal
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.parallel import DistributedConfig
from jaxformer.run import early_end, pretraining
from jaxformer.run.command_line import parse_run
from jaxformer.run.pretraining import RUNS
from jaxformer.run.run_config import setup_devices
from jaxformer.run.trainer import explained_early_end
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from tests.run.processes import (
    CORPUS_LINES,
    TIMEOUT_SECONDS,
    TINY_RUN_FLAGS,
    distributed_flags,
    free_port,
    slurm_environment,
    start_python,
    wait_for_output,
)

SILENCE = 10  # seconds after which a process counts as dead
STEPS = 200
RUN = [
    *(*TINY_RUN_FLAGS, "--steps", str(STEPS), "--schedule-steps", str(STEPS)),
    *("--save-every", "20", "--evaluate-every", "500"),
]
HEARTBEAT = ["--hosts.heartbeat-timeout", str(SILENCE)]
MESHES = {1: ["--mesh.data", "2"], 2: ["--mesh.data", "2", "--mesh.fsdp", "2"]}
WORDS = re.compile(
    r"\nIf one process stops, all stop\. To resume, start every process again with:\n"
    r"  (python -m experiments\.pretrain tiny .*)\n"
)
FAILED = re.compile(
    r"\nerror: Communication with the other processes failed: .*\n"
    r"The last good checkpoint is (\d+) in (\w+)\.\n"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("lost") / "here"
    (place / "texts").mkdir(parents=True)
    (place / "texts" / "all.txt").write_text("".join(CORPUS_LINES))
    return place


def begin(place, output, *, devices):
    """Two processes, where they were before or anew."""
    more = ["--resume"] if (place / output).exists() else []
    options = [
        *RUN,
        *MESHES[devices],
        "--output",
        output,
        *distributed_flags(free_port(), devices=devices),
        *HEARTBEAT,
    ]
    module = ["-m", "experiments.pretrain", *options, *more]
    return [start_python(place, *module, "--hosts.process-id", str(rank)) for rank in (0, 1)]


def updates(output):
    file = output / "metrics.jsonl"
    return len(re.findall('"loss"', file.read_text())) if file.exists() else 0


def checkpoints(output):
    folders = (output / "checkpoints").glob("*")
    return sorted(int(path.name) for path in folders if path.name.isdecimal())


def strike(both, rank, number, output, *, after=40):
    """Send a signal to one of two processes, so many updates later.

    Returns what both say in the end, and how many seconds later that is.
    """
    since, before = time.monotonic(), updates(output)
    while updates(output) < before + after:
        alive = all(process.poll() is None for process in both)
        assert alive and time.monotonic() - since < TIMEOUT_SECONDS, wait_for_output(both)
        time.sleep(0.01)
    both[rank].send_signal(number)
    sent = time.monotonic()
    return wait_for_output(both), time.monotonic() - sent


def assert_left_with_words(place, output, rank, *, devices):
    """Kill one of two, and read what the other one says."""
    both = begin(place, output, devices=devices)
    survivor = both[1 - rank]
    outputs, seconds = strike(both, rank, signal.SIGKILL, place / output)
    assert both[rank].returncode == -signal.SIGKILL
    assert survivor.returncode in (1, -signal.SIGABRT) and seconds < SILENCE + 20
    words = WORDS.search(outputs[1 - rank])
    assert words, outputs[1 - rank]
    flags = [x for x in survivor.args[3:] if x != "--resume"]
    command = shlex.split(words[1])
    assert command[:3] == ["python", "-m", "experiments.pretrain"]
    assert parse_run(RUNS, "", command[3:]) == parse_run(RUNS, "", [*flags, "--resume"])
    if failed := FAILED.search(outputs[1 - rank]):
        assert (int(failed[1]) in checkpoints(place / output)) and failed[2] == output


@pytest.mark.slow
def test_the_other_process_ends_and_a_signal_to_one_stops_both(place):
    assert_left_with_words(place, "few", 0, devices=1)
    both = begin(place, "few", devices=2)
    outputs, _ = strike(both, 0, signal.SIGTERM, place / "few", after=20)
    assert [process.returncode for process in both] == [143, 143], outputs
    saved = checkpoints(place / "few")[-1]
    for words in outputs:
        assert f"\nInterrupted. The last good checkpoint is {saved} in few.\n" in words
    lines = read_json_lines(place / "few" / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, saved + 1))
    assert 20 < saved < STEPS


@pytest.mark.exhaustive
def test_two_processes_are_killed_in_turn_and_end_where_one_process_does(place):
    for rank, devices in ((1, 1), (1, 2), (0, 2)):
        assert_left_with_words(place, "many", rank, devices=devices)
    both = begin(place, "many", devices=2)
    outputs = wait_for_output(both)
    assert [process.returncode for process in both] == [0, 0], outputs
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        whole = [*RUN, *MESHES[2], "--devices", "4", "--output", "whole"]
        pretraining.pretrain(parse_run(RUNS, "", whole))
    actual, expected = (
        read_json_lines(place / name / "metrics.jsonl") for name in ("many", "whole")
    )
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (actual, expected)]
    assert len(losses[0]) == len(losses[1]) == STEPS
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert checkpoints(place / "many")[-3:] == checkpoints(place / "whole")[-3:]


@pytest.mark.exhaustive
def test_a_process_that_fails_alone_does_not_leave_the_other_waiting(place):
    """It has no texts; the other one trains."""
    (place.parent / "empty").mkdir()
    options = ["-m", "experiments.pretrain", *RUN, *MESHES[2], "--output", "alone"]
    options += [*distributed_flags(free_port()), *HEARTBEAT]
    folders = (place, place.parent / "empty")
    both = [
        start_python(at, *options, "--hosts.process-id", str(i)) for i, at in enumerate(folders)
    ]
    since = time.monotonic()
    outputs = wait_for_output(both)
    assert time.monotonic() - since < 40 + 2 * SILENCE
    assert all(process.returncode in (1, -signal.SIGABRT) for process in both)
    assert "error: texts does not exist.\n" in outputs[1]


@pytest.mark.parametrize(
    "error, cause",
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: peer\nmore"), "UNKNOWN: peer"),
        (OSError("Saving failed:\nno room"), "Saving failed:\nno room"),
    ],
    ids=["devices", "checkpoint"],
)
def test_what_may_be_the_fault_of_others_ends_a_process_at_once(
    error, cause, tmp_path, capsys, monkeypatch
):
    def leave(status):
        raise SystemExit(status)

    def end():
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        with explained_early_end(RUNS["tiny"], checkpoints, tmp_path, ""):
            raise error

    monkeypatch.setattr(early_end.os, "_exit", leave)
    with pytest.raises(type(error)):
        end()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SystemExit) as status:
        end()
    assert status.value.code == 1
    assert capsys.readouterr().err.endswith(
        f"\nerror: Communication with the other processes failed: {cause}\n"
        "No checkpoint was saved yet.\n"
    )


def test_hosts_without_distributed_are_refused():
    lone = replace(
        RUNS["tiny"],
        hosts=DistributedConfig(coordinator_address="a:1", num_processes=2, process_id=0),
    )
    with pytest.raises(
        ValueError, match=r"coordinator_address='a:1'.* is for several .* pass --distributed"
    ):
        with setup_devices(lone):
            pass


@pytest.fixture(scope="module")
def begun(place):
    """What processes say that do not get to begin: two at two ports, and two unlike.

    The first of them is process 1, which finds nobody.
    """
    unlike = [*MESHES[2], "--output", "unlike", "--distributed", "--devices"]
    port, ports = free_port(), [free_port() for _ in range(2)]
    wanted = [
        (
            [
                *distributed_flags(number),
                "--output",
                "in-vain",
                "--hosts.initialization-timeout",
                "4",
                "--hosts.process-id",
                rank,
            ],
            {},
        )
        for number, rank in zip(ports, "10", strict=True)
    ]
    wanted += [
        ([*unlike, "2"], slurm_environment(0, port)),
        ([*unlike, "1", "--steps", "300", "--seed", "7"], slurm_environment(1, port)),
    ]
    module = ["-m", "experiments.pretrain", *RUN, *HEARTBEAT]
    runs = [start_python(place, *module, *more, **variables) for more, variables in wanted]
    results = zip(wait_for_output(runs), [run.returncode for run in runs], strict=True)
    return list(results), ports


@pytest.mark.slow
def test_processes_that_wait_in_vain_say_for_whom_and_where(place, begun):
    """Nobody is at the address, and one of two is missing: they are at two ports."""
    for (output, status), rank, port in zip(begun[0][:2], "10", begun[1], strict=True):
        assert status == 1, output
        first, last, hint = output.splitlines()
        assert first.startswith(
            "Waiting up to 4 seconds for the other processes; this one is DistributedConfig("
            f"coordinator_address='localhost:{port}', num_processes=2, process_id={rank}, "
            "initialization_timeout=4, heartbeat_timeout=10). "
        )
        expected = {
            "0": f"1 of 2 processes connected to localhost:{port} in 4 seconds; missing: 1. Check ",
            "1": f"Process 1 of 2 got no answer in 4 seconds at localhost:{port}: ",
        }
        assert last.startswith(f"error: {expected[rank]}")
        assert hint.startswith("(Set JAXFORMER_TRACEBACK=1")
    assert not (place / "in-vain").exists()


@pytest.mark.slow
def test_two_processes_that_were_started_differently_both_refuse_with_every_number(place, begun):
    """They find each other by what Slurm tells them."""
    for output, status in begun[0][2:]:
        assert status == 1, output
        words = output[output.index("error: ") :].splitlines()
        assert words[:-1] == [
            "error: The processes have different settings:",
            "  devices: 2 in process 0, 1 in process 1",
            "  local devices: [2, 'cpu'] in process 0, [1, 'cpu'] in process 1",
            "  seed: 0 in process 0, 7 in process 1",
            f"  steps: {STEPS} in process 0, 300 in process 1",
        ]
        assert words[-1].startswith("(Set JAXFORMER_TRACEBACK=1")
    assert not (place / "unlike").exists()
