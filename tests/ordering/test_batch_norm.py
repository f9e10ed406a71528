"""Curricula on networks with BatchNorm: scores look at running statistics, training at those of its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from rayfl.training.batched import vmap
from tests.runs import SMALL, Run
from tests.training.test_vmap import Skip


def chain(shape: tuple[int, ...], classes: int) -> nn.Module:
    """What the batched engine covers."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 6 * 6, classes)
    )


NETWORKS = {"vmap": f"{Skip.__module__}:Skip", "batched": f"{__name__}:chain"}


@pytest.mark.parametrize("engine", NETWORKS)
@pytest.mark.parametrize("score", ["global", "both"])
def test_engines_train_the_same_curriculum(
    run: Run, engine: str, score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vmap, "_LEAST_CLIENTS", 1)
    model = {"name": "module", "target": NETWORKS[engine]}
    order = {"name": "curriculum", "score": score}

    def models(engine: str, **sections: Any) -> Any:
        training = {**SMALL["training"], "engine": engine}
        return run("rounds=2", model=model, training=training, **sections).models

    loop, together, shuffled = models("loop", order=order), models(engine, order=order), models("loop")
    gap = np.linalg.norm(loop - together)
    assert 0 < gap < 1e-3 * np.linalg.norm(loop - shuffled), "roundings, far below what the order changes"
