"""Intervals, paired differences, Holm's correction and ranks, against SciPy's own functions and by hand."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from rayfl.statistics import holm, mean_interval, mean_ranks, paired_difference


def test_an_interval_is_student_s_over_the_seeds() -> None:
    values = [77.1, 78.4, 76.0, 79.9]
    found = mean_interval(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(77.85)
    assert found.n == 4


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, (4000, 3))
    inside = [interval.low <= 3.0 <= interval.high for interval in map(mean_interval, draws)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)  # four standard errors


def test_one_value_has_no_bounds_and_none_has_no_mean() -> None:
    one, none = mean_interval([5.0, math.nan]), mean_interval([])
    assert (one.mean, one.low, one.high, one.bounded) == (5.0, -math.inf, math.inf, False)
    assert math.isnan(none.mean)
    assert none.n == 0


def test_equal_values_have_an_interval_of_no_width() -> None:
    for value in (2.0, 91.1, 0.0):  # the mean of three times 91.1 is another number
        found = mean_interval([value] * 3)
        assert (found.mean, found.low, found.high, found.half) == (value, value, value, 0.0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_infinite_value_is_equal_to_no_other() -> None:
    found = mean_interval([1.0, math.inf, 2.0])
    assert found.mean == math.inf
    assert (found.low, found.high) != (1.0, 1.0)


def test_differences_pair_by_place() -> None:
    a, b = np.array([90.0, 80.0, 70.0]), np.array([88.0, 79.0, 67.0])
    found, test = paired_difference(a, b), stats.ttest_rel(a, b)
    assert found.mean == pytest.approx(2.0)
    assert found.p == pytest.approx(test.pvalue)
    assert found.low > -0.5  # unpaired, the spread of the seeds would drown it
    assert paired_difference([1, math.nan, 3], [0, 1, 2]).n == 2
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_difference([1, 2], [1])


def test_constant_differences_have_no_p_value() -> None:
    """The t-test divides by their spread; two seeds that agree would be beyond all doubt."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # SciPy warns of cancellation
        for first, second in (([1, 2], [1, 2]), ([2, 3], [1, 2]), ([0.1 + 0.2, 0.3], [0, 0]), ([2], [1])):
            assert math.isnan(paired_difference(first, second).p)
    assert paired_difference([2, 3], [1, 2]).half == 0


def test_holm_multiplies_the_smallest_most() -> None:
    found = holm([0.01, math.nan, 0.04, 0.03])
    assert found[[0, 2, 3]] == pytest.approx([0.03, 0.06, 0.06])
    assert math.isnan(found[1])
    assert np.isnan(holm([math.nan])).all()


def test_ranks_are_means_over_blocks() -> None:
    table = [[90, 80, 70], [80, 90, 70], [50, 50, math.nan]]
    assert mean_ranks(table).tolist() == [1.5, 1.5, 3.0]
    assert mean_ranks([[1, 1, 2]], higher_is_better=False).tolist() == [1.5, 1.5, 3.0]
    assert np.isnan(mean_ranks([[1, math.nan]])).all()


def test_numbers_that_are_equal_but_for_rounding_do_not_differ() -> None:
    """Differences of 1e-14 between numbers near 70 would have a p-value of 0.015."""
    base = np.array([70.1, 71.3, 69.9, 70.7])
    found = paired_difference(base + 1.4e-14 * np.array([1, 1, 2, 1]), base)
    assert (found.mean, found.low, found.high) == (0, 0, 0)
    assert math.isnan(found.p)
    shifted = paired_difference(base + 1.0, base)
    assert shifted.low == shifted.high == pytest.approx(1.0)
    assert math.isnan(shifted.p)
    small = paired_difference(
        base + 1e-6 * np.array([1, 2, 3, 2]), base
    )  # small differences remain differences
    assert 0 < small.p < 0.05
    apart = paired_difference([1e30, 2.0, 3.0], [1e30, 1.0, 1.0])  # each pair by its own size
    assert apart.mean == 1.0
    assert paired_difference([math.inf, 2.0, 3.0], [math.inf, 1.0, 2.0]).n == 2  # inf - inf is no number
