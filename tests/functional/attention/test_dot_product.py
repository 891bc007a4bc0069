import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxformer.functional.attention import dot_product as attention_module
from tests.functional.jitted_functions import F

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "attention.npz"))
B, T, S, K, G, H, HV = 2, 5, 7, 3, 2, 11, 13
N = K * G
QKV = ("query", "key", "value")


dot_product_attention, attention_weights = F.dot_product_attention, F.attention_weights


def golden(*names):
    return [GOLDEN[name] for name in names]


def unchecked(function):
    """The function without the tests' shape checks, as a user calls it."""
    return inspect.unwrap(function)


def exact(query, key, value, mask=None, bias=0.0, *, scale, softcap=None, relu=False):
    """The definition in float64, one query of one head at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    *batch, T, N, _ = query.shape
    S, K = key.shape[-3:-1]
    mask = np.broadcast_to(True if mask is None else mask, (*batch, N, T, S))
    bias = np.broadcast_to(np.asarray(bias, np.float64), (*batch, N, T, S))
    output = np.zeros((*batch, T, N, value.shape[-1]))
    for *b, t, n in np.ndindex(*batch, T, N):
        b, k = tuple(b), n // (N // K)
        scores = scale * key[*b, :, k] @ query[*b, t, n]
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores = scores + bias[*b, n, t]
        weights = np.maximum(scores, 0) if relu else np.exp(scores - scores.max())
        weights = np.where(mask[*b, n, t], weights, 0)
        if weights.sum() > 0:
            output[*b, t, n] = weights / weights.sum() @ value[*b, :, k]
    return output


def causal(T):
    return F.causal_mask(jnp.arange(T), jnp.arange(T))


# Values known from elsewhere


def test_matches_torch():
    actual = dot_product_attention(*golden(*QKV))
    np.testing.assert_allclose(actual, GOLDEN["full"], atol=2e-6)


def test_matches_torch_with_mask_and_bias_and_its_gradients():
    mask, bias, weights = golden("mask", "bias", "output_gradient")

    def attention(query, key, value):
        return dot_product_attention(query, key, value, mask, bias, scale=0.2)

    actual, pull_back = jax.vjp(attention, *golden(*QKV))
    np.testing.assert_allclose(actual, GOLDEN["masked"], atol=2e-6)
    for name, gradient in zip(QKV, pull_back(weights), strict=True):
        np.testing.assert_allclose(gradient, GOLDEN[f"{name}_gradient"], atol=5e-6)


def test_soft_cap_matches_gemma_2():
    query, key, value, mask = golden(*QKV, "mask")
    options = dict(scale=0.2, logit_softcap=2.0)
    actual = dot_product_attention(3 * query, key, value, mask, **options)
    np.testing.assert_allclose(actual, GOLDEN["capped"], atol=2e-6)
    weights = attention_weights(3 * query, key, mask, **options)
    np.testing.assert_allclose(weights, GOLDEN["capped_weights"], atol=1e-6)
    uncapped = dot_product_attention(3 * query, key, value, mask, scale=0.2)
    assert np.abs(uncapped - GOLDEN["capped"]).max() > 0.1


def projected_heads(x, weight, bias):
    """Query, key and value of three heads, ``[B, T, 3, 8]``, from torch's joint projection."""
    kernels, biases = weight.reshape(3, 3, 8, 24), bias.reshape(3, 1, 1, 3, 8)
    return [np.einsum("btd,nhd->btnh", x, k) + b for k, b in zip(kernels, biases, strict=True)]


def test_matches_torch_multi_head_attention():
    """inventory row 98: heads are put side by side, then W^O mixes them.

    So W^O receives each head's output b, not an attention score: a score would not change with
    the values.
    """
    x, in_weight, in_bias, out_weight, out_bias = golden(
        "x", "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias"
    )
    query, key, value = projected_heads(x, in_weight, in_bias)
    heads = dot_product_attention(query, key, value, causal(T))
    joined = heads.reshape(2, T, 24) @ out_weight.T + out_bias.reshape(1, 1, 24)
    np.testing.assert_allclose(joined, GOLDEN["mha"], atol=2e-6)
    one_by_one = sum(heads[..., n, :] @ out_weight[:, 8 * n : 8 * (n + 1)].T for n in range(3))
    np.testing.assert_allclose(one_by_one + out_bias.reshape(1, 1, 24), joined, atol=1e-6)

    weights = attention_weights(query, key, causal(T))
    np.testing.assert_allclose(weights, GOLDEN["mha_weights"], atol=1e-6)
    doubled = dot_product_attention(query, key, 2 * value, causal(T))
    np.testing.assert_allclose(doubled, 2 * heads, rtol=1e-6)


