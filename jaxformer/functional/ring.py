"""Attention over a sequence that is shared out among devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer.functional.arguments import checked
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.heads import check_heads, over_heads, weights_shape
from jaxformer.functional.linear import dropout
from jaxformer.functional.online_softmax import (
    NOTHING,
    PartialAttention,
    attend_partially,
    finish_attention,
    merge_attention,
)
from jaxformer.functional.scores import Normalizer, scaled

RING_BLOCK = 512  # queries whose scores are there at a time, and at most
KeyValue = tuple[Float[Array, "..."], ...]  # or one array that is both


def ring_order(length: int, devices: int) -> Int[np.ndarray, " T"]:
    """In which order a sequence is shared out, so that causal attention gives all equal work.

        device i of d has parts i and 2 d - 1 - i of 2 d equal ones

    Where only earlier tokens are seen, an early part has little to attend to and a late one much;
    each device has one of either. In the given order, consecutive equal shares are those.

    Args:
        length: Tokens of the sequence.
        devices: That it is shared out among; 1 changes nothing.

    Returns:
        Positions, so that ``x[ring_order(len(x), devices)]`` is what devices share.

    Raises:
        ValueError: The length is no multiple of twice the devices.

    Example:
        >>> from jaxformer import functional as F
        >>> F.ring_order(8, 2)  # the first device has the first four
        array([0, 1, 6, 7, 2, 3, 4, 5])

    References:
        Grattafiori et al., The Llama 3 Herd of Models, 2024. arXiv:2407.21783, section 3.3.2
    """
    if devices == 1:
        return np.arange(length)
    if length % (2 * devices):
        raise ValueError(
            f"A sequence shared by {devices} devices has a multiple of {2 * devices} tokens; "
            f"got {length}."
        )
    parts = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([parts[[i, -1 - i]].ravel() for i in range(devices)])


@checked
def ring_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    axis_name: str,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "*batch T N Hv"]:
    """`dot_product_attention` of a device's queries to the keys of all devices along an axis.

        output = finish(merge over devices d of attend_partially(query, key_d, value_d))

    Keys and values go round the ring of devices, one step for each. Queries and keys of two devices
    meet in halves, and a half works only on halves of which it may see something: with causal masks
    all devices have equal work if the sequence is shared out in `ring_order`. Of long halves
    `RING_BLOCK` queries do so at a time, and the backward pass computes their scores again, so that
    of what grows with the square of the length only masks and biases are kept. Each step sends
    ``S * K * (H + Hv)`` numbers per sequence to the next device, all together what an all-gather
    would; ``S * K * H`` where one array is given as key and as value.

    Args:
        query: Queries of this device.
        key: Keys of this device.
        value: Values of this device.
        mask: True where the query may attend to the key, for the queries of this device and the
            keys of all, in the order of devices: ``[..., T, devices * S]``. Axes before as in
            `dot_product_attention`.
        bias: Likewise.
        axis_name: Of the devices that share the sequence, inside `jax.shard_map` or `jax.pmap`.
        scale: As in `dot_product_attention`.
        logit_softcap: As in `dot_product_attention`.
        normalizer: As in `dot_product_attention`.
        dropout_rate: As in `dot_product_attention`.
        dropout_key: Randomness for dropout, the same on all devices; each draws its own from it.

    Returns:
        The mean values of each head for this device's queries, in the dtype of ``query``.

    Raises:
        ValueError: Shapes do not fit, or an option is out of its range.

    References:
        Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite
        Context, 2023. arXiv:2310.01889, section 3
    """
    check_heads(query, key)
    if dropout_rate != 0.0 and dropout_key is None:
        raise ValueError(f"dropout_rate {dropout_rate} needs a dropout_key.")
    query, scale = scaled(query, scale)
    devices, here = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    shared = value is key
    # The loop carries arrays that differ between devices, and their types must say so at once.
    given = [x for x in (query, key, value, mask, bias) if x is not None]
    differs = {axis_name}.union(*(varies_over(x) for x in given))
    query, key, value = (varying(x, *differs) for x in (query, key, value))
    one_head = partial(
        attend_partially,
        scale=scale,
        logit_softcap=logit_softcap,
        normalizer=normalizer,
    )
    blocks, parts, length = _blocks(query.shape[-3]), _parts(key.shape[-3]), key.shape[-3]
    rows, columns = query.shape[-3] // blocks, length // parts

    def tile(array: Array | None, i: Array, j: int, owner: Array) -> Array | None:
        """Of a mask or a bias, what concerns a block of queries and some keys of a device."""
        if array is None:
            return None
        if array.shape[-2] > 1:
            array = jax.lax.dynamic_slice_in_dim(array, i * rows, rows, axis=-2)
        if array.shape[-1] == 1:
            return array
        start = owner * length + j * columns
        return jax.lax.dynamic_slice_in_dim(array, start, columns, axis=-1)

    def meet(gathered: PartialAttention, pair: KeyValue, owner: Array) -> PartialAttention:
        """What each block of queries has gathered once it has met the keys of a device."""

        @jax.checkpoint  # so that the backward pass has room for the scores of one block
        def one(block: tuple[Array, Array, PartialAttention], pair: KeyValue) -> PartialAttention:
            # Else what masks give would be made for all tiles before a loop over layers, and kept.
            (i, query, so_far), seen, added = jax.lax.optimization_barrier((block, mask, bias))
            for j in range(parts):
                key, value = (_split(x, parts)[j] for x in (pair[0], pair[-1]))
                arrays = {"value": value, "mask": tile(seen, i, j, owner)}
                arrays["bias"] = tile(added, i, j, owner)
                if dropout_rate != 0.0 and dropout_key is not None:
                    place = (owner * blocks + i) * parts + j
                    own = jax.random.fold_in(jax.random.fold_in(dropout_key, here), place)
                    ones = jnp.ones(weights_shape(query, key), jnp.float32)
                    arrays["multipliers"] = dropout(ones, dropout_rate, own)
                more = partial(over_heads, one_head, "(t,v),(t),(t)", query, key, **arrays)
                so_far = _merged(so_far, more, arrays["mask"])
            return so_far

        indices = varying(jnp.arange(blocks), *differs)
        return jax.lax.map(lambda block: one(block, pair), (indices, queries, gathered))

    def step(carry: Any, steps: Array):
        gathered, pair = carry
        pair = jax.lax.ppermute(pair, axis_name, [(i, (i - 1) % devices) for i in range(devices)])
        return (meet(gathered, pair, (here + steps) % devices), pair), None

    queries = jnp.stack(_split(query, blocks))
    nothing = jax.tree.map(lambda x: varying(x, *differs), _nothing(queries, key, value))
    pair = (key,) if shared else (key, value)
    start = meet(nothing, pair, here), pair
    (gathered, _), _ = jax.lax.scan(step, start, jnp.arange(1, devices))
    output = jnp.concatenate(list(finish_attention(gathered)), axis=-2).astype(query.dtype)
    return jnp.moveaxis(output, -2, -4).reshape(*query.shape[:-1], value.shape[-1])


def _blocks(length: int) -> int:
    """In how many blocks queries meet keys: of at most `RING_BLOCK` where the length allows it."""
    parts = _parts(length)
    counts = range(parts, 4 * length // RING_BLOCK + 1, parts)
    fitting = (n for n in counts if length % n == 0 and length // n <= RING_BLOCK)
    return next(fitting, parts)


def _parts(length: int) -> int:
    """Two: the early and the late part of `ring_order`. One where the length is odd."""
    return 1 if length % 2 else 2


def _split(x: Float[Array, "*batch T N H"], parts: int) -> list[Float[Array, "*batch t N H"]]:
    t = x.shape[-3] // parts  # not `jnp.split`, whose transpose fails up to JAX 0.7 if parts idle
    return [jax.lax.slice_in_dim(x, i * t, (i + 1) * t, axis=-3) for i in range(parts)]


def _merged(
    so_far: PartialAttention, more: Callable[[], tuple[Array, ...]], mask: Array | None
) -> PartialAttention:
    """With what the mask lets through; nothing is computed where that is nothing."""
    new = lambda: merge_attention(so_far, PartialAttention(*more()))  # noqa: E731
    return new() if mask is None else jax.lax.cond(jnp.any(mask), new, lambda: so_far)


def _nothing(query: Array, key: Array, value: Array) -> PartialAttention:
    """What queries have gathered that have met no key."""
    *batch, N, T, _ = weights_shape(query, key)
    heads = (*batch, key.shape[-2], N // key.shape[-2], T)
    total = jnp.zeros(heads, jnp.float32)
    return PartialAttention(
        jnp.zeros((*heads, value.shape[-1]), jnp.float32), total, jnp.full_like(total, NOTHING)
    )
