"""A process may end before any change of a file: what it has saved is whole, the next goes on.

Each life is a process of its own, forked before JAX has begun anything:
`python -m tests.training.test_crashes FOLDER` runs all and prints how many there were.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training.checkpoints import Checkpoints

STEPS, KEEP = 5, 1
LOSSES = {1: 2.0, 2: 1.0, 3: 3.0, 4: 2.5, 5: 2.2}  # the best is not among the newest
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
FORK = multiprocessing.get_context("fork")


def state(step):
    values = np.random.default_rng(step).normal(size=(3, 5))
    return {"kernel": jnp.asarray(np.float32(values)), "step": jnp.int32(step)}


def assert_is(actual, step):
    for name, x in state(step).items():
        np.testing.assert_array_equal(actual[name], x)


def train(folder, report):
    """Go on from the newest, as a run does."""
    with Checkpoints(folder, max_to_keep=KEEP) as checkpoints:
        done = 0
        if checkpoints.all_steps():
            done = checkpoints.latest_valid_step()
            assert_is(checkpoints.restore(done, state(0)), done)
            checkpoints.delete_old()
        report.send(("found", done))
        for step in range(done + 1, STEPS + 1):
            checkpoints.save(step, state(step), {"seed": step}, loss=LOSSES[step])
            checkpoints.wait_until_finished()
            report.send(("saved", step))
        checkpoints.delete_old()
        assert checkpoints.all_steps() == [2, 5] and checkpoints.best_step() == 2
    report.send(("lived", 0))


def die_before(number, folder):
    """End this process, without any clean-up, before the n-th change of a file in the folder."""
    left = [number]

    def hook(event, args):
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in CHANGES or writes) and str(args[0]).startswith(str(folder)):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

    sys.addaudithook(hook)


def life(folder, passed):
    """What a process said that ends after so many changes; None lets it live."""
    reader, writer = FORK.Pipe(duplex=False)

    def run():
        if passed is not None:
            die_before(passed, folder)
        train(folder, writer)

    child = FORK.Process(target=run)
    child.start()
    writer.close()
    messages = []
    while True:
        try:
            messages.append(reader.recv())
        except EOFError:
            break
    child.join()
    assert child.exitcode in (0, 9), child.exitcode
    return messages


def look(folder, messages):
    """The next process finds what was saved, or the one after, and ends as a whole run does."""
    saved = max((step for word, step in messages if word in ("saved", "found")), default=0)
    again = life(folder, None)
    assert again[-1] == ("lived", 0) and again[0][1] in (saved, saved + 1), (messages, again)
    assert {"2", "5"} == {path.name for path in folder.iterdir()}


def crash(base, every):
    """A death before every n-th change, then one more early in the life that follows."""
    passed = deaths = 0
    while True:
        folder = base / str(passed)
        messages = life(folder, passed)
        if ("lived", 0) in messages:
            return deaths
        if folder.exists():
            messages += life(folder, passed % 5)
            look(folder, messages)
        deaths += 1
        passed += every


@pytest.mark.slow
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_wherever_a_process_ends_the_next_one_goes_on_as_if_it_had_not(tmp_path, every):
    command = [sys.executable, "-m", "tests.training.test_crashes", str(tmp_path), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) * every >= 100


if __name__ == "__main__":
    print(crash(Path(sys.argv[1]), int(sys.argv[2])))
