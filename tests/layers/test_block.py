from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import functional as F
from jaxformer.config import GLU, MLP, LayerNorm, MoE, NoAttention, RMSNorm, Router, SharedExpert
from jaxformer.layers import (
    AttentionInputs,
    Block,
    FeedForward,
    LayerInputs,
    MultiHeadAttention,
    RuntimeConfig,
)

MODE = RuntimeConfig()


def guide(length):
    at = jnp.arange(length)
    rotations = F.rope_rotations(at, F.rope_frequencies(6))
    return LayerInputs(AttentionInputs(F.causal_mask(at, at), None, rotations))


@pytest.fixture
def parts(config, normal, randomise):
    """A block with random parameters, and its attention, feed-forward and norms as functions."""

    def make(**changes):
        cfg = config(**changes)
        x, g = normal(2, 5, 14), guide(5)
        block = Block(cfg, cfg.layers[0], MODE)
        params = randomise(block, x, g)
        layer = cfg.layers[0]
        attention = MultiHeadAttention(cfg, layer.attention, MODE)
        feed_forward = FeedForward(cfg, cfg.layers[0].feed_forward, MODE)

        def norm(name, y, *, offset=0.0, **options):
            return F.rms_norm(y, params[name]["scale"] + offset, **options)

        return (
            x,
            jax.jit(block.apply)({"params": params}, x, g)[0],
            lambda y: jax.jit(attention.apply)({"params": params["attention"]}, y, *g[:1])[0],
            lambda y: jax.jit(feed_forward.apply)({"params": params["feed_forward"]}, y),
            norm,
        )

    return make


@pytest.mark.slow
def test_serial_block_keeps_the_attention_residual(parts):
    """inventory row 23: y = h + MLP(LN h) with h = x + Attn(LN x); as printed, y = x + MLP(LN(x +
    Attn(LN x))), the attention residual is lost."""
    x, y, attention, feed_forward, norm = parts()
    h = x + attention(norm("pre_attention_norm", x))
    branch = feed_forward(norm("pre_feed_forward_norm", h))
    np.testing.assert_allclose(y, h + branch, atol=1e-5)
    assert np.abs(y - (x + branch)).max() > 1e-2


def test_parallel_block_with_two_norms(parts):
    """inventory row 24: y = x + MLP(LN2 x) + Attn(LN1 x) (GPT-NeoX)."""
    x, y, attention, feed_forward, norm = parts(block="parallel")
    expected = x + attention(norm("pre_attention_norm", x))
    expected = expected + feed_forward(norm("pre_feed_forward_norm", x))
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_a_block_without_a_norm_before_attention(block, parts):
    """The first layer of ModernBERT."""
    x, y, attention, feed_forward, norm = parts(block=block, norm_placement="pre_feed_forward")
    h = x + attention(x)
    read = h if block == "serial" else x
    np.testing.assert_allclose(y, h + feed_forward(norm("pre_feed_forward_norm", read)), atol=1e-5)


def test_parallel_block_with_one_norm(parts):
    """inventory row 24: one norm shared by both branches (GPT-J, PaLM, Cohere)."""
    x, y, attention, feed_forward, norm = parts(block="parallel_shared_norm")
    z = norm("pre_norm", x)
    np.testing.assert_allclose(y, x + attention(z) + feed_forward(z), atol=1e-5)


def test_parallel_branches_read_one_input_so_their_products_fuse(normal):
    """inventory row 25: the parallel form only removes the dependency of the feed-forward on
    attention, so that the products of the input become one; the mathematics is the same."""
    x, query, gate = normal(5, 7), normal(7, 3), normal(7, 11)
    fused = F.linear(x, jnp.concatenate([query, gate], axis=-1))
    np.testing.assert_allclose(fused[:, :3], F.linear(x, query), atol=1e-6)
    np.testing.assert_allclose(fused[:, 3:], F.linear(x, gate), atol=1e-6)


def test_post_placement(parts):
    x, y, attention, feed_forward, norm = parts(norm_placement="post")
    h = norm("post_attention_norm", x + attention(x))
    np.testing.assert_allclose(y, norm("post_feed_forward_norm", h + feed_forward(h)), atol=1e-5)


