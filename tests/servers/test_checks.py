"""What does not fit the clients or the shape of their samples is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.servers.building import build
from rayfl.study import prepare, read
from rayfl.study.preparation import check_clients


@pytest.fixture
def features(tmp_path: Path) -> dict[str, Any]:
    """Eight clients with samples of five features."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 5)).astype(np.float32), np.arange(200) % 4
    np.savez(tmp_path / "own.npz", x_train=x[:160], y_train=y[:160], x_test=x[160:], y_test=y[160:])
    return {
        "data": {"name": "npz", "path": str(tmp_path / "own.npz")},
        "partition": {"name": "iid", "clients": 8},
        "model": {"name": "mlp", "hidden": [4]},
    }


@pytest.mark.parametrize(
    ("clustering", "message"),
    [
        ({"features": "conv_ae"}, "conv_ae needs images .*; use clustering.features=pca"),
        ({"features": "resnet18"}, "resnet18 needs images .*; use clustering.features=pca"),
        ({"n_clusters": 9}, "clustering.n_clusters: 9 clusters of 8 clients; use at most 8"),
        ({"grouping": "planted"}, "clustering.grouping: planted needs the true groups; use a partition"),
        ({"grouping": "random"}, "groups; use a partition with groups, or set clustering.n_clusters"),
        ({"grouping": "graph", "exact_up_to": 5}, "use at least 8, or clustering.grouping=hierarchical"),
        (
            {"signature": "spectrum", "proximity": "relevance", "exact_up_to": 5},
            "without an exchange, such as subspace",
        ),
    ],
    ids=str,
)
def test_a_clustering_that_cannot_succeed_is_refused(
    features: dict[str, Any], clustering: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(load({**features, "algorithm": "pacfl", "clustering": clustering}))
    build(load({**features, "algorithm": "fedavg"}))


def test_flt_names_the_setting_to_change(features: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"clustering\.features=pca"):
        build(load({**features, "algorithm": "flt"}))


def test_a_study_refuses_the_method_that_asks_for_too_many_clusters(tmp_path: Path) -> None:
    """Also if another method of the same clients has passed."""
    file = tmp_path / "two.yaml"
    file.write_text(
        "name: two\nbase: digits-demo\nmethods:\n  three: {algorithm: pacfl}\n"
        "  fifty: {algorithm: pacfl, clustering.n_clusters: 50}\nseeds: 0-1\n"
    )
    prepared = prepare(read(file))
    with pytest.raises(ConfigError, match=r"^fifty, seed 0: clustering.n_clusters: 50 clusters of 20"):
        check_clients(run for run in prepared.runs)
