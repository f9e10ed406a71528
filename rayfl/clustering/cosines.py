"""Cosine similarities of long vectors, in blocks of rows, so that no process holds the N x P matrix.

CFL compares the updates of all clients of a cluster (Sattler et al., Eq. 44), FLIS their predictions. Each
worker has the rows of its own clients; :func:`tile` compares two blocks, :func:`condensed_cosines` does so
for all pairs of blocks in this process, two of them at a time.

Products are computed in single precision over ``CHUNK`` entries at a time and summed in double precision.
Compared with double precision throughout, similarities differed by at most 1.2e-7: for 1,000,000 random
numbers, independent, nearly equal or all positive, and for 2,500 predictions of 10 classes. A tile depends on
its two blocks alone, not on the process that computes it; other block boundaries may round differently.

:func:`sketch` reduces a row of P parameters to q numbers, for the case that even the rows are too much to
send.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import scipy
from numpy.typing import NDArray

from rayfl.clustering.proximity import write_tile
from rayfl.errors import DataError
from rayfl.linalg import one_thread
from rayfl.random import generator, hashes, key

Array = NDArray[np.float64]
Rows = NDArray[np.floating]
Projection = Literal["sparse", "gaussian"]

CHUNK = 2048
"""Entries of a row that are multiplied in single precision before they are added in double precision."""

NONZEROS = 8
"""Entries of the sketch to which each number of the row is added, in the sparse projection."""


def _column_chunks(width: int, chunk: int = CHUNK) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, width, chunk)]


def norms(rows: Rows) -> Array:
    """The Euclidean norm of each row of ``(B, P)``, in double precision, ``(B,)``.

    Raises:
        DataError: if a row is not finite.
    """
    squares = np.zeros(len(rows))
    for cut in _column_chunks(rows.shape[1]):
        part = rows[:, cut].astype(np.float64)
        squares += np.einsum("bp,bp->b", part, part)
    if not np.isfinite(squares).all():
        raise DataError(f"row {int(np.flatnonzero(~np.isfinite(squares))[0])} of the block is not finite")
    return np.asarray(np.sqrt(squares), np.float64)


def tile(left: Rows, right: Rows, left_norms: Array | None = None, right_norms: Array | None = None) -> Array:
    """The cosine similarities of the rows of two blocks.

    Args:
        left, right: rows of P parameters, ``(B, P)`` and ``(C, P)``.
        left_norms, right_norms: their norms if known, ``(B,)`` and ``(C,)``.

    Returns:
        ``(B, C)`` in [-1, 1]. A row of zeros has no direction: its similarity to all rows is 0.

    Raises:
        DataError: if a row is not finite.
        ValueError: if the rows differ in length.
    """
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"rows of {left.shape[1]} and of {right.shape[1]} numbers cannot be compared")
    left_scale = _inverse(norms(left) if left_norms is None else left_norms)
    right_scale = _inverse(norms(right) if right_norms is None else right_norms)
    cosines = np.zeros((len(left), len(right)))
    with one_thread():
        for cut in _column_chunks(left.shape[1]):
            # scaled to length 1 before they are multiplied, so that single precision does not overflow
            u = (left[:, cut] * left_scale).astype(np.float32, copy=False)
            v = (right[:, cut] * right_scale).astype(np.float32, copy=False)
            cosines += u @ v.T
    return np.asarray(np.clip(cosines, -1.0, 1.0), np.float64)


def _inverse(lengths: Array) -> NDArray[np.float32]:
    """``1 / length`` as a column; 0 where the length is, in single precision, 0."""
    nonzero = lengths > np.finfo(np.float32).tiny
    return np.divide(1.0, lengths, out=np.zeros(len(lengths)), where=nonzero).astype(np.float32)[:, None]


def condensed_cosines(blocks: Sequence[Rows]) -> tuple[Array, Array]:
    """The cosine similarities of all N clients, from blocks of their rows, two blocks at a time.

    Args:
        blocks: rows ``(B_k, P)`` of consecutive clients. If the sequence reads a block on access, no more
            than two are in memory.

    Returns:
        The similarities in condensed form, ``(N (N - 1) / 2,)``, and the norms ``(N,)``.

    Raises:
        DataError, ValueError: as :func:`tile`.
    """
    lengths = [norms(blocks[k]) for k in range(len(blocks))]
    sizes = [len(length) for length in lengths]
    starts = list(itertools.accumulate(sizes, initial=0))
    clients = starts.pop()
    similarities = np.empty(clients * (clients - 1) // 2)
    for i in range(len(blocks)):
        left = blocks[i]
        for j in range(i, len(blocks)):
            right = left if i == j else blocks[j]
            write_tile(similarities, clients, starts[i], starts[j], tile(left, right, lengths[i], lengths[j]))
    return similarities, np.concatenate([np.empty(0), *lengths])


def mean_norm(similarities: Rows, lengths: Rows, weights: Rows) -> float:
    """The norm of a weighted mean of vectors, from their cosines and norms alone.

    ``||sum_i p_i d_i||^2 = sum_ij p_i p_j a_ij ||d_i|| ||d_j||``: CFL's ``||d_c||`` (Eq. 32) without any
    vector, also over updates of several rounds. If similarities have errors of size e, a mean of zero gets a
    norm of about ``sqrt(e) max ||d_i||``: 5e-4 times the maximum.

    Args:
        similarities: condensed ``(N (N - 1) / 2,)``.
        lengths: norms ``(N,)``.
        weights: ``(N,)``, not negative, not all 0; divided by their sum.
    """
    scaled_norms = lengths.astype(np.float64) * weights / np.sum(weights, dtype=np.float64)
    square, start = float(scaled_norms @ scaled_norms), 0
    for i in range(len(scaled_norms) - 1):
        row = similarities[start : start + len(scaled_norms) - 1 - i].astype(np.float64)
        square += 2.0 * float(scaled_norms[i] * (row @ scaled_norms[i + 1 :]))
        start += len(row)
    return float(np.sqrt(max(square, 0.0)))


# ---- sketches --------------------------------------------------------------------------------------------


def sketch(rows: Rows, dimension: int, seed: int, projection: Projection = "sparse") -> NDArray[np.float32]:
    """A random projection S of each row to q numbers: ``(B, P) -> (B, q)``, the same S for all rows.

    ``gaussian``: independent entries N(0, 1/q). ``sparse``: every number of the row is added, with a random
    sign and scaled by ``1/sqrt(s)``, to s = ``NONZEROS`` numbers of the sketch, one in each of its s parts
    (Kane and Nelson, *Sparser Johnson-Lindenstrauss transforms*, 2014): s/q of the work. S is derived from
    ``seed`` and the positions of the numbers, and never stored as a whole.

    For x, y of length 1 and cosine a both have ``E <Sx, Sy> = a`` and ``Var <Sx, Sy> <= (1 + a^2) / q``,
    with equality for ``gaussian``. Dividing by the sketches' own norms, as :func:`tile` does, leaves a
    standard deviation of about ``(1 - a^2) / sqrt(q)``. For many pairs at once see :func:`sketch_error`.

    Args:
        rows: ``(B, P)``.
        dimension: q; for ``sparse`` a multiple of ``NONZEROS``.
        seed: the same for all rows that are compared.
        projection: see above.

    Raises:
        ValueError: if q is not positive, or not a multiple.
    """
    if dimension < 1 or (projection == "sparse" and dimension % NONZEROS):
        raise ValueError(
            f"a {projection} sketch cannot have {dimension} numbers: take a multiple of {NONZEROS}"
        )
    total = np.zeros((len(rows), dimension))
    with one_thread():
        for cut in _column_chunks(rows.shape[1]):
            part = rows[:, cut].astype(np.float32)
            matrix = _MATRICES[projection](cut.start, part.shape[1], dimension, seed)
            total += part @ matrix
    return total.astype(np.float32)


def sketch_error(clients: int, dimension: int, failure: float = 0.01) -> float:
    """A bound on the error of all cosines of N Gaussian sketches; fails with probability ``failure`` at most.

    Johnson and Lindenstrauss: ``P(| ||Sx||^2 - 1 | > e) <= 2 exp(-q (e^2/4 - e^3/6))`` for x of length 1.
    Applied to x, x + y and x - y for all N vectors and all pairs, N^2 times, it gives e from
    ``2 N^2 exp(-q (e^2/4 - e^3/6)) = failure``. Then norms and inner products have errors of at most e, and
    cosines of at most ``2 e / (1 - e)``.

    Actual errors are a third of that or less (see :func:`sketch` for the typical error). The sparse
    projection obeys the same law up to constants.

    Returns:
        ``2 e / (1 - e)``; infinite if there is no such e below 1.
    """
    exponent = float(np.log(2.0 * clients * clients / failure)) / dimension
    if exponent >= 1 / 4 - 1 / 6:
        return float("inf")
    e = float(scipy.optimize.brentq(lambda e: e**2 / 4 - e**3 / 6 - exponent, 0.0, 1.0))
    return 2 * e / (1 - e)


def _gaussian(start: int, count: int, dimension: int, seed: int) -> NDArray[np.float32]:
    draws = generator(seed, "gaussian sketch", start).standard_normal((count, dimension), np.float32)
    return draws / np.float32(np.sqrt(dimension))


def _sparse(start: int, count: int, dimension: int, seed: int) -> scipy.sparse.csr_matrix:
    draws = hashes(key(seed, "sparse sketch"), np.arange(start, start + count), NONZEROS)
    width = dimension // NONZEROS
    columns = (draws >> np.uint64(1)).astype(np.int64) % width + width * np.arange(NONZEROS)
    signs = (1 - 2 * (draws & np.uint64(1)).astype(np.float32)) / np.float32(np.sqrt(NONZEROS))
    ends = np.arange(0, count * NONZEROS + 1, NONZEROS)
    return scipy.sparse.csr_matrix((signs.ravel(), columns.ravel(), ends), (count, dimension))


_MATRICES: dict[Projection, Callable[[int, int, int, int], Any]] = {"sparse": _sparse, "gaussian": _gaussian}
