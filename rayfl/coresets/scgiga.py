"""SCGIGA, sample cost greedy iterative geodesic ascent: Algorithm 12 of the thesis (section 6.4).

Vertices and weights are chosen so that weighted l-step walks from the vertices are spread evenly over the
graph: ``min_w || P^l w - 1/n ||`` with at most K non-zero weights (equation 6.4). On the unit sphere this
aligns ``P(w) = sum_v w_v P_v / ||P_v||`` with ``P* = 1 / sqrt(n)`` (6.8). Symbols:

========== ==============================================================================
``z1``     zeta_1 = <P*, P(w_k)>, the alignment reached; ``J = 1 - zeta_1^2``
``b_v``    <P*, P_v> = 1 / (sqrt(n) ||P_v||), as the columns sum to 1; zeta_0 = b of v_k
``z_v``    <P_v, P(w_k)>, kept incrementally; zeta_2 = z of v_k
``score``  <a_k, a_kv> = (b_v - zeta_1 z_v) / (sqrt(J) sqrt(1 - z_v^2))
========== ==============================================================================

What the printed algorithm leaves open, and what is done here:

- ``P_v`` is normalised in its first line, so the weights that it ends with belong to normalised columns.
  The weights of f are ``beta w_v / ||P_v||``; with ``||P(w)|| = 1``, equation 6.6 is ``beta = zeta_1 /
  sqrt(n)``. They sum to ``zeta_1^2 = 1 - J``: below 1 as long as the references do not cover the graph.
- A step may choose a vertex again, which changes its weight. K counts vertices, as in ``|S| <= K``; it stops
  when the next step would add vertex K + 1, when the alignment is complete, or after ten steps per reference.
- ``delta`` lies in [0, 1] if kappa = 1. With kappa < 1 a first vertex that is cheap may be aligned so much
  worse than a later one that ``delta > 1``, a negative weight. It is cut to 1: the later vertex alone.
- Among vertices within kappa with the same least cost, the best aligned is taken; ties are broken by the
  seed.

Each step costs O(n) and the inner products of one column: O(K n m) in all, as the thesis says, or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayfl.coresets.base import Coreset, check_references
from rayfl.coresets.graphs import Graph
from rayfl.coresets.walks import Power, Vectors, column_norms, inner_products, walk_vectors
from rayfl.errors import DataError
from rayfl.random import generator

Array = NDArray[np.float64]

ALIGNED = 1e-12
"""The alignment is complete when J is below this."""
STEPS_PER_REFERENCE = 10
_TIE_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Step:
    """Algorithm 12 after one more step.

    Attributes:
        coreset: the references so far, with the weights of f.
        J: ``1 - zeta_1^2 = n ||P^l w - 1/n||^2``.
        alignment: ``<a_k, a_kv>`` of the vertex of this step.
        cut: the step size was cut to 1.
    """

    coreset: Coreset
    J: float
    alignment: float
    cut: bool


def select(
    graph: Graph,
    references: int,
    *,
    seed: int = 0,
    power: Power = "auto",
    costs: ArrayLike | None = None,
    kappa: float = 1.0,
    eligible: ArrayLike | None = None,
) -> Coreset:
    """A weighted subset of at most K vertices by Algorithm 12.

    Args:
        graph: the graph G.
        references: K, the maximum number of different vertices; fewer if the alignment is complete.
        seed: decides between equally good vertices.
        power: l, the steps of the walk; ``auto``: just enough for K references to cover the graph.
        costs: C(v) >= 0, ``(n,)``, in any unit.
        kappa: slack in (0, 1]: of the vertices whose alignment is at least kappa times the best, the
            cheapest is taken. 1: costs are ignored.
        eligible: which vertices may be chosen ``(n,)`` (bool); the others are represented, too.

    Returns:
        References and the weights of f, which sum to ``1 - J`` (see :meth:`Coreset.normalised`).

    Raises:
        DataError: if an argument is out of range.
    """
    check_references(graph, references)
    vectors = walk_vectors(graph, power, references, seed)
    all_steps = steps(
        graph, references, seed=seed, costs=costs, kappa=kappa, eligible=eligible, vectors=vectors
    )
    return deque(all_steps, maxlen=1).pop().coreset  # there is a first step: all b_v > 0


def steps(
    graph: Graph,
    references: int,
    *,
    seed: int = 0,
    costs: ArrayLike | None = None,
    kappa: float = 1.0,
    eligible: ArrayLike | None = None,
    vectors: Vectors | None = None,
) -> Iterator[Step]:
    """The steps of :func:`select` one by one: the greedy choice for K contains those for smaller K.

    Args:
        graph, references, seed, costs, kappa, eligible: as in :func:`select`.
        vectors: of :func:`~rayfl.coresets.walks.walk_vectors`, ``(n, d)``; by default as in :func:`select`.
    """
    n = len(graph)
    check_references(graph, references)
    costs_V, eligible_V = check_choice(n, costs, kappa, eligible)
    X = walk_vectors(graph, "auto", references, seed) if vectors is None else vectors
    priority = generator(seed, "scgiga").permutation(n)
    norms = column_norms(X)
    b = 1.0 / (np.sqrt(n) * norms)
    z, z1 = np.zeros(n), 0.0
    weights: dict[int, float] = {}
    for _ in range(STEPS_PER_REFERENCE * references):
        J = 1.0 - z1 * z1
        if J <= ALIGNED:
            return
        score = _alignments(b, z, z1, J)
        score[~eligible_V] = -np.inf
        v = _choose_vertex(score, costs_V, kappa, priority)
        if score[v] <= _TIE_TOLERANCE or (v not in weights and len(weights) == references):
            return
        z0, z2 = b[v], z[v]
        toward, away = z0 - z1 * z2, z1 - z0 * z2
        cut = away < 0
        delta = 1.0 if cut else toward / (toward + away)
        length = np.sqrt((1 - delta) ** 2 + 2 * delta * (1 - delta) * z2 + delta**2)
        weights = {s: (1 - delta) * w / length for s, w in weights.items()} if delta < 1 else {}
        weights[v] = weights.get(v, 0.0) + delta / length
        z = ((1 - delta) * z + delta * inner_products(X, v) / (norms * norms[v])) / length
        z1 = float(((1 - delta) * z1 + delta * z0) / length)
        yield Step(_scaled_coreset(weights, z1, norms), max(0.0, 1.0 - z1 * z1), float(score[v]), bool(cut))


def _alignments(b: Array, z: Array, z1: float, J: float) -> Array:
    """``<a_k, a_kv>`` of every vertex; -inf where P_v and P(w_k) have the same direction."""
    apart = 1.0 - z * z
    score = np.full(len(b), -np.inf)
    np.divide(
        b - z1 * z, np.sqrt(J * np.maximum(apart, _TIE_TOLERANCE)), out=score, where=apart > _TIE_TOLERANCE
    )
    return score


def _choose_vertex(score: Array, costs: Array | None, kappa: float, priority: NDArray[np.int64]) -> int:
    """The vertex of a step: the cheapest within kappa of the best (lines 5 to 7)."""
    best = score.max()
    if costs is None or kappa == 1.0:
        within = np.flatnonzero(score >= best - _TIE_TOLERANCE * abs(best))
        return int(within[np.argmin(priority[within])])
    within = np.flatnonzero(score >= kappa * best) if best > 0 else np.array([score.argmax()])
    within = within[costs[within] == costs[within].min()]
    within = within[score[within] >= score[within].max() * (1 - _TIE_TOLERANCE)] if best > 0 else within
    return int(within[np.argmin(priority[within])])


def _scaled_coreset(weights: dict[int, float], z1: float, norms: Array) -> Coreset:
    """Weights of f from those of the normalised columns: ``beta w_v / ||P_v||``."""
    ids = np.fromiter(weights, np.int64, len(weights))
    w = np.fromiter(weights.values(), np.float64, len(weights))
    return Coreset(ids, z1 / np.sqrt(len(norms)) * w / norms[ids])


def check_choice(
    n: int, costs: ArrayLike | None, kappa: float, eligible: ArrayLike | None
) -> tuple[Array | None, NDArray[np.bool_]]:
    """Costs and eligibility as arrays ``(n,)``.

    Raises:
        DataError: if they, or kappa, are out of range.
    """
    if not 0 < kappa <= 1:
        raise DataError(f"kappa: got {kappa}, expected above 0 and at most 1")
    eligible_V = np.ones(n, bool) if eligible is None else np.asarray(eligible, bool)
    if eligible_V.shape != (n,) or not eligible_V.any():
        raise DataError(
            f"eligible: shape {eligible_V.shape}, {eligible_V.sum()} true; expected ({n},), at least one true"
        )
    if costs is None:
        return None, eligible_V
    costs_V = np.asarray(costs, np.float64)
    if costs_V.shape != (n,):
        raise DataError(f"costs: shape {costs_V.shape}, expected one of each vertex, ({n},)")
    if not (np.isfinite(costs_V) & (costs_V >= 0)).all():
        worst = int(np.flatnonzero(~(np.isfinite(costs_V) & (costs_V >= 0)))[0])
        raise DataError(f"costs: vertex {worst} has {costs_V[worst]}, expected finite costs of at least 0")
    return costs_V, eligible_V
