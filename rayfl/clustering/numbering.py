"""How clusters before and after a clustering correspond: their numbers, and their first models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.linkage import Labels


def match_ids(new: NDArray[np.integer], old: NDArray[np.integer], next_id: int | None = None) -> Labels:
    """Number new clusters after the old ones that they overlap most.

    Uses the one-to-one matching with the largest total number of common clients (Hungarian algorithm).

    Args:
        new: cluster of each client ``(N,)``.
        old: its cluster before ``(N,)``, -1 if it had none.
        next_id: the first id never used so far; default: one above the largest old id.

    Returns:
        The new clusters ``(N,)``: with the id of the matched old cluster if they share a client with it,
        otherwise with fresh ids (by smallest client id).
    """
    from scipy.optimize import linear_sum_assignment

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


def most_used(labels: NDArray[np.int64], models: NDArray[np.int64], clusters: int) -> NDArray[np.int64]:
    """The model that most members of each cluster used (ties: the smaller id); -1 without members.

    Args:
        labels: new cluster of each client ``(n,)``.
        models: the model that it used ``(n,)``.
        clusters: K.

    Returns:
        ``(K,)``.
    """
    pairs, votes = np.unique(np.stack([labels, models]), axis=1, return_counts=True)
    order = np.lexsort((-pairs[1], votes, pairs[0]))  # the last of each cluster counts
    model_of_cluster = np.full(clusters, -1, np.int64)
    model_of_cluster[pairs[0, order]] = pairs[1, order]
    return model_of_cluster


def reuse(labels: NDArray[np.int64], occupied: NDArray[np.int64], models: int) -> NDArray[np.int64]:
    """Give new clusters (labels from ``models`` on) the numbers of clusters that have no members.

    Args:
        labels: ``(n,)``.
        occupied: the clusters that have members; those from ``models`` on are ignored.
        models: K.
    """
    free = np.setdiff1d(np.arange(models), occupied)
    new_labels = np.unique(labels[labels >= models])
    numbers = np.concatenate([free, np.arange(models, models + len(new_labels))])[: len(new_labels)]
    renumbered = labels.copy()
    for label, number in zip(new_labels.tolist(), numbers.tolist(), strict=True):
        renumbered[labels == label] = number
    return renumbered


def completed(
    labels: NDArray[np.int64], kept_models: NDArray[np.int64], present: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The model of each client ``(N,)`` after a clustering.

    Args:
        labels: the clusters ``(N,)``, -1 for clients in none.
        kept_models: the models that absent clients in no cluster keep ``(N,)``; present clients in no cluster
            use the largest cluster's model.
        present: which clients are present ``(N,)``.
    """
    clustered = labels >= 0
    assignment = np.where(clustered, labels, kept_models)
    assignment[~clustered & present] = np.bincount(labels[clustered]).argmax()
    return assignment
