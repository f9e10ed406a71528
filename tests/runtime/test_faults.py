"""Faults, injected: processes that hang, lost nodes, failures of Ray. Same bits, or one line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray.exceptions as rx
import yaml

from rayfl.api import Result, resume, run
from rayfl.config import load
from rayfl.errors import Interrupted, RayflError, ResultsLost
from rayfl.events import BlockDone, Note, RoundDone, RunEvent, Stopped
from rayfl.rundir import RunDirectory
from rayfl.runtime import connection, processes
from rayfl.runtime.inline import InlineBackend
from rayfl.runtime.processes import Deadlines, Deaths, Silence, died, plain_errors
from rayfl.runtime.ray_backend import RayBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import checkpoints, round_of
from rayfl.servers.driver import Driver
from tests.runs import METHODS, actors, assert_same

ROOT = Path(__file__).resolve().parents[2]


def _drive(
    settings: dict[str, Any],
    method: str,
    watch: Callable[[RunEvent, RayBackend], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Result, list[str]]:
    """Run on two actors in this process; the result, and the notes."""
    execution = {"backend": "ray", "actors": 2, "block_size": 2}
    config = load({**settings, "algorithm": method, **METHODS[method], "execution": execution})
    stages, host = build(config)
    directory = RunDirectory.create(config)
    backend, notes = RayBackend(2, num_cpus=0.5, num_gpus=0, servers=1), []

    def listen(event: RunEvent) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        watch(event, backend)

    try:
        Driver(config, stages, backend, directory, host, listen, should_stop).run()
    except Interrupted:
        notes.append("interrupted")
    finally:
        backend.close()
    return Result(directory.path), notes


class Ticking(InlineBackend):
    """Looks for a request to stop whenever it fetches something, as Ray's backend does."""

    def get(self, ref: Any) -> Any:
        self.tick()
        return super().get(ref)


@pytest.mark.parametrize(
    ("changes", "last"),
    [({"output.checkpoint_every": 1}, 1), ({"evaluation.finetune_epochs": 1}, 3)],
    ids=["a checkpoint in mid-run", "the last checkpoint"],
)
def test_a_stop_during_a_checkpoint_leaves_it_whole_and_is_told(
    settings: dict[str, Any], changes: dict[str, Any], last: int
) -> None:
    given = [f"{name}={value}" for name, value in changes.items()]
    config = load({**settings, "rounds": 3}, given)
    stages, host = build(config)
    directory, told = RunDirectory.create(config), list[RunEvent]()

    def stop() -> bool:
        return any(isinstance(event, RoundDone) and event.round == last - 1 for event in told)

    backend = Ticking()
    try:
        with pytest.raises(Interrupted):
            Driver(config, stages, backend, directory, host, told.append, stop).run()
    finally:
        backend.close()
    assert told[-1] == Stopped(last, directory.path)
    assert round_of(checkpoints(directory.path / "checkpoints")[-1]) == last
    assert_same(run({**settings, "rounds": 3}, given), resume(directory.path))


@pytest.mark.ray
def test_a_client_actor_that_hangs_is_killed_and_its_work_done_again(
    settings: dict[str, Any], ray_cluster: None
) -> None:
    hung: list[psutil.Process] = []

    def hang(event: RunEvent, backend: RayBackend) -> None:
        if isinstance(event, RoundDone) and event.round == 0:
            hung.append(psutil.Process(backend.pids()[0]))
            hung[0].suspend()
            backend.deadlines.fixed = 2.0  # the engine is compiled by now
        if isinstance(event, Note) and "client actor 0 (process" in event.text and "killed" in event.text:
            backend.deadlines.fixed = None  # the new one compiles it again: how long that takes is no fault

    method = "mt_hfl, scaffold"
    expected = run({**settings, "algorithm": method, **METHODS[method]})
    found, notes = _drive(settings, method, hang)
    assert_same(expected, found)
    assert any("client actor 0 (process" in note and "it is killed" in note for note in notes)
    assert not hung[0].is_running() or hung[0].status() == psutil.STATUS_ZOMBIE


