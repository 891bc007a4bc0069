"""Attention around a ring of devices that share a text is attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import functional as F

DEVICES, LENGTH = 4, 12
HEADS = {"N": 6, "K": 3, "H": 4, "Hv": 5}
POSITIONS = jnp.arange(LENGTH)
SEGMENTS = jnp.repeat(jnp.array([1, 2, 3]), 4)


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
    "relu": dict(normalizer="relu", mask=F.causal_mask(POSITIONS, POSITIONS)),
    "no key at all": dict(mask=jnp.zeros((LENGTH, LENGTH), bool)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_ring_of_devices_gives_what_one_gives(options, arrays):
    """Values and gradients."""
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
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_dropout_is_other_on_each_device_and_needs_a_key(arrays):
    query, key, value = (jnp.ones_like(x) for x in arrays)
    options = dict(axis_name="context", dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate 0\.5 needs a dropout_key"):
        around(partial(F.ring_attention, **options))(query, key, value)
    dropped = around(partial(F.ring_attention, **options, dropout_key=jax.random.key(0)))
    found = np.asarray(dropped(query, key, value))[..., 0]  # [2, T, N]: the share that is kept
    assert abs(found.mean() - 1) < 0.1 and found.std() > 0.1
    assert len(np.unique(found[0].reshape(DEVICES, -1), axis=0)) == DEVICES
