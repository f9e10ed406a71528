"""Runs in which clients come, go and change: who is trained and tested, who keeps what, resuming across."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rayfl.api import Result, resume, run
from rayfl.config import load
from rayfl.errors import ConfigError, Interrupted
from rayfl.events import BlockDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.driver import Driver
from tests.runs import assert_same

EVENTS = [
    {"name": "join", "round": 2, "clients": 1, "group": 0},  # it gets the last id, 8
    {"name": "leave", "round": 3, "clients": [1, 4]},
    {"name": "drift", "round": 4, "kind": "group", "clients": [5], "to": 0, "reuse": True},
    {"name": "join", "round": 5, "returning": True, "clients": [4]},
]
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "solo": {},
    "pacfl": {"clustering": {"n_clusters": 3}},
    "pacfl, flags": {"algorithm": "pacfl", "clustering": {"n_clusters": 3, "max_flags": 0}},
    "ifca": {"algorithm": {"name": "ifca", "clusters": 6}},
    "fedsem": {"algorithm": {"name": "fedsem", "clusters": 3}},
    "fedsoft": {"algorithm": {"name": "fedsoft", "every": 2}},
    "flis_dc": {"algorithm": {"name": "flis_dc", "beta": 0.5}},
    "flis_hc": {"clustering": {"n_clusters": 3}},
    "pacfl, scaffold": {"algorithm": "pacfl", "local": "scaffold", "clustering": {"n_clusters": 3}},
}
PRESENT = [8, 8, 9, 7, 7, 8, 8]
"""Clients that are there in each of the seven rounds."""


def eventful(settings: dict[str, Any], method: str, **changes: Any) -> dict[str, Any]:
    training = {"epochs": 3, "batch_size": 10, "lr": 0.1}
    return {
        **settings,
        "rounds": 7,
        "algorithm": method,
        "events": EVENTS,
        "training": training,
        **METHODS[method],
        **changes,
    }


@pytest.fixture(scope="module")
def whole() -> dict[str, Result]:
    return {}


def _whole(whole: dict[str, Result], settings: dict[str, Any], method: str) -> Result:
    if method not in whole:
        found = whole[method] = run(eventful(settings, method))
        _ = found.rounds, found.clients, found.communication, found.clusters, found.summary, found.groups
    return whole[method]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", METHODS)
def test_those_who_are_there_take_part_and_are_tested(
    method: str, settings: dict[str, Any], whole: dict[str, Result]
) -> None:
    result = _whole(whole, settings, method)
    assert result.rounds["clients"].tolist() == PRESENT
    clients = result.clients
    # The mean of the last round is that of those who are there; client 1 has left.
    there = clients["client"] != 1
    last = clients.loc[there, "accuracy_last"]
    assert result.rounds["accuracy_mean"].iloc[-1] == pytest.approx(last.mean())
    assert clients.loc[1, "n"] == clients.loc[1, "test_samples"] == 0
    # What it reached while it was there was measured beside other clients; the means are of those present.
    assert clients.loc[1, ["accuracy_last", "accuracy_best"]].isna().all()
    assert clients.loc[1, "best_round"] == -1
    assert clients.loc[there, "accuracy_last"].notna().all()
    assert clients["accuracy_last"].mean() == pytest.approx(result.summary["accuracy_mean"])
    # A best is one of the rounds since the last event, before which other clients had other data.
    assert (clients.loc[there, "best_round"] >= 5).all()
    assert result.rounds["stage"].tolist() == [0, 0, 1, 2, 3, 4, 4]
    best = result.rounds["accuracy_mean"][5:].max()
    assert result.summary["accuracy_mean_best_test"] == pytest.approx(best)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("method", "stop"),
    [
        *((method, 4) for method in METHODS),
        # Clients join in round 2: who chooses, clusters and keeps something of its own.
        *((method, 2) for method in ("ifca", "flis_hc", "pacfl, scaffold")),
        *(
            pytest.param(method, 2, marks=pytest.mark.slow)
            for method in ("fedavg", "solo", "pacfl", "pacfl, flags", "fedsem", "flis_dc")
        ),
    ],
)
def test_stopped_in_the_round_of_an_event_and_resumed(
    method: str, stop: int, settings: dict[str, Any], whole: dict[str, Result]
) -> None:
    """The event has happened, the round has not been completed: it happens again when the run goes on."""
    config = load(eventful(settings, method))
    directory = RunDirectory.create(config)
    stages, host = build(config)
    stopping: list[int] = []

    def watch(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.round == stop:
            stopping.append(event.done)

    backend = InlineBackend()
    try:
        with pytest.raises(Interrupted):
            Driver(config, stages, backend, directory, host, watch, lambda: bool(stopping)).run()
    finally:
        backend.close()
    assert Checkpoint.load(checkpoints(directory.path / "checkpoints")[-1]).state.round == stop
    # What is written of the stopped run is from before the event.
    stopped = Result(directory.path)
    assert len(stopped.rounds) == stop
    assert stopped.clients["accuracy_last"].mean() == pytest.approx(stopped.rounds["accuracy_mean"].iloc[-1])
    assert_same(_whole(whole, settings, method), resume(directory.path))


def test_the_planted_groups_of_a_run_are_those_after_its_events(
    settings: dict[str, Any], whole: dict[str, Result]
) -> None:
    """Client 5 has drifted to group 0, and nobody is clustered: a resumed run would write it down anyway."""
    assert _whole(whole, settings, "fedavg").clusters["groups"] == [0, 0, 0, 1, 1, 0, 2, 2, 0]


@pytest.mark.slow
@pytest.mark.ray
def test_events_on_ray_are_those_inline(
    settings: dict[str, Any], whole: dict[str, Result], ray_cluster: None
) -> None:
    execution = {**settings["execution"], "backend": "ray", "actors": 2, "cpus_per_actor": 0.5}
    on_ray = run(eventful(settings, "pacfl, scaffold", execution=execution))
    assert_same(_whole(whole, settings, "pacfl, scaffold"), on_ray)


@pytest.mark.parametrize("method", ["pacfl", "flis_hc", "pacfl, scaffold"])
def test_old_clients_keep_their_clusters_when_others_come_and_go(
    method: str, settings: dict[str, Any], whole: dict[str, Result]
) -> None:
    """The first clusters are the planted ones; the newcomer finds its own; nobody else ever moves."""
    result = _whole(whole, settings, method)
    before, joined = result.clusters["timeline"][:2]
    assert before["labels"][:8] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert joined["round"] == 2
    assert joined["newcomers"] == [8]
    assert joined["labels"] == [0, 0, 0, 1, 1, 1, 2, 2, 0]
    returned = result.clusters["timeline"][-1]
    assert (returned["round"], returned["newcomers"], returned["returned"]) == (5, [], [4])
    assert returned["labels"][4] == 1
    assert result.clients["cluster"].tolist()[:8] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_flags_cluster_again_and_the_drifted_client_moves(
    settings: dict[str, Any], whole: dict[str, Result]
) -> None:
    """With lambda = 0 every newcomer and every drift is followed by a clustering, a return is not."""
    result = _whole(whole, settings, "pacfl, flags")
    found = [entry["round"] for entry in result.clusters["timeline"] if "newcomers" not in entry]
    assert found == [0, 2, 4]
    labels = result.clients["cluster"].tolist()
    assert labels[:5] == [0, 0, 0, 1, 1]
    assert labels[5] == labels[8] == 0  # it has the first group's data now
    assert result.rounds["ari"].iloc[-1] == 1.0


def test_clients_that_choose_their_model_choose_anew_when_their_data_change(
    settings: dict[str, Any], whole: dict[str, Result]
) -> None:
    for method in ("ifca", "fedsem"):
        labels = _whole(whole, settings, method).clients["cluster"].tolist()
        assert labels[5] in [labels[client] for client in (0, 2, 8)], method
        assert labels[5] not in [labels[client] for client in (3, 4, 6, 7)], method


def test_a_client_that_comes_back_has_its_own_model_and_variate(settings: dict[str, Any]) -> None:
    """SOLO's model and SCAFFOLD's c_i are the client's: they wait while it is away."""
    for method in ("solo", "pacfl, scaffold"):
        events = [
            {"name": "leave", "round": 2, "clients": [4]},
            {"name": "join", "round": 4, "returning": True, "clients": [4]},
        ]
        states = {}
        for rounds in (2, 4, 5):
            until = [event for event in events if event["round"] < rounds]  # type: ignore[operator]
            ran = run(eventful(settings, method, rounds=rounds, events=until))
            last = Checkpoint.load(checkpoints(ran.path / "checkpoints")[-1])
            states[rounds] = last.state_rows[last.state_clients.tolist().index(4)]
        np.testing.assert_array_equal(states[2], states[4])
        assert np.abs(states[4] - states[5]).max() > 0


