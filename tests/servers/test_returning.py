"""Clients that leave and return: their signatures and clusters wait for them, and nothing is sent twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rayfl.algorithms import OneShotState
from rayfl.api import Result, resume, run
from rayfl.errors import DataError, ResultsLost
from rayfl.rundir import RunDirectory
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.queries import ClientQueries
from tests.runs import TASKS

GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2]
CODES = {"features": "pca", "embedding": "none", "gamma": "auto", "n_clusters": 3}
METHODS: dict[str, dict[str, Any]] = {
    "pacfl": {"clustering": {"n_clusters": 3}},
    "mt_hfl": {"clustering": {"n_clusters": 3}},
    "flis_hc": {"clustering": {"n_clusters": 3}},
    "pca_km_hc": {"clustering": {"features": "pca", "n_clusters": 3}},
    "flt": {"clustering": CODES},
    "flt, clusters": {"algorithm": {"name": "flt", "train_on": "clusters"}, "clustering": CODES},
    "planted": {"algorithm": "pacfl", "clustering": {"grouping": "planted"}},
}
LEAVE = {"name": "leave", "round": 1, "group": 2}
RETURN = {"name": "join", "round": 3, "returning": True}
VECTORS = 3 * 64 * 4
"""Bytes of PACFL's signature."""


def dynamic(settings: dict[str, Any], method: str, events: list[dict[str, Any]], **changes: Any) -> Result:
    own = {"algorithm": method, **METHODS.get(method, {})}
    own["clustering"] = {**own.get("clustering", {}), **changes.pop("clustering", {})}
    epochs = 5 if method == "flis_hc" else 1  # by whose predictions clients are clustered
    training = {"epochs": epochs, "batch_size": 10, "lr": 0.1}
    return run({**settings, "rounds": 5, "training": training, **own, "events": events, **changes})


def last(result: Result, kind: type[OneShotState] | None = None) -> Checkpoint:
    return Checkpoint.load(checkpoints(result.path / "checkpoints")[-1], kind)


