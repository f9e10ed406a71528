"""What the client scripts of all systems share: the task's data, and how they report a complete round.

It needs NumPy only, and is not counted as user code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEAN, DEVIATION = 0.5, 0.29
"""Mean and standard deviation for the normalisation of pixels in 0..1, in all systems."""


@dataclass(frozen=True)
class Task:
    """A workload on disk, as ``tasks.py`` writes it.

    Attributes:
        name: of the workload.
        network: in ``networks.py``.
        shape: of a sample, ``(C, H, W)`` of an image or ``(L,)`` of a text.
        classes: labels, or words of the vocabulary.
        clients: N; the samples of one client follow those of the one before.
        samples: training samples of each client, unless ``sizes`` is given.
        cohort: clients per round.
        epochs, batch_size, lr, momentum: of the local SGD.
        folder: of ``x.npy`` and ``y.npy``.
        sizes: samples of each client, or empty.
        rounds: to run; practically unlimited if the system is stopped from outside.
        method: ``fedavg``, or one of ``agree.METHODS``.
        settings: of the method.
    """

    name: str
    network: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    samples: int
    cohort: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    folder: str
    rounds: int = 100_000
    sizes: tuple[int, ...] = ()
    method: str = "fedavg"
    settings: Mapping[str, float] = field(default_factory=dict)

    def arrays(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All samples: pixels ``(N * samples, C, H, W)`` in uint8 or words ``(.., L)``, and targets."""
        return _opened(self.folder)

    def client(self, number: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """A client's samples, as the networks take them: float32 normalised pixels, or int64 words."""
        x, y = self.arrays()
        positions = self.own(number)
        return normalised(x[positions]), np.array(y[positions])

    def starts(self) -> NDArray[np.float32]:
        """The weights of the first models ``(C, P)``, for methods that have several (``agree.py``)."""
        models: NDArray[np.float32] = np.load(Path(self.folder) / "starts.npy")
        return models

    def own(self, number: int) -> slice:
        """The positions of a client's samples."""
        if self.sizes:
            return slice(sum(self.sizes[:number]), sum(self.sizes[: number + 1]))
        return slice(number * self.samples, (number + 1) * self.samples)

    def count(self, number: int) -> int:
        """Samples of a client."""
        return self.sizes[number] if self.sizes else self.samples


@cache
def _opened(folder: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The arrays of a task, opened once in a process: a client of W3 trains for less time than that takes."""
    return tuple(np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in "xy")


def normalised(x: NDArray[Any]) -> NDArray[Any]:
    """Pixels in 0..255 as float32 with about zero mean and unit deviation; words as int64."""
    if x.dtype != np.uint8:
        return np.array(x, np.int64)
    return ((x.astype(np.float32) / 255) - MEAN) / DEVIATION


def load_task() -> Task:
    """The task that the environment variable ``PEERS_TASK`` names."""
    values = json.loads((Path(os.environ["PEERS_TASK"]) / "task.json").read_text())
    tuples = {name: tuple(values[name]) for name in ("shape", "sizes")}
    return Task(**{**values, **tuples, "folder": os.environ["PEERS_TASK"]})


def round_done() -> None:
    """Record that a round is complete: append the time to the file that ``PEERS_MARKS`` names."""
    with open(os.environ["PEERS_MARKS"], "a") as file:
        file.write(f"{time.time()}\n")


def finished(tensors: Iterable[Any]) -> None:
    """Write the final weights, in the order of the layers, to the file that ``PEERS_FINAL`` names, if any."""
    if path := os.environ.get("PEERS_FINAL"):
        np.savez(path, *(np.asarray(tensor) for tensor in tensors))
