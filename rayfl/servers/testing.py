"""Tests: forward passes of models over samples, also after clients have adapted their models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms import Served
from rayfl.backend import Key, Ref, Task
from rayfl.clients.jobs import UPDATES, AdaptJob, EvalJob, EvalReport, ForwardPass
from rayfl.clients.state import StateLayout, StateRow
from rayfl.data import Ragged, TestedOn
from rayfl.data.base import Part
from rayfl.evaluation import EvaluationPlan, Score, Scores
from rayfl.kept import Kept
from rayfl.local import LocalObjective
from rayfl.local.sgd import SGD
from rayfl.servers.models import Servers
from rayfl.servers.rounds import Round, refuse_failures
from rayfl.training import Segments

_PASSES_PER_TASK = 4
"""Forward passes in one evaluation task."""

_MODELS_PER_TASK = 8
"""Models that one task tests on the same samples, which are then read and scaled once for all of them."""

_COMMON_SAMPLES = 1 << 22
"""Samples, counted for each model, that are planned at a time when all models see the same samples."""


@dataclass(frozen=True)
class Passes:
    """What the forward passes of each job found about its n samples.

    Attributes:
        losses: the sum over the predictions of each sample ``(n,)``.
        correct: right predictions ``(n,)``; None if only losses were asked for.
        sums: further sums per sample ``(n, S)``; None if only losses were asked for.
    """

    losses: list[NDArray[np.float32]]
    correct: list[NDArray[np.int64]] | None = None
    sums: list[NDArray[np.float64]] | None = None

    def scores(self, plan: EvaluationPlan) -> Score:
        """The scores of the clients of the plan whose jobs these are."""
        return plan.gather(self.correct, self.losses, self.sums)


def evaluate(
    servers: Servers,
    served: Served,
    personal: Segments = (),
    local: LocalObjective = SGD(),  # noqa: B008 (frozen)
    clients: NDArray[np.int64] | None = None,
    on: TestedOn = "test",
) -> Score:
    """Test each client with the model that it would use, on its own test data or the data in ``on``.

    Args:
        served: the model, or mixture, of each client ``(N,)`` or ``(N, K)``.
        personal: the ranges of the model that the client keeps, if any.
        local: the local objective, which may replace the model by the client's own.
        clients: ids ``(n,)``; default: all.
        on: the data to test on.
    """
    who = np.arange(served.shape[0]) if clients is None else clients
    servers, assignment = _served_at_edges(servers, served, who)
    # With personal layers every client has a different model.
    own_models = bool(personal) or local.personal
    models = assignment if own_models else None
    if on == "common":
        return _score_on_common(servers, who if own_models else assignment[who], who, models, personal, local)
    federation = servers.federation
    part: Part = "test" if on == "test" else "train"

    def make() -> EvaluationPlan:
        tests = federation.test if on == "test" else federation.validation
        owner = who if own_models else assignment[who]
        return EvaluationPlan.of(owner, tests.among(who), servers.batch_size, batches=_PASSES_PER_TASK)

    kept_plan = servers.plans.setdefault(on, Kept())
    plan = kept_plan.of(make, federation, who, who if own_models else assignment, servers.batch_size)
    return _run_passes(servers, plan, models, part, personal, local).scores(plan)


def _served_at_edges(
    servers: Servers, served: Served, who: NDArray[np.int64]
) -> tuple[Servers, NDArray[np.int64]]:
    """The servers, and the index of the model that each client uses at its edge ``(N,)``. With mixtures, only
    the entries of clients ``who`` ``(n,)`` are set.
    """
    if isinstance(served, np.ndarray):
        return servers, servers.everywhere(served)
    servers, numbers = servers.serving(served[who], who)
    assignment = np.zeros(served.shape[0], np.int64)
    assignment[who] = numbers
    return servers, assignment


def local_losses(
    servers: Servers,
    clients: NDArray[np.int64],
    served: Served,
    ids: Ragged,
    part: Part,
    personal: Segments,
    local: LocalObjective,
) -> NDArray[np.float64]:
    """Mean loss of each client's model, or mixture, on samples of the client.

    Args:
        clients: ids ``(n,)``.
        served: the model, or mixture, of each ``(n,)`` or ``(n, K)``.
        ids: the samples of all N clients.
        part: whether these are training or test samples.
        personal: the ranges of the model that the client keeps, if any.
        local: the local objective, which may replace the model by the client's own.

    Returns:
        ``(n,)``; NaN for clients without such samples.
    """
    samples, assignment, own = ids.take(clients), np.zeros(len(ids), np.int64), personal or local.personal
    servers, models = servers.serving(served, clients)
    assignment[clients] = models
    plan = EvaluationPlan.of(
        clients if own else models, samples, servers.batch_size, batches=_PASSES_PER_TASK
    )
    owners = assignment if own else None
    passes = _run_passes(servers, plan, owners, part, personal, local, only_losses=True)
    sums = passes.scores(plan).losses
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / servers.federation.predictions_of(samples, part), np.float64)


def losses(servers: Servers, clients: NDArray[np.int64], ids: Ragged, part: Part) -> NDArray[np.float64]:
    """Mean loss of every model on samples of each client.

    Args:
        clients: ids ``(n,)``.
        ids: the samples of all N clients.
        part: whether these are training or test samples.

    Returns:
        ``(n, K)``; NaN for clients without such samples.
    """
    samples = ids.take(clients)
    plan, model_losses = _losses_of_all_models(servers, clients, samples, part)
    sums = np.stack([plan.gather(None, each).losses for each in model_losses])
    with np.errstate(invalid="ignore"):
        return np.asarray((sums / servers.federation.predictions_of(samples, part)).T, np.float64)


def samples_by_model(
    servers: Servers, clients: NDArray[np.int64], ids: Ragged, part: Part
) -> NDArray[np.int64]:
    """For each client and model, how many samples the model fits best, by the loss (ties: lowest number).

    Args:
        clients, ids, part: as for :func:`losses`.

    Returns:
        ``(n, K)``.
    """
    k, samples = len(servers.models) // servers.edge_count, ids.take(clients)
    counts = np.zeros((len(clients), k), np.int64)
    for block in samples.pieces(max(1, _COMMON_SAMPLES // k)):
        block_samples = samples.take(np.arange(block.start, block.stop))
        plan, model_losses = _losses_of_all_models(servers, clients[block], block_samples, part)
        spread = np.stack([plan.spread(losses) for losses in model_losses])
        best = np.nan_to_num(spread, nan=np.inf).argmin(axis=0)
        cells = np.repeat(np.arange(len(block_samples)), block_samples.sizes) * k + best
        counts[block] = np.bincount(cells, minlength=len(block_samples) * k).reshape(-1, k)
    return counts


def _losses_of_all_models(
    servers: Servers, clients: NDArray[np.int64], samples: Ragged, part: Part
) -> tuple[EvaluationPlan, list[list[NDArray[np.float32]]]]:
    """The losses of each of the K models at the edges of these clients on their samples.

    All models see the same samples, so these are planned once, and each task reads its samples once.

    Returns:
        The plan of one model (at all edges), and for each model the losses of each job.
    """
    k, edges = len(servers.models) // servers.edge_count, servers.at(np.zeros_like(clients), clients)
    plan = EvaluationPlan.of(edges, samples, servers.batch_size, batches=_PASSES_PER_TASK)
    tasks = []
    for job in plan.jobs:
        for first in range(0, k, _MODELS_PER_TASK):
            # Model k at edge e is at k E + e.
            models = [
                model * servers.edge_count + job.model
                for model in range(first, min(k, first + _MODELS_PER_TASK))
            ]
            passes = tuple(ForwardPass(model, None, job.samples) for model in models)
            message = EvalJob(passes, servers.batch_size, part=part, only_losses=True)
            cost = float(len(passes) * len(job.samples))
            tasks.append(
                Task("evaluate", message, servers.sent(models), cost=cost, work=servers.spec.P * cost)
            )
    task_losses = [each.report.loss for each in servers.backend.run_in_order(tasks)]
    pieces = -(-k // _MODELS_PER_TASK)  # tasks of each job
    job_losses = [
        list(itertools.chain(*task_losses[at : at + pieces])) for at in range(0, len(task_losses), pieces)
    ]
    return plan, [[by_model[model] for by_model in job_losses] for model in range(k)]


def _run_passes(
    servers: Servers,
    plan: EvaluationPlan,
    assignment: NDArray[np.int64] | None,
    part: Part,
    personal: Segments,
    local: LocalObjective,
    *,
    only_losses: bool = False,
) -> Passes:
    """Run the jobs of a plan; with an ``assignment`` ``(N,)`` each job's model belongs to a client."""
    layout, tasks = StateLayout.of(servers.spec, personal, local), []
    groups = _job_groups([job.samples for job in plan.jobs], _PASSES_PER_TASK * servers.batch_size)
    for group in groups:
        jobs = [plan.jobs[i] for i in group]
        owners = [job.model for job in jobs]  # the models themselves, or the clients that they belong to
        clients, models = (None, owners) if assignment is None else (owners, assignment[owners].tolist())
        objects, states = _task_inputs(servers, models, clients)
        passes = tuple(map(ForwardPass, models, states, (job.samples for job in jobs)))
        message = EvalJob(passes, servers.batch_size, layout, local, part, only_losses)
        cost = float(sum(len(job.samples) for job in jobs))
        tasks.append(Task("evaluate", message, objects, cost=cost, work=servers.spec.P * cost))
    reports: list[EvalReport] = [done.report for done in servers.backend.run_in_order(tasks)]
    in_order = np.argsort(np.concatenate([np.empty(0, np.int64), *groups])).tolist()
    losses = [loss for report in reports for loss in report.loss]
    result = Passes([losses[i] for i in in_order])
    if only_losses:
        return result
    correct = [right for report in reports for right in report.correct]
    sums = [more for report in reports for more in report.sums]
    return replace(result, correct=[correct[i] for i in in_order], sums=[sums[i] for i in in_order])


