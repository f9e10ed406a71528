"""SOLO (also Local, Standalone): every client trains alone. No averaging, no communication."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import Clients, Mixing, Plan, ServerState, Setup
from rayfl.training import LocalWork
from rayfl.training.reports import Reports


class Solo(Algorithm):
    """Every client trains its own model alone; nothing is sent.

    This is the baseline that collaboration has to beat. All clients start from the common w_0 and keep their
    models between rounds.

    By default all clients train in every round, since nothing has to be exchanged; ``sampling`` is not used
    then. That is ``1 / rho`` times the local work of a federated run with as many rounds. ``sampled: true``
    trains only the cohort: the same number of local steps as FedAvg.

    Symbols:
        rho: ``training.participation``

    Cost:
        No bytes. The state of a client is a model, P parameters, so memory grows with the number of clients.

    Fails when:
        Clients have few samples.

    Shown by:
        - experiments/pacfl/README.md: the worst 10 % of the clients
        - experiments/mt_hfl/digits.yaml: the worst 10 % of the clients
    """

    name: Literal["solo"] = "solo"
    sampled: bool = Field(False, description="train only the sampled cohort in a round, as FedAvg would")

    objectives: ClassVar[tuple[str, ...] | None] = ("sgd",)
    takes_aggregation: ClassVar[bool] = False

    def cohort(
        self, setup: Setup, state: ServerState, clients: Clients
    ) -> tuple[ServerState, NDArray[np.int64]]:
        """All clients, or the cohort that FedAvg would sample."""
        return super().cohort(setup, state, clients) if self.sampled else (state, setup.present)

    def work(self, setup: Setup, state: ServerState) -> LocalWork:
        """Plain SGD on a model that is personal as a whole."""
        return replace(super().work(setup, state), personal=((0, setup.spec.P),))

    def mix(self, setup: Setup, state: ServerState, plan: Plan, reports: Reports) -> Mixing:
        """An empty A: nothing is averaged."""
        return Mixing(scipy.sparse.csr_array((state.models, len(plan.cohort))))
