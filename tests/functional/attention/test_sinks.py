"""Sinks: a score per head without a key, in every implementation, against NumPy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import functional as F
from jaxformer.functional.attention import blockwise

B, T, N, K, H = 2, 128, 6, 3, 8
POSITIONS = np.arange(T, dtype=np.int32)
SEGMENTS = np.repeat(np.int32([1, 2, 3, 4]), T // 4)
INTERPRET = jax.default_backend() != "tpu"


@pytest.fixture(scope="module")
def arrays():
    """Queries, keys, values, sinks, and the cotangent of the output."""
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (N,), (B, T, N, H)
    query, key, value, sinks, d_output = (np.float32(rng.normal(size=n)) for n in shapes)
    return 2 * query, key, value, 3 * sinks, d_output


def lazy_mask(positions=POSITIONS, query_segments=None, key_segments=None, **rule):
    rule = F.MaskRule(causal=True, contiguous_positions=True, **rule)
    return F.AttentionMask(positions, positions, query_segments, key_segments, rule)


MASKS = {
    "causal": lazy_mask(),
    "window": lazy_mask(window=9),
    "segments": lazy_mask(query_segments=SEGMENTS, key_segments=SEGMENTS),
    "no key at all": lazy_mask(query_segments=SEGMENTS, key_segments=SEGMENTS + 9),
}


def in_float64(arrays, mask):
    """Output and gradients of queries, keys, values and sinks, from the weights and their sum."""
    query, key, value, sinks, d_output = (np.float64(x) for x in arrays)
    key, value = (np.repeat(x, N // K, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) * H**-0.5
    exponentials = np.where(np.asarray(mask.materialize()), np.exp(scores), 0.0)
    denominator = np.exp(sinks)[:, None] + np.sum(exponentials, axis=-1)
    weights = exponentials / denominator[..., None]
    d_weights = np.einsum("btnh,bsnh->bnts", d_output, value)
    delta = np.sum(weights * d_weights, axis=-1)
    d_scores = weights * (d_weights - delta[..., None])
    d_key = np.einsum("bnts,btnh->bsnh", d_scores, query) * H**-0.5
    d_value = np.einsum("bnts,btnh->bsnh", weights, d_output)
    d_key, d_value = (x.reshape(B, T, K, N // K, H).sum(3) for x in (d_key, d_value))
    d_query = np.einsum("bnts,bsnh->btnh", d_scores, key) * H**-0.5
    d_sinks = -np.sum(np.exp(sinks)[:, None] / denominator * delta, axis=(0, 2))
    return np.einsum("bnts,bsnh->btnh", weights, value), (d_query, d_key, d_value, d_sinks)


def on_four_devices(query, key, value, mask, *, sinks):
    """Ring attention of shards of the sequence; all devices have the sinks."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("context",))
    rows, whole = P(None, "context"), P()
    mask_specs = jax.tree.map(lambda _: P("context"), mask)

    def ring(query, key, value, mask, sinks):
        return F.ring_attention(query, key, value, mask, sinks=sinks, axis_name="context")

    specs = rows, rows, rows, mask_specs, whole
    run = jax.shard_map(ring, mesh=mesh, in_specs=specs, out_specs=rows)
    return run(query, key, value, mask, sinks)


IMPLEMENTATIONS = {
    "xla": partial(F.dot_product_attention, implementation="xla"),
    "blockwise": partial(F.blockwise_attention, block_sizes=(32, 48)),
    "ring": on_four_devices,
    "splash": partial(F.splash_attention, interpret=INTERPRET),
}


