"""The batched engine: several clients in one call, the SGD step fused into the backward pass."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rayfl.models import ModelSpec
from rayfl.random import key
from rayfl.training.batched.layers import Step
from rayfl.training.batched.network import BatchedNetwork, Network
from rayfl.training.batched.parameters import Sgd
from rayfl.training.batched.steps import StepPlan
from rayfl.training.batches import Batches
from rayfl.training.work import LocalWork, TrainedBlock, check_finite

CACHE_BYTES, MEMORY_BYTES = 1 << 22, 1 << 26
"""Models that train together should fit in a core's share of the cache; but eight at least share the cost of
the calls, as long as they are not too large."""


class BatchedEngine:
    """Trains the clients of a block together; equal to the plain loop up to rounding.

    Args:
        spec: the model and its flat layout.
        batches: where samples come from.
        seed: the run's seed.
        network: how a step of many clients is taken.
        clients_per_call: how many train together; None chooses by the size of the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batches: Batches,
        seed: int,
        network: Network | None = None,
        clients_per_call: int | None = None,
    ) -> None:
        self.spec, self.batches, self.seed = spec, batches, seed
        self.network = network or BatchedNetwork(spec)
        self.module = spec.build().to(batches.device)
        size = 4 * max(1, spec.P)
        least, most = max(1, min(8, MEMORY_BYTES // size)), 256
        self.clients_per_call = clients_per_call or max(least, min(most, CACHE_BYTES // size))

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
        plan = StepPlan(self.seed, round, ids, np.array([len(indices[r]) for r in rows]), work)
        where = torch.from_numpy(rows).to(start.device)
        self.network.load(start, where, Sgd(work.lr, work.momentum, work.weight_decay))
        means = self._together(round, ids, [indices[r] for r in rows], plan)
        for mean, finite in zip(means.tolist(), self.network.finite(), strict=True):
            check_finite(mean, finite)
        self.network.store(start, where)
        losses[rows], steps[rows] = means, plan.totals

    @torch.no_grad()
    def _together(
        self,
        round: int,
        clients: Sequence[int],
        indices: Sequence[NDArray[np.integer]],
        plan: StepPlan,
    ) -> NDArray[np.float64]:
        """Train the C clients whose models the network holds; their mean losses ``(C,)``."""
        device, network = self.batches.device, self.network
        x, y = self.batches.train(np.concatenate(indices))
        # What dropout and the like draw is keyed per client and round, as in the plain loop.
        generators = [
            torch.Generator(device=device).manual_seed(key(self.seed, "train", round, c) >> 1)
            for c in (clients if network.draws else ())
        ]
        places, weights = torch.from_numpy(plan.places).to(device), torch.from_numpy(plan.weights).to(device)
        counts = torch.from_numpy(plan.counts).to(device)
        totals = torch.zeros(len(clients), dtype=torch.float64, device=device)
        before = len(clients)
        for t, (now, width, full) in enumerate(
            zip(plan.active.tolist(), plan.widths.tolist(), plan.full.tolist(), strict=True)
        ):
            if now != before:
                network.narrow(now)
                before = now
            at = places[t, :now, :width].reshape(-1)
            step = (
                Step(generators) if full else Step(generators, counts[t, :now], plan.counts[t, :now].tolist())
            )
            loss = network.step(
                x.index_select(0, at).view(now, width, *x.shape[1:]),
                y.index_select(0, at).view(now, width),
                weights[t, :now, :width],
                step,
            )
            totals[:now].addcmul_(loss, counts[t, :now])
        means: NDArray[np.float64] = totals.cpu().numpy() / np.maximum(1, plan.seen)
        return means
