"""jaxformer inside other code: plain JAX, Equinox, NNX, Haiku, and other training loops.

Formulas are written a second time here, in float64 numpy, and slopes are differences of those.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import bridge
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from jaxformer import Transformer
from jaxformer import functional as F
from jaxformer.config import GLU, MultiHead, Rope, TransformerConfig

T, D, N, K, H, V = 7, 6, 4, 2, 6, 11  # tokens, width, heads, of keys and values, their width, ids
HIDDEN, DEPTH = 5, 3
DEVICES = 8  # of tests/conftest.py; a row of data for each
TIMES = np.arange(T, dtype=np.int32)


def drawn(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


class Case(NamedTuple):
    """The same thing twice: with jaxformer inside, and as a formula in numpy."""

    function: Callable[[Any, jax.Array], jax.Array]  # of weights and one row of data
    formula: Callable[[Any, np.ndarray], np.ndarray]
    weights: Any


# Formulas, in float64.


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def rms(w, x):
    return w["scale"] * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)


def turned(x, frequencies):
    """Feature j as cosine and feature j + C as sine, turned by position times frequency."""
    angle = np.arange(T)[:, None, None] * frequencies
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            first * np.sin(angle) + second * np.cos(angle),
        ],
        axis=-1,
    )


def attended(query, key, value):
    """Causal, head by head and token by token; query heads share keys in their order."""
    output = np.zeros(query.shape)
    for n in range(N):
        for t in range(T):
            keys, values = (x[: t + 1, n // (N // K)] for x in (key, value))
            output[t, n] = softmax(keys @ query[t, n] / math.sqrt(H)) @ values
    return output


def in_heads(w, x):
    return [np.einsum("td,dnh->tnh", x, w[name]) for name in ("query", "key", "value")]


def block(w, x):
    """Attention with rotary positions, then a gated unit, each after a norm and added."""
    frequencies = 10_000.0 ** (-np.arange(H // 2) / (H // 2))
    query, key, value = in_heads(w, rms({"scale": w["first"]}, x))
    heads = attended(turned(query, frequencies), turned(key, frequencies), value)
    x = x + np.einsum("tnh,nhd->td", heads, w["out"])
    y = rms({"scale": w["second"]}, x)
    return x + (silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


# The same with jaxformer, as somebody would write it in plain JAX.


def projected(w, x):
    return [jnp.einsum("td,dnh->tnh", x, w[name]) for name in ("query", "key", "value")]


def dense_heads(query, key, value):
    """What the modules below share: no parameters, rotary positions, causal."""
    rotations = F.rope_rotations(TIMES, F.rope_frequencies(H))
    query, key = F.rotate(query, rotations), F.rotate(key, rotations)
    return F.dot_product_attention(query, key, value, F.causal_mask(TIMES, TIMES))


def plain_block(w, x):
    y = F.rms_norm(x, w["first"])
    x = x + jnp.einsum("tnh,nhd->td", dense_heads(*projected(w, y)), w["out"])
    y = F.rms_norm(x, w["second"])
    return x + F.swiglu(y @ w["gate"], y @ w["up"]) @ w["down"]


def weights_of(**shapes):
    return {name: drawn(*shape, seed=i) / 2 for i, (name, shape) in enumerate(shapes.items())}


def plain():
    kernels = weights_of(query=(D, N, H), key=(D, K, H), value=(D, K, H), out=(N, H, D))
    kernels |= weights_of(gate=(D, HIDDEN), up=(D, HIDDEN), down=(HIDDEN, D))
    kernels |= {"first": 1 + drawn(D, seed=8) / 4, "second": 1 + drawn(D, seed=9) / 4}
    return Case(plain_block, block, kernels)


# Equinox: the module is the tree of its weights.


class EquinoxBlock(eqx.Module):
    first: jax.Array
    second: jax.Array
    inwards: dict[str, eqx.nn.Linear]
    out: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = iter(jax.random.split(key, 7))
        self.first, self.second = jnp.full(D, 1.2), jnp.full(D, 0.7)

        def linear(inside, outside):
            return eqx.nn.Linear(inside, outside, use_bias=False, key=next(keys))

        self.inwards = {"query": linear(D, N * H), "key": linear(D, K * H)}
        self.inwards |= {"value": linear(D, K * H), "gate": linear(D, HIDDEN)}
        self.inwards |= {"up": linear(D, HIDDEN)}
        self.out, self.down = linear(N * H, D), linear(HIDDEN, D)

    def __call__(self, x):
        def into(name, y):
            return jax.vmap(self.inwards[name])(y)

        y = F.rms_norm(x, self.first)
        heads = dense_heads(
            *(into(name, y).reshape(T, -1, H) for name in ("query", "key", "value"))
        )
        x = x + jax.vmap(self.out)(heads.reshape(T, N * H))
        y = F.rms_norm(x, self.second)
        return x + jax.vmap(self.down)(F.swiglu(into("gate", y), into("up", y)))


def of_equinox(m, x):
    """Its kernels are [out, in]."""
    w = {name: layer.weight.T for name, layer in m.inwards.items()}
    w |= {name: w[name].reshape(D, -1, H) for name in ("query", "key", "value")}
    w |= {"first": m.first, "second": m.second, "down": m.down.weight.T}
    return block(w | {"out": m.out.weight.T.reshape(N, H, D)}, x)


def equinox():
    return Case(lambda module, x: module(x), of_equinox, EquinoxBlock(jax.random.key(0)))


# NNX: the module is an object, split into its structure and its state.


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.first, self.second = nnx.Param(jnp.full(D, 1.2)), nnx.Param(jnp.full(D, 0.7))
        self.query, self.key, self.value = (linear(D, (heads, H)) for heads in (N, K, K))
        self.out = linear((N, H), D, axis=(-2, -1))
        self.gate, self.up, self.down = (
            linear(*sizes) for sizes in ((D, HIDDEN), (D, HIDDEN), (HIDDEN, D))
        )

    def __call__(self, x):
        y = F.rms_norm(x, self.first[...])
        x = x + self.out(dense_heads(self.query(y), self.key(y), self.value(y)))
        y = F.rms_norm(x, self.second[...])
        return x + self.down(F.swiglu(self.gate(y), self.up(y)))


def of_nnx(state, x):
    w = nnx.to_pure_dict(state)
    return block({name: v["kernel"] if isinstance(v, dict) else v for name, v in w.items()}, x)


def nnx_pure():
    structure, state = nnx.split(NnxBlock(nnx.Rngs(0)))
    return Case(lambda state, x: nnx.merge(structure, state)(x), of_nnx, state)


# Haiku: a function that asks for parameters becomes a pure one.


def haiku_block(x):
    def linear(name, size):
        return hk.Linear(size, with_bias=False, name=name)

    def norm(name, y):
        return F.rms_norm(y, hk.get_parameter(name, (D,), init=hk.initializers.RandomUniform(1, 2)))

    y = norm("first", x)
    sizes = {"query": N, "key": K, "value": K}
    heads = dense_heads(*(linear(k, n * H)(y).reshape(T, n, H) for k, n in sizes.items()))
    x = x + linear("out", D)(heads.reshape(T, N * H))
    y = norm("second", x)
    hidden = F.swiglu(linear("gate", HIDDEN)(y), linear("up", HIDDEN)(y))
    return x + linear("down", D)(hidden)


def of_haiku(params, x):
    """Linear layers by their names; the norms' scales belong to no module of their own."""
    w = {}
    for module, arrays in params.items():
        w |= {module.split("/")[-1]: arrays["w"]} if "w" in arrays else arrays
    w |= {name: w[name].reshape(D, -1, H) for name in ("query", "key", "value")}
    return block(w | {"out": w["out"].reshape(N, H, D)}, x)


