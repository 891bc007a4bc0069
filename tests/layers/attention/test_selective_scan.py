"""The layer of a selective scan against NumPy in float64; generation and packed rows with it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import costs, inspect
from jaxformer.config import MixerInputs, RMSNorm, SelectiveScan
from jaxformer.layers import empty_cache
from jaxformer.layers.attention.selective_scan import SelectiveScan as Module
from jaxformer.layers.runtime import RuntimeConfig
from jaxformer.parallel import check_divisible
from tests.small_models import BASE, random_params, random_tree

NO_INPUTS = MixerInputs(None, None, None)
MAMBA = SelectiveScan(width=12, step_rank=3, state_dim=5)
KINDS = {
    "mamba": replace(MAMBA, biases=("in", "convolution", "out")),
    "falcon": replace(MAMBA, norm=RMSNorm(parameters="none"), convolution_width=3),
    "jamba": replace(MAMBA, norm=RMSNorm(eps=1e-3)),
}
CONFIG = replace(BASE, attention=(KINDS["jamba"], BASE.attention), num_layers=4)


def silu(x):
    return x / (1 + np.exp(-x))


def in_numpy(cfg, params, x):
    """The layer of one text, a token at a time."""
    params = jax.tree.map(np.float64, params)

    def project(name):
        y = np.tensordot(x, params[name]["kernel"], 1) + params[name].get("bias", 0)
        return y[..., 0]

    def norm(name, y):
        if cfg.norm is None:
            return y
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + cfg.norm.eps)
        return y * params[name]["scale"] if cfg.norm.parameters == "scale" else y

    value, taps = project("value"), params["convolution"]
    padded = np.concatenate([np.zeros((cfg.convolution_width - 1, cfg.width)), value])
    value = sum(k[:, 0] * padded[j : j + len(x)] for j, k in enumerate(taps["kernel"]))
    value = silu(value + taps["bias"][:, 0] if "bias" in taps else value)
    selected = value @ params["selection"]["kernel"][:, 0]
    step, write, read = np.split(selected, [cfg.step_rank, cfg.step_rank + cfg.state_dim], axis=-1)
    step = norm("step_norm", step) @ params["step"]["kernel"][..., 0]
    step = np.log1p(np.exp(step + params["step_bias"]["bias"]))
    write, read = norm("write_norm", write), norm("read_norm", read)
    state, y = np.zeros((cfg.width, cfg.state_dim)), np.zeros(value.shape)
    for t in range(len(x)):
        state = np.exp(-np.exp(params["rate"]["bias"]) * step[t, :, None]) * state
        state += (step[t] * value[t])[:, None] * write[t]
        y[t] = state @ read[t] + params["skip"]["bias"] * value[t]
    y = y * silu(project("gate"))
    return y @ params["out"]["kernel"][:, 0] + params["out"].get("bias", 0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow(but=["falcon"])
def test_the_layer(name):
    cfg = KINDS[name]
    module = Module(BASE, cfg, RuntimeConfig())
    x = np.float32(np.random.default_rng(0).normal(size=(9, BASE.model_dim)))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, NO_INPUTS)["params"]
    params = random_tree(shapes)
    actual, _ = jax.jit(module.apply)({"params": params}, x, NO_INPUTS)
    np.testing.assert_allclose(actual, in_numpy(cfg, params, x), atol=2e-5)


def test_costs_on_paper():
    """Two FLOPs a number of each kernel, of the taps, and of decaying, writing and reading."""
    D, W, R, M, K = BASE.model_dim, 12, 3, 5, 4
    numbers = 3 * D * W + W * (R + 2 * M) + R * W + K * W + 3 * M * W
    assert MAMBA.flops(D, 10) == 2 * 10 * numbers
    config = replace(BASE, attention=MAMBA)
    state, taps = 4 * W * M, 4 * (K - 1) * W
    assert costs.cache_bytes(config, 10_000) == costs.cache_bytes(config, 10)
    assert costs.cache_bytes(config, 10, bytes_per_number=4) == 3 * (state + taps)
    assert costs.cache_bytes(config, 10) == 3 * (state + taps // 2)
    cache = empty_cache(config, (2,), 10, dtype=jnp.bfloat16).layers[0].self_attention
    assert cache.state.dtype == jnp.float32 and cache.convolutions[0].inputs.dtype == jnp.bfloat16


@pytest.mark.slow
def test_initial_steps_and_rates():
    """Rates of 1, 2, ... of each feature, steps of a thousandth to a tenth."""
    module = Module(BASE, replace(MAMBA, width=400), RuntimeConfig())
    begin = jax.jit(lambda key: module.init(key, jnp.zeros((1, BASE.model_dim)), NO_INPUTS))
    params = begin(jax.random.key(0))["params"]
    steps = np.log1p(np.exp(np.float64(params["step_bias"]["bias"])))
    assert 0.001 < steps.min() < 0.0015 and 0.06 < steps.max() < 0.1
    rates = np.exp(np.float64(params["rate"]["bias"]))
    np.testing.assert_allclose(rates, np.tile(np.arange(1, 6), (400, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(width=0), "SelectiveScan.width must be positive; got 0"),
        (dict(step_rank=0), "SelectiveScan.step_rank must be positive; got 0"),
        (dict(state_dim=0), "SelectiveScan.state_dim must be positive; got 0"),
        (dict(convolution_width=1), "convolution_width must be from 2 to 256; got 1"),
        (dict(biases=("in", "in")), "must not repeat an entry"),
    ],
)
def test_options_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(MAMBA, **fields)


def test_features_that_devices_cannot_share():
    with pytest.raises(ValueError, match="num_heads 12 is not divisible by tensor 8"):
        check_divisible(replace(BASE, attention=MAMBA, model_dim=16), dict(tensor=8))


@pytest.mark.slow
def test_memory_of_the_states():
    """Of each feature, over the numbers of its state."""
    config = replace(BASE, attention=KINDS["falcon"], num_layers=1)
    params, tokens = random_params(config), np.arange(6)[None]
    memory = inspect.state_memory(config, params, tokens)
    assert memory.layers == (0,) and memory.decay.shape == (1, 1, 6, 12)
    layer = jax.tree.map(
        lambda x: np.float64(x[0]), params["decoder"]["layers"]["layer_0"]["attention"]
    )
    rates = np.exp(layer["rate"]["bias"]).mean(axis=-1)
    steps = -np.log(np.float64(memory.decay[0, 0])) / rates
    values = inspect.run(config, params, tokens).values
    assert values["value"][0].shape == (1, 6, 12, 1) and values["key"][0].shape == (1, 6, 1, 5)
    selected = np.float64(values["value"][0][0, ..., 0]) @ layer["selection"]["kernel"][:, 0, :3]
    selected /= np.sqrt(np.mean(selected**2, axis=-1, keepdims=True) + 1e-6)
    logits = selected @ layer["step"]["kernel"][..., 0] + layer["step_bias"]["bias"]
    np.testing.assert_allclose(steps, np.log1p(np.exp(logits)), rtol=1e-3, atol=1e-5)
