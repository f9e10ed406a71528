"""Betweenness centrality: the K vertices that most shortest paths pass through (Freeman 1977)."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.coresets.base import Coreset, check_references, nearest_shares
from rayfl.coresets.graphs import Graph, Sparse
from rayfl.errors import DataError
from rayfl.random import generator

Array = NDArray[np.float64]

_SOURCES_AT_ONCE = 256  # sources in one sparse-dense product


def select(graph: Graph, references: int, *, seed: int = 0, sources: int | None = None) -> Coreset:
    """The K most central vertices, weighted by the share of vertices nearest to each.

    Args:
        graph: the graph; its weights are ignored, a path's length is its number of edges.
        references: K.
        seed: of the drawn sources; also decides between equally central vertices.
        sources: start vertices of the paths that are counted (Brandes, Pich 2007); None: all.

    Raises:
        DataError: if K is not from 1 to n, or ``sources`` is not.
    """
    check_references(graph, references)
    central = centrality(graph, sources=sources, seed=seed)
    priority = generator(seed, "betweenness coreset").permutation(len(graph))
    ids = np.lexsort((priority, -np.round(central, 9)))[:references].astype(np.int64)
    return Coreset(ids, nearest_shares(graph, ids))


def centrality(graph: Graph, *, sources: int | None = None, seed: int = 0) -> Array:
    """For each vertex v, ``sum_{s != v != t}`` of the share of shortest s-t paths through v, ``(n,)``.

    Every unordered pair counts once; with fewer sources than vertices the sum is scaled up. The algorithm
    of Brandes (2001), for many sources at once.
    """
    n = len(graph)
    if sources is not None and not 1 <= sources <= n:
        raise DataError(f"sources: got {sources}, expected 1 to {n}, the number of vertices")
    starts: NDArray[np.int64] = np.arange(n)
    if sources is not None and sources < n:
        starts = generator(seed, "betweenness sources").choice(n, sources, replace=False)
    steps = sp.csr_array(graph.adjacency - sp.diags_array(graph.adjacency.diagonal()))
    steps.eliminate_zeros()
    steps.data[:] = 1.0
    total = np.zeros(n)
    for first in range(0, len(starts), _SOURCES_AT_ONCE):
        total += _dependencies(steps, starts[first : first + _SOURCES_AT_ONCE])
    return total * (n / len(starts)) / 2.0


def _dependencies(steps: Sparse, starts: NDArray[np.integer]) -> Array:
    """Brandes' ``sum_s delta_s(v)`` over the sources, ``(n,)``."""
    n = steps.shape[0]
    frontier = np.zeros((n, len(starts)))
    frontier[starts, np.arange(len(starts))] = 1.0
    paths, layers = frontier.copy(), [frontier > 0]
    while True:
        reached = steps @ frontier  # paths into the next layer
        new = (reached > 0) & (paths == 0)
        if not new.any():
            break
        frontier = np.where(new, reached, 0.0)
        paths += frontier
        layers.append(new)
    delta = np.zeros_like(paths)
    for deeper, layer in zip(layers[:0:-1], layers[-2::-1], strict=True):
        share = np.divide(1.0 + delta, paths, out=np.zeros_like(paths), where=deeper)
        delta += np.where(layer, paths * (steps @ share), 0.0)
    delta[starts, np.arange(len(starts))] = 0.0
    return np.asarray(delta.sum(axis=1))
