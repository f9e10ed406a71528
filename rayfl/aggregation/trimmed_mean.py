"""The coordinate-wise trimmed mean. Yin, Chen, Ramchandran, Bartlett, ICML 2018, Definition 2, Option II."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.aggregation.base import Aggregation


class TrimmedMean(Aggregation):
    """The mean of each parameter without the largest and the smallest share beta of its m values.

    ``floor(beta m)`` values are removed at each end: with fewer than ``1 / beta`` clients none. It withstands
    that many clients that send arbitrary models, so beta must be at least their share. As in the paper all
    clients have equal weight, regardless of their numbers of samples. With ``share: 0`` it is the unweighted
    mean. NaN counts as larger than every number.
    """

    name: Literal["trimmed_mean"] = "trimmed_mean"
    share: float = Field(
        0.1, ge=0, lt=0.5, description="share of the values removed at each end (beta), below one half"
    )

    def combine(
        self, values: NDArray[np.float64], weights: NDArray[np.float64], old: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """``sum {w_j : j in U} / ((1 - 2 beta) m)`` of each parameter, U without the largest and smallest."""
        m = len(values)
        removed = int(self.share * m + 1e-9)  # 0.29 * 100 is 28.999999999999996
        if removed:
            values = np.sort(values, axis=0)[removed : m - removed]
        return np.asarray(values.mean(axis=0), np.float64)
