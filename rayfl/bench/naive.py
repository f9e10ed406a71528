"""The yardstick: FedAvg as a competent user would write it in plain PyTorch, in two processes of one thread.

Nothing of rayfl's engine or runtime is used: modules, ``torch.optim.SGD``, state dicts, pipes.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rayfl.bench.workloads import Workload

State = dict[str, torch.Tensor]


def build_model(workload: Workload) -> nn.Module:
    """The workload's network, written out."""
    if workload.model["name"] == "mlp":
        inputs = workload.shape[0] * workload.shape[1] * workload.shape[2]
        hidden = workload.model["hidden"][0]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, workload.classes)
        )
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, workload.classes),
    )


def train_client(model: nn.Module, x: torch.Tensor, y: torch.Tensor, training: dict[str, Any]) -> None:
    """E epochs of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=training["lr"], momentum=training.get("momentum", 0.0))
    for _ in range(training["epochs"]):
        for batch in torch.randperm(len(x)).split(training["batch_size"]):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            functional.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _work(workload: Workload, pipe: Connection) -> None:
    """A worker process: trains the clients it is told and returns the sum of their models."""
    torch.set_num_threads(1)
    pixels, labels = workload.arrays()
    x = torch.from_numpy(pixels).float().div_(255).sub_(0.5).div_(0.29)
    y = torch.from_numpy(labels)
    model = build_model(workload)
    model.train()
    pipe.send("ready")
    while True:
        message = pipe.recv()
        if message is None:
            return
        state, clients = message
        total: State = {name: torch.zeros_like(value) for name, value in state.items()}
        for client in clients:
            model.load_state_dict(state)
            mine = slice(client * workload.samples, (client + 1) * workload.samples)
            train_client(model, x[mine], y[mine], workload.training)
            for name, value in model.state_dict().items():
                total[name] += value
        pipe.send(total)


class NaiveFedAvg:
    """FedAvg over worker processes.

    Args:
        workload: what to run.
        processes: how many, of one thread each.
    """

    def __init__(self, workload: Workload, processes: int = 2) -> None:
        self.workload = workload
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(workload, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()
        torch.manual_seed(0)
        self.state: State = build_model(workload).state_dict()

    def round(self) -> float:
        """One round; its seconds."""
        begun = time.perf_counter()
        cohort = torch.randperm(self.workload.clients)[: self.workload.cohort].tolist()
        for k, pipe in enumerate(self._pipes):
            pipe.send((self.state, cohort[k :: len(self._pipes)]))
        totals = [pipe.recv() for pipe in self._pipes]
        self.state = {n: sum(total[n] for total in totals) / len(cohort) for n in self.state}
        return time.perf_counter() - begun

    def close(self) -> None:
        """Stop the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