def haiku():
    pure = hk.without_apply_rng(hk.transform(haiku_block))
    return Case(pure.apply, of_haiku, pure.init(jax.random.key(0), drawn(T, D)))


BLOCKS = {"plain JAX": plain, "Equinox": equinox, "NNX": nnx_pure, "Haiku": haiku}


@functools.cache
def case_of(name):
    return BLOCKS[name]()


# What is expected: values of the formula, and its slope along some direction of the weights.


def weighed(xp, y):
    """Some weighted sum of all numbers."""
    return xp.vdot(xp.cos(xp.arange(y.size, dtype=y.dtype)), y.ravel())


def in_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def noise_like(tree, seed=0):
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda x: generator.normal(size=x.shape), tree)


def several(weights, count):
    """Weights of so many layers or models, stacked; all different."""
    weights = jax.device_get(weights)
    layers = [
        jax.tree.map(lambda w, n: w * np.float32(1 + n / 5), weights, noise_like(weights, i))
        for i in range(count)
    ]
    return jax.tree.map(lambda *w: jax.device_put(np.stack(w)), *layers)


ROWS = drawn(DEVICES, T, D, seed=99)


def formula_of_rows(formula, weights, rows):
    """Values, and the slope of their weighted sum along the noise."""
    rows, weights, noise = (in_float64(x) for x in (rows, weights, noise_like(weights)))

    def moved(step):
        at = jax.tree.map(lambda w, n: w + step * n, weights, noise)
        return np.stack([formula(at, row) for row in rows])

    up, down = (sum(weighed(np, y) for y in moved(step)) for step in (1e-5, -1e-5))
    return moved(0.0), (up - down) / 2e-5


