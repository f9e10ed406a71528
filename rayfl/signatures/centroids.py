"""FLT's signature: a few centroids of the client's samples or of their codes."""

from __future__ import annotations

import functools
import warnings
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from threadpoolctl import ThreadpoolController

from rayfl.signatures.base import Signature, sample_matrix


class Centroids(Signature):
    """The centroids of k-means over the client's features (FLT, Algorithm 2, line 9).

    Jamali-Rad, Abdizadeh, Singh, "Federated learning with taskonomy for non-IID data", 2022. k is a setting,
    the same for all clients; the authors' code sets it to the true number of the client's classes. Clients
    are compared by their nearest centroids (``min_distance``, the paper) or by a matching of all of them
    (``matching``, the authors' code).
    """

    proximities: ClassVar[tuple[str, ...]] = ("min_distance", "matching")

    name: Literal["centroids"] = "centroids"
    k: int = Field(5, ge=1, description="number of centroids (k), at most the number of distinct samples")
    restarts: int = Field(1, ge=1, description="runs of k-means; the best is taken")

    def compute(self, x: NDArray[np.floating], y: NDArray[np.integer], key: int = 0) -> NDArray[np.float32]:
        """Centroids ``(k', e)`` of features ``(n, e)``; if at most k of them are distinct, these themselves.

        Raises:
            DataError: if there are no samples or they are not finite.
        """
        samples = sample_matrix(x)
        distinct = np.unique(samples, axis=0)
        if len(distinct) <= self.k:
            return distinct.astype(np.float32)
        from sklearn.cluster import KMeans  # deferred: only workers that need it import it

        # Rounding depends on how scikit-learn splits sums among OpenMP threads.
        with _thread_pools().limit(limits=1), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fewer clusters than k, if samples differ by rounding only
            seed = key % 2**32
            kmeans = KMeans(self.k, n_init=self.restarts, random_state=seed).fit(samples)
        return np.asarray(kmeans.cluster_centers_, np.float32)


@functools.cache
def _thread_pools() -> ThreadpoolController:
    """The thread pools of this process, once scikit-learn's are loaded."""
    return ThreadpoolController()
