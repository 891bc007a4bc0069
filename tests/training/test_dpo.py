"""Direct preference optimization: its loss and gradient on any mesh, and the reference."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer import config as c
from jaxformer.data import Batch, PreferenceBatch
from jaxformer.layers import Transformer
from jaxformer.parallel import MeshConfig, join_parameters, make_mesh, put_batch, split_parameters
from jaxformer.training import train_step as step
from jaxformer.training.gradient import DPO, Objective, make_value_and_grad
from jaxformer.training.pmap_train_step import make_pmap_train_step
from jaxformer.training.skip_step import init_skip_state

VOCAB, P, T = 32, 8, 16
CONFIG = c.TransformerConfig(
    vocab_size=VOCAB,
    model_dim=16,
    num_layers=1,
    attention=c.MultiHead(num_heads=4, num_kv_heads=2, head_dim=6),
    feed_forward=(c.GLU(hidden_dim=12),),
)
ADAPTED = replace(CONFIG, adapter=c.LoRA(rank=2))
BETA = 0.7
OBJECTIVE = DPO(beta=BETA)


def draw_rows(rng):
    """Rows of prompts of 3 tokens and answers of 1 to 13, filled with segment 0."""
    places, ends = np.arange(T), rng.integers(3, T, (P, 1))
    return Batch(
        tokens=rng.integers(0, VOCAB, (P, T), np.int32),
        targets=rng.integers(0, VOCAB, (P, T), np.int32),
        positions=np.where(places <= ends, places, 0).astype(np.int32),
        segments=(places <= ends).astype(np.int32),
        loss_mask=(places >= 3) & (places <= ends),
    )


@cache
def draw_batch():
    rng = np.random.default_rng(0)
    rows = draw_rows(rng), draw_rows(rng)
    references = (
        np.where(x.loss_mask, rng.normal(-3, 1, (P, T)), 0).astype(np.float32) for x in rows
    )
    return PreferenceBatch(*rows, *references)


@cache
def draw_params(config):
    init = jax.jit(Transformer(config).init)
    params = jax.device_get(init(jax.random.key(0), np.zeros((1, 2), np.int32)))["params"]
    wave = lambda x: np.float32(0.05 * np.cos(np.arange(x.size))).reshape(x.shape)  # noqa: E731
    return jax.tree.map(lambda x: x + wave(x), params)


def mesh_of(**sizes):
    return make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod([*sizes.values()]))])


@partial(jax.jit, static_argnums=0)
def log_likelihoods(config, params, rows):
    """Log-likelihood of every target, from whole logits."""
    logits = Transformer(config).apply(
        {"params": params}, rows.tokens, positions=rows.positions, segments=rows.segments
    )
    log_p = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_p, jnp.asarray(rows.targets)[..., None], -1)[..., 0]


@cache
def expected(config):
    """The loss in float64, and its gradient in the closed form of the paper's section 4."""
    batch, params = draw_batch(), draw_params(config)
    log_p = [np.float64(log_likelihoods(config, params, rows)) for rows in batch[:2]]
    ratios = [
        np.sum(x - reference, axis=-1, where=rows.loss_mask)
        for x, rows, reference in zip(log_p, batch[:2], batch[2:], strict=True)
    ]
    margins = BETA * (ratios[0] - ratios[1])
    weights = np.float32(-BETA / (1 + np.exp(margins)) / P)
    split = split_parameters(config.adapter, params)

    @jax.jit
    @jax.grad
    def gradient(trained):
        params = join_parameters(split.frozen, trained)
        chosen, rejected = (
            jnp.sum(log_likelihoods(config, params, rows), -1, where=rows.loss_mask)
            for rows in batch[:2]
        )
        return jnp.sum(weights * (chosen - rejected))

    gradients = gradient(split.trained)
    return np.mean(np.log1p(np.exp(-margins))), jax.device_get(gradients)


def assert_close(actual, wanted):
    def compare(x, y):
        np.testing.assert_allclose(x, y, atol=3e-6 * np.abs(y).max(), rtol=1e-5)

    jax.tree.map(compare, actual, wanted)