def test_matches_jax_nn():
    query, key, value, mask, bias = golden(*QKV, "mask", "bias")
    value = value[..., :H]  # jax.nn wants one width for both
    theirs = jax.jit(functools.partial(jax.nn.dot_product_attention, scale=0.3))
    expected = theirs(query, key, value, bias[None], mask[:, None])
    actual = dot_product_attention(query, key, value, mask, bias, scale=0.3)
    np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    "options",
    [{}, {"logit_softcap": 1.5}, {"normalizer": "relu"}],
    ids=["softmax", "softcap", "relu"],
)
def test_matches_the_definition_in_float64(normal, num_kv_heads, options):
    query, key, value = normal(2, T, 6, H), *(normal(2, S, num_kv_heads, h) for h in (H, HV))
    mask, bias = normal(2, 6, T, S) > 0, normal(1, 6, T, S)
    mask[0, 1, 2] = False
    expected = exact(
        query,
        key,
        value,
        mask,
        bias,
        scale=H**-0.5,
        softcap=options.get("logit_softcap"),
        relu="normalizer" in options,
    )
    actual = dot_product_attention(query, key, value, mask, bias, **options)
    np.testing.assert_allclose(actual, expected, atol=3e-6)


def test_attend_by_hand():
    """Two keys: the second score is larger by log 3, so the weights are a quarter and the rest."""
    query, value = jnp.ones((1, 2)), jnp.array([[0.0, 8.0], [4.0, 0.0]])
    key = jnp.array([[0.0, 0.0], [np.log(3.0), 0.0]])
    np.testing.assert_allclose(F.attend(query, key, value, scale=1.0), [[3.0, 2.0]], rtol=1e-6)
    half = F.attend(query, key, value, None, None, jnp.array([[0.0, 2.0]]), scale=1.0)
    np.testing.assert_allclose(half, [[6.0, 0.0]], rtol=1e-6)


# What the source documents say


def test_one_head_of_four_tokens_step_by_step():
    """inventory row 95: queries, keys and values of four tokens, scores, weights, outputs.

    With tokens as rows a score matrix is Q K^T. The document's row of q next to a row of k does
    not multiply: q stands as a column of rows.
    """
    rng = np.random.default_rng(0)
    a = rng.normal(size=(4, 6))
    w_query, w_key, w_value = (rng.normal(size=(6, 3)) for _ in range(3))
    q, k, v = a @ w_query, a @ w_key, a @ w_value
    scores = np.array([[q[i] @ k[j] for j in range(4)] for i in range(4)]) / np.sqrt(3)
    weights = np.array([np.exp(row) / np.exp(row).sum() for row in scores])
    b = np.array([sum(weights[i, j] * v[j] for j in range(4)) for i in range(4)])

    query, key, value = (np.float32(x)[:, None] for x in (q, k, v))
    np.testing.assert_allclose(attention_weights(query, key)[0], weights, atol=1e-5)
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(dot_product_attention(query, key, value)[:, 0], b, atol=1e-5)


def test_scaling_keeps_softmax_out_of_saturation(normal):
    """inventory row 96: q.k has variance d_k, so without 1/sqrt(d_k) softmax hardly passes on
    gradients."""
    query, key = normal(400, 1, 256), normal(37, 1, 256)
    scores = np.einsum("tnh,snh->ts", query, key)
    np.testing.assert_allclose(np.var(scores), 256, rtol=0.1)

    def slope(scale):
        """Mean size of d weights / d scores, from the diagonal of softmax's Jacobian."""
        weights = attention_weights(query, key, scale=scale)
        return float(np.mean(weights * (1 - weights)))

    assert slope(256**-0.5) > 4 * slope(1.0)


def test_two_stage_heads_are_a_split_of_one_product(normal):
    """inventory row 97: Q_h = Q W^{q,h}, K_h = K W^{k,h}, V_h = V W^{v,h}.

    The document writes W^{q,h} three times. With selectors the two stages are the usual split into
    heads, which only then may share a matrix; with any matrices they collapse into one product.
    """
    x = normal(5, 6)
    w_query, w_key, w_value = normal(3, 6, 6)
    first, second = normal(2, 3, 6, 3)  # [head, stage-two matrix of q, k or v, 6, 3]

    def heads(stage_two):
        """Stage-two matrices ``[head, q or k or v, 6, 3]``."""
        q, k, v = (
            np.stack([x @ w @ w_head[i] for w_head in stage_two], axis=1)
            for i, w in enumerate((w_query, w_key, w_value))
        )
        return dot_product_attention(q, k, v)

    selectors = np.split(np.eye(6, dtype="float32"), 2, axis=1)
    by_selection = heads([[half] * 3 for half in selectors])
    by_splitting = dot_product_attention(
        *((x @ w).reshape(5, 2, 3) for w in (w_query, w_key, w_value))
    )
    np.testing.assert_allclose(by_selection, by_splitting, atol=1e-5)

    collapsed = np.stack([w_query @ first[0], w_query @ second[0]], axis=1)
    np.testing.assert_allclose(
        np.stack([x @ w_query @ first[0], x @ w_query @ second[0]], axis=1),
        np.einsum("td,dnh->tnh", x, collapsed),
        atol=2e-5,
    )
    as_printed = heads([[first[0]] * 3, [second[0]] * 3])
    assert np.abs(as_printed - heads([first, second])).max() > 0.1


