"""Graphs as sparse matrices, their lazy random walks, and the graphs of the thesis' figures."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from rayfl.errors import DataError
from rayfl.random import generator

Points = NDArray[np.float64]
Sparse = Any  # scipy.sparse.csr_array, float64


@dataclass(frozen=True)
class Graph:
    """An undirected weighted graph that has been checked.

    Attributes:
        adjacency: ``A``, ``(n, n)``, SciPy sparse, symmetric, weights >= 0: the larger, the more alike.
            Given in any sparse format, kept as a ``csr_array``.
        points: ``(n, d)``, where the graph comes from a point cloud.
        groups: planted group of each vertex ``(n,)``, where known.
        components: accept a graph that is not connected. A walk never leaves its component, so a
            component without a reference is not represented.

    Raises:
        DataError: if the adjacency is not square, not symmetric, has negative or non-finite weights, no
            edges at all, or (unless ``components``) falls into components.
    """

    adjacency: Sparse
    points: Points | None = None
    groups: NDArray[np.int64] | None = None
    components: bool = False

    def __post_init__(self) -> None:
        A: Sparse = sp.csr_array(self.adjacency, dtype=np.float64, copy=True)
        A.sum_duplicates()
        if A.ndim != 2 or A.shape[0] != A.shape[1]:
            raise DataError(f"graph: the adjacency has shape {A.shape}, expected a square matrix")
        if not np.isfinite(A.data).all() or (A.data < 0).any():
            raise DataError("graph: negative or non-finite edge weights; similarities >= 0 are expected")
        A.eliminate_zeros()
        if (A - sp.diags_array(A.diagonal())).count_nonzero() == 0:
            raise DataError(f"graph: {A.shape[0]} vertices and no edges; there is nothing to walk along")
        asymmetry = abs(A - A.T)
        if asymmetry.nnz and asymmetry.max() > 1e-9 * A.data.max():
            raise DataError("graph: the adjacency is not symmetric; take A.maximum(A.T) or (A + A.T) / 2")
        if not self.components:
            count, labels = connected_components(A, directed=False)
            if count > 1:
                sizes = np.sort(np.bincount(labels))[::-1]
                raise DataError(
                    f"graph: it falls into {count} components, the largest with {sizes[0]} of {len(labels)} "
                    "vertices; keep that one (graphs.largest_component) or accept them (components=True)"
                )
        if A.nnz < 2**31:  # half the memory, and scikit-learn requires it
            A.indices, A.indptr = A.indices.astype(np.int32), A.indptr.astype(np.int32)
        object.__setattr__(self, "adjacency", A)

    def __len__(self) -> int:
        return int(self.adjacency.shape[0])


def lazy_walk(graph: Graph) -> Sparse:
    """``P = (A - D) / d_max + I``, Definition 1: symmetric, rows and columns sum to 1, sparse ``(n, n)``."""
    degrees = np.asarray(graph.adjacency.sum(axis=1)).ravel()
    stay = 1.0 - degrees / degrees.max()
    return sp.csr_array(graph.adjacency / degrees.max() + sp.diags_array(stay))


def walk_power(walk: Sparse, power: int) -> Sparse:
    """``P^l``, where a walk is after ``l >= 1`` steps, ``(n, n)``, by repeated squaring.

    A sparse array, or an ndarray once a tenth of the entries are non-zero.
    """
    result, square = None, walk
    while power:
        if power & 1:
            result = square if result is None else _dense_if_full(result @ square)
        power >>= 1
        if power:
            square = _dense_if_full(square @ square)
    return result


def _dense_if_full(matrix: Sparse) -> Sparse:
    if not isinstance(matrix, np.ndarray) and matrix.nnz > 0.1 * matrix.shape[0] ** 2:
        return matrix.toarray()
    return matrix


def largest_component(adjacency: Sparse) -> tuple[Sparse, NDArray[np.int64]]:
    """The adjacency of the largest component, and which vertices ``(n',)`` of the old graph it has."""
    _, labels = connected_components(adjacency, directed=False)
    keep = np.flatnonzero(labels == np.bincount(labels).argmax())
    return sp.csr_array(adjacency)[keep][:, keep], keep


def knn_graph(
    points: Points,
    neighbours: int = 10,
    *,
    groups: NDArray[np.int64] | None = None,
    components: bool = False,
) -> Graph:
    """The graph of a point cloud: i and j are joined if one is among the other's k nearest.

    Args:
        points: ``(n, d)``.
        neighbours: k; the thesis takes 10.
        groups: planted groups, passed on.
        components: accept a graph that is not connected.

    Raises:
        DataError: if there are not more points than neighbours, or as :class:`Graph`.
    """
    if points.ndim != 2 or not 1 <= neighbours < len(points):
        raise DataError(
            f"points: shape {points.shape} and {neighbours} neighbours; expected (n, d), n > neighbours >= 1"
        )
    if not np.isfinite(points).all():
        raise DataError("points: some coordinates are not finite numbers")
    from sklearn.neighbors import kneighbors_graph  # deferred: it takes a second

    A: Sparse = sp.csr_array(kneighbors_graph(points, neighbours, include_self=False), dtype=np.float64)
    A = sp.csr_array(A - sp.diags_array(A.diagonal()))  # if points are equal, one may be its own neighbour
    A.data[:] = np.minimum(A.data, 1.0)
    return Graph(A.maximum(A.T), np.asarray(points, np.float64), groups, components)


def gaussian_mixture(n: int, seed: int, neighbours: int = 10) -> Graph:
    """The point cloud of section 6.6.2: three Gaussians with 20, 30 and 50 % of n points, and its k-NN graph.

    Means (1, -3), (-3, 2), (3, 0), covariance I. Returns the largest component: rarely a far-off clique of
    neighbours is left out.
    """
    sizes = np.array([round(0.2 * n), round(0.3 * n), 0])
    sizes[2] = n - sizes.sum()
    groups = np.repeat(np.arange(3), sizes)
    means = np.array([[1.0, -3.0], [-3.0, 2.0], [3.0, 0.0]])
    points = means[groups] + generator(seed, "gaussian mixture").normal(size=(n, 2))
    graph = knn_graph(points, neighbours, components=True)
    A, keep = largest_component(graph.adjacency)
    return Graph(A, points[keep], groups[keep])


def block_model(sizes: Sequence[int], within: float, across: float, seed: int) -> Graph:
    """A stochastic block model: edges with probability ``within`` inside a block and ``across`` between two.

    Returns its largest component; ``groups`` are the blocks.
    """
    rng = generator(seed, "block model")
    starts = np.concatenate([[0], np.cumsum(sizes)])
    rows, columns = [], []
    for a in range(len(sizes)):
        for b in range(a, len(sizes)):
            pairs = sizes[a] * sizes[b] if a != b else sizes[a] * (sizes[a] - 1) // 2
            chosen = rng.choice(pairs, rng.binomial(pairs, within if a == b else across), replace=False)
            i, j = _triangle(chosen) if a == b else (chosen // sizes[b], chosen % sizes[b])
            rows.append(starts[a] + i)
            columns.append(starts[b] + j)
    n = int(starts[-1])
    A, keep = largest_component(_undirected_adjacency(np.concatenate(rows), np.concatenate(columns), n))
    return Graph(A, groups=np.repeat(np.arange(len(sizes)), sizes)[keep])


def _triangle(pairs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pairs (i, j), i > j, that are numbered row by row: (1, 0), (2, 0), (2, 1), ..."""
    i = ((1 + np.sqrt(1 + 8 * pairs.astype(np.float64))) / 2).astype(np.int64)
    i -= i * (i - 1) // 2 > pairs  # the square root may be off by one
    i += i * (i + 1) // 2 <= pairs
    return i, pairs - i * (i - 1) // 2


def random_graph(n: int, degree: float, seed: int) -> Graph:
    """Every pair is joined with the same probability, with ``degree`` edges per vertex on average.

    Raises:
        DataError: if there are fewer than 2 vertices, or the degree is not in (0, n - 1].
    """
    if not (n >= 2 and 0 < degree <= n - 1):
        raise DataError(f"random graph: n = {n}, degree {degree}; expected n >= 2 and 0 < degree <= n - 1")
    return block_model([n], degree / (n - 1), 0.0, seed)


def preferential_tree(n: int, seed: int) -> Graph:
    """A tree with power-law degrees: each new vertex joins an old one drawn in proportion to its degree.

    Raises:
        DataError: if there are fewer than 2 vertices.
    """
    if n < 2:
        raise DataError(f"preferential tree: {n} vertices, expected 2 or more")
    rng = generator(seed, "preferential tree")
    ends = np.empty(2 * (n - 1), np.int64)  # ends of all edges: a uniform draw is proportional to degree
    ends[:2] = 0, 1
    for new in range(2, n):
        ends[2 * new - 2] = ends[rng.integers(2 * new - 2)]
        ends[2 * new - 1] = new
    return Graph(_undirected_adjacency(ends[::2], ends[1::2], n))


def ego_graph(path: Path) -> Graph:
    """The largest component of a graph in a file with two vertex numbers per line (SNAP's ego-Facebook).

    The file may be compressed (``.gz``).

    Raises:
        DataError: if the file is missing or not such a list.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            edges = np.loadtxt(file, dtype=np.int64, ndmin=2)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"{path}: {error}; a file with two vertex numbers per line is expected, such as SNAP's "
            "facebook_combined.txt.gz"
        ) from None
    if edges.shape[1:] != (2,):
        raise DataError(f"{path}: {edges.shape[1]} columns, expected two vertex numbers per line")
    _, compact = np.unique(edges, return_inverse=True)
    compact = compact.reshape(edges.shape)
    A = _undirected_adjacency(compact[:, 0], compact[:, 1], int(compact.max()) + 1)
    return Graph(largest_component(A)[0])


def _undirected_adjacency(rows: NDArray[np.int64], columns: NDArray[np.int64], n: int) -> Sparse:
    """The adjacency with weight 1 for every pair that is listed, in any direction and any number of times."""
    both = np.concatenate([rows, columns]), np.concatenate([columns, rows])
    A = sp.csr_array((np.ones(len(both[0])), both), shape=(n, n))
    A.sum_duplicates()
    A.data[:] = 1.0
    return A
