import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.parallel import ParameterMetadata
from jaxformer.training.muon import orthogonalize, scale_by_muon

RNG = np.random.default_rng(0)


def draw(*shape):
    return np.float32(RNG.normal(size=shape))


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (2, 3, 5, 7)])
def test_orthogonalize_keeps_singular_vectors_and_maps_singular_values(shape):
    x = np.asarray(draw(*shape), np.float64)
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(s, axis=-1, keepdims=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    ours = jax.jit(orthogonalize)(np.float32(x))
    np.testing.assert_allclose(ours, (u * s[..., None, :]) @ vh, atol=2e-5)


@given(st.floats(1e-3, 1e3), st.integers(0, 100))
@settings(max_examples=8, deadline=None)
def test_orthogonalize_ignores_scale_and_commutes_with_transposition(factor, seed):
    x = np.random.default_rng(seed).normal(size=(3, 5)).astype(np.float32)
    compiled = jax.jit(orthogonalize)
    y = np.asarray(compiled(x))
    np.testing.assert_allclose(compiled(x * np.float32(factor)), y, atol=1e-3)
    np.testing.assert_allclose(compiled(x.T), y.T, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.slow(but=["float16", "float32"])
def test_orthogonalize_keeps_dtype_and_survives_zeros_and_large_values(dtype):
    np.testing.assert_array_equal(orthogonalize(np.zeros((3, 5), dtype)), np.zeros((3, 5)))
    large = jax.jit(orthogonalize)(np.diag(np.full(4, 6e4, dtype)))
    assert large.dtype == dtype
    values = np.diag(large.astype(jnp.float32))
    assert np.all((0.68 < values) & (values < 1.21))


@pytest.mark.slow
def test_orthogonalize_gradient_matches_finite_differences():
    x, direction, weights = draw(3, 5), draw(3, 5), draw(3, 5)

    def score(x):
        return jnp.sum(orthogonalize(x, steps=2) * weights)

    slope = jnp.sum(jax.grad(score)(x) * direction)
    h = 1e-2
    numeric = (score(x + h * direction) - score(x - h * direction)) / (2 * h)
    np.testing.assert_allclose(slope, numeric, rtol=2e-2)


@pytest.mark.parametrize("stack", ["layers", "experts", "blocks"])
@pytest.mark.slow
def test_first_muon_update_of_stacked_matrices_equals_that_of_optax(stack):
    g, name = draw(3, 7, 2, 5), "gate"
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3))
    theirs = optax.contrib.scale_by_muon(weight_dimension_numbers={name: axes})
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected, _ = jax.jit(theirs.update)({name: g}, theirs.init({name: g}))
    metadata = {name: ParameterMetadata(g.shape, (stack, "features", "heads", "features"), 2)}
    ours = scale_by_muon(metadata, momentum=0.95, rms=10**-0.5)
    actual, _ = jax.jit(ours.update)({name: g}, ours.init({name: g}))
    np.testing.assert_allclose(actual[name], expected[name], atol=1e-4)
