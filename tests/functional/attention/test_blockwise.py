"""Attention by blocks is attention: values and every gradient, whatever the rules."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jaxformer.functional.attention import blockwise
from tests.functional.jitted_functions import F

WHERE = {"one by one": "cpu", "side by side": "gpu"}  # units on a CPU, and elsewhere
CAUSAL = F.MaskRule(causal=True)


@pytest.fixture(params=WHERE.values(), ids=WHERE)
def where(request, monkeypatch):
    """Units as another platform has them."""
    monkeypatch.setattr(blockwise, "target_platform", lambda: request.param)
    return request.param


def numbers(rng, *shape):
    return np.float32(rng.normal(size=shape))


def mask_of(rule, T, S, segments=(None, None), first=0, num_heads=2):
    shifts = None if rule.block_sparse is None else rule.block_sparse.head_shifts(num_heads)
    return F.AttentionMask(first + np.arange(T), np.arange(S), *segments, rule, shifts)


@st.composite
def cases(draw):
    """Arrays, rules, options and blocks."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    batch = draw(st.sampled_from([(), (2,), (2, 1)]))
    T, S = draw(st.integers(1, 23)), draw(st.integers(1, 29))
    K, G = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    H, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    arrays = (
        numbers(rng, *batch, T, K * G, H),
        numbers(rng, *batch, S, K, H),
        numbers(rng, *batch, S, K, width),
    )
    window = draw(st.none() | st.integers(1, 12))
    rule = F.MaskRule(
        causal=draw(st.booleans()),
        window=window,
        lookahead=0 if window is None else draw(st.integers(0, 5)),
        chunk=draw(st.none() | st.integers(1, 12)),
        block_sparse=draw(st.sampled_from([None, F.BlockSparsePattern(3, 1, 2)])),
    )
    segments = (None, None)
    if draw(st.booleans()):
        segments = (
            np.asarray(np.sort(rng.integers(0, 3, (*batch, T)), axis=-1)),
            np.asarray(np.sort(rng.integers(0, 3, (*batch, S)), axis=-1)),
        )
    mask = draw(st.sampled_from([None, mask_of(rule, T, S, segments, max(S - T, 0), K * G)]))
    at = max(S - T, 0) + np.arange(T), np.arange(S)
    made = [  # later: checks of annotations, which are drawn at random, have no place in a strategy
        lambda: None,
        lambda: F.attention_bias(F.alibi_bias, F.alibi_slopes(K * G), *at),
        partial(
            F.attention_bias,
            F.t5_bias,
            numbers(rng, 8, K * G),
            *at,
            head_axes=1,
            bidirectional=draw(st.booleans()),
            max_distance=12,
        ),
        partial(F.attention_bias, fire, fire_params(rng, K * G), *at, head_axes=FIRE_HEADS),
    ]
    bias = draw(st.sampled_from(made))
    options = {
        "scale": draw(st.sampled_from([None, 0.7])),
        "logit_softcap": draw(st.sampled_from([None, 0.9])),
        "normalizer": draw(st.sampled_from(["softmax", "softmax", "relu"])),
    }
    return arrays, mask, bias, options, draw(st.sampled_from([(4, 8), (8, 4), (64, 64)]))


def fire(params, query_positions, key_positions):
    return F.fire_bias(query_positions, key_positions, **params)


FIRE_HEADS = dict.fromkeys(("hidden_kernel", "hidden_bias", "c", "length"))
FIRE_HEADS |= {"out_kernel": 1, "out_bias": 0}


def fire_params(rng, heads, width=3):
    shapes = {"hidden_kernel": (1, width), "hidden_bias": (width,), "out_kernel": (width, heads)}
    params = {name: numbers(rng, *shape) for name, shape in shapes.items()}
    scales = {"c": numbers(rng) ** 2, "length": 4 + numbers(rng)}
    return params | {"out_bias": numbers(rng, heads)} | scales


