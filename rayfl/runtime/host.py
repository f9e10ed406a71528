"""What runs inside a client actor (or in this process, inline): the clients' side of every phase."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from rayfl.data import Federation
from rayfl.random import key
from rayfl.runtime.jobs import EvalJob, EvalReport, HostSpec, SignJob, TrainJob, TrainReport
from rayfl.runtime.lps import Partial
from rayfl.training import ENGINES, Batches, Engine, gather, raw_features, scatter_
from rayfl.training.work import complement


class ClientHost:
    """Hosts any number of clients: everything it keeps is its model, its engine and the shared data.

    Args:
        federation: the data; arrays are read where they lie.
        host: what to run.
    """

    def __init__(self, federation: Federation, host: HostSpec) -> None:
        self.federation, self.host, self.spec = federation, host, host.spec
        device = torch.device(
            host.device if host.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        )
        if device.type == "cuda" and 0 < host.gpu_fraction < 1:
            torch.cuda.set_per_process_memory_fraction(host.gpu_fraction)
        self.batches = Batches(federation.samples, device)
        self.engine: Engine = ENGINES[host.engine](self.spec, self.batches, host.seed)

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def train(self, job: TrainJob, *objects: NDArray[np.float32]) -> Any:
        """Train a block: a report, then one :class:`Partial` a row of A, then the client states if any."""
        begun = time.perf_counter()
        work, device = job.work, self.batches.device
        starts = torch.stack([_tensor(objects[at]) for at in range(int(job.start.max()) + 1)])
        rows = starts.to(device)[torch.from_numpy(job.start).to(device)]
        for row, state in enumerate(job.states):
            if state is not None:
                scatter_(rows[row], work.personal, _tensor(objects[state[0]][state[1]]).to(device))
        indices = [self.federation.train[int(c)] for c in job.clients]
        block = self.engine.train(work, job.round, job.clients.tolist(), indices, rows)

        delivered = np.ones(len(job.clients))
        delivered[list(block.failures)] = 0.0
        shared = complement(work.personal, self.spec.P)
        values = block.rows if not work.personal else gather(block.rows, shared)
        partials = [partial_product(weights * delivered, values) for weights in job.weights]
        failures = {int(job.clients[row]): text for row, text in block.failures.items()}
        report = TrainReport(block.losses, block.steps, failures, time.perf_counter() - begun, os.getpid())
        own = [gather(block.rows, work.personal).cpu().numpy()] if work.personal else []
        answer = [report, *partials, *own]
        return answer if len(answer) > 1 else report

    def evaluate(self, job: EvalJob, *objects: NDArray[np.float32]) -> EvalReport:
        """Forward passes over test samples."""
        report = EvalReport()
        module = self.engine.module.eval()
        for item in job.items:
            vector = _tensor(objects[item.model])
            if item.state is not None:
                vector = vector.clone()
                scatter_(vector, job.personal, _tensor(objects[item.state[0]][item.state[1]]))
            self.spec.load(module, vector)
            correct, losses = [], []
            with torch.inference_mode():
                for start in range(0, len(item.samples), job.batch_size):
                    x, y = self.batches.test(item.samples[start : start + job.batch_size])
                    logits = module(x)
                    correct.append((logits.argmax(1) == y).cpu())
                    losses.append(functional.cross_entropy(logits, y, reduction="none").cpu())
            report.correct.append(torch.cat(correct).numpy())
            report.loss.append(torch.cat(losses).numpy())
        return report

    def sign(self, job: SignJob) -> tuple[int, list[NDArray[np.float32]]]:
        """The signatures of a block of clients, after how many numbers they send."""
        signatures = [
            job.signature.compute(*self._features(client, job), key(job.seed, "signature", client))
            for client in job.clients.tolist()
        ]
        return sum(job.signature.floats(s) for s in signatures), signatures

    def relate(self, job: SignJob, *blocks: list[NDArray[np.float32]]) -> tuple[int, NDArray[np.float64]]:
        """The second step of an exchange: one row ``r(i, .)`` for every client i of the block, ``(B, N)``."""
        everyone = [signature for block in blocks for signature in block]
        rows = np.stack(
            [
                job.signature.relate(self._features(client, job)[0], everyone[client], everyone)
                for client in job.clients.tolist()
            ]
        )
        return rows.size, rows

    def apply(self, function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
        """Call a plain function here; its result comes second, so that it may stay in the object store."""
        return None, function(*args)

    def _features(self, client: int, job: SignJob) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        samples, indices = self.federation.samples, self.federation.train[client]
        inputs = raw_features(samples.inputs("train", indices))
        return job.features.apply(inputs), samples.labels("train", indices)


_TOGETHER = 1 << 18
"""Numbers that are summed in one call: small models many at a time, large ones one by one."""


def partial_product(weights: NDArray[np.float64], rows: torch.Tensor) -> Partial:
    """``sum_j a_j w_j`` in float64, in the order of the rows, and ``sum_j a_j``.

    Args:
        weights: ``(B,)``.
        rows: ``(B, S)`` float32.
    """
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    # A client that failed may hold anything, NaN too: it is left out, not multiplied by zero.
    kept = np.flatnonzero(weights)
    if len(kept) < len(rows):
        rows, weights = rows[torch.from_numpy(kept).to(rows.device)], weights[kept]
    together = _TOGETHER // max(1, rows.shape[1])
    if together < 2:
        for weight, row in zip(weights.tolist(), rows, strict=True):
            total.add_(row, alpha=weight)
    else:
        factors = torch.from_numpy(weights).to(rows.device)[:, None]
        for start in range(0, len(rows), together):
            part = slice(start, start + together)
            total += (rows[part].to(torch.float64) * factors[part]).sum(0)
    return Partial(total.cpu().numpy(), float(weights.sum()))


def _tensor(array: NDArray[np.float32]) -> torch.Tensor:
    """A tensor over the array's memory. Arrays of the object store are read-only, and nobody writes here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
