"""The layers of time mixing and channel mixing against NumPy in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import costs, inspect
from jaxformer.config import ChannelMixing, MixerInputs, NoFeedForward, TimeMixing
from jaxformer.layers import empty_cache
from jaxformer.layers.attention.kinds import ATTENTION_MODULES
from jaxformer.layers.runtime import RuntimeConfig
from jaxformer.parallel import check_divisible
from tests.small_models import BASE, random_params, random_tree

NO_INPUTS = MixerInputs(None, None, None)
TIME, CHANNEL = TimeMixing(width=12), ChannelMixing(hidden_dim=20)
RWKV = replace(BASE, attention=(TIME, CHANNEL), feed_forward=(NoFeedForward(),), num_layers=4)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mixes(params, x):
    """What each linear layer reads."""
    before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])
    return {name: mix * x + (1 - mix) * before for name, mix in params["shift"].items()}


def time_mixing(params, x):
    """The layer of one text, by the weights of all earlier tokens."""
    read = mixes(params, x)
    key, value, receptance = (
        read[name] @ params[name]["kernel"][..., 0] for name in ("key", "value", "receptance")
    )
    rate, bonus, y = np.exp(params["rate"]["bias"]), params["bonus"]["bias"], np.zeros(value.shape)
    for t in range(len(x)):
        distance = t - 1 - np.arange(t)[:, None]
        weights = np.exp(np.r_[key[:t] - distance * rate, key[t : t + 1] + bonus])
        y[t] = (weights * value[: t + 1]).sum(axis=0) / weights.sum(axis=0)
    return (sigmoid(receptance) * y) @ params["out"]["kernel"][:, 0]


def channel_mixing(params, x):
    """The layer of one text."""
    read = mixes(params, x)
    hidden = np.maximum(read["key"] @ params["key"]["kernel"][..., 0], 0) ** 2
    gate = sigmoid(read["receptance"] @ params["receptance"]["kernel"])
    return gate * (hidden @ params["out"]["kernel"][:, 0])


@pytest.mark.parametrize("cfg, expected", [(TIME, time_mixing), (CHANNEL, channel_mixing)])
@pytest.mark.slow(but=["cfg1-channel_mixing"])
def test_the_layer(cfg, expected):
    module = ATTENTION_MODULES[type(cfg)](BASE, cfg, RuntimeConfig())
    x = np.float32(np.random.default_rng(0).normal(size=(9, BASE.model_dim)))
    params = random_tree(jax.eval_shape(module.init, jax.random.key(0), x, NO_INPUTS)["params"])
    exact = expected(jax.tree.map(np.float64, params), np.float64(x))
    actual, _ = jax.jit(module.apply)({"params": params}, x, NO_INPUTS)
    np.testing.assert_allclose(actual, exact, atol=2e-5)
    halves = module.clone(runtime=RuntimeConfig(dtype=jnp.bfloat16))
    actual, _ = jax.jit(halves.apply)({"params": params}, jnp.asarray(x, jnp.bfloat16), NO_INPUTS)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(actual), exact, atol=0.03 * np.abs(exact).max())


def test_costs_on_paper():
    """Two FLOPs a number of each kernel, both taps of each mix, and of decays and writes."""
    D, W, H = BASE.model_dim, 12, 20
    assert TIME.flops(D, 10) == 2 * 10 * (4 * D * W + 3 * 2 * D + 4 * W)
    assert CHANNEL.flops(D, 10) == 2 * 10 * (2 * D * H + D * D + 2 * 2 * D)
    assert costs.cache_bytes(RWKV, 10_000) == costs.cache_bytes(RWKV, 10)
    sums, token = 4 * 3 * W, 4 * D
    assert costs.cache_bytes(RWKV, 10, bytes_per_number=4) == 2 * (sums + 2 * token)
    assert costs.cache_bytes(RWKV, 10) == 2 * (sums + token)
    time, channel = (
        x.self_attention for x in empty_cache(RWKV, (2,), 10, dtype=jnp.bfloat16).layers
    )
    assert time.state.dtype == jnp.float32 and time.convolutions[0].inputs.dtype == jnp.bfloat16
    assert channel.inputs.shape == (2, 2, 1, 1, D)


@pytest.mark.slow
def test_initial_rates_mixes_and_bonuses():
    module = ATTENTION_MODULES[TimeMixing](BASE, TimeMixing(width=9), RuntimeConfig())
    begin = jax.jit(lambda key: module.init(key, jnp.zeros((1, BASE.model_dim)), NO_INPUTS))
    params = begin(jax.random.key(0))["params"]
    np.testing.assert_allclose(params["rate"]["bias"], np.linspace(-5, 3, 9), atol=1e-6)
    np.testing.assert_allclose(params["bonus"]["bias"][:4], np.log(0.3) + np.r_[0, 0.5, -0.5, 0])
    mix = np.arange(BASE.model_dim) / BASE.model_dim
    for name in ("key", "value", "receptance"):
        np.testing.assert_allclose(params["shift"][name], mix, rtol=1e-6)


def test_options_that_cannot_be():
    with pytest.raises(ValueError, match="TimeMixing.width must be positive; got 0"):
        replace(TIME, width=0)
    with pytest.raises(ValueError, match="ChannelMixing.hidden_dim must be positive; got 0"):
        replace(CHANNEL, hidden_dim=0)
    for kind in (TIME, CHANNEL):
        with pytest.raises(ValueError, match=f"{kind.num_heads} is not divisible by tensor 8"):
            check_divisible(replace(BASE, attention=kind, model_dim=16), dict(tensor=8))


@pytest.mark.slow
def test_memory_of_the_sums():
    """Of each feature, by its rate, whatever the token."""
    params, tokens = random_params(RWKV), np.arange(6)[None]
    memory = inspect.state_memory(RWKV, params, tokens)
    assert memory.layers == (0, 2) and memory.decay.shape == (2, 1, 6, 12)
    rates = params["decoder"]["layers"]["layer_0"]["attention"]["rate"]["bias"]
    decays = np.exp(-np.exp(np.float64(rates)))
    np.testing.assert_allclose(memory.decay[:, 0, 3], decays, rtol=1e-5)
