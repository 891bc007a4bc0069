"""Beam search over any decode-step function."""

from collections.abc import Callable
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
    best live beam, if it ended now, is no higher than theirs. After the last step live beams count
    as finished.

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
    batch, vocab_size = logits.shape
    num_candidates = min(num_beams * (1 + max(1, stop_tokens.shape[-1])), num_beams * vocab_size)
    rows = jnp.repeat(jnp.arange(batch), num_beams)
    # All beams of a row are equal at first, so only the first one is live.
    log_probs = jnp.where(jnp.arange(num_beams) == 0, 0.0, -jnp.inf)
    log_probs = jnp.broadcast_to(log_probs, (batch, num_beams))
    empty_tokens = jnp.zeros((batch, num_beams, max_new_tokens), jnp.int32)
    no_finished = Beams(
        empty_tokens, jnp.zeros((batch, num_beams), jnp.int32), jnp.full(log_probs.shape, -jnp.inf)
    )

    def expand_beams(search: BeamState) -> tuple[BeamState, Array]:
        """Extend every live beam by one token; also return each beam's parent row."""
        candidate_log_probs = jax.nn.log_softmax(search.logits.astype(jnp.float32), axis=-1)
        candidate_log_probs = (
            candidate_log_probs.reshape(batch, num_beams, vocab_size)
            + search.live_log_probs[..., None]
        )
        log_probs, flat = jax.lax.top_k(candidate_log_probs.reshape(batch, -1), num_candidates)
        beam, token = flat // vocab_size, flat % vocab_size
        tokens = jnp.take_along_axis(search.live_tokens, beam[..., None], axis=1)
        tokens = tokens.at[..., search.num_generated].set(token)
        length = search.num_generated + 1
        stops = jnp.any(token[..., None] == stop_tokens[:, None, :], axis=-1)
        is_top_beam = jnp.broadcast_to(jnp.arange(num_candidates) < num_beams, stops.shape)
        newly_finished = stops & is_top_beam & ~search.is_done[:, None]
        scores = jnp.where(
            newly_finished, log_probs / length.astype(jnp.float32) ** length_penalty, -jnp.inf
        )
        finished = top_beams(search.finished, Beams(tokens, jnp.full(beam.shape, length), scores))
        log_probs, top_indices = jax.lax.top_k(jnp.where(stops, -jnp.inf, log_probs), num_beams)
        live_tokens = jnp.take_along_axis(tokens, top_indices[..., None], axis=1)
        rows = jnp.arange(batch)[:, None] * num_beams + jnp.take_along_axis(
            beam, top_indices, axis=1
        )
        best_live_score = log_probs[:, 0] / length.astype(jnp.float32) ** length_penalty
        is_done = search.is_done | (best_live_score <= finished.scores[:, -1])
        search = search._replace(
            live_tokens=live_tokens,
            live_log_probs=log_probs,
            finished=finished,
            num_generated=length,
            is_done=is_done,
        )
        return search, rows.reshape(-1)

    def top_beams(first: Beams, second: Beams) -> Beams:
        candidates = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
        scores, top_indices = jax.lax.top_k(candidates.scores, num_beams)
        return Beams(
            jnp.take_along_axis(candidates.tokens, top_indices[..., None], axis=1),
            jnp.take_along_axis(candidates.lengths, top_indices, axis=1),
            scores,
        )

    def beam_step(search: BeamState) -> BeamState:
        last_tokens = search.live_tokens[..., search.num_generated - 1].reshape(-1)
        logits, state = step(search.state, last_tokens)
        search, rows = expand_beams(search._replace(logits=logits, state=state))
        return search._replace(state=take_rows(search.state, rows))

    def should_continue(search: BeamState) -> Bool[Array, ""]:
        return (search.num_generated < max_new_tokens) & ~jnp.all(search.is_done)

    is_done = jnp.zeros(batch, bool)
    start = BeamState(
        empty_tokens, log_probs, no_finished, state, logits[rows], jnp.int32(0), is_done
    )
    beam_state, _ = expand_beams(start)
    beam_state = beam_state._replace(state=take_rows(state, rows))
    beam_state = jax.lax.while_loop(should_continue, beam_step, beam_state)
    length = beam_state.num_generated
    scores = beam_state.live_log_probs / length.astype(jnp.float32) ** length_penalty
    scores = jnp.where(beam_state.is_done[:, None], -jnp.inf, scores)
    return top_beams(
        beam_state.finished, Beams(beam_state.live_tokens, jnp.full(scores.shape, length), scores)
    )
