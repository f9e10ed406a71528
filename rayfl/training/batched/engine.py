"""The batched engine: several clients in one call, the SGD step fused into the backward pass."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.data import Ragged
from rayfl.models import ModelSpec
from rayfl.random import key, moment
from rayfl.training.batched.calls import clients_in_a_call, clients_in_the_cache
from rayfl.training.batched.compiled import CompiledForward, CompiledTraining
from rayfl.training.batched.graphs import RecordedSteps, Recorder, Unrecordable
from rayfl.training.batched.layers import Step
from rayfl.training.batched.network import BatchedNetwork, Network
from rayfl.training.batched.parameters import Sgd
from rayfl.training.batched.reading import Unsupported, read
from rayfl.training.batched.steps import StepPlan
from rayfl.training.batches import Batches
from rayfl.training.device import out_of_memory
from rayfl.training.forward import Forward
from rayfl.training.precision import Precision
from rayfl.training.work import NO_TERMS, Indices, LocalWork, Terms, TrainedBlock, Visits, check_diverged

_PLAN_ENTRIES = 1 << 23
"""Places of samples in the plan of one call, which is as long as its largest client trains: 170 MB."""


def _plan_width(
    work: LocalWork, sizes: NDArray[np.int64], visits: Sequence[Visits] | NDArray[np.intp] | None
) -> int:
    """Places that a client has in a plan for each of its steps."""
    if visits is None:  # as wide as the data, not as the batch size
        return min(work.batch_size, int(sizes.max(initial=1))) * work.batches_a_step * work.epochs
    if isinstance(visits, np.ndarray):
        return int(visits.shape[-1])
    return max((len(batch) for batches in visits for batch in batches), default=1)


class BatchedEngine:
    """Trains the clients of a block together; equal to the plain loop up to rounding.

    Args:
        spec: the model and its flat layout.
        batches: where samples come from.
        seed: the run's seed.
        network: takes the steps of many clients; None for a :class:`.BatchedNetwork`.
        clients_per_call: how many train together; None chooses by the size of the model and of the other
            vectors that a step reads and writes.
        precision: the requested one; a given ``network`` decides how it computes.

    Attributes:
        recorded: recordings of steps; None if all steps are run from Python.
        compiled: trains the work that it covers in one call; None if it does not support the network, or on
            a GPU.
        forward: computes the outputs of models for tests.

    Raises:
        Unsupported: for models that the batched layers do not cover, and for reduced precision with these.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batches: Batches,
        seed: int,
        network: Network | None = None,
        clients_per_call: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        self.spec, self.batches, self.seed = spec, batches, seed
        self.network = network or BatchedNetwork(spec)
        if network is None and precision != "float32":
            raise Unsupported("its kernels, which are faster for small networks, compute in float32")
        self.module = spec.build().to(batches.device)
        self.clients_per_call = clients_per_call or clients_in_a_call(spec.P, batches.device.type)
        self._bounded_by_cache = clients_per_call is None and batches.device.type == "cpu" and network is None
        self.recorded: RecordedSteps | None = None
        self.compiled: CompiledTraining | None = None
        compiled_forward: CompiledForward | None = None
        if network is None and batches.device.type == "cpu":
            assert isinstance(self.network, BatchedNetwork)
            with suppress(Unsupported):
                compiled_forward = CompiledForward(spec, read(spec, training=False))
            with suppress(Unsupported):
                self.compiled = CompiledTraining(spec, self.network.reading)
        self.forward = Forward(spec, self.module, compiled_forward)

    def record(self, recorder: Recorder) -> None:
        """From now on, record each kind of step that recurs, and replay it."""
        self.recorded, self.compiled = RecordedSteps(recorder, self.batches.device), None

    def one_by_one(self, clients: int) -> bool:
        """Whether models are so large that a call trains one client."""
        return self.clients_per_call == 1

    def train(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Indices,
        start: torch.Tensor,
        terms: Terms = NO_TERMS,
    ) -> TrainedBlock:
        """Train every client of a block from its row of ``start`` ``(B, P)``; see
        :meth:`LoopEngine.train`.
        """
        terms.check(start)
        self.spec.frozen(work.frozen)  # raises here: an invalid setting is not the failure of a client
        if terms.guides is not None:
            terms.guides.check(self.module)
        device_terms = replace(
            terms,
            offset=None if terms.offset is None else terms.offset.to(start),
            mask=None if terms.mask is None else (terms.mask != 0).to(start),
            guides=None if terms.guides is None else terms.guides.to(start),
        )
        snapshots = start.clone(memory_format=torch.contiguous_format) if work.snapshot_epoch else None
        rows = torch.empty_like(start, memory_format=torch.contiguous_format)
        result = TrainedBlock(rows, np.zeros(len(clients)), np.zeros(len(clients), np.int64), {}, snapshots)
        samples = indices if isinstance(indices, Ragged) else Ragged.of(indices)
        block = _Block(work, round, np.asarray(clients), samples, start, device_terms, result)
        if terms.visits is None:
            steps = work.steps_an_epoch(samples.sizes)
        elif isinstance(terms.visits, np.ndarray):
            steps = np.full(len(terms.visits), terms.visits.shape[1], np.int64)
        else:
            steps = np.array([len(visits) for visits in terms.visits], np.int64)
        # Those with the most steps first, so that at any step the clients still training are a prefix.
        ranking = np.argsort(-steps, kind="stable")
        entries = steps * _plan_width(work, samples.sizes, terms.visits)
        begin = 0
        while begin < len(clients):
            count = self._clients_in_call(block, len(clients) - begin)
            count = max(1, min(count, _PLAN_ENTRIES // max(1, int(entries[ranking[begin]]))))
            chunk = ranking[begin : begin + count]
            if self._attempt(block, chunk):
                begin += len(chunk)
        return result

    def _clients_in_call(self, block: _Block, remaining: int) -> int:
        """How many of the ``remaining`` clients the next call trains; does not depend on timings."""
        work, terms, clients = block.work, block.terms, self.clients_per_call
        own_target = bool(work.proximal) and (block.start.stride(0) != 0 or terms.mask is not None)
        vectors = 1.0 + own_target + (terms.offset is not None) + 0.25 * (terms.mask is not None)
        if vectors == 1 or not self._bounded_by_cache:
            return clients
        clients = min(clients, clients_in_the_cache(self.spec.P, vectors))
        return -(-remaining // -(-remaining // clients))  # about equally many in each call

    def _attempt(self, block: _Block, rows: NDArray[np.intp]) -> bool:
        """Train the clients at ``rows`` of the block; False: nothing has changed, and it must be tried again.

        If one client fails, its failure is recorded. If a call with several fails, each is trained alone to
        find out which of them fails.
        """
        unrecordable, no_memory, split = "", False, False
        try:
            self._train_chunk(block, rows)
        except Unrecordable as error:
            unrecordable = str(error)
        except Exception as error:
            if len(rows) == 1:
                self._note_failure(block, int(rows[0]))
            else:
                no_memory = out_of_memory(error)
                split = not no_memory
        # Not before the exception is gone: its traceback holds all tensors of the attempt.
        if no_memory:
            self._halve(len(rows))
        if unrecordable:
            self.recorded = None
            warnings.warn(f"training goes on without CUDA graphs: {unrecordable}", stacklevel=3)
        for row in rows if split else ():
            while not self._attempt(block, row[None]):
                pass
        return not (no_memory or unrecordable)

    def _note_failure(self, block: _Block, row: int) -> None:
        result = block.result
        result.failures[row] = traceback.format_exc()
        result.rows[row] = block.start[row]
        if result.snapshots is not None:
            result.snapshots[row] = result.rows[row]

    def _halve(self, clients: int) -> None:
        """This many clients did not fit the device's memory: from now on train half of them at a time."""
        self.clients_per_call = clients // 2
        self.network.release()
        if self.recorded is not None:
            self.recorded.release()
        if self.batches.device.type == "cuda":
            torch.cuda.empty_cache()

    def _train_chunk(self, block: _Block, rows: NDArray[np.intp]) -> None:
        """Train the clients at ``rows`` of the block; all succeed, or it raises."""
        work, terms, result = block.work, block.terms, block.result
        ids, samples = block.clients[rows], block.samples.take(rows)
        visits = terms.visits
        if visits is not None:
            visits = visits[rows] if isinstance(visits, np.ndarray) else [visits[r] for r in rows]
        plan = StepPlan(self.seed, block.round, ids, samples.sizes, work, visits)
        device_rows = torch.from_numpy(rows).to(result.rows.device)
        if self.compiled is not None and self.compiled.covers(work, terms, plan):
            self._train_in_one_call(self.compiled, block, ids, samples.values, plan, device_rows)
            return
        guides = None if terms.guides is None else terms.guides.take(device_rows)
        self.network.load(block.start, device_rows, Sgd.of(work), terms.offset, terms.mask, guides)
        means = self._train_by_steps(block, ids, samples.values, plan, device_rows)
        for mean, length in zip(means.tolist(), self.network.lengths().tolist(), strict=True):
            check_diverged(mean, length)
        if (np.diff(rows) == 1).all():
            self.network.store(result.rows[rows[0] : rows[-1] + 1])
        else:
            self.network.store(result.rows, device_rows)
        result.losses[rows], result.steps[rows] = means, plan.totals

    def _train_in_one_call(
        self,
        compiled: CompiledTraining,
        block: _Block,
        clients: NDArray[np.integer],
        samples: NDArray[np.integer],
        plan: StepPlan,
        device_rows: torch.Tensor,
    ) -> None:
        """As :meth:`_train_chunk`, in one compiled call."""
        result, terms, rows = block.result, block.terms, device_rows.numpy()
        adjacent = bool((np.diff(rows) == 1).all())
        models = (
            result.rows[rows[0] : rows[-1] + 1] if adjacent else result.rows.new_empty(len(rows), self.spec.P)
        )
        torch.index_select(block.start, 0, device_rows, out=models)
        offset, mask = (None if term is None else term[device_rows] for term in (terms.offset, terms.mask))
        alike = block.start.stride(0) == 0
        means, snapshots = compiled.train(
            plan,
            block.work,
            models,
            Terms(offset, mask),
            alike,
            self.batches.train(samples),
            self._generators(block, clients),
        )
        lengths = torch.linalg.vector_norm(models, dim=1)
        for mean, length in zip(means.tolist(), lengths.tolist(), strict=True):
            check_diverged(mean, length)
        if not adjacent:
            result.rows.index_copy_(0, device_rows, models)
        if result.snapshots is not None:
            has_snapshot = torch.from_numpy(plan.snapshots > 0)
            result.snapshots.index_copy_(0, device_rows[has_snapshot], snapshots[has_snapshot])
        result.losses[rows], result.steps[rows] = means, plan.totals

    def _generators(self, block: _Block, clients: NDArray[np.integer]) -> list[torch.Generator]:
        """Generators for dropout and the like, seeded by client and round as in the plain loop."""
        round_key, device = moment(block.round, block.work.phase), self.batches.device
        return [
            torch.Generator(device=device).manual_seed(key(self.seed, "train", *round_key, c) >> 1)
            for c in (clients.tolist() if self.network.draws else ())
        ]

    @torch.no_grad()
    def _train_by_steps(
        self,
        block: _Block,
        clients: NDArray[np.integer],
        samples: NDArray[np.integer],
        plan: StepPlan,
        device_rows: torch.Tensor,
    ) -> NDArray[np.float64]:
        """Train the C clients whose models the network holds; returns their mean losses ``(C,)``."""
        device, network, work = self.batches.device, self.network, block.work
        one_pass = plan.passes == 1  # then the samples are fetched in the order of the only step
        if one_pass:
            samples = samples[plan.places[0, : plan.active[0], : plan.widths[0]].reshape(-1)]
        x, y = self.batches.train(samples)
        generators = self._generators(block, clients)
        places, weights = torch.from_numpy(plan.places).to(device), torch.from_numpy(plan.weights).to(device)
        counts = torch.from_numpy(plan.counts).to(device)
        totals = torch.zeros(len(clients), dtype=torch.float64, device=device)
        per_step, changing = work.batches_a_step, bool(work.inner_lr or work.lr_alpha)
        snapshots = block.result.snapshots
        recorded = None if block.terms.guides is not None else self.recorded
        if recorded is not None:
            terms = block.terms.offset is not None, block.terms.mask is not None
            recorded.begin(network, (Sgd.of(work), terms), *plan.places.shape[1:], x, y)
        previous = len(clients)
        for t, (active, width, full) in enumerate(
            zip(plan.active.tolist(), plan.widths.tolist(), plan.full.tolist(), strict=True)
        ):
            if active != previous:
                network.narrow(active)
                previous = active
            ends_step = (t + 1) % per_step == 0
            rate = work.rate(t // per_step)
            if changing:
                network.prepare(rate, looking_ahead=not ends_step)
            rows = None if one_pass else places[t, :active, :width].reshape(-1)
            pass_weights, step = weights[t, :active, :width], Step(generators)
            if not full:
                step = Step(generators, counts[t, :active], plan.counts[t, :active].tolist())
            if recorded is not None:
                loss = recorded.step(network, (rate, ends_step), x, y, rows, pass_weights, step)
            else:
                inputs, targets = (
                    (x, y) if rows is None else (x.index_select(0, rows), y.index_select(0, rows))
                )
                loss = network.step(
                    inputs.view(active, width, *x.shape[1:]),
                    targets.view(active, width, *y.shape[1:]),
                    pass_weights,
                    step,
                )
            if ends_step:
                totals[:active].addcmul_(loss, counts[t, :active])
                due = () if snapshots is None else np.flatnonzero(plan.snapshots == (t + 1) // per_step)
                if snapshots is not None and len(due):
                    which = torch.from_numpy(due).to(device)
                    network.store(snapshots, device_rows[which], which)
        means: NDArray[np.float64] = totals.cpu().numpy() / np.maximum(1, plan.seen)
        return means


@dataclass(frozen=True)
class _Block:
    """What :meth:`BatchedEngine.train` was called with, its terms on the device, and the growing result."""

    work: LocalWork
    round: int
    clients: NDArray[np.integer]
    samples: Ragged
    start: torch.Tensor
    terms: Terms
    result: TrainedBlock
