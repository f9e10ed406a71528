"""The workloads of the comparison, and their data on disk for all systems."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shared import Task

from rayfl.bench.workloads import WORKLOADS as BENCH
from rayfl.data.datasets.ag_news import AgNews
from rayfl.data.datasets.cifar10 import Cifar10
from rayfl.errors import DataError
from rayfl.given import data_root

Arrays = tuple[NDArray[Any], NDArray[np.int64]]

LENGTH, VOCABULARY = 20, 5_000
"""Number of words of an article, and of AG News' vocabulary."""


@dataclass(frozen=True)
class Workload:
    """A workload.

    Attributes:
        task: what is trained; ``folder`` is filled in when the data are written.
        about: for tables.
        source: whose benchmark it is.
        data: a dataset of rayfl's; None: random pixels and labels.
    """

    task: Task
    about: str
    source: str
    data: str | None = None

    @property
    def threads(self) -> int:
        """Threads of systems with a single process: all cores for large convolutions, else one is faster."""
        return (os.cpu_count() or 1) if self.task.network in ("resnet18", "resnet9", "dropout_cnn") else 1


def _bench_workload(name: str, network: str) -> Workload:
    """A workload of ``rayfl bench``."""
    w = BENCH[name]
    training = {"momentum": 0.0, **w.training}
    task = Task(name, network, w.shape, w.classes, w.clients, w.samples, w.cohort, folder="", **training)
    return Workload(task, w.about, "rayfl bench")


_RGB = (3, 32, 32)

WORKLOADS = {
    w.task.name: w
    for w in (
        _bench_workload("W1", "mlp"),
        _bench_workload("W2", "lenet5"),
        _bench_workload("W3", "mlp32"),
        Workload(
            Task("W4a", "resnet18", _RGB, 10, 100, 500, 10, 1, 32, 0.05, 0.0, ""),
            "ResNet-18 with GroupNorm on CIFAR-10, 10 of 100 clients, 1 epoch, batch 32",
            "rayfl",
            "cifar10",
        ),
        Workload(
            Task("W4b", "resnet9", _RGB, 10, 100, 500, 10, 1, 32, 0.05, 0.0, ""),
            "ResNet-9 with BatchNorm on CIFAR-10, 10 of 100 clients, 1 epoch, batch 32",
            "rayfl",
            "cifar10",
        ),
        Workload(
            Task("W5a", "lstm", (LENGTH,), VOCABULARY + 2, 100, 80, 10, 1, 10, 0.5, 0.0, ""),
            "two-layer LSTM on AG News, 10 of 100 clients, 1 epoch, batch 10",
            "rayfl",
            "ag_news",
        ),
        Workload(
            Task("W5b", "transformer", (LENGTH,), VOCABULARY + 2, 100, 80, 10, 1, 10, 0.1, 0.0, ""),
            "two-layer transformer on AG News, 10 of 100 clients, 1 epoch, batch 10",
            "rayfl",
            "ag_news",
        ),
        Workload(
            Task("pfl", "dropout_cnn", _RGB, 10, 1000, 50, 50, 1, 10, 0.1, 0.0, ""),
            "pfl's benchmark: CIFAR-10, 50 of 1,000 users x 50 images, batch 10, CNN",
            "github.com/apple/pfl-research, publications/pfl",
            "cifar10",
        ),
        Workload(
            Task("flute", "dropout_cnn", (1, 28, 28), 62, 3400, 200, 10, 1, 20, 0.1, 0.0, ""),
            "FLUTE's benchmark: FEMNIST's shape, 10 of 3,400 clients x 200 images, batch 20, CNN",
            "github.com/microsoft/msrflute, experiments/cv_cnn_femnist",
        ),
        Workload(
            Task("blazefl", "lenet5", _RGB, 10, 100, 500, 100, 5, 50, 0.1, 0.0, ""),
            "BlazeFL's benchmark: CIFAR-10, 100 of 100 clients, 5 epochs, batch 50, LeNet-like CNN",
            "github.com/blazefl/benchmarks",
            "cifar10",
        ),
    )
}


def quick(workload: Workload) -> Workload:
    """A tenth of the samples where a round would take minutes."""
    if workload.task.name not in ("W4a", "W4b", "blazefl"):
        return workload
    task = replace(workload.task, samples=workload.task.samples // 10)
    return replace(workload, task=task, about=f"{workload.about}; a tenth of the samples")


def write(workload: Workload, folder: Path) -> dict[str, str]:
    """Write ``task.json`` to ``folder``, and ``x.npy`` and ``y.npy`` unless the data are there.

    Returns:
        ``data``: the dataset's name, or ``random``; and ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = folder / "data.json"
    if not about.exists():
        (x, y), name = _arrays(workload)
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        about.write_text(json.dumps({"data": name}))
    task = replace(workload.task, folder=str(folder.resolve()))
    (folder / "task.json").write_text(json.dumps(asdict(task), indent=1))
    return {**json.loads(about.read_text()), "folder": str(folder)}


def _arrays(workload: Workload) -> tuple[Arrays, str]:
    """The arrays, and the name of the dataset or ``random``."""
    task = workload.task
    count = task.clients * task.samples
    rng = np.random.default_rng(0)
    if workload.data is not None:
        try:
            x, y = _DATASETS[workload.data]()
            order = rng.permutation(len(x))[:count]
            return (np.ascontiguousarray(x[order]), y[order]), workload.data
        except DataError:
            pass
    if len(task.shape) == 1:
        words = rng.integers(0, task.classes, (count, task.shape[0] + 1))
        return (words[:, :-1].astype(np.int32), words[:, 1:]), "random"
    x = rng.integers(0, 256, (count, *task.shape), dtype=np.uint8)
    return (x, rng.integers(0, task.classes, count)), "random"


def _cifar10() -> Arrays:
    samples = Cifar10().load(data_root())
    return np.asarray(samples.x_train), np.asarray(samples.y_train, np.int64)


def _ag_news() -> Arrays:
    samples = AgNews(vocabulary=VOCABULARY, length=LENGTH).load(data_root())
    return np.asarray(samples.x_train), np.asarray(samples.targets_train, np.int64)


_DATASETS: dict[str, Callable[[], Arrays]] = {"cifar10": _cifar10, "ag_news": _ag_news}
