"""FedSEM: several centers of models, found by expectation and maximisation.

Xie, Long, Shen, Zhou, Wang, Jiang, Zhang, "Multi-center federated learning", 2021, Algorithm 1 (FeSEM).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm, average, choose_by_loss, only_asked
from rayfl.algorithms.contract import Clients, Mixing, Plan, RoundReport, ServerState, Setup, per_client
from rayfl.clustering.centers import first_centers
from rayfl.training.reports import ClientReport, Reports, Trained


@dataclass(frozen=True)
class FedSEMState(ServerState):
    """``seen``: whether the server has seen a trained model of each client ``(N,)``."""

    seen: NDArray[np.bool_] = per_client(False)


class FedSEM(Algorithm[FedSEMState]):
    """C center models: a client belongs to the center nearest to its trained model.

    Clients train their center's model. The server assigns each trained model to the nearest center, and each
    center becomes the mean of its members. This is k-means on models, one step in each round.

    1. Participants train from their center's model.
    2. E-step: each trained w_i joins the center with the least ``|w_i - c|_2``.
    3. M-step: a center becomes the mean of its members, weighted by n_i. One without members stays.

    The paper, in which all clients take part in every round, leaves two things open:

    - The first centers. All clients start from the same w_0, and after round 0 the centers are those of
      k-means on the trained models. (With independent random centers every client would stay where it
      started: they are much farther apart than a client ever moves.) A group with no participant in round 0
      gets no center.
    - A client that the server has not seen trained, or whose data have changed, has no center. It downloads
      all C models once and takes the one with the least training loss, as IFCA's clients do.

    With one center this is FedAvg.

    Symbols:
        C: ``algorithm.clusters``

    Cost:
        As FedAvg, and C P parameters down once for each client that is new to the server. The server keeps C
        models. No client state.

    Fails when:
        Round 0 misses a group, or the distance between models is dominated by chance: large networks, few
        samples, few local steps.

    Shown by:
        - experiments/clustered/README.md: planted clusters, letters
        - experiments/flt/fedsem.py: what it forms if clients that have not trained count, too
    """

    name: Literal["fedsem"] = "fedsem"
    selects: ClassVar[bool] = True
    mixes_by_reports: ClassVar[bool] = True
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox", "fednova")

    clusters: int = Field(4, ge=1, description="number of centers (C; K in the paper)")

    def begin(self, setup: Setup) -> FedSEMState:
        """No client has been seen yet."""
        return FedSEMState(0, 1, np.zeros(setup.clients, np.int64))

    def drift(
        self, setup: Setup, state: FedSEMState, drifted: NDArray[np.int64], clients: Clients
    ) -> FedSEMState:
        """Forget that these clients were seen: their old models do not reflect their new data."""
        seen = state.seen.copy()
        seen[drifted] = False
        return replace(state, seen=seen)

    def select(
        self, setup: Setup, state: FedSEMState, who: NDArray[np.int64], clients: Clients
    ) -> FedSEMState:
        """Clients without a center take the one with the least training loss."""
        unseen = who[~state.seen[who]]
        return choose_by_loss(state, unseen, clients, "train") if len(unseen) else state

    def downloads(self, setup: Setup, state: FedSEMState, plan: Plan) -> int:
        """One model per client, all C for clients without a center; clients that only report a loss count."""
        models_each = np.where(state.seen, 1, state.models)
        total, asked = int(models_each[plan.cohort].sum()), only_asked(setup, state, plan)
        if asked:  # a sampling may ask only some of the others, and it is not known which: count their mean
            total += round(asked * float(models_each[np.setdiff1d(setup.present, plan.cohort)].mean()))
        return total

    def reports(self, setup: Setup, state: FedSEMState) -> Mapping[str, ClientReport]:
        """Distances among the trained models in round 0, and from then on to the centers."""
        return {"distances": Distances() if state.clustered else PairwiseDistances()}

    def mix(self, setup: Setup, state: FedSEMState, plan: Plan, reports: Reports) -> Mixing:
        """Average the clients that the E-step has assigned to the same center."""
        mixing = average(setup, plan, self._centers(setup, state, plan, reports), self.clusters)
        return mixing if state.clustered else replace(mixing, parents=np.zeros(self.clusters, np.int64))

    def _centers(self, setup: Setup, state: FedSEMState, plan: Plan, reports: Reports) -> NDArray[np.int64]:
        """The center of each trained model ``(M,)``; 0 for clients that failed, whose distances are NaN."""
        distances, centers = reports["distances"], np.zeros(len(plan.cohort), np.int64)
        delivered = np.flatnonzero(~np.isnan(distances).any(axis=1))
        if state.clustered:
            centers[delivered] = distances[delivered].argmin(axis=1)
        elif len(delivered):
            sizes = setup.sizes[plan.cohort[delivered]]
            centers[delivered] = first_centers(
                distances[np.ix_(delivered, delivered)], self.clusters, setup.seed, sizes
            )
        return centers

    def end(self, setup: Setup, state: FedSEMState, plan: Plan, report: RoundReport) -> FedSEMState:
        """Participants keep the center of this round until they take part again."""
        delivered = ~np.isin(plan.cohort, list(report.failures))
        centers = self._centers(setup, state, plan, report.reports)
        assignment, seen = state.assignment.copy(), state.seen.copy()
        assignment[plan.cohort[delivered]] = centers[delivered]
        seen[plan.cohort[delivered]] = True
        new = replace(state, models=self.clusters, assignment=assignment, clustered=True, seen=seen)
        return super().end(setup, new, plan, report)


_CACHE_ELEMENTS = 1 << 17
"""Number of elements of which a core's cache holds a few arrays."""


@dataclass(frozen=True)
class Distances(ClientReport):
    """The squared Euclidean distance from each trained model to each center (the E-step)."""

    needs_models = True

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """``(B, C)``; of the parameters, without running statistics."""
        import torch

        n = trained.spec.n_parameters
        rows = trained.rows[:, :n]
        centers = [model[:n].to(rows.device) for model in trained.models]
        # A few clients at a time, so that intermediate results fit in the cache.
        chunk_size = max(1, len(rows) if rows.is_cuda else _CACHE_ELEMENTS // max(1, n))
        blocks = [
            torch.stack([(chunk - center).double().square_().sum(1) for center in centers], dim=1)
            for chunk in (rows[k : k + chunk_size] for k in range(0, len(rows), chunk_size))
        ]
        return np.asarray(torch.cat(blocks).cpu().numpy(), np.float64)


@dataclass(frozen=True)
class PairwiseDistances(ClientReport):
    """The squared Euclidean distances among all trained models ``(M, M)``."""

    combined = True

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """The parameters themselves, which the server of this method receives anyway."""
        return trained.rows[:, : trained.spec.n_parameters].cpu().numpy()

    def combine(self, blocks: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
        """The distances, from all blocks; only two blocks at a time are in double precision."""
        middle = blocks[0].mean(axis=0, dtype=np.float64)  # centred rows lose less to cancellation

        def tile(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
            a, b = left - middle, right - middle
            squares = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :]
            return np.asarray(squares - 2 * a @ b.T, np.float64)

        distances = np.block([[tile(left, right) for right in blocks] for left in blocks])
        np.fill_diagonal(distances, 0.0)
        return np.asarray(np.maximum(distances, distances.T).clip(min=0), np.float64)
