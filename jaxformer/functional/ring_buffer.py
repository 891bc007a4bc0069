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

    Padding is dropped, and so are entries that a later entry of the same call would overwrite.

    Args:
        positions: Positions of the new entries, increasing in each row.
        valid: False for padding.
        num_slots: Slots of the ring buffer.

    Returns:
        A slot per entry for `write_slots`, unique within a row.

    Raises:
        ValueError: `num_slots` is below 1.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1; got {num_slots}.")
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
        buffer: Current entries, ``[*batch, S, *any]``.
        new: New entries, ``[*batch, T, *any]``, which are cast to the buffer's dtype.
        slots: Slot of each entry, unique within a row; out of range, such as -1, drops the entry.
        layer_index: Index of the buffer in a stack ``[L, *batch, S, *any]``, which is returned.

    Returns:
        The buffer with the new entries.

    Raises:
        ValueError: The shapes do not match.
    """
    batch, num_leading = slots.shape[:-1], slots.ndim
    buffer_shape = buffer.shape if layer_index is None else buffer.shape[1:]
    if (
        buffer_shape[: num_leading - 1] != batch
        or new.shape != slots.shape + buffer_shape[num_leading:]
    ):
        raise ValueError(
            "buffer, new and slots must be [*batch, S, *any], [*batch, T, *any] and [*batch, T]; "
            f"got {buffer.shape}, {new.shape} and {slots.shape}."
        )
    grid = jnp.meshgrid(*(jnp.arange(n) for n in slots.shape), indexing="ij")
    layer = () if layer_index is None else (layer_index,)
    at = buffer.at[(*layer, *grid[:-1], slots)]
    return at.set(new.astype(buffer.dtype), mode="drop", wrap_negative_indices=False)
