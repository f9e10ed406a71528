"""A few clients stand for all: in tests between the rounds, and as participants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from rayfl.api import resume
from rayfl.config import load
from rayfl.coresets.clients import client_graph, evaluation_coreset
from rayfl.errors import ConfigError, Interrupted
from rayfl.events import BlockDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.driver import Driver
from rayfl.servers.queries import histograms
from tests.runs import assert_same


@pytest.fixture
def many(settings: dict[str, Any]) -> dict[str, Any]:
    """60 clients in three groups."""
    tasks = [
        {"labels": [0, 1, 2, 3], "clients": 30},
        {"labels": [4, 5, 6], "clients": 20},
        {"labels": [7, 8, 9], "clients": 10},
    ]
    return {**settings, "partition": {"name": "tasks", "tasks": tasks}}


def test_estimates_between_and_the_truth_in_the_end(many: dict[str, Any]) -> None:
    few = rayfl.run({**many, "evaluation": {"coreset": 12}})
    every = rayfl.run(many)
    assert few.summary["models_sha256"] == every.summary["models_sha256"]  # tests change nothing
    estimated, true = few.rounds["accuracy_mean"].to_numpy(), every.rounds["accuracy_mean"].to_numpy()
    assert estimated[-1] == true[-1]
    assert (estimated[:-1] != true[:-1]).all()
    assert np.abs(estimated - true).max() < 10
    assert few.clients["accuracy_last"].notna().all()


def test_estimates_are_the_weighted_means_of_those_tested(many: dict[str, Any]) -> None:
    stages, _ = build(load(many))
    core = evaluation_coreset(client_graph(histograms(stages[0].federation)), 12, seed=3)
    few = rayfl.run({**many, "rounds": 2, "evaluation": {"coreset": 12}})
    every = rayfl.run({**many, "rounds": 1})  # its only test is after round 0, of everybody
    accuracy = every.clients["accuracy_last"].to_numpy()[core.ids]
    assert few.rounds["accuracy_mean"][0] == pytest.approx(core.weights @ accuracy)


def test_histograms_by_hand(settings: dict[str, Any]) -> None:
    federation = build(load(settings))[0][0].federation
    shares = histograms(federation)
    y = federation.samples.y_train[federation.train[4]]
    np.testing.assert_allclose(shares[4], np.bincount(y, minlength=10) / len(y))
    np.testing.assert_allclose(shares.sum(axis=1), 1)


def test_participants_stand_for_all_and_are_cheap(many: dict[str, Any]) -> None:
    changes = {"training": {**many["training"], "participation": 0.2}, "rounds": 5}
    chosen = rayfl.run({**many, **changes, "sampling": {"name": "coreset", "kappa": 0.5, "spread": 0.5}})
    assert chosen.rounds["clients"].tolist() == [12] * 5
    again = rayfl.run({**many, **changes, "sampling": {"name": "coreset", "kappa": 0.5, "spread": 0.5}})
    assert chosen.summary["models_sha256"] == again.summary["models_sha256"]
    uniform = rayfl.run({**many, **changes})
    assert chosen.summary["models_sha256"] != uniform.summary["models_sha256"]


JOIN = {"name": "join", "round": 2, "clients": 3, "group": 0}


def histograms_sent(result: rayfl.Result) -> list[tuple[int, int]]:
    """Rounds and bytes."""
    table = result.communication
    sent = table[(table["kind"] == "histogram") & (table["direction"] == "up")]
    assert len(sent) == (table["kind"] == "histogram").sum()
    return list(zip(sent["round"].tolist(), sent["bytes"].tolist(), strict=True))


@pytest.mark.parametrize("how", ["sampling", "evaluation"])
def test_histograms_are_sent_once_a_stage(how: str, many: dict[str, Any], tmp_path: Path) -> None:
    """Ten numbers of four bytes from each of 57, then of 60 clients; a resumed run does not pay twice."""
    training = {**many["training"], "participation": 0.2}
    asking = {
        "sampling": {"training": training, "sampling": "coreset"},
        "evaluation": {"evaluation": {"coreset": 12}},
    }
    settings = {**many, **asking[how], "rounds": 4, "events": [JOIN]}
    whole = rayfl.run(settings)
    assert histograms_sent(whole) == [(0, 57 * 40), (2, 60 * 40)]
    assert histograms_sent(rayfl.run(many)) == []

    for at in (1, 3):
        config = load(settings)
        stages, host = build(config)
        directory, backend, stopping = RunDirectory.create(config), InlineBackend(), []

        def watch(event: RunEvent, at: int = at, stopping: list[bool] = stopping) -> None:
            stopping.extend([True] if isinstance(event, BlockDone) and event.round == at else [])

        with pytest.raises(Interrupted):
            Driver(config, stages, backend, directory, host, watch, lambda s=stopping: bool(s)).run()
        backend.close()
        assert_same(resume(directory.path), whole)


@pytest.mark.parametrize("kappa", [0.01, 0.5])
def test_as_many_take_part_as_were_asked_for(many: dict[str, Any], kappa: float) -> None:
    """Also where fewer stand for all: equal clients, or cheap ones that dear ones then replace."""
    alike = {"name": "label_blocks", "clients": 400, "blocks": 10}
    changes = {"partition": alike, "training": {**many["training"], "participation": 0.25}, "rounds": 2}
    chosen = rayfl.run({**many, **changes, "sampling": {"name": "coreset", "kappa": kappa, "spread": 5.0}})
    assert chosen.rounds["clients"].tolist() == [100, 100]


def test_a_coreset_of_three_is_refused(many: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.coreset: got 3; expected an integer >= 4 or null"):
        load({**many, "evaluation": {"coreset": 3}})


SMALL = ["algorithm=fedavg", "rounds=6", "execution.backend=inline", "output.report=false"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[rayfl.Result, rayfl.Result]:
    """The example of the documentation, with groups of 10, 6 and 4: from 8 clients, and from all."""
    to = f"output.root={tmp_path_factory.mktemp('runs')}"
    found = [rayfl.run("digits-demo", [*SMALL, to, *more]) for more in (["evaluation.coreset=8"], [])]
    for result in found:
        _ = result.rounds, result.groups, result.clients, result.summary
    return found[0], found[1]


def test_small_groups_count_as_much_as_they_are(small: tuple[rayfl.Result, rayfl.Result]) -> None:
    """The two groups that FedAvg serves worse were a tenth of the estimate, not half: 88.5 % for 76.4."""
    estimated, true = small
    error = (estimated.rounds["accuracy_mean"] - true.rounds["accuracy_mean"]).to_numpy()
    assert np.abs(error).max() < 5
    assert (np.abs(error) < 3 * estimated.rounds["accuracy_se"])[:-1].all()
    worst = estimated.rounds["accuracy_worst10"] - true.rounds["accuracy_worst10"]
    assert np.abs(worst).max() < 10


def test_an_estimate_is_marked_and_no_best(small: tuple[rayfl.Result, rayfl.Result]) -> None:
    estimated, true = small
    assert estimated.rounds["estimated_from"].tolist()[:-1] == [8] * 5
    assert np.isnan(estimated.rounds["estimated_from"].iloc[-1])
    assert true.rounds["estimated_from"].isna().all()
    assert estimated.summary["accuracy_mean_best_test"] == true.rounds["accuracy_mean"].iloc[-1]
    assert true.summary["accuracy_mean_best_test"] == true.rounds["accuracy_mean"].max()
    assert (estimated.clients["best_round"] == 5).all()
    groups = estimated.groups.set_index(["round", "kind", "id"])
    assert groups.loc[(0, "group")]["clients"].tolist() == [10, 6, 4]
    assert groups.loc[(0, "group")]["estimated_from"].sum() == 8
    assert groups.loc[(5, "group")]["estimated_from"].isna().all()


def test_with_all_clients_there_is_no_estimate(settings: dict[str, Any]) -> None:
    """Nine clients, nine wanted."""
    assert rayfl.run({**settings, "evaluation": {"coreset": 9}}).rounds["estimated_from"].isna().all()