@dataclass(frozen=True)
class Adapted:
    """Clients that have adapted the models that they were given.

    Attributes:
        scores: the tests ``(n,)``; for clients that failed, tests of the model that they were given.
        updates: if asked for, the updates in blocks of rows ``(B, P)``, by reference.
        failures: client id -> traceback.
    """

    scores: Scores
    updates: list[Ref]
    failures: dict[int, str]


def adapt(
    servers: Servers,
    this_round: Round,
    clients: NDArray[np.int64],
    models: Served,
    on: Sequence[TestedOn] = ("test",),
    tolerate: int = 0,
    updates: bool = False,
) -> Adapted:
    """Let clients train these models further and test the result; nothing is averaged.

    Args:
        this_round: round, stage and work.
        clients: ids ``(n,)``.
        models: the model, or mixture, of each ``(n,)`` or ``(n, K)``.
        on: the data to test on.
        tolerate: how many clients may fail.
        updates: whether to keep the update of every client, which takes as much memory as all their models.

    Raises:
        ClientError: if more clients failed: the first of them.
    """
    blocks, tasks = _adapt_tasks(servers, this_round, clients, models, on, updates)
    scores = {data: Score.zeros(len(clients), servers.spec.sums) for data in on}
    kept: list[Ref] = []
    failures: dict[int, str] = {}
    for block, done in zip(blocks, servers.backend.run_in_order(tasks), strict=True):
        for data, score in scores.items():
            score.put(block, done.report.scores[data])
        kept += done.refs.values()
        failures.update(done.report.failures)
    refuse_failures(servers, failures, this_round.round, tolerate)
    return Adapted(scores, kept, failures)