@functools.cache
def expected(name):
    case = case_of(name)
    return formula_of_rows(case.formula, case.weights, ROWS)


def along_noise(gradient):
    products = jax.tree.map(np.vdot, in_float64(gradient), noise_like(gradient))
    return sum(jax.tree.leaves(products))


def check_close(actual, wanted, tolerance=3e-5):
    np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance)


# Their transforms: each takes a function of (weights, row), and gives one of (weights, rows)
# whose answer is the values of all rows, and the gradient in the weights of their weighted sum.


def with_gradient(function):
    def loss(weights, row):
        y = function(weights, row)
        return weighed(jnp, y), y

    def gradient(weights, row):
        slopes, y = jax.grad(loss, has_aux=True)(weights, row)
        return y, slopes

    return gradient


def with_gradient_of_all(function):
    def loss(weights, rows):
        y = jax.vmap(function, (None, 0))(weights, rows)
        return jnp.sum(jax.vmap(functools.partial(weighed, jnp))(y)), y

    def gradient(weights, rows):
        slopes, y = jax.grad(loss, has_aux=True)(weights, rows)
        return y, slopes

    return gradient


def added_up(pairs):
    y, slopes = pairs
    return y, jax.tree.map(lambda x: jnp.sum(x, axis=0), slopes)


def by_vmap(function):
    """A gradient for each row, as in private learning."""
    return jax.jit(lambda *a: added_up(jax.vmap(with_gradient(function), (None, 0))(*a)))


def by_remat(function):
    return jax.jit(with_gradient_of_all(jax.checkpoint(function)))


