"""What an option of a person's own file gives: taken if it is right, else refused by its name."""

import re
import traceback
from dataclasses import dataclass, replace
from functools import partial
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import costs, inspect, options
from jaxformer.config import GLU, MLP, Normal
from jaxformer.functional.activations import ACTIVATIONS
from jaxformer.layers import FeedForward, LayerState, empty_cache
from jaxformer.layers.attention.custom_mixer import CustomMixer
from jaxformer.layers.attention.score_bias import ScoreBiasModule
from jaxformer.layers.runtime import MeshAxes, RuntimeConfig
from jaxformer.parallel import abstract_parameters, check_divisible
from tests.small_models import BASE

D, N = BASE.model_dim, BASE.attention.num_heads
X = np.ones((2, 5, D), np.float32)
AT = np.arange(5)
NO_INPUTS = options.MixerInputs(None, None, None)
SQUARE = options.Parameter((D, D), "model -> features")


def traced(module, *inputs):
    """Its answer by shapes alone, as `jit` and `scan` have it."""
    return jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), *inputs)[0])


def feed_forward(answer, start=None):
    @dataclass(frozen=True, kw_only=True)
    class Mine(options.FeedForward):
        def parameters(self, model_dim):
            return {"w": SQUARE._replace(init=start)}

        def __call__(self, params, x):
            return answer(x @ params["w"])

    return Mine()


def mixer(answer, cache=None):
    @dataclass(frozen=True, kw_only=True)
    class Mine(options.Mixer):
        num_heads: int = 2

        def parameters(self, model_dim):
            return {"w": SQUARE}

        def __call__(self, params, x, inputs, cache):
            return answer(x @ params["w"], cache)

        def empty_cache(self, batch, room, dtype):
            return cache(batch)

        def flops(self, model_dim, length):
            return answer(model_dim, length)

    return Mine()


def bias(answer, constants=None):
    @dataclass(frozen=True, kw_only=True)
    class Mine(options.ScoreBias):
        def parameters(self, num_heads):
            return {"w": options.Parameter((num_heads,), "heads", 1.0)}

        def constants(self, num_heads):
            return {} if constants is None else constants(num_heads)

        def __call__(self, params, query_positions, key_positions, *, causal):
            away = query_positions[:, None] - key_positions[None, :]
            return answer(params["w"][:, None, None] * away.astype(jnp.float32)[None])

    return Mine()


def refused(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}")


VECTORS = {  # instead of vectors (2, 5, 14)
    "pooled": (lambda y: y.mean(-2, keepdims=True), " of shape (2, 5, 14); got (2, 1, 14)."),
    "narrow": (lambda y: y[..., :1], " of shape (2, 5, 14); got (2, 5, 1)."),
    "another width": (lambda y: y[..., :3], " of shape (2, 5, 14); got (2, 5, 3)."),
    "one text": (lambda y: y[0], " of shape (2, 5, 14); got (5, 14)."),
    "a number": (lambda y: 1.0, " of shape (2, 5, 14); got 1.0."),
    "nothing": (lambda y: None, " of shape (2, 5, 14); got None."),
    "a list": (lambda y: ["y"], " of shape (2, 5, 14); got ['y']."),
    "another dtype": (lambda y: y.astype("bfloat16"), " of dtype float32; got bfloat16."),
    "whole numbers": (lambda y: y.astype("int32"), " of dtype float32; got int32."),
}


@pytest.mark.parametrize("answer, message", VECTORS.values(), ids=VECTORS)
def test_vectors_of_another_shape_or_dtype_are_refused(answer, message):
    message = f"Mine must return [rows, tokens, width]{message}"
    with refused(message):
        traced(FeedForward(BASE, feed_forward(answer), RuntimeConfig()), X)
    kind = mixer(lambda y, cache: (answer(y), cache))
    module = CustomMixer(BASE, kind, RuntimeConfig())
    with refused(message):
        traced(module, X, NO_INPUTS)


PAIRS = {
    "vectors alone": (lambda y, cache: y, "Mine must return (vectors, cache); got "),
    "three": (lambda y, cache: (y, cache, 1), "Mine must return (vectors, cache); got "),
    "no cache": (
        lambda y, cache: (y, None),
        "Mine must return a cache like its input, float32(2, 2, 3); got None.",
    ),
    "a cache of one row": (
        lambda y, cache: (y, cache[:1]),
        "Mine must return a cache like its input, float32(2, 2, 3); got float32(1, 2, 3).",
    ),
    "a cache of another dtype": (
        lambda y, cache: (y, cache.astype("bfloat16")),
        "Mine must return a cache like its input, float32(2, 2, 3); got bfloat16(2, 2, 3).",
    ),
}


