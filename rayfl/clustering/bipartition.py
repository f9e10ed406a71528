"""Clustered federated learning (CFL): how a cluster of clients is split in two.

Sattler, Mueller, Samek, *Clustered federated learning: model-agnostic distributed multi-task optimization
under privacy constraints*, 2019. These are computed from the cosine similarities ``a_ij`` of the updates
``d_i`` of the m clients of a cluster (:mod:`rayfl.clustering.cosines`):

- :func:`bipartition`: the two halves whose largest similarity to each other is smallest (Eq. 25, Alg. 1);
- :func:`separation_gap`: how clear the split is if the true groups are known (Eq. 28, 29).

:mod:`rayfl.clustering.splitting` decides whether to split.

Similarities are condensed, ``(m (m - 1) / 2,)``, in the order of ``ids``. Clients are always named by their
ids, never by their position in a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.linkage import Labels, build_linkage, cut_after, cut_into

Ids = NDArray[np.int64]
Similarities = NDArray[np.floating]
Linkage = Literal["single", "complete"]


@dataclass(frozen=True, eq=False)
class Bipartition:
    """Two halves of a cluster.

    Attributes:
        first: ids ``(m_1,)`` of the half that contains the smallest id, ascending.
        second: ids ``(m_2,)`` of the other half, ascending.
        cross: ``a_cross_max``, the largest similarity between clients of different halves.
    """

    first: Ids
    second: Ids
    cross: float

    @property
    def gamma(self) -> float:
        """``sqrt((1 - a_cross_max) / 2)``: a smaller relative noise cannot have caused the split (Eq. 39)."""
        return float(np.sqrt(max(0.0, (1.0 - self.cross) / 2.0)))


def bipartition(
    similarities: Similarities, ids: Sequence[int] | NDArray[np.integer], linkage: Linkage = "single"
) -> Bipartition:
    """The optimal bipartition of a cluster (Eq. 25), ``argmin max_{i in c_1, j in c_2} a_ij``.

    Algorithm 1 joins pairs in the order of decreasing similarity until two groups are left. That is single
    linkage, cut at two: O(m^2) in place of O(m^3). ``complete`` linkage, which the authors' code uses,
    does not minimise the largest cross similarity.

    Among equally good bipartitions it returns the one that Algorithm 1 finds when it takes pairs of equal
    similarity in the order of their ids. So the result does not depend on the order in which the clients are
    given. (With complete linkage, ties are broken as by SciPy's linkage of the clients in the order of ids.)

    Args:
        similarities: ``a_ij`` of all pairs in the order of ``ids``, condensed, ``(m (m - 1) / 2,)``, finite.
        ids: of the m clients, all different ``(m,)``.
        linkage: see above.

    Raises:
        ValueError: with fewer than two clients, ids that occur twice, or a wrong number of similarities.
    """
    from scipy.spatial.distance import squareform

    clients = np.asarray(ids, np.int64)
    m = len(clients)
    if m < 2 or len(np.unique(clients)) < m:
        raise ValueError(f"a bipartition needs at least two different ids, got {clients.tolist()[:5]}")
    if np.shape(similarities) != (m * (m - 1) // 2,):
        raise ValueError(f"{m} clients have {m * (m - 1) // 2} similarities, got {np.shape(similarities)}")
    distances = -np.asarray(similarities, np.float64)  # exact, where 1 - a would round
    order = np.argsort(clients)
    if (order != np.arange(m)).any():
        clients = clients[order]
        distances = squareform(squareform(distances, checks=False)[np.ix_(order, order)], checks=False)
    labels = (
        _single_linkage_halves(distances)
        if linkage == "single"
        else cut_into(build_linkage(distances, linkage), 2)
    )
    cross = -distances[_pairs_across(labels)].min()
    return Bipartition(clients[labels == 0], clients[labels == 1], float(cross))


def _single_linkage_halves(distances: NDArray[np.float64]) -> Labels:
    """Single linkage cut at two; pairs of equal distance in the order of a stable sort."""
    linkage = build_linkage(distances, "single")
    last = float(linkage[-1, 2])
    labels = cut_after(linkage, int((linkage[:, 2] < last).sum()))
    groups = int(labels.max()) + 1
    if groups == 2:
        return labels
    i, j = np.triu_indices(len(labels), k=1)
    for pair in np.flatnonzero(distances == last):
        a, b = sorted((int(labels[i[pair]]), int(labels[j[pair]])))
        if a != b:
            labels = np.where(labels == b, a, labels)
            groups -= 1
            if groups == 2:
                break
    return np.asarray(labels != labels[0], np.int64)


def _pairs_across(labels: Labels) -> NDArray[np.bool_]:
    """Which pairs, in condensed order, have different labels."""
    return np.concatenate([labels[i + 1 :] != labels[i] for i in range(len(labels) - 1)])


def separation_gap(similarities: Similarities, groups: NDArray[np.integer]) -> float:
    """``g = a_intra_min - a_cross_max`` (Eq. 28, 29), for known groups.

    ``a_intra_min`` is the smallest similarity of two clients of one group, ``a_cross_max`` the largest
    across the *optimal bipartition*. If g > 0, the bipartition splits no group (Corollary 1). The converse
    of Remark 2 does not hold: single linkage can be right although two clients of a group are dissimilar.
    :func:`rayfl.clustering.quality.separation_gap` takes the largest similarity across all groups, which is
    never smaller if the bipartition is correct; it requires more, that every group is separated.

    Args:
        similarities: condensed ``(m (m - 1) / 2,)``.
        groups: true group of each client ``(m,)``.

    Returns:
        g; NaN if no two clients are of one group.
    """
    across = _pairs_across(groups.astype(np.int64))
    if across.all():
        return float("nan")
    cross = bipartition(similarities, np.arange(len(groups))).cross
    return float(np.min(similarities[~across])) - cross


def is_correct(halves: Bipartition, groups: NDArray[np.integer]) -> bool:
    """Whether the bipartition splits no group (Definition 1); ``groups`` ``(N,)`` has the true group of each
    client.
    """
    return not np.isin(groups[halves.first], groups[halves.second]).any()