def test_a_layer_of_each_token_ignores_the_others(normal):
    """inventory row 99: a layer applied to each vector ignores the relations between vectors.

    A fully connected layer over the whole sequence would not; the claim holds token by token.
    """
    x, kernel = normal(5, 3), normal(3, 3)
    by_token = jax.jit(jax.jacobian(lambda x: jnp.tanh(x @ kernel)))(x)
    mixed = jax.jit(jax.jacobian(lambda x: dot_product_attention(*[x[:, None]] * 3)[:, 0]))(x)
    influence = np.abs(by_token).max(axis=(1, 3)), np.abs(mixed).max(axis=(1, 3))
    np.testing.assert_array_equal(influence[0] > 0, np.eye(5, dtype=bool))
    assert (influence[1] > 1e-4).all()


def test_the_sign_of_the_dot_product_decides():
    """inventory row 100: alike vectors attract, orthogonal ones leave, opposite ones repel."""
    query = jnp.array([[[2.0, 1.0]]])
    key = jnp.array([[[2.0, 1.0]], [[-1.0, 2.0]], [[-2.0, -1.0]]])
    weights = attention_weights(query, key, scale=1.0)[0, 0]
    np.testing.assert_allclose(np.log(weights / weights[1]), [5.0, 0.0, -5.0], atol=1e-5)


def test_relu_shares_by_positive_scores():
    """inventory row 101: ReLU with a normalisation instead of softmax; rows of zeros are safe."""
    query = np.float32([[[1.0]], [[-1.0]]])
    key = np.float32([[[1.0]], [[3.0]], [[0.0]]])
    options = dict(scale=1.0, normalizer="relu")
    weights = attention_weights(query, key, **options)[0]
    np.testing.assert_allclose(weights, [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6)
    total = lambda q: jnp.sum(dot_product_attention(q, key, key, **options))  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(total))(query), 0.0, atol=1e-6)


def test_the_mask_belongs_on_the_scores():
    """inventory row 102: the causal mask is laid on the score matrix, before softmax.

    The document says on K and V. A key set to zero still has the weight exp(0), and one K cannot
    be masked for one query and not for another.
    """
    x = np.float32([[2, 0, 1], [0, 2, 1], [1, 1, 0], [0, 1, 2]])[:, None]
    weights = attention_weights(x, x, causal(4))[0]
    scores = np.einsum("tnh,snh->ts", x, x) / np.sqrt(3)
    tril = np.exp(scores) * np.tri(4)
    np.testing.assert_allclose(weights, tril / tril.sum(axis=-1, keepdims=True), rtol=1e-5)

    right = dot_product_attention(x, x, x, causal(4))
    seen_by_second = np.float32([1, 1, 0, 0]).reshape(4, 1, 1)
    masked_keys_and_values = dot_product_attention(x, x * seen_by_second, x * seen_by_second)
    assert np.abs(masked_keys_and_values - right)[1].max() > 0.1


def test_distances_form_a_lower_triangle_under_the_mask(normal):
    """inventory row 114: ALiBi's distances -(i - j) fill a lower triangle; what lies above never
    counts, and -(i - j) acts like j, the form [-(i - 1), ..., -1, 0] of the document."""
    query, key, value = (normal(5, 2, h) for h in (3, 3, 7))
    slopes = np.float32([0.5, 0.25]).reshape(2, 1, 1)
    distance = np.subtract.outer(np.arange(5), np.arange(5)).astype("float32")
    np.testing.assert_array_equal(distance[4], [4, 3, 2, 1, 0])
    bias = -slopes * distance[None]

    def attention(bias):
        return dot_product_attention(query, key, value, causal(5), bias)

    other = np.where(distance < 0, np.float32(9.0), bias)
    np.testing.assert_array_equal(attention(other), attention(bias))
    by_position = slopes * np.arange(5, dtype="float32")
    np.testing.assert_allclose(attention(by_position), attention(bias), atol=1e-6)


def swap_first_two(x):
    return x[np.array([1, 0, 2, 3, 4])]


def test_attention_is_equivariant_and_only_without_a_causal_mask(normal):
    """inventory row 26: the outputs do not stay where they were when tokens change places.

    Each query's output is invariant to the order of (key, value) pairs, so the layer is
    permutation-equivariant, not invariant, and with a causal mask neither.
    """
    x, query = normal(5, 2, 3), normal(5, 2, 3)
    swapped = swap_first_two(x)
    np.testing.assert_allclose(
        dot_product_attention(query, swapped, swapped),
        dot_product_attention(query, x, x),
        atol=1e-6,
    )
    plain, after = (dot_product_attention(y, y, y) for y in (x, swapped))
    np.testing.assert_allclose(after, swap_first_two(plain), atol=1e-6)
    assert np.abs(after - plain).max() > 0.1
    plain, after = (dot_product_attention(y, y, y, causal(5)) for y in (x, swapped))
    assert np.abs(after - swap_first_two(plain)).max() > 0.1


