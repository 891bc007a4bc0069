"""Continue text: one compiled loop, or token by token for those who want to watch."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.config import TransformerConfig
from jaxformer.generation.beam import beam_search
from jaxformer.generation.checks import check_count
from jaxformer.generation.prompts import (
    Request,
    fill_rows,
    make_request,
    one_batch_axis,
    tokens_read,
)
from jaxformer.generation.samplers import Beam, Greedy, Sample, Sampler, choose
from jaxformer.generation.steps import Context, decode_step, prefill, take_rows
from jaxformer.parallel import (
    abstract_parameters,
    check_fits,
    put_whole,
    replicated,
    row_shares,
    shardings,
)


class Plan(NamedTuple):
    """What a compiled loop is made for."""

    config: TransformerConfig
    max_new_tokens: int
    chunk: int | None
    dtype: jnp.dtype
    mesh: Mesh | None = None


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
    mesh: Mesh | None = None,
) -> Int[Array, "*batch P_plus_new"]:
    """Continue each prompt by up to `max_new_tokens` tokens.

    Args:
        config: A decoder, or an encoder-decoder; its prompt is then the decoder's start token.
        params: Its parameters.
        prompt: Token ids, at least one a row: an array, a list of rows of any lengths, or one flat
            list, a text without batch axes.
        max_new_tokens: How many to add.
        sampler: `Greedy()`, `Sample(...)` or `Beam(...)`.
        key: Random key; `Sample` needs one.
        lengths: Tokens of each row of an array whose rows are padded behind; they follow from a
            list of rows.
        stop_tokens: Ids that end a row: ``2`` or ``(2, 5)`` for all rows; a list of rows or an
            array ``[*batch, K]`` with those of each row, -1 where it has fewer.
        source: Token ids that an encoder-decoder reads, in the forms and with the batch axes of
            `prompt`.
        source_segments: 0 marks padding of an array's rows; they follow from a list of rows.
        vocab_size: Only ids below it are chosen: the tokenizer's number of tokens where the model
            has more. None allows all.
        prefill_chunk: Read the prompt so many tokens at a time, to save memory; None reads it at
            once.
        dtype: Of the computation and the cache.
        mesh: Devices that share the work, from `parallel.make_mesh`: heads, hidden width,
            vocabulary and caches along "tensor", rows along "data", "fsdp" and "expert"; those
            along "context" do the same. Parameters that are not there yet are moved. The tokens are
            those of one device.

    Returns:
        In each row the prompt, the new tokens behind it, and from its end on its last token. Rows
        are as wide as the prompt with its padding, and `max_new_tokens` more.

    Raises:
        ValueError: An empty prompt or source, a token id outside its vocabulary, more tokens than
            learned positions (the last new one is not read and needs none), lengths, stop tokens,
            sources or segments that do not fit the rows, a source missing or not read, a number
            that is not whole or out of range, a missing key, a mesh that does not fit, or an
            encoder alone.
    """
    plan = Plan(config, max_new_tokens, prefill_chunk, jnp.dtype(dtype), mesh)
    key = _check(plan, sampler, key)
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
    rows, count = request.prompt.shape[:-1], request.lengths.size
    if mesh is not None:
        params, request, key = _spread(mesh, config, params, request, key)
    if isinstance(sampler, Beam):
        text = _with_beams(plan, sampler, params, request)
    else:
        text = _generate(plan, sampler, params, request, key)
    return text if mesh is None else text[:count].reshape(*rows, -1)


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
    mesh: Mesh | None = None,
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
        mesh: Devices that share the work.
        **request: `lengths`, `stop_tokens`, `source`, `source_segments`, `vocab_size`.

    Yields:
        The next token of each row; a row that has ended repeats its stop token. Ends when all have.

    Raises:
        ValueError: As `generate`, and for `Beam(...)`.
    """
    if isinstance(sampler, Beam):
        raise ValueError(f"{sampler} knows its text only at the end of the search; use generate.")
    plan = Plan(config, max_new_tokens, prefill_chunk, jnp.dtype(dtype), mesh)
    key = _check(plan, sampler, key)
    checked = make_request(config, prompt, max_new_tokens=max_new_tokens, **request)

    rows, count = checked.prompt.shape[:-1], checked.lengths.size
    given = params, checked, key
    if mesh is not None:
        given = _spread(mesh, config, *given)

    def tokens() -> Iterator[Int[np.ndarray, "*batch"]]:
        state = _begin_jit(plan, sampler, *given)
        yield np.asarray(state.token)[:count].reshape(rows)
        while int(state.added) < max_new_tokens and not bool(jnp.all(state.done)):
            state = _advance_jit(plan, sampler, *given, state)
            yield np.asarray(state.token)[:count].reshape(rows)

    return tokens()


def _spread(
    mesh: Mesh, config: TransformerConfig, params: Any, request: Request, key: PRNGKeyArray
) -> tuple[Any, Request, PRNGKeyArray]:
    """Parameters, rows and key on the devices of a mesh, which must fit."""
    request = fill_rows(one_batch_axis(request), row_shares(mesh.shape))
    check_fits(config, mesh.shape, batch_size=len(request.lengths))
    params = jax.device_put(params, shardings(abstract_parameters(config, mesh)))
    data = put_whole(jax.random.key_data(key), mesh)
    return (
        params,
        put_whole(request, mesh),
        jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)),
    )


