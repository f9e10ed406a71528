"""Clients as points in the plane, for maps that replace the matrix of distances."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

Array = NDArray[np.float64]

FULL = 500
"""Clients up to which all eigenvectors are computed; of more only the two that are needed."""
DIGITS = 3
"""Decimals of places, which lie between -1 and 1: a map is for looking at."""


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
    with threadpool_limits(1):  # sums are split among threads, which rounds them otherwise
        if len(inner) > FULL:
            from scipy.sparse.linalg import eigsh

            values, vectors = eigsh(inner, 2, which="LA", v0=np.cos(np.arange(len(inner))))
        else:
            values, vectors = np.linalg.eigh(inner)
    found = largest_axes(values, vectors)
    found[:, : min(2, len(values))] *= np.sqrt(np.clip(np.sort(values)[::-1][:2], 0, None))
    return found


def largest_axes(values: Array, vectors: Array) -> Array:
    """The eigenvectors ``(n, 2)`` of the largest two eigenvalues, their largest entries positive."""
    found = np.zeros((len(vectors), 2))
    for axis, at in enumerate(np.argsort(-values, kind="stable")[:2]):
        found[:, axis] = vectors[:, at] * np.sign(vectors[np.abs(vectors[:, at]).argmax(), at])
    return found


def plane(distances: ArrayLike) -> Array:
    """A map ``(N, 2)`` of distances ``(N, N)``: :func:`classical`, within -1 and 1, with few digits."""
    places = classical(distances)
    extent = float(np.abs(places).max(initial=0.0)) or 1.0
    return np.round(places / extent, DIGITS) + 0.0  # no -0
