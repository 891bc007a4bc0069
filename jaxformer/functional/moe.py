"""Mixture of experts (MoE): routing, dispatch to experts over devices, router losses."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Integer

from jaxformer.checks import require_count
from jaxformer.functional.argument_checks import typechecked

ExpertScore: TypeAlias = Literal["softmax", "sigmoid"]
ExpertSelection: TypeAlias = Literal["scores", "logits"]
GroupScore: TypeAlias = Literal["max", "top_2"]


class Routing(NamedTuple):
    """The top_k experts of each token, most likely first, and their weights."""

    expert_ids: Integer[Array, "*batch top_k"]
    weights: Float32[Array, "*batch top_k"]


@typechecked
def route(
    logits: Float[Array, "*batch E"],
    *,
    top_k: int,
    score: ExpertScore = "softmax",
    selection_bias: Float[Array, " E"] | None = None,
    selection: ExpertSelection = "scores",
    num_groups: int = 1,
    top_k_groups: int = 1,
    group_score: GroupScore = "top_2",
    renormalise: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Top-k routing: choose the experts with the largest scores, and weigh them.

        s = softmax(logits) or sigmoid(logits)
        chosen = top_k of (s + selection_bias), in the groups with the largest scores
        weights = scale * s[chosen] / sum(s[chosen])

    With ``selection="logits"`` the logits stand in place of s where experts are chosen (Kolibri 1).

    Args:
        logits: Router logits.
        top_k: Experts per token.
        score: Function from logits to scores.
        selection_bias: Bias of the choice alone, without a gradient; None has none.
        selection: What the bias is added to. Without one both give the same choice, unless there
            are groups.
        num_groups: Groups of experts with consecutive numbers.
        top_k_groups: Groups that are kept for each token.
        group_score: Score of a group: the largest score of its experts, bias included, or the sum
            of the two largest.
        renormalise: False omits the division.
        scale: Multiplies the weights.

    Returns:
        Expert ids, and weights in float32.

    Raises:
        ValueError: If `top_k` is not between 1 and the number of experts in the groups that are
            kept, the groups do not divide the experts, "top_2" has groups of one expert, or a score
            is unknown.

    References:
        Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
        Layer, 2017. arXiv:1701.06538, section 2.1
        Jiang et al., Mixtral of Experts, 2024. arXiv:2401.04088, section 2.1
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024. arXiv:2412.19437, section 2.1.2
    """
    num_experts = logits.shape[-1]
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_k_groups <= num_groups:
        raise ValueError(
            f"num_groups must divide the {num_experts} experts, and top_k_groups be from 1 to "
            f"num_groups; got num_groups={num_groups}, top_k_groups={top_k_groups}."
        )
    size = num_experts // num_groups
    _check_top_k(top_k, size * top_k_groups)
    num_best = 1 if group_score == "max" else 2
    if num_groups > 1 and size < num_best:
        raise ValueError(f"group_score='top_2' needs groups of two experts or more; got {size}.")
    wide = logits.astype(jnp.float32)
    scores = jax.nn.softmax(wide, axis=-1) if score == "softmax" else jax.nn.sigmoid(wide)
    order = wide if selection == "logits" else scores
    if selection_bias is not None:
        bias = jax.lax.stop_gradient(selection_bias.astype(jnp.float32))
        order = order + jnp.broadcast_to(bias, order.shape)
    if num_groups > 1:
        grouped = order.reshape(*order.shape[:-1], num_groups, size)
        best = jax.lax.top_k(grouped, num_best)[0]
        _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), top_k_groups)
        in_group = jnp.any(jax.nn.one_hot(groups, num_groups, dtype=bool), axis=-2)
        grouped = jnp.where(in_group[..., None], grouped, -jnp.inf)
        order = grouped.reshape(order.shape)
    _, experts = jax.lax.top_k(order, top_k)
    # Not a gather, whose gradient is a scatter.
    is_chosen = jax.nn.one_hot(experts, num_experts, dtype=bool)
    weights = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0), axis=-1)
    if renormalise:
        weights = _shares(weights, 1e-20)
    return Routing(experts, weights * scale)


def _shares(x: Float[Array, "*batch n"], floor: float) -> Float[Array, "*batch n"]:
    """Divide x by max(sum of x, floor); the gradient does not square the sum, which would be 0."""
    total = jnp.sum(x, axis=-1, keepdims=True)
    size = jax.lax.stop_gradient(jnp.maximum(total, floor))
    return x / size / jnp.maximum(total / size, floor / size)


