"""The base of PACFL, MT-HFL, FLT and others: clustering before training, and again when needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, TypeVar

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import (
    Clients,
    Plan,
    Regrouping,
    RoundReport,
    ServerState,
    Setup,
    per_client,
)
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.clustering.newcomers import Fit, fit_by_distances
from rayfl.clustering.numbering import completed, match_ids, most_used, reuse
from rayfl.clustering.placing import adopt, assign, assign_by_distances
from rayfl.clustering.proximity import BLOCK
from rayfl.training.reports import ClientReport, UpdateLengths


@dataclass(frozen=True)
class OneShotState(ServerState):
    """The latest clustering, and what has changed since.

    Attributes:
        known: the round in which each client sent the signature that the servers have ``(N,)``; -1 for none.
        stale: clients whose data have changed since ``(N,)``.
        flags: clients that have raised a flag since the latest clustering ``(N,)``.
        losses, norms: training loss and norm of the update when a client last took part ``(N,)``; NaN before
        that, and if flags do not use them.
        threshold: beta of the latest clustering; None if it had no tree.
        again: whether the latest clustering was not the first.
    """

    known: NDArray[np.int64] = per_client(-1)
    stale: NDArray[np.bool_] = per_client(False)
    flags: NDArray[np.bool_] = per_client(False)
    losses: NDArray[np.float64] = per_client(np.nan)
    norms: NDArray[np.float64] = per_client(np.nan)
    threshold: float | None = None
    again: bool = False

    def sent(self, setup: Setup, newcomers: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """``known`` ``(N,)``, but -1 for clients that send their signature now.

        These are ``newcomers`` ``(n,)``, and present clients whose data have changed.
        """
        known = np.where(self.stale & (setup.sizes > 0), -1, self.known)
        if newcomers is not None:
            known[newcomers] = -1
        return known

    def flagged(self, who: NDArray[np.int64]) -> Self:
        """The state in which these clients ``(n,)`` have raised a flag."""
        flags = self.flags.copy()
        flags[who] = True
        return replace(self, flags=flags)


OS = TypeVar("OS", bound=OneShotState, default=OneShotState)


@dataclass(frozen=True)
class KnownSignatures:
    """Clients that have a signature.

    Attributes:
        clients: their ids ``(M,)``, ascending.
        signatures: M arrays, in the same order.
    """

    clients: NDArray[np.int64]
    signatures: list[NDArray[np.float32]]

    @classmethod
    def of(cls, clients: NDArray[np.int64], found: Mapping[int, NDArray[np.float32]]) -> Self:
        """Of the given clients ``(n,)``, select those that have a signature."""
        having = [client for client in clients.tolist() if client in found]
        return cls(np.array(having, np.int64), [found[client] for client in having])


class OneShotClustered(Algorithm[OS]):
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

    shuffles: ClassVar[bool] = False
    """Whether the clusters are only shuffled ones of another method."""

    def begin(self, setup: Setup) -> OS:
        """No client has sent a signature."""
        return cast("OS", OneShotState(0, 1, np.zeros(setup.clients, np.int64)))

    def recluster(self, setup: Setup, state: OS, clients: Clients) -> Regrouping[OS] | None:
        """Before round 0, every tau rounds, and when flags exceed lambda."""
        if not state.clustered:
            return self.regroup(setup, state, clients.cluster(setup.clustering))
        tau, most = setup.clustering.every, setup.clustering.max_flags
        due = tau > 0 and state.round > 0 and state.round % tau == 0
        if not due and (most is None or state.flags[setup.present].sum() <= most):
            return None
        # Absent clients are clustered by the signatures that the servers have.
        clustering, known = setup.clustering.again(), state.sent(setup)
        if _features_change(setup, state):
            known[:] = -1  # codes of another encoder compare with none of before
        ids = np.flatnonzero((known >= 0) | (setup.sizes > 0))
        found = clients.cluster(clustering.for_clients(len(ids)), ids, known[ids], has_feature_map=True)
        return self.regroup(setup, state, found)

    def regroup(self, setup: Setup, state: OS, clusters: Clusters) -> Regrouping[OS]:
        """One model per cluster; its parent is the model that most members used (ties: lowest number)."""
        labels = clusters.labels.astype(np.int64)
        there = labels >= 0
        if state.clustered:
            labels[there] = match_ids(labels[there], state.assignment[there], next_id=state.models)
            labels[there] = reuse(labels[there], labels[there], state.models)
        k = max(state.models if state.clustered else 0, int(labels.max()) + 1)
        parents = most_used(labels[there], state.assignment[there], k)
        parents = np.where(parents < 0, np.arange(k), parents)  # a cluster without members keeps its model
        assignment = completed(labels, state.assignment, setup.sizes > 0)
        settled = self.settled(setup, state, clusters)
        return Regrouping(replace(settled, models=k, assignment=assignment), parents, clusters)

    def settled(self, setup: Setup, state: OS, clusters: Clusters) -> OS:
        """The state after a clustering: its beta, and whose signatures it compared.

        Only flags of absent clients whose data have changed remain.
        """
        there, present = clusters.labels >= 0, setup.sizes > 0
        known = np.full_like(state.known, -1) if _features_change(setup, state) else state.known.copy()
        known[there & present & (state.stale | (known < 0))] = state.round
        known[~there] = -1
        left = state.stale & ~present
        return replace(
            state,
            known=known,
            stale=left,
            flags=left,
            threshold=clusters.threshold,
            again=state.clustered,
            clustered=True,
        )

    def join(
        self, setup: Setup, state: OS, newcomers: NDArray[np.int64], clients: Clients
    ) -> OS | Regrouping[OS]:
        """Assign newcomers to clusters by :meth:`find`; existing and returning clients keep theirs.

        If the servers have no other client's signature, the clients are clustered.
        """
        if not state.clustered:
            return state
        old, strangers = self.candidates(state, newcomers)
        facts = {"newcomers": strangers.tolist(), "returned": np.setdiff1d(newcomers, strangers).tolist()}
        if not len(strangers):
            return Regrouping(state, np.arange(state.models), facts=facts)
        present = setup.sizes > 0
        if not len(old):
            clustering = setup.clustering.again().for_clients(int(present.sum()))
            return self.regroup(setup, state, clients.cluster(clustering))
        found = self.find(setup, state, old, strangers, clients)
        here = old[present[old]]
        votes = np.bincount(state.assignment[here if len(here) else old], minlength=state.models)
        largest = int(votes.argmax())
        placed = found >= 0
        found = np.where(placed, found, largest)
        others = np.setdiff1d(np.flatnonzero((state.known >= 0) | present), strangers)
        found = reuse(found, np.concatenate([found, state.assignment[others]]), state.models)
        k = max(state.models, int(found.max()) + 1)
        # A cluster of newcomers alone starts from the largest cluster's model.
        parents = np.arange(k)
        parents[np.setdiff1d(found, state.assignment[others])] = largest
        assignment, known = state.assignment.copy(), state.known.copy()
        assignment[strangers], known[strangers] = found, np.where(placed, state.round, -1)
        known[state.stale & (known >= 0) & present] = state.round
        new = replace(state, models=k, assignment=assignment, known=known, stale=state.stale & ~present)
        return Regrouping(new.flagged(strangers), parents, facts=facts)

    def candidates(
        self, state: OS, newcomers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The clients ``(m,)`` that have a cluster, present or absent; and those of the newcomers ``(n,)``
        that need one.

        Clients that return with the data whose signature the servers have do not need one.
        """
        strangers = newcomers[(state.known[newcomers] < 0) | state.stale[newcomers]]
        return np.setdiff1d(np.flatnonzero(state.known >= 0), strangers), strangers

    def find(
        self,
        setup: Setup,
        state: OS,
        old: NDArray[np.int64],
        newcomers: NDArray[np.int64],
        clients: Clients,
    ) -> NDArray[np.int64]:
        """The clusters of newcomers by their signatures (thesis Algorithm 9).

        The servers have the signatures of the old clients; those that are present and whose data have changed
        since send theirs again. With more than ``BLOCK`` clients, or where distances need all signatures at
        once (UMAP) or are not used, all clients are clustered again at the same beta, and a newcomer joins
        the cluster of its neighbours (:func:`rayfl.clustering.placing.adopt`).

        Args:
            setup, state: at the moment.
            old: clients that have a cluster ``(M,)``, ascending, also absent ones.
            newcomers: ``(B,)``, ascending.
            clients: answers the questions.

        Returns:
            ``(B,)``; numbers from ``state.models`` on are new clusters; -1 for clients without a signature.
        """
        everyone = np.union1d(old, newcomers)
        clustering, few = latest(setup, state).for_clients(len(everyone)), len(everyone) <= BLOCK
        unknown = clustering.needs_groups and clients.groups is None  # unknown after a run
        if (clustering.pairwise and few) or unknown:
            known, theirs = self.signatures(setup, state, old, newcomers, clients)
            labels, signatures = state.assignment[known.clients], [*known.signatures, *theirs.signatures]
            found = assign(clustering, signatures, labels, state.threshold, state.models)
            return of_all(newcomers, theirs.clients, found)
        sent = state.sent(setup, newcomers)
        if clustering.signature.needs_exchange and few and clustering.needs_signatures:
            ids, distances = clients.distances(clustering, everyone, sent[everyone])
            new = np.intersect1d(newcomers, ids)
            labels = np.where(np.isin(ids, old), state.assignment[ids], -1)
            found = assign_by_distances(clustering, distances, labels, state.threshold, state.models)
            return of_all(newcomers, new, found)
        if clustering.needs_signatures and not clustering.embedding.joint:
            clustering = clustering.at(state.threshold)
        anew = clients.cluster(clustering, everyone, sent[everyone]).labels
        return adopt(anew[old], state.assignment[old], anew[newcomers], state.models)

    def fit(self, setup: Setup, state: OS, newcomers: NDArray[np.int64], clients: Clients) -> Fit | None:
        """Compare by the mean distance of a newcomer's signature to those of a cluster."""
        clustering, everyone = latest(setup, state), np.flatnonzero(state.known >= 0)
        new = np.isin(everyone, newcomers)
        if not clustering.needs_signatures or self.shuffles or len(everyone) > BLOCK or new.all():
            return None
        clustering = clustering.for_clients(len(everyone))
        _, distances = clients.distances(clustering, everyone, state.known[everyone])
        fit = fit_by_distances(clustering.measure, distances, state.assignment[everyone], new)
        return fit.of_some(state.known[newcomers] >= 0)

    def signatures(
        self,
        setup: Setup,
        state: OS,
        old: NDArray[np.int64],
        newcomers: NDArray[np.int64],
        clients: Clients,
    ) -> tuple[KnownSignatures, KnownSignatures]:
        """The signatures of the old clients ``(m,)`` and of the newcomers ``(n,)``."""
        everyone, sent = np.concatenate([old, newcomers]), state.sent(setup, newcomers)
        found = clients.signatures(latest(setup, state), everyone, sent[everyone])
        return KnownSignatures.of(old, found), KnownSignatures.of(newcomers, found)

    def drift(self, setup: Setup, state: OS, drifted: NDArray[np.int64], clients: Clients) -> OS:
        """Raise the flags of these clients; the servers' signatures of them are out of date."""
        stale = state.stale.copy()
        stale[drifted] = True
        return replace(state, stale=stale).flagged(drifted)

    def end(self, setup: Setup, state: OS, plan: Plan, report: RoundReport) -> OS:
        """Flag the clients whose training loss or update has risen since they last took part."""
        watch = setup.clustering
        losses, lost = risen(state.losses, plan.cohort, report.losses, watch.flag_loss)
        lengths = report.reports.get("norms", np.full(len(plan.cohort), np.nan))
        norms, longer = risen(state.norms, plan.cohort, lengths, watch.flag_update)
        state = super().end(setup, replace(state, losses=losses, norms=norms), plan, report)
        return state.flagged(np.union1d(lost, longer))

    def reports(self, setup: Setup, state: OS) -> Mapping[str, ClientReport]:
        """The norms of the updates, if flags use them."""
        return {} if setup.clustering.flag_update is None else {"norms": UpdateLengths()}


