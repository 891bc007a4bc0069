"""The linear attention layer against NumPy in float64; generation and packed rows with it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, costs, inspect
from jaxformer.config import (
    GatedNorm,
    LinearAttention,
    MixerInputs,
    NoFeedForward,
    SlopeDecay,
    StepDecay,
)
from jaxformer.data import Batch
from jaxformer.generation import generate
from jaxformer.layers import empty_cache
from jaxformer.layers.attention.linear_attention import LinearAttention as Module
from jaxformer.layers.runtime import RuntimeConfig
from jaxformer.parallel import (
    MeshConfig,
    abstract_parameters,
    check_divisible,
    make_mesh,
    put_batch,
    shardings,
)
from jaxformer.training.gradient import make_value_and_grad
from tests.small_models import BASE, LLAMA_VARIANTS, jitted_forward, random_params, random_tree

NO_INPUTS = MixerInputs(None, None, None)

GATED_DELTA = LinearAttention(num_heads=4, num_key_heads=2, key_dim=3, value_dim=5)
KINDS = {
    "gated delta": replace(GATED_DELTA, max_beta=2.0, biases=("in", "convolution", "out")),
    "mamba 2": replace(
        GATED_DELTA,
        decay=StepDecay(min_step=0.2, max_step=0.9),
        delta_rule=False,
        beta="step",
        unit_vectors=False,
        scale=1.0,
        skip=True,
        output=GatedNorm(over="group", placement="before_norm"),
    ),
    "kimi delta": replace(
        GATED_DELTA,
        num_key_heads=4,
        decay=StepDecay(over="feature", rank=2),
        output=GatedNorm(activation="sigmoid", rank=2),
    ),
    "lightning": replace(
        GATED_DELTA,
        num_key_heads=4,
        decay=SlopeDecay(scale=0.6),
        delta_rule=False,
        beta="one",
        unit_vectors=False,
        scale=1.0,
        convolution_width=None,
        output=GatedNorm(over="all", activation="sigmoid"),
    ),
    "no more than a sum": replace(
        GATED_DELTA,
        decay=None,
        delta_rule=False,
        beta="one",
        convolution_width=None,
        output=GatedNorm(norm=None, activation=None),
    ),
}
VARIANTS = pytest.mark.parametrize("name", ["gated delta", "mamba 2", "kimi delta", "lightning"])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def in_numpy(cfg, params, x):
    """The layer of one text, a token at a time."""
    params = jax.tree.map(np.float64, params)
    length = len(x)

    def project(name, y=x):
        y = y if f"{name}_down" not in params else y @ params[f"{name}_down"]["kernel"]
        y = np.tensordot(y, params[name]["kernel"], 1)
        return y + params[name].get("bias", 0)

    def convolved(name):
        y = project(name)
        if cfg.convolution_width is not None:
            taps = params[f"{name}_convolution"]
            width = len(taps["kernel"])
            padded = np.concatenate([np.zeros((width - 1, *y.shape[1:])), y])
            y = sum(taps["kernel"][j] * padded[j : j + length] for j in range(width))
            y = y + taps.get("bias", 0)
        return silu(y)

    query, key, value = map(convolved, ("query", "key", "value"))
    if cfg.unit_vectors:
        query, key = (y / np.sqrt(np.sum(y**2, -1, keepdims=True) + 1e-6) for y in (query, key))
    query, key = (np.repeat(y, cfg.num_heads // cfg.num_key_heads, axis=1) for y in (query, key))
    query = query * (cfg.key_dim**-0.5 if cfg.scale is None else cfg.scale)
    decay, beta = np.ones((*key.shape[:2], 1)), np.ones(key.shape[:2])
    if isinstance(cfg.decay, SlopeDecay):
        slopes = [2 ** (-8 * (n + 1) / cfg.num_heads) for n in range(cfg.num_heads)]
        decay = np.exp(-cfg.decay.scale * np.array(slopes))[:, None] * decay
    elif cfg.decay is not None:
        step = np.log1p(np.exp(project("step") + params["step_bias"]["bias"]))
        step = np.clip(step, cfg.decay.min_step, cfg.decay.max_step)
        beta = step if cfg.beta == "step" else beta
        step = step.reshape(*key.shape[:2], -1)
        decay = np.exp(-np.exp(params["rate"]["bias"])[:, None] * step)
    if cfg.beta == "sigmoid":
        beta = cfg.max_beta * sigmoid(project("beta"))
    state, y = np.zeros((cfg.num_heads, cfg.key_dim, cfg.value_dim)), np.zeros(value.shape)
    for t in range(length):
        state = decay[t][..., None] * state
        held = np.einsum("nkv,nk->nv", state, key[t]) if cfg.delta_rule else 0
        state = state + beta[t][:, None, None] * key[t][..., None] * (value[t] - held)[:, None]
        y[t] = np.einsum("nkv,nk->nv", state, query[t])
    if cfg.skip:
        y = y + params["skip"]["bias"][:, None] * value
    gate = 1
    if cfg.output.activation is not None:
        gate = {"silu": silu, "sigmoid": sigmoid}[cfg.output.activation](project("gate"))
    early = cfg.output.placement == "before_norm"
    y = y * gate if early else y
    if cfg.output.norm is not None:
        groups = {"head": cfg.num_heads, "group": cfg.num_key_heads, "all": 1}[cfg.output.over]
        z = y.reshape(length, groups, -1)
        z = z / np.sqrt(np.mean(z**2, axis=-1, keepdims=True) + cfg.output.norm.eps)
        y = (z * params["norm"]["scale"]).reshape(y.shape)
    y = y if early else y * gate
    return np.tensordot(y, params["out"]["kernel"], 2) + params["out"].get("bias", 0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow(but=["lightning"])
def test_the_layer(name):
    cfg = KINDS[name]
    module = Module(BASE, cfg, RuntimeConfig())
    x = np.float32(np.random.default_rng(0).normal(size=(9, BASE.model_dim)))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, NO_INPUTS)["params"]
    params = random_tree(shapes)
    actual, _ = jax.jit(module.apply)({"params": params}, x, NO_INPUTS)
    np.testing.assert_allclose(actual, in_numpy(cfg, params, x), atol=2e-5)


@VARIANTS
@pytest.mark.slow
def test_rows_of_different_lengths_and_chunks_of_prompts(name):
    """Each row generates what it does alone; "gated delta" has attention in every second layer."""
    config = LLAMA_VARIANTS[name]
    params, rows = random_params(config), [[3, 1], [9, 2, 6, 5, 30], [7, 8, 9]]
    together = generate(config, params, rows, max_new_tokens=4)
    in_chunks = generate(config, params, rows, max_new_tokens=4, prefill_chunk=2)
    np.testing.assert_array_equal(together, in_chunks)
    for row, tokens in zip(together, rows, strict=True):
        alone = generate(config, params, jnp.asarray(tokens), max_new_tokens=4)
        np.testing.assert_array_equal(row[: len(tokens) + 4], alone)


@VARIANTS
@pytest.mark.slow
def test_documents_of_a_row_are_documents_alone(name):
    config = LLAMA_VARIANTS[name]
    params, run = random_params(config), jitted_forward(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 12), np.int32)
    segments, positions = np.repeat([[1, 2]], [5, 7], axis=1), np.r_[0:5, 0:7][None]
    packed = run(params, tokens, segments=segments, positions=positions)
    alone = [run(params, tokens[:, part]) for part in (slice(0, 5), slice(5, 12))]
    np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), atol=2e-5)


def test_a_cache_of_constant_size():
    config = replace(BASE, attention=GATED_DELTA)
    state = 4 * (4 * 3 * 5)  # bytes
    convolutions = 4 * 3 * (2 * 2 * 3 + 4 * 5)
    assert costs.cache_bytes(config, 10_000) == costs.cache_bytes(config, 10)
    assert costs.cache_bytes(config, 10, bytes_per_number=4) == 3 * (state + convolutions)
    assert costs.cache_bytes(config, 10) == 3 * (state + convolutions // 2)
    layers = empty_cache(config, (2,), 10).layers
    assert layers[0].self_attention.state.dtype == jnp.float32


@pytest.mark.slow
def test_initial_steps_and_rates_are_within_their_limits():
    module = Module(BASE, replace(GATED_DELTA, num_heads=400), RuntimeConfig())
    begin = jax.jit(lambda key: module.init(key, jnp.zeros((1, BASE.model_dim)), NO_INPUTS))
    params = begin(jax.random.key(0))["params"]
    steps = np.log1p(np.exp(np.float64(params["step_bias"]["bias"])))
    rates = np.exp(np.float64(params["rate"]["bias"]))
    assert 0.001 < steps.min() < 0.0015 and 0.06 < steps.max() < 0.1
    assert 1 < rates.min() < 1.5 and 15 < rates.max() < 16


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_key_heads=3), "multiple of num_key_heads; got num_heads=4, num_key_heads=3"),
        (dict(convolution_width=1), "convolution_width must be from 2 to 256; got 1"),
        (dict(beta="step", decay=None), 'beta="step" needs a decay with one step per head'),
        (dict(beta="step", decay=StepDecay(over="feature")), 'beta="step" needs a decay with one'),
        (dict(decay=dict(min_step=0.3, max_step=0.2)), "min_step=0.3, max_step=0.2"),
        (dict(biases=("in", "in")), "must not repeat an entry"),
    ],
)
def test_options_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        if isinstance(fields.get("decay"), dict):
            fields = {"decay": StepDecay(**fields["decay"])}
        replace(GATED_DELTA, **fields)


@pytest.mark.parametrize("name, key_heads", [("mamba 2", 1), ("gated delta", 2)])
@pytest.mark.slow
def test_key_heads_that_devices_share(name, key_heads):
    """Four devices with a head of values each equal one device, in every gradient."""
    attention = replace(KINDS[name], num_key_heads=key_heads, biases=("in", "convolution"))
    sizes = dict(num_layers=1, vocab_size=12, feed_forward=(NoFeedForward(),))
    config = replace(BASE, attention=attention, **sizes)
    params, tokens = random_params(config), np.arange(8, dtype=np.int32)[None]
    batch = Batch(tokens, tokens, tokens, np.ones_like(tokens), tokens < 7)

    def gradients(size):
        mesh = make_mesh(MeshConfig(tensor=size), jax.devices()[:size])
        program = jax.jit(make_value_and_grad(Transformer(config), mesh))
        local = jax.device_put(params, shardings(abstract_parameters(config, mesh)))
        return jax.device_get(program(local, {}, jnp.int32(0), put_batch(batch, mesh, 1))[1])

    expected = gradients(1)
    assert np.abs(expected["decoder"]["layers"]["layer_0"]["attention"]["key"]["bias"]).max() > 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradients(4), expected)


@pytest.mark.parametrize(
    "name, key_heads, message",
    [
        ("gated delta", 3, "num_key_heads 3 and tensor 4: one must be a multiple of the other"),
        ("mamba 2", 2, "num_key_heads 2 with a norm of each group .* over tensor 4"),
    ],
)
def test_key_heads_that_devices_cannot_share(name, key_heads, message):
    attention = replace(KINDS[name], num_heads=12, num_key_heads=key_heads)
    with pytest.raises(ValueError, match=message):
        check_divisible(replace(BASE, attention=attention, model_dim=16), dict(tensor=4))


@pytest.mark.slow
def test_memory_of_the_states():
    """Of the layers of a hybrid that have a state; attention maps are those of the others."""
    config = LLAMA_VARIANTS["gated delta"]
    params, tokens = random_params(config), np.arange(6)[None]
    memory = inspect.state_memory(config, params, tokens)
    assert memory.layers == (0, 2) and memory.decay.shape == (2, 1, 6, 4)
    layer = jax.tree.map(lambda x: np.float64(x[0]), params["decoder"]["layers"]["layer_0"])
    x = np.float64(params["embedding"]["tokens"]["embedding"])[tokens[0]]
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm.eps)
    x = x * layer["pre_attention_norm"]["scale"]
    attention = layer["attention"]
    steps = np.log1p(np.exp(x @ attention["step"]["kernel"] + attention["step_bias"]["bias"]))
    decay = np.exp(-np.exp(attention["rate"]["bias"]) * steps)
    np.testing.assert_allclose(memory.decay[0, 0], decay, atol=1e-5)
    expected = 1 / (1 - np.exp(np.log(decay).mean(axis=0)))
    np.testing.assert_allclose(memory.tokens[0], expected, rtol=1e-4)
    assert inspect.attention_maps(config, params, tokens, layers=(1, 3)).decoder.shape[0] == 2
    with pytest.raises(ValueError, match=r"layers must be among \[0, 2\], .* got \(1,\)"):
        inspect.state_memory(config, params, tokens, layers=1)


@pytest.mark.slow
def test_memory_of_fixed_decays_and_of_none():
    config = replace(LLAMA_VARIANTS["decay"], num_layers=1)
    params, tokens = random_params(config), jnp.arange(3)
    logits = params["decoder"]["layers"]["layer_0"]["attention"]["memory"]["bias"][0]
    memory = inspect.state_memory(config, params, tokens)
    np.testing.assert_allclose(memory.tokens[0], 1 + np.exp(logits), rtol=1e-4)
    config = replace(config, attention=KINDS["no more than a sum"])
    assert np.isposinf(inspect.state_memory(config, random_params(config), tokens).tokens).all()
    with pytest.raises(ValueError, match=r"layers must be among \[\]"):
        inspect.state_memory(BASE, random_params(BASE), tokens)
