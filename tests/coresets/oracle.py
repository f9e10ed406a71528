"""Algorithm 12 with dense matrices, line by line as printed: nothing incremental, nothing sparse."""

from __future__ import annotations

import numpy as np


def lazy_walk(A):
    D = np.diag(A.sum(axis=1))
    return (A - D) / A.sum(axis=1).max() + np.eye(len(A))


def scgiga(A, power, references, costs, kappa):
    """Vertices in order and the weights of f; the same rule for when to stop as rayfl's."""
    P = np.linalg.matrix_power(lazy_walk(A), power)
    n = len(P)
    one, norms = np.ones(n), np.linalg.norm(P, axis=0)
    columns = P / norms
    w, order = np.zeros(n), []
    for _ in range(10 * references):
        Pw = columns @ w
        a = one - (one / np.sqrt(n) @ Pw) * Pw * np.sqrt(n)  # 1 is 1/sqrt(n) up to scale: a is normalised
        if np.linalg.norm(a) / np.sqrt(n) < 1e-6:
            break
        a /= np.linalg.norm(a)
        score = np.full(n, -np.inf)
        for v in range(n):
            av = columns[:, v] - (columns[:, v] @ Pw) * Pw
            if np.linalg.norm(av) > 1e-6:
                score[v] = a @ av / np.linalg.norm(av)
        best = score.max()
        within = [v for v in range(n) if score[v] >= kappa * best]
        v = min(within, key=lambda v: (costs[v], -score[v]))
        if best <= 1e-12 or (w[v] == 0 and len(order) == references):
            break
        zeta0, zeta1 = one @ columns[:, v] / np.sqrt(n), one @ Pw / np.sqrt(n)
        zeta2 = columns[:, v] @ Pw
        delta = (zeta0 - zeta1 * zeta2) / ((zeta0 - zeta1 * zeta2) + (zeta1 - zeta0 * zeta2))
        delta = min(delta, 1.0)
        unit = np.eye(n)[v]
        w = (1 - delta) * w + delta * unit
        w /= np.linalg.norm(columns @ w)
        order = [s for s in order if w[s] > 0] + ([v] if v not in order else [])
    Pw = P @ (w / norms)
    beta = max(0.0, Pw @ one / np.linalg.norm(Pw)) / (n * np.linalg.norm(Pw))  # equation 6.6
    return order, (beta * w / norms)[order]
