"""Runs side by side on Ray: processes that are killed, and the same bits as in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rayfl.runtime import trials
from rayfl.runtime.trials import Room, run_trials
from rayfl.study import execute, prepare, take
from rayfl.study.outcome import Study
from rayfl.study.running import directory_of

pytestmark = pytest.mark.ray

RUNS: dict[str, Any] = {
    "name": "side-by-side",
    "settings": {
        "rounds": 3,
        "partition": {"name": "label_skew", "clients": 6},
        "output": {"report": False, "tensorboard": False, "checkpoint_every": 1},
    },
    "methods": {"FedAvg": {"algorithm": "fedavg"}, "SOLO": {"algorithm": "solo"}},
    "seeds": [0, 1],
    "claims": ["FedAvg.bytes_up > 0"],
}


def die_once(item: tuple[str, int]) -> Mapping[str, Any]:
    """The square of a number; the first process to be given an odd one dies, an error is raised for 4."""
    folder, number = item
    mark = Path(folder) / str(number)
    if number % 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 4:
        raise ValueError("four is too much")
    return {"square": number**2}


def test_killed_trials_begin_again_and_errors_stay(ray_cluster: None, tmp_path: Path) -> None:
    lost: list[int] = []
    lock = threading.Lock()  # as whoever shows progress has one: it cannot be pickled

    def tell(place: int) -> None:
        with lock:
            lost.append(place)

    items = [(str(tmp_path), number) for number in range(5)]
    found = dict(run_trials(die_once, items, Room(jobs=2), tmp_path, tell))
    assert {place: found[place].get("square") for place in range(4)} == {0: 0, 1: 1, 2: 4, 3: 9}
    assert sorted(lost) == [1, 3]
    assert "four is too much" in found[4]["error"]


def wait_for_the_one_before(item: tuple[str, int]) -> Mapping[str, Any]:
    """Whether it was said within a minute that the item before this one has ended."""
    folder, number = item
    mark, deadline = Path(folder) / str(number - 1), time.monotonic() + 60
    while number and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"said": not number or mark.exists()}


@pytest.mark.slow
def test_who_has_ended_is_said_while_others_go_on(ray_cluster: None, tmp_path: Path) -> None:
    """So that an archive has all finished runs whatever ends the study."""
    items, ended = [(str(tmp_path), number) for number in range(3)], list[int]()

    def tell(place: int) -> None:
        ended.append(place)
        (tmp_path / str(place)).touch()

    found = dict(run_trials(wait_for_the_one_before, items, Room(jobs=2), tmp_path, ended=tell))
    assert all(found[place]["said"] for place in range(3))
    assert ended == [0, 1, 2]


def study(root: Path, inline: bool, *settings: str, **changes: Any) -> Study:
    values = take({**RUNS, **changes}, root, settings=[f"output.root={root / 'runs'}", *settings])
    return execute(prepare(values), root / "out", inline=inline, jobs=2)


def hashes(found: Study) -> list[str]:
    return [json.loads((Path(p) / "summary.json").read_text())["models_sha256"] for p in found.runs["path"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actors", "seeds"),
    [
        pytest.param(1, [0, 1], id="a process has several runs"),
        pytest.param(2, [0], id="a run has several processes"),
    ],
)
def test_side_by_side_and_one_after_another_give_the_same_bits(
    actors: int, seeds: list[int], ray_cluster: None, tmp_path: Path
) -> None:
    together = study(tmp_path / "ray", False, f"execution.actors={actors}", seeds=seeds)
    alone = study(tmp_path / "inline", True, seeds=seeds)
    assert together.results.finished == 2 * len(seeds)
    for path in together.runs["path"]:
        found = json.loads((Path(path) / "environment.json").read_text())["resources"]
        assert found["actors"] == actors
    assert hashes(together) == hashes(alone)
    assert together.claims == alone.claims


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loss_of_a_node_in_mid_study_loses_no_run_and_changes_none(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.study.on_two_nodes", str(tmp_path / "nodes")],
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "nodes" / "said.json").read_text())
    assert found["failed"] == {}
    assert found["ended"] == ["finished"] * 4
    assert found["hashes"] == hashes(study(tmp_path / "inline", True))


@pytest.mark.parametrize(("asked", "word", "code"), [(True, "stopped", 130), (False, "error", 1)])
def test_a_node_that_ends_while_the_trials_stop_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: bool, word: str, code: int
) -> None:
    node = {"NodeID": "n", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1}
    context = SimpleNamespace(get_node_id=lambda: "n")
    fake = SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: [node])
    codes: list[int] = []
    monkeypatch.setattr(trials, "ray", fake)
    monkeypatch.setattr(trials, "reachable", lambda address: False)
    monkeypatch.setattr(trials, "_NODE_CHECK", 0.01)
    monkeypatch.setattr(trials, "_PATIENCE", 0.01)
    monkeypatch.setattr(os, "_exit", codes.append)
    trials._watch_node(threading.Event(), lambda: asked)
    assert codes == [code]
    assert capsys.readouterr().err.startswith(f"{word}: this node's Ray has ended; complete rounds are kept")


@pytest.mark.slow
def test_a_signal_to_the_whole_group_loses_no_round(tmp_path: Path) -> None:
    """As by ``timeout``: Ray gets the signal, too, and may end this process before its runs have stopped."""
    values = {**RUNS, "settings": {**RUNS["settings"], "rounds": 400}, "claims": []}
    (tmp_path / "s.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-m", "rayfl", "study", "s.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes) as first:  # type: ignore[call-overload]
        try:
            while not any((tmp_path / "runs").glob("*/rounds.csv")) and first.poll() is None:
                time.sleep(0.2)
            os.killpg(first.pid, signal.SIGTERM)
            _, err = first.communicate(timeout=280)
        finally:
            first.kill()
    assert first.returncode in (1, 130), err  # 1: Ray ended it
    assert err.startswith("stopping: runs write a checkpoint, and the same command resumes the study\n")
    again = subprocess.run([*command, "--inline"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert again.returncode == 0, again.stderr
    whole = study(tmp_path / "whole", True, settings=values["settings"])
    for run in whole.results.runs:
        kept = tmp_path / "runs" / directory_of(run).name / "summary.json"
        summary = json.loads((directory_of(run) / "summary.json").read_text())
        assert json.loads(kept.read_text())["models_sha256"] == summary["models_sha256"]


@pytest.mark.slow
def test_a_dead_node_is_told_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """Ray ends the process of a driver whose node is gone, without a word and without Python's clean-up."""
    values = {**RUNS, "settings": {**RUNS["settings"], "rounds": 40}, "claims": []}
    (tmp_path / "s.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-m", "rayfl", "study", "s.yaml", "--jobs", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as first:  # type: ignore[call-overload]
        try:
            while not any((tmp_path / "runs").glob("*/rounds.csv")) and first.poll() is None:
                time.sleep(0.2)
            children = psutil.Process(first.pid).children(recursive=True)
            (raylet,) = [each for each in children if each.name() == "raylet"]
            raylet.kill()
            out, err = first.communicate(timeout=280)
        finally:
            first.kill()
    assert first.returncode == 1, (out, err)
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert told == [
        "error: this node's Ray has ended; complete rounds are kept; run the same command again to continue"
    ]
    assert "Raylet is terminated" not in out + err
    again = subprocess.run([*command, "--inline"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert again.returncode == 0, again.stderr
    study = take(values, tmp_path, settings=[f"output.root={tmp_path / 'whole'}"])
    whole = execute(prepare(study), tmp_path / "out", inline=True)
    kept = {p.parent.name: json.loads(p.read_text()) for p in (tmp_path / "runs").glob("*/summary.json")}
    for run in whole.results.runs:
        path = directory_of(run)
        summary = json.loads((path / "summary.json").read_text())
        assert kept[path.name]["models_sha256"] == summary["models_sha256"]
