"""Attention and masks under jit, vmap, grad and pmap give what they give without."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxformer import functional as F


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


POSITIONS = jnp.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]), jnp.array([[4, 0, 2], [5, 9, 11]])
QKV = draw(2, 5, 4, 3), draw(2, 3, 2, 3, seed=1), draw(2, 3, 2, 7, seed=2)
MASK, BIAS = draw(2, 5, 3, seed=3) > -0.5, draw(2, 4, 5, 3, seed=4)
LATENT = draw(2, 3, 7), draw(2, 3, 2, seed=1), draw(2, 7, 4, 5, seed=2), draw(2, 7, 4, 6, seed=3)
HEAD = tuple(x[..., 0, :] for x in QKV)
SIGHT = F.Sight(causal=True, window=5)
KEYS = jax.random.split(jax.random.key(0), 2)
DECAY = jnp.array([[0.5, 0.9, 1.0]] * 2), draw(2, 3, 2, seed=5)  # of heads, angles of their pairs
TEXT, STATE = draw(2, 5, 3, 4, seed=6), draw(2, 3, 4, seed=7)


def recurrences(value, gamma, theta, initial, valid):
    """All forms, by a path with padding and a state before."""
    return jnp.stack(
        [
            F.linear_recurrence(
                value, gamma, theta, initial=initial, valid=valid, method=method, chunk=2
            ).output
            for method in ("scan", "associative", "chunked")
        ]
    )


# name: function, arguments with a leading axis to map over: the gradient is taken of the first
CASES = {
    "expand_latent": (lambda *a: sum(y.sum(-1) for y in F.expand_latent(*a)), LATENT),
    "absorb_query": (F.absorb_query, (QKV[0], draw(2, 7, 4, 2, seed=5))),
    "values_from_latent": (F.values_from_latent, (QKV[0], draw(2, 3, 4, 7, seed=6))),
    "causal_mask": (F.causal_mask, POSITIONS),
    "window_mask": (lambda q, k: F.window_mask(q, k, 3, lookahead=1), POSITIONS),
    "segment_mask": (F.segment_mask, POSITIONS),
    "prefix_mask": (F.prefix_mask, (*POSITIONS, jnp.array([1, 10]))),
    "length_mask": (lambda n: F.length_mask(n, 5), (jnp.array([2, 5]),)),
    "key_mask": (F.key_mask, (MASK[:, 0],)),
    "block_sparse_mask": (
        lambda q, k: F.block_sparse_mask(q, k, num_heads=2, block=2, local_blocks=1, stride=2),
        POSITIONS,
    ),
    "attend": (lambda *a: F.attend(*a, scale=0.5), (*HEAD, MASK, BIAS[:, 0])),
    "attention_scores": (
        lambda *a: F.attention_scores(*a, scale=0.5, logit_softcap=2.0),
        (*HEAD[:2], BIAS[:, 0]),
    ),
    "blockwise_attention": (
        lambda q, k, v, t, s: F.blockwise_attention(q, k, v, F.PositionMask(t, s, sight=SIGHT)),
        (*QKV, *POSITIONS),
    ),
    "as_array": (lambda t, s: F.as_array(F.PositionMask(t, s, sight=SIGHT)), POSITIONS),
    "attention_weights": (F.attention_weights, (*QKV[:2], MASK, BIAS)),
    "dot_product_attention": (F.dot_product_attention, QKV),
    "dot_product_attention_masked": (F.dot_product_attention, (*QKV, MASK, BIAS)),
    "dot_product_attention_relu_softcap": (
        lambda *a: F.dot_product_attention(*a, normalizer="relu", logit_softcap=2.0),
        (*QKV, MASK),
    ),
    "dot_product_attention_dropout": (
        lambda *a: F.dot_product_attention(*a[:3], dropout_rate=0.5, dropout_key=a[3]),
        (*QKV, KEYS),
    ),
    "decay_rates": (lambda x: jnp.stack(F.decay_rates(x)), (draw(2, 3),)),
    "decay_attention": (
        lambda *a: F.decay_attention(*a[:3], segments=a[3]),
        (TEXT, *DECAY, jnp.array([[1, 1, 2, 2, 2], [3, 3, 3, 3, 4]])),
    ),
    "linear_recurrence": (
        recurrences,
        (TEXT, *DECAY, STATE, jnp.array([[True, True, False, True, False], [True] * 5])),
    ),
}


def value_and_gradient(function, arguments):
    """The value, and if the first argument can vary, the gradient of some weighted sum of it."""
    y = function(*arguments)
    if arguments[0].dtype != jnp.float32:
        return y, ()
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return y, jax.grad(lambda *a: jnp.sum(weights * function(*a)))(*arguments)


@functools.cache
def row_by_row(name):
    function, arguments = CASES[name]
    rows = [jax.tree.map(lambda a, row=row: a[row], arguments) for row in range(2)]
    once = jax.jit(lambda *a: value_and_gradient(function, a))
    return [once(*row) for row in rows]


class TransformsTest(chex.TestCase):
    @chex.variants(with_jit=True, with_pmap=True)
    @parameterized.parameters(*CASES)
    def test_vmap_and_grad(self, name):
        function, arguments = CASES[name]
        results = self.variant(jax.vmap(lambda *a: value_and_gradient(function, a)))(*arguments)
        for row, expected in enumerate(row_by_row(name)):
            found = jax.tree.map(lambda a, row=row: a[row], results)
            chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=1e-5)


def test_the_table_is_complete():
    modules = {"attention", "blockwise", "by_position", "kernels", "latent", "masks", "scores"}
    modules |= {"decay", "implementations", "recurrence"}
    public = {
        name
        for name, thing in vars(F).items()
        if callable(thing) and thing.__module__.split(".")[-1] in modules
    }
    assert public - set(CASES) == {
        "DecayRates",
        "Recurrence",
        "absorbing_saves",
        "many_scores",  # both compare numbers
        *("AlibiRule", "BucketRule", "Buckets", "PositionMask", "Sight"),
        *("cudnn_attention", "splash_attention"),  # of other platforms; see test_kernels.py
    }
