"""A step on eight devices is the step on one: loss, every gradient, and ten updates."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import Transformer, zoo
from jaxformer.config import EncoderDecoder
from jaxformer.data import Batch, PairBatch
from jaxformer.parallel import MeshConfig, make_mesh, put_batch
from jaxformer.training import step
from jaxformer.training.guard import new_guard
from jaxformer.training.optimizers import AdamW, Muon, OptimizerConfig, make_optimizer
from jaxformer.training.pmap_step import make_pmap_update
from jaxformer.training.schedules import Constant

pytestmark = pytest.mark.usefixtures("no_checks_of_annotations")

ROWS, LENGTH, STEPS = 8, 16, 10
MODELS = ("llama-2-70b", "gemma-2-2b", "mixtral-8x7b", "bloom-560m", "t5-small", "transformer-base")
MESHES = {
    "data8": dict(data=8),
    "fsdp8": dict(fsdp=8),
    "tensor4": dict(tensor=4),
    "context8": dict(context=8),
    "data2-fsdp4": dict(data=2, fsdp=4),
    "data4-tensor2": dict(data=4, tensor=2),
    "fsdp4-tensor2": dict(fsdp=4, tensor=2),
    "data2-context4": dict(data=2, context=4),
    "fsdp2-context4": dict(fsdp=2, context=4),
    "tensor2-context4": dict(tensor=2, context=4),
    "data2-fsdp2-tensor2": dict(data=2, fsdp=2, tensor=2),
    "fsdp2-tensor2-context2": dict(fsdp=2, tensor=2, context=2),
    "data2-tensor2-context2": dict(data=2, tensor=2, context=2),
}
EXPERTS = {
    "expert4": dict(expert=4),
    "data2-tensor2-expert2": dict(data=2, tensor=2, expert=2),
    "fsdp2-context2-expert2": dict(fsdp=2, context=2, expert=2),
    "tensor2-context2-expert2": dict(tensor=2, context=2, expert=2),
}


# Some gradients, such as those of key biases, are nothing but rounding, and with the usual epsilon
# of 1e-8 Adam would make whole steps of them.
ADAM = AdamW(eps=1e-6)


def recording(inner):
    """An optimizer that keeps the gradients it was given."""

    def update(gradients, state, params, **known):
        updates, kept = inner.update(gradients, state[1], params, **known)
        return updates, (gradients, kept)

    return optax.GradientTransformationExtraArgs(
        lambda params: (jax.tree.map(jnp.zeros_like, params), inner.init(params)), update
    )


@functools.cache
def optimizer(kind=ADAM):
    config = OptimizerConfig(schedule=Constant(peak=1e-3), optimizer=kind)
    return recording(make_optimizer(config, STEPS))


@functools.cache
def batches(name):
    """Rows of different lengths and documents, as each step sees them."""
    config, rng = zoo.get(name).tiny(), np.random.default_rng(1)

    def draw():
        return rng.integers(0, config.vocab_size - 1, (ROWS, LENGTH), np.int32)

    def one():
        mask = np.arange(LENGTH) < rng.integers(1, LENGTH, (ROWS, 1))
        if isinstance(config.topology, EncoderDecoder):
            lengths = rng.integers(2, LENGTH, (ROWS, 1))
            read = np.int32(np.arange(LENGTH) < lengths)
            return PairBatch(draw(), read, draw(), draw(), mask)
        ends = rng.integers(3, LENGTH - 3, (ROWS, 1))
        places = np.arange(LENGTH)
        positions = np.where(places < ends, places, places - ends).astype(np.int32)
        return Batch(draw(), draw(), positions, 1 + np.int32(places >= ends), mask)

    return [one() for _ in range(STEPS)]


@functools.cache
def first_params(name):
    """Of a size that every part of the model matters."""
    rng = np.random.default_rng(0)

    def draw(path, x):
        return np.float32(0.1 * rng.normal(size=x.shape) + (path[-1].key == "scale"))

    state = step.abstract_state(Transformer(zoo.get(name).tiny()), optimizer(), mesh_of(data=1))
    return jax.tree_util.tree_map_with_path(draw, state.params)


def mesh_of(**sizes):
    return make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])


def train(name, *, kind=ADAM, steps=STEPS, accumulation=1, **sizes):
    """Losses of the steps, gradients of the first, parameters after the last."""
    mesh, model = mesh_of(**sizes), Transformer(zoo.get(name).tiny(), dtype=jnp.float32)
    places = step.shardings(step.abstract_state(model, optimizer(kind), mesh))
    state = step.TrainState(
        np.int32(0), first_params(name), optimizer(kind).init(first_params(name)), new_guard()
    )
    state = jax.tree.map(lambda x, place: jax.device_put(np.array(x), place), state, places)
    update = step.make_update(model, optimizer(kind), mesh, accumulation=accumulation)
    losses, gradients = [], None
    for batch in batches(name)[:steps]:
        state, metrics = update(state, put_batch(batch, mesh, ROWS))
        gradients = jax.device_get(state.opt_state[0]) if gradients is None else gradients
        losses.append(float(metrics.loss))
    return losses, gradients, jax.device_get(state.params)


@functools.cache
def on_one_device(name, kind=ADAM, steps=STEPS):
    return train(name, kind=kind, steps=steps, data=1)


def compare(found, expected):
    (losses, gradients, params), (true_losses, true_gradients, true_params) = found, expected
    np.testing.assert_allclose(losses[0], true_losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses, true_losses, rtol=1e-4)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(true_gradients))

    def close(path, one, other):  # those of key biases are nothing but rounding
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * largest, err_msg=str(path))

    jax.tree_util.tree_map_with_path(close, gradients, true_gradients)
    worst = jax.tree.map(lambda x, y: np.abs(x - y).max(), params, true_params)
    return max(jax.tree.leaves(worst))


def pairs():
    """Every mesh with every model; rings of more than two devices make large programs."""
    found = [(name, label, sizes) for label, sizes in MESHES.items() for name in MODELS]
    found += [("mixtral-8x7b", label, sizes) for label, sizes in EXPERTS.items()]
    for name, label, sizes in found:
        mark = pytest.mark.exhaustive if sizes.get("context", 1) > 2 else pytest.mark.slow
        yield pytest.param(name, sizes, marks=mark, id=f"{name}-{label}")


@pytest.mark.parametrize("name, sizes", [*pairs()])
def test_a_step_on_many_devices_is_the_step_on_one(name, sizes):
    assert compare(train(name, **sizes), on_one_device(name)) < 1e-4


def test_parts_of_a_batch_on_a_mesh_add_up():
    found = train("llama-2-70b", accumulation=2, fsdp=2, tensor=2)
    assert compare(found, on_one_device("llama-2-70b")) < 1e-4


@pytest.mark.slow
def test_parts_are_the_same_rows_on_any_mesh():
    """The load of experts is balanced within each part, so it matters which rows it has."""
    how = dict(steps=2, accumulation=2)
    found = train("mixtral-8x7b", **how, fsdp=2, expert=2)
    assert compare(found, train("mixtral-8x7b", **how, data=1)) < 1e-4


@pytest.mark.slow
def test_muon_sees_whole_matrices():
    """Orthogonalising the shares of a matrix would give another update."""
    found = train("llama-2-70b", kind=Muon(), steps=2, fsdp=4, tensor=2)
    assert compare(found, on_one_device("llama-2-70b", Muon(), 2)) < 1e-4


@pytest.mark.parametrize("name", ["llama-2-70b", "mixtral-8x7b", "t5-small"])
@pytest.mark.slow(but=["llama-2-70b"])
def test_pmap_does_as_shard_map(name):
    params = jax.tree.map(jnp.asarray, first_params(name))
    state = step.TrainState(jnp.int32(0), params, optimizer().init(params), new_guard())
    update = make_pmap_update(Transformer(zoo.get(name).tiny()), optimizer())
    losses, gradients = [], None
    for batch in batches(name):
        state, metrics = update(state, jax.tree.map(lambda x: x[:, None], batch))
        gradients = jax.device_get(state.opt_state[0]) if gradients is None else gradients
        losses.append(float(metrics.loss))
    found = losses, gradients, jax.device_get(state.params)
    assert compare(found, on_one_device(name)) < 1e-4
