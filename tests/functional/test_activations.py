import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.functional.jitted_functions import F

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("basics.json").read_text())
GOLDEN = {name: np.asarray(v, np.float32) for name, v in GOLDEN["elementwise"].items()}
ELEMENTWISE = {  # compiled as one: op by op, most of the time of these tests is compilation
    "relu": F.relu,
    "relu_squared": F.relu_squared,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate=True),
    "quick_gelu": F.quick_gelu,
    "softplus": F.softplus,
}
ELEMENTWISE = {name: jax.jit(activation) for name, activation in ELEMENTWISE.items()}
GATED = {
    "glu": (F.glu, F.sigmoid),
    "bilinear": (F.bilinear, lambda x: x),
    "reglu": (F.reglu, F.relu),
    "geglu": (F.geglu, F.gelu),
    "geglu_tanh": (lambda g, v: F.geglu(g, v, approximate=True), ELEMENTWISE["gelu_tanh"]),
    "swiglu": (F.swiglu, F.silu),
    "clamped_geglu": (lambda g, v: F.clamped_geglu(g, v - 1.0, limit=1e3), F.quick_gelu),
}
GATED = {name: (jax.jit(gated), activation) for name, (gated, activation) in GATED.items()}


@pytest.mark.parametrize("name", sorted({*ELEMENTWISE} & {*GOLDEN}))
def test_activations_match_torch(name):
    """inventory row 18: swish is x * sigmoid(x), torch's silu; and every other activation."""
    y = ELEMENTWISE[name](np.asarray(GOLDEN["x"]))
    np.testing.assert_allclose(y, GOLDEN[name], rtol=1e-5, atol=1e-6)


