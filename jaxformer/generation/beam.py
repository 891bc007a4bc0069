"""Beam search over any decode-step function."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

DecodeStep = Callable[[Any, Int[Array, " rows"]], tuple[Float[Array, "rows V"], Any]]
TakeRows = Callable[[Any, Int[Array, " rows"]], Any]


class Beams(NamedTuple):
    """Result of a beam search: num_beams sequences per row, best first.

    Attributes:
        tokens: New tokens, including the stop token; undefined after `lengths`.
        lengths: Number of new tokens.
        scores: Sum of log-probabilities / lengths ** length_penalty; -inf for an empty beam.
    """

    tokens: Int[Array, "B beams new"]
    lengths: Int[Array, "B beams"]
    scores: Float[Array, "B beams"]


class BeamState(NamedTuple):
    """Loop state: live beams, finished beams, and the decode state."""

    live_tokens: Int[Array, "B beams new"]
    live_log_probs: Float[Array, "B beams"]  # log-probability
    finished: Beams
    state: Any
    logits: Float[Array, "rows V"]
    num_generated: Int[Array, ""]
    is_done: Bool[Array, " B"]  # no live beam can still reach the best num_beams


def beam_search(
    step: DecodeStep,
    take_rows: TakeRows,
    state: Any,
    logits: Float[Array, "B V"],
    stop_tokens: Int[Array, "B K"],
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
) -> Beams:
    """Return the sequences with the highest length-normalized log-probability.

        score = sum of log p(token) / number of tokens ** length_penalty

    Each step ranks the (1 + K) * num_beams most likely continuations of the live beams. Those that
    end in a stop token and are among the best num_beams become finished beams; the best num_beams
    of the others stay live. A row is done when it has num_beams finished beams and the score of its
    best live beam, if it ended now, is no higher than the finished beams' scores. After the last
    step live beams count as finished.

    Args:
        step: Function from (state, one token per row) to (next-token logits, state), with
            B * num_beams rows; the beams of a row of the batch are adjacent.
        take_rows: Function from (state, row indices) to the state of these rows.
        state: Decode state of B rows after the prompts.
        logits: Logits after the prompts.
        stop_tokens: Ids that end a sequence, padded with -1.
        num_beams: Live beams per row.
        max_new_tokens: Maximum number of new tokens.
        length_penalty: 0 compares sums, which favours short sequences; 1 compares means.

    Returns:
        num_beams sequences per row.

    References:
        Wu et al., Google's Neural Machine Translation System, 2016. arXiv:1609.08144, section 7
        (with another length penalty)
    """
    num_candidates = num_beams * min(1 + max(1, stop_tokens.shape[-1]), logits.shape[-1])
    expand = partial(expand_beams, stop_tokens, num_candidates, length_penalty)

    def beam_step(search: BeamState) -> BeamState:
        last_tokens = search.live_tokens[..., search.num_generated - 1].reshape(-1)
        logits, state = step(search.state, last_tokens)
        search, rows = expand(search._replace(logits=logits, state=state))
        return search._replace(state=take_rows(search.state, rows))

    def should_continue(search: BeamState) -> Bool[Array, ""]:
        return (search.num_generated < max_new_tokens) & ~jnp.all(search.is_done)

    rows = jnp.repeat(jnp.arange(logits.shape[0]), num_beams)  # all beams of a row begin alike
    start = initial_beams(take_rows(state, rows), logits[rows], num_beams, max_new_tokens)
    search, _ = expand(start)
    search = jax.lax.while_loop(should_continue, beam_step, search)
    scores = score(search.live_log_probs, search.num_generated, length_penalty)
    scores = jnp.where(search.is_done[:, None], -jnp.inf, scores)
    lengths = jnp.full(scores.shape, search.num_generated)
    return top_beams(search.finished, Beams(search.live_tokens, lengths, scores))


def initial_beams(
    state: Any, logits: Float[Array, "rows V"], num_beams: int, max_new_tokens: int
) -> BeamState:
    """Return the search before the first token: equal beams; only the first is live."""
    batch = logits.shape[0] // num_beams
    log_probs = jnp.where(jnp.arange(num_beams) == 0, 0.0, -jnp.inf)
    log_probs = jnp.broadcast_to(log_probs, (batch, num_beams))
    tokens = jnp.zeros((batch, num_beams, max_new_tokens), jnp.int32)
    lengths = jnp.zeros((batch, num_beams), jnp.int32)
    finished = Beams(tokens, lengths, jnp.full(log_probs.shape, -jnp.inf))
    is_done = jnp.zeros(batch, bool)
    return BeamState(tokens, log_probs, finished, state, logits, jnp.int32(0), is_done)


def expand_beams(
    stop_tokens: Int[Array, "B K"], num_candidates: int, length_penalty: float, search: BeamState
) -> tuple[BeamState, Int[Array, " rows"]]:
    """Extend every live beam by one token; also return each beam's parent row."""
    batch, num_beams = search.live_log_probs.shape
    vocab_size = search.logits.shape[-1]
    log_probs = jax.nn.log_softmax(search.logits.astype(jnp.float32), axis=-1)
    log_probs = log_probs.reshape(batch, num_beams, -1) + search.live_log_probs[..., None]
    log_probs, flat = jax.lax.top_k(log_probs.reshape(batch, -1), num_candidates)
    beam, token = flat // vocab_size, flat % vocab_size
    tokens = jnp.take_along_axis(search.live_tokens, beam[..., None], axis=1)
    tokens = tokens.at[..., search.num_generated].set(token)
    length = search.num_generated + 1
    stops = jnp.any(token[..., None] == stop_tokens[:, None, :], axis=-1)
    is_top_beam = jnp.broadcast_to(jnp.arange(num_candidates) < num_beams, stops.shape)
    newly_finished = stops & is_top_beam & ~search.is_done[:, None]
    scores = jnp.where(newly_finished, score(log_probs, length, length_penalty), -jnp.inf)
    finished = top_beams(search.finished, Beams(tokens, jnp.full(beam.shape, length), scores))
    log_probs, top_indices = jax.lax.top_k(jnp.where(stops, -jnp.inf, log_probs), num_beams)
    parents = jnp.take_along_axis(beam, top_indices, axis=1)
    best_live_score = score(log_probs[:, 0], length, length_penalty)
    search = search._replace(
        live_tokens=jnp.take_along_axis(tokens, top_indices[..., None], axis=1),
        live_log_probs=log_probs,
        finished=finished,
        num_generated=length,
        is_done=search.is_done | (best_live_score <= finished.scores[:, -1]),
    )
    return search, (jnp.arange(batch)[:, None] * num_beams + parents).reshape(-1)


def score(
    log_probs: Float[Array, "..."], length: Int[Array, ""], length_penalty: float
) -> Float[Array, "..."]:
    """Normalize log-probabilities of sequences by their length."""
    return log_probs / length.astype(jnp.float32) ** length_penalty


def top_beams(first: Beams, second: Beams) -> Beams:
    """Return the beams with the highest scores of both, as many as the first has."""
    candidates = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
    scores, top_indices = jax.lax.top_k(candidates.scores, first.scores.shape[-1])
    return Beams(
        jnp.take_along_axis(candidates.tokens, top_indices[..., None], axis=1),
        jnp.take_along_axis(candidates.lengths, top_indices, axis=1),
        scores,
    )
