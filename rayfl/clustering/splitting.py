"""Clustered federated learning (CFL): whether a cluster of clients is split in two.

Sattler, Mueller, Samek, *Clustered federated learning: model-agnostic distributed multi-task optimization
under privacy constraints*, 2019, Algorithm 5. A cluster is split at a point that is stationary for the
cluster (Eq. 32) and not for its clients (Eq. 33), and only if the halves
(:mod:`rayfl.clustering.bipartition`) are further apart than noise explains (Eq. 39).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.clustering import cosines
from rayfl.clustering.bipartition import Bipartition, Linkage, Similarities, bipartition
from rayfl.settings import Section


@dataclass(frozen=True, eq=False)
class UpdateNorms:
    """The norms of a cluster's updates after a round.

    Attributes:
        mean: ``||d_c||``, the norm of the weighted mean of the updates (Eq. 2; Alg. 5 prints the plain mean).
        each: ``||d_i||`` ``(m,)``.
        weights: weights of the clients in the mean ``(m,)``.
        reference: the largest norm of an update in this cluster so far, including :func:`reference_of_half`.
        rounds: completed rounds, including this one.
    """

    mean: float
    each: NDArray[np.float64]
    weights: NDArray[np.float64]
    reference: float
    rounds: int

    @property
    def max(self) -> float:
        """``max_i ||d_i||``."""
        return float(np.max(self.each))

    @property
    def relative(self) -> tuple[float, float]:
        """``||d_c||`` and ``max_i ||d_i||`` in units that carry over between datasets.

        The unit of the first is ``sqrt(sum_i p_i^2 ||d_i||^2)``, the norm that the mean would have if the
        updates were orthogonal; ``p_i`` is the weight of client i in the mean. The unit of the second is
        ``reference``.
        """
        orthogonal = np.linalg.norm(self.weights / self.weights.sum() * self.each)
        with np.errstate(invalid="ignore", divide="ignore"):  # before the first update
            mean, largest = np.array([self.mean, self.max]) / np.array([orthogonal, self.reference])
        return float(mean), float(largest)

    def with_mean_of(self, updates: NDArray[np.floating]) -> UpdateNorms:
        """These norms; if the norm of the mean is NaN, it is computed from updates or sketches ``(m, q)``."""
        mean = self.weights @ updates.astype(np.float64) / self.weights.sum()
        return replace(self, mean=float(np.linalg.norm(mean))) if np.isnan(self.mean) else self

    def with_mean_by(self, similarities: Similarities) -> UpdateNorms:
        """As :meth:`with_mean_of`, from the cosines of the updates, condensed ``(m (m - 1) / 2,)``."""
        mean = cosines.mean_norm(similarities, self.each, self.weights)
        return replace(self, mean=mean) if np.isnan(self.mean) else self

    @property
    def facts(self) -> dict[str, float]:
        """Columns of ``diagnostics.csv``: both norms, absolute and relative."""
        mean, largest = self.relative
        return {
            "mean_norm": self.mean,
            "max_norm": self.max,
            "mean_relative": mean,
            "max_relative": largest,
        }


def reference_of_half(root: float, norms: NDArray[np.float64]) -> float:
    """The initial :attr:`UpdateNorms.reference` of a half of a split.

    Decision: the geometric mean of the longest update so far (``root``, in the first cluster) and of the
    half's longest update at the split (the maximum of ``norms``, ``(m,)``). The first alone is too long,
    since the remaining clients disagree less than all did. The second alone is too short, since updates have
    become shorter by then.
    """
    return float(np.sqrt(root * norms.max()))


class SplitCriteria(Section):
    """When CFL splits a cluster: the base of the criteria for all units of the norms."""

    renamed: ClassVar[Mapping[str, str]] = {"norms": "name"}

    eps1: float
    eps2: float
    patience: int = Field(1, ge=1, description="both criteria must hold for this many rounds in a row")
    gamma_max: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="assumed bound on the relative noise of a client's gradient (Eq. 31); splits that such "
        "noise could cause are rejected (Eq. 39). 0 rejects only halves with equal updates",
    )
    min_size: int = Field(
        2,
        ge=2,
        description="size of the smallest cluster that is split (authors' code: 3); a half may be one client",
    )
    first_round: int = Field(
        0, ge=0, description="no split before this many rounds are complete (authors' code: 20)"
    )
    linkage: Linkage = Field(
        "single", description="single: the paper's optimal bipartition; complete: the authors' code"
    )

    @abstractmethod
    def in_units(self, norms: UpdateNorms) -> tuple[float, float]:
        """``||d_c||`` and ``max_i ||d_i||`` in the units of ``eps1`` and ``eps2``."""

    def met(self, norms: UpdateNorms) -> bool:
        """Whether all criteria that need no similarities hold; only then similarities are needed."""
        mean, largest = self.in_units(norms)
        return (
            mean < self.eps1
            and largest > self.eps2
            and len(norms.each) >= self.min_size
            and norms.rounds >= self.first_round
        )


class AbsoluteCriteria(SplitCriteria):
    """Thresholds are norms of updates, as in the paper.

    They depend on the data, the model, the learning rate and the number of local steps. The defaults are
    those of the authors' code.
    """

    name: Literal["absolute"] = "absolute"
    eps1: float = Field(
        0.4,
        ge=0,
        description="stationary if the mean update's norm is below this (Eq. 32); 0: never split",
    )
    eps2: float = Field(
        1.6, ge=0, description="incongruent if some client's update has a norm above this (Eq. 33)"
    )

    @override
    def in_units(self, norms: UpdateNorms) -> tuple[float, float]:
        return norms.mean, norms.max


class RelativeCriteria(SplitCriteria):
    """Thresholds are relative to the cluster's other updates (ours): one setting serves several datasets.

    Both are measured in units that carry over (:attr:`UpdateNorms.relative`). A cluster is stationary when
    its updates have no common direction any more: their mean is shorter than if they were orthogonal. It is
    incongruent if some updates are still long compared with the cluster's first rounds; the updates of
    congruent clients get shorter. experiments/cfl/README.md has the measurements that the defaults come from.
    """

    name: Literal["relative"] = "relative"
    eps1: float = Field(
        0.75,
        ge=0,
        description="stationary if the mean update is shorter than this share of its length if all updates "
        "were orthogonal; 0: never split",
    )
    eps2: float = Field(
        0.5,
        ge=0,
        description="incongruent if some client's update is longer than this share of the longest update in "
        "the cluster so far",
    )
    patience: int = Field(
        3,
        ge=1,
        description="both criteria must hold for this many rounds in a row, since the largest of many norms "
        "varies from round to round",
    )

    @override
    def in_units(self, norms: UpdateNorms) -> tuple[float, float]:
        return norms.relative


CRITERIA: Mapping[str, type[SplitCriteria]] = {"absolute": AbsoluteCriteria, "relative": RelativeCriteria}
"""The criteria by the unit of the norms."""


def decide(
    criteria: SplitCriteria,
    ids: Sequence[int] | NDArray[np.integer],
    similarities: Similarities | None,
    norms: UpdateNorms,
) -> Bipartition | None:
    """The halves into which a cluster is split, or None (Alg. 5, lines 16-23).

    Args:
        criteria: eps1, eps2, gamma_max and so on.
        ids: the m clients of the cluster ``(m,)``.
        similarities: of their latest updates, condensed, in the order of ``ids``; may be None unless
            :meth:`SplitCriteria.met`.
        norms: of the same updates.

    Raises:
        ValueError: as :func:`~rayfl.clustering.bipartition.bipartition`, if there are not m norms, or if
            similarities are needed and missing.
    """
    if len(norms.each) != len(ids):
        raise ValueError(f"expected a norm for each of {len(ids)} clients, got {len(norms.each)}")
    if not criteria.met(norms):
        return None
    if similarities is None:
        raise ValueError(f"the criteria are met, so the similarities of {len(ids)} clients are needed")
    best = bipartition(similarities, ids, criteria.linkage)
    return best if criteria.gamma_max < best.gamma else None
