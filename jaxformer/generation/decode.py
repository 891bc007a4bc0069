"""Continue text: one compiled loop, or token by token for those who want to watch."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.config import TransformerConfig
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import Request, make_request
from jaxformer.generation.samplers import Beam, Greedy, Sample, Sampler, choose
from jaxformer.generation.steps import Context, decode_step, prefill, take_rows


class Plan(NamedTuple):
    """What a compiled loop is made for."""

    config: TransformerConfig
    sampler: Sampler
    max_new_tokens: int
    chunk: int | None
    dtype: jnp.dtype


class State(NamedTuple):
    """A text on its way: what it is so far, and what choosing the next token needs."""

    text: Int[Array, "*batch P_plus_new"]
    length: Int[Array, "*batch"]
    token: Int[Array, "*batch"]  # the last one, not yet read
    done: Bool[Array, "*batch"]
    seen: Bool[Array, "*batch V"]
    context: Context
    added: Int[Array, ""]


def generate(
    config: TransformerConfig,
    params: Any,
    prompt: Any,
    *,
    max_new_tokens: int,
    sampler: Sampler | Beam = Greedy(),
    key: PRNGKeyArray | None = None,
    lengths: Any = None,
    stop_tokens: Any = (),
    source: Any = None,
    source_segments: Any = None,
    vocab_size: int | None = None,
    prefill_chunk: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Int[Array, "*batch P_plus_new"]:
    """Continue each prompt by up to `max_new_tokens` tokens.

    Args:
        config: A decoder, or an encoder-decoder; its prompt is then the decoder's start token.
        params: Its parameters.
        prompt: Token ids, at least one a row: an array, or a list of rows of any lengths.
        max_new_tokens: How many to add.
        sampler: `Greedy()`, `Sample(...)` or `Beam(...)`.
        key: Random key; `Sample` needs one.
        lengths: Tokens of each row of an array whose rows are padded behind.
        stop_tokens: Ids that end a row: ``(2,)`` for all rows, or an array ``[*batch, K]`` with
            those of each row, -1 where it has fewer.
        source: Token ids that an encoder-decoder reads: an array or a list of rows.
        source_segments: 0 marks padding of the source; follows from a list.
        vocab_size: Only ids below it are chosen: the tokenizer's number of tokens where the model
            has more. None allows all.
        prefill_chunk: Read the prompt so many tokens at a time, to save memory; None reads it at
            once.
        dtype: Of the computation and the cache.

    Returns:
        In each row the prompt, the new tokens behind it, and from its end on its last token.

    Raises:
        ValueError: An empty prompt, a token id outside the vocabulary, a length beyond a learned
            position table, a missing key, a source missing or not read, or an encoder alone.
    """
    key = _key(sampler, key)
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ValueError(f"prefill_chunk must be at least 1; got {prefill_chunk}.")
    request = make_request(
        config,
        prompt,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        stop_tokens=stop_tokens,
        vocab_size=vocab_size,
        source=source,
        source_segments=source_segments,
    )
    if isinstance(sampler, Beam):
        options = (config, sampler, max_new_tokens, prefill_chunk, jnp.dtype(dtype))
        return _with_beams(options, params, request)
    plan = Plan(config, sampler, max_new_tokens, prefill_chunk, jnp.dtype(dtype))
    return _generate(plan, params, request, key)


def stream(
    config: TransformerConfig,
    params: Any,
    prompt: Any,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: PRNGKeyArray | None = None,
    dtype: DTypeLike = jnp.float32,
    prefill_chunk: int | None = None,
    **request: Any,
) -> Iterator[Int[np.ndarray, "*batch"]]:
    """Give the tokens of `generate` one by one, as they are chosen.

    Args:
        config: As for `generate`, like all that follow.
        params: The parameters.
        prompt: Token ids.
        max_new_tokens: How many to add.
        sampler: `Greedy()` or `Sample(...)`.
        key: Random key.
        dtype: Of the computation.
        prefill_chunk: Tokens of the prompt to read at a time.
        **request: `lengths`, `stop_tokens`, `source`, `source_segments`, `vocab_size`.

    Yields:
        The next token of each row; a row that has ended repeats its stop token. Ends when all have.

    Raises:
        ValueError: As `generate`.
    """
    key = _key(sampler, key)
    checked = make_request(config, prompt, max_new_tokens=max_new_tokens, **request)
    plan = Plan(config, sampler, max_new_tokens, prefill_chunk, jnp.dtype(dtype))

    def tokens() -> Iterator[Int[np.ndarray, "*batch"]]:
        state = _begin_jit(plan, params, checked, key)
        yield np.asarray(state.token)
        while int(state.added) < max_new_tokens and not bool(jnp.all(state.done)):
            state = _advance_jit(plan, params, checked, key, state)
            yield np.asarray(state.token)

    return tokens()


def _key(sampler: Sampler | Beam, key: PRNGKeyArray | None) -> PRNGKeyArray:
    if key is None and isinstance(sampler, Sample):
        raise ValueError(f"{sampler} draws at random: pass key=jax.random.key(seed).")
    return jax.random.key(0) if key is None else key


def _capacity(request: Request, max_new_tokens: int) -> int:
    """Room for all that is read: the last token is chosen and never read."""
    return request.prompt.shape[-1] + max_new_tokens - 1


def _allowed(logits: Float[Array, "*batch V"], vocab_size: Int[Array, ""]) -> Array:
    known = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(jnp.broadcast_to(known, logits.shape), logits, -jnp.inf)


def _begin(plan: Plan, params: Any, request: Request, key: PRNGKeyArray) -> State:
    """Read the prompts and choose the first token of each row."""
    prompt = request.prompt
    logits, context = prefill(
        plan.config,
        params,
        prompt,
        request.lengths,
        capacity=_capacity(request, plan.max_new_tokens),
        chunk=plan.chunk,
        source=request.source,
        source_segments=request.source_segments,
        dtype=plan.dtype,
    )
    real = F.length_mask(request.lengths, prompt.shape[-1])
    width = [(0, 0)] * (prompt.ndim - 1) + [(0, plan.max_new_tokens)]
    state = State(
        text=jnp.pad(prompt, width),
        length=request.lengths,
        token=prompt[..., 0],
        done=jnp.zeros(prompt.shape[:-1], bool),
        seen=F.seen_tokens(jnp.where(real, prompt, -1), plan.config.vocab_size),
        context=context,
        added=jnp.int32(0),
    )
    return _add(plan, request, key, state, logits)


def _add(
    plan: Plan, request: Request, key: PRNGKeyArray, state: State, logits: Float[Array, "*batch V"]
) -> State:
    """Choose the next token of each row that has not ended."""
    allowed = _allowed(logits, request.vocab_size)
    chosen = choose(plan.sampler, allowed, state.seen, jax.random.fold_in(key, state.added))
    token = jnp.where(state.done, state.token, chosen.astype(state.token.dtype))
    nowhere = state.text.shape[-1]
    slot = jnp.where(state.done, nowhere, state.length)[..., None]
    stops = jnp.any(token[..., None] == request.stop.astype(token.dtype), axis=-1)
    return State(
        text=F.write_slots(state.text, token[..., None], slot),
        length=jnp.where(state.done, state.length, state.length + 1),
        token=token,
        done=state.done | stops,
        seen=state.seen | jax.nn.one_hot(token, plan.config.vocab_size, dtype=bool),
        context=state.context,
        added=state.added + 1,
    )


def _advance(plan: Plan, params: Any, request: Request, key: PRNGKeyArray, state: State) -> State:
    """Read the last tokens and choose the next."""
    logits, context = decode_step(plan.config, params, state.token, state.context, dtype=plan.dtype)
    return _add(plan, request, key, state._replace(context=context), logits)


def _finish(text: Int[Array, "*batch P"], length: Int[Array, "*batch"]) -> Int[Array, "*batch P"]:
    """Repeat each row's last token from its end on."""
    last = jnp.take_along_axis(text, length[..., None] - 1, axis=-1)
    return jnp.where(
        F.length_mask(length, text.shape[-1]), text, jnp.broadcast_to(last, text.shape)
    )


