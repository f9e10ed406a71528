"""The baseline of the benchmarks: FedAvg as a competent user would write it in plain PyTorch, in two
processes with one thread each.

It uses nothing of rayfl's engines or runtime, only modules, ``torch.optim.SGD``, state dicts and pipes.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rayfl.training.device import products_in_float32

State = dict[str, Tensor]
Reader = Callable[[int], tuple[Tensor, Tensor]]
"""Maps a client's number to its inputs and targets."""


class Plain(Protocol):
    """What the plain loop trains; it is pickled and sent to the worker processes."""

    @property
    def clients(self) -> int:
        """N."""

    @property
    def cohort(self) -> int:
        """Clients per round."""

    @property
    def training(self) -> Mapping[str, Any]:
        """``epochs``, ``batch_size``, ``lr``, and perhaps ``momentum`` and ``weight_decay``."""

    def network(self) -> nn.Module:
        """The network, freshly initialised."""

    def reader(self) -> Reader:
        """Read the data; called in a worker process."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch, a scalar: outputs ``(B, C)``, targets ``(B,)``."""


def train_client(plain: Plain, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """E epochs of SGD on the client's samples ``(n, ...)`` and targets ``(n,)``."""
    training = plain.training
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=training["lr"],
        momentum=training.get("momentum", 0.0),
        weight_decay=training.get("weight_decay", 0.0),
    )
    for _ in range(training["epochs"]):
        for batch in torch.randperm(len(x)).split(training["batch_size"]):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            plain.loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _work(plain: Plain, pipe: Connection, device: str = "cpu") -> None:
    """A worker process: trains the clients that it receives and returns the sums of n_i w_i and of n_i."""
    torch.set_num_threads(1)
    products_in_float32()  # as in rayfl; on a GPU, PyTorch's default may be other arithmetic
    read, model = plain.reader(), plain.network().to(device)
    model.train()
    pipe.send("ready")
    while True:
        message = pipe.recv()
        if message is None:
            return
        state, clients = message
        state = {name: value.to(device) for name, value in state.items()}
        total: State = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in state.items()}
        samples = 0
        for client in clients:
            x, y = (tensor.to(device) for tensor in read(client))
            model.load_state_dict(state)
            train_client(plain, model, x, y)
            for name, value in model.state_dict().items():
                total[name].add_(value, alpha=len(x))
            samples += len(x)
        pipe.send(({name: value.cpu() for name, value in total.items()}, samples))


class NaiveFedAvg:
    """FedAvg over worker processes.

    Args:
        plain: what to train.
        processes: how many processes, with one thread each.
        device: where they train.
    """

    def __init__(self, plain: Plain, processes: int = 2, device: str = "cpu") -> None:
        self.plain = plain
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(processes):
            our_end, worker_end = context.Pipe()
            process = context.Process(target=_work, args=(plain, worker_end, device), daemon=True)
            process.start()
            self._pipes.append(our_end)
            self._processes.append(process)
        torch.manual_seed(0)
        self.state: State = plain.network().state_dict()
        for pipe in self._pipes:
            pipe.recv()

    def round(self) -> float:
        """Run one round; returns its seconds."""
        start_time = time.perf_counter()
        cohort = torch.randperm(self.plain.clients)[: self.plain.cohort].tolist()
        for k, pipe in enumerate(self._pipes):
            pipe.send((self.state, cohort[k :: len(self._pipes)]))
        totals, samples = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        self.state = {
            name: (sum(total[name] for total in totals) / sum(samples)).to(value.dtype)
            for name, value in self.state.items()
        }
        return time.perf_counter() - start_time

    def close(self) -> None:
        """Stop the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
