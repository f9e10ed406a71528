"""What replaces the matrix of distances in reports: clients as points in the plane, and an excerpt."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from rayfl.random import generator, key

Array = NDArray[np.float64]

MapMethod = Literal["mds", "umap"]
METHODS: dict[MapMethod, str] = {"mds": "classical multidimensional scaling", "umap": "UMAP"}

FULL = 500
"""Up to this many clients all eigenvectors are computed; for more only the two that are needed."""
LEAST, NEIGHBOURS = 5, 15
"""Minimum number of clients for UMAP, and its number of neighbours per client (its default)."""
DIGITS = 3
"""Decimals of positions, which lie between -1 and 1: enough to draw a map."""

EXCERPT = 100
"""Maximum number of clients in an excerpt."""


@dataclass(frozen=True)
class Excerpt:
    """The distances between some clients, similar ones side by side.

    Attributes:
        clients: ids ``(n,)``.
        distances: condensed ``(n (n - 1) / 2,)``.
        related: whether ``distances`` only distinguish related clients (0) from others (1).
    """

    clients: NDArray[np.int64]
    distances: Array
    related: bool = False

    @classmethod
    def of(cls, distances: Array, order: NDArray[np.integer]) -> Excerpt:
        """The excerpt of the distances of all clients, or of evenly spaced ones if there are too many.

        Args:
            distances: condensed ``(N (N - 1) / 2,)``.
            order: of all N clients.
        """
        clients = cls.choose(order)
        i, j = np.triu_indices(len(clients), 1)
        low, high = np.minimum(clients[i], clients[j]), np.maximum(clients[i], clients[j])
        return cls(clients, distances[len(order) * low - low * (low + 1) // 2 + high - low - 1])

    @staticmethod
    def choose(order: NDArray[np.integer]) -> NDArray[np.int64]:
        """At most ``EXCERPT`` of the clients, evenly spaced in their order."""
        positions = np.linspace(0, len(order) - 1, min(len(order), EXCERPT))
        return np.asarray(order[positions.astype(np.intp)], np.int64)

    def facts(self) -> dict[str, Any]:
        """As plain numbers, with three significant digits of the largest."""
        largest = float(np.abs(self.distances).max(initial=0.0)) or 1.0
        digits = max(0, 2 - math.floor(math.log10(largest)))
        return {
            "clients": self.clients.tolist(),
            "distances": np.round(self.distances, digits).tolist(),
            "related": self.related,
        }


def classical(distances: ArrayLike) -> Array:
    """Classical multidimensional scaling (Torgerson 1952): the plane that keeps distances best.

    Args:
        distances: ``(N, N)``, symmetric; not necessarily Euclidean.

    Returns:
        Places ``(N, 2)``, the longest extent first, each axis with its largest entry positive.
    """
    squared = np.asarray(distances, np.float64) ** 2
    rows = squared.mean(axis=0)
    inner = -0.5 * (squared - rows - rows[:, None] + rows.mean())
    with threadpool_limits(1):  # rounding depends on how sums are split among threads
        if len(inner) > FULL:
            from scipy.sparse.linalg import eigsh

            values, vectors = eigsh(inner, 2, which="LA", v0=np.cos(np.arange(len(inner))))
        else:
            values, vectors = np.linalg.eigh(inner)
    places = largest_axes(values, vectors)
    places[:, : min(2, len(values))] *= np.sqrt(np.clip(np.sort(values)[::-1][:2], 0, None))
    return places


def largest_axes(values: Array, vectors: Array) -> Array:
    """The eigenvectors ``(n, 2)`` of the largest two eigenvalues, their largest entries positive."""
    axes = np.zeros((len(vectors), 2))
    for axis, column in enumerate(np.argsort(-values, kind="stable")[:2]):
        axes[:, axis] = vectors[:, column] * np.sign(vectors[np.abs(vectors[:, column]).argmax(), column])
    return axes


def by_neighbours(distances: ArrayLike, seed: int = 0) -> Array:
    """Positions ``(N, 2)`` by UMAP (McInnes, Healy, Melville 2018), which keeps near clients near.

    It starts from :func:`classical`, so clusters without common neighbours keep their relative places. The
    first call in a process compiles for some seconds.

    Args:
        distances: ``(N, N)``, symmetric, of at least ``LEAST`` clients.
        seed: of the run.
    """
    from umap import UMAP  # deferred: it takes seconds, and few need it

    distances = np.asarray(distances, np.float64)
    count = min(NEIGHBOURS, len(distances) - 1)
    order = np.argsort(distances, axis=1, kind="stable")
    # UMAP expects each client to be the first of its own neighbours, even if others are at distance 0.
    itself = order == np.arange(len(order))[:, None]
    others = order[~itself].reshape(len(order), -1)[:, : count - 1]
    places = np.column_stack([np.arange(len(order)), others])
    start = classical(distances)
    start *= 10 / (float(np.abs(start).max(initial=0.0)) or 1.0)  # the extent of UMAP's own initial positions
    # Noise makes positions differ and gives each axis an extent, by which UMAP divides.
    start += generator(seed, "map").normal(scale=0.01, size=start.shape)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # UMAP warns of disconnected graphs, which clusters cause
        reducer = UMAP(
            n_neighbors=count,
            metric="precomputed",
            init=start.astype(np.float32),
            random_state=key(seed, "map") % 2**32,
            n_jobs=1,
            precomputed_knn=(places, np.take_along_axis(distances, places, axis=1).astype(np.float32), None),
        )
        positions: Array = np.asarray(reducer.fit_transform(distances), np.float64)
    return np.asarray(positions - positions.mean(axis=0))


def plane(distances: ArrayLike, method: MapMethod = "mds", seed: int = 0) -> Array:
    """A map ``(N, 2)`` of distances ``(N, N)``, within -1 and 1, with few digits."""
    places = by_neighbours(distances, seed) if method == "umap" else classical(distances)
    extent = float(np.abs(places).max(initial=0.0)) or 1.0
    return np.round(places / extent, DIGITS) + 0.0  # no -0
