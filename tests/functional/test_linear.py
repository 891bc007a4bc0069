from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformer import functional
from tests.functional.jitted_functions import F


@pytest.mark.parametrize(
    "equation, kernel, axes",
    [
        ("btd,df->btf", (5, 7), 1),
        ("btd,dnh->btnh", (5, 2, 11), 1),
        ("btnh,nhd->btd", (2, 11, 5), 2),
    ],
)
@pytest.mark.slow(but=["btd,df->btf-kernel0-1"])
def test_linear_matches_einsum_in_float64(normal, equation, kernel, axes):
    x, weights = normal(2, 3, *kernel[:axes]), normal(*kernel)
    bias = normal(*kernel[axes:])
    expected = np.einsum(equation, *(np.asarray(a, np.float64) for a in (x, weights)))
    np.testing.assert_allclose(F.linear(x, weights, axes=axes), expected, rtol=1e-4, atol=1e-5)
    y = F.linear(x, weights, bias, axes=axes)
    np.testing.assert_allclose(y, expected + np.asarray(bias), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3, 2), (0,), (2, 0)])
def test_linear_takes_any_batch_axes_and_multiplies_once(batch):
    x, kernel = np.ones((*batch, 5), "float32"), np.ones((5, 2, 7), "float32")
    y = F.linear(x, kernel)
    assert y.shape == (*batch, 2, 7)
    np.testing.assert_array_equal(y, 5.0)
    products = [
        e for e in jax.make_jaxpr(functional.linear)(x, kernel).eqns if "dot" in str(e.primitive)
    ]
    assert [p.invars[0].aval.ndim for p in products] == [2]


@pytest.mark.parametrize("platform, dtype", [("gpu", "float32"), ("cpu", "bfloat16")])
@pytest.mark.parametrize("batch", [(), (1, 1)])
def test_a_single_row_is_multiplied_with_another(batch, platform, dtype, normal, monkeypatch):
    """The numbers and gradients are those of the row alone, also of each of many rows."""
    x, kernel, bias = (normal(*s).astype(dtype) for s in ((*batch, 5), (5, 2, 7), (2, 7)))
    precision = import_module("jaxformer.functional.matmul_precision")
    monkeypatch.setattr(precision, "target_platform", lambda: "tpu")

    def values_and_slopes():
        square = lambda *a: jnp.sum(functional.linear(*a) ** 2)  # noqa: E731
        both = lambda *a: (functional.linear(*a), jax.grad(square, (0, 1, 2))(*a))  # noqa: E731
        return jax.device_get(jax.jit(both)(x, kernel, bias))

    alone = values_and_slopes()
    monkeypatch.setattr(precision, "target_platform", lambda: platform)
    program = jax.make_jaxpr(lambda x, kernel: functional.linear(x, kernel))(x, kernel)
    (product,) = (e for e in program.eqns if "dot" in str(e.primitive))
    assert product.invars[0].aval.shape == (2, 5)
    # XLA for CPUs copies a bfloat16 matrix as float32 unless the result is float32.
    assert product.params["preferred_element_type"] == "float32"
    padded = values_and_slopes()
    rtol = 1e-5 if dtype == "float32" else 0.02
    close = lambda a, b: np.testing.assert_allclose(  # noqa: E731
        a.astype("float32"), b.astype("float32"), rtol=rtol
    )
    jax.tree.map(close, padded, alone)
    of_rows = jax.jit(jax.vmap(functional.linear, in_axes=(0, None, None)))
    many = of_rows(np.stack([x, x + x]), kernel, bias)
    close(many[0], alone[0])


def test_linear_is_linear(normal):
    x, y, kernel = normal(3, 5), normal(3, 5), normal(5, 7)
    both = F.linear(2.0 * x + y, kernel)
    np.testing.assert_allclose(both, 2.0 * F.linear(x, kernel) + F.linear(y, kernel), atol=1e-5)
    np.testing.assert_array_equal(F.linear(x, np.eye(5, dtype="float32")), x)


def test_linear_of_a_batch_is_the_map_of_each_vector(normal):
    x, kernel, bias = normal(2, 3, 5), normal(5, 7), normal(7)
    one_by_one = [[F.linear(v, kernel, bias) for v in row] for row in x]
    np.testing.assert_allclose(one_by_one, F.linear(x, kernel, bias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_linear_sums_in_float32_and_returns_the_dtype_of_its_input(dtype):
    x, kernel = np.ones((2, 3, 4096), dtype), np.ones((4096, 5), dtype)
    y = F.linear(x, kernel, np.zeros(5, "float32"))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.astype("float32"), 4096.0)  # bfloat16 sums stop at 256


def test_linear_backward_multiplies_in_the_narrow_dtype(monkeypatch):
    precision = import_module("jaxformer.functional.matmul_precision")
    monkeypatch.setattr(precision, "target_platform", lambda: "tpu")
    x, kernel = jnp.ones((2, 3, 5), "bfloat16"), jnp.ones((5, 7), "bfloat16")
    loss = lambda x, kernel: functional.linear(x, kernel).astype("float32").sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, kernel)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 3
    assert {v.aval.dtype for p in products for v in p.invars} == {jnp.dtype("bfloat16")}


