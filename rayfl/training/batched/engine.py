"""The batched engine: several clients in one call, the SGD step fused into the backward pass."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.models import ModelSpec
from rayfl.random import key, orders
from rayfl.training.batched.layers import Step
from rayfl.training.batched.network import BatchedNetwork
from rayfl.training.batched.parameters import Sgd
from rayfl.training.batches import Batches
from rayfl.training.work import LocalWork, TrainedBlock, check_finite

CACHE_BYTES = 1 << 20
"""Models that train together should fit in a core's cache; four at least, to share the cost of the calls."""


class BatchedEngine:
    """Trains the clients of a block together; equal to the plain loop up to rounding.

    Args:
        spec: the model and its flat layout.
        batches: where samples come from.
        seed: the run's seed.
        clients_per_call: how many train together; None chooses by the cache (all on a GPU).

    Raises:
        Unsupported: if a layer of the model has no batched twin.
    """

    def __init__(
        self, spec: ModelSpec, batches: Batches, seed: int, clients_per_call: int | None = None
    ) -> None:
        self.spec, self.batches, self.seed = spec, batches, seed
        self.network = BatchedNetwork(spec)
        self.module = spec.build().to(batches.device)
        fitting = CACHE_BYTES // (4 * max(1, spec.P))
        self.clients_per_call = clients_per_call or max(4, min(256, fitting))

    def train(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Sequence[NDArray[np.integer]],
        start: torch.Tensor,
    ) -> TrainedBlock:
        """Train every client of a block from its row of ``start``; see :meth:`LoopEngine.train`."""
        losses, steps = np.zeros(len(clients)), np.zeros(len(clients), np.int64)
        failures: dict[int, str] = {}
        sizes = np.array([len(i) for i in indices])
        per_epoch = -(-sizes // work.batch_size)
        # Those with the most steps first, so that at any step the clients still training are a prefix.
        ranking = np.argsort(-per_epoch, kind="stable")
        for begin in range(0, len(clients), self.clients_per_call):
            rows = ranking[begin : begin + self.clients_per_call]
            try:
                self._chunk(work, round, clients, indices, start, rows, losses, steps)
            except Exception:
                # Whose fault was it? Train them one by one; nothing of ``start`` has changed.
                for row in rows:
                    try:
                        self._chunk(work, round, clients, indices, start, row[None], losses, steps)
                    except Exception:
                        failures[int(row)] = traceback.format_exc()
        return TrainedBlock(start, losses, steps, failures)

    def _chunk(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Sequence[NDArray[np.integer]],
        start: torch.Tensor,
        rows: NDArray[np.intp],
        losses: NDArray[np.float64],
        steps: NDArray[np.int64],
    ) -> None:
        """Train the clients at ``rows`` of the block; all succeed, or it raises and changes nothing."""
        ids = [clients[r] for r in rows]
        plan = _StepPlan(self.seed, round, ids, np.array([len(indices[r]) for r in rows]), work)
        where = torch.from_numpy(rows).to(start.device)
        models = start.index_select(0, where)
        means = self._together(work, round, ids, [indices[r] for r in rows], models, plan)
        finite = torch.isfinite(models).all(1).tolist()
        for mean, whole in zip(means.tolist(), finite, strict=True):
            check_finite(mean, whole)
        start.index_copy_(0, where, models)
        losses[rows], steps[rows] = means, plan.totals

    @torch.no_grad()
    def _together(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Sequence[NDArray[np.integer]],
        models: torch.Tensor,
        plan: _StepPlan,
    ) -> NDArray[np.float64]:
        """Train C clients in place; their mean losses ``(C,)``."""
        device = self.batches.device
        x, y = self.batches.train(np.concatenate(indices))
        generators = [
            torch.Generator(device=device).manual_seed(key(self.seed, "train", round, c) >> 1)
            for c in clients
        ]
        self.network.load(models, Sgd(work.lr, work.momentum, work.weight_decay))
        places = torch.from_numpy(plan.places).to(device)
        weights = torch.from_numpy(plan.weights).to(device)
        totals = torch.zeros(len(clients), dtype=torch.float64, device=device)
        active = len(clients)
        for t in range(plan.steps):
            now = int(plan.active[t])
            if now != active:
                self.network.narrow(now)
                active = now
            width = int(plan.widths[t])
            at = places[t, :now, :width]
            flat = at.reshape(-1)
            counts = plan.counts[t, :now]
            full = bool((counts == width).all())
            step = Step(
                None if full else torch.from_numpy(counts).to(device),
                generators,
                None if full else counts.tolist(),
            )
            loss = self.network.step(
                x.index_select(0, flat).view(now, width, *x.shape[1:]),
                y.index_select(0, flat).view(now, width),
                weights[t, :now, :width],
                step,
            )
            totals[:now] += loss * torch.from_numpy(counts).to(device)
        self.network.store(models)
        means: NDArray[np.float64] = totals.cpu().numpy() / np.maximum(1, plan.seen)
        return means


class _StepPlan:
    """Which samples each of C clients visits in each step, for clients sorted by falling number of steps.

    Attributes:
        steps: T, of the client with the most.
        totals: steps of each client ``(C,)``.
        active: clients that still train in each step ``(T,)``: a prefix.
        counts: samples of each client in each step ``(T, C)``.
        widths: the most samples of any client in each step ``(T,)``.
        places: rows of the chunk's samples ``(T, C, B)``; 0 for padding.
        weights: ``1 / count`` for samples, 0 for padding, ``(T, C, B)`` float32.
        seen: samples visited by each client over all epochs ``(C,)``.
    """

    def __init__(
        self, seed: int, round: int, clients: Sequence[int], sizes: NDArray[np.int64], work: LocalWork
    ) -> None:
        batch = work.batch_size
        per_epoch = -(-sizes // batch)
        self.totals = per_epoch * work.epochs
        self.steps = int(self.totals.max(initial=0))
        shape = (self.steps, len(clients))
        width = int(min(batch, sizes.max(initial=1)))
        self.counts = np.zeros(shape, np.int64)
        self.places = np.zeros((*shape, width), np.int64)
        firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        shuffled = orders(seed, round, clients, sizes.tolist(), work.epochs)
        for c, order in enumerate(shuffled):
            n, s = int(sizes[c]), int(per_epoch[c])
            if n == 0:
                continue
            padded = np.zeros((work.epochs, s * batch), np.int64)
            padded[:, :n] = order + firsts[c]
            self.places[: s * work.epochs, c] = padded.reshape(work.epochs * s, batch)[:, :width]
            ends = np.full(s, batch)
            ends[-1] = n - (s - 1) * batch
            self.counts[: s * work.epochs, c] = np.tile(ends, work.epochs)
        self.widths = self.counts.max(axis=1, initial=0)
        self.active = (self.counts > 0).sum(axis=1)
        valid = np.arange(width)[None, None, :] < self.counts[:, :, None]
        self.weights = (valid / np.maximum(1, self.counts)[:, :, None]).astype(np.float32)
        self.seen = sizes * work.epochs
