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
GOLDEN = GOLDEN["losses"]
LOGITS = np.float32(GOLDEN["logits"])
TARGETS = np.asarray(GOLDEN["targets"])


def cross_entropy_64(logits, targets, label_smoothing=0.0, z_loss=0.0):
    """From the one-hot targets and the softmax themselves, token by token."""
    logits = np.asarray(logits, np.float64)
    V = logits.shape[-1]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    one_hot = (1 - label_smoothing) * np.eye(V)[np.asarray(targets)] + label_smoothing / V
    return -(one_hot * np.log(p)).sum(-1) + z_loss * np.log(np.exp(logits).sum(-1)) ** 2


def test_cross_entropy_matches_the_one_hot_form():
    """inventory row 89: softmax, then cross-entropy with the one-hot target, without either."""
    expected = cross_entropy_64(LOGITS, TARGETS)
    np.testing.assert_allclose(F.token_cross_entropy(LOGITS, TARGETS), expected, rtol=1e-5)
    np.testing.assert_allclose(F.cross_entropy(LOGITS, TARGETS), expected.mean(), rtol=1e-6)


def test_cross_entropy_options_match_their_formulas():
    options = dict(label_smoothing=0.2, z_loss=1e-2)
    expected = cross_entropy_64(LOGITS, TARGETS, **options)
    np.testing.assert_allclose(
        F.token_cross_entropy(LOGITS, TARGETS, **options), expected, rtol=1e-5
    )
    mask = np.array([[True, False, True], [True, True, False]])
    loss = F.cross_entropy(LOGITS, TARGETS, mask=mask, **options)
    np.testing.assert_allclose(loss, expected[np.asarray(mask)].mean(), rtol=1e-5)


def test_cross_entropy_matches_torch():
    """inventory row 89: and padded tokens count neither above nor below the line."""
    per_token = F.token_cross_entropy(LOGITS, TARGETS).reshape(-1)
    np.testing.assert_allclose(per_token, GOLDEN["per_token"], rtol=1e-5)
    smoothed = F.cross_entropy(LOGITS, TARGETS, label_smoothing=0.1)
    np.testing.assert_allclose(smoothed, GOLDEN["smoothed"], rtol=1e-6)
    token = np.arange(6).reshape(2, 3)
    mask = (token != 1) & (token != 5)
    ignored = np.where(mask, TARGETS, -100)
    for how in ({"mask": mask}, {}, {"mask": mask | (token == 1)}):
        loss = F.cross_entropy(LOGITS, ignored, label_smoothing=0.1, **how)
        np.testing.assert_allclose(loss, GOLDEN["ignoring_1_and_5"], rtol=1e-6)
    other = F.cross_entropy(LOGITS, np.where(mask, TARGETS, -1), ignore_index=-1)
    assert other == F.cross_entropy(LOGITS, ignored)
    narrow = F.cross_entropy(LOGITS, TARGETS.astype(jnp.uint8))
    assert narrow == F.cross_entropy(LOGITS, TARGETS)


def test_the_mean_is_over_tokens_also_across_shards():
    """inventory row 89: add up sums and counts; the mean of the shards' means is another number."""
    mask = np.array([[True, False, False], [True, True, True]])

    def shard(logits, targets, mask):
        total = jnp.sum(F.token_cross_entropy(logits, targets), where=mask)
        return jax.lax.psum(total, "data") / jax.lax.psum(jnp.sum(mask, dtype="float32"), "data")

    whole = F.cross_entropy(LOGITS, TARGETS, mask=mask)
    shards = jax.vmap(shard, axis_name="data")(LOGITS, TARGETS, mask)
    np.testing.assert_allclose(shards, [whole, whole], rtol=1e-6)
    means = jax.vmap(lambda logits, t, m: F.cross_entropy(logits, t, mask=m))(LOGITS, TARGETS, mask)
    assert abs(float(np.mean(means) - whole)) > 0.1


@settings(max_examples=20, deadline=None)
@given(shift=st.floats(-1e3, 1e3, width=32), smoothing=st.floats(0.0, 1.0))
@pytest.mark.slow
def test_cross_entropy_ignores_a_shift_of_all_logits(shift, smoothing):
    loss = F.token_cross_entropy(LOGITS + shift, TARGETS, label_smoothing=smoothing)
    expected = F.token_cross_entropy(LOGITS, TARGETS, label_smoothing=smoothing)
    np.testing.assert_allclose(loss, expected, atol=1e-3)


def test_cross_entropy_of_equal_logits_is_the_log_of_the_vocabulary():
    loss = F.cross_entropy(np.full((3, 11), 2.0), np.array([0, 5, 10]), label_smoothing=0.3)
    np.testing.assert_allclose(loss, math.log(11), rtol=1e-6)


def test_z_loss_pulls_the_normaliser_to_zero():
    logits = np.full((2, 11), 3.0)
    extra = F.cross_entropy(logits, np.zeros(2, int), z_loss=1e-4)
    log_z = 3 + math.log(11)
    np.testing.assert_allclose(extra, math.log(11) + 1e-4 * log_z**2, rtol=1e-6)
    slope = jax.grad(lambda x: F.cross_entropy(x, np.zeros(2, int), z_loss=1.0).sum())(logits)
    np.testing.assert_allclose(np.sum(slope), 2 * log_z, rtol=1e-5)


