"""Functions of arrays that are shared out among devices give what one device gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer import functional as F

DEVICES = 4


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def shared_out(function, *specs, out):
    devices = jax.devices()[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("parts",), (AxisType.Auto,), devices=devices)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))


LAST = P(None, None, "parts")
TARGETS = jnp.array([[0, 4, 11, 7, 2], [-1, 12, 3, 9, 8]])  # one too small, one too large


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.3}, {"label_smoothing": 0.2}], ids=str)
def test_cross_entropy_of_a_vocabulary_in_parts(options):
    """Losses, NaN for wrong ids, and gradients; large logits do not overflow."""
    logits = 50 * draw(2, 5, 12)
    losses = shared_out(
        partial(F.token_cross_entropy, axis_name="parts", **options), LAST, P(), out=P()
    )
    whole = partial(F.token_cross_entropy, **options)
    expected = whole(logits, TARGETS)
    assert np.isnan(expected[1, :2]).all() and np.isfinite(expected[0]).all()
    np.testing.assert_allclose(losses(logits, TARGETS), expected, rtol=1e-6)
    slopes = [jax.grad(lambda x, f=f: jnp.sum(f(x, TARGETS)[0]))(logits) for f in (losses, whole)]
    np.testing.assert_allclose(*slopes, atol=1e-6)


def test_rows_of_a_vocabulary_in_parts():
    table = draw(12, 3)
    embed = shared_out(partial(F.embed, axis_name="parts"), P("parts"), P(), out=P())
    expected = F.embed(table, TARGETS)
    assert np.isnan(expected[1, :2]).all()
    np.testing.assert_array_equal(embed(table, TARGETS), expected)
    weights = draw(5, 3, seed=1)
    slopes = [
        jax.grad(lambda x, f=f: jnp.sum(weights * f(x, TARGETS)[0]))(table)
        for f in (embed, F.embed)
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-6)


NORMS = {
    "layer": F.layer_norm,
    "rms": F.rms_norm,
    "rms outside": partial(F.rms_norm, eps_position="outside"),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_of_features_in_parts(norm):
    x, scale, bias = 3 + draw(2, 5, 8), draw(8, seed=1), draw(8, seed=2)
    parts = shared_out(partial(norm, axis_name="parts"), LAST, P("parts"), P("parts"), out=LAST)
    np.testing.assert_allclose(parts(x, scale, bias), norm(x, scale, bias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lean", [0.0, 30.0], ids=["spread", "all to one expert"])
def test_experts_on_other_devices(lean):
    """Values and gradients, also when every token goes to the same device; none is dropped."""
    experts, top_k = 8, 2
    x, kernels = draw(8, 3, 5), draw(experts, 5, 5, seed=1)
    logits = draw(8, 3, experts, seed=2).at[..., 6:].add(lean)

    def mix(x, logits, kernels, axis_name=None):
        def each(rows, sizes):
            return F.grouped_linear(jnp.tanh(rows), kernels, sizes)

        routing = F.route(logits, top_k=top_k)
        return F.mix_experts(x, routing, each, num_experts=experts, axis_name=axis_name)

    rows = P("parts")
    spread = shared_out(partial(mix, axis_name="parts"), rows, rows, rows, out=rows)
    np.testing.assert_allclose(spread(x, logits, kernels), mix(x, logits, kernels), atol=1e-5)
    weights = draw(8, 3, 5, seed=3)
    slopes = [
        jax.grad(lambda *a, f=f: jnp.sum(weights * f(*a)), (0, 1, 2))(x, logits, kernels)
        for f in (spread, mix)
    ]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *slopes)
