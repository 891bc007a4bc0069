"""Beam search over any decode-step function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Step = Callable[[Any, Int[Array, " rows"]], tuple[Float[Array, "rows V"], Any]]
TakeRows = Callable[[Any, Int[Array, " rows"]], Any]


class Beams(NamedTuple):
    """Result of a beam search: num_beams sequences per row, best first.

    Attributes:
        tokens: New tokens, the stop token included; behind `lengths` without meaning.
        lengths: How many there are.
        scores: Sum of the log-probabilities / lengths ** length_penalty; -inf is no text.
    """

    tokens: Int[Array, "B beams new"]
    lengths: Int[Array, "B beams"]
    scores: Float[Array, "B beams"]


class Search(NamedTuple):
    """Loop state: live beams, finished beams, and the decode state."""

    tokens: Int[Array, "B beams new"]
    total: Float[Array, "B beams"]  # log-probability
    ended: Beams
    state: Any
    logits: Float[Array, "rows V"]
    added: Int[Array, ""]
    settled: Bool[Array, " B"]  # nothing that goes on can still win


def beam_search(
    step: Step,
    take_rows: TakeRows,
    state: Any,
    logits: Float[Array, "B V"],
    stop: Int[Array, "B K"],
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
) -> Beams:
    """Return the sequences with the highest length-normalized log-probability.

        score = sum of log p(token) / number of tokens ** length_penalty

    Each step looks at the (1 + K) * num_beams most likely continuations of the kept beginnings. Of
    the best num_beams among them, those that end in a stop token are kept as texts; of the others,
    the best num_beams go on. A row is settled when it has num_beams texts and the best beginning,
    were it to end now, would be no better than the worst of them. At the last step beginnings count
    as texts.

    Args:
        step: (state, one token for each of B * num_beams rows) to (logits of the next, state). The
            beams of one row of the batch stand together.
        take_rows: (state, row numbers) to the state of those rows.
        state: After the prompts, of B rows.
        logits: After the prompts.
        stop: Token ids that end a text; -1 is none.
        num_beams: How many beginnings are kept for each row.
        max_new_tokens: Most tokens of a text.
        length_penalty: 0 compares sums, which favours short texts; 1 compares means.

    Returns:
        num_beams texts a row.

    References:
        Wu et al., Google's Neural Machine Translation System, 2016. arXiv:1609.08144, section 7
        (with another length penalty)
    """
    batch, vocab_size = logits.shape
    few = min(num_beams * (1 + max(1, stop.shape[-1])), num_beams * vocab_size)
    rows = jnp.repeat(jnp.arange(batch), num_beams)
    # All beams of a row begin alike, so only the first one may be continued at first.
    total = jnp.where(jnp.arange(num_beams) == 0, 0.0, -jnp.inf)
    total = jnp.broadcast_to(total, (batch, num_beams))
    blank = jnp.zeros((batch, num_beams, max_new_tokens), jnp.int32)
    none = Beams(blank, jnp.zeros((batch, num_beams), jnp.int32), jnp.full(total.shape, -jnp.inf))

    def expand(search: Search) -> tuple[Search, Array]:
        """Extend every live beam by one token; also return each beam's parent row."""
        by_token = jax.nn.log_softmax(search.logits.astype(jnp.float32), axis=-1)
        by_token = by_token.reshape(batch, num_beams, vocab_size) + search.total[..., None]
        total, flat = jax.lax.top_k(by_token.reshape(batch, -1), few)
        beam, token = flat // vocab_size, flat % vocab_size
        tokens = jnp.take_along_axis(search.tokens, beam[..., None], axis=1)
        tokens = tokens.at[..., search.added].set(token)
        length = search.added + 1
        stops = jnp.any(token[..., None] == stop[:, None, :], axis=-1)
        near = jnp.broadcast_to(jnp.arange(few) < num_beams, stops.shape)
        ends = stops & near & ~search.settled[:, None]
        scores = jnp.where(ends, total / length.astype(jnp.float32) ** length_penalty, -jnp.inf)
        ended = best(search.ended, Beams(tokens, jnp.full(beam.shape, length), scores))
        total, kept = jax.lax.top_k(jnp.where(stops, -jnp.inf, total), num_beams)
        going = jnp.take_along_axis(tokens, kept[..., None], axis=1)
        rows = jnp.arange(batch)[:, None] * num_beams + jnp.take_along_axis(beam, kept, axis=1)
        if_ended_now = total[:, 0] / length.astype(jnp.float32) ** length_penalty
        settled = search.settled | (if_ended_now <= ended.scores[:, -1])
        search = search._replace(
            tokens=going, total=total, ended=ended, added=length, settled=settled
        )
        return search, rows.reshape(-1)

    def best(first: Beams, second: Beams) -> Beams:
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
        scores, kept = jax.lax.top_k(both.scores, num_beams)
        return Beams(
            jnp.take_along_axis(both.tokens, kept[..., None], axis=1),
            jnp.take_along_axis(both.lengths, kept, axis=1),
            scores,
        )

    def advance(search: Search) -> Search:
        newest = search.tokens[..., search.added - 1].reshape(-1)
        logits, state = step(search.state, newest)
        search, rows = expand(search._replace(logits=logits, state=state))
        return search._replace(state=take_rows(search.state, rows))

    def unfinished(search: Search) -> Bool[Array, ""]:
        return (search.added < max_new_tokens) & ~jnp.all(search.settled)

    settled = jnp.zeros(batch, bool)
    start = Search(blank, total, none, state, logits[rows], jnp.int32(0), settled)
    search, _ = expand(start)
    search = search._replace(state=take_rows(state, rows))
    search = jax.lax.while_loop(unfinished, advance, search)
    length = search.added
    scores = search.total / length.astype(jnp.float32) ** length_penalty
    scores = jnp.where(search.settled[:, None], -jnp.inf, scores)
    return best(search.ended, Beams(search.tokens, jnp.full(scores.shape, length), scores))
