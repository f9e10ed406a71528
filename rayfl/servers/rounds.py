"""One round: blocks are cut, trained, multiplied by their part of A, reduced at LPSs, merged at the GPS."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.algorithms import GlobalStep, Mixing, Plan, RoundReport
from rayfl.backend import Done, Key, Ref, Task
from rayfl.clients.jobs import (
    ROWS,
    STATES,
    UPDATES,
    BlockMixing,
    TrainJob,
    TrainReport,
)
from rayfl.clients.state import StateLayout, StateRow
from rayfl.data.base import called
from rayfl.errors import ClientError
from rayfl.local import LocalObjective
from rayfl.local.sgd import SGD
from rayfl.models import ModelSpec
from rayfl.ordering import Ordering
from rayfl.ordering.shuffled import Shuffled
from rayfl.server_step import ServerStep
from rayfl.servers.averaging import Averaging, combine_rows, reduce_sums
from rayfl.servers.global_step import gather, share, union
from rayfl.servers.lps import Optimizer, Reduced
from rayfl.servers.mixing import block_mixings, scales, without
from rayfl.servers.models import Servers
from rayfl.training import LocalWork, complement
from rayfl.training.reports import ClientReport, Reports

Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks in all)."""


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

    def layout(self, spec: ModelSpec) -> StateLayout:
        """Whose numbers lie where in what a client keeps between rounds."""
        return StateLayout.of(spec, self.work.personal, self.local, self.order)

    @classmethod
    def nobody(cls, work: LocalWork, round: int = 0, stage: int = 0) -> Round:
        """Work without participants, for clients that are asked to train on their own."""
        plan = Plan(*(np.empty(0, np.int64) for _ in range(3)))
        return cls(round, plan, replace(work, personal=()), stage=stage)


def train(servers: Servers, turn: Round, progress: Progress = lambda done, total: None) -> RoundReport:
    """Train the cohort and set the models to ``A W``.

    If it raises or is interrupted, models and states are those before the round.

    Raises:
        ClientError: if more than ``tolerate`` clients failed: the first of them.
    """
    turn = _at_edges(servers, turn)
    plan, local, layout = turn.plan, turn.local, turn.layout(servers.spec)
    blocks = cut_blocks(plan, servers.block_size(len(plan.cohort)), servers.clients_per_actor)
    has_vectors = local.server_size(servers.spec) > 0
    if has_vectors and not servers.vectors:
        zeros = servers.backend.put(np.zeros(local.server_size(servers.spec), np.float32))
        servers.vectors = [zeros] * len(servers.models)
    cut = None if turn.mixing is None else block_mixings(turn.mixing, blocks)
    # Where blocks would send more sums than they have clients, the trained rows are sent.
    deliver = cut is None or sum(len(part.rows) for part in cut) > len(plan.cohort)
    parts: Sequence[BlockMixing | None] = [None] * len(blocks) if cut is None or deliver else cut
    assert not (deliver and (local.masks or has_vectors)), "trained rows travel alone"
    tasks = [_task(servers, turn, layout, block, part) for block, part in zip(blocks, parts, strict=True)]
    trained = _trained_blocks(servers, tasks, turn.round, progress)
    failures = {client: text for done in trained for client, text in done.report.failures.items()}

    reports = _combined_reports(servers, turn, trained)
    mixing = turn.mixing
    if mixing is None:
        assert turn.mix is not None
        mixing = _mixed_at_edges(servers, turn.mix(reports), plan.cohort)
    if turn.updates:
        servers.keep(servers.updates, plan, blocks, [done.refs[UPDATES] for done in trained], failures)
    before = len(servers.models)
    if mixing.parents is not None:
        servers.inherit(mixing.parents)
    step = turn.step
    averaging = Averaging(
        shared=complement(layout.layers, servers.spec.P),
        common=() if step is None or not step.due.any() else union(step),
        blocks=blocks,
        trained=trained,
        absent=_absent(servers, turn, failures),
        optimizer=_optimizer_of(servers, turn, failures),
    )
    if deliver:
        facts = combine_rows(servers, without(mixing, plan, failures, local), averaging)
    else:
        members = None
        if has_vectors:
            assert turn.assignment is not None
            members = servers.members(turn.assignment)
        rescaled = scales(without(mixing, plan, failures), local) if failures else None
        facts = reduce_sums(servers, averaging, members, rescaled)
    if layout.size:
        servers.keep(servers.states, plan, blocks, [done.refs[STATES] for done in trained], failures)
    changes = np.zeros(max(before, len(servers.models)))
    up = down = 0
    gathers = step is not None and step.weights is None
    if turn.updates or averaging.common or gathers:
        learned = _learned(servers, facts)
        for row, fact in learned.items():
            changes[row] = fact.moved
        if step is not None and gathers:
            gather(servers, step, learned)
        if step is not None and averaging.common:
            up, down = share(servers, step, averaging.common, learned)
    report = _report(plan, blocks, [done.report for done in trained], reports)
    return replace(report, model_changes=changes, gps_bytes_up=up, gps_bytes_down=down)


