"""Clustering once, before training, and again when it is time: the base of PACFL, MT-HFL, FLT and others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms.base import Algorithm, share_layers
from rayfl.algorithms.contract import Clients, Mixing, Plan, Regrouping, RoundReport, ServerState, Setup
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.placing import adopt, place
from rayfl.clustering.quality import match_ids


class OneShotClustered(Algorithm):
    """Base of methods that cluster clients by signature, then train one model a cluster.

    Every cluster starts from the same ``w_0``. Within a cluster FedAvg runs at its local parameter server;
    every kappa rounds the global one averages the common layers of ``hierarchy`` over the clusters.

    Clients are clustered again every ``clustering.every`` rounds (tau), and when more than
    ``clustering.max_flags`` of them (lambda) have raised a flag since: because they are new, because their
    data have changed, or because their training loss has risen by ``clustering.flag_loss``. Clusters keep
    their numbers (the matching with the largest overlap); a new one starts from the model that most of its
    members used.
    """

    shuffles: ClassVar[bool] = False
    """Whether the clusters are only shuffled ones of another method."""

    def recluster(self, setup: Setup, state: ServerState, clients: Clients) -> Regrouping | None:
        """Before round 0, every tau rounds, and when flags exceed lambda."""
        tau, most = setup.clustering.every, setup.clustering.max_flags
        flags = int(_flags(setup, state).sum())
        due = (
            not state.clustered
            or (tau > 0 and state.round > 0 and state.round % tau == 0)
            or (most is not None and flags > most)
        )
        return self.regroup(setup, state, clients.cluster(setup.clustering)) if due else None

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
        beta = np.array([np.nan if clusters.threshold is None else clusters.threshold])
        extra = {**state.extra, "flags": np.zeros(setup.clients, np.bool_), "threshold": beta}
        new = replace(state, models=k, assignment=assignment, clustered=True, extra=extra)
        return Regrouping(new, parents, clusters)

    def grow(self, setup: Setup, state: ServerState) -> ServerState:
        """Newcomers have raised no flag and trained nothing."""
        more = setup.clients - len(state.assignment)
        extra = dict(state.extra)
        for name, value in (("flags", False), ("losses", np.nan)):
            if name in extra:
                extra[name] = np.concatenate([extra[name], np.full(more, value)])
        return replace(super().grow(setup, state), extra=extra)

    def join(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64], clients: Clients
    ) -> ServerState | Regrouping:
        """Newcomers find their cluster by their signatures; old clients keep theirs (thesis Algorithm 9)."""
        if not state.clustered:
            return state
        old = np.setdiff1d(setup.present, newcomers)
        # Relations and joint embeddings are everybody's: they have to be made anew.
        if setup.clustering.signature.needs_exchange or setup.clustering.embedding.joint:
            labels = clients.cluster(setup.clustering).labels
            found = adopt(labels[old], state.assignment[old], labels[newcomers], state.models)
        else:
            signatures = clients.signatures(setup.clustering, np.concatenate([old, newcomers]))
            beta = float(state.extra["threshold"][0])
            found = place(setup.clustering, signatures, state.assignment[old], beta, state.models)
        assignment = state.assignment.copy()
        assignment[newcomers] = found
        k = max(state.models, int(found.max()) + 1)
        # A cluster of newcomers alone starts from the largest cluster's model.
        largest = int(np.bincount(state.assignment[old], minlength=state.models).argmax())
        parents = np.concatenate([np.arange(state.models), np.full(k - state.models, largest)])
        new = self._flag(setup, replace(state, models=k, assignment=assignment), newcomers)
        return Regrouping(new, parents, facts={"newcomers": newcomers.tolist()})

    def drift(
        self, setup: Setup, state: ServerState, drifted: NDArray[np.int64], clients: Clients
    ) -> ServerState:
        """They raise a flag."""
        return self._flag(setup, state, drifted)

    def _flag(self, setup: Setup, state: ServerState, who: NDArray[np.int64]) -> ServerState:
        flags = _flags(setup, state).copy()
        flags[who] = True
        return replace(state, extra={**state.extra, "flags": flags})

    def mix(
        self, setup: Setup, state: ServerState, plan: Plan, observed: NDArray[np.float64] | None = None
    ) -> Mixing:
        """FedAvg in every cluster, and the common layers over all of them every kappa rounds."""
        return share_layers(setup, state, super().mix(setup, state, plan))

    def end(self, setup: Setup, state: ServerState, plan: Plan, report: RoundReport) -> ServerState:
        """Flag the clients whose training loss has risen since they last took part."""
        state = super().end(setup, state, plan, report)
        rise = setup.clustering.flag_loss
        if rise is None:
            return state
        before = state.extra.get("losses", np.full(setup.clients, np.nan))
        risen = plan.cohort[report.losses > (1 + rise) * before[plan.cohort]]
        losses = before.copy()
        losses[plan.cohort] = np.where(np.isnan(report.losses), before[plan.cohort], report.losses)
        state = replace(state, extra={**state.extra, "losses": losses})
        return self._flag(setup, state, risen) if len(risen) else state


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


def _flags(setup: Setup, state: ServerState) -> NDArray[np.bool_]:
    """Who has raised a flag since the last clustering, ``(N,)``."""
    return np.asarray(state.extra.get("flags", np.zeros(setup.clients)), np.bool_)
