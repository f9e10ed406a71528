"""RFA: the geometric median by the smoothed Weiszfeld algorithm.

Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing
2022, Algorithm 2.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.aggregation.base import Aggregation


class GeometricMedian(Aggregation):
    """The geometric median: the point z whose distances to the clients' models have the least weighted sum.

    That is ``sum_j alpha_j |z - w_j|``, where ``alpha_j`` is the client's share of the weights. Starting with
    the weighted mean, ``beta_j = alpha_j / max(nu, |z - w_j|)`` and ``z <- sum_j beta_j w_j / sum_j beta_j``
    are repeated. It withstands clients that send arbitrary models, as long as they have less than half of the
    weight. As in the paper the method's weights apply (FedAvg: ``n_j``).

    z is always a mean of the models, so the distances follow from the inner products of the updates. In the
    paper each repetition is another secure average, for which clients send their vectors again. Here clients
    send their model once, and bytes are counted for that.
    """

    name: Literal["geometric_median"] = "geometric_median"
    nu: float = Field(1e-6, gt=0, description="smoothing: distances below it count as this much (nu)")
    iterations: int = Field(3, ge=1, description="repetitions of the Weiszfeld step (R)")

    def reweigh(
        self, gram: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], float]:
        """beta after the last repetition."""
        alpha = weights / weights.sum()
        beta = alpha
        for _ in range(self.iterations):
            shares = beta / beta.sum()  # z = sum_j shares_j w_j
            inner = gram @ shares  # <u_j, z>
            squares = gram.diagonal() - 2 * inner + shares @ inner
            beta = alpha / np.maximum(self.nu, np.sqrt(np.maximum(squares, 0.0)))
        return beta, 0.0
