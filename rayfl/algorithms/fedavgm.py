"""FedAvgM: momentum at the server. Hsu, Qi, Brown 2019; FedOpt of Reddi et al., ICLR 2021, Algorithm 1."""

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


class FedAvgM(Algorithm):
    """FedAvg with momentum at the server.

    The server takes the weighted mean of the clients' updates, Delta, as a step and remembers the direction
    of earlier rounds: ``v <- beta v + Delta``, ``w <- w + eta v``. This smooths rounds in which the cohort
    was not typical of all clients.

    Symbols:
        beta: ``algorithm.beta``
        eta: ``algorithm.server_lr``

    Cost:
        As FedAvg. The server keeps P parameters for each model; clients keep none.

    Fails when:
        beta is near 1 and eta is 1: the steps grow up to ``1 / (1 - beta)`` times as long as FedAvg's. With
        beta = 0 and eta = 1 it is FedAvg.

    Shown by:
        - tests/algorithms/test_server_steps.py::test_momentum_lengthens_steps
        - experiments/servers/server_steps.yaml: USPS, Dir(0.1), 100 rounds, five seeds: 90.4, FedAvg 84.4 %;
          75 % after 21 rounds in place of 39
    """

    name: Literal["fedavgm"] = "fedavgm"
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox", "fednova")

    beta: float = Field(0.9, ge=0, lt=1, description="server momentum (beta)")
    server_lr: float = Field(1.0, gt=0, description="server learning rate (eta)")

    def server_step(self, setup: Setup, state: ServerState) -> ServerStep:
        """Momentum."""
        return Momentum(self.beta, self.server_lr)


@dataclass(frozen=True)
class Momentum(ServerStep):
    """``v <- beta v + Delta``, ``w <- w + lr v``."""

    elementwise: ClassVar[bool] = True

    beta: float
    lr: float

    def vectors(self) -> Mapping[str, float]:
        """The velocity v."""
        return {"v": 0.0}

    def apply(self, averaged: Averaged, vectors: Vectors) -> tuple[NDArray[np.float64], Vectors]:
        """One step: the new model, and the new velocity."""
        v = self.beta * vectors["v"] + averaged.update
        return averaged.old + self.lr * v, {"v": v}
