"""Norm clipping. Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning?, 2019."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.aggregation.base import Aggregation


class NormClipping(Aggregation):
    """The weighted mean of updates of bounded length.

    ``u_j = w_j - w`` is the update of client j from the old model w, and the new model is ``w + sum_j a_j u_j
    / max(1, |u_j| / M) / sum_j a_j``. The method's weights ``a_j`` apply (FedAvg: ``n_j``). Changes of
    running statistics are scaled by the same factors.
    """

    name: Literal["norm_clipping"] = "norm_clipping"
    bound: float = Field(1.0, gt=0, description="length to which longer updates are shortened (M)")

    def reweigh(
        self, gram: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], float]:
        """A client's weight times the factor of its update; the rest is the old model's."""
        clipped = weights / np.maximum(1.0, np.sqrt(gram.diagonal()) / self.bound)
        return clipped, float((weights - clipped).sum())
