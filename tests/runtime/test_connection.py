"""The connection to Ray: tokens, folders of universities, waiting for room."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rayfl.api import run
from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.events import Note
from rayfl.runtime import connection, nodes
from rayfl.runtime.connection import await_room, prospect, refuse_without_gpus, short_folder
from rayfl.runtime.resources import Available, Node


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("there", [False, True])
def test_nobody_else_can_read_the_token(there: bool, tmp_path: Path) -> None:
    path = tmp_path / ".ray" / "auth_token"
    if there:
        path.parent.mkdir()
        path.write_text("the user's own")
        path.chmod(0o644)
    connection._guard_token(path)
    assert _mode(path) == 0o600
    assert path.read_text() == "the user's own" if there else len(path.read_text()) == 64


@pytest.mark.parametrize("own", ["/scratch/" + "x" * 60, "/tmp/höhe"])
def test_ray_gets_a_short_folder(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", own)
    assert short_folder(tmp_path) == str(tmp_path / f"rayfl-{os.getuid()}")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="set RAY_TMPDIR to a short folder"):
        short_folder()
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    assert short_folder() is None


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ["a-long-name-of-a-job-on-a-cluster" * 3, "Übungsgruppe"])
def test_a_run_with_a_folder_that_ray_does_not_take(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**settings, "rounds": 1, "execution": {"actors": 1}}))
    hidden = ("RAY_ADDRESS", "RAY_TMPDIR")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"TMPDIR": str(folder)}
    command = [sys.executable, "-m", "rayfl.cli", "run", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bundles the cluster was asked for; 0: the demand was withdrawn."""
    calls: list[int] = []

    class Group:
        """A placement group for which there is room at once."""

        def __init__(self, bundles: list[dict[str, float]]) -> None:
            calls.append(len(bundles))

        def wait(self, seconds: float) -> bool:
            return True

    monkeypatch.setattr(connection, "placement_group", Group)
    monkeypatch.setattr(connection, "remove_placement_group", lambda group: calls.append(0))
    monkeypatch.setattr(connection, "is_autoscaler_v2", lambda: False)
    return calls


