"""Clients that come after the clustering: PACFL's proximity matrix extension, and FLT's shortcut.

Thesis Algorithms 8 (PME) and 9: extend the proximity matrix by the newcomers' rows only, cut it with the
same threshold beta, and keep the cluster ids of the old clients. FLT (Jamali-Rad et al. 2022, section 3.2):
the cluster with the nearest mean code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist, squareform

from rayfl.clustering.linkage import Labels, Method, build_linkage, cut_at_threshold
from rayfl.clustering.proximity import condensed_distances, condensed_index, cross_distances

Array = NDArray[np.float64]


def newcomer_rows(
    proximity: str,
    old: Sequence[NDArray[np.floating]],
    new: Sequence[NDArray[np.floating]],
    vectors: int | None = None,
) -> Array:
    """The new rows of the proximity matrix: ``(B, M + B)`` from B newcomers to M old and B new clients."""
    among = np.zeros((len(new),) * 2)
    if len(new) > 1:
        among = squareform(condensed_distances(proximity, new, vectors=vectors))
    return np.hstack([cross_distances(proximity, new, old, vectors), among])


def extend(distances: Array, new_rows: Array) -> Array:
    """Algorithm 8: the condensed distances of M + B clients; the old ones are not computed again.

    Args:
        distances: of the M old clients, condensed.
        new_rows: from the B newcomers, clients M..M+B-1, to everybody, ``(B, M + B)``; zero from each to
            itself.

    Raises:
        ValueError: if the sizes do not fit.
    """
    newcomers, clients = new_rows.shape
    old = clients - newcomers
    if len(distances) != old * (old - 1) // 2:
        raise ValueError(f"{len(distances)} distances are not those of {old} old clients")
    extended = np.empty(clients * (clients - 1) // 2)
    extended[condensed_index(clients, *np.triu_indices(old, k=1))] = distances
    for row, client in zip(new_rows, range(old, clients), strict=True):
        earlier = np.arange(client)
        extended[condensed_index(clients, earlier, np.full(client, client))] = row[:client]
    return extended


def place_newcomers(
    extended: Array,
    old_labels: NDArray[np.integer],
    threshold: float,
    linkage: Method = "average",
    next_id: int | None = None,
) -> Labels:
    """Algorithm 9: the cluster of every client after B newcomers have joined M old clients.

    The extended matrix is clustered and cut at the same beta. Old clients keep their ids whatever the new
    tree says of them. A newcomer whose part of the tree holds old clients joins the cluster of theirs
    that is nearest to it on average (the part may hold several clusters, since a newcomer can bridge
    them); newcomers in a part without old clients found a cluster.

    Args:
        extended: condensed distances of the M + B clients, the newcomers last (:func:`extend`).
        old_labels: clusters of the old clients ``(M,)``.
        threshold: beta, as used for them.
        linkage: as used for them.
        next_id: the first cluster id never used so far; default: one above the largest old id.

    Returns:
        ``(M + B,)``: ``old_labels``, then the newcomers' clusters.
    """
    parts = cut_at_threshold(build_linkage(extended, linkage), threshold)
    old, clients = len(old_labels), len(parts)
    labels = np.concatenate([old_labels.astype(np.int64), np.full(clients - old, -1, np.int64)])
    fresh = next_id if next_id is not None else int(old_labels.max(initial=-1)) + 1
    founded: dict[int, int] = {}
    for client in range(old, clients):
        part = int(parts[client])
        companions = np.flatnonzero(parts[:old] == part)
        if len(companions):
            away = extended[condensed_index(clients, companions, np.full(len(companions), client))]
            candidates = np.unique(old_labels[companions])
            means = [away[old_labels[companions] == candidate].mean() for candidate in candidates]
            labels[client] = candidates[int(np.argmin(means))]
        else:
            labels[client] = founded.setdefault(part, fresh + len(founded))
    return labels


def nearest_cluster(
    old: Sequence[NDArray[np.floating]],
    old_labels: NDArray[np.integer],
    new: Sequence[NDArray[np.floating]],
) -> Labels:
    """FLT's shortcut for newcomers: the cluster nearest by the distance to its mean latent embedding.

    Signatures are compared as the clients sent them, before any embedding, which is of all together.

    Args:
        old: points of the M old clients, ``(k_i, e)``; a client counts once, whatever its ``k_i``.
        old_labels: their clusters ``(M,)``; negative: in none.
        new: points of the B newcomers, ``(k_i, e)``.

    Returns:
        ``(B,)``: of clusters equally near the one with the smaller id.

    Raises:
        ValueError: if no old client is in a cluster.
    """
    if not len(new):
        return np.empty(0, np.int64)
    clusters = np.unique(old_labels[old_labels >= 0])
    if not len(clusters):
        raise ValueError("there is no cluster that newcomers could join")
    means = np.array([points.mean(axis=0, dtype=np.float64) for points in old])
    centres = np.array([means[old_labels == cluster].mean(axis=0) for cluster in clusters])
    own = np.array([points.mean(axis=0, dtype=np.float64) for points in new])
    nearest = cdist(own, centres).argmin(axis=1)
    return np.asarray(clusters[nearest], np.int64)
