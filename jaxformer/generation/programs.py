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
from jaxformer.functional.platforms import LANES, platform
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import Request, one_batch_axis, tokens_read
from jaxformer.generation.samplers import Beam, Sampler, choose
from jaxformer.generation.steps import Context, decode_step, prefill, take_rows
from jaxformer.parallel import replicated


class Plan(NamedTuple):
    """Static arguments of the compiled decode loop."""

    config: TransformerConfig
    max_new_tokens: int
    chunk: int | None
    dtype: jnp.dtype
    mesh: Mesh | None = None


class State(NamedTuple):
    """State of the decode loop: tokens so far, cache, and stop flags."""

    text: Int[Array, "*batch P_plus_new"]
    length: Int[Array, "*batch"]
    token: Int[Array, "*batch"]  # the last one, not yet read
    done: Bool[Array, "*batch"]
    seen: Bool[Array, "*batch V"]
    context: Context
    added: Int[Array, ""]
    finite: Bool[Array, ""]  # whether the prompts gave logits that are numbers


def _allowed(logits: Float[Array, "*batch V"], vocab_size: Int[Array, ""]) -> Array:
    is_allowed = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(jnp.broadcast_to(is_allowed, logits.shape), logits, -jnp.inf)


def _read(plan: Plan, params: Any, request: Request) -> tuple[Float[Array, "*batch V"], Context]:
    """Prefill the cache, without padding beyond the learned positions."""
    width = request.prompt.shape[-1]
    num_slots = tokens_read(width, plan.max_new_tokens)
    max_positions = plan.config.max_length or sys.maxsize
    excess = max(0, num_slots - max_positions)
    slot_multiple = LANES if platform() == "tpu" else 1
    logits, context = prefill(
        plan.config,
        params,
        request.prompt[..., : width - excess],
        request.lengths,
        capacity=min(-(-num_slots // slot_multiple) * slot_multiple, max_positions),
        chunk=plan.chunk,
        source=request.source,
        source_segments=request.source_segments,
        dtype=plan.dtype,
        mesh=plan.mesh,
    )
    return _allowed(logits, request.vocab_size), context


def _finite(plan: Plan, logits: Float[Array, "*batch V"]) -> Bool[Array, ""]:
    return _everywhere(plan, jnp.all(jnp.isfinite(jnp.max(logits, axis=-1))))


def _begin(plan: Plan, sampler: Sampler, params: Any, request: Request, key: PRNGKeyArray) -> State:
    """Prefill and sample the first token of each row."""
    prompt = request.prompt
    logits, context = _read(plan, params, request)
    is_prompt = F.length_mask(request.lengths, prompt.shape[-1])
    width = [(0, 0)] * (prompt.ndim - 1) + [(0, plan.max_new_tokens)]
    state = State(
        text=jnp.pad(prompt, width),
        length=request.lengths,
        token=prompt[..., 0],
        done=jnp.zeros(prompt.shape[:-1], bool),
        seen=F.seen_tokens(jnp.where(is_prompt, prompt, -1), plan.config.vocab_size),
        context=context,
        added=jnp.int32(0),
        finite=_finite(plan, logits),
    )
    return _add(plan, sampler, request, key, state, logits)


def _add(
    plan: Plan,
    sampler: Sampler,
    request: Request,
    key: PRNGKeyArray,
    state: State,
    logits: Float[Array, "*batch V"],
) -> State:
    """Sample and append the next token of each unfinished row."""
    sampled = choose(sampler, logits, state.seen, jax.random.fold_in(key, state.added))
    token = jnp.where(state.done, state.token, sampled.astype(state.token.dtype))
    token = _everywhere(plan, token)
    out_of_range = state.text.shape[-1]
    slot = jnp.where(state.done, out_of_range, state.length)[..., None]
    stops = jnp.any(token[..., None] == request.stop.astype(token.dtype), axis=-1)
    return state._replace(
        text=F.write_slots(state.text, token[..., None], slot),
        length=jnp.where(state.done, state.length, state.length + 1),
        token=token,
        done=state.done | stops,
        seen=state.seen | jax.nn.one_hot(token, logits.shape[-1], dtype=bool),
        added=state.added + 1,
    )


def _next(
    plan: Plan, params: Any, request: Request, tokens: Int[Array, "*batch"], context: Context
) -> tuple[Float[Array, "*batch V"], Context]:
    """Logits after the last tokens, from one decode step."""
    logits, context = decode_step(
        plan.config, params, tokens, context, dtype=plan.dtype, mesh=plan.mesh
    )
    return _allowed(logits, request.vocab_size), context


def _advance(
    plan: Plan, sampler: Sampler, params: Any, request: Request, key: PRNGKeyArray, state: State
) -> State:
    """One decode step, then sample the next token."""
    logits, context = _next(plan, params, request, state.token, state.context)
    return _add(plan, sampler, request, key, state._replace(context=context), logits)


def _finish(text: Int[Array, "*batch P"], length: Int[Array, "*batch"]) -> Int[Array, "*batch P"]:
    """Fill each row after its end with its last token."""
    last = jnp.take_along_axis(text, length[..., None] - 1, axis=-1)
    return jnp.where(
        F.length_mask(length, text.shape[-1]), text, jnp.broadcast_to(last, text.shape)
    )


@partial(jax.jit, static_argnums=(0, 1))
def search(
    plan: Plan, sampler: Sampler, params: Any, request: Request, key: PRNGKeyArray
) -> tuple[Int[Array, "*batch P_plus_new"], Bool[Array, ""]]:
    """Decode until all rows stop; also return whether the prompt's logits were finite."""
    state = _begin(plan, sampler, params, request, key)
    state = jax.lax.while_loop(
        lambda state: (state.added < plan.max_new_tokens) & ~jnp.all(state.done),
        partial(_advance, plan, sampler, params, request, key),
        state,
    )
    return _everywhere(plan, _finish(state.text, state.length)), state.finite


begin = jax.jit(_begin, static_argnums=(0, 1))
advance = jax.jit(_advance, static_argnums=(0, 1), donate_argnums=5)


@partial(jax.jit, static_argnums=(0, 1))
def search_with_beams(
    plan: Plan, beam: Beam, params: Any, request: Request
) -> tuple[Int[Array, "*batch P_plus_new"], Bool[Array, ""]]:
    """Decode by beam search; also return whether the prompt's logits were finite."""
    flat_request, new = one_batch_axis(request), plan.max_new_tokens
    logits, context = _read(plan, params, flat_request)
    beams = beam_search(
        lambda context, tokens: _next(plan, params, flat_request, tokens, context),
        take_rows,
        context,
        logits,
        flat_request.stop,
        num_beams=beam.num_beams,
        max_new_tokens=new,
        length_penalty=beam.length_penalty,
    )
    output_tokens = jnp.pad(flat_request.prompt, [(0, 0), (0, new)])
    best_tokens = beams.tokens[:, 0].astype(output_tokens.dtype)
    slots = flat_request.lengths[:, None] + jnp.arange(new)[None]
    output_tokens = F.write_slots(output_tokens, best_tokens, slots)
    output_tokens = _finish(output_tokens, flat_request.lengths + beams.lengths[:, 0])
    output_tokens = output_tokens.reshape(*request.prompt.shape[:-1], -1)
    return _everywhere(plan, output_tokens), _finite(plan, logits)


def _everywhere(plan: Plan, x: Array) -> Array:
    """Replicate `x` on all devices, so that every process can read it."""
    if plan.mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, replicated(plan.mesh))