@pytest.mark.ray
def test_a_hung_server_does_not_keep_a_run_from_stopping(
    settings: dict[str, Any], ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to stop while the LPS is stopped: a checkpoint is written, and the run goes on from it."""
    monkeypatch.setattr(processes, "_HURRIED_DEADLINE", 2.0)
    stop: list[bool] = []
    before = actors("ServerActor")

    def hang(event: RunEvent, backend: RayBackend) -> None:
        if isinstance(event, BlockDone) and event.round == 1 and event.done == event.total and not stop:
            (server,) = actors("ServerActor") - before
            server.suspend()
            stop.append(True)

    expected = run({**settings, "algorithm": "mt_hfl", **METHODS["mt_hfl"]})
    found, notes = _drive(settings, "mt_hfl", hang, lambda: bool(stop))
    assert notes[-1] == "interrupted"
    (newest,) = checkpoints(found.path / "checkpoints")[-1:]
    assert newest.name == "round-00001"
    assert_same(expected, resume(found.path, ["execution.backend=inline"]))


@pytest.mark.ray
@pytest.mark.parametrize("fault", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
def test_a_driver_that_dies_or_hangs_is_replaced(
    fault: signal.Signals, settings: dict[str, Any], ray_cluster: None
) -> None:
    """The new one goes on from the last checkpoint by itself."""
    expected = run(settings)
    hit: list[psutil.Process] = []
    notes: list[str] = []

    def hurt(event: RunEvent) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        if isinstance(event, RoundDone) and event.round == 1 and not hit:
            hit.extend(actors("DriverActor"))
            hit[0].send_signal(fault)

    deadline = 3600 if fault == signal.SIGKILL else 8
    execution = {"backend": "ray", "actors": 1, "cpus_per_actor": 0.5, "block_size": 2, "deadline": deadline}
    found = run({**settings, "execution": execution}, on_event=hurt)
    assert len(hit) == 1
    assert any(note.startswith("the driver") and "last checkpoint" in note for note in notes)
    assert_same(expected, found)


# -- nodes ------------------------------------------------------------------------------------------------


def _on_two_nodes(settings: dict[str, Any], tmp_path: Path, moment: str, *more: str) -> dict[str, Any]:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "tests.runtime.on_two_nodes", str(file), moment, *more]
    hidden = ("RAY_ADDRESS",)
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert printed.returncode == 0, printed.stderr[-2000:]
    # Ray may print the log of the lost node's raylet after it.
    (line,) = [line for line in printed.stdout.splitlines() if line.startswith('{"path"')]
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["reduce", "start", "blocks", "tested", "checkpoint"])
def test_a_node_lost_for_good_costs_the_rounds_since_the_last_checkpoint(
    moment: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Models above 100 kB lie on the node that made them, and are lost with it."""
    settings |= {"algorithm": "mt_hfl", **METHODS["mt_hfl, scaffold"], "rounds": 5}
    settings["model"] = {"name": "mlp", "hidden": [512]}
    expected = run(settings)
    found = _on_two_nodes(settings, tmp_path, moment)
    assert found["lost"] == 1
    assert found["actors"] == 1
    assert_same(expected, Result(Path(found["path"])))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["blocks", "reduce"])
def test_sums_in_a_tree_on_two_nodes_of_which_one_is_lost_are_the_same(
    moment: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings |= {"rounds": 5, "model": {"name": "mlp", "hidden": [512]}}
    settings["execution"] = {**settings["execution"], "block_size": 1, "fan_in": 2}
    found = _on_two_nodes(settings, tmp_path, moment)
    assert (found["lost"], found["actors"]) == (1, 1)
    assert_same(run(settings), Result(Path(found["path"])))


@pytest.mark.ray
@pytest.mark.slow
def test_models_in_shards_on_two_nodes_of_which_one_is_lost_are_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings |= {"rounds": 5, "model": {"name": "mlp", "hidden": [1200]}}
    sharded = {**settings, "execution": {**settings["execution"], "shard_models": True}}
    found = _on_two_nodes(sharded, tmp_path, "reduce")
    assert (found["lost"], found["actors"]) == (1, 1)
    assert_same(run(settings), Result(Path(found["path"])))


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_that_comes_later_is_used(settings: dict[str, Any], tmp_path: Path) -> None:
    settings |= {"rounds": 200}
    found = _on_two_nodes(settings, tmp_path, "blocks", "later")
    assert found["actors"] == 2
    assert_same(run(settings), Result(Path(found["path"])))


# -- the head ---------------------------------------------------------------------------------------------


def test_a_head_is_gone_when_nothing_has_answered_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        head = connection.Head()
        for now[0] in (1, 10, 100):
            assert not head.silent()
    for now[0] in (103, 106, 109, 112, 115):
        assert not head.silent()
    now[0] = 118
    assert head.silent()


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_without_a_head_leaves_a_checkpoint_and_says_how_to_go_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with _run({**settings, "rounds": 10**6}, tmp_path) as (process, lines):
        for line in lines:
            if "round   2/" in line:
                break
        (head,) = (p for p in psutil.Process(process.pid).children(recursive=True) if "gcs_s" in p.name())
        head.kill()
        said, wrong = process.communicate(timeout=850)
    (path,) = tmp_path.glob("t-*")
    assert process.returncode == 2, wrong
    assert wrong.splitlines()[-1].startswith("error: Ray's head at ")
    assert wrong.splitlines()[-1].endswith(f"is gone; resume with: rayfl resume {path}")
    rounds = round_of(checkpoints(path / "checkpoints")[-1])
    assert f"stopped after {rounds} complete rounds" in said
    more = [f"rounds={rounds + 1}", "execution.backend=inline"]
    assert_same(run({**settings, "rounds": rounds + 1}), resume(path, more))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"RAY_DEDUP_LOGS_SKIP_REGEX": "nothing of this"}])
