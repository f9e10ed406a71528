"""What Theorem 6 promises, in numbers that can be checked after a run.

For f in ``P_lambda`` (Definition 2) and any weights, ``f = P^l g`` with ``||g|| <= ||f|| / lambda^l``, hence

    ``|mean f - sum_s w_s f(s)| = |<g, 1/n - P^l w>| <= ||f|| / lambda^l * ||P^l w - 1/n||``   (appendix D.3)

and Algorithm 12 makes the last factor ``sqrt(J / n)``. Theorem 6 bounds it further by ``eta v_K / sqrt(n)``
with ``v_K = O((1 - kappa^2 eps^2)^(K/2))``, whose constants are unknown. :func:`rate` is the bound with known
constants that its proof gives. Two corrections of the printed text: ``J`` is ``1 - <.,.>^2`` (the square is
missing in appendix D.2, and in 6.7), and the induction gives ``J_1 / (1 + kappa^2 tau^2 J_1 (k - 1))`` (the
J_1 in the denominator is missing), with ``tau = sqrt(n) / sum_v ||P_v||``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayfl.coresets.base import Coreset
from rayfl.coresets.graphs import Graph, lazy_walk
from rayfl.coresets.walks import Vectors, column_norms


def residual(graph: Graph, coreset: Coreset, power: int) -> float:
    """``||P^l w - 1/n||``, computed from P by l products."""
    walk, y = lazy_walk(graph), np.zeros(len(graph))
    y[coreset.ids] = coreset.weights
    for _ in range(power):
        y = walk @ y
    return float(np.linalg.norm(y - 1.0 / len(graph)))


def error_bound(graph: Graph, coreset: Coreset, power: int, norm: float, smoothness: float) -> float:
    """The bound on ``|mean f - sum_s w_s f(s)|`` for f with ``||f|| = norm`` in ``P_lambda``.

    Args:
        graph, coreset: any weights; those that sum to 1 give equation 6.2.
        power: l.
        norm: ``||f||_2``, which is ``||f||_{P_lambda}`` for f in ``P_lambda``.
        smoothness: lambda in (0, 1].
    """
    return norm / smoothness**power * residual(graph, coreset, power)


def rate(vectors: Vectors, kappa: float, steps: int) -> float:
    """A bound on J after k ``steps``, none of them cut: ``eta^2 / (1 + kappa^2 tau^2 eta^2 (k - 1))``.

    Args:
        vectors: of :func:`~rayfl.coresets.walks.walk_vectors`.
        kappa: the slack.
        steps: k >= 1.
    """
    norms = column_norms(vectors)
    n = len(norms)
    eta2 = 1.0 - (kappa / (np.sqrt(n) * norms.min())) ** 2
    tau = np.sqrt(n) / norms.sum()
    return float(eta2 / (1.0 + (kappa * tau) ** 2 * eta2 * (steps - 1)))


def bandlimit(graph: Graph, values: ArrayLike, smoothness: float) -> NDArray[np.float64]:
    """The part of f in ``P_lambda``, ``(n,)``: dense eigenvectors, so for graphs of up to a few thousand."""
    eigenvalues, U = np.linalg.eigh(lazy_walk(graph).toarray())
    U = U[:, np.abs(eigenvalues) > smoothness]
    return np.asarray(U @ (U.T @ np.asarray(values, np.float64)))
