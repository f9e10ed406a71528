"""From signatures to clusters: the work of the remote clustering tasks.

Up to ``exact_up_to`` clients, all pairs are compared and linked; beyond that, only representatives are
(:mod:`rayfl.clustering.two_stage`). :func:`cluster_signatures` does everything in this process. A run with
many workers computes the tiles, or the nearest representatives, on the workers, and ends with
:func:`from_distances` or :func:`from_representatives` on one of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import scipy
from numpy.typing import NDArray

from rayfl.clustering import grouping, two_stage
from rayfl.clustering.config import Clustering
from rayfl.clustering.graph import auto_gamma, graph_clusters, threshold_graph
from rayfl.clustering.linkage import (
    Curve,
    Labels,
    build_linkage,
    clients_of,
    clusters_over_threshold,
    cut_at_threshold,
    cut_into,
    suggest,
    threshold_for,
)
from rayfl.clustering.memory import RELATION_BYTES_PER_PAIR, bytes_per_pair, check_memory
from rayfl.clustering.plane import LEAST, Excerpt, MapMethod, plane
from rayfl.clustering.proximity import (
    BLOCK,
    RELEVANCE,
    Block,
    Distances,
    condensed_blocks,
    pack,
    relevance_distances,
    take,
)
from rayfl.clustering.quality import adjusted_rand_index
from rayfl.errors import ConfigError, DataError, type_of
from rayfl.memory import free_memory
from rayfl.plugins import is_own
from rayfl.random import generator, key
from rayfl.units import counted

Array = NDArray[np.float64]

CURVE = 1000
"""Steps of the curve of clusters over beta that are written: all up to this many clusters, and this many
beyond."""

SUBSET = 2000
"""Clients on which the agreement of two-stage with exact clustering is estimated."""


@dataclass(frozen=True)
class Clusters:
    """The outcome of a clustering.

    Attributes:
        labels: cluster of each client ``(N,)``, numbered 0, 1, ... by smallest client id.
        n_clusters: their number.
        suggested: whether the tree itself proposed the number, because neither a threshold nor a number was
            given.
        threshold: the beta of the cut: as given, or one that gives the same number of clusters (None if ties
            leave no such beta); None for groupings without a tree.
        distances: condensed ``(N (N - 1) / 2,)``, in double precision; None for more than ``BLOCK`` clients,
            with representatives, and for groupings without distances.
        linkage: SciPy's linkage matrix ``(N - 1, 4)``; None for groupings without a tree, and after
            :meth:`without_distances`.
        curve: the number of clusters over beta; None for groupings without a tree.
        ari: adjusted Rand index against the true groups, None if these are not known.
        seconds: duration.
        representatives: number of representatives; None if all clients were linked.
        radius: maximum distance of a client to its representative; None without representatives.
        agreement: adjusted Rand index against exact clustering, estimated on a random subset; None without
            representatives.
        graph: related clients, sparse ``(N, N)``: 1 for related clients and on the diagonal; None for
            groupings other than ``graph``.
        gamma: the threshold of the graph, as given or chosen; None without a graph.
        places: a map of the clients ``(N, 2)`` that replaces the distances; NaN for clients that were not
            clustered.
        placed_by: how that map was made; "" without one.
        excerpt: some of the distances, or of the graph's relations; kept where ``distances`` are not.
    """

    labels: Labels
    n_clusters: int
    suggested: bool = False
    threshold: float | None = None
    distances: Array | None = None
    linkage: Array | None = None
    curve: Curve | None = None
    ari: float | None = None
    seconds: float = 0.0
    representatives: int | None = None
    radius: float | None = None
    agreement: float | None = None
    graph: scipy.sparse.csr_array | None = None
    gamma: float | None = None
    places: Array | None = None
    placed_by: MapMethod | Literal[""] = ""
    excerpt: Excerpt | None = None

    def facts(self) -> dict[str, Any]:
        """How the clusters were found, for ``clusters.json``: the cut, and the number of clusters over beta.

        For a graph: gamma, and the mean number of relatives of a client.

        The curve is complete up to ``CURVE`` clusters; of its steps to more, at most ``CURVE`` are kept.
        """
        facts: dict[str, Any] = {"threshold": self.threshold, "suggested": self.suggested, "curve": None}
        if self.curve is not None:
            thresholds, counts = self.curve.thresholds, self.curve.counts
            n_beyond = int((counts > CURVE).sum())
            steps = np.r_[: n_beyond : max(1, -(-n_beyond // CURVE)), n_beyond : len(counts)]
            facts["curve"] = {"threshold": thresholds[steps].tolist(), "n_clusters": counts[steps].tolist()}
        if self.graph is not None:
            clients = int((self.labels >= 0).sum())
            relatives = (self.graph.nnz - clients) / clients
            facts["graph"] = {"gamma": self.gamma, "relatives": relatives}
        if self.representatives is not None:
            facts["two_stage"] = {
                "representatives": self.representatives,
                "radius": self.radius,
                "agreement": self.agreement,
            }
        if self.places is not None:
            axes = [[None if v != v else v for v in axis] for axis in self.places.T.tolist()]
            facts["map"] = {**dict(zip("xy", axes, strict=True)), "by": self.placed_by}
        if self.excerpt is not None:
            facts["excerpt"] = self.excerpt.facts()
        return facts

    def without_distances(self, method: MapMethod = "mds", seed: int = 0) -> Clusters:
        """A copy without distances and tree; a map of the clients and an excerpt replace them.

        Args:
            method: how the map is made; with fewer than ``LEAST`` clients always ``mds``.
            seed: of the run.
        """
        from scipy.spatial.distance import squareform

        if self.distances is None:
            return replace(self, linkage=None, excerpt=self.excerpt or self._related_excerpt())
        if len(self.labels) < LEAST:
            method = "mds"
        places = plane(squareform(self.distances), method, seed)
        excerpt = Excerpt.of(self.distances, self.order())
        return replace(self, distances=None, linkage=None, places=places, placed_by=method, excerpt=excerpt)

    def order(self) -> NDArray[np.integer]:
        """All N clients in the order of the tree's leaves, or by cluster if there is no tree."""
        from scipy.cluster.hierarchy import leaves_list

        if self.linkage is not None and 0 < len(self.linkage) == len(self.labels) - 1:
            return leaves_list(self.linkage)
        return np.argsort(self.labels, kind="stable")

    def _related_excerpt(self) -> Excerpt | None:
        if self.graph is None:
            return None
        clients = Excerpt.choose(self.order())
        apart: Array = (self.graph[clients][:, clients].toarray() == 0).astype(np.float64)
        return Excerpt(clients, apart[np.triu_indices(len(clients), 1)], related=True)

    def among(self, ids: NDArray[np.int64], clients: int) -> Clusters:
        """Clusters of the clients ``ids`` ``(n,)`` as clusters of all N: label -1 and no relatives for the
        others.
        """
        if len(ids) == clients:
            return self
        labels, graph, places = np.full(clients, -1, np.int64), self.graph, self.places
        excerpt = self.excerpt
        labels[ids] = self.labels
        if places is not None:
            places = np.full((clients, 2), np.nan)
            places[ids] = self.places
        if graph is not None:
            entries = graph.tocoo()
            positions = ids[entries.coords[0]], ids[entries.coords[1]]
            graph = scipy.sparse.csr_array((entries.data, positions), shape=(clients, clients))
        if excerpt is not None:
            excerpt = replace(excerpt, clients=ids[excerpt.clients])
        return replace(self, labels=labels, graph=graph, places=places, excerpt=excerpt)

    def only(self, ids: NDArray[np.int64]) -> Clusters:
        """The reverse of :meth:`among`: clusters of all N as those of the clients ``ids`` ``(n,)`` alone."""
        if len(ids) == len(self.labels):
            return self
        graph = None if self.graph is None else scipy.sparse.csr_array(self.graph[ids][:, ids])
        places = None if self.places is None else self.places[ids]
        excerpt = self.excerpt
        if excerpt is not None:
            excerpt = replace(excerpt, clients=np.searchsorted(ids, excerpt.clients))
        return replace(self, labels=self.labels[ids], graph=graph, places=places, excerpt=excerpt)


