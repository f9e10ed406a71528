"""FedSoft: clients whose data are mixtures of a few distributions train near a mixture of their models.

Ruan, Joe-Wong, "FedSoft: soft clustered federated learning with proximal local updating", AAAI 2022,
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import Clients, Mixing, Plan, Regrouping, ServerState, Setup, per_client
from rayfl.random import generator
from rayfl.training.reports import Reports


@dataclass(frozen=True)
class FedSoftState(ServerState):
    """What is known of the clients' data.

    Attributes:
        shares: u, how much of each client's data comes from each distribution ``(N, S)``.
        told: the round before which each client last sent its counts ``(N,)``; -1: never.
    """

    shares: NDArray[np.float64] = per_client(1.0)
    told: NDArray[np.int64] = per_client(-1)

    @property
    def served(self) -> scipy.sparse.csr_array:
        """The mixture ``sum_s u_ks c_s``."""
        return scipy.sparse.csr_array(self.shares)


class FedSoft(Algorithm[FedSoftState]):
    """S centers, one for each distribution; a client trains once, near all of them.

    The data of client k are a mixture of S distributions, with shares u_ks. Its local objective is
    ``h_k(w) = f_k(w) + (lambda / 2) sum_s u_ks |w - c_s|^2``. If the shares sum to 1, this is FedProx around
    the mixture of the centers, ``f_k(w) + (lambda / 2) |w - sum_s u_ks c_s|^2``, plus a constant.

    1. Every tau rounds each client counts on how many of its n_k samples each center has the least loss,
       n_ks, and sends ``u_ks = max(n_ks / n_k, sigma)``.
    2. For each center the server draws K clients with probabilities ``v_ks = u_ks n_k / sum_k u_ks n_k``.
    3. Every client drawn at least once trains once.
    4. Each center becomes the mean of the clients drawn for it.

    Decisions: u is divided by its sum, which would be 1 without sigma. K is the size of FedAvg's cohort. If
    that is all clients, there is no draw: the centers become ``sum_k v_ks w_k``, which draws would estimate.
    Clients are drawn without replacement, as in the authors' code. The paper does not say where local
    training starts; here it starts at the mixture, where the proximal term is zero. (The authors' code
    continues from each client's last model.) Clients are tested with their mixture; ``evaluation.local``
    tests the trained, personal models. With one center and all clients this is FedProx.

    Symbols:
        S: ``algorithm.clusters``
        tau: ``algorithm.every``
        sigma: ``algorithm.smoother``
        lambda: ``local.mu``
        K: ``training.participation`` times N

    Cost:
        S P parameters down for each client every tau rounds, and for each participant in the other rounds;
        P up for each of the up to S K participants. The server keeps S models. No client state.

    Fails when:
        At the start every center fits every client about equally well: then shares stay near 1 / S and all
        centers become one. Networks that start from different random values lose what they learnt when they
        are mixed, if sigma is large.

    Shown by:
        - tests/algorithms/test_fedsoft.py::test_planted_mixtures_are_found
        - experiments/clustered/fedsoft.yaml: labels of USPS mixed 70 to 30, five seeds: 91.3 %, as IFCA and
          FedAvg; in the paper it is better than IFCA on mixed letters
    """

    name: Literal["fedsoft"] = "fedsoft"
    uses_sampling: ClassVar[bool] = False
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox")
    defaults: ClassVar[Mapping[str, Any]] = {"local": {"name": "fedprox", "mu": 0.1}}

    clusters: int = Field(2, ge=1, description="number of centers (S)")
    every: int = Field(1, ge=1, description="rounds between two estimates of the shares (tau)")
    smoother: float = Field(1e-4, gt=0, le=1, description="least share of a center (sigma)")

    def initial(self, setup: Setup) -> tuple[int, ...]:
        """Independent random initialisations."""
        return tuple(range(self.clusters))

    def begin(self, setup: Setup) -> FedSoftState:
        """Equal shares: nothing is known of the clients yet."""
        assignment, shares = np.zeros(setup.clients, np.int64), np.ones((setup.clients, self.clusters))
        return FedSoftState(0, self.clusters, assignment, clustered=True, shares=shares)

    def join(
        self, setup: Setup, state: FedSoftState, newcomers: NDArray[np.int64], clients: Clients
    ) -> FedSoftState:
        """Newcomers send their counts immediately."""
        return self._with_counted_shares(state, newcomers, clients)

    def drift(
        self, setup: Setup, state: FedSoftState, drifted: NDArray[np.int64], clients: Clients
    ) -> FedSoftState:
        """Clients with new data send their counts again immediately."""
        return self._with_counted_shares(state, drifted, clients)

    def recluster(
        self, setup: Setup, state: FedSoftState, clients: Clients
    ) -> Regrouping[FedSoftState] | None:
        """All clients send their counts again every tau rounds."""
        if state.round % self.every:
            return None
        return Regrouping(self._with_counted_shares(state, setup.present, clients), np.arange(self.clusters))

    def _with_counted_shares(
        self, state: FedSoftState, who: NDArray[np.int64], clients: Clients
    ) -> FedSoftState:
        """The state after clients ``who`` ``(n,)`` have counted which center fits their samples (step 1)."""
        counts = clients.samples_by_model(who, "train")  # (n, S)
        smoothed = np.maximum(counts / counts.sum(axis=1, keepdims=True), self.smoother)
        shares, assignment, told = state.shares.copy(), state.assignment.copy(), state.told.copy()
        shares[who] = smoothed / smoothed.sum(axis=1, keepdims=True)
        assignment[who], told[who] = smoothed.argmax(axis=1), state.round
        return replace(state, shares=shares, assignment=assignment, told=told)

    def cohort(
        self, setup: Setup, state: FedSoftState, clients: Clients
    ) -> tuple[FedSoftState, NDArray[np.int64]]:
        """All clients that are drawn for at least one center (step 2)."""
        return state, np.flatnonzero(self._center_weights(setup, state).any(axis=0))

    def _center_weights(self, setup: Setup, state: FedSoftState) -> NDArray[np.float64]:
        """The weight of each client in the mean of each center ``(S, N)``."""
        present, weights = setup.present, state.shares.T * setup.sizes  # (S, N)
        count = setup.training.cohort(len(present))
        if count == len(present):
            return weights
        random, drawn = generator(setup.seed, "fedsoft", state.round), np.zeros_like(weights)
        for row, v in zip(drawn, weights[:, present], strict=True):
            row[random.choice(present, count, replace=False, p=v / v.sum())] = 1
        return drawn

    def mix(self, setup: Setup, state: FedSoftState, plan: Plan, reports: Reports) -> Mixing:
        """A center is the mean of the clients drawn for it."""
        return Mixing(scipy.sparse.csr_array(self._center_weights(setup, state)[:, plan.cohort]))

    def downloads(self, setup: Setup, state: FedSoftState, plan: Plan) -> int:
        """All centers, except for clients that downloaded them before this round to count."""
        return self.clusters * int((state.told[plan.cohort] != state.round).sum())
