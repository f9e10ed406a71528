"""Clients that come after the clustering: PACFL's proximity matrix extension, and FLT's shortcut.

Thesis Algorithms 8 (PME) and 9: extend the proximity matrix by the newcomers' rows only, cut it with the
same threshold beta, and keep the cluster ids of the old clients. FLT (Jamali-Rad et al. 2022, section 3.2):
the cluster with the nearest mean code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.linkage import Labels, Method, build_linkage, cut_at_threshold
from rayfl.clustering.proximity import condensed_distances, condensed_index, cross_distances

Array = NDArray[np.float64]

FAR = 3.0
"""A newcomer is far from its cluster if its distance exceeds this many times the largest of a member."""

FEW = 5
"""For clusters with fewer members, the largest distance of a member of any cluster is used instead."""


@dataclass(frozen=True)
class Fit:
    """How near B newcomers are to the clusters that they were assigned.

    Attributes:
        measure: name of the distance.
        distance: of each newcomer to its own cluster ``(B,)``; NaN in a new cluster.
        next_distance: to the nearest other cluster ``(B,)``; NaN if there is none.
        usual: the largest distance of a member of its cluster to the cluster; if the cluster has fewer than
            ``FEW`` members, the largest of any cluster ``(B,)``; NaN in a new cluster.
    """

    measure: str
    distance: Array
    next_distance: Array
    usual: Array

    @classmethod
    def of(
        cls,
        measure: str,
        distances: Array,
        members: Sequence[NDArray[np.floating]],
        clusters: NDArray[np.integer],
        labels: Labels,
    ) -> Fit:
        """The fit of newcomers, from their distances to all clusters.

        Args:
            measure: name of the distance.
            distances: from each newcomer to each cluster ``(B, C)``.
            members: for each cluster the known distances of its members to it ``(m_c,)``.
            clusters: ids of the clusters ``(C,)``.
            labels: the cluster of each newcomer ``(B,)``.
        """
        largest = np.array([values.max() if len(values) else np.nan for values in members])
        is_small = np.array([len(values) < FEW for values in members], np.bool_)
        usual = np.where(is_small, np.fmax.reduce(largest), largest)
        is_own = labels[:, None] == clusters
        next_distances = np.where(is_own, np.inf, distances).min(axis=1, initial=np.inf)
        assigned = is_own.any(axis=1)
        column = is_own.argmax(axis=1)
        return cls(
            measure,
            np.where(assigned, distances[np.arange(len(labels)), column], np.nan),
            np.where(np.isfinite(next_distances), next_distances, np.nan),
            np.where(assigned, usual[column], np.nan),
        )

    def of_some(self, newcomers: NDArray[np.bool_]) -> Fit:
        """Extend the fit to all B' newcomers: NaN for those that are False in ``newcomers`` ``(B',)``."""

        def filled(values: Array) -> Array:
            extended = np.full(len(newcomers), np.nan)
            extended[newcomers] = values
            return extended

        return Fit(self.measure, filled(self.distance), filled(self.next_distance), filled(self.usual))

    @property
    def far(self) -> NDArray[np.bool_]:
        """Whether the distance is far outside what is usual among the members ``(B,)``."""
        far: NDArray[np.bool_] = self.distance > FAR * np.maximum(self.usual, 1e-6)
        return far


def fit_by_distances(measure: str, distances: Array, labels: Labels, newcomers: NDArray[np.bool_]) -> Fit:
    """The fit of newcomers whose distance to a cluster is their mean distance to its members.

    Args:
        measure: name of the distance.
        distances: of all n clients, condensed ``(n (n - 1) / 2,)``.
        labels: their clusters ``(n,)``.
        newcomers: which of them are newcomers ``(n,)``; the others are the members.
    """
    from scipy.spatial.distance import squareform

    square, old_labels = squareform(distances), labels[~newcomers]
    clusters, size = np.unique(old_labels, return_counts=True)
    membership = (old_labels[:, None] == clusters).astype(np.float64)
    sums = square[:, ~newcomers] @ membership  # to all members of each cluster
    member_distances = [
        sums[~newcomers][old_labels == cluster, c] / (size[c] - 1) if size[c] > 1 else np.empty(0)
        for c, cluster in enumerate(clusters)
    ]
    return Fit.of(measure, sums[newcomers] / size, member_distances, clusters, labels[newcomers])


def fit_by_means(
    old: Sequence[NDArray[np.floating]],
    old_labels: NDArray[np.integer],
    new: Sequence[NDArray[np.floating]],
    labels: Labels,
) -> Fit:
    """The fit of newcomers by the distance of their mean code to that of a cluster.

    Args:
        old, old_labels, new: as for :func:`nearest_cluster`.
        labels: the clusters of the newcomers ``(B,)``.
    """
    from scipy.spatial.distance import cdist

    clusters, size = np.unique(old_labels, return_counts=True)
    means, centres = _means(old), _centres(_means(old), old_labels, clusters)
    distances = np.linalg.norm(means - centres[np.searchsorted(clusters, old_labels)], axis=1)
    member_distances = [
        distances[old_labels == c] if count > 1 else np.empty(0)
        for c, count in zip(clusters, size, strict=True)
    ]
    return Fit.of("distance of mean codes", cdist(_means(new), centres), member_distances, clusters, labels)


def _means(signatures: Sequence[NDArray[np.floating]]) -> Array:
    """The mean point of each signature ``(n, e)``."""
    return np.array([points.mean(axis=0, dtype=np.float64) for points in signatures])


def _centres(means: Array, labels: NDArray[np.integer], clusters: NDArray[np.integer]) -> Array:
    """The mean of the means in each cluster ``(C, e)``."""
    return np.array([means[labels == cluster].mean(axis=0) for cluster in clusters])


def newcomer_rows(
    proximity: str,
    old: Sequence[NDArray[np.floating]],
    new: Sequence[NDArray[np.floating]],
    vectors: int | None = None,
) -> Array:
    """The new rows of the proximity matrix: ``(B, M + B)`` from B newcomers to M old and B new clients."""
    from scipy.spatial.distance import squareform

    among_new = np.zeros((len(new),) * 2)
    if len(new) > 1:
        among_new = squareform(condensed_distances(proximity, new, vectors=vectors))
    return np.hstack([cross_distances(proximity, new, old, vectors), among_new])


def extend(distances: Array, new_rows: Array) -> Array:
    """Algorithm 8: the condensed distances of M + B clients; the old ones are not computed again.

    Args:
        distances: of the M old clients, condensed.
        new_rows: from the B newcomers, clients M..M+B-1, to all clients, ``(B, M + B)``; zero diagonal.

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