def cluster_signatures(
    clustering: Clustering,
    signatures: Sequence[NDArray[np.floating]],
    relations: Sequence[NDArray[np.floating]] | None = None,
    groups: NDArray[np.integer] | None = None,
    seed: int = 0,
    clients: int | None = None,
    ids: NDArray[Any] | None = None,
) -> Clusters:
    """Group N clients.

    Args:
        clustering: the settings.
        signatures: one per client; may be empty where ``clustering.needs_signatures`` is false.
        relations: the rows of the exchange step, for the proximity ``relevance``.
        groups: true groups ``(N,)`` if known.
        seed: the run's seed, for random groupings.
        clients: N; needed only if there are neither signatures nor groups.
        ids: the clients' numbers or ids ``(N,)``, for messages; None: they are numbered from 0.

    Raises:
        RayflError: if the distances do not fit in memory.
        ConfigError: if the settings cannot be met with these clients.
        DataError: if signatures or relations do not fit together.
    """
    start = time.perf_counter()
    if clients is None:
        clients = len(signatures) or (len(groups) if groups is not None else 0)
    if clients < 1:
        raise DataError("there are no clients to cluster")
    refuse_number(clustering, clients)
    if not clustering.needs_signatures:
        labels = _labels_without_distances(clustering, clients, groups, seed)
        return Clusters(
            labels=labels,
            n_clusters=int(labels.max()) + 1,
            ari=None if groups is None else adjusted_rand_index(labels, groups),
            seconds=time.perf_counter() - start,
        )
    refuse(clustering, clients, relations is not None)
    measure, precise = clustering.measure, clients <= BLOCK
    if measure == RELEVANCE:
        if relations is None or len(relations) != clients:
            count = 0 if relations is None else len(relations)
            raise DataError(f"relevance needs the relations of all {clients} clients, not of {count}")
        distances = relevance_distances(relations, precise)
        return from_distances(clustering, distances, groups, start)
    if len(signatures) != clients:
        raise DataError(f"got {len(signatures)} signatures of {clients} clients; expected one of each")
    ids = np.arange(clients) if ids is None else ids
    signatures = embed(clustering, signatures, seed, ids)
    vectors = clustering.signature.vectors
    cuts = [slice(first, first + BLOCK) for first in range(0, clients, BLOCK)]
    blocks = [pack(measure, signatures[cut], ids[cut], vectors) for cut in cuts]
    if clients <= clustering.exact_up_to:
        return from_distances(clustering, condensed_blocks(measure, blocks, precise), groups, start)
    sampled = two_stage.sample(clients, clustering.exact_up_to, seed)
    representatives = take(blocks, sampled)
    answers = [two_stage.nearest(measure, block, representatives) for block in blocks]
    return from_representatives(clustering, blocks, sampled, answers, groups, seed, start)