def by_shard_map(function):
    """Weights on all devices, a row on each; JAX adds up gradients of what all devices share."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(
        jax.shard_map(
            with_gradient_of_all(function),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P("data"), P()),
        )
    )


def by_pmap(function):
    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0))
    def on_each(weights, row):
        y, slopes = with_gradient(function)(weights, row)
        return y, jax.lax.psum(slopes, "data")

    def replicated(weights, rows):
        y, slopes = on_each(weights, rows)
        return y, jax.tree.map(lambda x: x[3], slopes)

    return replicated


def by_grad(function):
    return jax.jit(with_gradient_of_all(function))


TRANSFORMS = {
    "grad": by_grad,
    "vmap": by_vmap,
    "remat": by_remat,
    "shard_map": by_shard_map,
    "pmap": by_pmap,
}
every_block = pytest.mark.parametrize("name", BLOCKS)


@functools.cache
def answer(name, transform):
    case = case_of(name)
    return TRANSFORMS[transform](case.function)(case.weights, ROWS)


@pytest.mark.parametrize("transform", TRANSFORMS)
@every_block
@pytest.mark.slow
def test_values_and_slopes_are_those_of_the_formula(name, transform):
    y, gradient = answer(name, transform)
    values, slope = expected(name)
    assert y.dtype == jnp.float32 and y.shape == values.shape
    check_close(y, values)
    np.testing.assert_allclose(along_noise(gradient), slope, rtol=2e-4)


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
@every_block
@pytest.mark.slow
def test_gradients_on_eight_devices_are_those_of_one(name, transform):
    _, gradient = answer(name, transform)
    _, on_one_device = answer(name, "grad")
    jax.tree.map(check_close, gradient, on_one_device)
    assert jax.device_count() == DEVICES


def next_input(xp, x, y):
    return y if y.shape == x.shape else x + xp.tanh(xp.mean(y))


def in_depth(formula):
    """One layer after the other; the values of all."""

    def deep(stacked, row):
        values = []
        for i in range(DEPTH):
            values.append(formula(jax.tree.map(lambda w, i=i: w[i], stacked), row))
            row = next_input(np, row, values[-1])
        return np.stack(values)

    return deep


@every_block
@pytest.mark.slow
def test_scan_over_stacked_weights_is_one_layer_after_the_other(name):
    case = case_of(name)

    def deep(stacked, row):
        def layer(x, weights):
            y = case.function(weights, x)
            return next_input(jnp, x, y), y

        return jax.lax.scan(layer, row, stacked)[1]

    stacked, row = several(case.weights, DEPTH), ROWS[0]
    y, gradient = jax.jit(with_gradient(deep))(stacked, row)
    (values,), slope = formula_of_rows(in_depth(case.formula), stacked, row[None])
    check_close(y, values, 1e-4)
    np.testing.assert_allclose(along_noise(gradient), slope, rtol=3e-4)


@every_block
@pytest.mark.slow
def test_vmap_over_many_weights_is_each_of_them(name):
    case = case_of(name)
    many, row = several(case.weights, DEPTH), ROWS[0]
    actual = jax.jit(jax.vmap(case.function, (0, None)))(many, row)
    for i in range(DEPTH):
        weights = in_float64(jax.tree.map(lambda w, i=i: w[i], many))
        check_close(actual[i], case.formula(weights, in_float64(row)))


# Transforms of the libraries' own, each over a stack of three blocks.


def last_of(formula):
    return lambda stacked, row: in_depth(formula)(stacked, row)[-1]


ROW = drawn(T, D, seed=42)


@pytest.mark.slow
def test_equinox_filters_and_stacks():
    layers = eqx.filter_vmap(EquinoxBlock)(jax.random.split(jax.random.key(1), DEPTH))

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def loss(layers, row):
        arrays, rest = eqx.partition(layers, eqx.is_array)

        def layer(x, arrays):
            return eqx.filter_checkpoint(eqx.combine(arrays, rest))(x), None

        y, _ = jax.lax.scan(layer, row, arrays)
        return weighed(jnp, y), y

    (_, y), gradient = loss(layers, ROW)
    (values,), slope = formula_of_rows(last_of(of_equinox), layers, ROW[None])
    check_close(y, values, 1e-4)
    np.testing.assert_allclose(along_noise(gradient), slope, rtol=3e-4)


@pytest.mark.slow
def test_nnx_lifted_transforms():
    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return NnxBlock(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def through(layer, x):
        return layer(x)

    @nnx.jit
    @nnx.value_and_grad(has_aux=True)
    def loss(layers, row):
        y = through(layers, row)
        return weighed(jnp, y), y

    layers = make(nnx.Rngs(1))
    (_, y), gradient = loss(layers, ROW)
    (values,), slope = formula_of_rows(last_of(of_nnx), nnx.state(layers), ROW[None])
    check_close(y, values, 1e-4)
    np.testing.assert_allclose(along_noise(gradient), slope, rtol=3e-4)


@pytest.mark.slow
def test_haiku_stacks_and_remat():
    def model(x):
        return hk.experimental.layer_stack(DEPTH)(hk.remat(haiku_block))(x)

    pure = hk.without_apply_rng(hk.transform(model))
    params = jax.jit(pure.init)(jax.random.key(1), ROW)
    y, gradient = jax.jit(with_gradient(pure.apply))(params, ROW)
    (values,), slope = formula_of_rows(last_of(of_haiku), params, ROW[None])
    check_close(y, values, 1e-4)
    np.testing.assert_allclose(along_noise(gradient), slope, rtol=3e-4)


# The linen model in training loops of others.

MODEL = Transformer(
    TransformerConfig(
        vocab_size=V,
        model_dim=8,
        num_layers=2,
        attention=MultiHead(num_heads=2, num_kv_heads=1, head_dim=4, positions=(Rope(),)),
        feed_forward=(GLU(hidden_dim=12, activation="silu"),),
        norm_placement="pre",
    ),
    attention_implementation="xla",
)
TEXT = np.int32([[1, 4, 2, 8, 5, 7, 1], [3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])


@functools.cache
def initial():
    return jax.jit(MODEL.init)(jax.random.key(0), TEXT)["params"]


@jax.jit
def logits_of(params):
    return MODEL.apply({"params": params}, TEXT)


def loss_of(params):
    """Nothing of jaxformer but the model."""
    logits = MODEL.apply({"params": params}, TEXT[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, TEXT[:, 1:]).mean()


OPTIMIZER = optax.adam(0.03)
STEPS = 40
# Adam multiplies integers with floats, which the tests' strict promotion refuses.
as_jax_promotes = functools.partial(jax.numpy_dtype_promotion, "standard")
gradient_of = jax.jit(jax.grad(loss_of))


@functools.cache
def trained():
    params = initial()
    state, losses = OPTIMIZER.init(params), []

    @jax.jit
    def step(params, state):
        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, state = OPTIMIZER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    with as_jax_promotes():
        for _ in range(STEPS):
            params, state, loss = step(params, state)
            losses.append(float(loss))
    return params, losses


@pytest.mark.slow
def test_the_model_learns_in_a_plain_optax_loop():
    _, losses = trained()
    assert abs(losses[0] - math.log(V)) < 1
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.slow
def test_train_state_makes_the_same_updates():
    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.grad(loss_of)(state.params))

    state = TrainState.create(apply_fn=MODEL.apply, params=initial(), tx=OPTIMIZER)
    with as_jax_promotes():
        for _ in range(STEPS):
            state = step(state)
    assert int(state.step) == STEPS
    check_close(state.apply_fn({"params": state.params}, TEXT), logits_of(trained()[0]), 1e-3)


@pytest.mark.slow
def test_the_model_inside_an_nnx_module():
    class Classifier(nnx.Module):
        """Somebody's head on the logits of the last token."""

        def __init__(self, rngs):
            self.model = bridge.ToNNX(MODEL, rngs=rngs).lazy_init(TEXT)
            self.head = nnx.Linear(V, 2, rngs=rngs)

        def __call__(self, tokens):
            return self.head(self.model(tokens)[:, -1])

    classifier = Classifier(nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(classifier.model, nnx.Param))
    check_close(classifier.model(TEXT), logits_of(params))
    labels = jnp.array([0, 1, 1])
    optimizer = nnx.Optimizer(classifier, OPTIMIZER, wrt=nnx.Param)

    def loss_of_labels(classifier):
        logits = classifier(TEXT)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @nnx.jit
    def step(classifier, optimizer):
        loss, gradient = nnx.value_and_grad(loss_of_labels)(classifier)
        optimizer.update(classifier, gradient)
        return loss

    with as_jax_promotes():
        losses = [float(step(classifier, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]
    after = nnx.to_pure_dict(nnx.state(classifier.model, nnx.Param))
    assert jax.tree.structure(after) == jax.tree.structure(initial())
    moved = jax.tree.map(lambda old, new: bool(jnp.any(old != new)), params, after)
    assert all(jax.tree.leaves(moved))  # the gradient reached every parameter of ours


# Parameters are plain trees.


def types_within(tree):
    """Of the tree and all that it holds, whatever JAX would take for a tree."""
    below = tree.values() if isinstance(tree, dict) else ()
    return {type(tree)}.union(*map(types_within, below))


@pytest.mark.slow
def test_parameters_are_dicts_of_arrays():
    assert types_within(initial()) == {dict, type(jnp.zeros(()))}
    doubled = jax.tree.map(lambda x: 2 * x, initial())
    assert types_within(doubled) == types_within(initial())
    assert jax.tree.structure(doubled) == jax.tree.structure(initial())


def test_paths_of_parameters_are_text_and_go_to_json_and_back():
    flat = flatten_dict(initial(), sep="/")
    shapes = {path: list(x.shape) for path, x in flat.items()}
    assert json.loads(json.dumps(shapes)) == shapes
    assert all(part.isidentifier() for path in flat for part in path.split("/"))
    again = unflatten_dict(flat, sep="/")
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, again, initial()))