def test_linear_gradient_is_the_difference_quotient(normal):
    arguments = normal(2, 3, 5), normal(5, 7), normal(7)
    check_grads(jax.jit(F.linear), arguments, 1, modes=["rev"], rtol=1e-2)


def test_linear_names_the_shapes_that_do_not_fit(normal):
    with pytest.raises(
        ValueError, match=r"last 1 axes of x \(2, 5\) .* first 1 of kernel \(7, 5\)"
    ):
        F.linear(normal(2, 5), normal(7, 5))
    with pytest.raises(ValueError, match=r"last 2 axes of x \(3, 2, 5\) .* kernel \(5, 2, 7\)"):
        F.linear(normal(3, 2, 5), normal(5, 2, 7), axes=2)
    with pytest.raises(ValueError, match=r"last 0 axes of x \(2, 5\)"):
        F.linear(normal(2, 5), normal(5, 7), axes=0)
    with pytest.raises(
        ValueError, match=r"bias \(2,\) must have the output axes \(7,\) of \(5, 7\)"
    ):
        F.linear(normal(2, 5), normal(5, 7), normal(2))
    with pytest.raises(ValueError, match="dtype of x; got float32 and bfloat16"):
        F.linear(normal(2, 5, dtype="bfloat16"), normal(5, 7))


def test_dropout_zeroes_at_its_rate_and_keeps_the_mean():
    y = F.dropout(np.full((100, 101), 3.0, "float32"), 0.3, jax.random.key(0))
    np.testing.assert_allclose(np.mean(y == 0.0), 0.3, atol=0.015)  # 3 standard deviations
    np.testing.assert_allclose(np.mean(y), 3.0, rtol=0.02)
    np.testing.assert_allclose(y[y != 0.0], 3.0 / 0.7, rtol=1e-6)


def test_dropout_at_rate_zero_is_the_identity(normal):
    x = jnp.asarray(normal(3, 5))
    assert functional.dropout(x, 0.0, None) is x


def test_dropout_follows_its_key(normal):
    x = normal(7, 11)
    same, other = jax.random.key(1), jax.random.key(2)
    np.testing.assert_array_equal(F.dropout(x, 0.5, same), F.dropout(x, 0.5, same))
    assert np.any(F.dropout(x, 0.5, same) != F.dropout(x, 0.5, other))
    np.testing.assert_array_equal(
        F.dropout(x, 0.5, jax.random.PRNGKey(1)), F.dropout(x, 0.5, jax.random.key(1))
    )


@pytest.mark.slow
def test_dropout_under_vmap_is_dropout_with_each_key(normal):
    x, keys = normal(3, 5), jax.random.split(jax.random.key(3), 3)
    together = jax.jit(jax.vmap(lambda x, key: F.dropout(x, 0.5, key)))(x, keys)
    one_by_one = [F.dropout(row, 0.5, key) for row, key in zip(x, keys, strict=True)]
    np.testing.assert_array_equal(together, np.stack(one_by_one))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dropout_scales_before_rounding(dtype):
    x = np.full(97, 3.0, dtype)
    y = F.dropout(x, 0.1, jax.random.key(0))
    assert y.dtype == dtype
    expected = np.float32(3.0 / 0.9).astype(dtype)  # 3.328 in bfloat16, not 3.344
    np.testing.assert_array_equal(y[y != 0.0].astype("float32"), expected.astype("float32"))


def test_dropout_gradient_is_its_own_mask(normal):
    x, key = normal(31), jax.random.key(4)
    slope = jax.jit(jax.grad(lambda x: F.dropout(x, 0.5, key).sum()))(x)
    np.testing.assert_array_equal(slope, np.where(F.dropout(x, 0.5, key) == 0.0, 0.0, 2.0))


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_dropout_names_the_bad_rate(rate):
    with pytest.raises(ValueError, match=rf"must be (in \[0, 1\)|finite); got {rate}"):
        F.dropout(jnp.ones(3), rate, jax.random.key(0))


def test_dropout_asks_for_its_key():
    with pytest.raises(ValueError, match="rate 0.5 needs a random key"):
        F.dropout(jnp.ones(3), 0.5, None)
