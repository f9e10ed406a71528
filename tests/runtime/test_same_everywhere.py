"""Invariant 1: the same result inline, on 1, 2 and 3 actors, with a worker killed, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayfl.algorithms import ALGORITHMS
from rayfl.api import Result, resume, run
from rayfl.config import load
from rayfl.errors import Interrupted
from rayfl.events import BlockDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.runtime.ray_backend import RayBackend
from rayfl.servers.building import build
from rayfl.servers.driver import Driver
from tests.algorithms.test_contract import Contrast
from tests.runs import METHODS, TASKS, actors, assert_same


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Results of the inline backend, one a method, filled on demand."""
    return {}


def _settings(settings: dict[str, Any], method: str, **execution: Any) -> dict[str, Any]:
    return {
        **settings,
        "algorithm": method,
        "evaluation": {"local": True},
        **METHODS[method],
        "execution": {**settings["execution"], **execution},
    }


def _inline(inline: dict[str, Result], settings: dict[str, Any], method: str) -> Result:
    if method not in inline:
        inline[method] = run(_settings(settings, method))
        _ = (
            inline[method].rounds,
            inline[method].clients,
            inline[method].communication,
        )  # read before tmp goes
        _ = inline[method].clusters, inline[method].summary, inline[method].groups
    return inline[method]


def test_no_method_is_left_out() -> None:
    """FedProx, FedNova and SCAFFOLD are there as the local objectives that they are FedAvg with."""
    made = [load({"algorithm": method, **own}) for method, own in METHODS.items()]
    assert set(ALGORITHMS.own) == {config.algorithm.name for config in made} | {
        config.local.name for config in made if config.local.name in ALGORITHMS
    }


TWICE = "fedavg", "mt_hfl, scaffold", "cfl", "fedsoft"
"""The others are slow: below, every method is stopped and resumed, to the same end."""


