"""Speculative decoding: a draft of several tokens, which the model checks in one pass."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.generation.decode_loop import (
    DecodeConfig,
    DecodeState,
    mask_unused_ids,
    repeat_last_token,
    replicate,
    start_decoding,
)
from jaxformer.generation.drafters import Turn, Verdict, keep_tokens, read_tokens
from jaxformer.generation.prompts import Request
from jaxformer.generation.samplers import token_probabilities


class DraftConfig(NamedTuple):
    """Static options of speculative decoding: of the model, and who drafts."""

    decode: DecodeConfig
    drafter: Any  # `ModelDrafter` or `MultiTokenDrafter`


class DraftState(NamedTuple):
    """State of speculative decoding: of the model, whose rows differ in length, and of drafts."""

    decode: DecodeState
    drafter: Any
    num_drafted: Int[Array, ""]
    num_accepted: Int[Array, ""]


class CheckedDraft(NamedTuple):
    """What the model makes of a draft.

    Attributes:
        tokens: The accepted tokens of the draft, then one more of the model.
        length: How many tokens that are.
    """

    tokens: Int[Array, "*batch n_plus_1"]
    length: Int[Array, "*batch"]


def check_draft(
    draft: Float[Array, "*batch n V"],
    model: Float[Array, "*batch n_plus_1 V"],
    tokens: Int[Array, "*batch n"],
    num_tokens: Int[Array, "*batch"],
    key: PRNGKeyArray,
) -> CheckedDraft:
    """Accept tokens of a draft so that the text has the model's distribution.

        accept token t while u < p(t) / q(t), u uniform in [0, 1)
        the next token is of max(p - q, 0), normalised; after a whole draft, of p

    Args:
        draft: Probabilities q from which each token of the draft was drawn.
        model: Probabilities p of the model at the same places, and after the draft.
        tokens: The draft.
        num_tokens: How many tokens of the draft count.
        key: Random key.

    References:
        Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding,
        2022. arXiv:2211.17192, section 2.3 and appendix A.1
    """
    counts = F.length_mask(num_tokens, model.shape[-2])
    uniform_key, next_key = jax.random.split(key)
    of_token = partial(jnp.take_along_axis, indices=tokens[..., None], axis=-1)
    draft = jnp.nan_to_num(draft)  # the draft of a model that overflowed is never right
    p, q = of_token(model[..., :-1, :])[..., 0], of_token(draft)[..., 0]
    accepts = jax.random.uniform(uniform_key, tokens.shape) * q < p
    accepts &= (q > 0) & counts[..., :-1]
    count = jnp.sum(jnp.cumprod(accepts, axis=-1), axis=-1)
    no_draft = jnp.zeros_like(model[..., :1, :])
    q_or_zero = jnp.concatenate([draft, no_draft], axis=-2)
    q_or_zero = jnp.where(counts[..., None], q_or_zero, 0)
    rest = jnp.maximum(model - q_or_zero, 0)
    rest = jnp.take_along_axis(rest, count[..., None, None], axis=-2)[..., 0, :]
    last = jax.random.categorical(next_key, jnp.log(rest), axis=-1).astype(tokens.dtype)
    padded = jnp.concatenate([tokens, last[..., None]], axis=-1)
    is_draft = F.length_mask(count, model.shape[-2])
    return CheckedDraft(jnp.where(is_draft, padded, last[..., None]), count + 1)


def _draft_next(
    options: DraftConfig, params: tuple[Any, Any], request: Request, key: Any, state: DraftState
) -> DraftState:
    """Draft tokens, check them in one pass of the model, and append what is right."""
    old, settings = state.decode, options.decode
    left = request.lengths + settings.max_new_tokens - old.length
    num_drafted = jnp.where(old.is_done, -1, jnp.minimum(options.drafter.num_tokens, left - 1))
    is_input = F.length_mask(num_drafted + 1, options.drafter.num_tokens + 1)
    draft_key, key = jax.random.split(jax.random.fold_in(key, old.num_generated))
    turn = Turn(settings, params[1], request, old, is_input, draft_key)
    draft, q, drafted = options.drafter.propose(turn, state.drafter)
    tokens = jnp.concatenate([old.last_token[..., None], draft], axis=-1)
    before, segments = old.context.cache, is_input.astype(jnp.int32)
    logits, after, hidden = read_tokens(settings, params[0], tokens, before, segments)
    is_token = jax.nn.one_hot(tokens, logits.shape[-1], dtype=jnp.int8)
    seen_in_draft = jax.lax.cummax(is_token, axis=is_token.ndim - 2) > 0
    seen = old.seen_tokens[..., None, :] | seen_in_draft
    p = token_probabilities(settings.sampler, mask_unused_ids(logits, request.vocab_size), seen)
    checked = check_draft(q, p, draft, num_drafted, key)
    checked = CheckedDraft(*(replicate(settings, x) for x in checked))
    new = append_tokens(settings, request, old, checked)
    count = new.length - old.length
    cache = keep_tokens(settings, params[0], before, after, tokens, count)
    verdict = Verdict(tokens, hidden, checked.tokens, count)
    right = jnp.minimum(count, jnp.maximum(checked.length - 1, 0))
    return DraftState(
        new._replace(context=old.context._replace(cache=cache)),
        options.drafter.keep(turn, state.drafter, drafted, verdict),
        state.num_drafted + jnp.sum(jnp.maximum(num_drafted, 0)),
        state.num_accepted + jnp.sum(right),
    )


def append_tokens(
    options: DecodeConfig, request: Request, state: DecodeState, new: CheckedDraft
) -> DecodeState:
    """Append the checked tokens of each unfinished row, up to a stop token."""
    places, vocab_size = new.tokens.shape[-1], options.config.vocab_size
    stops = jnp.any(new.tokens[..., None] == request.stop_tokens[..., None, :], axis=-1)
    stops &= F.length_mask(new.length, places)
    stopped = jnp.any(stops, axis=-1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=-1) + 1, new.length)
    count = jnp.where(state.is_done, 0, count)
    is_new = F.length_mask(count, places)
    slots = state.length[..., None] + jnp.cumsum(is_new, axis=-1) - 1
    slots = jnp.where(is_new, slots, state.tokens.shape[-1])
    seen = jax.nn.one_hot(jnp.where(is_new, new.tokens, -1), vocab_size, dtype=bool)
    last = jnp.take_along_axis(new.tokens, jnp.maximum(count - 1, 0)[..., None], axis=-1)
    is_full = state.length + count >= request.lengths + options.max_new_tokens
    return state._replace(
        tokens=F.write_slots(state.tokens, new.tokens, slots),
        length=state.length + count,
        last_token=jnp.where(state.is_done, state.last_token, last[..., 0]),
        is_done=state.is_done | stopped | is_full,
        seen_tokens=state.seen_tokens | jnp.any(seen, axis=-2),
        num_generated=state.num_generated + 1,
    )


def _start_drafting(
    options: DraftConfig, params: tuple[Any, Any], request: Request, key: PRNGKeyArray
) -> DraftState:
    """Read the prompts with both models, and sample the first token of each row."""
    decode = start_decoding(options.decode, params[0], request, key)
    drafter, zero = options.drafter.start(params[1], request, decode), jnp.int32(0)
    is_done = decode.is_done | (options.decode.max_new_tokens <= 1)
    decode = decode._replace(is_done=is_done, context=decode.context._replace(hidden=None))
    return DraftState(decode, drafter, zero, zero)


@partial(jax.jit, static_argnums=0)
def decode_with_drafts(
    options: DraftConfig, params: tuple[Any, Any], request: Request, key: PRNGKeyArray
) -> tuple[Int[Array, "*batch P_plus_new"], DraftState]:
    """Decode until all rows stop; also return the last state."""
    state = _start_drafting(options, params, request, key)
    state = jax.lax.while_loop(
        lambda state: ~jnp.all(state.decode.is_done),
        partial(_draft_next, options, params, request, key),
        state,
    )
    tokens = repeat_last_token(state.decode.tokens, state.decode.length)
    return replicate(options.decode, tokens), state


start_drafting = jax.jit(_start_drafting, static_argnums=0)
draft_next = jax.jit(_draft_next, static_argnums=0, donate_argnums=4)
