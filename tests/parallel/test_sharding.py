"""Where parameters, optimizer state and rows go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import Transformer, zoo
from jaxformer import functional as F
from jaxformer.data import Batch
from jaxformer.parallel import (
    MeshConfig,
    batch_spec,
    local_batch_slice,
    make_mesh,
    parameter_metadata,
    parameter_specs,
    put_batch,
    put_replicated,
    state_specs,
)
from jaxformer.training import train_step as step
from jaxformer.training.optimizers import Adafactor, AdamW, Muon, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant

LLAMA = zoo.get("llama-2-70b").tiny()  # 4 heads, 2 of keys and values


def mesh_of(**sizes):
    return make_mesh(MeshConfig(**sizes), jax.devices()[: np.prod(list(sizes.values()))])


def test_parameters_are_shared_out_by_what_their_axes_count():
    specs = parameter_specs(LLAMA, {"data": 1, "fsdp": 2, "tensor": 2})
    layer = specs["decoder"]["layers"]["layer_0"]
    assert layer["attention"]["query"]["kernel"] == P(None, "fsdp", "tensor", None)
    assert layer["attention"]["key"]["kernel"] == P(None, "fsdp", "tensor", None)
    assert layer["attention"]["out"]["kernel"] == P(None, "tensor", None, "fsdp")
    assert layer["feed_forward"]["gate"]["kernel"] == P(None, "fsdp", "tensor")
    assert layer["feed_forward"]["down"]["kernel"] == P(None, "tensor", "fsdp")
    assert specs["embedding"]["tokens"]["embedding"] == P("tensor", "fsdp")
    assert layer["pre_attention_norm"]["scale"] == P(None, None)


def test_key_value_heads_that_are_fewer_than_devices_stay_whole():
    attention = parameter_specs(LLAMA, {"data": 1, "tensor": 4})["decoder"]["layers"]["layer_0"][
        "attention"
    ]
    assert attention["key"]["kernel"] == P(None, None, None, None)
    assert attention["query"]["kernel"] == P(None, None, "tensor", None)


def test_experts_are_shared_out():
    specs = parameter_specs(zoo.get("mixtral-8x7b").tiny(), {"data": 1, "expert": 2, "tensor": 2})
    layer = specs["decoder"]["layers"]["layer_0"]["feed_forward"]
    assert layer["experts"]["gate"]["kernel"] == P(None, "expert", None, "tensor")
    assert layer["router"]["kernel"] == P(None, None, None)


@pytest.mark.parametrize("kind", [AdamW(), Muon(), Adafactor()], ids=["AdamW", "Muon", "Adafactor"])
@pytest.mark.slow
def test_what_an_optimizer_keeps_is_shared_out_as_its_parameters(kind):
    """So a device holds an eighth of all that is large, and the update keeps it that way."""
    optimizer = make_optimizer(
        OptimizerConfig(schedule=Constant(peak=1e-3), optimizer=kind), 9, parameter_metadata(LLAMA)
    )
    mesh, model = mesh_of(fsdp=4, tensor=2), Transformer(LLAMA)
    state = step.init_train_state(model, optimizer, jax.random.key(0), mesh)
    tokens = np.zeros((8, 16), np.int32)
    ones = np.ones((8, 16), np.int32)
    batch = put_batch(Batch(tokens, tokens, tokens, ones, ones > 0), mesh, 8)
    after, _ = step.make_train_step(model, optimizer, mesh)(state, batch)
    for x in (x for x in jax.tree.leaves(after) if x.size > 1000):
        held = x.addressable_shards[0].data.size
        assert held * (8 if x.ndim > 1 and min(x.shape[-2:]) > 1 else 1) <= x.size
    large = [x for x in jax.tree.leaves(after.opt_state) if x.size > 1000]
    assert bool(large) == (kind != Adafactor())


def test_specs_follow_the_path_of_a_parameter_and_the_axes_that_it_shares():
    params = {"a": {"kernel": jnp.zeros((4, 6))}, "b": {"kernel": jnp.zeros((4, 6))}}
    specs = {"a": {"kernel": P("fsdp", "tensor")}, "b": {"kernel": P(None, "tensor")}}
    state = {
        "mean": params,
        "rows": {"a": {"kernel": [jnp.zeros((4, 1)), jnp.zeros((1, 6))]}},
        "count": jnp.zeros(()),
        "akernel": jnp.zeros((4, 6)),
    }
    actual = state_specs(state, params, specs)
    assert actual["mean"] == specs
    assert actual["rows"]["a"]["kernel"] == [P("fsdp", None), P(None, "tensor")]
    assert actual["count"] == P() and actual["akernel"] == P()


@pytest.mark.parametrize(
    "sizes",
    [dict(data=8), dict(fsdp=2, tensor=4), dict(data=2, context=4), dict(expert=2, context=2)],
    ids=["data", "fsdp-tensor", "data-context", "expert-context"],
)
def test_every_device_has_its_rows_and_its_part_of_each_sequence(sizes):
    mesh = mesh_of(**sizes)
    whole = np.arange(8 * 16).reshape(8, 16)
    placed = put_batch({"x": whole}, mesh, 8)["x"]
    context = sizes.get("context", 1)
    np.testing.assert_array_equal(placed, whole[:, F.zigzag_order(16, context)])
    assert placed.sharding.spec == batch_spec(mesh.shape)
    rows = 8 // int(np.prod([n for name, n in sizes.items() if name not in ("tensor", "context")]))
    assert placed.addressable_shards[0].data.shape == (rows, 16 // context)
    assert local_batch_slice(mesh, 8) == slice(0, 8)


def test_a_batch_of_other_rows_is_refused():
    with pytest.raises(ValueError, match=r"must pass rows 0 to 8 of 8, or all; got 5"):
        put_batch(np.zeros((5, 4)), mesh_of(data=2), 8)


def test_whole_arrays_are_everywhere():
    mesh = mesh_of(data=2, tensor=4)
    placed = put_replicated((np.arange(3), 2.5), mesh)
    for shard in placed[0].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(3))
    assert placed[1].sharding.is_fully_replicated and len(placed[1].sharding.device_set) == 8
