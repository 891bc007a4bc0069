import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from jaxformer import functional as F
from jaxformer.config import (
    GLU,
    Dropout,
    EncoderDecoder,
    MoE,
    MultiHead,
    TransformerConfig,
    from_json,
)
from jaxformer.data import Batch, PairBatch
from jaxformer.layers import Transformer
from jaxformer.parallel import MeshConfig, make_mesh, parameter_metadata, put_batch, replicated
from jaxformer.training import gradient as gradient_module
from jaxformer.training import pmap_train_step as pmap_step
from jaxformer.training import train_step as step
from jaxformer.training.gradient import Objective
from jaxformer.training.optimizers import AdamW, OptimizerConfig, make_optimizer
from jaxformer.training.pmap_train_step import make_pmap_train_step
from jaxformer.training.schedules import Constant
from jaxformer.training.skip_step import init_skip_state

VOCAB, T = 31, 7
CONFIG = TransformerConfig(
    vocab_size=VOCAB,
    model_dim=14,
    num_layers=2,
    attention=MultiHead(num_heads=2, num_kv_heads=1, head_dim=6),
    feed_forward=(GLU(hidden_dim=11),),
)
TRANSLATING = replace(CONFIG, num_layers=1, topology=EncoderDecoder(num_encoder_layers=1))
DROPPING = replace(CONFIG, dropout=Dropout(residual=0.5, embedding=0.5))
# Tokens that count in each of eight rows: another number on each device and in each part.
COUNTS = (7, 1, 4, 0, 6, 2, 0, 5)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "step.json").read_text())


def data_mesh(devices):
    return make_mesh(MeshConfig(), jax.devices()[:devices])


def put(batch, mesh):
    return put_batch(batch, mesh, len(batch.tokens))


def make_batch(counts=COUNTS, seed=0):
    rng = np.random.default_rng(seed)
    rows = len(counts)
    return Batch(
        tokens=rng.integers(0, VOCAB, (rows, T), np.int32),
        targets=rng.integers(0, VOCAB, (rows, T), np.int32),
        positions=np.tile(np.int32([0, 1, 2, 0, 1, 2, 3]), (rows, 1)),
        segments=np.tile(np.int32([1, 1, 1, 2, 2, 2, 2]), (rows, 1)),
        loss_mask=np.arange(T) < np.asarray(counts)[:, None],
    )


@functools.cache
def draw(config):
    """Parameters from their names and shapes alone, as in golden/step.py."""
    key, tokens = jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    source = tokens if isinstance(config.topology, EncoderDecoder) else None
    shapes = jax.eval_shape(lambda: Transformer(config).init(key, tokens, source=source))["params"]

    def start(path, x):
        wave = np.cos(np.arange(x.size) * 0.7 + len(keystr(path))).reshape(x.shape)
        return jnp.asarray(np.float32(0.3 * wave + float(path[-1].key == "scale")))

    return tree_map_with_path(start, shapes)


def put_state(mesh, params, optimizer):
    state = step.TrainState(jnp.int32(0), {}, params, optimizer.init(params), init_skip_state())
    return jax.device_put(jax.tree.map(np.asarray, state), replicated(mesh))


# Moves every parameter by its gradient and keeps the gradient, which the equality tests read.
RECORDER = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda gradients, state, params=None: (gradients, gradients),
)


@functools.cache
def compiled(devices=1, accumulation=1, objective=Objective(), config=CONFIG, seed=0):
    mesh = data_mesh(devices)
    update = step.make_train_step(
        Transformer(config),
        RECORDER,
        mesh,
        objective=objective,
        gradient_accumulation_steps=accumulation,
        seed=seed,
    )
    return mesh, update


def gradient(batch, *, config=CONFIG, steps=0, **how):
    """Loss and gradient that one update sees, after `steps` earlier updates."""
    mesh, update = compiled(config=config, **how)
    state = put_state(mesh, draw(config), RECORDER)._replace(
        step=jax.device_put(np.int32(steps), replicated(mesh))
    )
    state, metrics = jax.device_get(update(state, put(batch, mesh)))
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(state.opt_state)))
    np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-5)
    return metrics.loss, state.opt_state


