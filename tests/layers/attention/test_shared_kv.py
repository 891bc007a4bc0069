from dataclasses import replace
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, costs
from jaxformer import functional as F
from jaxformer.config import MultiHead, PRope, QKNorm, RMSNorm, Rope, Yarn
from jaxformer.config import SharedKV as Choice
from jaxformer.layers import AttentionInputs, MultiHeadAttention, RuntimeConfig, empty_cache
from jaxformer.layers.attention.inputs import TokenPositions
from jaxformer.layers.attention.shared_kv import SharedKVAttention
from jaxformer.layers.rope import token_rotations

B, T, D, N, H = 2, 5, 14, 4, 6
TURNS = Rope(targets=("q", "k", "v", "o"))
CHOICES = {
    "one head": Choice(num_heads=N, head_dim=H),
    "two heads, neighbours": Choice(
        num_heads=N,
        num_kv_heads=2,
        head_dim=H,
        positions=(replace(TURNS, pairing="neighbours"),),
        biases=("query", "key_value", "out"),
        scale=0.3,
    ),
    "in part, normalised": Choice(
        num_heads=N,
        head_dim=H,
        positions=(replace(TURNS, fraction=0.7),),
        qk_norm=QKNorm(norm=RMSNorm(eps=0.01)),
    ),
    "YaRN": Choice(
        num_heads=N,
        head_dim=H,
        positions=(replace(TURNS, scaling=Yarn(factor=40.0, original_max_length=8)),),
    ),
    "not turned": Choice(num_heads=N, head_dim=H, positions=(None,)),
}


def places(start=0):
    return TokenPositions(jnp.arange(start, start + T))


def guide(choice, at):
    rope = choice.positions[0]
    turned = None if rope is None else token_rotations(rope, H, at.positions, jnp.int32(T))
    return AttentionInputs(F.causal_mask(at.positions, at.positions), rotations=turned)


@pytest.fixture(params=CHOICES.values(), ids=CHOICES)
def choice(request):
    return request.param


@pytest.fixture
def layer(config, randomise, normal):
    """Parameters of an attention layer, and the compiled function of them."""

    def make(choice):
        module = SharedKVAttention(replace(config(), attention=choice), choice, RuntimeConfig())
        params = randomise(module, normal(B, T, D), guide(choice, places()))
        return params, jax.jit(lambda x, guide: module.apply({"params": params}, x, guide)[0])

    return make


def turn_by(x, angles, rope):
    """The first features turned by angles [C], in float64, one pair after another."""
    y, width = x.copy(), 2 * len(angles)
    for pair, angle in enumerate(angles):
        one, other = (2 * pair, 2 * pair + 1)
        if rope.pairing == "halves":
            one, other = pair, pair + width // 2
        y[..., one] = x[..., one] * np.cos(angle) - x[..., other] * np.sin(angle)
        y[..., other] = x[..., one] * np.sin(angle) + x[..., other] * np.cos(angle)
    return y


