"""The state of CFL: the parameter tree, and the norms of the clients' latest updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms.contract import Plan, RoundReport, ServerState, Setup, per_client, per_model
from rayfl.clustering.splitting import UpdateNorms
from rayfl.clustering.tree import ParameterTree


@dataclass(frozen=True)
class CFLState(ServerState):
    """The parameter tree, and what is known about the latest updates.

    Attributes:
        tree: its nodes are the models.
        update_norms: the norm of each model's update in the last round ``(K,)``.
        complete: whether that update is the mean over all members of the cluster ``(K,)``.
        norms: norms of the clients' latest updates ``(N,)``; NaN if none was made in the present cluster.
        reference: the norm with which each cluster's longest update is compared ``(K,)``.
        ripe: number of consecutive rounds in which the criteria on norms have been met ``(K,)``.
    """

    renamed: ClassVar[Mapping[str, str]] = {"moved": "update_norms"}

    tree: ParameterTree = field(default_factory=ParameterTree)
    update_norms: NDArray[np.float64] = per_model(np.nan)
    complete: NDArray[np.bool_] = per_model(False)
    norms: NDArray[np.float64] = per_client(np.nan)
    reference: NDArray[np.float64] = per_model(0.0)
    ripe: NDArray[np.int64] = per_model(0)

    def observed(self, setup: Setup, plan: Plan, report: RoundReport) -> CFLState:
        """The state with the norms of a round's updates (report ``norms``) and of their means."""
        norms, reference = self.norms.copy(), self.reference.copy()
        lengths = report.reports["norms"]
        sent = ~np.isnan(lengths)
        norms[plan.cohort[sent]] = lengths[sent]
        np.maximum.at(reference, plan.group[sent], lengths[sent])
        took_part = np.bincount(plan.group[sent], minlength=self.models)
        complete = took_part == np.bincount(self.assignment[setup.present], minlength=self.models)
        return replace(
            self, norms=norms, reference=reference, update_norms=report.model_changes, complete=complete
        )

    def latest(self, setup: Setup, cluster: int, weighted: bool) -> tuple[NDArray[np.int64], UpdateNorms]:
        """The present members of a cluster ``(m,)`` and the norms of their latest updates.

        The norm of their mean is NaN if not all members took part in the last round.
        """
        members: NDArray[np.int64] = setup.present[self.assignment[setup.present] == cluster]
        weights = setup.sizes[members].astype(np.float64) if weighted else np.ones(len(members))
        mean = float(self.update_norms[cluster]) if self.complete[cluster] else np.nan
        reference = float(self.reference[cluster])
        return members, UpdateNorms(mean, self.norms[members], weights, reference, self.round)
