"""Samplers: frozen dataclasses for choosing the next token, and `sample_token`."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.checks import Checked, Fraction, Must, Positive, Size


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """The most likely token."""


@dataclass(frozen=True, kw_only=True)
class Sample(Checked):
    """Sample from the softmax after temperature, top-k, top-p and min-p; None is no filter.

    The order is repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: Divides the logits; below 1 it sharpens the distribution.
        top_k: Keep only the k most likely tokens.
        top_p: Keep only the fewest tokens with at least this total probability.
        min_p: Keep only tokens with at least this fraction of the largest probability.
        repetition_penalty: Above 1 it makes tokens of the text less likely.
    """

    temperature: Annotated[
        float, Must("be positive", lambda t: t > 0, "For the most likely token use Greedy().")
    ] = 1.0
    top_k: Size | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repetition_penalty: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class Beam(Checked):
    """Beam search (see `beam_search`); returns the best sequence.

    Attributes:
        num_beams: Live beams per row.
        length_penalty: Exponent of the length by which log-probabilities are divided; 0 compares
            sums.
    """

    num_beams: Size = 4
    length_penalty: float = 1.0


Sampler = Greedy | Sample


def sample_token(
    sampler: Sampler,
    logits: Float[Array, "*batch V"],
    seen_tokens: Bool[Array, "*batch V"],
    key: PRNGKeyArray,
) -> Int[Array, "*batch"]:
    """Next token id of each row.

    Args:
        sampler: `Greedy()` or `Sample(...)`.
        logits: Next-token logits.
        seen_tokens: True for ids that occur in the text.
        key: Random key, used by `Sample` only.

    Returns:
        One token id per row.
    """
    match sampler:
        case Greedy():
            return jnp.argmax(logits, axis=-1)
        case Sample():
            return jax.random.categorical(key, filter_logits(sampler, logits, seen_tokens), axis=-1)


def token_probabilities(
    sampler: Sampler, logits: Float[Array, "*batch V"], seen_tokens: Bool[Array, "*batch V"]
) -> Float[Array, "*batch V"]:
    """Probabilities from which `sample_token` draws, in float32; for `Greedy` they are 0 and 1."""
    match sampler:
        case Greedy():
            return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
        case Sample():
            filtered = filter_logits(sampler, logits, seen_tokens)
            return jax.nn.softmax(filtered.astype(jnp.float32), axis=-1)


def filter_logits(
    sampler: Sample, logits: Float[Array, "*batch V"], seen_tokens: Bool[Array, "*batch V"]
) -> Float[Array, "*batch V"]:
    """Logits after repetition penalty, temperature, top-k, top-p and min-p."""
    if sampler.repetition_penalty != 1:
        logits = F.penalise_repetition(logits, seen_tokens, sampler.repetition_penalty)
    logits = F.scale_by_temperature(logits, sampler.temperature)
    if sampler.top_k is not None:
        logits = F.keep_top_k(logits, min(sampler.top_k, logits.shape[-1]))
    if sampler.top_p is not None:
        logits = F.keep_top_p(logits, sampler.top_p)
    if sampler.min_p is not None:
        logits = F.keep_min_p(logits, sampler.min_p)
    return logits