@functools.cache
def reference(z_loss=0.0, label_smoothing=0.0):
    """The same from `F.cross_entropy` of the whole batch, on one device."""

    def loss(params, batch):
        logits = Transformer(CONFIG).apply(
            {"params": params}, batch.tokens, positions=batch.positions, segments=batch.segments
        )
        return F.cross_entropy(
            logits,
            batch.targets,
            mask=batch.loss_mask,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )

    return jax.jit(jax.value_and_grad(loss))


def expected(batch, **objective):
    return jax.device_get(reference(**objective)(draw(CONFIG), jax.tree.map(jnp.asarray, batch)))


def assert_close(actual, wanted, *, atol=1e-7):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol)


def largest_difference(actual, wanted):
    parts = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), actual, wanted)
    return max(jax.tree.leaves(parts))


# Known values


def test_three_updates_have_the_golden_losses_and_parameters():
    config = from_json(TransformerConfig, json.dumps(GOLDEN["config"]))
    settings = dict(GOLDEN["optimizer"])
    schedule = Constant(peak=settings.pop("peak"))
    rule = OptimizerConfig(schedule=schedule, optimizer=AdamW(**settings))
    optimizer = make_optimizer(rule, 3, parameter_metadata(config))
    mesh = data_mesh(1)
    kinds = {"loss_mask": bool}
    rows = {n: np.asarray(x, kinds.get(n, np.int32)) for n, x in GOLDEN["batch"].items()}
    batch = put(Batch(**rows), mesh)
    update = step.make_train_step(Transformer(config), optimizer, mesh)
    state = put_state(mesh, draw(config), optimizer)
    for number, golden in enumerate(GOLDEN["steps"], start=1):
        state, metrics = update(state, batch)
        assert int(state.step) == number
        np.testing.assert_allclose(metrics.loss, golden["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics.gradient_norm, golden["gradient_norm"], rtol=1e-5)
        leaves, _ = tree_flatten_with_path(jax.device_get(state.params))
        actual = {keystr(p, simple=True, separator="/"): x.ravel()[:3] for p, x in leaves}
        assert actual.keys() == golden["entries"].keys()
        for name, entries in golden["entries"].items():
            np.testing.assert_allclose(actual[name], entries, atol=1e-5, err_msg=name)


# The mean over the tokens that count


@pytest.mark.parametrize(
    "devices, accumulation",
    [pytest.param(1, 1, marks=pytest.mark.exhaustive), (8, 1), (2, 4)],
    ids=lambda n: str(n),
)
@pytest.mark.slow
def test_inventory_row_89_any_split_of_the_batch_gives_the_gradient_of_the_whole(
    devices, accumulation
):
    """inventory row 89: the loss is the mean over tokens that count, also across shards.

    The rows hold 7, 1, 4, 0, 6, 2, 0 and 5 of them, so that no two splits are alike.
    """
    batch = make_batch()
    actual = gradient(batch, devices=devices, accumulation=accumulation)
    assert_close(actual, expected(batch))
    # Every parameter moved, or their equality would say nothing.
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(actual[1]))


@pytest.mark.slow
def test_inventory_row_89_the_mean_of_the_shards_means_is_another_number():
    """inventory row 89: what the sharded loss must not be; here 3% off and 0.05 in a gradient."""
    batch = make_batch()
    rows = np.arange(8)[:, None]
    shards = [expected(batch._replace(loss_mask=batch.loss_mask & (rows == i))) for i in range(8)]
    means = jax.tree.map(lambda *xs: np.mean(xs, axis=0), *shards)
    loss, whole = expected(batch)
    assert abs(means[0] - loss) > 0.03 * loss
    assert largest_difference(means[1], whole) > 0.05


@pytest.mark.slow
def test_rows_that_do_not_count_change_nothing():
    batch = make_batch()
    counts = np.asarray(COUNTS)
    other = make_batch(seed=1)
    changed = jax.tree.map(lambda x, y: np.where(counts[:, None] == 0, y, x), batch, other)
    changed = changed._replace(loss_mask=batch.loss_mask)
    assert np.any(changed.tokens != batch.tokens)
    assert_close(gradient(changed, devices=8), gradient(batch, devices=8), atol=0)


@pytest.mark.slow
def test_a_batch_in_which_nothing_counts_gives_zero():
    loss, gradients = gradient(make_batch(counts=(0,) * 8))
    assert loss == 0
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_the_objective_enters():
    batch, terms = make_batch(), {"z_loss": 0.3, "label_smoothing": 0.2}
    actual = gradient(batch, devices=2, objective=Objective(**terms))
    assert_close(actual, expected(batch, **terms))


@pytest.mark.slow
def test_the_load_of_experts_is_balanced_over_the_whole_batch():
    """Against the formulas of Switch and ST-MoE, written out for one device."""
    experts = MoE(expert=GLU(hidden_dim=5), num_experts=4)
    config = replace(CONFIG, feed_forward=(experts, GLU(hidden_dim=7)), num_layers=3)
    batch = jax.tree.map(jnp.asarray, make_batch())
    objective = Objective(load_balance=0.7, router_z_loss=0.2)

    def loss(params):
        logits, collections = Transformer(config).apply(
            {"params": params},
            batch.tokens,
            positions=batch.positions,
            segments=batch.segments,
            mutable=["router"],
        )
        decoder = collections["router"]["decoder"]
        routers = [
            decoder["layers"]["layer_0"]["feed_forward"]["logits"][0][0],
            decoder["tail"]["layer_0"]["feed_forward"]["logits"][0],
        ]
        extra = 0.0
        for router in routers:
            scores = router[batch.loss_mask]
            p = jax.nn.softmax(scores)
            best_two = jnp.argsort(-p, axis=-1)[:, :2]
            share = jnp.mean(jax.nn.one_hot(best_two, 4), axis=(0, 1))
            extra += 0.7 * 4 * jnp.sum(share * jnp.mean(p, axis=0))
            extra += 0.2 * jnp.mean(jnp.log(jnp.sum(jnp.exp(scores), axis=-1)) ** 2)
        return F.cross_entropy(logits, batch.targets, mask=batch.loss_mask) + extra / 2

    expected = jax.device_get(jax.jit(jax.value_and_grad(loss))(draw(config)))
    actual = gradient(batch, devices=8, objective=objective, config=config)
    assert_close(actual, expected, atol=1e-6)


# Pairs


SOURCE_LENGTHS = np.int32([5, 1, 4, 2, 5, 3, 1, 2])


def make_pairs(seed=0):
    """Sources of several lengths; anything may stand in their padding."""
    rng = np.random.default_rng(seed)
    batch = make_batch(seed=seed)
    return PairBatch(
        source=rng.integers(0, VOCAB, (8, 5), np.int32),
        source_segments=np.int32(np.arange(5) < SOURCE_LENGTHS[:, None]),
        tokens=batch.tokens,
        targets=batch.targets,
        loss_mask=batch.loss_mask,
    )


@functools.cache
def pairs_on(devices):
    return gradient(make_pairs(), config=TRANSLATING, devices=devices)


@pytest.mark.slow
def test_pairs_on_eight_devices_give_the_gradient_of_one():
    loss, gradients = pairs_on(1)
    assert_close(pairs_on(8), (loss, gradients))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradients))
    batch = jax.tree.map(jnp.asarray, make_pairs())
    logits = jax.jit(Transformer(TRANSLATING).apply)(
        {"params": draw(TRANSLATING)},
        batch.tokens,
        source=batch.source,
        source_segments=batch.source_segments,
    )
    expected = F.cross_entropy(logits, batch.targets, mask=batch.loss_mask)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.slow