def test_before_the_event_nothing_is_different(settings: dict[str, Any]) -> None:
    """The first rounds of a run are the same whatever happens later."""
    plain = run(eventful(settings, "fedavg", events=[], rounds=3))
    leave = run(
        eventful(settings, "fedavg", events=[{"name": "leave", "round": 2, "clients": [1]}], rounds=3)
    )
    shown = ["train_loss", "accuracy_mean", "clients"]
    assert plain.rounds[shown][:2].equals(leave.rounds[shown][:2])
    assert plain.rounds["clients"].tolist() == [9, 9, 9]
    assert leave.rounds["clients"].tolist() == [9, 9, 8]
    assert plain.summary["models_sha256"] != leave.summary["models_sha256"]


def test_an_event_after_the_end_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"events\.1\.round: it would happen after 3 of 2 rounds"):
        run(eventful(settings, "fedavg", rounds=2))


# --- what newcomers cost, and where they go ------------------------------------------------------------

JOIN = {"name": "join", "round": 1, "clients": 1, "group": 0}  # client 8, of nine
P = 64 * 16 + 16 + 16 * 10 + 10


def signed(result: Result, round: int) -> dict[str, int]:
    """The bytes of signatures in a round, up and down."""
    sent = result.communication
    sent = sent[(sent["kind"] == "signature") & (sent["round"] == round)]
    return {str(direction): int(rows["bytes"].sum()) for direction, rows in sent.groupby("direction")}


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        ("pacfl", 3 * 64, 0),  # p = 3 vectors
        ("flis_hc", P, P),  # w_0 down, its own first model up
        ("pca_km_hc", 5 * 10, 64 + 64 * 10),  # 5 centroids in 10 dimensions; the mean and the components
        # Its eigenvectors to eight others, theirs to it; it relates nine to it, and eight it to them.
        ("mt_hfl", 5 * 64 + 9 + 8, 8 * 5 * 64 + 8 * 5 * 64),
    ],
)
def test_a_newcomer_sends_its_signature_and_nobody_else_does(
    method: str, up: int, down: int, settings: dict[str, Any]
) -> None:
    """The servers have those of the others (thesis Algorithm 9: the rows of newcomers only)."""
    clustering: dict[str, Any] = {"n_clusters": 3}
    if method == "pca_km_hc":
        clustering["features"] = {"name": "pca", "dim": 10}
    result = run({**settings, "algorithm": method, "events": [JOIN], "clustering": clustering})
    assert result.clusters["timeline"][1]["labels"] == [0, 0, 0, 1, 1, 1, 2, 2, 0]
    assert signed(result, 1) == {"up": 4 * up, **({"down": 4 * down} if down else {})}