def client_models(
    servers: Servers,
    clients: NDArray[np.int64],
    served: Served,
    personal: Segments,
    local: LocalObjective,
) -> NDArray[np.float32]:
    """The models ``(n, P)`` with which :func:`evaluate` tests these clients, including their own layers.

    Args:
        clients: ids ``(n,)``.
        served: the server's model, or mixture, of each ``(n,)`` or ``(n, K)``.
        personal, local: as for :func:`evaluate`.
    """
    owners = clients.tolist() if personal or local.personal else None
    servers, numbers = servers.serving(served, clients)
    models = numbers.tolist()
    objects, states = _task_inputs(servers, models, owners)
    passes = tuple(map(ForwardPass, models, states, [np.empty(0, np.int32)] * len(models)))
    job = EvalJob(passes, servers.batch_size, StateLayout.of(servers.spec, personal, local), local)
    (done,) = servers.backend.run([Task("models", job, objects)])
    return np.stack(done.report)


def adapted_models(
    servers: Servers,
    this_round: Round,
    clients: NDArray[np.int64],
    models: Served,
    selected: NDArray[np.int64],
) -> NDArray[np.float32]:
    """The models ``(n, P)`` that :func:`adapt` tests, of the ``selected`` clients.

    Clients train in the same blocks as in :func:`adapt`, since the last bit of a result may depend on them.
    """
    blocks, tasks = _adapt_tasks(servers, this_round, clients, models)
    positions = np.searchsorted(clients, selected)
    block_numbers = [
        number
        for number, block in enumerate(blocks)
        if np.isin(range(block.start, block.stop), positions).any()
    ]
    rows = np.empty((len(selected), servers.spec.P), np.float32)
    for done in servers.backend.run([tasks[number] for number in block_numbers]):
        block = blocks[block_numbers[done.task]]
        inside = (block.start <= positions) & (positions < block.stop)
        rows[inside] = done.report[positions[inside] - block.start]
    return rows


