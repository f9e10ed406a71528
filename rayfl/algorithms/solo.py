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
    """Every client trains a model of its own from the common ``w_0``; nothing is sent.

    The whole model is *personal*: it is the client's state, kept between rounds. By default all clients
    train in every round (nobody has to be sampled when nothing is exchanged), which costs ``1/rho`` times
    the local work of a federated run of as many rounds; ``sampled: true`` trains the cohort only, which is
    the same budget of local steps as FedAvg's.
    """

    name: Literal["solo"] = "solo"
    sampled: bool = Field(False, description="train only the sampled cohort in a round, as FedAvg would")

    objectives: ClassVar[tuple[str, ...] | None] = ("sgd",)

    def cohort(
        self, setup: Setup, state: ServerState, clients: Clients
    ) -> tuple[ServerState, NDArray[np.int64]]:
        """Everybody, or the cohort that FedAvg would sample."""
        return super().cohort(setup, state, clients) if self.sampled else (state, setup.present)

    def work(self, setup: Setup, state: ServerState) -> LocalWork:
        """Plain SGD on a model that is personal as a whole."""
        return replace(super().work(setup, state), personal=((0, setup.spec.P),))

    def mix(self, setup: Setup, state: ServerState, plan: Plan, reports: Reports) -> Mixing:
        """An empty A: nothing is averaged."""
        return Mixing(scipy.sparse.csr_array((state.models, len(plan.cohort))))
