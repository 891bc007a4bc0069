"""Logit processors for sampling: temperature, top-k, top-p, min-p, repetition penalty.

Each maps logits ``[*batch, V]`` to logits of the same dtype. Sample from the result with
`jax.random.categorical`.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxformer.checks import require
from jaxformer.functional.argument_checks import typechecked


def _mask_logits(
    logits: Float[Array, "*batch V"], keep_mask: Bool[Array, "*batch V"]
) -> Float[Array, "*batch V"]:
    return jnp.where(keep_mask, logits, jnp.full_like(logits, -jnp.inf))


@typechecked
def scale_by_temperature(
    logits: Float[Array, "*batch V"], temperature: float
) -> Float[Array, "*batch V"]:
    """Divide by the temperature: below 1 sharpens the distribution, above 1 flattens it.

    Args:
        logits: Next-token logits.
        temperature: Positive; 1 changes nothing.

    Returns:
        The scaled logits. Rows that overflow their dtype are shifted to a maximum of 0, which does
        not change probabilities.

    Raises:
        ValueError: If `temperature` is not positive; use argmax in place of temperature 0.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite; got {temperature}.")
    wide = logits.astype(jnp.float32)
    divisor = max(temperature, float(jnp.finfo(jnp.float32).tiny))
    max_logit = jnp.max(wide, axis=-1, keepdims=True, initial=-jnp.inf)
    is_representable = jnp.abs(max_logit / divisor) <= float(jnp.finfo(logits.dtype).max)
    shift = jnp.where(is_representable | ~jnp.isfinite(max_logit), 0.0, max_logit)
    return ((wide - shift) / divisor).astype(logits.dtype)


@typechecked
def keep_top_k(logits: Float[Array, "*batch V"], k: int) -> Float[Array, "*batch V"]:
    """Top-k filter: keep the k largest logits and ties with the smallest of them.

    Args:
        logits: Next-token logits.
        k: Number of logits to keep, from 1 to V.

    Returns:
        The logits, with -inf for the others.

    Raises:
        ValueError: If `k` is not between 1 and V.

    References:
        Fan, Lewis and Dauphin, Hierarchical Neural Story Generation, 2018. arXiv:1805.04833,
        section 5.4
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k must be from 1 to the vocabulary size {logits.shape[-1]}; got {k}.")
    threshold = jax.lax.top_k(logits, k)[0][..., -1:]
    return _mask_logits(logits, logits >= threshold)


@typechecked
def keep_top_p(logits: Float[Array, "*batch V"], p: float) -> Float[Array, "*batch V"]:
    """Top-p (nucleus) filter: keep the fewest tokens whose probabilities sum to at least p.

    A token is kept if the more likely tokens have a total probability below `p`: so the most likely
    token is always kept, and so are ties with the last token (Hugging Face drops some of them).

    Args:
        logits: Next-token logits.
        p: Probability to keep, in (0, 1]; 1 keeps all tokens.

    Returns:
        The logits, with -inf outside the nucleus.

    Raises:
        ValueError: If `p` is outside (0, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
        >>> np.asarray(F.keep_top_p(logits, 0.7)).round(2)  # 0.5 alone is too little
        array([-0.69, -1.2 ,  -inf,  -inf], dtype=float32)

    References:
        Holtzman et al., The Curious Case of Neural Text Degeneration, 2019. arXiv:1904.09751,
        section 3.1
    """
    require(0 < p <= 1, f"p must be in (0, 1]; got {p}.")
    if p == 1:
        return logits
    wide = logits.astype(jnp.float32)
    descending = jnp.sort(wide, axis=-1, descending=True)
    probabilities = jax.nn.softmax(descending, axis=-1)
    preceding = jnp.cumsum(probabilities, axis=-1) - probabilities
    threshold = jnp.min(descending, axis=-1, keepdims=True, where=preceding < p, initial=jnp.inf)
    return _mask_logits(logits, wide >= threshold)


@typechecked
def keep_min_p(logits: Float[Array, "*batch V"], p: float) -> Float[Array, "*batch V"]:
    """Min-p filter: keep tokens with at least p times the largest probability.

        keep if logit >= max(logits) + log(p)

    Args:
        logits: Next-token logits.
        p: Fraction of the largest probability, in (0, 1]; 1 keeps only the most likely token.

    Returns:
        The logits, with -inf for the others.

    Raises:
        ValueError: If `p` is outside (0, 1].

    References:
        Nguyen et al., Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs,
        2024. arXiv:2407.01082, section 3
    """
    require(0 < p <= 1, f"p must be in (0, 1]; got {p}.")
    wide = logits.astype(jnp.float32)
    return _mask_logits(logits, wide >= jnp.max(wide, axis=-1, keepdims=True) + math.log(p))


@typechecked
def seen_tokens(tokens: Integer[Array, "*batch T"], vocab_size: int) -> Bool[Array, "*batch V"]:
    """Mark the vocabulary ids that occur in each row; ids out of range are ignored.

        seen[v] = any(tokens == v)

    Args:
        tokens: Ids.
        vocab_size: V.

    Returns:
        True for each id that occurs; for `penalise_repetition`.

    Raises:
        ValueError: `vocab_size` is below 1.
    """
    require(vocab_size >= 1, f"vocab_size must be at least 1; got {vocab_size}.")
    *batch, T = tokens.shape
    rows = tokens.reshape(math.prod(batch), T)
    inside = jnp.where(rows < 0, vocab_size, rows)  # negative ids would index from the end
    which = jnp.broadcast_to(jnp.arange(len(rows))[:, None], rows.shape)
    seen = jnp.zeros((len(rows), vocab_size), bool).at[which, inside].set(True, mode="drop")
    return seen.reshape(*batch, vocab_size)


@typechecked
def penalise_repetition(
    logits: Float[Array, "*batch V"], seen: Bool[Array, "*#batch V"], penalty: float
) -> Float[Array, "*batch V"]:
    """Repetition penalty of CTRL: lower the logits of tokens that occurred.

        y = logit / penalty if logit > 0 else logit * penalty        (where seen)

    Unlike probabilities, the result changes if a constant is added to the logits: apply it to the
    model's logits before other processors.

    Args:
        logits: Next-token logits.
        seen: True for tokens that occurred; from `seen_tokens`.
        penalty: 1 is no penalty; the paper uses 1.2. Below 1 it encourages repetition.

    Returns:
        The logits, with the penalty where `seen`.

    Raises:
        ValueError: If `penalty` is not positive.

    References:
        Keskar et al., CTRL: A Conditional Transformer Language Model for Controllable Generation,
        2019. arXiv:1909.05858, section 4.1
    """
    if not 0 < penalty < math.inf:
        raise ValueError(f"penalty must be positive and finite; got {penalty}.")
    wide = logits.astype(jnp.float32)
    max_value = float(jnp.finfo(logits.dtype).max)  # a large penalty must not give -inf
    penalised = jnp.clip(jnp.where(wide > 0, wide / penalty, wide * penalty), -max_value, max_value)
    changed = jnp.broadcast_to(seen, logits.shape) & jnp.isfinite(logits)
    return jnp.where(changed, penalised.astype(logits.dtype), logits)
