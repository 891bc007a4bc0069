"""The compiled decode loops: prefill, sampling or beam search, and stop tokens."""

import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.config import TransformerConfig
from jaxformer.functional.platforms import LANES, target_platform
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import Request, flatten_batch, num_processed_tokens, pad_right
from jaxformer.generation.samplers import Greedy, sample_token
from jaxformer.generation.steps import Context, decode_step, prefill, take_rows
from jaxformer.parallel import replicated


class DecodeConfig(NamedTuple):
    """Static arguments of the compiled decode loop."""

    config: TransformerConfig
    max_new_tokens: int
    chunk: int | None
    dtype: jnp.dtype
    mesh: Mesh | None = None
    sampler: Any = Greedy()  # a Sampler, or Beam for `decode_with_beams`
    lookahead: int = 0  # tokens that may be taken back
    keep_hidden: bool = False  # of prompts, in the context


class DecodeState(NamedTuple):
    """State of the decode loop: tokens so far, cache, and stop flags."""

    tokens: Int[Array, "*batch P_plus_new"]
    length: Int[Array, "*batch"]
    last_token: Int[Array, "*batch"]  # generated, but not yet processed
    is_done: Bool[Array, "*batch"]
    seen_tokens: Bool[Array, "*batch V"]
    context: Context
    num_generated: Int[Array, ""]
    prompt_logits_finite: Bool[Array, ""]  # whether all logits of the prompts were finite


def mask_unused_ids(logits: Float[Array, "*batch V"], vocab_size: Int[Array, ""]) -> Array:
    """Return the logits, with -inf for ids that must not be generated."""
    is_allowed = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(jnp.broadcast_to(is_allowed, logits.shape), logits, -jnp.inf)


