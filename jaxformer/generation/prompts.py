"""Check, pad and batch prompts and sources before decoding."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxformer import functional as F
from jaxformer.checks import require_count
from jaxformer.config import TransformerConfig

Tokens = Int[Array, "..."] | Int[np.ndarray, "..."]


class Request(NamedTuple):
    """Prompts with their lengths, stop tokens and optional encoder sources.

    Attributes:
        prompt: Token ids, right-padded.
        lengths: Tokens per row.
        stop_tokens: Ids that end each row, padded with -1.
        vocab_size: Only ids below it are generated.
        source: Token ids of an encoder-decoder's source.
        source_segments: 0 for padding of the source, else 1.
    """

    prompt: Int[Array, "*batch P"]
    lengths: Int[Array, "*batch"]
    stop_tokens: Int[Array, "*batch K"]
    vocab_size: Int[Array, ""]
    source: Int[Array, "*batch S"] | None = None
    source_segments: Int[Array, "*batch S"] | None = None


def make_request(
    config: TransformerConfig,
    prompt: Any,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    stop_tokens: Any = (),
    vocab_size: int | None = None,
    source: Any = None,
    source_segments: Any = None,
) -> Request:
    """Check prompts, sources and stop tokens, and convert them to padded arrays.

    Args:
        config: The model.
        prompt: Token ids: an array, a list of rows of any lengths, or a flat list.
        max_new_tokens: Maximum number of new tokens per row.
        lengths: Tokens per row of a right-padded array; not for a list of rows.
        stop_tokens: Ids that end a row: one or several for all rows, or per row as an array or a
            list of rows.
        vocab_size: Only ids below it are generated.
        source: Source of an encoder-decoder, as a list or an array with the prompt's batch axes.
        source_segments: 0 for padding of a source array; not for a list of rows.

    Returns:
        The request.

    Raises:
        ValueError: The prompt or source is empty, a token id is outside the vocabulary, there are
            more tokens than learned positions, the shape of an argument does not match the rows, a
            source is missing or not supported, a number is out of range, or the model is an
            encoder.
    """
    if not config.topology.has_decoder:
        raise ValueError(f"generate needs a Decoder or an EncoderDecoder; got {config.topology}.")
    require_count("max_new_tokens", max_new_tokens)
    allowed_vocab_size = config.vocab_size if vocab_size is None else vocab_size
    require_count("vocab_size", allowed_vocab_size, most=config.vocab_size)
    tokens, list_lengths = as_token_array("prompt", prompt, config.vocab_size)
    if list_lengths is not None and lengths is not None:
        raise ValueError(
            "lengths must not be passed with a list of rows, which has lengths "
            f"{list_lengths.tolist()}; got {lengths}."
        )
    lengths = lengths if list_lengths is None else list_lengths
    row_lengths = check_lengths(config, tokens, lengths, max_new_tokens=max_new_tokens)
    batch_shape = tokens.shape[:-1]
    source_tokens, segments = as_source_array(config, source, source_segments, batch_shape)
    stop = as_stop_array(stop_tokens, batch_shape)
    allowed = jnp.int32(allowed_vocab_size)
    return Request(tokens, row_lengths, stop, allowed, source_tokens, segments)


def flatten_batch(request: Request) -> Request:
    """Return the request with its batch axes flattened to one."""
    count, num_axes = request.lengths.size, request.lengths.ndim

    def rows(x: Array) -> Array:
        return x if x is request.vocab_size else x.reshape(count, *x.shape[num_axes:])

    return jax.tree.map(rows, request)


def pad_to_bucket(request: Request, max_source_length: int | None) -> Request:
    """Pad prompts and sources to a bucketed width, so that compiled programs are reused.

    Widths are multiples of 16, and of larger numbers from 256 on, with at most 1/8 of padding.

    Args:
        request: Prompts and sources.
        max_source_length: Maximum width of the sources; None is no limit.
    """
    prompt, source, segments = request.prompt, request.source, request.source_segments
    request = request._replace(prompt=pad_right(prompt, bucket_length(prompt.shape[-1])))
    if source is None:
        return request
    width = bucket_length(source.shape[-1])
    width = min(width, max_source_length or width)
    segments = jnp.ones(source.shape, jnp.int32) if segments is None else segments
    return request._replace(
        source=pad_right(source, width), source_segments=pad_right(segments, width)
    )


def bucket_length(length: int) -> int:
    """Smallest bucket width of at least `length`."""
    granularity = max(16, 2 ** ((length - 1).bit_length() - 4))
    return -(-length // granularity) * granularity


def pad_right(x: Shaped[Array, "*batch T"], width: int) -> Shaped[Array, "*batch width"]:
    """Pad every row with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def pad_batch(request: Request, multiple: int) -> Request:
    """Repeat the last row until the number of rows is a multiple of `multiple`."""
    count = len(request.lengths)
    rows = np.minimum(np.arange(-(-count // multiple) * multiple), count - 1)
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0) if x.ndim else x, request)


def pad_rows(
    rows: Sequence[Any], *, name: str = "prompt", fill: int = 0
) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
    """Right-pad rows of different lengths into one array; also return their lengths.

    Raises:
        ValueError: A row is no list of integers.
    """
    arrays = [np.asarray(row) for row in rows]
    for i, row in enumerate(arrays):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(f"Row {i} of the {name} must be a list of token ids; got {rows[i]}.")
    lengths = np.asarray([len(row) for row in arrays], np.int32)
    padded = np.full((len(rows), max(lengths, default=0)), fill, np.int64)
    for i, row in enumerate(arrays):
        padded[i, : len(row)] = row
    return padded, lengths


def as_token_array(
    name: str, values: Any, vocab_size: int
) -> tuple[Int[Array, "*batch T"], Int[np.ndarray, " B"] | None]:
    """Return token ids as an array, and the row lengths of a list of rows."""
    lengths = None
    if _is_list_of_rows(values):
        values, lengths = pad_rows(values, name=name)
    tokens = _as_array(values)
    if tokens.ndim < 1:
        raise ValueError(f"The {name} must have an axis of token ids; got {values}.")
    shortest = tokens.shape[-1] if lengths is None else min(lengths)
    if shortest < 1:
        raise ValueError(f"The {name} is empty; pass at least one token (end-of-text works).")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"The {name} must have an integer dtype; got {tokens.dtype}.")
    try:
        F.check_token_ids(tokens, vocab_size)
    except ValueError as wrong:
        raise ValueError(f"In the {name}: {wrong}") from None
    return jnp.asarray(tokens, jnp.int32), lengths  # narrow dtypes do not hold all new ids


