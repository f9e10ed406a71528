"""Clustered federated learning (CFL): whether and how a cluster of clients is split in two.

Sattler, Mueller, Samek, *Clustered federated learning: model-agnostic distributed multi-task optimization
under privacy constraints*, 2019. From the cosine similarities ``a_ij`` of the updates ``d_i`` of the m
clients of a cluster (:mod:`rayfl.clustering.cosines`) follow

- :func:`bipartition`: the two halves whose largest similarity to each other is smallest (Eq. 25, Alg. 1);
- :func:`decide`: whether to split: at a stationary point (Eq. 32) that is none for its clients (Eq. 33),
  and only if the halves are further apart than noise explains (Eq. 39);
- :func:`separation_gap`: how clear the split is where the true groups are known (Eq. 28, 29).

Similarities are condensed, ``(m (m - 1) / 2,)``, in the order of ``ids``. Clients are always named by their
ids, never by their position in a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.spatial.distance import squareform

from rayfl.clustering.linkage import Labels, build_linkage, cut_after, cut_into
from rayfl.settings import Section

Ids = NDArray[np.int64]
Similarities = NDArray[np.floating]
Linkage = Literal["single", "complete"]


class SplitCriteria(Section):
    """When CFL splits a cluster.

    The norms are those of updates, so ``eps1`` and ``eps2`` depend on the model, the learning rate and the
    number of local steps; the defaults are those of the authors' code.
    """

    eps1: float = Field(
        0.4, ge=0, description="stationary if the mean update's norm is below this (Eq. 32); 0: never split"
    )
    eps2: float = Field(
        1.6, ge=0, description="incongruent if some client's update has a norm above this (Eq. 33)"
    )
    gamma_max: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="assumed bound on the relative noise of a client's gradient (Eq. 31); splits that such "
        "noise could cause are rejected (Eq. 39). 0 rejects only halves with equal updates",
    )
    min_size: int = Field(
        2, ge=2, description="smallest cluster that is split (authors' code: 3); a half may be one client"
    )
    first_round: int = Field(
        0, ge=0, description="no split before so many rounds are complete (authors' code: 20)"
    )
    linkage: Linkage = Field(
        "single", description="single: the paper's optimal bipartition; complete: the authors' code"
    )

    def met(self, clients: int, mean_norm: float, max_norm: float, rounds: int) -> bool:
        """Whether all criteria hold that need no similarities, so that those are worth computing.

        Args:
            clients: m, in the cluster.
            mean_norm, max_norm: ``||d_c||`` and ``max_i ||d_i||``.
            rounds: complete ones, this one included.
        """
        return (
            mean_norm < self.eps1
            and max_norm > self.eps2
            and clients >= self.min_size
            and rounds >= self.first_round
        )


@dataclass(frozen=True, eq=False)
class Bipartition:
    """Two halves of a cluster.

    Attributes:
        first: ids ``(m_1,)`` of the half that holds the smallest id, rising.
        second: ids ``(m_2,)`` of the other, rising.
        cross: ``a_cross_max``, the largest similarity between a client of one and a client of the other.
    """

    first: Ids
    second: Ids
    cross: float

    @property
    def gamma(self) -> float:
        """``sqrt((1 - a_cross_max) / 2)``: a smaller relative noise cannot have caused the split (Eq. 39)."""
        return float(np.sqrt(max(0.0, (1.0 - self.cross) / 2.0)))


@dataclass(frozen=True, eq=False)
class Decision:
    """What the criteria say of one cluster in one round.

    Attributes:
        mean_norm: ``||d_c||``, of the weighted mean of the updates.
        max_norm: ``max_i ||d_i||``.
        stationary: Eq. 32, ``mean_norm < eps1``.
        incongruent: Eq. 33, ``max_norm > eps2``.
        best: the optimal bipartition; None if it was not called for.
        split: whether to make it.
    """

    mean_norm: float
    max_norm: float
    stationary: bool
    incongruent: bool
    best: Bipartition | None
    split: bool


def bipartition(
    similarities: Similarities, ids: Sequence[int] | NDArray[np.integer], linkage: Linkage = "single"
) -> Bipartition:
    """The optimal bipartition of a cluster (Eq. 25), ``argmin max_{i in c_1, j in c_2} a_ij``.

    Algorithm 1 joins pairs in the order of falling similarity until two groups are left. That is single
    linkage, cut at two: O(m^2) in place of O(m^3). ``complete`` linkage, which the authors' code uses,
    does not minimise the largest cross similarity.

    Of bipartitions that are equally good it is the one of Algorithm 1 when pairs of equal similarity are
    taken in the order of their ids. So the result does not depend on the order in which the clients are
    given. (With complete linkage ties fall as in SciPy's linkage of the clients in the order of ids.)

    Args:
        similarities: ``a_ij`` of all pairs in the order of ``ids``, condensed, ``(m (m - 1) / 2,)``, finite.
        ids: of the m clients, all different.
        linkage: see above.

    Raises:
        ValueError: with fewer than two clients, ids that occur twice, or a wrong number of similarities.
    """
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
    labels = _single(distances) if linkage == "single" else cut_into(build_linkage(distances, linkage), 2)
    cross = -distances[_across(labels)].min()
    return Bipartition(clients[labels == 0], clients[labels == 1], float(cross))


def _single(distances: NDArray[np.float64]) -> Labels:
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


def _across(labels: Labels) -> NDArray[np.bool_]:
    """Which pairs, in condensed order, have different labels."""
    return np.concatenate([labels[i + 1 :] != labels[i] for i in range(len(labels) - 1)])


def decide(
    criteria: SplitCriteria,
    ids: Sequence[int] | NDArray[np.integer],
    similarities: Similarities | None,
    norms: NDArray[np.floating],
    mean_norm: float,
    rounds: int,
) -> Decision:
    """Whether to split a cluster, and how (Alg. 5, lines 16-23).

    Args:
        criteria: eps1, eps2, gamma_max and so on.
        ids: of its m clients.
        similarities: of their latest updates, condensed, in the order of ``ids``; may be None unless
            :meth:`SplitCriteria.met`.
        norms: ``||d_i||`` ``(m,)``.
        mean_norm: ``||d_c||``, ``d_c`` the mean of the updates, weighted by the numbers of samples (Eq. 2;
            Alg. 5 prints the plain mean).
        rounds: complete ones, this one included.

    Raises:
        ValueError: as :func:`bipartition`, if there are not m norms, or if similarities are called for and
            not there.
    """
    if len(norms) != len(ids):
        raise ValueError(f"{len(ids)} clients have as many norms, got {len(norms)}")
    max_norm = float(np.max(norms))
    stationary, incongruent = mean_norm < criteria.eps1, max_norm > criteria.eps2
    best = None
    if criteria.met(len(ids), mean_norm, max_norm, rounds):
        if similarities is None:
            raise ValueError(f"the criteria are met, so the similarities of {len(ids)} clients are needed")
        best = bipartition(similarities, ids, criteria.linkage)
    split = best is not None and criteria.gamma_max < best.gamma
    return Decision(float(mean_norm), max_norm, stationary, incongruent, best, split)


def separation_gap(similarities: Similarities, groups: NDArray[np.integer]) -> float:
    """``g = a_intra_min - a_cross_max`` (Eq. 28, 29), for known groups.

    ``a_intra_min`` is the smallest similarity of two clients of one group, ``a_cross_max`` the largest
    across the *optimal bipartition*. If g > 0, the bipartition parts no group (Corollary 1). The converse
    of Remark 2 does not hold: single linkage can be right although two clients of a group are unlike each
    other. :func:`rayfl.clustering.quality.separation_gap` takes the largest similarity across all groups,
    which is never smaller where the bipartition is correct, and asks for more: every group has to stand out.

    Args:
        similarities: condensed ``(m (m - 1) / 2,)``.
        groups: true group of each client ``(m,)``.

    Returns:
        g; NaN if no two clients are of one group.
    """
    across = _across(groups.astype(np.int64))
    if across.all():
        return float("nan")
    cross = bipartition(similarities, np.arange(len(groups))).cross
    return float(np.min(similarities[~across])) - cross


def is_correct(halves: Bipartition, groups: NDArray[np.integer]) -> bool:
    """Whether the bipartition parts no group (Definition 1); ``groups[i]`` is the true group of client i."""
    return not np.isin(groups[halves.first], groups[halves.second]).any()
