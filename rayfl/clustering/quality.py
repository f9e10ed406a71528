"""How good a clustering is."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray


def adjusted_rand_index(labels: NDArray[np.integer], truth: NDArray[np.integer]) -> float:
    """Agreement of two labellings ``(N,)``, up to numbering: 1 if equal, about 0 if random (Hubert,
    Arabie).
    """
    from sklearn.metrics import adjusted_rand_score  # deferred: it takes a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # scikit-learn warns about many small clusters
        return float(adjusted_rand_score(truth, labels))


def separation_gap(similarity: NDArray[np.floating], groups: NDArray[np.integer]) -> float:
    """CFL's separation gap ``g = alpha_intra_min - alpha_cross_max`` (Sattler et al.).

    Positive if and only if any two clients of one group are more similar than any two of different groups.

    Args:
        similarity: ``(N, N)``, symmetric, larger is more similar; the diagonal is ignored.
        groups: true group of each client ``(N,)``.

    Returns:
        g; NaN if there is no pair within a group or none across groups.
    """
    same = groups[:, None] == groups[None, :]
    off_diagonal = ~np.eye(len(groups), dtype=bool)
    within, across = similarity[same & off_diagonal], similarity[~same]
    if within.size == 0 or across.size == 0:
        return float("nan")
    return float(within.min() - across.max())