def refuse_number(clustering: Clustering, clients: int) -> None:
    """Refuse more clusters than clients.

    Raises:
        ConfigError
    """
    n_clusters = clustering.n_clusters
    if n_clusters is not None and n_clusters > clients:
        what = f"{n_clusters} clusters of {counted(clients, 'client')}"
        raise ConfigError("clustering.n_clusters", what, f"use at most {clients}")


def refuse_groups(clustering: Clustering) -> None:
    """Refuse a grouping that copies the true groups, for clients that have none.

    Raises:
        ConfigError
    """
    if clustering.needs_groups:
        remedy = "use a partition with groups" + (
            ", or set clustering.n_clusters" if clustering.grouping == "random" else ""
        )
        raise ConfigError("clustering.grouping", f"{clustering.grouping} needs the true groups", remedy)


def refuse(clustering: Clustering, clients: int, exchanged: bool = False) -> None:
    """Refuse a clustering that cannot succeed, before any client computes a signature.

    Args:
        clustering: the settings.
        clients: N.
        exchanged: whether the relations of an exchange exist already, so that they need no more memory.

    Raises:
        ConfigError: if signatures with an exchange, or a graph, are to be clustered by representatives.
        RayflError: if the distances do not fit in memory.
    """
    if not clustering.needs_signatures:
        return
    exchange = clustering.signature.needs_exchange
    if clients > clustering.exact_up_to:
        if clustering.grouping == "graph":
            raise ConfigError(
                "clustering.exact_up_to",
                f"a graph needs all pairs of the {clients:,} clients: representatives cannot replace them",
                f"use at least {clients}, or clustering.grouping=hierarchical",
            )
        if exchange:
            raise ConfigError(
                "clustering.exact_up_to",
                f"{clients:,} clients, and {clustering.signature.name} compares all pairs: "
                "representatives cannot replace them",
                f"use at least {clients}, or a signature without an exchange, such as subspace",
            )
        return
    per_pair = bytes_per_pair(clients) + (RELATION_BYTES_PER_PAIR if exchange and not exchanged else 0)
    check_memory(clients, free_memory(), per_pair)