def check(implementation, arrays, mask):
    *inputs, d_output = arrays

    @jax.jit
    def both(query, key, value, sinks):
        attend = lambda q, k, v, s: implementation(q, k, v, mask, sinks=s)  # noqa: E731
        output, pullback = jax.vjp(attend, query, key, value, sinks)
        return output, pullback(d_output)

    expected = jax.tree.leaves(in_float64(arrays, mask))
    for actual, wanted in zip(jax.tree.leaves(both(*inputs)), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5 * max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize(
    "implementation, name",
    [
        (implementation, name)
        for implementation in IMPLEMENTATIONS
        for name in MASKS
        if (implementation, name) != ("splash", "no key at all")  # segments are the row's own
    ],
)
@pytest.mark.slow(but=["xla-causal"])
def test_values_and_gradients(implementation, name, arrays):
    check(IMPLEMENTATIONS[implementation], arrays, MASKS[name])


@pytest.mark.slow
def test_blocks_side_by_side(arrays, monkeypatch):
    monkeypatch.setattr(blockwise, "target_platform", lambda: "gpu")
    check(IMPLEMENTATIONS["blockwise"], arrays, MASKS["segments"])


def test_a_kernel_under_vmap_has_the_gradient_of_shared_sinks(arrays):
    """`jax.vmap` merges rows into the kernel's batch; sinks have no batch axis."""
    query, key, value, sinks, d_output = arrays

    def total(attend, sinks):
        attend_row = lambda *x: attend(*x, MASKS["causal"], sinks=sinks)  # noqa: E731
        return jnp.sum(jax.vmap(attend_row)(query, key, value) * d_output)

    *_, expected = in_float64(arrays, MASKS["causal"])[1]
    actual = jax.jit(jax.grad(partial(total, IMPLEMENTATIONS["splash"])))(sinks)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_one_query_and_maps(arrays):
    """A decoding step is the last row; weights and the sink's share sum to 1."""
    query, key, value, sinks, _ = arrays
    expected = in_float64(arrays, MASKS["causal"])[0]
    step = jax.jit(F.dot_product_attention)(query[:, -1:], key, value, sinks=sinks)
    np.testing.assert_allclose(step, expected[:, -1:], atol=1e-5)
    weights = jax.jit(F.attention_weights)(query, key, MASKS["causal"], sinks=sinks)
    values = np.repeat(value, N // K, axis=2)
    np.testing.assert_allclose(np.einsum("bnts,bsnh->btnh", weights, values), expected, atol=1e-5)
    assert np.all(np.sum(weights, axis=-1) < 1)


@pytest.mark.slow
def test_a_low_sink_changes_nothing(arrays):
    query, key, value, *_ = arrays
    sinks = np.full(N, -1e9, np.float32)
    for name in ("xla", "blockwise"):
        attend = partial(IMPLEMENTATIONS[name], query, key, value, MASKS["causal"])
        np.testing.assert_array_equal(attend(sinks=sinks), attend())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.slow
def test_an_infinite_sink_takes_all_weight(implementation, arrays):
    *inputs, sinks, d_output = arrays
    sinks = np.where(np.arange(N) == 1, np.float32(np.inf), sinks)

    def attend(*inputs):
        return IMPLEMENTATIONS[implementation](*inputs[:3], MASKS["causal"], sinks=inputs[3])

    output, pullback = jax.vjp(jax.jit(attend), *inputs, sinks)
    assert np.isfinite(output).all() and not output[..., 1, :].any() and output[..., 0, :].any()
    d_query, *key_value_gradients, d_sinks = pullback(d_output)
    assert all(np.isfinite(x).all() for x in key_value_gradients)
    assert not d_query[..., 1, :].any() and d_sinks[1] == 0 and d_sinks[0] != 0


def test_wrong_sinks():
    x = jnp.ones((4, N, H))
    with pytest.raises(ValueError, match="sinks has 5 heads .*, but query has 6"):
        F.dot_product_attention(x, x, x, sinks=jnp.zeros(5))
    with pytest.raises(ValueError, match=r"sinks need normalizer=\"softmax\"; got 'relu'"):
        F.dot_product_attention(x, x, x, sinks=jnp.zeros(N), normalizer="relu")