def cluster_newcomers(
    extended: Array,
    old_labels: NDArray[np.integer],
    threshold: float,
    linkage: Method = "average",
    next_id: int | None = None,
) -> Labels:
    """Algorithm 9: the cluster of every client after B newcomers have joined M old clients.

    For each newcomer the matrix of the old clients and itself is clustered and cut at the same beta, so that
    its cluster does not depend on the other newcomers (the thesis builds one tree of all). Old clients keep
    their clusters, regardless of the new tree. If a newcomer is grouped with old clients, it joins the one of
    their clusters that is nearest on average (a newcomer can bridge several clusters). The other newcomers
    form new clusters, by a tree of these newcomers alone.

    Args:
        extended: condensed distances of the M + B clients, the newcomers last (:func:`extend`).
        old_labels: clusters of the old clients ``(M,)``.
        threshold: beta, as used for them.
        linkage: as used for them.
        next_id: the first cluster id never used so far; default: one above the largest old id.

    Returns:
        ``(M + B,)``: ``old_labels``, then the newcomers' clusters.
    """
    from scipy.spatial.distance import num_obs_y

    old, clients = len(old_labels), num_obs_y(extended)
    labels = np.concatenate([old_labels.astype(np.int64), np.full(clients - old, -1, np.int64)])
    old_distances = extended[condensed_index(clients, *np.triu_indices(old, k=1))]
    for client in range(old, clients):
        to_old = extended[condensed_index(clients, np.arange(old), np.full(old, client))]
        cut_labels = cut_at_threshold(
            build_linkage(extend(old_distances, np.append(to_old, 0.0)[None]), linkage), threshold
        )
        companions = np.flatnonzero(cut_labels[:old] == cut_labels[old])
        if len(companions):
            candidates = np.unique(old_labels[companions])
            means = [to_old[companions[old_labels[companions] == c]].mean() for c in candidates]
            labels[client] = candidates[int(np.argmin(means))]
    founders = np.flatnonzero(labels < 0)
    if len(founders):
        fresh = next_id if next_id is not None else int(old_labels.max(initial=-1)) + 1
        first, second = np.triu_indices(len(founders), k=1)
        founder_distances = extended[condensed_index(clients, founders[first], founders[second])]
        labels[founders] = fresh + cut_at_threshold(build_linkage(founder_distances, linkage), threshold)
    return labels


def nearest_cluster(
    old: Sequence[NDArray[np.floating]],
    old_labels: NDArray[np.integer],
    new: Sequence[NDArray[np.floating]],
) -> Labels:
    """FLT's shortcut for newcomers: the cluster whose mean code is nearest to the newcomer's mean code.

    Signatures are compared as the clients sent them, before any embedding, since an embedding needs all of
    them at once.

    Args:
        old: points of the M old clients, ``(k_i, e)``; all clients have the same weight, regardless of
            ``k_i``.
        old_labels: their clusters ``(M,)``; negative: in none.
        new: points of the B newcomers, ``(k_i, e)``.

    Returns:
        ``(B,)``; ties: the smaller id.

    Raises:
        ValueError: if no old client is in a cluster.
    """
    from scipy.spatial.distance import cdist

    if not len(new):
        return np.empty(0, np.int64)
    clusters = np.unique(old_labels[old_labels >= 0])
    if not len(clusters):
        raise ValueError("there is no cluster that newcomers could join")
    nearest = cdist(_means(new), _centres(_means(old), old_labels, clusters)).argmin(axis=1)
    return np.asarray(clusters[nearest], np.int64)
