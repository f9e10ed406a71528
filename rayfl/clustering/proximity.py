"""How two signatures compare: distances of all pairs of clients, in condensed form.

The condensed form of a symmetric N x N distance matrix is its upper triangle row by row, as in
``scipy.spatial.distance.pdist``: ``N (N - 1) / 2`` float64 numbers, the diagonal being 0 by definition.

The angles between subspaces are PACFL's, in degrees. Thesis Eq. 3.1 is ``principal_angle``, Eq. 3.2
``vector_angle_sum``; ``vector_angle_min`` is what its published angles are. Singular vectors have no sign,
so all three use ``|u . v|``, clipped to [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from scipy.spatial.distance import cdist, pdist, squareform

from rayfl.errors import ConfigError, DataError, nearest
from rayfl.signatures.linalg import one_thread

Array = NDArray[np.float64]

TILE_COLUMNS = 1024
"""Vectors on each side of one matrix product: tiles of 8 MB, whatever the number of clients."""


def _degrees(cosines: Array) -> Array:
    return np.asarray(np.degrees(np.arccos(np.clip(cosines, 0.0, 1.0))), np.float64)


def principal_angle(products: Array) -> Array:
    """Eq. 3.1: the smallest principal angle, whose cosine is the largest singular value of ``U_i^T U_j``.

    Args:
        products: ``U_i^T U_j`` of many pairs, ``(..., p_i, p_j)``; the columns of U orthonormal.

    Returns:
        Degrees ``(...)``, in [0, 90].
    """
    rows, columns = products.shape[-2:]
    if min(rows, columns) == 1:
        return _degrees(np.sqrt((products**2).sum(axis=(-2, -1))))
    turned = np.swapaxes(products, -2, -1)
    gram = products @ turned if rows <= columns else turned @ products
    return _degrees(np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[..., -1], 0.0)))


def vector_angle_sum(products: Array) -> Array:
    """Eq. 3.2: ``trace(arccos|U_i^T U_j|)``, the sum of the angles between vectors of equal rank.

    Over the first ``min(p_i, p_j)`` vectors. Arguments and result as :func:`principal_angle`; up to
    ``90 p`` degrees.
    """
    angles = _degrees(np.abs(np.diagonal(products, axis1=-2, axis2=-1)))
    return np.asarray(angles.sum(axis=-1), np.float64)


def vector_angle_min(products: Array) -> Array:
    """The smallest angle between any vector of one and any of the other (the authors' code).

    Arguments and result as :func:`principal_angle`.
    """
    return _degrees(np.abs(products).max(axis=(-2, -1)))


ANGLES: dict[str, Callable[[Array], Array]] = {
    "principal_angle": principal_angle,
    "vector_angle_sum": vector_angle_sum,
    "vector_angle_min": vector_angle_min,
}
"""Proximities of signatures ``(D, p_i)``, by name."""

VECTOR_DISTANCES = ("euclidean", "cosine")
"""Proximities of signatures that are plain arrays: the length of their difference, and 1 - cosine."""

RELEVANCE = "relevance"
"""The proximity of signatures with an exchange: 1 - R, R being MT-HFL's mutual relevance."""

PROXIMITIES = (*ANGLES, *VECTOR_DISTANCES, RELEVANCE)


def condensed_index(clients: int, i: NDArray[np.integer], j: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where the distance between clients i and j (i != j, either order) lies in the condensed form."""
    low, high = np.minimum(i, j).astype(np.int64), np.maximum(i, j).astype(np.int64)
    return np.asarray(clients * low - low * (low + 1) // 2 + high - low - 1, np.int64)


def condensed_distances(
    proximity: str, signatures: Sequence[NDArray[np.floating]], tile_columns: int = TILE_COLUMNS
) -> Array:
    """The distances between all pairs of N clients.

    Args:
        proximity: a name of ``ANGLES`` (signatures ``(D, p_i)``, ``p_i`` may differ) or of
            ``VECTOR_DISTANCES`` (arrays of one shape; histograms ``(c_i,)`` are padded with zeros).
        signatures: one a client.
        tile_columns: vectors on each side of a matrix product.

    Returns:
        ``(N (N - 1) / 2,)``; degrees for angles.

    Raises:
        ConfigError: if the proximity is unknown or compares no signatures (``relevance``).
        DataError: if the signatures do not fit together.
    """
    clients = len(signatures)
    if proximity in VECTOR_DISTANCES:
        vectors = _vectors(signatures)
        return np.maximum(pdist(vectors, proximity), 0.0)  # type: ignore[call-overload, no-any-return]
    compare = _angle(proximity)
    bases = _bases(proximity, signatures)
    distances = np.empty(clients * (clients - 1) // 2)
    tiles = _tiles(bases, tile_columns)
    with one_thread():
        for place, left in enumerate(tiles):
            for right in tiles[place:]:
                values = compare(_products(bases, left, right))
                i, j = np.broadcast_arrays(left[:, None], right[None, :])
                if right is left:
                    upper = np.triu_indices(len(left), k=1)
                    i, j, values = i[upper], j[upper], values[upper]
                distances[condensed_index(clients, i, j)] = values
    return distances


def cross_distances(
    proximity: str, rows: Sequence[NDArray[np.floating]], columns: Sequence[NDArray[np.floating]]
) -> Array:
    """The distances from each client of ``rows`` to each of ``columns``, ``(len(rows), len(columns))``.

    Arguments and errors as :func:`condensed_distances`.
    """
    if proximity in VECTOR_DISTANCES:
        vectors = _vectors([*rows, *columns])
        left, right = vectors[: len(rows)], vectors[len(rows) :]
        return np.maximum(cdist(left, right, proximity), 0.0)  # type: ignore[call-overload, no-any-return]
    compare = _angle(proximity)
    bases = _bases(proximity, [*rows, *columns])
    distances = np.empty((len(rows), len(columns)))
    with one_thread():
        for tile in _tiles(bases[: len(rows)], TILE_COLUMNS):
            for other in _tiles(bases[len(rows) :], TILE_COLUMNS):
                distances[np.ix_(tile, other)] = compare(_products(bases, tile, other + len(rows)))
    return distances


def relevance_matrix(relations: Sequence[NDArray[np.floating]]) -> Array:
    """MT-HFL's R (Eq. 5), the mean of both directions: ``R = (r + r^T) / 2``, unit diagonal.

    Args:
        relations: the row ``r(i, .)`` of every client, ``(N,)`` each.

    Returns:
        ``(N, N)``, symmetric, in [0, 1].

    Raises:
        DataError: if the rows do not make a square matrix.
    """
    clients = len(relations)
    if any(np.shape(row) != (clients,) for row in relations):
        raise DataError(f"relevance needs a row of {clients} relations from each of the {clients} clients")
    r = np.array(relations, dtype=np.float64).reshape(clients, clients)
    similarity = (r + r.T) / 2
    np.fill_diagonal(similarity, 1.0)
    return similarity


def relevance_distances(relations: Sequence[NDArray[np.floating]]) -> Array:
    """``1 - R`` in condensed form; arguments and errors as :func:`relevance_matrix`."""
    return np.asarray(squareform(1.0 - relevance_matrix(relations), checks=False), np.float64)


def _angle(proximity: str) -> Callable[[Array], Array]:
    if proximity == RELEVANCE:
        raise ConfigError("clustering.proximity", "relevance compares relations, not signatures", "")
    if proximity not in ANGLES:
        raise ConfigError(
            "clustering.proximity", f"no proximity {proximity!r}", nearest(proximity, PROXIMITIES)
        )
    return ANGLES[proximity]


def _bases(proximity: str, signatures: Sequence[NDArray[np.floating]]) -> list[Array]:
    """The signatures in float64; orthonormal for the principal angle, which is one between spans."""
    for client, signature in enumerate(signatures):
        if signature.ndim != 2 or signature.shape[1] == 0:
            raise DataError(f"client {client}: {proximity} needs a signature (D, p), not {signature.shape}")
        if signature.shape[0] != signatures[0].shape[0]:
            raise DataError(
                f"client {client}: its signature has {signature.shape[0]} features, "
                f"client 0's has {signatures[0].shape[0]}"
            )
    bases = [signature.astype(np.float64) for signature in signatures]
    if proximity == "principal_angle":
        with one_thread():
            bases = [np.asarray(scipy.linalg.orth(basis, rcond=1e-5), np.float64) for basis in bases]
    return bases


def _tiles(bases: Sequence[Array], columns: int) -> list[NDArray[np.intp]]:
    """Client ids in tiles of at most ``columns`` vectors, every client of a tile with equally many."""
    counts = np.array([basis.shape[1] for basis in bases], dtype=np.intp)
    tiles = []
    for count in np.unique(counts):
        ids = np.flatnonzero(counts == count)
        step = max(1, columns // int(count))
        tiles += [ids[start : start + step] for start in range(0, len(ids), step)]
    return tiles


def _products(bases: Sequence[Array], left: NDArray[np.intp], right: NDArray[np.intp]) -> Array:
    """``U_i^T U_j`` of all pairs of two tiles, ``(len(left), len(right), p_i, p_j)``, by one product."""
    stacked_left = np.concatenate([bases[i] for i in left], axis=1)
    stacked_right = np.concatenate([bases[j] for j in right], axis=1)
    product = (stacked_left.T @ stacked_right).reshape(len(left), -1, len(right), bases[right[0]].shape[1])
    return np.asarray(product.transpose(0, 2, 1, 3), np.float64)


def _vectors(signatures: Sequence[NDArray[np.floating]]) -> Array:
    """Signatures as rows; one-dimensional ones of different lengths are padded with zeros."""
    for client, signature in enumerate(signatures):
        if not (np.isfinite(signature).all() and signature.any()):
            raise DataError(f"client {client}: its signature is zero or not finite")
    shapes = {signature.shape for signature in signatures}
    if all(len(shape) == 1 for shape in shapes):
        vectors = np.zeros((len(signatures), max((shape[0] for shape in shapes), default=0)))
        for row, signature in zip(vectors, signatures, strict=True):
            row[: len(signature)] = signature
        return vectors
    if len(shapes) > 1:
        raise DataError(f"signatures of different shapes cannot be compared: {sorted(shapes)[:3]}")
    return np.array([signature.ravel() for signature in signatures], dtype=np.float64)