def test_sandwich_placement(parts):
    x, y, attention, feed_forward, norm = parts(norm_placement="sandwich")
    h = x + norm("post_attention_norm", attention(norm("pre_attention_norm", x)))
    branch = feed_forward(norm("pre_feed_forward_norm", h))
    np.testing.assert_allclose(y, h + norm("post_feed_forward_norm", branch), atol=1e-5)


def test_a_norm_after_a_branch_of_its_own_kind(parts):
    x, y, attention, feed_forward, norm = parts(
        norm_placement="res_post", post_norm=RMSNorm(eps=0.5, scale_offset=1.0)
    )
    norm = partial(norm, eps=0.5, offset=1.0)
    h = x + norm("post_attention_norm", attention(x))
    np.testing.assert_allclose(y, h + norm("post_feed_forward_norm", feed_forward(h)), atol=1e-5)


def test_res_post_placement(parts):
    x, y, attention, feed_forward, norm = parts(norm_placement="res_post")
    h = x + norm("post_attention_norm", attention(x))
    np.testing.assert_allclose(y, h + norm("post_feed_forward_norm", feed_forward(h)), atol=1e-5)


@pytest.mark.parametrize("block", ["serial", "parallel", "parallel_shared_norm"])
@pytest.mark.slow
def test_each_layer_has_its_own_placement(block, config, normal, randomise):
    places = "pre", "post", "sandwich", "res_post"
    by_layer = config(block=block, norm_placement=places, num_layers=4)
    x, g = normal(2, 5, 14), guide(5)
    for i, place in enumerate(places):
        alone = config(block=block, norm_placement=place)
        params = randomise(Block(alone, alone.layers[0], MODE), x, g)
        expected, _ = jax.jit(Block(alone, alone.layers[0], MODE).apply)({"params": params}, x, g)
        y, _ = jax.jit(Block(by_layer, by_layer.layers[i], MODE).apply)({"params": params}, x, g)
        np.testing.assert_array_equal(y, expected)


def test_parallel_branches_with_a_norm_each_after_their_sums(parts):
    """Both read the same x; the second sum is of the first one, normalised."""
    x, y, attention, feed_forward, norm = parts(block="parallel", norm_placement="post")
    first = norm("post_attention_norm", x + attention(x))
    np.testing.assert_allclose(
        y, norm("post_feed_forward_norm", first + feed_forward(x)), atol=1e-5
    )


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "res_post"])
@pytest.mark.parametrize("block", ["serial", "parallel", "parallel_shared_norm"])
@pytest.mark.slow
def test_a_multiplier_of_branches_is_one_of_their_last_parameters(
    block, placement, config, normal, randomise
):
    """x + m * branch(x): as if m were in the norm after the branch, or in its last projection."""
    plain, x, g = config(block=block, norm_placement=placement), normal(2, 5, 14), guide(5)
    scaled = replace(plain, residual_multiplier=0.3)
    params = randomise(Block(plain, plain.layers[0], MODE), x, g)
    last = ("post_",) if placement in ("sandwich", "res_post") else ("out", "down")

    def multiply(path, leaf):
        return 0.3 * leaf if any(key.key.startswith(last) for key in path) else leaf

    def run(cfg, params):
        return jax.jit(Block(cfg, cfg.layers[0], MODE).apply)({"params": params}, x, g)[0]

    expected = run(plain, jax.tree_util.tree_map_with_path(multiply, params))
    np.testing.assert_allclose(run(scaled, params), expected, atol=1e-5)
    assert np.abs(run(plain, params) - expected).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_a_scalar_multiplies_what_leaves_a_layer(block, config, normal, randomise):
    plain, x, g = config(block=block), normal(2, 5, 14), guide(5)
    scaled = replace(plain, layer_scalar=True)
    params = randomise(Block(plain, plain.layers[0], MODE), x, g)
    known = params | {"layer_scalar": jnp.float32([0.3])}
    outputs = [
        jax.jit(Block(cfg, cfg.layers[0], MODE).apply)({"params": p}, x, g)[0]
        for cfg, p in ((plain, params), (scaled, known))
    ]
    np.testing.assert_allclose(outputs[1], 0.3 * outputs[0], rtol=1e-6)
    fresh = jax.jit(Block(scaled, scaled.layers[0], MODE).init)(jax.random.key(0), x, g)
    assert fresh["params"]["layer_scalar"] == 1