def test_what_stands_in_the_padding_of_pairs_changes_nothing():
    """Neither in the source's, nor behind the end of the target."""
    batch, other = make_pairs(), make_pairs(seed=1)
    changed = batch._replace(
        source=np.where(batch.source_segments == 1, batch.source, other.source),
        tokens=np.where(batch.loss_mask, batch.tokens, other.tokens),
        targets=np.where(batch.loss_mask, batch.targets, other.targets),
    )
    assert not all(np.array_equal(a, b) for a, b in zip(batch, changed, strict=True))
    assert_close(gradient(changed, config=TRANSLATING), pairs_on(1), atol=0)


@pytest.mark.slow
def test_pairs_are_tallied_and_start_from_a_state_with_an_encoder():
    mesh, model = data_mesh(8), Transformer(TRANSLATING)
    abstract = step.abstract_train_state(model, RECORDER, mesh)
    assert {"decoder", "encoder", "embedding", "head"} == abstract.params.keys()
    tally = step.make_eval_step(model, mesh)(draw(TRANSLATING), put(make_pairs(), mesh))
    assert int(tally.num_tokens) == sum(COUNTS)
    np.testing.assert_allclose(tally.nll_sum, pairs_on(1)[0] * sum(COUNTS), rtol=1e-5)


# pmap


