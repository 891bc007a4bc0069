from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, costs
from jaxformer import functional as F
from jaxformer.config import Latent as Choice
from jaxformer.config import LoRA, MultiHead, OutputGate, QueryScaling, RMSNorm, Rope, SharedKV
from jaxformer.config.attention.layer_sizes import LatentCache
from jaxformer.layers import AttentionInputs, RuntimeConfig, empty_cache
from jaxformer.layers.attention.latent import LatentAttention

B, T, D, N = 2, 5, 14, 4
C, Q, P, R, V = 5, 7, 3, 4, 6
CHOICE = Choice(num_heads=N, latent_dim=C, nope_dim=P, rope_dim=R, value_dim=V)
CHOICES = {
    "plain": CHOICE,
    "no positions": replace(CHOICE, positions=(None,)),
    "queries that grow": replace(
        CHOICE, query_scaling=QueryScaling(beta=0.7, original_max_length=2)
    ),
    "a gate of each feature": replace(CHOICE, output_gate=OutputGate()),
    "queries from a latent, biases, halves": replace(
        CHOICE,
        query_latent_dim=Q,
        positions=(Rope(pairing="halves", base=100.0),),
        scale=0.7,
        norm=RMSNorm(eps=0.01),
        biases=("query_latent", "latent", "rotary_key", "out"),
        output_gate=OutputGate(over="head"),
    ),
}


