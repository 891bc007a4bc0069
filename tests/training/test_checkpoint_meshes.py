"""A state saved on some devices comes back bitwise on others, once in memory, and donatable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.training import array_records as records
from jaxformer.training import checkpoints as module
from jaxformer.training.checkpoints import Checkpoints

SPECS = {
    "both": P("fsdp", "tensor"),
    "rows": P("fsdp"),
    "columns": P(None, "tensor"),
    "joined": P(("fsdp", "tensor")),
    "everywhere": P(),
    "step": P(),
}


def mesh(fsdp, tensor):
    devices = np.asarray(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor)
    return Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def shardings(fsdp, tensor):
    return {name: NamedSharding(mesh(fsdp, tensor), spec) for name, spec in SPECS.items()}


def values():
    """Random bits, of several dtypes."""
    draw = np.random.default_rng(0)
    kernels = {name: draw.bytes(16 * 24 * 4) for name in SPECS if name != "step"}
    state = {name: np.frombuffer(raw, np.float32).reshape(16, 24) for name, raw in kernels.items()}
    state["rows"] = state["rows"].view(jnp.bfloat16)
    return {**state, "step": np.int32(7)}


def abstract(shardings):
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
        for name, x in values().items()
    }


def save(folder, shardings):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(7, jax.device_put(values(), shardings), {})
    return folder


def restore(folder, shardings):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(None, abstract(shardings))


def assert_bitwise(actual):
    for name, x in values().items():
        assert actual[name].dtype == x.dtype, name
        assert np.asarray(actual[name]).tobytes() == x.tobytes(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("eight"), shardings(4, 2))


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (1, 2), (1, 1)], ids=str)
@pytest.mark.slow
def test_a_state_shared_out_among_eight_devices_comes_back_on_any_number(saved, shape):
    restored = restore(saved, shardings(*shape))
    assert {name: x.sharding for name, x in restored.items()} == shardings(*shape)
    assert_bitwise(restored)


def test_a_state_of_one_device_comes_back_shared_out_among_eight(tmp_path):
    restored = restore(save(tmp_path, shardings(1, 1)), shardings(4, 2))
    assert {name: x.sharding for name, x in restored.items()} == shardings(4, 2)
    assert_bitwise(restored)


@pytest.mark.parametrize("shape", [(2, 4), (1, 1)], ids=str)
@pytest.mark.slow(but=["(1, 1)"])
def test_a_restored_state_is_donated_without_a_copy(saved, shape):
    def places(state):
        shards = {name: x.addressable_shards for name, x in state.items() if name != "step"}
        return {
            (name, shard.device): shard.data.unsafe_buffer_pointer()
            for name, parts in shards.items()
            for shard in parts
        }

    state = restore(saved, shardings(*shape))
    before = places(state)
    negate = jax.jit(
        lambda state: jax.tree.map(lambda x: -x, state),
        donate_argnums=0,
        out_shardings=shardings(*shape),
    )
    after = negate(state)
    assert all(x.is_deleted() for x in state.values())
    assert places(after) == before


def test_memory_holds_one_state_and_one_array_while_restoring(saved, monkeypatch):
    alive, copy = [], jnp.copy
    bytes_before = sum(x.nbytes for x in jax.live_arrays())

    def watched(x):
        done = copy(x)
        alive.append(sum(x.nbytes for x in jax.live_arrays()) - bytes_before)
        return done

    monkeypatch.setattr(module.jnp, "copy", watched)
    restore(saved, shardings(1, 1))
    whole = sum(x.nbytes for x in values().values())
    assert len(alive) == len(SPECS)
    assert whole < max(alive) <= whole + 16 * 24 * 4


def test_few_checksums_are_under_way_at_once(monkeypatch):
    """With 33 that wait for messages between a CPU's devices, JAX waits for ever."""
    under_way, most = [], []
    sum_of_words, device_get = records._device_checksum, jax.device_get

    def begun(x):
        under_way.append(x)
        most.append(len(under_way))
        return sum_of_words(x)

    def read(sums):
        under_way.clear()
        return device_get(sums)

    monkeypatch.setattr(records, "_device_checksum", begun)
    monkeypatch.setattr(jax, "device_get", read)
    array = jnp.asarray(values()["both"])  # on one device, so that this ends when it fails
    sums = records.checksums({str(i): array for i in range(40)})
    assert max(most) == 16 and len(most) == 40
    assert set(sums.values()) == {int(np.sum(values()["both"].view(np.uint32), dtype=np.uint32))}
