"""CFL: clusters are split in two where their clients' updates point apart.

Sattler, Mueller, Samek, "Clustered federated learning: model-agnostic distributed multi-task optimization
under privacy constraints", IEEE TNNLS 2020 (arXiv 2019), Algorithms 1, 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import Field

from rayfl.algorithms.base import Algorithm, losses_on
from rayfl.algorithms.cfl_state import CFLState
from rayfl.algorithms.contract import (
    Clients,
    Mixing,
    Plan,
    Regrouping,
    RoundReport,
    Setup,
)
from rayfl.clustering import cosines
from rayfl.clustering.bipartition import Bipartition, bipartition, is_correct, separation_gap
from rayfl.clustering.newcomers import Fit
from rayfl.clustering.splitting import (
    CRITERIA,
    AbsoluteCriteria,
    SplitCriteria,
    UpdateNorms,
    decide,
    reference_of_half,
)
from rayfl.settings import Choice
from rayfl.training.reports import ClientReport, Reports, UpdateLengths


class CFL(Algorithm[CFLState]):
    """Recursive bipartition: a cluster is split where its clients' updates point apart.

    All clients start in one cluster, which trains with FedAvg. When the mean update of a cluster is small
    while single updates are long, its clients pull in different directions; the cluster is then split in two
    by the cosines of their updates. This repeats, so the number of clusters is not given.

    In every cluster c, after every round:

    1. The model moves by ``d_c = sum_i n_i / n_c d_i`` (``weighted: false``: the plain mean that Algorithm 5
       prints).
    2. If ``|d_c| < eps1`` and ``max_i |d_i| > eps2``, the optimal bipartition of the members is found from
       the cosines of their updates. ``criteria`` has absolute norms, as in the paper, or relative ones, which
       carry over between datasets.
    3. The cluster is split if ``gamma_max < sqrt((1 - a_cross) / 2)``. Both halves continue from the updated
       model.

    If not all members take part in a round, the latest updates of the others are used, also in ``|d_c|``. An
    update counts only for the cluster in which it was made: no cluster is split before every member has sent
    one. Updates are those of the parameters, without running statistics (BatchNorm).

    The models are the nodes of the *parameter tree*. A node that was split keeps its model and its members'
    last updates, as sketches of ``tree_sketch`` numbers (Eq. 47). A newcomer, or a client with new data,
    walks from the root to a leaf: at each node it trains the node's model and goes to the child with the most
    similar update.

    With ``fallback`` every client uses, and is tested with, the node on its way from the root to its leaf
    with the lowest validation loss; it still trains the leaf's model. This undoes splits that did harm. With
    ``permute`` the clients permute all that they send, by a permutation that the server does not know.
    Cosines and norms stay the same up to rounding.

    Symbols:
        eps_1, eps_2: ``algorithm.criteria.eps1``, ``algorithm.criteria.eps2``
        gamma_max, a_cross: computed; ``algorithm.gap=true`` reports the separation gap
        n_i weights: ``algorithm.weighted``

    Cost:
        As FedAvg: splitting needs no other messages. The servers keep the latest update of every client, N P
        parameters; with ``algorithm.sketch`` only sketches are compared. No client state.

    Fails when:
        eps1 and eps2 do not fit: they are norms, which depend on the dataset, the model and the number of
        samples (``criteria: relative`` carries over). Clients take part rarely. Updates from few
        samples are noise: with 20 samples for each client the groups are not separated.

    Shown by:
        - experiments/cfl/README.md: thresholds over samples per client, and 20 samples
        - experiments/pacfl/README.md: with a tenth of the clients a round it splits three or four times
    """

    name: Literal["cfl"] = "cfl"
    keeps_updates: ClassVar[bool] = True
    objectives: ClassVar[tuple[str, ...] | None] = ("sgd", "fedprox")

    criteria: Annotated[SplitCriteria, Choice(CRITERIA)] = Field(
        AbsoluteCriteria(), description="when a cluster is split, and in which units its updates are measured"
    )
    weighted: bool = Field(
        True, description="weight clients by n_i; false: equal weights, as Algorithm 5 prints"
    )
    permute: bool = Field(False, description="clients permute what they send (section V-B)")
    sketch: int = Field(
        0,
        ge=0,
        multiple_of=8,
        description="compare sketches of this many numbers in place of whole updates; 0: whole updates",
    )
    tree_sketch: int = Field(
        1024,
        ge=8,
        multiple_of=8,
        description="size of the sketch that the parameter tree keeps of each update",
    )
    fallback: bool = Field(
        False,
        description="each client uses the model with the lowest validation loss on its way from the "
        "root to its leaf (without validation samples: the lowest training loss, which "
        "favours the leaf)",
    )
    gap: bool = Field(
        False,
        description="report the separation gap of every cluster and round, and whether its "
        "bipartition is correct; needs planted groups",
    )

    @property
    def permutes(self) -> bool:
        """``permute``."""
        return self.permute

    def begin(self, setup: Setup) -> CFLState:
        """One cluster, the root of the tree."""
        return CFLState(0, 1, np.zeros(setup.clients, np.int64), clustered=True)

    def mix(self, setup: Setup, state: CFLState, plan: Plan, reports: Reports) -> Mixing:
        """The mean of every cluster's updates, weighted or not."""
        mixing = super().mix(setup, state, plan, reports)
        if self.weighted:
            return mixing
        weights = mixing.weights
        ones = scipy.sparse.csr_array(
            (np.ones_like(weights.data), weights.indices, weights.indptr), weights.shape
        )
        return replace(mixing, weights=ones)

    def reports(self, setup: Setup, state: CFLState) -> Mapping[str, ClientReport]:
        """The lengths of the updates."""
        return {"norms": UpdateLengths()}

    def end(self, setup: Setup, state: CFLState, plan: Plan, report: RoundReport) -> CFLState:
        """Store the norms of the updates and of their means, and count the rounds in which they met the
        criteria.

        If not all members took part, the norm of the mean is not known yet; it then counts as 0.
        """
        state = super().end(setup, state.observed(setup, plan, report), plan, report)
        ripe = np.zeros(state.models, np.int64)
        for cluster in np.unique(state.assignment[setup.present]).tolist():
            _, norms = state.latest(setup, cluster, self.weighted)
            if self.criteria.met(replace(norms, mean=np.nan_to_num(norms.mean))):
                ripe[cluster] = state.ripe[cluster] + 1
        return replace(state, ripe=ripe)

    def split(self, setup: Setup, state: CFLState, clients: Clients) -> Regrouping[CFLState] | None:
        """Split the clusters that meet the criteria; each half becomes a new node of the tree.

        A node that is split is reset to the model from which its members computed their updates, because
        updates of newcomers will be compared with these.
        """
        assignment, norms, reference = state.assignment.copy(), state.norms.copy(), state.reference.tolist()
        tree, splits = state.tree, []
        for cluster in np.unique(assignment[setup.present]).tolist():
            examined = self.examine(setup, state, cluster, clients)
            if examined is None:
                continue
            best, update_norms = examined
            halves = best.first, best.second
            tree, children = tree.split(
                cluster, [clients.sketches(half, self.tree_sketch) for half in halves]
            )
            for half, node in zip(halves, children, strict=True):
                assignment[half] = node
                reference.append(reference_of_half(reference[0], norms[half]))
                norms[half] = np.nan
            splits.append(
                {
                    "cluster": cluster,
                    "into": list(children),
                    "halves": [half.tolist() for half in halves],
                    "cross": best.cross,
                    "gamma": best.gamma,
                    "mean_norm": update_norms.mean,
                    "max_norm": update_norms.max,
                }
            )
        if not splits:
            return None
        models, reference = len(tree.parent), np.array(reference)
        new = replace(
            state, models=models, assignment=assignment, norms=norms, reference=reference, tree=tree
        )
        split_nodes = tree.parent[state.models :]
        parents = np.concatenate([np.arange(state.models), split_nodes])
        return Regrouping(new, parents, facts={"splits": splits}, restored=np.unique(split_nodes))

    def examine(
        self, setup: Setup, state: CFLState, cluster: int, clients: Clients
    ) -> tuple[Bipartition, UpdateNorms] | None:
        """The halves of a cluster that is to be split, and the norms of its updates; None for no split."""
        members, norms = state.latest(setup, cluster, self.weighted)
        if np.isnan(norms.each).any() or state.ripe[cluster] < self.criteria.patience:
            return None
        similarities, full_norms = self._cosines_and_norms(members, norms, clients)
        best = decide(self.criteria, members, similarities, full_norms)
        return None if best is None else (best, full_norms)

    def _cosines_and_norms(
        self, members: NDArray[np.int64], norms: UpdateNorms, clients: Clients
    ) -> tuple[NDArray[np.float64], UpdateNorms]:
        """Cosines of the members' latest updates, condensed; norms of the updates and of their mean."""
        from scipy.spatial.distance import squareform

        if self.sketch:
            rows = clients.sketches(members, self.sketch)
            return squareform(cosines.tile(rows, rows), checks=False), norms.with_mean_of(rows)
        similarities = squareform(clients.cosines(members), checks=False)
        return similarities, norms.with_mean_by(similarities)

    def diagnose(self, setup: Setup, state: CFLState, clients: Clients) -> list[dict[str, Any]]:
        """One row per cluster: absolute and relative norms of its updates; with ``gap`` also its bipartition.

        Without ``gap``, ``mean_norm`` is NaN if not all members took part: it needs all their updates.
        """
        rows = []
        for cluster in np.unique(state.assignment[setup.present]).tolist():
            members, norms = state.latest(setup, cluster, self.weighted)
            bipartition_facts: dict[str, Any] = {}
            comparable = not np.isnan(norms.each).any() and len(members) > 1
            if self.gap and clients.groups is not None and comparable:
                similarities, norms = self._cosines_and_norms(members, norms, clients)
                halves = bipartition(similarities, members, self.criteria.linkage)
                bipartition_facts = {
                    "gap": separation_gap(similarities, clients.groups[members]),
                    "gamma": halves.gamma,
                    "correct": is_correct(halves, clients.groups),
                }
            rows.append({"cluster": cluster, "clients": len(members), **norms.facts, **bipartition_facts})
        return rows

    def join(self, setup: Setup, state: CFLState, newcomers: NDArray[np.int64], clients: Clients) -> CFLState:
        """Newcomers walk down the parameter tree (Algorithm 4)."""
        leaves = state.tree.walk(
            len(newcomers),
            lambda who, nodes: clients.updates_from(newcomers[who], nodes, self.tree_sketch),
        )
        assignment, norms = state.assignment.copy(), state.norms.copy()
        assignment[newcomers], norms[newcomers] = leaves, np.nan
        return replace(state, assignment=assignment, norms=norms)

    def fit(
        self, setup: Setup, state: CFLState, newcomers: NDArray[np.int64], clients: Clients
    ) -> Fit | None:
        """Compare updates at the last step down the tree; before the first split, compare losses."""
        leaves = state.assignment[newcomers]
        parents = state.tree.parent[leaves]
        if (parents < 0).any():
            return super().fit(setup, state, newcomers, clients)
        return state.tree.fit(clients.updates_from(newcomers, parents, self.tree_sketch), leaves)

    def drift(self, setup: Setup, state: CFLState, drifted: NDArray[np.int64], clients: Clients) -> CFLState:
        """These clients look for their cluster again, as newcomers do."""
        return self.join(setup, state, drifted, clients)

    def tested_with(self, setup: Setup, state: CFLState, clients: Clients) -> NDArray[np.int64]:
        """With ``fallback`` the node of least validation loss on each client's way from the root to its leaf.

        Ties: the most specialised node.
        """
        if not self.fallback or state.models == 1:
            return state.assignment
        present, models = setup.present, state.assignment.copy()
        losses = np.nan_to_num(losses_on("validation", present, clients), nan=np.inf)
        for client, client_losses in zip(present, losses, strict=True):
            models[client] = state.tree.best_on_the_way(int(models[client]), client_losses)
        return models
