"""Two processes with two devices each save, restore and stop together."""

import os
import re
import socket
import subprocess
import sys

import pytest

TRAINER = """
import os, signal, sys
import jax

folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.signals import defer_signals, raise_on_signals

devices = np.asarray(jax.devices()).reshape(2, 2)
mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
values = {"kernel": np.arange(48.0, dtype=np.float32).reshape(8, 6), "step": np.int32(7)}
specs = {"kernel": P("fsdp", "tensor"), "step": P()}
abstract = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
    for name, x in values.items()
}
state = {
    name: jax.make_array_from_callback(x.shape, abstract[name].sharding, lambda i, x=x: x[i])
    for name, x in values.items()
}


def check(found):
    for name, x in found.items():
        assert x.sharding == abstract[name].sharding
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, values[name][shard.index])


with Checkpoints(folder, max_to_keep=2) as checkpoints:
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state, {"seed": step}, loss=float(step))
    check(checkpoints.restore(None, abstract))
    assert checkpoints.all_steps() == [1, 3, 4] and checkpoints.best_step() == 1

multihost_utils.sync_global_devices("saved")
if rank == 0:
    os.truncate(f"{folder}/4/description/metadata", 9)
multihost_utils.sync_global_devices("damaged")
with Checkpoints(folder, max_to_keep=2) as checkpoints:
    said = []
    assert checkpoints.latest_valid_step(said.append) == 3 and checkpoints.all_steps() == [1, 3]
    assert len(said) == (1 if rank == 0 else 0)
    check(checkpoints.restore(3, abstract))
    checkpoints.save(4, state, {"seed": 44})
    assert checkpoints.read_description(4)["seed"] == 44
    assert sorted(os.listdir(folder)) == ["1", "3", "4", "4.damaged"]
    manager = checkpoints._manager
    finished = manager.wait_until_finished

    def fail():
        finished()
        manager.wait_until_finished = finished
        os.rename(f"{folder}/5", f"{folder}/5.orbax-checkpoint-tmp")  # as if it had not come so far
        raise OSError("No space left on device")

    try:
        checkpoints.save(5, state, {})
        if rank == 0:
            manager.wait_until_finished = fail
        checkpoints.wait_until_finished()
    except OSError as error:
        print(error)

with raise_on_signals(), defer_signals() as signals:
    for step in range(1, 1000):
        multihost_utils.sync_global_devices("update")
        if rank == 1 and step == 5:
            signal.raise_signal(signal.SIGINT)
        if signals.should_stop(step):
            print(f"stops after {step}")
            raise SystemExit(signals.to_error().status)
"""


def free_port():
    with socket.socket() as chosen:
        chosen.bind(("localhost", 0))
        return chosen.getsockname()[1]


@pytest.mark.slow
def test_two_processes_save_restore_and_stop_as_one(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    port = free_port()
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(tmp_path), str(port), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [run.communicate(timeout=200) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [143, 143], outputs
    # Among what threads of Gloo write, also over each other.
    lines = [re.findall(r"(?:Saving checkpoint|stops after).*", out) for out, _ in outputs]
    where = f"Saving checkpoint 5 in {tmp_path} failed: "
    assert lines[0][0].startswith(f"{where}No space left on device. The last good ch")
    assert lines[1][0] == f"{where}it failed in process 0. The last good checkpoint is 4."
    assert lines[0][1] == lines[1][1] and lines[0][1].startswith("stops after ")
