from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.jitted_functions import F

RNG = np.random.default_rng(0)
R, D, H, E = 11, 5, 3, 4


def draw(*shape):
    return np.float32(RNG.normal(size=shape))


X, KERNELS, LOGITS = draw(R, D), draw(E, D, H), draw(R, E)


def by_hand(x, logits, kernels, top_k):
    """Token by token and expert by expert, in float64."""
    x, logits, kernels = (np.asarray(a, np.float64) for a in (x, logits, kernels))
    y = np.zeros((len(x), kernels.shape[-1]))
    for t in range(len(x)):
        p = np.exp(logits[t]) / np.exp(logits[t]).sum()
        chosen = np.argsort(-p)[:top_k]
        for e in chosen:
            y[t] += p[e] / p[chosen].sum() * (x[t] @ kernels[e])
    return y


@partial(jax.jit, static_argnames="top_k")
def mixture(x, logits, kernels, top_k=2):
    return F.mixture_of_experts(
        x,
        F.route(logits, top_k=top_k),
        lambda rows, sizes: F.grouped_matmul(rows, kernels, sizes),
        num_experts=len(kernels),
    )


SQUARE = draw(E, D, D)


@pytest.mark.parametrize("top_k", [1, 2, E])
def test_a_mixture_is_the_weighted_sum_of_its_experts(top_k):
    np.testing.assert_allclose(
        mixture(X, LOGITS, SQUARE, top_k), by_hand(X, LOGITS, SQUARE, top_k), atol=1e-5
    )


@pytest.mark.parametrize("top_k", [1, 3])
def test_weights_may_multiply_what_experts_read(top_k):
    """Llama 4: in float64 token by token, with experts that are not linear; gradients too."""

    def answer(x, logits, kernels):
        return F.mixture_of_experts(
            x,
            F.route(logits, top_k=top_k, score="sigmoid", renormalise=False),
            lambda rows, sizes: F.grouped_matmul(rows, kernels, sizes) ** 2,
            num_experts=E,
            weighs_inputs=True,
        )

    x, logits, kernels = (np.asarray(a, np.float64) for a in (X, LOGITS, SQUARE))
    y, slopes = np.zeros((R, D)), np.zeros((R, E))
    for t in range(R):
        for e in np.argsort(-logits[t])[:top_k]:
            weight = 1 / (1 + np.exp(-logits[t, e]))
            y[t] += (weight * x[t] @ kernels[e]) ** 2
            slopes[t, e] = 2 * weight**2 * (1 - weight) * ((x[t] @ kernels[e]) ** 2).sum()
    np.testing.assert_allclose(answer(X, LOGITS, SQUARE), y, rtol=2e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda logits: answer(X, logits, SQUARE).sum()))(LOGITS)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-6)


def test_weights_sum_to_one_only_if_asked():
    routing = F.route(LOGITS, top_k=2, renormalise=False)
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    np.testing.assert_allclose(routing.weights, -np.sort(-p, axis=-1)[:, :2], rtol=1e-6)
    np.testing.assert_array_equal(routing.expert_ids, np.argsort(-p, axis=-1)[:, :2])
    np.testing.assert_allclose(F.route(LOGITS, top_k=2).weights.sum(-1), 1, rtol=1e-6)


def test_the_gradient_of_tokens_is_gathered_and_summed_in_float32():
    """A scatter-add would sum a token's eight parts in bfloat16, on a GPU in any order."""
    top_k, scales = 8, jnp.asarray(RNG.normal(size=8), jnp.bfloat16)
    routing = F.route(draw(R, 8), top_k=top_k)
    upward = np.asarray(draw(R, D), jnp.bfloat16)

    def scaled(rows, sizes):
        expert = jnp.sum(np.arange(len(rows))[:, None] >= jnp.cumsum(sizes)[None], axis=-1)
        return rows * scales[expert][:, None]

    def gradient(x):
        return jax.vjp(lambda x: F.mixture_of_experts(x, routing, scaled, num_experts=8), x)[1](
            upward
        )[0]

    x = np.asarray(draw(R, D), jnp.bfloat16)
    assert "scatter" not in str(jax.make_jaxpr(gradient)(x))
    weights, parts = np.asarray(routing.weights, np.float64), np.float64(scales)[routing.expert_ids]
    of_rows = np.asarray(weights[..., None] * np.float64(upward)[:, None], jnp.bfloat16)
    of_rows = np.asarray(np.float64(of_rows) * parts[..., None], jnp.bfloat16)  # as it is stored
    expected = np.float64(of_rows).sum(1)
    np.testing.assert_allclose(np.float64(gradient(x)), expected, rtol=2**-8, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(E)))
