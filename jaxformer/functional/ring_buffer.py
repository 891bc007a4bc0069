"""Ring-buffer slots (KV cache): slot of each position, and writing entries to slots."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer, Shaped

from jaxformer.functional.argument_checks import typechecked


@typechecked
def ring_buffer_slots(
    positions: Integer[Array, "*batch T"], valid: Bool[Array, "*batch T"], num_slots: int
) -> Int[Array, "*batch T"]:
    """Ring-buffer slot of each new entry; `num_slots` (out of range) for entries to drop.

        slot = position mod num_slots

    Entries that are not valid go nowhere, and so do those that a later one of the same call would
    overwrite. A buffer with room for every position is a ring that never turns.

    Args:
        positions: Of the new entries, rising in each row.
        valid: False for padding.
        num_slots: Slots of the ring.

    Returns:
        A slot for each entry, different ones within a row, for `write_slots`.

    Raises:
        ValueError: There is no slot.
    """
    if num_slots < 1:
        raise ValueError(f"A ring has at least 1 slot; got {num_slots}.")
    last = jnp.max(jnp.where(valid, positions, -1), axis=-1, keepdims=True, initial=-1)
    is_written = valid & (positions > last - num_slots)
    return jnp.where(is_written, positions % num_slots, num_slots)


@typechecked
def write_slots(
    buffer: Shaped[Array, "..."],
    new: Shaped[Array, "..."],
    slots: Integer[Array, "*batch T"],
    *,
    layer_index: Int[Array, ""] | None = None,
) -> Shaped[Array, "..."]:
    """Write new entries to their slots of a buffer; out-of-range slots drop the entry.

        y[slots[t]] = new[t];    y[s] = buffer[s] elsewhere

    Args:
        buffer: Entries so far, ``[*batch, S, *any]``.
        new: Entries to put, ``[*batch, T, *any]`` in any dtype; the buffer's stays.
        slots: Different ones within a row; one outside the buffer, as -1 is, drops its
            entry.
        layer_index: Which one of several buffers, ``[L, *batch, S, *any]``, all of which are
            returned.

    Returns:
        The buffer with the new entries.

    Raises:
        ValueError: The shapes do not go together.
    """
    batch, num_leading = slots.shape[:-1], slots.ndim
    buffer_shape = buffer.shape if layer_index is None else buffer.shape[1:]
    if (
        buffer_shape[: num_leading - 1] != batch
        or new.shape != slots.shape + buffer_shape[num_leading:]
    ):
        raise ValueError(
            f"buffer {buffer.shape} and new {new.shape} do not go with slots {slots.shape}: they "
            "are [*batch, S, *any], [*batch, T, *any] and [*batch, T]."
        )
    grid = jnp.meshgrid(*(jnp.arange(n) for n in slots.shape), indexing="ij")
    layer = () if layer_index is None else (layer_index,)
    at = buffer.at[(*layer, *grid[:-1], slots)]
    return at.set(new.astype(buffer.dtype), mode="drop", wrap_negative_indices=False)