@typechecked
def sparse_mixer(logits: Float[Array, "*batch E"], *, top_k: int, jitter: float) -> Routing:
    """SparseMixer routing: choose one expert after another, and weigh each among its rivals.

        best = max of l over the experts that are left
        rivals = experts that are left with (best - l) / max(abs(l), best) <= 2 * jitter
        weight = exp(best) / sum over rivals of exp(l)

    This is the router of a trained model. In training, the paper draws each expert from the softmax
    of its rivals and estimates the gradient of the draw; here only the weights have a gradient.

    Args:
        logits: Router logits l.
        top_k: Experts per token.
        jitter: Half the relative distance to the best up to which an expert is a rival.

    Returns:
        Expert ids, and weights in float32, which do not add up to 1.

    Raises:
        ValueError: If `top_k` is not between 1 and the number of experts, or `jitter` is negative.

    References:
        Liu et al., GRIN: GRadient-INformed MoE, 2024. arXiv:2409.12136; the thresholds follow the
        released code of Phi-3.5 MoE
    """
    num_experts = logits.shape[-1]
    _check_top_k(top_k, num_experts)
    if not jitter >= 0:
        raise ValueError(f"jitter must be 0 or more; got {jitter}.")
    wide = logits.astype(jnp.float32)
    left, experts, weights = wide, list[Array](), list[Array]()
    for _ in range(top_k):
        best = jnp.max(left, axis=-1, keepdims=True)
        is_far = (best - wide) / jnp.maximum(jnp.abs(wide), best) > 2 * jitter
        rivals = jax.nn.softmax(jnp.where(is_far, -jnp.inf, left), axis=-1)
        experts.append(jnp.argmax(left, axis=-1))
        is_chosen = jax.nn.one_hot(experts[-1], num_experts, dtype=bool)
        weights.append(jnp.sum(jnp.where(is_chosen, rivals, 0), axis=-1))
        left = jnp.where(is_chosen, -jnp.inf, left)
    return Routing(jnp.stack(experts, axis=-1), jnp.stack(weights, axis=-1))


