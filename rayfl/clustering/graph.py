"""FLT's graph of related clients: distances cut at gamma, and disjoint clusters of what remains.

Jamali-Rad, Abdizadeh, Singh, "Federated learning with taskonomy for non-IID data", 2022, Algorithm 2, lines
15 to 19. Decision: clients are related if ``A_ij <= gamma``; the printed ``Sign(A_ij - gamma)`` relates those
that are far from each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import scipy
from numpy.typing import NDArray

from rayfl.clustering.linkage import (
    Array,
    Labels,
    build_linkage,
    cut_into,
    linkage_of,
    merge_members,
    suggest,
)
from rayfl.clustering.memory import check_memory
from rayfl.clustering.proximity import Distances
from rayfl.errors import RayflError
from rayfl.linalg import one_thread
from rayfl.memory import free_memory
from rayfl.units import size

Graph: TypeAlias = "scipy.sparse.csr_array"
"""``(N, N)``: 1 for related clients and on the diagonal, nothing elsewhere; float32, symmetric."""

QUANTILES = (*np.arange(0.02, 0.12, 0.02), *np.arange(0.12, 0.30, 0.03), *np.arange(0.30, 0.53, 0.05))
"""Shares of the pairs that the automatic gamma may relate: at most half. Beyond that, groups of groups would
look clearest, which mean little in a plane made by UMAP."""

SAMPLE = 1000
"""Clients, evenly spaced, from whose distances gamma is chosen."""

BYTES_PER_PAIR = 24
"""Memory per pair of distinct rows: two distances, and the rows themselves."""

STRIP = 1024
"""Rows that are compared with all others at a time."""


def threshold_graph(distances: Distances, clients: int, gamma: float) -> Graph:
    """Relate clients whose distance is at most gamma.

    Args:
        distances: condensed, ``(N (N - 1) / 2,)``.
        clients: N.
        gamma: the threshold.

    Raises:
        RayflError: if the graph would not fit in memory.
    """
    counts = np.ones(clients, np.int64)  # every client is its own neighbour
    for i, others in _later_neighbours(distances, clients, gamma):
        counts[i] += len(others)
        counts[others] += 1
    offsets = np.concatenate([[0], np.cumsum(counts)])
    entries = int(offsets[-1])
    index: type[np.signedinteger] = np.int32 if entries <= np.iinfo(np.int32).max else np.int64
    needed, available = entries * (4 + np.dtype(index).itemsize), free_memory()
    if needed > available:
        raise RayflError(
            f"clustering: the graph of {clients:,} clients with gamma={gamma:.4g} has {entries:,} entries "
            f"and needs {size(needed)}, {size(available)} are free; lower clustering.gamma, or choose "
            "another clustering.grouping"
        )
    columns, place = np.empty(entries, index), offsets[:-1].copy()
    for i, others in _later_neighbours(distances, clients, gamma):
        # Those before i have been written when it was their turn.
        columns[place[i]] = i
        columns[place[i] + 1 : place[i] + 1 + len(others)] = others
        columns[place[others]] = i
        place[others] += 1
    ones = np.ones(entries, np.float32)
    graph = scipy.sparse.csr_array((ones, columns, offsets.astype(index)), shape=(clients, clients))
    graph.has_sorted_indices = True
    return graph


def _later_neighbours(
    distances: Distances, clients: int, gamma: float
) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield each client, and those after it that are no further than ``gamma``."""
    start = 0
    for i in range(clients):
        row = distances[start : start + clients - 1 - i]
        yield i, np.flatnonzero(row <= gamma) + (i + 1)
        start += len(row)


def graph_linkage(graph: Graph) -> Array:
    """Ward's tree of the graph's rows, points in N dimensions (as in the authors' code).

    Clients with equal rows merge at height 0, so only distinct rows are linked, each with the number of
    clients that share it.

    Returns:
        SciPy's linkage matrix ``(N - 1, 4)``.

    Raises:
        RayflError: if the distances of the distinct rows do not fit in memory.
    """
    clients = graph.shape[0]
    first, inverse, sizes = _distinct_rows(graph)
    check_memory(len(first), free_memory(), BYTES_PER_PAIR)
    tree = build_linkage(_row_distances(graph[first][:, first], sizes), "ward", sizes)
    everyone = np.arange(clients)
    followers = everyone[first[inverse] != everyone]
    pairs = np.concatenate(
        [np.stack([followers, first[inverse[followers]]], axis=1), first[merge_members(tree)]]
    )
    heights = np.concatenate([np.zeros(len(followers)), tree[:, 2]])
    return linkage_of(pairs, heights, np.ones_like(everyone))


def graph_clusters(graph: Graph, n_clusters: int | None = None) -> Labels:
    """Disjoint clusters of related clients ``(N,)``.

    Args:
        graph: related clients.
        n_clusters: C; None: as many as the tree proposes (:func:`rayfl.clustering.linkage.suggest`), or one
            cluster per client if no two clients are related.
    """
    if n_clusters is None and graph.nnz == graph.shape[0]:
        return np.arange(graph.shape[0], dtype=np.int64)
    tree = graph_linkage(graph)
    return cut_into(tree, suggest(tree) if n_clusters is None else n_clusters)


