"""The models at the servers and the states of the clients, by reference."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.algorithms import Plan, Served
from rayfl.backend import Backend, Joined, Key, Ref
from rayfl.clients.jobs import Mixture
from rayfl.clients.ranges import Ranges
from rayfl.data import Federation
from rayfl.evaluation import EvaluationPlan
from rayfl.kept import Kept
from rayfl.models import ModelSpec
from rayfl.servers.states import ClientStates
from rayfl.training import LocalWork

if TYPE_CHECKING:
    from rayfl.coresets.graphs import Graph


@dataclass(frozen=True)
class Blocks:
    """How a round is divided: clients into blocks (the unit of scheduling), sums into a tree, and models into
    shards.

    Attributes:
        size: clients per block, given how many train.
        clients_per_actor: if given, clients are pinned to actors, this many to each.
        fan_in: the sums of this many blocks are added before they are sent on, and so on in a tree; None: the
            LPS adds the sums of all blocks.
        shards: maximum number of shards of a model.
    """

    size: Callable[[int], int]
    clients_per_actor: int | None = None
    fan_in: int | None = None
    shards: int = 1


class Servers:
    """The models at the servers and the states of the clients, all by reference, and operations on them.

    Callers number the models 0 to K - 1. With E edges each is kept E times: model k at edge e is at index
    ``k E + e`` of :attr:`models`, and clients use the one at their edge.

    Args:
        backend: executes the work.
        spec: the model's flat layout.
        federation: the clients' parts of the data; :attr:`federation` is replaced in every stage.
        blocks: how clients are cut into blocks.
        tolerate: clients that may fail in a round.
        batch_size: test samples in a forward pass.
        edges: the edge of each client ``(N,)``; None, or all 0, for a single one.
    """

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        federation: Federation,
        *,
        blocks: Blocks,
        tolerate: int = 0,
        batch_size: int = 500,
        edges: NDArray[np.int64] | None = None,
    ) -> None:
        self.backend, self.spec, self.federation = backend, spec, federation
        self.blocks = blocks
        self.tolerate, self.batch_size = tolerate, batch_size
        self.ranges = Ranges.of(spec.P, blocks.shards)
        self.edges = edges if edges is not None and edges.any() else None
        self.edge_count = 1 if self.edges is None else int(self.edges.max()) + 1  # E
        self.models: list[Ref] = []
        self.mixtures: tuple[Mixture, ...] = ()  # numbered after the models, see :meth:`serving`
        self.vectors: list[Ref] = []  # the vector of the local objective for each model, if it has one
        self.memories: list[Ref] = []  # the memory (V, n) of a server step for each model
        # The weight that took part in each model since its last global step: (layers, K, 1), or
        # (layers, K, P) if clients leave parameters out of the average; empty for methods without a GPS.
        self.gathered: NDArray[np.float64] = np.zeros((0, 0, 1))
        self.states, self.updates = ClientStates(), ClientStates()
        self.graph: tuple[Federation, Graph] | None = None  # data, and the graph of its clients
        self.plans: dict[str, Kept[EvaluationPlan]] = {}  # the latest test of clients, by the data tested on
        self._members: Kept[NDArray[np.int64]] = Kept()
        self._everywhere: Kept[NDArray[np.int64]] = Kept()

    def put(self, values: NDArray[np.floating], ranges: Ranges | None = None) -> Ref:
        """Share an array: a model, or another whose shards are these ranges of its last axis."""
        return Joined.of([self.backend.put(shard) for shard in (ranges or self.ranges).split(values)])

    def lps(self, number: int, shard: int) -> int:
        """The number of the LPS for a shard of a model, or of a group of models, with this number."""
        return number * len(self.ranges) + shard

    def begin(self, models: Sequence[Ref]) -> None:
        """Start from these K models, at every edge."""
        self.models = [model for model in models for _ in range(self.edge_count)]

    def at(self, models: NDArray[np.int64], clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices ``(n,)`` of these models ``(n,)`` at the edges of these clients ``(n,)``."""
        return models if self.edges is None else models * self.edge_count + self.edges[clients]

    def everywhere(self, assignment: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of each client's model at its edge ``(N,)``."""
        if self.edges is None:
            return assignment
        return self._everywhere.of(lambda: self.at(assignment, np.arange(len(assignment))), assignment)

    def serving(self, served: Served, clients: NDArray[np.int64]) -> tuple[Servers, NDArray[np.int64]]:
        """These servers with the mixtures that they serve to ``clients`` ``(n,)``, and the index of the model
        or mixture that each client receives ``(n,)``; mixtures are numbered after the models.

        Args:
            served: the model, or mixture, of each client ``(n,)`` or ``(n, K)``.
            clients: ids.
        """
        if not isinstance(served, sp.csr_array):
            return self, self.at(served, clients)
        shares = served.astype(np.float64)
        shares.sum_duplicates()
        shares.eliminate_zeros()
        counts = np.diff(shares.indptr)
        models = self.at(shares.indices.astype(np.int64), np.repeat(clients, counts)).tolist()
        weights = (shares.data / np.repeat(shares.sum(axis=1), counts)).tolist()
        numbers: dict[Mixture, int] = {}
        indices = np.empty(len(clients), np.int64)
        for row, (first, last) in enumerate(itertools.pairwise(shares.indptr.tolist())):
            if last - first == 1:
                indices[row] = models[first]
            else:
                mixture = Mixture(tuple(models[first:last]), tuple(weights[first:last]))
                indices[row] = numbers.setdefault(mixture, len(self.models) + len(numbers))
        servers = copy.copy(self)
        servers.mixtures = tuple(numbers)
        return servers, indices

    def weights(self, served: Served, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """The weight of each model ``(L,)``, if every client gives its weight, ``sizes`` ``(N,)``, to the
        models that it uses.
        """
        servers, used = self.serving(served, np.arange(len(sizes)))
        count = len(self.models) + len(servers.mixtures)
        totals: NDArray[np.float64] = np.bincount(used, sizes, minlength=count).astype(np.float64)
        for weight, mixture in zip(totals[len(self.models) :].tolist(), servers.mixtures, strict=True):
            totals[list(mixture.models)] += weight * np.array(mixture.weights)
        return totals[: len(self.models)]

    def sent(self, numbers: Iterable[int]) -> dict[Key, Ref]:
        """The models with these numbers, by reference; for mixtures, also the models that they consist of."""
        refs: dict[Key, Ref] = {}
        for number in numbers:
            if number < len(self.models):
                refs["model", number] = self.models[number]
            else:
                mixture = self.mixtures[number - len(self.models)]
                refs.update({("model", part): self.models[part] for part in mixture.models})
                refs["model", number] = mixture
        return refs

    def name(self, index: int) -> str:
        """The model's number, followed by that of the edge if there are several."""
        model, edge = divmod(index, self.edge_count)
        return f"{model}" if self.edges is None else f"{model}_edge_{edge}"

    def ordered(self, plan: Plan) -> Plan:
        """The plan sorted by (group, edge, id)."""
        if self.edges is None:
            return plan
        order = np.lexsort((plan.cohort, self.at(plan.group, plan.cohort)))
        ordered = {name: getattr(plan, name)[order] for name in ("cohort", "start", "group")}
        return replace(plan, **ordered)

    def snapshot(self) -> dict[str, Any]:
        """Everything that a round changes, for :meth:`restore`."""
        return {
            "models": list(self.models),
            "vectors": list(self.vectors),
            "memories": list(self.memories),
            "gathered": self.gathered,
            "states": self.states.copy(),
            "updates": self.updates.copy(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the output of :meth:`snapshot`."""
        for name, value in snapshot.items():
            setattr(self, name, value)

    def inherit(self, parents: NDArray[np.int64]) -> None:
        """Replace the models and the servers' vectors by copies of their parents ``(K_new,)``, and divide the
        gathered weight.
        """
        parents = (np.asarray(parents)[:, None] * self.edge_count + np.arange(self.edge_count)).ravel()
        if self.gathered.size:
            self.gathered = self.gathered[:, parents] / np.bincount(parents)[parents][:, None]
        self.models = [self.models[parent] for parent in parents.tolist()]
        if self.vectors:
            self.vectors = [self.vectors[parent] for parent in parents.tolist()]
        if self.memories:
            self.memories = [self.memories[parent] for parent in parents.tolist()]

    def restore_models(self, models: NDArray[np.int64], former: Sequence[Ref]) -> None:
        """Replace models ``(R,)`` by earlier ones of the same numbers, at every edge."""
        indices = np.asarray(models)[:, None] * self.edge_count + np.arange(self.edge_count)
        for index in indices.ravel().tolist():
            self.models[index] = former[index]

    def members(self, assignment: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many clients each model has ``(L,)``, from the model of each client ``(N,)``."""
        federation, models = self.federation, len(self.models)

        def count() -> NDArray[np.int64]:
            return np.bincount(assignment[federation.sizes > 0], minlength=models)

        return self._members.of(count, assignment, federation, models)

    def keep(
        self,
        states: ClientStates,
        plan: Plan,
        blocks: Sequence[slice],
        objects: Sequence[Ref],
        failures: Mapping[int, str],
    ) -> None:
        """Keep what the blocks of a cohort have sent, except from clients that failed."""
        delivered = ~np.isin(plan.cohort, list(failures))
        for block, ref in zip(blocks, objects, strict=True):
            states.update(plan.cohort[block], ref, delivered[block])
        states.pack(self.backend)
        states.spill(self.backend)

    def work_of(self, clients: NDArray[np.int64], work: LocalWork) -> float:
        """Parameters times samples of the local training of these clients ``(n,)``."""
        return float(self.spec.P * work.epochs * self.federation.sizes[clients].sum())
