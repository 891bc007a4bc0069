import json
import os
import shutil
import signal
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from orbax.checkpoint._src.serialization import serialization

from jaxformer.parallel import ParameterMetadata
from jaxformer.training import array_records as records
from jaxformer.training import checkpoints as module
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.optimizers import AdamW, Muon, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant
from jaxformer.training.signals import raise_on_signals


class State(NamedTuple):
    step: Array
    params: dict
    opt_state: object


def draw(seed, *shape):
    return jnp.asarray(np.float32(np.random.default_rng(seed).normal(size=shape)))


def make(step=3, seed=0, *, width=5, optimizer=None):
    params = {
        "decoder": {"layers": {"layer_0": {"up": {"kernel": draw(seed, 2, 7, width)}}}},
        "head": {"kernel": draw(seed + 1, 7, 3), "bias": draw(seed + 2, 3).astype(jnp.bfloat16)},
    }
    config = OptimizerConfig(schedule=Constant(peak=0.1), optimizer=optimizer or AdamW())
    return State(jnp.int32(step), params, rule(config, params).init(params))


def rule(config, params):
    """The optimizer, of matrices and vectors that are told by their axes."""
    declared = jax.tree.map(
        lambda x: ParameterMetadata(x.shape, ("features",) * x.ndim, int(x.ndim > 1)), params
    )
    return make_optimizer(config, 9, declared)


def abstract(state):
    return jax.eval_shape(lambda: state)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def write(folder, *steps, **kwargs):
    with Checkpoints(folder, **kwargs) as checkpoints:
        for step in steps:
            checkpoints.save(step, make(step, seed=step), {"seed": step})
    return folder


