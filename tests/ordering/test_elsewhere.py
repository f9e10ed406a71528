"""The order of samples where clients train outside of a round: for a test, a signature, a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import rayfl
from rayfl.commands import newcomers
from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.local import LocalObjective, Outcome, Start, Train
from rayfl.models import ModelSpec
from rayfl.ordering.base import Arrival, Ordering
from rayfl.random import moment
from rayfl.servers.building import build
from rayfl.training import LocalWork, Terms, TrainedBlock
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine
from tests.runs import SMALL, Run


class Backwards(Ordering):
    """In every epoch all samples, the last one first; a client keeps a number."""

    name: Literal["backwards"] = "backwards"
    asked: ClassVar[list[Arrival]] = []

    def state_size(self, spec: ModelSpec) -> int:
        return 1

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :1]

    def visits(self, arrival: Arrival) -> list[list[NDArray[np.intp]]]:
        self.asked.append(arrival)
        return [backwards(n, arrival.work) for n in arrival.sizes.tolist()]


def backwards(samples: int, work: LocalWork) -> list[NDArray[np.intp]]:
    order = np.arange(samples)[::-1].copy()
    return [order[at : at + work.batch_size] for at in range(0, samples, work.batch_size)] * work.epochs


def newcomers_file(folder: Path) -> Path:
    """Two clients with 30 digits each."""
    samples = load({**SMALL}).data.load(Path())
    x, y, owner = samples.x_test[:60], samples.y_test[:60], np.repeat([0, 1], 30)
    parts = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(folder / "new.npz", **parts, client_train=owner, client_test=owner)
    return folder / "new.npz"


@pytest.fixture
def asked() -> Iterator[list[Arrival]]:
    Backwards.asked.clear()
    yield Backwards.asked
    Backwards.asked.clear()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    output = {"root": str(tmp_path), "report": False, "tensorboard": False, "checkpoint_every": 1}
    return {**SMALL, "rounds": 2, "output": output, "order": Backwards()}


def test_fine_tuning_follows_the_order(settings: dict[str, Any], asked: list[Arrival]) -> None:
    result = rayfl.run({**settings, "evaluation": {"finetune_epochs": 3}})
    last = [arrival for arrival in asked if arrival.work.epochs == 3]
    assert sorted(np.concatenate([arrival.clients for arrival in last]).tolist()) == list(range(8))
    assert not np.concatenate([arrival.fresh for arrival in last]).any()
    assert all((arrival.state != 0).all() for arrival in last)  # kept in the last round

    config = load({**settings, "evaluation": {"finetune_epochs": 3}})
    stages, host = build(config)
    engine = LoopEngine(host.spec, Batches(stages[0].federation.samples, torch.device("cpu")), config.seed)
    work = config.training.work(1, 2)
    train = stages[0].federation.train
    for client in (0, 5):
        model = torch.cat([t.ravel() for t in result.client_model(client).values()])[None]
        terms = Terms(visits=[backwards(len(train[client]), replace(work, epochs=3))])
        tuned = engine.train(work, 1, [client], [train[client]], model, terms).rows[0]
        found = torch.cat([t.ravel() for t in result.client_model(client, finetuned=True).values()])
        assert torch.equal(found, tuned)


@pytest.mark.parametrize("local", [False, True])
def test_adaptation_follows_the_order(local: bool, settings: dict[str, Any], asked: list[Arrival]) -> None:
    """Per-FedAvg's, before every test, of the servers' models and of those just trained."""
    training = {**settings["training"], "momentum": 0.0}
    evaluation = {"every": 2, "local": local}
    rayfl.run({**settings, "algorithm": "per_fedavg", "training": training, "evaluation": evaluation})
    adapted = [arrival for arrival in asked if arrival.work.epochs == 1 and not arrival.work.inner_lr]
    assert sum(len(arrival.clients) for arrival in adapted) == 8 * (1 + 2 * local)
    assert all((arrival.state != 0).all() and not arrival.fresh.any() for arrival in adapted)


def test_trained_signatures_follow_the_order_of_round_0(
    settings: dict[str, Any], asked: list[Arrival]
) -> None:
    """Each client as if it came first: signatures of later clients can be compared."""
    flis = {"algorithm": {"name": "flis_hc"}, "clustering": {"n_clusters": 2}}
    rayfl.run({**settings, **flis, "rounds": 1})
    (signed, trained) = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    for arrivals in (signed, trained):
        assert sorted(np.concatenate([arrival.clients for arrival in arrivals]).tolist()) == list(range(8))
    for arrival in signed:
        assert arrival.fresh.all()
        assert arrival.round == 0
        assert not arrival.same.any()


def test_newcomers_of_cfl_compare_updates_in_the_order(
    settings: dict[str, Any], asked: list[Arrival], tmp_path: Path
) -> None:
    """Without what they keep between rounds: newcomers have nothing yet."""
    tasks = [{"labels": [0, 1, 2, 3, 4], "clients": 4}, {"labels": [5, 6, 7, 8, 9], "clients": 4}]
    criteria = {"eps1": 10, "eps2": 0, "min_size": 5}
    cfl = {"algorithm": {"name": "cfl", "criteria": criteria}}
    result = rayfl.run({**settings, **cfl, "partition": {"name": "tasks", "tasks": tasks}})
    asked.clear()
    newcomers.assign_newcomers(result.path, newcomers_file(tmp_path), epochs=0, local_epochs=0)
    assert asked
    assert all(arrival.fresh.all() and not arrival.state.shape[1] for arrival in asked)


def test_a_curriculum_that_looks_back_has_the_models_of_the_last_round(run: Run) -> None:
    """Fine-tuning sorts by the loss of the client's own last model; before its first round, as others do."""
    orders: list[Any] = ["shuffled", *({"name": "curriculum", "score": s} for s in ("global", "local"))]
    tuned = [
        run(order=order, rounds=2, evaluation={"finetune_epochs": 2}).result.clients["accuracy_finetuned"]
        for order in orders
    ]
    assert len({tuple(each.tolist()) for each in tuned}) == 3


