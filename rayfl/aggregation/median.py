"""The coordinate-wise median. Yin, Chen, Ramchandran, Bartlett, ICML 2018, Definition 1 and Option I."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.aggregation.base import Aggregation


class Median(Aggregation):
    """The median of each parameter over the clients; the mean of the middle two if their number is even.

    It withstands clients that send arbitrary models, as long as they are fewer than half. As in the paper all
    clients have equal weight: a malicious client could invent its number of samples. NaN counts as larger
    than every number.
    """

    name: Literal["median"] = "median"

    def combine(
        self, values: NDArray[np.float64], weights: NDArray[np.float64], old: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """``med{w_j : j}``, of each parameter."""
        lower, upper = (len(values) - 1) // 2, len(values) // 2
        ordered = np.sort(values, axis=0)  # for a few clients much faster than np.partition
        return np.asarray(ordered[lower : upper + 1].mean(axis=0), np.float64)
