"""Agglomerative hierarchical clustering on condensed distances: the tree, its cuts, and where to cut.

Distances in float64 are linked by SciPy. Those of many clients are kept in float32 and linked here, in place,
by the nearest-neighbour chain (Murtagh 1985) with the update formula of Lance and Williams. That needs 4
bytes per pair where SciPy needs 16, also takes O(N^2) time, and allows one client to represent several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy
from numpy.typing import NDArray

Method = Literal["average", "weighted", "single", "complete", "ward"]
Array = NDArray[np.float64]
Distances = NDArray[np.floating]
Labels = NDArray[np.int64]

CLEAR_GAP = 1.5
"""A tree proposes several clusters only if the next merge is at least this many times as high as the last."""


@dataclass(frozen=True)
class Curve:
    """The number of clusters as a step function of the threshold beta.

    Attributes:
        thresholds: ``(K,)``, ascending from 0: the values of beta at which the number changes.
        counts: ``(K,)``: the number of clusters for beta from ``thresholds[k]`` up to, but not including,
            ``thresholds[k + 1]``; the last one holds for every greater beta and is 1.
    """

    thresholds: Array
    counts: NDArray[np.int64]


def clients_of(distances: Distances) -> int:
    """N, of condensed distances ``(N (N - 1) / 2,)``."""
    return int((1 + (1 + 8 * len(distances)) ** 0.5) / 2 + 0.5)


def build_linkage(
    distances: Distances, method: Method = "average", sizes: NDArray[np.integer] | None = None
) -> Array:
    """The merges of hierarchical clustering.

    Args:
        distances: condensed, ``(N (N - 1) / 2,)``; empty for a single client. Overwritten if they are
            float32 or ``sizes`` are given: there may be no room for a copy.
        method: how the distance between two groups follows from that of their members. ``average`` is the
            mean over pairs of members (UPGMA). ``weighted`` is the mean of the distances to the two parts
            that a group was merged from, regardless of their sizes (WPGMA). Ward assumes Euclidean distances.
        sizes: how many clients each of the N represents, ``(N,)``; default: one.

    Returns:
        SciPy's linkage matrix ``(N - 1, 4)``: rows (a, b, height, size) by ascending height; a and b
        are clients if below N, otherwise the results of merges ``a - N`` and ``b - N``.
    """
    if len(distances) == 0:
        return np.empty((0, 4))
    if distances.dtype == np.float32 or sizes is not None:
        count = clients_of(distances)
        if sizes is None:
            sizes = np.ones(count, np.int64)
        elif method == "ward":
            _weigh_for_ward(distances, sizes)
        pairs, heights = _nearest_neighbour_chain(distances, sizes, method)
        return linkage_of(pairs, heights, sizes)
    return np.asarray(scipy.cluster.hierarchy.linkage(distances, method), np.float64)


def _weigh_for_ward(distances: Distances, sizes: NDArray[np.integer]) -> None:
    """Ward's distance of groups of n and m equal members: ``sqrt(2 n m / (n + m))`` times their distance."""
    start = 0
    for i, n in enumerate(sizes[:-1].tolist()):
        m = sizes[i + 1 :]
        distances[start : start + len(m)] *= np.sqrt(2 * n * m / (n + m))
        start += len(m)


def linkage_of(pairs: NDArray[np.integer], heights: Distances, sizes: NDArray[np.integer]) -> Array:
    """SciPy's linkage matrix of merges in any order.

    Args:
        pairs: a member of each of the two groups that merge, ``(N - 1, 2)``.
        heights: heights of the merges ``(N - 1,)``; merges of equal height keep their order.
        sizes: how many clients each of the N represents ``(N,)``.
    """
    count = len(sizes)
    root, node, size = list(range(count)), list(range(count)), sizes.tolist()

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i

    linkage = np.empty((len(pairs), 4))
    order = np.argsort(heights, kind="stable")
    for merge, ((i, j), height) in enumerate(
        zip(pairs[order].tolist(), heights[order].tolist(), strict=True)
    ):
        a, b = find(i), find(j)
        root[a] = b
        size[b] += size[a]
        linkage[merge] = (*sorted((node[a], node[b])), height, size[b])
        node[b] = count + merge
    return linkage


def merge_members(linkage: Array) -> NDArray[np.int64]:
    """A member of each of the two groups that merge, ``(N - 1, 2)``."""
    clients = len(linkage) + 1
    member = np.arange(clients + len(linkage))
    pairs = linkage[:, :2].astype(np.int64)
    for merge, (a, _) in enumerate(pairs.tolist()):
        member[clients + merge] = member[a]
    return np.asarray(member[pairs], np.int64)


