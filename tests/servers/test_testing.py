"""Tests of many models on the same samples, which are read once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rayfl.api import run
from rayfl.clients import host
from rayfl.data import IGNORED, Federation, Ragged
from rayfl.local.sgd import SGD
from rayfl.servers import testing
from rayfl.training.batches import Batches, KeptSamples
from tests.runs import SMALL, assert_same
from tests.training.test_recurrent import texts


def ids(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def test_models_tested_on_the_same_samples_are_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_MODELS", 2)
    a, b = ids(1, 2), ids(3)
    jobs = [a, b, ids(4), a.copy(), b.copy(), ids(5, 6), a.copy(), ids(7)]
    assert testing._groups(jobs, limit=3) == [[0, 3], [6], [1, 4], [2, 5], [7]]
    assert testing._groups([], limit=3) == []


def test_samples_are_read_once_unless_a_network_changes_them() -> None:
    asked: list[list[int]] = []

    def read(some: NDArray[np.integer]) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(some.tolist())
        return torch.zeros(len(some)).add_(1), torch.zeros(len(some))

    kept = KeptSamples(2 * 2 * 4)
    for _ in range(2):
        x, _ = kept.read(ids(1, 2), read)
        kept.read(ids(3), read)  # there is no room for it
    assert asked == [[1, 2], [3], [3]]
    with torch.inference_mode():
        x.add_(1)
    assert kept.read(ids(1, 2), read)[0].tolist() == [1, 1]
    assert asked[3:] == [[1, 2]]


def test_losses_of_texts_are_means_over_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is not hard because its texts are long."""
    long = texts(30, 20, count=2)
    targets = np.full((2, 30), IGNORED)
    targets[0, :3], targets[1] = 7, 7
    lists, none = Ragged.of([ids(0), ids(1)]), Ragged.of([ids(), ids()])
    federation = Federation(replace(long, targets_train=targets), lists, none, lists)
    servers: Any = SimpleNamespace(
        models=[0], places=1, batch_size=7, federation=federation, at=lambda models, clients: models
    )
    sums = SimpleNamespace(losses=2.0 * np.array([3, 30]))
    monkeypatch.setattr(testing, "_passes", lambda *given: SimpleNamespace(scores=lambda plan: sums))
    assert testing.losses(servers, np.arange(2), lists, "train").tolist() == [[2.0], [2.0]]
    servers.serving = lambda served, clients: (servers, served)
    served = np.zeros(2, np.int64)
    own = testing.local_losses(servers, np.arange(2), served, lists, "train", (), SGD())
    assert own.tolist() == [2.0, 2.0]


IFCA: dict[str, Any] = {
    **SMALL,
    "algorithm": {"name": "ifca", "clusters": 3},
    "evaluation": {"batch_size": 7},
}


def test_results_do_not_depend_on_what_is_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose among three models: their samples are read a third as often."""
    reads = [0]
    original = Batches.train

    def counted(self: Batches, indices: NDArray[np.integer]) -> Any:
        reads[0] += 1
        return original(self, indices)

    monkeypatch.setattr(Batches, "train", counted)
    results, counts = [], []
    for name, most in (("kept", host._KEPT), ("not", 0)):
        monkeypatch.setattr(host, "_KEPT", most)
        reads[0] = 0
        results.append(run({**IFCA, "output": {"root": str(tmp_path / name), "report": False}}))
        counts.append(reads[0])
    assert_same(*results)
    assert counts[0] < 0.6 * counts[1]
