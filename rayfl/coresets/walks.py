"""The columns of ``P^l`` as vectors whose inner products Algorithm 12 needs, and how to choose ``l``.

``P`` is symmetric, so ``<P^l e_u, P^l e_v>`` is entry (u, v) of ``P^(2l)``. Two forms have these inner
products: the rows of ``P^l`` itself, sparse as long as l is small; and, for large l, the rows of
``U Lambda^l`` with the few eigenvectors U whose ``lambda^l`` is not yet negligible. With growing l the first
form becomes denser and the second smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh

from rayfl.coresets.graphs import Graph, Sparse, lazy_walk, walk_power
from rayfl.errors import DataError
from rayfl.random import generator

Power = int | Literal["auto"]
Array = NDArray[np.float64]
Vectors = Any  # a csr_array or an ndarray, float64: both have @ and row indexing

FILL = 20_000_000
"""Maximum number of non-zero entries of ``P^l`` (240 MB); denser powers are computed from eigenvectors."""
NEGLIGIBLE = 0.05
"""Eigenvectors are left out once ``lambda^l`` is below this (its square enters inner products)."""
MOST_EIGENVECTORS = 400
POWERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def walk_vectors(
    graph: Graph,
    power: Power,
    references: int,
    seed: int = 0,
    *,
    fill_limit: float = FILL,
    smooth: bool = True,
) -> Vectors:
    """Vectors ``x_v``, ``(n, n)`` sparse or ``(n, r)`` dense, with ``<x_u, x_v> = <P^l e_u, P^l e_v>``.

    Args:
        graph: the graph.
        power: l; ``auto``: :func:`covering_power`.
        references: K, for ``auto``.
        seed: for ``auto`` and for the start of the eigenvector iteration.
        fill_limit: maximum number of non-zero entries of ``P^l``.
        smooth: whether eigenvectors may be used (which takes up to a minute at n = 10,000); without them,
            ``auto`` takes as many steps as ``fill_limit`` allows.

    Raises:
        DataError: if l is below 1, or ``P^l`` is too dense for the first form and not smooth enough for the
            second.
    """
    if power != "auto" and power < 1:
        raise DataError(f"power: got {power}, expected a number of steps from 1, or auto")
    walk = lazy_walk(graph)
    steps = covering_power(walk, references, seed) if power == "auto" else power
    if fill(walk, steps, seed) <= fill_limit:
        return walk_power(walk, steps)
    if smooth and eigenvalues_at_most(walk, steps, seed) <= 3 * MOST_EIGENVECTORS:  # the bound is loose
        return _smooth_vectors(walk, steps, seed)
    if power == "auto":  # as many steps as there is memory for
        return walk_power(walk, max(s for s in POWERS if s == 1 or fill(walk, s, seed) <= fill_limit))
    raise DataError(
        f"power: {power} steps on {len(graph)} vertices fill the matrix and leave too many eigenvectors; "
        "take fewer or many more steps, or auto"
    )


def covering_power(walk: Sparse, references: int, seed: int = 0) -> int:
    """The least l with which walks from K references can cover the graph: ``trace(P^(2l)) <= 2 K``.

    The trace is the sum of ``||P^l e_v||^2``, and ``1 / ||P^l e_v||^2`` is the number of vertices that a
    walk from v is effectively spread over: with a trace of K, an average of n / K. Shorter walks do not reach
    most of the graph, so that the weights do not reflect it; longer ones blur the function. On samples of the
    Gaussian mixture, errors were least at traces of 1 to 4 per reference, hence the 2; block models need
    longer walks.

    Args:
        walk: P, ``(n, n)``.
        references: K.
        seed: of the estimate of the trace.
    """
    for power, trace in zip(POWERS, _traces(walk, POWERS, seed), strict=False):
        if trace <= 2 * references:
            return power
    return POWERS[-1]


def _traces(walk: Sparse, powers: Iterable[int], seed: int) -> Iterator[float]:
    """``trace(P^(2l))`` for each l, ascending, by Hutchinson's ``E ||P^l r||^2`` with random signs r."""
    probes, done = 32, 0
    signs = generator(seed, "trace").integers(0, 2, (walk.shape[0], probes)) * 2.0 - 1.0
    for power in powers:
        for _ in range(power - done):
            signs = walk @ signs
        done = power
        yield float((signs**2).sum() / probes)


