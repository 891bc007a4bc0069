"""Processes that train are killed; whoever goes on from there ends bitwise where nobody was."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from experiments import pretrain
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines

ROOT = Path(pretrain.__file__).parents[1]
LINES = [f"{n}: the {w} fox jumps over {n * n} lazy dogs\n" for n in range(60) for w in ("a", "b")]
STEPS = 80
PATIENCE = 240  # seconds for any one process
# A shell starts background jobs so that they ignore SIGINT; this one is to be interrupted. The
# limit of a file's size fails as a full disk does, where files are written.
START = """
import resource, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup, under which tests may run, ignores
from experiments.starting import start_process
start_process()
if (limit := int(sys.argv.pop(1))):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_module("experiments.pretrain", run_name="__main__")
"""
ARGUMENTS = [
    *("tiny", "--corpus", "TextFiles(path='texts')", "--tokenizer", "ByteLevel()"),
    *("--model.vocab-size", "257", "--model.model-dim", "16", "--model.num-layers", "1"),
    *("--length", "16", "--optimizer.optimizer", "AdamW()"),
    *("--steps", str(STEPS), "--schedule-steps", str(STEPS), "--batch-size", "4"),
    *("--save-every", "2", "--evaluate-every", "6", "--evaluate-rows", "3", "--log-every", "1"),
    *("--held-out", "0.1", "--devices", "1", "--scan", "--no-tensorboard", "--cache", "cache"),
    *("--sample-tokens", "None"),
]


class Moment(NamedTuple):
    """When a process gets which signal.

    After such a "share" of the time that the whole run took, so many "updates" after its first,
    after so many updates and then while it is "writing" a checkpoint, while it is "packing" text,
    or when it is "trained" but not yet evaluated.
    """

    sent: signal.Signals
    kind: str
    after: float


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts, and the outcome of a run that nothing happened to, in "whole"."""
    place = tmp_path_factory.mktemp("faults")
    (place / "texts").mkdir()
    (place / "texts" / "all.txt").write_text("".join(LINES))
    since = time.monotonic()
    run = start(place, "whole")
    said = ended(run)
    assert run.returncode == 0, said
    (place / "seconds").write_text(str(time.monotonic() - since))
    return place