@functools.cache
def pmapped(config):
    return make_pmap_train_step(Transformer(config), RECORDER)


@pytest.mark.parametrize("counts", [(5,) * 8, COUNTS], ids=["equal counts", "unequal counts"])
@pytest.mark.slow
def test_inventory_row_89_under_pmap_the_mean_follows_the_gradient(counts):
    """inventory row 89: under pmap each device differentiates its own share of the mean.

    With the mean over devices after the gradient, that share is its sum of losses times the number
    of devices over the tokens of all; equal counts make it the device's own `F.cross_entropy`.
    """
    batch = make_batch(counts)
    state = step.TrainState(
        jnp.int32(0), {}, draw(CONFIG), RECORDER.init(draw(CONFIG)), init_skip_state()
    )
    state = jax.tree.map(jnp.copy, state)  # it is consumed
    state, metrics = pmapped(CONFIG)(state, jax.tree.map(lambda x: x[:, None], batch))
    loss, gradients = expected(batch)
    assert int(state.step) == 1
    for device in (0, 7):
        device_state = jax.tree.map(lambda x: np.asarray(x.addressable_shards[device].data), state)  # noqa: B023
        assert_close((metrics.loss, device_state.opt_state), (loss, gradients))


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.slow
def test_pmap_compiles_once_for_a_state_on_every_device(placed, monkeypatch):
    traced = []

    def summed_loss(model, objective, params, batch, key, *, axis_names):
        traced.append(axis_names)
        return sum(jnp.sum(x) for x in jax.tree.leaves(params))

    monkeypatch.setattr(pmap_step, "summed_loss", summed_loss)
    update = make_pmap_train_step(Transformer(CONFIG), RECORDER)
    state = step.TrainState(
        jnp.int32(0), {}, draw(CONFIG), RECORDER.init(draw(CONFIG)), init_skip_state()
    )
    state = jax.tree.map(jnp.copy, state)  # it is consumed
    if placed:
        state = jax.device_put(state, NamedSharding(Mesh(jax.devices(), ("data",)), P()))
    batch = jax.tree.map(lambda x: x[:, None], make_batch(COUNTS))
    for _ in range(3):
        state, _ = update(state, batch)
    once = placed or jax.__version_info__ < (0, 8)  # whose pmap gave its state back in any place
    assert len(traced) == (1 if once else 2)


# Dropout


class Keys:
    """A stand-in for the loss whose gradient at row r is a number drawn from the key of r."""

    def __init__(self, monkeypatch):
        def summed_loss(model, objective, params, batch, key, *, axis_names):
            column = table(params)[batch.tokens[:, 0], 0]
            return jnp.sum(column) * jax.random.uniform(key)

        def table(params):
            return params["embedding"]["tokens"]["embedding"]

        self.table = table

        monkeypatch.setattr(gradient_module, "summed_loss", summed_loss)

    def __call__(self, *, devices=1, accumulation=1, steps=1, seed=0):
        """Numbers of [step, row]."""
        mesh = data_mesh(devices)
        update = step.make_train_step(
            Transformer(CONFIG), RECORDER, mesh, gradient_accumulation_steps=accumulation, seed=seed
        )
        batch = make_batch(counts=(1,) + (0,) * 7)  # one token counts, so nothing is divided
        batch = batch._replace(tokens=np.tile(np.arange(8, dtype=np.int32)[:, None], (1, T)))
        state, rows = put_state(mesh, draw(CONFIG), RECORDER), []
        for _ in range(steps):
            state, _ = update(state, put(batch, mesh))
            rows.append(np.asarray(self.table(state.opt_state))[:8, 0])
        return np.stack(rows)