@pytest.mark.slow
def test_parameters_survive_a_file_of_numpy(tmp_path):
    np.savez(tmp_path / "params.npz", **flatten_dict(initial(), sep="/"))
    with np.load(tmp_path / "params.npz", allow_pickle=False) as file:
        loaded = unflatten_dict(dict(file), sep="/")
    np.testing.assert_array_equal(logits_of(loaded), logits_of(initial()))


@pytest.mark.slow
def test_frozen_parameters_work():
    frozen = flax.core.freeze(initial())
    np.testing.assert_array_equal(logits_of(frozen), logits_of(initial()))
    gradient = gradient_of(frozen)
    assert jax.tree.structure(gradient) == jax.tree.structure(frozen)
    assert type(flax.core.unfreeze(frozen)) is dict


@pytest.mark.slow
def test_vmap_over_an_ensemble_is_each_member():
    def init(key):
        return MODEL.init(key, TEXT)["params"]

    ensemble = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(1), 3))
    actual, losses = jax.jit(jax.vmap(lambda p: (logits_of(p), loss_of(p))))(ensemble)
    assert actual.shape == (3, *TEXT.shape, V) and len(set(losses.tolist())) == 3
    for i in range(3):
        member = jax.tree.map(lambda x, i=i: x[i], ensemble)
        check_close(actual[i], logits_of(member))


