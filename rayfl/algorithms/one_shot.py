"""The base of PACFL, MT-HFL, FLT and others: clustering before training, and again when needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rayfl.algorithms.contract import Clients, Plan, Regrouping, RoundReport, Setup
from rayfl.algorithms.one_shot_newcomers import AssignsNewcomers
from rayfl.algorithms.one_shot_state import OS, OneShotState, features_change, risen
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.numbering import completed, match_ids, most_used, reuse
from rayfl.training.reports import ClientReport, UpdateLengths

__all__ = ["OneShotClustered", "OneShotState"]


class OneShotClustered(AssignsNewcomers[OS]):
    """Base of methods that cluster clients by signatures and then train one model per cluster.

    Every cluster starts from the same ``w_0``. Within a cluster FedAvg runs at its local parameter server.
    Every kappa rounds the global server averages the common layers of ``hierarchy`` over the clusters.

    Clients are clustered again every ``clustering.every`` rounds (tau), and when more than
    ``clustering.max_flags`` of them (lambda) have raised a flag. A client raises a flag if it is new, if its
    data have changed, or if its training loss has risen by ``clustering.flag_loss`` or the norm of its update
    by ``clustering.flag_update``. Flags of absent clients wait until they return. Clusters keep their numbers
    (by the matching with the largest overlap). A new cluster starts from the model that most of its members
    used, and takes the number of a cluster that has lost all its members, if there is one.

    The servers keep the signature of every client with the round in which it was sent (``known``). A client
    sends it again only when its data have changed. Absent clients are clustered with the others, and
    newcomers can join their clusters. A client that returns with the same data still has its cluster.
    """

    takes: ClassVar[tuple[str, ...]] = ("clustering", "hierarchy")

    def begin(self, setup: Setup) -> OS:
        """No client has sent a signature."""
        return cast("OS", OneShotState(0, 1, np.zeros(setup.clients, np.int64)))

    def recluster(self, setup: Setup, state: OS, clients: Clients) -> Regrouping[OS] | None:
        """Before round 0, every tau rounds, and when flags exceed lambda."""
        if not state.clustered:
            return self.regroup(setup, state, clients.cluster(setup.clustering))
        tau, max_flags = setup.clustering.every, setup.clustering.max_flags
        due = tau > 0 and state.round > 0 and state.round % tau == 0
        if not due and (max_flags is None or state.flags[setup.present].sum() <= max_flags):
            return None
        # Absent clients are clustered by the signatures that the servers have.
        clustering, known = setup.clustering.again(), state.sent(setup)
        if features_change(setup, state):
            known[:] = -1  # codes of different encoders cannot be compared
        ids = np.flatnonzero((known >= 0) | (setup.sizes > 0))
        clusters = clients.cluster(
            clustering.for_clients(len(ids)), ids, known[ids], state.have_feature_map[ids]
        )
        return self.regroup(setup, state, clusters)

    @override
    def regroup(self, setup: Setup, state: OS, clusters: Clusters) -> Regrouping[OS]:
        """One model per cluster; its parent is the model that most members used (ties: lowest number)."""
        labels = clusters.labels.astype(np.int64)
        labelled = labels >= 0
        if state.clustered:
            labels[labelled] = match_ids(labels[labelled], state.assignment[labelled], next_id=state.models)
            labels[labelled] = reuse(labels[labelled], labels[labelled], state.models)
        k = max(state.models if state.clustered else 0, int(labels.max()) + 1)
        parents = most_used(labels[labelled], state.assignment[labelled], k)
        parents = np.where(parents < 0, np.arange(k), parents)  # a cluster without members keeps its model
        assignment = completed(labels, state.assignment, setup.sizes > 0)
        settled = self.settled(setup, state, clusters)
        return Regrouping(replace(settled, models=k, assignment=assignment), parents, clusters)

    def settled(self, setup: Setup, state: OS, clusters: Clusters) -> OS:
        """The state after a clustering: its beta, and which clients' signatures it compared.

        Only flags of absent clients whose data have changed remain.
        """
        labelled, present = clusters.labels >= 0, setup.sizes > 0
        known = np.full_like(state.known, -1) if features_change(setup, state) else state.known.copy()
        known[labelled & present & (state.stale | (known < 0))] = state.round
        known[~labelled] = -1
        absent_stale = state.stale & ~present
        return replace(
            state,
            known=known,
            stale=absent_stale,
            flags=absent_stale,
            threshold=clusters.threshold,
            again=state.clustered,
            clustered=True,
        )

    def drift(self, setup: Setup, state: OS, drifted: NDArray[np.int64], clients: Clients) -> OS:
        """Raise the flags of these clients and mark their signatures at the servers as out of date."""
        stale = state.stale.copy()
        stale[drifted] = True
        return replace(state, stale=stale).flagged(drifted)

    def end(self, setup: Setup, state: OS, plan: Plan, report: RoundReport) -> OS:
        """Flag the clients whose training loss or update has risen since they last took part."""
        clustering = setup.clustering
        losses, higher_loss = risen(state.losses, plan.cohort, report.losses, clustering.flag_loss)
        lengths = report.reports.get("norms", np.full(len(plan.cohort), np.nan))
        norms, longer_update = risen(state.norms, plan.cohort, lengths, clustering.flag_update)
        state = super().end(setup, replace(state, losses=losses, norms=norms), plan, report)
        return state.flagged(np.union1d(higher_loss, longer_update))

    def reports(self, setup: Setup, state: OS) -> Mapping[str, ClientReport]:
        """The norms of the updates, if flags use them."""
        return {} if setup.clustering.flag_update is None else {"norms": UpdateLengths()}