@pytest.mark.slow
def test_the_causal_mask_breaks_the_symmetry_of_earlier_tokens(normal):
    """inventory row 30: f(.., x, .., y, ..) = f(.., y, .., x, ..) fails for causal models.

    It holds for the last token of one layer, which sees a set. From two layers on the causal mask
    gives the order away, which is how models without position encodings know it: by how much
    differs, so it is a mean over 16 draws.
    """
    draws = normal(16, 5, 2, 3)

    def last_token(x, mask, num_layers):
        for _ in range(num_layers):
            x = x + dot_product_attention(x, x, x, mask)
        return x[-1]

    def changes(mask, num_layers):
        def change(x):
            swapped = last_token(swap_first_two(x), mask, num_layers)
            return jnp.abs(last_token(x, mask, num_layers) - swapped).max()

        return jax.vmap(change)(draws)

    assert changes(None, 1).max() < 1e-6 and changes(causal(5), 1).max() < 1e-6
    assert changes(None, 2).max() < 1e-5
    assert changes(causal(5), 2).mean() > 1e-2


CACHED = {
    "causal": (F.causal_mask, None),
    "window": (functools.partial(F.window_mask, window=3), None),
    "alibi": (F.causal_mask, jnp.array([0.5, 0.25, 0.125, 0.0625])),
}


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.slow
def test_one_query_over_kept_keys_is_the_last_row(normal, kind):
    """inventory row 122: keys and values of earlier tokens are kept, not computed again.

    What is saved is their computation, not a faster product of Q, K and V. The slots may be in any
    order and longer than what they hold: positions tell.
    """
    mask_of, slopes = CACHED[kind]
    query, key, value = normal(6, 4, 3), normal(6, 2, 3), normal(6, 2, 5)
    slots = jnp.array([4, 2, 7, 0, 5, 1])  # slot of each token; 3 and 6 stay unused

    def attention(query, key, value, query_positions, key_positions):
        bias = None
        if slopes is not None:
            distance = query_positions[:, None] - key_positions[None, :]
            bias = -slopes.reshape(4, 1, 1) * distance.astype(jnp.float32)[None]
        mask = mask_of(query_positions, key_positions)
        return dot_product_attention(query, key, value, mask, bias)

    @jax.jit
    def step(cache, token):
        kept_keys, kept_values, kept_positions, t = cache
        q, k, v, slot = token
        kept_keys, kept_values = kept_keys.at[slot].set(k), kept_values.at[slot].set(v)
        kept_positions = kept_positions.at[slot].set(t)
        output = attention(q[None], kept_keys, kept_values, t[None], kept_positions)[0]
        return (kept_keys, kept_values, kept_positions, t + 1), output

    empty = jnp.full((8, 2, 3), 7.0), jnp.full((8, 2, 5), 7.0), jnp.full(8, 1000), jnp.array(0)
    _, one_by_one = jax.lax.scan(step, empty, (query, key, value, slots))
    for t in range(6):
        now = jnp.arange(t + 1)
        full = attention(query[: t + 1], key[: t + 1], value[: t + 1], now, now)
        np.testing.assert_allclose(one_by_one[t], full[-1], atol=1e-6)


@pytest.mark.parametrize("num_kv_heads, equal", [(4, 8), (2, 4), (1, 2)])
@pytest.mark.slow
def test_on_a_tpu_equal_queries_stand_for_one(normal, monkeypatch, num_kv_heads, equal):
    """And nothing else: eight of them for each head of keys."""
    query, key = map(jnp.asarray, (normal(2, 1, 4, 3), normal(2, 9, num_kv_heads, 3)))
    mask, bias = jnp.arange(9)[None, None] < jnp.array([[[4]], [[7]]]), normal(4, 1, 9)
    expected = attention_module.dot_product_attention(query, key, key, mask, bias)
    monkeypatch.setattr(attention_module, "target_platform", lambda: "tpu")
    actual = attention_module.dot_product_attention(query, key, key, mask, bias)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert attention_module.num_query_copies(query, key) == equal
    assert attention_module.num_query_copies(jnp.ones((2, 3, 4, 3)), key) == 3


def test_a_sentence_seen_at_once_shows_each_token_its_past(normal):
    """inventory row 123: "A B C D" goes in at once; each row is the last row of its own prefix."""
    query, key, value = normal(4, 2, 3), normal(4, 2, 3), normal(4, 2, 5)
    together = dot_product_attention(query, key, value, causal(4))
    for t in range(1, 5):
        prefix = dot_product_attention(query[:t], key[:t], value[:t])
        np.testing.assert_allclose(together[t - 1], prefix[-1], atol=1e-6)


# Laws