def test_the_order_of_experts_means_nothing(order):
    order = np.asarray(order)
    np.testing.assert_allclose(
        mixture(X, LOGITS[:, order], SQUARE[order]), mixture(X, LOGITS, SQUARE), atol=1e-5
    )


def test_bfloat16_stays_and_is_summed_in_float32():
    y = mixture(X.astype(jnp.bfloat16), LOGITS, SQUARE.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), by_hand(X, LOGITS, SQUARE, 2), atol=0.1)


@pytest.mark.parametrize("top_k", [0, E + 1])
def test_impossible_choices_are_refused(top_k):
    with pytest.raises(ValueError, match=f"top_k must be from 1 to .* 4; got {top_k}"):
        F.route(LOGITS, top_k=top_k)


def routed_by_hand(logits, bias, top_k, groups, kept, group_score, score, renormalise, scale):
    """One token, in float64, by sorting."""
    logits = np.asarray(logits, np.float64)
    exp = np.exp(logits)
    scores = exp / exp.sum() if score == "softmax" else 1 / (1 + np.exp(-logits))
    selection = scores + bias
    by_group = [sorted(group, reverse=True) for group in np.split(selection, groups)]
    worth = [g[0] if group_score == "max" else g[0] + g[1] for g in by_group]
    best = sorted(range(groups), key=lambda g: -worth[g])[:kept]
    size = len(logits) // groups
    candidates = [e for e in range(len(logits)) if e // size in best]
    chosen = sorted(candidates, key=lambda e: -selection[e])[:top_k]
    weights = scores[chosen] / (scores[chosen].sum() if renormalise else 1)
    return chosen, weights * scale


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "groups, kept, group_score", [(1, 1, "max"), (4, 2, "max"), (4, 2, "top_2"), (3, 1, "top_2")]
)
@pytest.mark.slow(but=["4-2-top_2-sigmoid", "1-1-max-softmax"])
def test_a_router_chooses_by_biased_scores_in_the_best_groups(score, groups, kept, group_score):
    logits, bias = draw(1000, 12), 0.3 * draw(12)
    options = dict(top_k=3, score=score, renormalise=groups != 3, scale=1 + groups / 2)
    routing = F.route(
        logits,
        selection_bias=bias,
        num_groups=groups,
        top_k_groups=kept,
        group_score=group_score,
        **options,
    )
    for t in range(len(logits)):
        chosen, weights = routed_by_hand(
            logits[t], bias, groups=groups, kept=kept, group_score=group_score, **options
        )
        assert routing.expert_ids[t].tolist() == chosen
        np.testing.assert_allclose(routing.weights[t], weights, rtol=2e-6)


def test_the_bias_of_the_choice_has_no_gradient_and_no_weight():
    bias = np.float32([0.0, 0.0, 5.0, 0.0])

    def weights(logits, bias):
        routing = F.route(logits, top_k=1, selection_bias=bias, renormalise=False)
        assert routing.expert_ids.shape == (R, 1)
        return jnp.sum(routing.weights)

    total, gradients = jax.value_and_grad(weights, argnums=(0, 1))(LOGITS, bias)
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    np.testing.assert_allclose(total, p[:, 2].sum(), rtol=1e-5)
    expected = p * (p[:, 2:3] * -1) + np.eye(E)[2] * p[:, 2:3]
    np.testing.assert_allclose(gradients[0], expected, atol=1e-6)
    np.testing.assert_array_equal(gradients[1], 0)


