"""A process may end before any change of a file: what it has saved is whole, the next goes on."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxformer.training.folders import Folder

STEPS, KEEP = 5, 2
LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.2}  # the best is not among the newest
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")


class Death(BaseException):
    """What no handler of errors takes for one."""


class Ending:
    """Lets so many changes of files pass, and none after: the dead do not clean up."""

    left: int | None = None

    def __call__(self, event, args):
        if self.left is None:
            return
        if event in CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            self.left -= 1
            if self.left < 0:
                raise Death


ENDING = Ending()
sys.addaudithook(ENDING)


def state(step):
    return np.random.default_rng(step).normal(size=(2, 5))


def save(folder, step):
    """As a run does: three files, of which one is in a folder of its own."""
    folder.prepare()
    beside = folder.beside(step) / "state"
    beside.mkdir(parents=True)
    for part, rows in enumerate(state(step)):
        with open(beside / f"{part}.npy", "wb") as file:
            np.save(file, rows)
    folder.complete(step, {"loss": LOSSES[step]})


def newest(folder):
    """Its step after a look at every byte of every checkpoint; 0 if there is none."""
    steps = folder.steps()
    for step in steps:
        assert folder.damage(step) == ""
        found = [np.load(folder.at(step) / "state" / f"{part}.npy") for part in (0, 1)]
        np.testing.assert_array_equal(found, state(step))
    return max(steps, default=0)


def files(path: Path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def changes_of_a_whole_run(path):
    ENDING.left = 10**6
    try:
        for step in range(1, STEPS + 1):
            save(Folder(path, keep=KEEP), step)
    finally:
        made, ENDING.left = 10**6 - ENDING.left, None
    assert Folder(path, keep=KEEP).steps() == [2, 4, 5]
    return made


@pytest.mark.parametrize("twice", [False, True])
def test_wherever_a_process_ends_the_next_one_goes_on_as_if_it_had_not(tmp_path, twice):
    """Also where the next one ends after one change, while it cleans up."""
    made = changes_of_a_whole_run(tmp_path / "whole")
    assert made > 50
    for passed in range(made):
        path, done = tmp_path / str(passed), 0
        for left in (passed, 1) if twice else (passed,):
            folder = Folder(path, keep=KEEP)
            with pytest.raises(Death):
                ENDING.left = left
                try:
                    for step in range(done + 1, STEPS + 1):
                        save(folder, step)
                        done = step
                    folder.prepare()  # as the next run would, though all is there
                    ENDING.left = -1
                    os.mkdir(path)
                finally:
                    ENDING.left = None
            found = newest(Folder(path, keep=KEEP))
            assert found in (done, done + 1)  # what was saved has stayed; the next may be complete
            done = found
        for step in range(done + 1, STEPS + 1):
            save(Folder(path, keep=KEEP), step)
        folder = Folder(path, keep=KEEP)
        folder.prepare()
        folder.drop_old()
        assert files(path) == files(tmp_path / "whole"), passed
