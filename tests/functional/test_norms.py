import json
import math
from functools import partial
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
NORMS = {  # compiled as one: op by op, most of the time of these tests is compilation
    "layer_norm": jax.jit(F.layer_norm, static_argnames="eps"),
    "rms_norm": jax.jit(F.rms_norm, static_argnames="eps"),
    "rms_norm_outside": jax.jit(partial(F.rms_norm, eps_position="outside"), static_argnames="eps"),
}
batch_norm = jax.jit(F.batch_norm, static_argnames="over")


def golden(part, name):
    return np.float32(GOLDEN[part][name])


def wide(*arrays):
    return tuple(np.asarray(a, np.float64) for a in arrays)


def layer_norm_64(x, scale, bias, eps=1e-5):
    x, scale, bias = wide(x, scale, bias)
    centred = x - x.mean(-1, keepdims=True)
    return scale * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) + bias


def test_layer_norm_matches_the_formula_in_float64(normal):
    """inventory row 8: statistics per token over the features, eps inside the root."""
    x, scale, bias = normal(2, 3, 7), normal(7), normal(7)
    expected = layer_norm_64(x, scale, bias)
    np.testing.assert_allclose(F.layer_norm(x, scale, bias), expected, rtol=1e-5, atol=1e-6)


def test_layer_norm_commutes_with_any_order_of_tokens(normal):
    """inventory row 8: permuting the tokens permutes the result and nothing else."""
    x, order = normal(5, 7), np.array([3, 0, 4, 1, 2])
    np.testing.assert_array_equal(F.layer_norm(x[order]), F.layer_norm(x)[order])


def test_layer_norm_survives_a_mean_far_above_the_spread(normal):
    """inventory row 8: the one-pass variance E[x^2] - E[x]^2 is what loses the digits."""
    x = 1000.0 + 0.1 * normal(3, 64)
    expected = layer_norm_64(x, np.ones(64), np.zeros(64))
    one_pass = np.mean(np.square(x), -1) - np.square(np.mean(x, -1))
    np.testing.assert_allclose(F.layer_norm(x), expected, atol=2e-3)
    variance = np.var(wide(x)[0], -1)  # 0.01, and float32 near 1000^2 goes in steps of 0.06
    assert np.min(np.abs(one_pass - variance) / variance) > 0.5


def test_layer_norm_takes_eps_as_torch_does_and_not_as_flax_does():
    """inventory row 8: the default is torch's 1e-5; Flax's 1e-6 is another function."""
    x = np.array([1e-3, -2e-3, 3e-3, 1e-3])
    assert np.max(np.abs(F.layer_norm(x) - F.layer_norm(x, eps=1e-6))) > 0.1
    np.testing.assert_allclose(F.layer_norm(x), layer_norm_64(x, 1.0, 0.0, 1e-5), rtol=1e-5)


def test_layer_norm_does_not_know_the_length_of_the_sequence(normal):
    """inventory row 9: N in the notes is the batch, L the length; neither enters the statistics."""
    x = normal(2, 11, 7)
    np.testing.assert_array_equal(F.layer_norm(x)[:, :5], F.layer_norm(x[:, :5]))


def test_layer_norm_is_per_token_not_per_sample(normal):
    """inventory row 125: the document drops the time index; mu belongs to (sample, step)."""
    x = normal(2, 5, 7) + np.arange(5.0)[None, :, None]
    per_sample = layer_norm_64(x.reshape(2, 35), 1.0, 0.0).reshape(2, 5, 7)
    np.testing.assert_allclose(np.mean(F.layer_norm(x), -1), 0.0, atol=1e-6)
    np.testing.assert_allclose(np.var(F.layer_norm(x), -1), 1.0, rtol=1e-4)
    assert np.max(np.abs(F.layer_norm(x) - per_sample)) > 1.0


