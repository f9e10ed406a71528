"""The earth mover's distance between label distributions, where similar classes are near each other."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Samples
from rayfl.data.heterogeneity.base import Array, Measure
from rayfl.data.heterogeneity.measures.emd import label_shares
from rayfl.data.heterogeneity.super_clusters import Proximity, class_angles
from rayfl.errors import DataError


class EmdClasses(Measure):
    """Earth mover's distance between label distributions whose ground distance is the angle between classes.

    The distance of two labels is the angle between their classes (``class_angles``) divided by the largest
    possible angle: 0 to 1. Unlike under ``emd``, a client with cats is nearer to one with dogs than to one
    with ships. The transport cost is minimised by linear programming.
    """

    labels_only: ClassVar[bool] = True

    name: Literal["emd_classes"] = "emd_classes"
    samples: int | None = Field(None, ge=1, description="maximum number of samples per client; null: all")
    p: int = Field(3, ge=1, description="number of singular vectors per class")
    proximity: Proximity = Field("vector_angle_min", description="the angle between two classes")
    per_class: int | None = Field(1000, ge=1, description="maximum number of samples per class; null: all")

    @override
    def common(self, samples: Samples, seed: int) -> Array:
        """The ground distance ``(C, C)``; NaN for classes without samples."""
        present, angles = class_angles(samples, self.p, self.proximity, self.per_class)
        ground = np.full((samples.classes, samples.classes), np.nan)
        largest = 90 * self.p if self.proximity == "vector_angle_sum" else 90
        ground[np.ix_(present, present)] = angles / largest
        return ground

    @override
    def summary(self, x: NDArray[np.float32], y: NDArray[np.int64], classes: int, common: Any) -> Array:
        return label_shares(y, classes)

    @override
    def compare(self, a: Array, b: Array, common: Array) -> float:
        sources, targets = np.flatnonzero(a), np.flatnonzero(b)
        cost = common[np.ix_(sources, targets)]
        if np.isnan(cost).any():
            raise DataError("emd_classes: a client sees labels that no training sample has; use emd")
        return transport_cost(a[sources], b[targets], cost)


def transport_cost(supply: Array, demand: Array, cost: Array) -> float:
    """The minimum cost of moving ``supply (m,)`` to ``demand (n,)``, which have equal sums; unit costs ``(m,
    n)``.
    """
    m, n = cost.shape
    rows = np.kron(np.eye(m), np.ones(n))
    columns = np.kron(np.ones(m), np.eye(n))
    result = scipy.optimize.linprog(
        cost.ravel(),
        A_eq=np.concatenate([rows, columns[:-1]]),  # the last demand follows from the sums
        b_eq=np.concatenate([supply, demand[:-1]]),
        method="highs",
    )
    return float(result.fun or 0.0)
