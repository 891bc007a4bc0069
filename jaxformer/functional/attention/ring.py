"""Ring attention: attention over a sequence sharded over devices (context parallelism)."""

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.blockwise import (
    BLOCKWISE_REMAT_NAME,
    DEFAULT_BLOCK_SIZE,
    from_head_groups,
    head_group_attention,
    map_head_groups,
    split_sinks,
    to_head_groups,
)
from jaxformer.functional.attention.blockwise_gradient import cast_gradients, head_group_gradient
from jaxformer.functional.attention.lazy_masks import AttentionBias, AttentionMask, check_arrays
from jaxformer.functional.attention.online_softmax import (
    NEG_INF,
    PartialAttention,
    combine_partial_attention,
    finish_partial_attention,
    log_denominator,
    sinks_gradient,
)
from jaxformer.functional.attention.scores import Normalizer, check_score_options, resolve_scale
from jaxformer.functional.attention.tiles import (
    KEY_FIELDS,
    BlockwiseOptions,
    HeadGroup,
    position_fields,
)
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.platforms import target_platform

T = TypeVar("T")
OutputAndLse = tuple[Float32[Array, "U G T Hv"], Float32[Array, "U G T"]]  # output and log-sum-exp


def zigzag_order(length: int, devices: int) -> Int[np.ndarray, " T"]:
    """Zigzag order of positions, which balances causal attention over devices.

        of 2 d equal parts of the sequence, device i has parts i and 2 d - 1 - i

    Under a causal mask early parts attend to few keys and late parts to many, so each device gets
    one of each. In this order, the devices' shards are consecutive and equal.

    Args:
        length: Tokens of the sequence.
        devices: Number of devices; 1 changes nothing.

    Returns:
        Positions, so that ``x[zigzag_order(len(x), devices)]`` can be sharded evenly.

    Raises:
        ValueError: There is no device, or the length is not a multiple of twice their number.

    Example:
        >>> from jaxformer import functional as F
        >>> F.zigzag_order(8, 2)  # the first device has the first four
        array([0, 1, 6, 7, 2, 3, 4, 5])

    References:
        Grattafiori et al., The Llama 3 Herd of Models, 2024. arXiv:2407.21783, section 3.3.2
    """
    if devices < 1:
        raise ValueError(f"devices must be at least 1; got {devices}.")
    if devices == 1:
        return np.arange(length)
    if length % (2 * devices):
        raise ValueError(
            f"A sequence sharded over {devices} devices must have a multiple of {2 * devices} "
            f"tokens; got {length}."
        )
    parts = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([parts[[i, -1 - i]].ravel() for i in range(devices)])


@typechecked
def ring_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: AttentionMask | None = None,
    bias: AttentionBias | None = None,
    *,
    axis_name: str,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "*batch T N Hv"]:
    """Ring attention: this device's queries attend to the keys of all devices along an axis.

        output_d, lse_d = `blockwise_attention` of query to the keys and values of device d
        output = sum over d of exp(lse_d - lse) output_d;      lse = logsumexp over d of lse_d

    Keys and values pass around the ring of devices, one step per device; their positions and
    segments are gathered before. The backward pass sends keys and values around once more, with
    their gradients, and recomputes scores, so each device stores only its shard and memory is
    linear in the sequence length. Fully masked tiles are skipped: with causal masks, devices have
    equal work if the sequence is sharded in `zigzag_order`. Each forward step sends
    ``S * K * (H + Hv)`` numbers per sequence to the next device, in total as many as an all-gather;
    a backward step also sends as many float32 gradients.
    If key and value are the same array, it is sent once.

    Args:
        query: Queries of this device.
        key: Keys of this device.
        value: Values of this device.
        mask: Lazy mask, with positions and segments of this device's queries and keys.
        bias: Added to the scores after scale and cap; likewise.
        axis_name: Mesh axis that shards the sequence, inside `jax.shard_map` or `jax.pmap`.
        scale: As in `dot_product_attention`.
        logit_softcap: As in `dot_product_attention`.
        normalizer: As in `dot_product_attention`.
        dropout_rate: As in `dot_product_attention`.
        dropout_key: Random key of dropout, the same on all devices; it is folded with the index.
        sinks: As in `dot_product_attention`.

    Returns:
        The mean values of each head for this device's queries, in the dtype of ``query``.

    Raises:
        ValueError: Shapes do not fit, or an option is out of range.

    References:
        Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite
        Context, 2023. arXiv:2310.01889, section 3
    """
    check_arrays(query, key, mask, bias)
    check_score_options(normalizer, logit_softcap, dropout_rate, dropout_key, sinks)
    query, scale = resolve_scale(query, scale)
    T, S = query.shape[-3], key.shape[-3]
    sizes = _block_size(T), _block_size(S)
    blockwise = BlockwiseOptions(
        scale, logit_softcap, normalizer, dropout_rate, sizes, S, keep_float32=True
    )
    if dropout_key is not None:
        dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(axis_name))
    groups = to_head_groups(blockwise, query, key, value, mask, bias, dropout_key, axis_name)
    options = RingOptions(blockwise, axis_name, key.shape[-2], value is key)
    key_positions = _gather_key_positions(options, groups)
    grouped_sinks = split_sinks(sinks, groups, key.shape[-2])
    return from_head_groups(_ring(options, groups, key_positions, grouped_sinks), query, key)


