"""An error of any kind in a round loses none of those before it."""

from __future__ import annotations

import errno
import gc
import json
import pickle
import re
import signal
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import rayfl
from rayfl import files
from rayfl.algorithms import Regrouping
from rayfl.algorithms.base import Algorithm
from rayfl.algorithms.fedavg import FedAvg
from rayfl.algorithms.ifca import IFCA
from rayfl.errors import ConfigError, DiskError, Interrupted
from rayfl.events import Begun, RoundDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime import driving
from rayfl.runtime.inline import InlineBackend
from rayfl.servers import building, checkpoint
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.driver import Driver
from rayfl.training.reports import ClientReport
from tests.runs import METHODS, assert_same


@pytest.mark.parametrize("error", [KeyError("missing"), ZeroDivisionError()])
def test_a_mistake_in_a_hook_leaves_a_checkpoint_and_no_trace_of_its_round(
    error: Exception, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a method's author meets it; mended, the run goes on to the bits of one without the mistake."""
    output = {**settings["output"], "checkpoint_every": 0}
    config = {**settings, **METHODS["ifca"], "rounds": 4, "output": output}
    whole = rayfl.run({**config, "seed": 1})
    end = IFCA.end

    def wrong(self: IFCA, setup: Any, state: Any, *rest: Any) -> Any:
        if state.round == 2:
            raise error
        return end(self, setup, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(IFCA, "end", wrong)
        with pytest.raises(type(error)):
            rayfl.run({**config, "seed": 1, "name": "wrong"})
    root = whole.path.parent
    (stopped,) = (path for path in root.iterdir() if path.name.startswith("wrong"))
    assert [path.name for path in checkpoints(stopped / "checkpoints")] == ["round-00002"]
    kept = json.loads((stopped / "clusters.json").read_text())["timeline"]
    assert all(entry["round"] < 2 for entry in kept)
    status = RunDirectory(stopped).read_json("status.json")
    assert status is not None
    assert status["state"] == "failed"
    assert status["why"].startswith(f"wrong, {__file__}:")
    assert type(error).__name__ in status["why"]
    assert rayfl.resume(stopped).summary["models_sha256"] == whole.summary["models_sha256"]


def stopped(config: dict[str, Any], after: int) -> Path:
    """The directory of a run that was interrupted after so many rounds."""
    paths = []

    def stop(event: RunEvent) -> None:
        if isinstance(event, Begun):
            paths.append(event.path)
        if isinstance(event, RoundDone) and event.round == after - 1:
            raise KeyError

    with pytest.raises(KeyError):
        rayfl.run(config, on_event=stop)
    return paths[0]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", ["fedavg", "ifca", "cfl"])
@pytest.mark.parametrize("tests", [{"every": 4}, {"every": 1, "coreset": 5}, {"every": 4, "local": True}])
def test_a_stopped_run_that_ends_there_is_tested_as_one_of_so_many_rounds(
    method: str, tests: dict[str, Any], settings: dict[str, Any]
) -> None:
    """No test of all clients was due in its last round, when it was not the last."""
    config = {**settings, "algorithm": method, **METHODS[method], "rounds": 8, "evaluation": tests}
    whole = rayfl.run({**config, "rounds": 3})
    ended = rayfl.resume(stopped(config, 3), ["rounds=3"])
    assert_same(whole, ended)
    for name in whole.summary.keys() - {"seconds"}:
        assert ended.summary[name] == whole.summary[name], name
    saved = Checkpoint.load(checkpoints(ended.path / "checkpoints")[-1])
    assert [row["round"] for row in saved.tables["rounds"]] == [0, 1, 2]
    assert_same(whole, rayfl.resume(ended.path))  # by its checkpoint, in which the amended rows are
    first, second = (rayfl.resume(result.path, ["rounds=5"]) for result in (whole, ended))
    assert_same(first, second)
    assert_same(second, rayfl.resume(second.path, ["rounds=5"]))


def test_a_stop_in_that_test_leaves_a_run_to_resume(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**settings, "rounds": 8, "evaluation": {"every": 4}}
    path = stopped(config, 3)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr("rayfl.servers.testing.evaluate", interrupted)
        with pytest.raises(Interrupted):
            rayfl.resume(path, ["rounds=3"])
    assert_same(rayfl.run({**config, "rounds": 3}), rayfl.resume(path, ["rounds=3"]))


def test_a_stop_after_that_test_does_not_repeat_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def served(self: Any, setup: Any, state: Any, clients: Any) -> Any:
        clients.samples_by_model(setup.present, "train")
        return state.assignment

    monkeypatch.setattr(Algorithm, "tested_with", served)
    config = {**settings, "rounds": 8, "evaluation": {"every": 4, "finetune_epochs": 1}}
    path, notes = stopped(config, 3), []

    def interrupted(*_: Any, **__: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr("rayfl.servers.testing.adapt", interrupted)
        with pytest.raises(Interrupted):
            rayfl.resume(path, ["rounds=3"])
    ended = rayfl.resume(path, ["rounds=3"], on_event=notes.append)
    assert not any("testing all clients" in getattr(event, "text", "") for event in notes)
    assert_same(rayfl.run({**config, "rounds": 3}), ended)


def test_newcomers_after_the_last_round_account_for_what_they_send(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def served(self: Any, setup: Any, state: Any, clients: Any) -> Any:
        clients.samples_by_model(setup.present, "train")
        return state.assignment

    events = [{"name": "join", "round": 3, "clients": 2}]
    without = rayfl.run({**settings, "events": events}).summary["newcomers_bytes_up"]
    monkeypatch.setattr(Algorithm, "tested_with", served)
    assert rayfl.run({**settings, "events": events}).summary["newcomers_bytes_up"] == without + 4 * 9


def test_what_is_sent_after_training_counts_for_its_round_and_once(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a stop; rows of diagnostics that name a round keep ours."""

    def ask(self: Any, setup: Any, state: Any, clients: Any) -> None:
        clients.samples_by_model(setup.present, "train")

    def served(self: Any, setup: Any, state: Any, clients: Any) -> Any:
        clients.samples_by_model(setup.present, "train")
        return state.assignment

    def diagnose(self: Any, setup: Any, state: Any, clients: Any) -> Any:
        return [{"round": state.round + 5, "x": 1.0}]

    monkeypatch.setattr(Algorithm, "split", ask)
    monkeypatch.setattr(Algorithm, "tested_with", served)
    monkeypatch.setattr(Algorithm, "diagnose", diagnose)
    config = {**settings, "rounds": 4, "evaluation": {"finetune_epochs": 1}}
    whole = rayfl.run(config)
    sent = whole.communication
    assert sorted(set(sent["round"])) == [0, 1, 2, 3]
    reports = sent[sent["kind"] == "report"]
    assert reports["bytes"].tolist() == [2 * 4 * 9] * 4  # two questions a round to nine clients
    resumed = rayfl.resume(stopped(config, 2))
    assert_same(whole, resumed)
    for result in (whole, resumed):
        assert (result.path / "diagnostics.csv").read_text().split() == [
            "round,x",
            "0,1.0",
            "1,1.0",
            "2,1.0",
            "3,1.0",
        ]
    assert (
        rayfl.resume(stopped({**config, "rounds": 6}, 4), ["rounds=4"]).summary["bytes_up"]
        == whole.summary["bytes_up"]
    )


def test_models_are_restored_at_every_edge(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def undo(self: Any, setup: Any, state: Any, clients: Any) -> Any:
        return Regrouping(state, np.arange(state.models), restored=np.array([1]))

    monkeypatch.setattr(IFCA, "split", undo)
    hierarchy = {"edges": 2, "global_every": 50}
    algorithm = {"name": "ifca", "clusters": 2}
    result = rayfl.run({**settings, "algorithm": algorithm, "hierarchy": hierarchy, "rounds": 2})
    first, second = (Checkpoint.load(path).models for path in checkpoints(result.path / "checkpoints"))
    moved = np.abs(first - second).max(axis=1) > 0
    assert not moved[2:].any()
    assert moved[:2].any()


@pytest.mark.parametrize(
    ("hook", "more", "text"),
    [
        ("split", {"parents": np.array([0, 9, 0])}, "ifca.split: parents holds 9; expected 0 to 2"),
        ("split", {"parents": np.array([0.0, 1, 2])}, "ifca.split: parents is an array"),
        ("split", {"restored": np.array([3])}, "ifca.split: restored holds 3; expected 0 to 2"),
        ("recluster", {"restored": np.array([0])}, "ifca.recluster: only split restores models of before"),
    ],
)
def test_models_that_do_not_exist_are_refused(
    hook: str,
    more: dict[str, Any],
    text: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def regroup(self: Any, setup: Any, state: Any, clients: Any) -> Any:
        return Regrouping(state, **{"parents": np.arange(state.models), **more})

    monkeypatch.setattr(IFCA, hook, regroup)
    with pytest.raises(ConfigError, match=re.escape(text)):
        rayfl.run({**settings, "algorithm": {"name": "ifca", "clusters": 3}})


@dataclass(frozen=True)
class Numbered(ClientReport):
    """A report that differs from round to round, or one with an array."""

    number: Any
    floats: ClassVar[int] = 1

    def compute(self, trained: Any) -> Any:
        return trained.mean_losses(trained.start)


def test_reports_that_differ_from_round_to_round_are_not_kept(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, drivers = [], []
    monkeypatch.setattr(FedAvg, "reports", lambda self, setup, state: {"x": Numbered(state.round)})
    begin = Driver.start
    monkeypatch.setattr(Driver, "start", lambda self: drivers.append(self) or begin(self))
    rayfl.run(
        settings,
        on_event=lambda e: kept.append(len(drivers[0]._prepared_refs)) if isinstance(e, RoundDone) else None,
    )
    assert kept == [1, 1, 1]
    monkeypatch.setattr(FedAvg, "reports", lambda self, setup, state: {"x": Numbered(np.zeros(2))})
    with pytest.raises(ConfigError, match=r"fedavg.reports: Numbered cannot be compared .* keep arrays out"):
        rayfl.run(settings)


def test_the_data_are_in_memory_once(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backend has a copy of its own, as on Ray."""
    built, alive = [], []

    class Copying(InlineBackend):
        def put(self, value: Any) -> Any:
            return pickle.loads(pickle.dumps(value)) if isinstance(value, tuple) else value

    def build(*given: Any) -> Any:
        stages, host = building.build(*given)
        built.append(weakref.ref(stages[0].federation.samples))
        return stages, host

    def look(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            gc.collect()
            alive.append(built[0]() is not None)

    monkeypatch.setattr(driving, "build", build)
    monkeypatch.setattr(driving, "make_backend", lambda *_: Copying())
    rayfl.run(settings, on_event=look)
    assert alive == [False] * 3


def test_clients_that_failed_have_sent_nothing(settings: dict[str, Any]) -> None:
    execution = {**settings["execution"], "tolerate_failures": 9}
    training = {**settings["training"], "lr": 1e30}
    result = rayfl.run({**settings, "training": training, "execution": execution})
    assert result.rounds["failures"].tolist() == [9] * 3
    assert result.rounds["bytes_up"].tolist() == [0] * 3
    assert (result.rounds["bytes_down"] > 0).all()


def test_who_only_reads_renames_no_checkpoint(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads a checkpoint again that was replaced meanwhile, and goes back if one is damaged."""
    result = rayfl.run(settings)
    folder = result.path / "checkpoints"
    newest = checkpoints(folder)[-1]
    names = sorted(path.name for path in folder.iterdir())
    saved = Checkpoint.load(newest)
    later = replace(saved, tables={**saved.tables, "seconds": saved.tables["seconds"] + 1})
    read, replaced = checkpoint._manifest, []

    def replacing(path: Path) -> Any:
        manifest = read(path)
        if path == newest and len(replaced) < 2:
            replaced.append(path)
            if len(replaced) == 2:  # between the manifest and the files that it lists
                later.save(folder, 5)
        return manifest

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_manifest", replacing)
        found, notes = Checkpoint.newest(folder, reading=True)
    assert found is not None
    assert (found.tables["seconds"], notes) == (later.tables["seconds"], [])
    state = newest / "state.json"
    state.write_bytes(state.read_bytes()[:-9])
    found, notes = Checkpoint.newest(folder, reading=True)
    assert found is not None
    assert found.state.round == 2
    assert len(notes) == 1
    assert len(list(rayfl.Result(result.path).model(client=0).parameters())) > 0
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_run_that_ignores_the_end_of_its_terminal_goes_on(settings: dict[str, Any]) -> None:
    """As ``nohup`` starts it."""

    def hang_up(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = rayfl.run(settings, on_event=hang_up)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(result.rounds) == 3


def test_tests_keep_no_updates(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all clients would take as much memory as all their models."""
    adapting = []
    run = InlineBackend.run

    def watched(self: Any, tasks: Any) -> Any:
        adapting.extend(task for task in tasks if task.method == "adapt")
        return run(self, tasks)

    monkeypatch.setattr(InlineBackend, "run", watched)
    algorithm = {"name": "per_fedavg", "alpha": 0.05, "beta": 0.05}
    rayfl.run({**settings, "algorithm": algorithm, "evaluation": {"finetune_epochs": 1}})
    assert len(adapting) > 3
    assert all(task.keeps == () and not task.job.updates for task in adapting)


def test_a_full_disk_before_the_first_round_leaves_the_threads_of_the_process(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(action: str, path: Path) -> None:
        if "normalisation" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(files, "watch", full)
        with pytest.raises(DiskError, match="No space left"):
            rayfl.run(settings)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
