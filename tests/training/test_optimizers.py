import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

from jaxformer import zoo
from jaxformer.config import BranchScale, Decay, Differential, Latent, SharedKV
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.parallel import ParameterMetadata, parameter_metadata
from jaxformer.training.optimizers import (
    SGD,
    Adafactor,
    AdamW,
    Lion,
    Muon,
    OptimizerConfig,
    make_optimizer,
)
from jaxformer.training.schedules import Constant, Cosine, make_schedule
from tests.small_models import random_params

GOLDEN_FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "optimizers.json").read_text())
OPTIMIZERS = [AdamW(), Adafactor(), Lion(), Muon(), SGD()]
by_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
STACKED = "decoder/layers/layer_0"
ALONE = "decoder/tail/layer_0"
LAYER = {
    "attention/query/kernel": (7, 2, 5),
    "attention/query/bias": (2, 5),
    "attention/out/kernel": (2, 5, 7),
    "feed_forward/up/kernel": (7, 11),
    "pre_attention_norm/scale": (7,),
}
AXES = {
    "embedding/embedding": "vocabulary -> model",
    "head/kernel": "model -> vocabulary",
    "head/bias": "vocabulary",
    "query/kernel": "model -> heads features",
    "query/bias": "heads features",
    "out/kernel": "heads features -> model",
    "out/bias": "features",
    "up/kernel": "model -> hidden",
    "pre_attention_norm/scale": "features",
}
SHAPES = {
    "embedding/embedding": (13, 7),
    "head/kernel": (7, 13),
    "head/bias": (13,),
    **{f"{STACKED}/{name}": (3, *shape) for name, shape in LAYER.items()},
    f"{ALONE}/feed_forward/up/kernel": (7, 11),
}
ONE_OF_EACH_ROLE = [
    "embedding/embedding",
    "head/kernel",
    f"{STACKED}/attention/query/kernel",
    f"{STACKED}/attention/query/bias",
    f"{STACKED}/pre_attention_norm/scale",
]
RNG = np.random.default_rng(0)


def draw(*shape):
    return np.float32(RNG.normal(size=shape))


def tree(flat):
    root = {}
    for path, leaf in flat.items():
        *modules, name = path.split("/")
        node = root
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = leaf
    return root


def flat(root):
    return {keystr(p, simple=True, separator="/"): x for p, x in tree_leaves_with_path(root)}


def declared(root):
    """What a model would declare of parameters like these."""

    def metadata_of(path, shape):
        names, outputs = parse_logical_axes(AXES["/".join(path.split("/")[-2:])])
        stacked = ("layers",) if STACKED in path else ()
        return ParameterMetadata(shape, (*stacked, *names), outputs)

    return tree({path: metadata_of(path, jnp.shape(x)) for path, x in flat(root).items()})


@pytest.fixture
def params():
    return tree({path: draw(*shape) for path, shape in SHAPES.items()})


@pytest.fixture
def grads():
    return tree({path: draw(*shape) for path, shape in SHAPES.items()})


def one_of_each_role(root):
    return tree({path: flat(root)[path] for path in ONE_OF_EACH_ROLE})


@functools.cache
def _step_of(config, declared, treedef):
    transform = make_optimizer(config, 100, treedef.unflatten(declared))

    @jax.jit
    def step(params, state, grads):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(transform.init), step


def step_of(config, params):
    leaves, treedef = jax.tree.flatten(declared(params))
    return _step_of(config, tuple(leaves), treedef)


def run(optimizer, params, gradients, *, peak=0.03, clip_norm=None, **config):
    """Parameters after each gradient."""
    config = OptimizerConfig(
        schedule=Constant(peak=peak), optimizer=optimizer, clip_norm=clip_norm, **config
    )
    init, step = step_of(config, params)
    state, steps = init(params), []
    for grads in gradients:
        params, state = step(params, state, grads)
        steps.append(params)
    return steps


def kernel(matrix):
    return tree({f"{ALONE}/feed_forward/up/kernel": np.float32(matrix)})


