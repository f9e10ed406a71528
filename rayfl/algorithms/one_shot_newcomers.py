"""Newcomers find a cluster by their signatures (Vahidian's thesis, Algorithm 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import Clients, Regrouping, Setup
from rayfl.algorithms.one_shot_state import OS, latest
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.newcomers import Fit, fit_by_distances
from rayfl.clustering.numbering import reuse
from rayfl.clustering.placing import adopt, assign, assign_by_distances
from rayfl.clustering.proximity import BLOCK


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
    def of(cls, clients: NDArray[np.int64], signatures: Mapping[int, NDArray[np.float32]]) -> Self:
        """Select those of the given clients ``(n,)`` that have one of the ``signatures``."""
        signed = [client for client in clients.tolist() if client in signatures]
        return cls(np.array(signed, np.int64), [signatures[client] for client in signed])


class AssignsNewcomers(Algorithm[OS]):
    """The part of :class:`~rayfl.algorithms.one_shot.OneShotClustered` that gives newcomers a cluster."""

    shuffles: ClassVar[bool] = False
    """Whether the clusters are those of another method with shuffled members."""

    def regroup(self, setup: Setup, state: OS, clusters: Clusters) -> Regrouping[OS]:
        """One model per cluster."""
        raise NotImplementedError

    def join(
        self, setup: Setup, state: OS, newcomers: NDArray[np.int64], clients: Clients
    ) -> OS | Regrouping[OS]:
        """Assign newcomers to clusters by :meth:`find`; existing and returning clients keep theirs.

        If the servers have no signature of another client, all present clients are clustered again.
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
            present_ids = setup.present
            clusters = clients.cluster(
                clustering, present_ids, has_feature_map=state.have_feature_map[present_ids]
            )
            return self.regroup(setup, state, clusters)
        labels = self.find(setup, state, old, strangers, clients)
        present_ids = old[present[old]]
        votes = np.bincount(
            state.assignment[present_ids if len(present_ids) else old], minlength=state.models
        )
        largest = int(votes.argmax())
        placed = labels >= 0
        labels = np.where(placed, labels, largest)
        others = np.setdiff1d(np.flatnonzero((state.known >= 0) | present), strangers)
        labels = reuse(labels, np.concatenate([labels, state.assignment[others]]), state.models)
        k = max(state.models, int(labels.max()) + 1)
        # A cluster of newcomers alone starts from the largest cluster's model.
        parents = np.arange(k)
        parents[np.setdiff1d(labels, state.assignment[others])] = largest
        assignment, known = state.assignment.copy(), state.known.copy()
        assignment[strangers], known[strangers] = labels, np.where(placed, state.round, -1)
        known[state.stale & (known >= 0) & present] = state.round
        new = replace(state, models=k, assignment=assignment, known=known, stale=state.stale & ~present)
        return Regrouping(new.flagged(strangers), parents, facts=facts)

    def candidates(
        self, state: OS, newcomers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The clients that have a cluster, present or absent ``(m,)``; and the newcomers that need one
        ``(n,)``.

        Returning clients whose signature at the servers is up to date do not need one.
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
            setup, state: the current ones.
            old: clients that have a cluster ``(M,)``, ascending, also absent ones.
            newcomers: ``(B,)``, ascending.
            clients: provides signatures, distances and clusterings.

        Returns:
            ``(B,)``; numbers from ``state.models`` on are new clusters; -1 for clients without a signature.
        """
        everyone = np.union1d(old, newcomers)
        clustering, few = latest(setup, state).for_clients(len(everyone)), len(everyone) <= BLOCK
        unknown = clustering.needs_groups and clients.groups is None  # unknown after a run
        if (clustering.pairwise and few) or unknown:
            clustered, arrived = self.signatures(setup, state, old, newcomers, clients)
            labels, signatures = (
                state.assignment[clustered.clients],
                [*clustered.signatures, *arrived.signatures],
            )
            assigned = assign(clustering, signatures, labels, state.threshold, state.models)
            return of_all(newcomers, arrived.clients, assigned)
        sent = state.sent(setup, newcomers)
        if clustering.signature.needs_exchange and few and clustering.needs_signatures:
            ids, distances = clients.distances(
                clustering, everyone, sent[everyone], state.have_feature_map[everyone]
            )
            new = np.intersect1d(newcomers, ids)
            labels = np.where(np.isin(ids, old), state.assignment[ids], -1)
            assigned = assign_by_distances(clustering, distances, labels, state.threshold, state.models)
            return of_all(newcomers, new, assigned)
        if clustering.needs_signatures and not clustering.embedding.joint:
            clustering = clustering.at(state.threshold)
        new_labels = clients.cluster(
            clustering, everyone, sent[everyone], state.have_feature_map[everyone]
        ).labels
        return adopt(new_labels[old], state.assignment[old], new_labels[newcomers], state.models)

    def fit(self, setup: Setup, state: OS, newcomers: NDArray[np.int64], clients: Clients) -> Fit | None:
        """Compare by the mean distance of a newcomer's signature to those of a cluster."""
        clustering, everyone = latest(setup, state), np.flatnonzero(state.known >= 0)
        is_new = np.isin(everyone, newcomers)
        if not clustering.needs_signatures or self.shuffles or len(everyone) > BLOCK or is_new.all():
            return None
        clustering = clustering.for_clients(len(everyone))
        _, distances = clients.distances(
            clustering, everyone, state.known[everyone], state.have_feature_map[everyone]
        )
        fit = fit_by_distances(clustering.measure, distances, state.assignment[everyone], is_new)
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
        served = state.have_feature_map[everyone]
        signatures = clients.signatures(latest(setup, state), everyone, sent[everyone], served)
        return KnownSignatures.of(old, signatures), KnownSignatures.of(newcomers, signatures)


def of_all(
    newcomers: NDArray[np.int64], signed: NDArray[np.int64], labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The cluster of each of the ``newcomers`` ``(B,)``, ascending; -1 for those without a signature.

    ``labels`` are the clusters of ``signed``, the newcomers that have one, ascending.
    """
    clusters = np.full(len(newcomers), -1, np.int64)
    clusters[np.isin(newcomers, signed)] = labels
    return clusters