def relative_form(choice, params, x, frequencies):
    """inventory row 76: o[i] = sum of a[i, j] R[j - i] c[j], with a from q[i] @ R[j - i] c[j].

    In float64, every pair of tokens and every head on its own; no absolute position enters.
    """
    p, x = jax.tree.map(lambda a: np.asarray(a, np.float64), params), np.asarray(x, np.float64)
    rope, width = choice.positions[0], 2 * len(frequencies)

    def project(name):
        y = np.einsum("btd,dnh->btnh", x, p[name]["kernel"]) + p[name].get("bias", 0.0)
        if choice.qk_norm is None:
            return y
        scale = p[{"query": "query_norm", "key_value": "key_norm"}[name]]["scale"]
        size = np.sqrt((y**2).mean(axis=-1, keepdims=True) + choice.qk_norm.norm.eps)
        return y / size * scale

    query, both = project("query"), project("key_value")
    heads, grow = np.zeros((B, T, N, H)), 1.0
    if rope is not None and rope.scaling is not None:
        grow = (0.1 * np.log(rope.scaling.factor) + 1) ** 2
    query[..., :width] *= grow  # YaRN's factor of query and key
    scale = H**-0.5 if choice.scale is None else choice.scale
    for b, i, n in np.ndindex(B, T, N):
        c = both[b, : i + 1, n // (N // choice.num_kv_heads)]
        seen = np.stack([turn_by(c[j], (j - i) * frequencies, rope) for j in range(i + 1)])
        scores = scale * seen @ query[b, i, n]
        weights = np.exp(scores - scores.max())
        heads[b, i, n] = weights @ seen / weights.sum()
    return np.einsum("btnh,nhd->btd", heads, p["out"]["kernel"]) + p["out"].get("bias", 0.0)


def true_frequencies(rope):
    """In float64; YaRN's are checked in test_rope_scaling.py."""
    if rope is None:
        return np.zeros(0)
    width = rope.rotary_dim(H)
    plain = 10_000.0 ** (-np.arange(0, width, 2) / width)
    if rope.scaling is None:
        return plain
    scaled = F.rope_scale_yarn(
        F.rope_frequencies(width), base=10_000.0, factor=40.0, original_max_length=8
    )
    return np.asarray(scaled, np.float64)


@pytest.mark.slow(but=["two heads, neighbours", "in part, normalised", "YaRN", "not turned"])
def test_outputs_equal_the_relative_form(choice, layer, normal):
    params, attention = layer(choice)
    x = normal(B, T, D)
    expected = relative_form(choice, params, x, true_frequencies(choice.positions[0]))
    np.testing.assert_allclose(attention(x, guide(choice, places())), expected, atol=3e-5)


EVERY = tuple(chosen for n in range(5) for chosen in combinations("qkvo", n))


@pytest.mark.parametrize("scaling", [None, Yarn(factor=40.0, original_max_length=8)])
@pytest.mark.slow
def test_any_rotary_targets_equal_multi_head_with_a_shared_kernel(config, layer, normal, scaling):
    """All sixteen choices."""
    shared = Choice(num_heads=N, head_dim=H)
    params, _ = layer(shared)
    separate_params = {"key": params["key_value"], "value": params["key_value"]}
    separate_params |= {name: params[name] for name in ("query", "out")}
    apart = MultiHead(num_heads=N, num_kv_heads=1, head_dim=H)

    @jax.jit
    def run(x):
        outputs = {}
        for targets in EVERY:
            rope = Rope(targets=targets, scaling=scaling)
            one, two = (replace(a, positions=(rope,)) for a in (shared, apart))
            here = guide(one, places())
            one = SharedKVAttention(config(), one, RuntimeConfig())
            two = MultiHeadAttention(config(), two, RuntimeConfig())
            outputs[targets] = (
                one.apply({"params": params}, x, here)[0],
                two.apply({"params": separate_params}, x, here)[0],
            )
        return outputs

    for targets, (actual, expected) in run(normal(B, T, D)).items():
        np.testing.assert_allclose(actual, expected, atol=3e-5, err_msg=str(targets))


def test_a_norm_of_values_leaves_them_unrotated_and_unscaled(config, randomise, normal):
    """K = V of Gemma 4, in float64: k = R rms(W x) * scale, v = rms(W x); q with its own scale.

    MultiHead with one kernel for both has the same output.
    """
    rope = Rope(base=99.0, scaling=PRope(fraction=0.4))  # of three pairs, one is rotated
    bare = RMSNorm(eps=0.01, parameters="none")
    fields = dict(num_heads=N, num_kv_heads=2, head_dim=H, positions=(rope,), scale=0.7)
    fields |= dict(qk_norm=QKNorm(norm=RMSNorm(eps=0.02)), value_norm=bare)
    x, choice = normal(B, T, D), Choice(**fields)
    module = SharedKVAttention(config(), choice, RuntimeConfig())
    params = randomise(module, x, guide(choice, places()))
    p, wide = jax.tree.map(np.float64, params), np.float64(x)

    def rms(y, eps, scale=1.0):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + eps) * scale

    q, c = (np.einsum("btd,dnh->btnh", wide, p[i]["kernel"]) for i in ("query", "key_value"))
    q, k = rms(q, 0.02, p["query_norm"]["scale"]), rms(c, 0.02, p["key_norm"]["scale"])
    for i in range(T):
        angles = i * np.array([1.0, 0.0, 0.0])
        q[:, i], k[:, i] = (turn_by(y[:, i], angles, rope) for y in (q, k))
    k, v = (np.repeat(y, 2, axis=2) for y in (k, rms(c, 0.01)))
    scores = 0.7 * np.einsum("btnh,bsnh->bnts", q, k) - 1e9 * ~np.tri(T, dtype=bool)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnh,nhd->btd", weights, v, p["out"]["kernel"])
    apart = MultiHeadAttention(config(), MultiHead(**fields), RuntimeConfig())
    separate = params | {"key": params["key_value"], "value": params["key_value"]}
    for layer, its in ((module, params), (apart, separate)):
        actual = jax.jit(layer.apply)({"params": its}, x, guide(choice, places()))[0]
        np.testing.assert_allclose(actual, expected, atol=3e-5)