def matrix_of(params):
    return params["decoder"]["tail"]["layer_0"]["feed_forward"]["up"]["kernel"]


# Known values


@pytest.mark.parametrize(
    "name, optimizer",
    [
        ("adamw", AdamW(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.2)),
        ("sgd", SGD(momentum=0.7)),
        ("nesterov", SGD(momentum=0.7, nesterov=True)),
        ("plain", SGD(momentum=0.0)),
        ("adafactor", Adafactor(weight_decay=0.2)),
        ("muon", Muon(momentum=0.8, weight_decay=0.2)),
    ],
)
def test_five_updates_match_torch(name, optimizer):
    steps = run(optimizer, kernel(GOLDEN["start"]), map(kernel, GOLDEN["gradients"]))
    ours = np.stack([matrix_of(x) for x in steps])
    np.testing.assert_allclose(ours, GOLDEN[name], rtol=2e-5, atol=2e-6)


def test_lion_matches_the_written_out_rule():
    x, mean, expected = np.asarray(GOLDEN["start"]), 0.0, []
    for g in np.asarray(GOLDEN["gradients"]):
        x = x - 0.03 * (np.sign(0.7 * mean + 0.3 * g) + 0.2 * x)
        mean = 0.8 * mean + 0.2 * g
        expected.append(x)
    optimizer = Lion(b1=0.7, b2=0.8, weight_decay=0.2)
    steps = run(optimizer, kernel(GOLDEN["start"]), map(kernel, GOLDEN["gradients"]))
    np.testing.assert_allclose([matrix_of(x) for x in steps], expected, rtol=1e-5, atol=1e-6)