def test_norms_match_torch():
    """inventory row 10: RMSNorm with eps inside the root, as in PyTorch and Llama."""
    x, scale, bias = (golden("norms", name) for name in ("x", "scale", "bias"))
    np.testing.assert_allclose(
        F.layer_norm(x, scale, bias), golden("norms", "layer_norm"), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(F.rms_norm(x, scale), golden("norms", "rms_norm"), rtol=1e-6)


def test_rms_norm_matches_the_formula_in_float64(normal):
    """inventory rows 10, 11: eps inside the root by default, outside and with a bias on request."""
    x, scale, bias = 1e-3 * normal(2, 3, 7), normal(7), normal(7)
    x64, scale64, bias64 = wide(x, scale, bias)
    mean_square = np.mean(x64**2, axis=-1, keepdims=True)
    inside = scale64 * x64 / np.sqrt(mean_square + 1e-6) + bias64
    outside = scale64 * x64 / (np.sqrt(mean_square) + 1e-6) + bias64
    np.testing.assert_allclose(F.rms_norm(x, scale, bias), inside, rtol=1e-5, atol=1e-6)
    y = F.rms_norm(x, scale, bias, eps_position="outside")
    np.testing.assert_allclose(y, outside, rtol=1e-5, atol=1e-6)


def test_rms_norm_where_eps_stands_shows_on_small_vectors():
    """inventory row 11: inside 0.45883, outside 0.51613 at 1e-3; equal to 4e-7 at size 1."""
    x = np.array([1.0, -2.0, 3.0, 1.0])
    small = 1e-3 * x
    outside = F.rms_norm(small, eps_position="outside")
    np.testing.assert_allclose(F.rms_norm(small)[0], 0.458831, atol=1e-6)
    np.testing.assert_allclose(outside[0], 0.516131, atol=1e-6)
    np.testing.assert_allclose(F.rms_norm(small) / outside, 0.889, atol=1e-3)
    np.testing.assert_allclose(F.rms_norm(x), F.rms_norm(x, eps_position="outside"), rtol=2e-6)


def test_rms_norm_brings_the_length_to_the_root_of_the_width(normal):
    """inventory row 12: the root mean square is the length divided by sqrt(D)."""
    y = F.rms_norm(normal(3, 11), eps=0.0)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.sqrt(11), rtol=1e-6)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="XLA of JAX 0.7 says that both norms move the same bytes"
)
def test_rms_norm_saves_traffic_not_floating_point_operations():
    """inventory row 13: subtracting the mean is not what costs; both norms are noise in FLOPs.

    Compiled for a CPU at D = 4096: layer_norm takes 8 FLOPs per number, rms_norm 4, the smallest
    matrix product beside them 8192. What halves is the memory traffic: 6 numbers against 3.
    """
    x, vector, kernel = np.zeros((16, 4096)), np.zeros(4096), np.zeros((4096, 4096))

    def cost(function, *arguments):
        analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
        return analysis["flops"], analysis["bytes accessed"]

    layer_flops, layer_bytes = cost(F.layer_norm, x, vector, vector)
    rms_flops, rms_bytes = cost(F.rms_norm, x, vector)
    product_flops, _ = cost(F.linear, x, kernel)
    assert rms_flops < layer_flops < 2e-3 * product_flops
    assert rms_bytes < 0.7 * layer_bytes


def test_rms_norm_is_layer_norm_of_centred_vectors(normal):
    """inventory row 126: the two norms differ by the mean and by nothing else."""
    x = normal(3, 5, 7)
    centred = x - jnp.mean(x, -1, keepdims=True)
    np.testing.assert_allclose(F.layer_norm(x), F.rms_norm(centred, eps=1e-5), atol=1e-6)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@settings(max_examples=10, deadline=None)
