"""Training processes that are killed and resumed end bitwise equal to uninterrupted ones.

Each strikes itself, before a change of a file that has a number: nothing here depends on a clock.
Every such moment of the folder of checkpoints: tests/training/test_crashes.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.run import pretraining
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from tests.run.processes import CORPUS_LINES, TIMEOUT_SECONDS

ROOT = Path(pretraining.__file__).parents[2]
STEPS = 16
# A shell starts background jobs so that they ignore SIGINT; this one is to be interrupted.
START = """
import atexit, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup, under which tests may run, ignores
number, moment, output = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv[-1]
made = 0

def count(event, args):
    global made
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.rename", "os.mkdir", "os.rmdir"):
        if output in os.fspath(args[0] if isinstance(args[0], (str, os.PathLike)) else ""):
            made += 1
            if made == moment:
                os.kill(os.getpid(), number)

sys.addaudithook(count)
atexit.register(lambda: print(made))
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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts, and the outcome of a run that nothing happened to, in "whole"."""
    place = tmp_path_factory.mktemp("faults")
    (place / "texts").mkdir()
    (place / "texts" / "all.txt").write_text("".join(CORPUS_LINES))
    whole = run(place, "whole")
    assert whole.returncode == 0, whole.stderr
    (place / "changes").write_text(whole.stdout.split()[-1])
    return place


def run(place, output, *more, number=0, moment=0):
    """A process until its end, by the signal of this number at a moment if there is one."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(place / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    environment.pop("JAXFORMER_TRACEBACK", None)
    return subprocess.run(
        [sys.executable, "-c", START, str(int(number)), str(moment), *ARGUMENTS]
        + [*more, "--output", output],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def complete(output):
    folders = (output / "checkpoints").glob("*")
    return sorted(int(path.name) for path in folders if path.name.isdecimal())


def strike(place, output, number, moment):
    """The same command every time goes on where the last process ended. Returns what is saved."""
    struck = run(place, output, "--resume-or-begin", number=number, moment=moment)
    saved = complete(place / output)[-1:]
    killed = number == signal.SIGKILL
    assert struck.returncode == (-9 if killed else 128 + number), struck.stderr
    if not killed:
        message = f"Interrupted. The last good checkpoint is {saved[0]} in {output}."
        assert message in struck.stderr
        losses = [line for line in numbers(place / output) if "loss" in line]
        assert losses[-1]["step"] == saved[0]
    return saved


def assert_goes_on(place, output):
    last = run(place, output, "--resume-or-begin")
    assert last.returncode == 0, last.stderr
    assert_as_if_nothing_had_happened(place, output)


def numbers(output):
    """All that was written in order, but for times and speeds."""
    timed = ("time", "tokens_per_second", "mfu")
    lines = read_json_lines(output / "metrics.jsonl")
    return [{name: x for name, x in line.items() if name not in timed} for line in lines]


def state(output):
    """Every array of the newest checkpoint."""
    with Checkpoints(output / "checkpoints") as checkpoints:
        step = checkpoints.latest_valid_step()
        file = output / "checkpoints" / str(step) / "description" / "metadata"
        arrays = json.loads(file.read_text())["arrays"]
        wanted = {p: jax.ShapeDtypeStruct(shape, dtype) for p, (dtype, shape, _) in arrays.items()}
        return step, jax.device_get(checkpoints.restore(step, wanted))


def assert_as_if_nothing_had_happened(place, output):
    actual, expected = numbers(place / output), numbers(place / "whole")
    assert [line["step"] for line in actual if "loss" in line] == list(range(1, STEPS + 1))
    assert actual == expected
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
    name = "held_out_bits_per_byte"
    losses = {line["step"]: line[name] for line in numbers(place / "whole") if name in line}
    assert [*losses] == [*range(6, STEPS, 6)]
    with Checkpoints(place / "whole" / "checkpoints") as checkpoints:
        losses[STEPS] = checkpoints.saved_loss(STEPS)  # rated, but no line that a longer run lacks
        best = min(losses, key=lambda step: (losses[step], -step))
        assert checkpoints.best_step() == best
        assert checkpoints.all_steps() == sorted({best, STEPS - 4, STEPS - 2, STEPS})


@pytest.mark.slow
def test_a_run_that_was_killed_and_interrupted_ends_bitwise_as_one_that_was_not(place):
    changes = int((place / "changes").read_text())
    interrupted = strike(place, "few", signal.SIGTERM, changes // 4)
    assert [0] < interrupted < strike(place, "few", signal.SIGKILL, changes // 3) < [STEPS]
    assert_goes_on(place, "few")


@pytest.mark.exhaustive
def test_wherever_a_run_is_killed_it_ends_bitwise_as_one_that_was_not(place):
    changes = int((place / "changes").read_text())
    for moment in range(1, changes, changes // 20):
        strike(place, str(moment), signal.SIGKILL, moment)
        assert_goes_on(place, str(moment))


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_other_signals_interrupt_too(place, number):
    changes = int((place / "changes").read_text())
    strike(place, number.name, number, changes // 4)
    assert_goes_on(place, number.name)


@pytest.mark.slow
def test_a_run_killed_during_its_last_evaluation_repeats_it(place):
    shutil.copytree(place / "whole", place / "late")
    metrics = place / "late" / "metrics.jsonl"
    *lines, last = metrics.read_text().splitlines(keepends=True)
    assert "final_held_out_bits_per_byte" in last
    metrics.write_text("".join(lines))
    checkpoints = place / "late" / "checkpoints"  # and while it removed an older checkpoint
    shutil.copytree(checkpoints / str(STEPS - 4), checkpoints / f"{STEPS - 6}.orbax-checkpoint-tmp")
    for _ in range(2):  # the second finds nothing left to do
        assert_goes_on(place, "late")