def _adapt_tasks(
    servers: Servers,
    this_round: Round,
    clients: NDArray[np.int64],
    served: Served,
    on: Sequence[TestedOn] | None = None,
    updates: bool = False,
) -> tuple[list[slice], list[Task]]:
    """The blocks in which clients adapt these models, and the task of each block, which tests the adapted
    models on the data ``on`` (and keeps the updates, if asked for), or returns the models if ``on`` is None.
    """
    size, layout = servers.blocks.size(len(clients)), this_round.layout(servers.spec)
    servers, models = servers.serving(served, clients)
    tasks, blocks = [], []
    for first in range(0, len(clients), size):
        block = slice(first, first + size)
        start = models[block]
        owners = clients[block].tolist() if layout.size else None
        objects, states = _task_inputs(servers, start.tolist(), owners)
        job = AdaptJob(
            round=this_round.round,
            stage=this_round.stage,
            clients=clients[block],
            start=start,
            states=states,
            layout=layout,
            work=this_round.work,
            local=this_round.local,
            order=this_round.order,
            on=tuple(on or ()),
            batch_size=servers.batch_size,
            updates=updates,
        )
        cost = float(servers.federation.sizes[clients[block]].sum())
        method, keeps = "adapted" if on is None else "adapt", (UPDATES,) if updates else ()
        work = servers.work_of(clients[block], this_round.work)
        tasks.append(Task(method, job, objects, keeps, cost=cost, work=work))
        blocks.append(block)
    return blocks, tasks


def _score_on_common(
    servers: Servers,
    owner: NDArray[np.int64],
    who: NDArray[np.int64],
    assignment: NDArray[np.int64] | None,
    personal: Segments,
    local: LocalObjective,
) -> Score:
    """Test clients on all test samples; each model runs once for all clients that use it and see the same
    labels.
    """
    federation = servers.federation
    pairs, place = np.unique(np.stack([owner, federation.label_maps(who)]), axis=1, return_inverse=True)
    step = max(1, _COMMON_SAMPLES // len(federation.samples.y_test))
    scores = Score.zeros(pairs.shape[1], servers.spec.sums)
    for begin in range(0, pairs.shape[1], step):
        columns = slice(begin, begin + step)
        owners, maps = pairs[:, columns]
        tests = Ragged.of([federation.common_tests(label_map) for label_map in maps.tolist()])
        plan = EvaluationPlan.of(owners, tests, servers.batch_size, batches=_PASSES_PER_TASK)
        scores.put(columns, _run_passes(servers, plan, assignment, "test", personal, local).scores(plan))
    return scores.take(place.ravel())


def _task_inputs(
    servers: Servers, models: Sequence[int], clients: Sequence[int] | None
) -> tuple[dict[Key, Ref], tuple[StateRow, ...]]:
    """The inputs of a task: these models, the states of the clients that own them, and where each state
    is.
    """
    objects = servers.sent(sorted(set(models)))
    if clients is None:
        return objects, (None,) * len(models)
    states, rows = servers.states.locate(clients)
    return {**objects, **states}, rows


def _job_groups(samples: Sequence[NDArray[np.int32]], limit: int) -> list[list[int]]:
    """Group jobs into tasks: jobs on the same samples, :data:`_MODELS_PER_TASK` at a time; of the others,
    consecutive jobs with at most ``limit`` samples."""
    by_samples: dict[bytes, list[int]] = {}
    for i, ids in enumerate(samples):
        by_samples.setdefault(ids.tobytes(), []).append(i)
    shared = [numbers for numbers in by_samples.values() if len(numbers) > 1]
    unshared = sorted(numbers[0] for numbers in by_samples.values() if len(numbers) == 1)
    groups = [
        numbers[k : k + _MODELS_PER_TASK]
        for numbers in shared
        for k in range(0, len(numbers), _MODELS_PER_TASK)
    ]
    for group in _consecutive_groups([len(samples[i]) for i in unshared], limit):
        groups.append([unshared[k] for k in group])
    return groups


def _consecutive_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Groups of consecutive positions whose sizes sum to at most ``limit`` (or single positions)."""
    groups: list[list[int]] = []
    total = limit + 1
    for i, size in enumerate(sizes):
        if total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += size
    return groups