@pytest.mark.parametrize(
    "method", [m if m in TWICE else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
def test_the_same_run_twice_is_the_same(
    method: str, settings: dict[str, Any], inline: dict[str, Result]
) -> None:
    assert_same(_inline(inline, settings, method), run(_settings(settings, method)))


def test_another_seed_is_another_run(settings: dict[str, Any], inline: dict[str, Result]) -> None:
    other = run({**_settings(settings, "fedavg"), "seed": 4})
    assert other.summary["models_sha256"] != _inline(inline, settings, "fedavg").summary["models_sha256"]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("method", "actors"),
    [
        ("mt_hfl, scaffold", 2),
        *(
            pytest.param(method, actors, marks=pytest.mark.slow)
            for method, actors in (
                ("cfl", 2),
                ("flt", 2),
                ("mt_hfl, edges", 2),
                ("sub_fedavg", 3),
                ("fedsoft", 3),
                ("mt_hfl", 1),
                ("mt_hfl", 3),
                ("mtl", 3),
                ("ifca", 2),
                ("flis_dc", 2),
                ("solo", 2),
                ("fedavg", 3),
                ("pacfl", 2),
                ("flis_hc", 2),
                ("fedsem", 3),
                ("mt_hfl, fednova", 3),
                ("hierfavg", 3),
            )
        ),
    ],
)
def test_ray_on_any_number_of_actors_is_inline(
    method: str, actors: int, settings: dict[str, Any], inline: dict[str, Result], ray_cluster: None
) -> None:
    on_ray = run(_settings(settings, method, backend="ray", actors=actors, cpus_per_actor=0.5))
    assert_same(_inline(inline, settings, method), on_ray)


def _with_network(settings: dict[str, Any], network: str) -> dict[str, Any]:
    """Settings with a network of :mod:`tests.runtime.networks`, which has dropout and running statistics."""
    model = {"name": "module", "target": f"tests.runtime.networks:{network}"}
    return {**_settings(settings, "sub_fedavg"), "data": {"name": "digits", "size": 8}, "model": model}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("network", ["Mixed", "Strided"])
def test_norms_and_dropout_stopped_on_ray_and_resumed(
    network: str, settings: dict[str, Any], ray_cluster: None
) -> None:
    """In compiled calls, and layer by layer for several clients; running statistics are restored."""
    small = _with_network(settings, network)
    on_ray = {**settings["execution"], "backend": "ray", "actors": 2, "cpus_per_actor": 0.5}
    begun = run({**small, "rounds": 1, "execution": on_ray})
    assert_same(run(small), resume(begun.path, ["rounds=3"]))


@pytest.mark.ray
def test_one_actor_a_client_with_fractional_gpus(settings: dict[str, Any], ray_cluster: None) -> None:
    """Logical GPUs: the scheduling is real, the device falls back to the CPU where there is none."""
    pinned = _settings(settings, "mt_hfl", clients_per_actor=1, block_size=1)
    tasks = [{**task, "clients": n} for task, n in zip(TASKS, (2, 1, 1), strict=True)]
    pinned["partition"] = {**pinned["partition"], "tasks": tasks}
    fractions = {"cpus_per_actor": 0.25, "gpus_per_actor": 0.25, "device": "cpu"}
    on_ray = run({**pinned, "execution": {**pinned["execution"], "backend": "ray", **fractions}})
    assert RunDirectory(on_ray.path).read_json("environment.json")["resources"]["actors"] == 4
    assert_same(run(pinned), on_ray)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("method", "together"),
    [
        ("mt_hfl, scaffold", True),
        *(
            pytest.param(method, together, marks=pytest.mark.slow)
            for method, together in (
                ("mt_hfl, scaffold", False),
                ("mt_hfl", True),
                ("mt_hfl", False),
                ("flis_dc", True),
                ("flis_dc", False),
                ("mtl", True),
                ("mtl", False),
            )
        ),
    ],
)
def test_a_killed_actor_costs_only_its_block(
    method: str,
    together: bool,
    settings: dict[str, Any],
    inline: dict[str, Result],
    ray_cluster: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether blocks travel one by one or several in a message."""
    if not together:
        monkeypatch.setattr("rayfl.backend.MESSAGE_WORK", 1.0)
    on_ray = _settings(settings, method, backend="ray", actors=2)
    assert_same(_inline(inline, settings, method), _with_a_killed_actor(on_ray))


def _with_a_killed_actor(settings: dict[str, Any]) -> Result:
    """A run of which an actor is killed in the second round, while it trains."""
    config = load(settings)
    directory = RunDirectory.create(config)
    stages, host = build(config)
    backend = RayBackend(2, num_cpus=0.5, num_gpus=0, servers=1)
    killed: list[int] = []
    trained: list[int] = []

    def kill_once(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.round == 1:
            trained.append(event.done)
            if not killed:
                killed.append(backend.pids()[0])
                os.kill(killed[0], signal.SIGKILL)

    try:
        Driver(config, stages, backend, directory, host, kill_once).run()
        assert len(killed) == 1
        assert killed[0] not in backend.pids()
    finally:
        backend.close()
    assert trained == list(range(1, trained[-1] + 1))  # no block of the round was reported twice
    return Result(directory.path)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("network", ["Mixed", "Strided"])
def test_a_network_with_dropout_draws_the_same_when_its_actor_is_killed(
    network: str, settings: dict[str, Any], ray_cluster: None
) -> None:
    given = _with_network(settings, network)
    on_ray = {**given["execution"], "backend": "ray", "actors": 2}
    assert_same(run(given), _with_a_killed_actor({**given, "execution": on_ray}))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_loss_with_guides_is_the_same_on_two_actors(
    engine: str, settings: dict[str, Any], ray_cluster: None
) -> None:
    """MOON, an own objective that keeps a model as client state."""
    training = {**settings["training"], "engine": engine}
    given = {**settings, "training": training, "local": Contrast()}
    execution = {**settings["execution"], "backend": "ray", "actors": 2}
    assert_same(run(given), run({**given, "execution": execution}))


@pytest.mark.slow
@pytest.mark.ray
def test_sums_in_a_tree_are_the_same_on_two_actors_of_which_one_is_killed(
    settings: dict[str, Any], ray_cluster: None
) -> None:
    """Six blocks, three groups of two, two sums of these."""
    config = load(_settings(settings, "mtl", backend="ray", actors=2, block_size=1, fan_in=2))
    directory = RunDirectory.create(config)
    stages, host = build(config)
    backend = RayBackend(2, num_cpus=0.5, num_gpus=0, servers=2)
    killed: list[int] = []

    def kill_once(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.round == 1 and not killed:
            killed.append(backend.pids()[0])
            os.kill(killed[0], signal.SIGKILL)

    try:
        Driver(config, stages, backend, directory, host, kill_once).run()
    finally:
        backend.close()
    assert killed
    inline = run(_settings(settings, "mtl", block_size=1, fan_in=2))
    assert_same(inline, Result(directory.path))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("method", ["mt_hfl, scaffold", pytest.param("fedadam", marks=pytest.mark.slow)])
def test_models_in_shards_are_the_same_when_a_server_of_one_is_killed(
    method: str, settings: dict[str, Any], ray_cluster: None
) -> None:
    """Two LPSs, each with a shard of every model; the models at the first are whole again after its death."""
    wide = {**settings, "model": {"name": "mlp", "hidden": [1200]}}  # two pieces, one for each
    before = actors("ServerActor")
    config = load(_settings(wide, method, backend="ray", actors=2, shard_models=True))
    directory = RunDirectory.create(config)
    stages, host = build(config)
    backend = RayBackend(2, num_cpus=0.5, num_gpus=0, servers=2)
    killed: list[int] = []

    def kill_once(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.round == 1 and event.done == event.total and not killed:
            servers = actors("ServerActor") - before
            assert len(servers) == 2
            killed.append(min(servers, key=lambda server: server.pid).pid)
            os.kill(killed[0], signal.SIGKILL)

    try:
        Driver(config, stages, backend, directory, host, kill_once).run()
    finally:
        backend.close()
    assert killed
    assert_same(run(_settings(wide, method)), Result(directory.path))


TREE = {"block_size": 1, "fan_in": 2}
"""Six clients train: three groups of two blocks, and two sums of these."""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("actors", [1, 3])
def test_sums_in_a_tree_are_the_same_on_any_number_of_actors(
    actors: int, settings: dict[str, Any], ray_cluster: None
) -> None:
    on_ray = run(_settings(settings, "fedavg", backend="ray", actors=actors, cpus_per_actor=0.5, **TREE))
    assert_same(run(_settings(settings, "fedavg", **TREE)), on_ray)


@pytest.mark.slow
def test_sums_in_a_tree_killed_and_resumed_are_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    long = {**_settings(settings, "fedavg", **TREE), "rounds": 60}
    process, path = _start({**long, "output": {**long["output"], "checkpoint_every": 3}}, tmp_path)
    process.kill()
    process.communicate(timeout=280)
    assert not (path / "summary.json").exists()
    assert_same(run(long), resume(path))


@pytest.mark.ray
@pytest.mark.slow
def test_sums_in_a_tree_stopped_on_ray_and_resumed_inline_are_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    long = {**_settings(settings, "fedavg", backend="ray", actors=2, **TREE), "rounds": 60}
    process, path = _start(long, tmp_path)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=280)
    assert process.returncode == 130
    resumed = resume(path, ["execution.backend=inline"])
    assert_same(run({**long, "execution": {**settings["execution"], **TREE}}), resumed)


def _start(settings: dict[str, Any], tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A run in a process of its own, which announces its directory by making it."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    before = set(tmp_path.glob("t-*"))
    process = subprocess.Popen(
        [sys.executable, "-m", "rayfl.cli", "run", str(file)], text=True, stdout=subprocess.PIPE
    )
    deadline = time.time() + 280
    while time.time() < deadline:
        new = set(tmp_path.glob("t-*")) - before
        if new and (path := new.pop() / "rounds.csv").exists() and len(path.read_text().splitlines()) > 4:
            return process, path.parent
        time.sleep(0.01)
    raise AssertionError("the run did not get to its fourth round")


@pytest.mark.parametrize(
    ("method", "kill", "code"),
    [
        ("solo", signal.SIGINT, 130),
        pytest.param("mt_hfl, scaffold", signal.SIGKILL, -9, marks=pytest.mark.slow),
        pytest.param("mt_hfl", signal.SIGKILL, -9, marks=pytest.mark.slow),
        pytest.param("mt_hfl", signal.SIGTERM, 130, marks=pytest.mark.slow),
        pytest.param("mtl", signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_is_uninterrupted(
    method: str, kill: signal.Signals, code: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    long = {**_settings(settings, method), "rounds": 60}
    process, path = _start({**long, "output": {**long["output"], "checkpoint_every": 3}}, tmp_path)
    process.send_signal(kill)
    printed, _ = process.communicate(timeout=280)
    assert process.returncode == code
    done = len((path / "rounds.csv").read_text().splitlines()) - 1
    assert done < 60
    assert not (path / "summary.json").exists()
    if kill != signal.SIGKILL:
        assert f"rayfl resume {path}" in printed
        assert (path / "clients.csv").exists()
    resumed = resume(path)
    assert_same(run(long), resumed)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", METHODS)
def test_stopped_while_clients_are_tested_and_resumed(
    method: str, settings: dict[str, Any], inline: dict[str, Result]
) -> None:
    """The round's training is done but its test is not: models and client states go back together."""
    config = load(_settings(settings, method))
    directory = RunDirectory.create(config)
    stages, host = build(config)
    trained: list[bool] = []

    def watch(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.round == 1 and event.done == event.total:
            trained.append(True)

    backend = InlineBackend()
    try:
        with pytest.raises(Interrupted):
            Driver(config, stages, backend, directory, host, watch, lambda: bool(trained)).run()
    finally:
        backend.close()
    assert (Result(directory.path).clients["local_round"] <= 0).all()
    assert_same(_inline(inline, settings, method), resume(directory.path))


@pytest.mark.ray
@pytest.mark.slow
def test_interrupted_on_ray_and_resumed_inline(settings: dict[str, Any], tmp_path: Path) -> None:
    long = {**_settings(settings, "mt_hfl", backend="ray"), "rounds": 60}
    process, path = _start(long, tmp_path)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=280)
    assert process.returncode == 130
    resumed = resume(path, ["execution.backend=inline"])
    assert_same(run({**long, "execution": settings["execution"]}), resumed)


@pytest.mark.slow
@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("how", ["hangup", "closed output"])
def test_a_run_whose_terminal_goes_away_leaves_a_checkpoint(
    how: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A lost connection, and ``rayfl run ... | head``."""
    long = {**_settings(settings, "fedavg"), "rounds": 60}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(long))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "rayfl.cli", "run", str(file)],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    while "round " not in process.stdout.readline():
        assert process.poll() is None
    if how == "hangup":
        process.send_signal(signal.SIGHUP)
    else:
        process.stdout.close()
        process.stdout = None
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 130
    (path,) = tmp_path.glob("t-*")
    if how == "closed output":
        assert f"rayfl resume {path}" in errors
    assert "Traceback" not in errors
    assert_same(run(long), resume(path))
