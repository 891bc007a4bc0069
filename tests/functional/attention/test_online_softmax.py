"""Attention in parts, merged in any order and grouping, is attention."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.jitted_functions import F

T, S, H = 3, 8, 4


def arrays(seed):
    rng = np.random.default_rng(seed)
    query, key, value = (np.float32(4 * rng.normal(size=s)) for s in ((T, H), (S, H), (S, 5)))
    mask = jnp.asarray(rng.random((T, S)) > 0.4)
    return query, key, value, mask.at[0].set(False), jnp.asarray(rng.normal(size=(T, S)), "float32")


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 99), st.permutations(range(S)), st.integers(1, S - 1))
def test_any_parts_in_any_order_make_the_whole(seed, order, cut):
    """A query that may attend to nothing, in a part or at all, gives zero."""
    first = np.isin(np.arange(S), order[:cut])
    for normalizer in ("softmax", "relu"):
        *merged, whole = parts_and_whole(*arrays(seed), first, normalizer)
        for either in merged:
            np.testing.assert_allclose(either, whole, rtol=2e-5, atol=2e-6)
        assert (whole[0] == 0).all()


@partial(jax.jit, static_argnames="normalizer")
def parts_and_whole(query, key, value, mask, bias, first, normalizer):
    """Attention to the first keys and to the others, merged both ways, and to all."""
    options = {"scale": 0.7, "logit_softcap": 3.0, "normalizer": normalizer}
    parts = [
        F.partial_attention(query, key, value, mask & some[None], bias, **options)
        for some in (first, ~first)
    ]
    merged = [
        F.finish_partial_attention(reduce(F.combine_partial_attention, p))
        for p in (parts, parts[::-1])
    ]
    return *merged, F.attend(query, key, value, mask, bias, **options)


def test_merging_is_associative_and_large_scores_do_not_overflow():
    query, key, value, _, _ = arrays(1)
    a, b, c = (
        F.partial_attention(100 * query, key[i : i + 2], value[i : i + 2], scale=1.0)
        for i in (0, 2, 4)
    )
    left = F.combine_partial_attention(F.combine_partial_attention(a, b), c)
    right = F.combine_partial_attention(a, F.combine_partial_attention(b, c))
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
        assert np.isfinite(x).all()


@pytest.mark.parametrize("multipliers", [0.0, 2.0])
def test_multipliers_change_values_and_not_the_total(multipliers):
    query, key, value, mask, _ = arrays(2)
    plain = F.partial_attention(query, key, value, mask, scale=1.0)
    part = F.partial_attention(
        query, key, value, mask, None, jnp.full((T, S), multipliers), scale=1.0
    )
    np.testing.assert_array_equal(part.denominator, plain.denominator)
    np.testing.assert_allclose(part.numerator, multipliers * plain.numerator, rtol=1e-6)