def test_logits_and_a_bias_choose_what_sigmoids_weigh():
    """Kolibri 1, in float64; the scores and the same bias choose other experts."""
    bias = np.float32(RNG.normal(size=E))
    options = dict(top_k=2, score="sigmoid", renormalise=False, scale=1.5)
    routing = F.route(LOGITS, selection_bias=bias, selection="logits", **options)
    wide = np.float64(LOGITS)
    chosen = np.argsort(-(wide + bias), axis=-1)[:, :2]
    np.testing.assert_array_equal(routing.expert_ids, chosen)
    weights = 1.5 / (1 + np.exp(-np.take_along_axis(wide, chosen, -1)))
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)
    assert (F.route(LOGITS, selection_bias=bias, **options).expert_ids != chosen).any()


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_an_expert_takes_the_first_tokens_of_each_row(capacity):
    routing = F.route(draw(3, R, E), top_k=2)
    weights = F.drop_late_tokens(*routing, num_experts=E, capacity=capacity)
    expected, dropped = np.array(routing.weights), 0
    for row, ids in enumerate(np.asarray(routing.expert_ids)):
        taken = [0] * E
        for t in range(R):
            for k, e in enumerate(ids[t]):
                taken[e] += 1
                if taken[e] > capacity:
                    expected[row, t, k] = 0
                    dropped += 1
    np.testing.assert_array_equal(weights, expected)
    assert dropped
    early = F.drop_late_tokens(*(x[:, :5] for x in routing), num_experts=E, capacity=capacity)
    np.testing.assert_array_equal(early, weights[:, :5])  # whatever comes later
    whole = F.drop_late_tokens(*routing, num_experts=E, capacity=R)
    np.testing.assert_array_equal(whole, routing.weights)


def test_what_an_expert_does_not_take_has_no_gradient():
    ids = np.asarray([[1], [1], [0], [1]])
    gradient = jax.grad(
        lambda w: jnp.sum(F.drop_late_tokens(ids, w, num_experts=2, capacity=2) ** 2)
    )(np.full((4, 1), 0.5))
    np.testing.assert_array_equal(gradient, [[1], [1], [1], [0]])
    with pytest.raises(ValueError, match="capacity must be at least 1; got 0"):
        F.drop_late_tokens(ids, np.ones((4, 1)), num_experts=2, capacity=0)


def mixed_by_hand(logits, top_k, jitter):
    """One token, in float64: experts, their weights, and how clear the closest decision was."""
    left, experts, weights, margins = dict(enumerate(np.float64(logits))), [], [], []
    for _ in range(top_k):
        best = max(left, key=left.get)
        distance = {e: (left[best] - x) / max(abs(x), left[best]) for e, x in left.items()}
        rivals = [e for e in left if distance[e] <= 2 * jitter]
        margins += [abs(x - 2 * jitter) for x in distance.values()]
        margins += [left[best] - x for e, x in left.items() if e != best]
        experts.append(best)
        weights.append(np.exp(left[best]) / sum(np.exp(left[e]) for e in rivals))
        del left[best]
    return experts, weights, min(margins)


@pytest.mark.parametrize("top_k, jitter", [(2, 0.25), (2, 0.01), (3, 0.5), (1, 2.0)])
def test_sparse_mixer_weighs_one_expert_after_another_among_its_rivals(top_k, jitter):
    logits = draw(1000, 9)
    routing, clear = F.sparse_mixer(logits, top_k=top_k, jitter=jitter), 0
    for t in range(len(logits)):
        experts, weights, margin = mixed_by_hand(logits[t], top_k, jitter)
        if margin > 1e-5:
            assert routing.expert_ids[t].tolist() == experts
            np.testing.assert_allclose(routing.weights[t], weights, rtol=2e-6)
            clear += 1
    assert clear > 950


def test_rivals_of_a_sparse_mixer():
    """By hand: 3 of 4 is a quarter away, 2 of 4 a half; below 0 the larger magnitude divides."""
    logits = jnp.log(2.0) * np.float32([[4, 3, 2, -9], [-4, -3, -2, -9]])
    routing = F.sparse_mixer(logits, top_k=2, jitter=0.125)
    np.testing.assert_array_equal(routing.expert_ids, [[0, 1], [2, 1]])
    np.testing.assert_allclose(routing.weights, [[16 / 24, 1], [1, 8 / 12]], rtol=1e-6)
    routing = F.sparse_mixer(logits, top_k=2, jitter=0.17)  # 2 of 3, and -3 of -2: a third
    np.testing.assert_allclose(routing.weights, [[16 / 24, 8 / 12], [4 / 6, 8 / 12]], rtol=1e-6)
    equal = F.sparse_mixer(np.zeros((1, 4)), top_k=2, jitter=0.01)
    np.testing.assert_allclose(equal.weights, [[1 / 4, 1 / 3]])
    with pytest.raises(ValueError, match="top_k must be from 1 to .* 4; got 5"):
        F.sparse_mixer(logits, top_k=5, jitter=0.1)
    with pytest.raises(ValueError, match=r"jitter must be 0 or more; got -0\.1"):
        F.sparse_mixer(logits, top_k=2, jitter=-0.1)


