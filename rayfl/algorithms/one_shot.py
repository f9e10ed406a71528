"""Clustering once, before training, and again when it is time: the base of PACFL, MT-HFL, FLT and others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import Clients, Plan, Regrouping, RoundReport, ServerState, Setup
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.clustering.placing import adopt, place
from rayfl.clustering.proximity import BLOCK
from rayfl.clustering.quality import match_ids


class OneShotClustered(Algorithm):
    """Base of methods that cluster clients by signature, then train one model a cluster.

    Every cluster starts from the same ``w_0``. Within a cluster FedAvg runs at its local parameter server;
    every kappa rounds the global one averages the common layers of ``hierarchy`` over the clusters.

    Clients are clustered again every ``clustering.every`` rounds (tau), and when more than
    ``clustering.max_flags`` of them (lambda) have raised a flag since: because they are new, because their
    data have changed, or because their training loss has risen by ``clustering.flag_loss`` or the length of
    their update by ``clustering.flag_update``. Clusters keep their numbers (the matching with the largest
    overlap); a new one starts from the model that most of its members used.
    """

    takes: ClassVar[tuple[str, ...]] = ("clustering", "hierarchy")

    shuffles: ClassVar[bool] = False
    """Whether the clusters are only shuffled ones of another method."""

    def recluster(self, setup: Setup, state: ServerState, clients: Clients) -> Regrouping | None:
        """Before round 0, every tau rounds, and when flags exceed lambda."""
        tau, most = setup.clustering.every, setup.clustering.max_flags
        flags = int(_who(setup, state, "flags").sum())
        due = (
            not state.clustered
            or (tau > 0 and state.round > 0 and state.round % tau == 0)
            or (most is not None and flags > most)
        )
        if not due:
            return None
        clustering = anew(setup) if state.clustered else setup.clustering
        return self.regroup(setup, state, clients.cluster(clustering, again=state.clustered))

    def regroup(self, setup: Setup, state: ServerState, clusters: Clusters) -> Regrouping:
        """One model a cluster; its parent is the one that most members used (ties: the smaller id)."""
        labels = clusters.labels.astype(np.int64)
        there = labels >= 0
        if state.clustered:
            labels[there] = match_ids(labels[there], state.assignment[there], next_id=state.models)
        k = max(state.models if state.clustered else 0, int(labels.max()) + 1)
        parents = most_used(labels[there], state.assignment[there], k)
        unused = parents < 0
        parents[unused] = np.arange(k)[unused]  # a cluster without members keeps its model
        assignment = np.where(there, labels, state.assignment)
        new = replace(
            state, models=k, assignment=assignment, clustered=True, extra=self.settled(setup, state, clusters)
        )
        return Regrouping(new, parents, clusters)

    def settled(self, setup: Setup, state: ServerState, clusters: Clusters) -> dict[str, NDArray[np.generic]]:
        """What is remembered after a clustering: its beta, no flags, and that all signatures are there."""
        beta = np.array([np.nan if clusters.threshold is None else clusters.threshold])
        nobody = np.zeros(setup.clients, np.bool_)
        again = np.array([state.clustered])
        return {**state.extra, "flags": nobody, "stale": nobody, "threshold": beta, "again": again}

    def grow(self, setup: Setup, state: ServerState) -> ServerState:
        """Newcomers have raised no flag and trained nothing."""
        more = setup.clients - len(state.assignment)
        extra = dict(state.extra)
        for name, value in (("flags", False), ("stale", False), ("losses", np.nan), ("norms", np.nan)):
            if name in extra:
                extra[name] = np.concatenate([extra[name], np.full(more, value)])
        return replace(super().grow(setup, state), extra=extra)

    def join(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64], clients: Clients
    ) -> ServerState | Regrouping:
        """Newcomers find their cluster by :meth:`find`; old clients keep theirs.

        Where all old clients have left there is nothing to be found: the newcomers are clustered.
        """
        if not state.clustered:
            return state
        old = np.setdiff1d(setup.present, newcomers)
        if not len(old):
            return self.regroup(setup, state, clients.cluster(anew(setup)))
        found = self.find(setup, state, old, newcomers, clients)
        assignment = state.assignment.copy()
        assignment[newcomers] = found
        k = max(state.models, int(found.max()) + 1)
        # A cluster of newcomers alone starts from the largest cluster's model.
        largest = int(np.bincount(state.assignment[old], minlength=state.models).argmax())
        parents = np.concatenate([np.arange(state.models), np.full(k - state.models, largest)])
        extra = {**state.extra, "stale": np.zeros(setup.clients, np.bool_)}
        new = replace(state, models=k, assignment=assignment, extra=extra)
        new = self._flag(setup, new, newcomers)
        return Regrouping(new, parents, facts={"newcomers": newcomers.tolist()})

    def find(
        self,
        setup: Setup,
        state: ServerState,
        old: NDArray[np.int64],
        newcomers: NDArray[np.int64],
        clients: Clients,
    ) -> NDArray[np.int64]:
        """The clusters of newcomers by their signatures (thesis Algorithm 9).

        The servers have the signatures of the old clients, but for those whose data have changed since. Where
        the distances are of more than ``BLOCK`` clients, come from an exchange, or are not used, everybody is
        clustered anew, at the same beta, and a newcomer goes to those who are beside it
        (:func:`rayfl.clustering.placing.adopt`).

        Returns:
            ``(B,)``; numbers from ``state.models`` on are those of new clusters.
        """
        clustering, beta = latest(setup, state), float(state.extra["threshold"][0])
        senders = self.senders(setup, state, newcomers)
        if _pairwise(clustering, len(setup.present)) or not _told(clustering, clients):
            everyone = np.concatenate([old, newcomers])
            signatures = clients.signatures(clustering, everyone, senders)
            return place(clustering, signatures, state.assignment[old], beta, state.models)
        if clustering.needs_signatures and not (np.isnan(beta) or clustering.embedding.joint):
            clustering = clustering.model_copy(update={"threshold": beta, "n_clusters": None})
        labels = clients.cluster(clustering, senders).labels
        return adopt(labels[old], state.assignment[old], labels[newcomers], state.models)

    def senders(self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Whose signatures the servers do not have: newcomers', and those of clients with other data."""
        return np.union1d(newcomers, np.flatnonzero(_who(setup, state, "stale")))

    def drift(
        self, setup: Setup, state: ServerState, drifted: NDArray[np.int64], clients: Clients
    ) -> ServerState:
        """They raise a flag, and the servers' signatures of them are out of date."""
        stale = _who(setup, state, "stale").copy()
        stale[drifted] = True
        return self._flag(setup, replace(state, extra={**state.extra, "stale": stale}), drifted)

    def _flag(self, setup: Setup, state: ServerState, who: NDArray[np.int64]) -> ServerState:
        flags = _who(setup, state, "flags").copy()
        flags[who] = True
        return replace(state, extra={**state.extra, "flags": flags})

    def end(self, setup: Setup, state: ServerState, plan: Plan, report: RoundReport) -> ServerState:
        """Flag the clients whose training loss or update has risen since they last took part."""
        state = super().end(setup, state, plan, report)
        watched = (
            ("losses", report.losses, setup.clustering.flag_loss),
            ("norms", report.norms, setup.clustering.flag_update),
        )
        for name, now, rise in watched:
            if rise is not None:
                state = self._watch(setup, state, plan.cohort, name, now, rise)
        return state

    def _watch(
        self,
        setup: Setup,
        state: ServerState,
        cohort: NDArray[np.int64],
        name: str,
        now: NDArray[np.float64],
        rise: float,
    ) -> ServerState:
        """Keep the cohort's latest numbers ``(M,)``, and flag those that have risen by more than ``rise``."""
        before = state.extra.get(name, np.full(setup.clients, np.nan))
        risen = cohort[now > (1 + rise) * before[cohort]]
        latest = before.copy()
        latest[cohort] = np.where(np.isnan(now), before[cohort], now)
        state = replace(state, extra={**state.extra, name: latest})
        return self._flag(setup, state, risen) if len(risen) else state

    def measures_updates(self, setup: Setup) -> bool:
        """If clients watch how long their updates are."""
        return super().measures_updates(setup) or setup.clustering.flag_update is not None


