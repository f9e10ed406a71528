"""What a run writes about its tests: by group, how certain, on what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rayfl
from rayfl.config import load
from rayfl.errors import Interrupted
from rayfl.servers import records
from rayfl.servers.building import build
from rayfl.servers.driver import Driver

PARTS = ["group_var_within", "group_var_between"]


@pytest.fixture(scope="module")
def whole() -> dict[str, rayfl.Result]:
    return {}


@pytest.fixture
def clustered(settings: dict[str, Any], whole: dict[str, rayfl.Result]) -> rayfl.Result:
    """Nine clients in three planted groups, which PACFL is told to divide in two."""
    if "pacfl" not in whole:
        found = rayfl.run({**settings, "algorithm": "pacfl", "clustering": {"n_clusters": 2}})
        _ = found.rounds, found.groups, found.clients, found.summary
        whole["pacfl"] = found
    return whole["pacfl"]


@pytest.mark.parametrize("kind", ["group", "cluster"])
def test_the_last_rows_are_the_means_over_the_rows_of_the_clients(kind: str, clustered: rayfl.Result) -> None:
    last = clustered.groups.query(f"round == 2 and kind == '{kind}'").set_index("id")
    found = clustered.clients.groupby(kind)
    assert last.index.tolist() == sorted(found.groups)
    np.testing.assert_array_equal(last["clients"], found.size())
    np.testing.assert_array_equal(last["test_samples"], found["test_samples"].sum())
    np.testing.assert_allclose(last["accuracy_mean"], found["accuracy_last"].mean())
    np.testing.assert_allclose(last["accuracy_var"], found["accuracy_last"].var(ddof=0))
    np.testing.assert_allclose(last["accuracy_se"], found["accuracy_last"].sem())
    assert len(clustered.summary[f"by_{kind}"]) == len(last)
    assert clustered.summary[f"by_{kind}"][-1]["accuracy_mean"] == last["accuracy_mean"].iloc[-1]


def test_in_every_round_the_variance_is_that_within_and_that_between(clustered: rayfl.Result) -> None:
    rounds = clustered.rounds
    np.testing.assert_allclose(rounds[PARTS].sum(axis=1), rounds["accuracy_var"])
    np.testing.assert_allclose(
        rounds["cluster_var_within"] + rounds["cluster_var_between"], rounds["accuracy_var"]
    )
    assert (rounds["cluster_var_within"] > rounds["group_var_within"]).all()  # two groups share a cluster
    assert sorted(clustered.groups["round"].unique()) == [0, 1, 2]


def test_the_samples_that_clients_share_are_counted_once(
    settings: dict[str, Any], clustered: rayfl.Result
) -> None:
    federation = build(load(settings))[0][0].federation
    held = [set(test.tolist()) for test in federation.test]
    assert clustered.rounds["distinct_test_samples"].unique() == [len(set.union(*held))]
    sizes = [len(one) for one in held]
    assert clustered.summary["client_test_samples"] == [min(sizes), np.median(sizes), max(sizes)]
    rows = clustered.groups.query("round == 0 and kind == 'group'").set_index("id")
    for group, row in rows.iterrows():
        its = [held[i] for i in np.flatnonzero(federation.groups == group)]  # type: ignore[operator]
        assert row["distinct_test_samples"] == len(set.union(*its)) < row["test_samples"]


def test_the_same_images_under_other_labels_are_the_same_images(settings: dict[str, Any]) -> None:
    partition = {"name": "relabelled", "clients": 6, "clusters": 2}
    found = rayfl.run({**settings, "rounds": 1, "partition": partition})
    federation = build(load({**settings, "partition": partition}))[0][0].federation
    images = len(federation.samples.y_test)
    plain = np.unique(federation.test.values % images)
    assert len(np.unique(federation.test.values)) > len(plain)
    assert found.rounds["distinct_test_samples"].tolist() == [len(plain)]


def test_many_clusters_have_no_rows_of_their_own(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SOLO at 100,000 clients would write 100,000 rows a round."""
    monkeypatch.setattr(records, "MOST_GROUPS", 4)
    clustering = {"grouping": "singletons"}
    found = rayfl.run({**settings, "rounds": 1, "algorithm": "pacfl", "clustering": clustering})
    assert found.groups["kind"].tolist() == ["group"] * 3
    assert found.rounds["cluster_var_within"].tolist() == [0.0]
    np.testing.assert_allclose(found.rounds["cluster_var_between"], found.rounds["accuracy_var"])
    assert found.summary["by_cluster"] == []


def test_without_groups_and_clusters_there_are_no_rows(settings: dict[str, Any]) -> None:
    found = rayfl.run({**settings, "rounds": 1, "partition": {"name": "iid", "clients": 4}})
    assert found.groups.empty
    assert list(found.groups.columns)[:3] == ["round", "kind", "id"]
    assert found.rounds[PARTS].isna().all(axis=None)


def test_rounds_without_a_test_have_no_groups(settings: dict[str, Any]) -> None:
    found = rayfl.run({**settings, "rounds": 4, "evaluation": {"every": 3}})
    assert sorted(found.groups["round"].unique()) == [2, 3]
    assert pd.isna(found.rounds["distinct_test_samples"][0])


def test_a_round_that_was_not_completed_does_not_count(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped after training, while clients are tested."""
    original = Driver._evaluate

    def evaluate(self: Driver, state: Any, this_round: Any) -> Any:
        if state.round == 2:
            raise Interrupted("stopped")
        return original(self, state, this_round)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "_evaluate", evaluate)
        with pytest.raises(Interrupted):
            rayfl.run({**settings, "name": "stopped"})
    (path,) = Path(settings["output"]["root"]).glob("stopped-*")
    assert (rayfl.Result(path).clients["rounds_trained"] == 1).all()
    assert (rayfl.resume(path).clients["rounds_trained"] == 3).all()


def test_a_checkpoint_that_does_not_say_how_often_clients_trained_leaves_that_out(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of rayfl 0.1."""
    original = records.Records.save

    def save(self: records.Records, state: Any) -> Any:
        arrays, tables = original(self, state)
        return {name: each for name, each in arrays.items() if name != "rounds_trained"}, tables

    with monkeypatch.context() as patch:
        patch.setattr(records.Records, "save", save)
        begun = rayfl.run({**settings, "rounds": 1})
    assert (begun.clients["rounds_trained"] == 1).all()
    assert "rounds_trained" not in rayfl.resume(begun.path, ["rounds=2"]).clients
