"""Names of run directories: what tells one run from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.config import changes, load, variant
from rayfl.models import MODELS
from rayfl.rundir import RunDirectory


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["partition.alpha=0.3", "training.lr=2e-2"], ["alpha=0.3", "lr=0.02"]),
        (["training.lr=0.5", "seed=4", "name=other", "algorithm=fedavgm"], ["lr=0.5"]),
        (
            ["rounds=3", "execution.backend=inline", "output.report=false"],
            [],
        ),  # a resumed run may change them
        (["training.momentum=0"], []),  # as it was
        (["training.lr=1", "training.lr=2"], ["lr=2"]),
        (["model=lenet5", "training.weight_decay=0"], ["model=lenet5"]),
        (["model.name=lenet5"], ["model=lenet5"]),
        (["model.hidden=[5, 4]"], ["hidden=5-4"]),
        (["data={name: npz, path: a b/ü.npz}"], ["data=npz"]),
        (["data={name: npz}", "data.path=a b/c ü.npz"], ["data=npz", "path=c-.npz"]),
        (["events=[{name: leave, round: 1, clients: 2}]"], ["events=1"]),
        (["local.name=fedprox", "local.mu=0.5"], ["local=fedprox", "mu=0.5"]),
        (["training={lr: 0.7, momentum: 0}"], ["lr=0.7"]),
    ],
)
def test_settings_that_differ_from_what_was_named(given: list[str], expected: list[str]) -> None:
    source: dict[str, Any] = {"name": "t", "partition": {"name": "dirichlet", "alpha": 0.1, "clients": 5}}
    assert list(changes(load(source, given), source, given)) == expected


def test_two_settings_of_one_name_are_told_apart() -> None:
    given = ["training.batch_size=7", "evaluation.batch_size=8", "training.epochs=3"]
    expected = ("training.batch_size=7", "evaluation.batch_size=8", "epochs=3")
    assert changes(load({}, given), {}, given) == expected


def test_settings_beside_which_the_file_is_incomplete() -> None:
    source = {"data": {"name": "npz"}}  # has no path
    assert changes(load(source, ["data.path=x.npz"]), source, ["data.path=x.npz"]) == ("path=x.npz",)


def test_runs_beside_one_another_speak_of_what_they_use() -> None:
    given = ["clustering.n_clusters=2", "training.lr=0.3"]
    own = {"algorithm": "pacfl"}
    assert changes(load(own, given), own, given) == ("n_clusters=2", "lr=0.3")
    assert changes(variant(own, given, "fedavg"), own, given) == ("lr=0.3",)


def test_the_name_of_a_run_directory(settings: dict[str, Any]) -> None:
    smaller = MODELS["mlp"](hidden=(5,))
    result = rayfl.run(settings, ["rounds=1", "seed=2", "training.lr=0.25"], model=smaller)
    start, _, time = result.path.name.rpartition("-seed2-")
    assert start == f"{settings['name']}-fedavg-lr=0.25-hidden=5"
    assert len(time) == len("20261122-104500")


def test_a_name_is_short_whatever_was_changed(tmp_path: Path) -> None:
    config = load({"name": "n" * 20, "seed": 12345}, [f"output.root={tmp_path}"])
    changed = [f"setting_{i}={'v' * 12}" for i in range(9)]
    path = RunDirectory.create(config, changed).path
    assert len(path.name) <= 100
    assert path.name.startswith(f"{'n' * 20}-fedavg-setting_0=vvvvvvvvvvvv-and8more-seed12345-")
