"""What runs inside a client actor (or in this process, inline): the clients' side of every phase."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.backend import RESULT, Answer, Key, Objects
from rayfl.clients.jobs import (
    RELATIONS,
    ROWS,
    SIGNATURES,
    STATES,
    UPDATES,
    AdaptJob,
    AdaptReport,
    BlockMixing,
    EvalJob,
    EvalReport,
    ForwardPass,
    GroupJob,
    GroupReport,
    HostSpec,
    Mixture,
    SignatureJob,
    SignatureReport,
    TrainJob,
    TrainReport,
    in_group,
)
from rayfl.clients.partial import LARGE, PIECE, Adding, Partial, Weight
from rayfl.clients.ranges import Ranges
from rayfl.clients.state import StateLayout
from rayfl.data import Federation, Ragged
from rayfl.data.base import Part, TestedOn, called
from rayfl.errors import ClientError, ConfigError, DataError, RayflError, type_of
from rayfl.evaluation import Score, Scores
from rayfl.local import Outcome, Start, client_model_of, trained_by
from rayfl.memory import resident
from rayfl.models.flat import as_tensor
from rayfl.ordering import Arrival
from rayfl.ordering.base import kept_by, visits_of
from rayfl.random import key
from rayfl.training import NO_TERMS, LocalWork, Terms, TrainedBlock, complement, gather, length, scatter_
from rayfl.training.batched.linear_kernels import weighted_sum
from rayfl.training.batches import Batches, KeptSamples, raw_features
from rayfl.training.device import on_gpu, open_device
from rayfl.training.engine import Engine, GuidedEngines, open_engine
from rayfl.training.guides import Guides
from rayfl.training.reports import ClientReport, Trained, updates_of
from rayfl.training.server import ServerTrainingJob, train_model
from rayfl.training.work import length_from


class ClientHost:
    """Hosts any number of clients; it keeps only a model, a training engine and the shared data.

    Args:
        stages: the federation in each stage of the run; its arrays are read in place.
        host: what to run.
    """

    def __init__(self, stages: Sequence[Federation], host: HostSpec) -> None:
        self.stages, self.host, self.spec = stages, host, host.spec
        self._ranges = Ranges.of(host.spec.P, host.shards)
        self.samples = stages[0].samples
        self.batches = Batches(self.samples, open_device(host.device, host.gpu_fraction))
        self.engine: Engine
        self.engine, self._engine_line = open_engine(
            host.engine, self.spec, self.batches, host.seed, host.cuda_graphs, host.precision
        )

    @cached_property
    def _guided_engines(self) -> GuidedEngines:
        return GuidedEngines(self.spec, self.batches, self.host.seed, self.host.precision)

    def _engine_for(self, guides: Guides | None) -> Engine:
        """The engine for the round's loss, which may look at other models."""
        if guides is None or self.host.engine == "loop":
            return self.engine
        return self._guided_engines.engine(guides)

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def about(self, job: None, objects: Objects) -> Answer:
        """Return one line about the engine that trains here."""
        return Answer(self._engine_line)

    def train(self, job: TrainJob, objects: Objects) -> Answer:
        """Train a block: see :class:`~rayfl.clients.jobs.TrainJob` for what goes in and what comes out."""
        one_by_one = job.only_sums and self.spec.P >= LARGE and self.engine.one_by_one(len(job.clients))
        answer = (self._train_one_by_one if one_by_one and len(job.clients) > 1 else self._train_block)(
            job, objects
        )
        return replace(answer, objects=self._in_shards(job, answer.objects))

    def _in_shards(self, job: TrainJob, objects: Objects) -> dict[Key, Any]:
        """The results of a block, with its sums or rows cut into the shards of the model."""
        shared = self._ranges.among(complement(job.layout.layers, self.spec.P))
        extra = self._ranges.evenly(job.local.server_size(self.spec))
        results: dict[Key, Any] = {}
        for (kind, which), value in objects.items():
            if kind == "sum":
                assert isinstance(which, int)
                shards = value.split([*shared], [*extra])
                results.update((("sum", (which, at)), shard.cut()) for at, shard in enumerate(shards))
            elif kind == ROWS:
                # Contiguous: other arrays are copied into the message instead of the object store.
                shards = [np.ascontiguousarray(shard) for shard in shared.split(value)]
                results.update(((ROWS, at), shard) for at, shard in enumerate(shards))
            else:
                results[kind, which] = value
        return results

    def _train_one_by_one(self, job: TrainJob, objects: Objects) -> Answer:
        """Train the clients of a block one after the other, and keep only the sums of their models."""
        assert job.mixing is not None
        # Allocated before any model: memory freed between large arrays may be too small for later ones.
        size, rows = self.spec.P - length(job.layout.layers), job.mixing.rows.tolist()
        sums: dict[Key, Adding] = {("sum", row): Adding(size) for row in rows}
        reports = [
            self._train_into(job.take(slice(place, place + 1)), objects, sums)
            for place in range(len(job.clients))
        ]
        report = TrainReport.joined(reports)
        delivered = np.array([client not in report.failures for client in job.clients.tolist()], np.float64)
        partials: dict[Key, Any] = {}
        for place, row in enumerate(rows):
            # The weights are added as for a whole block: their order may change the last bit.
            weight, keep = _row_weights(job.mixing, place, delivered)
            partials["sum", row] = replace(sums["sum", row].partial(), weight=weight, keep=keep)
        return Answer(report, partials)

    def _train_into(self, job: TrainJob, objects: Objects, sums: dict[Key, Adding]) -> TrainReport:
        """Train a client and add its model to the sums; nothing of the model's size is kept."""
        answer = self._train_block(job, objects)
        for name, part in answer.objects.items():
            sums[name].add(part)
        report: TrainReport = answer.report
        return report

    def _train_block(self, job: TrainJob, objects: Objects) -> Answer:
        """Train a block, all clients at once."""
        start_time = time.perf_counter()
        local, spec, layout = job.local, self.spec, job.layout
        # If all clients start from the same model, they need no copies of it.
        rows = self._gather(objects, "model", job.start, own=bool(layout.layers))
        states, fresh = self._client_states(job, objects, rows)
        _overlay(rows, layout, states, fresh)
        indices = self.stages[job.stage].train.take(job.clients)
        has_vectors = local.server_size(spec) > 0
        start = Start(
            spec=spec,
            work=job.work,
            models=rows,
            server=self._gather(objects, "vector", job.start, own=False) if has_vectors else rows[:, :0],
            state=layout.objective(states),
            fresh=fresh,
            sizes=indices.sizes,
            test=partial(self._validate, job),
        )
        same = np.arange(len(job.clients)) if layout.layers else job.start
        arrival = self._arrival(job.work, job.round, job.clients, indices, rows, same)
        arrival = replace(arrival, state=layout.order(states), fresh=fresh)
        phases: list[TrainedBlock] = []

        def train(work: LocalWork, models: torch.Tensor, terms: Terms = NO_TERMS) -> TrainedBlock:
            if terms.visits is None:
                terms = replace(terms, visits=visits_of(job.order, replace(arrival, work=work)))
            engine = self._engine_for(terms.guides)
            phases.append(engine.train(work, job.round, job.clients.tolist(), indices, models, terms))
            return phases[-1]

        block, outcome = trained_by(local, start, train)
        block = _merge_phases(block, phases)
        if job.sends_updates:
            outcome = replace(outcome, rows=_minus_start(outcome.rows, start.models, spec.n_parameters))

        results: dict[Key, Any] = self._products(job, block, outcome, has_vectors)
        small_reports = self._reports(job, objects, block, start.models, indices, results)
        if job.updates:
            results[UPDATES] = self._as_sent(updates_of(block.rows, start.models, spec)).cpu().numpy()
        order_state = kept_by(job.order, block.rows, spec)
        if layout.size:
            own_layers = gather(block.rows, layout.layers)
            results[STATES] = layout.joined(own_layers, outcome.state, order_state).cpu().numpy()
        client_bytes = 4 * (spec.P - length(layout.layers) + start.server.shape[1])
        sent = np.ones(len(job.clients), np.int64)
        sent[list(block.failures)] = 0  # they had received their models before they failed
        up, down = (
            int((count * client_bytes if each is None else count * each).sum())
            for count, each in ((sent, outcome.bytes_up), (np.ones_like(sent), outcome.bytes_down))
        )
        scores, unadapted = self._local_scores(job, block, (outcome.state, order_state), indices)
        report = TrainReport(
            losses=block.losses,
            steps=block.steps,
            reports=small_reports,
            failures={int(job.clients[row]): text for row, text in block.failures.items()},
            seconds=time.perf_counter() - start_time,
            worker=f"{platform.node()}:{os.getpid()}",
            bytes_up=up,
            bytes_down=down,
            remarks={text: job.clients[list(rows)].tolist() for text, rows in outcome.remarks.items()},
            scores=scores,
            memory=resident(),
            unadapted=unadapted,
        )
        return Answer(report, results)

    def train_group(self, job: GroupJob, objects: Objects) -> Answer:
        """Train several blocks: see :class:`~rayfl.clients.jobs.GroupJob`."""
        reports, results, sums = [], dict[Key, Any](), dict[Key, Adding]()
        for place, block in enumerate(job.blocks):
            answer = self.train(block, objects)
            reports.append(answer.report)
            for own_name, value in answer.objects.items():
                if own_name[0] == "sum":
                    sums.setdefault(own_name, Adding()).add(value)
                else:
                    results[in_group(place, own_name)] = value
        results.update((name, adding.partial().cut()) for name, adding in sums.items())
        return Answer(GroupReport(tuple(reports)), results)

    def _products(
        self, job: TrainJob, block: TrainedBlock, outcome: Outcome, has_vectors: bool
    ) -> dict[Key, Any]:
        """The block's part of ``A W``, or the rows themselves if those are sent."""
        shared = complement(job.layout.layers, self.spec.P)
        values, kept = self._as_sent(outcome.rows), outcome.kept
        if job.layout.layers:
            values = gather(values, shared)
            kept = None if kept is None else gather(kept, shared)
        if job.mixing is None:
            return {(ROWS, 0): values.cpu().numpy()}
        delivered = np.ones(len(job.clients))
        delivered[list(block.failures)] = 0.0
        sent = _Sent(values, kept, outcome.server if has_vectors else None, delivered)
        statistics = length_from(shared, self.spec.n_parameters)
        return {
            ("sum", int(row)): _row_partial(job.mixing, place, sent, statistics)
            for place, row in enumerate(job.mixing.rows)
        }

    def _reports(
        self,
        job: TrainJob,
        objects: Objects,
        block: TrainedBlock,
        start: torch.Tensor,
        samples: Ragged,
        combined: dict[Key, Any],
    ) -> dict[str, NDArray[np.floating]]:
        """The small reports by name; those that are combined are added to ``combined``."""
        if not job.reports:
            return {}
        failed = list(block.failures)
        rows = block.rows
        if failed:  # their rows may contain NaN
            rows = rows.clone()
            rows[failed] = start[failed]
        models = [as_tensor(objects["model", k]) for k in range(job.models)]
        trained = Trained(self.spec, self.engine.forward, self.batches, rows, start, samples, models)
        small_reports: dict[str, NDArray[np.floating]] = {}
        for name in job.reports:
            report: ClientReport = objects["report", name]
            values = report.compute(trained)
            if np.shape(values)[:1] != (len(rows),):
                what = f"compute returned shape {np.shape(values)} for {len(rows)} clients"
                raise ConfigError(type(report).__name__, what, "expected a row for each (B, ...)")
            if report.combined:
                combined["report", name] = values
            else:
                small_reports[name] = np.array(values, np.float64)
                small_reports[name][failed] = np.nan
        return small_reports

    def _gather(
        self, objects: Objects, kind: str, numbers: NDArray[np.int64], own: bool = True
    ) -> torch.Tensor:
        """The vectors of a kind with these numbers, one per client ``(B, ...)``; they may only be written to
        if ``own``."""
        device = self.batches.device
        used, place = np.unique(numbers, return_inverse=True)
        if len(used) > 1 and self.spec.P <= PIECE and isinstance(objects[kind, int(used[-1])], Mixture):
            rows = as_tensor(self.host.unpermute(_stack_models(objects, kind, used.tolist(), self.spec.P)))
            in_order = np.array_equal(used, numbers)
            return (rows if in_order else rows.index_select(0, torch.from_numpy(place))).to(device)
        vectors = [self._as_received(objects, (kind, int(number))) for number in used]
        if len(used) == 1:
            vector = vectors[0].to(device)
            return vector.repeat(len(numbers), 1) if own else vector.expand(len(numbers), -1)
        return torch.stack(vectors).to(device).index_select(0, torch.from_numpy(place).to(device))

    def _as_received(self, objects: Objects, name: Key) -> torch.Tensor:
        """A vector as the clients use it: a mixture is formed, a permutation undone."""
        vector = objects[name]
        if isinstance(vector, Mixture):
            vector = vector.of([objects[name[0], number] for number in vector.models])
        return as_tensor(self.host.unpermute(vector))

    def _as_sent(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the servers may see them, permuted if the run asks for it."""
        return (
            as_tensor(self.host.permute(rows.cpu().numpy())).to(rows.device) if self.host.permutes else rows
        )

    def _client_states(
        self, job: TrainJob | AdaptJob, objects: Objects, rows: torch.Tensor
    ) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """The clients' states ``(B, S)``, and which clients have none yet ``(B,)``; their rows are zero."""
        fresh = np.array([state is None for state in job.states], np.bool_)
        if not len(fresh):
            return rows[:, :0], np.ones(len(rows), np.bool_)
        size = job.layout.size
        rows_by_object: dict[int, list[tuple[int, int]]] = {}
        for place, state in enumerate(job.states):
            if state is not None:
                rows_by_object.setdefault(state[0], []).append((place, state[1]))
        if size > _SHORT_STATE:
            states = rows.new_empty(len(rows), size)
            for place in np.flatnonzero(fresh).tolist():
                states[place] = 0.0
            for number, places in rows_by_object.items():
                stored = as_tensor(objects["state", number])
                for place, row in places:
                    states[place] = stored[row]
            return states, fresh
        # Short states in NumPy, which takes a quarter of the time of indexing in torch.
        state_rows = np.empty((len(rows), size), np.float32)
        state_rows[fresh] = 0.0
        for number, places in rows_by_object.items():
            positions, stored_rows = np.array(places).T
            state_rows[positions] = as_tensor(objects["state", number]).cpu().numpy()[stored_rows]
        return torch.from_numpy(state_rows).to(rows.device), fresh

    def _arrival(
        self,
        work: LocalWork,
        round: int,
        clients: NDArray[np.int64],
        samples: Ragged,
        models: torch.Tensor,
        same: NDArray[np.int64],
    ) -> Arrival:
        """What the order of samples knows about clients without a state for it.

        Args:
            work, round: of the training.
            clients: ids ``(B,)``.
            samples: their training samples.
            models: that they train from ``(B, P)``.
            same: clients with the same number have equal models ``(B,)``.
        """

        def logits(model: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            ids = samples.among(np.asarray(rows)).values
            batch_size = self.batches.at_once(_ORDER_BATCH)
            pieces = np.split(ids, range(batch_size, len(ids), batch_size))
            self.engine.forward.load(model)
            results = [self._logits("train", piece) for piece in pieces]
            return torch.cat([outputs for outputs, _ in results]), torch.cat([y for _, y in results])

        return Arrival(
            spec=self.spec,
            work=work,
            round=round,
            seed=self.host.seed,
            clients=clients,
            sizes=samples.sizes,
            models=models,
            same=same,
            state=models[:, :0],
            fresh=np.ones(len(clients), np.bool_),
            logits=logits,
        )

    def _logits(self, part: Part, ids: NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the loaded model on samples, and what they should be."""
        x, y = self._read(part, ids)
        return self.engine.forward(x), y

    def _read(self, part: Part, ids: NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of samples."""
        return self.batches.test(ids) if part == "test" else self.batches.train(ids)

    def _validate(self, job: TrainJob, model: torch.Tensor, row: int) -> float:
        """Accuracy on a client's validation samples."""
        ids = self.stages[job.stage].validation[int(job.clients[row])]
        if not len(ids):
            return float("nan")
        self.engine.forward.load(model)
        logits, y = self._logits("train", ids)
        return float(self.spec.loss.right(logits, y).double().mean())

    def _local_scores(
        self,
        job: TrainJob,
        block: TrainedBlock,
        states: tuple[torch.Tensor, torch.Tensor],
        samples: Ragged,
    ) -> tuple[Scores, dict[int, str]]:
        """Tests of the models that the clients of a block hold after training ``(B,)``, if the job asks; and
        the clients that failed when they adapted them.

        Args:
            job: the job.
            block: as trained.
            states: the new states of the local objective, and of the order of samples, each ``(B, S)``.
            samples: of the clients, to train on.
        """
        test, clients = job.test, job.clients
        if test is None:
            return {}, {}
        failures: dict[int, str] = {}
        delivered = np.setdiff1d(np.arange(len(clients)), list(block.failures))
        local_states, order_states = (each[torch.from_numpy(delivered).to(each.device)] for each in states)
        models = [
            client_model_of(job.local, block.rows[row], local_states[at], self.spec)
            for at, row in enumerate(delivered.tolist())
        ]
        if test.adaptation is not None and models:
            ids, start, subset = clients[delivered], torch.stack(models), samples.take(delivered)
            fresh = np.zeros(len(local_states), np.bool_)
            arrival = self._arrival(test.adaptation, job.round, ids, subset, start, np.arange(len(ids)))
            visits = visits_of(job.order, replace(arrival, state=order_states, fresh=fresh))
            terms = Terms(mask=job.local.held(local_states, fresh, self.spec), visits=visits)
            adapted = self.engine.train(test.adaptation, job.round, ids.tolist(), subset, start, terms)
            failures = _failures_by_client(adapted, ids)
            models = list(_trained_or_start(adapted, start))
        scores = self._scores(models, clients[delivered], job.stage, test.on, test.batch_size)
        return {on: score.of(delivered, len(clients)) for on, score in scores.items()}, failures

    def _scores(
        self,
        models: Sequence[torch.Tensor] | torch.Tensor,
        clients: NDArray[np.int64],
        stage: int,
        tested_on: Sequence[TestedOn],
        batch_size: int,
    ) -> dict[TestedOn, Score]:
        """Tests of a model ``(P,)`` of each client ``(n,)``."""
        scores = {on: Score.zeros(len(clients), self.spec.sums) for on in tested_on}
        for on, score in scores.items():
            for row, client in enumerate(clients.tolist()):
                samples = self.stages[stage].tested_on(on, client)
                right, loss, sums = self._test(models[row], *samples, batch_size)
                score.correct[row], score.losses[row] = right.sum(), loss.sum(dtype=np.float64)
                score.sums[row] = sums.sum(0)
        return scores

    def adapt(self, job: AdaptJob, objects: Objects) -> Answer:
        """Fine-tune a block of clients without reporting to the servers: an :class:`AdaptReport`, and the
        updates if they are asked for."""
        before, after, failures = self._adapted(job, objects)
        results: dict[Key, Any] = {}
        if job.updates:
            results[UPDATES] = self._as_sent(updates_of(after, before, self.spec)).cpu().numpy()
        scores = self._scores(after, job.clients, job.stage, job.on, job.batch_size)
        return Answer(AdaptReport(scores, failures), results)

    def adapted(self, job: AdaptJob, objects: Objects) -> Answer:
        """The models that :meth:`adapt` tests ``(B, P)``."""
        return Answer(self._adapted(job, objects)[1].cpu().numpy())

    def _adapted(self, job: AdaptJob, objects: Objects) -> tuple[torch.Tensor, torch.Tensor, dict[int, str]]:
        """The clients' models before and after fine-tuning ``(B, P)``, and the failures by client id."""
        rows = self._gather(objects, "model", job.start)
        states, fresh = self._client_states(job, objects, rows)
        _overlay(rows, job.layout, states, fresh)
        local_states = job.layout.objective(states)
        for row in range(len(rows)):
            if not fresh[row]:
                rows[row] = client_model_of(job.local, rows[row], local_states[row], self.spec)
        indices = self.stages[job.stage].train.take(job.clients)
        owned = bool(job.layout.layers) or job.local.personal
        same = np.arange(len(rows)) if owned else job.start
        arrival = self._arrival(job.work, job.round, job.clients, indices, rows, same)
        visits = visits_of(job.order, replace(arrival, state=job.layout.order(states), fresh=fresh))
        terms = Terms(mask=job.local.held(local_states, fresh, self.spec), visits=visits)
        block = self.engine.train(job.work, job.round, job.clients.tolist(), indices, rows, terms)
        return rows, _trained_or_start(block, rows), _failures_by_client(block, job.clients)

    def _test(
        self,
        model: torch.Tensor,
        part: Part,
        ids: NDArray[np.integer],
        batch_size: int,
        kept: KeptSamples | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float64]]:
        """Test a model on samples.

        Args:
            model: ``(P,)``.
            part, ids: the samples.
            batch_size: samples in a forward pass.
            kept: caches samples that other models will be tested on, too.

        Returns:
            For each sample the number of its predictions that are right, the sum of their losses, and the
            other sums that are measured ``(n, S)``.
        """
        kept = kept or KeptSamples(0)
        if not len(ids):
            return np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros((0, self.spec.sums))
        correct, losses, sums, loss = [], [], [], self.spec.loss.for_tests()
        self.engine.forward.load(model)
        for start in range(0, len(ids), batch_size):
            x, y = kept.read(ids[start : start + batch_size], partial(self._read, part))
            logits = self.engine.forward(x)
            right = loss.right(logits, y) if loss.accurate else torch.zeros(len(y), dtype=torch.bool)
            correct.append(_sum_per_sample(right).cpu())
            losses.append(_sum_per_sample(loss.each(logits, y)).cpu())
            sums.append(loss.sums(logits, y).double().cpu())
        return _joined(correct), _joined(losses), _joined(sums)

    def _losses(
        self,
        model: torch.Tensor,
        part: Part,
        ids: NDArray[np.integer],
        batch_size: int,
        kept: KeptSamples,
    ) -> NDArray[np.float32]:
        """The losses of :meth:`_test` alone ``(n,)``, in the same batches and with the same bits."""
        losses, loss = [torch.zeros(0)], self.spec.loss.for_tests()
        self.engine.forward.load(model)
        for start in range(0, len(ids), batch_size):
            x, y = kept.read(ids[start : start + batch_size], partial(self._read, part))
            losses.append(_sum_per_sample(loss.each(self.engine.forward(x), y)).cpu())
        return _joined(losses[1:] or losses)

    def evaluate(self, job: EvalJob, objects: Objects) -> Answer:
        """Forward passes over samples: an :class:`EvalReport`."""
        report, kept = EvalReport(), KeptSamples(_KEPT_BYTES if len(job.passes) > 1 else 0)
        for forward_pass in job.passes:
            model = self._model(job, forward_pass, objects)
            if job.only_losses:
                report.loss.append(self._losses(model, job.part, forward_pass.samples, job.batch_size, kept))
                continue
            right, loss, sums = self._test(model, job.part, forward_pass.samples, job.batch_size, kept)
            report.correct.append(right)
            report.loss.append(loss)
            report.sums.append(sums)
        return Answer(report)

    def models(self, job: EvalJob, objects: Objects) -> Answer:
        """The models that :meth:`evaluate` tests, each ``(P,)``."""
        return Answer([self._model(job, forward_pass, objects).cpu().numpy() for forward_pass in job.passes])

    def _model(self, job: EvalJob, forward_pass: ForwardPass, objects: Objects) -> torch.Tensor:
        """A server's model combined with the client's own state, as the client uses it."""
        vector = self._as_received(objects, ("model", forward_pass.model))
        if forward_pass.state is None:
            return vector
        state = _client_state(objects, forward_pass.state)
        vector = vector.clone()
        scatter_(vector, job.layout.layers, job.layout.own_layers(state))
        return client_model_of(job.local, vector, job.layout.objective(state), self.spec)

    def signatures(self, job: SignatureJob, objects: Objects) -> Answer:
        """Compute the signatures of a block of clients: a :class:`SignatureReport`, and a list of them.

        For signatures of trained models the objects are ``("report", "signature")`` and the start model
        ``("model", 0)``, and every client sends its model.
        """
        if job.work is not None:
            return self._trained_signatures(job, job.work, objects)
        signatures: list[NDArray[np.float32]] = []
        failures: dict[int, RayflError] = {}
        for client, stage in zip(job.clients.tolist(), job.stages.tolist(), strict=True):
            try:
                signature = job.signature.compute(
                    *self._features(client, stage, job), key(job.seed, "signature", client)
                )
            except DataError as error:
                failures[client] = DataError(f"client {called(self.stages[stage].names, client)}: {error}")
            else:
                if not isinstance(signature, np.ndarray) or signature.dtype.kind not in "fiub":
                    where, what = f"{job.signature.name}.compute", f"returned {type_of(signature)}"
                    raise ConfigError(where, what, "expected an array of numbers")
                if np.isfinite(signature).all():
                    signatures.append(signature)
                    continue
                name = called(self.stages[stage].names, client)
                what = f"{job.signature.name}.compute returned NaN or infinity"
                failures[client] = DataError(f"client {name}: {what}")
        floats = np.array([job.signature.floats(s) for s in signatures], np.int64)
        return Answer(SignatureReport(floats, failures), {SIGNATURES: signatures})

    def _trained_signatures(self, job: SignatureJob, work: LocalWork, objects: Objects) -> Answer:
        rows = self._gather(objects, "model", np.zeros(len(job.clients), np.int64), own=False)
        clients = job.clients.tolist()
        samples = Ragged.of(
            [self.stages[s].train[c] for c, s in zip(clients, job.stages.tolist(), strict=True)]
        )
        same = np.zeros(len(clients), np.int64)
        visits = visits_of(job.order, self._arrival(work, 0, job.clients, samples, rows, same))
        block = self.engine.train(work, 0, clients, samples, rows, Terms(visits=visits))
        if block.failures:
            texts = {clients[row]: text for row, text in block.failures.items()}
            failures: dict[int, RayflError] = {c: ClientError(c, 0, text) for c, text in texts.items()}
            return Answer(SignatureReport(np.empty(0, np.int64), failures), {SIGNATURES: []})
        report: ClientReport = objects["report", "signature"]
        trained = Trained(self.spec, self.engine.forward, self.batches, block.rows, rows, samples)
        signatures = report.compute(trained).reshape(len(rows), -1).astype(np.float32)
        return Answer(SignatureReport(np.full(len(rows), self.spec.P), {}), {SIGNATURES: list(signatures)})

    def relations(self, job: SignatureJob, objects: Objects) -> Answer:
        """The second step of an exchange, with the signatures of all blocks ``("signatures", block)``: one
        row ``r(i, .)`` for every client i of the block, ``(B, N)``."""
        blocks = range(len(objects))
        all_signatures = [signature for block in blocks for signature in objects["signatures", block]]
        clients = (
            (self._features(client, stage, job)[0], all_signatures[at])
            for at, (client, stage) in enumerate(
                zip(job.clients.tolist(), job.stages.tolist(), strict=True), job.first
            )
        )
        rows = job.signature.relate_all(clients, all_signatures)
        return Answer(None, {RELATIONS: rows})

    def train_model(self, job: ServerTrainingJob, objects: Objects) -> Answer:
        """Train a server's model, see :class:`~rayfl.training.server.ServerTrainingJob`; returns the shards
        ``("model", shard)`` of the result."""
        training, model = objects["training", 0], as_tensor(objects["model", 0])
        shard_keys: list[Key] = [("model", shard) for shard in range(len(self._ranges))]
        try:
            trained = train_model(training, job, model, self.spec, self.batches, self.host.seed)
        except Exception as error:
            name = type(training).__name__
            message = f"round {job.round + 1}, model {job.model}: {type(error).__name__}: {error}"
            return Answer(ConfigError(f"{name}.train", " ".join(message.split())), dict.fromkeys(shard_keys))
        return Answer(None, dict(zip(shard_keys, self._ranges.split(trained), strict=True)))

    def call(self, function: Callable[..., Any], objects: Objects) -> Answer:
        """Call a plain function here, see :meth:`rayfl.backend.Task.calling`."""
        return Answer(None, {RESULT: function(*objects.values())})

    def _features(
        self, client: int, stage: int, job: SignatureJob
    ) -> tuple[NDArray[np.float32], NDArray[np.int64] | NDArray[np.float32]]:
        samples, indices = self.samples, self.stages[stage].train[client]
        truth = samples.targets if samples.numeric else samples.labels
        inputs = raw_features(samples.inputs("train", indices), len(samples.vocabulary), samples.scaling)
        features = job.features.apply(inputs, key(job.seed, "features", client))
        return features, truth("train", indices)


def _stack_models(objects: Objects, kind: str, numbers: Sequence[int], size: int) -> NDArray[np.float32]:
    """Small models of a kind by their numbers ``(n, P)``, of which some are mixtures.

    Clients of a block often mix the same models with different weights: the models are then stacked once. The
    sums equal those of :meth:`~rayfl.clients.jobs.Mixture.of`.
    """
    vectors, total = np.empty((len(numbers), size), np.float32), np.empty(size)
    stacks: dict[tuple[int, ...], NDArray[np.float32]] = {}
    for row, number in enumerate(numbers):
        model = objects[kind, number]
        if not isinstance(model, Mixture):
            vectors[row] = as_tensor(model).numpy()
            continue
        if model.models not in stacks:
            stacks[model.models] = np.stack([objects[kind, part] for part in model.models])
        total[:] = 0
        weighted_sum(np.array(model.weights), stacks[model.models], total)
        vectors[row] = total
    return vectors


def _failures_by_client(block: TrainedBlock, clients: NDArray[np.int64]) -> dict[int, str]:
    """The failures of a block by client id."""
    return {int(clients[row]): text for row, text in block.failures.items()}


def _trained_or_start(block: TrainedBlock, start: torch.Tensor) -> torch.Tensor:
    """The trained models ``(B, P)``; for clients that failed, the models that they started from."""
    if not block.failures:
        return block.rows
    rows, failed = block.rows.clone(), list(block.failures)
    rows[failed] = start[failed].to(rows.device)
    return rows


_SHORT_STATE = 1 << 14
"""Copying this many numbers takes as long as a call: longer states are not copied twice to save calls."""

_KEPT_BYTES = 1 << 26
"""Bytes of samples that are kept while models are tested on the same ones."""

_ORDER_BATCH = 512
"""Samples in a forward pass for the order of samples."""

_SUM_VALUES = 1 << 18
"""Values summed in one call: many small models at a time, large models one by one."""


def partial_product(
    weights: NDArray[np.float64], rows: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[NDArray[np.float64], Weight]:
    """``sum_j a_j w_j`` in float64, in the order of the rows, and ``sum_j a_j``.

    Args:
        weights: ``(B,)``.
        rows: ``(B, S)`` float32.
        kept: 1 for the parameters that take part, 0 for the others, ``(B, S)``; None for all. If given, the
            result has one weight per parameter.
    """
    # Rows of failed clients may contain NaN: they are dropped, since 0 * NaN is NaN.
    nonzero = np.flatnonzero(weights)
    if len(nonzero) < len(rows):
        positions = torch.from_numpy(nonzero).to(rows.device)
        rows, weights, kept = rows[positions], weights[nonzero], None if kept is None else kept[positions]
    if kept is None:
        return _weighted_sum(weights, rows).cpu().numpy(), float(weights.sum())
    size = rows.shape[1]
    width = max(1, size if on_gpu(rows) else PIECE // max(1, len(rows)))
    totals, shares = [], []
    for start in range(0, max(1, size), width):  # products of a few columns at a time stay in the cache
        kept_columns = kept[:, start : start + width]
        totals.append(_weighted_sum(weights, rows[:, start : start + width] * kept_columns))
        shares.append(_weighted_sum(weights, kept_columns))
    return torch.cat(totals).cpu().numpy(), torch.cat(shares).cpu().numpy()


def _weighted_sum(weights: NDArray[np.float64], rows: torch.Tensor) -> torch.Tensor:
    if not on_gpu(rows):
        total = np.zeros(rows.shape[1])
        weighted_sum(weights, rows.contiguous().numpy(), total)
        return torch.from_numpy(total)
    sums = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    factors = torch.from_numpy(weights).to(rows.device)[:, None]
    rows_at_once = max(1, _SUM_VALUES // max(1, rows.shape[1]))
    for start in range(0, len(rows), rows_at_once):
        part = slice(start, start + rows_at_once)
        sums += (rows[part].to(torch.float64) * factors[part]).sum(0)
    return sums


def _minus_start(rows: torch.Tensor, start: torch.Tensor, n: int) -> torch.Tensor:
    """Models ``(B, P)`` minus the models that they started from, in the first n numbers; the others are
    unchanged.
    """
    updates = rows.clone()
    updates[:, :n] -= start[:, :n]
    return updates


def _overlay(rows: torch.Tensor, layout: StateLayout, states: torch.Tensor, fresh: NDArray[np.bool_]) -> None:
    """Copy the clients' personal layers into their models, in place, if they have any."""
    values = layout.own_layers(states)
    if not layout.layers:
        return
    if not fresh.any():
        scatter_(rows, layout.layers, values)
        return
    for row in np.flatnonzero(~fresh).tolist():
        scatter_(rows[row], layout.layers, values[row])


def _client_state(objects: Objects, state: tuple[int, int]) -> torch.Tensor:
    """A client's state ``(S,)``."""
    number, row = state
    return as_tensor(objects["state", number][row])


@dataclass(frozen=True)
class _Sent:
    """What the clients of a block send.

    Attributes:
        values: the shared parameters of their models ``(B, S)``.
        kept: 1 for the parameters that take part, 0 for the others ``(B, S)``; None for all.
        vectors: what they add to the server's vector ``(B, Q)``, if there is one.
        delivered: 1 for each client that delivered its model, 0 for one that failed ``(B,)``.
    """

    values: torch.Tensor
    kept: torch.Tensor | None
    vectors: torch.Tensor | None
    delivered: NDArray[np.float64]


def _row_weights(mixing: BlockMixing, index: int, delivered: NDArray[np.float64]) -> tuple[float, float]:
    """The weight of the clients that delivered in the row at ``index``, and the weight of the old model."""
    weights, keep = mixing.weights[index] * delivered, 0.0
    if mixing.keep is not None:
        keep = float((mixing.keep[index] * delivered).sum())
    return float(weights[weights != 0].sum()), keep


def _row_partial(mixing: BlockMixing, index: int, sent: _Sent, statistics: int) -> Partial:
    """The part of the row at ``index`` of a block's part of A; ``statistics`` entries at the end are
    running statistics.
    """
    weights = mixing.weights[index] * sent.delivered
    weight, keep = _row_weights(mixing, index, sent.delivered)
    single = len(weights) == 1 and sent.kept is None and not (mixing.keep is not None and statistics)
    if single and sent.vectors is None:
        total = sent.values[0].cpu().numpy() if weight else np.zeros(1)  # a failed row may contain NaN
        return Partial(total, weight, keep, statistics=statistics, factor=weight)
    total, total_weight = partial_product(weights, sent.values, sent.kept)
    if mixing.keep is not None and statistics:
        statistic_values = sent.values[:, -statistics:]
        both_weights = weights + mixing.keep[index] * sent.delivered
        total[-statistics:], _ = partial_product(both_weights, statistic_values)
    if sent.vectors is None:
        return Partial(total, total_weight, keep, statistics=statistics)
    sums, _ = partial_product((weights > 0).astype(np.float64), sent.vectors)
    return Partial(total, total_weight, keep, sums, statistics)


def _merge_phases(block: TrainedBlock, phases: Sequence[TrainedBlock]) -> TrainedBlock:
    """Merge the phases of clients that trained several times: the first failure, and the steps of all."""
    if len(phases) < 2:
        return block
    failures = {row: text for phase in reversed(phases) for row, text in phase.failures.items()}
    return replace(block, failures=failures, steps=np.sum([phase.steps for phase in phases], axis=0))


def _sum_per_sample(values: torch.Tensor) -> torch.Tensor:
    """The sum over the predictions of each sample: ``(n,)`` or ``(n, L)`` to ``(n,)``."""
    return values.reshape(len(values), -1).sum(1)


def _joined(parts: Sequence[torch.Tensor]) -> NDArray[Any]:
    """One array of parts ``(n, ...)``; a single one is not copied."""
    joined = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return joined.numpy()