def _room(monkeypatch: pytest.MonkeyPatch, *rooms: int) -> None:
    left = list(rooms)

    def now(*_: object) -> Available:
        return Available((Node(float(left.pop(0) if len(left) > 1 else left[0]), 0.0),), 1e12)

    monkeypatch.setattr(connection, "this_cluster", now)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [("actors=4", 4), ("actors=3-64", 3), ("actors=auto", 1), ("clients_per_actor=3", 7)],
)
def test_a_run_waits_for_room_and_asks_an_autoscaler(
    setting: str, wanted: int, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    _room(monkeypatch, 0, 0, wanted)  # while the demand is met, it holds the room
    stop, said = threading.Event(), []
    monkeypatch.setattr(stop, "wait", lambda seconds: False)
    config = load({}, ["partition.clients=20", f"execution.{setting}", "execution.wait=60"])
    await_room(config, said.append, stop)
    assert asked == [wanted, 0]
    assert said == [f"waiting for nodes: there is room for 0 of {wanted} actors (at most 60 s)"]


def test_waiting_ends_when_the_run_is_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    _room(monkeypatch, 0)
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    await_room(load({}, ["execution.actors=4", "execution.wait=1e9"]), lambda text: None, stop)
    assert stop.is_set()


_BY_HAND = f"node_{'0af1' * 14}"
"""The type that the monitor of ``ray start --head`` gives a node."""


@pytest.mark.parametrize(
    ("status", "autoscaler"),
    [
        (None, False),
        ({"autoscaler_report": {"active_nodes": {_BY_HAND: 1}}}, False),
        ({"autoscaler_report": {"active_nodes": {}, "idle_nodes": {_BY_HAND: 1}}}, False),
        ({"autoscaler_report": {"active_nodes": {"head": 1}}}, True),
        ({"autoscaler_report": {"active_nodes": {}}}, True),
        ({"load_metrics_report": {}}, True),
    ],
)
def test_without_an_autoscaler_nobody_waits_long(
    status: dict[str, Any] | None, autoscaler: bool, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    """Whichever it is: Ray's own monitor reports where all can see it, and is no autoscaler."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    written = None if status is None else json.dumps(status).encode()
    monkeypatch.setattr(connection, "_internal_kv_get", lambda key: written)
    monkeypatch.setattr(nodes, "whole", lambda gpus: {"a": Node(2.0, 0.0)})
    monkeypatch.setattr(Path, "home", lambda: Path("/nowhere"))
    monkeypatch.delenv("KUBERAY_GEN_RAY_START_CMD", raising=False)
    _room(monkeypatch, 0)
    stop = threading.Event()

    def pass_time(seconds: float) -> bool:
        now[0] += seconds
        return False

    monkeypatch.setattr(stop, "wait", pass_time)
    await_room(load({}, ["execution.actors=4"]), lambda text: None, stop)
    assert (now[0] > 800) == autoscaler
    assert bool(asked) == autoscaler


@pytest.mark.parametrize(("kind", "autoscaler"), [(_BY_HAND, False), ("worker", True)])
def test_the_second_autoscaler_is_asked_itself(
    kind: str, autoscaler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports to nobody else."""
    monkeypatch.setattr(connection, "is_autoscaler_v2", lambda: True)
    monkeypatch.setattr(Path, "home", lambda: Path("/nowhere"))
    monkeypatch.delenv("KUBERAY_GEN_RAY_START_CMD", raising=False)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    nodes = [SimpleNamespace(ray_node_type_name=kind)]
    status = SimpleNamespace(active_nodes=nodes, idle_nodes=[])
    monkeypatch.setattr(connection, "get_cluster_status", lambda address: status)
    assert connection._autoscales() == autoscaler


@pytest.mark.parametrize("actors", ["2-64", "2", "auto"])
def test_who_waits_in_vain_hears_that_others_hold_the_cluster(
    actors: str, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    """The cluster itself would be large enough."""
    _room(monkeypatch, 0)
    monkeypatch.setattr(nodes, "whole", lambda gpus: {"a": Node(2.0, 0.0)})
    config = load({}, [f"execution.actors={actors}", "execution.wait=0"])
    with pytest.raises(ConfigError, match=r"room for 0 of \d actors?; execution.wait=3600 waits"):
        await_room(config, lambda text: None, threading.Event())


@pytest.mark.parametrize(("address", "cpus"), [("10.0.0.1:6379", 96.0), (None, 3.0)])
def test_a_plan_is_for_the_cluster_that_is_named(
    address: str | None, cpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--dry-run`` on a laptop, too: not for the laptop."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connection, "connect", lambda config: None)
    monkeypatch.setattr(connection, "_autoscales", lambda: False)
    monkeypatch.setattr(nodes, "whole", lambda gpus: {name: Node(48.0, 0.0, None, 1e11) for name in "ab"})
    monkeypatch.setattr(connection, "this_cluster", lambda gpus: Available((), 0.0, 5e9))
    monkeypatch.setattr(connection, "this_machine", lambda: Available((Node(3.0, 0.0),), 1e9))
    found = prospect(load({}, [f"execution.address={address}"] if address else []))
    assert found.cpus == cpus
    assert (found.memory, found.store) == ((2e11, 5e9) if address else (1e9, None))


_TYPES = {
    "head": {"resources": {"CPU": 4}, "max_workers": 0},
    "small": {"resources": {"CPU": 8}, "max_workers": 9},
    "gpu": {"resources": {"CPU": 16, "GPU": 2, "memory": 5e10}, "max_workers": 2},
}


@pytest.mark.parametrize(
    ("types", "actors", "cpus", "said"),
    [
        (_TYPES, "64", 60.0, "the most that its configuration allows: 6 nodes with 60 CPUs in all"),
        ({**_TYPES, "gpu": {"resources": {}}}, "64", 64.0, "is not known here, .*: 8 nodes with 64 CPUs"),
        (None, "20-64", 24.0, "how many is not known here, this plan is for: 3 nodes with 24 CPUs"),
        (None, "auto", 8.0, "this plan is for: 1 node with 8 CPUs in all"),
    ],
)
def test_a_plan_for_a_cluster_that_grows_says_what_it_assumes(
    types: dict[str, Any] | None,
    actors: str,
    cpus: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for the laptop on which it is made."""
    if types is not None:
        found = {"max_workers": 5, "head_node_type": "head", "available_node_types": types}
        (tmp_path / "ray_bootstrap_config.yaml").write_text(json.dumps(found))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(connection, "connect", lambda config: None)
    monkeypatch.setattr(connection, "_autoscales", lambda: True)
    monkeypatch.setattr(nodes, "whole", lambda gpus: {"a": Node(8.0, 0.0, None, 1e11)})
    monkeypatch.setattr(connection, "this_cluster", lambda gpus: Available((), 0.0, 5e9))
    monkeypatch.setattr(connection, "this_machine", lambda: Available((Node(3.0, 0.0),), 1e9))
    there = prospect(load({}, ["execution.address=10.0.0.1:6379", f"execution.actors={actors}"]))
    assert there.cpus == cpus
    assert re.search(said, there.assumed)


def test_what_a_cluster_has_is_known_beside_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RELEASE_TIMEOUT", 0.0)
    monkeypatch.setattr(nodes, "whole", lambda gpus: {"a": Node(4.0, 0.0)})
    _room(monkeypatch, 0)
    found = connection.available(load({}, ["execution.actors=2-64"]))
    assert (found.cpus, found.whole) == (0.0, (Node(4.0, 0.0),))


@pytest.mark.parametrize(("gpus", "autoscales"), [(1.0, False), (0.0, True), (0.0, False)])
def test_a_device_that_no_node_has_is_refused(
    gpus: float, autoscales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before actors start that would fail."""
    monkeypatch.setattr(connection, "_autoscales", lambda: autoscales)
    monkeypatch.setattr(nodes, "whole", lambda: {"a": Node(2.0, 0.0), "b": Node(2.0, gpus)})
    config = load({}, ["execution.device=cuda"])
    if gpus or autoscales:
        refuse_without_gpus(config)
    else:
        with pytest.raises(ConfigError, match=r"execution\.device: Ray knows of no GPU here; .*auto"):
            refuse_without_gpus(config)
    refuse_without_gpus(load({}, ["execution.device=cpu"]))


@pytest.mark.ray
def test_a_second_run_queues_behind_what_holds_the_cluster(
    settings: dict[str, Any], ray_cluster: None
) -> None:
    import ray

    holder = ray.remote(num_cpus=4)(threading.Event).remote()
    ray.get(holder.is_set.remote())
    notes: list[str] = []

    def release(event: Any) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
            if "waiting for nodes" in notes[-1]:
                ray.kill(holder)

    execution = {"backend": "ray", "actors": 2, "cpus_per_actor": 2, "block_size": 2, "wait": 300}
    found = run({**settings, "execution": execution}, on_event=release)
    assert "waiting for nodes: there is room for 0 of 2 actors (at most 300 s)" in notes
    assert found.summary["models_sha256"] == run(settings).summary["models_sha256"]


def test_a_cluster_that_does_not_let_one_in_is_named_with_what_may_be_wrong(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: object) -> None:
        raise RuntimeError("Failed to get cluster ID from GCS server\nmore")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr(connection, "_reach", lambda address: None)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match=r"execution.address: Failed to get.*set RAY_AUTH_MODE=token"):
        run(settings, ["execution.backend=ray", "execution.address=10.0.0.1:6379"])
