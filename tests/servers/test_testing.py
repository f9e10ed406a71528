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
from rayfl.clients.jobs import Mixture
from rayfl.data import IGNORED, Federation, Ragged
from rayfl.local.sgd import SGD
from rayfl.losses import CrossEntropy
from rayfl.servers import testing
from rayfl.training.batches import Batches, KeptSamples
from tests.runs import SMALL, assert_same
from tests.training.test_recurrent import texts


def ids(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def test_models_tested_on_the_same_samples_are_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_MODELS_PER_TASK", 2)
    a, b = ids(1, 2), ids(3)
    jobs = [a, b, ids(4), a.copy(), b.copy(), ids(5, 6), a.copy(), ids(7)]
    assert testing._job_groups(jobs, limit=3) == [[0, 3], [6], [1, 4], [2, 5], [7]]
    assert testing._job_groups([], limit=3) == []


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
    plan = SimpleNamespace(gather=lambda correct, losses: sums)
    monkeypatch.setattr(testing, "_losses_of_all_models", lambda *given: (plan, [[]]))
    monkeypatch.setattr(
        testing, "_run_passes", lambda *given, **more: SimpleNamespace(scores=lambda plan: sums)
    )
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
    for name, most in (("kept", host._KEPT_BYTES), ("not", 0)):
        monkeypatch.setattr(host, "_KEPT_BYTES", most)
        reads[0] = 0
        results.append(run({**IFCA, "output": {"root": str(tmp_path / name), "report": False}}))
        counts.append(reads[0])
    assert_same(*results)
    assert counts[0] < 0.6 * counts[1]


@pytest.mark.parametrize("edges", [1, 2])
def test_choices_compute_losses_alone_with_the_same_bits(
    edges: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions are not looked at, and one plan serves all models."""
    hierarchy = {"hierarchy": {"edges": edges}} if edges > 1 else {}
    config = {**IFCA, **hierarchy, "rounds": 2, "output": {"root": str(tmp_path), "report": False}}
    found: list[tuple[NDArray[np.float64], int, int]] = []
    original, planned = testing.losses, testing.EvaluationPlan.of
    counts = {"right": 0, "plans": 0}

    def right(self: Any, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        counts["right"] += 1
        return outputs.argmax(1) == targets

    def plan_of(*given: Any, **more: Any) -> Any:
        counts["plans"] += 1
        return planned(*given, **more)

    def losses(servers: Any, clients: Any, samples: Ragged, part: Any) -> NDArray[np.float64]:
        counts.update(right=0, plans=0)
        mine = original(servers, clients, samples, part)
        found.append((mine, counts["right"], counts["plans"]))
        # Model by model, as tests are made.
        for k in range(mine.shape[1]):
            use = np.full(samples.offsets.size - 1, k)
            plan = testing.EvaluationPlan.of(
                servers.everywhere(use)[clients],
                samples.take(clients),
                servers.batch_size,
                testing._PASSES_PER_TASK,
            )
            sums = testing._run_passes(servers, plan, None, part, (), SGD()).scores(plan).losses
            assert (sums / samples.take(clients).sizes == mine[:, k]).all()
        return mine

    monkeypatch.setattr(CrossEntropy, "right", right)
    monkeypatch.setattr(testing.EvaluationPlan, "of", plan_of)
    monkeypatch.setattr(testing, "losses", losses)
    run(config)
    assert found
    for mine, predicted, plans in found:
        assert mine.shape[1] == 3
        assert not predicted
        assert plans == 1


def test_mixtures_of_a_block_are_those_of_each_bit_for_bit() -> None:
    """Numbers may come several times and in any order; some are models themselves."""
    random = np.random.default_rng(0)
    models = {("model", k): random.normal(size=50).astype(np.float32) for k in range(3)}
    mixtures: dict[Any, Any] = {}
    for number in range(3, 9):
        parts = (0, 1, 2) if number % 2 else (0, 2)
        weights = tuple(random.dirichlet(np.ones(len(parts))).tolist())
        mixtures["model", number] = Mixture(parts, weights)
    objects = {**models, **mixtures}
    found = host._stack_models(objects, "model", [1, 4, 3, 8, 5], 50)
    assert (found[0] == models["model", 1]).all()
    for row, number in enumerate([4, 3, 8, 5], start=1):
        mixture = mixtures["model", number]
        assert (found[row] == mixture.of([models["model", k] for k in mixture.models])).all()
