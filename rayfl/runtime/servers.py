"""One round: blocks are cut, trained, multiplied by their part of A, reduced at LPSs, merged at the GPS."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.algorithms import Mixing, Plan
from rayfl.data import Ragged
from rayfl.errors import ClientError
from rayfl.evaluation import EvaluationPlan
from rayfl.models import ModelSpec
from rayfl.runtime.backend import Backend, Ref, Task
from rayfl.runtime.jobs import EvalItem, EvalJob, EvalReport, TrainJob, TrainReport
from rayfl.runtime.lps import merge
from rayfl.runtime.states import ClientStates
from rayfl.training import LocalWork, Segments, complement

Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks in all)."""

_PASSES = 4
"""Forward passes in one evaluation task."""


@dataclass(frozen=True)
class RoundReport:
    """What came back from a round, in the order of the cohort.

    Attributes:
        losses: mean local training loss ``(M,)``; NaN for clients that failed.
        steps: local steps ``(M,)``.
        busy: seconds that each worker process spent training, by process id.
        failures: client id -> traceback.
    """

    losses: NDArray[np.float64]
    steps: NDArray[np.int64]
    busy: Mapping[int, float]
    failures: Mapping[int, str]


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


class Servers:
    """The models at the servers and the states of the clients, all by reference, and what is done with them.

    Args:
        backend: who does the work.
        spec: the model's flat layout.
        sizes: training samples of each client ``(N,)``.
        tests: test samples of each client.
        block_size: clients in a block, given how many train.
        clients_per_actor: pins clients to actors if given.
        tolerate: clients that may fail in a round.
        batch_size: test samples in a forward pass.
    """

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        sizes: NDArray[np.int64],
        tests: Ragged,
        *,
        block_size: Callable[[int], int],
        clients_per_actor: int | None = None,
        tolerate: int = 0,
        batch_size: int = 500,
    ) -> None:
        self.backend, self.spec, self.sizes, self.tests = backend, spec, sizes, tests
        self.block_size, self.clients_per_actor = block_size, clients_per_actor
        self.tolerate, self.batch_size = tolerate, batch_size
        self.models: list[Ref] = []
        self.states = ClientStates()

    def train(
        self,
        round: int,
        plan: Plan,
        work: LocalWork,
        mixing: Mixing,
        progress: Progress = lambda done, total: None,
    ) -> RoundReport:
        """Train the cohort and set the models to ``A W``.

        If it raises or is interrupted, models and states are those before the round.

        Raises:
            ClientError: if more than ``tolerate`` clients failed: the first of them.
        """
        blocks = cut_blocks(plan, self.block_size(len(plan.cohort)), self.clients_per_actor)
        columns = mixing.weights.tocsc()
        tasks = [self._task(round, plan, work, columns, block) for block in blocks]
        answers: list[list[Any]] = [[]] * len(tasks)
        failures: dict[int, str] = {}
        for done, (index, answer) in enumerate(self.backend.run(tasks), 1):
            answers[index] = answer
            failures.update(answer[0].failures)
            if len(failures) > self.tolerate:
                client = min(failures)
                raise ClientError(client, round, failures[client])
            progress(done, len(tasks))

        parts: dict[int, list[Ref]] = {}  # output model -> its partial products, in block order
        for task, answer in zip(tasks, answers, strict=True):
            for place, row in enumerate(task.args[0].rows.tolist()):
                parts.setdefault(row, []).append(answer[1 + place])
        self.models = self._reduce(mixing, complement(work.personal, self.spec.P), parts)
        if work.personal:
            for block, answer in zip(blocks, answers, strict=True):
                delivered = [c not in failures for c in plan.cohort[block].tolist()]
                self.states.update(plan.cohort[block].tolist(), answer[-1], delivered)
            self.states.pack(self.backend)
        return _report(plan, blocks, [answer[0] for answer in answers], failures)

    def _task(self, round: int, plan: Plan, work: LocalWork, columns: sp.csc_array, block: slice) -> Task:
        clients = plan.cohort[block]
        part = columns[:, block].tocoo()
        rows = np.unique(part.coords[0])
        weights = np.zeros((len(rows), len(clients)))
        weights[np.searchsorted(rows, part.coords[0]), part.coords[1]] = part.data
        used, start = np.unique(plan.start[block], return_inverse=True)
        refs, located = self.states.locate(clients.tolist(), len(used)) if work.personal else ([], ())
        job = TrainJob(round, clients, start, located, work, rows.astype(np.int64), weights)
        return Task(
            "train",
            (job, *(self.models[k] for k in used), *refs),
            cost=float(self.sizes[clients].sum()),
            returns=1 + len(rows) + bool(work.personal),
            home=int(clients[0]) // self.clients_per_actor if self.clients_per_actor else None,
        )

    def _reduce(self, mixing: Mixing, shared: Segments, parts: dict[int, list[Ref]]) -> list[Ref]:
        """Each LPS reduces its rows in the order of the blocks; then the GPS merges the common layers."""
        new, commons = list(self.models), []
        for row in sorted(parts):
            new[row], common = self.backend.serve(
                row, "reduce", shared, mixing.common, self.models[row], *parts[row], returns=2
            )
            commons.append(common)
        merged = merge(self.backend.get(commons)) if mixing.common and commons else None
        if merged is None:
            return new
        values = self.backend.put(merged)
        return [
            self.backend.serve(row, "install", mixing.common, model, values)[0]
            for row, model in enumerate(new)
        ]

    def evaluate(
        self, assignment: NDArray[np.int64], personal: Segments
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Test every client on its own test data with the model that it would use.

        Args:
            assignment: the model of each client ``(N,)``.
            personal: the ranges of the model that are the client's own, if any.

        Returns:
            Correctly classified test samples ``(N,)``, and sums of their losses ``(N,)`` in nats.
        """
        # A client with personal layers has a model of its own, whatever it shares.
        own = np.arange(len(assignment)) if personal else assignment
        plan = EvaluationPlan.of(own, self.tests, self.batch_size, batches=_PASSES)
        tasks = []
        for group in _grouped([len(job.samples) for job in plan.jobs], _PASSES * self.batch_size):
            jobs = [plan.jobs[i] for i in group]
            models = [int(assignment[job.model]) if personal else job.model for job in jobs]
            used = sorted(set(models))
            refs, located = (
                self.states.locate([job.model for job in jobs], len(used))
                if personal
                else ([], (None,) * len(jobs))
            )
            items = tuple(
                EvalItem(used.index(model), state, job.samples)
                for model, state, job in zip(models, located, jobs, strict=True)
            )
            message = EvalJob(items, self.batch_size, personal)
            cost = float(sum(len(job.samples) for job in jobs))
            tasks.append(Task("evaluate", (message, *(self.models[k] for k in used), *refs), cost))
        reports = [EvalReport()] * len(tasks)
        for index, answer in self.backend.run(tasks):
            reports[index] = answer[0]
        return plan.gather([c for r in reports for c in r.correct], [x for r in reports for x in r.loss])


def _report(
    plan: Plan, blocks: Sequence[slice], reports: Sequence[TrainReport], failures: Mapping[int, str]
) -> RoundReport:
    losses, steps = np.full(len(plan.cohort), np.nan), np.zeros(len(plan.cohort), np.int64)
    busy: dict[int, float] = {}
    for block, report in zip(blocks, reports, strict=True):
        losses[block], steps[block] = report.losses, report.steps
        busy[report.pid] = busy.get(report.pid, 0.0) + report.seconds
    losses[np.isin(plan.cohort, list(failures))] = np.nan
    return RoundReport(losses, steps, busy, failures)


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
