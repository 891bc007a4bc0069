"""RoPE scaling for long contexts: each method maps frequencies to scaled frequencies.

All slow the pairs down so that long texts meet the phases short ones did. They differ in which
pairs they slow; ``factor`` always says by how much the context grows.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxformer.functional.argument_checks import typechecked


@typechecked
def rope_scale_linear(frequencies: Float[Array, " C"], *, factor: float) -> Float[Array, " C"]:
    """Linear scaling (position interpolation): divide all frequencies by `factor`.

        frequencies[j] / factor

    Args:
        frequencies: Unscaled, one per feature pair.
        factor: How much longer the context becomes.

    Returns:
        The scaled frequencies.

    References:
        Chen et al., Extending Context Window of Large Language Models via Positional
        Interpolation, 2023. arXiv:2306.15595, section 2.3
    """
    return frequencies / factor


@typechecked
def rope_scale_ntk(
    frequencies: Float[Array, " C"], *, factor: float | Float[Array, ""]
) -> Float[Array, " C"]:
    """NTK-aware scaling: divide frequencies by 1 (highest) to `factor` (lowest), geometrically.

        frequencies[j] * factor ** (-j / (C - 1))

    The same as `rope_frequencies` with the base raised to ``base * factor ** (C / (C - 1))``.

    Args:
        frequencies: Unscaled, one per feature pair.
        factor: How much longer the context becomes; may be traced.

    Returns:
        The scaled frequencies.

    Raises:
        ValueError: If there is one pair only, which is both fastest and slowest.

    References:
        bloc97, NTK-aware scaled RoPE, 2023, as given by Peng et al., YaRN: Efficient Context Window
        Extension of Large Language Models, 2023. arXiv:2309.00071, section 3.1
    """
    C = frequencies.shape[0]
    if C < 2:
        raise ValueError(f"NTK scaling needs at least two frequencies; got {C}.")
    exponents = -jnp.arange(C, dtype=jnp.float32) / (C - 1)
    return frequencies * jnp.asarray(factor, jnp.float32) ** exponents


@typechecked
def rope_scale_dynamic_ntk(
    frequencies: Float[Array, " C"],
    *,
    length: int | Integer[Array, ""],
    factor: float,
    original_max_length: int,
) -> Float[Array, " C"]:
    """Dynamic NTK scaling: `rope_scale_ntk` with a factor that grows with the sequence length.

        growth = 1 + factor * (max(length, original_max_length) / original_max_length - 1)

    A cache of rotated keys mixes frequencies of several lengths when the text grows past the
    length of training, in the released implementations as well.

    Args:
        frequencies: Unscaled, one per feature pair.
        length: Tokens so far, the highest position plus one; may be traced.
        factor: The slope of the growth.
        original_max_length: Longest text in training.

    Returns:
        The scaled frequencies; the given ones up to the length of training.

    References:
        Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
        arXiv:2309.00071, section 3.3
    """
    excess = jnp.maximum(jnp.asarray(length, jnp.float32) / original_max_length, 1.0) - 1.0
    return rope_scale_ntk(frequencies, factor=1.0 + factor * excess)


@typechecked
def rope_scale_llama3(
    frequencies: Float[Array, " C"],
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_length: int,
) -> Float[Array, " C"]:
    """Llama 3 scaling: divide low frequencies by `factor`, keep high ones, interpolate between.

        turns[j] = original_max_length * frequencies[j] / (2 * pi)
        keep[j] = clip((turns[j] - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        keep[j] * frequencies[j] + (1 - keep[j]) * frequencies[j] / factor

    Args:
        frequencies: Unscaled, one per feature pair.
        factor: How much longer the context becomes; 8 in Llama 3.1.
        low_freq_factor: Pairs with fewer turns than this are slowed in full; 1 in Llama 3.1.
        high_freq_factor: Pairs with more turns than this are kept; 4 in Llama 3.1.
        original_max_length: Longest text in training before the extension; 8192 in Llama 3.1.

    Returns:
        The scaled frequencies.

    Raises:
        ValueError: If ``high_freq_factor`` is not above ``low_freq_factor``.

    References:
        Grattafiori et al., The Llama 3 Herd of Models, 2024. arXiv:2407.21783; the formula is that
        of the code released with Llama 3.1
    """
    if high_freq_factor <= low_freq_factor:
        raise ValueError(
            "high_freq_factor must exceed low_freq_factor; "
            f"got {high_freq_factor} and {low_freq_factor}."
        )
    turns = frequencies * (original_max_length / (2 * math.pi))
    keep = jnp.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / factor


@typechecked
def rope_scale_yarn(
    frequencies: Float[Array, " C"],
    *,
    base: float,
    factor: float,
    original_max_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Float[Array, " C"]:
    """YaRN scaling: keep high frequencies, divide low ones by `factor`, a linear ramp between.

        first, last = the (real) indices of the pairs that make beta_fast and beta_slow turns
                      within original_max_length
        slow[j] = clip((j - first) / (last - first), 0, 1)
        (1 - slow[j]) * frequencies[j] + slow[j] * frequencies[j] / factor

    Goes with `yarn_attention_factor`.

    Args:
        frequencies: Unscaled, one per feature pair, ``base ** (-j / C)``.
        base: The base of the frequencies.
        factor: How much longer the context becomes.
        original_max_length: Longest text in training before the extension.
        beta_fast: Pairs with more turns than this are kept.
        beta_slow: Pairs with fewer turns than this are slowed in full.
        truncate: Round ``first`` down and ``last`` up to whole indices, as most released models do.

    Returns:
        The scaled frequencies.

    Raises:
        ValueError: If the indices lie in the wrong order, so that there is nothing in between.

    References:
        Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
        arXiv:2309.00071, sections 3.2 and 3.4
    """
    C = frequencies.shape[0]

    def pair_that_makes(turns):
        return C * math.log(original_max_length / (2 * math.pi * turns)) / math.log(base)

    first, last = pair_that_makes(beta_fast), pair_that_makes(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # The released models' bound is the last feature, not the last pair.
    first, last = max(first, 0), min(last, 2 * C - 1)
    if last < first:
        raise ValueError(
            f"No pairs lie between beta_fast={beta_fast} and beta_slow={beta_slow} turns within "
            f"original_max_length={original_max_length} at base={base}."
        )
    slow = jnp.clip((jnp.arange(C, dtype=jnp.float32) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return (1 - slow) * frequencies + slow * frequencies / factor


def yarn_attention_factor(
    factor: float, *, mscale: float = 1.0, mscale_all_dim: float = 0.0
) -> float:
    """YaRN attention factor, which multiplies the rotations of queries and keys.

        (0.1 * mscale * ln(factor) + 1) / (0.1 * mscale_all_dim * ln(factor) + 1)

    The defaults are the paper's. DeepSeek sets both scales, alike, so that the rotations keep their
    length, and multiplies the scores of all features, rotated or not, by the square of
    ``yarn_attention_factor(factor, mscale=mscale_all_dim)`` instead.

    Args:
        factor: How much longer the context becomes; up to 1 nothing changes.
        mscale: Weight of the logarithm for the rotated features.
        mscale_all_dim: Weight of the logarithm that is applied to all features elsewhere.

    Returns:
        The attention factor.

    References:
        Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
        arXiv:2309.00071, section 3.4; DeepSeek-AI, DeepSeek-V2, 2024. arXiv:2405.04434,
        section 3.1.4
    """
    growth = 0.1 * math.log(max(factor, 1.0))
    return (mscale * growth + 1) / (mscale_all_dim * growth + 1)


@typechecked
def rope_scale_longrope(
    frequencies: Float[Array, " C"],
    short_factors: Float[Array, " C"],
    long_factors: Float[Array, " C"],
    *,
    length: int | Integer[Array, ""],
    original_max_length: int,
) -> Float[Array, " C"]:
    """LongRoPE scaling: divide each frequency by its short or long factor, by sequence length.

        frequencies[j] / (long_factors[j] if length > original_max_length else short_factors[j])

    All positions of a long text take the long factors, the early ones too, so keys that were
    cached before the text became long have to be computed again. Goes with
    `longrope_attention_factor`.

    Args:
        frequencies: Unscaled, one per feature pair.
        short_factors: For texts up to ``original_max_length``.
        long_factors: For longer texts.
        length: Tokens so far, the highest position plus one; may be traced.
        original_max_length: Longest text in training before the extension.

    Returns:
        The scaled frequencies.

    References:
        Ding et al., LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens, 2024.
        arXiv:2402.13753, section 3
    """
    is_long = jnp.asarray(length) > original_max_length
    return frequencies / jnp.where(is_long, long_factors, short_factors)


def longrope_attention_factor(max_length: int | float, original_max_length: int) -> float:
    """LongRoPE attention factor, which multiplies the rotations of queries and keys.

        sqrt(1 + ln(max_length / original_max_length) / ln(original_max_length))

    Args:
        max_length: Longest text after the extension; if no longer than before, nothing changes.
        original_max_length: Longest text in training before the extension.

    Returns:
        The attention factor.

    References:
        Ding et al., LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens, 2024.
        arXiv:2402.13753; the formula is that of the released Phi-3 models
    """
    growth = max(max_length / original_max_length, 1.0)
    return math.sqrt(1 + math.log(growth) / math.log(original_max_length))
