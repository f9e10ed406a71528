"""Two clients with softmax regression on six features: whole runs, and the same in NumPy by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.data import build_federation
from rayfl.models import ModelSpec
from rayfl.random import orders
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from tests.training.bounds import rounding

Array = np.ndarray
FEATURES, CLASSES = 6, 4
P = FEATURES * CLASSES + CLASSES
ETA = 0.2
SIZES = (30, 12)
ROUND = rounding(max(SIZES), steps=10)
"""What float32 may do to a model in a round of at most ten steps: softmax regression is convex and smooth."""


class Ran:
    """A finished run and its last checkpoint."""

    def __init__(self, result: rayfl.Result) -> None:
        self.result, self.summary = result, result.summary
        self.last = Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])
        self.models, self.vectors = self.last.models, self.last.vectors
        self.model = self.models[0]

    def client_state(self, client: int) -> Array:
        return self.last.state_rows[self.last.state_clients.tolist().index(client)]

    def bytes(self, direction: str) -> int:
        frame = self.result.communication
        return int(frame[frame["direction"] == direction]["bytes"].sum())


class Problem:
    """Two clients, 30 samples of classes 0 and 1, and 12 of classes 2 and 3.

    Args:
        folder: where the data and the runs go.
    """

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(5)
        y = np.repeat([0, 1, 2, 3], [20, 10, 5, 7])
        x = rng.standard_normal((42, FEATURES)) + y[:, None] * np.eye(CLASSES, FEATURES)[y]
        self.file = folder / "made.npz"
        self.folder = folder
        x = x.astype(np.float32)
        np.savez(self.file, x_train=x, y_train=y, x_test=x[::3], y_test=y[::3])
        config = rayfl.load(self.settings())
        samples = config.data.load(Path())
        federation = build_federation(
            samples, config.partition, validation=0.0, test_samples="all", seed=config.seed
        )
        self.spec = ModelSpec.of(config.model, samples.shape, samples.classes, config.seed)
        self.data = [(samples.x_train[ids], samples.y_train[ids]) for ids in federation.train]
        assert tuple(len(labels) for _, labels in self.data) == SIZES

    def settings(self) -> dict[str, Any]:
        tasks = [{"labels": [0, 1], "clients": 1}, {"labels": [2, 3], "clients": 1}]
        return {
            "rounds": 1,
            "seed": 4,
            "data": {"name": "npz", "path": str(self.file), "normalise": "none"},
            "partition": {"name": "tasks", "tasks": tasks, "validation": 0.0},
            "model": "linear",
            "training": {"epochs": 2, "batch_size": 100, "lr": ETA, "engine": "loop"},
            "execution": {"backend": "inline", "block_size": 1},
            "output": {"root": str(self.folder), "report": False, "tensorboard": False},
        }

    def run(self, *overrides: str, **sections: Any) -> Ran:
        return Ran(rayfl.run({**self.settings(), **sections}, list(overrides)))

    def start(self) -> Array:
        """w_0 in double precision."""
        return self.spec.initial().astype(np.float64)

    def gradient(self, w: Array, client: int, batch: Array | None = None) -> Array:
        """Of the mean cross-entropy of softmax regression, ``(P,)``."""
        x, y = self.data[client]
        x, y = (x, y) if batch is None else (x[batch], y[batch])
        x = x.astype(np.float64)
        weight, bias = w[: FEATURES * CLASSES].reshape(CLASSES, FEATURES), w[FEATURES * CLASSES :]
        scores = x @ weight.T + bias
        probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        delta = (probabilities - np.eye(CLASSES)[y]) / len(y)
        return np.concatenate([(delta.T @ x).ravel(), delta.sum(axis=0)])

    def batches(self, client: int, round: int, epochs: int, size: int) -> list[Array]:
        """The batches that a client visits, in the order that the keyed generator gives."""
        order = orders(4, round, [client], [SIZES[client]], epochs)[0]
        return [epoch[at : at + size] for epoch in order for at in range(0, len(epoch), size)]

    def sgd(
        self,
        w: Array,
        client: int,
        batches: list[Array],
        *,
        momentum: float = 0.0,
        extra: Callable[[Array], Array] = lambda w: np.zeros(P),
    ) -> Array:
        """Local steps; ``extra(w)`` is added to every gradient."""
        w, velocity = w.copy(), np.zeros(P)
        for batch in batches:
            velocity = momentum * velocity + self.gradient(w, client, batch) + extra(w)
            w -= ETA * velocity
        return w


@pytest.fixture(scope="session")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return Problem(tmp_path_factory.mktemp("local"))
