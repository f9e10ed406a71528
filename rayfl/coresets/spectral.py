"""Spectral clustering: k-means on the first K eigenvectors of the normalised adjacency."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array
from scipy.sparse.linalg import eigsh
from threadpoolctl import threadpool_limits

from rayfl.coresets.base import Coreset, check_references, cluster_coreset
from rayfl.coresets.graphs import Graph
from rayfl.errors import DataError
from rayfl.random import generator, key

Array = NDArray[np.float64]


def select(graph: Graph, references: int, *, seed: int = 0, embedding: Array | None = None) -> Coreset:
    """One reference per spectral cluster (Ng, Jordan, Weiss 2002), weighted by the cluster's share.

    Args:
        graph: the graph.
        references: K, below n.
        seed: of the eigenvector iteration and of k-means++.
        embedding: the result of :func:`eigenvectors` ``(n, K)``, or with more columns, if available.

    Raises:
        DataError: if K is not from 1 to n - 1.
    """
    check_references(graph, references)
    U = eigenvectors(graph, references, seed) if embedding is None else embedding
    rows = U[:, :references]
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    from sklearn.cluster import KMeans  # deferred: it takes a second

    model = KMeans(references, n_init=1, random_state=key(seed, "spectral coreset") % 2**32)
    with threadpool_limits(1):  # rounding depends on how sums are split among threads
        labels = model.fit_predict(rows)
    return cluster_coreset(rows, labels)


def eigenvectors(graph: Graph, count: int, seed: int = 0) -> Array:
    """The eigenvectors of ``D^-1/2 A D^-1/2`` with the largest eigenvalues, largest first, ``(n, count)``."""
    if count >= len(graph):
        raise DataError(f"references: got {count}, spectral clustering takes at most {len(graph) - 1}")
    degrees = np.asarray(graph.adjacency.sum(axis=1)).ravel()
    root = diags_array(1.0 / np.sqrt(np.maximum(degrees, 1e-300)))
    start = generator(seed, "eigenvectors").normal(size=len(graph))
    values, vectors = eigsh(csr_array(root @ graph.adjacency @ root), k=count, which="LA", v0=start, tol=1e-8)
    return np.asarray(vectors[:, np.argsort(-values)])
