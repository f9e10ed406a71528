"""IFCA: clients choose the cluster model that fits their data best, every round.

Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020,
Algorithm 1 (model averaging).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm, choose_by_loss
from rayfl.algorithms.contract import Clients, ServerState, Setup


class IFCA(Algorithm):
    """Iterative federated clustering: C models from independent random initialisations.

    1. Every sampled client downloads all C models and takes ``argmin_c loss_i(w_c)`` on its *training* data
       (never on its test data), which costs C models down per client.
    2. It trains that model; models are averaged over those who chose them, weighted by n_i. A model that
       nobody chose stays.
    3. Option (the paper's section 4.3): ``hierarchy.common_layers``, a shared representation, are averaged
       over all clusters.

    SCAFFOLD is refused: its c is the mean of the c_i of a model's clients, and here clients change models.

    Before a test every client chooses again, so everybody is tested with the model that it would use. With
    one cluster this is FedAvg.
    """

    name: Literal["ifca"] = "ifca"
    selects: ClassVar[bool] = True
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox", "fednova")
    takes: ClassVar[tuple[str, ...]] = ("hierarchy",)

    clusters: int = Field(4, ge=1, description="number of cluster models (C; k in the paper)")

    def initial(self, setup: Setup) -> tuple[int, ...]:
        """Independent random initialisations."""
        return tuple(range(self.clusters))

    def begin(self, setup: Setup) -> ServerState:
        """Nobody has chosen yet, but clusters there are."""
        return replace(super().begin(setup), clustered=True)

    def select(
        self, setup: Setup, state: ServerState, who: NDArray[np.int64], clients: Clients
    ) -> ServerState:
        """The model of least training loss."""
        return choose_by_loss(state, who, clients, "train")