def test_newcomers_of_random_clustering_send_what_those_of_mt_hfl_do(settings: dict[str, Any]) -> None:
    """It costs as much, and only who is beside whom differs."""
    joins = [JOIN, {**JOIN, "round": 2}]
    found = [
        run({**settings, "algorithm": method, "events": joins, "clustering": {"n_clusters": 3}})
        for method in ("random_clustering", "mt_hfl")
    ]
    for t in range(3):
        assert signed(found[0], t) == signed(found[1], t) != {}


def test_of_old_clients_those_send_theirs_again_whose_data_have_changed(settings: dict[str, Any]) -> None:
    drift = {"name": "drift", "round": 1, "kind": "permuted_labels", "clients": [0, 3]}
    events = [drift, {**JOIN, "round": 2}, {**JOIN, "round": 3}]
    changes = {"rounds": 4, "clustering": {"n_clusters": 3}}
    result = run({**settings, "algorithm": "pacfl", "events": events, **changes})
    vectors = 3 * 64 * 4
    assert [signed(result, t).get("up", 0) for t in range(4)] == [7 * vectors, 0, 3 * vectors, vectors]


def test_the_feature_map_is_sent_once(settings: dict[str, Any]) -> None:
    """Clustered again, a client with new data sends its signature, by the map that it has."""
    clustering = {"n_clusters": 3, "every": 1, "features": {"name": "pca", "dim": 10}}
    drift = {"name": "drift", "round": 2, "kind": "permuted_labels", "clients": [5]}
    result = run({**settings, "algorithm": "pca_km_hc", "clustering": clustering, "events": [drift]})
    sent, down = 5 * 10 * 4, (64 + 64 * 10) * 4
    assert [signed(result, t) for t in range(3)] == [{"up": 9 * sent, "down": 9 * down}, {}, {"up": sent}]
    # So it is where it signs again because others join, who get the map.
    joined = {"n_clusters": 3, "features": {"name": "pca", "dim": 10}}
    events = [{**drift, "round": 1}, {**JOIN, "round": 2}]
    result = run({**settings, "algorithm": "pca_km_hc", "clustering": joined, "events": events})
    assert [signed(result, t) for t in (1, 2)] == [{}, {"up": 2 * sent, "down": down}]


