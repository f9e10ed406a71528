"""One round: blocks are cut, trained, multiplied by their part of A, reduced at LPSs, merged at the GPS."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.algorithms import GlobalStep, Mixing, Plan, RoundReport
from rayfl.backend import Backend, Done, Key, Ref, Task
from rayfl.clients.jobs import (
    ROWS,
    STATES,
    UPDATES,
    AdaptJob,
    BlockMixing,
    EvalJob,
    EvalReport,
    ForwardPass,
    TrainJob,
    TrainReport,
)
from rayfl.clients.partial import Partial
from rayfl.clients.state import StateLayout, StateRow
from rayfl.data import Federation, Ragged
from rayfl.data.base import Part
from rayfl.errors import ClientError
from rayfl.evaluation import EvaluationPlan
from rayfl.local import LocalObjective
from rayfl.local.sgd import SGD
from rayfl.models import ModelSpec
from rayfl.ordering import Ordering
from rayfl.ordering.shuffled import Shuffled
from rayfl.server_step import ServerStep
from rayfl.servers.lps import (
    FACTS,
    MODEL,
    VALUES,
    VECTOR,
    CombineJob,
    Optimizer,
    Reduced,
    ReduceJob,
    merge,
)
from rayfl.servers.mixing import block_mixings, scales, without
from rayfl.servers.states import ClientStates
from rayfl.training import LocalWork, Segments, complement, length
from rayfl.training.reports import ClientReport, Reports
from rayfl.training.work import behind

if TYPE_CHECKING:
    from rayfl.coresets.graphs import Graph

Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks in all)."""

_PASSES = 4
"""Forward passes in one evaluation task."""


def cut_blocks(plan: Plan, size: int, clients_per_actor: int | None) -> list[slice]:
    """Cut the cohort into blocks of at most ``size`` clients of one group (and, if pinned, one actor)."""
    homes = plan.cohort // clients_per_actor if clients_per_actor else np.zeros_like(plan.cohort)
    change = (np.diff(plan.group) != 0) | (np.diff(homes) != 0)
    edges = [0, *(np.flatnonzero(change) + 1).tolist(), len(plan.cohort)]
    return [
        slice(start, min(start + size, stop))
        for begin, stop in itertools.pairwise(edges)
        for start in range(begin, stop, size)
    ]


@dataclass(frozen=True)
class AskedReport:
    """What clients are to report: what it is, and the same prepared, by reference."""

    report: ClientReport
    ref: Ref


@dataclass(frozen=True)
class Round:
    """What is to be done in a round, besides who takes part.

    Attributes:
        round: its number.
        plan: who trains from what.
        work: of the clients.
        mixing: A, if it is known before training.
        stage: the federation's stage.
        local, order: the local objective, and the order of samples.
        assignment: the model of each client ``(N,)``; for objectives with vectors at the servers, and those
            in whose average the absent count.
        reports: what clients report besides, by name.
        mix: gives A from the reports, if it is not known before training.
        updates: whether the servers keep the clients' updates.
        server_step: what an LPS does with the average, if anything.
        step: what the GPS averages over the LPSs; None for methods without a GPS.
    """

    round: int
    plan: Plan
    work: LocalWork
    mixing: Mixing | None = None
    stage: int = 0
    local: LocalObjective = SGD()  # noqa: RUF009 (frozen)
    order: Ordering = Shuffled()  # noqa: RUF009
    assignment: NDArray[np.int64] | None = None
    reports: Mapping[str, AskedReport] = field(default_factory=dict)
    mix: Callable[[Reports], Mixing] | None = None
    updates: bool = False
    server_step: ServerStep | None = None
    step: GlobalStep | None = None

    @classmethod
    def nobody(cls, work: LocalWork, round: int = 0, stage: int = 0) -> Round:
        """Work without participants, for clients that are asked to train on their own."""
        plan = Plan(*(np.empty(0, np.int64) for _ in range(3)))
        return cls(round, plan, replace(work, personal=()), stage=stage)