def start(place, output, *more, limit=0):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(place / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    environment.pop("JAXFORMER_TRACEBACK", None)
    return subprocess.Popen(
        [sys.executable, "-c", START, str(limit), *ARGUMENTS, "--output", output, *more],
        cwd=place,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin(place, output):
    """The same command every time: it goes on where the last process was killed, or begins."""
    return start(place, output, "--resume-or-begin", "--cache", f"cache-{output}")


def complete(output):
    found = (output / "checkpoints").glob("*")
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def written(output, since=0.0):
    """How many updates were written to the metrics since a time."""
    file = output / "metrics.jsonl"
    times = re.findall(r'"time": ([\d.]+), "loss"', file.read_text() if file.exists() else "")
    return sum(float(at) > since for at in times)


def over(output):
    """Whether the evaluation that ends a run was written."""
    file = output / "metrics.jsonl"
    return file.exists() and "final_held_out" in file.read_text().rpartition("\n")[0]


def ended(run):
    """What a process said, when it has ended by itself or after long enough."""
    try:
        return run.communicate(timeout=PATIENCE)[1]
    finally:
        run.kill()


def being_written(output):
    """Whether there is more of a checkpoint than there is of the newest complete one."""
    unfinished = [int(path.stem) for path in (output / "checkpoints").glob("*.unfinished")]
    return max(unfinished, default=0) > max(complete(output), default=0)


def strike(run, output, moment):
    """Send a signal at its moment, if it comes; returns what the process then said."""
    since, whole = time.time(), float((output.parent / "seconds").read_text())
    while run.poll() is None and time.time() - since < PATIENCE:
        time.sleep(0.001)
        share = (time.time() - since) / whole
        done = share if moment.kind == "share" else written(output, since)
        if moment.kind == "packing":
            done = (output.parent / f"cache-{output.name}").exists()
        elif moment.kind == "trained":
            done = complete(output)[-1:] == [STEPS]
        if done < moment.after:
            continue
        if moment.kind == "writing":
            if not being_written(output):
                continue
            run.send_signal(signal.SIGSTOP)
            time.sleep(0.01)
            if not being_written(output):  # it was quicker
                run.send_signal(signal.SIGCONT)
                continue
        run.send_signal(moment.sent)
        run.send_signal(signal.SIGCONT)
        break
    return ended(run)


def survive(place, output, moments):
    """Returns how many different checkpoints were the newest when a process ended."""
    newest, waiting, missed = set(), list(moments), 0
    while waiting:
        run, moment = begin(place, output), waiting.pop(0)
        said = strike(run, place / output, moment)
        if run.returncode == 0:  # it was at its end before its moment came: from the beginning
            missed += 1
            assert missed <= 5 * len(moments), f"{moment} does not come or does nothing: {said}"
            assert_as_if_nothing_had_happened(place, output)
            shutil.rmtree(place / output)
            if moment.kind == "share":  # of a time that was slower: sooner, or it may never come
                moment = moment._replace(after=0.7 * moment.after)
            waiting.append(moment)
            continue
        killed = moment.sent == signal.SIGKILL
        assert run.returncode == (-9 if killed else 128 + moment.sent), (moment, said)
        if killed and moment.kind == "writing":
            assert being_written(place / output)
        if not killed:
            saved = complete(place / output)[-1]
            assert f"Interrupted. The last good checkpoint is {saved} in {output}." in said
            assert written(place / output) == saved
        newest.update(complete(place / output)[-1:])
        if over(place / output):  # struck when nothing was left to do: from the beginning
            again = begin(place, output)
            said = ended(again)
            assert again.returncode == 0, said
            assert_as_if_nothing_had_happened(place, output)
            shutil.rmtree(place / output)
    run = begin(place, output)
    said = ended(run)
    assert run.returncode == 0, said
    return len(newest)


def numbers(output):
    """All that was written in order, but for times and speeds."""
    timed = ("time", "tokens_per_second", "utilisation")
    lines = read_json_lines(output / "metrics.jsonl")
    return [{name: x for name, x in line.items() if name not in timed} for line in lines]


def state(output):
    """Every array of the newest checkpoint."""
    with Checkpoints(output / "checkpoints") as checkpoints:
        step = checkpoints.newest()
        file = output / "checkpoints" / str(step) / "description.json"
        arrays = json.loads(file.read_text())["arrays"]
        wanted = {p: jax.ShapeDtypeStruct(shape, dtype) for p, (dtype, shape, _) in arrays.items()}
        return step, jax.device_get(checkpoints.restore(step, wanted))


def assert_as_if_nothing_had_happened(place, output):
    found, expected = numbers(place / output), numbers(place / "whole")
    assert [line["step"] for line in found if "loss" in line] == list(range(1, STEPS + 1))
    assert found == expected
    (last, arrays), (whole, expected) = state(place / output), state(place / "whole")
    assert last == whole == STEPS
    assert arrays.keys() == expected.keys() and len(arrays) > 20
    for path, x in arrays.items():
        assert np.asarray(x).tobytes() == np.asarray(expected[path]).tobytes(), path
    names = [
        sorted(p.name for p in (place / o / "checkpoints").iterdir()) for o in (output, "whole")
    ]
    assert names[0] == names[1]


@pytest.mark.slow
def test_the_newest_and_the_best_checkpoint_are_left(place):
    lines = [line for line in numbers(place / "whole") if "held_out_bits_per_byte" in line]
    assert [line["step"] for line in lines] == list(range(6, STEPS, 6))
    best = min(lines, key=lambda line: (line["held_out_bits_per_byte"], -line["step"]))["step"]
    with Checkpoints(place / "whole" / "checkpoints") as checkpoints:
        assert checkpoints.best() == best
        assert checkpoints.steps() == sorted({best, STEPS - 4, STEPS - 2, STEPS})


@pytest.mark.slow
def test_a_run_that_was_killed_and_interrupted_ends_bitwise_as_one_that_was_not(place):
    moments = [
        Moment(signal.SIGKILL, "updates", 1),  # before the first checkpoint
        Moment(signal.SIGKILL, "writing", 5),
        Moment(signal.SIGHUP, "updates", 4),
        Moment(signal.SIGINT, "writing", 4),
        Moment(signal.SIGKILL, "updates", 7),
    ]
    assert survive(place, "few", moments) >= 4
    assert_as_if_nothing_had_happened(place, "few")


@pytest.mark.exhaustive
def test_a_run_killed_at_twenty_moments_ends_bitwise_as_one_that_was_not(place):
    draw = random.Random(0)
    moments = [
        *(Moment(signal.SIGKILL, "writing", draw.randint(2, 5)) for _ in range(8)),
        *(Moment(signal.SIGKILL, "updates", draw.randint(3, 6)) for _ in range(6)),
        *(Moment(signal.SIGKILL, "share", draw.uniform(0, 1)) for _ in range(6)),
    ]
    draw.shuffle(moments)
    moments = [
        Moment(signal.SIGKILL, "share", 0.05),  # during imports
        *(Moment(signal.SIGKILL, "packing", 1) for _ in range(2)),
        *(Moment(signal.SIGKILL, "updates", 1) for _ in range(2)),
        *moments,
        *(Moment(signal.SIGKILL, "trained", 1) for _ in range(2)),
    ]
    assert survive(place, "many", moments) >= 6
    assert_as_if_nothing_had_happened(place, "many")


@pytest.mark.slow
def test_a_run_killed_during_its_last_evaluation_makes_it_up(place):
    shutil.copytree(place / "whole", place / "late")
    metrics = place / "late" / "metrics.jsonl"
    *lines, last = metrics.read_text().splitlines(keepends=True)
    assert "final_held_out_bits_per_byte" in last
    metrics.write_text("".join(lines))
    checkpoints = place / "late" / "checkpoints"  # and while it removed an older checkpoint
    shutil.copytree(checkpoints / str(STEPS - 4), checkpoints / f"{STEPS - 6}.unfinished")
    for _ in range(2):  # the second finds nothing left to do
        run = start(place, "late", "--resume-or-begin")
        said = ended(run)
        assert run.returncode == 0, said
        assert_as_if_nothing_had_happened(place, "late")
    run = start(place, "late", "--resume")
    assert f"has {STEPS} steps already; pass --steps N with N above." in ended(run)
    assert run.returncode == 1


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on_when_there_is_room(place):
    shutil.copytree(place / "whole", place / "full")
    for step in (STEPS, STEPS - 2):
        shutil.rmtree(place / "full" / "checkpoints" / str(step))
    before = complete(place / "full")
    run = start(place, "full", "--resume", limit=20_000)
    said = ended(run)
    assert run.returncode == 1
    assert re.fullmatch(
        rf"error: Saving checkpoint {STEPS - 2} in \S*/full/checkpoints failed: (.*\n)?"
        rf".*File too large.*The last good checkpoint is {STEPS - 4}\.\n"
        r"\(JAXFORMER_TRACEBACK=1 shows where this came from\.\)\n",
        said,
    ), said
    assert complete(place / "full") == before
    assert not list((place / "full" / "checkpoints").glob("*.unfinished"))
    run = start(place, "full", "--resume")
    said = ended(run)
    assert run.returncode == 0, said
    assert_as_if_nothing_had_happened(place, "full")