def test_activations_match_their_formulas_in_float64():
    x = np.linspace(-6.0, 6.0, 37)
    logistic = 1 / (1 + np.exp(-x))
    cubic = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    expected = {
        "relu": np.maximum(x, 0),
        "relu_squared": np.maximum(x, 0) ** 2,
        "sigmoid": logistic,
        "silu": x * logistic,
        "gelu": x * 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x])),
        "gelu_tanh": x * 0.5 * (1 + np.tanh(cubic)),
        "quick_gelu": x / (1 + np.exp(-1.702 * x)),
        "softplus": np.log1p(np.exp(x)),
    }
    for name, activation in ELEMENTWISE.items():
        y = activation(np.float32(x))
        np.testing.assert_allclose(y, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_gelu_is_exact_unless_asked():
    """The trap: jax.nn.gelu defaults to the tanh form, 5e-4 away."""
    x = np.linspace(-4.0, 4.0, 401, dtype="float32")
    np.testing.assert_array_equal(F.gelu(x), jax.nn.gelu(x, approximate=False))
    np.testing.assert_array_equal(F.gelu(x, approximate=True), jax.nn.gelu(x))
    assert 4e-4 < np.max(np.abs(F.gelu(x) - F.gelu(x, approximate=True))) < 5e-4
    assert np.max(np.abs(F.gelu(x) - F.quick_gelu(x))) < 0.021


@settings(max_examples=20, deadline=None)
@given(x=st.floats(-20, 20, width=32))
def test_activations_obey_their_symmetries(x):
    x = np.float32(x)
    np.testing.assert_allclose(F.sigmoid(x) + F.sigmoid(-x), 1.0, rtol=1e-6)
    for even in (F.silu, F.gelu, F.quick_gelu, F.relu):  # each is x * f(x) with f(x) + f(-x) = 1
        np.testing.assert_allclose(even(x) - even(-x), x, rtol=1e-5, atol=1e-6)


def test_slopes_at_zero():
    """inventory rows 18, 22: swish leaves 0 with slope 1/2, continuously; relu's slope jumps.

    A smooth slope is all that the claim about vanishing gradients amounts to: far to the left
    swish is as flat as relu.
    """
    slope = {name: jax.jit(jax.grad(activation)) for name, activation in ELEMENTWISE.items()}
    for name in ("silu", "gelu", "gelu_tanh", "quick_gelu"):
        np.testing.assert_allclose(slope[name](0.0), 0.5, err_msg=name)
        np.testing.assert_allclose(slope[name](-1e-4), slope[name](1e-4), atol=1e-3)
        np.testing.assert_allclose(slope[name](-40.0), 0.0, atol=1e-6)
    assert slope["relu"](-1e-4) == slope["relu"](0.0) == 0.0 and slope["relu"](1e-4) == 1.0
    np.testing.assert_allclose(slope["relu_squared"](3.0), 6.0)
    np.testing.assert_allclose(slope["sigmoid"](0.0), 0.25)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.slow(but=[f"{name}-float16" for name in ELEMENTWISE])
def test_activations_keep_dtype_and_stay_finite(name, dtype):
    activation = ELEMENTWISE[name]
    x = np.array([-200.0, -1.0, 0.0, 2.0, 200.0], dtype)
    y, slope = jax.jit(jax.vmap(jax.value_and_grad(activation)))(x)
    assert y.dtype == slope.dtype == dtype
    assert np.all(np.isfinite(y)) and np.all(np.isfinite(slope))
    narrow = 2e-2 if dtype == "bfloat16" else 2e-3
    np.testing.assert_allclose(
        np.float32(y), activation(x.astype("float32")), rtol=narrow, atol=1e-6
    )


@pytest.mark.parametrize("name", GATED)
def test_gated_units_activate_the_first_argument_only(name, normal):
    """inventory rows 16, 21: the product is symmetric, so either path may be called the gate.

    What is not symmetric is the activation: it goes on the first argument (`gate_proj` in
    checkpoints of Hugging Face, W in the paper) and never on the second (`up_proj`, V).
    """
    gated, activation = GATED[name]
    gate, value = normal(2, 3, 7), normal(2, 3, 7)
    np.testing.assert_allclose(gated(gate, value), activation(gate) * value, rtol=1e-5, atol=1e-6)
    one_by_one = [gated(g, v) for g, v in zip(gate[0], value[0], strict=True)]
    np.testing.assert_allclose(one_by_one, gated(gate, value)[0], rtol=1e-5, atol=1e-6)
    if name != "bilinear":
        assert np.max(np.abs(gated(gate, value) - gated(value, gate))) > 0.1


def test_glu_against_the_one_array_forms():
    """inventory row 16: torch's and jax's glu take one array and activate its second half."""
    value, gate = np.asarray(GOLDEN["x"][::-1]), np.asarray(GOLDEN["x"])
    np.testing.assert_allclose(F.glu(gate, value), GOLDEN["glu"], rtol=1e-6)
    np.testing.assert_array_equal(F.glu(gate, value), jax.nn.glu(np.concatenate([value, gate])))


def test_plain_feed_forward_layer(normal):
    """inventory row 15: max(0, x W1) W2."""
    x, w1, w2 = normal(2, 3, 5), normal(5, 7), normal(7, 5)
    x64, a, b = (np.asarray(v, np.float64) for v in (x, w1, w2))
    y = F.linear(F.relu(F.linear(x, w1)), w2)
    np.testing.assert_allclose(y, np.maximum(0, x64 @ a) @ b, rtol=1e-4, atol=1e-5)


def test_reglu_feed_forward_layer(normal):
    """inventory row 16: (max(0, x W1) * x V) W2."""
    x, w1, v, w2 = normal(2, 3, 5), normal(5, 7), normal(5, 7), normal(7, 5)
    x64, a, b, c = (np.asarray(u, np.float64) for u in (x, w1, v, w2))
    y = F.linear(F.reglu(F.linear(x, w1), F.linear(x, v)), w2)
    np.testing.assert_allclose(y, (np.maximum(0, x64 @ a) * (x64 @ b)) @ c, rtol=1e-4, atol=1e-4)


def test_both_signatures_of_swiglu_agree(normal):
    """inventory row 17: SwiGLU(x W1, x W2) W3 and SwiGLU(x, W1, W2) name the same function."""
    x, w1, w2 = normal(2, 3, 5), normal(5, 7), normal(5, 7)

    def swiglu_of_kernels(x, w1, w2):
        return F.swiglu(F.linear(x, w1), F.linear(x, w2))

    z1, z2 = (np.asarray(x, np.float64) @ np.asarray(w, np.float64) for w in (w1, w2))
    np.testing.assert_allclose(
        swiglu_of_kernels(x, w1, w2), z1 / (1 + np.exp(-z1)) * z2, rtol=1e-4, atol=1e-5
    )
    both = F.linear(x, jnp.stack([w1, w2], axis=1))  # one product for both paths, [D, 2, F]
    np.testing.assert_allclose(
        F.swiglu(both[..., 0, :], both[..., 1, :]), swiglu_of_kernels(x, w1, w2), rtol=1e-5
    )


def test_swiglu_is_credited_to_its_paper():
    """inventory row 19: SwiGLU is Shazeer's of 2020 (GLU Variants); PaLM adopted it in 2022."""
    assert "Shazeer" in F.swiglu.__doc__ and "2002.05202" in F.swiglu.__doc__


def test_a_gated_layer_of_two_thirds_the_width_has_as_many_parameters():
    """inventory row 20: "outperforms" needs equal parameters, 3 D (2/3 F) = 2 D F.

    At the same width the gated layer is simply half as large again.
    """
    D, hidden = 6, 24
    plain = [(D, hidden), (hidden, D)]
    gated = [(D, hidden * 2 // 3), (D, hidden * 2 // 3), (hidden * 2 // 3, D)]
    wide = [(D, hidden), (D, hidden), (hidden, D)]
    size = lambda kernels: sum(map(math.prod, kernels))  # noqa: E731
    assert size(gated) == size(plain) and size(wide) == 1.5 * size(plain)
    y = F.swiglu(*(F.linear(np.ones((5, D)), np.ones(shape)) for shape in gated[:2]))
    assert F.linear(y, np.ones(gated[2])).shape == (5, D)


def test_clamped_geglu_by_hand():
    gate, value = np.array([1.0, 5.0, -3.0, 2.0]), np.array([0.5, -9.0, 9.0, -1.0])
    quick = lambda x: x / (1 + np.exp(-1.702 * x))  # noqa: E731
    expected = [quick(1.0) * 1.5, quick(4.0) * -3.0, quick(-3.0) * 5.0, 0.0]
    np.testing.assert_allclose(F.clamped_geglu(gate, value, limit=4.0), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="limit must be positive; got 0.0"):
        F.clamped_geglu(gate, value, limit=0.0)


def test_a_gaussian_top_k_is_what_exceeds_a_quantile():
    """Of normal features it leaves the share 1 - sparsity; of equal ones nothing, and no NaN."""
    x = np.random.default_rng(0).normal(0.7, 2.0, (2, 20_011))
    y = np.asarray(F.gaussian_top_k(np.float32(x), sparsity=0.95))
    for row, actual in zip(x, y, strict=True):
        mean = sum(row) / len(row)
        cut = mean + 1.6448536269514722 * (sum((row - mean) ** 2) / len(row)) ** 0.5
        expected = [max(number - cut, 0) for number in row]
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        assert abs((actual > 0).mean() - 0.05) < 0.005
    equal = np.ones((1, 7), np.float32)
    slope = jax.grad(lambda x: F.gaussian_top_k(x, sparsity=0.6).sum())(equal)
    assert np.isfinite(slope).all()
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"sparsity must be between 0 and 1; got {share}"):
            F.gaussian_top_k(equal, sparsity=share)


def test_xielu_is_the_integral_of_elu():
    """Its slope is beta + 2 a x above zero and beta + b (exp(x) - 1) below (arXiv:2411.13010)."""
    alpha_p, alpha_n = np.float32([0.3]), np.float32([-0.7])
    softplus = lambda x: np.log1p(np.exp(np.float64(x)))  # noqa: E731
    x = np.float32(np.linspace(-9.0, 3.0, 25))
    steep, bent = softplus(alpha_p), 0.4 + softplus(alpha_n)
    wide = x.astype(np.float64)
    expected = np.where(x > 0, steep * wide**2, bent * (np.expm1(wide) - wide)) + 0.4 * wide
    y = F.xielu(np.asarray(x), np.asarray(alpha_p), np.asarray(alpha_n), beta=0.4)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    slope = jax.vmap(jax.grad(lambda v: F.xielu(v, alpha_p[0], alpha_n[0], beta=0.4)))
    expected = 0.4 + np.where(x > 0, 2 * steep * wide, bent * np.expm1(wide))
    np.testing.assert_allclose(slope(np.asarray(x)), expected, rtol=1e-5, atol=1e-6)
    large = F.xielu(np.array([1e4, -1e4]), np.asarray(alpha_p), np.asarray(alpha_n))
    assert np.isfinite(large).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", GATED)
@pytest.mark.slow(but=[f"{name}-bfloat16" for name in GATED])
def test_gated_units_keep_dtype_and_have_gradients(name, dtype, normal):
    gated, _ = GATED[name]
    gate, value = normal(3, 7, dtype=dtype), normal(3, 7, dtype=dtype)

    def total(*arguments):
        y = gated(*arguments)
        return y.astype("float32").sum(), y

    gradients, y = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(gate, value)
    assert y.dtype == dtype
    for gradient in gradients:
        assert gradient.dtype == dtype and np.all(np.isfinite(gradient.astype("float32")))


@pytest.mark.parametrize("name", GATED)
@pytest.mark.slow(but=["clamped_geglu", "swiglu"])
def test_gated_units_take_numbers_so_that_vmap_gives_slopes(name, normal):
    gated, _ = GATED[name]
    gate, value = normal(5), normal(5)
    slopes = jax.jit(jax.vmap(jax.grad(gated)))(gate, value)
    whole = jax.jit(jax.grad(lambda g: jnp.sum(gated(g, value))))(gate)
    np.testing.assert_allclose(slopes, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", GATED)
def test_gated_units_gradient_is_the_difference_quotient(name):
    gated, _ = GATED[name]
    gate, value = (
        np.float32([-1.3, 0.4, 2.0]),
        np.float32([0.7, -1.1, 3.0]),
    )  # away from relu's kink
    check_grads(gated, (gate, value), 1, modes=["rev"], rtol=1e-2)


@settings(max_examples=20, deadline=None)
@given(x=st.floats(-1e4, 1e4, width=32), cap=st.floats(1.0, 100.0))
def test_soft_cap_is_bounded_odd_and_never_amplifies(x, cap):
    y = F.soft_cap(np.float32(x), cap)
    np.testing.assert_allclose(y, cap * np.tanh(x / cap), rtol=1e-5, atol=1e-6)
    assert np.abs(y) <= min(abs(x), cap) * (1 + 1e-6)
    assert F.soft_cap(np.float32(-x), cap) == -y


def test_soft_cap_is_the_identity_near_zero_and_flat_far_away():
    np.testing.assert_allclose(F.soft_cap(np.array([0.01, 0.3]), 50.0), [0.01, 0.3], rtol=2e-5)
    slope = jax.grad(lambda x: F.soft_cap(x, 30.0))
    np.testing.assert_allclose([slope(0.0), slope(1e6)], [1.0, 0.0])
    for dtype in ("bfloat16", "float16"):
        y = F.soft_cap(np.array([-6e4, 6e4], dtype), 50.0)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.astype("float32"), [-50.0, 50.0])
    with pytest.raises(ValueError, match="cap must be positive; got -50.0"):
        F.soft_cap(np.zeros(3), -50.0)
