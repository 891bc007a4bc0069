"""Functions of sharded arrays equal those of unsharded ones."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.functional.jitted_functions import F

DEVICES = 4


def draw(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def shared_out(function, *specs, out):
    devices = jax.devices()[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("parts",), (AxisType.Auto,), devices=devices)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))


LAST = P(None, None, "parts")
TARGETS = jnp.array([[0, 4, 11, 7, 2], [-1, 12, 3, 9, 8]])  # one too small, one too large


HEADS = {
    "smoothed": dict(z_loss=0.3, label_smoothing=0.2, softcap=2.0),
    "masked": dict(masked_ids=(1, *range(12, 24), 46), multiplier=0.5),  # all of the second device
}


@pytest.mark.slow
def test_rows_of_each_device_and_a_head_that_all_share():
    x, kernel, targets = draw(4, 5, 3), draw(3, 12, seed=1), jnp.arange(20).reshape(4, 5) % 12

    def slopes(x, kernel, targets, add=lambda loss: loss):
        def loss(x, kernel):
            return add(jnp.sum(F.linear_cross_entropy(x, kernel, targets, chunk_size=4)))

        return jax.grad(loss, (0, 1))(x, kernel)

    spread = partial(slopes, add=lambda loss: jax.lax.psum(loss, "parts"))
    sharded = shared_out(spread, P("parts"), P(), P("parts"), out=(P("parts"), P()))
    expected = jax.jit(slopes)(x, kernel, targets)
    for one, other in zip(sharded(x, kernel, targets), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.3}, {"label_smoothing": 0.2}], ids=str)
@pytest.mark.slow
def test_cross_entropy_of_a_vocabulary_in_parts(options):
    """Losses, NaN for wrong ids, and gradients; large logits do not overflow."""
    logits = 50 * draw(2, 5, 12)
    losses = shared_out(
        partial(F.token_cross_entropy, axis_name="parts", **options), LAST, P(), out=P()
    )
    whole = partial(F.token_cross_entropy, **options)
    expected = whole(logits, TARGETS)
    assert np.isnan(expected[1, :2]).all() and np.isfinite(expected[0]).all()
    np.testing.assert_allclose(losses(logits, TARGETS), expected, rtol=1e-6)
    slope = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x, TARGETS)[0])))(logits)  # noqa: E731
    np.testing.assert_allclose(slope(losses), slope(whole), atol=1e-6)


@pytest.mark.parametrize("chunk", [2, 3, 12], ids=lambda chunk: f"chunk{chunk}")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.slow
def test_a_heads_vocabulary_in_parts(options, axis, chunk):
    """Each device goes through its 12 ids, some at a time; losses and gradients are one's."""
    x, kernel, bias = draw(2, 5, 3), draw(3, 48, seed=1), draw(48, seed=2)
    kernel, parts = (kernel, P(None, "parts")) if axis else (kernel.T, P("parts"))
    targets = jnp.array([[0, 25, 47, 11, 36], [-1, 48, 3, 9, 8]])  # too small, too large
    options = dict(options, vocabulary_axis=axis)

    def shared(x, kernel, bias, targets):
        x = F.copy_to_tensor_parallel(x, "parts")
        head = dict(options, chunk_size=chunk, axis_name="parts")
        return F.linear_cross_entropy(x, kernel, targets, bias, **head)

    def whole(x, kernel, bias, targets):
        return F.linear_cross_entropy(x, kernel, targets, bias, chunk_size=48, **options)

    spread = shared_out(shared, P(), parts, P("parts"), P(), out=P())

    def results(function):
        def loss(x, kernel, bias):
            losses = function(x, kernel, bias, targets)
            return jnp.sum(losses[0]), losses

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))

    actual, expected = (results(f)(x, kernel, bias) for f in (spread, whole))
    assert np.isnan(expected[1][1, :2]).all() and np.isfinite(expected[1][0]).all()
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), actual, expected)
    program = results(spread).lower(x, kernel, bias).compile().as_text()
    # Of a token: largest, normaliser, target, and with smoothing the mean; and its features' slope.
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) <= 4 + (
        "label_smoothing" in options
    )
    assert not re.search(r" (all-gather|all-to-all|collective-permute)", program)


def test_rows_of_a_vocabulary_in_parts():
    table = draw(12, 3)
    embed = shared_out(partial(F.embed, axis_name="parts"), P("parts"), P(), out=P())
    expected = F.embed(table, TARGETS)
    assert np.isnan(expected[1, :2]).all()
    np.testing.assert_array_equal(embed(table, TARGETS), expected)
    weights = draw(5, 3, seed=1)
    total = lambda f: lambda x: jnp.sum(weights * f(x, TARGETS)[0])  # noqa: E731
    slopes = [jax.jit(jax.grad(total(f)))(table) for f in (embed, F.embed)]
    np.testing.assert_allclose(*slopes, rtol=1e-6)


