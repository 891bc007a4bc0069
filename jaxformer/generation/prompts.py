"""What to continue: rows of different lengths, checked before anything runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxformer import functional as F
from jaxformer.config import Encoder, EncoderDecoder, TransformerConfig

Tokens = Int[Array, "..."] | Int[np.ndarray, "..."]


class Request(NamedTuple):
    """Prompts, and what they are continued with.

    Attributes:
        prompt: Token ids, padded behind.
        lengths: Tokens of each row.
        stop: Token ids that end each row; -1 is none.
        vocab_size: Only ids below it are chosen.
        source: What an encoder-decoder reads.
        source_segments: 0 marks its padding.
    """

    prompt: Int[Array, "*batch P"]
    lengths: Int[Array, "*batch"]
    stop: Int[Array, "*batch K"]
    vocab_size: Int[Array, ""]
    source: Int[Array, "*batch S"] | None = None
    source_segments: Int[Array, "*batch S"] | None = None


def pad_rows(rows: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
    """Rows of different lengths as one array, zeros behind, and their lengths."""
    lengths = np.asarray([len(row) for row in rows], np.int32)
    padded = np.zeros((len(rows), max(lengths, default=0)), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded, lengths


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
    """Check what is to be continued and bring it into one form.

    Args:
        config: The model.
        prompt: Token ids: an array, or a list of rows that may differ in length.
        max_new_tokens: Most tokens to add.
        lengths: Tokens of each row of an array whose rows are padded behind.
        stop_tokens: Ids that end a row, the same for all, or an array with those of each.
        vocab_size: Only ids below it are chosen.
        source: What an encoder-decoder reads: an array or a list of rows.
        source_segments: 0 marks padding of the source; follows from a list.

    Returns:
        The request.

    Raises:
        ValueError: An empty prompt, a token id outside the vocabulary, a length beyond a learned
            position table, a source that is missing or not read, or a model that is an encoder.
    """
    if isinstance(config.topology, Encoder):
        raise ValueError(
            f"generate continues text with a Decoder or an EncoderDecoder; got {config.topology}."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; got {max_new_tokens}.")
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], list | tuple):
        prompt, lengths = pad_rows(prompt)
    prompt = jnp.asarray(prompt) if len(prompt) else jnp.zeros(0, jnp.int32)
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"A prompt is token ids, integers; got dtype {prompt.dtype}.")
    full = jnp.full(prompt.shape[:-1], prompt.shape[-1], jnp.int32)
    lengths = full if lengths is None else jnp.asarray(lengths, jnp.int32)
    check_lengths(config, prompt, lengths, max_new_tokens)
    F.check_token_ids(prompt, config.vocab_size)
    if isinstance(source, list | tuple):
        source, source_lengths = pad_rows(source)
        real = F.length_mask(jnp.asarray(source_lengths), source.shape[-1])
        source_segments = real.astype(jnp.int32)
    reads = isinstance(config.topology, EncoderDecoder)
    if reads != (source is not None):
        raise ValueError(
            "An EncoderDecoder reads a source: pass source=token_ids; the prompt is the decoder's "
            "start token."
            if reads
            else "A Decoder has no encoder for a source; put it into the prompt."
        )
    stop = jnp.asarray(stop_tokens, jnp.int32)
    stop = jnp.broadcast_to(stop, (*prompt.shape[:-1], stop.shape[-1]))
    limit = config.vocab_size if vocab_size is None else vocab_size
    if not 1 <= limit <= config.vocab_size:
        raise ValueError(f"vocab_size must be in [1, {config.vocab_size}]; got {limit}.")
    return Request(
        prompt,
        lengths,
        stop,
        jnp.int32(limit),
        None if source is None else jnp.asarray(source),
        None if source_segments is None else jnp.asarray(source_segments),
    )


def check_lengths(
    config: TransformerConfig,
    prompt: Int[Array, "*batch P"],
    lengths: Int[Array, "*batch"],
    max_new_tokens: int,
) -> None:
    """Refuse empty rows, and those that would outgrow a learned position table."""
    shortest, longest = 0, prompt.shape[-1]
    if not isinstance(lengths, jax.core.Tracer) and lengths.size:
        shortest, longest = int(jnp.min(lengths)), int(jnp.max(lengths))
    else:
        shortest = min(longest, 1)
    if shortest < 1:
        raise ValueError("The prompt is empty; give at least one token (end-of-text will do).")
    if longest > prompt.shape[-1]:
        raise ValueError(
            f"lengths go up to {longest}, but the prompt has {prompt.shape[-1]} places."
        )
    if config.max_length is not None and longest + max_new_tokens > config.max_length:
        raise ValueError(
            f"The model has {config.max_length} learned positions; a prompt of {longest} tokens "
            f"and {max_new_tokens} new ones need {longest + max_new_tokens}."
        )