@typechecked
def drop_late_tokens(
    expert_ids: Integer[Array, "*batch T top_k"],
    weights: Float[Array, "*batch T top_k"],
    *,
    num_experts: int,
    capacity: int,
) -> Float32[Array, "*batch T top_k"]:
    """Set the weights of tokens to 0 for which an expert has no room, so that they skip it.

        place[t, e] = number of tokens up to t, of the same row, that chose e
        weight[t, e] if place[t, e] <= capacity else 0

    Args:
        expert_ids: Result of `route`.
        weights: Result of `route`.
        num_experts: E, the number of experts.
        capacity: Tokens of a row that an expert accepts, in order.

    Returns:
        The weights in float32.

    Raises:
        ValueError: If `capacity` is below 1.

    References:
        Fedus, Zoph and Shazeer, Switch Transformers, 2021. arXiv:2101.03961, section 2.2
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1; got {capacity}.")
    choices = jnp.sum(jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.int32), axis=-2)
    places = jnp.take_along_axis(jnp.cumsum(choices, axis=-2), expert_ids, axis=-1)
    return jnp.where(places <= capacity, weights.astype(jnp.float32), 0)


def _check_top_k(top_k: int, num_experts: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k must be from 1 to the number of experts, {num_experts}; got {top_k}."
        )


@typechecked
def mixture_of_experts(
    x: Float[Array, "*batch D"],
    routing: Routing,
    experts: Callable[[Float[Array, "R D"], Int[Array, " E"]], Float[Array, "R D"]],
    *,
    num_experts: int,
    axis_name: str | None = None,
    capacity_factor: float | None = None,
    weighs_inputs: bool = False,
) -> Float[Array, "*batch D"]:
    """Mixture of experts: dispatch tokens to their experts and sum the weighted outputs.

        y = sum over chosen e of weight[e] * expert_e(x)     or of expert_e(weight[e] * x)

    Args:
        x: Tokens.
        routing: Result of `route` for these tokens.
        experts: Function from rows sorted by expert and the number of rows of each expert to the
            output rows; see `grouped_matmul`.
        num_experts: E, the number of experts on all devices.
        axis_name: Mesh axis over which experts and tokens are sharded. Tokens are exchanged by
            all-to-all; `x` and `routing` hold the tokens of this device.
        capacity_factor: Rows that a device accepts from each device, as a multiple of the even
            share ``R * top_k / devices``. All these rows are exchanged and computed, filled or not;
            later tokens over the capacity skip the expert, so the result depends on the sharding
            of tokens. None accepts all rows, ``devices`` times the even share.
        weighs_inputs: Whether the weights multiply what the experts read, not their outputs.

    Returns:
        The weighted sums, computed in float32, in the dtype of `x`.

    Raises:
        ValueError: If `capacity_factor` is below 1, the shapes of `routing` do not match `x`, or
            `experts` returns another number of rows.

    References:
        Shazeer et al., 2017. arXiv:1701.06538, section 2
        Lepikhin et al., GShard: Scaling Giant Models with Conditional Computation and Automatic
        Sharding, 2020. arXiv:2006.16668, section 2.2 (expert capacity)
    """
    if capacity_factor is not None and not capacity_factor >= 1:
        raise ValueError(f"capacity_factor must be at least 1; got {capacity_factor}.")
    if not routing.expert_ids.shape[:-1] == routing.weights.shape[:-1] == x.shape[:-1]:
        raise ValueError(
            f"routing must have expert_ids and weights of shape {x.shape[:-1]} + (top_k,) for "
            f"x {x.shape}; got {routing.expert_ids.shape} and {routing.weights.shape}."
        )
    top_k = routing.expert_ids.shape[-1]
    expert_ids = routing.expert_ids.reshape(-1)
    if axis_name is not None and capacity_factor is not None:
        expert_ids = _drop_over_capacity(expert_ids, capacity_factor, num_experts, axis_name)
    order = jnp.argsort(expert_ids)
    group_sizes = jnp.sum(expert_ids[:, None] == jnp.arange(num_experts)[None], axis=0)
    places = jnp.argsort(order)
    rows = _dispatch(top_k, x.reshape(-1, x.shape[-1]), order, places)
    weights = routing.weights[..., None].astype(jnp.float32)
    if weighs_inputs:
        rows = (rows * _permute(weights.reshape(-1, 1), order, places)).astype(x.dtype)
        weights = jnp.ones_like(weights)

    def answer(rows: Float[Array, "R D"], sizes: Int[Array, " E"]) -> Float[Array, "R D"]:
        answers = experts(rows, sizes)
        if getattr(answers, "shape", None) != rows.shape:
            raise ValueError(
                f"experts must return rows of shape {rows.shape}; got "
                f"{getattr(answers, 'shape', answers)}."
            )
        return answers

    if axis_name is None:
        expert_outputs = answer(rows, group_sizes)
    else:
        expert_outputs = _all_to_all_experts(rows, group_sizes, answer, axis_name, capacity_factor)
    by_token = _permute(expert_outputs, places, order).reshape(*routing.weights.shape, x.shape[-1])
    weighted = by_token.astype(jnp.float32) * weights
    return jnp.sum(weighted, axis=-2).astype(x.dtype)


# The gradient of a gather is a scatter-add, which sums in the dtype of the rows and on a GPU in no
# fixed order. So the gathers below define a gather as their gradient.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(
    top_k: int, x: Float[Array, "T D"], order: Int[Array, " R"], places: Int[Array, " R"]
) -> Float[Array, "R D"]:
    """Repeat each token `top_k` times, sorted by expert; `places` is the inverse of `order`."""
    return x[order // top_k]


def _dispatch_forward(top_k: int, x: Array, order: Array, places: Array):
    return x[order // top_k], places


def _dispatch_backward(top_k: int, places: Int[Array, " R"], gradient: Float[Array, "R D"]):
    by_token = gradient[places].reshape(-1, top_k, gradient.shape[-1])
    return jnp.sum(by_token.astype(jnp.float32), axis=1).astype(gradient.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _permute(
    x: Float[Array, "R D"], order: Int[Array, " R"], inverse: Int[Array, " R"]
) -> Float[Array, "R D"]:
    """Permute rows by `order`; `inverse` is the inverse permutation."""
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse),
    lambda inverse, gradient: (gradient[inverse], None, None),
)


@jax.custom_vjp
def _place(
    x: Float[Array, "R D"], sources: Int[Array, " S"], targets: Int[Array, " R"]
) -> Float[Array, "S D"]:
    """Put row r of x at ``targets[r]``, the inverse of `sources`; zeros for a source of R or more.

    Rows whose target is S or more are left out.
    """
    return x.at[sources].get(mode="fill", fill_value=0)


_place.defvjp(
    lambda x, sources, targets: (_place(x, sources, targets), (sources, targets)),
    lambda maps, gradient: (_place(gradient, *reversed(maps)), None, None),
)


def _drop_over_capacity(
    expert_ids: Int[Array, " R"], capacity_factor: float, num_experts: int, axis_name: str
) -> Int[Array, " R"]:
    """Set the expert id of rows over the capacity of their device to E, which drops them.

    The last rows sent to a device are dropped, whatever their expert.
    """
    devices = jax.lax.axis_size(axis_name)
    destination = expert_ids // (num_experts // devices)
    is_destination = (destination[:, None] == jnp.arange(devices)[None]).astype(jnp.int32)
    rank = jnp.sum(jnp.cumsum(is_destination, axis=0) * is_destination, axis=-1) - 1
    capacity = expert_capacity(len(expert_ids), devices, capacity_factor)
    return jnp.where(rank < capacity, expert_ids, num_experts)


def expert_capacity(num_rows: int, devices: int, capacity_factor: float | None) -> int:
    """Rows that one device may send to another.

        capacity = min(num_rows, ceil(capacity_factor * num_rows / devices))

    Args:
        num_rows: Rows of one device, one per token and expert.
        devices: Devices over which the experts are sharded.
        capacity_factor: Capacity as a multiple of an even share; None is a capacity of `num_rows`.

    Returns:
        Number of rows.

    Raises:
        ValueError: `num_rows` is negative, or `devices` is below 1.
    """
    require_count("num_rows", num_rows, least=0)
    require_count("devices", devices)
    if capacity_factor is None:
        return num_rows
    return min(num_rows, math.ceil(capacity_factor * num_rows / devices))


def _all_to_all_experts(
    rows: Float[Array, "R D"],
    group_sizes: Int[Array, " E"],
    experts: Callable[[Float[Array, "R D"], Int[Array, " E"]], Float[Array, "R D"]],
    axis_name: str,
    capacity_factor: float | None,
) -> Float[Array, "R D"]:
    """Send rows to the devices of their experts, apply the experts, and send the outputs back."""
    devices, count = jax.lax.axis_size(axis_name), rows.shape[0]
    capacity = expert_capacity(count, devices, capacity_factor)
    sizes_by_device = group_sizes.reshape(devices, -1)  # [to, expert]
    counts = jnp.sum(sizes_by_device, axis=-1)
    ends, slots, row = jnp.cumsum(counts), jnp.arange(capacity), jnp.arange(count)
    starts = ends - counts
    # Row of each slot, and slot of each row; too large if there is none.
    rows_of_slots = jnp.where(slots[None] < counts[:, None], starts[:, None] + slots[None], count)
    device = jnp.sum(row[:, None] >= ends[None], axis=-1)
    slots_of_rows = jnp.where(
        device < devices, device * capacity + row - starts[device], devices * capacity
    )
    maps = rows_of_slots.reshape(-1), slots_of_rows
    send_buffer = _place(rows, *maps).reshape(devices, capacity, -1)
    exchange = partial(jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0)
    # [from, slot, D], [from, expert]
    received, received_sizes = exchange(send_buffer), exchange(sizes_by_device)
    ends = jnp.cumsum(received_sizes, axis=-1)
    local_expert_ids = jnp.sum(slots[None, :, None] >= ends[:, None, :], axis=-1).reshape(-1)
    # Empty slots come last; they are zero rows of the last expert.
    order = jnp.argsort(local_expert_ids)
    other_sizes = jnp.sum(received_sizes[:, :-1], axis=0)
    total = jnp.append(other_sizes, local_expert_ids.size - jnp.sum(other_sizes))
    places = jnp.argsort(order)
    by_expert = _permute(received.reshape(local_expert_ids.size, -1), order, places)
    expert_outputs = _permute(experts(by_expert, total), places, order)
    returned = exchange(expert_outputs.reshape(devices, capacity, -1))
    return _place(returned.reshape(devices * capacity, -1), *reversed(maps))


class RouterTotals(NamedTuple):
    """Sums over tokens for the router losses; sums of several batches or devices can be added."""

    expert_counts: Float32[Array, "*layers E"]  # tokens routed to each expert
    probability_sums: Float32[Array, "*layers E"]  # sum of its router probabilities
    squared_log_z: Float32[Array, "*layers"]  # sum of logsumexp(logits) ** 2
    num_tokens: Float32[Array, "*layers"]


@typechecked
def router_totals(
    logits: Float[Array, "*batch T E"],
    expert_ids: Integer[Array, "*batch T top_k"],
    *,
    score: ExpertScore = "softmax",
    mask: Bool[Array, "*#batch T"] | None = None,
    num_token_axes: int | None = None,
) -> RouterTotals:
    """Compute the sums that `load_balance_loss` and `router_z_loss` need.

    Args:
        logits: Router logits, with leading axes for layers.
        expert_ids: The experts of each token, from `route`.
        score: As in `route`; sigmoids are divided by their sum.
        mask: True for tokens to include; None is all.
        num_token_axes: Number of token axes before the last axis; the axes before them are layers.
            None is two (batch and time), or one if there is only one.

    Returns:
        The totals of each layer.

    Raises:
        ValueError: If `num_token_axes` is below 1 or above the number of axes before the last, or
            the score is unknown.
    """
    wide = logits.astype(jnp.float32)
    num_token_axes = min(2, wide.ndim - 1) if num_token_axes is None else num_token_axes
    if not 1 <= num_token_axes < wide.ndim:
        raise ValueError(
            f"num_token_axes must be from 1 to {wide.ndim - 1} for logits {logits.shape}; "
            f"got {num_token_axes}."
        )
    token_axes = tuple(range(wide.ndim - 1 - num_token_axes, wide.ndim - 1))
    shape = wide.shape[:-1]
    weights = jnp.ones(shape, jnp.float32)
    if mask is not None:
        mask = mask.reshape(*(1,) * (len(shape) - mask.ndim), *mask.shape)
        weights = jnp.broadcast_to(mask, shape).astype(jnp.float32)
    choices = jnp.sum(jax.nn.one_hot(expert_ids, wide.shape[-1], dtype=jnp.float32), axis=-2)
    if score == "softmax":
        probabilities = jax.nn.softmax(wide, axis=-1)
    else:
        probabilities = _shares(jax.nn.sigmoid(wide), 1e-37)
    return RouterTotals(
        jnp.sum(choices * weights[..., None], axis=token_axes),
        jnp.sum(probabilities * weights[..., None], axis=token_axes),
        jnp.sum(jnp.square(jax.nn.logsumexp(wide, axis=-1)) * weights, axis=token_axes),
        jnp.sum(weights, axis=token_axes),
    )


@typechecked
def load_balance_loss(totals: RouterTotals) -> Float32[Array, "*layers"]:
    """Load-balancing loss of Switch Transformers, which is 1 if experts are used evenly.

        loss = E * sum over e of share_e * p_e

    with `share_e` the fraction of expert choices that are expert e, and `p_e` its mean probability.
    Only the probabilities have a gradient.

    Args:
        totals: Result of `router_totals`.

    Returns:
        One loss per layer.

    References:
        Fedus, Zoph and Shazeer, Switch Transformers, 2021. arXiv:2101.03961, section 2.2
    """
    choices = jnp.sum(totals.expert_counts, axis=-1, keepdims=True)
    share = totals.expert_counts / jnp.maximum(choices, 1)
    mean = totals.probability_sums / jnp.maximum(totals.num_tokens[..., None], 1)
    return totals.expert_counts.shape[-1] * jnp.sum(share * mean, axis=-1)


@typechecked
def router_z_loss(totals: RouterTotals) -> Float32[Array, "*layers"]:
    """Router z-loss of ST-MoE: mean squared log-sum-exp of the router logits.

        loss = mean over tokens of log(sum over e of exp(logits[e])) ** 2

    Args:
        totals: Result of `router_totals`.

    Returns:
        One loss per layer.

    References:
        Zoph et al., ST-MoE: Designing Stable and Transferable Sparse Expert Models, 2022.
        arXiv:2202.08906, section 3.2
    """
    return totals.squared_log_z / jnp.maximum(totals.num_tokens, 1)
