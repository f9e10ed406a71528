"""FLT: clients related by the codes of their data train on the graph of who is related to whom.

Jamali-Rad, Abdizadeh, Singh, "Federated learning with taskonomy for non-IID data", IEEE TNNLS 2022,
Algorithms 2 (FCR) and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.contract import Clients, Mixing, Plan, Regrouping, ServerState, Setup
from rayfl.algorithms.one_shot import OneShotClustered, latest, most_used, with_labels
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.newcomers import Fit, fit_by_means, nearest_cluster
from rayfl.clustering.proximity import POINTS
from rayfl.clustering.quality import match_ids


class FLT(OneShotClustered):
    """Federated learning with taskonomy.

    1. FCR, once: each client encodes its samples with an encoder that the server sends
       (``clustering.features``: pretrained elsewhere, fine-tuned by the client for ``finetune_epochs`` = J
       epochs) and sends k centroids of the codes (``clustering.signature``).
    2. The server embeds all centroids by UMAP in u = 2 dimensions (``clustering.embedding``); the distance of
       two clients is that of their nearest centroids; clients are related up to ``clustering.gamma``.
    3. Training on the graph (``train_on: graph``, Case I): client j's next model is
       ``sum_i A_ij n_i w_i / sum_i A_ij n_i`` over the sampled clients i; where none of its relatives was
       sampled it keeps its model. Or on disjoint clusters (``clusters``, Case II): FedAvg in each of the
       ``clustering.n_clusters`` that Ward's linkage finds in the graph, or as many as it proposes.
    4. Every ``clustering.every`` rounds (tau), or when more than ``clustering.max_flags`` clients (lambda)
       are new or have new data, FCR runs again (in the paper with encoders fine-tuned: ``fine_tune_again``
       of ``clustering.features``). Until then a newcomer counts as one of the cluster (Case I: of the clients
       with the same relatives) whose mean code is nearest to its own: it uses their model and contributes to
       the same ones.

    Rows of ``A`` that are equal are one model: clients with the same relatives start alike and stay alike, so
    a graph of disjoint groups costs no more than its groups, and no client-by-client matrix is ever formed.
    The clusters that are compared with planted groups (ARI) are the disjoint ones in both cases.

    With everybody related (a large gamma) both cases are FedAvg, bit for bit.

    **Code differs** (github hjraad/FLT, ``src/utils/cluster.py``): the distance of two clients is not that of
    their nearest centroids but the least sum over all ways to pair their centroids, divided by k
    (``clustering.proximity: matching``), and clients are related below 1. On letters ``gamma: auto`` with the
    nearest centroids finds the groups best (experiments/clustered).
    """

    name: Literal["flt"] = "flt"
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox")
    defaults: ClassVar[Mapping[str, Any]] = {
        "clustering": {
            "signature": {"name": "centroids", "k": 5},
            "features": {"name": "conv_ae"},
            "embedding": {"name": "umap"},
            "grouping": "graph",
        }
    }

    train_on: Literal["graph", "clusters"] = Field(
        "graph", description="graph: each client averages over its relatives (Case I); clusters (Case II)"
    )

    def regroup(self, setup: Setup, state: ServerState, clusters: Clusters) -> Regrouping:
        """Case II: a model a cluster; Case I: a model for each set of relatives."""
        if self.train_on == "clusters" or clusters.graph is None:
            return super().regroup(setup, state, clusters)
        graph = sp.csr_array(clusters.graph)
        there = clusters.labels >= 0
        kinds, first = relatives(graph, there)
        assignment = with_labels(setup, kinds, np.zeros_like(kinds))
        # A kind of client goes on with the model that most of them used.
        parents = most_used(kinds[there], state.assignment[there], len(first))
        disjoint, names = _named(state, clusters.labels)
        extra = {**self.settled(setup, state, clusters), **_kept(graph[first]), **names}
        new = replace(state, models=len(first), assignment=assignment, clustered=True, extra=extra)
        return Regrouping(new, parents, clusters, {"disjoint": disjoint.tolist()})

    def grow(self, setup: Setup, state: ServerState) -> ServerState:
        """Newcomers are in no cluster yet."""
        grown = super().grow(setup, state)
        if "disjoint" not in state.extra:
            return grown
        more = np.full(setup.clients - len(state.assignment), -1)
        disjoint = np.concatenate([state.extra["disjoint"], more])
        return replace(grown, extra={**grown.extra, "disjoint": disjoint})

    def mix(
        self, setup: Setup, state: ServerState, plan: Plan, observed: NDArray[np.float64] | None = None
    ) -> Mixing:
        """Case I: row k of A holds n_i for the sampled relatives i of clients of kind k."""
        if "relatives" not in state.extra:
            return super().mix(setup, state, plan)
        weights, _ = setup.local.weights(setup.sizes[plan.cohort], plan.group, setup.training)
        sampled = _relatives(setup, state).tocsc()[:, plan.cohort]
        sampled.data = np.repeat(weights, np.diff(sampled.indptr))
        return Mixing(sampled.tocsr())

    def join(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64], clients: Clients
    ) -> ServerState | Regrouping:
        """Case I: newcomers have the relatives and the disjoint cluster of their kind of client; those
        of a new kind have one another."""
        found = super().join(setup, state, newcomers, clients)
        if isinstance(found, ServerState) or found.clusters is not None or "relatives" not in state.extra:
            return found
        new, (old, strangers) = found.state, self.candidates(setup, state, newcomers)
        kinds, columns = new.assignment[strangers], np.arange(setup.clients)
        founds = ~np.isin(kinds, state.assignment[old])
        founders, own = strangers[founds], kinds[founds]
        for newcomer, kind in zip(strangers[~founds].tolist(), kinds[~founds].tolist(), strict=True):
            columns[newcomer] = old[state.assignment[old] == kind][0]
        rows, members = _relatives(setup, state).tocsc()[:, columns].tocoo().coords
        # What was known of founders is void, and of kinds without members whose numbers they take.
        stays = ~np.isin(members, founders) & ~np.isin(rows, own)
        entries = np.concatenate([rows[stays], own]), np.concatenate([members[stays], founders])
        graph = sp.csr_array((np.ones(len(entries[0])), entries), shape=(new.models, setup.clients))
        disjoint = np.asarray(new.extra["disjoint"], np.int64)[columns]
        free = np.asarray(new.extra["disjoint.free"], np.int64)
        founded, numbers = np.unique(own, return_inverse=True)
        disjoint[founders] = free + numbers
        names = {"disjoint": disjoint, "disjoint.free": free + len(founded)}
        new = replace(new, extra={**new.extra, **_kept(graph), **names})
        return replace(found, state=new, facts={**found.facts, "disjoint": disjoint.tolist()})

    def find(
        self,
        setup: Setup,
        state: ServerState,
        old: NDArray[np.int64],
        newcomers: NDArray[np.int64],
        clients: Clients,
    ) -> NDArray[np.int64]:
        """The shortcut: the cluster, or the kind of client, with the nearest mean code.

        Signatures other than codes have no mean; they extend the distances, as in PACFL.
        """
        clustering = latest(setup, state)
        if clustering.measure not in POINTS or not clustering.needs_signatures:
            return super().find(setup, state, old, newcomers, clients)
        old, codes, new, theirs = self.signatures(setup, state, old, newcomers, clients)
        found = np.full(len(newcomers), -1)
        found[np.isin(newcomers, new)] = nearest_cluster(codes, state.assignment[old], theirs)
        return found

    def fit(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64], clients: Clients
    ) -> Fit | None:
        """By the distance of the mean codes, which decides; other signatures as in PACFL."""
        clustering = latest(setup, state)
        if clustering.measure not in POINTS or not clustering.needs_signatures:
            return super().fit(setup, state, newcomers, clients)
        old = np.setdiff1d(np.flatnonzero(np.asarray(state.extra["known"]) >= 0), newcomers)
        old, codes, new, theirs = self.signatures(setup, state, old, newcomers, clients)
        if not len(old):
            return None
        fit = fit_by_means(codes, state.assignment[old], theirs, state.assignment[new])
        return fit.of_some(np.isin(newcomers, new))


def _named(
    state: ServerState, labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.int64]]]:
    """The disjoint clusters of Case I under the numbers that they had before, and what is kept of that.

    The models have numbers of their own: one for each kind of client, numbered anew with every graph.

    Args:
        state: the state before.
        labels: the new clusters ``(N,)``, -1 for clients that are not there.
    """
    disjoint, there = labels.astype(np.int64), labels >= 0
    before = np.asarray(state.extra.get("disjoint", np.full(len(labels), -1)), np.int64)
    free = int(np.asarray(state.extra.get("disjoint.free", np.zeros(1)))[0])
    disjoint[there] = match_ids(disjoint[there], before[there], next_id=free)
    return disjoint, {
        "disjoint": np.where(there, disjoint, before),
        "disjoint.free": np.array([max(free, int(disjoint.max()) + 1)]),
    }


def _relatives(setup: Setup, state: ServerState) -> sp.csr_array:
    """The relatives of each kind of client, ``(K, N)``."""
    columns = np.asarray(state.extra["relatives"], np.int64)
    offsets = np.asarray(state.extra["relatives.offsets"], np.int64)
    return sp.csr_array((np.ones(len(columns)), columns, offsets), shape=(state.models, setup.clients))


def _kept(graph: sp.csr_array) -> dict[str, NDArray[np.int64]]:
    """The relatives of each kind of client as arrays of a state."""
    graph.sort_indices()
    return {
        "relatives": graph.indices.astype(np.int64),
        "relatives.offsets": graph.indptr.astype(np.int64),
    }


def relatives(graph: sp.csr_array, there: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Clients with the same relatives are of one kind.

    Args:
        graph: symmetric ``(N, N)``, nonzero where clients are related, sorted indices.
        there: which clients count ``(N,)``.

    Returns:
        The kind of each client ``(N,)``, numbered by first occurrence, -1 where it is not there; and the
        first client of each kind.
    """
    graph.sort_indices()
    known: dict[bytes, int] = {}
    first: list[int] = []
    kinds = np.full(graph.shape[0], -1, np.int64)
    for client in np.flatnonzero(there).tolist():
        row = graph.indices[graph.indptr[client] : graph.indptr[client + 1]]
        kind = known.setdefault(np.ascontiguousarray(row).tobytes(), len(known))
        if kind == len(first):
            first.append(client)
        kinds[client] = kind
    return kinds, np.array(first, np.int64)
