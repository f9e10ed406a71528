"""CFL: clusters are split in two where their clients' updates point apart.

Sattler, Mueller, Samek, "Clustered federated learning: model-agnostic distributed multi-task optimization
under privacy constraints", IEEE TNNLS 2020 (arXiv 2019), Algorithms 1, 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from pydantic import Field
from scipy.spatial.distance import squareform

from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.contract import Clients, Mixing, Plan, Regrouping, RoundReport, ServerState, Setup
from rayfl.clustering.bipartition import Decision, SplitCriteria, decide, separation_gap


class CFL(Algorithm):
    """Recursive bipartition by the cosine similarity of weight updates.

    In every cluster c, after every round:

    1. all members' model moves by ``d_c = sum_i n_i / n_c d_i`` (``weighted: false``: the plain mean that
       Algorithm 5 prints);
    2. if ``|d_c| < eps1`` and ``max_i |d_i| > eps2`` (``criteria``), the optimal bipartition of the members
       is found from the cosines of their updates;
    3. it is made if ``gamma_max < sqrt((1 - a_cross) / 2)``. Both halves go on from the stationary model.

    Where not all members take part in a round, their latest updates stand for them, also in ``|d_c|``; no
    cluster is split before every member has sent one.

    The models are the nodes of the *parameter tree*: a node that was split keeps its stationary model, and
    with its children the updates that their members sent just before, as sketches of ``tree_sketch`` numbers.
    A newcomer walks from the root to a leaf: at each node it trains from the node's model and goes to the
    child with the single most similar update.

    With ``permute`` the clients permute all that they send by a permutation that the server does not know;
    it computes on permuted vectors only. Cosines and norms stay the same up to rounding.
    """

    name: Literal["cfl"] = "cfl"
    keeps_updates: ClassVar[bool] = True
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox")
    defaults: ClassVar[Mapping[str, Any]] = {}

    criteria: SplitCriteria = Field(SplitCriteria(), description="when a cluster is split")
    weighted: bool = Field(True, description="average by n_i; false: as Algorithm 5 prints, all alike")
    permute: bool = Field(False, description="clients permute what they send (section V-B)")
    sketch: int = Field(
        0, ge=0, multiple_of=8, description="compare sketches of so many numbers; 0: the updates themselves"
    )
    tree_sketch: int = Field(
        1024, ge=8, multiple_of=8, description="numbers kept of every update in the parameter tree"
    )
    gap: bool = Field(
        False, description="report the separation gap of every cluster and round, where groups are known"
    )

    @property
    def private(self) -> bool:
        """``permute``."""
        return self.permute

    def begin(self, setup: Setup) -> ServerState:
        """One cluster, the root of the tree."""
        extra = {
            "parent": np.array([-1]),
            "norms": np.full(setup.clients, np.nan),
            "moved": np.full(1, np.nan),
            "complete": np.zeros(1, np.bool_),
        }
        return replace(super().begin(setup), clustered=True, extra=extra)

    def mix(
        self, setup: Setup, state: ServerState, plan: Plan, observed: NDArray[np.float64] | None = None
    ) -> Mixing:
        """The mean of every cluster's updates, weighted or not."""
        mixing = super().mix(setup, state, plan)
        if self.weighted:
            return mixing
        weights = mixing.weights
        ones = sp.csr_array((np.ones_like(weights.data), weights.indices, weights.indptr), weights.shape)
        return replace(mixing, weights=ones)

    def end(self, setup: Setup, state: ServerState, plan: Plan, report: RoundReport) -> ServerState:
        """Remember the norms of the updates and of their means."""
        norms = np.asarray(state.extra["norms"], np.float64).copy()
        sent = ~np.isnan(report.norms)
        norms[plan.cohort[sent]] = report.norms[sent]
        took_part = np.bincount(plan.group[sent], minlength=state.models)
        members = np.bincount(state.assignment[setup.present], minlength=state.models)
        extra = {**state.extra, "norms": norms, "moved": report.moved, "complete": took_part == members}
        return super().end(setup, replace(state, extra=extra), plan, report)

    def split(self, setup: Setup, state: ServerState, clients: Clients) -> Regrouping | None:
        """Split the clusters that call for it; a half is a new node of the tree."""
        assignment, parent = state.assignment.copy(), state.extra["parent"].tolist()
        extra, splits = dict(state.extra), []
        for cluster in np.unique(assignment[setup.present]).tolist():
            decision = self.examine(setup, state, cluster, clients)
            if decision is None or not decision.split or decision.best is None:
                continue
            for half in (decision.best.first, decision.best.second):
                node = len(parent)
                parent.append(cluster)
                assignment[half] = node
                extra[f"edge{node}.clients"] = half
                extra[f"edge{node}.updates"] = clients.sketches(half, self.tree_sketch)
            splits.append(
                {
                    "cluster": cluster,
                    "halves": [decision.best.first.tolist(), decision.best.second.tolist()],
                    "cross": decision.best.cross,
                    "mean_norm": decision.mean_norm,
                    "max_norm": decision.max_norm,
                }
            )
        if not splits:
            return None
        new = len(parent) - state.models
        parents = np.concatenate([np.arange(state.models), np.array(parent[state.models :])])
        extra |= {
            "parent": np.array(parent),
            "moved": np.concatenate([state.extra["moved"], np.full(new, np.nan)]),
            "complete": np.concatenate([state.extra["complete"], np.zeros(new, np.bool_)]),
        }
        regrouped = replace(state, models=len(parent), assignment=assignment, extra=extra)
        return Regrouping(regrouped, parents, facts={"splits": splits})

    def examine(self, setup: Setup, state: ServerState, cluster: int, clients: Clients) -> Decision | None:
        """What the criteria say of a cluster; None as long as a member has not sent an update."""
        members = self._members(setup, state, cluster)
        norms = np.asarray(state.extra["norms"], np.float64)[members]
        if np.isnan(norms).any():
            return None
        mean_norm = float(state.extra["moved"][cluster])
        similarities = None
        complete = bool(state.extra["complete"][cluster])
        worth = self.criteria.met(
            len(members), mean_norm if complete else 0.0, float(norms.max()), state.round
        )
        if worth:
            cosines = self._cosines(clients, members)
            similarities = squareform(cosines, checks=False)
            if not complete:
                mean_norm = mean_length(cosines, norms, self._weights(setup, members))
        return decide(self.criteria, members, similarities, norms, mean_norm, state.round)

    def _members(self, setup: Setup, state: ServerState, cluster: int) -> NDArray[np.int64]:
        present = setup.present
        members: NDArray[np.int64] = present[state.assignment[present] == cluster]
        return members

    def _weights(self, setup: Setup, members: NDArray[np.int64]) -> NDArray[np.float64]:
        return setup.sizes[members].astype(np.float64) if self.weighted else np.ones(len(members))

    def _cosines(self, clients: Clients, members: NDArray[np.int64]) -> NDArray[np.float64]:
        if not self.sketch:
            return clients.cosines(members)
        rows = clients.sketches(members, self.sketch).astype(np.float64)
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return np.clip(rows @ rows.T, -1.0, 1.0)

    def diagnose(self, setup: Setup, state: ServerState, clients: Clients) -> list[dict[str, Any]]:
        """A row a cluster: the norms of its updates, and its separation gap if ``gap``."""
        rows = []
        for cluster in np.unique(state.assignment[setup.present]).tolist():
            members = self._members(setup, state, cluster)
            norms = np.asarray(state.extra["norms"], np.float64)[members]
            row = {
                "cluster": cluster,
                "clients": len(members),
                "mean_norm": float(state.extra["moved"][cluster]),
                "max_norm": float(np.max(norms)),
            }
            if self.gap and clients.groups is not None and not np.isnan(norms).any() and len(members) > 1:
                similarities = squareform(self._cosines(clients, members), checks=False)
                row["gap"] = separation_gap(similarities, clients.groups[members])
            rows.append(row)
        return rows

    def grow(self, setup: Setup, state: ServerState) -> ServerState:
        """Newcomers have sent no update."""
        more = setup.clients - len(state.assignment)
        norms = np.concatenate([state.extra["norms"], np.full(more, np.nan)])
        return replace(super().grow(setup, state), extra={**state.extra, "norms": norms})

    def join(
        self, setup: Setup, state: ServerState, newcomers: NDArray[np.int64], clients: Clients
    ) -> ServerState:
        """Newcomers walk down the parameter tree (Algorithm 4; its ``a0`` belongs to the first child)."""
        parent = np.asarray(state.extra["parent"])
        at = np.zeros(len(newcomers), np.int64)
        while len(walking := np.flatnonzero(np.isin(at, parent))):
            updates = _normed(clients.updates_from(newcomers[walking], at[walking], self.tree_sketch))
            for place, update in zip(walking, updates, strict=True):
                children = np.flatnonzero(parent == at[place]).tolist()
                nearest = [float((_normed(self._edge(state, c)) @ update).max()) for c in children]
                at[place] = children[int(np.argmax(nearest))]
        assignment = state.assignment.copy()
        assignment[newcomers] = at
        return replace(state, assignment=assignment)

    def _edge(self, state: ServerState, child: int) -> NDArray[np.float32]:
        """The sketches of the updates that a child's members sent before the split."""
        return np.asarray(state.extra[f"edge{child}.updates"], np.float32)


def mean_length(
    cosines: NDArray[np.float64], norms: NDArray[np.float64], weights: NDArray[np.float64]
) -> float:
    """``|d_c|`` of the weighted mean of updates, from their norms and angles.

    Args:
        cosines: ``(m, m)``.
        norms: ``|d_i|``, ``(m,)``.
        weights: of the mean ``(m,)``.
    """
    lengths = norms * weights / weights.sum()
    return float(np.sqrt(max(0.0, lengths @ cosines @ lengths)))


def _normed(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, np.finfo(np.float32).tiny), np.float64)
