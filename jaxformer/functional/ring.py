"""Attention over a sequence that is shared out among devices."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxformer.functional.attention import Normalizer
from jaxformer.functional.heads import check_heads, over_heads, weights_shape
from jaxformer.functional.linear import dropout
from jaxformer.functional.online_softmax import (
    PartialAttention,
    attend_partially,
    finish_attention,
    merge_attention,
)


def ring_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    axis_name: str,
    scale: float | None = None,
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "*batch T N Hv"]:
    """`dot_product_attention` of a device's queries to the keys of all devices along an axis.

        output = finish(merge over devices d of attend_partially(query, key_d, value_d))

    Keys and values go round the ring of devices, one step for each; a device works only on keys
    that some of its queries may see. Each step sends ``S * K * (H + Hv)`` numbers per sequence to
    the next device, all steps together what an all-gather would.

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
    check_heads(query, key, value)
    if dropout_rate != 0.0 and dropout_key is None:
        raise ValueError(f"dropout_rate {dropout_rate} needs a dropout_key.")
    devices, here = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    length = key.shape[-3]
    one_head = partial(
        attend_partially,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        logit_softcap=logit_softcap,
        normalizer=normalizer,
    )

    def columns(array: Array | None, owner: Array) -> Array | None:
        """What concerns the keys of one device."""
        if array is None or array.shape[-1] == 1:
            return array
        return jax.lax.dynamic_slice_in_dim(array, owner * length, length, axis=-1)

    @jax.checkpoint
    def part(query: Array, key: Array, value: Array, owner: Array) -> PartialAttention:
        arrays = {"value": value, "mask": columns(mask, owner), "bias": columns(bias, owner)}
        if dropout_rate != 0.0 and dropout_key is not None:
            own = jax.random.fold_in(jax.random.fold_in(dropout_key, here), owner)
            ones = jnp.ones(weights_shape(query, key), jnp.float32)
            arrays["multipliers"] = dropout(ones, dropout_rate, own)
        return PartialAttention(*over_heads(one_head, "(t,v),(t),(t)", query, key, **arrays))

    def step(carry, steps):
        gathered, key, value = carry
        key, value = jax.lax.ppermute(
            (key, value), axis_name, [(i, (i - 1) % devices) for i in range(devices)]
        )
        owner = (here + steps) % devices
        seen = columns(mask, owner)
        meet = lambda: merge_attention(gathered, part(query, key, value, owner))  # noqa: E731
        if seen is None:
            return (meet(), key, value), None
        return (jax.lax.cond(jnp.any(seen), meet, lambda: gathered), key, value), None

    # The loop carries arrays that differ between devices, and their types must say so from the
    # start: `where` takes that from the index, and the compiler takes `where` out again.
    key, value = (jnp.where(here >= 0, x, x) for x in (key, value))
    start = part(query, key, value, here), key, value
    (gathered, _, _), _ = jax.lax.scan(step, start, jnp.arange(1, devices))
    output = finish_attention(gathered).astype(query.dtype)
    return jnp.moveaxis(output, -2, -4).reshape(*query.shape[:-1], value.shape[-1])
