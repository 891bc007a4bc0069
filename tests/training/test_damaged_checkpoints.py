"""Any byte of any file of a checkpoint, changed or gone, is noticed, and the one before is used."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.training.checkpoints import Checkpoints, json_digest


def state(step):
    values = np.random.default_rng(step).normal(size=(7, 30))
    return {"step": jnp.int32(step), "kernel": jnp.asarray(np.float32(values))}


def write(folder, *steps, losses=None, **kwargs):
    with Checkpoints(folder, **kwargs) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"seed": step}, loss=(losses or {}).get(step))
    return folder


def assert_is(actual, step):
    for name, x in state(step).items():
        np.testing.assert_array_equal(actual[name], x)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints 2 and 5, never changed."""
    return write(tmp_path_factory.mktemp("saved"), 2, 5)


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def delete(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\n")


def flip(path, place):
    raw = bytearray(path.read_bytes())
    raw[int(place * (len(raw) - 1))] ^= 1
    path.write_bytes(raw)


def flip_first(path):
    flip(path, 0.0)


def flip_middle(path):
    flip(path, 0.5)


def flip_last(path):
    flip(path, 1.0)


# Orbax leaves reads behind that end when their event loop is closed, which nobody can catch.
unraisable = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
HARMS = [delete, empty, truncate, lengthen, flip_first, flip_middle, flip_last]


@unraisable
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.slow
def test_harm_to_any_file_of_the_newest_is_noticed_or_none(copied, harm):
    """Where nobody notices, state and description are what was saved."""
    files = sorted(path for path in (copied / "5").rglob("*") if path.is_file())
    names = [path.relative_to(copied / "5").as_posix() for path in files]
    assert {"description/metadata", "state/_METADATA"} < set(names) and len(names) > 9
    with Checkpoints(copied) as checkpoints:
        for path, name in zip(files, names, strict=True):
            before, messages = path.read_bytes(), []
            harm(path)
            if checkpoints.latest_valid_step(messages.append) == 5:
                assert name != "description/metadata" or harm is lengthen  # by a blank line
                assert_is(checkpoints.restore(5, state(0)), 5)
                assert checkpoints.read_description(5)["seed"] == 5
            else:
                (line,) = messages
                assert line.startswith(f"Checkpoint 5 in {copied} is damaged: "), name
                assert line.endswith("The folder has 2, 5. An earlier one is used."), name
                assert checkpoints.read_description(2)["seed"] == 2
                with pytest.raises(ValueError, match=f"Checkpoint 5 in {copied} is damaged: "):
                    Checkpoints(copied).restore(5, state(0))
            path.write_bytes(before)
        assert checkpoints.latest_valid_step(messages.append) == 5


def harm_an_array(folder):
    """One bit of a file of numbers, which Orbax reads without a word or not at all."""
    flip_middle(max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size))


@unraisable
def test_without_a_step_all_read_the_one_before(copied):
    delete(copied / "5" / "description" / "metadata")
    for read in (
        lambda checkpoints: checkpoints.restore(None, state(0)),
        lambda checkpoints: state(checkpoints.read_description()["seed"]),
    ):
        with Checkpoints(copied) as checkpoints:
            with pytest.warns(UserWarning, match=f"Checkpoint 5 in {copied} is damaged: "):
                assert_is(read(checkpoints), 2)


def test_a_damaged_checkpoint_asked_for_by_its_step_is_an_error(copied):
    flip(copied / "5" / "description" / "metadata", 0.9)
    message = rf"Checkpoint 5 in {copied} is damaged: .*The folder has 2, 5\."
    with Checkpoints(copied) as checkpoints:
        for read in (
            checkpoints.read_description,
            lambda step: checkpoints.restore(step, state(0)),
        ):
            with pytest.raises(ValueError, match=message):
                read(5)


@unraisable
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.pop("description"),
            "its description lacks description; it has arrays, loss, sch",
        ),
        (
            lambda x: x.pop("arrays"),
            "its description lacks arrays; it has description, loss, schema",
        ),
        (
            lambda x: x.pop("schema"),
            "its description lacks schema; it has arrays, description, loss",
        ),
        (lambda x: x.pop("loss"), "its description lacks loss; it has arrays, description, schema"),
        (lambda x: x.update(schema="x"), "its description: schema is a string, not an integer"),
        (lambda x: x.update(schema=True), "its description: schema is a boolean, not an integer"),
        (lambda x: x.update(loss="low"), "its description: loss is a string, not a number"),
        (
            lambda x: x.update(description=[]),
            "its description: description is a list, not an object",
        ),
        (lambda x: x.update(arrays=[]), "its description: arrays is a list, not an object"),
        (lambda x: x["arrays"].update(step=5), "invalid record of array step: 5"),
        (lambda x: x["arrays"]["step"].pop(), r'invalid record of array step: \["int32", \[\]\]'),
        (lambda x: x["arrays"]["kernel"][1].append(-1), r"invalid record .* kernel: .*30, -1\]"),
    ],
)
def test_a_whole_description_that_lacks_something_is_damage(copied, change, message):
    """Its digest is right, so that another program wrote it, or a hand."""
    file = copied / "5" / "description" / "metadata"
    contents = json.loads(file.read_text())
    del contents["digest"]
    change(contents)
    file.write_text(json.dumps(contents | {"digest": json_digest(contents)}))
    message = rf"^Checkpoint 5 in {copied} is damaged: {message}.*(?<!\.)\. The folder has 2, 5"
    with Checkpoints(copied) as checkpoints:
        for read in (
            checkpoints.read_description,
            lambda step: checkpoints.restore(step, state(0)),
        ):
            with pytest.raises(ValueError, match=message):
                read(5)
        assert checkpoints.best_step() is None
        messages = []
        assert checkpoints.latest_valid_step(messages.append) == 2
        assert messages[0].startswith(f"Checkpoint 5 in {copied} is damaged: ")