def test_rows_in_parts_for_tokens_of_each_device():
    """The ids go to the rows; only what they find comes back, and the table stays."""
    table, tokens = draw(48, 3), np.random.default_rng(0).integers(0, 48, (4, 5))
    tokens[0, 0], tokens[3, 1] = -1, 48
    spread = partial(F.embed, axis_name="parts", own_tokens=True)
    embed = shared_out(spread, P("parts"), P("parts"), out=P("parts"))
    expected = F.embed(table, tokens)
    assert np.isnan(expected[0, 0]).all() and np.isnan(expected[3, 1]).all()
    np.testing.assert_array_equal(embed(table, tokens), expected)
    weights, inside = draw(4, 5, 3, seed=1), np.clip(tokens, 0, 47)
    total = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(weights * f(x, inside))))  # noqa: E731
    np.testing.assert_allclose(total(embed)(table), total(F.embed)(table), rtol=1e-6)
    program = total(embed).lower(table).compile().as_text()
    assert re.search(r"s32\[4,1,5\]\S* all-gather", program)
    assert not re.search(r"f32\[48,3\]\S* (all-gather|all-reduce)", program)


NORMS = {
    "layer": F.layer_norm,
    "rms": F.rms_norm,
    "rms outside": partial(F.rms_norm, eps_position="outside"),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_of_features_in_parts(norm):
    x, scale, bias = 3 + draw(2, 5, 8), draw(8, seed=1), draw(8, seed=2)
    parts = shared_out(partial(norm, axis_name="parts"), LAST, P("parts"), P("parts"), out=LAST)
    np.testing.assert_allclose(parts(x, scale, bias), norm(x, scale, bias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lean", [0.0, 30.0], ids=["spread", "all to one expert"])
@pytest.mark.slow
def test_experts_on_other_devices(lean):
    """Values and gradients, also when every token goes to the same device; none is dropped."""
    experts, top_k = 8, 2
    x, kernels = draw(8, 3, 5), draw(experts, 5, 5, seed=1)
    logits = draw(8, 3, experts, seed=2) + np.float32(lean * (np.arange(experts) >= 6))

    def mix(x, logits, kernels, axis_name=None):
        def expert(rows, sizes):
            return F.grouped_matmul(jnp.tanh(rows), kernels, sizes)

        routing = F.route(logits, top_k=top_k)
        return F.mixture_of_experts(x, routing, expert, num_experts=experts, axis_name=axis_name)

    rows = P("parts")
    spread = shared_out(partial(mix, axis_name="parts"), rows, rows, rows, out=rows)
    np.testing.assert_allclose(spread(x, logits, kernels), mix(x, logits, kernels), atol=1e-5)
    weights = draw(8, 3, 5, seed=3)
    gradients = [
        jax.grad(lambda *a, f=f: jnp.sum(weights * f(*a)), (0, 1, 2)) for f in (spread, mix)
    ]
    slopes = [gradient(x, logits, kernels) for gradient in gradients]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *slopes)
    assert "scatter" not in str(jax.make_jaxpr(gradients[0])(x, logits, kernels))


def mixed_by_hand(x, routing, kernels, *, devices, room):
    """Loops over devices and tokens: what finds no room is left out; and how many do not."""
    experts, out, lost = len(kernels) // devices, np.zeros_like(x), 0
    for source in range(devices):
        rows = slice(source * len(x) // devices, (source + 1) * len(x) // devices)
        tokens, chosen = x[rows].reshape(-1, x.shape[-1]), routing.expert_ids[rows].reshape(-1)
        weights, result = routing.weights[rows].reshape(-1), np.zeros_like(tokens)
        sent = np.zeros(devices, int)
        for i in range(len(chosen)):
            to = chosen[i] // experts
            sent[to] += 1
            if sent[to] <= room:
                token = i // routing.expert_ids.shape[-1]
                result[token] += weights[i] * (np.tanh(tokens[token]) @ kernels[chosen[i]])
            else:
                lost += 1
        out[rows] = result.reshape(x[rows].shape)
    return out, lost


@pytest.mark.parametrize("room, rows", [(1.0, 3), (1.4, 5), (4.0, 12), (9.0, 12)])
@pytest.mark.slow
def test_tokens_over_the_expert_capacity_are_dropped(room, rows):
    """Of 12 choices a device, to four devices with two experts each; gradients are those of what
    found room."""
    x, kernels = draw(8, 3, 5), draw(8, 5, 5, seed=1)
    routing = F.route(draw(8, 3, 8, seed=2) + np.float32(np.arange(8) < 2), top_k=2)
    expected, lost = mixed_by_hand(
        np.asarray(x), jax.tree.map(np.asarray, routing), np.asarray(kernels), devices=4, room=rows
    )
    assert (lost > 0) == (rows < 12)

    def mix(x, experts, weights, kernels):
        def expert(rows, sizes):
            return F.grouped_matmul(jnp.tanh(rows), kernels, sizes)

        local_routing = F.Routing(experts, weights)
        return F.mixture_of_experts(
            x, local_routing, expert, num_experts=8, axis_name="parts", capacity_factor=room
        )

    spread = shared_out(mix, *[P("parts")] * 4, out=P("parts"))
    np.testing.assert_allclose(spread(x, *routing, kernels), expected, atol=1e-5)
    slope = jax.grad(lambda k: jnp.sum(spread(x, *routing, k) ** 2))(kernels)
    step = 1e-2 * draw(8, 5, 5, seed=5)
    ends = [np.sum(np.asarray(spread(x, *routing, kernels + s * step)) ** 2) for s in (1, -1)]
    np.testing.assert_allclose(np.sum(slope * step), (ends[0] - ends[1]) / 2, rtol=1e-3)


def test_less_room_than_an_even_share_is_refused():
    routing = F.route(draw(3, 4), top_k=1)
    with pytest.raises(ValueError, match=r"capacity_factor must be at least 1; got 0"):
        F.mixture_of_experts(
            draw(3, 5), routing, lambda rows, _: rows, num_experts=4, capacity_factor=0.5
        )


@pytest.mark.parametrize(
    "rows, devices, share, expected",
    [(12, 4, None, 12), (12, 4, 1.0, 3), (13, 4, 1.5, 5), (8, 2, 9.0, 8)],
)
def test_room_is_a_multiple_of_an_even_share_and_never_more_than_all(
    rows, devices, share, expected
):
    assert F.expert_capacity(rows, devices, share) == expected
    with pytest.raises(ValueError, match="devices must be an integer of at least 1; got 0"):
        F.expert_capacity(rows, 0, share)


def recurrence(x, **options):
    gamma, theta = jnp.array([0.5, 0.9]), draw(2, 2)
    return F.linear_recurrence(x.reshape(*x.shape[:-1], 2, 4), gamma, theta, **options)


def convolution(x, **options):
    return F.causal_convolution(x, draw(4, 8), draw(8), **options)


def dilated(x, **options):
    return F.causal_convolution(x, draw(2, 8), draw(8), dilation=3, **options)


@pytest.mark.parametrize("function", [recurrence, convolution, dilated])
@pytest.mark.slow
def test_states_are_handed_along_a_sequence_in_zigzag_order(function):
    """A part has fewer tokens than the convolution has taps, or none that is valid."""
    x, initial = draw(2, 16, 8), draw(2, 3, 8, seed=1)
    initial = initial[:, 0].reshape(2, 2, 4) if function is recurrence else initial
    rng = np.random.default_rng(0)
    segments, valid = np.cumsum(rng.random((2, 16)) < 0.2, axis=1), rng.random((2, 16)) < 0.8
    segments[1], segments[1, 2:6], valid[1, 2:6] = 0, 9, False
    expected = function(x, initial_state=initial, segments=segments, valid=valid)

    def share(x, segments, valid):
        masks = dict(segments=segments, valid=valid, axis_name="parts")
        output, state = function(x, initial_state=jnp.asarray(initial), **masks)
        return jnp.swapaxes(output, 0, 1), state[None]

    order, parts = F.zigzag_order(16, DEVICES), P(None, "parts")
    sharded = shared_out(share, parts, parts, parts, out=P("parts"))
    output, states = sharded(x[:, order], segments[:, order], valid[:, order])
    output = np.swapaxes(output, 0, 1)[:, np.argsort(order)]
    np.testing.assert_allclose(output[valid], expected.output[valid], atol=1e-5)
    for state in states:
        np.testing.assert_allclose(state, expected.state, atol=1e-5)


def test_a_device_has_an_even_number_of_tokens():
    with pytest.raises(ValueError, match="number of tokens must be even; got 3"):
        shared_out(lambda x: convolution(x, axis_name="parts").output, P("parts"), out=P("parts"))(
            draw(12, 8)
        )