@pytest.mark.slow
def test_experts_with_norms_of_their_own_read_the_stream(config, normal, randomise):
    """Gemma 4 26B-A4B, in float64: x + post(norm(experts(norm x)) + norm(shared(norm x))).

    The router reads rms(x) * scale / sqrt(D), and each expert's weight has a scale of its own.
    """
    rms = RMSNorm(eps=0.01)
    moe = MoE(
        expert=GLU(hidden_dim=3),
        num_experts=5,
        router=Router(norm=RMSNorm(eps=0.02), expert_scale=True),
        shared=SharedExpert(expert=GLU(hidden_dim=7)),
        norm=rms,
    )
    cfg = config(norm=rms, norm_placement="sandwich", feed_forward=(moe,))
    layer = replace(cfg.layers[0], attention=NoAttention())
    block, x = Block(cfg, layer, MODE), normal(2, 5, 14)
    params = randomise(block, x, guide(5))
    actual = jax.jit(block.apply)({"params": params}, x, guide(5))[0]
    assert "pre_feed_forward_norm" not in params
    p, wide = jax.tree.map(np.float64, params["feed_forward"]), np.float64(x)

    def norm(name, y, eps=0.01, tree=p):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + eps) * np.float64(tree[name]["scale"])

    def glu(kernels, y):
        gate = y @ kernels["gate"]
        return (gate / (1 + np.exp(-gate)) * (y @ kernels["up"])) @ kernels["down"]

    logits = norm("router_norm", wide, 0.02) / np.sqrt(14) @ p["router"]["kernel"]
    read, routed = norm("pre_experts_norm", wide), np.zeros_like(wide)
    for at in np.ndindex(2, 5):
        chosen = np.argsort(-logits[at])[:2]
        weights = np.exp(logits[at][chosen])
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            kernels = {name: x["kernel"][expert] for name, x in p["experts"].items()}
            routed[at] += weight * p["expert_scale"][expert] * glu(kernels, read[at])
    kernels = {name: x["kernel"] for name, x in p["shared"].items()}
    shared = glu(kernels, norm("pre_shared_norm", wide))
    total = norm("post_experts_norm", routed) + norm("post_shared_norm", shared)
    expected = wide + norm("post_feed_forward_norm", total, tree=params)
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_a_norm_before_the_last_projection(config, normal, randomise):
    """BitNet's network, in float64: down(norm(relu(gate x)^2 * up x))."""
    option = GLU(hidden_dim=7, activation="relu_squared", sub_norm=RMSNorm(eps=0.05))
    module, x = FeedForward(config(), option, MODE), normal(2, 5, 14)
    params = randomise(module, x)
    p, wide = jax.tree.map(np.float64, params), np.float64(x)
    hidden = np.maximum(wide @ p["gate"]["kernel"], 0) ** 2 * (wide @ p["up"]["kernel"])
    size = np.sqrt((hidden**2).mean(-1, keepdims=True) + 0.05)
    expected = hidden / size * p["sub_norm"]["scale"] @ p["down"]["kernel"]
    actual = jax.jit(module.apply)({"params": params}, x)
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_a_norm_of_the_sum_of_experts_that_capped_logits_choose(config, normal, randomise):
    """A.X K1's norm and Laguna's cap, in float64: x + norm(experts(norm x) + shared(norm x))."""
    moe = MoE(
        expert=MLP(hidden_dim=3, activation="relu"),
        num_experts=5,
        router=Router(score="sigmoid", selection_bias=True, scale=1.5, logit_softcap=0.4),
        shared=SharedExpert(expert=MLP(hidden_dim=7, activation="relu")),
        output_norm=RMSNorm(eps=0.05),
    )
    module, x = FeedForward(config(), moe, MODE), normal(2, 5, 14)
    params = randomise(module, x)
    p, wide = jax.tree.map(np.float64, params), np.float64(x)

    def mlp(kernels, y):
        return np.maximum(y @ kernels["up"], 0) @ kernels["down"]

    logits = 0.4 * np.tanh(wide @ p["router"]["kernel"] / 0.4)
    scores, total = 1 / (1 + np.exp(-logits)), np.zeros_like(wide)
    for at in np.ndindex(2, 5):
        chosen = np.argsort(-(scores[at] + p["selection_bias"]))[:2]
        for expert in chosen:
            kernels = {name: x["kernel"][expert] for name, x in p["experts"].items()}
            weight = 1.5 * scores[at][expert] / scores[at][chosen].sum()
            total[at] += weight * mlp(kernels, wide[at])
    total += mlp({name: x["kernel"] for name, x in p["shared"].items()}, wide)
    size = np.sqrt((total**2).mean(-1, keepdims=True) + 0.05)
    expected = total / size * p["output_norm"]["scale"]
    actual, sown = jax.jit(partial(module.apply, mutable="router"))({"params": params}, x)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    np.testing.assert_allclose(sown["router"]["logits"][0], logits, atol=1e-6)