def most_used(labels: NDArray[np.int64], models: NDArray[np.int64], clusters: int) -> NDArray[np.int64]:
    """The model that most members of each cluster used, ties: the smaller id; -1 for one without members.

    Args:
        labels: new cluster of each client ``(n,)``.
        models: the model that it used ``(n,)``.
        clusters: K.

    Returns:
        ``(K,)``.
    """
    pairs, votes = np.unique(np.stack([labels, models]), axis=1, return_counts=True)
    order = np.lexsort((-pairs[1], votes, pairs[0]))  # the last of each cluster counts
    found = np.full(clusters, -1, np.int64)
    found[pairs[0, order]] = pairs[1, order]
    return found


def anew(setup: Setup) -> Clustering:
    """The settings with which clients are clustered again.

    Of fewer clients than ``n_clusters`` each is a cluster then; encoders may be fine-tuned for another time.
    """
    wanted, present = setup.clustering.n_clusters, len(setup.present)
    most = None if wanted is None else min(wanted, present)
    features = setup.clustering.features.again()
    return setup.clustering.model_copy(update={"n_clusters": most, "features": features})


def latest(setup: Setup, state: ServerState) -> Clustering:
    """The settings of the latest clustering: signatures of newcomers must be like those that it compared."""
    now = anew(setup)
    if "again" in state.extra and state.extra["again"][0]:
        return now
    return now.model_copy(update={"features": setup.clustering.features})


def _pairwise(clustering: Clustering, clients: int) -> bool:
    """Whether the distances of newcomers follow from two signatures each, and all fit into one process."""
    exchanged = clustering.signature.needs_exchange or clustering.embedding.joint
    return clustering.needs_signatures and not exchanged and clients <= BLOCK


def _told(clustering: Clustering, clients: Clients) -> bool:
    """Whether it is known how newcomers are grouped where that needs true groups (after a run it is not)."""
    needs_groups = clustering.grouping == "planted" or (
        clustering.grouping == "random" and clustering.n_clusters is None
    )
    return clients.groups is not None or not needs_groups


def _who(setup: Setup, state: ServerState, what: str) -> NDArray[np.bool_]:
    """Who has raised a flag (``flags``) or has other data (``stale``) since the last clustering ``(N,)``."""
    return np.asarray(state.extra.get(what, np.zeros(setup.clients)), np.bool_)
