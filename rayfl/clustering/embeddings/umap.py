"""The manifold on which the clients' points lie, by UMAP."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from threadpoolctl import threadpool_limits

from rayfl.clustering.embeddings.base import Embedding
from rayfl.errors import DataError

LEAST = 5
"""Minimum number of points for UMAP."""

EXACT = 50_000
"""Up to this many points, nearest neighbours are found here from all distances: 3 s for 12,000 points, while
UMAP's own search takes 20 s to compile."""


class Umap(Embedding):
    """UMAP of the points of all clients to u dimensions (FLT, Algorithm 2, line 14).

    McInnes, Healy, Melville, "UMAP: uniform manifold approximation and projection", 2018. The defaults are
    those of umap-learn, as in FLT's code. It is seeded and runs on one thread, so that the same points give
    the same bits. All points are fitted together and keep the positions of the fit. (The authors' code fits,
    and then maps each client's points again by ``transform``, which moves them a little.)
    """

    name: Literal["umap"] = "umap"
    dim: int = Field(2, ge=1, description="dimensions (u)")
    n_neighbors: int = Field(
        15, ge=2, description="neighbours of a point; at most the number of points minus one"
    )
    min_dist: float = Field(
        0.1, ge=0, le=1, description="minimum distance of embedded points (UMAP's min_dist)"
    )

    def embed(
        self, signatures: Sequence[NDArray[np.floating]], key: int = 0
    ) -> Sequence[NDArray[np.floating]]:
        """Points ``(k_i, u)``, float32.

        Raises:
            DataError: if there are fewer than ``LEAST`` points, or points of different dimensions.
        """
        if len(signatures) < 2:  # no other client to compare with
            return signatures
        dims = {signature.shape[1:] for signature in signatures}
        if len(dims) > 1:
            raise DataError(f"signatures of different shapes cannot be embedded: {sorted(dims)[:3]}")
        points = np.concatenate(signatures).astype(np.float32)
        if len(points) < LEAST or len(points) < self.dim + 2:
            least = max(LEAST, self.dim + 2)
            raise DataError(f"UMAP needs {least} points, there are {len(points)}; use embedding none")
        from umap import UMAP  # deferred: it takes seconds, and few need it

        neighbours = min(self.n_neighbors, len(points) - 1)
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # UMAP warns of disconnected graphs, which clusters cause
            reducer = UMAP(
                n_components=self.dim,
                n_neighbors=neighbours,
                min_dist=self.min_dist,
                random_state=key % 2**32,
                n_jobs=1,
                precomputed_knn=_nearest_neighbours(points, neighbours)
                if len(points) <= EXACT
                else (None, None, None),
            )
            embedded = np.asarray(reducer.fit_transform(points), np.float32)
        if not np.isfinite(embedded).all():
            raise DataError("UMAP: some points have no neighbour at a finite distance; use embedding none")
        return np.split(embedded, np.cumsum([len(signature) for signature in signatures])[:-1])


def _nearest_neighbours(
    points: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], None]:
    """The ``count`` nearest points of each, itself first as UMAP expects, and their distances."""
    from sklearn.neighbors import NearestNeighbors

    distances, places = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(points).kneighbors(points)
    return places, distances.astype(np.float32), None
