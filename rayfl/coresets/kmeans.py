"""K-means: the vertex nearest to each of K centres, weighted by the cluster's share."""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from rayfl.coresets.base import Coreset, check_references, nearest_members
from rayfl.coresets.graphs import Graph
from rayfl.random import key


def select(graph: Graph, references: int, *, seed: int = 0, starts: int = 1) -> Coreset:
    """One reference per cluster of the points, or of the rows of the adjacency if there are no points.

    Args:
        graph: the graph; ``points`` are used if it has them.
        references: K.
        seed: of k-means++.
        starts: number of runs of k-means, each with its own initial centres; the best result is kept.

    Raises:
        DataError: if K is not from 1 to n.
    """
    check_references(graph, references)
    features = graph.adjacency if graph.points is None else graph.points
    from sklearn.cluster import KMeans  # deferred: it takes a second

    model = KMeans(references, n_init=starts, random_state=key(seed, "kmeans coreset") % 2**32)
    with threadpool_limits(1):  # rounding depends on how sums are split among threads
        labels = model.fit_predict(features)
        distances = model.transform(features)[np.arange(len(graph)), labels]
    return nearest_members(labels, distances)