@given(factor=st.floats(0.1, 1e3), seed=st.integers(0, 9))
def test_norms_ignore_the_length_of_their_input(norm, factor, seed):
    x = np.float32(np.random.default_rng(seed).normal(size=(2, 7)))
    np.testing.assert_allclose(norm(factor * x), norm(x), rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_of_a_batch_are_the_norms_of_each_vector(norm, normal):
    x, scale, bias = normal(2, 3, 7), normal(7), normal(7)
    one_by_one = jnp.stack([jnp.stack([norm(v, scale, bias) for v in row]) for row in x])
    np.testing.assert_allclose(one_by_one, norm(x, scale, bias), rtol=1e-6)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_take_one_gain_per_head(norm, normal):
    x, scale, bias = normal(2, 5, 3, 7), normal(3, 7), normal(3, 7)
    heads = [norm(x[:, :, n], scale[n], bias[n]) for n in range(3)]
    np.testing.assert_allclose(norm(x, scale, bias), np.stack(heads, 2), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_keep_dtype_and_survive_large_values(norm, dtype):
    x = np.tile(np.array([1e4, -1e4], dtype), 32)  # 1e4 ** 2 overflows float16
    y = norm(x, np.ones(64, "float32"), np.zeros(64, dtype))
    assert y.dtype == dtype
    np.testing.assert_allclose(np.abs(y.astype("float32")), 1.0, rtol=1e-3)


def test_norms_have_the_slope_of_their_formula_at_zero():
    def slope(name):
        return jax.jit(jax.jacobian(lambda x: NORMS[name](x, eps=1e-4)))(np.zeros(5))

    np.testing.assert_allclose(slope("layer_norm"), 100 * (np.eye(5) - 0.2), rtol=1e-5)
    np.testing.assert_allclose(slope("rms_norm"), 100 * np.eye(5), rtol=1e-5)
    np.testing.assert_allclose(slope("rms_norm_outside"), 1e4 * np.eye(5), rtol=1e-5)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_gradient_is_the_difference_quotient(norm, normal):
    x, scale, bias, weights = normal(7), normal(7), normal(7), normal(7)
    loss = jax.jit(lambda *a: jnp.vdot(norm(*a), weights))
    check_grads(loss, (x, scale, bias), 1, modes=["rev"], rtol=1e-2)


def test_rms_norm_names_the_bad_place_of_eps(no_checks_of_annotations):
    with pytest.raises(ValueError, match="eps_position must be one of .*'outside'.*; got 'under'"):
        F.rms_norm(np.ones(3), eps_position="under")


def batch_norm_64(x, axes, eps=1e-5):
    x = np.asarray(x, np.float64)
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    n = np.prod([x.shape[axis] for axis in axes])
    return (x - mean) / np.sqrt(var + eps), mean.squeeze(axes), var.squeeze(axes) * n / (n - 1)


@pytest.mark.parametrize("over, axes", [("step", (0,)), ("pooled", (0, 1))])
def test_batch_norm_matches_the_formula_in_float64(normal, over, axes):
    """inventory row 124: per (step, feature) as the document says, or pooled as BatchNorm1d.

    Biased variance in the output, unbiased variance in the running statistics.
    """
    x, scale, bias = 3.0 + normal(5, 3, 2), normal(2), normal(2)
    expected, mean, var = batch_norm_64(x, axes)
    y, statistics = batch_norm(x, scale, bias, over=over)
    np.testing.assert_allclose(y, expected * np.asarray(scale) + np.asarray(bias), atol=1e-5)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(statistics.var, var, rtol=1e-5)


def test_batch_norm_pooled_is_not_per_step(normal):
    """inventory row 124: a drift over time survives pooling and is erased per step."""
    x = normal(5, 3, 2) + 5.0 * np.arange(3.0)[None, :, None]
    per_step, _ = batch_norm(x, over="step")
    pooled, _ = batch_norm(x, over="pooled")
    np.testing.assert_allclose(np.mean(per_step, 0), 0.0, atol=1e-5)
    assert np.max(np.abs(np.mean(pooled, 0))) > 1.0


def test_batch_norm_matches_torch_through_training_and_evaluation():
    """inventory row 124: two training steps, running statistics and evaluation of BatchNorm1d."""
    scale, bias = golden("batch_norm", "scale"), golden("batch_norm", "bias")
    running = F.BatchStatistics(np.zeros(2), np.ones(2))
    for name, expected in zip(["first", "second"], GOLDEN["batch_norm"]["outputs"], strict=True):
        y, running = batch_norm(golden("batch_norm", name), scale, bias, running=running)
        np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(running, GOLDEN["batch_norm"]["running"], rtol=1e-5)
    evaluated = F.batch_norm_inference(golden("batch_norm", "first"), running, scale, bias)
    np.testing.assert_allclose(evaluated, GOLDEN["batch_norm"]["evaluated"], atol=1e-5)


@pytest.mark.parametrize("over", ["step", "pooled"])
def test_batch_norm_inference_with_the_batchs_own_statistics(normal, over):
    x, scale, bias = normal(5, 3, 2), normal(2), normal(2)
    y, (mean, var) = batch_norm(x, scale, bias, over=over)
    n = 5 if over == "step" else 15
    biased = F.BatchStatistics(mean, var * (n - 1) / n)
    np.testing.assert_allclose(F.batch_norm_inference(x, biased, scale, bias), y, atol=1e-5)
    np.testing.assert_allclose(F.batch_norm_inference(x[2], biased, scale, bias), y[2], atol=1e-5)


@pytest.mark.parametrize("over", ["step", "pooled"])
def test_batch_norm_of_a_padded_batch_sees_the_real_tokens_only(normal, over):
    x, padding = normal(5, 3, 2), 100.0 * normal(2, 3, 2)
    mask = np.broadcast_to((np.arange(7) < 5)[:, None], (7, 3))
    y, statistics = batch_norm(x, over=over)
    padded, masked = batch_norm(jnp.concatenate([x, padding]), over=over, mask=mask)
    np.testing.assert_allclose(padded[:5], y, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), masked, statistics)


@pytest.mark.slow
def test_batch_norm_of_one_value_is_refused_or_leaves_the_statistics_alone(normal):
    """inventory row 124: one value has no variance; the document's formula gives the bias."""
    x = normal(1, 3, 2)
    with pytest.raises(ValueError, match="a batch of 1 and 3 time steps with over='step'"):
        batch_norm(x, over="step")
    with pytest.raises(ValueError, match="a batch of 1 and 1 time steps with over='pooled'"):
        batch_norm(x[:, :1])
    running = F.BatchStatistics(np.full((3, 2), 7.0), np.full((3, 2), 9.0))
    mask = np.array([[True, True, False], [False, True, False]])
    y, moved = batch_norm(normal(2, 3, 2), running=running, over="step", mask=mask)
    np.testing.assert_array_equal(moved.mean[np.array([0, 2])], 7.0)
    np.testing.assert_array_equal(moved.var[np.array([0, 2])], 9.0)
    assert np.all(moved.mean[1] != 7.0) and np.all(np.isfinite(y))
    _, unknown = batch_norm(normal(2, 3, 2), over="step", mask=mask)
    np.testing.assert_array_equal(np.isnan(unknown.var[:, 0]), [True, False, True])


@pytest.mark.slow
def test_layer_norm_of_a_sample_ignores_its_batch_and_batch_norm_does_not(normal):
    """inventory rows 91, 126: LN normalises one token's features, BN one feature over samples."""
    x, company = normal(1, 3, 7), 5.0 * normal(4, 3, 7)
    together = jnp.concatenate([x, company])
    for norm in NORMS.values():
        np.testing.assert_allclose(norm(together)[:1], norm(x), rtol=1e-6)
    alone, _ = batch_norm(x)
    in_company, _ = batch_norm(together)
    assert np.max(np.abs(in_company[:1] - alone)) > 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.slow(but=["float16", "float32"])
def test_batch_norm_keeps_dtype_and_survives_large_values(dtype):
    x = np.tile(np.array([[[1e4]], [[-1e4]]], dtype), (1, 3, 2))
    y, statistics = batch_norm(x)
    assert y.dtype == dtype and statistics.mean.dtype == statistics.var.dtype == "float32"
    np.testing.assert_allclose(np.abs(y.astype("float32")), 1.0, rtol=1e-3)
    assert F.batch_norm_inference(x, statistics).dtype == dtype


def test_batch_norm_output_does_not_move_along_a_shift_of_its_input(normal):
    """The gradient sums to zero over the batch: a shift of all samples changes nothing."""
    x, weights = normal(5, 3, 2), normal(5, 3, 2)
    gradient = jax.jit(jax.grad(lambda x: jnp.vdot(batch_norm(x)[0], weights)))(x)
    np.testing.assert_allclose(np.sum(gradient, (0, 1)), 0.0, atol=1e-4)
    assert np.max(np.abs(gradient)) > 0.01


@pytest.mark.parametrize("eps", [-1.0, math.nan])
def test_norms_name_the_bad_eps(eps):
    x, running = np.ones((2, 3, 4)), F.BatchStatistics(np.zeros(4), np.ones(4))
    calls = F.layer_norm, F.rms_norm, F.batch_norm, partial(F.batch_norm_inference, running=running)
    for call in calls:
        with pytest.raises(ValueError, match=f"eps must be at least 0; got {eps}"):
            call(x, eps=eps)


def test_batch_norm_names_the_bad_axis(no_checks_of_annotations):
    with pytest.raises(ValueError, match="over must be one of .*'pooled'.*; got 'batch'"):
        F.batch_norm(np.ones((2, 3, 5)), over="batch")
