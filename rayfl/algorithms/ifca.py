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
    """C models compete: every client takes the one with the lowest loss on its data.

    The server keeps C models, initialised at random. In each round every participant downloads all of them,
    takes the best one for its training data, and trains it. Each model becomes the mean of the models that
    the clients trained from it.

    1. A participant takes ``argmin_c loss_i(w_c)`` on its *training* data, never on its test data.
    2. Models are averaged over the clients that chose them, weighted by n_i. A model that no client chose
       stays.
    3. Option (section 4.3 of the paper): ``hierarchy.common_layers``, a shared representation, are averaged
       over all clusters.

    Before a test every client chooses again, so each is tested with the model that it would use. SCAFFOLD is
    refused: its c is the mean of the c_i of a model's clients, and here clients change models. With one
    cluster this is FedAvg.

    Symbols:
        C (k in the paper): ``algorithm.clusters``

    Cost:
        C P parameters down and P up for each participant. Clients evaluate C models in each round and before
        each test. The server keeps C models. No client state.

    Fails when:
        The initial models are unlucky: a model that is best for no client is never trained. Several seeds
        show it; ARI 0.24 to 1.00 over tasks and seeds.

    Shown by:
        - experiments/clustered/README.md: planted clusters, five tasks
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
        """C models; no client has chosen one yet."""
        return replace(super().begin(setup), clustered=True)

    def select(
        self, setup: Setup, state: ServerState, who: NDArray[np.int64], clients: Clients
    ) -> ServerState:
        """The model of least training loss."""
        return choose_by_loss(state, who, clients, "train")
