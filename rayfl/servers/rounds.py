"""One round: blocks are cut, trained, multiplied by their part of A, reduced at LPSs, merged at the GPS."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.algorithms import GlobalStep, Mixing, Plan, RoundReport
from rayfl.backend import Backend, Ref, Task
from rayfl.clients.jobs import AdaptJob, EvalItem, EvalJob, EvalReport, State, TrainJob, TrainReport
from rayfl.clients.partial import Partial
from rayfl.data import Federation, Ragged
from rayfl.data.base import Part
from rayfl.errors import ClientError
from rayfl.evaluation import EvaluationPlan
from rayfl.local import LocalObjective
from rayfl.local.sgd import SGD
from rayfl.models import ModelSpec
from rayfl.ordering import Ordering
from rayfl.ordering.shuffled import Shuffled
from rayfl.servers.lps import Reduced, merge
from rayfl.servers.states import ClientStates
from rayfl.training import LocalWork, Segments, complement, length
from rayfl.training.observations import Observation
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
        observation: what must be seen of the trained models to know A otherwise, by reference;
        compares: whether that looks at the servers' models too;
        mix: and what then gives A.
        updates: whether the servers keep the clients' updates.
        norms: whether the lengths of the clients' updates are reported.
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
    observation: Ref = None
    compares: bool = False
    mix: Callable[[NDArray[np.float64]], Mixing] | None = None
    updates: bool = False
    norms: bool = False
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

    def train(self, turn: Round, progress: Progress = lambda done, total: None) -> RoundReport:
        """Train the cohort and set the models to ``A W``.

        If it raises or is interrupted, models and states are those before the round.

        Raises:
            ClientError: if more than ``tolerate`` clients failed: the first of them.
        """
        turn = self._at_edges(turn)
        plan, mixing = turn.plan, turn.mixing
        blocks = cut_blocks(plan, self.block_size(len(plan.cohort)), self.clients_per_actor)
        stateful = self._state_size(turn) > 0
        has_vectors = turn.local.server_size(self.spec) > 0
        if has_vectors and not self.vectors:
            zeros = self.backend.put(np.zeros(turn.local.server_size(self.spec), np.float32))
            self.vectors = [zeros] * len(self.models)
        parts = [] if mixing is None else shares(mixing, blocks)
        # Where blocks would send more sums than they have clients, the trained rows are sent.
        deliver = mixing is None or sum(len(part.rows) for part in parts) > len(plan.cohort)
        assert not (deliver and (turn.local.masks or has_vectors)), "trained rows travel alone"
        if deliver:
            parts = [Share(np.empty(0, np.int64), np.empty((0, 0)), None)] * len(blocks)
        tasks = [
            self._task(turn, block, part, deliver, has_vectors, stateful)
            for block, part in zip(blocks, parts, strict=True)
        ]
        answers: list[list[Any]] = [[]] * len(tasks)
        failures: dict[int, str] = {}
        for done, (index, answer) in enumerate(self.backend.run(tasks), 1):
            answers[index] = answer
            failures.update(answer[0].failures)
            if len(failures) > self.tolerate:
                client = min(failures)
                raise ClientError(client, turn.round, failures[client])
            progress(done, len(tasks))

        rest = [answer[1:] for answer in answers]  # what follows the reports, taken off part by part
        sent = [
            [part.pop(0) for _ in range(1 if deliver else len(t.args[0].rows))]
            for part, t in zip(rest, tasks, strict=True)
        ]
        if turn.observation is not None:
            assert turn.mix is not None
            seen = [part.pop(0) for part in rest]
            mixing = turn.mix(self.backend.get(self.backend.call(_combine, turn.observation, *seen)))
            mixing = self._mixed_at_edges(mixing, plan.cohort)
        assert mixing is not None
        if turn.updates:
            self._keep(self.updates, plan, blocks, [part.pop(0) for part in rest], failures)
        before = len(self.models)
        if mixing.parents is not None:
            self.inherit(mixing.parents)
        shared, step = complement(turn.work.personal, self.spec.P), turn.step
        common = () if step is None or not step.due.any() else _union(step)
        absent = self._absent(turn, failures)
        if deliver:
            left = _without(mixing, plan, failures, turn.local)
            reduced = self._combine(left, shared, common, blocks, [s[0] for s in sent], absent)
        else:
            members = self._members(turn) if has_vectors else None
            scales = _scales(_without(mixing, plan, failures), turn.local) if failures else None
            reduced = self._reduce(shared, common, tasks, sent, members, absent, scales)
        if stateful:
            self._keep(self.states, plan, blocks, [part.pop(0) for part in rest], failures)
        moved = np.zeros(max(before, len(self.models)))
        up = down = 0
        gathers = step is not None and step.weights is None
        if turn.updates or common or gathers:
            facts = self._fetch(reduced)
            for row, fact in facts.items():
                moved[row] = fact.moved
            if step is not None and gathers:
                self._gather(step, facts)
            if step is not None and common:
                up, down = self._share(step, common, facts)
        report = _report(plan, blocks, [answer[0] for answer in answers], failures, moved, mixing)
        return replace(report, gps_bytes_up=up, gps_bytes_down=down)

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

    def _fetch(self, reduced: Mapping[int, tuple[Ref, int | None]]) -> dict[int, Reduced]:
        """What the GPS may learn, by row: LPSs that combine several rows answer with a list."""
        values = self.backend.get([ref for ref, _ in reduced.values()])
        return {
            row: value if place is None else value[place]
            for (row, (_, place)), value in zip(reduced.items(), values, strict=True)
        }

    def _state_size(self, turn: Round) -> int:
        """Numbers that a client keeps between rounds."""
        return (
            length(turn.work.personal) + turn.local.state_size(self.spec) + turn.order.state_size(self.spec)
        )

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

    def _task(
        self, turn: Round, block: slice, part: Share, deliver: bool, has_vectors: bool, stateful: bool
    ) -> Task:
        clients = turn.plan.cohort[block]
        used, start = np.unique(turn.plan.start[block], return_inverse=True)
        objects = [self.models[k] for k in used]
        servers = observe = None
        models: list[Ref] = []
        if has_vectors:
            servers = len(objects)
            objects += [self.vectors[k] for k in used]
        if turn.observation is not None:
            observe = len(objects)
            models = list(self.models) if turn.compares else []
            objects += [turn.observation, *models]
        states: tuple[State, ...] = ()
        if stateful:
            refs, states = self.states.locate(clients.tolist(), len(objects))
            objects += refs
        job = TrainJob(
            round=turn.round,
            stage=turn.stage,
            clients=clients,
            start=start,
            servers=servers,
            observe=observe,
            models=len(models),
            states=states,
            work=turn.work,
            local=turn.local,
            order=turn.order,
            rows=part.rows,
            weights=part.weights,
            keep=part.keep,
            deliver=deliver,
            updates=turn.updates,
            norms=turn.norms,
        )
        sent = 1 if deliver else len(part.rows)
        return Task(
            "train",
            (job, *objects),
            cost=float(self.federation.sizes[clients].sum()),
            returns=1 + sent + (observe is not None) + turn.updates + stateful,
            home=int(clients[0]) // self.clients_per_actor if self.clients_per_actor else None,
            work=self._work(clients, turn.work),
        )

    def _work(self, clients: NDArray[np.int64], work: LocalWork) -> float:
        """Parameters times samples of these clients' local training."""
        return float(self.spec.P * work.epochs * self.federation.sizes[clients].sum())

    def _reduce(
        self,
        shared: Segments,
        common: Segments,
        tasks: Sequence[Task],
        sent: Sequence[Sequence[Ref]],
        members: NDArray[np.int64] | None,
        absent: NDArray[np.int64] | None,
        scales: NDArray[np.float64] | None,
    ) -> dict[int, tuple[Ref, int | None]]:
        """Each LPS reduces its rows in the order of the blocks; what the GPS may learn, by row."""
        parts: dict[int, list[Ref]] = {}  # output model -> its partial products, in block order
        for task, refs in zip(tasks, sent, strict=True):
            for row, ref in zip(task.args[0].rows.tolist(), refs, strict=True):
                parts.setdefault(row, []).append(ref)
        reduced: dict[int, tuple[Ref, int | None]] = {}
        for row in sorted(parts):
            still = [] if absent is None else [Partial(np.zeros(1), 0.0, keep=float(absent[row]))]
            if scales is not None and scales[row] != 1:
                still.append(Partial(np.zeros(1), 0.0, scale=float(scales[row])))
            self.models[row], fact = self.backend.serve(
                row, "reduce", shared, common, self.models[row], *parts[row], *still, returns=2
            )
            reduced[row] = (fact, None)
            if members is not None:
                self.vectors[row] = self.backend.serve(
                    row, "accumulate", self.vectors[row], int(members[row]), *parts[row]
                )[0]
        return reduced

    def _combine(
        self,
        mixing: Mixing,
        shared: Segments,
        common: Segments,
        blocks: Sequence[slice],
        rows: Sequence[Ref],
        absent: NDArray[np.int64] | None,
    ) -> dict[int, tuple[Ref, int | None]]:
        """The LPSs multiply A with the trained rows, a few models in a call."""
        weights = mixing.weights.tocsr()
        keep: NDArray[np.float64] = np.zeros(weights.shape[0])
        kept = None if mixing.keep is None else mixing.keep.tocsr()
        if kept is not None:
            keep = np.asarray(kept.sum(axis=1), np.float64).ravel()
        if absent is not None:
            keep = keep + absent
        filled = np.flatnonzero(np.diff(weights.indptr))
        step = max(1, _COMBINED // max(1, self.spec.P))
        reduced: dict[int, tuple[Ref, int | None]] = {}
        for at, first in enumerate(range(0, len(filled), step)):
            some = filled[first : first + step]
            dense = weights[some].toarray()
            theirs = None if kept is None else kept[some].toarray()
            wanted = [b for b, block in enumerate(blocks) if dense[:, block].any()]
            *models, facts = self.backend.serve(
                at,
                "combine",
                shared,
                common,
                [dense[:, blocks[b]] for b in wanted],
                None if theirs is None else [theirs[:, blocks[b]] for b in wanted],
                keep[some],
                behind(shared, self.spec.n_parameters),
                len(some),
                *(self.models[k] for k in some.tolist()),
                *(rows[b] for b in wanted),
                returns=1 + len(some),
            )
            for place, row in enumerate(some.tolist()):
                self.models[row] = models[place]
                reduced[row] = (facts, place)
        return reduced

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
                        (ref,) = self.backend.serve(row, "upload", sent, self.models[row])
                        uploads[row] = self.backend.get(ref)
                sums = [uploads[row].take(places) for row in senders]
                merged = merge(sums, [w[numbers] if len(w) > 1 else w for w in weights[weights.any(axis=1)]])
                values = self.backend.put(merged)
                for row in rows.tolist():
                    (self.models[row],) = self.backend.serve(
                        row, "install", segments, self.models[row], values
                    )
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
        tasks = []
        for group in _grouped([len(job.samples) for job in plan.jobs], _PASSES * self.batch_size):
            jobs = [plan.jobs[i] for i in group]
            models = [job.model if assignment is None else int(assignment[job.model]) for job in jobs]
            used = sorted(set(models))
            refs: list[Ref] = []
            located: tuple[State, ...] = (None,) * len(jobs)
            if assignment is not None:
                refs, located = self.states.locate([job.model for job in jobs], len(used))
            items = tuple(
                EvalItem(used.index(model), state, job.samples)
                for model, state, job in zip(models, located, jobs, strict=True)
            )
            message = EvalJob(items, self.batch_size, personal, local, part)
            cost = float(sum(len(job.samples) for job in jobs))
            objects = [*(self.models[k] for k in used), *refs]
            tasks.append(Task("evaluate", (message, *objects), cost, work=self.spec.P * cost))
        reports = [EvalReport()] * len(tasks)
        for index, answer in self.backend.run(tasks):
            reports[index] = answer[0]
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
        updates: list[Ref] = [None] * len(tasks)
        for index, (scores, ref) in self.backend.run(tasks):
            correct[blocks[index]], losses[blocks[index]] = scores
            updates[index] = ref
        everyone = np.arange(len(clients))
        return correct, losses, [(everyone[b], ref) for b, ref in zip(blocks, updates, strict=True)]

    def client_models(
        self, clients: NDArray[np.int64], models: NDArray[np.int64], personal: Segments, local: LocalObjective
    ) -> NDArray[np.float32]:
        """The models with which :meth:`evaluate` tests these clients ``(n, P)``, with what is their own.

        Args:
            clients: ids ``(n,)``.
            models: the server's model of each ``(n,)``.
            personal, local: as for :meth:`evaluate`.
        """
        used, place = np.unique(models, return_inverse=True)
        refs: list[Ref] = []
        located: tuple[State, ...] = (None,) * len(clients)
        if personal or local.personal:
            refs, located = self.states.locate(clients.tolist(), len(used))
        items = tuple(
            EvalItem(int(model), state, np.empty(0, np.int32))
            for model, state in zip(place, located, strict=True)
        )
        objects = [*(self.models[k] for k in used.tolist()), *refs]
        task = Task("models", (EvalJob(items, self.batch_size, personal, local), *objects), 1.0)
        ((_, (rows,)),) = self.backend.run([task])
        return np.stack(rows)

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
        for index, (rows,) in self.backend.run([tasks[number] for number in some]):
            block = blocks[some[index]]
            inside = (block.start <= places) & (places < block.stop)
            found[inside] = rows[places[inside] - block.start]
        return found

    def _adapting(
        self, method: str, turn: Round, clients: NDArray[np.int64], models: NDArray[np.int64]
    ) -> tuple[list[slice], list[Task]]:
        """The blocks in which clients train on from these models, and the task of each."""
        size, stateful = self.block_size(len(clients)), self._state_size(turn) > 0
        models = self.at(models, clients)
        tasks, blocks = [], []
        for first in range(0, len(clients), size):
            block = slice(first, first + size)
            used, start = np.unique(models[block], return_inverse=True)
            objects = [self.models[k] for k in used]
            states: tuple[State, ...] = ()
            if stateful:
                refs, states = self.states.locate(clients[block].tolist(), len(objects))
                objects += refs
            job = AdaptJob(
                turn.round,
                turn.stage,
                clients[block],
                start,
                states,
                turn.work,
                turn.local,
                turn.order,
                self.batch_size,
            )
            cost = float(self.federation.sizes[clients[block]].sum())
            much = self._work(clients[block], turn.work)
            returns = 2 if method == "adapt" else 1
            tasks.append(Task(method, (job, *objects), cost, returns=returns, work=much))
            blocks.append(block)
        return blocks, tasks


_COMBINED = 1 << 23
"""Numbers of output models that one call of an LPS makes from trained rows (64 MB in double precision)."""


@dataclass(frozen=True)
class Share:
    """A block's part of A.

    Attributes:
        rows: the output models that it contributes to ``(R,)``, ascending.
        weights: of its clients in each ``(R, B)``.
        keep: how much of the old models they leave in place ``(R, B)``; None for none.
    """

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    keep: NDArray[np.float64] | None


def shares(mixing: Mixing, blocks: Sequence[slice]) -> list[Share]:
    """The part of A of every block."""
    weights = mixing.weights.tocsc()
    keep = None if mixing.keep is None else mixing.keep.tocsc()
    found = []
    for block in blocks:
        inside = weights.indices[weights.indptr[block.start] : weights.indptr[block.stop]]
        rows: NDArray[np.int64] = np.unique(inside).astype(np.int64)
        kept = None if keep is None else _dense(keep, rows, block)
        found.append(Share(rows, _dense(weights, rows, block), kept))
    return found


def _dense(matrix: sp.csc_array, rows: NDArray[np.int64], block: slice) -> NDArray[np.float64]:
    """``matrix[rows, block]`` as an array ``(R, B)``; what the columns hold lies in these rows."""
    first, last = matrix.indptr[block.start], matrix.indptr[block.stop]
    columns = np.repeat(
        np.arange(block.stop - block.start), np.diff(matrix.indptr[block.start : block.stop + 1])
    )
    dense = np.zeros((len(rows), block.stop - block.start))
    dense[np.searchsorted(rows, matrix.indices[first:last]), columns] = matrix.data[first:last]
    return dense


def _without(
    mixing: Mixing, plan: Plan, failures: Mapping[int, str], local: LocalObjective | None = None
) -> Mixing:
    """A without the columns of the clients that failed; with ``local`` as it weighs the others then."""
    if not failures:
        return mixing
    failed = np.isin(plan.cohort, list(failures))

    def drop(matrix: sp.csr_array) -> sp.csr_array:
        kept = matrix.tocoo()
        there = ~failed[kept.coords[1]]
        entries = kept.data[there], (kept.coords[0][there], kept.coords[1][there])
        return sp.csr_array(entries, shape=matrix.shape)

    keep = None if mixing.keep is None else drop(mixing.keep)
    left = replace(mixing, weights=drop(mixing.weights), keep=keep)
    if local is None or keep is None:
        return left
    scaled = sp.csr_array(left.weights.multiply(_scales(left, local)[:, None]))
    return replace(left, weights=scaled, keep=sp.csr_array(keep + left.weights - scaled))


def _scales(left: Mixing, local: LocalObjective) -> NDArray[np.float64]:
    """What each row of A, without the clients that failed, is multiplied by ``(K,)``."""
    scales = np.ones(left.weights.shape[0])
    if left.keep is None:
        return scales
    for row in np.flatnonzero(np.diff(left.weights.indptr)):
        weights, keep = (matrix[[row]].toarray().ravel() for matrix in (left.weights, left.keep))
        there = weights != 0
        scales[row] = local.rescaled(weights[there], keep[there])
    return scales


def _union(step: GlobalStep) -> Segments:
    """The ranges of all layers of a global step, ascending."""
    return tuple(sorted(segment for segments, _ in step.layers for segment in segments))


def _numbers(segments: Segments) -> NDArray[np.int64]:
    """The places in the model of the numbers that the ranges cover, ascending."""
    return np.concatenate([np.arange(a, b) for a, b in segments])


def _combine(observation: Observation, *blocks: NDArray[np.floating]) -> NDArray[np.float64]:
    """The remote task that puts the blocks' observations together."""
    return observation.combine(blocks)


def _tiled_offsets(sizes: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.tile(sizes, times))])


def _report(
    plan: Plan,
    blocks: Sequence[slice],
    reports: Sequence[TrainReport],
    failures: Mapping[int, str],
    moved: NDArray[np.float64],
    mixing: Mixing,
) -> RoundReport:
    losses, steps = np.full(len(plan.cohort), np.nan), np.zeros(len(plan.cohort), np.int64)
    norms = np.full(len(plan.cohort), np.nan)
    busy: dict[int, float] = {}
    for block, report in zip(blocks, reports, strict=True):
        losses[block], steps[block], norms[block] = report.losses, report.steps, report.norms
        busy[report.pid] = busy.get(report.pid, 0.0) + report.seconds
    losses[np.isin(plan.cohort, list(failures))] = np.nan
    up, down = sum(r.bytes_up for r in reports), sum(r.bytes_down for r in reports)
    remarks: dict[str, list[int]] = {}
    for report in reports:
        for text, clients in report.remarks.items():
            remarks.setdefault(text, []).extend(clients)
    return RoundReport(losses, steps, norms, moved, busy, failures, mixing, up, down, remarks=remarks)


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