def test_adafactor_matches_the_written_out_rule_for_heads_and_vectors():
    shapes = {f"{ALONE}/attention/out/kernel": (2, 5, 7), f"{ALONE}/attention/out/bias": (7,)}
    x = tree({path: draw(*shape) for path, shape in shapes.items()})
    gradients = [tree({p: draw(*s) for p, s in shapes.items()}) for _ in range(3)]
    last = flat(run(Adafactor(min_scale=0.5), x, gradients)[-1])
    for path in shapes:
        y = np.asarray(flat(x)[path], np.float64)
        flattened = y.reshape(-1, 7) if path.endswith("kernel") else y
        row = column = v = 0.0
        for t, grads in enumerate(gradients, start=1):
            g = np.asarray(flat(grads)[path], np.float64).reshape(flattened.shape)
            b = 1 - t**-0.8
            if g.ndim == 2:
                row = b * row + (1 - b) * np.mean(g**2, axis=1, keepdims=True)
                column = b * column + (1 - b) * np.mean(g**2, axis=0, keepdims=True)
                estimate = row * column / np.mean(row)
            else:
                v = b * v + (1 - b) * g**2
                estimate = v
            u = g / np.sqrt(estimate)
            u = u / max(1, np.sqrt(np.mean(u**2)))
            size = max(0.5, np.sqrt(np.mean(flattened**2)))
            flattened = flattened - 0.03 * size * u
        np.testing.assert_allclose(last[path], flattened.reshape(y.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_clipping_bounds_the_global_norm_in_float32():
    x = tree({"up/kernel": jnp.zeros((2, 2)), "out/bias": jnp.zeros(1)})
    g = tree({"up/kernel": jnp.full((2, 2), 2.0), "out/bias": jnp.full(1, 3.0)})  # norm 5
    (clipped,) = run(SGD(momentum=0.0), x, [g], peak=1.0, clip_norm=2.0)
    np.testing.assert_allclose(clipped["up"]["kernel"], np.full((2, 2), -0.8), rtol=1e-6)
    np.testing.assert_allclose(clipped["out"]["bias"], [-1.2], rtol=1e-6)
    still, _ = run(SGD(momentum=0.0), x, [x, x], peak=1.0, clip_norm=2.0)
    np.testing.assert_array_equal(still["out"]["bias"], np.zeros(1, np.float32))
    (whole,) = run(SGD(momentum=0.0), x, [g], peak=1.0, clip_norm=6.0)
    np.testing.assert_array_equal(whole["out"]["bias"], np.full(1, -3, np.float32))


@pytest.mark.slow
def test_updates_follow_the_schedule_that_is_logged():
    config = OptimizerConfig(
        schedule=Cosine(peak=0.5, warmup_steps=3), optimizer=SGD(momentum=0.0), clip_norm=None
    )
    x = kernel(np.zeros((1, 1)))
    transform, rate = make_optimizer(config, 9, declared(x)), make_schedule(config.schedule, 9)
    state, change = transform.init(x), jax.jit(transform.update)
    for step in range(9):
        update, state = change(kernel(np.ones((1, 1))), state, x)
        np.testing.assert_allclose(-matrix_of(update)[0, 0], rate(step), rtol=1e-6)


# Roles


@pytest.mark.slow
def test_roles_and_matrices_of_every_preset_are_those_that_stood_in_a_table_of_names():
    """The table was recorded when names of modules and parameters decided.

    Gates of RG-LRU and of short convolutions have one name: a place lists each role and matrix.
    """
    roles = {}
    for config in dict.fromkeys(zoo.get(name).tiny() for name in zoo.names()):
        for path, x in tree_leaves_with_path(parameter_metadata(config)):
            place = re.sub(r"layer_\d+", "layer_*", keystr(path, simple=True, separator="/"))
            matrix = list(map(list, x.input_and_output_axes)) if x.num_output_axes else None
            kinds = roles.setdefault(f"{place} {len(x.shape)}", [])
            if [x.role, matrix] not in kinds:
                kinds.append([x.role, matrix])
    assert roles == json.loads((GOLDEN_FOLDER / "roles.json").read_text())


@pytest.mark.parametrize("roles", [("kernel", "head"), ("embedding", "vector")])
@by_optimizer
def test_only_the_named_roles_decay(optimizer, roles, params):
    optimizer = dataclasses.replace(optimizer, weight_decay=0.5)
    if isinstance(optimizer, Muon):
        optimizer = dataclasses.replace(optimizer, adamw=AdamW(weight_decay=0.5))
    params = one_of_each_role(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    (after,) = run(optimizer, params, [zeros], peak=0.1, decay_roles=roles)
    kinds = "embedding", "head", "kernel", "vector", "vector"
    for path, role in zip(ONE_OF_EACH_ROLE, kinds, strict=True):
        factor = 0.95 if role in roles else 1.0
        np.testing.assert_allclose(flat(after)[path], factor * flat(params)[path], rtol=1e-6)


@pytest.mark.parametrize("optimizer", [AdamW(), Muon(), SGD()], ids=lambda o: type(o).__name__)
@pytest.mark.slow(but=["AdamW", "SGD"])
def test_decay_stays_out_of_the_statistics(optimizer, params, grads):
    path = f"{STACKED}/attention/query/kernel"
    params, grads = one_of_each_role(params), one_of_each_role(grads)
    free, decayed = (
        run(dataclasses.replace(optimizer, weight_decay=decay), params, [grads], peak=0.1)[0]
        for decay in (0.0, 0.5)
    )
    np.testing.assert_allclose(
        flat(free)[path] - flat(decayed)[path], 0.05 * flat(params)[path], atol=1e-6
    )


# Matrices


@pytest.mark.parametrize(
    "kind",
    [
        SharedKV(num_heads=4, num_kv_heads=2, head_dim=6),
        Differential(num_heads=4, num_kv_heads=2, head_dim=6),
        Latent(num_heads=4, latent_dim=5, query_latent_dim=9, nope_dim=3, rope_dim=2, value_dim=7),
        Decay(num_heads=4, head_dim=6),
    ],
    ids=lambda kind: type(kind).__name__,
)
def test_kernels_of_all_kinds_of_attention_are_one_matrix_each(kind):
    """None of their own axes counts matrices, and the model's width is a whole side."""
    config = dataclasses.replace(zoo.get("llama-2-70b").tiny(), attention=kind)
    for path, x in tree_leaves_with_path(parameter_metadata(config)):
        place = keystr(path, simple=True, separator="/")
        if "attention" in place and place.endswith("kernel"):
            inputs, outputs = x.input_and_output_axes
            assert (*inputs, *outputs) == tuple(range(1, len(x.shape)))
            sides = [x.logical_axes[i] for i in inputs], [x.logical_axes[i] for i in outputs]
            latent = isinstance(kind, Latent) and path[-2].key in ("query", "key", "value")
            assert x.role == "kernel" and (["model"] in sides or latent), place


@pytest.mark.slow
def test_muon_updates_have_the_asked_root_mean_square_whatever_the_shape(params, grads):
    still = dataclasses.replace(Muon(), weight_decay=0.0, adamw=AdamW(weight_decay=0.0))
    (after,) = run(still, params, [grads], peak=1.0)
    for path, x in flat(params).items():
        if path.endswith("kernel") and path != "head/kernel":
            size = np.sqrt(np.mean(np.square(flat(after)[path] - x)))
            assert 0.68 * 0.2 < size < 1.21 * 0.2, path


def test_the_rest_of_muon_is_adamw_at_its_own_rate(params, grads):
    adamw = AdamW(weight_decay=0.3)
    params, grads = one_of_each_role(params), one_of_each_role(grads)
    mixed = flat(run(Muon(adamw=adamw, adamw_rate=0.25), params, [grads, grads], peak=0.04)[-1])
    alone = flat(run(adamw, params, [grads, grads], peak=0.01)[-1])
    for path in mixed:
        same = np.allclose(mixed[path], alone[path], rtol=1e-6, atol=1e-7)
        assert same != (path.endswith("kernel") and path != "head/kernel"), path


# Laws of every optimizer


@by_optimizer
@pytest.mark.slow
def test_a_stack_of_layers_is_updated_as_each_layer_alone(optimizer):
    shapes = {f"{STACKED}/{name}": (3, *shape) for name, shape in LAYER.items()}
    params, *gradients = (tree({p: draw(*s) for p, s in shapes.items()}) for _ in range(3))
    together = flat(run(optimizer, params, gradients)[-1])

    def layer(root, i):
        return tree({p.replace(STACKED, ALONE): x[i] for p, x in flat(root).items()})

    for i in range(3):
        alone = flat(run(optimizer, layer(params, i), [layer(g, i) for g in gradients])[-1])
        for name in LAYER:
            np.testing.assert_allclose(
                together[f"{STACKED}/{name}"][i], alone[f"{ALONE}/{name}"], rtol=1e-5, atol=1e-5
            )


@by_optimizer
@pytest.mark.slow(but=["AdamW", "Lion", "Muon", "SGD"])
def test_state_is_float32_and_updates_have_the_dtype_of_the_parameters(optimizer, params, grads):
    half, grads = (
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), one_of_each_role(x)) for x in (params, grads)
    )
    config = OptimizerConfig(schedule=Constant(peak=0.1), optimizer=optimizer)
    transform = make_optimizer(config, 10, declared(half))
    state = transform.init(half)
    assert {x.dtype.name for x in jax.tree.leaves(state)} <= {"float32", "int32"}
    assert jax.eval_shape(transform.init, half) == jax.eval_shape(lambda: state)
    updates, after = jax.jit(transform.update)(grads, state, half)
    assert jax.eval_shape(lambda: after) == jax.eval_shape(lambda: state)
    assert all(u.dtype == jnp.bfloat16 for u in jax.tree.leaves(updates))
    assert all(np.any(np.asarray(u) != 0) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e12])