def test_token_cross_entropy_of_a_batch_is_that_of_each_token():
    one_by_one = [
        [F.token_cross_entropy(x, t) for x, t in zip(xs, ts, strict=True)]
        for xs, ts in zip(LOGITS, TARGETS, strict=True)
    ]
    np.testing.assert_allclose(np.array(one_by_one), F.token_cross_entropy(LOGITS, TARGETS))


@pytest.mark.parametrize("wrong", [-1, -99, 11, 2**31 - 1])
def test_a_target_out_of_range_is_loud_unless_masked(wrong):
    mask = np.arange(6).reshape(2, 3) != 1
    targets = np.where(mask, TARGETS, wrong)
    per_token = F.token_cross_entropy(LOGITS, targets, label_smoothing=0.1)
    np.testing.assert_array_equal(np.isnan(per_token), [[False, True, False], [False] * 3])
    assert np.isnan(F.cross_entropy(LOGITS, targets))
    loss, gradient = jax.value_and_grad(lambda x: F.cross_entropy(x, targets, mask=mask))(LOGITS)
    expected = np.delete(cross_entropy_64(LOGITS, TARGETS).reshape(-1), 1).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert np.all(np.isfinite(gradient)) and not np.any(gradient[0, 1])


def test_no_token_that_counts_gives_zero_and_no_gradient():
    nothing = np.zeros((2, 3), bool)
    loss, gradient = jax.value_and_grad(lambda x: F.cross_entropy(x, TARGETS, mask=nothing))(LOGITS)
    assert loss == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cross_entropy_is_float32_and_survives_extreme_logits(dtype):
    logits = np.array([[6e4, -6e4, 0.0], [-6e4, -6e4, -6e4]], dtype)
    losses = F.token_cross_entropy(logits, np.array([1, 2]))
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, [1.2e5, math.log(3)], rtol=1e-2)
    gradient = jax.grad(lambda x: F.cross_entropy(x, np.array([1, 2])))(logits)
    assert gradient.dtype == dtype and np.all(np.isfinite(gradient))


def test_cross_entropy_of_a_forbidden_token_is_ignored_elsewhere():
    logits = np.array([1.0, -jnp.inf, 2.0])
    loss = F.token_cross_entropy(logits, np.array(2))
    np.testing.assert_allclose(loss, math.log1p(1 / math.e), rtol=1e-5)
    gradient = jax.grad(lambda x: F.token_cross_entropy(x, np.array(2)))(logits)
    np.testing.assert_allclose(gradient[1], 0.0)


@pytest.mark.slow
def test_cross_entropy_gradient_is_softmax_minus_one_hot():
    gradient = jax.grad(lambda x: F.token_cross_entropy(x, TARGETS).sum())(LOGITS)
    expected = jax.nn.softmax(LOGITS) - jax.nn.one_hot(TARGETS, 11)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    loss = jax.jit(lambda x: F.cross_entropy(x, TARGETS, z_loss=0.1, label_smoothing=0.1))
    check_grads(loss, (LOGITS / 3,), 1, modes=["rev"], rtol=1e-2)


def test_losses_name_the_bad_option():
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\]; got 1.5"):
        F.cross_entropy(LOGITS, TARGETS, label_smoothing=1.5)
    with pytest.raises(ValueError, match="z_loss must not be negative; got -0.1"):
        F.cross_entropy(LOGITS, TARGETS, z_loss=-0.1)
    with pytest.raises(ValueError, match="num_bytes must be positive; got 0"):
        F.bits_per_byte(1.0, 0)


def test_cross_entropy_refuses_a_mask_of_weights(no_checks_of_annotations):
    with pytest.raises(ValueError, match="mask is float32, but must be boolean"):
        F.cross_entropy(LOGITS, TARGETS, mask=np.ones((2, 3)))


def test_bits_per_byte():
    """A uniform guess over 256 bytes costs 8 bits each; longer tokens share their cost."""
    np.testing.assert_allclose(F.bits_per_byte(100 * math.log(256), 100), 8.0)
    np.testing.assert_allclose(F.bits_per_byte(np.float32(100 * math.log(256)), 280), 8 / 2.8, 2e-7)
    slope = jax.grad(lambda nats: F.bits_per_byte(nats, 7))(3.0)
    np.testing.assert_allclose(slope, 1 / (7 * math.log(2)), rtol=1e-6)


def test_dpo_loss_is_the_formula():
    chosen, rejected = np.float32([3.0, -1.0, 0.5]), np.float32([1.0, 2.0, 0.5])
    loss = F.dpo_loss(chosen, rejected, beta=0.2)
    np.testing.assert_allclose(loss, -np.log(1 / (1 + np.exp([-0.4, 0.6, 0.0]))), rtol=1e-6)
    extreme = F.dpo_loss(np.float32([1e6, -1e6]), np.float32([0.0, 0.0]), beta=1.0)
    np.testing.assert_allclose(extreme, [0.0, 1e6])
    halves = np.asarray(chosen, jnp.bfloat16), np.asarray(rejected, jnp.bfloat16)
    assert F.dpo_loss(*halves, beta=0.2).dtype == jnp.float32
    check_grads(lambda x, y: F.dpo_loss(x, y, beta=0.2), (chosen, rejected), 1, ["rev"])
    with pytest.raises(ValueError, match="beta must be positive; got 0.0"):
        F.dpo_loss(chosen, rejected, beta=0.0)