def latest(setup: Setup, state: OneShotState) -> Clustering:
    """The settings of the latest clustering: signatures of newcomers are compared with its signatures."""
    return setup.clustering.again() if state.again else setup.clustering


def _features_change(setup: Setup, state: OneShotState) -> bool:
    """Whether clustering once more needs other features than the latest clustering had."""
    return state.clustered and setup.clustering.again().features != latest(setup, state).features


def of_all(
    newcomers: NDArray[np.int64], new: NDArray[np.int64], found: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The clusters of all newcomers ``(B,)`` from those of some, ascending; -1 for the others."""
    clusters = np.full(len(newcomers), -1, np.int64)
    clusters[np.isin(newcomers, new)] = found
    return clusters


def risen(
    before: NDArray[np.float64], cohort: NDArray[np.int64], now: NDArray[np.float64], rise: float | None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Update the last known values of all clients, and find the clients whose value has risen.

    Args:
        before: ``(N,)``, NaN where unknown.
        cohort: ids ``(M,)``.
        now: the cohort's values ``(M,)``, NaN where unknown.
        rise: the fraction by which a value has to rise; None: never.

    Returns:
        The values ``(N,)``, and the ids of clients whose value has risen by more than ``rise``.
    """
    if rise is None:
        return before, np.empty(0, np.int64)
    latest = before.copy()
    latest[cohort] = np.where(np.isnan(now), before[cohort], now)
    return latest, cohort[now > (1 + rise) * before[cohort]]