def _nearest_neighbour_chain(
    distances: Distances, sizes: NDArray[np.integer], method: Method
) -> tuple[NDArray[np.int64], Distances]:
    """Merges (pairs of positions, heights) in the order in which they are found; overwrites ``distances``.

    Go from a group to its nearest group, from there to the nearest of that, and so on. Distances decrease, so
    the chain ends in two groups that are each other's nearest; these merge (``i``, ``j`` into position
    ``j``). All five linkages are *reducible*: a merge brings no other group nearer, so the rest of the chain
    stays valid.
    """
    count = len(sizes)
    places = np.arange(count)
    start = count * places - places * (places + 1) // 2 - places - 1  # of row i: (i, j) is at start[i] + j
    size = sizes.astype(np.float64)
    active = places
    pairs, heights = np.empty((count - 1, 2), np.int64), np.empty(count - 1, distances.dtype)

    def index(i: int, others: NDArray[np.int64]) -> NDArray[np.int64]:
        split = int(np.searchsorted(others, i))
        return np.concatenate([start[others[:split]] + i, start[i] + others[split:]])

    chain: list[int] = []
    for merge in range(count - 1):
        chain = chain or [int(active[0])]
        while True:
            tip_place = int(np.searchsorted(active, chain[-1]))
            others = np.delete(active, tip_place)
            row = distances[index(chain[-1], others)]
            place = int(row.argmin())  # ties: the first, so that the chain cannot go in a circle
            following = int(others[place])
            if len(chain) > 1 and following == chain[-2]:
                break
            chain.append(following)
        i, j = sorted((chain.pop(), chain.pop()))
        pairs[merge], heights[merge] = (i, j), row[place]
        others = np.delete(active, np.searchsorted(active, (i, j)))
        at_j = index(j, others)
        distances[at_j] = _lance_williams(
            method, distances[index(i, others)], distances[at_j], row[place], size[i], size[j], size[others]
        )
        size[j] += size[i]
        active = np.delete(active, np.searchsorted(active, i))
    return pairs, heights


def _lance_williams(
    method: Method, to_i: Distances, to_j: Distances, ij: float, n_i: float, n_j: float, n_k: Array
) -> Distances:
    """The distances of all groups k to the union of i and j."""
    if method == "single":
        return np.minimum(to_i, to_j)
    if method == "complete":
        return np.maximum(to_i, to_j)
    if method == "average":
        return (n_i * to_i + n_j * to_j) / (n_i + n_j)
    if method == "weighted":
        return (to_i + to_j) / 2
    squared = (n_i + n_k) * to_i**2.0 + (n_j + n_k) * to_j**2.0 - n_k * float(ij) ** 2
    return np.asarray(np.sqrt(np.maximum(squared / (n_i + n_j + n_k), 0.0)))


def number_by_first(labels: NDArray[np.integer]) -> Labels:
    """The same clusters ``(N,)``, numbered 0, 1, ... by their smallest client id."""
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
    """Exactly ``n_clusters`` clusters ``(N,)``, even if merges have equal heights.

    Raises:
        ValueError: if ``n_clusters`` is not in 1..N.
    """
    clients = len(linkage) + 1
    if not 1 <= n_clusters <= clients:
        raise ValueError(f"{clients} clients cannot form {n_clusters} clusters")
    return cut_after(linkage, clients - n_clusters)


def threshold_for(linkage: Array, n_clusters: int) -> float | None:
    """A beta that gives ``n_clusters``: the middle of its interval; None if ties leave no interval.

    For one cluster, whose interval has no upper end, it is the height of the last merge. ``linkage`` is
    SciPy's linkage matrix ``(N - 1, 4)``.
    """
    heights = linkage[:, 2]
    below = float(heights[-n_clusters]) if n_clusters <= len(heights) else 0.0
    if n_clusters == 1:
        return below
    above = float(heights[len(heights) - n_clusters + 1])
    return (below + above) / 2 if below < above else None


def clusters_over_threshold(linkage: Array) -> Curve:
    """The number of clusters for every threshold beta, from a linkage matrix ``(N - 1, 4)``; needs no
    training.
    """
    heights = np.sort(linkage[:, 2])
    thresholds = np.unique(np.concatenate([[0.0], heights]))
    return Curve(thresholds, len(heights) + 1 - np.searchsorted(heights, thresholds, side="right"))


def suggest(linkage: Array, clear_gap: float = CLEAR_GAP) -> int:
    """The number of clusters that the tree itself proposes: the largest relative gap of merge heights.

    It considers cuts into 2 to N/2 clusters (more would leave most clients alone) and takes the one with the
    largest ratio of the next merge's height to that of the last merge made. If no ratio reaches
    ``clear_gap``, it is one cluster. With up to three clients it is also one, since noise looks like two.
    ``linkage`` is SciPy's linkage matrix ``(N - 1, 4)``.
    """
    heights = linkage[:, 2]
    clients = len(heights) + 1
    counts = np.arange(2, clients // 2 + 1)
    if len(counts) == 0:
        return 1
    last_heights, next_heights = heights[clients - counts - 1], heights[clients - counts]
    floor = 1e-4 * float(heights[-1])  # merges of equal clients have height 0, up to the angles' accuracy
    if floor == 0:
        return 1
    ratios = np.maximum(next_heights, floor) / np.maximum(last_heights, floor)
    best = int(np.argmax(ratios))
    return int(counts[best]) if ratios[best] >= clear_gap else 1
