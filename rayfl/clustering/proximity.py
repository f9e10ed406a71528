"""Distances between the signatures of all pairs of clients, in condensed form.

The condensed form of a symmetric N x N distance matrix is its upper triangle row by row, as in
``scipy.spatial.distance.pdist``: ``N (N - 1) / 2`` numbers; the diagonal is 0 by definition.

Clients are compared in *blocks*: :func:`pack` concatenates the signatures of up to ``BLOCK`` clients,
:func:`tile` compares two blocks by matrix products, :func:`write_tile` writes a tile into the condensed form.
A tile depends only on its two blocks, so any worker can compute tiles in any order.

The angles between subspaces are PACFL's, in degrees (:mod:`rayfl.angles`). Sets of points are compared as in
FLT, by ``min_distance`` (the paper) or ``matching`` (its authors' code).

Accuracy against an SVD in float64 of each pair: in double precision 1e-5 degrees, and 0.01 where two angles
coincide near 0, since the closed form of the largest eigenvalue then loses half the digits; in single
precision 0.005 degrees per angle (``vector_angle_sum`` adds p of them). Single-precision products have errors
of up to 1e-6, which matters most near 0, so even in single precision angles below ``NEAR`` are computed in
double precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from rayfl.angles import ANGLES
from rayfl.errors import ConfigError, DataError, nearest
from rayfl.linalg import one_thread

Array = NDArray[np.float64]
Distances = NDArray[np.floating]

BLOCK = 2048
"""Clients in a block, for any number of workers: a tile of two blocks is 17 MB in single precision."""

PRODUCT = (384, 1024)
"""Vectors on either side of one matrix product: small enough that results stay in the cache."""

STRIP = 12_000
"""Pairs whose angles are computed at a time: temporaries of less than 128 kB, which malloc reuses."""

NEAR = 1.0
"""Angles in degrees below which single precision does not suffice."""

VECTOR_DISTANCES = ("euclidean", "cosine")
"""Proximities of signatures that are plain arrays: the length of their difference, and 1 - cosine."""

MIN_DISTANCE = "min_distance"
"""A proximity of sets of points: the smallest Euclidean distance between any two (FLT)."""

MATCHING = "matching"
"""A proximity of sets of points: the points of two clients are paired at the least cost (FLT's code)."""

POINTS = (MIN_DISTANCE, MATCHING)
"""Proximities of signatures that are sets of points."""

EXACT_MATCHING = 8
"""Up to this many points per client, all pairs of clients are matched together; with more, SciPy matches them
one by one."""

RELEVANCE = "relevance"
"""The proximity of signatures with an exchange: 1 - R, R being MT-HFL's mutual relevance."""

PROXIMITIES = (*ANGLES, *VECTOR_DISTANCES, *POINTS, RELEVANCE)


def condensed_index(clients: int, i: NDArray[np.integer], j: NDArray[np.integer]) -> NDArray[np.int64]:
    """The positions ``(n,)`` of the distances between clients i and j ``(n,)`` in condensed form (i != j, any
    order).
    """
    low, high = np.minimum(i, j).astype(np.int64), np.maximum(i, j).astype(np.int64)
    return np.asarray(clients * low - low * (low + 1) // 2 + high - low - 1, np.int64)


# ---- blocks and tiles ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Signatures of n clients, ready to be compared.

    Attributes:
        size: n.
        parts: (positions in the block, ascending, ``(m,)``; vectors ``(p, m, D)``), one part for each number
            of vectors. Vectors are orthonormal for ``principal_angle``, of length 1 for the other angles,
            both up to single precision; for ``POINTS`` they are the points.
        vectors: number of vectors of a client with enough samples, see :func:`rayfl.angles.vector_angle_sum`.
    """

    size: int
    parts: tuple[tuple[NDArray[np.intp], Distances], ...]
    vectors: int | None = None

    def __post_init__(self) -> None:
        # A block sent to another process arrives in C order; products of other orders round differently.
        ordered = tuple((places, np.ascontiguousarray(vectors)) for places, vectors in self.parts)
        object.__setattr__(self, "parts", ordered)


def pack(
    proximity: str,
    signatures: Sequence[NDArray[np.floating]],
    ids: NDArray[Any] | None = None,
    vectors: int | None = None,
) -> Block:
    """Concatenate signatures.

    Args:
        proximity: a name of ``ANGLES`` (signatures ``(D, p_i)``, ``p_i`` may differ), of ``VECTOR_DISTANCES``
            (arrays of one shape; histograms ``(c_i,)`` are padded with zeros), or of ``POINTS`` (points
            ``(k_i, D)``, ``k_i`` may differ).
        signatures: one per client.
        ids: the clients' numbers or ids ``(n,)``, for messages; None: they are numbered from 0.
        vectors: :attr:`rayfl.signatures.base.Signature.vectors`.

    Raises:
        ConfigError: if the proximity is unknown or compares no signatures (``relevance``).
        DataError: if the signatures do not fit the proximity or one another.
    """
    named = list(zip(range(len(signatures)) if ids is None else ids.tolist(), signatures, strict=True))
    if proximity in VECTOR_DISTANCES:
        rows = _signature_rows(named)
        return Block(len(rows), ((np.arange(len(rows)), rows[None]),))
    if proximity == RELEVANCE:
        raise ConfigError("clustering.proximity", "relevance compares relations, not signatures", "")
    if proximity in POINTS:
        _check_points(proximity, named)
        return Block(len(signatures), _parts_by_count([points.T for points in signatures]))
    if proximity not in ANGLES:
        raise ConfigError(
            "clustering.proximity", f"no proximity {proximity!r}", nearest(proximity, PROXIMITIES)
        )
    for client, signature in named:
        if signature.ndim != 2 or signature.shape[1] == 0:
            raise DataError(f"client {client}: {proximity} needs a signature (D, p), not {signature.shape}")
        if signature.shape[0] != signatures[0].shape[0]:
            raise DataError(
                f"client {client}: its signature has {signature.shape[0]} features, "
                f"client {named[0][0]}'s has {signatures[0].shape[0]}; all must have equally many"
            )
        if not np.isfinite(signature).all():
            raise DataError(f"client {client}: its signature holds NaN or infinity")
    if proximity == "principal_angle":
        with one_thread():
            signatures = [_orthonormal_basis(signature) for signature in signatures]
    parts = _parts_by_count(signatures)
    if proximity != "principal_angle":
        parts = tuple((positions, _unit_vectors(columns)) for positions, columns in parts)
    return Block(len(signatures), parts, vectors)


def _parts_by_count(
    signatures: Sequence[NDArray[np.floating]],
) -> tuple[tuple[NDArray[np.intp], Distances], ...]:
    """The parts of a block, of signatures ``(D, p_i)``."""
    counts = np.array([signature.shape[1] for signature in signatures], dtype=np.intp)
    parts = []
    for count in np.unique(counts):
        positions = np.flatnonzero(counts == count)
        parts.append((positions, np.stack([signatures[i].T for i in positions.tolist()], axis=1)))
    return tuple(parts)


def take(blocks: Sequence[Block], ids: NDArray[np.integer]) -> Block:
    """The clients at ``ids`` ``(n,)``, ascending, of consecutive blocks, as one block."""
    by_count: dict[int, list[tuple[NDArray[np.intp], Distances]]] = {}
    start = 0
    for block in blocks:
        for positions, vectors in block.parts:
            _, in_part, places = np.intersect1d(
                positions + start, ids, assume_unique=True, return_indices=True
            )
            by_count.setdefault(len(vectors), []).append((places, vectors[:, in_part]))
        start += block.size
    parts = []
    for pieces in by_count.values():
        positions = np.concatenate([places for places, _ in pieces])
        if len(positions):
            width = max(vectors.shape[-1] for _, vectors in pieces)
            parts.append((positions, np.concatenate([_pad_with_zeros(v, width) for _, v in pieces], axis=1)))
    return Block(len(ids), tuple(parts), blocks[0].vectors if blocks else None)


def tile(proximity: str, left: Block, right: Block | None = None, precise: bool = False) -> Distances:
    """The distances between the clients of two blocks.

    Args:
        proximity: as given to :func:`pack`.
        left: n clients.
        right: m clients; None for the pairs within ``left``, of which only the upper triangle is computed
            (the lower one is undefined, the diagonal 0).
        precise: compute and return double precision.

    Returns:
        ``(n, m)``, float32 or float64.

    Raises:
        DataError: if the signatures have different numbers of features.
    """
    right_block = left if right is None else right
    out = np.zeros((left.size, right_block.size), np.float64 if precise else np.float32)
    with one_thread():
        for place, part in enumerate(left.parts):
            for second_place, second in enumerate(right_block.parts):
                if right is None and second_place < place:
                    continue
                _compare_parts(proximity, part, second, right is None, precise, out, left.vectors)
    if right is None:
        np.fill_diagonal(out, 0.0)
    return out


def write_tile(distances: Distances, clients: int, row: int, column: int, values: Distances) -> None:
    """Write a tile into the condensed form.

    Args:
        distances: condensed, ``(N (N - 1) / 2,)``, written to.
        clients: N.
        row, column: the first client on either side, ``row <= column``; equal: a tile within one block.
        values: the tile ``(n, m)``.
    """
    for offset, line in enumerate(values):
        i = row + offset
        skip = offset + 1 if row == column else 0
        start = clients * i - i * (i + 1) // 2 + column + skip - i - 1
        distances[start : start + len(line) - skip] = line[skip:]


def condensed_distances(
    proximity: str,
    signatures: Sequence[NDArray[np.floating]],
    precise: bool = True,
    block: int = BLOCK,
    vectors: int | None = None,
) -> Distances:
    """The distances between all pairs of N clients, tile by tile.

    Args:
        proximity, signatures, vectors: as for :func:`pack`.
        precise: double precision; else single precision, half the memory.
        block: clients in a block.

    Returns:
        ``(N (N - 1) / 2,)``, float64 or float32; degrees for angles.

    Raises:
        ConfigError, DataError: as :func:`pack`.
    """
    starts = range(0, len(signatures), block)
    ids = np.arange(len(signatures))
    blocks = [pack(proximity, signatures[i : i + block], ids[i : i + block], vectors) for i in starts]
    return condensed_blocks(proximity, blocks, precise)


def condensed_blocks(proximity: str, blocks: Sequence[Block], precise: bool = False) -> Distances:
    """:func:`condensed_distances` of clients that are packed already, in consecutive blocks."""
    starts = np.cumsum([0, *(block.size for block in blocks)]).tolist()
    clients = starts[-1]
    distances = np.empty(clients * (clients - 1) // 2, np.float64 if precise else np.float32)
    for i, left in enumerate(blocks):
        for j in range(i, len(blocks)):
            values = tile(proximity, left, blocks[j] if j > i else None, precise)
            write_tile(distances, clients, starts[i], starts[j], values)
    return distances


def cross_distances(
    proximity: str,
    rows: Sequence[NDArray[np.floating]],
    columns: Sequence[NDArray[np.floating]],
    vectors: int | None = None,
) -> Array:
    """The distances from each client of ``rows`` to each of ``columns``, ``(len(rows), len(columns))``.

    Arguments and errors as :func:`pack`.
    """
    packed = pack(proximity, rows, vectors=vectors), pack(proximity, columns, vectors=vectors)
    return np.asarray(tile(proximity, *packed, precise=True), np.float64)


def _compare_parts(
    proximity: str,
    first: tuple[NDArray[np.intp], Distances],
    second: tuple[NDArray[np.intp], Distances],
    within: bool,
    precise: bool,
    out: Distances,
    vectors: int | None,
) -> None:
    """Fill ``out`` with the distances between two parts of the clients, a matrix product at a time."""
    from scipy.spatial.distance import cdist

    (row_places, u), (column_places, v) = first, second
    if proximity in VECTOR_DISTANCES:
        width = max(u.shape[-1], v.shape[-1])
        rows, columns = _pad_with_zeros(u[0], width), _pad_with_zeros(v[0], width)
        values = cdist(rows, columns, proximity)  # type: ignore[call-overload]
        out[np.ix_(row_places, column_places)] = np.maximum(values, 0.0)
        return
    if u.shape[-1] != v.shape[-1]:
        raise DataError(f"signatures of {u.shape[-1]} and of {v.shape[-1]} features cannot be compared")
    same = within and u is v
    if proximity in POINTS:
        values = _point_distances(proximity, u, v, same)
        out[np.ix_(row_places, column_places)] = values
        if within and not same:  # clients of either part may come first
            out[np.ix_(column_places, row_places)] = values.T
        return
    step, stride = max(1, PRODUCT[0] // len(u)), max(1, PRODUCT[1] // len(v))
    cuts = [slice(j, j + stride) for j in range(0, len(column_places), stride)]
    singles = [] if precise else [v[:, cut].astype(np.float32) for cut in cuts]
    doubles: dict[int, Array] = {}  # the ``cuts`` that need double precision, by number
    for i in range(0, len(row_places), step):
        rows = slice(i, i + step)
        single, double = u[:, rows].astype(np.float32), None
        for number, columns in enumerate(cuts):
            if same and columns.stop <= i:
                continue  # below the diagonal
            if not precise:
                products = _inner_products(single, singles[number])
                values = _angles(proximity, products, vectors)
                near = _needs_double(proximity, products, values)
                if same:
                    near &= row_places[rows, None] < column_places[columns]  # not from a client to itself
            if precise or near.any():
                double = _in_double_precision(proximity, u[:, rows]) if double is None else double
                if number not in doubles:
                    doubles[number] = _in_double_precision(proximity, v[:, columns])
                refined = _angles(proximity, _inner_products(double, doubles[number]), vectors)
                values = refined if precise else np.where(near, refined, values)
            out[np.ix_(row_places[rows], column_places[columns])] = values
            if within and not same:  # clients of either part may come first
                out[np.ix_(column_places[columns], row_places[rows])] = values.T


def _point_distances(proximity: str, u: Distances, v: Distances, same: bool) -> Array:
    """The distances of all pairs ``(n, m)``, from points ``(k_i, n, D)``, ``(k_j, m, D)``.

    Within one block (``same``), entries below the diagonal may be left 0.

    One product gives all squared distances: ``|u - v|^2 = (-2 u, |u|^2, 1) . (v, 1, |v|^2)``, up to 1e-15 of
    the squared lengths. The mean of ``v`` is subtracted first, so that these lengths are not large.
    """
    middle = v.mean(axis=(0, 1), dtype=np.float64)
    left, right = u.astype(np.float64) - middle, v.astype(np.float64) - middle
    ones = np.ones((*left.shape[:-1], 1)), np.ones((*right.shape[:-1], 1))
    left = np.concatenate([-2 * left, (left**2).sum(-1, keepdims=True), ones[0]], axis=-1)
    right = np.concatenate([right, ones[1], (right**2).sum(-1, keepdims=True)], axis=-1)
    distances = np.zeros((u.shape[1], v.shape[1]))
    step, stride = max(1, PRODUCT[0] // len(u)), max(1, PRODUCT[1] // len(v))
    for i in range(0, u.shape[1], step):
        rows = slice(i, i + step)
        for j in range(0, v.shape[1], stride):
            columns = slice(j, j + stride)
            if same and columns.stop <= i:
                continue  # below the diagonal
            distances[rows, columns] = _POINT_DISTANCES[proximity](
                _inner_products(left[:, rows], right[:, columns])
            )
    return distances


def _nearest_points(squares: Distances) -> Array:
    """FLT, Algorithm 2: ``min_{r,s} ||u_ir - u_js||`` from squared distances ``(n, m, k_i, k_j)``."""
    least = squares[..., 0, 0]
    for a, b in np.ndindex(*squares.shape[-2:]):
        least = np.minimum(least, squares[..., a, b])
    return np.asarray(np.sqrt(np.maximum(least, 0.0)), np.float64)


def _matched_points(squares: Distances) -> Array:
    """FLT's code: ``min_pi sqrt(sum_r ||u_ir - u_j,pi(r)||^2) / k``, arguments as :func:`_nearest_points`.

    If the numbers of points differ, k is the smaller one; every point of the smaller set is matched with a
    different point of the larger set, and the other points are ignored (as in the code,
    ``min_matching_distance``).

    The minimum for each set of matched points of the larger set is extended by one point of the smaller set
    at a time. That takes ``k 2^(k-1)`` additions for all pairs of clients at once, 80 for k = 5, where the
    code tries k! orders.
    """
    from scipy.optimize import linear_sum_assignment

    if squares.shape[-2] > squares.shape[-1]:
        squares = np.swapaxes(squares, -2, -1)
    n_smaller, n_larger = squares.shape[-2:]
    if n_larger > EXACT_MATCHING:
        sums = np.empty(squares.shape[:-2])
        for pair in np.ndindex(*sums.shape):
            costs = squares[pair]
            sums[pair] = costs[linear_sum_assignment(costs)].sum()
    else:
        least: dict[int, Array] = {0: np.zeros(squares.shape[:-2])}  # by taken points, as bits
        for a in range(n_smaller):
            following: dict[int, Array] = {}
            for taken, total in least.items():
                for b in range(n_larger):
                    if taken >> b & 1:
                        continue
                    cost, best = total + squares[..., a, b], following.get(taken | 1 << b)
                    following[taken | 1 << b] = cost if best is None else np.minimum(best, cost, out=best)
            least = following
        sums = functools.reduce(np.minimum, least.values())
    return np.asarray(np.sqrt(np.maximum(sums, 0.0)) / n_smaller, np.float64)


_POINT_DISTANCES: dict[str, Callable[[Distances], Array]] = {
    MIN_DISTANCE: _nearest_points,
    MATCHING: _matched_points,
}


def _angles(proximity: str, products: Distances, vectors: int | None) -> Array:
    """The angles of products ``(n, m, p_i, p_j)``, a strip at a time."""
    step = max(1, STRIP // products.shape[1])
    strips = [products[start : start + step] for start in range(0, len(products), step)]
    return np.concatenate([ANGLES[proximity](strip, vectors) for strip in strips])


def _inner_products(u: Distances, v: Distances) -> Distances:
    """``U_i^T U_j`` of all pairs, ``(n, m, p_i, p_j)``, by one product.

    From vectors ``(p_i, n, D)`` and ``(p_j, m, D)``. A view: entries (a, b) of all pairs lie together in
    memory, as the angles read them.
    """
    product = u.reshape(-1, u.shape[-1]) @ v.reshape(-1, v.shape[-1]).T
    return product.reshape(len(u), u.shape[1], len(v), v.shape[1]).transpose(1, 3, 0, 2)


def _needs_double(proximity: str, products: Distances, values: Array) -> NDArray[np.bool_]:
    """Pairs with an angle so small that single precision does not suffice."""
    if proximity != "vector_angle_sum":
        return values < NEAR
    near = np.zeros(values.shape, np.bool_)
    for k in range(min(products.shape[-2:])):
        near |= np.abs(products[..., k, k]) > np.cos(np.radians(NEAR))
    return near


def _orthonormal_basis(signature: NDArray[np.floating]) -> Distances:
    """An orthonormal basis of the columns: the columns themselves if they are orthonormal up to rounding."""
    gram = signature.T @ signature
    if np.abs(gram - np.eye(len(gram), dtype=gram.dtype)).max() < 1e-5:
        return signature
    return np.asarray(scipy.linalg.orth(signature.astype(np.float64), rcond=1e-5), signature.dtype)


def _in_double_precision(proximity: str, vectors: Distances) -> Array:
    """Vectors ``(p, n, D)`` that are orthonormal, or of length 1, in double precision.

    If a basis U is orthonormal up to e, ``U (3 I - U^T U) / 2`` is so up to e^2 and has the same span.
    """
    vectors = vectors.astype(np.float64)
    if proximity != "principal_angle":
        return np.asarray(_unit_vectors(vectors), np.float64)
    u = vectors.transpose(1, 0, 2)
    return np.ascontiguousarray((1.5 * u - 0.5 * ((u @ u.transpose(0, 2, 1)) @ u)).transpose(1, 0, 2))


def _unit_vectors(vectors: Any) -> Any:
    """Vectors of length 1; zero stays zero."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(length > 0, length, 1)


def _check_points(proximity: str, named: Sequence[tuple[int | str, NDArray[np.floating]]]) -> None:
    for client, points in named:
        if points.ndim != 2 or len(points) == 0 or not np.isfinite(points).all():
            raise DataError(
                f"client {client}: {proximity} needs finite points (k, D), not an array {points.shape}"
            )
        first, of_first = named[0]
        if points.shape[1] != of_first.shape[1]:
            raise DataError(
                f"client {client}: its points have {points.shape[1]} features, client {first}'s have "
                f"{of_first.shape[1]}; all must have equally many"
            )


def _signature_rows(named: Sequence[tuple[int | str, NDArray[np.floating]]]) -> Distances:
    """Signatures as rows; one-dimensional ones of different lengths are padded with zeros."""
    signatures = [signature for _, signature in named]
    for client, signature in named:
        if not (np.isfinite(signature).all() and signature.any()):
            raise DataError(f"client {client}: its signature is zero or not finite")
    shapes = {signature.shape for signature in signatures}
    if all(len(shape) == 1 for shape in shapes):
        width = max((shape[0] for shape in shapes), default=0)
        return np.array([_pad_with_zeros(signature, width) for signature in signatures]).reshape(
            len(signatures), width
        )
    if len(shapes) > 1:
        raise DataError(f"signatures of different shapes cannot be compared: {sorted(shapes)[:3]}")
    return np.array([signature.ravel() for signature in signatures])


def _pad_with_zeros(vectors: Any, width: int) -> Any:
    """Append zeros on the last axis."""
    missing = width - vectors.shape[-1]
    return np.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(0, missing)]) if missing else vectors