@pytest.mark.slow
def test_the_gradient_of_a_sparse_mixer_is_that_of_its_weights():
    logits = jnp.log(2.0) * np.float32([4, 3, 2, -9])
    gradient = jax.grad(lambda x: F.sparse_mixer(x, top_k=2, jitter=0.125).weights[0])(logits)
    np.testing.assert_allclose(gradient, [2 / 9, -2 / 9, 0, 0], atol=1e-6)
    zero = jax.grad(lambda x: F.sparse_mixer(x, top_k=2, jitter=0.1).weights[1])(np.zeros(3))
    np.testing.assert_allclose(zero, [0, 1 / 4, -1 / 4], atol=1e-6)


@pytest.mark.parametrize(
    "groups, message",
    [
        (dict(num_groups=3), "num_groups must divide the 4 experts"),
        (dict(num_groups=2, top_k_groups=3), "top_k_groups=3"),
        (dict(num_groups=4, top_k_groups=1), "top_k must be from 1 to the number of experts, 1"),
        (dict(num_groups=4, top_k_groups=2), "group_score='top_2' .* two experts or more; got 1"),
        (dict(score="tanh"), r"score must be one of \('softmax', 'sigmoid'\); got 'tanh'"),
        (dict(group_score="mean"), r"group_score must be one of \('max', 'top_2'\); got 'mean'"),
    ],
)
def test_impossible_groups_are_refused(groups, message, no_checks_of_annotations):
    with pytest.raises(ValueError, match=message):
        F.route(LOGITS, top_k=2, **groups)


def test_groups_for_no_token():
    routing = F.route(LOGITS[:0], top_k=2, num_groups=2, top_k_groups=1)
    assert routing.expert_ids.shape == routing.weights.shape == (0, 2)


def test_unknown_scores_have_no_losses(no_checks_of_annotations):
    with pytest.raises(ValueError, match=r"score must be one of .*; got 'tanh'"):
        totals(LOGITS, score="tanh")


# Losses


def totals(logits, mask=None, top_k=2, **options):
    expert_ids = F.route(logits, top_k=top_k).expert_ids
    return F.router_totals(logits, expert_ids, mask=mask, **options)


def test_an_even_load_costs_one_and_a_collapsed_one_the_number_of_experts():
    even = np.asarray(np.eye(E) * 30 + np.roll(np.eye(E), 1, axis=1) * 30)[None]
    loss = F.load_balance_loss(totals(even))
    np.testing.assert_allclose(loss, 1, rtol=1e-5)
    all_to_one = np.broadcast_to(np.asarray([50.0, 0, 0, 0]), (1, R, E))
    only = F.load_balance_loss(totals(all_to_one, top_k=1))
    np.testing.assert_allclose(only, E, rtol=1e-5)


