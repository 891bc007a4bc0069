import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import LayerNorm, RMSNorm
from jaxformer.layers import Norm


def reference(choice, x, scale=1.0, bias=0.0):
    """The formula in float64."""
    x = np.asarray(x, np.float64)
    if isinstance(choice, LayerNorm):
        x = x - x.mean(axis=-1, keepdims=True)
    square = np.square(x).mean(axis=-1, keepdims=True)
    outside = getattr(choice, "eps_position", "inside") == "outside"
    root = np.sqrt(square) + choice.eps if outside else np.sqrt(square + choice.eps)
    return x / root * scale + bias


def run(module, params, x):
    return jax.jit(module.apply)({"params": params}, x)


CHOICES = [
    kind(eps=0.01, parameters=parameters, scale_offset=offset)
    for kind in (LayerNorm, RMSNorm)
    for parameters in ("none", "scale", "scale_bias")
    for offset in (0.0, 1.0)
]


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_every_choice_is_its_formula(normal, randomise, choice):
    x, module = normal(2, 5, 7), Norm(choice)
    params = randomise(module, x) if choice.parameters != "none" else {}
    expected = {"none": set(), "scale": {"scale"}, "scale_bias": {"scale", "bias"}}
    assert set(params) == expected[choice.parameters]
    scale = np.asarray(params["scale"], np.float64) + choice.scale_offset if params else 1.0
    bias = np.asarray(params.get("bias", 0.0), np.float64)
    np.testing.assert_allclose(
        run(module, params, x), reference(choice, x, scale, bias), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_starts_as_the_plain_norm(normal, offset):
    """(1 + w) starts with w = 0, a plain scale with 1; both leave the vector normalised."""
    x, choice = normal(5, 7), LayerNorm(scale_offset=offset)
    y, variables = jax.jit(Norm(choice).init_with_output)(jax.random.key(0), x)
    np.testing.assert_array_equal(variables["params"]["scale"], np.full(7, 1.0 - offset))
    np.testing.assert_array_equal(variables["params"]["bias"], np.zeros(7))
    np.testing.assert_allclose(y, reference(choice, x), atol=1e-6)


def test_where_eps_stands_shows_on_small_vectors(normal):
    """sqrt(m + eps) and sqrt(m) + eps differ when m is small; each is its own formula."""
    x = 1e-3 * normal(3, 7)
    results = []
    for position in ("inside", "outside"):
        choice = RMSNorm(eps=1e-4, eps_position=position, parameters="none")
        results.append(run(Norm(choice), {}, x))
        np.testing.assert_allclose(results[-1], reference(choice, x), rtol=1e-5)
    assert np.abs(results[0] - results[1]).max() > 0.5


@pytest.mark.parametrize("parameters", ["none", "scale", "scale_bias"])
def test_every_head_has_its_own_parameters(normal, randomise, parameters):
    """Scale [heads, width]; each head as if it were alone."""
    choice = LayerNorm(parameters=parameters, scale_offset=1.0)
    x, module = normal(2, 5, 3, 7), Norm(choice, num_heads=3)
    params = randomise(module, x) if parameters != "none" else {}
    assert all(p.shape == (3, 7) for p in params.values())
    together = run(module, params, x)
    for head in range(3):
        head_params = {name: p[head] for name, p in params.items()}
        alone = run(Norm(choice), head_params, x[..., head, :])
        np.testing.assert_allclose(together[..., head, :], alone, atol=1e-6)


def test_statistics_are_float32_and_the_result_has_the_inputs_dtype(normal):
    x = (normal(5, 64) + 100).astype(jnp.bfloat16)
    params = {"scale": jnp.ones(64), "bias": jnp.zeros(64)}
    y = run(Norm(LayerNorm()), params, x)
    assert y.dtype == jnp.bfloat16
    exact = reference(LayerNorm(), np.asarray(x.astype(jnp.float32)))
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=0.02)


def test_gradients_are_finite_at_zero(randomise):
    x, module = jnp.zeros((3, 7)), Norm(RMSNorm())
    params = randomise(module, x)
    gradient = jax.jit(jax.grad(lambda p, x: run(module, p, x).sum(), argnums=(0, 1)))(params, x)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