def signed(result: Result) -> list[int]:
    """The bytes of signatures that clients sent in each round."""
    sent = result.communication
    sent = sent[(sent["kind"] == "signature") & (sent["direction"] == "up")]
    by_round = sent.groupby("round")["bytes"].sum()
    return [int(by_round.get(t, 0)) for t in range(5)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("again", [{}, {"every": 2}], ids=["once", "clustered again meanwhile"])
@pytest.mark.parametrize("method", METHODS)
def test_a_cluster_whose_members_were_all_away_is_theirs_when_they_return(
    method: str, again: dict[str, Any], settings: dict[str, Any]
) -> None:
    result = dynamic(settings, method, [LEAVE, RETURN], clustering=again)
    assert result.rounds["clients"].tolist() == [9, 7, 7, 9, 9]
    first, end = result.clusters["timeline"][0], last(result)
    assert result.summary["clusters"] == first["n_clusters"]
    assert end.state.assignment.tolist() == first["labels"]
    assert len(end.models) == first["n_clusters"], "no cluster is founded, and none is lost"
    assert result.rounds["ari"].tolist() == [pytest.approx(first["ari"])] * 5
    assert all(sent == 0 for sent in signed(result)[1:]), "the servers have their signatures"
    returned = next(entry for entry in result.clusters["timeline"] if "returned" in entry)
    assert (returned["round"], returned["returned"], returned["newcomers"]) == (3, [7, 8], [])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", METHODS)
def test_a_newcomer_joins_the_cluster_of_absent_clients(method: str, settings: dict[str, Any]) -> None:
    """Client 8 waits; the other one of its group has left when it comes."""
    events = [{**LEAVE, "group": None, "clients": [7]}, {"name": "join", "round": 2, "clients": [8]}]
    result = dynamic(settings, method, events)
    labels = last(result).state.assignment
    assert labels[8] == labels[7]
    assert labels[8] not in labels[:7]
    assert len(last(result).models) == result.clusters["timeline"][0]["n_clusters"]


def test_who_returns_with_other_data_is_a_newcomer(settings: dict[str, Any]) -> None:
    """Client 8 returns with the data of group 0, and sends their signature; client 7 returns as it was."""
    drift = {"name": "drift", "round": 3, "kind": "group", "clients": [8], "to": 0, "reuse": True}
    result = dynamic(settings, "pacfl", [LEAVE, RETURN, drift])
    joined = result.clusters["timeline"][-1]
    assert (joined["newcomers"], joined["returned"]) == ([8], [7])
    assert joined["labels"] == [0, 0, 0, 0, 1, 1, 1, 2, 0]
    assert signed(result) == [9 * VECTORS, 0, 0, VECTORS, 0]


def test_flags_of_absent_clients_wait(settings: dict[str, Any]) -> None:
    """lambda = 1: of two clients with new data one has left before the clustering would be due."""
    events = [
        {"name": "drift", "round": 1, "kind": "permuted_labels", "clients": [0]},
        {"name": "leave", "round": 2, "clients": [0]},
        {"name": "drift", "round": 3, "kind": "permuted_labels", "clients": [4]},
        {"name": "join", "round": 4, "returning": True},
    ]
    result = dynamic(settings, "pacfl", events, clustering={"max_flags": 1})
    found = [entry["round"] for entry in result.clusters["timeline"] if "newcomers" not in entry]
    assert found == [0, 4]


def test_a_signature_is_sent_once(settings: dict[str, Any]) -> None:
    """Clustered again in every round, in one of which a client joins and another has new data."""
    events = [
        {"name": "join", "round": 2, "clients": 1, "group": 0},
        {"name": "drift", "round": 3, "kind": "permuted_labels", "clients": [5]},
    ]
    result = dynamic(settings, "pacfl", events, clustering={"every": 1})
    assert signed(result) == [8 * VECTORS, 0, VECTORS, VECTORS, 0]


def test_beside_a_drift_newcomers_are_compared_with_signatures_that_were_sent(
    settings: dict[str, Any],
) -> None:
    drift = {"name": "drift", "round": 2, "kind": "group", "clients": [5], "to": 0, "reuse": True}
    join = {"name": "join", "round": 2, "clients": 1, "group": 0}
    result = dynamic(settings, "pacfl", [join, drift])
    assert signed(result) == [8 * VECTORS, 0, 2 * VECTORS, 0, 0]


def test_absent_clients_send_nothing_and_receive_nothing(settings: dict[str, Any]) -> None:
    """MT-HFL's exchange: a newcomer's eigenvectors go to the six that are present, and relations come back
    from it to all nine, and from those six to it."""
    leave = {"name": "leave", "round": 1, "clients": [0, 4]}
    join = {"name": "join", "round": 2, "clients": [8]}
    result = dynamic(settings, "mt_hfl", [leave, join])
    sent = result.communication
    sent = sent[(sent["kind"] == "signature") & (sent["round"] == 2)].set_index("direction")["bytes"]
    assert sent["up"] == 4 * (5 * 64 + 9 + 6)
    assert last(result).state.assignment.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]


def test_the_mean_number_of_relatives_is_one_of_those_that_were_compared(settings: dict[str, Any]) -> None:
    """Four of nine clients have come, and nobody is related to anybody else."""
    join = {"name": "join", "round": 4, "clients": [4, 5, 6, 7, 8]}
    result = dynamic(settings, "flt", [join], clustering={"gamma": 0.0})
    assert result.clusters["timeline"][0]["graph"]["relatives"] == 0


def test_clients_that_have_not_arrived_have_no_cluster_in_the_history(settings: dict[str, Any]) -> None:
    for method in ("pacfl", "ifca"):
        result = dynamic(settings, method, [{"name": "join", "round": 4, "clients": [8]}])
        *before, after = [entry["labels"] for entry in result.clusters["timeline"]]
        assert all(labels[8] == -1 for labels in before)
        assert all(min(labels[:8]) >= 0 for labels in before)
        assert min(after) >= 0


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_as_inline(settings: dict[str, Any], ray_cluster: None) -> None:
    execution = {**settings["execution"], "backend": "ray", "actors": 2, "cpus_per_actor": 0.5}
    found = [
        dynamic(settings, "mt_hfl", [LEAVE, RETURN], clustering={"every": 2}, **changes)
        for changes in ({}, {"execution": execution})
    ]
    assert found[0].summary["models_sha256"] == found[1].summary["models_sha256"]
    assert found[0].clusters == found[1].clusters