@pytest.mark.slow
def test_dropout_keys_differ_by_step_device_and_part(monkeypatch):
    numbers = Keys(monkeypatch)(devices=2, accumulation=2, steps=3)
    shared = numbers.reshape(3, 2, 2, 2)  # step, device, row of the part, part
    assert np.all(shared[:, :, 0] == shared[:, :, 1])
    assert len(np.unique(numbers)) == 3 * 2 * 2


@pytest.mark.slow
def test_dropout_keys_are_a_function_of_seed_and_step(monkeypatch):
    draw_keys = Keys(monkeypatch)
    first = draw_keys(devices=2, steps=2)
    np.testing.assert_array_equal(draw_keys(devices=2, steps=2), first)
    assert not np.any(draw_keys(devices=2, steps=2, seed=1) == first)


@pytest.mark.slow
def test_training_drops_out():
    batch = make_batch()
    loss, gradients = gradient(batch, config=DROPPING)
    assert abs(loss - expected(batch)[0]) > 0.01
    assert_close(gradient(batch, config=DROPPING), (loss, gradients), atol=0)
    assert gradient(batch, config=DROPPING, steps=1)[0] != loss


@pytest.mark.slow
def test_attention_by_blocks_drops_out_on_every_device():
    """Devices with equal rows drop other weights; one seed drops the same ones again."""
    length = 272  # of several blocks of queries and keys
    rng = np.random.default_rng(0)
    row = rng.integers(0, VOCAB, (1, length + 1), np.int32)
    tokens = np.tile(row, (2, 1))
    ones = np.ones((2, length), np.int32)
    at = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], at, ones, ones > 0)
    dropping = replace(CONFIG, dropout=Dropout(attention=0.5))
    loss, gradients = gradient(batch, config=dropping, devices=2)
    assert_close(gradient(batch, config=dropping, devices=2), (loss, gradients), atol=0)
    same = jax.tree.map(lambda x: x[:1], batch)
    alone, plain = gradient(same, config=dropping)[1], gradient(same)[1]

    def value_of(gradients):
        return gradients["decoder"]["layers"]["layer_0"]["attention"]["value"]["kernel"]

    slope, size = value_of(gradients), np.max(np.abs(value_of(plain)))
    assert np.max(np.abs(slope - value_of(plain))) > 0.05 * size  # it drops
    assert np.max(np.abs(slope - value_of(alone))) > 0.05 * size  # and devices drop their own
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))


# State


@pytest.mark.slow
def test_a_fresh_state_is_the_same_on_any_number_of_devices_and_fits_its_abstract():
    states, config = [], replace(CONFIG, num_layers=1)
    for devices in (1, 8):
        mesh = data_mesh(devices)
        arguments = Transformer(config), RECORDER
        states.append(step.init_train_state(*arguments, jax.random.key(3), mesh))
        abstract = step.abstract_train_state(*arguments, mesh)
        assert jax.tree.structure(abstract) == jax.tree.structure(states[-1])
        pairs = zip(jax.tree.leaves(abstract), jax.tree.leaves(states[-1]), strict=True)
        for shape, x in pairs:
            assert (shape.shape, shape.dtype) == (x.shape, x.dtype)
            assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)
            assert x.sharding.device_set == set(mesh.devices.flat)
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert int(states[0].step) == 0
    draws = [leaf for leaf in jax.tree.leaves(states[0].params) if np.std(leaf) > 0]
    assert draws, "no parameter is random"


