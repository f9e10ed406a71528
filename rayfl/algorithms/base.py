"""The contract of an algorithm; its defaults are FedAvg (McMahan et al. 2017, Algorithm 1).

Every aggregation of this project is ``W_new = A W``: the rows of ``W`` are the models trained in a round,
row ``k`` of the mixing matrix ``A`` says how output model ``k`` is averaged. An algorithm never sees a
model: it plans who trains from which model, and says what ``A`` is. The runtime trains, multiplies and
keeps the models. States are immutable, and everything an algorithm remembers is in them, so a
checkpoint is a state written down.

Symbols: ``N`` clients, ``M`` of them in a round's cohort, ``K`` models at the servers, ``P`` numbers in a
model, ``n_i`` training samples of client ``i``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from pydantic import Field, field_validator

from rayfl.clustering.config import Clustering
from rayfl.models import ModelSpec
from rayfl.random import generator
from rayfl.settings import Section
from rayfl.training import LocalWork, Segments, Training


class Hierarchy(Section):
    """The servers: one local parameter server (LPS) a cluster, one global one (GPS) above them."""

    common_layers: Annotated[int, Field(ge=0)] | Literal["none", "all"] | tuple[str, ...] = Field(
        "none",
        description="layers that the GPS averages over all clusters: how many first ones, or their names",
    )
    global_every: int = Field(1, ge=1, description="local rounds between two global rounds (kappa)")
    lps_actors: int = Field(
        2,
        ge=1,
        description="most LPS actors; many small clusters share one, and the results do not depend on it",
    )

    @field_validator("common_layers", mode="before")
    @classmethod
    def _single_name(cls, value: object) -> object:
        if isinstance(value, bool):  # YAML's yes and no are not 1 and 0 layers
            raise ValueError("give 'all', 'none', a number of layers or their names, not true or false")
        return (value,) if isinstance(value, str) and value not in ("none", "all") else value

    def common(self, spec: ModelSpec) -> Segments:
        """The common layers as ranges of the flat parameter vector.

        Raises:
            ConfigError: if a layer is not one of the model's.
        """
        if self.common_layers == "none" or self.common_layers == 0:
            return ()
        if self.common_layers == "all":
            return ((0, spec.P),)
        if isinstance(self.common_layers, int):
            return tuple(spec.segment(first=self.common_layers))
        return tuple(spec.segment(self.common_layers))


@dataclass(frozen=True)
class Setup:
    """What an algorithm may know of a run: the public facts, no samples.

    Attributes:
        clients: N.
        sizes: n_i, ``(N,)``.
        spec: the model's flat layout.
        rounds: planned number of rounds.
        seed: the run's seed.
        training, hierarchy, clustering: the config sections of these names.
    """

    clients: int
    sizes: NDArray[np.int64]
    spec: ModelSpec
    rounds: int
    seed: int
    training: Training
    hierarchy: Hierarchy
    clustering: Clustering


@dataclass(frozen=True)
class ServerState:
    """All that the servers remember between rounds, except the models' numbers.

    Attributes:
        round: rounds completed.
        models: K.
        assignment: the model that each client uses, ``(N,)`` in ``range(K)``.
        clustered: whether the clients have been clustered.
        extra: a method's own arrays, by name.
    """

    round: int
    models: int
    assignment: NDArray[np.int64]
    clustered: bool = False
    extra: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Who trains in a round.

    Attributes:
        cohort: client ids ``(M,)``, sorted by (group, id); blocks are cut from it in this order.
        start: the model that each starts from, ``(M,)`` in ``range(K)``.
        group: the local parameter server that each reports to, ``(M,)``.
    """

    cohort: NDArray[np.int64]
    start: NDArray[np.int64]
    group: NDArray[np.int64]


@dataclass(frozen=True)
class Mixing:
    """How trained models become the next ones.

    Attributes:
        weights: ``A`` before its rows are normalised, sparse ``(K, M)``: model ``k`` becomes
            ``sum_j weights[k, j] w_j / sum_j weights[k, j]`` over the clients ``j`` that delivered; an empty
            row keeps its model. Whole numbers such as ``n_i`` make the sums exact to 2^-53.
        common: ranges of the parameter vector that the GPS then averages over all models by the weight that
            took part in each, and sends back to every LPS; empty when this round has no global step.
    """

    weights: sp.csr_array
    common: Segments = ()