def embed(
    clustering: Clustering,
    signatures: Sequence[NDArray[np.floating]],
    seed: int,
    ids: NDArray[Any] | None = None,
) -> Sequence[NDArray[np.floating]]:
    """Map the signatures of n clients, each ``(k_i, d)``, to the space in which they are compared, each
    ``(k_i, u)``.

    Args:
        clustering: the settings.
        signatures: one per client.
        seed: the run's seed.
        ids: the clients' numbers or ids ``(n,)``, for messages; None: they are numbered from 0.
    """
    part = clustering.embedding
    embedded: Any = part.embed(signatures, key(seed, "embedding"))
    if is_own(part):
        return cast("Sequence[NDArray[np.floating]]", embedded)
    where = f"{part.name}.embed"
    if not isinstance(embedded, Sequence) and not isinstance(embedded, np.ndarray):
        raise ConfigError(where, f"returned {type_of(embedded)}", "expected a list of arrays (k_i, u)")
    if len(embedded) != len(signatures):
        what = f"returned {len(embedded)} signatures of {len(signatures)} clients"
        raise ConfigError(where, what, "expected one of each")
    named = range(len(embedded)) if ids is None else ids.tolist()
    for client, each in zip(named, embedded, strict=True):
        if not isinstance(each, np.ndarray) or each.dtype.kind not in "fiub" or not np.isfinite(each).all():
            what = f"returned {type_of(each)} for the signature of client {client}"
            raise ConfigError(where, what, "expected finite numbers (k_i, u)")
    return cast("Sequence[NDArray[np.floating]]", embedded)


def from_distances(
    clustering: Clustering,
    distances: Distances,
    groups: NDArray[np.integer] | None = None,
    start: float | None = None,
) -> Clusters:
    """Link and cut condensed distances ``(N (N - 1) / 2,)``, or their graph.

    Args:
        clustering: the settings.
        distances: overwritten if in single precision.
        groups: true groups ``(N,)`` if known.
        start: when the work began (``time.perf_counter``).
    """
    start = time.perf_counter() if start is None else start
    if clustering.grouping == "graph":
        return _from_graph(clustering, distances, groups, start)
    linkage = build_linkage(distances, clustering.linkage)
    clusters = _clusters_of_tree(clustering, linkage, groups)
    kept_distances = distances.astype(np.float64, copy=False) if distances.dtype == np.float64 else None
    return replace(clusters, distances=kept_distances, seconds=time.perf_counter() - start)