def _block_size(length: int) -> int:
    """Tile size such that, where the length allows, no tile spans both zigzag parts.

    A tile across both parts would span all positions between, so that no mask could skip it. If no
    such size divides the length well, tiles do cross.
    """
    max_size = min(DEFAULT_BLOCK_SIZE[target_platform()], length)
    zigzag_part = length // 2 if length % 2 == 0 else length
    sizes = range(min(max_size, zigzag_part), max_size // 8, -1)
    return next((size for size in sizes if zigzag_part % size == 0), max_size)


class RingOptions(NamedTuple):
    """Static options of ring attention."""

    blockwise: BlockwiseOptions
    axis_name: str
    num_kv_heads: int
    key_is_value: bool  # whether keys are the values


def _gather_key_positions(options: RingOptions, groups: HeadGroup) -> Any:
    """Gather the key positions and segments of all devices, one copy for all heads."""
    return jax.tree.map(
        lambda x: jax.lax.all_gather(x[:: options.num_kv_heads], options.axis_name),
        position_fields(groups, KEY_FIELDS),
    )


def _ring_payload(options: RingOptions, groups: HeadGroup) -> Any:
    """Return what the ring sends: keys and values."""
    return groups.key, None if options.key_is_value else groups.value


def _with_remote_keys(
    options: RingOptions, groups: HeadGroup, key_positions: Any, payload: Any, owner: Int[Array, ""]
) -> HeadGroup:
    """Give the `HeadGroup`s the keys, values and key positions of another device."""
    key, value = payload
    groups = groups._replace(key=key, value=key if options.key_is_value else value)
    heads = options.num_kv_heads
    positions = jax.tree.map(lambda x: jnp.repeat(x[owner], heads, axis=0), key_positions)
    for name, fields in positions.items():  # of mask and bias
        groups = groups._replace(**{name: getattr(groups, name)._replace(**fields)})
    if groups.dropout_key is None:
        return groups
    folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(groups.dropout_key, owner)
    return groups._replace(dropout_key=folded)


def _shift_ring(axis_name: str, x: Any) -> Any:
    """Receive from the next device of the ring (ppermute by one)."""
    devices = jax.lax.axis_size(axis_name)
    return jax.lax.ppermute(x, axis_name, [(i, (i - 1) % devices) for i in range(devices)])


def _initial_partial(groups: HeadGroup, sinks: Float[Array, "U G"] | None) -> OutputAndLse:
    """Initial state of queries without keys: output 0, log-sum-exp NEG_INF or the sink."""
    output = jnp.zeros((*groups.query.shape[:-1], groups.value.shape[-1]), jnp.float32)
    lse = jnp.full(groups.query.shape[:-1], NEG_INF, jnp.float32)
    if sinks is not None:
        lse = jnp.broadcast_to(sinks.astype(jnp.float32)[..., None], lse.shape)
    return pvary_like((output, lse), groups.query)


def _combine(a: OutputAndLse, b: OutputAndLse) -> OutputAndLse:
    """Combine outputs and log-sum-exps of two disjoint sets of keys."""
    # A mean of values is their sum over weights that sum to 1, relative to the log-sum-exp.
    partials = (PartialAttention(output, jnp.ones_like(lse), lse) for output, lse in (a, b))
    both = combine_partial_attention(*partials)
    return finish_partial_attention(both), log_denominator(both)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    options: RingOptions, groups: HeadGroup, key_positions: Any, sinks: Float[Array, "U G"] | None
) -> Float32[Array, "U G T Hv"]:
    return _forward(options, groups, key_positions, sinks)[0]


