from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer import costs
from jaxformer.config import Differential, LayerNorm, RMSNorm
from jaxformer.layers import empty_cache
from tests.small_models import BASE, jitted_forward, random_params, rounding_error

N, K, H, W = 8, 4, 6, 3
KIND = Differential(num_heads=N, num_kv_heads=K, head_dim=H, windows=(W, None))
CHOICES = {
    "windows": KIND,
    "normed, biased": replace(
        KIND,
        num_kv_heads=8,
        windows=(None,),
        positions=(None,),
        scale=0.3,
        norm=LayerNorm(),
        biases=("query", "key", "value", "out"),
    ),
}
CONFIGS = {name: replace(BASE, attention=kind, num_layers=3) for name, kind in CHOICES.items()}
TOKENS = np.random.default_rng(3).integers(0, BASE.vocab_size, (2, 7))


def test_no_positions_is_the_formula():
    """In float64, one query of one pair at a time; each layer with the factor of its depth."""
    config = replace(CONFIGS["normed, biased"], head=replace(BASE.head, tied=False))
    params, run = random_params(config), jitted_forward(config)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    stream = p["embedding"]["tokens"]["embedding"][TOKENS]
    layers = p["decoder"]["layers"]["layer_0"]

    def rms(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm.eps) * scale

    for number in range(3):
        layer = jax.tree.map(lambda x, i=number: x[i], layers)
        x, heads = rms(stream, layer["pre_attention_norm"]["scale"]), layer["attention"]
        q, k, v = (
            np.einsum("btd,dnh->btnh", x, heads[name]["kernel"]) + heads[name]["bias"]
            for name in ("query", "key", "value")
        )
        initial = 0.8 - 0.6 * np.exp(-0.3 * number)
        exponents = [heads[f"factor_query_{i}"] @ heads[f"factor_key_{i}"] for i in (1, 2)]
        factor = np.exp(exponents[0]) - np.exp(exponents[1]) + initial
        out = np.zeros((*TOKENS.shape, N // 2, 2 * H))
        for b, t, pair in np.ndindex(*TOKENS.shape, N // 2):
            both = v[b, : t + 1, 2 * pair : 2 * pair + 2].reshape(t + 1, 2 * H)
            for sign, n in ((1.0, 2 * pair), (-factor, 2 * pair + 1)):
                weights = np.exp(0.3 * k[b, : t + 1, n] @ q[b, t, n])
                out[b, t, pair] += sign * weights @ both / weights.sum()
        centred = out - out.mean(-1, keepdims=True)
        out = centred / np.sqrt(out.var(-1, keepdims=True) + 1e-5)
        out = (1 - initial) * (out * heads["norm"]["scale"] + heads["norm"]["bias"])
        out = out.reshape(*TOKENS.shape, N, H)
        stream = stream + np.einsum("btnh,nhd->btd", out, heads["out"]["kernel"])
        stream = stream + heads["out"]["bias"]
        x, ffn = rms(stream, layer["pre_feed_forward_norm"]["scale"]), layer["feed_forward"]
        gate, up = x @ ffn["gate"]["kernel"], x @ ffn["up"]["kernel"]
        stream = stream + (gate / (1 + np.exp(-gate)) * up) @ ffn["down"]["kernel"]
    logits = rms(stream, p["decoder"]["final_norm"]["scale"]) @ p["head"]["kernel"]
    np.testing.assert_allclose(run(params, TOKENS), logits, atol=3e-5 * np.abs(logits).max())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_cached_generation_is_the_whole_text_at_every_split(name):
    config = CONFIGS[name]
    params, run = random_params(config), jitted_forward(config)
    whole, bound = np.asarray(run(params, TOKENS)), 3 * rounding_error(run, params, TOKENS)
    for split in range(1, 7):
        cache, logits = empty_cache(config, (2,), 7), []
        for part in (TOKENS[:, :split], TOKENS[:, split:]):
            here, cache = run(params, part, cache=cache)
            logits.append(here)
        np.testing.assert_allclose(
            np.concatenate(logits, axis=1), whole, rtol=0, atol=bound, err_msg=f"{split}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_implementations_agree(implementation):
    config = CONFIGS["windows"]
    params = random_params(config)
    expected = jitted_forward(config)(params, TOKENS)
    actual = jitted_forward(config, attention_implementation=implementation)(params, TOKENS)
    np.testing.assert_allclose(actual, expected, atol=3e-6 * np.abs(expected).max())


def test_sizes_by_hand():
    """A cache as wide as of grouped queries; values twice as wide as keys."""
    config, T, D = CONFIGS["normed, biased"], 5, BASE.model_dim
    plain = replace(config, attention=BASE.attention)
    heads = replace(BASE.attention, num_heads=N, num_kv_heads=8, head_dim=H)
    plain = replace(config, attention=heads)
    assert costs.cache_bytes(config, 9) == costs.cache_bytes(plain, 9) == 3 * 9 * 2 * 8 * H * 2
    extra = costs.forward_flops(config, T) - costs.forward_flops(plain, T)
    assert extra == 3 * 2 * T * T * N * H
    vectors = 4 * H + 2 * 2 * H + 3 * N * H + D
    assert costs.num_parameters(config) - costs.num_parameters(plain) == 3 * vectors


@pytest.mark.parametrize("norm", [RMSNorm(eps=1e-5), RMSNorm(parameters="none")])
def test_the_norm_has_its_own_parameters(norm):
    config = replace(BASE, attention=replace(KIND, norm=norm))
    layer = random_params(config)["decoder"]["layers"]["layer_0"]["attention"]
    assert ("norm" in layer) == (norm.parameters == "scale")
