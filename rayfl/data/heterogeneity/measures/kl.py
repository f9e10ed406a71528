"""The Kullback-Leibler divergence between normal distributions."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from rayfl.data.heterogeneity.measures._gaussian import Gaussian, GaussianMeasure


class Kl(GaussianMeasure):
    """Kullback-Leibler divergence between normal distributions fitted to the data, in nats; at least 0.

    ``KL(1 || 2) = [tr(S_2^-1 S_1) + d^T S_2^-1 d - dim + ln(det S_2 / det S_1)] / 2``, and by default the
    mean of both directions.
    """

    name: Literal["kl"] = "kl"
    symmetric: bool = Field(
        True, description="take the mean of both directions; false: from the first to the second"
    )

    @property
    @override
    def directed(self) -> bool:
        return not self.symmetric

    @override
    def compare(self, a: Gaussian, b: Gaussian, common: Any) -> float:
        forward = kl_divergence(a, b)
        return (forward + kl_divergence(b, a)) / 2 if self.symmetric else forward


def kl_divergence(a: Gaussian, b: Gaussian) -> float:
    """``KL(a || b)`` in nats."""
    difference = a.mean - b.mean
    trace = np.trace(np.linalg.solve(b.covariance, a.covariance))
    apart = difference @ np.linalg.solve(b.covariance, difference)
    return float(trace + apart - len(a.mean) + b.log_determinant - a.log_determinant) / 2