def prefill_prompt(
    options: DecodeConfig, params: Any, request: Request
) -> tuple[Float[Array, "*batch V"], Context]:
    """Prefill the cache, without padding beyond the learned positions."""
    width = request.prompt.shape[-1]
    num_slots = num_processed_tokens(width, options.max_new_tokens)
    max_positions = options.config.max_length or sys.maxsize
    excess = max(0, num_slots - max_positions)
    slot_multiple = LANES if target_platform() == "tpu" else 1
    logits, context = prefill(
        options.config,
        params,
        request.prompt[..., : width - excess],
        request.lengths,
        capacity=min(-(-num_slots // slot_multiple) * slot_multiple, max_positions),
        chunk=options.chunk,
        source=request.source,
        source_segments=request.source_segments,
        dtype=options.dtype,
        mesh=options.mesh,
        lookahead=options.lookahead,
        keep_hidden=options.keep_hidden,
    )
    return mask_unused_ids(logits, request.vocab_size), context


def logits_finite(options: DecodeConfig, logits: Float[Array, "*batch V"]) -> Bool[Array, ""]:
    """Return whether the largest logit of every row is finite."""
    return replicate(options, jnp.all(jnp.isfinite(jnp.max(logits, axis=-1))))


def _start_decoding(
    options: DecodeConfig, params: Any, request: Request, key: PRNGKeyArray
) -> DecodeState:
    """Prefill and sample the first token of each row."""
    prompt = request.prompt
    logits, context = prefill_prompt(options, params, request)
    is_prompt = F.length_mask(request.lengths, prompt.shape[-1])
    state = DecodeState(
        tokens=pad_right(prompt, prompt.shape[-1] + options.max_new_tokens),
        length=request.lengths,
        last_token=prompt[..., 0],
        is_done=jnp.zeros(prompt.shape[:-1], bool),
        seen_tokens=F.seen_tokens(jnp.where(is_prompt, prompt, -1), options.config.vocab_size),
        context=context,
        num_generated=jnp.int32(0),
        prompt_logits_finite=logits_finite(options, logits),
    )
    return append_token(options, request, key, state, logits)


def append_token(
    options: DecodeConfig,
    request: Request,
    key: PRNGKeyArray,
    state: DecodeState,
    logits: Float[Array, "*batch V"],
) -> DecodeState:
    """Sample and append the next token of each unfinished row."""
    key = jax.random.fold_in(key, state.num_generated)
    sampled = sample_token(options.sampler, logits, state.seen_tokens, key)
    token = jnp.where(state.is_done, state.last_token, sampled.astype(state.last_token.dtype))
    token = replicate(options, token)
    out_of_range = state.tokens.shape[-1]
    slot = jnp.where(state.is_done, out_of_range, state.length)[..., None]
    stops = jnp.any(token[..., None] == request.stop_tokens.astype(token.dtype), axis=-1)
    return state._replace(
        tokens=F.write_slots(state.tokens, token[..., None], slot),
        length=jnp.where(state.is_done, state.length, state.length + 1),
        last_token=token,
        is_done=state.is_done | stops,
        seen_tokens=state.seen_tokens | jax.nn.one_hot(token, logits.shape[-1], dtype=bool),
        num_generated=state.num_generated + 1,
    )


def _decode_logits(
    options: DecodeConfig,
    params: Any,
    request: Request,
    tokens: Int[Array, "*batch"],
    context: Context,
) -> tuple[Float[Array, "*batch V"], Context]:
    """Logits after the last tokens, from one decode step."""
    logits, context = decode_step(
        options.config, params, tokens, context, dtype=options.dtype, mesh=options.mesh
    )
    return mask_unused_ids(logits, request.vocab_size), context


def _decode_next(
    options: DecodeConfig, params: Any, request: Request, key: PRNGKeyArray, state: DecodeState
) -> DecodeState:
    """One decode step, then sample the next token."""
    logits, context = _decode_logits(options, params, request, state.last_token, state.context)
    return append_token(options, request, key, state._replace(context=context), logits)


def repeat_last_token(
    text: Int[Array, "*batch P"], length: Int[Array, "*batch"]
) -> Int[Array, "*batch P"]:
    """Repeat the last token of each row to the end of the array."""
    last = jnp.take_along_axis(text, length[..., None] - 1, axis=-1)
    return jnp.where(
        F.length_mask(length, text.shape[-1]), text, jnp.broadcast_to(last, text.shape)
    )


@partial(jax.jit, static_argnums=0)
def decode_tokens(
    options: DecodeConfig, params: Any, request: Request, key: PRNGKeyArray
) -> tuple[Int[Array, "*batch P_plus_new"], Bool[Array, ""]]:
    """Decode until all rows stop; also return whether the prompt's logits were finite."""

    def continues(state: DecodeState) -> Bool[Array, ""]:
        return (state.num_generated < options.max_new_tokens) & ~jnp.all(state.is_done)

    state = _start_decoding(options, params, request, key)
    next_state = partial(_decode_next, options, params, request, key)
    state = jax.lax.while_loop(continues, next_state, state)
    tokens = repeat_last_token(state.tokens, state.length)
    return replicate(options, tokens), state.prompt_logits_finite


start_decoding = jax.jit(_start_decoding, static_argnums=0)
decode_next = jax.jit(_decode_next, static_argnums=0, donate_argnums=4)


@partial(jax.jit, static_argnums=0)
def decode_with_beams(
    options: DecodeConfig, params: Any, request: Request
) -> tuple[Int[Array, "*batch P_plus_new"], Bool[Array, ""]]:
    """Decode by beam search; also return whether the prompt's logits were finite."""
    rows, new, beam = flatten_batch(request), options.max_new_tokens, options.sampler
    logits, context = prefill_prompt(options, params, rows)
    beams = beam_search(
        lambda context, tokens: _decode_logits(options, params, rows, tokens, context),
        take_rows,
        context,
        logits,
        rows.stop_tokens,
        num_beams=beam.num_beams,
        max_new_tokens=new,
        length_penalty=beam.length_penalty,
    )
    tokens = pad_right(rows.prompt, rows.prompt.shape[1] + new)
    slots = rows.lengths[:, None] + jnp.arange(new)[None]
    tokens = F.write_slots(tokens, beams.tokens[:, 0].astype(tokens.dtype), slots)
    tokens = repeat_last_token(tokens, rows.lengths + beams.lengths[:, 0])
    tokens = tokens.reshape(*request.prompt.shape[:-1], -1)
    return replicate(options, tokens), logits_finite(options, logits)


def replicate(options: DecodeConfig, x: Array) -> Array:
    """Replicate `x` on all devices, so that every process can read it."""
    if options.mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, replicated(options.mesh))
