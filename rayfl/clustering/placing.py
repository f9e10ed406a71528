"""Which clusters newcomers join, by the signatures of all clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.config import Clustering
from rayfl.clustering.linkage import Labels
from rayfl.clustering.newcomers import cluster_newcomers, extend, newcomer_rows
from rayfl.clustering.proximity import condensed_distances


def assign(
    clustering: Clustering,
    signatures: Sequence[NDArray[np.floating]],
    old_labels: NDArray[np.integer],
    threshold: float | None,
    next_id: int,
) -> Labels:
    """PACFL's Algorithm 9: the clusters of B newcomers.

    Args:
        clustering: proximity and linkage, as used for the old clients.
        signatures: of the M old clients, then of the B newcomers.
        old_labels: clusters of the old clients ``(M,)``.
        threshold: beta of the old clusters; if None (there was no tree) newcomers join the cluster nearest on
            average.
        next_id: the first cluster id never used so far, for newcomers that form new clusters.

    Returns:
        ``(B,)``.
    """
    old, new = signatures[: len(old_labels)], signatures[len(old_labels) :]
    measure, vectors = clustering.measure, clustering.signature.vectors
    rows = np.asarray(newcomer_rows(measure, old, new, vectors), np.float64)
    distances = np.asarray(condensed_distances(measure, old, vectors=vectors), np.float64)
    return _newcomer_labels(clustering, extend(distances, rows), old_labels, threshold, next_id)


def assign_by_distances(
    clustering: Clustering,
    distances: NDArray[np.float64],
    labels: NDArray[np.int64],
    threshold: float | None,
    next_id: int,
) -> Labels:
    """The same as :func:`assign`, if the distances of all clients are known.

    Args:
        clustering, threshold, next_id: as for :func:`assign`.
        distances: of the M + B clients, condensed.
        labels: their clusters, -1 for newcomers ``(M + B,)``.

    Returns:
        ``(B,)``.
    """
    from scipy.spatial.distance import squareform

    order = np.argsort(labels < 0, kind="stable")  # newcomers last
    reordered = squareform(squareform(distances)[np.ix_(order, order)], checks=False)
    return _newcomer_labels(clustering, reordered, labels[labels >= 0], threshold, next_id)


def _newcomer_labels(
    clustering: Clustering,
    distances: NDArray[np.float64],
    old_labels: NDArray[np.integer],
    threshold: float | None,
    next_id: int,
) -> Labels:
    beta = np.inf if threshold is None else threshold
    return cluster_newcomers(distances, old_labels, beta, clustering.linkage, next_id)[len(old_labels) :]


def adopt(
    old_new_labels: NDArray[np.integer],
    old_labels: NDArray[np.integer],
    newcomer_labels: NDArray[np.integer],
    next_id: int,
) -> Labels:
    """The clusters of newcomers, from a new clustering of all clients and the clusters that old clients keep.

    The new clustering groups a newcomer with some old clients; it joins the cluster to which most of these
    belong (ties: the smaller id). If there are none, it forms a new cluster, together with the newcomers of
    the same label. A newcomer without a label gets -1.

    Args:
        old_new_labels: new labels of the M old clients.
        old_labels: the clusters that they have and keep ``(M,)``.
        newcomer_labels: new labels of the B newcomers.
        next_id: the first id never used so far.

    Returns:
        ``(B,)``.
    """
    newcomer_clusters = np.empty(len(newcomer_labels), np.int64)
    new_ids: dict[int, int] = {}
    for i, label in enumerate(newcomer_labels.tolist()):
        companion_labels = old_labels[old_new_labels == label]
        if label < 0:
            newcomer_clusters[i] = -1
        elif len(companion_labels):
            newcomer_clusters[i] = np.bincount(companion_labels).argmax()
        else:
            newcomer_clusters[i] = new_ids.setdefault(label, next_id + len(new_ids))
    return newcomer_clusters
