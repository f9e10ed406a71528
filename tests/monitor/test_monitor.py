"""What runs tell those who watch them: status.json, log.jsonl, ``rayfl runs`` and ``rayfl top``."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayfl import api, files
from rayfl.errors import ConfigError, RayflError
from rayfl.events import BlockDone, CheckpointSaved, Note, RoundDone, RunEvent
from rayfl.monitor import Monitor, Pace, Status, newest_running, runs_below, view, writer
from rayfl.monitor.writer import LOG
from rayfl.overview import follow, runs_table, screen
from rayfl.rundir import RunDirectory

ROOT = Path(__file__).parents[2]


def shown(what: Any, width: int = 160) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(what)
    return file.getvalue()


def log_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / LOG).read_text().splitlines()]


def test_a_finished_run_says_what_it_did(settings: dict[str, Any], tmp_path: Path) -> None:
    path = api.run(settings).path
    found = view(path).status
    assert (found.state, found.why, found.done, found.rounds) == ("finished", "", 3, 3)
    assert (found.method, found.dataset, found.run) == ("fedavg", "digits", path.name)
    assert (found.rounds_run, found.clients, found.workers) == (3, 27, 1)
    rounds = api.Result(path).rounds
    assert found.traffic["client_lps_up"] == rounds["bytes_up"].sum()
    assert found.accuracy_mean == api.Result(path).summary["accuracy_mean"]
    assert found.steps > 27
    assert found.slowest is not None
    assert found.slowest.name == "inline"
    assert found.slowest.clients == 9
    assert min(found.driver_memory, found.worker_memory) > 10e6
    events = [(line["event"], line["worker"]) for line in log_of(path)]
    assert events[0] == ("started", "driver")
    assert events.count(("round", "driver")) == 3
    assert events.count(("worker", "inline")) == 3
    assert events[-1] == ("finished", "driver")
    assert not list(path.glob(".status*"))


def test_a_trial_that_tune_ends_early_is_stopped(settings: dict[str, Any], tmp_path: Path) -> None:
    def end(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        api.run(settings, on_event=end)
    (found,) = runs_below(tmp_path)
    assert (found.status.state, found.status.why) == ("stopped", "")


def test_a_stopped_run_and_one_that_failed_and_why(settings: dict[str, Any], tmp_path: Path) -> None:
    def stop(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        api.run(settings, on_event=stop)
    settings["training"] = {**settings["training"], "lr": 1e30}
    with pytest.raises(api.RayflError):
        api.run(settings)
    failed, stopped = runs_below(tmp_path)
    assert (stopped.status.state, stopped.status.done) == ("stopped", 1)
    assert failed.status.state == "failed"
    assert failed.status.why.startswith("client ")
    assert "a smaller training.lr may help" in failed.status.why
    assert log_of(failed.path)[-1]["level"] == "error"
    table = shown(runs_table([failed, stopped], tmp_path))
    assert "stopped" in table
    assert f"\n  {failed.status.why}\n" in table
    api.resume(stopped.path)
    assert [line["event"] for line in log_of(stopped.path)].count("started") == 2
    assert (view(stopped.path).status.state, view(stopped.path).status.rounds_run) == ("finished", 2)


def test_a_run_is_not_resumed_with_fewer_rounds_than_it_has(settings: dict[str, Any], tmp_path: Path) -> None:
    def stop(event: RunEvent) -> None:
        if isinstance(event, RoundDone) and event.round == 2:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        api.run({**settings, "rounds": 9}, on_event=stop)
    (run,) = runs_below(tmp_path)
    with pytest.raises(api.ConfigError, match="3 rounds are complete, more than rounds=2; rounds=3 ends"):
        api.resume(run.path, ["rounds=2"])
    ended = api.resume(run.path, ["rounds=3"])  # trains nothing
    assert len(ended.rounds) == 3
    assert view(run.path).status.accuracy_mean == ended.summary["accuracy_mean"]


@pytest.mark.parametrize("text", ["", "\0\n\0\n", "round\n1\n", "round,loss_mean\n1,high\n"])
def test_a_damaged_table_of_rounds_gives_no_results(text: str, tmp_path: Path) -> None:
    (tmp_path / "rounds.csv").write_text(text)
    assert api._last_results(RunDirectory(tmp_path)) == {}


def test_a_finished_run_without_checkpoints_is_not_resumed(settings: dict[str, Any]) -> None:
    """As from an archive of a study: it would begin again, in place of its results."""
    ran = api.run(settings)
    shutil.rmtree(ran.path / "checkpoints")
    with pytest.raises(RayflError, match="has no checkpoint, and so no models, like runs from an archive"):
        api.resume(ran.path, ["rounds=9"])
    assert ran.path.joinpath("summary.json").is_file()


def _status(**changes: Any) -> Status:
    return Status(
        **{"run": "r", "state": "running", "rounds": 5, "done": 2, "updated": time.time(), **changes}
    )


def _put(folder: Path, name: str, status: Status) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("rounds: 5\n")
    status.write(path)
    return path


def test_a_killed_run_is_told_from_a_running_one(tmp_path: Path) -> None:
    _put(tmp_path, "here", _status())
    _put(tmp_path, "killed", _status(pid=2**22 + 1))
    _put(tmp_path, "another-process", _status(born=time.time() - 1e6, updated=time.time() - 60))
    _put(tmp_path, "elsewhere", _status(host="elsewhere"))
    _put(tmp_path, "study/silent", _status(host="elsewhere", updated=time.time() - 60))
    found = {run.path.name: run.status for run in runs_below(tmp_path)}
    assert {name: s.state for name, s in found.items()} == {
        "here": "running",
        "elsewhere": "running",
        "killed": "failed",
        "another-process": "failed",
        "silent": "failed",
    }
    assert found["silent"].why.startswith("its process was killed or its machine is gone; last sign of life ")


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells when a process started without the clock"
)
def test_a_run_stays_running_when_the_clock_is_adjusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _put(tmp_path, "here", _status(updated=time.time() - 60))
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: time.time() - 1)
    assert view(path).status.state == "running"


def test_the_newest_running_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is running there"):
        newest_running(tmp_path)
    now = time.time()
    _put(tmp_path, "old", _status(begun=now - 50))
    new = _put(tmp_path, "new", _status(begun=now - 20))
    _put(tmp_path, "ended", _status(begun=now, state="finished"))
    assert newest_running(tmp_path).path == new
    with pytest.raises(ConfigError, match="not a folder"):
        runs_below(tmp_path / "missing")
    with pytest.raises(ConfigError, match="not a run directory"):
        view(tmp_path)


def test_a_run_of_an_earlier_version_has_no_status(settings: dict[str, Any]) -> None:
    path = api.run(settings).path
    expected = view(path).status
    (path / "status.json").unlink()
    found = view(path).status
    for name in ("run", "state", "method", "dataset", "rounds", "done", "accuracy_mean"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.pid, found.host) == (0, "")  # not those of the process that looks
    (path / "summary.json").unlink()
    assert view(path).status.state == "stopped"
    (path / "diverged.json").write_text(f'{{"rounds": {expected.rounds}, "error": "the loss is nan"}}')
    assert (view(path).status.state, view(path).status.why) == ("failed", "the loss is nan")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"run": "r"}',
        '{"run": "r", "state": "running", "slowest": 3}',
        '{"run": "r", "state": "unknown"}',
        '{"run": "r", "state": "running", "begun": null}',
        '{"run": "r", "state": "running", "accuracy_mean": "high"}',
        '{"run": "r", "state": "running", "slowest": {}}',
    ],
)
def test_a_damaged_status_is_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(text)
    assert Status.read(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "- a list"),
        ("config.yaml", "rounds: many"),
        ("config.yaml", "rounds:"),
        ("config.yaml", "{"),
        ("summary.json", "[1]"),
        ("summary.json", '{"rounds": null, "accuracy_mean": "high"}'),
    ],
)
def test_a_damaged_run_does_not_hide_the_others(name: str, text: str, tmp_path: Path) -> None:
    """Nor another program's folder, which has a config.yaml of its own."""
    good = _put(tmp_path, "good", _status())
    bad = _put(tmp_path, "bad", _status())
    (bad / "status.json").unlink()
    (bad / name).write_text(text)
    found = runs_below(tmp_path)
    assert {run.path for run in found} == {good, bad}
    assert "good" in runs_table(found, tmp_path).plain