@pytest.mark.parametrize("kind", ["softmax", "relu", "softcap"])
@pytest.mark.parametrize("argument", [1, 2], ids=["key", "value"])
def test_the_future_has_exactly_zero_gradient(normal, kind, argument):
    arrays = [normal(5, 2, 3), normal(5, 2, 3), normal(5, 2, 3)]
    arrays[1] = arrays[0] + 0.1 * arrays[1]  # mostly positive scores on the diagonal, for ReLU
    options = {"softmax": {}, "relu": {"normalizer": "relu"}, "softcap": {"logit_softcap": 2.0}}

    def attention(*arrays):
        return dot_product_attention(*arrays, causal(5), **options[kind])

    influence = np.abs(jax.jit(jax.jacrev(attention, argument))(*arrays)).max((1, 2, 4, 5))
    np.testing.assert_array_equal(influence * (1 - np.tri(5)), 0.0)
    if kind != "relu":  # which also cuts keys that point away, and a lone key's score
        expected = np.tri(5, dtype=bool)
        if argument == 1:
            expected[0, 0] = False  # the only key has weight 1, whatever it is
        np.testing.assert_array_equal(influence > 1e-7, expected)


@pytest.mark.slow
def test_packed_documents_do_not_leak(normal):
    segments = jnp.array([1, 1, 2, 2, 2, 0])
    positions = jnp.array([0, 1, 0, 1, 2, 0])
    mask = F.segment_mask(segments, segments) & F.causal_mask(jnp.arange(6), jnp.arange(6))
    arrays = normal(6, 2, 3), normal(6, 2, 3), normal(6, 2, 5)

    def second_document(*arrays):
        return jnp.sum(jnp.sin(dot_product_attention(*arrays, mask)[2:5]))

    for gradient in jax.grad(second_document, (0, 1, 2))(*arrays):
        np.testing.assert_array_equal(gradient[np.array([0, 1, 5])], 0.0)
        assert np.abs(gradient[3]).max() > 0
    alone = dot_product_attention(
        *(x[2:5] for x in arrays), F.causal_mask(positions[2:5], positions[2:5])
    )
    packed = dot_product_attention(*arrays, mask)[2:5]
    np.testing.assert_allclose(packed, alone, atol=1e-6)


@pytest.mark.parametrize("normalizer", ["softmax", "relu"])
@pytest.mark.slow(but=["relu"])
def test_a_query_without_keys_gives_zero_and_no_gradient(normal, normalizer):
    arrays = normal(3, 2, 3), normal(5, 2, 3), normal(5, 2, 7)
    mask = np.arange(3)[:, None] != np.ones((3, 5))

    def attention(*arrays):
        return dot_product_attention(*arrays, mask, normalizer=normalizer)

    with jax.debug_nans(True):
        np.testing.assert_array_equal(attention(*arrays)[1], 0.0)
        row, rest = (
            jax.jit(jax.grad(lambda *a, i=i: jnp.sum(jnp.sin(attention(*a)[i])), (0, 1, 2)))(
                *arrays
            )
            for i in (np.array([1]), np.array([0, 2]))
        )
    for zero, some in zip(row, rest, strict=True):
        np.testing.assert_array_equal(zero, 0.0)
        assert np.isfinite(some).all() and np.abs(some).max() > 0


def test_masked_keys_and_values_may_hold_any_finite_number(normal):
    query, key, value = normal(3, 2, 3), normal(5, 2, 3), normal(5, 2, 7)
    valid = jnp.array([True, False, True, True, False])
    row = valid.reshape(5, 1, 1)
    wild_key, wild_value = jnp.where(row, key, 1e30), jnp.where(row, value, -3e38)
    np.testing.assert_array_equal(
        dot_product_attention(query, wild_key, wild_value, F.key_padding_mask(valid)),
        dot_product_attention(query, key, value, F.key_padding_mask(valid)),
    )


@settings(max_examples=15, deadline=None)
@given(shift=st.floats(-50, 50), seed=st.integers(0, 99))
def test_a_shift_of_all_scores_changes_nothing(shift, seed):
    rng = np.random.default_rng(seed)
    query, key = (np.float32(rng.normal(size=(n, 2, 3))) for n in (3, 5))
    weights = attention_weights(query, key)
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-6)
    shifted = attention_weights(query, key, None, jnp.full((1, 1, 1), shift, jnp.float32))
    np.testing.assert_allclose(shifted, weights, rtol=2e-5)


def test_cap_then_bias_then_mask():
    query, key = jnp.array([[[100.0]]]), jnp.array([[[1.0]], [[-1.0]]])
    bias = jnp.array([[[0.0, 10.0]]])
    weights = attention_weights(query, key, None, bias, scale=1.0, logit_softcap=2.0)
    np.testing.assert_allclose(
        weights[0, 0], [1 / (1 + np.exp(6)), 1 / (1 + np.exp(-6))], rtol=1e-5
    )


def test_output_is_the_weights_times_the_values():
    query, key, value, mask, bias = golden(*QKV, "mask", "bias")
    weights = attention_weights(query, key, mask, bias)
    values = np.repeat(value, G, axis=-2)
    np.testing.assert_allclose(
        np.einsum("bnts,bsnv->btnv", weights, values),
        dot_product_attention(query, key, value, mask, bias),
        atol=1e-6,
    )