def rewrite(folder, **fields):
    """Change a checkpoint's description, as if it had been saved so."""
    file = folder / "description" / "metadata"
    contents = {**json.loads(file.read_text()), **fields}
    del contents["digest"]
    file.write_text(json.dumps({**contents, "digest": module.json_digest(contents)}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints 2 and 5, never changed."""
    return write(tmp_path_factory.mktemp("saved"), 2, 5)


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_what_is_restored_is_bit_for_bit_what_was_saved(saved):
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.all_steps() == [2, 5] and checkpoints.latest_step() == 5
        assert_same(checkpoints.restore(None, abstract(make())), make(5, seed=5))
        assert_same(checkpoints.restore(2, make()), make(2, seed=2))
        assert checkpoints.read_description() == {"seed": 5, "schema": module.SCHEMA}
        assert checkpoints.read_description(2)["seed"] == 2


@pytest.mark.slow
def test_extreme_values_and_muons_masked_state_survive(tmp_path):
    state = make(2**31 - 1, optimizer=Muon())
    values = [np.nan, -np.nan, np.inf, -0.0, 1e-45, 3e38, -1.5]
    state.params["odd"] = {"bias": jnp.asarray(np.float32(values))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait_until_finished()
        restored = checkpoints.restore(1, abstract(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_run_may_go_on_without_clipping_or_decay(saved):
    calmer = OptimizerConfig(
        schedule=Constant(peak=0.1), optimizer=AdamW(weight_decay=0.0), clip_norm=None
    )
    state = make(5, seed=5)
    state = state._replace(opt_state=rule(calmer, state.params).init(state.params))
    with Checkpoints(saved) as checkpoints:
        assert_same(checkpoints.restore(5, abstract(state)), state)


def test_a_description_comes_back_as_json(tmp_path):
    description = {"config": {"a": [1, None, {"b": "x"}]}, "tokenizer": "tokenizer.json"}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make(), description)
        checkpoints.wait_until_finished()
        assert checkpoints.read_description() == {**description, "schema": module.SCHEMA}


def test_a_checkpoint_counts_when_it_is_complete_and_saving_does_not_wait(tmp_path, monkeypatch):
    with Checkpoints(tmp_path / "deep" / "folder") as checkpoints:
        assert checkpoints.all_steps() == [] and checkpoints.latest_step() is None
        assert not (tmp_path / "deep").exists()
        checkpoints.save(1, make(), {})
        assert checkpoints.all_steps() in ([], [1])
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [1]


def test_only_the_newest_stay(tmp_path):
    with Checkpoints(write(tmp_path, 9, 10, 11, 100, max_to_keep=2)) as checkpoints:
        assert checkpoints.all_steps() == [11, 100]


@pytest.mark.slow
def test_what_a_killed_process_left_beside_the_newest_is_removed_unless_it_may_be_needed(tmp_path):
    write(
        tmp_path, 9, 10, 11, max_to_keep=3
    )  # as if killed between a checkpoint's place and what goes
    shutil.copytree(tmp_path / "9", tmp_path / "12.orbax-checkpoint-tmp")  # or while saving
    with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.delete_old()
        assert [path.name for path in tmp_path.iterdir()] == ["11"]
    write(tmp_path, 12, 13, max_to_keep=3)
    (tmp_path / "13" / "description" / "metadata").write_text("{}")
    with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
        assert checkpoints.latest_valid_step(report=lambda _: None) == 12
        checkpoints.delete_old()
        assert (tmp_path / "13").is_dir() and checkpoints.all_steps() == [11, 12]
        checkpoints.save(14, make(14), {})
        checkpoints.wait_until_finished()
        shutil.copytree(tmp_path / "14", tmp_path / "3")
        checkpoints.delete_old()
        checkpoints.save(15, make(15), {})
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [15]


def test_arrays_may_be_donated_once_save_returns(tmp_path):
    state, expected = make(), make()
    halve = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        halve(state)
        checkpoints.wait_until_finished()
        assert_same(checkpoints.restore(1, abstract(expected)), expected)


@pytest.mark.slow
def test_restored_arrays_can_be_donated(saved):
    with Checkpoints(saved) as checkpoints:
        state = checkpoints.restore(5, abstract(make()))
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + x, s), donate_argnums=0)
    doubled = advance(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert_same(doubled, jax.tree.map(lambda x: x + x, make(5, seed=5)))


def test_arrays_go_where_the_abstract_state_says(saved):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    target = abstract(make())
    kernel = NamedSharding(mesh, P("data"))
    layer = target.params["decoder"]["layers"]["layer_0"]["up"]
    layer["kernel"] = jax.ShapeDtypeStruct((2, 7, 5), jnp.float32, sharding=kernel)
    with Checkpoints(saved) as checkpoints:
        restored = checkpoints.restore(5, target)
    assert restored.params["decoder"]["layers"]["layer_0"]["up"]["kernel"].sharding == kernel
    assert restored.step.devices() == {jax.devices()[0]}
    assert_same(restored, make(5, seed=5))


@pytest.mark.slow
def test_a_sharded_state_is_restored_on_one_device(tmp_path):
    mesh = Mesh(np.asarray(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(draw(0, 16, 3), NamedSharding(mesh, P("data")))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x}, {})
        checkpoints.wait_until_finished()
        restored = checkpoints.restore(1, {"x": jax.ShapeDtypeStruct((16, 3), jnp.float32)})
    assert restored["x"].devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(restored["x"], x)


def test_part_of_a_state_is_read_only_when_asked(saved):
    part = {"params": abstract(make()).params}
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(ValueError, match="  step: int32\\[\\] in the checkpoint, nothing"):
            checkpoints.restore(5, part)
        restored = checkpoints.restore(5, part, partial=True)
        with pytest.raises(ValueError, match="  extra: nothing in the checkpoint, float32\\[3"):
            checkpoints.restore(5, {"extra": jnp.zeros(3)}, partial=True)
    assert_same(restored, {"params": make(5, seed=5).params})


def test_differences_are_listed_with_both_shapes(saved):
    other = make(width=11)
    other.params["head"]["scale"] = jnp.zeros(3)
    other.params["head"]["bias"] = jnp.zeros(3)
    with Checkpoints(saved) as checkpoints, pytest.raises(ValueError) as caught:
        checkpoints.restore(5, abstract(other))
    message = str(caught.value)
    assert f"Checkpoint 5 in {saved} does not match the requested state: 5 of " in message
    path = "decoder/layers/layer_0/up/kernel"
    shapes = "float32[2, 7, 5] in the checkpoint, float32[2, 7, 11] requested"
    assert f"\n  params/{path}: {shapes}\n" in message
    assert f"\n  opt_state/optimizer/0/mu/{path}: {shapes}\n" in message
    assert "\n  params/head/bias: bfloat16[3] in the checkpoint, float32[3] requested\n" in message
    assert message.endswith(
        "\n  params/head/scale: nothing in the checkpoint, float32[3] requested"
    )


def test_many_differences_are_counted(saved):
    with Checkpoints(saved) as checkpoints, pytest.raises(ValueError) as caught:
        checkpoints.restore(5, {f"x{i}": jnp.zeros(1) for i in range(20)})
    stored = len(jax.tree.leaves(make()))
    lines = str(caught.value).splitlines()
    assert len(lines) == 12 and lines[-1] == f"  and {20 + stored - 10} more"
    assert f"{20 + stored} of {20 + stored} arrays differ" in lines[0]


def test_a_folder_without_checkpoints_is_refused_and_not_made(tmp_path):
    folder = tmp_path / "none"
    with Checkpoints(folder) as checkpoints:
        for read in (checkpoints.read_description, lambda: checkpoints.restore(None, make())):
            with pytest.raises(ValueError, match=f"There is no checkpoint in {folder}"):
                read()
    assert not folder.exists()


def test_a_missing_step_is_refused_with_those_that_exist(saved):
    with Checkpoints(saved) as checkpoints:
        message = f"There is no checkpoint 4 in {saved}; it has 2, 5"
        for read in (checkpoints.read_description, lambda step: checkpoints.restore(step, make())):
            with pytest.raises(ValueError, match=message):
                read(4)


@pytest.mark.parametrize("step", [4, 5])
def test_a_step_that_is_not_the_newest_is_refused(saved, step):
    message = f"Checkpoint {step} cannot be saved: {saved} has 2, 5, and steps must"
    with Checkpoints(saved) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.save(step, make(), {})


def test_other_mistakes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="max_to_keep must be at least 1; got 0"):
        Checkpoints(tmp_path, max_to_keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, not a folder of checkpoints"):
        Checkpoints(tmp_path / "file")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="must be JSON-serializable: Object of type set"):
            checkpoints.save(1, make(), {"seen": {1, 2}})


def test_relative_folders_are_resolved(tmp_path, monkeypatch, saved):
    monkeypatch.chdir(saved.parent)
    with Checkpoints(saved.name) as checkpoints:
        monkeypatch.chdir(tmp_path)
        assert checkpoints.read_description()["seed"] == 5


@pytest.mark.parametrize("schema, age", [(7, "a newer"), (2, "an earlier"), (1, "an earlier")])
def test_another_schema_is_refused(copied, schema, age):
    if schema == 1:  # whose description was elsewhere
        (copied / "5" / "description.json").write_text("{}")
    else:
        rewrite(copied / "5", schema=schema)
    with Checkpoints(copied) as checkpoints:
        message = f"Checkpoint 5 in {copied} was written by {age} version of jaxformer, with"
        for read in (checkpoints.read_description, lambda: checkpoints.restore(None, make())):
            with pytest.raises(
                ValueError, match=f"{message} schema {schema}; this version reads schema 3"
            ):
                read()
        assert checkpoints.read_description(2)["seed"] == 2


def test_arrays_that_cannot_be_read_are_damage(saved, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("Input/output error")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
    with Checkpoints(saved) as checkpoints:
        message = f"Checkpoint 5 in {saved} is damaged: Input/output error. The folder has 2, 5"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(5, make())


@pytest.mark.slow
def test_a_signal_while_a_checkpoint_is_read_is_not_damage(tmp_path):
    state = {f"kernel_{i}": jnp.ones((200, 200)) for i in range(20)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
        checkpoints.restore(2, state)
        started = time.monotonic()
        checkpoints.restore(2, state)
        seconds = time.monotonic() - started
        for fraction in np.linspace(0.1, 0.9, 10):
            timer = threading.Timer(fraction * seconds, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt), raise_on_signals():
                timer.start()
                checkpoints.restore(2, state)
                timer.join()


def test_one_changed_bit_of_an_array_is_damage(copied):
    arrays = json.loads((copied / "5" / "description" / "metadata").read_text())["arrays"]
    arrays["params/head/kernel"][2] ^= 1
    rewrite(copied / "5", arrays=arrays)
    with Checkpoints(copied) as checkpoints:
        with pytest.raises(ValueError, match="damaged: wrong checksum of params/head/kernel"):
            checkpoints.restore(5, make())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
def test_checksums_see_every_bit(dtype):
    raw = np.random.default_rng(0).integers(0, 2, (5, 16), np.uint8)
    x = jnp.asarray(raw).astype(dtype)
    bits = np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")
    expected = int(bits.astype(np.uint64).sum() % 2**32)
    assert records.checksums({"x": x, "y": np.asarray(x)}) == {"x": expected, "y": expected}


def test_an_interrupted_save_is_not_listed_and_does_not_stand_in_the_way(copied):
    shutil.copytree(copied / "5", copied / "6.orbax-checkpoint-tmp")
    with Checkpoints(copied) as checkpoints:
        assert checkpoints.all_steps() == [2, 5]
        checkpoints.save(6, make(6), {})
        checkpoints.wait_until_finished()
        assert_same(checkpoints.restore(6, make()), make(6))


def full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


async def full_disk_later(*args, **kwargs):
    full_disk()


@pytest.mark.parametrize(
    "owner, name, fail",
    [
        (ocp.type_handlers.ArrayHandler, "serialize", full_disk),
        (serialization, "async_serialize_from_host", full_disk_later),
    ],
    ids=["at once", "in the background"],
)
def test_a_full_disk_is_an_error_that_names_the_last_good_checkpoint(
    tmp_path, monkeypatch, owner, name, fail
):
    with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.save(1, make(1), {})
        checkpoints.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            message = (
                f"Saving checkpoint 2 in {tmp_path} failed: .*No space left on device.*"
                "The last good checkpoint is 1"
            )
            with pytest.raises(OSError, match=message):
                checkpoints.save(2, make(2), {})
                checkpoints.wait_until_finished()
        assert_same(checkpoints.restore(None, make()), make(1))
        checkpoints.save(3, make(3), {})
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [3]
        assert_same(checkpoints.restore(None, make()), make(3))


@pytest.mark.parametrize("then", ["save", "leave"])
def test_a_failure_in_the_background_is_told_at_the_next_chance(tmp_path, monkeypatch, then):
    write(tmp_path, 1)
    message = f"Saving checkpoint 2 in {tmp_path} failed: .* The last good checkpoint is 1"
    with pytest.raises(OSError, match=message):
        with Checkpoints(tmp_path) as checkpoints:
            monkeypatch.setattr(serialization, "async_serialize_from_host", full_disk_later)
            checkpoints.save(2, make(2), {})
            if then == "save":
                checkpoints.save(3, make(3), {})


def test_a_reader_sees_what_another_wrote_since(tmp_path):
    with Checkpoints(tmp_path) as reader:
        for step in (1, 2):
            write(tmp_path, step)
            assert reader.latest_step() == step
            assert_same(reader.restore(None, make()), make(step, seed=step))


def test_a_folder_that_cannot_be_made_is_an_error_of_the_save(tmp_path):
    (tmp_path / "file").write_text("")
    with Checkpoints(tmp_path / "file" / "runs") as checkpoints:
        with pytest.raises(OSError, match="Saving checkpoint 1 in .* There is no good checkpoint"):
            checkpoints.save(1, make(), {})


@pytest.mark.parametrize("step", ["../../x", "7", -1, 2.0, True, None], ids=repr)
def test_a_step_that_is_no_whole_number_is_refused(step, tmp_path):
    with Checkpoints(tmp_path / "inside" / "deep") as checkpoints:
        with pytest.raises(ValueError, match="step must be a non-negative integer; got "):
            checkpoints.save(step, make(), {})
        checkpoints.save(np.int64(3), make(), {})
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith("x")] == []
    assert Checkpoints(tmp_path / "inside" / "deep").all_steps() == [3]


def test_foreign_files_and_folders_are_left_alone(copied):
    for name in ("007", "theirs", "8.damaged"):
        (copied / name).mkdir()
    (copied / "notes.txt").write_text("theirs")
    with Checkpoints(copied) as checkpoints:
        assert checkpoints.all_steps() == [2, 5] and checkpoints.latest_valid_step() == 5
        checkpoints.save(7, make(7, seed=7), {})
        checkpoints.wait_until_finished()
        assert_same(checkpoints.restore(None, abstract(make())), make(7, seed=7))
    names = {path.name for path in copied.iterdir()}
    assert names == {"2", "5", "7", "007", "theirs", "8.damaged", "notes.txt"}


def test_a_folder_may_be_anywhere_that_epath_knows(tmp_path):
    @epath.register_path_cls("store://")
    class Store(epath.gpath.PosixGPath):
        def __new__(cls, first, *rest):
            return super().__new__(cls, str(first).replace("store:/", str(tmp_path)), *rest)

    with Checkpoints("store://bucket/run", max_to_keep=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make(step), {}, loss=float(step))
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [1, 3]
        assert_same(checkpoints.restore(None, make()), make(3))
    assert {path.name for path in (tmp_path / "bucket" / "run").iterdir()} == {"1", "3"}


def test_a_loss_is_the_best_below_those_of_all_checkpoints(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.is_best(9.0)
        for step, loss in ((1, 3.0), (2, None), (3, 4.0)):
            checkpoints.save(step, {"x": np.zeros(2)}, {}, loss=loss)
        losses = [2.9, 3.0, float("nan")]
        assert [checkpoints.is_best(loss) for loss in losses] == [True, False, False]
        assert [checkpoints.saved_loss(step) for step in (1, 2, 3)] == [3.0, None, 4.0]