def test_losses_are_those_of_the_papers():
    logits = np.asarray(draw(2, R, E), np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-p, axis=-1)[..., :2]
    share = np.bincount(best.ravel(), minlength=E) / best.size
    router_totals = totals(np.float32(logits))
    balance = E * (share * p.mean((0, 1))).sum()
    np.testing.assert_allclose(F.load_balance_loss(router_totals), balance, rtol=1e-5)
    square = (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    np.testing.assert_allclose(F.router_z_loss(router_totals), square, rtol=1e-5)


def test_flat_tokens_have_the_totals_of_rows():
    """As other libraries have a router's logits: [tokens, experts]."""
    logits, mask = draw(2, R, E), np.asarray(RNG.random((2, R)) > 0.4)
    flat = logits.reshape(-1, E)
    for counted, in_flat in ((None, None), (mask, mask.reshape(-1))):
        for a, b in zip(totals(flat, in_flat), totals(logits, counted), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-5)
    by_layer = totals(logits, num_token_axes=1)
    assert by_layer.expert_counts.shape == (2, E)


@pytest.mark.parametrize("axes", [0, 2, -1])
def test_axes_of_tokens_are_those_that_there_are(axes):
    with pytest.raises(ValueError, match=rf"from 1 to 1 for logits \(6, 4\); got {axes}\."):
        totals(draw(6, 4), num_token_axes=axes)


@pytest.mark.parametrize(
    "experts, got",
    [(lambda rows, _: rows[:1], r"\(1, 4\)"), (lambda rows, _: rows[:, :1], r"\(12, 1\)"),
     (lambda rows, _: None, "None")],
)  # fmt: skip
def test_experts_give_a_row_for_each_row(experts, got):
    x = draw(6, 4)
    with pytest.raises(ValueError, match=rf"must return rows of shape \(12, 4\); got {got}\."):
        F.mixture_of_experts(x, F.route(x, top_k=2), experts, num_experts=4)
    with pytest.raises(ValueError, match="routing must be a Routing; got tuple"):
        F.mixture_of_experts(x, (x, x), experts, num_experts=4)


@pytest.mark.parametrize("loss", [F.load_balance_loss, F.router_z_loss])
def test_losses_are_of_totals(loss):
    with pytest.raises(ValueError, match=f"{loss.__name__}: totals must be a RouterTotals; got "):
        loss(draw(6, 4))


@pytest.mark.slow
def test_totals_of_parts_add_up_and_masked_tokens_do_not_count():
    logits = draw(3, 2, R, E)  # three layers
    mask = np.asarray(RNG.random((2, R)) > 0.4)
    whole = totals(logits, mask)
    parts = [totals(logits[:, i : i + 1], mask[i : i + 1]) for i in range(2)]
    for a, b in zip(jax.tree.map(jnp.add, *parts), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert whole.expert_counts.shape == (3, E) and whole.num_tokens.shape == (3,)
    changed = jnp.where(mask[..., None], logits, 9.0 * logits[::-1])
    for a, b in zip(totals(changed, mask), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.slow
def test_only_probabilities_pass_the_gradient_of_the_balance():
    logits = RNG.normal(size=(R, E))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    share = np.bincount(np.argsort(-logits, axis=-1)[:, :2].ravel(), minlength=E) / (2 * R)
    expected = E / R * p * (share - (p @ share)[:, None])
    gradient = jax.grad(lambda x: F.load_balance_loss(totals(x[None])))(np.float32(logits))
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_sigmoids_are_divided_by_their_sum():
    logits = np.asarray(draw(2, R, E), np.float64)
    expert_ids = F.route(np.float32(logits), top_k=2, score="sigmoid").expert_ids
    p = 1 / (1 + np.exp(-logits))
    sigmoid_totals = F.router_totals(np.float32(logits), expert_ids, score="sigmoid")
    expected = (p / p.sum(-1, keepdims=True)).sum((0, 1))
    np.testing.assert_allclose(sigmoid_totals.probability_sums, expected, rtol=1e-5)


@pytest.mark.parametrize("logit", [-20.0, -50.0, -85.0])
@pytest.mark.slow(but=["-50.0", "-85.0"])
def test_gradients_of_small_scores_are_those_of_float64(logit):
    """Scores far below 1 were divided by the square of their sum, which is 0 in float32."""
    logits = np.array([[logit, logit + 1, logit - 2, logit]], np.float32)
    slope = np.array([1.0, 2.0])

    def loss(x):
        return jnp.sum(F.route(x, top_k=2, score="sigmoid").weights[0] * slope.astype(np.float32))

    gradient = jax.grad(loss)(np.asarray(logits))
    scores = 1 / (1 + np.exp(-np.float64(logits[0])))
    chosen = [1, 0]
    s, total = scores[chosen], scores[chosen].sum()
    expected = np.zeros(4)
    for i, expert in enumerate(chosen):  # d(s_j / max(total, 1e-20)) / dl_i
        by_weight = (np.arange(2) == i) / max(total, 1e-20)
        by_weight = by_weight - (s / total**2 if total > 1e-20 else 0)
        expected[expert] = np.sum(slope * by_weight) * s[i] * (1 - s[i])
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-5, atol=1e-30)
    totals = jax.grad(
        lambda x: F.router_totals(x, np.array([[0, 1]]), score="sigmoid").probability_sums[0]
    )(np.asarray(logits))
    probabilities = scores / scores.sum()
    expected = probabilities[0] * (1 - scores) * ((np.arange(4) == 0) - probabilities)
    np.testing.assert_allclose(totals[0], expected, rtol=1e-5)
