"""Attention around a ring of devices that share a text is attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.functional.compiled import F

DEVICES, LENGTH = 4, 16
HEADS = {"N": 6, "K": 3, "H": 4, "Hv": 5}
POSITIONS = jnp.arange(LENGTH)
SEGMENTS = jnp.repeat(jnp.array([1, 2, 3, 4]), 4)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    n, k, h, v = HEADS.values()
    return draw(2, LENGTH, n, h), draw(2, LENGTH, k, h), draw(2, LENGTH, k, v)


def mesh():
    return jax.make_mesh(
        (DEVICES,), ("context",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )


def around(function, *, mask=None, bias=None):
    """The function of whole arrays that runs on shares of them; masks and biases by query."""
    rows = P(None, "context")
    specs = (rows, rows, rows, P("context") if mask is not None else P())
    specs += (P(None, "context") if bias is not None else P(),)
    shared = jax.shard_map(function, mesh=mesh(), in_specs=specs, out_specs=rows)
    return lambda *qkv: shared(*qkv, mask, bias)


OPTIONS = {
    "all": {},
    "causal": dict(mask=F.causal_mask(POSITIONS, POSITIONS)),
    "window": dict(
        mask=F.causal_mask(POSITIONS, POSITIONS) & F.window_mask(POSITIONS, POSITIONS, 3)
    ),
    "segments": dict(mask=F.causal_mask(POSITIONS, POSITIONS) & F.segment_mask(SEGMENTS, SEGMENTS)),
    "in any order": dict(mask=F.causal_mask(POSITIONS[::-1], POSITIONS[::-1])),
    "alibi": dict(
        mask=F.causal_mask(POSITIONS, POSITIONS),
        bias=F.alibi_bias(F.alibi_slopes(6), POSITIONS, POSITIONS),
    ),
    "soft cap": dict(logit_softcap=0.7),
    "scale": dict(scale=2.0),
    "relu": dict(  # the bias keeps sums of positive scores away from zero, where rounding grows
        normalizer="relu",
        mask=F.causal_mask(POSITIONS, POSITIONS),
        bias=jnp.ones((6, LENGTH, LENGTH)),
    ),
    "no key at all": dict(mask=jnp.zeros((LENGTH, LENGTH), bool)),
}


@pytest.mark.parametrize("block", [F.RING_BLOCK, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.slow(but=["window-1"])
def test_a_ring_of_devices_gives_what_one_gives(options, block, arrays, monkeypatch):
    """Values and gradients, whether a half's scores are there at once or a query's."""
    monkeypatch.setattr(F.ring, "RING_BLOCK", block)
    options = dict(options)
    mask, bias = options.pop("mask", None), options.pop("bias", None)
    ring = partial(F.ring_attention, axis_name="context", **options)
    weights = jnp.cos(jnp.arange(2 * LENGTH * 6 * 5.0)).reshape(2, LENGTH, 6, 5)

    def both(function):
        value, pull = jax.vjp(function, *arrays)
        return value, pull(weights)

    whole = lambda *qkv: F.dot_product_attention(*qkv, mask, bias, **options)  # noqa: E731
    expected = jax.jit(partial(both, whole))()
    found = jax.jit(partial(both, around(ring, mask=mask, bias=bias)))()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6 * np.max(np.abs(b), initial=1))


@pytest.mark.slow
def test_dropout_is_other_on_each_device_and_needs_a_key(arrays):
    query, key, value = (jnp.ones_like(x) for x in arrays)
    options = dict(axis_name="context", dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate 0\.5 needs a dropout_key"):
        around(partial(F.ring_attention, **options))(query, key, value)
    dropped = around(partial(F.ring_attention, **options, dropout_key=jax.random.key(0)))
    found = np.asarray(dropped(query, key, value))[..., 0]  # [2, T, N]: the share that is kept
    assert abs(found.mean() - 1) < 0.1 and found.std() > 0.1
    assert len(np.unique(found[0].reshape(DEVICES, -1), axis=0)) == DEVICES


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


@pytest.mark.parametrize("length, devices", [(16, 4), (24, 2), (6, 1)])
def test_every_device_has_an_early_and_a_late_part(length, devices):
    order = F.ring_order(length, devices)
    np.testing.assert_array_equal(np.sort(order), np.arange(length))
    for i, share in enumerate(order.reshape(devices, 2, -1)):
        early, late = (part // (length // (2 * devices)) for part in share)
        assert set(early) == {i} and set(late) == {2 * devices - 1 - i}


def test_a_length_without_halves_for_all_is_refused():
    with pytest.raises(ValueError, match=r"shared by 4 devices has a multiple of 8 tokens; got 12"):
        F.ring_order(12, 4)


@pytest.mark.parametrize(
    "length, blocks", [(2048, 4), (512, 2), (1536, 4), (2 * 1031, 2), (7, 1), (6000, 12)]
)
def test_queries_meet_keys_in_blocks_of_their_halves(length, blocks):
    """Of 512 at most, unless the length has no such divisor."""
    assert F.ring._blocks(length) == blocks


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
    real = F.ring.attend_partially

    def counted(*args, **kwargs):
        jax.debug.callback(lambda i: ran.append(int(i)), jax.lax.axis_index("context"))
        return real(*args, **kwargs)

    monkeypatch.setattr(F.ring, "attend_partially", counted)
    ring = partial(F.ring_attention, axis_name="context")
    counts = {}
    for name, order in (("plain", np.arange(LENGTH)), ("ring", F.ring_order(LENGTH, DEVICES))):
        ran.clear()
        query, key, value = (x[:1, order, :1] for x in arrays)
        mask = F.causal_mask(jnp.asarray(order), jnp.asarray(order))
        jax.block_until_ready(jax.jit(around(ring, mask=mask))(query, key, value))
        jax.effects_barrier()
        counts[name] = np.bincount(ran, minlength=DEVICES)
        np.testing.assert_array_equal(counts[name], tiles_seen(order))
    np.testing.assert_array_equal(counts["ring"], [2 * DEVICES + 1] * DEVICES)
    np.testing.assert_array_equal(counts["plain"], 3 + 4 * np.arange(DEVICES))
