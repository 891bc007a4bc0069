"""Every function under jit, vmap, grad, shard_map and pmap gives what it gives row by row."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer import functional as F


def draw(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


TOKENS = np.array([[1, 4, 0], [6, 2, 2]])
SEEN = np.arange(14).reshape(2, 7) % 3 == 0
X, GATE, VALUE, LOGITS = draw(2, 3, 5), draw(2, 3, 7, seed=1), draw(2, 3, 7, seed=2), draw(2, 7)
STATISTICS = F.BatchStatistics(draw(5), draw(5) ** 2)
KEYS = jax.random.split(jax.random.key(0), 2)
SLOTS, KERNELS = np.array([[3, 0, 4], [2, 1, 0]]), draw(2, 3, 5, 5, seed=3)
GROUPS = np.array([[2, 0, 1], [0, 3, 0]])


def mixture(x, logits, kernels):
    def experts(rows, sizes):
        return F.grouped_matmul(rows, kernels, sizes)

    return F.mixture_of_experts(x, F.route(logits, top_k=2), experts, num_experts=3)


def gate_totals(x):
    return F.router_totals(x, F.route(x, top_k=2).expert_ids, num_token_axes=1)


def first_tokens(routing):
    return F.drop_late_tokens(*routing, num_experts=3, capacity=1)


# name: function, arguments with a leading axis to map over: the gradient is taken of the first
CASES = {
    "layer_norm": (F.layer_norm, (X,)),
    "rms_norm": (F.rms_norm, (X,)),
    "rms_norm_outside": (lambda x: F.rms_norm(x, eps_position="outside"), (X,)),
    "batch_norm": (lambda x: F.batch_norm(x)[0], (draw(2, 2, 3, 5),)),
    "batch_norm_step": (lambda x: F.batch_norm(x, over="step")[0], (draw(2, 2, 3, 5),)),
    "batch_norm_inference": (lambda x: F.batch_norm_inference(x, STATISTICS), (X,)),
    "relu": (F.relu, (X,)),
    "relu_squared": (F.relu_squared, (X,)),
    "sigmoid": (F.sigmoid, (X,)),
    "silu": (F.silu, (X,)),
    "gelu": (F.gelu, (X,)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate=True), (X,)),
    "quick_gelu": (F.quick_gelu, (X,)),
    "softplus": (F.softplus, (X,)),
    "soft_cap": (lambda x: F.soft_cap(x, 2.0), (X,)),
    "glu": (F.glu, (GATE, VALUE)),
    "bilinear": (F.bilinear, (GATE, VALUE)),
    "reglu": (F.reglu, (GATE, VALUE)),
    "geglu": (F.geglu, (GATE, VALUE)),
    "swiglu": (F.swiglu, (GATE, VALUE)),
    "clamped_geglu": (lambda g, v: F.clamped_geglu(g, v, limit=1.0), (GATE, VALUE)),
    "xielu": (F.xielu, (X, draw(2, 1), draw(2, 1))),
    "gaussian_top_k": (lambda x: F.gaussian_top_k(x, sparsity=0.6), (X,)),
    "linear": (F.linear, (X, draw(2, 5, 7))),
    "linear_heads": (lambda x, k: F.linear(x, k, axes=2), (draw(2, 3, 5, 7), draw(2, 5, 7, 2))),
    "dropout": (lambda x, key: F.dropout(x, 0.5, key), (X, KEYS)),
    "embed": (F.embed, (draw(2, 7, 5), TOKENS)),
    "learned_positions": (F.learned_positions, (draw(2, 7, 5), TOKENS)),
    "token_cross_entropy": (F.token_cross_entropy, (GATE, TOKENS)),
    "logit_statistics": (lambda x, y: F.logit_statistics(x, y).log_z, (GATE, TOKENS)),
    "cross_entropy_from_statistics": (
        lambda x, y: F.cross_entropy_from_statistics(
            F.logit_statistics(x, y), z_loss=0.1, label_smoothing=0.2
        ),
        (GATE, TOKENS),
    ),
    "dpo_loss": (lambda x, y: F.dpo_loss(x, y, beta=0.3), (GATE, VALUE)),
    "linear_logits": (F.linear_logits, (X, draw(2, 5, 7))),
    "linear_logit_statistics": (
        lambda x, k, y: F.linear_logit_statistics(x, k, y, chunk_size=3).target_logit,
        (X, draw(2, 5, 7), TOKENS),
    ),
    "linear_cross_entropy": (
        lambda x, k, y: F.linear_cross_entropy(x, k, y, chunk_size=3, z_loss=0.1),
        (X, draw(2, 5, 7), TOKENS),
    ),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y, mask=y > 1), (GATE, TOKENS)),
    "bits_per_byte": (lambda x: F.bits_per_byte(x, 7), (draw(2),)),
    "scale_by_temperature": (lambda x: F.scale_by_temperature(x, 0.5), (LOGITS,)),
    "keep_top_k": (lambda x: jax.nn.softmax(F.keep_top_k(x, 3)), (LOGITS,)),
    "keep_top_p": (lambda x: jax.nn.softmax(F.keep_top_p(x, 0.6)), (LOGITS,)),
    "keep_min_p": (lambda x: jax.nn.softmax(F.keep_min_p(x, 0.3)), (LOGITS,)),
    "penalise_repetition": (lambda x, s: F.penalise_repetition(x, s, 1.5), (LOGITS, SEEN)),
    "shift_right": (lambda x: F.shift_right(x, 1), (TOKENS,)),
    "unit_vectors": (F.unit_vectors, (draw(2, 7, 5),)),
    "route": (lambda x: F.route(x, top_k=2).weights, (GATE,)),
    "drop_late_tokens": (lambda x: first_tokens(F.route(x, top_k=2)), (GATE,)),
    "sparse_mixer": (lambda x: F.sparse_mixer(x, top_k=2, jitter=0.3).weights, (GATE,)),
    "grouped_matmul": (F.grouped_matmul, (X, KERNELS, GROUPS)),
    "mixture_of_experts": (mixture, (X, draw(2, 3, 3), KERNELS)),
    "router_totals": (lambda x: gate_totals(x).probability_sums, (GATE,)),
    "load_balance_loss": (lambda x: F.load_balance_loss(gate_totals(x)), (GATE,)),
    "router_z_loss": (lambda x: F.router_z_loss(gate_totals(x)), (GATE,)),
    "ring_buffer_slots": (lambda p, valid: F.ring_buffer_slots(p, valid, 2), (TOKENS, TOKENS > 0)),
    "write_slots": (F.write_slots, (draw(2, 4, 5), X, SLOTS)),
    "seen_tokens": (lambda x: F.seen_tokens(x, 7), (TOKENS,)),
}

POSITIONS = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]), np.array([[4, 0, 2], [5, 9, 11]])
QKV = draw(2, 5, 4, 3), draw(2, 3, 2, 3, seed=1), draw(2, 3, 2, 7, seed=2)
MASK, BIAS = draw(2, 5, 3, seed=3) > -0.5, draw(2, 4, 5, 3, seed=4)
LATENT = draw(2, 3, 7), draw(2, 3, 2, seed=1), draw(2, 7, 4, 5, seed=2), draw(2, 7, 4, 6, seed=3)
HEAD = tuple(x[..., 0, :] for x in QKV)
SIGHT = F.MaskRule(causal=True, window=5)
DECAY = np.float32([[0.5, 0.9, 1.0]] * 2), draw(2, 3, 2, seed=5)  # of heads, angles of their pairs
TEXT, STATE = draw(2, 5, 3, 4, seed=6), draw(2, 3, 4, seed=7)


SEGMENTS = np.array([[1, 1, 2, 2, 2], [3, 3, 3, 3, 4]])
VALID = np.array([[True, True, False, True, False], [True] * 5])


def recurrences(value, gamma, theta, initial, valid):
    """All forms, by a path with padding and a state before."""
    return jnp.stack(
        [
            F.linear_recurrence(
                value, gamma, theta, initial_state=initial, valid=valid, method=method, chunk_size=2
            ).output
            for method in ("scan", "associative", "chunked")
        ]
    )


CASES |= {
    "expand_latent": (lambda *a: sum(y.sum(-1) for y in F.expand_latent(*a)), LATENT),
    "absorb_query": (F.absorb_query, (QKV[0], draw(2, 7, 4, 2, seed=5))),
    "up_project_values": (F.up_project_values, (QKV[0], draw(2, 3, 4, 7, seed=6))),
    "causal_mask": (F.causal_mask, POSITIONS),
    "window_mask": (lambda q, k: F.window_mask(q, k, 3, lookahead=1), POSITIONS),
    "chunk_mask": (lambda q, k: F.chunk_mask(q, k, 3), POSITIONS),
    "segment_mask": (F.segment_mask, POSITIONS),
    "prefix_mask": (F.prefix_mask, (*POSITIONS, np.array([1, 10]))),
    "length_mask": (lambda n: F.length_mask(n, 5), (np.array([2, 5]),)),
    "key_padding_mask": (F.key_padding_mask, (MASK[:, 0],)),
    "block_sparse_mask": (
        lambda q, k: F.block_sparse_mask(q, k, num_heads=2, block_size=2, local_blocks=1, stride=2),
        POSITIONS,
    ),
    "attend": (lambda *a: F.attend(*a, scale=0.5), (*HEAD, MASK, BIAS[:, 0])),
    "attention_scores": (
        lambda *a: F.attention_scores(*a, scale=0.5, logit_softcap=2.0),
        (*HEAD[:2], BIAS[:, 0]),
    ),
    "blockwise_attention": (
        lambda q, k, v, t, s: F.blockwise_attention(q, k, v, F.AttentionMask(t, s, rule=SIGHT)),
        (*QKV, *POSITIONS),
    ),
    "materialize": (lambda t, s: F.materialize(F.AttentionMask(t, s, rule=SIGHT)), POSITIONS),
    "materialize_for_xla": (
        lambda t, s: F.materialize_for_xla(F.AttentionMask(t, s, rule=SIGHT), "xla", 4),
        POSITIONS,
    ),
    "attention_weights": (F.attention_weights, (*QKV[:2], MASK, BIAS)),
    "dot_product_attention": (F.dot_product_attention, QKV),
    "dot_product_attention_masked": (F.dot_product_attention, (*QKV, MASK, BIAS)),
    "dot_product_attention_relu_softcap": (
        lambda *a: F.dot_product_attention(*a, normalizer="relu", logit_softcap=2.0),
        (*QKV, MASK),
    ),
    "dot_product_attention_sinks": (
        lambda *a: F.dot_product_attention(*a[:3], sinks=a[3]),
        (*QKV, draw(2, QKV[0].shape[-2], seed=7)),
    ),
    "dot_product_attention_dropout": (
        lambda *a: F.dot_product_attention(*a[:3], dropout_rate=0.5, dropout_key=a[3]),
        (*QKV, KEYS),
    ),
    "decay_rates": (lambda x: jnp.stack(F.decay_rates(x)), (draw(2, 3),)),
    "decay_attention": (
        lambda *a: F.decay_attention(*a[:3], segments=a[3]),
        (TEXT, *DECAY, SEGMENTS),
    ),
    "causal_convolution": (
        lambda x, kernel, segments, valid: (
            F.causal_convolution(x, kernel, segments=segments, valid=valid).output
        ),
        (draw(2, 5, 3), draw(2, 4, 3, seed=1), SEGMENTS, VALID),
    ),
    "linear_recurrence": (recurrences, (TEXT, *DECAY, STATE, VALID)),
    "linear_attention": (
        lambda query, key, value, rates, segments, valid: (
            F.linear_attention(
                *(query, key, value),
                log_decay=-rates,
                delta_rule=True,
                chunk_size=2,
                segments=segments,
                valid=valid,
            ).output
        ),
        (*(draw(2, 5, 3, 4, seed=seed) for seed in range(3)), draw(2, 5, 3) ** 2, SEGMENTS, VALID),
    ),
    "rg_lru": (
        lambda x, input_gate, decay_gate, segments, valid: (
            F.rg_lru(
                *(x, input_gate, decay_gate**2, np.float32([0.5, 2, 3])),
                first=valid,
                segments=segments,
                valid=valid,
            ).output
        ),
        (*(draw(2, 5, 3, seed=seed) for seed in range(3)), SEGMENTS, VALID),
    ),
    "wkv": (
        lambda key, value, segments, valid: (
            F.wkv(
                *(key, value, np.float32([0.5, 2, 3]), np.float32([-1, 0, 1])),
                segments=segments,
                valid=valid,
            ).output
        ),
        (*(draw(2, 5, 3, seed=seed) for seed in range(2)), SEGMENTS, VALID),
    ),
    "selective_scan": (
        lambda x, step, write, read, segments, valid: (
            F.selective_scan(
                *(x, step**2, np.float32([[0.5, 2, 3]] * 3), write, read),
                segments=segments,
                valid=valid,
            ).output
        ),
        (*(draw(2, 5, 3, seed=seed) for seed in range(4)), SEGMENTS, VALID),
    ),
}


def value_and_gradient(function, arguments):
    """The value, and if the first argument can vary, the gradient of some weighted sum of it."""
    y = function(*arguments)
    if arguments[0].dtype != jnp.float32:
        return y, ()
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return y, jax.grad(lambda *a: jnp.sum(weights * function(*a)))(*arguments)


@functools.cache
def row_by_row(name):
    function, arguments = CASES[name]
    rows = [jax.tree.map(lambda a, row=row: a[row], arguments) for row in range(2)]
    once = jax.jit(lambda *a: value_and_gradient(function, a))
    return [once(*row) for row in rows]


def check(name, transform):
    function, arguments = CASES[name]
    mapped = transform(jax.vmap(lambda *a: value_and_gradient(function, a)))
    results = jax.device_get(mapped(*arguments))
    for row, expected in enumerate(row_by_row(name)):
        actual = jax.tree.map(lambda a, row=row: a[row], results)
        chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(
    but=[
        "rms_norm",
        "swiglu",
        "embed",
        "grouped_matmul",
        "route",
        "dot_product_attention",
        "attend",
        "keep_top_k",
        "cross_entropy",
        "mixture_of_experts",
        "decay_attention",
        "causal_mask",
    ]
)
def test_vmap_and_grad_under_jit(name):
    check(name, jax.jit)


BY_PMAP = {"layer_norm", "dot_product_attention"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_PMAP else pytest.mark.exhaustive) for name in CASES],
)
def test_vmap_and_grad_under_pmap(name):
    def on_one_device(function):
        parallel = jax.pmap(function, devices=jax.devices()[:1])
        return lambda *a: jax.tree.map(lambda x: x[0], parallel(*(x[None] for x in a)))

    check(name, on_one_device)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_vmap_and_grad_under_shard_map(name):
    def on_two_devices(function):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
        shared_out = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return jax.jit(shared_out)

    check(name, on_two_devices)


def test_the_table_is_complete():
    """Of functions of arrays; those of positions stand in test_transforms_positions.py."""
    modules = {"norms", "activations", "linear", "embeddings", "losses", "sampling"}
    modules |= {"moe", "ring_buffer", "linear_losses"}
    modules |= {"dot_product", "blockwise", "lazy_masks", "kernels", "latent", "masks", "scores"}
    modules |= {"decay", "dispatch", "recurrence", "convolution"}
    public = {
        name
        for name, thing in vars(F).items()
        if callable(thing) and thing.__module__.split(".")[-1] in modules
    }
    of_numbers = {"check_token_ids", "check_positions", "expert_capacity", "vocab_chunk_size"}
    of_numbers |= {"prefer_absorbed", "prefer_blockwise"}
    types = {"BatchStatistics", "Routing", "RouterTotals", "LogitStatistics", "DecayRates"}
    types |= {
        "Recurrence",
        "CausalConvolution",
        "AttentionMask",
        "AttentionBias",
        "MaskRule",
        "BlockSparsePattern",
    }
    types |= {"attention_bias"}  # of a function, which is no array
    elsewhere = {"cudnn_attention", "splash_attention"}  # other platforms': test_kernels.py
    assert public - set(CASES) == of_numbers | types | elsewhere
