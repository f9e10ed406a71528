"""Label maps in a run: training, signatures and tests see what the client calls its samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl import load
from rayfl.api import run
from rayfl.data import DATASETS, write_npz


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Digits with two classes more that nobody has, as they are and with 0 and 1 exchanged."""
    plain = replace(DATASETS["digits"]().load(tmp_path), classes=12, class_names=tuple("0123456789ab"))
    swap = np.array([1, 0, *range(2, 12)])
    write_npz(tmp_path / "plain.npz", plain)
    write_npz(
        tmp_path / "swapped.npz", replace(plain, y_train=swap[plain.y_train], y_test=swap[plain.y_test])
    )
    return tmp_path


def outcome(folder: Path, data: str, swap: list[int], **changes: Any) -> dict[str, Any]:
    config = load(
        {
            "rounds": 2,
            "data": {"name": "npz", "path": str(folder / f"{data}.npz")},
            "partition": {"name": "relabelled", "clients": 4, "clusters": 1, "swaps": [swap], "samples": 60},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"epochs": 1, "lr": 0.1},
            "execution": {"backend": "inline"},
            "output": {"root": str(folder / "runs"), "tensorboard": False, "report": False},
            **changes,
        }
    )
    return dict(run(config).summary)


@pytest.mark.parametrize("method", ["fedavg", "pacfl"])
def test_swapping_back_is_not_swapping_at_all(digits: Path, method: str) -> None:
    changes: dict[str, Any] = {"algorithm": method}
    if method == "pacfl":
        changes["clustering"] = {
            "signature": "label_histogram",
            "proximity": "euclidean",
            "n_clusters": 2,
        }
    untouched = outcome(digits, "plain", [10, 11], **changes)
    back = outcome(digits, "swapped", [0, 1], **changes)
    away = outcome(digits, "plain", [0, 1], **changes)
    assert back["models_sha256"] == untouched["models_sha256"] != away["models_sha256"]
    assert back["accuracy_mean"] == untouched["accuracy_mean"]
