import math

import numpy as np
import pytest
from scipy import stats

from experiments.studies.statistics import (
    estimate,
    paired_difference,
    rank_correlation,
    rank_p_value,
)


def test_an_interval_is_that_of_students_t():
    """Against scipy's own one-sample test, from which the interval follows."""
    values = [2.71, 2.75, 2.69, 2.74]
    interval = estimate(values)
    theirs = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert interval.mean == pytest.approx(np.mean(values))
    assert interval.mean - interval.half_width == pytest.approx(theirs.low)
    assert interval.mean + interval.half_width == pytest.approx(theirs.high)
    assert interval.std == pytest.approx(np.std(values, ddof=1))


def test_pairs_are_compared_seed_by_seed():
    """What a seed adds to both variants drops out, so the interval is that of the differences."""
    baseline, values = [1.0, 2.0, 3.0], [1.1, 2.2, 3.3]
    theirs = stats.ttest_rel(values, baseline).confidence_interval(0.9)
    difference = paired_difference(values, baseline, confidence=0.9)
    assert difference.mean == pytest.approx(0.2)
    assert difference.mean + difference.half_width == pytest.approx(theirs.high)
    assert difference.half_width < estimate(values).half_width / 3


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    draws = rng.normal(3.0, 0.5, (2000, 4))
    hits = [abs(e.mean - 3.0) <= e.half_width for e in map(estimate, draws)]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)


def test_rank_correlation_by_hand():
    """1 - 6 sum d^2 / (n (n^2 - 1)): one exchange of neighbours among five."""
    assert rank_correlation([1, 2, 3, 5, 4], [1, 2, 3, 4, 5]) == pytest.approx(1 - 6 * 2 / 120)
    assert rank_correlation([3, 2, 1], [10, 20, 30]) == pytest.approx(-1)


def test_how_likely_a_rank_correlation_is_by_chance():
    """Among all orders of nine, those as far from none; Student's t is near that."""
    order = [1, 2, 4, 3, 6, 5, 9, 7, 8]
    rho = rank_correlation(order, range(9))
    rng = np.random.default_rng(0)
    drawn = np.argsort(rng.random((100_000, 9)), axis=1)
    shares = 1 - 6 * np.sum((drawn - np.arange(9)) ** 2, axis=1) / (9 * 80)
    assert rank_p_value(order, range(9)) == pytest.approx(np.mean(abs(shares) >= rho), abs=2e-3)
    assert rank_p_value([1, 2, 3, 4], [2, 4, 1, 3]) == pytest.approx(1.0)


def test_a_seed_without_a_finite_loss_makes_the_estimate_nan():
    assert math.isnan(estimate([1.0, math.nan]).mean)
    assert math.isnan(paired_difference([1.0, 2.0], [1.0, math.inf]).half_width)


def test_too_few_seeds_are_refused():
    with pytest.raises(ValueError, match="interval needs at least 2 seeds; got 1"):
        estimate([1.0])
    with pytest.raises(ValueError, match="equal numbers of seeds; got 2 and 3 in the baseline"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
