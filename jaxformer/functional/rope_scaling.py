"""RoPE scaling for long contexts: each method maps frequencies to scaled frequencies.

All lower frequencies, so that long contexts have phases seen in training; they differ in which
frequencies they lower. ``factor`` is the ratio of the extended to the original context length.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxformer.checks import require
from jaxformer.functional.argument_checks import typechecked


def _check_positive(**numbers: int | float | Array) -> None:
    """Check that numbers are positive, apart from traced ones."""
    for name, value in numbers.items():
        require(isinstance(value, Array) or value > 0, f"{name} must be positive; got {value}.")


@typechecked
def rope_scale_linear(frequencies: Float[Array, " C"], *, factor: float) -> Float[Array, " C"]:
    """Linear scaling (position interpolation): divide all frequencies by `factor`.

        frequencies[j] / factor

    Args:
        frequencies: Unscaled, one per feature pair.
        factor: Ratio of the extended to the original context length.

    Returns:
        The scaled frequencies.

    References:
        Chen et al., Extending Context Window of Large Language Models via Positional
        Interpolation, 2023. arXiv:2306.15595, section 2.3
    """
    _check_positive(factor=factor)
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
        factor: Ratio of the extended to the original context length; may be traced.

    Returns:
        The scaled frequencies.

    Raises:
        ValueError: If there is only one frequency, or `factor` is not positive.

    References:
        bloc97, NTK-aware scaled RoPE, 2023, as given by Peng et al., YaRN: Efficient Context Window
        Extension of Large Language Models, 2023. arXiv:2309.00071, section 3.1
    """
    C = frequencies.shape[0]
    if C < 2:
        raise ValueError(f"NTK scaling needs at least two frequencies; got {C}.")
    _check_positive(factor=factor)
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

    During decoding, cached keys keep the rotation of earlier lengths, also in the released
    implementations.

    Args:
        frequencies: Unscaled, one per feature pair.
        length: Sequence length, the highest position plus one; may be traced.
        factor: Slope of the growth.
        original_max_length: Context length in training.

    Returns:
        The scaled frequencies; unchanged up to `original_max_length`.

    References:
        Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
        arXiv:2309.00071, section 3.3
    """
    _check_positive(factor=factor, original_max_length=original_max_length)
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
        factor: Ratio of the extended to the original context length; 8 in Llama 3.1.
        low_freq_factor: Frequencies with fewer turns are divided by `factor`; 1 in Llama 3.1.
        high_freq_factor: Frequencies with more turns are unchanged; 4 in Llama 3.1.
        original_max_length: Original context length; 8192 in Llama 3.1.

    Returns:
        The scaled frequencies.

    Raises:
        ValueError: If ``high_freq_factor`` is not above ``low_freq_factor``, or `factor` or
            `original_max_length` is not positive.

    References:
        Grattafiori et al., The Llama 3 Herd of Models, 2024. arXiv:2407.21783; the formula follows
        the code released with Llama 3.1
    """
    if high_freq_factor < low_freq_factor:
        raise ValueError(
            "high_freq_factor must be at least low_freq_factor; "
            f"got {high_freq_factor} and {low_freq_factor}."
        )
    _check_positive(factor=factor, original_max_length=original_max_length)
    turns = frequencies * (original_max_length / (2 * math.pi))
    width = high_freq_factor - low_freq_factor
    keep = jnp.where(turns < low_freq_factor, 0.0, 1.0)
    if width > 0:
        keep = jnp.clip((turns - low_freq_factor) / width, 0.0, 1.0)
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

    Use it with `yarn_attention_factor`.

    Args:
        frequencies: Unscaled, one per feature pair, ``base ** (-j / C)``.
        base: The base of the frequencies.
        factor: Ratio of the extended to the original context length.
        original_max_length: Original context length.
        beta_fast: Frequencies with more turns are unchanged.
        beta_slow: Frequencies with fewer turns are divided by `factor`.
        truncate: Round ``first`` down and ``last`` up to whole indices, as most released models do.

    Returns:
        The scaled frequencies.

    Raises:
        ValueError: If ``last`` is below ``first``, `base` is not above 1, or another number is not
            positive.

    References:
        Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
        arXiv:2309.00071, sections 3.2 and 3.4
    """
    _check_positive(factor=factor, original_max_length=original_max_length)
    _check_positive(beta_fast=beta_fast, beta_slow=beta_slow)
    require(base > 1, f"base must exceed 1; got {base}.")
    C = frequencies.shape[0]

    def pair_that_makes(turns):
        return C * math.log(original_max_length / (2 * math.pi * turns)) / math.log(base)

    first, last = pair_that_makes(beta_fast), pair_that_makes(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # Released models limit the index to the last feature, not to the last pair.
    first, last = max(first, 0), min(last, 2 * C - 1)
    if last < first:
        raise ValueError(
            f"No frequencies have between beta_slow={beta_slow} and beta_fast={beta_fast} turns "
            f"within original_max_length={original_max_length} at base={base}."
        )
    slow = jnp.clip((jnp.arange(C, dtype=jnp.float32) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return (1 - slow) * frequencies + slow * frequencies / factor


def yarn_attention_factor(
    factor: float, *, mscale: float = 1.0, mscale_all_dim: float = 0.0
) -> float:
    """YaRN attention factor, which multiplies the rotations of queries and keys.

        (0.1 * mscale * ln(factor) + 1) / (0.1 * mscale_all_dim * ln(factor) + 1)

    The defaults are the paper's. DeepSeek sets both scales to the same number, which makes this
    factor 1, and instead multiplies the scores by the square of
    ``yarn_attention_factor(factor, mscale=mscale_all_dim)``.

    Args:
        factor: Ratio of the extended to the original context length; the result is 1 up to 1.
        mscale: Weight of the logarithm for the rotated features.
        mscale_all_dim: Weight of the logarithm that the model applies to all features.

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

    In a long sequence all positions use the long factors, so keys that were cached before it became
    long must be recomputed. Use it with `longrope_attention_factor`.

    Args:
        frequencies: Unscaled, one per feature pair.
        short_factors: Divisors for sequences up to ``original_max_length``.
        long_factors: Divisors for longer sequences.
        length: Sequence length, the highest position plus one; may be traced.
        original_max_length: Original context length.

    Returns:
        The scaled frequencies.

    References:
        Ding et al., LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens, 2024.
        arXiv:2402.13753, section 3
    """
    _check_positive(original_max_length=original_max_length)
    is_long = jnp.asarray(length) > original_max_length
    return frequencies / jnp.where(is_long, long_factors, short_factors)


def longrope_attention_factor(max_length: int | float, original_max_length: int) -> float:
    """LongRoPE attention factor, which multiplies the rotations of queries and keys.

        sqrt(1 + ln(max_length / original_max_length) / ln(original_max_length))

    Args:
        max_length: Extended context length; up to `original_max_length` the result is 1.
        original_max_length: Original context length.

    Returns:
        The attention factor.

    References:
        Ding et al., LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens, 2024.
        arXiv:2402.13753; the formula follows the released Phi-3 models
    """
    message = f"original_max_length must exceed 1; got {original_max_length}."
    require(original_max_length > 1, message)
    growth = max(max_length / original_max_length, 1.0)
    return math.sqrt(1 + math.log(growth) / math.log(original_max_length))


@typechecked
def rope_truncate(frequencies: Float[Array, " C"], *, fraction: float) -> Float[Array, " C"]:
    """p-RoPE: keep the fastest frequencies, and replace the others by 0, which rotates nothing.

        frequencies[j] if j < floor(fraction * C) else 0

    The features of the other pairs carry no position, however long the context. The frequencies
    that are kept equal the frequencies of the whole head; with `config.Rope.fraction` they differ.

    Args:
        frequencies: One per feature pair, the fastest first.
        fraction: Fraction p of the frequencies that is kept; 0.25 in Gemma 4.

    Returns:
        The truncated frequencies.

    References:
        Barbero et al., Round and Round We Go! What makes Rotary Positional Encodings useful?, 2024.
        arXiv:2410.06205, section 6
    """
    require(0 <= fraction <= 1, f"fraction must be in [0, 1]; got {fraction}.")
    count = int(fraction * frequencies.shape[0])
    return frequencies.at[count:].set(0)
