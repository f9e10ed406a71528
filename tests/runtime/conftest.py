"""A small federation on real digits, and one local Ray for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

TASKS = [
    {"labels": [0, 1, 2, 3], "clients": 4},
    {"labels": [4, 5, 6], "clients": 3},
    {"labels": [7, 8, 9], "clients": 2},
]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray with four logical CPUs and GPUs, so that several actors and fractions fit on any machine."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
    yield
    ray.shutdown()


def actors(kind: str) -> set[psutil.Process]:
    """The processes of Ray actors of this class that descend from this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if f"ray::{kind}" in " ".join(process.cmdline()):
                found.add(process)
        except psutil.Error:  # it has just ended
            continue
    return found


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A run of three rounds over nine clients in three planted groups, a second or less inline."""
    return {
        "name": "t",
        "rounds": 3,
        "seed": 3,
        "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05},
        "model": {"name": "mlp", "hidden": [16]},
        "algorithm": "fedavg",
        "training": {"epochs": 2, "batch_size": 10, "lr": 0.05},
        "execution": {"backend": "inline", "block_size": 2},
        "output": {"root": str(tmp_path), "report": False, "tensorboard": False, "checkpoint_every": 1},
    }


CLUSTERED = {"clustering": {"n_clusters": 3}}

TREE = {**CLUSTERED, "hierarchy": {"common_layers": 1, "global_every": 2}}
SAMPLED = {"training": {"epochs": 2, "batch_size": 10, "lr": 0.05, "momentum": 0.5, "participation": 0.7}}

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"training": {"epochs": 2, "batch_size": 10, "lr": 0.05, "participation": 0.7}},
    "solo": {},
    "pacfl": CLUSTERED,
    "mt_hfl": TREE,
    "random_clustering": CLUSTERED,
    "lg_fedavg": {"algorithm": {"name": "lg_fedavg", "local_layers": 1}},
    "per_fedavg": {"algorithm": {"name": "per_fedavg", "alpha": 0.05, "beta": 0.05}},
    "sub_fedavg": {
        "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05, "validation": 0.2},
        "local": {"step": 0.3, "accuracy": 0.2},
        "training": {"epochs": 2, "batch_size": 10, "lr": 0.05, "participation": 0.7},
    },
    # splits after every round
    "cfl": {
        "algorithm": {"name": "cfl", "criteria": {"eps1": 100, "eps2": 0, "min_size": 3}, "fallback": True}
    },
    "ifca": {"algorithm": {"name": "ifca", "clusters": 3}, **SAMPLED, "hierarchy": TREE["hierarchy"]},
    "fedsem": {"algorithm": {"name": "fedsem", "clusters": 3}, **SAMPLED},
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
    "mtl": {"local": {"strength": 0.5}, **SAMPLED},
    "pacfl, mtl": {"algorithm": "pacfl", "local": {"name": "mtl", "strength": 0.5}, **CLUSTERED, **SAMPLED},
    "pacfl, scaffold": {"algorithm": "pacfl", "local": "scaffold", **CLUSTERED, **SAMPLED},
}
"""Methods and local objectives with settings that exercise them: partial participation, clusters, common
layers, client state, servers that look at trained models before they mix."""