def _forward(
    options: RingOptions, groups: HeadGroup, key_positions: Any, sinks: Float[Array, "U G"] | None
) -> Any:
    device, devices = jax.lax.axis_index(options.axis_name), jax.lax.axis_size(options.axis_name)

    def attend_remote(payload: Any, owner: Array) -> OutputAndLse:
        remote_groups = _with_remote_keys(options, groups, key_positions, payload, owner)
        return map_head_groups(head_group_attention, options.blockwise, remote_groups)

    def step(carry: Any, step_index: Array) -> tuple[Any, None]:
        partial, payload = carry
        next_payload = _shift_ring(options.axis_name, payload)  # while this device works
        remote = attend_remote(payload, (device + step_index) % devices)
        return (_combine(partial, remote), next_payload), None

    initial = _initial_partial(groups, sinks), _ring_payload(options, groups)
    (partial, payload), _ = jax.lax.scan(step, initial, jnp.arange(devices - 1))
    total = _combine(partial, attend_remote(payload, (device - 1) % devices))
    output, lse = (checkpoint_name(x, BLOCKWISE_REMAT_NAME) for x in total)
    return output, (groups, key_positions, sinks, output, lse)


def _wait_for(dependency: Float32[Array, "..."], tree: T) -> T:
    """Return the tree, on a CPU by an operation that needs the dependency.

    XLA for CPUs runs a collective beside a loop with collectives where no data order them, and the
    devices, which do not agree on the order, hang; it removes `jax.lax.optimization_barrier`.
    """
    if target_platform() != "cpu":
        return tree
    zero = 0.0 * jnp.sum(dependency.ravel()[:1])
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)


def _backward(
    options: RingOptions, residuals: Any, d_output: Float32[Array, "U G T Hv"]
) -> tuple[HeadGroup, None, Array | None]:
    """Backward ring: each device adds to the gradients of the keys and values that pass."""
    groups, key_positions, sinks, output, lse = residuals
    device, devices = jax.lax.axis_index(options.axis_name), jax.lax.axis_size(options.axis_name)

    def remote_gradient(payload: Any, owner: Array) -> tuple[Any, Any]:
        """Gradients of query and bias (which stay) and of keys and values (which move on)."""
        remote_groups = _with_remote_keys(options, groups, key_positions, payload, owner)
        gradients = map_head_groups(
            head_group_gradient, options.blockwise, remote_groups, output, lse, d_output
        )
        key_value_gradients = [gradients.key, gradients.value]
        if options.key_is_value:
            key_value_gradients = [gradients.key + gradients.value]
        return (gradients.query, gradients.bias), key_value_gradients

    def step(carry: Any, step_index: Array) -> tuple[Any, None]:
        local_gradients, payload, key_value_gradients = carry
        # While this device works.
        next_payload, received = _shift_ring(options.axis_name, (payload, key_value_gradients))
        gradients = remote_gradient(payload, (device + step_index) % devices)
        local_gradients, total = jax.tree.map(jnp.add, (local_gradients, received), gradients)
        return (local_gradients, next_payload, total), None

    payload = _ring_payload(options, groups)
    local_gradients, key_value_gradients = remote_gradient(payload, device)
    next_payload = _shift_ring(options.axis_name, _wait_for(lse, payload))
    initial = local_gradients, next_payload, key_value_gradients
    ((query, bias), _, key_value_gradients), _ = jax.lax.scan(step, initial, jnp.arange(1, devices))
    key, value = (*_shift_ring(options.axis_name, key_value_gradients), None)[:2]  # home
    if options.key_is_value:  # the keys have all of it
        value = pvary_like(jnp.zeros_like(key), key)
    gradients = cast_gradients(HeadGroup(query, key, value, None, bias, None), groups)
    d_sinks = None if sinks is None else sinks_gradient(sinks, output, lse, d_output)
    return gradients, None, d_sinks


_ring.defvjp(_forward, _backward)
