"""k-means where only distances are known: the first centers of FedSEM."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from rayfl.random import key


def first_centers(
    distances: NDArray[np.float64], centers: int, seed: int, sizes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """k-means of points that are only known by their distances, in coordinates that reproduce them.

    Args:
        distances: squared Euclidean distances ``(M, M)``.
        centers: C; with at most C different points each point is a center.
        seed: the run's seed.
        sizes: weights of the points ``(M,)``.

    Returns:
        The center of each point ``(M,)``, numbered by first occurrence.
    """
    # Classical scaling: the centred inner products, and their root.
    inner = distances - distances.mean(axis=0)
    inner = -0.5 * (inner - inner.mean(axis=1, keepdims=True))
    different = len(np.unique(distances, axis=0))
    from sklearn.cluster import KMeans  # deferred: takes a second; imported before threads are limited

    with threadpool_limits(1):
        values, vectors = np.linalg.eigh((inner + inner.T) / 2)
        points = vectors * np.sqrt(values.clip(min=0))
        kmeans = KMeans(min(centers, different), n_init=10, random_state=key(seed, "fedsem centers") % 2**32)
        labels = kmeans.fit_predict(points, sample_weight=sizes)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(first.argsort().argsort()[inverse], np.int64)
