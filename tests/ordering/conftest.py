"""Small whole runs on digits, inline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from tests.runtime.conftest import ray_cluster  # noqa: F401 (a fixture)

SETTINGS: dict[str, Any] = {
    "name": "t",
    "rounds": 3,
    "seed": 3,
    "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.3, "min_samples": 3},
    "model": {"name": "mlp", "hidden": [6]},
    "training": {"epochs": 2, "batch_size": 10, "lr": 0.1, "momentum": 0.5, "engine": "loop"},
    "execution": {"backend": "inline", "block_size": 3},
}
"""Eight clients of very different sizes; the plain loop gives each the same bits in any company."""


class Ran:
    """A finished run and its last checkpoint."""

    def __init__(self, result: rayfl.Result) -> None:
        self.result, self.summary = result, result.summary
        self.last = Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])
        self.models, self.states = self.last.models, self.last.state_rows

    @property
    def bits(self) -> bytes:
        """Of the servers' models."""
        return self.models.tobytes()


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run("rounds=1", order={...})``: :data:`SETTINGS` with other sections and overrides."""
    output = {"root": str(tmp_path_factory.mktemp("runs")), "report": False, "tensorboard": False}
    known: dict[str, Ran] = {}

    def call(*overrides: str, **sections: Any) -> Ran:
        settings = {**SETTINGS, "output": output, **sections}
        name = repr((overrides, settings))
        if name not in known:
            known[name] = Ran(rayfl.run(settings, overrides))
        return known[name]

    return call


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """:data:`SETTINGS`, with outputs in a folder of the test's own."""
    output = {"root": str(tmp_path), "report": False, "tensorboard": False, "checkpoint_every": 1}
    return {**SETTINGS, "output": output}
