"""Agglomerative hierarchical clustering on condensed distances: the tree, its cuts, and where to cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.cluster.hierarchy
from numpy.typing import NDArray

Method = Literal["average", "single", "complete", "ward"]
Array = NDArray[np.float64]
Labels = NDArray[np.int64]

CLEAR_GAP = 1.5
"""A tree proposes several clusters only if the next merge is this many times as high as the last."""


@dataclass(frozen=True)
class Curve:
    """The number of clusters as a step function of the threshold beta.

    Attributes:
        thresholds: ``(K,)``, rising from 0: the values of beta at which the number changes.
        counts: ``(K,)``: the number of clusters for beta from ``thresholds[k]`` up to, but without,
            ``thresholds[k + 1]``; the last holds for every greater beta and is 1.
    """

    thresholds: Array
    counts: NDArray[np.int64]


def build_linkage(distances: Array, method: Method = "average") -> Array:
    """The merges of hierarchical clustering.

    Args:
        distances: condensed, ``(N (N - 1) / 2,)``; empty for a single client.
        method: how the distance between two groups follows from that of their members. Ward assumes
            Euclidean distances.

    Returns:
        SciPy's linkage matrix ``(N - 1, 4)``: rows (a, b, height, size) in rising height; a and b are
        clients if below N, else merge ``a - N``.
    """
    if len(distances) == 0:
        return np.empty((0, 4))
    return np.asarray(scipy.cluster.hierarchy.linkage(distances, method), np.float64)


def number_by_first(labels: NDArray[np.integer]) -> Labels:
    """The same clusters, numbered 0, 1, ... by their smallest client id."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def cut_after(linkage: Array, merges: int) -> Labels:
    """The clusters ``(N,)`` after the first ``merges`` merges, numbered by their smallest client id."""
    clients = len(linkage) + 1
    parent = np.arange(clients + merges)
    for merge in range(merges):
        parent[linkage[merge, :2].astype(np.intp)] = clients + merge
    root = parent.copy()
    for node in range(clients + merges - 1, -1, -1):
        root[node] = root[parent[node]]
    return number_by_first(root[:clients])


def cut_at_threshold(linkage: Array, threshold: float) -> Labels:
    """The clusters ``(N,)`` when all merges up to height ``threshold`` (beta) are made."""
    return cut_after(linkage, int((linkage[:, 2] <= threshold).sum()))


def cut_into(linkage: Array, n_clusters: int) -> Labels:
    """Exactly ``n_clusters`` clusters ``(N,)``, also where merges have equal heights.

    Raises:
        ValueError: if ``n_clusters`` is not in 1..N.
    """
    clients = len(linkage) + 1
    if not 1 <= n_clusters <= clients:
        raise ValueError(f"{clients} clients cannot form {n_clusters} clusters")
    return cut_after(linkage, clients - n_clusters)


def threshold_for(linkage: Array, n_clusters: int) -> float | None:
    """A beta that gives ``n_clusters``: the middle of its interval, None if ties leave no interval.

    For one cluster, which has no upper end, the height of the last merge.
    """
    heights = linkage[:, 2]
    below = float(heights[-n_clusters]) if n_clusters <= len(heights) else 0.0
    if n_clusters == 1:
        return below
    above = float(heights[len(heights) - n_clusters + 1])
    return (below + above) / 2 if below < above else None


def clusters_over_threshold(linkage: Array) -> Curve:
    """The number of clusters for every threshold beta: choosing it needs no training."""
    heights = np.sort(linkage[:, 2])
    thresholds = np.unique(np.concatenate([[0.0], heights]))
    return Curve(thresholds, len(heights) + 1 - np.searchsorted(heights, thresholds, side="right"))


def suggest(linkage: Array, clear_gap: float = CLEAR_GAP) -> int:
    """The number of clusters that the tree itself proposes: the largest relative gap of merge heights.

    Of the cuts into 2 to N/2 clusters (more would leave most clients alone) the one with the largest
    ratio between the next merge's height and the last one made; one cluster if no ratio reaches
    ``clear_gap``. With up to three clients: two clusters cannot be told from noise, so one.
    """
    heights = linkage[:, 2]
    clients = len(heights) + 1
    counts = np.arange(2, clients // 2 + 1)
    if len(counts) == 0:
        return 1
    made, following = heights[clients - counts - 1], heights[clients - counts]
    floor = 1e-12 * float(heights[-1])  # merges of equal clients have height 0, up to rounding
    if floor == 0:
        return 1
    ratios = np.maximum(following, floor) / np.maximum(made, floor)
    best = int(np.argmax(ratios))
    return int(counts[best]) if ratios[best] >= clear_gap else 1