def test_what_cannot_be_looked_into_does_not_hide_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that leads to itself, and a run that is removed while it is looked at."""
    (tmp_path / "circle").symlink_to("circle")
    good = _put(tmp_path, "good", _status())
    gone = _put(tmp_path, "gone", _status())
    read = Status.read

    def reading(folder: Path) -> Status | None:
        if folder == gone:
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(Status, "read", reading)
    assert [run.path for run in runs_below(tmp_path)] == [good]


def test_a_run_to_which_links_lead_is_listed_once(tmp_path: Path) -> None:
    """By its own path, whichever comes first; what lies elsewhere by that of a link."""
    root = tmp_path / "runs"
    run, other = _put(root, "study/run", _status()), _put(tmp_path, "elsewhere/other", _status())
    (root / "latest").symlink_to("study/run")
    (root / "zz").symlink_to("study")
    for name in ("a", "b"):
        (root / name).symlink_to(other)
    (tmp_path / "link").symlink_to(root)
    assert sorted(found.path for found in runs_below(root)) == [root / "a", run]
    through = tmp_path / "link"
    assert sorted(found.path for found in runs_below(through)) == [through / "a", through / "study/run"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    (folder := tmp_path / "disk").mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write until there is no room, not even for one byte."""
    with (folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_run_that_a_full_disk_ends_says_so(settings: dict[str, Any], small_disk: Path) -> None:
    """Where not even its status can be written to a new file."""

    def full(event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved):
            fill(small_disk)

    settings["output"]["root"] = str(small_disk / "runs")
    with pytest.raises(RayflError, match="No space left on device"):
        api.run(settings, on_event=full)
    (found,) = runs_below(small_disk / "runs")
    assert found.status.state == "failed"
    assert "No space left on device" in found.status.why


def test_a_status_that_outgrows_its_file_is_not_torn(small_disk: Path) -> None:
    status = _status()
    status.write(small_disk)
    fill(small_disk)
    replace(status, notes=("x" * 20_000,)).write(small_disk)
    assert Status.read(small_disk) == status
    replace(status, state="failed", why="y" * 300, notes=("z" * 500,) * 5).write(small_disk)
    found = Status.read(small_disk)
    assert found is not None
    assert (found.state, len(found.why)) == ("failed", 300)
    assert [path.name for path in small_disk.iterdir()].count("status.json") == 1


def test_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST", 3000)
    for number in range(50):
        with Monitor(_status(), tmp_path, lambda event: None) as monitor:
            monitor(Note(f"line {number} " + "x" * 100))
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.jsonl")}
    assert sizes.keys() == {"log.jsonl", "log.1.jsonl"}
    assert max(sizes.values()) <= 3000
    assert log_of(tmp_path)[-2]["text"].startswith("line 49 ")


def test_nothing_that_watching_meets_is_an_error_of_the_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses, a number is wrong, an exporter fails: the run finishes, and says nothing of it."""

    def refuse(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        status = _status()
        status.write(Path("/nonexistent"))
        files.log(Path("/nonexistent/log"), "text", 10)
    calls: list[Status] = []

    def export(status: Status) -> None:
        calls.append(status)
        raise RuntimeError("no metrics")

    monkeypatch.setattr(api, "exports", lambda config: [export])
    path = api.run(settings).path
    assert len(calls) == 1
    assert "RuntimeError: no metrics" in (path / LOG).read_text()
    assert view(path).status.state == "finished"


def test_blocks_are_put_together_by_worker(tmp_path: Path) -> None:
    row = {"seconds": 4.0, "clients": 5, "train_loss": 0.5, "failures": 1, "accuracy_mean": None}
    block = {"wanted": 4, "present": 2, "busy": 2}
    with Monitor(_status(), tmp_path, lambda event: None) as monitor:
        monitor(BlockDone(0, 1, 3, "client:0", 2, 7, 1.0, 100, **block))
        monitor(BlockDone(0, 2, 3, "client:1", 2, 3, 3.0, 300, **block))
        monitor(BlockDone(0, 3, 3, "client:0", 1, 9, 1.5, 200, **block))
        monitor(RoundDone(0, 5, row, steps=80, traffic={"client_lps_up": 7}, memory=50))
    found = Status.read(tmp_path)
    assert found is not None
    assert found.slowest is not None
    assert found.slowest_block is not None
    assert (found.slowest.name, found.slowest.seconds, found.slowest.blocks) == ("client:1", 3.0, 1)
    assert (found.slowest_block.worker, found.slowest_block.first) == ("client:1", 3)
    assert (found.worker_memory, found.driver_memory) == (500, 50)
    assert found.waiting == pytest.approx(1 - 5.5 / 8)
    assert found.steps_per_second == 20
    assert (found.actors_present, found.actors_wanted) == (2, 4)
    text = shown(screen(view(_put(tmp_path, "r", replace(found, state="running", actors_busy=2)))))
    for part in ("client:1, 3.0 s for 2 clients", "2 busy, 2 of 4 present", "20 client-steps a second"):
        assert part in text


def test_the_pace_of_a_run() -> None:
    now = [100.0]
    pace = Pace(lambda: now[0])
    assert pace.remaining(10) is None
    pace.round(4, seconds=60)  # resumed: three rounds were done before
    assert pace.remaining(10) == 6 * 60
    now[0] += 120
    pace.round(5, seconds=120)
    assert pace.remaining(10) == 5 * 90
    now[0] += 30
    assert pace.remaining(10) == 5 * 90 - 30
    now[0] += 1e6
    assert pace.remaining(10) == 0
    pace.round(5, seconds=10)  # gone back to a checkpoint
    assert pace.remaining(10) == 50


def test_the_pace_of_rounds_that_are_heard_of_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(writer.time, "time", lambda: now[0])
    # It looks when the run ends, and would say nothing then.
    monkeypatch.setattr(writer, "_WRITE_INTERVAL", 3600)
    row = {"seconds": 0.5, "clients": 5, "train_loss": 0.5, "failures": 0, "accuracy_mean": None}
    monitor = Monitor(_status(rounds=1000), tmp_path, lambda event: None)
    for round in range(40):
        now[0] += 0.5
        monitor(RoundDone(round, 1000, row))
    monitor._handle_events()
    monitor._write()
    found = Status.read(tmp_path)
    assert found is not None
    assert found.remaining == pytest.approx(960 * 0.5)


def test_the_table_of_runs_never_breaks_a_name(tmp_path: Path) -> None:
    name = "a-run-with-a-name-as-long-as-those-of-runs-with-many-changed-settings-seed0-20261123-063353"
    path = _put(tmp_path, name, _status(method="fedavg", dataset="digits"))
    _put(tmp_path, "b", _status(state="failed", why="client 3 failed", accuracy_mean=12.0))
    file = io.StringIO()
    Console(file=file, width=80).print(runs_table(runs_below(tmp_path), tmp_path), soft_wrap=True)
    lines = file.getvalue().splitlines()
    assert lines[0].split()[-1] == "run"
    assert any(line.endswith("  " + path.name) for line in lines)
    assert lines[-1] == "  client 3 failed" or lines[-2] == "  client 3 failed"


def test_following_where_there_is_no_terminal(tmp_path: Path) -> None:
    path = _put(tmp_path, "r", _status())
    states = [_status(done=3, accuracy_mean=50.0), _status(done=3), _status(done=5, state="finished")]
    file = io.StringIO()
    follow(path, Console(file=file, width=200), lambda seconds: states.pop(0).write(path))
    assert file.getvalue().splitlines() == [
        "running  round 2/5  accuracy –  ETA –",
        "running  round 3/5  accuracy 50.0 %  ETA –",
        "finished  round 5/5  accuracy –  ETA –",
    ]


@pytest.mark.parametrize(
    ("known", "listed", "told"),
    [
        ({"accuracy_mean": 16.1}, "16.1 %", "accuracy 16.1 %"),
        ({"accuracy_mean": 16.1, "estimated_from": 5.0}, "≈ 16.1 %", "accuracy ≈ 16.1 %"),
        ({"loss_mean": 0.12345, "train_loss": 1.0}, "loss 0.1235", "test loss 0.1235"),
    ],
)
def test_results_are_told_as_what_they_are(
    known: dict[str, float], listed: str, told: str, tmp_path: Path
) -> None:
    path = _put(tmp_path, "r", _status(state="finished", done=5, **known))
    assert f" {listed} " in shown(runs_table(runs_below(tmp_path), tmp_path))
    file = io.StringIO()
    follow(path, Console(file=file, width=200), lambda seconds: None)
    assert f"round 5/5  {told}  ETA" in file.getvalue()


def test_the_command_line(tmp_path: Path) -> None:
    path = _put(tmp_path, "runs/r", _status())

    def rayfl(*line: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "rayfl", *line]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return found.returncode, found.stdout, found.stderr

    code, text, _ = rayfl("runs", "--json")
    (line,) = json.loads(text)
    assert (code, line["path"], line["state"], line["rounds_done"]) == (0, "runs/r", "running", 2)
    assert "runs/r" in rayfl("top", "--once")[1]
    assert json.loads(rayfl("top", str(path), "--json")[1])["rounds"] == 5
    assert rayfl("runs", "missing")[::2] == (
        2,
        "error: missing: not a folder; name the folder of the runs, output.root\n",
    )
    assert rayfl("top", "missing")[0] == 2


def test_a_run_is_not_slowed_by_who_does_not_look(settings: dict[str, Any], tmp_path: Path) -> None:
    """The run's own thread puts events into a queue and does nothing else: no file is written meanwhile."""
    monitor = Monitor(_status(), tmp_path, lambda event: None)
    for number in range(1000):
        monitor(BlockDone(0, number, 1000))
    assert not list(tmp_path.iterdir())
