"""Embedding lookup of tokens and learned positions, checks of ids, and `shift_right`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from jaxformer.functional.argument_checks import typechecked


def _gather_rows(
    table: Float[Array, "rows D"], indices: Integer[Array, "*batch"]
) -> Float[Array, "*batch D"]:
    """Gather rows of a table; indices out of range give rows of NaN.

    Plain indexing would clamp the one kind and wrap the other, to wrong rows that look right.
    """
    table = jnp.asarray(table)  # NumPy arrays have no `at`
    return table.at[indices].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@typechecked
def embed(
    table: Float[Array, "V D"], tokens: Integer[Array, "*batch"], *, axis_name: str | None = None
) -> Float[Array, "*batch D"]:
    """Look up the embedding of each token.

        y = table[tokens]

    Args:
        table: One row per token of the vocabulary.
        tokens: Ids in [0, V). Check what comes from outside with `check_token_ids`.
        axis_name: Of the devices among which the vocabulary is shared out in equal parts; each has
            the rows of its part, in the order of devices, and the rows found are summed over them.

    Returns:
        One row per token. A wrong id gives a row of NaN, never a neighbour's row.

    References:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, 2019. arXiv:1909.08053, section 3 (the shared vocabulary)
    """
    if axis_name is None:
        return _gather_rows(table, tokens)
    rows_per_device, devices = table.shape[0], jax.lax.axis_size(axis_name)
    local_ids = tokens - rows_per_device * jax.lax.axis_index(axis_name)
    is_local = ((local_ids >= 0) & (local_ids < rows_per_device))[..., None]
    rows = jnp.where(is_local, _gather_rows(table, local_ids), 0)
    in_vocabulary = ((tokens >= 0) & (tokens < rows_per_device * devices))[..., None]
    return jnp.where(in_vocabulary, jax.lax.psum(rows, axis_name), jnp.nan)


def check_token_ids(
    tokens: Integer[Array, "*batch"] | Integer[np.ndarray, "*batch"], vocab_size: int
) -> None:
    """Check that token ids are in [0, vocab_size).

    A check on the host, for arrays that have values: it waits for the device, so call it where
    tokens enter, not in the training loop. Under a transformation such as `jax.jit` there are no
    values yet and it does nothing; `embed` then gives NaN for a wrong id.

    Args:
        tokens: Ids.
        vocab_size: V, the number of rows of the embedding.

    Raises:
        ValueError: For the first id that is out of range; names the id, its place and `vocab_size`.
    """
    if isinstance(tokens, jax.core.Tracer):
        return
    values = np.asarray(tokens)
    invalid = np.argwhere((values < 0) | (values >= vocab_size))
    if len(invalid):
        place = tuple(int(i) for i in invalid[0])
        raise ValueError(
            f"Token id {values[place]} at position {place} is outside the vocabulary of "
            f"{vocab_size}: ids go from 0 to {vocab_size - 1}."
        )


@typechecked
def shift_right(tokens: Integer[Array, "*batch T"], start: int) -> Integer[Array, "*batch T"]:
    """Shift targets right by one to get the decoder's input (teacher forcing).

        y = [start, tokens[0], ..., tokens[T - 2]]

    Position t then predicts ``tokens[t]`` from the true tokens before it, whatever the model would
    have said there. That spares training the accumulation of errors; generation still has it.

    Args:
        tokens: Targets.
        start: Id that opens every sequence (T5 and Marian use their padding id).

    Returns:
        The decoder's input, of the same shape, as int32 where the targets' dtype is narrower.

    References:
        Williams and Zipser, A Learning Algorithm for Continually Running Fully Recurrent Neural
        Networks, 1989 (teacher forcing)
    """
    first = jnp.full_like(tokens[..., :1], start)  # empty where there is no token
    return jnp.concatenate([first, tokens[..., :-1]], axis=-1)


@typechecked
def learned_positions(
    table: Float[Array, "M D"], positions: Integer[Array, "*batch T"], *, offset: int = 0
) -> Float[Array, "*batch T D"]:
    """Look up the learned embedding of each position.

        y = table[positions + offset]

    Unlike a formula of the position, a table ends: it has no row for a longer text than it was
    trained on.

    Args:
        table: One row per position.
        positions: Position of each token, counted from 0.
        offset: Rows of the table before that of position 0; 2 in OPT.

    Returns:
        One row per position. A position that the table does not have gives a row of NaN.

    References:
        Gehring et al., Convolutional Sequence to Sequence Learning, 2017. arXiv:1705.03122,
        section 3.1
    """
    return _gather_rows(table, positions + offset)


def check_positions(
    positions: Integer[Array, "*batch"] | Integer[np.ndarray, "*batch"], max_length: int
) -> None:
    """Check that positions are in [0, max_length).

    A check on the host, for arrays that have values; under a transformation it does nothing.

    Args:
        positions: Position of each token.
        max_length: How many positions there are.

    Raises:
        ValueError: For the first position that is out of range; names it and `max_length`.
    """
    if isinstance(positions, jax.core.Tracer):
        return
    values = np.asarray(positions)
    invalid = values[(values < 0) | (values >= max_length)]
    if len(invalid):
        raise ValueError(
            f"Position {invalid[0]} is outside the {max_length} positions there are: they go from "
            "0 "
            f"to {max_length - 1}."
        )
