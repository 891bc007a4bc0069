"""The decoding loop, compiled as one program."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.config import Decoder, TransformerConfig
from jaxformer.generation.samplers import Greedy, Sampler, choose
from jaxformer.layers import Transformer


def generate(
    config: TransformerConfig,
    params: Any,
    prompt: Int[Array, "*batch P"] | Int[np.ndarray, "*batch P"],
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: PRNGKeyArray | None = None,
    vocab_size: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Int[Array, "*batch P_plus_new"]:
    """Continue each prompt by `max_new_tokens` tokens.

    Every step runs the model over the whole text so far, so the time grows with the square of the
    length (and the cube in attention).

    Args:
        config: A decoder.
        params: Its parameters.
        prompt: Token ids; all rows of one length, at least one token.
        max_new_tokens: How many to add.
        sampler: `Greedy()` or `Sample(...)`.
        key: Random key; `Sample` needs one.
        vocab_size: Only ids below it are chosen: the tokenizer's number of tokens where the model
            has more. None allows all.
        dtype: Of the computation.

    Returns:
        The prompt followed by the new tokens.

    Raises:
        ValueError: An empty prompt, a token id outside the vocabulary, a length beyond a learned
            position table, a missing key, or a model that is no decoder.
    """
    length = prompt.shape[-1] + max_new_tokens
    if not isinstance(config.topology, Decoder):
        raise ValueError(f"generate continues text with a Decoder; got {config.topology}.")
    if prompt.shape[-1] == 0:
        raise ValueError("The prompt is empty; give at least one token (end-of-text will do).")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; got {max_new_tokens}.")
    if config.max_length is not None and length > config.max_length:
        raise ValueError(
            f"The model has {config.max_length} learned positions; a prompt of "
            f"{prompt.shape[-1]} tokens and {max_new_tokens} new ones need {length}."
        )
    if key is None and not isinstance(sampler, Greedy):
        raise ValueError(f"{sampler} draws at random: pass key=jax.random.key(seed).")
    F.check_token_ids(prompt, config.vocab_size)
    key = jax.random.key(0) if key is None else key
    limit = jnp.int32(config.vocab_size if vocab_size is None else vocab_size)
    return _decode(
        config, sampler, max_new_tokens, jnp.dtype(dtype), params, jnp.asarray(prompt), key, limit
    )


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _decode(
    config: TransformerConfig,
    sampler: Sampler,
    max_new_tokens: int,
    dtype: jnp.dtype,
    params: Any,
    prompt: Int[Array, "*batch P"],
    key: PRNGKeyArray,
    vocab_size: Int[Array, ""],
) -> Int[Array, "*batch P_plus_new"]:
    model = Transformer(config, dtype=dtype)
    *batch, start = prompt.shape
    blank = jnp.zeros((*batch, max_new_tokens), prompt.dtype)
    text = jnp.concatenate([prompt, blank], axis=-1)

    def add_token(at, carry):
        text, seen = carry
        index = jnp.broadcast_to(jnp.arange(text.shape[-1]), text.shape)
        blank = index >= at  # a segment of its own, and no position beyond the text so far
        logits = model.apply(
            {"params": params},
            text,
            positions=jnp.where(blank, 0, index),
            segments=blank.astype(jnp.int32),
        )
        last = jax.lax.dynamic_index_in_dim(logits, at - 1, axis=-2, keepdims=False)
        known = jnp.broadcast_to(jnp.arange(config.vocab_size) < vocab_size, last.shape)
        last = jnp.where(known, last, -jnp.inf)
        token = choose(sampler, last, seen, jax.random.fold_in(key, at)).astype(text.dtype)
        text = jax.lax.dynamic_update_index_in_dim(text, token, at, axis=-1)
        return text, seen | jax.nn.one_hot(token, config.vocab_size, dtype=bool)

    seen = F.seen_tokens(prompt, config.vocab_size)
    text, _ = jax.lax.fori_loop(start, start + max_new_tokens, add_token, (text, seen))
    return text