def fill(walk: Sparse, power: int, seed: int = 0) -> float:
    """The approximate number of non-zero entries of ``P^l``, from 64 of its columns."""
    n = walk.shape[0]
    columns = generator(seed, "fill").choice(n, min(n, 64), replace=False)
    reached = sp.csr_array(
        (np.ones(len(columns)), (columns, np.arange(len(columns)))), shape=(n, len(columns))
    )
    for _ in range(power):
        old_count = reached.nnz
        reached = sp.csr_array(walk @ reached)
        reached.data[:] = 1.0
        if reached.nnz == old_count or reached.nnz / len(columns) * n > FILL:
            break
    return float(reached.nnz / len(columns) * n)


def _smooth_vectors(walk: Sparse, power: int, seed: int) -> Array:
    n = walk.shape[0]
    max_rank = min(MOST_EIGENVECTORS, n - 1)
    rank = min(max_rank, max(32, round(7 * next(_traces(walk, (power,), seed)))))
    values, vectors = eigenpairs(walk, rank, seed)
    while values[-1] ** power > NEGLIGIBLE and rank < max_rank:
        rank = min(max_rank, 2 * rank)
        values, vectors = eigenpairs(walk, rank, seed)
    return np.ascontiguousarray(vectors * values**power)


def eigenvalues_at_most(walk: Sparse, power: int, seed: int = 0) -> float:
    """An upper bound on how many eigenvalues have ``lambda^l > 0.05``, from traces of shorter walks.

    Each of them adds at least ``0.05^(2m/l)`` to ``trace(P^(2m))`` (Markov's inequality).
    """
    shorter = sorted({max(1, power // part) for part in (8, 6, 4, 3, 2)})
    traces = _traces(walk, shorter, seed)
    return float(min(t * NEGLIGIBLE ** (-2 * m / power) for m, t in zip(shorter, traces, strict=True)))


def eigenpairs(walk: Sparse, rank: int, seed: int = 0) -> tuple[Array, Array]:
    """The largest eigenvalues of P, descending, ``(r,)``, negative ones as 0, and eigenvectors ``(n, r)``.

    Computed from ``P^16``, applied step by step: its large eigenvalues lie further apart, so the iteration
    converges several times faster.
    """
    n = walk.shape[0]

    def sixteen_steps(x: Array) -> Array:
        for _ in range(16):
            x = walk @ x
        return x

    start = generator(seed, "eigenvectors").normal(size=n)
    operator = LinearOperator((n, n), matvec=sixteen_steps, dtype=np.float64)
    values, vectors = eigsh(operator, k=rank, which="LA", v0=start, tol=1e-8)
    order = np.argsort(-values)
    return np.maximum(values[order], 0.0) ** (1 / 16), np.asarray(vectors[:, order])


def column_norms(vectors: Vectors) -> Array:
    """``||P^l e_v||`` of every vertex, ``(n,)``."""
    dense = isinstance(vectors, np.ndarray)
    squares = (vectors**2).sum(axis=1) if dense else vectors.multiply(vectors).sum(axis=1)
    return np.asarray(np.sqrt(np.asarray(squares, np.float64).ravel()))


def inner_products(vectors: Vectors, vertex: int) -> Array:
    """``<P^l e_u, P^l e_v>`` of one v with every u, ``(n,)``: O(m^2) for m non-zero entries per column."""
    if isinstance(vectors, np.ndarray):
        return np.asarray(vectors @ vectors[vertex])
    first, last = vectors.indptr[vertex], vectors.indptr[vertex + 1]
    near, values = vectors.indices[first:last], vectors.data[first:last]
    if len(near) > vectors.shape[0] // 20:  # rows copied one by one would cost more than the whole product
        column = np.zeros(vectors.shape[1])
        column[near] = values
        return np.asarray(vectors @ column)
    return np.asarray(vectors[near].T @ values)  # P^l is symmetric: its rows are its columns