def actual(config, *, steps=1, objective=OBJECTIVE, **sizes):
    mesh = mesh_of(**sizes)
    value_and_grad = make_value_and_grad(
        Transformer(config), mesh, objective=objective, gradient_accumulation_steps=steps
    )
    batch = put_batch(draw_batch(), mesh, P)
    frozen, trained = split_parameters(config.adapter, draw_params(config))
    return jax.device_get(jax.jit(value_and_grad)(trained, frozen, jnp.int32(0), batch))


def test_loss_and_gradient_are_those_of_the_formula_in_float64():
    assert_close(actual(CONFIG, data=1), expected(CONFIG))


@pytest.mark.slow
def test_a_mesh_and_microbatches_change_nothing():
    assert_close(actual(CONFIG, data=2, tensor=2, context=2, steps=2), expected(CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"data": 8}, {"fsdp": 4, "tensor": 2}, {"data": 1, "fsdp": 2, "context": 4}], ids=str
)
@pytest.mark.parametrize("config", [CONFIG, ADAPTED], ids=["whole", "adapter"])
def test_every_mesh_has_the_same_gradient(config, sizes):
    assert_close(actual(config, **sizes), expected(config))


@pytest.mark.slow
def test_routers_are_balanced_beside_it():
    experts = c.MoE(expert=c.GLU(hidden_dim=12), num_experts=4, top_k=2)
    config = replace(CONFIG, feed_forward=(experts,))
    plain = actual(config, objective=DPO(beta=BETA, load_balance=0.0, router_z_loss=0.0), data=1)
    assert_close(plain, expected(config))
    balanced = DPO(beta=BETA, load_balance=0.5)
    one = actual(config, objective=balanced, data=1)
    assert one[0] - plain[0] > 0.4  # a loss of at least 1, whose weight is 0.5
    assert_close(actual(config, objective=balanced, data=2, expert=2, tensor=2), one)


@pytest.mark.slow
def test_under_pmap():
    update = make_pmap_train_step(
        Transformer(CONFIG), optax.sgd(1.0), objective=DPO(beta=BETA, load_balance=0.0)
    )
    params = jax.tree.map(jnp.copy, draw_params(CONFIG))
    state = step.TrainState(
        jnp.int32(0), {}, params, optax.sgd(1.0).init(params), init_skip_state()
    )
    batch = jax.tree.map(lambda x: x.reshape(2, P // 2, T), draw_batch())
    state, metrics = jax.device_get(update(state, batch))
    loss, gradients = expected(CONFIG)
    after = jax.tree.map(lambda x, g: x - g, draw_params(CONFIG), gradients)
    assert_close((metrics.loss, state.params), (loss, after))


@pytest.mark.parametrize(
    "sizes",
    [{"data": 1}, pytest.param({"data": 2, "tensor": 2, "context": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_log_likelihoods_are_those_of_the_targets_in_their_order(sizes):
    mesh, rows, params = mesh_of(**sizes), draw_batch().chosen, draw_params(CONFIG)
    log_likelihood_step = step.make_log_likelihood_step(Transformer(CONFIG), mesh)
    result = log_likelihood_step(params, put_batch(rows, mesh, P))
    assert result.is_fully_replicated
    wanted = np.where(rows.loss_mask, log_likelihoods(CONFIG, params, rows), 0)
    np.testing.assert_allclose(result, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"beta": 0.0}, "beta must be positive; got 0.0"),
        ({"z_loss": 1e-4}, "DPO has no z_loss; got 0.0001"),
        ({"label_smoothing": 0.1}, "DPO has no label_smoothing; got 0.1"),
        ({"load_balance": -1.0}, "load_balance must be at least 0; got -1.0"),
    ],
)
def test_options_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DPO(**fields)


def test_a_batch_of_another_kind():
    with pytest.raises(ValueError, match="belong together; got Objective and PreferenceBatch"):
        actual(CONFIG, objective=Objective(), data=1)
