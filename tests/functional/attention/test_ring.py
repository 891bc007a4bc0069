"""Attention around a ring of devices that share a text is attention."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.functional import ring_attention
from jaxformer.functional.attention import blockwise, ring
from tests.functional.jitted_functions import F

DEVICES, LENGTH = 4, 16
HEADS = {"N": 6, "K": 3, "H": 4, "Hv": 5}
POSITIONS = np.arange(LENGTH, dtype=np.int32)
SEGMENTS = np.repeat(np.int32([1, 2, 3, 4]), 4)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return np.float32(rng.normal(size=shape))

    n, k, h, v = HEADS.values()
    return draw(2, LENGTH, n, h), draw(2, LENGTH, k, h), draw(2, LENGTH, k, v)


def mesh():
    return jax.make_mesh(
        (DEVICES,), ("context",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )


def around(function):
    """The function of whole arrays that runs on shares of them, as do masks and biases."""
    rows, places, whole = P(None, "context"), P("context"), P()

    def run(query, key, value, mask=None, bias=None):
        mask_specs = jax.tree.map(lambda _: places, mask)
        if mask is not None and mask.head_shifts is not None:
            mask_specs = mask_specs._replace(head_shifts=whole)
        specs = (rows,) * 3 + (mask_specs,)
        if bias is not None:  # parameters are everywhere
            bias_specs = bias._replace(params=jax.tree.map(lambda _: whole, bias.params))
            specs += (bias_specs._replace(query_positions=places, key_positions=places),)
        inputs = (query, key, value, mask) + ((bias,) if bias is not None else ())
        return jax.shard_map(function, mesh=mesh(), in_specs=specs, out_specs=rows)(*inputs)

    return run


def mask_of(positions=POSITIONS, segments=None, **rule):
    return F.AttentionMask(positions, positions, segments, segments, F.MaskRule(**rule))


def ones(params, query_positions, key_positions):
    shape = len(params), len(query_positions), len(key_positions)
    return jnp.broadcast_to(params[:, None, None], shape)


CAUSAL = mask_of(causal=True)
PATTERN = F.BlockSparsePattern(2, 1, 3)
OPTIONS = {
    "all": {},
    "causal": dict(mask=CAUSAL),
    "window": dict(mask=mask_of(causal=True, window=3)),
    "to both sides": dict(mask=mask_of(window=3, lookahead=2)),
    "chunks": dict(mask=mask_of(causal=True, chunk=3)),
    "segments": dict(mask=mask_of(segments=SEGMENTS, causal=True)),
    "in any order": dict(mask=mask_of(POSITIONS[::-1], causal=True)),
    "ring order": dict(mask=mask_of(jnp.asarray(F.zigzag_order(LENGTH, DEVICES)), causal=True)),
    "alibi": dict(
        mask=CAUSAL, bias=F.attention_bias(F.alibi_bias, F.alibi_slopes(6), POSITIONS, POSITIONS)
    ),
    "soft cap": dict(logit_softcap=0.7),
    "scale": dict(scale=2.0),
    "relu": dict(  # the bias keeps sums of positive scores away from zero, where rounding grows
        normalizer="relu",
        mask=CAUSAL,
        bias=F.attention_bias(ones, jnp.ones(6), POSITIONS, POSITIONS),
    ),
    "block-sparse": dict(
        mask=mask_of(causal=True, block_sparse=PATTERN)._replace(head_shifts=PATTERN.head_shifts(6))
    ),
    "no key at all": dict(mask=F.AttentionMask(POSITIONS, POSITIONS, SEGMENTS, SEGMENTS + 9)),
}


WITHIN_BLOCKS = {"window", "segments", "alibi", "relu"}  # others at once, before a release in both


@pytest.mark.parametrize(
    "name, block",
    [(name, 1 if name in WITHIN_BLOCKS else 512) for name in OPTIONS]
    + [
        pytest.param(name, 512 if name in WITHIN_BLOCKS else 1, marks=pytest.mark.exhaustive)
        for name in OPTIONS
        if name != "alibi"
    ]
    + [("alibi", 512)],
)
@pytest.mark.slow
def test_a_ring_of_devices_gives_what_one_gives(name, block, arrays, monkeypatch):
    """Values and gradients, whether a half's scores are there at once or a query's."""
    monkeypatch.setitem(blockwise.DEFAULT_BLOCK_SIZE, "cpu", block)
    options = dict(OPTIONS[name])
    mask, bias = options.pop("mask", None), options.pop("bias", None)
    weights = jnp.cos(jnp.arange(2 * LENGTH * 6 * 5.0)).reshape(2, LENGTH, 6, 5)

    def both(function):
        def of(query, key, value, params):
            learned_bias = bias if bias is None else bias._replace(params=params)
            return function(query, key, value, mask, learned_bias)

        value, pull = jax.vjp(of, *arrays, None if bias is None else bias.params)
        return value, pull(weights)

    ring = around(partial(F.ring_attention, axis_name="context", **options))
    whole = partial(F.dot_product_attention, implementation="xla", **options)
    expected, actual = (jax.jit(partial(both, function))() for function in (whole, ring))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6 * np.max(np.abs(b), initial=1))


@pytest.mark.slow
def test_one_array_goes_round_as_key_and_value(arrays):
    """Its gradient is that of both, and so much less is sent."""
    query, both, _ = arrays

    def gradient(attend):
        def of(query, both):
            return jnp.sum(jnp.sin(attend(query, both, both, CAUSAL)))

        return jax.jit(jax.grad(of, argnums=(0, 1)))

    ring = around(partial(F.ring_attention, axis_name="context"))
    once = lambda query, key, value, mask: around(  # noqa: E731
        lambda query, key, _, mask: ring_attention(query, key, key, mask, axis_name="context")
    )(query, key, value, mask)
    expected = gradient(F.dot_product_attention)(query, both)
    for function in (ring, once):
        for a, b in zip(gradient(function)(query, both), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-6)
    sent = [
        gradient(f).lower(query, both).as_text().count("collective_permute") for f in (ring, once)
    ]
    assert sent[1] < sent[0]


@pytest.mark.slow
def test_memory_of_a_device_is_linear_in_length():
    """Of a gradient with a window, documents and ALiBi, which is that of one device."""
    rows, places = P("context"), P("context")

    def per_device(query, key, value, at, segments):
        mask = F.AttentionMask(at, at, segments, segments, F.MaskRule(causal=True, window=4096))
        bias = F.attention_bias(F.alibi_bias, F.alibi_slopes(2), at, at)
        output = F.ring_attention(query, key, value, mask, bias, axis_name="context")
        return jax.lax.psum(jnp.sum(output**2), "context")

    specs = (rows, rows, rows, places, places)
    loss = jax.shard_map(per_device, mesh=mesh(), in_specs=specs, out_specs=P())
    gradient, taken = jax.jit(jax.grad(loss, argnums=(0, 1, 2))), []
    for length in (8192, 16_384, 32_768):
        heads = jax.ShapeDtypeStruct((length, 2, 8), jnp.float32)
        numbers = jax.ShapeDtypeStruct((length,), jnp.int32)
        compiled = gradient.lower(heads, heads, heads, numbers, numbers).compile()
        taken.append(compiled.memory_analysis().temp_size_in_bytes)
    growth = np.diff(taken) / np.diff([1, 2, 4])
    assert growth.max() < 1.1 * growth.min(), taken
    order = F.zigzag_order(8192, DEVICES)
    rng = np.random.default_rng(0)
    drawn = [np.float32(rng.normal(size=(8192, 2, 8))) for _ in range(3)]
    at = jnp.asarray(np.arange(8192) % 5000, jnp.int32)
    documents = jnp.asarray(np.arange(8192) // 5000, jnp.int32)

    def on_one(query, key, value):
        mask = F.AttentionMask(at, at, documents, documents, F.MaskRule(causal=True, window=4096))
        bias = F.attention_bias(F.alibi_bias, F.alibi_slopes(2), at, at)
        return jnp.sum(F.blockwise_attention(query, key, value, mask, bias) ** 2)

    expected = jax.jit(jax.grad(on_one, argnums=(0, 1, 2)))(*drawn)
    actual = gradient(*(x[order] for x in (*drawn, at, documents)))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b[order], atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.slow
def test_dropout_is_other_on_each_device_and_needs_a_key(arrays):
    query, key, value = (jnp.ones_like(x) for x in arrays)
    options = dict(axis_name="context", dropout_rate=0.5)
    with pytest.raises(ValueError, match="Dropout at rate 0.5 needs a random key"):
        around(partial(F.ring_attention, **options))(query, key, value)
    dropped = around(partial(F.ring_attention, **options, dropout_key=jax.random.key(0)))
    shares = np.asarray(dropped(query, key, value))[..., 0]  # [2, T, N]: the share that is kept
    assert abs(shares.mean() - 1) < 0.1 and shares.std() > 0.1
    assert len(np.unique(shares[0].reshape(DEVICES, -1), axis=0)) == DEVICES


@pytest.mark.slow
def test_dropout_is_other_for_each_pair_of_halves():
    """Values that name their keys show which weights are left."""
    key = jnp.ones((LENGTH, 1, 2))
    value = jnp.eye(LENGTH)[:, None]
    ring = partial(F.ring_attention, axis_name="context", dropout_rate=0.5)
    rows = P("context")
    program = jax.shard_map(
        partial(ring, dropout_key=jax.random.key(0)),
        mesh=mesh(),
        in_specs=(rows, rows, rows),
        out_specs=rows,
    )
    left = np.asarray(jax.jit(program)(jnp.ones((LENGTH, 64, 2)), key, value)) > 0  # [T, N, S]
    half = LENGTH // (2 * DEVICES)
    tiles = left.transpose(0, 2, 1).reshape(2 * DEVICES, half, 2 * DEVICES, half * 64)
    tiles = tiles.transpose(0, 2, 1, 3).reshape((2 * DEVICES) ** 2, -1)
    assert 0.4 < left.mean() < 0.6
    assert len(np.unique(tiles, axis=0)) == len(tiles)


@pytest.mark.slow
def test_no_rows_are_no_rows_and_so_are_their_gradients(arrays):
    attend = around(partial(ring_attention, axis_name="context"))
    none = [x[:0] for x in arrays]
    gradients = jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))(*none)
    assert [x.shape for x in gradients] == [x.shape for x in none]


@pytest.mark.slow
def test_the_backward_ring_starts_after_the_forward_ring(arrays):
    """A CPU would start a permute that needs keys alone beside the forward ring: devices hang."""
    attend = around(partial(ring_attention, axis_name="context"))
    gradient = jax.jit(jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2)))
    hlo = gradient.lower(*arrays).compile().as_text()
    operands = {
        name: (kind, re.findall(r"%[\w.-]+", rest))
        for name, kind, rest in re.findall(
            r"(%[\w.-]+) = .*? ([a-z-]+)\((.*?)\)[,\n]", hlo[hlo.index("ENTRY") :]
        )
    }

    def follows_a_loop(name):
        kind, inputs = operands.get(name, ("", []))
        return kind == "while" or any(map(follows_a_loop, inputs))

    permutes = [name for name, (kind, _) in operands.items() if kind == "collective-permute"]
    assert permutes and all(map(follows_a_loop, permutes))


@pytest.mark.parametrize("length, devices", [(16, 4), (24, 2), (6, 1)])
def test_every_device_has_an_early_and_a_late_part(length, devices):
    order = F.zigzag_order(length, devices)
    np.testing.assert_array_equal(np.sort(order), np.arange(length))
    for i, share in enumerate(order.reshape(devices, 2, -1)):
        early, late = (part // (length // (2 * devices)) for part in share)
        assert set(early) == {i} and set(late) == {2 * devices - 1 - i}


def test_a_length_without_halves_for_all_is_refused():
    with pytest.raises(
        ValueError, match=r"sharded over 4 devices must have a multiple of 8 tokens; got 12"
    ):
        F.zigzag_order(12, 4)


@pytest.mark.parametrize(
    "length, block", [(2048, 128), (128, 64), (192, 96), (2 * 1031, 128), (7, 7), (6000, 125)]
)
def test_a_block_stands_in_one_half(length, block):
    """Of 128 tokens at most on a CPU, unless the half has no such divisor."""
    assert ring._block_size(length) == block


def tiles_seen(order):
    """Halves of queries and keys that meet, of each device, where only the past is seen."""
    seen = order[:, None] >= order[None]
    half = LENGTH // (2 * DEVICES)
    tiles = seen.reshape(DEVICES, 2, half, 2 * DEVICES, half).any(axis=(2, 4))
    return tiles.sum(axis=(1, 2))


@pytest.mark.slow
def test_in_ring_order_the_work_is_the_same_on_all_devices(monkeypatch, arrays):
    """What runs is counted where it runs; without the order, the last device has most to do."""
    ran = []
    real = blockwise.partial_attention

    def counted(*args, **kwargs):
        jax.debug.callback(lambda i: ran.append(int(i)), jax.lax.axis_index("context"))
        return real(*args, **kwargs)

    monkeypatch.setattr(blockwise, "partial_attention", counted)
    ring = around(partial(F.ring_attention, axis_name="context"))
    counts = {}
    for name, order in (("plain", np.arange(LENGTH)), ("ring", F.zigzag_order(LENGTH, DEVICES))):
        ran.clear()
        query, key, value = (x[:1, order, :1] for x in arrays)
        mask = mask_of(jnp.asarray(order), causal=True)
        jax.block_until_ready(jax.jit(ring)(query, key, value, mask))
        jax.effects_barrier()
        counts[name] = np.bincount(ran, minlength=DEVICES)
        np.testing.assert_array_equal(counts[name], tiles_seen(order))
    np.testing.assert_array_equal(counts["ring"], [2 * DEVICES + 1] * DEVICES)
    np.testing.assert_array_equal(counts["plain"], 3 + 4 * np.arange(DEVICES))


def test_zigzag_order_is_of_one_device_or_more():
    with pytest.raises(ValueError, match="devices must be at least 1; got 0"):
        F.zigzag_order(8, 0)
