"""The three workloads: FedAvg on random images, without evaluation in the timed part."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl.config import Config, load
from rayfl.data import Samples, write_npz

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rayfl.bench.naive import Reader

_CLIENTS_PER_FILE = 10_000
"""Clients per shard."""


@dataclass(frozen=True)
class Workload:
    """A workload.

    Attributes:
        name: for tables.
        about: what it represents.
        clients: N.
        samples: training samples of each client.
        cohort: clients per round.
        shape: of an image ``(C, H, W)``.
        classes: number of labels.
        model: the ``model`` section.
        training: the ``training`` section, without participation.
        sections: further sections of the config, such as ``{"local": "scaffold"}``.
        tests: test samples per client.
        sharded: whether the data are in many files and are read from there.
    """

    name: str
    about: str
    clients: int
    samples: int
    cohort: int
    shape: tuple[int, int, int]
    classes: int
    model: dict[str, Any]
    training: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    tests: int = 1
    sharded: bool = False

    @property
    def steps(self) -> int:
        """Client-steps (optimizer steps of one client) in a round."""
        batches = -(-self.samples // int(self.training["batch_size"]))
        return self.cohort * int(self.training["epochs"]) * batches

    def arrays(
        self, seed: int = 0
    ) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]]]:
        """Random images ``(N * samples, C, H, W)`` and labels."""
        rng = np.random.default_rng(seed)
        count = self.clients * self.samples
        x = rng.integers(0, 256, (count, *self.shape), dtype=np.uint8)
        return x, rng.integers(0, self.classes, count)

    def _write_shards(self, folder: Path) -> None:
        """Write the clients to files of 10,000 clients each; all files have the same random images."""
        if (folder / "test-0.npz").exists():
            return
        folder.mkdir(exist_ok=True)
        few = replace(self, clients=min(self.clients, _CLIENTS_PER_FILE))
        x, y = few.arrays()
        y = y.astype(np.uint8)
        for number, first in enumerate(range(0, self.clients, _CLIENTS_PER_FILE)):
            clients = np.arange(first, min(first + _CLIENTS_PER_FILE, self.clients), dtype=np.int32)
            count = len(clients) * self.samples
            owners = np.repeat(clients, self.samples)
            np.savez(folder / f"train-{number:06d}.npz", x=x[:count], y=y[:count], client=owners)
        np.savez(folder / "test-0.npz", x=x[:1000], y=y[:1000])

    def network(self) -> nn.Module:
        """The network in plain PyTorch."""
        from torch import nn

        if self.model["name"] == "mlp":
            widths = [math.prod(self.shape), *self.model["hidden"], self.classes]
            layers = [(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
            return nn.Sequential(nn.Flatten(), *itertools.chain(*layers))[:-1]
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
            nn.Linear(84, self.classes),
        )

    def reader(self) -> Reader:
        """See :class:`~rayfl.bench.naive.Plain`; all images are normalised in advance."""
        import torch

        pixels, labels = self.arrays()
        x = torch.from_numpy(pixels).float().div_(255).sub_(0.5).div_(0.29)
        y = torch.from_numpy(labels)

        def read(client: int) -> tuple[Tensor, Tensor]:
            rows = slice(client * self.samples, (client + 1) * self.samples)
            return x[rows], y[rows]

        return read

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of logits ``(B, C)`` and labels ``(B,)``."""
        from torch.nn import functional

        return functional.cross_entropy(outputs, targets)

    def config(self, folder: Path, **execution: Any) -> Config:
        """The rayfl config, with its data written to ``folder``; IID, so that all clients have equally many
        samples.
        """
        data, partition = ("sharded", "stored") if self.sharded else ("npz", "iid")
        path = folder / (self.name if self.sharded else f"{self.name}.npz")
        if self.sharded:
            self._write_shards(path)
        elif not path.exists():
            x, y = self.arrays()
            test = min(len(x), 1000)
            write_npz(path, Samples(self.name, x, y, x[:test], y[:test], self.classes))
        return load(
            {
                "name": f"bench-{self.name}",
                "rounds": 1_000_000,
                "data": {"name": data, "path": str(path)},
                "partition": {
                    "name": partition,
                    "clients": self.clients,
                    "validation": 0.0,
                    "test_samples": self.tests,
                },
                "model": self.model,
                "training": {**self.training, "participation": self.cohort / self.clients},
                "evaluation": {"every": 1_000_000},
                "execution": execution,
                "output": {"root": str(folder), "tensorboard": False, "report": False, "checkpoint_every": 0},
                **self.sections,
            }
        )


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "W1",
            "many small clients, MLP 784-200-47",
            clients=2400,
            samples=47,
            cohort=480,
            shape=(1, 28, 28),
            classes=47,
            model={"name": "mlp", "hidden": [200]},
            training={"epochs": 5, "batch_size": 10, "lr": 0.01},
        ),
        Workload(
            "W2",
            "PACFL's setting, LeNet-5",
            clients=100,
            samples=600,
            cohort=10,
            shape=(1, 28, 28),
            classes=10,
            model={"name": "lenet5"},
            training={"epochs": 2, "batch_size": 10, "lr": 0.01, "momentum": 0.5},
        ),
        Workload(
            "W3",
            "tiny rounds, MLP 64-32-10",
            clients=10_000,
            samples=20,
            cohort=1000,
            shape=(1, 8, 8),
            classes=10,
            model={"name": "mlp", "hidden": [32]},
            training={"epochs": 1, "batch_size": 20, "lr": 0.05},
        ),
    )
}
