"""Groupings that need no distances, and operations on any grouping."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.linkage import Labels, number_by_first
from rayfl.random import generator


def single(clients: int) -> Labels:
    """All clients in one cluster: FedAvg."""
    return np.zeros(clients, np.int64)


def singletons(clients: int) -> Labels:
    """One cluster per client: SOLO."""
    return np.arange(clients, dtype=np.int64)


def planted(groups: NDArray[np.integer]) -> Labels:
    """The planted groups of the federation ``(N,)``: the oracle."""
    return number_by_first(groups)


def random_clusters(clients: int, n_clusters: int, seed: int) -> Labels:
    """``n_clusters`` clusters of sizes that differ by at most one, members drawn at random.

    Raises:
        ValueError: if ``n_clusters`` is not in 1..clients.
    """
    if not 1 <= n_clusters <= clients:
        raise ValueError(f"{clients} clients cannot form {n_clusters} clusters")
    return shuffle_members(np.arange(clients, dtype=np.int64) % n_clusters, seed)


def shuffle_members(labels: NDArray[np.integer], seed: int) -> Labels:
    """Labels ``(N,)`` with the same cluster sizes and random members: MT-HFL's baseline "random
    clustering".
    """
    return number_by_first(generator(seed, "random clusters").permutation(labels))


def members(
    labels: NDArray[np.integer], clients: Sequence[int] | NDArray[np.integer] | None = None
) -> list[NDArray[np.int64]]:
    """The client ids of each cluster; clusters and ids in ascending order.

    Args:
        labels: cluster of each client ``(n,)``.
        clients: their ids ``(n,)`` if only a part of the population was clustered, so that positions are not
            mistaken for ids; None if they are 0..n-1.
    """
    ids = np.arange(len(labels)) if clients is None else np.asarray(clients)
    return [np.sort(ids[labels == cluster]).astype(np.int64) for cluster in np.unique(labels)]