def rotate(x, rope):
    """x [B, T, ..., R] turned by position, in float64; as it is without RoPE."""
    if rope is None:
        return x
    frequencies = rope.base ** (-np.arange(0, R, 2) / R)
    z = np.exp(1j * np.arange(T)[:, None] * frequencies)
    z = z.reshape(T, *(1,) * (x.ndim - 3), R // 2)
    if rope.pairing == "neighbours":
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * z
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    turned = (x[..., : R // 2] + 1j * x[..., R // 2 :]) * z
    return np.concatenate([turned.real, turned.imag], axis=-1)


def by_hand(choice, params, x):
    """The equations of DeepSeek-V2, section 2.1, one head at a time, in float64."""
    p, x = jax.tree.map(lambda a: np.asarray(a, np.float64), params), np.asarray(x, np.float64)
    (rope,) = choice.positions

    def down(name):
        return x @ p[name]["kernel"][:, 0] + p[name].get("bias", np.zeros((1, 1)))[0]

    def norm(y, name):
        size = np.sqrt((y**2).mean(axis=-1, keepdims=True) + choice.norm.eps)
        return y / size * p[name]["scale"]

    query_input = x
    if choice.query_latent_dim is not None:
        query_input = norm(down("query_latent"), "query_latent_norm")
    query = np.einsum("btd,dnh->btnh", query_input, p["query"]["kernel"])
    latent, shared = norm(down("latent"), "latent_norm"), rotate(down("rotary_key"), rope)
    scale = (P + R) ** -0.5 if choice.scale is None else choice.scale
    heads = np.zeros((B, T, N, V))
    for n in range(N):
        key = np.concatenate([latent @ p["key"]["kernel"][:, n], shared], axis=-1)
        rotary = rotate(query[:, :, n, P:], rope)
        asks = np.concatenate([query[:, :, n, :P], rotary], axis=-1)
        if (growth := choice.query_scaling) is not None:
            periods = np.arange(T) // growth.original_max_length
            asks *= 1 + growth.beta * np.log(1 + periods)[:, None]
        scores = np.where(np.tri(T), scale * asks @ key.transpose(0, 2, 1), -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        heads[:, :, n] = weights @ (latent @ p["value"]["kernel"][:, n])
    if choice.output_gate is not None:
        heads /= 1 + np.exp(-np.einsum("btd,dnv->btnv", x, p["output_gate"]["kernel"]))
    return np.einsum("btnv,nvd->btd", heads, p["out"]["kernel"]) + p["out"].get("bias", 0.0)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.slow(
    but=["no positions", "a gate of each feature", "queries from a latent, biases, halves"]
)
def test_latent_attention_by_hand(choice, config, randomise, normal):
    (rope,) = choice.positions
    module = LatentAttention(config(), choice, RuntimeConfig())
    x, at = normal(B, T, D), jnp.arange(T)
    turned = rope and F.rope_rotations(at, F.rope_frequencies(R, base=rope.base))
    growth = choice.query_scaling and choice.query_scaling(at)
    guide = AttentionInputs(F.causal_mask(at, at), rotations=turned, query_scale=growth)
    params = randomise(module, x, guide)
    actual, _ = jax.jit(module.apply)({"params": params}, x, guide)
    np.testing.assert_allclose(actual, by_hand(choice, params, x), atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_adapted_keys_and_values_are_the_kernels_with_their_updates(
    dora, config, randomise, normal
):
    """In float64; a new token of a cache, which absorbs the kernels, has the same."""
    choice = replace(CHOICE, positions=(None,))
    lora = LoRA(rank=2, alpha=3.0, targets=("key", "value"), dora=dora)
    module = LatentAttention(config(), choice, RuntimeConfig(adapter=lora))
    x, at = normal(B, T, D), jnp.arange(T)
    guide = AttentionInputs(F.causal_mask(at, at))
    params = randomise(module, x, guide)
    merged = dict(params)
    for name in ("key", "value"):
        part = {key: np.asarray(y, np.float64) for key, y in params[name].items()}
        kernel = part["kernel"] + 3 / 2 * np.einsum("cr,rnh->cnh", part["lora_a"], part["lora_b"])
        if dora:
            kernel *= part["lora_magnitude"] / np.sqrt(np.square(kernel).sum(axis=0))
        assert np.abs(kernel - part["kernel"]).max() > 0.1
        merged[name] = {"kernel": kernel}
    actual, _ = jax.jit(module.apply)({"params": params}, x, guide)
    np.testing.assert_allclose(actual, by_hand(choice, merged, x), atol=3e-5)
    query, kv = normal(B, T, N, P + R), LatentCache(normal(B, T, 1, C), normal(B, T, 1, R))
    expanded, absorbed = (
        jax.jit(partial(module.apply, method=f"attend_{form}"))(
            {"params": params}, query, kv, guide
        )
        for form in ("expanded", "absorbed")
    )
    np.testing.assert_allclose(absorbed, expanded, atol=3e-5)


def products(config, length, **arguments):
    """Shapes that the matrix products of one call have."""
    model, tokens = Transformer(config), jnp.zeros((1, length), int)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))
    text = str(jax.make_jaxpr(lambda p: model.apply(p, tokens, **arguments))(params))
    return {
        line.split("=")[0].split(":")[1].strip() for line in text.split("\n") if "dot_gen" in line
    }


@pytest.mark.slow
def test_one_new_token_makes_no_keys_and_no_values(config):
    """Nothing has a slot's keys by head (50 x 4 x 3); reading a text of 50 tokens has."""
    cfg = replace(config(), attention=CHOICE, num_layers=1)
    cache = empty_cache(cfg, (1,), 50)
    by_head = {f"f32[1,50,{N},{P}]", f"f32[1,50,{N},{V}]"}
    assert by_head <= products(cfg, 50)
    assert not by_head & products(cfg, 1, cache=cache)


def test_cached_numbers_per_token_and_layer(config):
    """inventory rows 74 and 75, at DeepSeek-V2's width of 512.

    A latent with 64 rotated features beside it keeps 576 numbers of a token in each layer. Were it
    itself turned as key, it and what it was before would be 1024; turned as key and value, it is
    512. Its 128 heads of keys and values would be 40,960.
    """
    latent = Choice(
        num_heads=128, latent_dim=512, nope_dim=128, rope_dim=64, value_dim=128, positions=(Rope(),)
    )
    numbers = {
        576: latent,
        512: SharedKV(num_heads=128, head_dim=512),
        1024: MultiHead(num_heads=128, num_kv_heads=1, head_dim=512),
    }
    for count, attention in numbers.items():
        cfg = replace(config(), attention=attention)
        assert costs.cache_bytes(cfg, 10, batch=2) == 2 * 10 * 3 * count * 2
        cache = jax.eval_shape(lambda cfg=cfg: empty_cache(cfg, (2,), 10, dtype=jnp.bfloat16))
        arrays = jax.tree.leaves((cache.layers, cache.tail))
        assert sum(x.size * x.dtype.itemsize for x in arrays) == 2 * 10 * 3 * count * 2
