"""What functions are given: narrow integers, lists, wrong shapes, wrong kinds, nothing at all."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import functional as F
from jaxformer.functional.argument_checks import _argument_specs, _ArraySpec, _TupleSpec

NARROW = ["uint8", "int8", "uint16", "int16", "uint32"]
RNG = np.random.default_rng(0)
MASK = jax.device_put(np.tri(5, dtype=bool))


def ones(*shape, dtype="float32"):
    return jax.device_put(np.ones(shape, dtype))


def ids(*values, dtype="int32"):
    return jax.device_put(np.asarray(values, dtype))


# Integers that would wrap


def test_targets_of_uint8():
    logits = RNG.normal(size=(3, 256))
    exact = np.log(np.exp(logits).sum(-1)) - logits[np.arange(3), [0, 1, 255]]
    cross_entropy = jax.jit(F.cross_entropy)
    actual = cross_entropy(np.float32(logits), np.array([0, 1, 255], np.uint8))
    np.testing.assert_allclose(actual, exact.mean(), rtol=1e-5)
    zeros = cross_entropy(np.zeros((3, 256), np.float32), np.array([0, 1, 255], np.uint8))
    np.testing.assert_allclose(zeros, np.log(256), rtol=1e-6)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.slow(but=["int8"])
def test_targets_of_any_integer_dtype_with_chunks(dtype):
    """A chunk that begins at 256 is id 0 to int8, were ids compared in it."""
    features, kernel = RNG.normal(size=(4, 8)), RNG.normal(size=(8, 600))
    targets = np.array([1, 100, 127, 3])
    logits = features @ kernel
    exact = np.log(np.exp(logits).sum(-1)) - logits[np.arange(4), targets]
    for chunk in (128, 600):
        losses = jax.jit(functools.partial(F.linear_cross_entropy, chunk_size=chunk))
        actual = losses(np.float32(features), np.float32(kernel), targets.astype(dtype))
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.slow
def test_ids_and_positions_of_any_integer_dtype_are_as_int32(dtype):
    tokens, at = jnp.asarray([1, 127, 5, 3], dtype), jnp.arange(6, dtype=dtype)
    segments = jnp.asarray([0, 0, 0, 1, 1, 1], dtype)
    query, table = np.float32(RNG.normal(size=(6, 2, 4))), ones(300, 2)
    rows = np.float32(RNG.normal(size=(8, 2)))

    def rules(at, segments):
        settings = dict(bidirectional=True, max_distance=8)
        bucket = F.attention_bias(F.t5_bias, rows, at, at, head_axes=1, **settings)
        alibi = F.attention_bias(F.alibi_bias, F.alibi_slopes(2), at, at)
        mask = F.AttentionMask(at, at, segments, segments, F.MaskRule(window=2, lookahead=1))
        return mask, alibi, bucket

    @jax.jit
    def everything(tokens, at, segments):
        mask, alibi, bucket = rules(at, segments)
        return {
            "seen": F.seen_tokens(tokens, 300),
            "embed": F.embed(table, tokens),
            "shifted": F.shift_right(tokens, 299),
            "scores": F.logit_statistics(jnp.zeros((4, 300)), tokens),
            "learned": F.learned_positions(rows, at, offset=2),
            "causal": F.causal_mask(at, at),
            "window": F.window_mask(at, at, 2, lookahead=1),
            "prefix": F.prefix_mask(at, at, 3),
            "sparse": F.block_sparse_mask(
                at, at, num_heads=2, block_size=2, local_blocks=1, stride=2
            ),
            "sinusoid": F.sinusoidal_positions(at, 4),
            "rotations": F.rope_rotations(at, F.rope_frequencies(4)),
            "alibi": F.alibi_bias(F.alibi_slopes(2), at, at),
            "xl": F.transformer_xl_bias(query, ones(4, 2, 4), at, at, bidirectional=True),
            "slots": F.ring_buffer_slots(at, ones(6, dtype=bool), 4),
            "decay": F.decay_attention(query, jnp.array([0.5, 0.9]), segments=segments),
            "rules": [rule.materialize() for rule in (mask, alibi, bucket)],
            "blocks": F.blockwise_attention(query, query, query, mask, bucket, block_sizes=(2, 2)),
            "attention": F.dot_product_attention(query, query, query, mask, alibi),
        }

    expected = everything(*(x.astype(jnp.int32) for x in (tokens, at, segments)))
    jax.tree.map(np.testing.assert_array_equal, everything(tokens, at, segments), expected)


def test_windows_of_unsigned_positions():
    at = np.arange(6, dtype="uint16")
    seen = np.asarray(jax.jit(lambda at: F.window_mask(at, at, 2))(at))
    np.testing.assert_array_equal(seen[-1], [0, 0, 0, 0, 1, 1])
    marked_unused = np.asarray([0, 1, 2**32 - 1], "uint32")  # a slot after all queries
    np.testing.assert_array_equal(jax.jit(F.causal_mask)(at[1:2], marked_unused), [[1, 1, 0]])


def test_differences_of_unsigned_positions_are_refused():
    with pytest.raises(ValueError, match="relative_positions is uint8, .* signed integer"):
        F.relative_position_buckets(ids(3, 254, dtype="uint8"), bidirectional=True)


def test_integers_that_int32_does_not_hold_are_refused():
    with pytest.raises(
        ValueError, match="tokens holds 4294967301, outside of int32, which ends at 2147483647"
    ):
        F.embed(ones(8, 2), np.array([1, 2**32 + 5]))


# Kinds


@pytest.mark.parametrize(
    "call",
    [
        lambda mask: F.dot_product_attention(*[ones(5, 2, 4)] * 3, mask),
        lambda mask: F.attention_weights(ones(5, 2, 4), ones(5, 2, 4), mask),
        lambda mask: F.attend(*[ones(5, 4)] * 3, mask, scale=1.0),
        lambda mask: F.partial_attention(*[ones(5, 4)] * 3, mask, scale=1.0),
        lambda mask: F.batch_norm(ones(5, 5, 2), mask=mask),
        lambda mask: F.cross_entropy(ones(5, 5, 9), jnp.zeros((5, 5), int), mask=mask),
        lambda mask: F.router_totals(ones(5, 5, 4), jnp.zeros((5, 5, 1), int), mask=mask),
    ],
)
def test_masks_that_are_not_boolean_are_refused(call):
    additive = jnp.where(MASK, 0.0, -1e9)
    with pytest.raises(ValueError, match="mask is float32, but must be boolean.* use mask == 0"):
        call(additive)
    with pytest.raises(ValueError, match="mask is int32, but must be boolean.* use mask != 0"):
        call(MASK.astype(jnp.int32))
    jax.eval_shape(call, additive == 0)
    with pytest.raises(ValueError, match="mask is float32, but must be boolean"):
        jax.jit(call)(additive)


def test_rotations_that_are_angles_are_refused():
    x, angles = ones(5, 2, 8), ones(5, 4)
    with pytest.raises(ValueError, match=r"rotations is float32, but must be complex"):
        F.rotate(x, angles)


def test_floats_and_integers_are_not_taken_for_each_other():
    with pytest.raises(ValueError, match=r"x is int32, .* a float.* Use x.astype\(jnp.float32\)"):
        F.layer_norm(jnp.arange(6))
    with pytest.raises(ValueError, match="tokens is float32, but must be an integer"):
        F.embed(ones(8, 2), ones(3))


# Lists, arrays of NumPy, and what is neither


@pytest.mark.slow
def test_lists_and_arrays_of_numpy_are_arrays():
    np.testing.assert_allclose(F.silu([0, 1]), [0, 0.731059], rtol=1e-5)  # whole numbers of Python
    np.testing.assert_allclose(
        F.rms_norm([[3.0, 4.0]], np.ones(2, np.float32)), [[0.849, 1.131]], 1e-3
    )
    np.testing.assert_array_equal(F.causal_mask([1], range(3)), [[1, 1, 0]])
    np.testing.assert_array_equal(F.key_padding_mask([True, False]), [[1, 0]])
    assert F.embed(np.ones((8, 2), np.float32), []).shape == (0, 2)
    np.testing.assert_allclose(F.cross_entropy([[0.0, 0.0]], [1]), np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(F.write_slots(np.zeros(3), np.array([7.0]), [1]), [0, 7, 0])
    x = RNG.normal(size=(5, 2, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        F.dot_product_attention(x, x, x, np.asarray(MASK), scale=np.float32(0.5)),
        F.dot_product_attention(*[jnp.asarray(x)] * 3, MASK, scale=0.5),
    )


@pytest.mark.parametrize(
    "given, message",
    [
        ([[1.0], [2.0, 3.0]], "x: cannot convert list to an array"),
        ("text", "x is 'text', not an array"),
        (None, "x is None, not an array"),
        ({"x": 1}, "x is {'x': 1}, not an array"),
    ],
)
def test_what_is_no_array_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        F.silu(given)


# Shapes

LONG = ones(2, 7, 3, 4)
WRONG = {
    "dot_product_attention": (
        lambda f: f(ones(2, 5, 6, 8), ones(2, 7, 3, 4), LONG),
        r"key has 4 features per head \(axis 3 .*\), but query has 8 \(axis 3",
    ),
    "attention_weights": (
        lambda f: f(ones(2, 5, 4, 4), LONG),
        r"Query heads must be a multiple of key/value heads; got 4 and 3",
    ),
    "blockwise_attention": (
        lambda f: f(LONG, LONG, LONG[:, :6]),
        r"value has 6 key positions \(axis 1 .*\), but key has 7 \(axis 1",
    ),
    "attend": (
        lambda f: f(ones(5, 4), ones(6, 4), ones(6, 4), ones(5, 5, dtype=bool), scale=1.0),
        r"mask has 5 key positions \(axis 1 .*\), but key has 6 \(axis 0",
    ),
    "layer_norm": (
        lambda f: f(ones(2, 5), ones(1)),
        r"scale has 1 features \(axis 0 of shape \(1,\)\), but x has 5 \(axis 1",
    ),
    "rms_norm": (
        lambda f: f(ones(2, 3, 5), ones(1, 5)),
        r"scale has 1 in axis 0 of its shape \(1, 5\), but x has 3 in axis 1 of \(2, 3, 5\)",
    ),
    "batch_norm": (
        lambda f: f(ones(2, 3, 5), bias=ones(1)),
        r"bias has 1 features .* but x has 5 \(axis 2",
    ),
    "batch_norm_inference": (
        lambda f: f(ones(2, 3, 5), F.BatchStatistics(ones(1), ones(1))),
        r"running.mean has 1 in axis 0 .* but x has 5 in axis 2",
    ),
    "linear": (
        lambda f: f(ones(2, 5), ones(4, 3)),
        r"last 1 axes of x \(2, 5\) .* kernel \(4, 3\); got \(5,\) and \(4,\)",
    ),
    "linear_logits": (
        lambda f: f(ones(2, 5), ones(7, 4), vocabulary_axis=0),
        r"kernel has 4 features \(axis 1 .*\), but features has 5 \(axis 1",
    ),
    "linear_cross_entropy": (
        lambda f: f(ones(2, 5), ones(5, 7), ids(1, 2, 3)),
        r"targets has batch axes \(3,\) .* must be the \(2,\) of features",
    ),
    "embed": (lambda f: f(ones(5), ids(1)), r"table has 1 axis, .* must have 2: \[V, D\]"),
    "learned_positions": (
        lambda f: f(ones(5, 2), jnp.asarray(1)),
        r"positions has 0 axes, .* must have at least 1: \[\*batch, T\]",
    ),
    "rotate": (
        lambda f: f(ones(2, 5, 3, 8), ones(6, 4, dtype="complex64")),
        r"rotations has 6 positions \(axis 0 .*\), but x has 5 \(axis 1 of shape \(2, 5, 3, 8\)\)",
    ),
    "rope_rotations": (
        lambda f: f(ids(1), ones(2, 4)),
        r"frequencies has 2 axes, shape \(2, 4\), but must have 1: \[C\]",
    ),
    "swiglu": (
        lambda f: f(ones(2, 6), ones(2, 1)),
        r"value has batch axes \(2, 1\) .* must be the \(2, 6\) of gate",
    ),
    "cross_entropy": (
        lambda f: f(ones(2, 3, 9), jnp.zeros((2, 4), int)),
        r"targets has batch axes \(2, 4\) .* must be the \(2, 3\) of logits",
    ),
    "token_cross_entropy": (
        lambda f: f(ones(3, 9), jnp.zeros((), int)),
        r"targets has batch axes \(\) .* must be the \(3,\) of logits",
    ),
    "alibi_bias": (
        lambda f: f(ones(2, 2), ids(1), ids(1)),
        r"slopes has 2 axes, shape \(2, 2\), but must have 1: \[N\]",
    ),
    "decay_attention": (
        lambda f: f(ones(5, 3, 4), ones(2)),
        r"gamma has 2 heads \(axis 0 .*\), but value has 3 \(axis 1",
    ),
    "linear_recurrence": (
        lambda f: f(ones(5, 3, 4), ones(3), initial_state=ones(3, 5)),
        r"initial_state has 5 features per head \(axis 1 .*\), but value has 4 \(axis 2",
    ),
    "linear_attention": (
        lambda f: f(ones(5, 2, 4), ones(5, 2, 4), ones(5, 2, 3), beta=ones(5, 3)),
        r"beta has 3 heads \(axis 1 .*\), but value has 2 \(axis 1",
    ),
    "selective_scan": (
        lambda f: f(ones(5, 3), ones(5, 3), ones(3, 2), ones(5, 2), ones(5, 4)),
        r"read has M = 4 \(axis 1 .*\), but rate has M = 2 \(axis 1",
    ),
    "rg_lru": (
        lambda f: f(ones(5, 3), ones(5, 3), ones(5, 3), ones(4)),
        r"rate has C = 4 \(axis 0 .*\), but x has C = 3 \(axis 1",
    ),
    "wkv": (
        lambda f: f(ones(5, 3), ones(5, 3), ones(3), ones(4)),
        r"bonus has C = 4 \(axis 0 .*\), but key has C = 3 \(axis 1",
    ),
    "mixture_of_experts": (
        lambda f: f(ones(5, 4), F.route(ones(6, 3), top_k=1), lambda x, _: x, num_experts=3),
        r"routing must have .* for x \(5, 4\); got \(6, 1\) and \(6, 1\)",
    ),
    "grouped_matmul": (
        lambda f: f(ones(5, 4), ones(2, 3, 6), ids(2, 3)),
        r"kernels has 3 features \(axis 1 .*\), but x has 4 \(axis 1",
    ),
    "penalise_repetition": (
        lambda f: f(ones(2, 9), ones(2, 8, dtype=bool), 1.2),
        r"seen has 8 vocabulary ids \(axis 1 .*\), but logits has 9 \(axis 1",
    ),
    "write_slots": (
        lambda f: f(ones(2, 4, 3), ones(2, 2, 5), jnp.zeros((2, 2), int)),
        r"buffer, new and slots must be .* got \(2, 4, 3\), \(2, 2, 5\) and \(2, 2\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_named_with_their_axis_and_both_numbers(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as caught:
        call(getattr(F, name))
    assert "\n" not in str(caught.value)


def test_every_public_function_of_arrays_is_checked():
    """`check_token_ids` and `check_positions` are none: they take arrays of NumPy as they are."""
    functions = [x for x in vars(F).values() if inspect.isfunction(x)]
    arrays = [
        x
        for x in functions
        if any(isinstance(spec, _ArraySpec | _TupleSpec) for spec in _argument_specs(x).values())
    ]
    sources = {x.__name__: inspect.getsource(inspect.unwrap(x)) for x in arrays}
    without = {name for name, source in sources.items() if not source.startswith("@typechecked\n")}
    assert len(arrays) > 70 and not without


NUMBERS = {
    "not whole": (lambda: F.window_mask(ids(3), ids(3), 2.5), "window must be an integer; got 2.5"),
    "nan for a size": (lambda: F.window_mask(ids(3), ids(3), math.nan), "an integer; got nan"),
    "text": (lambda: F.rope_frequencies("8"), "head_dim must be an integer; got '8'"),
    "True": (lambda: F.alibi_slopes(True), "num_heads must be an integer; got True"),
    "a shape": (lambda: F.sinusoidal_positions(ids(3), 4.0), "dim must be an integer; got 4.0"),
    "top_k": (lambda: F.route(ones(2, 4), top_k=1.5), "top_k must be an integer; got 1.5"),
    "no number": (lambda: F.rms_norm(ones(2), eps="a"), "eps must be a number; got 'a'"),
    "negative": (lambda: F.rms_norm(ones(2), eps=-1.0), "eps must be at least 0; got -1.0"),
    "base": (lambda: F.rope_frequencies(8, base=0), "base must be positive; got 0"),
    "wave": (lambda: F.sinusoidal_positions(ids(3), 4, base=-2.0), "be positive; got -2.0"),
    "slots": (lambda: F.ring_buffer_slots(ids(3), jnp.ones(1, bool), 0), "slots must .* 1; got 0"),
    "vocabulary": (lambda: F.seen_tokens(ids(3), 0), "vocab_size must be at least 1; got 0"),
    "a misspelt option": (
        lambda: F.linear_cross_entropy(ones(2, 3), ones(3, 4), ids(1, 2), chunk=1),
        r"linear_cross_entropy\(\) got an unexpected keyword argument 'chunk'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_what_their_annotations_say(name, no_checks_of_annotations):
    call, message = NUMBERS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_numbers_of_numpy_are_numbers():
    actual = F.window_mask(ids(3), ids(3), np.int64(2))
    np.testing.assert_array_equal(actual, F.window_mask(ids(3), ids(3), 2))
    np.testing.assert_array_equal(
        F.rms_norm(ones(2), eps=np.float32(0.5)), F.rms_norm(ones(2), eps=0.5)
    )


@pytest.mark.parametrize("length", [16, 3000])
def test_options_that_shape_the_program_are_refused_when_they_are_traced(
    length, no_checks_of_annotations
):
    x = ones(1, length, 1, 2)
    with pytest.raises(ValueError, match="logit_softcap must be a static number, not a traced"):
        jax.grad(lambda s: F.dot_product_attention(x, x, x, logit_softcap=s).sum())(30.0)
    with pytest.raises(ValueError, match="dropout rate must be a static number, not a traced"):
        jax.jit(lambda rate: F.dropout(x, rate, jax.random.key(0)))(0.5)


# Broadcasting that is meant


def test_a_prefix_of_each_sequence():
    lengths, at = np.array([0, 2, 4]), np.arange(4)
    exact = (at[None, :] <= at[:, None]) | (at[None, None] < lengths[:, None, None])
    prefix_mask = jax.jit(F.prefix_mask)
    np.testing.assert_array_equal(prefix_mask(at, at, lengths), exact)
    rows = np.broadcast_to(at, (3, 4))
    np.testing.assert_array_equal(prefix_mask(rows, at, lengths), exact)
    np.testing.assert_array_equal(prefix_mask(rows[None], at, lengths)[0], exact)
    np.testing.assert_array_equal(jax.vmap(prefix_mask, (None, None, 0))(at, at, lengths), exact)


# What is seen of the package


def test_the_package_shows_functions_and_types_alone():
    assert dir(F) == F.__all__ == sorted(F.__all__)
    assert {"cross_entropy", "AttentionMask", "Implementation"} <= set(dir(F))
    for name in F.__all__:
        assert not inspect.ismodule(getattr(F, name)), name
    assert {"masks", "arguments", "attention", "RING_BLOCK", "checked"}.isdisjoint(dir(F))
