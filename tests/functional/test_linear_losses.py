"""Losses from features: some ids of the vocabulary at a time give what all of them give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.jitted_functions import F


def draw(tokens, width, vocab_size, *, axis=1, dtype="float32", seed=0):
    """Features, a kernel or table, a bias, targets, and what each loss weighs."""
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(width, vocab_size))
    numbers = rng.normal(size=(tokens, width)), kernel if axis else kernel.T
    arrays = (*numbers, rng.normal(size=vocab_size))
    targets = jnp.asarray(rng.integers(0, vocab_size, tokens))
    weights = np.float32(rng.normal(size=tokens))
    return [jnp.asarray(x, dtype) for x in arrays], targets, weights


def by_hand(
    arrays, targets, weights, *, vocabulary_axis=1, multiplier=1.0, softcap=None, **options
):
    """Losses and the gradients of their weighted sum, in float64, with the softmax itself."""
    x, kernel, bias = (np.asarray(a, np.float64) for a in arrays)
    kernel = kernel if vocabulary_axis else kernel.T
    y = multiplier * (x @ kernel + bias)
    slope = np.full_like(y, multiplier)
    if softcap is not None:
        y = softcap * np.tanh(y / softcap)
        slope *= 1 - (y / softcap) ** 2
    masked = list(options.get("masked_ids", ()))
    y[:, masked] = -np.inf
    peak = y.max(-1, keepdims=True)
    p = np.exp(y - peak)
    log_z = (peak + np.log(p.sum(-1, keepdims=True)))[:, 0]
    p /= p.sum(-1, keepdims=True)
    z_loss, s = options.get("z_loss", 0.0), options.get("label_smoothing", 0.0)
    V = y.shape[-1]
    hit = np.eye(V)[np.asarray(targets)]
    loss = log_z - y[np.arange(len(y)), np.asarray(targets)] + z_loss * log_z**2
    if s:
        loss -= s * (y.mean(-1) - y[np.arange(len(y)), np.asarray(targets)])
    dy = (1 + 2 * z_loss * log_z)[:, None] * p - (1 - s) * hit - s / V
    dy[:, masked] = 0
    dy *= slope * np.asarray(weights, np.float64)[:, None]
    d_kernel = x.T @ dy
    return loss, (dy @ kernel.T, d_kernel if vocabulary_axis else d_kernel.T, dy.sum(0))


def by_chunks(arrays, targets, weights, **options):
    """The same of `F.linear_cross_entropy`."""

    @jax.jit
    def both(arrays):
        def loss(arrays):
            losses = F.linear_cross_entropy(*arrays[:2], targets, *arrays[2:], **options)
            return jnp.sum(weights * losses), losses

        gradients, losses = jax.grad(loss, has_aux=True)(arrays)
        return losses, gradients

    return both(arrays)


def assert_close(results, expected, atol=1e-5):
    """To 1e-5 of the largest number of each array."""
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        scale = max(1.0, np.max(np.abs(other), where=np.isfinite(other), initial=0.0))
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=atol * scale)


OPTIONS = {
    "plain": {},
    "z": dict(z_loss=0.1),
    "smoothed": dict(label_smoothing=0.2),
    "capped": dict(multiplier=0.5, softcap=2.0, z_loss=0.05, label_smoothing=0.1),
    "masked": dict(masked_ids=(0, *range(5, 16)), softcap=3.0),  # all of the second five
}


@pytest.mark.parametrize("chunk", [5, 23])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow(but=["plain-0-23", "masked-1-23", "z-0-23", "smoothed-1-23", "capped-0-23"])
def test_losses_and_gradients_are_those_of_all_logits_by_hand(name, axis, chunk):
    """Of 23 ids five at a time, with three left over; and all at once."""
    options = dict(OPTIONS[name], vocabulary_axis=axis)
    arrays, _, weights = draw(7, 3, 23, axis=axis)
    targets = jnp.array([1, 4, 16, 22, 3, 20, 19])
    expected = by_hand(arrays, targets, weights, **options)
    assert_close(by_chunks(arrays, targets, weights, chunk_size=chunk, **options), expected)


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 9),
    width=st.integers(1, 7),
    vocab_size=st.integers(2, 61),
    chunk=st.integers(1, 64),
    axis=st.sampled_from([0, 1]),
    options=st.sampled_from([OPTIONS["capped"], dict(z_loss=0.1), dict(masked_ids=(1,))]),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_any_shape_and_any_chunk(tokens, width, vocab_size, chunk, axis, options, seed):
    """Odd vocabularies, chunks that do not divide them, one id at a time, more than there are."""
    arrays, targets, weights = draw(tokens, width, vocab_size, axis=axis, seed=seed)
    targets = jnp.where(targets == 1, 0, targets)
    options = dict(options, vocabulary_axis=axis)
    expected = by_hand(arrays, targets, weights, **options)
    assert_close(by_chunks(arrays, targets, weights, chunk_size=chunk, **options), expected)


@pytest.mark.slow
def test_without_a_bias_and_with_leading_axes():
    (x, kernel, _), targets, weights = draw(12, 3, 23)
    nothing = jnp.zeros(23)
    expected, slopes = by_hand((x, kernel, nothing), targets, weights)

    def loss(x, kernel):
        losses = F.linear_cross_entropy(
            x.reshape(2, 6, 3), kernel, targets.reshape(2, 6), chunk_size=9
        )
        return jnp.sum(weights.reshape(2, 6) * losses), losses

    gradients, losses = jax.grad(loss, (0, 1), has_aux=True)(x, kernel)
    assert losses.shape == (2, 6)
    assert_close((losses.reshape(-1), gradients), (expected, slopes[:2]))


def test_scores_are_those_of_whole_logits():
    """The three numbers one by one, against numpy."""
    (x, kernel, bias), targets, _ = draw(7, 3, 23)
    scores = F.linear_logit_statistics(x, kernel, targets, bias, multiplier=1.5, chunk_size=4)
    logits = 1.5 * (np.asarray(x, np.float64) @ np.asarray(kernel) + np.asarray(bias))
    np.testing.assert_allclose(scores.log_z, np.log(np.exp(logits).sum(-1)), rtol=1e-5)
    np.testing.assert_allclose(
        scores.target_logit, logits[np.arange(7), np.asarray(targets)], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(scores.mean_logit, logits.mean(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, -100, 23, 2**31 - 1, -(2**31)])
@pytest.mark.slow(but=["-100", "23", "2147483647", "-2147483648"])
def test_a_target_out_of_range_is_loud_unless_masked(wrong):
    arrays, targets, _ = draw(4, 3, 23)
    targets = targets.at[2].set(wrong)

    def total(x):
        losses = F.linear_cross_entropy(x, arrays[1], targets, chunk_size=7, label_smoothing=0.1)
        return jnp.sum(jnp.where(jnp.arange(4) != 2, losses, 0.0)), losses

    gradient, losses = jax.grad(total, has_aux=True)(arrays[0])
    np.testing.assert_array_equal(np.isnan(losses), [False, False, True, False])
    assert np.all(np.isfinite(gradient)) and not np.any(gradient[2]) and np.any(gradient[1])


def test_large_logits_do_not_overflow():
    x, kernel = jnp.array([[1.0], [-1.0]]), jnp.array([[6e4, -6e4, 0.0, 3e4, 6e4]])
    losses, slopes = by_chunks((x, kernel), jnp.array([1, 4]), jnp.ones(2), chunk_size=2)
    np.testing.assert_allclose(losses, [1.2e5 + np.log(2), 1.2e5])
    assert all(np.isfinite(x).all() for x in slopes)


@pytest.mark.slow
def test_bfloat16_products_as_the_head_makes_them():
    """Losses are float32 and those of the whole form; gradients have the dtypes of their arrays and
    are as near those in float64, though they are added up from 64 chunks."""
    arrays, targets, weights = draw(32, 48, 512, dtype="bfloat16")
    arrays[1] = arrays[1] * 0.125
    expected, slopes = by_hand(arrays, targets, weights)
    few, whole = (by_chunks(arrays, targets, weights, chunk_size=chunk) for chunk in (8, 512))
    assert few[0].dtype == jnp.float32 and {x.dtype for x in few[1]} == {jnp.dtype("bfloat16")}
    np.testing.assert_allclose(few[0], whole[0], atol=1e-3)
    np.testing.assert_allclose(few[0], expected, atol=0.03)

    def errors(gradients):
        pairs = zip(gradients, slopes, strict=True)
        return [np.linalg.norm(np.asarray(x, float) - y) / np.linalg.norm(y) for x, y in pairs]

    assert np.all(np.array(errors(few[1])) < 1.1 * np.array(errors(whole[1])))
    assert max(errors(few[1])) < 0.01


TOKENS, WIDTH, VOCABULARY = 4096, 256, 128_000


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", [{}, OPTIONS["capped"]], ids=["plain", "capped"])
@pytest.mark.slow(but=["capped-0"])
def test_memory_is_under_a_tenth_of_the_logits(options, axis):
    """Vocabulary 128,000 x 4,096 tokens: loss, gradients of features and kernel, all told."""
    shape = (WIDTH, VOCABULARY) if axis else (VOCABULARY, WIDTH)
    abstract = jax.ShapeDtypeStruct
    x, kernel = abstract((TOKENS, WIDTH), jnp.float32), abstract(shape, jnp.float32)

    def loss(x, kernel, targets):
        losses = F.linear_cross_entropy(x, kernel, targets, vocabulary_axis=axis, **options)
        return jnp.mean(losses)

    program = jax.jit(jax.value_and_grad(loss, (0, 1)))
    memory = program.lower(x, kernel, abstract((TOKENS,), jnp.int32)).compile().memory_analysis()
    logits = 4 * TOKENS * VOCABULARY
    assert memory.temp_size_in_bytes < 0.03 * logits
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 0.1 * logits


@pytest.mark.parametrize(
    "tokens, vocab_size, chunk",
    [
        (2048, 4096, 4096),  # 2 ** 23 logits are kept
        (4096, 4096, 4096),
        (4097, 4096, 512),
        (4096, 128_000, 1024),
        (128, 262_144, 32_768),
        (10**6, 50_257, 512),
        (10**6, 300, 300),
        (0, 50_257, 50_257),
    ],
)
def test_ids_at_a_time(tokens, vocab_size, chunk):
    assert F.vocab_chunk_size(tokens, vocab_size, platform="cpu") == chunk


@pytest.mark.parametrize("tokens, vocab_size, chunk", [(4096, 4096, 4096), (16_384, 32_768, 8192)])
def test_accelerators_have_more_ids_at_a_time(tokens, vocab_size, chunk):
    assert F.vocab_chunk_size(tokens, vocab_size, platform="gpu") == chunk


def test_wrong_options_are_named(no_checks_of_annotations):
    (x, kernel, bias), targets, _ = draw(4, 3, 23)
    with pytest.raises(ValueError, match="chunk_size must be positive; got 0"):
        F.linear_logit_statistics(x, kernel, targets, chunk_size=0)
    for function in (F.linear_logit_statistics, lambda x, k, _, **o: F.linear_logits(x, k, **o)):
        with pytest.raises(ValueError, match="vocabulary_axis must be 0 or 1; got 2"):
            function(x, kernel, targets, vocabulary_axis=2)
    with pytest.raises(ValueError, match="label_smoothing must be in .0, 1.; got 2"):
        F.linear_cross_entropy(x, kernel, targets, bias, label_smoothing=2.0)
    with pytest.raises(ValueError, match=r"masked_ids must be from 0 to 22; got \[-1, 23\]"):
        F.linear_logits(x, kernel, masked_ids=(-1, 0, 22, 23))
    with pytest.raises(ValueError, match=r"platform must be one of .*'gpu'.*; got 'cuda'"):
        F.vocab_chunk_size(1, 1, platform="cuda")
    with pytest.raises(
        ValueError, match=r"kernel has 23 features \(axis 0 of .* but features has 3 "
    ):
        F.linear_logit_statistics(x, kernel.T, targets, chunk_size=2)
    with pytest.raises(ValueError, match=r"bias has 23 vocabulary ids .* kernel has 22"):
        F.linear_logit_statistics(x, kernel[:, 1:], targets, bias, chunk_size=2)
    with pytest.raises(ValueError, match="Cast kernel to the dtype of features; got bfloat16"):
        F.linear_logit_statistics(x, kernel.astype(jnp.bfloat16), targets, chunk_size=2)