def test_ray_does_not_report_deaths_that_are_mended_unless_asked_to(
    own: dict[str, str], settings: dict[str, Any], tmp_path: Path
) -> None:
    killed = []
    with _run({**settings, "rounds": 60}, tmp_path, **own) as (process, lines):
        said = []
        for line in lines:
            said.append(line)
            if "round   2/" in line:
                processes = psutil.Process(process.pid).children(recursive=True)
                actors = [p for p in processes if "HostActor" in " ".join(p.cmdline())]
                actors[0].kill()
                killed.append(actors[0].pid)
        assert process.stderr is not None
        text = "".join(said) + process.stderr.read()
        assert process.wait(280) == 0, text
    assert killed
    assert ("(raylet)" in text) == bool(own)
    assert "60/60" in text


# -- memory -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _run(
    settings: dict[str, Any], tmp_path: Path, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """``rayfl run`` with two actors on a Ray of its own, whose settings are in the environment."""
    execution = {"backend": "ray", "actors": 2, "cpus_per_actor": 0.5, "block_size": 2}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**settings, "execution": execution}))
    command = [sys.executable, "-m", "rayfl.cli", "run", str(file)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | environment
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        assert process.stdout is not None
        yield process, process.stdout


@pytest.mark.ray
@pytest.mark.slow
def test_what_ray_kills_for_lack_of_memory_is_done_again(settings: dict[str, Any], tmp_path: Path) -> None:
    """Another program takes the memory, and gives it back when Ray has killed some of ours for it."""
    memory = psutil.virtual_memory()
    if memory.available < 12 << 30:
        pytest.skip("6 GB are taken for a moment, and 12 GB are not free")
    threshold = 1 - (memory.available - (5 << 30)) / memory.total
    limits = {"RAY_memory_usage_threshold": f"{threshold:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    settings |= {"algorithm": "mt_hfl", **METHODS["mt_hfl, scaffold"], "rounds": 200}
    settings["output"]["checkpoint_every"] = 20
    with _run(settings, tmp_path, **limits) as (process, lines):
        for line in lines:
            if "round   2/" in line:
                break
        tree = psutil.Process(process.pid)
        before = {p for p in tree.children(recursive=True) if "ray::" in " ".join(p.cmdline())}
        taking = "x = b'x' * (6 << 30); input()"
        with subprocess.Popen([sys.executable, "-c", taking], stdin=subprocess.PIPE) as hog:
            gone, _ = psutil.wait_procs(before, timeout=120, callback=lambda p: hog.kill())
        _, wrong = process.communicate(timeout=850)
    assert gone, wrong
    assert process.returncode == 0, wrong
    (path,) = tmp_path.glob("t-*")
    assert_same(run(settings), Result(path))


@pytest.mark.ray
@pytest.mark.slow
def test_a_full_object_store_on_a_full_disk_is_one_line(settings: dict[str, Any], tmp_path: Path) -> None:
    settings |= {"data": {"name": "synthetic", "features": 1000, "samples": 40_000}}
    settings |= {"partition": {"name": "iid", "clients": 9}}
    full = {
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "80000000",
        "RAY_local_fs_capacity_threshold": "1e-6",
    }
    with _run(settings, tmp_path, **full) as (process, _):
        _, wrong = process.communicate(timeout=850)
    assert process.returncode == 2, wrong
    assert wrong.splitlines()[-1].startswith("error: the disk to which Ray spills objects is full; free some")
    assert not list(tmp_path.glob("t-*"))


# -- every failure of Ray has an outcome -------------------------------------------------------------------


def _raised(error: Exception) -> Exception:
    try:
        with plain_errors():
            raise error
    except Exception as raised:
        return raised
    raise AssertionError


LOST = ("00" * 28, None, "")


@pytest.mark.parametrize(
    "error",
    [
        rx.ActorDiedError(),
        rx.ActorUnavailableError("gone", None),
        rx.WorkerCrashedError(),
        rx.OutOfMemoryError("killed by the memory monitor"),
        rx.NodeDiedError("gone"),
        rx.RayTaskError("f", "Traceback", rx.OutOfMemoryError("of what it needed")),
    ],
)
def test_a_dead_process_is_known_for_one(error: Exception) -> None:
    assert died(_raised(error))


@pytest.mark.parametrize("kind", [rx.ObjectLostError, rx.OwnerDiedError, rx.ObjectReconstructionFailedError])
@pytest.mark.parametrize("needed_by_a_task", [False, True])
def test_lost_results_are_known_for_such(kind: type[Exception], needed_by_a_task: bool) -> None:
    arguments = (*LOST, "why", "what")[: 5 if kind is rx.ObjectReconstructionFailedError else 3]
    error = kind(*arguments) if kind is not rx.ObjectReconstructionFailedError else kind(*LOST, "why", "what")
    if needed_by_a_task:
        error = rx.RayTaskError("f", "Traceback ...", error)
    assert isinstance(_raised(error), ResultsLost)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (rx.ObjectStoreFullError("full"), "object store is full"),
        (rx.OutOfDiskError("full"), "disk"),
        (rx.LocalRayletDiedError("raylet died\nmore"), "raylet died"),
        (rx.RaySystemError("broken\nmore"), "broken"),
        (rx.RuntimeEnvSetupError("no such package"), "no such package"),
        (rx.RayTaskError("f", "Traceback", rx.ObjectStoreFullError("full")), "object store is full"),
    ],
)
def test_other_failures_of_ray_are_one_line(error: Exception, words: str) -> None:
    found = _raised(error)
    assert type(found) is RayflError
    assert words in str(found)
    assert "\n" not in str(found)


