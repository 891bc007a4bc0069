"""Mixture of experts (MoE): routing, dispatch to experts over devices, router losses."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Integer

from jaxformer.functional.arguments import checked


class Routing(NamedTuple):
    """The top_k experts of each token, most likely first, and their weights."""

    experts: Integer[Array, "*batch top_k"]
    weights: Float32[Array, "*batch top_k"]


@checked
def route(logits: Float[Array, "*batch E"], *, top_k: int, renormalise: bool = True) -> Routing:
    """Top-k routing: choose the most likely experts of each token.

        p = softmax(logits);    weights = p[chosen] / sum(p[chosen])

    Args:
        logits: A router's scores.
        top_k: How many experts a token goes to.
        renormalise: False leaves out the division, so that weights sum to less than 1.

    Returns:
        Experts and weights, in float32.

    Raises:
        ValueError: If `top_k` is not between 1 and the number of experts.

    References:
        Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
        Layer, 2017. arXiv:1701.06538, section 2.1
        Jiang et al., Mixtral of Experts, 2024. arXiv:2401.04088, section 2.1
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"top_k chooses among {logits.shape[-1]} experts; got {top_k}.")
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, top_k)
    if renormalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(experts, weights)


@checked
def mix_experts(
    x: Float[Array, "*batch D"],
    routing: Routing,
    experts: Callable[[Float[Array, "R D"], Int[Array, " E"]], Float[Array, "R D"]],
    *,
    num_experts: int,
    axis_name: str | None = None,
    room: float | None = None,
) -> Float[Array, "*batch D"]:
    """Mixture of experts: dispatch each token to its experts and sum their outputs, weighted.

        y = sum over chosen e of weight[e] * expert_e(x)

    Args:
        x: Tokens.
        routing: From `route`.
        experts: All of them at once: given rows sorted by expert and the number of rows of each
            expert, what each row becomes; see `grouped_linear`.
        num_experts: E, on all devices together.
        axis_name: Of the devices among which the experts are shared out in equal parts. `experts`
            are then those of this device, and tokens travel to theirs and back.
        room: How many rows a device has room for from each other one, as a multiple of an even
            share ``R * top_k / devices``. So many are exchanged each way and worked on, whether
            they are filled or not; the last tokens, for which there is no room, are not seen by
            that expert, so the result depends on how tokens are shared out. None has room for all,
            ``devices`` times what is needed when tokens are evenly spread.

    Returns:
        The mixtures, summed in float32, in the dtype of `x`.

    Raises:
        ValueError: If `room` is below 1, `routing` is of other tokens, or `experts` give other
            rows than theirs.

    References:
        Shazeer et al., 2017. arXiv:1701.06538, section 2
        Lepikhin et al., GShard: Scaling Giant Models with Conditional Computation and Automatic
        Sharding, 2020. arXiv:2006.16668, section 2.2 (tokens that find no room)
    """
    if room is not None and not room >= 1:
        raise ValueError(f"room is a multiple of an even share, at least 1; got {room}.")
    if not routing.experts.shape[:-1] == routing.weights.shape[:-1] == x.shape[:-1]:
        raise ValueError(
            f"routing has experts {routing.experts.shape} and weights {routing.weights.shape}; for "
            f"x {x.shape} it has top_k of each for every token {x.shape[:-1]}."
        )
    top_k = routing.experts.shape[-1]
    expert_ids = routing.experts.reshape(-1)
    if axis_name is not None and room is not None:
        expert_ids = _with_room(expert_ids, room, num_experts=num_experts, axis_name=axis_name)
    order = jnp.argsort(expert_ids)
    group_sizes = jnp.sum(expert_ids[:, None] == jnp.arange(num_experts)[None], axis=0)
    places = jnp.argsort(order)
    rows = _dispatch(top_k, x.reshape(-1, x.shape[-1]), order, places)

    def answer(rows: Float[Array, "R D"], sizes: Int[Array, " E"]) -> Float[Array, "R D"]:
        answers = experts(rows, sizes)
        if getattr(answers, "shape", None) != rows.shape:
            raise ValueError(
                f"experts give a row for each row, here {rows.shape}; got "
                f"{getattr(answers, 'shape', answers)}."
            )
        return answers

    if axis_name is None:
        expert_outputs = answer(rows, group_sizes)
    else:
        expert_outputs = _at_their_devices(rows, group_sizes, answer, axis_name, room)
    by_token = _permute(expert_outputs, places, order).reshape(*routing.weights.shape, x.shape[-1])
    weighted = by_token.astype(jnp.float32) * routing.weights[..., None]
    return jnp.sum(weighted, axis=-2).astype(x.dtype)


