"""``rayfl bench``: what its parts return, on workloads of a second."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rayfl.bench import local, measure
from rayfl.bench.workloads import WORKLOADS, Workload
from rayfl.ordering.curriculum import Curriculum

TINY = Workload(
    "tiny",
    "for tests",
    clients=8,
    samples=10,
    cohort=4,
    shape=(1, 4, 4),
    classes=3,
    model={"name": "mlp", "hidden": [4]},
    training={"epochs": 1, "batch_size": 5, "lr": 0.01},
)


def test_a_workload_takes_sections_of_the_config(tmp_path: Path) -> None:
    work = Workload(**{**vars(TINY), "sections": {"order": {"name": "curriculum", "score": "local"}}})
    order = work.config(tmp_path).order
    assert isinstance(order, Curriculum)
    assert order.score == "local"
    assert WORKLOADS["W1"].sections == {}


def test_objectives_and_orders_take_turns() -> None:
    lines: list[str] = []
    rows = local.run(rounds=3, workload=TINY, execution={"backend": "inline"}, say=lines.append)
    assert [row["variant"] for row in rows] == list(local.VARIANTS)
    assert len(lines) == 3  # the rounds that warm up are not said, nor counted
    assert (rows[0]["ratio"], rows[0]["least"], rows[0]["most"]) == (1, 1, 1)
    for row in rows:
        assert row["least"] <= row["ratio"] <= row["most"]
        # 4 clients of 10 samples: 2 batches each
        assert row["steps_per_second"] == pytest.approx(8 / row["seconds"])


def test_no_round_counts_before_every_actor_has_trained() -> None:
    """The second actor begins in the third round; of few blocks it may never get one."""

    class Run:
        driver = SimpleNamespace(backend=SimpleNamespace(actors=2))
        worker_seconds: ClassVar[dict[str, float]] = {}
        rounds = 0

        def __init__(self, second: int) -> None:
            self.second = second

        def round(self) -> None:
            self.rounds += 1
            self.worker_seconds = {"first" if self.rounds < self.second else "second": 0.5}

    for second, expected in ((3, 3), (100, 5)):
        run: Any = Run(second)
        measure._warm_up(run)
        assert run.rounds == expected
