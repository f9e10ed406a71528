"""FedSEM: several centers of models, found by expectation and maximisation.

Xie, Long, Shen, Zhou, Wang, Jiang, Zhang, "Multi-center federated learning", 2021, Algorithm 1 (FeSEM).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm, average, choose_by_loss
from rayfl.algorithms.contract import Clients, Mixing, Plan, RoundReport, ServerState, Setup
from rayfl.random import generator
from rayfl.training.observations import Distances, Observation, Trained


class FedSEM(Algorithm):
    """C center models; a client belongs to the one that its trained model is nearest to.

    1. Sampled clients train from their center's model.
    2. E-step: each trained w_i joins the center with the least ``|w_i - c|_2``.
    3. M-step: a center becomes the mean of its members, weighted by n_i; one without members stays.

    All start from the same w_0, where centers cannot differ. After round 0 the first centers are therefore
    C of the trained models, drawn as k-means++ draws its seeds, and step 3 follows. The paper leaves the
    initialisation open; independent random ones would keep every client at the center it was given, since
    they are much farther apart than a client ever moves.
    """

    name: Literal["fedsem"] = "fedsem"
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox", "fednova")

    clusters: int = Field(4, ge=1, description="number of centers (C; K in the paper)")

    def observation(self, setup: Setup, state: ServerState) -> Observation:
        """Distances among the trained models in round 0, and from then on to the centers."""
        return Distances() if state.clustered else PairwiseDistances()

    def mix(
        self, setup: Setup, state: ServerState, plan: Plan, observed: NDArray[np.float64] | None = None
    ) -> Mixing:
        """The E-step says who is averaged with whom."""
        assert observed is not None
        rows = self._nearest(setup, state, observed)
        mixing = average(setup, plan, rows, self.clusters)
        parents = None if state.clustered else np.zeros(self.clusters, np.int64)
        return replace(mixing, parents=parents)

    def _nearest(self, setup: Setup, state: ServerState, observed: NDArray[np.float64]) -> NDArray[np.int64]:
        """The center of each of the cohort ``(M,)``."""
        centers = observed
        if not state.clustered:
            centers = observed[:, seeds(observed, self.clusters, setup.seed)]
        return np.asarray(centers.argmin(axis=1), np.int64)

    def join(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64], clients: Clients
    ) -> ServerState:
        """A newcomer has no trained model yet: it starts from the center that fits its training data best."""
        return choose_by_loss(state, newcomers, clients, "train")

    def end(self, setup: Setup, state: ServerState, plan: Plan, report: RoundReport) -> ServerState:
        """The participants belong to their centers, also in the next round."""
        delivered = ~np.isin(plan.cohort, list(report.failures))
        centers = report.mixing.weights.tocsc().indices  # one entry a column
        assignment = state.assignment.copy()
        assignment[plan.cohort[delivered]] = centers[delivered]
        new = replace(state, models=self.clusters, assignment=assignment, clustered=True)
        return super().end(setup, new, plan, report)


@dataclass(frozen=True)
class PairwiseDistances(Observation):
    """The squared Euclidean distances among all trained models ``(M, M)``."""

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """The models themselves: the server of this method has them anyway."""
        return trained.rows.cpu().numpy()

    def combine(self, blocks: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
        """From all blocks."""
        everyone = np.concatenate(blocks).astype(np.float64)
        everyone -= everyone.mean(axis=0)  # so that no precision is lost
        squares = np.einsum("mp,mp->m", everyone, everyone)
        distances = squares[:, None] + squares[None, :] - 2 * everyone @ everyone.T
        np.fill_diagonal(distances, 0.0)
        return np.asarray(np.maximum(distances, 0.0), np.float64)


def seeds(distances: NDArray[np.float64], count: int, seed: int) -> NDArray[np.int64]:
    """k-means++ (Arthur, Vassilvitskii 2007): each next seed is drawn by its squared distance to the nearest.

    Args:
        distances: squared ``(M, M)``.
        count: how many; where fewer points differ, the first is repeated.
        seed: the run's seed.
    """
    rng = generator(seed, "fedsem centers")
    found = [int(rng.integers(len(distances)))]
    while len(found) < count:
        nearest = distances[:, found].min(axis=1)
        total = nearest.sum()
        found.append(int(rng.choice(len(nearest), p=nearest / total)) if total > 0 else found[0])
    return np.array(found, np.int64)