def test_a_mistake_in_remote_code_keeps_its_traceback() -> None:
    assert isinstance(
        _raised(rx.RayTaskError("f", "Traceback", ValueError("no"))), ValueError | rx.RayTaskError
    )


def test_deadlines_follow_what_work_has_taken_and_double_when_it_is_lost() -> None:
    deadlines = Deadlines(None, lambda text: None)
    assert deadlines.seconds("train", 10) == 300  # nothing measured yet
    deadlines.measured("train", 40.0, cost=2)
    assert deadlines.seconds("train", 10) == 20 * 20 * 10
    assert deadlines.seconds("train", 10, lost=2) == 4 * 20 * 20 * 10
    deadlines.hurried = True
    assert deadlines.seconds("train", 10) == 10
    assert Deadlines(7.0, lambda text: None).seconds("train", 1e9) == 7


def test_silence_is_said_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said: list[str] = []
    deadlines, silence = Deadlines(200.0, said.append), Silence()
    over = []
    for now[0] in range(0, 205, 5):
        over.append(deadlines.over(silence, 200.0, "LPS actor 0"))
    assert [s.split(" has been silent for ")[1].split(" s")[0] for s in said] == ["30", "60", "120", "200"]
    assert over == [False] * 40 + [True]


def test_nothing_but_deaths_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    deaths = Deaths()
    for _ in range(processes.MAX_DEATHS):
        deaths.one(rx.WorkerCrashedError())
    deaths.none()
    for _ in range(processes.MAX_DEATHS):
        deaths.one(None)
    with pytest.raises(RayflError, match="keep dying"):
        deaths.one(rx.OutOfMemoryError("the node ran out of memory\nmore"))


def test_an_actor_that_cannot_start_says_why() -> None:
    """Not the first 300 characters of a page of traceback."""
    error = rx.ActorDiedError(
        rx.RayTaskError(
            "__init__",
            'Traceback (most recent call last):\n  File "/ray/worker.py", line 9, in main\n'
            '  File "/own/net.py", line 3, in <module>\n    WIDTH = read()\n'
            "FileNotFoundError: [Errno 2] No such file or directory: 'width.json'",
            FileNotFoundError(),
        )
    )
    assert error.actor_init_failed
    with pytest.raises(RayflError) as raised:
        Deaths().one(error)
    expected = "/own/net.py:3: FileNotFoundError: [Errno 2] No such file or directory: 'width.json'"
    assert str(raised.value) == f"an actor cannot start: {expected}"


def test_where_ray_does_not_start_nothing_is_left_behind(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise Exception("The current node timed out during startup.\nmore")  # as Ray does

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", broken)
    with pytest.raises(RayflError, match=r"Ray does not start on this machine: The current node timed out"):
        run({**settings, "execution": {"backend": "ray"}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("resumable", [True, False])
def test_only_a_run_directory_that_no_line_names_is_removed(
    resumable: bool, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object, directory: RunDirectory, *more: object) -> None:
        raise RayflError(f"resume with: rayfl resume {directory.path}" if resumable else "the disk is full")

    monkeypatch.setattr("rayfl.api.drive", fail)
    with pytest.raises(RayflError):
        run(settings)
    assert len(list(tmp_path.glob("t-*"))) == resumable