def _trained_blocks(servers: Servers, tasks: Sequence[Task], round: int, progress: Progress) -> list[Done]:
    """The blocks trained, in their order.

    Raises:
        ClientError: if more than ``tolerate`` clients failed: the first of them.
    """
    failures: dict[int, str] = {}
    trained: list[Done] = []
    for done in servers.backend.run(tasks):
        trained.append(done)
        failures.update(done.report.failures)
        if len(failures) > servers.tolerate:
            client = min(failures)
            raise ClientError(client, round, failures[client], called(servers.federation.names, client))
        progress(len(trained), len(tasks))
    return sorted(trained, key=lambda done: done.task)


def _combined_reports(servers: Servers, turn: Round, trained: Sequence[Done]) -> Reports:
    """What the cohort has reported: blocks put together, large ones in a remote task."""
    found: dict[str, NDArray[np.float64]] = {}
    for name, asked in turn.reports.items():
        if asked.report.combined:
            blocks = [done.refs["report", name] for done in trained]
            found[name] = servers.backend.get(servers.backend.call(_combined, asked.ref, *blocks))
        else:
            found[name] = asked.report.combine([done.report.reports[name] for done in trained])
    return found


def _optimizer_of(servers: Servers, turn: Round, failures: Mapping[int, str]) -> Optimizer | None:
    """The server step, for all models."""
    if turn.server_step is None:
        return None
    delivered = ~np.isin(turn.plan.cohort, list(failures))
    clients = np.bincount(turn.plan.group[delivered], minlength=len(servers.models))
    assert turn.assignment is not None
    return Optimizer(turn.server_step, clients, servers.members(turn.assignment))


def _at_edges(servers: Servers, turn: Round) -> Round:
    """The round with the places of models instead of their numbers."""
    if servers.edges is None:
        return turn
    plan, assignment, mixing = turn.plan, turn.assignment, turn.mixing
    start, group = servers.at(plan.start, plan.cohort), servers.at(plan.group, plan.cohort)
    return replace(
        turn,
        plan=Plan(plan.cohort, start, group),
        assignment=None if assignment is None else servers.at(assignment, np.arange(len(assignment))),
        mixing=None if mixing is None else _mixed_at_edges(servers, mixing, plan.cohort),
    )


def _mixed_at_edges(servers: Servers, mixing: Mixing, cohort: NDArray[np.int64]) -> Mixing:
    """A with a row for each model and edge: clients contribute at their own."""
    if servers.edges is None:
        return mixing

    def at_edges(matrix: sp.csr_array) -> sp.csr_array:
        entries = matrix.tocoo()
        rows, columns = (np.asarray(axis, np.int64) for axis in entries.coords)
        shape = matrix.shape[0] * servers.places, matrix.shape[1]
        return sp.csr_array((entries.data, (servers.at(rows, cohort[columns]), columns)), shape=shape)

    keep = None if mixing.keep is None else at_edges(mixing.keep)
    return replace(mixing, weights=at_edges(mixing.weights), keep=keep)


def _learned(servers: Servers, facts: Sequence[Ref]) -> dict[int, Reduced]:
    """What the GPS may learn, by row."""
    return {row: fact for found in servers.backend.get(list(facts)) for row, fact in found.items()}


def _absent(servers: Servers, turn: Round, failures: Mapping[int, str]) -> NDArray[np.int64] | None:
    """How many clients of each model took part before but not now ``(K,)``; None if they do not count."""
    if not turn.local.counts_absent:
        return None
    assert turn.assignment is not None
    known = np.array([client in servers.states for client in range(len(turn.assignment))], np.bool_)
    known[[client for client in turn.plan.cohort.tolist() if client not in failures]] = False
    return np.bincount(turn.assignment[known], minlength=len(servers.models))


def _task(servers: Servers, turn: Round, layout: StateLayout, block: slice, part: BlockMixing | None) -> Task:
    clients, start = turn.plan.cohort[block], turn.plan.start[block]
    objects: dict[Key, Ref] = {}
    states: tuple[StateRow, ...] = ()
    if layout.size:
        located, states = servers.states.locate(clients.tolist())
        objects.update(located)
    compares = any(asked.report.needs_models for asked in turn.reports.values())
    for k in range(len(servers.models)) if compares else np.unique(start).tolist():
        objects["model", k] = servers.models[k]
    if turn.local.server_size(servers.spec):
        objects.update({("vector", k): servers.vectors[k] for k in np.unique(start).tolist()})
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
        models=len(servers.models) if compares else 0,
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
        cost=float(servers.federation.sizes[clients].sum()),
        home=int(clients[0]) // servers.clients_per_actor if servers.clients_per_actor else None,
        work=servers.work_of(clients, turn.work),
    )


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