def test_grouped_heads_are_repeated_keys():
    query, key, value = golden(*QKV)
    repeated = dot_product_attention(query, *(jnp.repeat(x, G, axis=-2) for x in (key, value)))
    grouped = dot_product_attention(query, key, value)
    np.testing.assert_allclose(grouped, repeated, atol=1e-6)


# Batches


def test_a_batch_is_each_sequence_and_head():
    query, key, value, mask, bias = golden(*QKV, "mask", "bias")
    together = dot_product_attention(query, key, value, mask, bias)
    for b, n in np.ndindex(B, N):
        alone = F.attend(
            query[b, :, n], key[b, :, n // G], value[b, :, n // G], mask[b], bias[n], scale=H**-0.5
        )
        np.testing.assert_allclose(together[b, :, n], alone, atol=1e-6)
    nested = dot_product_attention(query[:, None], key[:, None], value[:, None], mask[:, None])
    flat = dot_product_attention(query, key, value, mask)
    np.testing.assert_allclose(nested[:, 0], flat, atol=1e-6)


@pytest.mark.parametrize(
    "axes",
    ["BNTS", "1NTS", "B1TS", "11TS", "BN1S", "BNT1", "BTS", "B1S", "1TS", "TS", "1S", "T1", "S"],
)
@pytest.mark.slow(but=["BN1S", "BTS", "TS", "S"])
def test_a_mask_broadcasts(normal, axes):
    sizes = {"B": 2, "N": 6, "T": 5, "S": 7, "1": 1}
    query, key, value = golden(*QKV)
    mask = normal(*(sizes[axis] for axis in axes)) > -0.3
    full = mask if len(axes) == 4 else np.expand_dims(mask, -3) if len(axes) > 1 else mask
    full = np.broadcast_to(full, (B, N, T, S))
    np.testing.assert_allclose(
        dot_product_attention(query, key, value, mask),
        dot_product_attention(query, key, value, full),
        atol=1e-6,
    )


@pytest.mark.parametrize("axes", ["BNTS", "1NTS", "NTS", "1TS", "N1S", "B1TS", "TS"])
def test_a_bias_broadcasts(normal, axes):
    sizes = {"B": 2, "N": 6, "T": 5, "S": 7, "1": 1}
    query, key, value = golden(*QKV)
    bias = normal(*(sizes[axis] for axis in axes))
    np.testing.assert_allclose(
        dot_product_attention(query, key, value, None, bias),
        dot_product_attention(query, key, value, None, np.broadcast_to(bias, (B, N, T, S))),
        atol=1e-6,
    )


def test_one_sequence_may_have_a_mask_for_each_head(normal):
    query, key, value = (x[0] for x in golden(*QKV))
    mask = normal(N, T, S) > 0
    np.testing.assert_allclose(
        dot_product_attention(query, key, value, mask),
        dot_product_attention(query[None], key[None], value[None], mask[None])[0],
        atol=1e-6,
    )


# Dtypes and extremes


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_half_precision_sums_in_float32(dtype, error):
    query, key, value = (x.astype(dtype) for x in golden(*QKV))
    mask, bias = golden("mask", "bias")
    actual = dot_product_attention(query, key, value, mask, bias.astype(dtype))
    assert actual.dtype == dtype
    expected = exact(query, key, value, mask[:, None], bias.astype(dtype), scale=H**-0.5)
    np.testing.assert_allclose(actual.astype(jnp.float32), expected, atol=error)
    assert attention_weights(query, key).dtype == jnp.float32
    # neither half precision has the number 4099: rounded, the weight would move by 6e-5
    ones = np.ones((1, 1, 4099), dtype)
    weights = attention_weights(ones, np.concatenate([ones, 0 * ones]), scale=1e-3)
    np.testing.assert_allclose(weights[0, 0, 0], 1 / (1 + np.exp(-4.099)), rtol=5e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.slow(but=["float32"])
def test_extreme_scores_neither_overflow_nor_lose_the_gradient(dtype):
    query = np.full((2, 1, 3), 3e4, dtype)
    key = np.repeat(np.array([3e4, -3e4, 0.0], dtype), 3).reshape(3, 1, 3)
    value = np.arange(1, 4).astype(dtype).reshape(3, 1, 1)
    np.testing.assert_array_equal(dot_product_attention(query, key, value), 1.0)
    total = lambda *a: dot_product_attention(*a).sum()  # noqa: E731
    gradients = jax.jit(jax.grad(total, (0, 1, 2)))(query, key, value)
    for gradient, x in zip(gradients, (query, key, value), strict=True):
        assert gradient.dtype == x.dtype and np.isfinite(gradient).all()


@pytest.mark.slow
def test_dropout_keeps_the_mean(normal):
    query, key, value = normal(1, 3, 2), normal(5, 3, 2), normal(5, 3, 7)
    expected = dot_product_attention(query, key, value)

    @jax.vmap
    def draws(dropout_key):
        return dot_product_attention(query, key, value, dropout_rate=0.25, dropout_key=dropout_key)

    outputs = draws(jax.random.split(jax.random.key(1), 1000))
    np.testing.assert_allclose(outputs.mean(axis=0), expected, atol=0.1)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1
    same = dot_product_attention(query, key, value, dropout_key=jax.random.key(1))
    np.testing.assert_array_equal(same, expected)


def test_dropout_zeroes_weights_and_scales_the_rest():
    """With the identity as values and equal scores the output shows the weights themselves."""
    query, key = np.zeros((50, 2, 3), "float32"), np.zeros((8, 2, 3), "float32")
    value = np.broadcast_to(np.eye(8, dtype="float32")[:, None], (8, 2, 8))
    weights = dot_product_attention(
        query, key, value, dropout_rate=0.25, dropout_key=jax.random.key(0)
    )
    np.testing.assert_allclose(np.unique(weights), [0.0, 1 / 8 / 0.75], rtol=1e-6)
    np.testing.assert_allclose(np.mean(weights == 0), 0.25, atol=0.05)
    assert (weights[:, 0] != weights[:, 1]).any()


# Gradients and errors


@pytest.mark.parametrize("normalizer", ["softmax", "relu"])
def test_gradients_match_finite_differences(normal, normalizer):
    arrays = normal(3, 2, 3), normal(5, 1, 3), normal(5, 1, 2), normal(2, 3, 5)

    def attention(*arrays):
        options = {"logit_softcap": 3.0, "normalizer": normalizer}
        return dot_product_attention(*arrays[:3], None, arrays[3], **options)

    check_grads(jax.jit(attention), arrays, order=1, modes=["fwd", "rev"], rtol=2e-2)


def shapes(*, T=5, S=7, N=6, K=3, H=11, value=None, batch=(2,)):
    sizes = (*batch, T, N, H), (2, S, K, 11), value or (2, S, K, 13)
    return tuple(jax.device_put(np.zeros(size, "float32")) for size in sizes)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (shapes(N=5), "must be a multiple of key/value heads; got 5 and 3"),
        (
            shapes(H=8),
            r"key has 11 features per head \(axis 3 of .* but query has 8 \(axis 3 of shape",
        ),
        (shapes(batch=(4,)), r"key has batch axes \(2,\) .* must be the \(4,\) of query"),
        (
            shapes(value=(2, 8, 3, 13)),
            r"value has 8 key positions \(axis 1 of .* but key has 7 \(axis 1",
        ),
        (
            shapes(value=(2, 7, 2, 13)),
            r"value has 2 key/value heads \(axis 2 of .* key has 3 \(axis 2",
        ),
        (
            (*shapes(), np.ones((2, 7, 5), bool)),
            r"mask of shape \(2, 7, 5\) .* \[\*batch, queries, keys\] = \(2, 5, 7\)",
        ),
        (
            (*shapes(), np.ones((6, 5, 7), bool)),
            r"mask of shape \(6, 5, 7\) .* \[\*batch, queries, keys\] = \(2, 5, 7\)",
        ),
        (
            (*shapes(), np.ones((2, 3, 5, 7), bool)),
            r"mask of shape \(2, 3, 5, 7\) .* \[\*batch, heads, queries, keys\] = \(2, 6, 5, 7\)",
        ),
        (
            (*shapes(), None, jnp.ones((1, 2, 6, 5, 7))),
            r"bias of shape \(1, 2, 6, 5, 7\) .* \[\*batch, heads, .* = \(2, 6, 5, 7\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_named(arrays, message, no_checks_of_annotations):
    with pytest.raises(ValueError, match=message):
        F.dot_product_attention(*arrays)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_softcap": -2.0}, "must be positive; got -2.0"),
        ({"dropout_rate": 1.0}, r"\[0, 1\); got 1.0"),
        ({"dropout_rate": -0.5}, r"\[0, 1\); got -0.5"),
        ({"dropout_rate": 0.5}, "0.5 needs a random key"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        unchecked(F.dot_product_attention)(*shapes(), **options)


def test_unknown_words_are_named(no_checks_of_annotations):
    x = jnp.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"normalizer .* one of \('softmax', 'relu'\); got 'tanh'"):
        F.attend(x[0], x[0], x[0], scale=1.0, normalizer="tanh")
    with pytest.raises(ValueError, match=r"implementation .* one of \('auto', .*\); got 'flash'"):
        F.dot_product_attention(x, x, x, implementation="flash")


@pytest.mark.slow
def test_weights_of_rules_are_those_of_their_arrays():
    query, key = np.float32(np.random.default_rng(0).normal(size=(2, 5, 2, 3)))
    at = jnp.arange(5)
    mask = F.AttentionMask(at, at, rule=F.MaskRule(causal=True, window=3))
    bias = F.attention_bias(F.alibi_bias, F.alibi_slopes(2), at, at)
    actual = F.attention_weights(query, key, mask, bias)
    np.testing.assert_array_equal(
        actual, F.attention_weights(query, key, mask.materialize(), bias.materialize())
    )
    assert not np.any(actual[:, ~np.asarray(mask.materialize())])
    with pytest.raises(ValueError, match="key_positions has a number for each of 5 keys"):
        F.attention_weights(query, key, mask._replace(key_positions=at[:3]))


# A scale that is learned


def slope_in_the_scale(query, key, value, scale):
    """Of the sum of squared outputs, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))

    def loss(scale):
        scores = scale * np.einsum("tnh,snh->nts", query, key)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.square(np.einsum("nts,snh->tnh", weights, value)).sum()

    return loss(scale), (loss(scale + 1e-5) - loss(scale - 1e-5)) / 2e-5


@pytest.mark.parametrize("length, implementation", [(6, "xla"), (6, "blockwise"), (256, "auto")])
@pytest.mark.slow(but=["6-xla"])
def test_a_scale_may_be_learned(length, implementation):
    """At 256 tokens "auto" goes by blocks, whose loops are told a number of Python."""
    rng = np.random.default_rng(0)
    query, key, value = (np.float32(rng.normal(size=(length, 1, 4))) for _ in "qkv")

    def loss(scale):
        output = F.dot_product_attention(
            query, key, value, scale=scale, implementation=implementation
        )
        return jnp.sum(jnp.square(output))

    expected = slope_in_the_scale(query, key, value, 0.7)
    actual = jax.jit(jax.value_and_grad(loss))(jnp.float32(0.7))
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    np.testing.assert_allclose(loss(0.7), expected[0], rtol=1e-4)


def test_a_learned_scale_has_no_axes():
    x = jnp.ones((5, 2, 4))
    with pytest.raises(ValueError, match=r"scale has 1 axis, shape \(2,\), but must have 0"):
        F.dot_product_attention(x, x, x, scale=jnp.ones(2))


@pytest.mark.parametrize("shape", [(0, 256, 2, 4), (3, 0, 256, 2, 4), (0, 5, 2, 4), (2, 0, 2, 4)])
def test_attention_of_nothing_is_nothing(shape):
    total = lambda x: F.dot_product_attention(x, x, x).sum()  # noqa: E731
    x = np.ones(shape, "float32")
    assert F.dot_product_attention(x, x, x).shape == shape
    assert jax.jit(jax.grad(total))(x).shape == shape


def test_queries_without_keys_get_zero():
    query, key = jnp.ones((3, 2, 4)), jnp.ones((0, 2, 4))
    for attention in (F.dot_product_attention, F.blockwise_attention):
        np.testing.assert_array_equal(attention(query, key, key), np.zeros((3, 2, 4)))


def test_a_lazy_causal_mask_is_its_parts():
    positions, segments = jnp.arange(6), jnp.asarray([1, 1, 1, 1, 2, 2])
    expected = F.causal_mask(positions, positions) & F.window_mask(positions, positions, 2)
    mask = F.AttentionMask.causal(positions, 2, segments)
    np.testing.assert_array_equal(mask.materialize(), expected & F.segment_mask(segments, segments))
    assert F.AttentionMask.causal(positions).rule == F.MaskRule(causal=True)


@pytest.mark.parametrize(
    "implementation, T, S, is_lazy",
    [
        ("auto", 512, 512, True),
        ("auto", 16, 16, False),
        ("auto", 1, 10**6, False),
        ("xla", 512, 512, False),
        ("blockwise", 1, 9, True),
    ],
)
def test_masks_that_layers_share_become_arrays_where_matrices_are_whole(
    implementation, T, S, is_lazy
):
    mask = F.AttentionMask(jnp.arange(T), jnp.arange(S), rule=F.MaskRule(causal=True))
    result = jax.eval_shape(lambda: F.materialize_for_xla(mask, implementation, 4))
    assert isinstance(result, F.AttentionMask) == is_lazy
    assert is_lazy or result.shape == (T, S)


def test_a_mask_of_each_head_serves_a_batch():
    """Its array has as many axes as the queries, also where positions have no batch axis."""
    rng, pattern = np.random.default_rng(0), F.BlockSparsePattern(1, 1, 2)
    query, key = (jnp.asarray(rng.normal(size=(2, 5, 2, 4)), jnp.float32) for _ in range(2))
    at, rule = jnp.arange(5), F.MaskRule(causal=True, block_sparse=pattern)
    mask = F.AttentionMask(at, at, rule=rule, head_shifts=pattern.head_shifts(2))
    array = F.block_sparse_mask(at, at, num_heads=2, block_size=1, local_blocks=1, stride=2)
    assert F.materialize_for_xla(mask, "xla", query.ndim).shape == (1, 2, 5, 5)
    np.testing.assert_array_equal(
        F.dot_product_attention(query, key, key, mask),
        F.dot_product_attention(query, key, key, array[None]),
    )
