import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.functional.jitted_functions import F

B, T, S, N, C, P, R, V = 2, 3, 5, 4, 11, 7, 2, 6
SCALE = (P + R) ** -0.5


@pytest.fixture
def arrays(normal):
    """Queries, latents, rotated keys, and the kernels of keys and values."""
    return (
        normal(B, T, N, P + R),
        normal(B, S, C),
        normal(B, S, R),
        normal(C, N, P),
        normal(C, N, V),
    )


def expanded(query, latent, rotary_key, key_kernel, value_kernel):
    key, value = F.expand_latent(latent, rotary_key, key_kernel, value_kernel)
    return F.dot_product_attention(query, key, value)


def absorbed(query, latent, rotary_key, key_kernel, value_kernel):
    key = jnp.concatenate([latent, rotary_key], axis=-1)[..., None, :]
    query = F.absorb_query(query, key_kernel)
    mean = F.dot_product_attention(query, key, latent[..., None, :], scale=SCALE)
    return F.up_project_values(mean, value_kernel)


def by_hand(query, latent, rotary_key, key_kernel, value_kernel, *, score=lambda s: s):
    """One query and one head at a time, in float64, from the formulas of the paper."""
    inputs = (query, latent, rotary_key, key_kernel, value_kernel)
    query, latent, rotary_key, key_kernel, value_kernel = (
        np.asarray(x, np.float64) for x in inputs
    )
    out = np.zeros((B, T, N, V))
    for b, t, n in np.ndindex(B, T, N):
        keys = np.concatenate([latent[b] @ key_kernel[:, n], rotary_key[b]], axis=-1)
        weights = np.exp(score(SCALE * (keys @ query[b, t, n])))
        out[b, t, n] = weights @ (latent[b] @ value_kernel[:, n]) / weights.sum()
    return out


@pytest.mark.parametrize("form", [expanded, absorbed])
def test_both_forms_are_the_formula(form, arrays):
    np.testing.assert_allclose(form(*arrays), by_hand(*arrays), rtol=2e-5, atol=2e-5)


def test_scores_are_exponentiated_once(arrays):
    """inventory row 73: the document writes s = exp(q @ c) and exponentiates s again."""
    arrays = 0.2 * arrays[0], *arrays[1:]  # smaller scores: exp(exp(7)) is not a number
    twice = by_hand(*arrays, score=np.exp)
    assert np.abs(np.asarray(absorbed(*arrays)) - twice).max() > 0.1


def test_forms_have_equal_gradients(arrays, normal):
    weights = normal(B, T, N, V)

    def loss(form):
        return lambda *a: jnp.sum(weights * form(*a))

    actual, expected = (
        jax.jit(jax.grad(loss(form), argnums=range(5)))(*arrays) for form in (absorbed, expanded)
    )
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
        assert np.abs(other).max() > 0.1


def test_absorbed_scores_are_those_of_keys_and_need_no_scale_of_their_own(arrays):
    query, latent, rotary_key, key_kernel, value_kernel = arrays
    key, _ = F.expand_latent(latent, rotary_key, key_kernel, value_kernel)
    shared = jnp.concatenate([latent, rotary_key], axis=-1)
    np.testing.assert_allclose(
        jnp.einsum("btnq,bsq->bnts", F.absorb_query(query, key_kernel), shared),
        jnp.einsum("btnq,bsnq->bnts", query, key),
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_batch_is_a_loop_over_its_members(arrays):
    query, latent, rotary_key, *kernels = arrays
    for form in (expanded, absorbed):
        whole = form(query, latent, rotary_key, *kernels)
        for b in range(B):
            alone = form(query[b], latent[b], rotary_key[b], *kernels)
            np.testing.assert_allclose(whole[b], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_results_have_the_dtype_of_what_is_given(arrays):
    narrow = [x.astype(jnp.bfloat16) for x in arrays]
    assert expanded(*narrow).dtype == absorbed(*narrow).dtype == jnp.bfloat16
    expected = by_hand(*narrow)
    np.testing.assert_allclose(absorbed(*narrow).astype(float), expected, rtol=0.1, atol=0.1)


def test_absorbing_saves_products_while_queries_are_few():
    """DeepSeek-V2's widths: below 171 queries. Counted for one head and one token of the text."""
    widths = dict(latent_dim=512, nope_dim=128, value_dim=128)
    for queries in (1, 170, 171, 4096):
        absorbed = queries * 2 * 512
        expanded = (512 + queries) * (128 + 128)
        assert F.prefer_absorbed(queries, **widths) == (absorbed < expanded)
    assert F.prefer_absorbed(170, **widths) and not F.prefer_absorbed(171, **widths)
