"""Partial attention over some of the keys, and combining partial results (online softmax)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.scores import Normalizer, attention_scores
from jaxformer.functional.matmul_precision import float32_matmul

NEG_INF = float(jnp.finfo(jnp.float32).min)  # the peak of a query that has seen no key


class PartialAttention(NamedTuple):
    """Softmax numerator, denominator and running maximum of each query, over the keys so far.

    `numerator` and `denominator` are sums over those keys of ``exp(score - max_score) * value`` and
    of ``exp(score - max_score)``; `max_score` is the largest score.
    """

    numerator: Float32[Array, "*batch T Hv"]
    denominator: Float32[Array, "*batch T"]
    max_score: Float32[Array, "*batch T"]


@typechecked
def partial_attention(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    mask: Bool[Array, "T S"] | None = None,
    bias: Float[Array, "T S"] | None = None,
    dropout_multipliers: Float[Array, "T S"] | None = None,
    *,
    scale: float | Float[Array, ""],
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
) -> PartialAttention:
    """Partial attention of one head: numerator, denominator and maximum over these keys.

        values = exp(attention_scores(query, key, bias) - peak) @ value
                 over the keys that mask allows

    Args:
        query: Queries of T positions.
        key: Keys of S positions.
        value: Values of S positions.
        mask: True where the query may attend to the key. None allows every pair.
        bias: Added to the capped scores.
        dropout_multipliers: Factors of the weights, from dropout.
        scale: Multiplies the dot products.
        logit_softcap: Bound on the absolute score.
        normalizer: With "relu", positive scores replace the exponentials, and the maximum is 0.

    Returns:
        Numerator, denominator and maximum. The maximum has no gradient; the result does not
        depend on it.

    References:
        Milakov and Gimelshein, Online normalizer calculation for softmax, 2018. arXiv:1805.02867
    """
    scores = attention_scores(query, key, bias, scale=scale, logit_softcap=logit_softcap)
    visible = jnp.ones(scores.shape, bool) if mask is None else mask
    if normalizer == "relu":
        max_score = jnp.zeros_like(scores[:, 0])
        weights = jnp.where(visible, jax.nn.relu(scores), 0.0)
    else:
        scores = jnp.where(visible, scores, NEG_INF)
        max_score = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - max_score[:, None]), 0.0)
    denominator = jnp.sum(weights, axis=-1)
    if dropout_multipliers is not None:
        weights = weights * dropout_multipliers.astype(jnp.float32)
    numerator = float32_matmul(weights.astype(value.dtype), value)
    return PartialAttention(numerator, denominator, max_score)


@typechecked
def combine_partial_attention(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Combine the partial attention of two disjoint sets of keys.

        peak = max(peak_a, peak_b);    x = x_a * exp(peak_a - peak) + x_b * exp(peak_b - peak)

    Args:
        a: Partial attention to some keys.
        b: Partial attention to other keys.

    Returns:
        Partial attention to all of them; the order and grouping change only the rounding.
    """
    max_score = jnp.maximum(a.max_score, b.max_score)
    scale_a, scale_b = jnp.exp(a.max_score - max_score), jnp.exp(b.max_score - max_score)
    return PartialAttention(
        a.numerator * scale_a[..., None] + b.numerator * scale_b[..., None],
        a.denominator * scale_a + b.denominator * scale_b,
        max_score,
    )


def log_denominator(partial: PartialAttention) -> Float32[Array, "*batch T"]:
    """Log of the denominator, the log-sum-exp of a softmax; NEG_INF without visible keys."""
    denominator = jnp.where(partial.denominator > 0, partial.denominator, 1.0)
    return jnp.where(partial.denominator > 0, partial.max_score + jnp.log(denominator), NEG_INF)


def finite_sinks(sinks: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Sinks in float32, infinity replaced by the largest number: infinity minus itself is NaN."""
    return jnp.minimum(sinks.astype(jnp.float32), jnp.finfo(jnp.float32).max)


@typechecked
def add_sinks(
    output: Float[Array, "*batch T Hv"],
    lse: Float32[Array, "*batch T"],
    sinks: Float[Array, "*batch"],
) -> tuple[Float[Array, "*batch T Hv"], Float32[Array, "*batch T"]]:
    """Add a key of the score `sinks` and the value zero to finished softmax attention.

        lse' = log(exp(lse) + exp(sinks));    output' = exp(lse - lse') * output

    Args:
        output: Attention without sinks.
        lse: Log-sum-exp of each query's scores.
        sinks: A score per head.

    Returns:
        Output and log-sum-exp with sinks. With these two, the backward pass of attention without
        sinks gives the gradients of queries, keys and values.

    References:
        Agarwal et al., gpt-oss-120b & gpt-oss-20b Model Card, 2025. arXiv:2508.10925, section 2.2
    """
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32)[..., None])
    return (output * jnp.exp(lse - total)[..., None]).astype(output.dtype), total


@typechecked
def sinks_gradient(
    sinks: Float[Array, "*batch"],
    output: Float[Array, "*batch T Hv"],
    lse: Float32[Array, "*batch T"],
    d_output: Float[Array, "*batch T Hv"],
) -> Float[Array, "*batch"]:
    """Gradient of the sinks: -sum over queries of exp(sinks - lse) * (d_output . output).

    Args:
        sinks: A score per head.
        output: Attention with sinks.
        lse: Log-sum-exp of each query's scores and sink.
        d_output: Cotangent of the output.

    Returns:
        The gradient, in the dtype of `sinks`.
    """
    delta = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    weights = jnp.exp(sinks.astype(jnp.float32)[..., None] - lse)
    return -jnp.sum(weights * delta, axis=-1).astype(sinks.dtype)


@typechecked
def finish_partial_attention(partial: PartialAttention) -> Float32[Array, "*batch T Hv"]:
    """Divide numerator by denominator; zero for queries without visible keys.

        output = values / total

    Args:
        partial: Of all keys.

    Returns:
        The mean values.
    """
    denominator = jnp.where(partial.denominator > 0, partial.denominator, 1.0)
    return partial.numerator / denominator[..., None]
