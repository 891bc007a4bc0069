"""How well queries match keys, and what may be chosen about it."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from jaxformer.functional.activations import soft_cap
from jaxformer.functional.arguments import checked
from jaxformer.functional.linear import check_dropout

Normalizer = Literal["softmax", "relu"]


@checked
def attention_scores(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    bias: Float[Array, "T S"] | None = None,
    *,
    scale: float,
    logit_softcap: float | None = None,
) -> Float32[Array, "T S"]:
    """How well each query of one head matches each key.

        scores = c * tanh(scale * query @ key.T / c) + bias          c = logit_softcap, if any

    Args:
        query: What each of T positions looks for.
        key: What each of S positions offers.
        bias: Added to the capped scores.
        scale: Multiplies the dot products.
        logit_softcap: Bound on the absolute score.

    Returns:
        The scores in float32.
    """
    scores = scale * jnp.matmul(query, key.T, preferred_element_type=jnp.float32)
    if logit_softcap is not None:
        scores = soft_cap(scores, logit_softcap)
    return scores if bias is None else scores + bias.astype(jnp.float32)


def check_choices(
    normalizer: Normalizer,
    logit_softcap: float | None,
    dropout_rate: float,
    dropout_key: PRNGKeyArray | None,
) -> None:
    """Refuse what no implementation of attention can do."""
    if normalizer not in get_args(Normalizer):
        raise ValueError(f"normalizer must be in {get_args(Normalizer)}; got {normalizer!r}.")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap must be positive; got {logit_softcap}.")
    check_dropout(dropout_rate, dropout_key)
