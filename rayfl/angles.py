"""Angles between the subspaces in which data mostly lie (PACFL), in degrees.

Thesis Eq. 3.1 is ``principal_angle``, Eq. 3.2 ``vector_angle_sum``; the angles published in the thesis were
computed with ``vector_angle_min``. The sign of a singular vector is arbitrary, so all three use ``|u . v|``,
clipped to [0, 1].
They compare signatures of clients (:mod:`rayfl.clustering.proximity`) and classes of a dataset
(:mod:`rayfl.data.heterogeneity`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Distances = NDArray[np.floating]


def _degrees(cosines: Array) -> Array:
    return np.asarray(np.degrees(np.arccos(np.clip(cosines, 0.0, 1.0))), np.float64)


def principal_angle(products: Distances, vectors: int | None = None) -> Array:
    """Eq. 3.1: the smallest principal angle, whose cosine is the largest singular value of ``U_i^T U_j``.

    Args:
        products: ``U_i^T U_j`` of many pairs, ``(..., p_i, p_j)``; the columns of U orthonormal.
        vectors: p, the number of columns of a signature of full rank (not used here).

    Returns:
        Degrees ``(...)``, in [0, 90].
    """
    if products.shape[-2] < products.shape[-1]:
        products = np.swapaxes(products, -2, -1)
    rows, size = products.shape[-2:]
    if size > 3:
        matrices = np.ascontiguousarray(products, np.float64)
        largest = np.linalg.eigvalsh(np.swapaxes(matrices, -2, -1) @ matrices)[..., -1]
        return _degrees(np.sqrt(np.maximum(largest, 0.0)))
    m = [[products[..., a, b].astype(np.float64) for b in range(size)] for a in range(rows)]
    gram = [[sum(row[a] * row[b] for row in m) if a <= b else None for b in range(size)] for a in range(size)]
    return _degrees(np.sqrt(np.maximum(_LARGEST[size](gram), 0.0)))


def _largest_of_1(g: Any) -> Array:
    return np.asarray(g[0][0])


def _largest_of_2(g: Any) -> Array:
    half = (g[0][0] - g[1][1]) / 2
    return np.asarray((g[0][0] + g[1][1]) / 2 + np.sqrt(half * half + g[0][1] * g[0][1]))


def _largest_of_3(g: Any) -> Array:
    """The largest eigenvalue of symmetric 3 x 3 matrices, by the trigonometric solution of the cubic.

    With mean eigenvalue q and spread s, the matrix ``(G - q I) / s`` has the eigenvalues
    ``2 cos(phi + 2 pi k / 3)`` where ``cos(3 phi)`` is half its determinant.
    """
    q = (g[0][0] + g[1][1] + g[2][2]) / 3
    a, b, c = g[0][0] - q, g[1][1] - q, g[2][2] - q
    d, e, f = g[0][1], g[0][2], g[1][2]
    s = np.sqrt((a * a + b * b + c * c + 2 * (d * d + e * e + f * f)) / 6)
    determinant = a * (b * c - f * f) - d * (d * c - f * e) + e * (d * f - b * e)
    cosine = determinant / np.maximum(2 * s * s * s, 1e-300)  # s = 0: all eigenvalues are q
    return np.asarray(q + 2 * s * np.cos(np.arccos(np.clip(cosine, -1.0, 1.0)) / 3))


_LARGEST: dict[int, Callable[[Any], Array]] = {1: _largest_of_1, 2: _largest_of_2, 3: _largest_of_3}


def vector_angle_sum(products: Distances, vectors: int | None = None) -> Array:
    """Eq. 3.2: ``trace(arccos|U_i^T U_j|)``, the sum of the angles between vectors of equal rank.

    A client with few samples has fewer than p vectors. The sum of its ``min(p_i, p_j)`` angles is multiplied
    by ``p / min(p_i, p_j)``: otherwise it would be close to every client, having fewer angles to add.

    Arguments and result as :func:`principal_angle`; up to ``90 p`` degrees. Without ``vectors`` p is the
    larger of ``p_i`` and ``p_j``.
    """
    common = min(products.shape[-2:])
    angles = np.zeros(products.shape[:-2])
    for k in range(common):
        angles += _degrees(np.abs(products[..., k, k].astype(np.float64)))
    scaled: Array = angles * ((vectors or max(products.shape[-2:])) / common)
    return scaled


def vector_angle_min(products: Distances, vectors: int | None = None) -> Array:
    """The smallest angle between any column of ``U_i`` and any column of ``U_j`` (as in the authors' code).

    Arguments and result as :func:`principal_angle`.
    """
    largest = np.zeros(products.shape[:-2])
    for a, b in np.ndindex(*products.shape[-2:]):
        np.maximum(largest, np.abs(products[..., a, b]), out=largest)
    return _degrees(largest)


ANGLES: dict[str, Callable[[Distances, int | None], Array]] = {
    "principal_angle": principal_angle,
    "vector_angle_sum": vector_angle_sum,
    "vector_angle_min": vector_angle_min,
}
"""Proximities of signatures ``(D, p_i)``, by name."""
