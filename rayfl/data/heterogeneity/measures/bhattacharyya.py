"""The Bhattacharyya distance between normal distributions."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from typing_extensions import override

from rayfl.data.heterogeneity.measures._gaussian import Gaussian, GaussianMeasure


class Bhattacharyya(GaussianMeasure):
    """Bhattacharyya distance between normal distributions fitted to the data; at least 0.

    Kailath 1967: with ``S = (S_1 + S_2) / 2`` and ``d`` the difference of the means,
    ``d^T S^-1 d / 8 + ln(det S / sqrt(det S_1 det S_2)) / 2``.
    """

    name: Literal["bhattacharyya"] = "bhattacharyya"

    @override
    def compare(self, a: Gaussian, b: Gaussian, common: Any) -> float:
        middle = (a.covariance + b.covariance) / 2
        difference = a.mean - b.mean
        apart = difference @ np.linalg.solve(middle, difference)
        spread = np.linalg.slogdet(middle)[1] - (a.log_determinant + b.log_determinant) / 2
        return float(apart / 8 + spread / 2)
