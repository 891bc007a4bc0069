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

    Plain indexing would clamp large indices and wrap negative ones, to wrong rows without an error.
    """
    table = jnp.asarray(table)  # NumPy arrays have no `at`
    # The gradient sums over equal tokens: 256 equal rows of bfloat16 would no longer grow.
    wide = table.astype(jnp.float32) if table.dtype.itemsize < 4 else table
    rows = wide.at[indices].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return rows.astype(table.dtype)


@typechecked
def embed(
    table: Float[Array, "V D"],
    tokens: Integer[Array, "*batch"],
    *,
    axis_name: str | None = None,
    own_tokens: bool = False,
) -> Float[Array, "*batch D"]:
    """Look up the embedding of each token.

        y = table[tokens]

    Args:
        table: One row per token of the vocabulary.
        tokens: Ids in [0, V). Check input from outside the program with `check_token_ids`.
        axis_name: Mesh axis over which the rows are sharded; the results are summed over it.
        own_tokens: Whether each device along it has tokens of its own. Then the ids are gathered
            and the sums are scattered; the table stays where it is.

    Returns:
        One row per token; a row of NaN for an id out of range.

    References:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, 2019. arXiv:1909.08053, section 3 (the shared vocabulary)
    """
    if axis_name is None:
        return _gather_rows(table, tokens)
    rows_per_device, devices = table.shape[0], jax.lax.axis_size(axis_name)
    looked_up = jax.lax.all_gather(tokens, axis_name) if own_tokens else tokens
    local_ids = looked_up - rows_per_device * jax.lax.axis_index(axis_name)
    is_local = ((local_ids >= 0) & (local_ids < rows_per_device))[..., None]
    rows = jnp.where(is_local, _gather_rows(table, local_ids), 0)
    in_vocabulary = ((tokens >= 0) & (tokens < rows_per_device * devices))[..., None]
    reduce = jax.lax.psum_scatter if own_tokens else jax.lax.psum
    return jnp.where(in_vocabulary, reduce(rows, axis_name), jnp.nan)


def check_token_ids(
    tokens: Integer[Array, "*batch"] | Integer[np.ndarray, "*batch"], vocab_size: int
) -> None:
    """Check that token ids are in [0, vocab_size).

    It waits for the values, so call it on input data, not in the training loop. On tracers, as
    under `jax.jit`, it does nothing; `embed` returns NaN for a wrong id.

    Args:
        tokens: Ids.
        vocab_size: V, the number of rows of the embedding.

    Raises:
        ValueError: An id is out of range; the message has the first one, its index and
            `vocab_size`.
    """
    if isinstance(tokens, jax.core.Tracer):
        return
    values = np.asarray(tokens)
    invalid = np.argwhere((values < 0) | (values >= vocab_size))
    if len(invalid):
        place = tuple(int(i) for i in invalid[0])
        raise ValueError(
            f"Token id {values[place]} at position {place} is outside the vocabulary of "
            f"{vocab_size}: ids must be from 0 to {vocab_size - 1}."
        )


@typechecked
def shift_right(tokens: Integer[Array, "*batch T"], start: int) -> Integer[Array, "*batch T"]:
    """Shift targets right by one to get the decoder's input (teacher forcing).

        y = [start, tokens[0], ..., tokens[T - 2]]

    Position t then predicts ``tokens[t]`` from the true tokens before it.

    Args:
        tokens: Targets.
        start: First id of every sequence (T5 and Marian use their padding id).

    Returns:
        The decoder's input, of the same shape, in at least int32.

    References:
        Williams and Zipser, A Learning Algorithm for Continually Running Fully Recurrent Neural
        Networks, 1989 (teacher forcing)
    """
    first = jnp.full_like(tokens[..., :1], start)  # empty if T is 0
    return jnp.concatenate([first, tokens[..., :-1]], axis=-1)


@typechecked
def learned_positions(
    table: Float[Array, "M D"], positions: Integer[Array, "*batch T"], *, offset: int = 0
) -> Float[Array, "*batch T D"]:
    """Look up the learned embedding of each position.

        y = table[positions + offset]

    The table has no rows for positions beyond its length.

    Args:
        table: One row per position.
        positions: Position of each token, counted from 0.
        offset: Rows of the table before the row of position 0; 2 in OPT.

    Returns:
        One row per position; a row of NaN for a position out of range.

    References:
        Gehring et al., Convolutional Sequence to Sequence Learning, 2017. arXiv:1705.03122,
        section 3.1
    """
    return _gather_rows(table, positions + offset)


def check_positions(
    positions: Integer[Array, "*batch"] | Integer[np.ndarray, "*batch"], max_length: int
) -> None:
    """Check that positions are in [0, max_length).

    It waits for the values; on tracers it does nothing.

    Args:
        positions: Position of each token.
        max_length: Number of positions.

    Raises:
        ValueError: A position is out of range; the message has the first one and `max_length`.
    """
    if isinstance(positions, jax.core.Tracer):
        return
    values = np.asarray(positions)
    invalid = values[(values < 0) | (values >= max_length)]
    if len(invalid):
        raise ValueError(
            f"Position {invalid[0]} is out of range: positions must be from 0 to {max_length - 1}."
        )


@typechecked
def unit_vectors(
    x: Float[Array, "*batch"], *, axis: int = -1, eps: float = 0.0
) -> Float[Array, "*batch"]:
    """Divide vectors by their length, x / max(sqrt(sum(x ** 2) + eps), 1e-12).

    Args:
        x: Vectors in any float dtype.
        axis: Axis of the features.
        eps: Added to the square of the length.

    Returns:
        Vectors of length 1, in the dtype of `x`; vectors of zeros stay as they are.

    References:
        Yang et al., Baichuan 2: Open Large-scale Language Models, 2023. arXiv:2309.10305, section
        2.5 (NormHead); Loshchilov et al., nGPT, 2024. arXiv:2410.01131 (with an epsilon)
    """
    wide = x.astype(jnp.float32)
    squares = jnp.sum(wide * wide, axis=axis, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.maximum(squares + eps, 1e-24))).astype(x.dtype)
