"""Training at the servers: who trains what, the same bits everywhere, and mistakes in a line.

The numbers are checked against NumPy in tests/algorithms/test_contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

import rayfl
from rayfl import plugins
from rayfl.algorithms import Algorithm, ServerState, Setup
from rayfl.algorithms.pacfl import PACFL
from rayfl.api import Result, run
from rayfl.errors import ConfigError
from rayfl.local import LocalObjective, Start, Train
from rayfl.local.base import Outcome
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.training import TrainedBlock
from rayfl.training.reports import ClientReport, UpdateLengths
from rayfl.training.server import AtServer, ServerTraining
from tests.docs.blocks import DOCS, blocks

pytestmark = pytest.mark.usefixtures("forgotten_parts")

SEEN: list[AtServer] = []


@dataclass(frozen=True)
class Move(ServerTraining):
    """Adds ``by`` to every parameter, and says what it saw."""

    by: float
    noise: float = 0.0

    def train(self, at: AtServer) -> None:
        SEEN.append(at)
        with torch.no_grad():
            for parameter in at.module.parameters():
                parameter += self.by + self.noise * torch.randn(parameter.shape)


class Moving(PACFL):
    name: Literal["pacfl", "moving"] = "moving"
    by: float = 0.0
    noise: float = 0.0
    defaults: ClassVar[Mapping[str, Any]] = PACFL.defaults

    def reports(self, setup: Setup, state: ServerState) -> Mapping[str, ClientReport]:
        return {"lengths": UpdateLengths()}

    def server_training(self, setup: Setup, state: ServerState) -> ServerTraining | None:
        return Move(self.by, self.noise)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


@pytest.fixture
def clustered(settings: dict[str, Any]) -> dict[str, Any]:
    training = {**settings.get("training", {}), "participation": 0.7}
    return {**settings, "clustering": {"n_clusters": 3}, "training": training, "rounds": 2}


def models(result: Result) -> np.ndarray[Any, Any]:
    return Checkpoint.load(checkpoints(result.path / "checkpoints")[-1]).models


def test_each_server_has_its_own_clients(clustered: dict[str, Any]) -> None:
    result = run({**clustered, "algorithm": Moving()})
    labels = result.clients.set_index("client")["cluster"]
    assert {at.model for at in SEEN} == {0, 1, 2}
    for at in SEEN:
        assert len(at.clients)
        assert (labels[at.clients] == at.model).all()
        assert at.reports["lengths"].shape == at.weights.shape == at.clients.shape
        assert (at.reports["lengths"] > 0).all()
        assert at.module.training
    for round in (0, 1):
        cohort = np.concatenate([at.clients for at in SEEN if at.round == round])
        assert len(np.unique(cohort)) == len(cohort) == round_size(result, round)
    assert (
        result.summary["models_sha256"] == run({**clustered, "algorithm": "pacfl"}).summary["models_sha256"]
    )


def round_size(result: Result, round: int) -> int:
    return int(result.rounds["clients"][round])


def test_clients_continue_with_what_the_server_has_trained(clustered: dict[str, Any]) -> None:
    once = {**clustered, "rounds": 1}
    plain, moved = (models(run({**once, "algorithm": Moving(by=by)})) for by in (0.0, 0.25))
    np.testing.assert_allclose(moved, plain + 0.25, rtol=0, atol=1e-6)
    longer = [run({**clustered, "algorithm": Moving(by=by)}).summary["models_sha256"] for by in (0.0, 0.25)]
    assert longer[0] != longer[1]


def test_random_numbers_are_the_runs(clustered: dict[str, Any]) -> None:
    """The same in a second run; others in each round and for each model."""
    one = {**clustered, "rounds": 1}
    first, again = (run({**one, "algorithm": Moving(noise=0.1)}) for _ in range(2))
    assert again.summary["models_sha256"] == first.summary["models_sha256"]
    quiet = models(run({**one, "algorithm": Moving()}))
    steps = models(first) - quiet
    assert np.abs(np.corrcoef(steps)[np.triu_indices(3, 1)]).max() < 0.2
    orders = [
        np.concatenate(list(replace(SEEN[0], round=round, model=model).shuffled(20, 6, 2)))
        for round, model in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert sorted(orders[0].tolist()) == sorted([*range(20), *range(20)])
    assert (orders[0] == orders[1]).all()
    assert (orders[0] != orders[2]).any()
    assert (orders[0] != orders[3]).any()


class Fails(LocalObjective):
    """The client with most samples starts from NaN."""

    name: Literal["fails"] = "fails"

    def train(self, start: Start, train: Train) -> tuple[TrainedBlock, Outcome]:
        broken = start.models.clone()
        broken[torch.from_numpy(start.sizes == start.sizes.max())] = float("nan")
        block = train(start.work, broken)
        return block, Outcome(block.rows, start.state, start.server)


class Flat(Algorithm):
    name: Literal["flat"] = "flat"

    def reports(self, setup: Setup, state: ServerState) -> Mapping[str, ClientReport]:
        return {"lengths": UpdateLengths()}

    def server_training(self, setup: Setup, state: ServerState) -> ServerTraining | None:
        return Move(0.0)


def test_failed_clients_are_not_there(settings: dict[str, Any]) -> None:
    execution = {**settings["execution"], "block_size": 100, "tolerate_failures": 3}
    result = run({**settings, "rounds": 1, "execution": execution, "algorithm": Flat(), "local": Fails()})
    failed = int(result.rounds["failures"][0])
    (at,) = SEEN
    assert failed
    assert len(at.clients) == round_size(result, 0) - failed
    assert np.isfinite(at.reports["lengths"]).all()


@dataclass(frozen=True)
class Wrong(ServerTraining):
    how: str

    def train(self, at: AtServer) -> None:
        if self.how == "raises":
            raise ValueError("no such layer\nin this network")
        with torch.no_grad():
            next(at.module.parameters())[:] = float("nan")


class Mistaken(Algorithm):
    name: Literal["mistaken"] = "mistaken"
    how: str = "raises"

    def server_training(self, setup: Setup, state: ServerState) -> Any:
        return "train" if self.how == "text" else Wrong(self.how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", r"Wrong.train: round 1, model 0: ValueError: no such layer in this network"),
        ("nan", r"Wrong.train: round 1, model 0: FloatingPointError: .* not finite any more"),
        ("text", r"mistaken.server_training: returned .*; expected a ServerTraining"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        run({**settings, "rounds": 1, "algorithm": Mistaken(how=how)})
    assert "\n" not in str(error.value)


class Hidden(Algorithm):
    name: Literal["hidden"] = "hidden"

    @property
    def permutes(self) -> bool:
        return True

    def server_training(self, setup: Setup, state: ServerState) -> ServerTraining | None:
        return Move(0.0)


def test_permuted_models_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the servers see permuted models, which they cannot train"):
        run({**settings, "rounds": 1, "algorithm": Hidden()})


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_it_is_the_same(clustered: dict[str, Any], ray_cluster: None) -> None:
    inline = run({**clustered, "algorithm": Moving(by=0.01, noise=0.1)})
    execution = {**clustered["execution"], "backend": "ray", "actors": 2}
    on_ray = run({**clustered, "algorithm": Moving(by=0.01, noise=0.1), "execution": execution})
    assert on_ray.summary["models_sha256"] == inline.summary["models_sha256"]


def test_a_resumed_run_is_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    """FedDF of the documentation, under a name that no other test of the process has."""
    page = (DOCS / "your" / "method.md").read_text(encoding="utf-8")
    code = next(block.code for block in blocks(page) if block.title == "feddf.py")
    (tmp_path / "feddf_resumed.py").write_text(code.replace('"feddf"', '"feddf_resumed"'))
    named = {"plugins": [str(tmp_path / "feddf_resumed.py")], "algorithm": "feddf_resumed"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_loaded", {})  # Ray of later tests does not have it
        given = {**settings, **named, "rounds": 2}
        whole = run(given)
        resumed = rayfl.resume(run({**given, "rounds": 1}).path, ["rounds=2"])
    assert resumed.summary["models_sha256"] == whole.summary["models_sha256"]