def _from_graph(
    clustering: Clustering, distances: Distances, groups: NDArray[np.integer] | None, start: float
) -> Clusters:
    """Relate near clients, and find disjoint clusters of related ones (FLT)."""
    clients = clients_of(distances)
    n_clusters, gamma = clustering.n_clusters, clustering.gamma
    if gamma == "auto":
        gamma = auto_gamma(distances, clients, n_clusters)
    graph = threshold_graph(distances, clients, gamma)
    labels = graph_clusters(graph, n_clusters)
    return Clusters(
        labels=labels,
        n_clusters=int(labels.max()) + 1,
        suggested=n_clusters is None,
        distances=distances.astype(np.float64, copy=False) if distances.dtype == np.float64 else None,
        ari=None if groups is None else adjusted_rand_index(labels, groups),
        seconds=time.perf_counter() - start,
        graph=graph,
        gamma=gamma,
    )


def from_representatives(
    clustering: Clustering,
    blocks: Sequence[Block],
    sampled: NDArray[np.int64],
    answers: Sequence[tuple[NDArray[np.int64], Distances]],
    groups: NDArray[np.integer] | None = None,
    seed: int = 0,
    start: float | None = None,
) -> Clusters:
    """Link representatives and cut; arguments as for :func:`two_stage.link` and :func:`from_distances`.

    ``sampled`` are the representatives' ids ``(R,)``; ``answers`` have for each block the nearest
    representative of each client and the distance to it, ``(B,)`` each; ``groups`` are planted groups
    ``(N,)``. The agreement with exact clustering is estimated on ``SUBSET`` clients.
    """
    start = time.perf_counter() if start is None else start
    measure, method = clustering.measure, clustering.linkage
    represented = two_stage.link(measure, method, blocks, sampled, answers, clustering.threshold)
    clusters = _clusters_of_tree(clustering, represented.linkage, groups)
    clients = len(clusters.labels)
    draw = generator(seed, "agreement").choice(clients, min(SUBSET, clients), replace=False)
    subset = np.sort(draw)
    exact = build_linkage(condensed_blocks(measure, [take(blocks, subset)], precise=True), method)
    labels = clusters.labels[subset]
    if clustering.threshold is not None:
        expected = cut_at_threshold(exact, clustering.threshold)
    else:
        expected = cut_into(exact, len(np.unique(labels)))
    return replace(
        clusters,
        representatives=represented.representatives,
        radius=represented.radius,
        agreement=adjusted_rand_index(labels, expected),
        seconds=time.perf_counter() - start,
    )


def _clusters_of_tree(clustering: Clustering, linkage: Array, groups: NDArray[np.integer] | None) -> Clusters:
    """Cut the tree at the threshold, into the given number, or as the tree proposes."""
    n_clusters, threshold = clustering.n_clusters, clustering.threshold
    if threshold is not None:
        labels = cut_at_threshold(linkage, threshold)
    else:
        count = n_clusters if n_clusters is not None else suggest(linkage)
        threshold = threshold_for(linkage, count) if len(linkage) else None
        labels = cut_into(linkage, count)
    return Clusters(
        labels=labels,
        n_clusters=int(labels.max()) + 1,
        suggested=clustering.threshold is None and n_clusters is None,
        threshold=threshold,
        linkage=linkage,
        curve=clusters_over_threshold(linkage),
        ari=None if groups is None else adjusted_rand_index(labels, groups),
    )


def _labels_without_distances(
    clustering: Clustering, clients: int, groups: NDArray[np.integer] | None, seed: int
) -> Labels:
    if clustering.grouping == "single":
        return grouping.single(clients)
    if clustering.grouping == "singletons":
        return grouping.singletons(clients)
    if clustering.grouping == "random" and clustering.n_clusters is not None:
        return grouping.random_clusters(clients, clustering.n_clusters, seed)
    if groups is None:
        refuse_groups(clustering)
    assert groups is not None
    if clustering.grouping == "random":
        return grouping.shuffle_members(groups, seed)
    return grouping.planted(groups)