def _check(plan: Plan, sampler: Sampler | Beam, key: PRNGKeyArray | None) -> PRNGKeyArray:
    """Refuse settings that cannot be; the key, or any key where none is needed."""
    if plan.chunk is not None:
        check_count("prefill_chunk", plan.chunk)
    if key is None and isinstance(sampler, Sample):
        raise ValueError(f"{sampler} draws at random: pass key=jax.random.key(seed).")
    return jax.random.key(0) if key is None else key


def _allowed(logits: Float[Array, "*batch V"], vocab_size: Int[Array, ""]) -> Array:
    known = jnp.arange(logits.shape[-1]) < vocab_size
    return jnp.where(jnp.broadcast_to(known, logits.shape), logits, -jnp.inf)


def _read(plan: Plan, params: Any, request: Request) -> tuple[Float[Array, "*batch V"], Context]:
    """Read the prompts, without padding for which the model has no positions."""
    width = request.prompt.shape[-1]
    room = tokens_read(width, plan.max_new_tokens)
    beyond = max(0, room - (plan.config.max_length or room))
    logits, context = prefill(
        plan.config,
        params,
        request.prompt[..., : width - beyond],
        request.lengths,
        capacity=room - beyond,
        chunk=plan.chunk,
        source=request.source,
        source_segments=request.source_segments,
        dtype=plan.dtype,
        mesh=plan.mesh,
    )
    return _allowed(logits, request.vocab_size), context


def _begin(plan: Plan, sampler: Sampler, params: Any, request: Request, key: PRNGKeyArray) -> State:
    """Read the prompts and choose the first token of each row."""
    prompt = request.prompt
    logits, context = _read(plan, params, request)
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
    return _add(plan, sampler, request, key, state, logits)


def _add(
    plan: Plan,
    sampler: Sampler,
    request: Request,
    key: PRNGKeyArray,
    state: State,
    logits: Float[Array, "*batch V"],
) -> State:
    """Choose the next token of each row that has not ended."""
    chosen = choose(sampler, logits, state.seen, jax.random.fold_in(key, state.added))
    token = jnp.where(state.done, state.token, chosen.astype(state.token.dtype))
    token = _everywhere(plan, token)
    nowhere = state.text.shape[-1]
    slot = jnp.where(state.done, nowhere, state.length)[..., None]
    stops = jnp.any(token[..., None] == request.stop.astype(token.dtype), axis=-1)
    return State(
        text=F.write_slots(state.text, token[..., None], slot),
        length=jnp.where(state.done, state.length, state.length + 1),
        token=token,
        done=state.done | stops,
        seen=state.seen | jax.nn.one_hot(token, logits.shape[-1], dtype=bool),
        context=state.context,
        added=state.added + 1,
    )


def _next(
    plan: Plan, params: Any, request: Request, tokens: Int[Array, "*batch"], context: Context
) -> tuple[Float[Array, "*batch V"], Context]:
    """Read the last tokens."""
    logits, context = decode_step(
        plan.config, params, tokens, context, dtype=plan.dtype, mesh=plan.mesh
    )
    return _allowed(logits, request.vocab_size), context


def _advance(
    plan: Plan, sampler: Sampler, params: Any, request: Request, key: PRNGKeyArray, state: State
) -> State:
    """Read the last tokens and choose the next."""
    logits, context = _next(plan, params, request, state.token, state.context)
    return _add(plan, sampler, request, key, state._replace(context=context), logits)


def _finish(text: Int[Array, "*batch P"], length: Int[Array, "*batch"]) -> Int[Array, "*batch P"]:
    """Repeat each row's last token from its end on."""
    last = jnp.take_along_axis(text, length[..., None] - 1, axis=-1)
    return jnp.where(
        F.length_mask(length, text.shape[-1]), text, jnp.broadcast_to(last, text.shape)
    )


@partial(jax.jit, static_argnums=(0, 1))
def _generate(
    plan: Plan, sampler: Sampler, params: Any, request: Request, key: PRNGKeyArray
) -> Int[Array, "*batch P_plus_new"]:
    state = _begin(plan, sampler, params, request, key)
    state = jax.lax.while_loop(
        lambda state: (state.added < plan.max_new_tokens) & ~jnp.all(state.done),
        partial(_advance, plan, sampler, params, request, key),
        state,
    )
    return _everywhere(plan, _finish(state.text, state.length))


_begin_jit = jax.jit(_begin, static_argnums=(0, 1))
_advance_jit = jax.jit(_advance, static_argnums=(0, 1), donate_argnums=5)


@partial(jax.jit, static_argnums=(0, 1))
def _with_beams(
    plan: Plan, beam: Beam, params: Any, request: Request
) -> Int[Array, "*batch P_plus_new"]:
    flat, new = one_batch_axis(request), plan.max_new_tokens
    logits, context = _read(plan, params, flat)
    found = beam_search(
        lambda context, tokens: _next(plan, params, flat, tokens, context),
        take_rows,
        context,
        logits,
        flat.stop,
        num_beams=beam.num_beams,
        max_new_tokens=new,
        length_penalty=beam.length_penalty,
    )
    text = jnp.pad(flat.prompt, [(0, 0), (0, new)])
    best = found.tokens[:, 0].astype(text.dtype)
    slots = flat.lengths[:, None] + jnp.arange(new)[None]
    text = F.write_slots(text, best, slots)
    text = _finish(text, flat.lengths + found.lengths[:, 0])
    return _everywhere(plan, text.reshape(*request.prompt.shape[:-1], -1))


def _everywhere(plan: Plan, x: Array) -> Array:
    """A copy on every device, so that each process can read it."""
    if plan.mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, replicated(plan.mesh))