# --- clients without a signature -----------------------------------------------------------------------


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> dict[str, Any]:
    """Client 8 waits, and all its pixels are zero."""
    from rayfl import config
    from rayfl.data.datasets.digits import Digits
    from rayfl.servers import building

    load = Digits.load
    events = [{"name": "join", "round": 2, "clients": [8]}]
    tasks = {
        "name": "tasks",
        "tasks": [*TASKS[:2], {**TASKS[2], "clients": 1}, {"labels": [9], "clients": 1}],
    }
    whole = {**settings, "rounds": 4, "partition": tasks, "events": events}
    whole |= {"algorithm": "pacfl", "clustering": {"n_clusters": 3}}
    stages, _ = building.build(config.load(whole))
    theirs = stages[1].federation.train[8]

    def blanked(self: Digits, root: Any) -> Any:
        samples = load(self, root)
        samples.x_train[theirs] = 0
        return samples

    monkeypatch.setattr(Digits, "load", blanked)
    return whole


def test_a_newcomer_without_a_signature_is_named_before_anything_is_trained(
    blank: dict[str, Any], tmp_path: Any
) -> None:
    with pytest.raises(
        DataError, match=r"after 2 rounds: client 8: subspace signature: all samples are zero"
    ):
        run(blank)
    assert not list(tmp_path.glob("t-*")), "nothing is left of it"


def test_a_newcomer_without_a_signature_may_be_tolerated(blank: dict[str, Any]) -> None:
    """It uses the model of the largest cluster, tries again at every clustering, and has no part in it."""
    blank["execution"]["tolerate_failures"] = 1
    blank["clustering"]["every"] = 3
    result = run(blank)
    assert result.rounds["clients"].tolist() == [8, 8, 9, 9]
    for entry in result.clusters["timeline"][1:]:
        assert entry["labels"] == [0, 0, 0, 0, 1, 1, 1, 2, 0]
    assert last(result, OneShotState).state.known.tolist() == [0] * 8 + [-1]
    assert signed(result) == [8 * VECTORS, 0, 0, 0, 0]


def test_signatures_that_are_lost_with_a_node_before_the_first_round_are_asked_for_again(
    blank: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, found = [0], ClientQueries.missing_signatures

    def lost(self: ClientQueries, clustering: Any, clients: Any) -> Any:
        asked[0] += 1
        if asked[0] == 1:
            raise ResultsLost("a node was lost")
        return found(self, clustering, clients)

    monkeypatch.setattr(ClientQueries, "missing_signatures", lost)
    with pytest.raises(DataError, match="client 8: subspace signature"):
        run(blank)
    assert asked == [2]


def test_at_the_start_too(blank: dict[str, Any]) -> None:
    del blank["events"]
    with pytest.raises(DataError, match=r"client 8: subspace signature: all samples are zero"):
        run(blank)
    blank["execution"]["tolerate_failures"] = 1
    assert run(blank).clients["cluster"].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 0]


def test_a_run_that_is_resumed_names_it(blank: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from rayfl.servers.driver import Driver

    with monkeypatch.context() as patched:
        patched.setattr(Driver, "_check_signatures", lambda self, state: None)
        with pytest.raises(DataError, match="client 8: subspace"):
            run(blank)
    (path,) = RunDirectory(blank["output"]["root"]).path.glob("t-*")
    assert Checkpoint.load(checkpoints(path / "checkpoints")[-1]).state.round == 2
    with pytest.raises(DataError, match="after 2 rounds: client 8: subspace signature"):
        resume(path)
    assert resume(path, ["execution.tolerate_failures=1"]).clients["cluster"][8] == 0
    assert np.isfinite(last(Result(path)).models).all()