@pytest.mark.parametrize(
    ("grouping", "expected"),
    [
        ("planted", [0, 0, 0, 1, 1, 1, 2, 2, 0]),
        ("single", [0] * 9),
        ("singletons", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("random", None),
    ],
)
@pytest.mark.parametrize("method", ["pacfl", "flt"])
def test_where_no_signatures_are_compared_newcomers_send_none(
    method: str, grouping: str, expected: list[int] | None, settings: dict[str, Any]
) -> None:
    """SOLO's groups stay SOLO's: nobody is put beside anybody."""
    result = run({**settings, "algorithm": method, "events": [JOIN], "clustering": {"grouping": grouping}})
    assert expected is None or result.clients["cluster"].tolist() == expected
    assert all(signed(result, t) == {} for t in range(3))


@pytest.mark.parametrize("method", ["pacfl", "flis_hc", "pca_km_hc"])
def test_of_many_clients_newcomers_are_placed_by_the_tasks_that_cluster(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one process cannot hold all distances; at the same beta, for the same bytes, with one of them
    unlike everybody."""
    events = [{**JOIN, "clients": 2}, {"name": "join", "round": 2, "clients": 2, "group": 2}]
    clustering = {"pacfl": 9.0, "flis_hc": 0.4, "pca_km_hc": 1.2}
    training = {"epochs": 8, "batch_size": 10, "lr": 0.1}
    whole = {
        **settings,
        "algorithm": method,
        "events": events,
        "clustering": {
            "threshold": clustering[method],
            **({"features": "pca"} if method == "pca_km_hc" else {}),
        },
        "training": training,
    }
    few = run(whole)
    assert few.clusters["timeline"][1]["labels"][:5] == [0, 0, 1, 1, 1]
    assert few.clients["cluster"].tolist() == [0, 0, 1, 1, 1, 0, 0, 2, 2]

    def never(*_: Any) -> None:
        raise AssertionError("all distances in one process")

    monkeypatch.setattr("rayfl.algorithms.one_shot_newcomers.BLOCK", 4)
    monkeypatch.setattr("rayfl.algorithms.one_shot_newcomers.assign", never)
    many = run(whole)
    assert many.clients["cluster"].tolist() == few.clients["cluster"].tolist()
    assert many.summary["models_sha256"] == few.summary["models_sha256"]
    assert many.communication.equals(few.communication)


CODES = {"features": "identity", "embedding": "none", "gamma": "auto"}
DESERTED: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "pacfl": {"clustering": {"n_clusters": 2}},
    "mt_hfl": {"clustering": {"n_clusters": 2}},
    "flis_hc": {"clustering": {"n_clusters": 2}},
    "flt": {"clustering": CODES},
    "flt, clusters": {"algorithm": {"name": "flt", "train_on": "clusters"}, "clustering": CODES},
    "random_clustering": {"clustering": {"n_clusters": 2}},
    "ifca": {},
    "fedsem": {},
    "fedsoft": {},
    "flis_dc": {},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", DESERTED)
def test_newcomers_who_find_nobody_there(method: str, settings: dict[str, Any]) -> None:
    """All old clients leave in the round in which others come: these are clustered."""
    events = [
        {"name": "join", "round": 1, "clients": 3},
        {"name": "leave", "round": 1, "clients": [0, 1, 2, 3, 4, 5]},
    ]
    result = run({**settings, "algorithm": method, **DESERTED[method], "events": events})
    assert result.rounds["clients"].tolist() == [6, 3, 3]
    assert result.clients["accuracy_last"].notna().tolist() == [False] * 6 + [True] * 3


@pytest.mark.parametrize("method", ["pacfl", "mt_hfl", "flt"])
def test_fewer_clients_are_left_than_clusters_were_asked_for(method: str, settings: dict[str, Any]) -> None:
    """A run does not end for that; a number that never could be met is refused before anybody trains."""
    clustering = {"n_clusters": 3, "every": 1, **(CODES if method == "flt" else {})}
    changes = {"algorithm": method, "clustering": clustering}
    leave = [{"name": "leave", "round": 1, "clients": [0, 1, 2, 3, 4, 5, 6]}]
    result = run({**settings, **changes, "events": leave})
    assert result.rounds["clients"].tolist() == [9, 2, 2]
    with pytest.raises(ConfigError, match="10 clusters of 9 clients; use at most 9"):
        run({**settings, **changes, "clustering": {**clustering, "n_clusters": 10}})