class Algorithm(Section):
    """Base of all algorithms: a frozen set of parameters and five pure functions.

    ``defaults`` holds what the method sets in other config sections unless the user does.
    """

    name: str = ""

    defaults: ClassVar[Mapping[str, Any]] = {}

    def initial(self, setup: Setup) -> tuple[int, ...]:
        """The K initial models, as numbers of random initialisations: equal numbers give equal models."""
        return (0,)

    def begin(self, setup: Setup) -> ServerState:
        """The state before round 0."""
        return ServerState(0, len(self.initial(setup)), np.zeros(setup.clients, np.int64))

    def clustering(self, setup: Setup, state: ServerState) -> Clustering | None:
        """The signature clustering to do before the coming round, if any."""
        return None

    def regroup(self, setup: Setup, state: ServerState, labels: NDArray[np.int64]) -> Regrouping:
        """Take the outcome of :meth:`clustering`: the cluster of each client, ``(N,)``."""
        raise NotImplementedError(f"{type(self).__name__} asked for a clustering but cannot use one")

    def plan(self, setup: Setup, state: ServerState) -> Plan:
        """Sample ``max(1, round(rho N))`` clients; each starts from the model that it uses."""
        return self.plan_for(state, sample_cohort(setup, state.round))

    def plan_for(self, state: ServerState, cohort: NDArray[np.int64]) -> Plan:
        """The plan in which each of ``cohort`` starts from its own model and reports to that model's LPS."""
        group = state.assignment[cohort]
        order = np.lexsort((cohort, group))
        return Plan(cohort[order], group[order], group[order])

    def work(self, setup: Setup, state: ServerState) -> LocalWork:
        """The local work of the round: E epochs of SGD."""
        t = setup.training
        return LocalWork(
            epochs=t.epochs,
            batch_size=t.batch_size,
            lr=t.lr_at(state.round, setup.rounds),
            momentum=t.momentum,
            weight_decay=t.weight_decay,
        )

    def mix(self, setup: Setup, state: ServerState, plan: Plan) -> Mixing:
        """Within each group the average weighted by n_i."""
        columns = np.arange(len(plan.cohort))
        weights = setup.sizes[plan.cohort].astype(np.float64)
        shape = (state.models, len(columns))
        return Mixing(sp.csr_array((weights, (plan.group, columns)), shape=shape))

    def end(self, setup: Setup, state: ServerState, plan: Plan) -> ServerState:
        """The state after the round."""
        return replace(state, round=state.round + 1)


@dataclass(frozen=True)
class Regrouping:
    """New clusters.

    Attributes:
        state: the state with the new number of models and assignment.
        parents: the old model that each new one starts from, ``(K_new,)``.
    """

    state: ServerState
    parents: NDArray[np.int64]


def sample_cohort(setup: Setup, round: int) -> NDArray[np.int64]:
    """The ids of the clients sampled in a round, ascending; O(cohort) time and memory when it is small."""
    count = setup.training.cohort(setup.clients)
    if count == setup.clients:
        return np.arange(count)
    draw = generator(setup.seed, "cohort", round).choice(setup.clients, count, replace=False, shuffle=False)
    return np.sort(draw).astype(np.int64)


class OneShotClustered(Algorithm):
    """Base of methods that cluster clients by signature, then train one model a cluster.

    Every cluster starts from the same ``w_0`` (or, when clustered again, from the model that most of its
    members used). Within a cluster FedAvg runs at its local parameter server; every kappa rounds the
    global one averages the common layers of ``hierarchy`` over the clusters.
    """

    def clustering(self, setup: Setup, state: ServerState) -> Clustering | None:
        """Before round 0, and every tau rounds when ``clustering.every`` is tau > 0."""
        tau = setup.clustering.every
        due = not state.clustered or (tau > 0 and state.round > 0 and state.round % tau == 0)
        return setup.clustering if due else None

    def regroup(self, setup: Setup, state: ServerState, labels: NDArray[np.int64]) -> Regrouping:
        """One model a cluster; its parent is the one that most members used (ties: the smaller id)."""
        k = int(labels.max()) + 1
        votes = np.zeros((k, state.models), np.int64)
        np.add.at(votes, (labels, state.assignment), 1)
        new = replace(state, models=k, assignment=labels.astype(np.int64), clustered=True)
        return Regrouping(new, votes.argmax(axis=1))

    def mix(self, setup: Setup, state: ServerState, plan: Plan) -> Mixing:
        """FedAvg in every cluster, and the common layers over all of them every kappa rounds."""
        mixing = super().mix(setup, state, plan)
        if (state.round + 1) % setup.hierarchy.global_every:
            return mixing
        return replace(mixing, common=setup.hierarchy.common(setup.spec))
