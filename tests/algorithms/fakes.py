"""What surrounds the methods, without data, workers or Ray: a setup, clients that answer from tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms import (
    ALGORITHMS,
    Algorithm,
    OneShotState,
    Plan,
    RoundReport,
    ServerState,
    Setup,
    Split,
)
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.config import load
from rayfl.models import MODELS, ModelSpec
from rayfl.servers.serialisation import flatten

SPEC = ModelSpec.of(MODELS["mlp"](hidden=(3, 2)), (5,), 4, 0)  # fc1 5*3+3, fc2 3*2+2, fc3 2*4+4
SIZES = [10, 20, 30, 40, 50, 60]


def setup(name: str | Mapping[str, Any] = "fedavg", sizes: Sequence[int] = SIZES, **sections: Any) -> Setup:
    """The public facts of a run of ``len(sizes)`` clients, with the method's defaults."""
    config = load({"algorithm": name, **sections})
    return Setup(
        clients=len(sizes),
        sizes=np.array(sizes, np.int64),
        spec=SPEC,
        rounds=8,
        seed=config.seed,
        training=config.training,
        hierarchy=config.hierarchy,
        clustering=config.clustering,
        local=config.local,
        order=config.order,
        sampling=config.sampling,
    )


def algorithm(name: str, **settings: Any) -> Algorithm:
    return ALGORITHMS[name](**settings)


def clustered(
    labels: Sequence[int], round: int = 0, newcomers: Sequence[int] = (), **facts: Any
) -> OneShotState:
    """Clients in these clusters, by the signatures that all but the newcomers sent in round 0."""
    found = np.array(labels, np.int64)
    known = np.where(np.isin(np.arange(len(found)), newcomers), -1, 0)
    return OneShotState(round, int(found.max()) + 1, found, clustered=True, known=known, **facts)


@dataclass(frozen=True)
class Remembering(ServerState):
    """A state of a method that is not rayfl's own."""

    memory: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))


def assert_same_state(one: ServerState, other: ServerState) -> None:
    """To the bit."""
    a, b = flatten(one), flatten(other)
    assert type(one) is type(other)
    assert a.values == b.values
    assert a.arrays.keys() == b.arrays.keys()
    for name, array in a.arrays.items():
        assert array.dtype == b.arrays[name].dtype, name
        assert array.shape == b.arrays[name].shape, name
        assert array.tobytes() == b.arrays[name].tobytes(), name


def clusters(labels: Sequence[int], **facts: Any) -> Clusters:
    found = np.array(labels, np.int64)
    return Clusters(labels=found, n_clusters=len(np.unique(found[found >= 0])), **facts)


class FakeClients:
    """Clients whose answers are given, and that write down what they were asked.

    Args:
        losses: for each part of the data the loss of every model at every client ``(N, K)``.
        labels: the clusters ``(N,)`` that their signatures would give.
        signatures: of each client.
        cosines: of all clients' updates ``(N, N)``.
    """

    groups: NDArray[np.int64] | None = None

    def __init__(
        self,
        losses: Mapping[str, Sequence[Sequence[float]]] | None = None,
        labels: Sequence[int] = (),
        signatures: Sequence[Sequence[float]] = (),
        cosines: Sequence[Sequence[float]] = (),
    ) -> None:
        self._losses = {part: np.array(values, np.float64) for part, values in (losses or {}).items()}
        self._labels, self._signatures, self._cosines = labels, signatures, cosines
        self.asked: list[str] = []

    def losses(self, clients: NDArray[np.int64], split: Split) -> NDArray[np.float64]:
        self.asked.append(split)
        return self._losses[split][clients]

    def cluster(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64] | None = None,
        known: NDArray[np.int64] | None = None,
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> Clusters:
        self.asked.append("cluster")
        return clusters(self._labels, threshold=clustering.threshold)

    def signatures(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64],
        known: NDArray[np.int64] | None = None,
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> dict[int, NDArray[np.float32]]:
        self.asked.append("signatures")
        return {c: np.array(self._signatures[c], np.float32) for c in clients.tolist()}

    def cosines(self, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        self.asked.append("cosines")
        return np.array(self._cosines, np.float64)[np.ix_(clients, clients)]

    def sketches(self, clients: NDArray[np.int64], size: int) -> NDArray[np.float32]:
        raise NotImplementedError

    def updates_from(
        self, clients: NDArray[np.int64], models: NDArray[np.int64], size: int
    ) -> NDArray[np.float32]:
        raise NotImplementedError


NOBODY = FakeClients()


def plan_of(method: Algorithm, s: Setup, state: ServerState, clients: FakeClients = NOBODY) -> Plan:
    """Who would train."""
    state, cohort = method.cohort(s, state, clients)
    return method.plan(s, state, cohort)


def report(plan: Plan, models: int, failures: Sequence[int] = (), **facts: Any) -> RoundReport:
    """A round in which nothing was learnt worth reporting."""
    m = len(plan.cohort)
    usual = {
        "losses": np.ones(m),
        "steps": np.ones(m, np.int64),
        "reports": {"norms": np.ones(m)},
        "model_changes": np.ones(models),
        "failures": {c: "boom" for c in failures},
    }
    return RoundReport(**{**usual, **facts})
