"""Statistics over the seeds of a study: means with intervals, paired differences, Holm's correction, ranks.

All intervals are Student's t over seeds, by default with 95 % confidence each. One run has no finite
interval; that of two runs is wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
"""Confidence of the intervals."""

FEW = 5
"""Tables point out results of fewer seeds than this: so few hardly show the spread that an interval needs."""

_EQUAL_SPREAD = 1e-12
"""Relative spread up to which differences count as equal (they differ only by rounding)."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval.

    Attributes:
        mean: of the values; NaN if there are none.
        low, high: bounds of the interval; infinite if there is one value, NaN if there is none, or one of
            several is infinite.
        n: number of values.
    """

    mean: float
    low: float
    high: float
    n: int

    @property
    def half(self) -> float:
        """Half the width: ``mean ± half``."""
        return (self.high - self.low) / 2

    @property
    def bounded(self) -> bool:
        """Whether there are at least two values."""
        return self.n > 1


@dataclass(frozen=True)
class Difference(Interval):
    """Mean paired difference.

    Attributes:
        p: two-sided p-value of Student's paired t-test; NaN if there are fewer than two pairs, or if all
            differences are equal (as those of bytes may be), since the test divides by their spread.
    """

    p: float = math.nan


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """The mean of values with its interval.

    Args:
        values: ``(n,)``, one number per seed; NaN is ignored.
        level: confidence.
    """
    present = _without_nan(values)
    if len(present) == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    with np.errstate(invalid="ignore"):  # the mean of inf and -inf is NaN
        mean = float(present.mean())
    if len(present) == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    if not np.isfinite(present).all():
        return Interval(mean, math.nan, math.nan, len(present))
    spread = float(np.ptp(present))
    # Of equal values, since the computed mean of three times 91.1 is another number.
    if spread <= _EQUAL_SPREAD * np.abs(present).max():
        equal = float(present[0])
        return Interval(equal, equal, equal, len(present))
    low, high = _bounds(present, level)
    return Interval(mean, low, high, len(present))


def paired_difference(first: ArrayLike, second: ArrayLike, level: float = LEVEL) -> Difference:
    """The mean of ``first - second`` over equal seeds, with its interval and p-value.

    Args:
        first, second: ``(n,)`` of the same seeds in the same order; pairs with NaN are left out.
        level: confidence.

    Raises:
        ValueError: if they are not equally long.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"{a.shape} and {b.shape} values cannot be paired")
    differences = _without_nan(without_rounding([a, -b]))
    interval = mean_interval(differences, level)
    return Difference(interval.mean, interval.low, interval.high, interval.n, _p_value(differences))


def without_rounding(terms: ArrayLike) -> NDArray[np.float64]:
    """Sums of terms; 0 where these cancel out but for rounding.

    Numbers near 70 that are equal but for rounding differ by 1e-14, which tests would find significant.

    Args:
        terms: ``(T, n)``.

    Returns:
        ``(n,)``.
    """
    table = np.asarray(terms, np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN
        sums = table.sum(axis=0)
        tiny = np.abs(sums) <= _EQUAL_SPREAD * np.abs(table).max(axis=0, initial=0.0)
    return np.asarray(np.where(tiny & np.isfinite(sums), 0.0, sums), np.float64)


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """p-values adjusted for multiple tests by Holm's method (1979); NaN stays NaN and is not counted.

    Args:
        p_values: ``(m,)``.

    Returns:
        ``(m,)``.
    """
    from statsmodels.stats.multitest import multipletests

    p = np.asarray(p_values, np.float64)
    adjusted, valid = p.copy(), ~np.isnan(p)
    if valid.any():
        adjusted[valid] = np.asarray(multipletests(p[valid], method="holm")[1])
    return adjusted


def mean_ranks(values: ArrayLike, higher_is_better: bool = True) -> NDArray[np.float64]:
    """The mean rank of each method, 1 for the best; ties share the mean of their ranks.

    Args:
        values: ``(blocks, methods)``. A block contains the values to compare, such as those of one seed of a
            setting. Blocks in which a method has no value (NaN) are left out.
        higher_is_better: whether the highest value of a block gets rank 1.

    Returns:
        ``(methods,)``; NaN if no block is complete.
    """
    from scipy.stats import rankdata

    table = np.atleast_2d(np.asarray(values, np.float64))
    complete = table[~np.isnan(table).any(axis=1)]
    if not len(complete):
        return np.full(table.shape[1], np.nan)
    signed = -complete if higher_is_better else complete
    return np.asarray(rankdata(signed, axis=1).mean(axis=0), np.float64)


def _without_nan(values: ArrayLike) -> NDArray[np.float64]:
    flat = np.asarray(values, np.float64).ravel()
    return np.asarray(flat[~np.isnan(flat)], np.float64)


def _bounds(values: NDArray[np.float64], level: float) -> tuple[float, float]:
    from scipy.stats import t

    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    low, high = t.interval(level, len(values) - 1, loc=mean, scale=error)
    return float(low), float(high)


def _p_value(differences: NDArray[np.float64]) -> float:
    from scipy.stats import ttest_1samp

    if len(differences) < 2:
        return math.nan
    # The test divides by the spread: with a spread of 0, p would be 0
    if differences.std() <= _EQUAL_SPREAD * np.abs(differences).max():
        return math.nan
    return float(ttest_1samp(differences, 0.0).pvalue)
