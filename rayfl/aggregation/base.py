"""The contract of an aggregation rule; its defaults are the weighted mean.

Importing this module must stay cheap: an LPS actor needs NumPy, and neither torch nor anything built on it.

Shapes: a rule sees the m clients that contribute to one model, and n of the model's parameters at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayfl.settings import Section


class Aggregation(Section):
    """How a local server turns the models ``w_j`` of its clients into one; one rule per file.

    The method defines who contributes to which model, and with which weights: row k of its matrix A. A rule
    is applied to each row separately, to the m clients with a nonzero weight that delivered a model. It has
    two stages, and overrides one or both:

    1. :meth:`reweigh` gets the inner products of the updates ``u_j = w_j - w`` from the old model w, and
       returns new weights of the clients. Clients with weight 0 are left out of the second stage.
    2. :meth:`combine` gets the parameters themselves, some at a time, and reduces each over the clients.

    A client that sends NaN or infinity gets weight 0 in the first stage. In the second stage the rule has to
    handle such values.

    Running statistics (BatchNorm) are not used in the first stage. They are combined like the parameters, and
    kept within the range of the clients' and the old values, so a variance never becomes negative.
    """

    name: str = ""

    def check(self, clients: int) -> None:
        """Refuse settings that make no sense for a model to which this many clients contribute.

        It is called for the largest cohort before anything starts, and for every model in every round.

        Raises:
            ConfigError
        """

    def reweigh(
        self, gram: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], float]:
        """The clients' new weights, from the geometry of their updates.

        Args:
            gram: inner products ``<u_i, u_j>`` of the updates, without running statistics ``(m, m)``. All
                distances follow from it: :func:`squared_distances`.
            weights: row k of A ``(m,)``, positive and not normalised (FedAvg: ``n_j``).

        Returns:
            The weights ``(m,)``, not negative, and the weight of the old model. Their sum must be positive;
            they need not be normalised.
        """
        return weights, 0.0

    def combine(
        self, values: NDArray[np.float64], weights: NDArray[np.float64], old: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The new values of some parameters ``(n,)``: by default the weighted mean.

        Args:
            values: what the clients sent ``(m, n)``.
            weights: of the clients, from the first stage ``(m,)``, all positive.
            old: the model's old values ``(n,)``.
        """
        total = np.zeros(values.shape[1])
        for weight, row in zip(weights.tolist(), values, strict=True):  # in this order, on any machine
            total += weight * row
        return total / float(weights.sum())

    @property
    def reweighs(self) -> bool:
        """Whether the rule has a first stage, which needs all inner products."""
        return type(self).reweigh is not Aggregation.reweigh

    @property
    def is_mean(self) -> bool:
        """Whether it is the weighted mean: then clients' models are summed where they are trained."""
        return not self.reweighs and type(self).combine is Aggregation.combine


def squared_distances(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """``|u_i - u_j|^2`` of vectors with these inner products, ``(m, m)``."""
    squares = gram.diagonal()
    return np.maximum(squares[:, None] + squares - 2 * gram, 0.0)  # rounding may go below zero
