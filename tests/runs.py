"""Small runs that many tests begin, and what it means that two are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import rayfl

if TYPE_CHECKING:  # torch takes seconds, and conftest.py imports this file for everybody
    import psutil

TASKS = [
    {"labels": [0, 1, 2, 3], "clients": 4},
    {"labels": [4, 5, 6], "clients": 3},
    {"labels": [7, 8, 9], "clients": 2},
]

CLUSTERED = {"clustering": {"n_clusters": 3}}

TREE = {**CLUSTERED, "hierarchy": {"common_layers": 1, "global_every": 2}}
SAMPLED = {"training": {"epochs": 2, "batch_size": 40, "lr": 0.05, "momentum": 0.5, "participation": 0.7}}

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"training": {"epochs": 2, "batch_size": 40, "lr": 0.05, "participation": 0.7}},
    "solo": {},
    "pacfl": CLUSTERED,
    "mt_hfl": TREE,
    "pca_km_hc": CLUSTERED,
    "random_clustering": CLUSTERED,
    "lg_fedavg": {"algorithm": {"name": "lg_fedavg", "local_layers": 1}},
    "per_fedavg": {"algorithm": {"name": "per_fedavg", "alpha": 0.05, "beta": 0.05}},
    "sub_fedavg": {
        "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05, "validation": 0.2},
        "local": {"step": 0.3, "accuracy": 0.2},
        "training": {"epochs": 2, "batch_size": 40, "lr": 0.05, "participation": 0.7},
    },
    # splits after every round
    "cfl": {
        "algorithm": {"name": "cfl", "criteria": {"eps1": 100, "eps2": 0, "min_size": 3}, "fallback": True}
    },
    "ifca": {"algorithm": {"name": "ifca", "clusters": 3}, **SAMPLED, "hierarchy": TREE["hierarchy"]},
    "fedsem": {"algorithm": {"name": "fedsem", "clusters": 3}, **SAMPLED},
    "fedsoft": {"algorithm": {"name": "fedsoft", "clusters": 3, "every": 2}, **SAMPLED},
    "flis_dc": {"algorithm": {"name": "flis_dc", "beta": 0.6}, **SAMPLED},
    "flis_hc": {**CLUSTERED, **SAMPLED},
    "flt": {"clustering": {"features": "pca", "embedding": "none", "gamma": "auto"}, **SAMPLED},
    "fedprox": {"algorithm": "fedavg", "local": {"name": "fedprox", "mu": 0.1}, **SAMPLED},
    "mt_hfl, fednova": {"algorithm": "mt_hfl", "local": "fednova", **TREE, **SAMPLED},
    "mt_hfl, scaffold": {"algorithm": "mt_hfl", "local": "scaffold", **TREE, **SAMPLED},
    "fedavgm": {"algorithm": "fedavgm", **SAMPLED},
    "fedadam": {"algorithm": {"name": "fedadam", "server_lr": 0.02}, **SAMPLED},
    "qfedavg": {"algorithm": "qfedavg", **SAMPLED},
    "hierfavg": {"hierarchy": {"edges": 4, "global_every": [2, 3]}, **SAMPLED},
    "mt_hfl, edges": {
        "algorithm": "mt_hfl",
        "clustering": CLUSTERED["clustering"],
        "hierarchy": {"common_layers": 1, "global_every": 2, "edges": 2},
        **SAMPLED,
    },
    "mtl": {"local": {"lam": 0.5}, **SAMPLED},
    "pacfl, mtl": {"algorithm": "pacfl", "local": {"name": "mtl", "lam": 0.5}, **CLUSTERED, **SAMPLED},
    "pacfl, scaffold": {"algorithm": "pacfl", "local": "scaffold", **CLUSTERED, **SAMPLED},
}
"""Methods and local objectives with settings that exercise them: partial participation, clusters, common
layers, client state, servers that look at trained models before they mix."""

SMALL: dict[str, Any] = {
    "name": "t",
    "rounds": 3,
    "seed": 3,
    "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.3, "min_samples": 3},
    "model": {"name": "mlp", "hidden": [6]},
    "training": {"epochs": 2, "batch_size": 40, "lr": 0.1, "momentum": 0.5, "engine": "loop"},
    "execution": {"backend": "inline", "block_size": 3},
}
"""Eight clients of very different sizes; the plain loop gives each the same bits, whoever is in its block."""


class Ran:
    """A finished run and its last checkpoint."""

    def __init__(self, result: rayfl.Result) -> None:
        from rayfl.servers.checkpoint import Checkpoint, checkpoints

        self.result, self.summary = result, result.summary
        self.last = Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])
        self.models, self.states = self.last.models, self.last.state_rows

    @property
    def bits(self) -> bytes:
        """Of the servers' models."""
        return self.models.tobytes()


Run = Callable[..., Ran]


def assert_same(first: rayfl.Result, second: rayfl.Result) -> None:
    """Equal in every bit and table; seconds aside."""
    import pandas as pd

    assert first.summary["models_sha256"] == second.summary["models_sha256"]
    pd.testing.assert_frame_equal(
        first.rounds.drop(columns="seconds"), second.rounds.drop(columns="seconds"), check_exact=True
    )
    pd.testing.assert_frame_equal(first.clients, second.clients, check_exact=True)
    pd.testing.assert_frame_equal(first.groups, second.groups, check_exact=True)
    pd.testing.assert_frame_equal(first.communication, second.communication, check_exact=True)
    assert first.clusters == second.clusters


def actors(kind: str) -> set[psutil.Process]:
    """The processes of Ray actors of this class that descend from this one."""
    import psutil

    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if f"ray::{kind}" in " ".join(process.cmdline()):
                found.add(process)
        except psutil.Error:  # it has just ended
            continue
    return found
