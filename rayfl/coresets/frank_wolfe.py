"""Frank-Wolfe on the simplex relaxation of equation 6.4 (thesis, section 6.3; Campbell, Broderick 2018).

``min_w ||P w - 1/n||^2`` over ``w >= 0, sum_v ||P_v|| w_v = sigma / n``, ``sigma = sum_v ||P_v||``: each step
moves toward the corner ``(sigma / n) / ||P_v||`` whose column is most aligned with the residual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from rayfl.coresets.base import Coreset, check_references, nearest_shares
from rayfl.coresets.graphs import Graph
from rayfl.coresets.walks import Power, Vectors, column_norms, inner_products, walk_vectors
from rayfl.random import generator

STEPS_PER_REFERENCE = 10


def select(
    graph: Graph, references: int, *, seed: int = 0, power: Power = "auto", own_weights: bool = False
) -> Coreset:
    """A weighted subset of at most K vertices.

    Args:
        graph: the graph G.
        references: K. Steps that choose a vertex again change its weight. It stops when a step would add
            vertex K + 1, when nothing improves, or after ten steps per reference.
        seed: decides between equally good vertices.
        power: l, as in SCGIGA.
        own_weights: return Frank-Wolfe's own weights, which need not sum to 1; otherwise, as in the thesis,
            the share of vertices nearest to each reference.

    Raises:
        DataError: if K is not from 1 to n.
    """
    last = deque(steps(graph, references, seed=seed, power=power), maxlen=1).pop()
    return last if own_weights else Coreset(last.ids, nearest_shares(graph, last.ids))


def steps(
    graph: Graph,
    references: int,
    *,
    seed: int = 0,
    power: Power = "auto",
    vectors: Vectors | None = None,
) -> Iterator[Coreset]:
    """The coreset after each step, with Frank-Wolfe's own weights."""
    n = len(graph)
    check_references(graph, references)
    X = walk_vectors(graph, power, references, seed) if vectors is None else vectors
    norms = column_norms(X)
    b = 1.0 / (np.sqrt(n) * norms)
    c = norms.sum() / n
    priority = generator(seed, "frank-wolfe coreset").permutation(n)
    weights: dict[int, float] = {}
    z, yy = np.zeros(n), 0.0  # z_v = <P_v / ||P_v||, y>, yy = <y, y> of y = P w
    for _ in range(STEPS_PER_REFERENCE * references):
        gain = b / np.sqrt(n) - z
        best = np.flatnonzero(gain >= gain.max() - 1e-12 * abs(gain.max()))
        v = int(best[np.argmin(priority[best])])
        if v not in weights and len(weights) == references:
            return
        y1 = sum(weights.values()) / n  # <y, 1/n>, as the columns of P sum to 1
        toward = c * b[v] / np.sqrt(n) - c * z[v] - y1 + yy
        length = c * c - 2 * c * z[v] + yy
        gamma = 1.0 if not weights else min(1.0, toward / length) if length > 1e-15 else 0.0
        if gamma <= 1e-12:
            return
        yy = (1 - gamma) ** 2 * yy + 2 * gamma * (1 - gamma) * c * z[v] + (gamma * c) ** 2
        z = (1 - gamma) * z + gamma * c * inner_products(X, v) / (norms * norms[v])
        weights = {s: (1 - gamma) * w for s, w in weights.items()} if gamma < 1 else {}
        weights[v] = weights.get(v, 0.0) + gamma * c / norms[v]
        yield Coreset(
            np.fromiter(weights, np.int64, len(weights)),
            np.fromiter(weights.values(), np.float64, len(weights)),
        )
