"""What runs inside a client actor (or in this process, inline): the clients' side of every phase."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from rayfl.clients.jobs import (
    AdaptJob,
    EvalItem,
    EvalJob,
    EvalReport,
    HostSpec,
    SignJob,
    SignReport,
    TrainJob,
    TrainReport,
)
from rayfl.clients.partial import Partial, Weight
from rayfl.data import Federation, Ragged
from rayfl.data.base import Part
from rayfl.errors import ClientError, DataError, RayflError
from rayfl.local import Start
from rayfl.models import ModelSpec
from rayfl.ordering import Arrival
from rayfl.random import key
from rayfl.training import (
    Batches,
    Engine,
    Segments,
    Terms,
    TrainedBlock,
    complement,
    gather,
    length,
    open_device,
    open_engine,
    raw_features,
    scatter_,
)
from rayfl.training.batched.linear_kernels import weighted_sum
from rayfl.training.observations import Observation, Trained
from rayfl.training.work import behind


class ClientHost:
    """Hosts any number of clients: everything it keeps is its model, its engine and the shared data.

    Args:
        stages: the federation, one for each stage of the run; arrays are read where they lie.
        host: what to run.
    """

    def __init__(self, stages: Sequence[Federation], host: HostSpec) -> None:
        self.stages, self.host, self.spec = stages, host, host.spec
        self.samples = stages[0].samples
        self.batches = Batches(self.samples, open_device(host.device, host.gpu_fraction))
        self.engine: Engine
        self.engine, self._about = open_engine(
            host.engine, self.spec, self.batches, host.seed, host.cuda_graphs
        )

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def about(self) -> str:
        """Which engine trains here, on what, in a line."""
        return self._about

    def train(self, job: TrainJob, *objects: Any) -> Any:
        """Train a block.

        Returns:
            A report; then a :class:`Partial` for each row of A (if ``job.deliver``, the rows instead),
            the observation if one is asked for, the updates if they are, the client states if there are any.
        """
        begun = time.perf_counter()
        work, local, spec = job.work, job.local, self.spec
        # Where all start from the same model there is no need of a copy each.
        rows = self._gather(objects, job.start, own=bool(work.personal))
        states, fresh = self._states(job, objects, rows)
        a = length(work.personal)
        b = a + local.state_size(spec)
        own, mine, order = states[:, :a], states[:, a:b], states[:, b:]
        _overlay(rows, work.personal, own, fresh)
        indices = self.stages[job.stage].train.take(job.clients)
        servers = rows[:, :0]
        if job.servers is not None:
            servers = self._gather(objects[job.servers :], job.start, own=False)
        start = Start(
            spec=spec,
            work=work,
            models=rows,
            server=servers,
            state=mine,
            fresh=fresh,
            sizes=indices.sizes,
            test=partial(self._validate, job),
        )
        visits = job.order.visits(self._arrival(job, start, order, indices))
        terms = replace(local.terms(start), visits=visits)
        own_start = local.begin(start)
        begin = rows if own_start is None else own_start
        block = self.engine.train(work, job.round, job.clients.tolist(), indices, begin, terms)
        outcome = local.finish(start, block)

        delivered = np.ones(len(job.clients))
        delivered[list(block.failures)] = 0.0
        shared = complement(work.personal, spec.P)
        values, kept = self._sent(outcome.rows), outcome.kept
        if work.personal:
            values = gather(values, shared)
            kept = None if kept is None else gather(kept, shared)
        answer: list[Any] = [None]
        if job.deliver:
            answer.append(values.cpu().numpy())
        else:
            extra = outcome.server if job.servers is not None else None
            last = behind(shared, spec.n_parameters)
            answer += [
                self._partial(job, row, delivered, values, kept, extra, last).cut()
                for row in range(len(job.rows))
            ]
        if job.observe is not None:
            observation: Observation = objects[job.observe]
            models = [_tensor(o) for o in objects[job.observe + 1 : job.observe + 1 + job.models]]
            seen = block.rows
            if block.failures:  # their rows may hold anything: the server sees them where they started
                failed = list(block.failures)
                seen = seen.clone()
                seen[failed] = self._gather(objects, job.start)[failed]
            trained = Trained(spec, self.engine.module, self.batches, seen, models)
            answer.append(observation.compute(trained))
        norms = np.full(len(job.clients), np.nan)
        if job.updates or job.norms:
            updates = _updates(block.rows, start.models, spec)
            norms = updates.double().norm(dim=1).cpu().numpy()
            norms[list(block.failures)] = np.nan
            if job.updates:
                answer.append(self._sent(updates).cpu().numpy())
        if states.shape[1]:
            new = [gather(block.rows, work.personal), outcome.state, job.order.keep(block.rows)]
            new = [part for part in new if part.shape[1]]
            together = new[0].contiguous() if len(new) == 1 else torch.cat(new, dim=1)
            answer.append(together.cpu().numpy())
        numbers = 4 * (length(shared) + (0 if job.servers is None else start.server.shape[1]))
        up, down = (
            numbers * len(job.clients) if each is None else int(each.sum())
            for each in (outcome.bytes_up, outcome.bytes_down)
        )
        failures = {int(job.clients[row]): text for row, text in block.failures.items()}
        seconds = time.perf_counter() - begun
        remarks = {text: job.clients[list(rows)].tolist() for text, rows in outcome.remarks.items()}
        answer[0] = TrainReport(
            block.losses, block.steps, norms, failures, seconds, os.getpid(), up, down, remarks
        )
        return answer if len(answer) > 1 else answer[0]

    def _gather(self, objects: Sequence[Any], at: NDArray[np.int64], own: bool = True) -> torch.Tensor:
        """The vectors at these positions, one a client ``(B, ...)``; only its ``own`` may be written to."""
        device = self.batches.device
        count = int(at.max()) + 1
        if count == 1:
            one = self._received(objects[0]).to(device)
            return one.repeat(len(at), 1) if own else one.expand(len(at), -1)
        different = torch.stack([self._received(objects[k]) for k in range(count)]).to(device)
        return different.index_select(0, torch.from_numpy(at).to(device))

    def _received(self, vector: NDArray[np.float32]) -> torch.Tensor:
        """A vector as the clients use it."""
        return _tensor(self.host.reveal(vector))

    def _sent(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the servers may see them."""
        return _tensor(self.host.hide(rows.cpu().numpy())).to(rows.device) if self.host.private else rows

    def _states(
        self, job: TrainJob | AdaptJob, objects: Sequence[Any], rows: torch.Tensor
    ) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """The clients' states ``(B, S)``, zeros where there is none yet, and where that is ``(B,)``."""
        fresh = np.array([state is None for state in job.states], np.bool_)
        if not len(fresh):
            return rows[:, :0], np.ones(len(rows), np.bool_)
        size = length(job.work.personal) + job.local.state_size(self.spec) + job.order.state_size(self.spec)
        states = rows.new_empty(len(rows), size)
        for row, state in enumerate(job.states):
            states[row] = 0.0 if state is None else _tensor(objects[state[0]][state[1]])
        return states, fresh

    def _arrival(self, job: TrainJob, start: Start, state: torch.Tensor, indices: Ragged) -> Arrival:
        def logits(model: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            ids = np.concatenate([indices[row] for row in rows])
            pieces = np.split(ids, range(_AT_ONCE, len(ids), _AT_ONCE))
            found = [self._logits(model, "train", piece) for piece in pieces]
            return torch.cat([outputs for outputs, _ in found]), torch.cat([y for _, y in found])

        return Arrival(
            spec=self.spec,
            work=job.work,
            round=job.round,
            seed=self.host.seed,
            clients=job.clients,
            sizes=start.sizes,
            models=start.models,
            same=np.arange(len(job.clients)) if job.work.personal else job.start,
            state=state,
            fresh=start.fresh,
            logits=logits,
        )

    def _partial(
        self,
        job: TrainJob,
        row: int,
        delivered: NDArray[np.float64],
        values: torch.Tensor,
        kept: torch.Tensor | None,
        extra: torch.Tensor | None,
        statistics: int,
    ) -> Partial:
        weights, keep = job.weights[row] * delivered, 0.0
        total, weight = partial_product(weights, values, kept)
        if job.keep is not None:
            kept_back = job.keep[row] * delivered
            keep = float(kept_back.sum())
            if statistics:
                total[-statistics:], _ = partial_product(weights + kept_back, values[:, -statistics:])
        if extra is None:
            return Partial(total, weight, keep, statistics=statistics)
        sums, _ = partial_product((weights > 0).astype(np.float64), extra)
        return Partial(total, weight, keep, sums, statistics)

    def _logits(
        self, model: torch.Tensor, part: Part, ids: NDArray[np.integer]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of a model on samples, and what they should be."""
        module = self.engine.module.eval()
        self.spec.load(module, model)
        x, y = self.batches.test(ids) if part == "test" else self.batches.train(ids)
        with torch.inference_mode():
            return module(x), y

    def _validate(self, job: TrainJob, model: torch.Tensor, row: int) -> float:
        """Accuracy on a client's validation samples."""
        ids = self.stages[job.stage].validation[int(job.clients[row])]
        if not len(ids):
            return float("nan")
        logits, y = self._logits(model, "train", ids)
        return float((logits.argmax(1) == y).double().mean())

    def adapt(self, job: AdaptJob, *objects: Any) -> Any:
        """Train a block of clients on, without telling anybody.

        Returns:
            For every client how many of its test samples the new model gets right and the sum of their
            losses; then the updates ``(B, P)``.
        """
        before, after = self._adapted(job, objects)
        tests = self.stages[job.stage].test
        correct, losses = [], []
        for row, client in enumerate(job.clients.tolist()):
            right, loss = self._test(after[row], "test", tests[client], job.batch_size)
            correct.append(int(right.sum()))
            losses.append(float(loss.sum()))
        scores = np.array(correct, np.int64), np.array(losses, np.float64)
        return scores, self._sent(_updates(after, before, self.spec)).cpu().numpy()

    def adapted(self, job: AdaptJob, *objects: Any) -> NDArray[np.float32]:
        """The models that :meth:`adapt` tests ``(B, P)``."""
        return self._adapted(job, objects)[1].cpu().numpy()

    def _adapted(self, job: AdaptJob, objects: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The clients' models before and after they trained on ``(B, P)``."""
        rows = self._gather(objects, job.start)
        states, fresh = self._states(job, objects, rows)
        own = states[:, : length(job.work.personal)]
        _overlay(rows, job.work.personal, own, fresh)
        mine = states[:, own.shape[1] : own.shape[1] + job.local.state_size(self.spec)]
        for row in range(len(rows)):
            if not fresh[row]:
                rows[row] = job.local.client_model(rows[row], mine[row], self.spec)
        indices = self.stages[job.stage].train.take(job.clients)
        terms = Terms(mask=job.local.held(mine, fresh, self.spec))
        block = self.engine.train(job.work, job.round, job.clients.tolist(), indices, rows, terms)
        _raise_first(block, job.clients, job.round)
        return rows, block.rows

    def _test(
        self, model: torch.Tensor, part: Part, ids: NDArray[np.integer], batch_size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """How many predictions of each sample are right, and the sum of their losses."""
        correct, losses = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)]
        for start in range(0, len(ids), batch_size):
            logits, y = self._logits(model, part, ids[start : start + batch_size])
            correct.append(_of_samples(logits.argmax(1) == y).cpu())
            losses.append(_of_samples(functional.cross_entropy(logits, y, reduction="none")).cpu())
        return torch.cat(correct).numpy(), torch.cat(losses).numpy()

    def evaluate(self, job: EvalJob, *objects: NDArray[np.float32]) -> EvalReport:
        """Forward passes over samples."""
        report = EvalReport()
        for item in job.items:
            model = self._model(job, item, objects)
            right, loss = self._test(model, job.part, item.samples, job.batch_size)
            report.correct.append(right)
            report.loss.append(loss)
        return report

    def models(self, job: EvalJob, *objects: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """The models that :meth:`evaluate` tests, each ``(P,)``."""
        return [self._model(job, item, objects).cpu().numpy() for item in job.items]

    def _model(self, job: EvalJob, item: EvalItem, objects: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        """A model of the servers, with what the client has of its own, as the client uses it."""
        vector = self._received(objects[item.model])
        if item.state is None:
            return vector
        state = _tensor(objects[item.state[0]][item.state[1]])
        own = length(job.personal)
        vector = vector.clone()
        scatter_(vector, job.personal, state[:own])
        mine = state[own : own + job.local.state_size(self.spec)]
        return job.local.client_model(vector, mine, self.spec)

    def sign(self, job: SignJob, *objects: Any) -> tuple[SignReport, list[NDArray[np.float32]]]:
        """The signatures of a block of clients, after a report.

        For signatures of trained models the observation and the start model come as objects, and every
        client sends its model.
        """
        if job.work is not None:
            observation: Observation = objects[0]
            rows = self._gather(objects[1:], np.zeros(len(job.clients), np.int64), own=False)
            clients = job.clients.tolist()
            lists = [self.stages[s].train[c] for c, s in zip(clients, job.stages.tolist(), strict=True)]
            block = self.engine.train(job.work, 0, clients, Ragged.of(lists), rows)
            if block.failures:
                errors = {clients[row]: text for row, text in block.failures.items()}
                return SignReport(
                    np.empty(0, np.int64), {c: ClientError(c, 0, text) for c, text in errors.items()}
                ), []
            seen = observation.compute(Trained(self.spec, self.engine.module, self.batches, block.rows, []))
            sent = np.full(len(rows), self.spec.P)
            return SignReport(sent, {}), list(seen.reshape(len(rows), -1).astype(np.float32))
        signatures: list[NDArray[np.float32]] = []
        failures: dict[int, RayflError] = {}
        for client, stage in zip(job.clients.tolist(), job.stages.tolist(), strict=True):
            try:
                found = job.signature.compute(
                    *self._features(client, stage, job), key(job.seed, "signature", client)
                )
            except DataError as error:
                failures[client] = DataError(f"client {client}: {error}")
            else:
                signatures.append(found)
        floats = np.array([job.signature.floats(s) for s in signatures], np.int64)
        return SignReport(floats, failures), signatures

    def relate(self, job: SignJob, *blocks: list[NDArray[np.float32]]) -> tuple[int, NDArray[np.float64]]:
        """The second step of an exchange: one row ``r(i, .)`` for every client i of the block, ``(B, N)``."""
        everyone = [signature for block in blocks for signature in block]
        rows = np.stack(
            [
                job.signature.relate(self._features(client, stage, job)[0], everyone[at], everyone)
                for at, (client, stage) in enumerate(
                    zip(job.clients.tolist(), job.stages.tolist(), strict=True), job.first
                )
            ]
        )
        return rows.size, rows

    def apply(self, function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
        """Call a plain function here; its result comes second, so that it may stay in the object store."""
        return None, function(*args)

    def _features(
        self, client: int, stage: int, job: SignJob
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        samples, indices = self.samples, self.stages[stage].train[client]
        inputs = raw_features(samples.inputs("train", indices), len(samples.vocabulary), samples.scaling)
        features = job.features.apply(inputs, key(job.seed, "features", client))
        return features, samples.labels("train", indices)


def _raise_first(block: TrainedBlock, clients: NDArray[np.int64], round: int) -> None:
    """Where nobody may be left out, the first failure is everybody's."""
    if block.failures:
        row, text = min(block.failures.items())
        raise ClientError(int(clients[row]), round, text)


_AT_ONCE = 512
"""Samples in a forward pass that scores them."""

_TOGETHER = 1 << 18
"""Numbers that are summed in one call: small models many at a time, large ones one by one."""


def partial_product(
    weights: NDArray[np.float64], rows: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[NDArray[np.float64], Weight]:
    """``sum_j a_j w_j`` in float64, in the order of the rows, and ``sum_j a_j``.

    Args:
        weights: ``(B,)``.
        rows: ``(B, S)`` float32.
        kept: 1 for the numbers that take part, 0 for the others, ``(B, S)``; None for all. The weight is then
            one of each number.
    """
    # A client that failed may hold anything, NaN too: it is left out, not multiplied by zero.
    there = np.flatnonzero(weights)
    if len(there) < len(rows):
        at = torch.from_numpy(there).to(rows.device)
        rows, weights, kept = rows[at], weights[there], None if kept is None else kept[at]
    if kept is not None:
        total = _weighted_sum(weights, rows * kept)
        return total.cpu().numpy(), _weighted_sum(weights, kept).cpu().numpy()
    return _weighted_sum(weights, rows).cpu().numpy(), float(weights.sum())


def _weighted_sum(weights: NDArray[np.float64], rows: torch.Tensor) -> torch.Tensor:
    if not rows.is_cuda:
        total = np.zeros(rows.shape[1])
        weighted_sum(weights, rows.contiguous().numpy(), total)
        return torch.from_numpy(total)
    sums = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    factors = torch.from_numpy(weights).to(rows.device)[:, None]
    together = max(1, _TOGETHER // max(1, rows.shape[1]))
    for start in range(0, len(rows), together):
        part = slice(start, start + together)
        sums += (rows[part].to(torch.float64) * factors[part]).sum(0)
    return sums


def _updates(rows: torch.Tensor, before: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """``w_i - w`` ``(B, P)``, 0 for running statistics: those follow the inputs, they are no descent."""
    updates = rows - before
    updates[:, spec.n_parameters :] = 0
    return updates


def _overlay(rows: torch.Tensor, segments: Segments, values: torch.Tensor, fresh: NDArray[np.bool_]) -> None:
    """Put the clients' own numbers into their models, in place, where they have some."""
    for row in np.flatnonzero(~fresh).tolist() if segments else ():
        scatter_(rows[row], segments, values[row])


def _of_samples(values: torch.Tensor) -> torch.Tensor:
    """The sum over the predictions of each sample: ``(n,)`` or ``(n, L)`` to ``(n,)``."""
    return values.reshape(len(values), -1).sum(1)


def _tensor(array: NDArray[np.float32]) -> torch.Tensor:
    """A tensor over the array's memory. Arrays of the object store are read-only, and nobody writes here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