@pytest.mark.slow
def test_parallel_shared_placements(parts):
    x, y, attention, feed_forward, norm = parts(block="parallel_shared_norm", norm_placement="post")
    both = attention(x) + feed_forward(x)
    np.testing.assert_allclose(y, norm("post_norm", x + both), atol=1e-5)
    x, y, attention, feed_forward, norm = parts(
        block="parallel_shared_norm", norm_placement="sandwich"
    )
    z = norm("pre_norm", x)
    np.testing.assert_allclose(y, x + norm("post_norm", attention(z) + feed_forward(z)), atol=1e-5)


@pytest.mark.slow
def test_a_block_that_adds_nothing_is_the_identity(config, normal, randomise):
    """inventory row 86: y = x + F(x)."""
    cfg, x = config(), normal(2, 5, 14)
    block = Block(cfg, cfg.layers[0], MODE)
    params = randomise(block, x, guide(5))
    for branch, kernel in (("attention", "out"), ("feed_forward", "down")):
        params[branch][kernel]["kernel"] = jnp.zeros_like(params[branch][kernel]["kernel"])
    np.testing.assert_array_equal(block.apply({"params": params}, x, guide(5))[0], x)


@pytest.mark.slow
def test_residual_jacobian_is_identity_plus_branch(normal):
    """inventory row 90: dL/dx = (I + J)^T dL/dy. It does not guarantee a useful gradient: with
    F(x) = -x it is zero, and under post-norm the identity path ends at the norm."""
    x, kernel = normal(5), normal(5, 5)

    def branch(x):
        return jnp.tanh(F.linear(x, kernel))

    jacobian = jax.jacobian(lambda x: x + branch(x))(x)
    np.testing.assert_allclose(jacobian, jnp.eye(5) + jax.jacobian(branch)(x), atol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: (x + -x).sum())(x), np.zeros(5))
    # Along x itself the norm after the sum lets nothing through, whatever the branch is.
    post = partial(F.rms_norm, eps=0.0)
    np.testing.assert_allclose(jax.jacobian(post)(x) @ x, np.zeros(5), atol=1e-5)


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()])
@pytest.mark.parametrize("block", ["serial", "parallel", "parallel_shared_norm"])
def test_no_bias_leaf_unless_asked(config, build, norm, block):
    """inventory row 14: without biases there is no bias leaf, in norms neither."""
    cfg = config(block=block, norm=replace(norm, parameters="scale"))
    params, _ = build(cfg)
    leaves = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert leaves == {"kernel", "scale", "embedding"}


@pytest.mark.slow
def test_pre_norm_keeps_an_identity_path_and_post_norm_does_not(parts):
    """A scaled input leaves a pre-norm block scaled (up to its branches), a post-norm one unit."""
    x, y, *_ = parts(norm_placement="pre")
    assert np.abs(y - x).max() < np.abs(y).max() * 10
    x, y, _, _, norm = parts(norm_placement="post")
    scale = norm("post_feed_forward_norm", jnp.ones_like(x))  # of a vector of unit mean square
    np.testing.assert_allclose(
        jnp.mean(jnp.square(y / scale), axis=-1), jnp.ones(x.shape[:-1]), rtol=1e-3
    )
