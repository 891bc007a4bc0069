"""Vectorise a one-head function over heads and batch (MHA, GQA, MQA)."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

# The axes of one head's arrays, in the notation of jnp.vectorize.
HEAD_SIGNATURES = {
    "query": "(t,h)",
    "key": "(s,h)",
    "value": "(s,v)",
    "mask": "(t,s)",
    "bias": "(t,s)",
    "dropout_multipliers": "(t,s)",
    "sink": "()",
}


def vectorize_heads(
    one_head: Callable[..., Any],
    output_axes: str,
    query: Array,
    key: Array,
    **head_arrays: Array | None,
) -> Any:
    """Apply a one-head function to all heads and sequences, [*batch, K, N // K, ...]."""
    shape = weights_shape(query, key)
    num_kv_heads = key.shape[-2]
    arrays = {"query": query, "key": key}
    arrays |= {name: array for name, array in head_arrays.items() if array is not None}

    def split(name: str, array: Array) -> Array:
        if name == "sink":
            return array.reshape(*(1,) * (query.ndim - 3), num_kv_heads, -1)
        if name in ("query", "key", "value"):
            return _split_heads(array, num_kv_heads)
        return _split_mask_heads(name, array, shape, num_kv_heads)

    grouped_arrays = [split(name, array) for name, array in arrays.items()]
    signature = ",".join(HEAD_SIGNATURES[name] for name in arrays) + f"->{output_axes}"

    def positional(*values: Array) -> Any:
        return one_head(**dict(zip(arrays, values, strict=True)))

    # vectorize shares axes of size 1 instead of repeating them. Heads stand in front of time for
    # speed: on CPU an einsum over [T, N, H] takes twice as long forwards.
    return jnp.vectorize(positional, signature=signature)(*grouped_arrays)


def _split_heads(x: Float[Array, "*batch T N H"], num_kv_heads: int) -> Float[Array, "..."]:
    """Bring ``[*batch, T, N, H]`` to ``[*batch, K, N // K, T, H]``."""
    *batch, T, N, H = x.shape
    return jnp.moveaxis(x.reshape(*batch, T, num_kv_heads, N // num_kv_heads, H), -4, -2)


def _split_mask_heads(name: str, array: Array, shape: tuple[int, ...], num_kv_heads: int) -> Array:
    """Broadcast a mask or bias to [*batch, K, N // K, T, S]; axes before T may stay 1."""
    has_no_head_axis = name == "mask" and array.ndim < len(shape)
    full_shape = (*shape[:-3], *shape[-2:]) if has_no_head_axis else shape
    padded_shape = (1,) * (len(full_shape) - array.ndim) + array.shape
    if len(padded_shape) > len(full_shape) or any(
        n not in (1, m) for n, m in zip(padded_shape, full_shape, strict=True)
    ):
        axes = "[*batch, queries, keys]" if has_no_head_axis else "[*batch, heads, queries, keys]"
        raise ValueError(
            f"{name} of shape {array.shape} does not broadcast to {axes} = {full_shape}."
        )
    *batch, N, T, S = (
        (*padded_shape[:-2], 1, *padded_shape[-2:]) if has_no_head_axis else padded_shape
    )
    groups = (1, 1) if N == 1 else (num_kv_heads, N // num_kv_heads)
    grouped = array.reshape(*batch, *groups, T, S)
    return jnp.broadcast_to(grouped, (*batch, *groups, *shape[-2:]))


def weights_shape(query: Array, key: Array) -> tuple[int, ...]:
    """Shape of the attention weights: (*batch, N, T, S)."""
    *batch, T, N, _ = query.shape
    return (*batch, N, T, key.shape[-3])