class Servers:
    """The models at the servers and the states of the clients, all by reference, and what is done with them.

    Callers number the models 0 to K - 1. With E edges each is kept E times, model k at edge e in place
    ``k E + e`` of :attr:`models`, and clients meet the one at their edge.

    Args:
        backend: who does the work.
        spec: the model's flat layout.
        federation: the clients' parts of the data; :attr:`federation` is set anew in every stage.
        block_size: clients in a block, given how many train.
        clients_per_actor: pins clients to actors if given.
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
        block_size: Callable[[int], int],
        clients_per_actor: int | None = None,
        tolerate: int = 0,
        batch_size: int = 500,
        edges: NDArray[np.int64] | None = None,
    ) -> None:
        self.backend, self.spec, self.federation = backend, spec, federation
        self.block_size, self.clients_per_actor = block_size, clients_per_actor
        self.tolerate, self.batch_size = tolerate, batch_size
        self.edges = edges if edges is not None and edges.any() else None
        self.places = 1 if self.edges is None else int(self.edges.max()) + 1  # E
        self.models: list[Ref] = []
        self.vectors: list[Ref] = []  # the servers' own, one beside each model, for objectives that have such
        self.memories: list[Ref] = []  # (V, n) of a server step, one beside each model
        # The weight that took part in each model since its last global step: (layers, K, 1), or
        # (layers, K, P) where clients leave numbers out of the average; empty for methods without a GPS.
        self.gathered: NDArray[np.float64] = np.zeros((0, 0, 1))
        self.states, self.updates = ClientStates(), ClientStates()
        self.graph: tuple[Federation, Graph] | None = None  # of the clients, and of which stage

    def begin(self, models: Sequence[Ref]) -> None:
        """Start from these K models, at every edge."""
        self.models = [model for model in models for _ in range(self.places)]

    def at(self, models: NDArray[np.int64], clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where these models are kept at the edges of these clients."""
        return models if self.edges is None else models * self.places + self.edges[clients]

    def name(self, place: int) -> str:
        """The model's number, and behind it that of the edge if there are several."""
        model, edge = divmod(place, self.places)
        return f"{model}" if self.edges is None else f"{model}_edge_{edge}"

    def ordered(self, plan: Plan) -> Plan:
        """The plan sorted by (group, edge, id)."""
        if self.edges is None:
            return plan
        order = np.lexsort((plan.cohort, self.at(plan.group, plan.cohort)))
        return Plan(plan.cohort[order], plan.start[order], plan.group[order])

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
        """Back to what :meth:`snapshot` took."""
        for name, value in snapshot.items():
            setattr(self, name, value)

    def inherit(self, parents: NDArray[np.int64]) -> None:
        """The models and the servers' own vectors are now copies of these; they divide what was gathered."""
        parents = (parents[:, None] * self.places + np.arange(self.places)).ravel()
        if self.gathered.size:
            self.gathered = self.gathered[:, parents] / np.bincount(parents)[parents][:, None]
        self.models = [self.models[parent] for parent in parents.tolist()]
        if self.vectors:
            self.vectors = [self.vectors[parent] for parent in parents.tolist()]
        if self.memories:
            self.memories = [self.memories[parent] for parent in parents.tolist()]

    def train(self, turn: Round, progress: Progress = lambda done, total: None) -> RoundReport:
        """Train the cohort and set the models to ``A W``.

        If it raises or is interrupted, models and states are those before the round.

        Raises:
            ClientError: if more than ``tolerate`` clients failed: the first of them.
        """
        turn = self._at_edges(turn)
        plan, local, layout = turn.plan, turn.local, self._layout(turn)
        blocks = cut_blocks(plan, self.block_size(len(plan.cohort)), self.clients_per_actor)
        has_vectors = local.server_size(self.spec) > 0
        if has_vectors and not self.vectors:
            zeros = self.backend.put(np.zeros(local.server_size(self.spec), np.float32))
            self.vectors = [zeros] * len(self.models)
        parts: list[BlockMixing | None] = [None] * len(blocks)
        if turn.mixing is not None:
            cut = block_mixings(turn.mixing, blocks)
            # Where blocks would send more sums than they have clients, the trained rows are sent.
            if sum(len(part.rows) for part in cut) <= len(plan.cohort):
                parts = [*cut]
        deliver = parts[:1] == [None]
        assert not (deliver and (local.masks or has_vectors)), "trained rows travel alone"
        tasks = [self._task(turn, layout, block, part) for block, part in zip(blocks, parts, strict=True)]
        trained = self._trained(tasks, turn.round, progress)
        failures = {client: text for done in trained for client, text in done.report.failures.items()}

        reports = self._reports(turn, trained)
        mixing = turn.mixing
        if mixing is None:
            assert turn.mix is not None
            mixing = self._mixed_at_edges(turn.mix(reports), plan.cohort)
        if turn.updates:
            self._keep(self.updates, plan, blocks, [done.refs[UPDATES] for done in trained], failures)
        before = len(self.models)
        if mixing.parents is not None:
            self.inherit(mixing.parents)
        step = turn.step
        averaging = _Averaging(
            shared=complement(layout.layers, self.spec.P),
            common=() if step is None or not step.due.any() else _union(step),
            blocks=blocks,
            trained=trained,
            absent=self._absent(turn, failures),
            optimizer=self._optimizer(turn, failures),
        )
        if deliver:
            facts = self._combine(without(mixing, plan, failures, local), averaging)
        else:
            members = self._members(turn) if has_vectors else None
            rescaled = scales(without(mixing, plan, failures), local) if failures else None
            facts = self._reduce(averaging, members, rescaled)
        if layout.size:
            self._keep(self.states, plan, blocks, [done.refs[STATES] for done in trained], failures)
        changes = np.zeros(max(before, len(self.models)))
        up = down = 0
        gathers = step is not None and step.weights is None
        if turn.updates or averaging.common or gathers:
            learned = self._learned(facts)
            for row, fact in learned.items():
                changes[row] = fact.moved
            if step is not None and gathers:
                self._gather(step, learned)
            if step is not None and averaging.common:
                up, down = self._share(step, averaging.common, learned)
        report = _report(plan, blocks, [done.report for done in trained], reports)
        return replace(report, model_changes=changes, gps_bytes_up=up, gps_bytes_down=down)

    def _trained(self, tasks: Sequence[Task], round: int, progress: Progress) -> list[Done]:
        """The blocks trained, in their order.

        Raises:
            ClientError: if more than ``tolerate`` clients failed: the first of them.
        """
        failures: dict[int, str] = {}
        trained: list[Done] = []
        for done in self.backend.run(tasks):
            trained.append(done)
            failures.update(done.report.failures)
            if len(failures) > self.tolerate:
                client = min(failures)
                raise ClientError(client, round, failures[client])
            progress(len(trained), len(tasks))
        return sorted(trained, key=lambda done: done.task)

    def _reports(self, turn: Round, trained: Sequence[Done]) -> Reports:
        """What the cohort has reported: blocks put together, large ones in a remote task."""
        found: dict[str, NDArray[np.float64]] = {}
        for name, asked in turn.reports.items():
            if asked.report.combined:
                blocks = [done.refs["report", name] for done in trained]
                found[name] = self.backend.get(self.backend.call(_combined, asked.ref, *blocks))
            else:
                found[name] = asked.report.combine([done.report.reports[name] for done in trained])
        return found

    def _optimizer(self, turn: Round, failures: Mapping[int, str]) -> Optimizer | None:
        """The server step, for all models."""
        if turn.server_step is None:
            return None
        delivered = ~np.isin(turn.plan.cohort, list(failures))
        clients = np.bincount(turn.plan.group[delivered], minlength=len(self.models))
        return Optimizer(turn.server_step, clients, self._members(turn))

    def _at_edges(self, turn: Round) -> Round:
        """The round with the places of models instead of their numbers."""
        if self.edges is None:
            return turn
        plan, assignment, mixing = turn.plan, turn.assignment, turn.mixing
        start, group = self.at(plan.start, plan.cohort), self.at(plan.group, plan.cohort)
        return replace(
            turn,
            plan=Plan(plan.cohort, start, group),
            assignment=None if assignment is None else self.at(assignment, np.arange(len(assignment))),
            mixing=None if mixing is None else self._mixed_at_edges(mixing, plan.cohort),
        )

    def _mixed_at_edges(self, mixing: Mixing, cohort: NDArray[np.int64]) -> Mixing:
        """A with a row for each model and edge: clients contribute at their own."""
        if self.edges is None:
            return mixing

        def at_edges(matrix: sp.csr_array) -> sp.csr_array:
            entries = matrix.tocoo()
            rows, columns = (np.asarray(axis, np.int64) for axis in entries.coords)
            shape = matrix.shape[0] * self.places, matrix.shape[1]
            return sp.csr_array((entries.data, (self.at(rows, cohort[columns]), columns)), shape=shape)

        keep = None if mixing.keep is None else at_edges(mixing.keep)
        return replace(mixing, weights=at_edges(mixing.weights), keep=keep)

    def _members(self, turn: Round) -> NDArray[np.int64]:
        """How many clients each model has ``(L,)``."""
        assert turn.assignment is not None
        return np.bincount(turn.assignment[self.federation.sizes > 0], minlength=len(self.models))

    def _learned(self, facts: Sequence[Ref]) -> dict[int, Reduced]:
        """What the GPS may learn, by row."""
        return {row: fact for found in self.backend.get(list(facts)) for row, fact in found.items()}

    def _layout(self, turn: Round) -> StateLayout:
        """Whose numbers lie where in what a client keeps between rounds."""
        return StateLayout.of(self.spec, turn.work.personal, turn.local, turn.order)

    def _absent(self, turn: Round, failures: Mapping[int, str]) -> NDArray[np.int64] | None:
        """How many clients of each model took part before but not now ``(K,)``; None if they do not count."""
        if not turn.local.counts_absent:
            return None
        assert turn.assignment is not None
        known = np.array([client in self.states for client in range(len(turn.assignment))], np.bool_)
        known[[client for client in turn.plan.cohort.tolist() if client not in failures]] = False
        return np.bincount(turn.assignment[known], minlength=len(self.models))

    def _keep(
        self,
        states: ClientStates,
        plan: Plan,
        blocks: Sequence[slice],
        objects: Sequence[Ref],
        failures: Mapping[int, str],
    ) -> None:
        for block, ref in zip(blocks, objects, strict=True):
            clients = plan.cohort[block].tolist()
            states.update(clients, ref, [c not in failures for c in clients])
        states.pack(self.backend)

    def _task(self, turn: Round, layout: StateLayout, block: slice, part: BlockMixing | None) -> Task:
        clients, start = turn.plan.cohort[block], turn.plan.start[block]
        objects: dict[Key, Ref] = {}
        states: tuple[StateRow, ...] = ()
        if layout.size:
            located, states = self.states.locate(clients.tolist())
            objects.update(located)
        compares = any(asked.report.needs_models for asked in turn.reports.values())
        for k in range(len(self.models)) if compares else np.unique(start).tolist():
            objects["model", k] = self.models[k]
        if turn.local.server_size(self.spec):
            objects.update({("vector", k): self.vectors[k] for k in np.unique(start).tolist()})
        objects.update({("report", name): asked.ref for name, asked in turn.reports.items()})
        job = TrainJob(
            round=turn.round,
            stage=turn.stage,
            clients=clients,
            start=start,
            states=states,
            layout=layout,
            work=turn.work,
            local=turn.local,
            order=turn.order,
            mixing=part,
            reports=tuple(turn.reports),
            models=len(self.models) if compares else 0,
            updates=turn.updates,
        )
        keeps: list[Key] = [ROWS] if part is None else [("sum", int(row)) for row in part.rows]
        keeps += [("report", name) for name, asked in turn.reports.items() if asked.report.combined]
        keeps += [UPDATES] * turn.updates + [STATES] * bool(layout.size)
        return Task(
            "train",
            job,
            objects,
            tuple(keeps),
            cost=float(self.federation.sizes[clients].sum()),
            home=int(clients[0]) // self.clients_per_actor if self.clients_per_actor else None,
            work=self._work(clients, turn.work),
        )

    def _work(self, clients: NDArray[np.int64], work: LocalWork) -> float:
        """Parameters times samples of these clients' local training."""
        return float(self.spec.P * work.epochs * self.federation.sizes[clients].sum())

    def _reduce(
        self,
        averaging: _Averaging,
        members: NDArray[np.int64] | None,
        rescaled: NDArray[np.float64] | None,
    ) -> list[Ref]:
        """Each LPS reduces its rows in the order of the blocks; by reference what the GPS may learn."""
        parts: dict[int, dict[Key, Ref]] = {}  # output model -> its partial sums, in block order
        for block, done in enumerate(averaging.trained):
            for (kind, row), ref in done.refs.items():
                if kind == "sum":
                    parts.setdefault(int(row), {})["sum", block] = ref
        facts = []
        for row in sorted(parts):
            still = []
            if averaging.absent is not None:
                still.append(Partial(np.zeros(1), 0.0, keep=float(averaging.absent[row])))
            if rescaled is not None and rescaled[row] != 1:
                still.append(Partial(np.zeros(1), 0.0, scale=float(rescaled[row])))
            job = ReduceJob(
                row,
                averaging.shared,
                averaging.common,
                tuple(still),
                None if members is None else int(members[row]),
                averaging.own_optimizer([row]),
            )
            objects, keeps = {MODEL: self.models[row], **parts[row]}, [MODEL, FACTS]
            if members is not None:
                objects[VECTOR] = self.vectors[row]
                keeps.append(VECTOR)
            if averaging.optimizer is not None:
                objects.update(self._memory(row, 0))
                keeps.append(("memory", 0))
            found = self.backend.serve(row, "reduce", job, objects, keeps)
            self.models[row] = found[MODEL]
            if members is not None:
                self.vectors[row] = found[VECTOR]
            if averaging.optimizer is not None:
                self._remember(row, found["memory", 0])
            facts.append(found[FACTS])
        return facts

    def _memory(self, model: int, number: int) -> dict[Key, Ref]:
        """What a server step keeps beside a model, if there is anything yet."""
        ref = self.memories[model] if self.memories else None
        return {} if ref is None else {("memory", number): ref}

    def _remember(self, model: int, memory: Ref) -> None:
        if not self.memories:
            self.memories = [None] * len(self.models)
        self.memories[model] = memory

    def _combine(self, mixing: Mixing, averaging: _Averaging) -> list[Ref]:
        """The LPSs multiply A with the trained rows, a few models in a call; by reference what the GPS may
        learn."""
        weights, blocks = mixing.weights.tocsr(), averaging.blocks
        keep: NDArray[np.float64] = np.zeros(weights.shape[0])
        kept = None if mixing.keep is None else mixing.keep.tocsr()
        if kept is not None:
            keep = np.asarray(kept.sum(axis=1), np.float64).ravel()
        if averaging.absent is not None:
            keep = keep + averaging.absent
        filled = np.flatnonzero(np.diff(weights.indptr))
        size = max(1, _COMBINED // max(1, self.spec.P))
        facts = []
        for number, first in enumerate(range(0, len(filled), size)):
            some: list[int] = filled[first : first + size].tolist()
            dense = weights[some].toarray()
            theirs = None if kept is None else kept[some].toarray()
            wanted = [b for b, block in enumerate(blocks) if dense[:, block].any()]
            job = CombineJob(
                averaging.shared,
                averaging.common,
                models=tuple(some),
                blocks=tuple(wanted),
                weights=[dense[:, blocks[b]] for b in wanted],
                kept=None if theirs is None else [theirs[:, blocks[b]] for b in wanted],
                keep=keep[some],
                statistics=behind(averaging.shared, self.spec.n_parameters),
                optimizer=averaging.own_optimizer(some),
            )
            objects: dict[Key, Ref] = {("model", k): self.models[k] for k in some}
            objects.update({("rows", b): averaging.trained[b].refs[ROWS] for b in wanted})
            keeps: list[Key] = [*(("model", k) for k in some), FACTS]
            if averaging.optimizer is not None:
                for k in some:
                    objects.update(self._memory(k, k))
                keeps += [("memory", k) for k in some]
            found = self.backend.serve(number, "combine", job, objects, keeps)
            for k in some:
                self.models[k] = found["model", k]
                if averaging.optimizer is not None:
                    self._remember(k, found["memory", k])
            facts.append(found[FACTS])
        return facts

    def _gather(self, step: GlobalStep, facts: Mapping[int, Reduced]) -> None:
        """What took part in this round counts in the next global step."""
        each = np.zeros((len(self.models), 1))
        if any(np.ndim(fact.weight) for fact in facts.values()):
            each = np.zeros((len(self.models), self.spec.P))
        for row, fact in facts.items():
            each[row] = fact.weight
        before = self.gathered if self.gathered.size else np.zeros((len(step.layers), len(self.models), 1))
        self.gathered = before + each

    def _share(self, step: GlobalStep, sent: Segments, facts: Mapping[int, Reduced]) -> tuple[int, int]:
        """The GPS averages layers over the LPSs that are due and sends them back; bytes up and down.

        An LPS that is alone in its group has nothing to share, and keeps what it has gathered.

        Args:
            step: which layers, LPSs and weights.
            sent: the ranges that the LPSs send, those of all layers.
            facts: of the LPSs whose clients took part in this round.
        """
        up = down = 0
        uploads = {row: fact.common for row, fact in facts.items()}
        gathered = self.gathered.copy()
        for layer, (segments, groups) in enumerate(step.layers):
            size, numbers = 4 * length(segments), _numbers(segments)
            places = np.searchsorted(_numbers(sent), numbers)
            for group in np.unique(groups[step.due]):
                rows = np.flatnonzero(step.due & (groups == group))
                weights = gathered[layer, rows] if step.weights is None else step.weights[rows, None]
                senders = rows[weights.any(axis=1)].tolist()
                if len(rows) == 1 or not senders:
                    continue
                for row in senders:
                    if row not in uploads:
                        found = self.backend.serve(row, "upload", sent, {MODEL: self.models[row]}, [VALUES])
                        uploads[row] = self.backend.get(found[VALUES])
                sums = [uploads[row].take(places) for row in senders]
                merged = merge(sums, [w[numbers] if len(w) > 1 else w for w in weights[weights.any(axis=1)]])
                values = self.backend.put(merged)
                for row in rows.tolist():
                    objects = {MODEL: self.models[row], VALUES: values}
                    self.models[row] = self.backend.serve(row, "install", segments, objects, [MODEL])[MODEL]
                up, down = up + size * len(senders), down + size * len(rows)
                if step.weights is None:
                    gathered[layer, rows] = 0
        self.gathered = gathered
        return up, down

    def evaluate(
        self,
        assignment: NDArray[np.int64],
        personal: Segments = (),
        local: LocalObjective = SGD(),  # noqa: B008 (frozen)
        clients: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Test clients, each on its own test data with the model that it would use.

        Args:
            assignment: the model of each client ``(N,)``.
            personal: the ranges of the model that are the client's own, if any.
            local: the local objective, which may make the model the client's own.
            clients: ids ``(n,)``; default: all.

        Returns:
            Correctly classified test samples ``(n,)``, and sums of their losses ``(n,)`` in nats.
        """
        who = np.arange(len(assignment)) if clients is None else clients
        assignment = self.at(assignment, np.arange(len(assignment)))
        # A client with personal layers has a model of its own, whatever it shares.
        own = bool(personal) or local.personal
        owner = who if own else assignment[who]
        plan = EvaluationPlan.of(owner, self.federation.test.take(who), self.batch_size, batches=_PASSES)
        return self._pass(plan, assignment if own else None, "test", personal, local)

    def own_losses(
        self,
        clients: NDArray[np.int64],
        models: NDArray[np.int64],
        ids: Ragged,
        part: Part,
        personal: Segments,
        local: LocalObjective,
    ) -> NDArray[np.float64]:
        """Mean loss of one model on samples of each client.

        Args:
            clients: ids ``(n,)``.
            models: the server's model of each ``(n,)``.
            ids: the samples of all N clients.
            part: whether these are training or test samples.
            personal: the ranges of the model that are the client's own, if any.
            local: the local objective, which may make the model the client's own.

        Returns:
            ``(n,)``; NaN for clients without such samples.
        """
        some, assignment, own = ids.take(clients), np.zeros(len(ids), np.int64), personal or local.personal
        models = self.at(models, clients)
        assignment[clients] = models
        plan = EvaluationPlan.of(clients if own else models, some, self.batch_size, batches=_PASSES)
        _, sums = self._pass(plan, assignment if own else None, part, personal, local)
        with np.errstate(invalid="ignore"):
            return np.asarray(sums / some.sizes, np.float64)

    def losses(self, clients: NDArray[np.int64], ids: Ragged, part: Part) -> NDArray[np.float64]:
        """Mean loss of every model on samples of each client.

        Args:
            clients: ids ``(n,)``.
            ids: the samples of all N clients.
            part: whether these are training or test samples.

        Returns:
            ``(n, K)``; NaN for clients without such samples.
        """
        k, some = len(self.models) // self.places, ids.take(clients)
        tiled = Ragged(np.tile(some.values, k), _tiled_offsets(some.sizes, k))
        models = self.at(np.repeat(np.arange(k), len(clients)), np.tile(clients, k))
        plan = EvaluationPlan.of(models, tiled, self.batch_size, batches=_PASSES)
        _, sums = self._pass(plan, None, part, (), SGD())
        with np.errstate(invalid="ignore"):
            return (sums / tiled.sizes).reshape(k, len(clients)).T

    def _pass(
        self,
        plan: EvaluationPlan,
        assignment: NDArray[np.int64] | None,
        part: Part,
        personal: Segments,
        local: LocalObjective,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Do the forward passes of a plan; with an ``assignment`` its models are those of clients."""
        layout, tasks = StateLayout.of(self.spec, personal, local), []
        for group in _grouped([len(job.samples) for job in plan.jobs], _PASSES * self.batch_size):
            jobs = [plan.jobs[i] for i in group]
            models = [job.model if assignment is None else int(assignment[job.model]) for job in jobs]
            objects: dict[Key, Ref] = {("model", k): self.models[k] for k in sorted(set(models))}
            located: tuple[StateRow, ...] = (None,) * len(jobs)
            if assignment is not None:
                states, located = self.states.locate([job.model for job in jobs])
                objects.update(states)
            passes = tuple(
                ForwardPass(model, state, job.samples)
                for model, state, job in zip(models, located, jobs, strict=True)
            )
            message = EvalJob(passes, self.batch_size, layout, local, part)
            cost = float(sum(len(job.samples) for job in jobs))
            tasks.append(Task("evaluate", message, objects, cost=cost, work=self.spec.P * cost))
        reports: list[EvalReport] = [done.report for done in self.backend.run_in_order(tasks)]
        return plan.gather([c for r in reports for c in r.correct], [x for r in reports for x in r.loss])

    def adapt(
        self,
        turn: Round,
        clients: NDArray[np.int64],
        models: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], list[tuple[NDArray[np.int64], Ref]]]:
        """Let clients train on from these models, and test what comes of it; nothing is averaged or kept.

        Args:
            turn: round, stage and work.
            clients: ids ``(n,)``.
            models: the model of each ``(n,)``.

        Returns:
            Correct test samples ``(n,)``, sums of their losses ``(n,)``, and the updates in blocks: places in
            ``clients``, and the rows ``(B, P)`` by reference.
        """
        blocks, tasks = self._adapting("adapt", turn, clients, models)
        correct, losses = np.zeros(len(clients), np.int64), np.zeros(len(clients))
        updates, everyone = [], np.arange(len(clients))
        for block, done in zip(blocks, self.backend.run_in_order(tasks), strict=True):
            correct[block], losses[block] = done.report.correct, done.report.losses
            updates.append((everyone[block], done.refs[UPDATES]))
        return correct, losses, updates

    def client_models(
        self, clients: NDArray[np.int64], models: NDArray[np.int64], personal: Segments, local: LocalObjective
    ) -> NDArray[np.float32]:
        """The models with which :meth:`evaluate` tests these clients ``(n, P)``, with what is their own.

        Args:
            clients: ids ``(n,)``.
            models: the server's model of each ``(n,)``.
            personal, local: as for :meth:`evaluate`.
        """
        objects: dict[Key, Ref] = {("model", k): self.models[k] for k in np.unique(models).tolist()}
        located: tuple[StateRow, ...] = (None,) * len(clients)
        if personal or local.personal:
            states, located = self.states.locate(clients.tolist())
            objects.update(states)
        passes = tuple(
            ForwardPass(int(model), state, np.empty(0, np.int32))
            for model, state in zip(models, located, strict=True)
        )
        job = EvalJob(passes, self.batch_size, StateLayout.of(self.spec, personal, local), local)
        (done,) = self.backend.run([Task("models", job, objects)])
        return np.stack(done.report)

    def adapted_models(
        self, turn: Round, clients: NDArray[np.int64], models: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The models that :meth:`adapt` tests, of those ``wanted`` among the clients ``(n, P)``.

        They train in the same blocks, as what a client gets may depend on its block in the last bit.
        """
        blocks, tasks = self._adapting("adapted", turn, clients, models)
        places = np.searchsorted(clients, wanted)
        some = [
            number
            for number, block in enumerate(blocks)
            if np.isin(range(block.start, block.stop), places).any()
        ]
        found = np.empty((len(wanted), self.spec.P), np.float32)
        for done in self.backend.run([tasks[number] for number in some]):
            block = blocks[some[done.task]]
            inside = (block.start <= places) & (places < block.stop)
            found[inside] = done.report[places[inside] - block.start]
        return found

    def _adapting(
        self, method: str, turn: Round, clients: NDArray[np.int64], models: NDArray[np.int64]
    ) -> tuple[list[slice], list[Task]]:
        """The blocks in which clients train on from these models, and the task of each."""
        size, layout = self.block_size(len(clients)), self._layout(turn)
        models = self.at(models, clients)
        tasks, blocks = [], []
        for first in range(0, len(clients), size):
            block = slice(first, first + size)
            start = models[block]
            objects: dict[Key, Ref] = {("model", k): self.models[k] for k in np.unique(start).tolist()}
            states: tuple[StateRow, ...] = ()
            if layout.size:
                located, states = self.states.locate(clients[block].tolist())
                objects.update(located)
            job = AdaptJob(
                round=turn.round,
                stage=turn.stage,
                clients=clients[block],
                start=start,
                states=states,
                layout=layout,
                work=turn.work,
                local=turn.local,
                batch_size=self.batch_size,
            )
            cost = float(self.federation.sizes[clients[block]].sum())
            keeps: tuple[Key, ...] = (UPDATES,) if method == "adapt" else ()
            much = self._work(clients[block], turn.work)
            tasks.append(Task(method, job, objects, keeps, cost=cost, work=much))
            blocks.append(block)
        return blocks, tasks


_COMBINED = 1 << 23
"""Numbers of output models that one call of an LPS makes from trained rows (64 MB in double precision)."""


def _union(step: GlobalStep) -> Segments:
    """The ranges of all layers of a global step, ascending."""
    return tuple(sorted(segment for segments, _ in step.layers for segment in segments))


def _numbers(segments: Segments) -> NDArray[np.int64]:
    """The places in the model of the numbers that the ranges cover, ascending."""
    return np.concatenate([np.arange(a, b) for a, b in segments])


def _tiled_offsets(sizes: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.tile(sizes, times))])


def _grouped(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive positions in groups of at most ``limit`` in sum (or one position)."""
    groups: list[list[int]] = []
    total = limit + 1
    for i, size in enumerate(sizes):
        if total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += size
    return groups


@dataclass(frozen=True)
class _Averaging:
    """What the rows of A are multiplied with.

    Attributes:
        shared: the ranges of the model that clients send.
        common: those that the GPS averages in this round.
        blocks: places of each block in the cohort.
        trained: what came of each block.
        absent: how many clients of each model count though they did not take part; None if they do not.
        optimizer: the server step, if any, for all models.
    """

    shared: Segments
    common: Segments
    blocks: Sequence[slice]
    trained: Sequence[Done]
    absent: NDArray[np.int64] | None
    optimizer: Optimizer | None

    def own_optimizer(self, models: Sequence[int]) -> Optimizer | None:
        """The server step for some models."""
        if self.optimizer is None:
            return None
        some = list(models)
        return Optimizer(self.optimizer.step, self.optimizer.clients[some], self.optimizer.members[some])


def _combined(report: ClientReport, *blocks: NDArray[np.floating]) -> NDArray[np.float64]:
    """The remote task that puts the blocks' reports together."""
    return report.combine(blocks)


def _report(
    plan: Plan, blocks: Sequence[slice], trained: Sequence[TrainReport], reports: Reports
) -> RoundReport:
    """What the blocks reported, for the cohort."""
    losses, steps = np.full(len(plan.cohort), np.nan), np.zeros(len(plan.cohort), np.int64)
    failures: dict[int, str] = {}
    seconds: dict[int, float] = {}
    remarks: dict[str, list[int]] = {}
    for block, report in zip(blocks, trained, strict=True):
        losses[block], steps[block] = report.losses, report.steps
        seconds[report.pid] = seconds.get(report.pid, 0.0) + report.seconds
        failures.update(report.failures)
        for text, clients in report.remarks.items():
            remarks.setdefault(text, []).extend(clients)
    losses[np.isin(plan.cohort, list(failures))] = np.nan
    return RoundReport(
        losses=losses,
        steps=steps,
        reports=reports,
        failures=failures,
        seconds=seconds,
        bytes_up=sum(report.bytes_up for report in trained),
        bytes_down=sum(report.bytes_down for report in trained),
        remarks=remarks,
    )
