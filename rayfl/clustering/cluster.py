"""From signatures to clusters: the work of the remote clustering task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
from numpy.typing import NDArray

from rayfl.clustering import grouping
from rayfl.clustering.config import Clustering
from rayfl.clustering.linkage import (
    Curve,
    Labels,
    build_linkage,
    clusters_over_threshold,
    cut_at_threshold,
    cut_into,
    suggest,
    threshold_for,
)
from rayfl.clustering.proximity import RELEVANCE, condensed_distances, relevance_distances
from rayfl.clustering.quality import adjusted_rand_index
from rayfl.errors import ConfigError, DataError, RayflError

Array = NDArray[np.float64]

BYTES_PER_PAIR = 20
"""Peak memory per pair of clients: the distance, the copy that the linkage works on, and temporaries."""
RELEVANCE_BYTES_PER_PAIR = 40
"""The same where the distances come from a matrix of relations: that is full, and needs its transpose."""


@dataclass(frozen=True)
class Clusters:
    """The outcome of a clustering.

    Attributes:
        labels: cluster of each client ``(N,)``, numbered 0, 1, ... by smallest client id.
        n_clusters: their number.
        suggested: whether the number is the tree's own proposal, neither threshold nor count being given.
        threshold: the beta of the cut: as given, or one that gives the same number of clusters (None if
            ties allow none); None for groupings without a tree.
        distances: condensed ``(N (N - 1) / 2,)``; None for groupings without a tree.
        linkage: SciPy's linkage matrix ``(N - 1, 4)``; None likewise.
        curve: the number of clusters over beta; None likewise.
        ari: adjusted Rand index against the true groups, None if these are not known.
        seconds: what it took.
    """

    labels: Labels
    n_clusters: int
    suggested: bool
    threshold: float | None
    distances: Array | None
    linkage: Array | None
    curve: Curve | None
    ari: float | None
    seconds: float


def cluster_signatures(
    clustering: Clustering,
    signatures: Sequence[NDArray[np.floating]],
    relations: Sequence[NDArray[np.floating]] | None = None,
    groups: NDArray[np.integer] | None = None,
    seed: int = 0,
    clients: int | None = None,
) -> Clusters:
    """Group N clients.

    Args:
        clustering: the settings.
        signatures: one a client; may be empty where ``clustering.needs_signatures`` is false.
        relations: the rows of the exchange step, for the proximity ``relevance``.
        groups: true groups ``(N,)`` if known.
        seed: the run's seed, for random groupings.
        clients: N, needed only where neither signatures nor groups tell.

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
    wanted = clustering.n_clusters
    if wanted is not None and wanted > clients:
        raise ConfigError("clustering.n_clusters", f"{wanted} of {clients} clients", f"at most {clients}")

    distances = linkage = curve = threshold = None
    if clustering.grouping == "hierarchical":
        per_pair = RELEVANCE_BYTES_PER_PAIR if clustering.measure == RELEVANCE else BYTES_PER_PAIR
        check_memory(clients, int(psutil.virtual_memory().available), per_pair)
        distances = _distances(clustering, signatures, relations, clients)
        linkage = build_linkage(distances, clustering.linkage)
        curve = clusters_over_threshold(linkage)
        if clustering.threshold is not None:
            threshold = clustering.threshold
            labels = cut_at_threshold(linkage, threshold)
        else:
            count = wanted if wanted is not None else suggest(linkage)
            threshold = threshold_for(linkage, count) if clients > 1 else None
            labels = cut_into(linkage, count)
    else:
        labels = _without_distances(clustering, clients, groups, seed)
    return Clusters(
        labels=labels,
        n_clusters=int(labels.max()) + 1,
        suggested=clustering.grouping == "hierarchical" and clustering.threshold is None and wanted is None,
        threshold=threshold,
        distances=distances,
        linkage=linkage,
        curve=curve,
        ari=None if groups is None else adjusted_rand_index(labels, groups),
        seconds=time.perf_counter() - start,
    )


def check_memory(clients: int, available: int, bytes_per_pair: int = BYTES_PER_PAIR) -> None:
    """Refuse a population whose distances would not fit in ``available`` bytes.

    Raises:
        RayflError: one line with the figures and what would fit.
    """
    needed = bytes_per_pair * clients * (clients - 1) // 2
    if needed > available:
        fits = int((2 * available / bytes_per_pair) ** 0.5)
        raise RayflError(
            f"clustering: the distances of {clients:,} clients need {needed / 1e9:.1f} GB, "
            f"{available / 1e9:.1f} GB are free; up to {fits:,} clients would fit, "
            "and the groupings planted, random, single and singletons need no distances"
        )


def _distances(
    clustering: Clustering,
    signatures: Sequence[NDArray[np.floating]],
    relations: Sequence[NDArray[np.floating]] | None,
    clients: int,
) -> Array:
    if clustering.measure == RELEVANCE:
        if relations is None or len(relations) != clients:
            given = 0 if relations is None else len(relations)
            raise DataError(f"relevance needs the relations of all {clients} clients, not of {given}")
        return relevance_distances(relations)
    if len(signatures) != clients:
        raise DataError(f"there are {len(signatures)} signatures of {clients} clients")
    return condensed_distances(clustering.measure, signatures)


def _without_distances(
    clustering: Clustering, clients: int, groups: NDArray[np.integer] | None, seed: int
) -> Labels:
    if clustering.grouping == "single":
        return grouping.single(clients)
    if clustering.grouping == "singletons":
        return grouping.singletons(clients)
    if clustering.grouping == "random" and clustering.n_clusters is not None:
        return grouping.random_clusters(clients, clustering.n_clusters, seed)
    if groups is None:
        remedy = "a partition with groups" + (
            ", or clustering.n_clusters" if clustering.grouping == "random" else ""
        )
        raise ConfigError("clustering.grouping", f"{clustering.grouping} needs the true groups", remedy)
    if clustering.grouping == "random":
        return grouping.shuffle_members(groups, seed)
    return grouping.planted(groups)