def as_source_array(
    config: TransformerConfig, source: Any, segments: Any, rows: tuple[int, ...]
) -> tuple[Int[Array, "*batch S"] | None, Int[Array, "*batch S"] | None]:
    """Return the encoder source as an array, and its padding mask as segments."""
    topology = config.topology
    if not topology.is_encoder_decoder:
        if source is not None or segments is not None:
            raise ValueError("A Decoder has no source; make it part of the prompt.")
        return None, None
    if source is None:
        raise ValueError(
            "An EncoderDecoder needs source=token_ids; its prompt is the decoder start token."
        )
    source_vocab_size = topology.source_vocab_size or config.vocab_size
    tokens, list_lengths = as_token_array("source", source, source_vocab_size)
    *batch, length = tokens.shape
    if tuple(batch) != rows:
        raise ValueError(
            f"Prompt and source must have the same batch axes; got {rows} and {tuple(batch)}."
        )
    if config.max_length is not None and length > config.max_length:
        raise ValueError(
            f"The source has {length} tokens, but the model has {config.max_length} learned "
            "positions."
        )
    if list_lengths is not None:
        if segments is not None:
            raise ValueError(
                "source_segments must not be passed with a list of rows, which has lengths "
                f"{list_lengths.tolist()}."
            )
        return tokens, F.length_mask(jnp.asarray(list_lengths), length).astype(jnp.int32)
    if segments is not None and jnp.shape(segments) != tokens.shape:
        raise ValueError(
            f"source_segments must have the shape of the source, {tokens.shape}; got "
            f"{jnp.shape(segments)}."
        )
    return tokens, None if segments is None else jnp.asarray(segments)


def as_stop_array(values: Any, rows: tuple[int, ...]) -> Int[Array, "*batch K"]:
    """Return the stop ids of each row, padded with -1."""
    if _is_list_of_rows(values):
        values, _ = pad_rows(values, name="stop tokens", fill=-1)
    stop = jnp.atleast_1d(_as_array(values))
    if stop.size and not jnp.issubdtype(stop.dtype, jnp.integer):
        raise ValueError(f"stop_tokens must have an integer dtype; got {stop.dtype}.")
    if stop.shape[:-1] not in ((), rows):
        raise ValueError(
            f"stop_tokens must have shape [K], or [*batch, K] with *batch = {rows}; "
            f"got {stop.shape}."
        )
    return jnp.broadcast_to(stop.astype(jnp.int32), (*rows, stop.shape[-1]))


def _as_array(values: Any) -> Any:
    """Return JAX arrays unchanged, anything else as NumPy arrays, which keep 64-bit numbers."""
    return values if isinstance(values, jax.Array) else np.asarray(values)


def _is_list_of_rows(values: Any) -> bool:
    return isinstance(values, list | tuple) and any(np.ndim(item) == 1 for item in values)


def num_processed_tokens(length: int, max_new_tokens: int) -> int:
    """Number of tokens that the model processes: all but the last new one."""
    return length + max_new_tokens - 1


def check_lengths(
    config: TransformerConfig, prompt: Int[Array, "*batch P"], lengths: Any, *, max_new_tokens: int
) -> Int[Array, "*batch"]:
    """Return row lengths as an array; each must be from 1 to the width and fit max_length."""
    batch_shape, width = prompt.shape[:-1], prompt.shape[-1]
    row_lengths = np.full(batch_shape, width) if lengths is None else lengths
    row_lengths = _as_array(row_lengths)
    if row_lengths.shape != batch_shape or not jnp.issubdtype(row_lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths must be integers of shape {batch_shape}, one per row; got "
            f"{row_lengths.dtype} of shape {row_lengths.shape}."
        )
    shortest, longest = 1, width
    if not isinstance(row_lengths, jax.core.Tracer) and row_lengths.size:
        shortest, longest = int(row_lengths.min()), int(row_lengths.max())
    if shortest < 1:
        raise ValueError(f"lengths must be at least 1; got {shortest}.")
    if longest > width:
        raise ValueError(f"lengths must be at most the prompt's width of {width}; got {longest}.")
    num_processed = num_processed_tokens(longest, max_new_tokens)
    if config.max_length is not None and num_processed > config.max_length:
        raise ValueError(
            f"The model has {config.max_length} learned positions, but a prompt of {longest} "
            f"tokens with max_new_tokens={max_new_tokens} needs {num_processed}."
        )
    return jnp.asarray(row_lengths, jnp.int32)
