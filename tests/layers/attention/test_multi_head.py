import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import functional as F
from jaxformer.config import (
    Embedding,
    Initialisation,
    LayerNorm,
    Learned,
    OutputGate,
    QKNorm,
    RMSNorm,
    Rope,
    Sinusoid,
    T5Bias,
)
from jaxformer.layers import AttentionInputs, Linear, MultiHeadAttention, Norm, RuntimeConfig
from jaxformer.layers.embedding import Embed

MODE = RuntimeConfig()
B, T, S, D, N, K, H = 2, 5, 7, 14, 4, 2, 6


def guide(length=T):
    at = jnp.arange(length)
    return AttentionInputs(F.causal_mask(at, at), None, F.rope_rotations(at, F.rope_frequencies(H)))


@pytest.fixture
def layer(config, randomise, normal):
    """Parameters of an attention layer and the compiled function of them."""

    def make(**attention):
        cfg = config(attention=attention)
        module = MultiHeadAttention(cfg, cfg.attention, MODE)
        params = randomise(module, normal(B, T, D), AttentionInputs())

        def run(p, x, guide, memory=None):
            bound = module.bind({"params": p})
            if memory is None:
                return bound(x, guide)[0]
            return bound.attend_to_source(x, guide, bound.project_key_value(memory, guide))

        return params, jax.jit(run)

    return make


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(params, x, *, read=None, mask=None, turn=None, bound=None, norm=None, gate=sigmoid):
    """Every head on its own, in float64, from the parameters alone."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = np.asarray(x, np.float64)
    read = x if read is None else np.asarray(read, np.float64)
    parts = {}
    for name, y in (("query", x), ("key", read), ("value", read)):
        part = np.einsum("btd,dnh->btnh", y, p[name]["kernel"])
        part = part + p[name].get("bias", 0.0)
        part = part if bound is None else np.clip(part, -bound, bound)
        if norm is not None and name != "value":
            part = norm(name, part, p)
        parts[name] = turn(part) if turn is not None and name != "value" else part
    heads = np.zeros((*x.shape[:2], N, parts["value"].shape[-1]))
    for n in range(N):
        key, value = parts["key"][:, :, n // (N // K)], parts["value"][:, :, n // (N // K)]
        scores = np.einsum("bth,bsh->bts", parts["query"][:, :, n], key) * H**-0.5
        scores = scores if mask is None else np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        heads[:, :, n] = np.einsum("bts,bsh->bth", weights, value)
    if "output_gate" in p:
        logits = np.einsum("btd,dnh->btnh", x, p["output_gate"]["kernel"])
        if "output_gate_bias" in p:
            logits += p["output_gate_bias"]["bias"][:, None]
        heads *= gate(logits)
    if "sub_norm" in p:  # of all heads together
        size = np.sqrt(np.square(heads).mean(axis=(-2, -1), keepdims=True) + 1e-6)
        heads = heads / size * p["sub_norm"]["scale"].reshape(heads.shape[-2:])
    out = np.einsum("btnh,nhd->btd", heads, p["out"]["kernel"])
    return out + p["out"].get("bias", 0.0)


def turn_halves(y):
    """Rotary positions on the pairs (j, j + H / 2), in float64."""
    angles = np.arange(y.shape[1])[:, None, None] * 10_000.0 ** (-np.arange(0, H, 2) / H)
    first, second = np.split(y, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


CAUSAL = np.tri(T, dtype=bool)


def test_grouped_queries_with_rotary_positions_by_hand(layer, normal):
    params, attention = layer()
    x = normal(B, T, D)
    expected = by_hand(params, x, mask=CAUSAL, turn=turn_halves)
    np.testing.assert_allclose(attention(params, x, guide()), expected, atol=2e-5)


def test_grouped_queries_are_repeated_key_and_value_heads(layer, normal):
    """GQA with 2 key heads is multi-head attention whose 4 key heads are equal in pairs."""
    params, attention = layer()
    _, every_head = layer(num_kv_heads=N)
    repeated = {**params}
    for name in ("key", "value"):
        repeated[name] = {"kernel": jnp.repeat(params[name]["kernel"], N // K, axis=1)}
    x = normal(B, T, D)
    np.testing.assert_allclose(
        every_head(repeated, x, guide()), attention(params, x, guide()), atol=1e-5
    )


def test_cross_attention_reads_the_memory(layer, normal):
    """Queries from x, keys and values from the memory, of another length, under its mask."""
    x, memory = normal(B, T, D), normal(B, S, D)
    params, attention = layer(positions=(None,))
    np.testing.assert_allclose(
        attention(params, x, AttentionInputs(), memory), by_hand(params, x, read=memory), atol=2e-5
    )
    seen = np.arange(S) < 4
    masked = attention(params, x, AttentionInputs(jnp.asarray(np.tile(seen, (B, T, 1)))), memory)
    np.testing.assert_allclose(masked, by_hand(params, x, read=memory[:, :4]), atol=2e-5)


def test_clips_queries_keys_and_values(layer, normal):
    params, attention = layer(clip_qkv=0.3)
    x = normal(B, T, D)
    expected = by_hand(params, x, mask=CAUSAL, turn=turn_halves, bound=0.3)
    np.testing.assert_allclose(attention(params, x, guide()), expected, atol=2e-5)
    assert np.abs(expected - by_hand(params, x, mask=CAUSAL, turn=turn_halves)).max() > 0.05


@pytest.mark.parametrize("placement", ["before_rope", "after_rope"])
@pytest.mark.parametrize("over", ["width", "head", "each_head"])
def test_query_and_key_norms_come_before_or_after_positions(layer, normal, over, placement):
    """The order shows because scales differ by feature: a turned vector is scaled otherwise."""
    qk_norm = QKNorm(norm=RMSNorm(eps=0.01), over=over, placement=placement)
    params, attention = layer(qk_norm=qk_norm)
    shapes = {"width": ((N * H,), (K * H,)), "head": ((H,), (H,)), "each_head": ((N, H), (K, H))}
    assert params["query_norm"]["scale"].shape == shapes[over][0]
    assert params["key_norm"]["scale"].shape == shapes[over][1]

    def norm(name, y, p):
        scale = p[f"{name}_norm"]["scale"]
        flat = y.reshape(B, T, -1) if over == "width" else y
        root = np.sqrt(np.square(flat).mean(axis=-1, keepdims=True) + 0.01)
        return (flat / root * scale).reshape(y.shape)

    def norm_of_turned(name, y, p):
        return norm(name, turn_halves(y), p)

    x, steps = normal(B, T, D), {"turn": turn_halves, "norm": norm}
    if placement == "after_rope":
        steps = {"norm": norm_of_turned}
    expected = by_hand(params, x, mask=CAUSAL, **steps)
    np.testing.assert_allclose(attention(params, x, guide()), expected, atol=2e-5)


def test_queries_are_scaled_by_their_position(layer, normal):
    params, attention = layer()
    x, scale = normal(B, T, D), np.linspace(1, 2, T)

    def scaled(name, y, p):
        return y * scale[:, None, None] if name == "query" else y

    inputs = guide()._replace(query_scale=jnp.asarray(scale, jnp.float32))
    expected = by_hand(params, x, mask=CAUSAL, turn=turn_halves, norm=scaled)
    np.testing.assert_allclose(attention(params, x, inputs), expected, atol=2e-5)
    assert np.abs(expected - attention(params, x, guide())).max() > 0.01


@pytest.mark.parametrize(
    "over, gates, activation", [("feature", H, "sigmoid"), ("head", 1, "softplus")]
)
@pytest.mark.slow
def test_a_gate_multiplies_the_heads(layer, normal, over, gates, activation):
    """By hand, and gradients of its kernel and of x from differences of that."""
    option = OutputGate(over=over, activation=activation, bias=over == "feature")
    sub_norm = RMSNorm() if over == "head" else None
    params, attention = layer(qk_norm=QKNorm(), output_gate=option, sub_norm=sub_norm)
    gate = sigmoid if activation == "sigmoid" else lambda x: np.log1p(np.exp(x))
    kernel = params["output_gate"]["kernel"]
    assert kernel.shape == (D, N, gates)
    assert option.bias == ("output_gate_bias" in params)
    x, towards = normal(B, T, D), normal(B, T, D)

    def norm(name, y, p):
        size = np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + 1e-6)
        return y / size * p[f"{name}_norm"]["scale"]

    def exact(kernel, x):
        gated = params | {"output_gate": {"kernel": kernel}}
        return by_hand(gated, x, mask=CAUSAL, turn=turn_halves, norm=norm, gate=gate)

    np.testing.assert_allclose(attention(params, x, guide()), exact(kernel, x), atol=2e-5)
    total = lambda p, x: jnp.sum(attention(p, x, guide()) * towards)  # noqa: E731
    of_params, of_x = jax.grad(total, argnums=(0, 1))(params, x)
    both = (of_params["output_gate"]["kernel"], of_x)
    for i, at in [(0, (0, 0, 0)), (0, (5, 1, gates - 1)), (1, (1, 2, 3)), (1, (0, T - 1, 0))]:
        there = [np.float64(kernel), np.float64(x)]
        there[i][at] += 1e-4
        change = exact(*there)
        there[i][at] -= 2e-4
        change -= exact(*there)
        np.testing.assert_allclose(both[i][at], np.sum(change * towards) / 2e-4, rtol=1e-3)


def test_values_may_be_narrower_than_keys(layer, normal):
    params, attention = layer(value_dim=5, output_gate=OutputGate(), sub_norm=RMSNorm())
    x = normal(B, T, D)
    assert params["value"]["kernel"].shape == (D, K, 5)
    assert params["sub_norm"]["scale"].shape == (5 * N,)
    expected = by_hand(params, x, mask=CAUSAL, turn=turn_halves)
    np.testing.assert_allclose(attention(params, x, guide()), expected, atol=2e-5)


def test_a_gate_of_cross_attention_reads_what_asks(layer, normal):
    x, memory = normal(B, T, D), normal(B, S, D)
    params, attention = layer(positions=(None,), output_gate=OutputGate())
    expected = by_hand(params, x, read=memory)
    np.testing.assert_allclose(attention(params, x, AttentionInputs(), memory), expected, atol=2e-5)


def test_layer_norm_serves_queries_and_keys_too(layer, normal):
    params, attention = layer(qk_norm=QKNorm(norm=LayerNorm()))
    x = normal(B, T, D)

    def norm(name, y, p):
        y = y - y.mean(axis=-1, keepdims=True)
        root = np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + 1e-5)
        return y / root * p[f"{name}_norm"]["scale"] + p[f"{name}_norm"]["bias"]

    expected = by_hand(params, x, mask=CAUSAL, turn=turn_halves, norm=norm)
    np.testing.assert_allclose(attention(params, x, guide()), expected, atol=2e-5)


@pytest.mark.parametrize(
    "biases", [(), ("query", "key", "value"), ("out",), ("query", "key", "value", "out")]
)
def test_biases_where_named_and_nowhere_else(layer, normal, biases):
    params, attention = layer(biases=biases)
    assert {name for name in params if "bias" in params[name]} == set(biases)
    x = normal(B, T, D)
    expected = by_hand(params, x, mask=CAUSAL, turn=turn_halves)
    np.testing.assert_allclose(attention(params, x, guide()), expected, atol=2e-5)


@pytest.mark.slow
def test_rows_of_a_batch_and_gradient(layer, normal):
    params, attention = layer()
    x = normal(B, T, D)
    y = attention(params, x, guide())
    np.testing.assert_allclose(attention(params, x[1], guide()), y[1], atol=1e-6)
    gradient = jax.jit(jax.grad(lambda p: attention(p, x, guide()).sum()))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all() and np.any(leaf != 0), path


def test_computes_in_bfloat16(config, randomise, normal):
    cfg = config()
    module = MultiHeadAttention(cfg, cfg.attention, RuntimeConfig(dtype=jnp.bfloat16))
    x = normal(B, T, D)
    params = randomise(module, x.astype(jnp.bfloat16), guide())
    y, _ = jax.jit(module.apply)({"params": params}, x.astype(jnp.bfloat16), guide())
    assert y.dtype == jnp.bfloat16
    exact = by_hand(params, x.astype(jnp.bfloat16), mask=CAUSAL, turn=turn_halves)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=0.05)


def test_the_components_compose(normal, randomise):
    """inventory row 63: an embedding, RMSNorm and the three products of SwiGLU, composed by
    hand, are down(silu(gate(z)) * up(z)) of z = rms_norm(table[tokens])."""
    init, tokens = Initialisation(), jnp.asarray([[3, 1, 4], [1, 5, 2]])
    table, norm = Embed(7, D, init.embedding), Norm(RMSNorm())
    gate, up = (Linear((11,), init.projection, MODE) for _ in range(2))
    down = Linear((D,), init.projection, MODE)
    p = {
        "table": randomise(table),
        "norm": randomise(norm, normal(2, 3, D)),
        "gate": {"kernel": normal(D, 11)},
        "up": {"kernel": normal(D, 11)},
        "down": {"kernel": normal(11, D)},
    }

    @jax.jit
    def compose(p, tokens):
        z = norm.apply({"params": p["norm"]}, F.embed(table.apply({"params": p["table"]}), tokens))
        hidden = F.swiglu(gate.apply({"params": p["gate"]}, z), up.apply({"params": p["up"]}, z))
        return down.apply({"params": p["down"]}, hidden)

    q = jax.tree.map(lambda a: np.asarray(a, np.float64), p)
    x = q["table"]["embedding"][np.asarray(tokens)]
    z = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-6) * q["norm"]["scale"]
    gated = z @ q["gate"]["kernel"]
    hidden = gated / (1 + np.exp(-gated)) * (z @ q["up"]["kernel"])
    expected = hidden @ q["down"]["kernel"]
    np.testing.assert_allclose(compose(p, tokens), expected, rtol=1e-5, atol=1e-4)


POSITIONS = {
    "sinusoid": dict(embedding=Embedding(positions=Sinusoid()), attention=dict(positions=(None,))),
    "learned": dict(
        embedding=Embedding(positions=Learned(max_length=9)), attention=dict(positions=(None,))
    ),
    "relative": dict(attention=dict(positions=(T5Bias(num_buckets=8, max_distance=14),))),
    "rotary": dict(attention=dict(positions=(Rope(base=50.0),))),
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.slow(but=["relative"])
def test_each_kind_of_position_is_one_choice(config, build, name):
    """inventory row 36: sinusoid, learned, relative and rotary are each one choice that builds,
    and each tells the order of earlier tokens, which no position at all in one layer does not."""
    tokens = jnp.asarray([[3, 1, 4, 1, 5]])
    swapped = jnp.asarray([[1, 3, 4, 1, 5]])
    last = []
    for changes in (POSITIONS[name], dict(attention=dict(positions=(None,)))):
        _, run = build(config(num_layers=1, **changes))
        last.append(float(jnp.abs(run(tokens)[0, -1] - run(swapped)[0, -1]).max()))
    assert last[0] > 1e-3 and last[1] < 1e-5