@pytest.mark.parametrize("answer, message", PAIRS.values(), ids=PAIRS)
def test_a_mixer_gives_vectors_and_the_cache_that_it_was_given(answer, message):
    module = CustomMixer(BASE, mixer(answer), RuntimeConfig())
    with refused(message):
        traced(module, X, NO_INPUTS, LayerState(np.zeros((2, 2, 3), np.float32)))


def test_in_training_a_mixer_keeps_nothing():
    module = CustomMixer(BASE, mixer(lambda y, cache: (y, y)), RuntimeConfig())
    with refused("Mine must return a cache like its input, None; got float32(2, 5, 14)."):
        traced(module, X, NO_INPUTS)


BIASES = {  # instead of a bias (4, 5, 5)
    "of one head": (lambda b: b[:1], " of shape (4, 5, 5); got (1, 5, 5)."),
    "of one query": (lambda b: b[:, :1], " of shape (4, 5, 5); got (4, 1, 5)."),
    "of no head": (lambda b: b[0], " of shape (4, 5, 5); got (5, 5)."),
    "a number": (lambda b: 0.5, " of shape (4, 5, 5); got "),
    "nothing": (lambda b: None, " of shape (4, 5, 5); got None."),
    "whole numbers": (lambda b: b.astype("int32"), " of dtype float32; got int32."),
    "of few digits": (lambda b: b.astype("bfloat16"), " of dtype float32; got bfloat16."),
}


@pytest.mark.parametrize("answer, message", BIASES.values(), ids=BIASES)
def test_a_bias_of_other_heads_queries_or_keys_is_refused(answer, message):
    with refused(f"Mine must return [heads, queries, keys]{message}"):
        traced(ScoreBiasModule(bias(answer), N, RuntimeConfig(), True), AT, AT)


CONSTANTS = {
    "a list": (lambda n: [np.ones(n)], "float arrays [heads, ...]; got [array([1., 1., 1., "),
    "a number": (lambda n: {"a": 1.0}, "float arrays [heads, ...]; got 1.0 for 'a'."),
    "whole numbers": (lambda n: {"a": np.arange(2)}, "[heads, ...]; got array([0, 1]) for 'a'."),
    "of other heads": (
        lambda n: {"a": np.ones((3, n))}, "[heads, ...] with 4 heads; got (3, 4) for 'a'."
    ),
    "no number": (lambda n: {"a": np.full(n, np.nan)}, "must not return NaN; 'a' has NaN."),
    "learned, too": (lambda n: {"w": np.ones(n)}, "Mine.constants and parameters both define 'w'."),
}  # fmt: skip


