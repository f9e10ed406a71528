"""The plain loop: one client after another, one optimizer step after another.

It is the oracle that faster engines are tested against: nothing here is clever.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from rayfl.models import ModelSpec
from rayfl.random import key, orders
from rayfl.training.batches import Batches
from rayfl.training.work import LocalWork, TrainedBlock, check_finite


class LoopEngine:
    """Trains a block of clients with a plain PyTorch loop.

    Args:
        spec: the model and its flat layout.
        batches: where samples come from.
        seed: the run's seed.
    """

    def __init__(self, spec: ModelSpec, batches: Batches, seed: int) -> None:
        self.spec, self.batches, self.seed = spec, batches, seed
        self.module = spec.build().to(batches.device)

    def train(
        self,
        work: LocalWork,
        round: int,
        clients: Sequence[int],
        indices: Sequence[NDArray[np.integer]],
        start: torch.Tensor,
    ) -> TrainedBlock:
        """Train every client of a block from its row of ``start``.

        Args:
            work: what to do.
            round: the round (0-based): part of the key of all randomness.
            clients: ids of the B clients.
            indices: each client's training samples.
            start: start models ``(B, P)`` float32; overwritten with the trained models.
        """
        losses, steps = np.zeros(len(clients)), np.zeros(len(clients), np.int64)
        failures: dict[int, str] = {}
        shuffled = orders(self.seed, round, clients, [len(i) for i in indices], work.epochs)
        for row, client in enumerate(clients):
            try:
                # Dropout and the like draw from torch's generator: keyed per client and round.
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(key(self.seed, "train", round, client) >> 1)
                    losses[row], steps[row] = self._client(work, indices[row], shuffled[row], start[row])
            except Exception:
                failures[row] = traceback.format_exc()
        return TrainedBlock(start, losses, steps, failures)

    def _client(
        self, work: LocalWork, indices: NDArray[np.integer], order: NDArray[np.intp], vector: torch.Tensor
    ) -> tuple[float, int]:
        """Train one client in place; mean loss over its samples and epochs, and number of steps."""
        x, y = self.batches.train(indices)
        module = self.module.train()
        self.spec.load(module, vector)
        parameters = list(module.parameters())
        velocity: list[torch.Tensor | None] = [None] * len(parameters)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        steps = 0
        for epoch in torch.from_numpy(order).to(x.device):
            for batch in epoch.split(work.batch_size):
                loss = functional.cross_entropy(module(x[batch]), y[batch])
                gradients = torch.autograd.grad(loss, parameters)
                sgd_step(parameters, gradients, velocity, work)
                total += loss.detach() * len(batch)
                steps += 1
        mean = float(total) / max(1, order.size)
        check_finite(mean, all(bool(torch.isfinite(t).all()) for t in (*parameters, *module.buffers())))
        self.spec.store(module, vector)
        return mean, steps


@torch.no_grad()
def sgd_step(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor],
    velocity: list[torch.Tensor | None],
    work: LocalWork,
) -> None:
    """One step of SGD as ``torch.optim.SGD`` defines it: ``v = mu v + g + lambda w``, ``w -= eta v``.

    Written out because the first ``torch.optim.SGD`` of a process imports a compiler for 1.6 s.
    """
    for k, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
        if work.weight_decay:
            g = g.add(p, alpha=work.weight_decay)
        if work.momentum:
            previous = velocity[k]
            g = g.clone() if previous is None else previous.mul_(work.momentum).add_(g)
            velocity[k] = g
        p.add_(g, alpha=-work.lr)
