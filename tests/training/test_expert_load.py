"""The bias by which a router chooses: its update levels the load of experts, on any mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer.config import GLU, MoE, MultiHead, Router, TransformerConfig
from jaxformer.data import Batch
from jaxformer.parallel import MeshConfig, make_mesh, parameter_metadata, put_batch
from jaxformer.training import optimizers, schedules, train_step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.gradient import LOAD_GRADIENT, Objective, make_value_and_grad

EXPERTS, TOP_K, VOCAB, ROWS, LENGTH = 16, 2, 56, 8, 24
CONFIG = TransformerConfig(
    vocab_size=VOCAB,
    model_dim=16,
    num_layers=2,
    attention=MultiHead(num_heads=2, num_kv_heads=2, head_dim=8),
    feed_forward=(
        MoE(
            expert=GLU(hidden_dim=8),
            num_experts=EXPERTS,
            top_k=TOP_K,
            router=Router(score="sigmoid", selection_bias=True),
        ),
    ),
)
(LEVELLED,) = CONFIG.feed_forward
UNBIASED = replace(
    CONFIG, feed_forward=(replace(LEVELLED, router=replace(LEVELLED.router, selection_bias=False)),)
)
PLAIN = optimizers.SGD(momentum=0.0)
NO_AUXILIARY_LOSS = Objective(load_balance=0.0, router_z_loss=0.0)


def batch(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], positions, ones, ones > 0)


class Run:
    """A train state and its step."""

    def __init__(self, config=CONFIG, *, rate=0.01, optimizer=PLAIN, **mesh):
        self.model = Transformer(config)
        self.mesh = make_mesh(MeshConfig(**mesh), jax.devices()[: int(np.prod([*mesh.values()]))])
        settings = optimizers.OptimizerConfig(
            schedule=schedules.Constant(peak=3e-3), optimizer=optimizer, selection_bias_rate=rate
        )
        self.optimizer = optimizers.make_optimizer(settings, 200, parameter_metadata(config))
        self.state = train_step.init_train_state(
            self.model, self.optimizer, jax.random.key(0), self.mesh
        )
        self.update = train_step.make_train_step(
            self.model, self.optimizer, self.mesh, objective=NO_AUXILIARY_LOSS
        )

    def train(self, steps):
        for step in steps:
            placed = put_batch(batch(step % 10), self.mesh, ROWS)
            self.state, metrics = self.update(self.state, placed)
        return metrics

    def counts(self):
        """Tokens of each expert of each layer, over all batches."""
        tokens = np.concatenate([batch(step).tokens for step in range(10)])
        params = jax.tree.map(jnp.asarray, jax.device_get(self.state.params))
        _, outputs = self.model.apply({"params": params}, jnp.asarray(tokens), mutable=["router"])
        leaves = jax.tree_util.tree_leaves_with_path(outputs)
        (ids,) = [np.asarray(x) for path, x in leaves if "expert_ids" in str(path)]
        return np.stack([np.bincount(layer.ravel(), minlength=EXPERTS) for layer in ids])


def biases(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    (bias,) = [x for path, x in leaves if "selection_bias" in str(path)]
    return np.asarray(jax.device_get(bias))


@pytest.mark.slow
def test_its_gradient_is_the_relative_load():
    run = Run()
    one = batch(3)
    value_and_grad = make_value_and_grad(run.model, run.mesh, objective=NO_AUXILIARY_LOSS)
    loss, gradients = jax.jit(value_and_grad)(run.state.params, {}, jnp.zeros((), jnp.int32), one)
    _, outputs = run.model.apply(
        {"params": run.state.params}, jnp.asarray(one.tokens), mutable=["router"]
    )
    leaves = jax.tree_util.tree_leaves_with_path(outputs)
    (ids,) = [np.asarray(x) for path, x in leaves if "expert_ids" in str(path)]
    counts = np.stack([np.bincount(layer.ravel(), minlength=EXPERTS) for layer in ids])
    load = counts / counts.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(biases(gradients) / LOAD_GRADIENT, load - 1, rtol=1e-5, atol=1e-6)
    metrics = run.train([3])
    np.testing.assert_allclose(metrics.max_expert_load, load.max(), rtol=1e-6)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(biases(run.state.params), -0.01 * np.sign(load - 1), rtol=1e-6)


@pytest.mark.slow
def test_the_load_levels_with_it_and_not_without():
    worst = {}
    for config in (CONFIG, UNBIASED):
        run = Run(config)
        metrics = run.train(range(200))
        counts = run.counts()
        worst[config] = (counts / counts.mean(axis=1, keepdims=True)).max()
    assert worst[CONFIG] < 1.5 and worst[UNBIASED] > 2, worst
    assert metrics.max_expert_load is None  # without biases


@pytest.mark.parametrize(
    "optimizer",
    [optimizers.AdamW(), optimizers.Muon(), optimizers.Adafactor()],
    ids=["adamw", "muon", "adafactor"],
)
@pytest.mark.slow
def test_no_optimizer_decays_or_scales_it(optimizer):
    run = Run(optimizer=optimizer)
    run.train(range(3))
    steps = np.abs(biases(run.state.params)) / 0.01
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert steps.max() <= 3.001


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dict(expert=8), dict(fsdp=2, expert=2, tensor=2)], ids=str)
def test_eight_devices_equal_one(mesh):
    one, eight = Run(), Run(**mesh)
    for run in (one, eight):
        run.train(range(6))
    np.testing.assert_array_equal(biases(one.state.params), biases(eight.state.params))
    for a, b in zip(
        jax.tree.leaves(one.state.params), jax.tree.leaves(eight.state.params), strict=True
    ):
        np.testing.assert_allclose(jax.device_get(a), jax.device_get(b), atol=1e-5)


@pytest.mark.slow
def test_a_restored_state_goes_on_bitwise(tmp_path):
    whole, first = Run(optimizer=optimizers.Muon()), Run(optimizer=optimizers.Muon())
    whole.train(range(4))
    first.train(range(2))
    with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.save(2, first.state, {})
        checkpoints.wait_until_finished()
        abstract = train_step.abstract_train_state(first.model, first.optimizer, first.mesh)
        first.state = checkpoints.restore(2, abstract)
    first.train(range(2, 4))
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(first.state), strict=True):
        np.testing.assert_array_equal(jax.device_get(a), jax.device_get(b))
