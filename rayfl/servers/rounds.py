"""One round: cut blocks, train them, multiply by their part of A, reduce at the LPSs, merge at the GPS."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.aggregation import Aggregation
from rayfl.aggregation.mean import Mean
from rayfl.algorithms import GlobalStep, Mixing, Plan, RoundReport
from rayfl.backend import Done, Joined, Key, Ref, Task
from rayfl.clients.jobs import (
    ROWS,
    STATES,
    UPDATES,
    BlockMixing,
    GroupJob,
    LocalTest,
    TrainJob,
    TrainReport,
    in_group,
)
from rayfl.clients.partial import LARGE
from rayfl.clients.state import StateLayout, StateRow
from rayfl.data.base import called
from rayfl.errors import ClientError, ConfigError
from rayfl.evaluation import Score
from rayfl.local import LocalObjective
from rayfl.local.sgd import SGD
from rayfl.models import ModelSpec
from rayfl.ordering import Ordering
from rayfl.ordering.shuffled import Shuffled
from rayfl.server_step import ServerStep
from rayfl.servers.averaging import Arriving, Averaging, combine_rows, reduce_sums
from rayfl.servers.global_step import gather, share, union
from rayfl.servers.lps import Optimizer, Reduced
from rayfl.servers.mixing import block_mixings, scales, without
from rayfl.servers.models import Servers
from rayfl.training import LocalWork, complement
from rayfl.training.reports import ClientReport, Reports
from rayfl.training.server import ServerTrainingJob

Progress = Callable[[int, Sequence[Task], Done], None]
"""Called with (number of finished tasks, all tasks, the task that finished last)."""


_SHUFFLED = Shuffled()


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


def cut_groups(plan: Plan, blocks: Sequence[slice], size: int, clients_per_actor: int | None) -> list[slice]:
    """Put the blocks into groups of at most ``size`` whose clients belong to one local server (and, if
    pinned, one actor). One actor trains the blocks of a group and adds their sums. Like the blocks, the
    groups depend only on the config and the cohort.
    """
    homes = plan.cohort // clients_per_actor if clients_per_actor else np.zeros_like(plan.cohort)
    kinds = [(plan.group[block.start], homes[block.start]) for block in blocks]
    groups: list[slice] = []
    for _, same in itertools.groupby(range(len(blocks)), key=lambda block: kinds[block]):
        numbers = list(same)
        stop = numbers[-1] + 1
        groups += [slice(first, min(first + size, stop)) for first in range(numbers[0], stop, size)]
    return groups


@dataclass(frozen=True)
class AskedReport:
    """A report that clients make: its description, and the prepared report by reference."""

    report: ClientReport
    ref: Ref


@dataclass(frozen=True)
class Round:
    """Everything the servers need to run one round.

    Attributes:
        round: its number, from 0.
        plan: the cohort, and the model that each client starts from.
        work: the local work of the clients.
        mixing: A, if it is known before training.
        stage: the federation's stage.
        local, order: the local objective, and the order of samples.
        aggregation: the rule that turns clients' models into one.
        assignment: the model of each client ``(N,)``; needed for server steps, and for objectives with
            vectors at the servers or whose average includes absent clients.
        reports: additional reports of the clients, by name.
        mix: computes A from the reports, if it is not known before training.
        updates: whether the servers keep the clients' updates.
        server_step: what an LPS does with the average, if anything.
        step: what the GPS averages over the LPSs; None for methods without a GPS.
        training: what servers do with their models after all averages, by reference; None for nothing.
        test: how clients test what they have trained, if they do.
        stateless: whether to ignore the clients' states, as if no client had ever taken part.
    """

    round: int
    plan: Plan
    work: LocalWork
    mixing: Mixing | None = None
    stage: int = 0
    local: LocalObjective = SGD()  # noqa: RUF009 (frozen)
    order: Ordering = Shuffled()  # noqa: RUF009
    aggregation: Aggregation = Mean()  # noqa: RUF009
    assignment: NDArray[np.int64] | None = None
    reports: Mapping[str, AskedReport] = field(default_factory=dict)
    mix: Callable[[Reports], Mixing] | None = None
    updates: bool = False
    server_step: ServerStep | None = None
    step: GlobalStep | None = None
    training: Ref | None = None
    test: LocalTest | None = None
    stateless: bool = False

    def layout(self, spec: ModelSpec) -> StateLayout:
        """The layout of the state that a client keeps between rounds: which part owns which range."""
        if self.stateless:
            return StateLayout()
        return StateLayout.of(spec, self.work.personal, self.local, self.order)

    @classmethod
    def without_clients(
        cls, work: LocalWork, round: int = 0, stage: int = 0, order: Ordering = _SHUFFLED
    ) -> Round:
        """The round with an empty cohort, for clients that train outside of a round, without their state."""
        work = replace(work, personal=())
        return cls(round, Plan.nobody(), work, stage=stage, order=order, stateless=True)


def train(servers: Servers, this_round: Round, progress: Progress = lambda *of: None) -> RoundReport:
    """Train the cohort and set the models to ``A W``.

    If it raises or is interrupted while clients train, models and states are those before the round; after
    later errors the caller must restore them (:meth:`Servers.snapshot`).

    Raises:
        ClientError: if more than ``tolerate`` clients failed: the first of them.
    """
    serving, start = servers.serving(this_round.plan.start, this_round.plan.cohort)
    this_round = _round_at_edges(servers, this_round)
    plan, local, layout = this_round.plan, this_round.local, this_round.layout(servers.spec)
    blocks = cut_blocks(plan, servers.blocks.size(len(plan.cohort)), servers.blocks.clients_per_actor)
    has_vectors = local.server_size(servers.spec) > 0
    if has_vectors and not servers.vectors:
        zeros = np.zeros(local.server_size(servers.spec), np.float32)
        servers.vectors = [servers.put(zeros, servers.ranges.evenly(len(zeros)))] * len(servers.models)
    rule = None if this_round.aggregation.is_mean else this_round.aggregation
    known_mixing = this_round.mixing if rule is None else None  # a rule needs the trained rows
    mixings = None if known_mixing is None else block_mixings(known_mixing, blocks)
    # If a block would send more sums than it has clients, it sends the trained rows instead.
    deliver = mixings is None or sum(len(part.rows) for part in mixings) > len(plan.cohort)
    parts: Sequence[BlockMixing | None] = [None] * len(blocks) if mixings is None or deliver else mixings
    if deliver and (local.masks or has_vectors):
        what = f"{local.name!r} sends more than models, and the method mixes them into more than it trains"
        raise ConfigError("local.name", what, "use another objective, such as sgd")
    tasks = [
        _train_task(serving, this_round, layout, block, start[block], part)
        for block, part in zip(blocks, parts, strict=True)
    ]
    if not deliver and servers.blocks.fan_in:
        grouped = cut_groups(plan, blocks, servers.blocks.fan_in, servers.blocks.clients_per_actor)
    else:
        grouped = [slice(block, block + 1) for block in range(len(blocks))]
    sending = {g.start: {row for part in parts[g] if part for row in part.rows.tolist()} for g in grouped}
    sums = Arriving(servers, sending)
    trained = _trained_blocks(servers, tasks, grouped, sums, progress)
    failures = {client: text for done in trained for client, text in done.report.failures.items()}

    reports = _combined_reports(servers, this_round, trained, np.isin(plan.cohort, list(failures)))
    mixing = this_round.mixing
    if mixing is None:
        assert this_round.mix is not None
        mixing = _mixing_at_edges(servers, this_round.mix(reports), plan.cohort)
    if this_round.updates:
        servers.keep(servers.updates, plan, blocks, [done.refs[UPDATES] for done in trained], failures)
    former_count = len(servers.models)
    if mixing.parents is not None:
        servers.inherit(mixing.parents)
    step = this_round.step
    common = () if step is None or not step.due.any() else union(step)
    gathers = step is not None and step.weights is None
    learns = bool(this_round.updates or common or gathers)
    averaging = Averaging(
        shared=complement(layout.layers, servers.spec.P),
        common=common,
        blocks=blocks,
        trained=trained,
        absent=_absent_counts(servers, this_round, failures),
        optimizer=_optimizer(servers, this_round, failures),
        needs_norms=learns,
        updates=plan.updates,
        rule=rule,
    )
    if deliver:
        facts = combine_rows(servers, without(mixing, plan, failures, local), averaging)
    else:
        members = None
        if has_vectors:
            assert this_round.assignment is not None
            members = servers.members(this_round.assignment)
        rescaled = scales(without(mixing, plan, failures), local) if failures else None
        facts = reduce_sums(servers, averaging, sums, members, rescaled)
    if layout.size:
        servers.keep(servers.states, plan, blocks, [done.refs[STATES] for done in trained], failures)
    changes = np.zeros(max(former_count, len(servers.models)))
    up = down = 0
    if learns:
        learned = _facts_by_row(servers, facts)
        for row, fact in learned.items():
            changes[row] = fact.update_norm
        if step is not None and gathers:
            gather(servers, step, learned)
        if step is not None and averaging.common:
            up, down = share(servers, step, averaging.common, learned)
    if this_round.training is not None:
        _train_models(servers, this_round, without(mixing, plan, failures).weights, reports)
    report = _round_report(plan, blocks, [done.report for done in trained], reports)
    return replace(report, model_changes=changes, gps_bytes_up=up, gps_bytes_down=down)


def _train_models(servers: Servers, this_round: Round, weights: sp.csr_array, reports: Reports) -> None:
    """Let servers train the models to which clients have contributed, with ``weights`` ``(K, M)``.

    Raises:
        ConfigError: of the first model whose training failed.
    """
    weights, tasks = weights.tocsr(), []
    shards: tuple[Key, ...] = tuple(("model", shard) for shard in range(len(servers.ranges)))
    models = np.flatnonzero(np.diff(weights.indptr)).tolist()
    for model in models:
        row = slice(weights.indptr[model], weights.indptr[model + 1])
        columns = weights.indices[row]
        order = np.argsort(columns)
        positions = columns[order]
        job = ServerTrainingJob(
            model=model,
            clients=this_round.plan.cohort[positions],
            weights=weights.data[row][order],
            reports={name: values[positions] for name, values in reports.items()},
            round=this_round.round,
        )
        objects: dict[Key, Ref] = {("model", 0): servers.models[model], ("training", 0): this_round.training}
        tasks.append(Task("train_model", job, objects, shards))
    for model, done in zip(models, servers.backend.run_in_order(tasks), strict=True):
        if done.report is not None:
            raise done.report
        servers.models[model] = Joined.of([done.refs[shard] for shard in shards])


def _trained_blocks(
    servers: Servers, tasks: Sequence[Task], groups: Sequence[slice], sums: Arriving, progress: Progress
) -> list[Done]:
    """Train the blocks; returns their results in order, without the sums, which ``sums`` takes. The sums of a
    group arrive as those of its first block.

    Raises:
        ClientError: if more than ``tolerate`` clients failed: the first of them.
    """
    failures: dict[int, str] = {}
    trained: list[Done] = []
    group_tasks = [_group_task(tasks[group]) for group in groups]
    for number, done in enumerate(servers.backend.run(group_tasks)):
        for block_done in _block_results(done, groups[done.task], tasks):
            trained.append(sums.take(block_done))
            failures.update(block_done.report.failures | block_done.report.unadapted)
        refuse_failures(servers, failures, tasks[0].job.round, servers.tolerate)
        progress(number + 1, group_tasks, done)
    return sorted(trained, key=lambda done: done.task)


def refuse_failures(servers: Servers, failures: Mapping[int, str], round: int, tolerate: int) -> None:
    """Raise the error of the first client if more clients failed than may.

    Raises:
        ClientError
    """
    if len(failures) > tolerate:
        client = min(failures)
        raise ClientError(client, round, failures[client], called(servers.federation.names, client))


def _group_task(tasks: Sequence[Task]) -> Task:
    """The blocks of a group as one task; a single block is its own task."""
    if len(tasks) == 1:
        return tasks[0]
    keeps = [in_group(place, key) for place, task in enumerate(tasks) for key in task.keeps]
    return Task(
        "train_group",
        GroupJob(tuple(task.job for task in tasks)),
        {key: ref for task in tasks for key, ref in task.objects.items()},
        tuple(dict.fromkeys(keeps)),
        cost=sum(task.cost for task in tasks),
        home=tasks[0].home,
        work=sum(task.work for task in tasks),
    )


def _block_results(done: Done, group: slice, tasks: Sequence[Task]) -> Iterator[Done]:
    """The result of each block of a group."""
    if group.stop - group.start == 1:
        yield replace(done, task=group.start)
        return
    sums = {key: ref for key, ref in done.refs.items() if key[0] == "sum"}
    for place, block in enumerate(range(group.start, group.stop)):
        block_refs = {key: done.refs[in_group(place, key)] for key in tasks[block].keeps if key[0] != "sum"}
        refs = {**block_refs, **(sums if not place else {})}
        yield replace(done, task=block, report=done.report.blocks[place], refs=refs)


def _combined_reports(
    servers: Servers, this_round: Round, trained: Sequence[Done], failed: NDArray[np.bool_]
) -> Reports:
    """The reports of the cohort: the blocks' results merged, large ones in a remote task.

    Rows of the clients that ``failed`` ``(M,)`` are NaN.
    """
    combined: dict[str, NDArray[np.float64]] = {}
    for name, asked in this_round.reports.items():
        if asked.report.combined:
            blocks = [done.refs["report", name] for done in trained]
            merged = servers.backend.get(servers.backend.call(_combine_blocks, asked.ref, *blocks))
            if failed.any():
                merged = np.array(merged)  # arrays from the object store are read-only
                merged[failed] = np.nan
            combined[name] = merged
        else:
            combined[name] = asked.report.combine([done.report.reports[name] for done in trained])
    return combined


def _optimizer(servers: Servers, this_round: Round, failures: Mapping[int, str]) -> Optimizer | None:
    """The server step, for all models."""
    if this_round.server_step is None:
        return None
    delivered = ~np.isin(this_round.plan.cohort, list(failures))
    clients = np.bincount(this_round.plan.group[delivered], minlength=len(servers.models))
    assert this_round.assignment is not None
    return Optimizer(this_round.server_step, clients, servers.members(this_round.assignment))


def _round_at_edges(servers: Servers, this_round: Round) -> Round:
    """The round with model numbers, except those of the start models, replaced by positions at the edges."""
    if servers.edges is None:
        return this_round
    plan, assignment, mixing = this_round.plan, this_round.assignment, this_round.mixing
    return replace(
        this_round,
        plan=replace(plan, group=servers.at(plan.group, plan.cohort)),
        assignment=None if assignment is None else servers.everywhere(assignment),
        mixing=None if mixing is None else _mixing_at_edges(servers, mixing, plan.cohort),
    )


def _mixing_at_edges(servers: Servers, mixing: Mixing, cohort: NDArray[np.int64]) -> Mixing:
    """A with one row per model and edge; each client contributes at its own edge."""
    if servers.edges is None:
        return mixing

    def at_edges(matrix: sp.csr_array) -> sp.csr_array:
        entries = matrix.tocoo()
        rows, columns = (np.asarray(axis, np.int64) for axis in entries.coords)
        shape = matrix.shape[0] * servers.edge_count, matrix.shape[1]
        return sp.csr_array((entries.data, (servers.at(rows, cohort[columns]), columns)), shape=shape)

    keep = None if mixing.keep is None else at_edges(mixing.keep)
    return replace(mixing, weights=at_edges(mixing.weights), keep=keep)


def _facts_by_row(servers: Servers, facts: Sequence[Ref]) -> dict[int, Reduced]:
    """What the GPS may know about each row."""
    shards: dict[int, list[Reduced]] = {}
    for facts_by_row in servers.backend.get(list(facts)):
        for row, fact in facts_by_row.items():
            shards.setdefault(row, []).append(fact)
    return {row: Reduced.joined(parts, servers.ranges) for row, parts in shards.items()}


def _absent_counts(
    servers: Servers, this_round: Round, failures: Mapping[int, str]
) -> NDArray[np.int64] | None:
    """How many clients of each model took part earlier but not in this round ``(K,)``; None if the local
    objective does not count them.
    """
    if not this_round.local.counts_absent:
        return None
    assert this_round.assignment is not None
    absent = np.zeros(len(this_round.assignment), np.bool_)
    absent[servers.states.clients] = True
    absent[[client for client in this_round.plan.cohort.tolist() if client not in failures]] = False
    return np.bincount(this_round.assignment[absent], minlength=len(servers.models))


def _train_task(
    servers: Servers,
    this_round: Round,
    layout: StateLayout,
    block: slice,
    start: NDArray[np.int64],
    part: BlockMixing | None,
) -> Task:
    """The task that trains a block; ``start`` ``(B,)``: the model or mixture that each client starts from."""
    clients, pinned = this_round.plan.cohort[block], servers.blocks.clients_per_actor
    objects: dict[Key, Ref] = {}
    states: tuple[StateRow, ...] = ()
    if layout.size:
        located, states = servers.states.locate(clients)
        objects.update(located)
    compares = any(asked.report.needs_models for asked in this_round.reports.values())
    objects.update(
        servers.sent([*(range(len(servers.models)) if compares else ()), *np.unique(start).tolist()])
    )
    if this_round.local.server_size(servers.spec):
        objects.update({("vector", k): servers.vectors[k] for k in np.unique(start).tolist()})
    objects.update({("report", name): asked.ref for name, asked in this_round.reports.items()})
    job = TrainJob(
        round=this_round.round,
        stage=this_round.stage,
        clients=clients,
        start=start,
        states=states,
        layout=layout,
        work=this_round.work,
        local=this_round.local,
        order=this_round.order,
        mixing=part,
        reports=tuple(this_round.reports),
        models=len(servers.models) if compares else 0,
        updates=this_round.updates,
        sends_updates=this_round.plan.updates,
        test=this_round.test,
    )
    shards = range(len(servers.ranges))
    keeps: list[Key] = [(ROWS, shard) for shard in shards]
    if part is not None:
        keeps = [("sum", (row, shard)) for row in part.rows.tolist() for shard in shards]
    keeps += [("report", name) for name, asked in this_round.reports.items() if asked.report.combined]
    keeps += [UPDATES] * this_round.updates + [STATES] * bool(layout.size)
    # Large models train in the order in which their sums are added, not the longest first.
    samples = servers.federation.sizes[clients].sum()
    return Task(
        "train",
        job,
        objects,
        tuple(keeps),
        cost=float(len(clients) if servers.spec.P >= LARGE else samples),
        home=int(clients[0]) // pinned if pinned else None,
        work=servers.work_of(clients, this_round.work),
    )


def _combine_blocks(report: ClientReport, *blocks: NDArray[np.floating]) -> NDArray[np.float64]:
    """The remote task that merges the reports of the blocks."""
    return report.combine(blocks)


def unadapted(text: str) -> str:
    """The message about a client that could not adapt its model, from the traceback."""
    error = text.strip().splitlines()[-1]
    return f"failed while adapting its model, so it is tested without adaptation: {error}"


def _round_report(
    plan: Plan, blocks: Sequence[slice], trained: Sequence[TrainReport], reports: Reports
) -> RoundReport:
    """The reports of the blocks, in the order of the cohort."""
    losses, steps = np.full(len(plan.cohort), np.nan), np.zeros(len(plan.cohort), np.int64)
    template = trained[0].scores if trained else {}
    scores = {on: Score.zeros(len(plan.cohort), score.sums.shape[1]) for on, score in template.items()}
    failures: dict[int, str] = {}
    seconds: dict[str, float] = {}
    remarks: dict[str, list[int]] = {}
    for block, report in zip(blocks, trained, strict=True):
        losses[block], steps[block] = report.losses, report.steps
        seconds[report.worker] = seconds.get(report.worker, 0.0) + report.seconds
        failures.update(report.failures)
        for on, score in report.scores.items():
            scores[on].put(block, score)
        for text, clients in report.remarks.items():
            remarks.setdefault(text, []).extend(clients)
        for client, text in report.unadapted.items():
            remarks.setdefault(unadapted(text), []).append(client)
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
        scores=scores,
    )