@by_optimizer
def test_extreme_gradients_give_finite_updates(optimizer, size, params, grads):
    gradient = jax.tree.map(lambda g: np.float32(size) * np.asarray(g), grads)
    steps = run(optimizer, params, [gradient, gradient])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(steps[-1]))


@by_optimizer
def test_every_optimizer_goes_downhill(optimizer, params):
    losses = []

    def gradients():  # of the sum of squares, at wherever the run is
        for _ in range(8):
            leaves = [np.asarray(x) for x in jax.tree.leaves(here[-1])]
            losses.append(sum(np.sum(np.square(x)) for x in leaves))
            yield jax.tree.map(lambda x: np.float32(2) * np.asarray(x), here[-1])

    config = OptimizerConfig(schedule=Constant(peak=0.03), optimizer=optimizer, clip_norm=None)
    init, step = step_of(config, params)
    here, state = [params], init(params)
    for gradient in gradients():
        x, state = step(here[-1], state, gradient)
        here.append(x)
    assert np.all(np.diff(losses) < 0)


# Users' mistakes


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: AdamW(b1=1.0), r"AdamW.b1 must be in \[0, 1\); got 1.0"),
        (lambda: AdamW(b2=-0.1), r"AdamW.b2 must be in \[0, 1\); got -0.1"),
        (lambda: AdamW(eps=0.0), "AdamW.eps must be positive; got 0.0"),
        (lambda: AdamW(weight_decay=-1.0), "AdamW.weight_decay must be at least 0; got -1.0"),
        (lambda: Adafactor(clip=0.0), "Adafactor.clip must be positive; got 0.0"),
        (lambda: Adafactor(min_scale=0.0), "Adafactor.min_scale must be positive; got 0.0"),
        (lambda: Adafactor(decay_exponent=-1.0), "Adafactor.decay_exponent must be positive"),
        (lambda: Lion(b2=2.0), r"Lion.b2 must be in \[0, 1\); got 2.0"),
        (lambda: Muon(momentum=1.5), r"Muon.momentum must be in \[0, 1\); got 1.5"),
        (lambda: Muon(rms=-0.2), "Muon.rms must be positive; got -0.2"),
        (lambda: Muon(adamw_rate=0.0), "Muon.adamw_rate must be positive; got 0.0"),
        (lambda: SGD(momentum=1.0), r"SGD.momentum must be in \[0, 1\); got 1.0"),
        (
            lambda: OptimizerConfig(schedule=Constant(peak=1.0), clip_norm=0.0),
            "clip_norm must be positive; got 0.0",
        ),
        (
            lambda: make_optimizer(
                OptimizerConfig(schedule=Constant(peak=1.0, warmup_steps=9)), 3, {}
            ),
            "warmup_steps=9 and 0 steps of decay do not fit into total_steps=3",
        ),
    ],
)
def test_impossible_settings_are_refused_with_their_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_vectors_of_the_models_width_keep_length_one():
    """Of kernels, embeddings and head, after the update; vectors of features have none."""
    config = dataclasses.replace(zoo.get("llama-2-7b").tiny(), residual=BranchScale(start=0.5))
    params, metadata = random_params(config), parameter_metadata(config)
    gradients = jax.tree.map(lambda x: np.float32(1.5 * np.cos(x)), params)
    rule = OptimizerConfig(
        schedule=Constant(peak=0.1), optimizer=SGD(momentum=0.0), clip_norm=None, unit_vectors=True
    )
    optimizer = make_optimizer(rule, 3, metadata)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    seen = set()
    for (path, m), p, g, update in zip(
        tree_leaves_with_path(metadata),
        *map(jax.tree.leaves, (params, gradients, updates)),
        strict=True,
    ):
        expected = np.float64(p) - 0.1 * np.float64(g)
        if m.num_output_axes or m.role == "embedding":
            axis = m.logical_axes.index("model")
            expected /= np.sqrt((expected**2).sum(axis, keepdims=True))
            seen.add((m.role, axis))
        np.testing.assert_allclose(p + update, expected, atol=1e-6, err_msg=keystr(path))
    assert seen == {("kernel", 1), ("kernel", 2), ("kernel", 3), ("embedding", 1), ("head", 0)}