def smallest_total(arrays, mask, bias, options):
    """Of what "relu" divides by: slopes are rounded to a part of it, so next to zero to nothing."""
    query, key, _ = (np.asarray(x, np.float64) for x in arrays)
    key = np.repeat(key, query.shape[-2] // key.shape[-2], axis=-2)
    scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    scores = scale * np.einsum("...tnh,...snh->...nts", query, key)
    if (cap := options["logit_softcap"]) is not None:
        scores = cap * np.tanh(scores / cap)
    scores = scores + (0.0 if bias is None else np.asarray(F.materialize(bias)))
    rule = F.materialize(mask, num_axes=query.ndim)  # None where a rule allows all
    seen = True if rule is None else np.asarray(rule)
    seen = seen[..., None, :, :] if 2 < np.ndim(seen) < query.ndim else seen
    totals = np.sum(np.where(seen, np.maximum(scores, 0.0), 0.0), axis=-1)
    return np.min(totals, where=totals > 0, initial=np.inf)


def values_and_gradients(function, arrays, bias, weights):
    """Of the weighted sum of what a function gives, for its arrays and what its bias learns."""
    learned = {name: getattr(bias, name) for name in LEARNED if hasattr(bias, name)}

    def total(arrays, learned):
        learned_bias = bias if bias is None else bias._replace(**learned)
        output = function(*arrays, learned_bias)
        return jnp.sum(output * weights), output

    (_, output), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
        arrays, learned
    )
    return output, gradients


@pytest.mark.parametrize("platform, size", [("cpu", 128), ("tpu", 512)])
def test_blocks_suit_the_platform(platform, size, monkeypatch):
    monkeypatch.setattr(blockwise, "target_platform", lambda: platform)
    x = jax.ShapeDtypeStruct((1024, 1, 8), jnp.float32)
    program = str(jax.make_jaxpr(lambda *x: blockwise.blockwise_attention(*x))(x, x, x))
    assert re.search(rf"\[(\d,)*{size},{size}\] = exp", program)


LEARNED = ("slopes", "table")


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(case=cases(), where=st.sampled_from(sorted(WHERE.values())))
def test_it_is_attention(case, where):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "target_platform", lambda: where)
        check_that_it_is_attention(case)


def check_that_it_is_attention(case):
    arrays, mask, make_bias, options, block = case
    bias = make_bias()
    assume(options["normalizer"] != "relu" or smallest_total(arrays, mask, bias, options) >= 0.05)
    query, _, value = arrays
    weights = numbers(np.random.default_rng(1), *query.shape[:-1], value.shape[-1])

    @jax.jit
    def both(arrays, bias):
        def blockwise(query, key, value, bias):
            return F.blockwise_attention(
                query, key, value, mask, bias, block_sizes=block, **options
            )

        def whole(query, key, value, bias):
            matrices = F.materialize(mask, num_axes=query.ndim), F.materialize(bias)
            return F.dot_product_attention(
                query, key, value, *matrices, implementation="xla", **options
            )

        return [values_and_gradients(f, arrays, bias, weights) for f in (blockwise, whole)]

    (output, gradients), (expected, slopes) = both(arrays, bias)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    longest = max(query.shape[-3], value.shape[-3])  # what is learned adds up so many distances
    for one, other, size in zip(gradients, slopes, (1.0, longest), strict=True):
        for actual, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            scale = max(float(jnp.abs(wanted).max()), size)
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * scale)