def test_a_mesh_that_does_not_divide_the_model_is_named():
    mesh = make_mesh(MeshConfig(tensor=4), jax.devices()[:4])
    with pytest.raises(ValueError, match=r"vocab_size 31 is not divisible by tensor 4"):
        step.init_train_state(Transformer(CONFIG), RECORDER, jax.random.key(0), mesh)


@pytest.mark.slow
def test_parameters_of_one_device_are_shared_out_over_a_mesh():
    """Such as those of a model that was loaded."""
    mesh, model = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2]), Transformer(CONFIG)
    loaded = jax.device_put(draw(CONFIG), jax.devices()[0])
    expected = jax.device_get(loaded)
    state = step.init_train_state(model, RECORDER, jax.random.key(0), mesh, params=loaded)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected)
    where = jax.tree.map(lambda x: x.sharding, step.abstract_train_state(model, RECORDER, mesh))
    assert jax.tree.map(lambda x: x.sharding, state) == where


@pytest.mark.slow
def test_parameters_that_are_passed_in_bfloat16_are_trained_in_float32():
    mesh, model = data_mesh(1), Transformer(CONFIG)
    loaded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), draw(CONFIG))
    expected = jax.tree.map(lambda x: np.asarray(x, np.float32), loaded)
    state = step.init_train_state(model, RECORDER, jax.random.key(0), mesh, params=loaded)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(
        lambda x: x.dtype, step.abstract_train_state(model, RECORDER, mesh)
    )
    jax.tree.map(np.testing.assert_array_equal, state.params, expected)


@pytest.mark.slow
def test_a_tiny_model_learns_four_rows_by_heart_and_its_states_are_consumed():
    batch = make_batch(counts=(7, 7, 7, 7))
    optimizer = make_optimizer(
        OptimizerConfig(schedule=Constant(peak=0.02), optimizer=AdamW(weight_decay=0.0)),
        60,
        parameter_metadata(CONFIG),
    )
    mesh, model = data_mesh(1), Transformer(CONFIG)
    state = step.init_train_state(model, optimizer, jax.random.key(0), mesh)
    update, rows, losses = step.make_train_step(model, optimizer, mesh), put(batch, mesh), []
    for _ in range(60):
        before = state
        state, metrics = update(before, rows)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        losses.append(float(metrics.loss))
    assert losses[0] == pytest.approx(np.log(VOCAB), abs=1.0)
    assert losses[-1] < 0.1 * losses[0]
    assert int(state.step) == 60


# Evaluation


@functools.cache
def counting():
    """Of a model with dropout, which evaluation leaves out."""
    return step.make_eval_step(Transformer(DROPPING), data_mesh(8))


def count(batch):
    return counting()(draw(CONFIG), put(batch, data_mesh(8)))


@pytest.mark.slow
def test_the_tally_sums_what_counts_over_devices_without_dropout():
    batch = make_batch()
    tally = count(batch)
    loss, _ = expected(batch)
    assert int(tally.num_tokens) == sum(COUNTS)
    np.testing.assert_allclose(tally.nll_sum, loss * sum(COUNTS), rtol=1e-5)
    assert tally.nll_sum.dtype == jnp.float32


def test_the_tally_ignores_padding_rows():
    batch = make_batch()
    padding = np.asarray(COUNTS)[:, None] == 0
    padded = jax.tree.map(lambda x: np.where(padding, np.zeros_like(x), x), batch)
    assert jax.device_get(count(padded)) == jax.device_get(count(batch))
    nothing = count(make_batch(counts=(0,) * 8))
    assert (float(nothing.nll_sum), int(nothing.num_tokens)) == (0.0, 0)


# Objectives


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"z_loss": -1e-4}, "z_loss must be at least 0; got -0.0001"),
        ({"load_balance": -0.5}, "load_balance must be at least 0; got -0.5"),
        ({"router_z_loss": -2.0}, "router_z_loss must be at least 0; got -2.0"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\); got 1.0"),
    ],
)
def test_an_impossible_objective_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Objective(**fields)
