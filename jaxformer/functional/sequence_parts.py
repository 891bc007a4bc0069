"""States of a recurrence over blocks of a sequence, and over parts that devices share."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxformer.functional.collectives import pvary_like

T = TypeVar("T")


class PartDocuments(NamedTuple):
    """Documents at the ends of a part: of its first and its last valid token, if it has any."""

    first: Integer[Array, "*batch"]
    last: Integer[Array, "*batch"]
    has_tokens: Bool[Array, "*batch"]


def split_parts(x: Array, axis: int) -> Array:
    """Stack a device's two parts of the sequence, [2, ...].

    Raises:
        ValueError: The number of tokens is odd.
    """
    if x.shape[axis] % 2:
        raise ValueError(
            "A device has two parts of equal length of a sharded sequence (`zigzag_order`), so its "
            f"number of tokens must be even; got {x.shape[axis]}."
        )
    return jnp.stack(jnp.split(x, 2, axis=axis))


def join_parts(x: Array, axis: int) -> Array:
    """Inverse of `split_parts`."""
    return jnp.concatenate([x[0], x[1]], axis=axis)


def apply_affine(
    state: Float[Array, "*batch S C"], part: Float[Array, "*batch S Z"]
) -> Float[Array, "*batch S C"]:
    """State after a part that has [offset, matrix] as columns: matrix @ state + offset."""
    offset, matrix = jnp.split(part, [state.shape[-1]], axis=-1)
    return matrix @ state + offset


def zeros_and_identity(state: Float[Array, "*batch S C"]) -> Float[Array, "2 *batch S Z"]:
    """Columns of the state before each part that make what comes after it an `apply_affine`."""
    shape = 2, *state.shape
    identity = jnp.broadcast_to(jnp.eye(shape[-2], dtype=state.dtype), (*shape[:-1], shape[-2]))
    return jnp.concatenate([jnp.zeros(shape, state.dtype), identity], axis=-1)


def split_masks(
    segments: Array | None, valid: Array | None, shape: tuple[int, ...]
) -> tuple[dict[str, Any], PartDocuments]:
    """Split segments and valid tokens of a device's tokens [*batch, T] into its two parts.

    Returns:
        The masks that are not None, as arguments, and the documents at the ends of the parts.
    """
    masks = {
        name: split_parts(jnp.broadcast_to(mask, shape), -1)
        for name, mask in (("segments", segments), ("valid", valid))
        if mask is not None
    }
    part_shape = 2, *shape[:-1], shape[-1] // 2
    numbers = masks.get("segments", jnp.zeros(part_shape, jnp.int32))
    is_token = masks.get("valid", jnp.ones(part_shape, bool))

    def document_at(index: Array) -> Array:
        return jnp.take_along_axis(numbers, index[..., None], axis=-1)[..., 0]

    first = document_at(jnp.argmax(is_token, axis=-1))
    last = document_at(part_shape[-1] - 1 - jnp.argmax(is_token[..., ::-1], axis=-1))
    return masks, PartDocuments(first, last, jnp.any(is_token, axis=-1))


def states_between_parts(
    advance: Callable[[Float[Array, "..."], T], Float[Array, "..."]],
    summaries: T,
    documents: PartDocuments,
    initial_state: Float[Array, "..."],
    axis_name: str,
) -> tuple[Float[Array, "2 ..."], Float[Array, "..."]]:
    """States before the two parts of this device, and the state after the whole sequence.

    A summary is what a part does to the state before it: every device gathers the summaries of
    all parts, which have no time axis, and applies them in order.

    Args:
        advance: State after a part, from the state before it and the part's summary.
        summaries: Arrays [2, ...] of this device's parts.
        documents: Of this device's parts; a part that begins with another document than that
            before it begins with a state of zeros.
        initial_state: State before the sequence.
        axis_name: Mesh axis over which the sequence is sharded.
    """

    def in_order(x: Array) -> Array:
        every = jax.lax.all_gather(x, axis_name)  # [devices, 2, ...]
        return jnp.concatenate([every[:, 0], every[::-1, 1]])

    def step(carry: Any, part: Any) -> tuple[Any, Array]:
        state, document, has_begun = carry
        summary, ends = part
        continues = ~has_begun | ~ends.has_tokens | (ends.first == document)
        continues = jnp.expand_dims(continues, tuple(range(continues.ndim, state.ndim)))
        before = jnp.where(continues, state, 0)
        document = jnp.where(ends.has_tokens, ends.last, document)
        return (advance(before, summary), document, has_begun | ends.has_tokens), before

    parts = jax.tree.map(in_order, (summaries, documents))
    carry = (
        initial_state,
        jnp.zeros_like(documents.last[0]),
        jnp.zeros_like(documents.has_tokens[0]),
    )
    (state, _, _), states = jax.lax.scan(step, pvary_like(carry, parts), parts)
    index = jax.lax.axis_index(axis_name)
    return states[jnp.stack([index, len(states) - 1 - index])], state


def scan_in_blocks(
    step: Callable[[Array, T], tuple[Array, Array]],
    advance: Callable[[Array, tuple[Array, Array]], Array],
    decays: Callable[[T], Array],
    tokens: T,
    state: Float[Array, "*batch S C"],
    chunk_size: int,
) -> tuple[Float[Array, "T *batch C"], Float[Array, "*batch S C"]]:
    """Outputs of a recurrence, and the state after the last token, chunk by chunk.

    About chunk_size ** 0.5 blocks of a chunk run side by side, once from zeros, to find the states
    between them, and once from these. The gradient keeps a state per chunk, and those of one.

    Args:
        step: State after a token, and its output, from the state before it and the token.
        advance: State after a block, from the state before it, the state to which the block alone
            leads, and its decay.
        decays: Decay over all tokens [T, ...] of a block.
        tokens: Arrays with tokens first; tokens of zeros leave the state as it is.
        state: State before the first token; zeros are the state of no tokens.
        chunk_size: Tokens per chunk.
    """
    length = jax.tree.leaves(tokens)[0].shape[0]
    size = max(1, min(chunk_size, length))
    block = 1 + math.isqrt(size - 1)
    size = block * -(-size // block)
    step = jax.checkpoint(step)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, -length % size)] + [(0, 0)] * (x.ndim - 1))
        return jnp.swapaxes(x.reshape(-1, size // block, block, *x.shape[1:]), 1, 2)

    @jax.checkpoint
    def chunk(state: Array, tokens: T) -> tuple[Array, Array]:
        before = state[None]
        if size > block:
            zeros = pvary_like(jnp.zeros((size // block, *state.shape)), state, tokens)
            ends, _ = jax.lax.scan(lambda s, token: (step(s, token)[0], None), zeros, tokens)
            parts = ends, decays(tokens)
            _, before = jax.lax.scan(lambda s, part: (advance(s, part), s), state, parts)
        after, output = jax.lax.scan(step, before, tokens)
        return after[-1], output

    state, output = jax.lax.scan(chunk, state, jax.tree.map(split, tokens))
    output = jnp.swapaxes(output, 1, 2)
    return output.reshape(-1, *output.shape[3:])[:length], state