def test_by_hand():
    """In float64, one query of one head at a time."""
    rng = np.random.default_rng(0)
    T, N, H = 13, 4, 3
    query, key, value = numbers(rng, T, N, H), numbers(rng, T, 2, H), numbers(rng, T, 2, 5)
    segments = np.asarray([1] * 5 + [2] * 8)
    mask = mask_of(F.MaskRule(causal=True, window=6), T, T, (segments, segments))
    actual = F.blockwise_attention(query, key, value, mask, scale=0.4, block_sizes=(4, 4))
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    for t, n in np.ndindex(T, N):
        seen = [s for s in range(T) if t - 6 < s <= t and segments[s] == segments[t]]
        weights = np.exp([0.4 * q[t, n] @ k[s, n // 2] for s in seen])
        expected = sum(w * v[s, n // 2] for w, s in zip(weights, seen, strict=True)) / weights.sum()
        np.testing.assert_allclose(actual[t, n], expected, atol=1e-6)


SEEN = {
    "causal": (F.MaskRule(causal=True), slice(0, 8)),
    "window": (F.MaskRule(causal=True, window=3), slice(4, 8)),
    "to both sides": (F.MaskRule(window=3, lookahead=2), slice(4, 12)),
    "chunk": (F.MaskRule(chunk=8), slice(0, 8)),
    # Remote blocks are number 3, which comes later, and for the other head 1, which is local.
    "block-sparse": (
        F.MaskRule(causal=True, block_sparse=F.BlockSparsePattern(4, 1, 4)),
        slice(4, 8),
    ),
}


@pytest.mark.parametrize("rule, seen", SEEN.values(), ids=SEEN)
@pytest.mark.slow
def test_blocks_in_which_nothing_is_seen_are_not_looked_at(rule, seen, where):
    """What stands in them may be anything, even NaN, forwards and backwards."""
    rng = np.random.default_rng(0)
    arrays = numbers(rng, 2, 2, 3), numbers(rng, 16, 2, 3), numbers(rng, 16, 2, 3)
    mask = mask_of(rule, 2, 16, first=6)  # blocks of 4 keys; the queries stand in the second

    @jax.jit
    def run(query, key, value):
        function = partial(F.blockwise_attention, mask=mask, block_sizes=(2, 4))
        return jax.value_and_grad(lambda *x: jnp.sum(function(*x) ** 2), argnums=(0, 1, 2))(
            query, key, value
        )

    query, *key_and_value = arrays
    blank = [jnp.full_like(x, jnp.nan).at[seen].set(x[seen]) for x in key_and_value]
    (value, gradients), (expected, wanted) = run(query, *blank), run(*arrays)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for actual, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(actual, other, atol=1e-6)
    # A condition in every loop, not a choice between two results that are both computed.
    assert str(jax.make_jaxpr(run)(*arrays)).count(" cond[") == 2


def test_documents_that_are_elsewhere_are_not_looked_at():
    rng = np.random.default_rng(0)
    query, key = numbers(rng, 16, 1, 3), numbers(rng, 16, 1, 3)
    segments = jnp.repeat(np.arange(1, 5), 4)
    mask = mask_of(F.MaskRule(), 16, 16, (segments, segments))
    value = jnp.where((segments == 3)[:, None, None], jnp.nan, key)
    actual = F.blockwise_attention(query, key, value, mask, block_sizes=(4, 4))
    assert bool(np.all(np.isnan(actual[8:12]))) and not bool(np.any(np.isnan(actual[:8])))


def test_who_sees_nothing_says_nothing():
    rng = np.random.default_rng(0)
    query, key, value = (numbers(rng, 5, 2, 3) for _ in range(3))
    mask = mask_of(CAUSAL, 5, 5, first=-3)  # the first three queries stand before all keys
    output, pull = jax.vjp(partial(F.blockwise_attention, mask=mask), query, key, value)
    np.testing.assert_array_equal(output[:3], 0.0)
    gradients = pull(jnp.ones_like(output))
    assert all(bool(np.all(np.isfinite(x))) for x in gradients)
    np.testing.assert_array_equal(gradients[0][:3], 0.0)


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_with_its_square():
    """Working space of values and gradients, as the compiler has it."""

    def working_space(T):
        shapes = [jax.ShapeDtypeStruct((T, 2, 16), jnp.float32)] * 3

        def total(query, key, value):
            mask = mask_of(CAUSAL, T, T)
            return jnp.sum(F.dot_product_attention(query, key, value, mask))

        program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert working_space(8192) < 2.2 * working_space(4096)
    assert working_space(8192) < 8192**2  # a fourth of the scores of one head


@pytest.mark.slow
def test_dropout_is_that_of_its_key():
    rng = np.random.default_rng(0)
    arrays = [numbers(rng, 9, 2, 3) for _ in range(3)]
    rate, mask = 0.4, mask_of(CAUSAL, 9, 9)

    @jax.jit
    def drop(key, *arrays):
        return F.blockwise_attention(
            *arrays, mask, dropout_rate=rate, dropout_key=key, block_sizes=(4, 4)
        )

    key, other = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(drop(key, *arrays), drop(key, *arrays))
    assert float(np.abs(drop(key, *arrays) - drop(other, *arrays)).max()) > 0.1
    check_grads(partial(drop, key), arrays, order=1, modes=["rev"], eps=1e-2, rtol=5e-3)
    many = jax.vmap(drop, (0, None, None, None))(jax.random.split(key, 800), *arrays)
    np.testing.assert_allclose(
        jnp.mean(many, axis=0), F.blockwise_attention(*arrays, mask), atol=0.15
    )


@pytest.mark.parametrize("options", [{}, dict(normalizer="relu"), dict(logit_softcap=0.8)])
@pytest.mark.slow
def test_each_block_of_each_head_of_each_row_drops_its_own(options, where):
    """Values that are rows of the identity show the weights themselves."""
    rng, T, rate = np.random.default_rng(0), 16, 0.4
    query, key = numbers(rng, 3, T, 4, 3), numbers(rng, 3, T, 2, 3)
    value = np.broadcast_to(np.eye(T)[:, None], (3, T, 2, T))

    def weights(**more):
        output = F.blockwise_attention(query, key, value, block_sizes=(8, 8), **options, **more)
        return np.asarray(jnp.moveaxis(output, 2, 1)).reshape(12, T, T)

    whole, dropped = weights(), weights(dropout_rate=rate, dropout_key=jax.random.key(0))
    seen = whole > 0
    gone = (dropped == 0) & seen
    np.testing.assert_allclose(np.where(gone, 0, whole / (1 - rate)), dropped, rtol=1e-5)
    assert abs(gone[seen].mean() - rate) < 0.05
    tiles = [tile for x in gone | ~seen for half in np.split(x, 2) for tile in np.split(half, 2, 1)]
    assert len({tile.tobytes() for tile in tiles}) == 12 * 4


WRONG = {
    "dropout without a key": (dict(dropout_rate=0.1), "rate 0.1 needs a random key"),
    "all dropped": (dict(dropout_rate=1.0), r"rate must be in \[0, 1\); got 1.0"),
    "an unknown normalizer": (dict(normalizer="softmx"), "normalizer must be one of .*'softmx'"),
    "no room for scores": (dict(logit_softcap=0.0), "logit_softcap must be positive; got 0.0"),
}


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused_alike(
    options, message, implementation, no_checks_of_annotations
):
    x = np.ones((3, 1, 2))
    with pytest.raises(ValueError, match=message):
        F.dot_product_attention(x, x, x, implementation=implementation, **options)


def of_t5(table, query_positions, key_positions):
    return F.t5_bias(table, query_positions, key_positions, bidirectional=False, max_distance=9)


def keys_first(params, query_positions, key_positions):
    return np.zeros((len(key_positions), len(params)))


AT = np.arange(3, dtype=np.int32)
BLOCK_SPARSE = F.MaskRule(block_sparse=F.BlockSparsePattern(1, 1, 2))
OTHERS = {
    "segments of one side": (
        dict(mask=F.AttentionMask(AT, AT, query_segments=AT)),
        "AttentionMask needs both query_segments and key_segments, or neither",
    ),
    "fewer keys": (
        dict(mask=F.AttentionMask(AT, AT[:2])),
        r"AttentionMask.key_positions has a number for each of 3 keys; got shape \(2,\)",
    ),
    "more segments": (
        dict(mask=F.AttentionMask(AT, AT, np.arange(4), AT)),
        r"query_segments has a number for each of 3 queries; got shape \(4,\)",
    ),
    "no shifts": (
        dict(mask=F.AttentionMask(AT, AT, rule=BLOCK_SPARSE)),
        "AttentionMask needs both head_shifts and rule.block_sparse, or neither",
    ),
    "shifts of key heads": (
        dict(mask=F.AttentionMask(AT, AT, rule=BLOCK_SPARSE, head_shifts=AT[:1])),
        r"head_shifts has a number for each of 2 query heads; got shape \(1,\)",
    ),
    "slopes of key heads": (
        dict(bias=F.attention_bias(F.alibi_bias, np.ones(1), AT, AT)),
        r"params have a number for each of 2 query heads along axis 0; got shape \(1,\)",
    ),
    "a table of key heads": (
        dict(bias=F.attention_bias(of_t5, np.ones((8, 1)), AT, AT, head_axes=1)),
        r"params have a number for each of 2 query heads along axis 1; got shape \(8, 1\)",
    ),
    "another order": (
        dict(bias=F.attention_bias(keys_first, np.ones((2, 5)), AT, np.arange(3), head_axes=0)),
        r"keys_first gives a bias .* 3 queries and 3 keys; got shape \(3, 2\)",
    ),
}


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("rules, message", OTHERS.values(), ids=OTHERS)
def test_rules_about_others_are_refused(rules, message, implementation, no_checks_of_annotations):
    query, x = np.ones((3, 2, 2)), np.ones((3, 1, 2))
    with pytest.raises(ValueError, match=message):
        F.dot_product_attention(query, x, x, implementation=implementation, **rules)


WRONG_SIGHTS = {
    "lookahead alone": (dict(lookahead=2), "got lookahead=2 and window=None"),
    "behind": (dict(window=2, lookahead=-1), "got lookahead=-1 and window=2"),
    "no window": (dict(window=0), "window must be at least 1; got 0"),
    "no chunk": (dict(chunk=0), "chunk must be at least 1; got 0"),
}


@pytest.mark.parametrize("fields, message", WRONG_SIGHTS.values(), ids=WRONG_SIGHTS)
def test_sights_of_nothing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        F.MaskRule(**fields)


@pytest.mark.slow
def test_gradients_of_gradients():
    rng = np.random.default_rng(0)
    arrays = [numbers(rng, 5, 2, 3) for _ in range(3)]
    mask = mask_of(CAUSAL, 5, 5)

    def function(*inputs):
        return F.blockwise_attention(*map(jnp.asarray, inputs), mask, block_sizes=(2, 4))

    check_grads(function, arrays, order=2, modes=["rev"], eps=1e-2, rtol=1e-2)


@pytest.mark.slow
def test_half_precision_is_summed_in_float32():
    rng = np.random.default_rng(0)
    arrays = [numbers(rng, 40, 2, 8).astype(jnp.bfloat16) for _ in range(3)]
    mask = mask_of(CAUSAL, 40, 40)
    actual = F.blockwise_attention(*arrays, mask, block_sizes=(8, 8))
    exact = F.dot_product_attention(*(x.astype(jnp.float32) for x in arrays), mask)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(actual.astype(jnp.float32), exact, atol=0.02)

    def slopes(function, arrays):
        def total(*x):
            return jnp.sum(jnp.sin(function(*x, mask).astype(jnp.float32)))

        return jax.grad(total, argnums=(0, 1, 2))(*arrays)

    wide = [x.astype(jnp.float32) for x in arrays]
    gradients = slopes(partial(F.blockwise_attention, block_sizes=(8, 8)), arrays)
    wanted = slopes(F.dot_product_attention, wide)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert gradient.dtype == jnp.bfloat16
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(gradient.astype(jnp.float32), other, atol=0.02 * scale)


@pytest.mark.slow
def test_on_devices_that_have_rows_each():
    """Loops carry what differs between devices, and the table's gradient is added up over them."""
    rng = np.random.default_rng(0)
    arrays = [numbers(rng, 4, 10, 2, 3) for _ in range(3)]
    table, at = numbers(rng, 8, 2), np.arange(10)

    def total(table, query, key, value):
        bias = F.attention_bias(of_t5, table, at, at, head_axes=1)
        mask = mask_of(CAUSAL, 10, 10)
        return jnp.sum(
            F.blockwise_attention(query, key, value, mask, bias, block_sizes=(4, 4)) ** 2
        )

    def per_device(table, *arrays):
        def local_total(table):
            return jax.lax.psum(total(table, *arrays), "data")

        return jax.value_and_grad(local_total)(table)

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    rows = P("data")
    spread = jax.shard_map(
        per_device, mesh=mesh, in_specs=(P(), rows, rows, rows), out_specs=(P(), P())
    )
    actual, gradient = jax.jit(spread)(table, *arrays)
    expected, wanted = jax.jit(jax.value_and_grad(total))(table, *arrays)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)
