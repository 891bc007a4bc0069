"""The layer of RG-LRU against NumPy in float64; generation and packed rows with it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import costs, inspect
from jaxformer.config import RGLRU, MixerInputs
from jaxformer.layers import empty_cache
from jaxformer.layers.attention import rg_lru
from jaxformer.layers.runtime import RuntimeConfig
from jaxformer.parallel import check_divisible
from tests.small_models import BASE, random_params, random_tree

KINDS = {
    "griffin": RGLRU(num_heads=4, head_dim=3),
    "other": RGLRU(num_heads=2, head_dim=5, convolution_width=3, activation="silu"),
}
CONFIG = replace(BASE, attention=(KINDS["griffin"], BASE.attention), num_layers=4)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def in_numpy(cfg, params, x):
    """The layer of one text, a token at a time."""
    params = jax.tree.map(np.float64, params)

    def project(name):
        return np.tensordot(x, params[name]["kernel"], 1) + params[name].get("bias", 0)

    value, taps = project("value"), params["convolution"]
    padded = np.concatenate([np.zeros((cfg.convolution_width - 1, *value.shape[1:])), value])
    value = sum(k * padded[j : j + len(x)] for j, k in enumerate(taps["kernel"]))
    value = value + taps.get("bias", 0)

    def gate(name):
        heads = zip(np.swapaxes(value, 0, 1), params[name]["kernel"], strict=True)
        logits = np.stack([head @ kernel for head, kernel in heads], axis=1)
        return sigmoid(logits + params[name]["bias"])

    a = np.exp(-8 * np.log1p(np.exp(params["rate"]["bias"])) * gate("decay_gate"))
    root = np.sqrt(1 - a**2)
    root[0] = 1
    state, y = 0, np.zeros(value.shape)
    for t in range(len(x)):
        state = a[t] * state + root[t] * gate("input_gate")[t] * value[t]
        y[t] = state
    branch = project("gate")
    y = y * (gelu(branch) if cfg.activation == "gelu_tanh" else branch * sigmoid(branch))
    return np.tensordot(y, params["out"]["kernel"], 2) + params["out"].get("bias", 0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow(but=["griffin"])
def test_the_layer(name):
    cfg = KINDS[name]
    module = rg_lru.RGLRU(BASE, cfg, RuntimeConfig())
    inputs = MixerInputs(np.arange(9), None, None)
    x = np.float32(np.random.default_rng(0).normal(size=(9, BASE.model_dim)))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, inputs)["params"]
    params = random_tree(shapes)
    actual, _ = jax.jit(module.apply)({"params": params}, x, inputs)
    np.testing.assert_allclose(actual, in_numpy(cfg, params, x), atol=2e-5)


def test_costs_on_paper():
    """Two FLOPs a number of each kernel, of both gates of a head, of the taps, and of decaying."""
    D, N, H, K = BASE.model_dim, 4, 3, 4
    cfg, W = KINDS["griffin"], N * H
    assert cfg.flops(D, 10) == 2 * 10 * (3 * D * W + 2 * N * H * H + K * W + W)
    config = replace(BASE, attention=cfg)
    state, taps = 4 * W, 4 * (K - 1) * W
    assert costs.cache_bytes(config, 10_000) == costs.cache_bytes(config, 10)
    assert costs.cache_bytes(config, 10, bytes_per_number=4) == 3 * (state + taps)
    assert costs.cache_bytes(config, 10) == 3 * (state + taps // 2)
    cache = empty_cache(config, (2,), 10, dtype=jnp.bfloat16).layers[0].self_attention
    assert cache.state.dtype == jnp.float32 and cache.convolutions[0].inputs.dtype == jnp.bfloat16


@pytest.mark.slow
def test_initial_decays_and_gates():
    """Decays of 0.9 to 0.999 where the gate is 1; inputs of a gate are those of its head."""
    module = rg_lru.RGLRU(BASE, RGLRU(num_heads=3, head_dim=100), RuntimeConfig())
    inputs = MixerInputs(np.arange(1), None, None)
    begin = jax.jit(lambda key: module.init(key, jnp.zeros((1, BASE.model_dim)), inputs))
    params = begin(jax.random.key(0))["params"]
    decays = np.exp(-8 * np.log1p(np.exp(np.float64(params["rate"]["bias"]))))
    assert 0.9 < decays.min() < 0.903 and 0.996 < decays.max() < 0.999
    for name in ("input_gate", "decay_gate"):
        assert params[name]["kernel"].shape == (3, 100, 100)
        np.testing.assert_allclose(np.std(params[name]["kernel"]), 0.1, rtol=0.02)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_heads=0), "RGLRU.num_heads must be positive; got 0"),
        (dict(head_dim=0), "RGLRU.head_dim must be positive; got 0"),
        (dict(convolution_width=257), "convolution_width must be from 2 to 256; got 257"),
        (dict(activation="none"), "RGLRU.activation must be one of .* got 'none'"),
    ],
)
def test_options_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(KINDS["griffin"], **fields)


def test_heads_that_devices_cannot_share():
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by tensor 8"):
        check_divisible(replace(CONFIG, model_dim=16), dict(tensor=8))


@pytest.mark.slow
def test_memory_of_the_states():
    """Of each head, over its features."""
    config = replace(BASE, attention=KINDS["griffin"], num_layers=1)
    params, tokens = random_params(config), np.arange(6)[None]
    memory = inspect.state_memory(config, params, tokens)
    assert memory.layers == (0,) and memory.decay.shape == (1, 1, 6, 4)
    layer = jax.tree.map(lambda x: np.float64(x[0]), params["decoder"]["layers"]["layer_0"])
    layer = layer["attention"]
    value = np.float64(inspect.run(config, params, tokens).values["value"][0][0])
    logits = np.einsum("tnh,nhk->tnk", value, layer["decay_gate"]["kernel"])
    gates = sigmoid(logits + layer["decay_gate"]["bias"])
    logs = -8 * np.log1p(np.exp(layer["rate"]["bias"])) * gates
    np.testing.assert_allclose(memory.decay[0, 0], np.exp(logs.mean(axis=-1)), rtol=1e-4)
