"""Attention scores of one head, their scale, and checks of the score options."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from jaxformer.functional.activations import soft_cap
from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.linear import check_dropout, check_static
from jaxformer.functional.matmul_precision import float32_matmul

Normalizer = Literal["softmax", "relu"]


@typechecked
def attention_scores(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    bias: Float[Array, "T S"] | None = None,
    *,
    scale: float | Float[Array, ""],
    logit_softcap: float | None = None,
) -> Float32[Array, "T S"]:
    """Scores of one head: soft_cap(scale * query @ key.T) + bias, float32.

        scores = c * tanh(scale * query @ key.T / c) + bias          c = logit_softcap, if any

    Args:
        query: Queries of T positions.
        key: Keys of S positions.
        bias: Added to the capped scores.
        scale: Multiplies the dot products.
        logit_softcap: Bound on the absolute score.

    Returns:
        The scores in float32.
    """
    if isinstance(scale, jax.Array):
        scale = scale.astype(jnp.float32)
    scores = scale * float32_matmul(query, key.T)
    if logit_softcap is not None:
        scores = soft_cap(scores, logit_softcap)
    return scores if bias is None else scores + bias.astype(jnp.float32)


def resolve_scale(
    query: Float[Array, "..."], scale: float | Float[Array, ""] | None
) -> tuple[Float[Array, "..."], float]:
    """Return the query and a Python scale; a traced scale is multiplied into the query instead.

    A scale that is an array, such as a learned one, multiplies the queries, because kernels and
    loops take a Python number and have no gradient with respect to it.
    """
    if scale is None:
        return query, query.shape[-1] ** -0.5
    if not isinstance(scale, jax.Array):
        return query, scale
    return (query.astype(jnp.float32) * scale.astype(jnp.float32)).astype(query.dtype), 1.0


def check_score_options(
    normalizer: Normalizer,
    logit_softcap: float | None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    sinks: Array | None = None,
) -> None:
    """Check soft cap, dropout and sinks of an attention call."""
    if sinks is not None and normalizer != "softmax":
        raise ValueError(f'sinks need normalizer="softmax"; got {normalizer!r}.')
    check_static("logit_softcap", logit_softcap)
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap must be positive; got {logit_softcap}.")
    check_dropout(dropout_rate, dropout_key)