def auto_gamma(distances: Distances, clients: int, n_clusters: int | None = None) -> float:
    """The gamma whose graph is closest to a union of disjoint cliques.

    Among the ``QUANTILES`` of the distances, it is the one whose graph agrees best with its own clusters.
    Agreement is the phi coefficient between "i and j are related" and "i and j are in one cluster" over all
    pairs: 1 for a union of cliques, 0 if the two are unrelated, as with one cluster. If no gamma shows any
    groups, it is the largest distance: all clients are related.

    On EMNIST's letters (five groups of five letters, 120 and 240 clients, experiments/flt) gamma is 0.26 to
    0.42 and finds the five groups; no other candidate gives a much higher adjusted Rand index.

    Args:
        distances: condensed, ``(N (N - 1) / 2,)``.
        clients: N; at most ``SAMPLE`` of them, evenly spaced, are used.
        n_clusters: C if it is given.
    """
    if not len(distances):
        return 0.0
    if clients > SAMPLE:
        ids = np.linspace(0, clients - 1, SAMPLE).round().astype(np.int64)
        i, j = np.triu_indices(SAMPLE, k=1)
        low = ids[i]
        distances = distances[clients * low - low * (low + 1) // 2 + ids[j] - low - 1]
        clients = SAMPLE
    n_clusters = None if n_clusters is None else min(n_clusters, clients)
    best, gamma = 0.0, float(distances.max())
    i, j = np.triu_indices(clients, k=1)
    for candidate in np.unique(np.quantile(distances, QUANTILES)).tolist():
        labels = graph_clusters(threshold_graph(distances, clients, candidate), n_clusters)
        phi = _phi(distances <= candidate, labels[i] == labels[j])
        if phi > best:
            best, gamma = phi, candidate
    return gamma


def _phi(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """The phi coefficient of two boolean arrays; 0 if one of them is constant."""
    p, q, both = float(a.mean()), float(b.mean()), float((a & b).mean())
    spread = p * (1 - p) * q * (1 - q)
    return (both - p * q) / spread**0.5 if spread > 0 else 0.0


def _distinct_rows(
    graph: Graph,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The first client with each distinct row ``(D,)``, the distinct row of each client ``(N,)``, and the
    number of clients with each distinct row ``(D,)``."""
    indices, offsets = graph.indices, graph.indptr
    place_of_row: dict[bytes, int] = {}
    first: list[int] = []
    inverse = np.empty(graph.shape[0], np.int64)
    for client in range(graph.shape[0]):
        row = indices[offsets[client] : offsets[client + 1]].tobytes()
        place = place_of_row.setdefault(row, len(first))
        if place == len(first):
            first.append(client)
        inverse[client] = place
    return np.array(first, np.int64), inverse, np.bincount(inverse).astype(np.int64)


def _row_distances(rows: Graph, sizes: NDArray[np.int64]) -> Array:
    """Euclidean distances between distinct rows, condensed: the roots of the numbers of unequal entries.

    Args:
        rows: ``(D, D)``: the graph is symmetric, so clients with equal rows have equal columns, and one of
            each is enough.
        sizes: how many columns each represents ``(D,)``.
    """
    dense = rows.toarray()
    weighted = dense * sizes.astype(np.float32)
    entries = weighted.sum(axis=1, dtype=np.float64)
    count = len(entries)
    distances, start = np.empty(count * (count - 1) // 2), 0
    with one_thread():
        for first in range(0, count, STRIP):
            common = weighted[first : first + STRIP] @ dense.T  # whole numbers below 2^24: exact
            for offset, line in enumerate(common):
                i = first + offset
                unequal = entries[i] + entries[i + 1 :] - 2.0 * line[i + 1 :]
                distances[start : start + len(unequal)] = np.sqrt(unequal)
                start += len(unequal)
    return distances


def kinds_of_clients(
    graph: Graph, in_graph: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the kinds of clients: clients with the same relatives are of one kind.

    Args:
        graph: symmetric ``(N, N)``, nonzero where clients are related; its indices are sorted in place.
        in_graph: clients that are in the graph ``(N,)``.

    Returns:
        The kind of each client ``(N,)``, numbered by first occurrence, -1 for clients not in the graph; and
        the first client of each kind ``(K,)``.
    """
    graph.sort_indices()
    kind_of_row: dict[bytes, int] = {}
    first: list[int] = []
    kinds = np.full(graph.shape[0], -1, np.int64)
    for client in np.flatnonzero(in_graph).tolist():
        row = graph.indices[graph.indptr[client] : graph.indptr[client + 1]]
        kind = kind_of_row.setdefault(np.ascontiguousarray(row).tobytes(), len(kind_of_row))
        if kind == len(first):
            first.append(client)
        kinds[client] = kind
    return kinds, np.array(first, np.int64)


def with_newcomers(
    relatives: Graph, same_kind_as: NDArray[np.int64], founders: NDArray[np.int64], kinds: NDArray[np.int64]
) -> Graph:
    """The relatives of each kind of client after newcomers have joined kinds or founded new ones.

    Args:
        relatives: relatives of each kind before ``(K, N)``.
        same_kind_as: for each client the one whose column of ``relatives`` it gets: itself, or the client
            whose kind it joins ``(N,)``.
        founders: newcomers of new kinds ``(n,)``.
        kinds: the kinds of the founders ``(n,)``: new numbers, or those of kinds whose clients have all left.
    """
    rows, members = relatives.tocsc()[:, same_kind_as].tocoo().coords
    stays = ~np.isin(members, founders) & ~np.isin(rows, kinds)
    entries = np.concatenate([rows[stays], kinds]), np.concatenate([members[stays], founders])
    shape = max(relatives.shape[0], int(kinds.max(initial=-1)) + 1), len(same_kind_as)
    graph = scipy.sparse.csr_array((np.ones(len(entries[0]), np.float32), entries), shape=shape)
    graph.sort_indices()
    return graph