@unraisable
def test_when_all_are_damaged_no_state_is_given(copied):
    delete(copied / "2" / "description" / "metadata")
    shutil.rmtree(copied / "5" / "state")
    messages = []
    with Checkpoints(copied) as checkpoints:
        with pytest.raises(ValueError, match=rf"no checkpoint in {copied}: 2, 5 are damaged\."):
            checkpoints.latest_valid_step(messages.append)
    assert [line.split(" in ")[0] for line in messages] == ["Checkpoint 5", "Checkpoint 2"]


@unraisable
def test_what_was_passed_over_is_renamed_when_the_run_saves_again(copied):
    harm_an_array(copied / "5")
    (copied / "5.damaged").mkdir()  # of an earlier time
    before = sorted(path.name for path in copied.iterdir())
    with Checkpoints(copied) as checkpoints:
        assert checkpoints.latest_valid_step(lambda _: None) == 2
        assert checkpoints.all_steps() == [2] and checkpoints.latest_step() == 2
        assert sorted(path.name for path in copied.iterdir()) == before
        for step in (4, 5):
            checkpoints.save(step, state(step + 10), {"seed": step + 10})
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [2, 4, 5]
        assert_is(checkpoints.restore(5, state(0)), 15)
        harm_an_array(copied / "5")
        assert checkpoints.latest_valid_step(lambda _: None) == 4
        checkpoints.save(5, state(25), {"seed": 25})
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [2, 4, 5]
        assert_is(checkpoints.restore(5, state(0)), 25)
    assert (copied / "5.damaged" / "state").is_dir()


# Which stay


def test_the_best_stays_beside_the_newest(tmp_path):
    losses = {1: float("nan"), 2: 1.5, 3: 2.0, 4: None, 5: 1.75, 6: float("nan")}
    with Checkpoints(tmp_path, max_to_keep=2) as checkpoints:
        held = []
        for step, loss in losses.items():
            checkpoints.save(step, state(step), {}, loss=loss)
            checkpoints.wait_until_finished()
            held.append((checkpoints.all_steps(), checkpoints.best_step()))
        assert held == [
            ([1], None),
            ([1, 2], 2),
            ([2, 3], 2),
            ([2, 3, 4], 2),
            ([2, 4, 5], 2),
            ([2, 5, 6], 2),
        ]
    with Checkpoints(write(tmp_path, 7, losses={7: 1.5}, max_to_keep=1)) as checkpoints:
        assert checkpoints.all_steps() == [7] and checkpoints.best_step() == 7


def test_without_losses_none_is_best(saved, tmp_path):
    for folder in (saved, tmp_path):
        with Checkpoints(folder) as checkpoints:
            assert checkpoints.best_step() is None


def test_a_damaged_description_has_no_loss_and_stops_no_run(tmp_path):
    write(tmp_path, 1, 2, losses={1: 1.0, 2: 2.0})
    empty(tmp_path / "1" / "description" / "metadata")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.best_step() == 2
        checkpoints.save(3, state(3), {}, loss=3.0)
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [1, 2, 3] and checkpoints.best_step() == 2


def test_what_a_killed_process_left_is_no_checkpoint_and_goes_with_the_next_save(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    shutil.copytree(saved / "2", tmp_path / "copy" / "7.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path / "copy") as checkpoints:
        assert checkpoints.all_steps() == [2, 5]
    write(tmp_path / "copy", 6)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["2", "5", "6"]


# A disk that is full


LIMITED = """
import os, resource, sys
import jax.numpy as jnp
from jaxformer.training.checkpoints import Checkpoints
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {"x": jnp.arange(3)}, {})
    checkpoints.wait_until_finished()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    for numbers, letters in ((10_000, 1), (1, 20_000)):  # state or description has no room
        try:
            checkpoints.save(2, {"x": jnp.arange(numbers)}, {"long": "x" * letters})
            checkpoints.wait_until_finished()
        except OSError as error:
            print(error, *checkpoints.all_steps())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoints.save(2, {"x": jnp.arange(5)}, {})
"""


@pytest.mark.slow
def test_files_that_have_no_room_leave_the_checkpoint_before_and_no_rest(tmp_path):
    """The limit of a file's size, which fails as a full disk does, where files are written."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        cwd=os.getcwd(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("The last good checkpoint is 1. 1\n")
    assert len(parts) == 3 and parts[2] == ""
    for text in parts[:2]:
        assert text.startswith(f"Saving checkpoint 2 in {tmp_path} failed: ")
        assert "File too large" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(None, {"x": jax.ShapeDtypeStruct((5,), jnp.int32)})
    np.testing.assert_array_equal(restored["x"], np.arange(5))
