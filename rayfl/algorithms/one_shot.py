"""Clustering once, before training, and again when it is time: the base of PACFL, MT-HFL, FLT and others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import squareform

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import Clients, Plan, Regrouping, RoundReport, ServerState, Setup
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.clustering.newcomers import Fit, fit_by_distances, place_newcomers
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
    their update by ``clustering.flag_update``. Flags of absent clients wait until they return. Clusters keep
    their numbers (the matching with the largest overlap); a new one starts from the model that most of its
    members used, and takes the number of a cluster that has lost all its members, if there is one.

    The servers keep the signature of every client, with the round in which it was sent (``known``). A client
    sends it again only when its data have changed. Absent clients are clustered with the others and stay
    candidates for newcomers; one that returns with the same data still has its cluster.
    """

    takes: ClassVar[tuple[str, ...]] = ("clustering", "hierarchy")

    shuffles: ClassVar[bool] = False
    """Whether the clusters are only shuffled ones of another method."""

    def recluster(self, setup: Setup, state: ServerState, clients: Clients) -> Regrouping | None:
        """Before round 0, every tau rounds, and when flags exceed lambda."""
        tau, most = setup.clustering.every, setup.clustering.max_flags
        flags = int(_who(setup, state, "flags")[setup.present].sum())
        due = (
            not state.clustered
            or (tau > 0 and state.round > 0 and state.round % tau == 0)
            or (most is not None and flags > most)
        )
        if not due:
            return None
        clusters = (
            self._again(setup, state, clients) if state.clustered else clients.cluster(setup.clustering)
        )
        return self.regroup(setup, state, clusters)

    def _again(self, setup: Setup, state: ServerState, clients: Clients) -> Clusters:
        """Cluster those that are present, and the absent ones by the signatures that the servers have."""
        known = _known(setup, state)
        known[_who(setup, state, "stale") & (setup.sizes > 0)] = -1
        clustering = anew(setup)
        if clustering.features != latest(setup, state).features:
            known[:] = -1  # codes of another encoder compare with none of before
        ids = np.flatnonzero((known >= 0) | (setup.sizes > 0))
        return clients.cluster(fitting(clustering, len(ids)), ids, known[ids], again=True)

    def regroup(self, setup: Setup, state: ServerState, clusters: Clusters) -> Regrouping:
        """One model a cluster; its parent is the one that most members used (ties: the smaller id)."""
        labels = clusters.labels.astype(np.int64)
        there = labels >= 0
        if state.clustered:
            labels[there] = match_ids(labels[there], state.assignment[there], next_id=state.models)
            labels[there] = reuse(labels[there], labels[there], state.models)
        k = max(state.models if state.clustered else 0, int(labels.max()) + 1)
        parents = most_used(labels[there], state.assignment[there], k)
        unused = parents < 0
        parents[unused] = np.arange(k)[unused]  # a cluster without members keeps its model
        assignment = with_labels(setup, labels, state.assignment)
        new = replace(
            state, models=k, assignment=assignment, clustered=True, extra=self.settled(setup, state, clusters)
        )
        return Regrouping(new, parents, clusters)

    def settled(self, setup: Setup, state: ServerState, clusters: Clusters) -> dict[str, NDArray[np.generic]]:
        """What is remembered after a clustering: its beta, whose signatures it compared, and no flags but
        those of absent clients whose data have changed."""
        there, present = clusters.labels >= 0, setup.sizes > 0
        stale = _who(setup, state, "stale")
        known = _known(setup, state)
        again = np.array([state.clustered])
        if state.clustered and anew(setup).features != latest(setup, state).features:
            known[:] = -1
        known[there & present & (stale | (known < 0))] = state.round
        known[~there] = -1
        beta = np.array([np.nan if clusters.threshold is None else clusters.threshold])
        left = stale & ~present
        return {
            **state.extra,
            "flags": left,
            "stale": left,
            "threshold": beta,
            "again": again,
            "known": known,
        }

    def grow(self, setup: Setup, state: ServerState) -> ServerState:
        """Newcomers have raised no flag, trained nothing and sent no signature."""
        more = setup.clients - len(state.assignment)
        extra = dict(state.extra)
        new = {"flags": False, "stale": False, "losses": np.nan, "norms": np.nan, "known": -1}
        for name, value in new.items():
            if name in extra:
                extra[name] = np.concatenate([extra[name], np.full(more, value)])
        return replace(super().grow(setup, state), extra=extra)

    def join(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64], clients: Clients
    ) -> ServerState | Regrouping:
        """Newcomers find their cluster by :meth:`find`; old clients keep theirs, also those that return.

        Where the servers have nobody else's signature the clients are clustered.
        """
        if not state.clustered:
            return state
        old, strangers = self.candidates(setup, state, newcomers)
        facts = {"newcomers": strangers.tolist(), "returned": np.setdiff1d(newcomers, strangers).tolist()}
        if not len(strangers):
            return Regrouping(state, np.arange(state.models), facts=facts)
        if not len(old):
            return self.regroup(setup, state, clients.cluster(fitting(anew(setup), len(setup.present))))
        found = self.find(setup, state, old, strangers, clients)
        here = old[setup.sizes[old] > 0]
        votes = np.bincount(state.assignment[here if len(here) else old], minlength=state.models)
        largest = int(votes.argmax())
        placed = found >= 0
        found = np.where(placed, found, largest)
        others = np.setdiff1d(np.flatnonzero((_known(setup, state) >= 0) | (setup.sizes > 0)), strangers)
        found = reuse(found, np.concatenate([found, state.assignment[others]]), state.models)
        assignment = state.assignment.copy()
        assignment[strangers] = found
        k = max(state.models, int(found.max()) + 1)
        # A cluster of newcomers alone starts from the largest cluster's model.
        parents = np.arange(k)
        parents[np.setdiff1d(found, state.assignment[others])] = largest
        known, stale = _known(setup, state), _who(setup, state, "stale")
        known[strangers] = np.where(placed, state.round, -1)
        known[stale & (known >= 0) & (setup.sizes > 0)] = state.round
        extra = {**state.extra, "stale": stale & (setup.sizes == 0), "known": known}
        new = replace(state, models=k, assignment=assignment, extra=extra)
        return Regrouping(self._flag(setup, new, strangers), parents, facts=facts)

    def candidates(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The clients that have a cluster, present or absent; and which of the newcomers need one: all but
        those that return with the data whose signature the servers have."""
        known = _known(setup, state, newcomers)
        strangers = newcomers[(known[newcomers] < 0) | _who(setup, state, "stale")[newcomers]]
        return np.setdiff1d(np.flatnonzero(known >= 0), strangers), strangers

    def find(
        self,
        setup: Setup,
        state: ServerState,
        old: NDArray[np.int64],
        newcomers: NDArray[np.int64],
        clients: Clients,
    ) -> NDArray[np.int64]:
        """The clusters of newcomers by their signatures (thesis Algorithm 9).

        The servers have the signatures of the old clients; those that are present and whose data have
        changed since send theirs again. Where the distances are of more than ``BLOCK`` clients, follow from
        no two signatures alone (UMAP), or are not used, everybody is clustered anew, at the same beta, and a
        newcomer goes to those who are beside it (:func:`rayfl.clustering.placing.adopt`).

        Args:
            setup, state: at the moment.
            old: clients that have a cluster ``(M,)``, ascending; absent ones are among them.
            newcomers: ``(B,)``, ascending.
            clients: whom to ask.

        Returns:
            ``(B,)``; numbers from ``state.models`` on are those of new clusters, -1 of clients that have no
            signature.
        """
        clustering, beta = latest(setup, state), float(state.extra["threshold"][0])
        if _pairwise(clustering, len(old) + len(newcomers)) or not _told(clustering, clients):
            old, signatures, new, theirs = self.signatures(setup, state, old, newcomers, clients)
            found = np.full(len(newcomers), -1)
            labels = place(clustering, [*signatures, *theirs], state.assignment[old], beta, state.models)
            found[np.isin(newcomers, new)] = labels
            return found
        everyone = np.union1d(old, newcomers)
        clustering = fitting(clustering, len(everyone))
        if clustering.signature.needs_exchange and len(everyone) <= BLOCK and clustering.needs_signatures:
            sent = self.sent(setup, state, newcomers)[everyone]
            ids, distances = clients.distances(clustering, everyone, sent)
            has, signs = np.isin(old, ids), np.isin(newcomers, ids)
            at = np.searchsorted(ids, np.concatenate([old[has], newcomers[signs]]))
            among = squareform(squareform(distances)[np.ix_(at, at)], checks=False)
            found = np.full(len(newcomers), -1)
            cut = np.inf if np.isnan(beta) else beta
            labels = place_newcomers(among, state.assignment[old[has]], cut, clustering.linkage, state.models)
            found[signs] = labels[has.sum() :]
            return found
        if clustering.needs_signatures and not (np.isnan(beta) or clustering.embedding.joint):
            clustering = clustering.model_copy(update={"threshold": beta, "n_clusters": None})
        sent = self.sent(setup, state, newcomers)[everyone]
        labels = clients.cluster(clustering, everyone, sent).labels
        return adopt(labels[old], state.assignment[old], labels[newcomers], state.models)

    def fit(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64], clients: Clients
    ) -> Fit | None:
        """By the mean distance of a newcomer's signature to those of a cluster."""
        clustering, known = latest(setup, state), _known(setup, state)
        if not clustering.needs_signatures or self.shuffles:
            return None
        everyone = np.flatnonzero(known >= 0)
        new = np.isin(everyone, newcomers)
        if len(everyone) > BLOCK or new.all():
            return None
        _, distances = clients.distances(fitting(clustering, len(everyone)), everyone, known[everyone])
        fit = fit_by_distances(clustering.measure, distances, state.assignment[everyone], new)
        return fit.of_some(known[newcomers] >= 0)

    def sent(self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The round in which each client sent the signature that the servers have ``(N,)``; -1 for newcomers
        and for present clients whose data have changed, who send theirs now."""
        known = _known(setup, state, newcomers)
        known[newcomers] = -1
        known[_who(setup, state, "stale") & (setup.sizes > 0)] = -1
        return known

    def signatures(
        self,
        setup: Setup,
        state: ServerState,
        old: NDArray[np.int64],
        newcomers: NDArray[np.int64],
        clients: Clients,
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float32]], NDArray[np.int64], list[NDArray[np.float32]]]:
        """The old clients that have a signature, those signatures, and the same of the newcomers."""
        everyone = np.concatenate([old, newcomers])
        known = self.sent(setup, state, newcomers)
        found = clients.signatures(latest(setup, state), everyone, known[everyone])
        old, new = (np.array([c for c in ids.tolist() if c in found], np.int64) for ids in (old, newcomers))
        return old, [found[c] for c in old.tolist()], new, [found[c] for c in new.tolist()]

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


def reuse(labels: NDArray[np.int64], used: NDArray[np.int64], models: int) -> NDArray[np.int64]:
    """New clusters (labels from ``models`` on) under the numbers of clusters that have no members.

    Args:
        labels: ``(n,)``.
        used: the clusters that have members; those from ``models`` on do not matter.
        models: K.
    """
    free = np.setdiff1d(np.arange(models), used)
    new = np.unique(labels[labels >= models])
    numbers = np.concatenate([free, np.arange(models, models + len(new))])[: len(new)]
    found = labels.copy()
    for label, number in zip(new.tolist(), numbers.tolist(), strict=True):
        found[labels == label] = number
    return found


def with_labels(setup: Setup, labels: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """The model of each client ``(N,)`` after a clustering.

    Args:
        setup: who is present.
        labels: the clusters ``(N,)``, -1 of clients in none.
        others: what these keep ``(N,)``; those that are present and have no signature use the largest
            cluster's model.
    """
    there = labels >= 0
    assignment = np.where(there, labels, others)
    assignment[~there & (setup.sizes > 0)] = np.bincount(labels[there]).argmax()
    return assignment


def anew(setup: Setup) -> Clustering:
    """The settings with which clients are clustered again: encoders may be fine-tuned for another time."""
    return setup.clustering.model_copy(update={"features": setup.clustering.features.again()})


def fitting(clustering: Clustering, clients: int) -> Clustering:
    """The settings for so many clients: of fewer than ``n_clusters`` each is a cluster."""
    if clustering.n_clusters is None or clustering.n_clusters <= clients:
        return clustering
    return clustering.model_copy(update={"n_clusters": clients})


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
    """Who has raised a flag since the last clustering (``flags``), or has other data than those of the
    signature that the servers have (``stale``), ``(N,)``."""
    return np.asarray(state.extra.get(what, np.zeros(setup.clients)), np.bool_)


def _known(setup: Setup, state: ServerState, newcomers: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """The round in which each client sent the signature that the servers have ``(N,)``, -1 for none.

    States of older checkpoints do not say: then those of all that are present, but the newcomers.
    """
    if "known" in state.extra:
        return np.array(state.extra["known"], np.int64)
    known = np.where((setup.sizes > 0) & state.clustered, 0, -1)
    if newcomers is not None:
        known[newcomers] = -1
    return known