def test_a_second_array_is_kept_where_key_and_value_are_not_turned_alike(config):
    """inventory row 74: rotary keys alone double what is kept."""
    for targets in EVERY:
        shared = Choice(num_heads=N, head_dim=H, positions=(Rope(targets=targets),))
        cfg = replace(config(), attention=shared)
        cache = empty_cache(cfg, (3,), 50, dtype=jnp.bfloat16)
        alike = ("k" in targets) == ("v" in targets)
        num_bytes = sum(x.nbytes for x in jax.tree.leaves((cache.layers, cache.tail)))
        assert num_bytes == costs.cache_bytes(cfg, 50, batch=3)
        assert num_bytes == (1 if alike else 2) * 3 * cfg.num_layers * 50 * H * 2
    sizes = dict(num_heads=N, head_dim=H, positions=(TURNS,))
    assert Choice(**sizes, value_norm=RMSNorm()).num_cached_arrays == 2


def test_a_scaling_of_what_is_not_turned_changes_nothing(layer, normal):
    """YaRN sharpens the scores of rotated keys, and here nothing is rotated."""
    x, outputs = normal(B, T, D), []
    for scaling in (None, Yarn(factor=8.0, original_max_length=4)):
        choice = Choice(num_heads=N, head_dim=H, positions=(Rope(targets=(), scaling=scaling),))
        outputs.append(layer(choice)[1](x, guide(choice, places())))
    np.testing.assert_array_equal(*outputs)


def test_only_distances_matter(layer, normal):
    """The same text 97 tokens further on; without turning the output it would not be the same."""
    choice = CHOICES["one head"]
    _, attention = layer(choice)
    x, here = normal(B, T, D), guide(choice, places())
    far = here._replace(rotations=guide(choice, places(97)).rotations)
    np.testing.assert_allclose(attention(x, far), attention(x, here), atol=3e-5)
    strange = here._replace(rotations=here.rotations * jnp.exp(0.4j).astype(jnp.complex64))
    np.testing.assert_allclose(attention(x, strange), attention(x, here), atol=3e-5)


def test_the_cache_is_half_of_keys_and_values(config):
    """One array; inventory row 74: with rotary keys alone the document's cache doubles."""
    shared = replace(config(), attention=Choice(num_heads=N, num_kv_heads=2, head_dim=H))
    apart = replace(shared, attention=MultiHead(num_heads=N, num_kv_heads=2, head_dim=H))

    def cache_size(config):
        cache = empty_cache(config, (3,), 50, dtype=jnp.bfloat16)
        arrays = jax.tree.leaves((cache.layers, cache.tail))
        return len(arrays), sum(x.nbytes for x in arrays)

    assert cache_size(shared) == (1, costs.cache_bytes(shared, 50, batch=3))
    assert cache_size(apart) == (2, costs.cache_bytes(apart, 50, batch=3))
    assert cache_size(apart)[1] == 2 * cache_size(shared)[1] == 2 * 3 * 50 * 3 * 2 * H * 2


@pytest.mark.slow
def test_the_cache_holds_rotated_vectors(config, randomise, tokens):
    """The cache holds R[j] c[j]: decoding turns nothing but the new token."""
    choice = Choice(num_heads=N, head_dim=H)
    cfg = replace(config(), attention=choice, num_layers=1)
    model = Transformer(cfg)
    params = randomise(model, tokens)
    _, cache = model.apply({"params": params}, tokens, cache=empty_cache(cfg, (2,), 7))
    layer = jax.tree.map(lambda x: x[0], params["decoder"]["layers"]["layer_0"])
    x = params["embedding"]["tokens"]["embedding"][tokens]
    x = F.rms_norm(x, layer["pre_attention_norm"]["scale"], eps=1e-6)
    c = np.asarray(F.linear(x, layer["attention"]["key_value"]["kernel"]), np.float64)
    turned = [turn_by(c[:, j], j * true_frequencies(TURNS), TURNS) for j in range(7)]
    (layer_cache,) = cache.layers
    np.testing.assert_allclose(
        layer_cache.self_attention.key_value[0], np.stack(turned, axis=2), atol=2e-5
    )
