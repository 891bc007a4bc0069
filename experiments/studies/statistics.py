"""Confidence intervals over seeds, paired differences, rank correlation."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """Mean, standard deviation and half-width of the confidence interval."""

    mean: float
    std: float
    half_width: float


def estimate(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """Mean of independent values, with a confidence interval by Student's t.

        half_width = t(confidence, n - 1) * deviation / sqrt(n)

    Args:
        values: One for each seed.
        confidence: Confidence level of the interval.

    Returns:
        The estimate; NaN if a value is not finite.

    Raises:
        ValueError: There are fewer than two values.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"A confidence interval needs at least 2 seeds; got {count}.")
    if not all(map(math.isfinite, values)):
        return Estimate(math.nan, math.nan, math.nan)
    deviation = float(np.std(values, ddof=1))
    t = float(stats.t.ppf((1 + confidence) / 2, count - 1))
    return Estimate(float(np.mean(values)), deviation, t * deviation / math.sqrt(count))


def paired_difference(
    values: Sequence[float], baseline: Sequence[float], *, confidence: float = CONFIDENCE
) -> Estimate:
    """Mean difference between two variants, paired by seed.

    Both variants of a seed train on the same data in the same order, so that effects of the seed on
    both cancel.

    Args:
        values: One for each seed.
        baseline: Values of the other variant, in the same order.
        confidence: Confidence level of the interval.

    Returns:
        The estimate of values - baseline.

    Raises:
        ValueError: The numbers of values differ, or are below two.
    """
    if len(values) != len(baseline):
        raise ValueError(
            f"Paired values need equal numbers of seeds; got {len(values)} and {len(baseline)} in "
            "the baseline."
        )
    return estimate([a - b for a, b in zip(values, baseline, strict=True)], confidence=confidence)


def rank_correlation(values: Sequence[float], published: Sequence[float]) -> float:
    """Spearman's rank correlation: 1 for equal orders, -1 for reversed ones.

    References:
        Spearman, The Proof and Measurement of Association between Two Things, 1904
    """
    return float(stats.spearmanr(values, published).statistic)


def rank_p_value(values: Sequence[float], published: Sequence[float]) -> float:
    """p-value: the chance that a random order has at least this absolute rank correlation.

    From Student's t with n - 2 degrees of freedom, an approximation for fewer than ten values.
    """
    return float(stats.spearmanr(values, published).pvalue)