def test_newcomers_after_a_run_fine_tune_in_its_order(
    settings: dict[str, Any], asked: list[Arrival], tmp_path: Path
) -> None:
    result = rayfl.run(settings)
    asked.clear()
    newcomers.assign_newcomers(result.path, newcomers_file(tmp_path), epochs=4, local_epochs=0)
    assert [arrival.work.epochs for arrival in asked] == [4]
    assert asked[0].fresh.all()


# --- local objectives whose clients train several times in a round ---------------------------------------


class Twice(LocalObjective):
    name: Literal["twice"] = "twice"

    def train(self, start: Start, train: Train) -> tuple[TrainedBlock, Outcome]:
        first = train(start.work, start.models)
        block = train(replace(start.work, phase=1), first.rows)
        return block, self.finish(start, block)


class TwiceThenHead(Twice):
    name: Literal["twice_then_head"] = "twice_then_head"

    def finetuning(self, work: LocalWork, spec: ModelSpec) -> LocalWork | None:
        return replace(work, frozen=tuple(spec.segment(first=1)))


def test_fine_tuning_after_several_trainings_must_be_defined(settings: dict[str, Any]) -> None:
    given = {**settings, "order": "shuffled", "evaluation": {"finetune_epochs": 1}}
    with pytest.raises(ConfigError) as caught:
        rayfl.run({**given, "local": Twice()})
    assert str(caught.value) == (
        "evaluation.finetune_epochs: clients of Twice may train several times in a round, and it does not "
        "say how they fine-tune; set it to 0, or define Twice.finetuning"
    )
    rayfl.run({**given, "local": Twice(), "evaluation": {}})
    result = rayfl.run({**given, "local": TwiceThenHead()})
    spec, before, after = build(load(given))[1].spec, result.client_model(2), result.client_model(2, True)
    same = [torch.equal(before[name], after[name]) for name in spec.names]
    assert same == [True, True, False, False]


def test_every_training_of_a_round_has_a_curriculum_of_its_own(run: Run, settings: dict[str, Any]) -> None:
    """As each shuffles differently: the second draws other batches than the first."""
    from rayfl.ordering.curriculum import Curriculum

    seen: list[Any] = []
    original = Curriculum.visits

    def visits(self: Curriculum, arrival: Arrival) -> Any:
        found = original(self, arrival)
        seen.append((moment(arrival.round, arrival.work.phase), found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Curriculum, "visits", visits)
        random = {"name": "curriculum", "order": "random"}
        rayfl.run({**settings, "rounds": 1, "order": random, "local": Twice()})
    assert [when for when, _ in seen[:2]] == [(0,), (0, 1)]
    first, second = (np.concatenate([np.ravel(b) for b in found[0]]) for _, found in seen[:2])
    assert first.tolist() != second.tolist()