@partial(jax.jit, static_argnums=0)
def _generate(
    plan: Plan, params: Any, request: Request, key: PRNGKeyArray
) -> Int[Array, "*batch P_plus_new"]:
    state = _begin(plan, params, request, key)
    state = jax.lax.while_loop(
        lambda state: (state.added < plan.max_new_tokens) & ~jnp.all(state.done),
        partial(_advance, plan, params, request, key),
        state,
    )
    return _finish(state.text, state.length)


_begin_jit = jax.jit(_begin, static_argnums=0)
_advance_jit = jax.jit(_advance, static_argnums=0, donate_argnums=4)


@partial(jax.jit, static_argnums=0)
def _with_beams(
    options: tuple[TransformerConfig, Beam, int, int | None, jnp.dtype],
    params: Any,
    request: Request,
) -> Int[Array, "*batch P_plus_new"]:
    config, beam, max_new_tokens, chunk, dtype = options
    flat = _one_batch_axis(request)
    logits, context = prefill(
        config,
        params,
        flat.prompt,
        flat.lengths,
        capacity=_capacity(request, max_new_tokens),
        chunk=chunk,
        source=flat.source,
        source_segments=flat.source_segments,
        dtype=dtype,
    )

    def step(context: Context, tokens: Int[Array, " rows"]):
        logits, context = decode_step(config, params, tokens, context, dtype=dtype)
        return _allowed(logits, request.vocab_size), context

    found = beam_search(
        step,
        take_rows,
        context,
        _allowed(logits, request.vocab_size),
        flat.stop,
        num_beams=beam.num_beams,
        max_new_tokens=max_new_tokens,
        length_penalty=beam.length_penalty,
    )
    text = jnp.pad(flat.prompt, [(0, 0), (0, max_new_tokens)])
    best = found.tokens[:, 0].astype(text.dtype)
    slots = flat.lengths[:, None] + jnp.arange(max_new_tokens)[None]
    text = F.write_slots(text, best, slots)
    text = _finish(text, flat.lengths + found.lengths[:, 0])
    return text.reshape(*request.prompt.shape[:-1], -1)


def _one_batch_axis(request: Request) -> Request:
    count = request.lengths.size

    def rows(x: Array) -> Array:
        return x.reshape(count, x.shape[-1])

    source, segments = request.source, request.source_segments

    return request._replace(
        prompt=rows(request.prompt),
        lengths=request.lengths.reshape(count),
        stop=rows(request.stop),
        source=None if source is None else rows(source),
        source_segments=None if segments is None else rows(segments),
    )
