"""FedAdam: Adam at the server. Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import ServerState, Setup
from rayfl.server_step import Averaged, ServerStep, Vectors


class FedAdam(Algorithm):
    """FedAvg with Adam at the server.

    The server uses the weighted mean of the clients' updates, Delta, as a gradient and takes a step of Adam,
    so each parameter has its own step size.

    In every round, for every model::

        m <- beta1 m + (1 - beta1) Delta        v <- beta2 v + (1 - beta2) Delta^2
        w <- w + eta m / (sqrt(v) + tau)

    m starts at 0 and v at tau^2. There is no bias correction. Delta is weighted by n_i, as in the paper's
    experiments.

    Symbols:
        beta_1, beta_2: ``algorithm.beta1``, ``algorithm.beta2``
        eta: ``algorithm.server_lr``
        tau, degree of adaptivity: ``algorithm.tau``

    Cost:
        As FedAvg. The server keeps 2 P parameters for each model; clients keep none.

    Fails when:
        eta does not fit the network: unlike FedAvg's, the size of a step does not follow the clients'
        updates, so eta has to be tuned.

    Shown by:
        - tests/algorithms/test_server_steps.py::test_steps_of_adam_do_not_follow_the_updates
        - experiments/servers/server_steps.yaml: USPS, Dir(0.1), 100 rounds, five seeds: 88.6, FedAvg 84.4 %;
          75 % after 26 rounds in place of 39
    """

    name: Literal["fedadam"] = "fedadam"
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox", "fednova")

    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment (beta_1)")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of the second moment (beta_2)")
    tau: float = Field(1e-3, gt=0, description="degree of adaptivity (tau)")
    server_lr: float = Field(0.01, gt=0, description="server learning rate (eta)")

    def server_step(self, setup: Setup, state: ServerState) -> ServerStep:
        """Adam."""
        return Adam(self.beta1, self.beta2, self.tau, self.server_lr)


@dataclass(frozen=True)
class Adam(ServerStep):
    """A step of Adam without bias correction."""

    elementwise: ClassVar[bool] = True

    beta1: float
    beta2: float
    tau: float
    lr: float

    def vectors(self) -> Mapping[str, float]:
        """The moments."""
        return {"m": 0.0, "v": self.tau**2}

    def apply(self, averaged: Averaged, vectors: Vectors) -> tuple[NDArray[np.float64], Vectors]:
        """One step: the new model, and the new moments."""
        delta = averaged.update
        m = self.beta1 * vectors["m"] + (1 - self.beta1) * delta
        v = self.beta2 * vectors["v"] + (1 - self.beta2) * delta**2
        return averaged.old + self.lr * m / (np.sqrt(v) + self.tau), {"m": m, "v": v}
