"""FLIS: similarity of clients' models by their predictions on the server's data.

Morafah, Vahidian, Wang, Lin, *FLIS: clustered federated learning via inference similarity for non-IID data
distribution*, 2022 (Vahidian's thesis, section 3.3). ``B_i`` are the predictions of client i's model on the
server's samples, (samples x classes), soft or one-hot, here one row per client. The inference similarity is
``A_ij = <B_i, B_j>_F / (||B_i||_F ||B_j||_F)``, the cosine of two rows. It lies in [0, 1]; with one-hot
predictions it is the share of samples on which both agree. (The printed numerator, the norm of the
elementwise product, would not give the unit diagonal that the text states; the authors' code has the inner
product.)

The similarities of many clients are computed in blocks by :mod:`rayfl.clustering.cosines`. They give
overlapping clusters (FLIS (DC), Algorithm 5) or disjoint ones (FLIS (HC), Algorithm 6).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering import cosines
from rayfl.clustering.linkage import Labels, Method, build_linkage, cut_at_threshold

Array = NDArray[np.float64]
Joint = NDArray[np.bool_]

ROUNDING = 1e-6
"""Tolerance below beta: rounding must not separate equal predictions when beta is 1."""


def inference_similarities(predictions: NDArray[np.floating], block: int = 256) -> Array:
    """A of all pairs of N clients, condensed ``(N (N - 1) / 2,)``, from one row per client ``(N, S)``.

    Raises:
        DataError: if a row is not finite.
    """
    blocks = [predictions[start : start + block] for start in range(0, len(predictions), block)]
    return cosines.condensed_cosines(blocks)[0]


def joint_clusters(similarities: NDArray[np.floating], beta: float) -> Joint:
    """FLIS (DC): cluster i is ``{j : A_ij >= beta}``, overlapping; one cluster per client (Alg. 5, line 4).

    Args:
        similarities: condensed ``(N (N - 1) / 2,)``.
        beta: 0 puts all clients into every cluster (FedAvg), 1 only clients that predict alike (SOLO).

    Returns:
        ``(N, N)``: row i is cluster i. Symmetric; each client is in its own cluster. Equal rows are equal
        clusters.
    """
    from scipy.spatial.distance import squareform

    joint = squareform(np.asarray(similarities, np.float64), checks=False) >= beta - ROUNDING
    np.fill_diagonal(joint, True)
    return joint


def disjoint_clusters(similarities: NDArray[np.floating], beta: float, method: Method = "average") -> Labels:
    """FLIS (HC): hierarchical clustering on ``1 - A``, cut where similarity falls below beta (Alg. 6).

    The thesis leaves the linkage open; ``average`` is PACFL's. New clients extend ``1 - A`` and are assigned
    by :func:`rayfl.clustering.newcomers.cluster_newcomers` with the threshold ``1 - beta``.

    Args:
        similarities: condensed ``(N (N - 1) / 2,)``.
        beta: 0 makes one cluster; 1 separates all clients that do not predict alike.
        method: linkage, how the distance of two groups follows from that of their members.

    Returns:
        The cluster of each client ``(N,)``, numbered by their smallest client.
    """
    distances = np.maximum(1.0 - np.asarray(similarities, np.float64), 0.0)
    return cut_at_threshold(build_linkage(distances, method), 1.0 - beta + ROUNDING)


def clustering_error(together: Joint, groups: NDArray[np.integer]) -> tuple[int, int]:
    """Compare clusters with the true groups, over all unordered pairs of clients.

    The thesis' clustering error is the sum of both numbers (section 3.3, "the influence of beta on clustering
    error"). A beta that is too small makes false positives, one that is too large false negatives.

    Args:
        together: ``(N, N)``, symmetric, whether two clients are together; for disjoint clusters
            ``labels[:, None] == labels``.
        groups: true group of each client ``(N,)``.

    Returns:
        False positives (together, but of different groups) and false negatives (apart, but of one group).
    """
    same = groups[:, None] == groups[None, :]
    pairs = np.triu(np.ones_like(same), k=1)
    return int((together & ~same & pairs).sum()), int((~together & same & pairs).sum())