# The gradient of a gather is a scatter-add, whose order, and so whose last bits, a GPU leaves open,
# and which adds up in the dtype of the rows. Both gathers have a gather for their gradient.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(
    top_k: int, x: Float[Array, "T D"], order: Int[Array, " R"], places: Int[Array, " R"]
) -> Float[Array, "R D"]:
    """Each token `top_k` times, sorted by expert; `places` is the inverse of `order`."""
    return x[order // top_k]


def _dispatch_forward(
    top_k: int, x: Float[Array, "T D"], order: Int[Array, " R"], places: Int[Array, " R"]
) -> tuple[Float[Array, "R D"], Int[Array, " R"]]:
    return x[order // top_k], places


def _dispatch_backward(
    top_k: int, places: Int[Array, " R"], gradient: Float[Array, "R D"]
) -> tuple[Float[Array, "T D"], None, None]:
    by_token = gradient[places].reshape(-1, top_k, gradient.shape[-1])
    return jnp.sum(by_token.astype(jnp.float32), axis=1).astype(gradient.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _permute(
    x: Float[Array, "R D"], order: Int[Array, " R"], inverse: Int[Array, " R"]
) -> Float[Array, "R D"]:
    """Rows in another order."""
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse),
    lambda inverse, gradient: (gradient[inverse], None, None),
)


def _with_room(
    chosen: Int[Array, " R"], room: float, *, num_experts: int, axis_name: str
) -> Int[Array, " R"]:
    """Set the expert id of rows over the capacity of their device to E, which drops them.

    Rows have room in their order, whatever the expert, so that none is left out before others.
    """
    devices = jax.lax.axis_size(axis_name)
    destination = chosen // (num_experts // devices)
    is_destination = (destination[:, None] == jnp.arange(devices)[None]).astype(jnp.int32)
    rank = jnp.sum(jnp.cumsum(is_destination, axis=0) * is_destination, axis=-1) - 1
    return jnp.where(rank < room_for(len(chosen), devices, room), chosen, num_experts)


def room_for(rows: int, devices: int, share: float | None) -> int:
    """How many of a device's rows another device has room for, as `mix_experts` has it.

        room = rows if share is None else min(rows, ceil(share * rows / devices))

    Args:
        rows: Of one device, a token and one of its experts each.
        devices: Among which the experts are shared out.
        share: Room in times the rows that one would get if all got as many; None is room for all.

    Returns:
        A number of rows.
    """
    return rows if share is None else min(rows, math.ceil(share * rows / devices))


def _at_their_devices(
    rows: Float[Array, "R D"],
    sizes: Int[Array, " E"],
    experts: Callable[[Float[Array, "R D"], Int[Array, " E"]], Float[Array, "R D"]],
    axis_name: str,
    share: float | None,
) -> Float[Array, "R D"]:
    """Send rows to the devices of their experts, apply the experts, and send the outputs back."""
    devices, count = jax.lax.axis_size(axis_name), rows.shape[0]
    capacity = room_for(count, devices, share)
    sizes_by_device = sizes.reshape(devices, -1)  # [to, expert]
    counts = jnp.sum(sizes_by_device, axis=-1)
    starts = jnp.cumsum(counts) - counts
    slots = jnp.arange(capacity)
    send_buffer = rows[jnp.minimum(starts[:, None] + slots[None], count - 1)]
    send_buffer = jnp.where((slots[None] < counts[:, None])[..., None], send_buffer, 0)
    exchange = partial(jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0)
    # [from, slot, D], [from, expert]
    received, received_sizes = exchange(send_buffer), exchange(sizes_by_device)
    ends = jnp.cumsum(received_sizes, axis=-1)
    local_expert_ids = jnp.sum(slots[None, :, None] >= ends[:, None, :], axis=-1).reshape(-1)
    # Empty slots come last; they are zeros, and count for the last expert.
    order = jnp.argsort(local_expert_ids)
    total = jnp.sum(received_sizes, axis=0)
    total = total.at[-1].add(local_expert_ids.size - jnp.sum(total))
    places = jnp.argsort(order)
    expert_outputs = experts(
        _permute(received.reshape(local_expert_ids.size, -1), order, places), total
    )
    returned = exchange(_permute(expert_outputs, places, order).reshape(devices, capacity, -1))
    row = jnp.arange(count)
    device = jnp.sum(row[:, None] >= jnp.cumsum(counts)[None], axis=-1)
    outputs = returned[
        jnp.minimum(device, devices - 1), jnp.clip(row - starts[device], 0, capacity - 1)
    ]
    return jnp.where((device < devices)[:, None], outputs, 0)


class RouterTotals(NamedTuple):
    """Sums over tokens, for the router losses; sums of several batches can be added.

    Totals of parts of a batch, on one device or on several, add up to those of the batch.
    """

    chosen: Float32[Array, "*layers E"]  # how often each expert was chosen
    probability: Float32[Array, "*layers E"]  # sum of its probabilities
    squared_log: Float32[Array, "*layers"]  # sum of the squared logs of the softmax's denominator
    tokens: Float32[Array, "*layers"]


@checked
def router_totals(
    logits: Float[Array, "*batch T E"],
    *,
    top_k: int,
    mask: Bool[Array, "*#batch T"] | None = None,
    axes: int | None = None,
) -> RouterTotals:
    """Compute the sums that `load_balance_loss` and `router_z_loss` need.

    Args:
        logits: A router's scores, or those of many layers along leading axes.
        top_k: How many experts a token goes to.
        mask: True where a token counts.
        axes: How many axes before the last are of tokens; those before them are of layers. None is
            two, rows and tokens, or one where there is no other, as of flat [tokens, experts].

    Returns:
        The totals of each layer.

    Raises:
        ValueError: If `axes` are more than there are before the last, or none.
    """
    wide = logits.astype(jnp.float32)
    axes = min(2, wide.ndim - 1) if axes is None else axes
    if not 1 <= axes < wide.ndim:
        raise ValueError(
            f"axes counts those of tokens, between 1 and {wide.ndim - 1} of logits {logits.shape}; "
            f"got {axes}."
        )
    token_axes = tuple(range(wide.ndim - 1 - axes, wide.ndim - 1))
    shape = wide.shape[:-1]
    weights = jnp.ones(shape, jnp.float32)
    if mask is not None:
        weights = jnp.broadcast_to(
            mask.reshape(*(1,) * (len(shape) - mask.ndim), *mask.shape), shape
        )
        weights = weights.astype(jnp.float32)
    experts = route(wide, top_k=top_k).experts
    choices = jnp.sum(jax.nn.one_hot(experts, wide.shape[-1], dtype=jnp.float32), axis=-2)
    return RouterTotals(
        jnp.sum(choices * weights[..., None], axis=token_axes),
        jnp.sum(jax.nn.softmax(wide, axis=-1) * weights[..., None], axis=token_axes),
        jnp.sum(jnp.square(jax.nn.logsumexp(wide, axis=-1)) * weights, axis=token_axes),
        jnp.sum(weights, axis=token_axes),
    )


@checked
def load_balance_loss(totals: RouterTotals) -> Float32[Array, "*layers"]:
    """Load-balancing loss of Switch Transformers: E * sum of share * mean probability.

        loss = E * sum over e of share_e * p_e

    with `share_e` the share of choices that fell on expert e, and `p_e` its mean probability.
    Only the probabilities pass a gradient.

    Args:
        totals: From `router_totals`.

    Returns:
        One number a layer.

    References:
        Fedus, Zoph and Shazeer, Switch Transformers, 2021. arXiv:2101.03961, section 2.2
    """
    choices = jnp.sum(totals.chosen, axis=-1, keepdims=True)
    share = totals.chosen / jnp.maximum(choices, 1)
    mean = totals.probability / jnp.maximum(totals.tokens[..., None], 1)
    return totals.chosen.shape[-1] * jnp.sum(share * mean, axis=-1)


@checked
def router_z_loss(totals: RouterTotals) -> Float32[Array, "*layers"]:
    """Router z-loss of ST-MoE: mean squared log-sum-exp of the router logits.

        loss = mean over tokens of log(sum over e of exp(logits[e])) ** 2

    Args:
        totals: From `router_totals`.

    Returns:
        One number a layer.

    References:
        Zoph et al., ST-MoE: Designing Stable and Transferable Sparse Expert Models, 2022.
        arXiv:2202.08906, section 3.2
    """
    return totals.squared_log / jnp.maximum(totals.tokens, 1)