@pytest.mark.parametrize("constants, message", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_are_numbers_of_each_head(constants, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        traced(ScoreBiasModule(bias(lambda b: b, constants), N, RuntimeConfig(), True), AT, AT)


SQUEEZED = {
    "a_mean": (lambda x: x.mean(-1, keepdims=True), " of shape (2, 5, 3); got (2, 5, 1)."),
    "nothing": (lambda x: None, " of shape (2, 5, 3); got None."),
    "another_dtype": (lambda x: x.astype("float16"), " of dtype float32; got float16."),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_an_activation_gives_an_array_like_its_own(name, monkeypatch):
    function, message = SQUEEZED[name]
    function.__name__ = name
    monkeypatch.setitem(ACTIVATIONS, name, function)  # undone after the test
    del ACTIVATIONS[name]
    options.activation(function)
    into = {"up": jnp.ones((2, 5, 3)), "gate": jnp.ones((2, 5, 3))}
    for choice in (MLP, GLU):
        with refused(f"The activation {name!r} must return an array{message}"):
            jax.eval_shape(choice(hidden_dim=3, activation=name).activate, into)


@pytest.mark.parametrize("function", [lambda x: x, partial(jnp.maximum, 0), "relu", None])
def test_an_activation_has_a_name(function):
    with refused("An activation needs a name: define it by def name(x); got "):
        unwrap(options.activation)(function)  # as users have it, without beartype


def shaped(shape, axes="model -> features", start=None):
    return lambda d: {"w": options.Parameter(shape, axes, start)}


STARTS = "Mine.parameters: init of 'w' must be a finite number, a config initialiser such as "
SIZES = "Mine.parameters: the shape of 'w' must be a tuple of integers from 1 to 2147483647; got "
NAME = "Mine.parameters: the name of a parameter must be non-empty and without '/'; got "
DICT = "Mine.parameters must return a dict from names to Parameter; got "
DECLARED = {
    "nothing": (lambda d: None, DICT + "None."),
    "a list": (lambda d: [SQUARE], DICT + "[Parameter(shape=(14, 14), axes='model -> "),
    "a tuple": (lambda d: {"w": ((d, d), "model -> hidden")}, DICT + "((14, 14), 'model -> hidd"),
    "no name": (lambda d: {3: SQUARE}, DICT + "Parameter("),
    "an empty name": (lambda d: {"": SQUARE}, NAME + "''."),
    "a path": (lambda d: {"a/b": SQUARE}, NAME + "'a/b'."),
    "half a size": (shaped((14, 7.0)), SIZES + "(14, 7.0)."),
    "a size below 0": (shaped((14, -14)), SIZES + "(14, -14)."),
    "no size": (shaped((14, 0)), SIZES + "(14, 0)."),
    "truth": (shaped((14, True)), SIZES + "(14, True)."),
    "one number": (shaped(14), SIZES + "14."),
    "a misspelt word": (shaped((14, 3), "model -> haeds"), "Mine.parameters: 'w': Axes of a par"),
    "a word too few": (
        shaped((14, 3), "model"), "Mine.parameters: 'w' (14, 3) has 2 axes, but 'model' names 1."
    ),
    "no words": (shaped((14, 3), 2), "Mine.parameters: the axes of 'w' must be a string such as"),
    "a word for a start": (shaped((14, 3), start="ones"), STARTS),
    "no number": (shaped((14, 3), start=float("nan")), STARTS),
    "above float32": (shaped((14, 3), start=1e39), STARTS),
    "an array": (shaped((14, 3), start=jnp.ones((14, 3))), STARTS),
    "an error": (lambda d: {}["w"], "Mine.parameters raises KeyError: 'w'"),
}  # fmt: skip


@pytest.mark.parametrize("declared, message", DECLARED.values(), ids=DECLARED)
def test_parameters_of_custom_options_are_always_checked(declared, message):
    @dataclass(frozen=True, kw_only=True)
    class Mine(options.FeedForward):
        def parameters(self, model_dim):
            return declared(model_dim)

    config = replace(BASE, feed_forward=(Mine(),))
    for ask in (
        lambda: Mine().parameters(D),
        lambda: check_divisible(config, {"tensor": 2}),
        lambda: traced(FeedForward(config, Mine(), RuntimeConfig()), X),
    ):
        with refused(message):
            ask()


@pytest.mark.parametrize(
    "start", [None, 0, 1.5, np.float32(2), Normal(), lambda key, shape, dtype: np.ones(shape)]
)
def test_what_may_start_a_parameter(start):
    module = FeedForward(BASE, feed_forward(lambda y: y, start), RuntimeConfig())
    assert traced(module, X).shape == X.shape


STARTED = "Mine's start of 'w' "
FUNCTIONS = {
    "nothing": (lambda *_: None, "raises "),
    "an error": (lambda key: 1, "raises TypeError: "),
    "one number": (lambda *_: 1.0, "must return an array of shape (14, 14); got ()."),
    "another dtype": (lambda _, s, __: np.ones(s, int), "must return an array of dtype float32; "),
}  # fmt: skip


@pytest.mark.parametrize("start, message", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_that_starts_a_parameter_gives_all_of_its_numbers(start, message):
    with refused(STARTED + message):
        traced(FeedForward(BASE, feed_forward(lambda y: y, start), RuntimeConfig()), X)


@pytest.mark.parametrize("count", [None, -1, float("nan"), float("inf"), "8", True])
def test_operations_are_a_finite_number(count):
    config = replace(BASE, attention=mixer(lambda *_: count))
    with refused(f"Mine.flops must return a finite number of at least 0; got {count!r}."):
        costs.forward_flops(config, 8)


CACHES = {
    "nothing": (lambda batch: None, "with *batch = (3, 5); got None."),
    "a number": (lambda batch: 1.0, "with *batch = (3, 5); got ()."),
    "of all rows": (lambda batch: jnp.zeros((2, 3)), "with *batch = (3, 5); got (2, 3)."),
    "without heads": (lambda batch: jnp.zeros(batch), "with *batch = (3, 5); got (3, 5)."),
}


@pytest.mark.parametrize("cache, message", CACHES.values(), ids=CACHES)
def test_a_cache_has_a_place_for_each_row(cache, message):
    config = replace(BASE, attention=mixer(None, cache))  # three layers, in one loop
    with refused(f"Mine.empty_cache must return arrays [*batch, heads, ...] {message}"):
        empty_cache(config, (5,), 7)


@pytest.mark.parametrize("fields", [{}, {"num_heads": 0}, {"num_heads": "4"}, {"windows": (7,)}])
def test_a_mixer_has_heads_and_windows_of_its_kind(fields):
    body = {"num_heads": 2} | fields if fields else {}
    kind = dataclass(frozen=True)(type("Headless", (options.Mixer,), body))
    name, value = next(iter(fields.items()), ("num_heads", None))
    with pytest.raises(ValueError, match=rf"Headless.{name} .*; got {re.escape(repr(value))}."):
        kind()


def test_what_an_option_raises_has_its_name_and_is_the_cause():
    """A program shows the sentence, a notebook both tracebacks."""
    wrong = feed_forward(lambda y: y @ jnp.ones((3, 3)))
    with refused("Mine.__call__ raises TypeError: dot_general requires") as caught:
        traced(FeedForward(BASE, wrong, RuntimeConfig()), X)
    cause = caught.value.__cause__
    assert type(cause) is TypeError and len(str(caught.value).splitlines()) == 1
    frames = [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    assert "__call__" in frames and "<lambda>" in frames

    def undefined(x):
        raise NotImplementedError("later")

    with refused("Mine.__call__ raises NotImplementedError: later"):
        traced(FeedForward(BASE, feed_forward(undefined), RuntimeConfig()), X)


def test_methods_may_be_of_any_kind():
    """Static, of a class, of a parent that is no option, of another option."""

    class Answers:
        def __call__(self, params, x):
            return self.factor() * (x @ params["w"])

    @dataclass(frozen=True, kw_only=True)
    class Parent(Answers, options.FeedForward):
        @staticmethod
        def parameters(model_dim):
            return {"w": SQUARE}

        @classmethod
        def factor(cls):
            return 1.0

    @dataclass(frozen=True, kw_only=True)
    class Child(Parent):
        def flops(self, model_dim, length):
            return length if super().parameters(model_dim) else 0

        def __call__(self, params, x):
            return super().__call__(params, x)[..., :1]

    assert Parent().parameters(D) == Child().parameters(D) == {"w": SQUARE}
    assert Child().flops(model_dim=D, length=3) == 3
    assert traced(FeedForward(BASE, Parent(), RuntimeConfig()), X).shape == X.shape
    with refused("Child must return [rows, tokens, width] of shape (2, 5, 14); got (2, 5, 1)."):
        traced(FeedForward(BASE, Child(), RuntimeConfig()), X)


def test_on_a_mesh_shapes_are_those_of_a_device():
    """Rows and heads are shared out: two of four heads, one of two rows each."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mode = RuntimeConfig(mesh_axes=MeshAxes(tensor="tensor"))

    def on_mesh(module, *inputs):
        specs = (P("data"),) * len(inputs)
        run = jax.shard_map(
            lambda *x: module.init_with_output(jax.random.key(0), *x)[0],
            mesh=mesh,
            in_specs=specs,
            out_specs=P("data"),
            check_vma=False,
        )
        return jax.eval_shape(run, *inputs)

    with refused("Mine must return [rows, tokens, width] of shape (1, 5, 14); got (1, 1, 14)."):
        on_mesh(FeedForward(BASE, feed_forward(VECTORS["pooled"][0]), mode), X)
    rows = np.stack([AT, AT])
    with refused("Mine must return [heads, queries, keys] of shape (2, 5, 5); got (1, 5, 5)."):
        on_mesh(ScoreBiasModule(bias(lambda b: b[:1]), N, mode, True), rows, rows)


def test_a_model_refuses_them_inside_its_loop_over_layers():
    """Also what asks for a bias without a model."""
    for changed in (
        {"feed_forward": (feed_forward(VECTORS["pooled"][0]),)},
        {"attention": mixer(lambda y, cache: (y[..., :1], cache))},
        {"attention": replace(BASE.attention, positions=(bias(BIASES["of one head"][0]),))},
    ):
        with refused("Mine must return ["):
            abstract_parameters(replace(BASE, **changed), None)
    config = replace(BASE, attention=replace(BASE.attention, positions=(bias(lambda b: b[:1]),)))
    with refused("Mine must return [heads, queries, keys] of shape (4, 2, 2); got (1, 2, 2)."):
        inspect.position_bias(config, {"decoder": {}}, 5)