# ---- relevance -------------------------------------------------------------------------------------------


def relevance_matrix(relations: Sequence[NDArray[np.floating]]) -> Array:
    """MT-HFL's R (Eq. 5), the mean of both directions: ``R = (r + r^T) / 2``, unit diagonal.

    Args:
        relations: the row ``r(i, .)`` of every client, ``(N,)`` each.

    Returns:
        ``(N, N)``, symmetric, in [0, 1].

    Raises:
        DataError: if the rows do not make a square matrix.
    """
    r = np.array(_checked_relations(relations), dtype=np.float64).reshape(len(relations), len(relations))
    similarity = (r + r.T) / 2
    np.fill_diagonal(similarity, 1.0)
    return similarity


def relevance_distances(
    relations: Sequence[NDArray[np.floating]], precise: bool = True, block: int = 512
) -> Distances:
    """``1 - R`` in condensed form, computed in tiles without the square matrix.

    The result is ``(N (N - 1) / 2,)``. Arguments and errors as :func:`relevance_matrix` and
    :func:`condensed_distances`.
    """
    clients = len(_checked_relations(relations))
    distances: Distances = np.empty(clients * (clients - 1) // 2, np.float64 if precise else np.float32)
    starts = range(0, clients, block)
    for i in starts:
        for j in range(i, clients, block):
            forward = np.array([row[j : j + block] for row in relations[i : i + block]], np.float64)
            backward = np.array([row[i : i + block] for row in relations[j : j + block]], np.float64)
            write_tile(distances, clients, i, j, 1.0 - (forward + backward.T) / 2)
    return distances


def _checked_relations(relations: Sequence[NDArray[np.floating]]) -> Sequence[NDArray[np.floating]]:
    clients = len(relations)
    if any(np.shape(row) != (clients,) for row in relations):
        raise DataError(f"relevance needs a row of {clients} relations from each of the {clients} clients")
    return relations