# Forward mode, and second derivatives.


def dot(a, b):
    return sum(jax.tree.leaves(jax.tree.map(np.vdot, in_float64(a), in_float64(b))))


def direction(seed):
    """Of length one."""
    noise = noise_like(initial(), seed)
    return jax.tree.map(lambda n: jnp.asarray(n / math.sqrt(dot(noise, noise)), "float32"), noise)


def moved(step, along):
    return jax.tree.map(lambda p, v: p + step * v, initial(), along)


@pytest.mark.slow
def test_jvp_is_the_slope_along_a_direction():
    along = direction(1)
    forward = jax.jit(lambda p, v: jax.jvp(loss_of, (p,), (v,)))
    loss, slope = forward(initial(), along)
    np.testing.assert_allclose(slope, dot(gradient_of(initial()), along), rtol=1e-4)
    up, down = (forward(moved(step, along), along)[0] for step in (3e-3, -3e-3))
    check_close(loss, (up + down) / 2, 1e-3)
    np.testing.assert_allclose(slope, (up - down) / 6e-3, rtol=1e-2)


@pytest.mark.slow
def test_hessian_vector_products():
    @jax.jit
    def forward_over_reverse(p, v):
        return jax.jvp(jax.grad(loss_of), (p,), (v,))[1]

    @jax.jit
    def reverse_over_reverse(p, v):
        return jax.grad(lambda p: optax.tree.vdot(jax.grad(loss_of)(p), v))(p)

    u, v = direction(1), direction(2)
    product = forward_over_reverse(initial(), v)
    jax.tree.map(lambda *x: check_close(*x, 1e-3), product, reverse_over_reverse(initial(), v))
    crosswise = dot(v, forward_over_reverse(initial(), u))
    np.testing.assert_allclose(dot(u, product), crosswise, rtol=1e-3)
    up, down = (gradient_of(moved(step, v)) for step in (2e-3, -2e-3))
    np.testing.assert_allclose(dot(u, product), (dot(u, up) - dot(u, down)) / 4e-3, rtol=1e-2)
