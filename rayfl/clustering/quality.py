"""How good a clustering is, and how clusters of two moments correspond."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from rayfl.clustering.linkage import Labels


def adjusted_rand_index(labels: NDArray[np.integer], truth: NDArray[np.integer]) -> float:
    """Agreement with the true groups whatever the ids: 1 if equal, about 0 if random (Hubert, Arabie)."""
    from sklearn.metrics import adjusted_rand_score  # deferred: it takes a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # scikit-learn takes many small clusters for a mistake
        return float(adjusted_rand_score(truth, labels))


def separation_gap(similarity: NDArray[np.floating], groups: NDArray[np.integer]) -> float:
    """CFL's separation gap ``g = alpha_intra_min - alpha_cross_max`` (Sattler et al.).

    Positive exactly if every two clients of one group are more alike than any two of different groups.

    Args:
        similarity: ``(N, N)``, symmetric, larger is more alike; the diagonal is not looked at.
        groups: true group of each client ``(N,)``.

    Returns:
        g; NaN if there is no pair within a group or none across groups.
    """
    same = groups[:, None] == groups[None, :]
    other = ~np.eye(len(groups), dtype=bool)
    within, across = similarity[same & other], similarity[~same]
    if within.size == 0 or across.size == 0:
        return float("nan")
    return float(within.min() - across.max())


def match_ids(new: NDArray[np.integer], old: NDArray[np.integer], next_id: int | None = None) -> Labels:
    """Number new clusters after the old ones that they overlap most.

    The one-to-one matching with the largest total number of common clients (Hungarian algorithm).

    Args:
        new: cluster of each client ``(N,)``.
        old: its cluster before ``(N,)``, -1 if it had none.
        next_id: the first id never used so far; default: one above the largest old id.

    Returns:
        The new clusters ``(N,)`` under old ids where they share a client with the old cluster matched to
        them, under fresh ids (by smallest client id) where not.
    """
    fresh = next_id if next_id is not None else int(old.max(initial=-1)) + 1
    new_ids, first, new_index = np.unique(new, return_index=True, return_inverse=True)
    old_ids, old_index = np.unique(old[old >= 0], return_inverse=True)
    overlap = np.zeros((len(new_ids), len(old_ids)), np.int64)
    np.add.at(overlap, (new_index[old >= 0], old_index), 1)
    renamed = np.full(len(new_ids), -1, np.int64)
    for row, column in zip(*linear_sum_assignment(overlap, maximize=True), strict=True):
        if overlap[row, column]:
            renamed[row] = old_ids[column]
    for row in np.argsort(first):
        if renamed[row] < 0:
            renamed[row] = fresh
            fresh += 1
    return renamed[new_index]
