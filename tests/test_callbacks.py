"""What ``rayfl.run(..., on_event=...)`` is told, and what becomes of a callback's error."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl import events
from tests.runs import METHODS, assert_same


def test_events_are_typed_frozen_and_can_be_pickled(settings: dict[str, Any], tmp_path: Path) -> None:
    """All of a run with clusters, on the way, in order, and equal after the way from a Ray actor."""
    seen: list[rayfl.RunEvent] = []
    found = rayfl.run(
        {**settings, "algorithm": "pacfl", **METHODS["pacfl"], "rounds": 2}, on_event=seen.append
    )
    assert [type(e) for e in seen if not isinstance(e, rayfl.Note | rayfl.BlockDone)] == [
        rayfl.Begun,
        rayfl.Clustered,
        rayfl.RoundDone,
        rayfl.CheckpointSaved,
        rayfl.RoundDone,
        rayfl.CheckpointSaved,
        rayfl.CheckpointSaved,  # with the final tables
        rayfl.Finished,
    ]
    assert seen[0] == rayfl.Begun(found.path)
    assert seen[-1] == rayfl.Finished(found.summary, found.path)
    rounds = [event for event in seen if isinstance(event, rayfl.RoundDone)]
    assert [event.row["train_loss"] for event in rounds] == found.rounds["train_loss"].tolist()
    assert [(event.round, event.rounds, event.tested) for event in rounds] == [(0, 2, True), (1, 2, True)]
    assert rounds[0].curves["accuracy_mean"] == found.rounds["accuracy_mean"][0]
    (clusters,) = (event for event in seen if isinstance(event, rayfl.Clustered))
    entry = found.clusters["timeline"][0]
    assert (clusters.n_clusters, clusters.when, clusters.ari) == (entry["n_clusters"], "before", entry["ari"])
    assert clusters.facts["threshold"] == entry["threshold"]
    done = [event for event in seen if isinstance(event, rayfl.BlockDone) and event.round == 1]
    assert [event.done for event in done] == list(range(1, done[0].total + 1))
    for event in seen:
        assert pickle.loads(pickle.dumps(event)) == event
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.path = Path()  # type: ignore[attr-defined]


def test_every_event_is_public() -> None:
    classes = [value for value in vars(events).values() if isinstance(value, type)]
    assert {c.__name__ for c in classes if issubclass(c, events.RunEvent)} <= set(rayfl.__all__)


def test_an_estimate_has_a_curve_of_its_own() -> None:
    row = {"train_loss": 1, "accuracy_mean": 50.0, "ari": None, "estimated_from": 8}
    assert rayfl.RoundDone(0, 1, row).curves == {"train_loss": 1.0, "estimated/accuracy_mean": 50.0}


class Mine(Exception):
    """Of a callback."""


@pytest.mark.parametrize("kind", [rayfl.Begun, rayfl.BlockDone, rayfl.RoundDone, rayfl.CheckpointSaved])
def test_an_error_in_a_callback_stops_the_run_with_a_checkpoint_and_is_raised(
    kind: type[rayfl.RunEvent], settings: dict[str, Any]
) -> None:
    paths, called = [], 0

    def fail(event: rayfl.RunEvent) -> None:
        nonlocal called
        if isinstance(event, rayfl.Begun):
            paths.append(event.path)
        if isinstance(event, kind):
            called += 1
            raise Mine("no such project")

    with pytest.raises(Mine, match="no such project"):
        rayfl.run(settings, on_event=fail)
    assert called == 1  # it is not called again
    assert 0 <= len(rayfl.Result(paths[0]).rounds) < settings["rounds"]
    assert_same(rayfl.run(settings), rayfl.resume(paths[0]))


@pytest.mark.slow
@pytest.mark.ray
def test_an_error_in_a_callback_stops_a_run_on_ray_too(settings: dict[str, Any], ray_cluster: None) -> None:
    """The callback is called here, and the driver is in an actor of its own, some rounds ahead perhaps."""
    paths: list[Path] = []

    def fail(event: rayfl.RunEvent) -> None:
        if isinstance(event, rayfl.Begun):
            paths.append(event.path)
        if isinstance(event, rayfl.RoundDone):
            raise Mine

    execution = {"backend": "ray", "actors": 1, "cpus_per_actor": 0.5, "block_size": 2}
    with pytest.raises(Mine):
        rayfl.run({**settings, "rounds": 300, "execution": execution}, on_event=fail)
    assert 0 < len(rayfl.Result(paths[0]).rounds) < 300
    assert rayfl.Result(paths[0]).summary == {}


def test_an_error_at_the_very_end_is_raised_too(settings: dict[str, Any]) -> None:
    paths = []

    def fail(event: rayfl.RunEvent) -> None:
        if isinstance(event, rayfl.Finished):
            paths.append(event.path)
            raise Mine

    with pytest.raises(Mine):
        rayfl.run(settings, on_event=fail)
    assert rayfl.Result(paths[0]).summary["rounds"] == settings["rounds"]
