"""FLT: clients whose data have similar codes are related, and each client averages with its relatives.

Jamali-Rad, Abdizadeh, Singh, "Federated learning with taskonomy for non-IID data", IEEE TNNLS 2022,
Algorithms 2 (FCR) and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.contract import Clients, Mixing, Plan, Regrouping, Setup, per_client
from rayfl.algorithms.one_shot import OneShotClustered, OneShotState
from rayfl.algorithms.one_shot_newcomers import of_all
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.graph import kinds_of_clients, with_newcomers
from rayfl.clustering.newcomers import Fit, fit_by_means, nearest_cluster
from rayfl.clustering.numbering import completed, match_ids, most_used
from rayfl.clustering.proximity import POINTS
from rayfl.local import weights_of
from rayfl.training.reports import Reports


@dataclass(frozen=True)
class FLTState(OneShotState):
    """Case I: the clients' relatives, and the clusters that they form.

    A kind of client is a set of clients with the same relatives.

    Attributes:
        relatives: which clients are relatives of each kind of client ``(K, N)``; None before the first graph,
            and in Case II.
        disjoint: the disjoint cluster of each client ``(N,)``; -1 for none.
        free: the first number that no disjoint cluster has had.
    """

    relatives: scipy.sparse.csr_array | None = None
    disjoint: NDArray[np.int64] = per_client(-1)
    free: int = 0

    @property
    def clusters(self) -> NDArray[np.int64]:
        """The disjoint clusters ``(N,)``; in Case I models are shared by kinds of clients instead."""
        return self.assignment if self.relatives is None else self.disjoint


class FLT(OneShotClustered[FLTState]):
    """Federated learning with taskonomy: clients train with their relatives on a graph.

    Each client encodes its samples with an encoder that the server sends, and reveals k centroids of the
    codes. The server embeds all centroids in the plane and relates clients whose centroids are near. Clients
    then average with their relatives, or with all of their disjoint cluster.

    1. FCR, once: each client encodes its samples (``clustering.features``: pretrained elsewhere, fine-tuned
       by the client for J epochs) and sends k centroids (``clustering.signature``).
    2. The server embeds all centroids by UMAP in u = 2 dimensions (``clustering.embedding``). The distance of
       two clients is that of their nearest centroids. Clients are related up to the distance gamma.
    3. Case I (``train_on: graph``): client j's next model is ``sum_i A_ij n_i w_i / sum_i A_ij n_i`` over the
       sampled clients i. A client none of whose relatives was sampled keeps its model. Case II
       (``clusters``): FedAvg in each of the clusters that Ward's linkage finds in the graph.
    4. Every tau rounds, or when more than lambda clients are new or have new data, FCR runs again (in the
       paper with fine-tuned encoders: ``fine_tune_again``). Until then a newcomer belongs to the cluster
       whose mean code is nearest to its own (Case I: to the clients with the same relatives).

    Rows of A that are equal are one model: clients with the same relatives start alike and stay alike. So a
    graph of disjoint groups costs no more than its groups, and no client-by-client matrix of models is
    formed. In both cases ARI compares the disjoint clusters with the planted groups. If all clients are
    related (a large gamma) both cases are FedAvg, bit for bit.

    **Code differs** (github hjraad/FLT, ``src/utils/cluster.py``): the distance of two clients is the least
    sum over all ways to pair their centroids, divided by k (``clustering.proximity: matching``), and clients
    are related below 1.

    Symbols:
        e, length of a code: ``clustering.features.latent``
        k: ``clustering.signature.k``
        u: ``clustering.embedding.dim``
        gamma: ``clustering.gamma``
        J: ``clustering.features.fine_tune``
        tau: ``clustering.every``
        lambda: ``clustering.max_flags``
        C, clusters: ``clustering.n_clusters``

    Cost:
        The encoder down and k codes up for each client, once. Then as FedAvg. In Case I the servers keep a
        model for each set of relatives, at most one for each client. No client state.

    Fails when:
        Clients have few samples (ARI 0.69 with 12 letters per client, 0.94 with 50); gamma 1 joins clusters,
        ``gamma: auto`` finds the groups more often; k exceeds the number of a client's classes (CIFAR-10, two
        classes: ARI 0.70 with k = 5, 0.97 with k = 2); equal images under different labels look alike.

    Shown by:
        - experiments/flt/samples.yaml: samples per client, five seeds
        - experiments/clustered/README.md: samples per client, gamma, k, swapped labels
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
        "graph",
        description="graph: each client averages over its relatives (Case I); clusters: FedAvg in "
        "disjoint clusters (Case II)",
    )

    def begin(self, setup: Setup) -> FLTState:
        """No client has relatives yet."""
        return FLTState(0, 1, np.zeros(setup.clients, np.int64))

    def regroup(self, setup: Setup, state: FLTState, clusters: Clusters) -> Regrouping[FLTState]:
        """Case II: one model per cluster; Case I: one model per set of relatives."""
        if self.train_on == "clusters" or clusters.graph is None:
            return super().regroup(setup, state, clusters)
        clustered, disjoint = clusters.labels >= 0, clusters.labels.astype(np.int64)
        kinds, first = kinds_of_clients(clusters.graph, clustered)
        # Kinds get new numbers with every graph; the disjoint clusters keep theirs.
        disjoint[clustered] = match_ids(disjoint[clustered], state.disjoint[clustered], next_id=state.free)
        new = replace(
            self.settled(setup, state, clusters),
            models=len(first),
            assignment=completed(kinds, np.zeros_like(kinds), setup.sizes > 0),
            relatives=clusters.graph[first],
            disjoint=np.where(clustered, disjoint, state.disjoint),
            free=max(state.free, int(disjoint.max()) + 1),
        )
        # A kind of client continues from the model that most of its clients used.
        parents = most_used(kinds[clustered], state.assignment[clustered], len(first))
        return Regrouping(new, parents, clusters, {"disjoint": disjoint.tolist()})

    def grow(self, setup: Setup, state: FLTState) -> FLTState:
        """Newcomers have no relatives yet."""
        state = super().grow(setup, state)
        if state.relatives is None:
            return state
        csr_parts = state.relatives.data, state.relatives.indices, state.relatives.indptr
        return replace(
            state, relatives=scipy.sparse.csr_array(csr_parts, shape=(state.models, setup.clients))
        )

    def mix(self, setup: Setup, state: FLTState, plan: Plan, reports: Reports) -> Mixing:
        """Case I: row k of A holds n_i for the sampled relatives i of clients of kind k."""
        if state.relatives is None:
            return super().mix(setup, state, plan, reports)
        weights, _ = weights_of(setup.local, setup.sizes[plan.cohort], plan.group, setup.training)
        sampled = state.relatives.tocsc()[:, plan.cohort]
        sampled.data = np.repeat(weights, np.diff(sampled.indptr))
        return Mixing(sampled.tocsr())

    def join(
        self, setup: Setup, state: FLTState, newcomers: NDArray[np.int64], clients: Clients
    ) -> FLTState | Regrouping[FLTState]:
        """Case I: newcomers get the relatives and the disjoint cluster of their kind of client; newcomers
        of a new kind become each other's relatives."""
        joined = super().join(setup, state, newcomers, clients)
        if isinstance(joined, FLTState) or joined.clusters is not None or state.relatives is None:
            return joined
        next_state, (old, strangers) = joined.state, self.candidates(state, newcomers)
        kinds, same_kind_as = next_state.assignment[strangers], np.arange(setup.clients)
        founders = ~np.isin(kinds, state.assignment[old])
        for newcomer, kind in zip(strangers[~founders].tolist(), kinds[~founders].tolist(), strict=True):
            same_kind_as[newcomer] = old[state.assignment[old] == kind][0]
        disjoint = next_state.disjoint[same_kind_as]
        new_kinds, numbers = np.unique(kinds[founders], return_inverse=True)
        disjoint[strangers[founders]] = next_state.free + numbers
        graph = with_newcomers(state.relatives, same_kind_as, strangers[founders], kinds[founders])
        next_state = replace(
            next_state, relatives=graph, disjoint=disjoint, free=next_state.free + len(new_kinds)
        )
        return replace(joined, state=next_state, facts={**joined.facts, "disjoint": disjoint.tolist()})

    def find(
        self,
        setup: Setup,
        state: FLTState,
        old: NDArray[np.int64],
        newcomers: NDArray[np.int64],
        clients: Clients,
    ) -> NDArray[np.int64]:
        """The shortcut: the cluster, or the kind of client, with the nearest mean code.

        Signatures other than codes have no mean; they extend the distances, as in PACFL.
        """
        if not _signatures_have_means(setup):
            return super().find(setup, state, old, newcomers, clients)
        clustered, arrived = self.signatures(setup, state, old, newcomers, clients)
        labels = state.assignment[clustered.clients]
        return of_all(
            newcomers, arrived.clients, nearest_cluster(clustered.signatures, labels, arrived.signatures)
        )

    def fit(
        self, setup: Setup, state: FLTState, newcomers: NDArray[np.int64], clients: Clients
    ) -> Fit | None:
        """Compare distances to mean codes, as :meth:`find` does; other signatures as in PACFL."""
        if not _signatures_have_means(setup):
            return super().fit(setup, state, newcomers, clients)
        old = np.setdiff1d(np.flatnonzero(state.known >= 0), newcomers)
        clustered, arrived = self.signatures(setup, state, old, newcomers, clients)
        if not len(clustered.clients):
            return None
        labels = [state.assignment[signed.clients] for signed in (clustered, arrived)]
        fit = fit_by_means(clustered.signatures, labels[0], arrived.signatures, labels[1])
        return fit.of_some(np.isin(newcomers, arrived.clients))


def _signatures_have_means(setup: Setup) -> bool:
    """Whether signatures are points, such as codes, which have a mean."""
    return setup.clustering.measure in POINTS and setup.clustering.needs_signatures
