"""The earth mover's distance between distributions of labels."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.heterogeneity.base import Array, Measure


class Emd(Measure):
    """Earth mover's distance between the label distributions, from 0 (equal) to 1.

    Rubner, Tomasi, Guibas 2000; in federated learning Zhao et al. 2018, arXiv:1806.00582 (theirs is twice
    this one). All labels are equally far apart, so the distance is half the sum of ``|p_c - q_c|``. With
    ``ground=order`` labels c and d are ``|c - d| / (C - 1)`` apart, which is meaningful only if the classes
    are ordered.
    """

    labels_only: ClassVar[bool] = True

    name: Literal["emd"] = "emd"
    samples: int | None = Field(None, ge=1, description="maximum number of samples per client; null: all")
    ground: Literal["labels", "order"] = Field(
        "labels", description="labels: all are equally far apart; order: c and d are |c - d| / (C - 1) apart"
    )

    @override
    def summary(self, x: NDArray[np.float32], y: NDArray[np.int64], classes: int, common: Any) -> Array:
        return label_shares(y, classes)

    @override
    def compare(self, a: Array, b: Array, common: Any) -> float:
        if self.ground == "labels":
            return float(np.abs(a - b).sum() / 2)
        return float(np.abs(np.cumsum(a - b)).sum() / max(len(a) - 1, 1))


def label_shares(y: NDArray[np.int64], classes: int) -> Array:
    """The share of each label ``(classes,)``."""
    return np.bincount(y, minlength=classes) / len(y)
