"""The Ray backend: messages worth sending, nothing kept, calls made again when a process dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from rayfl.api import Result, run
from rayfl.backend import MESSAGE_WORK, Task, bundles
from rayfl.config import load
from rayfl.errors import RayflError
from rayfl.events import BlockDone, RoundDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime import processes
from rayfl.runtime.ray_backend import RayBackend
from rayfl.servers import states
from rayfl.servers.building import build
from rayfl.servers.driver import Driver
from rayfl.servers.lps import MODEL, VALUES
from tests.runs import METHODS, actors


def _task(work: float, cost: float = 1.0) -> Task:
    return Task("train", None, cost=cost, work=work)


@given(
    st.lists(st.tuples(st.floats(0, 3 * MESSAGE_WORK), st.floats(0.1, 100)), max_size=40), st.integers(1, 9)
)
def test_every_task_is_in_one_message_and_every_actor_has_one(
    sizes: list[tuple[float, float]], actors: int
) -> None:
    tasks = [_task(work, cost) for work, cost in sizes]
    found = bundles(tasks, actors)
    assert sorted(i for bundle in found for i in bundle) == list(range(len(tasks)))
    assert min(actors, len(tasks)) <= len(found)
    assert all(found)
    costs = [sum(tasks[i].cost for i in bundle) for bundle in found]
    assert costs == sorted(costs, reverse=True)


def test_tiny_tasks_make_one_message_an_actor_with_equal_loads() -> None:
    found = bundles([_task(MESSAGE_WORK / 100)] * 12, 3)
    assert [len(bundle) for bundle in found] == [4, 4, 4]


def test_some_work_leaves_messages_to_even_out_who_is_faster() -> None:
    assert len(bundles([_task(MESSAGE_WORK / 10)] * 100, 2)) == 10
    assert len(bundles([_task(MESSAGE_WORK / 10)] * 30, 2)) == 8


def test_work_worth_a_message_or_unknown_travels_alone() -> None:
    assert bundles([_task(2 * MESSAGE_WORK, cost) for cost in (1.0, 3.0, 2.0)], 1) == [[1], [2], [0]]
    assert len(bundles([Task("apply", None)] * 9, 2)) == 9


@pytest.fixture
def backend(ray_cluster: None) -> Iterator[RayBackend]:
    made = RayBackend(1, num_cpus=0.5, num_gpus=0, servers=1)
    yield made
    made.close()


def _objects() -> int:
    """Objects that this process keeps alive, in whatever way."""
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


@pytest.mark.ray
@pytest.mark.parametrize(
    "method",
    [
        "mt_hfl, scaffold",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("cfl", "fedavg", "sub_fedavg", "ifca")),
    ],
)
def test_nothing_is_kept_that_no_later_round_needs(
    method: str, settings: dict[str, Any], ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models above 100 kB: Ray keeps what such are made of, if it may have to make them again."""
    monkeypatch.setattr(states, "PACK", 2)  # so that the clients' states are packed anew every few rounds
    settings = {
        **settings,
        "algorithm": method,
        **METHODS[method],
        "rounds": 20,
        "model": {"name": "mlp", "hidden": [512]},
        "execution": {"backend": "ray", "actors": 2, "cpus_per_actor": 0.5, "block_size": 6},
    }
    settings["training"] = {**settings["training"], "participation": 0.5}
    if method == "cfl":  # every split would add models
        settings["algorithm"] = {"name": "cfl", "criteria": {"eps2": 1e9}}
    config = load(settings)
    stages, host = build(config)
    backend = RayBackend(2, num_cpus=0.5, num_gpus=0, servers=1)
    kept: list[int] = []

    def count(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            # Ray lets go of objects a moment later; packing may come a round earlier or later.
            until = time.monotonic() + 60
            while event.round >= 12 and _objects() > max(kept[4:12]) + 4 and time.monotonic() < until:
                time.sleep(0.05)
            kept.append(_objects())

    try:
        Driver(config, stages, backend, RunDirectory.create(config), host, count).run()
    finally:
        backend.close()
    assert max(kept[12:]) <= max(kept[4:12]) + 4


def _servers() -> list[psutil.Process]:
    return sorted(actors("ServerActor"), key=lambda process: process.pid)


@pytest.mark.ray
@pytest.mark.parametrize("method", ["mt_hfl, scaffold", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_a_killed_server_costs_nothing(
    method: str, settings: dict[str, Any], tmp_path: Path, ray_cluster: None
) -> None:
    """It is stopped while clients train, and killed when the driver believes the round to be over."""
    settings = {**settings, "algorithm": method, **METHODS[method]}
    expected = run(settings)
    config = load({**settings, "execution": {"backend": "ray", "actors": 2, "block_size": 2}})
    stages, host = build(config)
    directory = RunDirectory.create(config)
    before = _servers()
    backend = RayBackend(2, num_cpus=0.5, num_gpus=0, servers=1)
    stopped: list[psutil.Process] = []

    def disturb(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.round == 1 and not stopped:
            (process,) = [p for p in _servers() if p not in before]
            stopped.append(process)
            process.suspend()
        if isinstance(event, BlockDone) and event.round == 1 and event.done == event.total:
            os.kill(stopped[0].pid, signal.SIGKILL)

    try:
        Driver(config, stages, backend, directory, host, disturb).run()
        (now,) = [p for p in _servers() if p not in before]
        assert now != stopped[0]
    finally:
        backend.close()
    assert Result(directory.path).summary["models_sha256"] == expected.summary["models_sha256"]


@pytest.mark.ray
def test_a_server_that_dies_with_many_calls_dies_once(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many clusters, say."""
    monkeypatch.setattr(processes, "MAX_DEATHS", 3)
    before = _servers()
    backend = RayBackend(1, num_cpus=0.5, num_gpus=0, servers=1)
    try:
        model, nothing = np.arange(4, dtype=np.float32), np.empty(0, np.float32)
        backend.get(backend.serve(0, "install", (), {MODEL: model, VALUES: nothing}, [MODEL])[MODEL])
        (process,) = [p for p in _servers() if p not in before]
        process.suspend()
        several = [{MODEL: model + k, VALUES: nothing} for k in range(12)]
        calls = [backend.serve(0, "install", (), objects, [MODEL])[MODEL] for objects in several]
        process.kill()
        for k, found in enumerate(backend.get(calls)):
            np.testing.assert_array_equal(found, model + k)
    finally:
        backend.close()


@pytest.mark.ray
def test_what_replaces_lost_results_is_kept_only_as_long_as_these(backend: RayBackend) -> None:
    """A model of every round whose server is killed would be kept otherwise."""
    model = np.zeros(50_000, np.float32)  # Ray stores smaller ones in the message
    ref, kept = backend.put(model), list[int]()
    process: psutil.Process | None = None
    before = {p.pid for p in _servers()}
    backend.get(backend.serve(0, "install", (), {MODEL: ref, VALUES: model[:0]}, [MODEL])[MODEL])
    for _ in range(2):
        (process,) = [p for p in _servers() if p.pid not in before]
        process.suspend()
        before.add(process.pid)
        lost = ref = backend.serve(0, "install", (), {MODEL: ref, VALUES: model[:0]}, [MODEL])[MODEL]
        process.kill()
        np.testing.assert_array_equal(backend.get(ref), model)
        ref = backend.serve(0, "install", (), {MODEL: ref, VALUES: model[:0]}, [MODEL])[MODEL]
        np.testing.assert_array_equal(backend.get(lost), model)  # it may be used as long as it is held
        del lost
        backend.get(ref)
        kept.append(len(backend._replacements))
    assert kept == [0] * 2


def _die_once(mark: Path, value: np.ndarray) -> np.ndarray:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value + 1


def _twice(value: np.ndarray) -> np.ndarray:
    return value * 2


@pytest.mark.ray
def test_a_remote_task_whose_process_dies_is_done_again(tmp_path: Path, backend: RayBackend) -> None:
    """What was made of its result in the meantime too."""
    value = backend.put(np.arange(3.0))
    lost = backend.call(_die_once, tmp_path / "mark", value)
    later = backend.call(_twice, lost)
    np.testing.assert_array_equal(backend.get(later), [2, 4, 6])
    np.testing.assert_array_equal(backend.get(lost), [1, 2, 3])


def _die(value: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return value


@pytest.mark.ray
def test_what_dies_again_and_again_ends_the_run(backend: RayBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_DEATHS", 2)
    with pytest.raises(RayflError, match="keep dying"):
        backend.get(backend.call(_die, 1))


def _fails(value: int) -> int:
    raise ValueError(f"no {value}")


@pytest.mark.ray
def test_an_error_in_a_remote_task_is_raised_and_not_tried_again(backend: RayBackend) -> None:
    with pytest.raises(ValueError, match="no 1"):
        backend.get(backend.call(_fails, 1))


PARTS = ("client:0", "driver", "lps:0")
"""The second LPS actor starts when there is a second model."""


def _listed(run: str) -> list[str]:
    """The names of the live actors of runs whose names begin so, as ``ray list actors`` shows them."""
    every = ray._private.state.actors().values()
    names = [actor["Name"] for actor in every if actor["State"] != "DEAD"]
    return sorted(name for name in names if name.startswith(f"rayfl:{run}"))


@pytest.mark.slow
@pytest.mark.ray
def test_actors_are_listed_by_run_and_two_runs_of_one_name_do_not_collide(
    settings: dict[str, Any], ray_cluster: None
) -> None:
    settings["execution"] = {"backend": "ray", "actors": 1, "block_size": 3, "cpus_per_actor": 0.5}
    seen: list[str] = []

    def look(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            seen.extend(_listed("t-fedavg-"))

    pair = [RayBackend(1, num_cpus=0.5, num_gpus=0, servers=1, run="other") for _ in range(2)]
    try:
        result = run(settings, on_event=look)
        assert _listed("other:") == ["rayfl:other:lps:0"] * 2
    finally:
        for backend in pair:
            backend.close()
    assert set(seen) == {f"rayfl:{result.path.name}:{part}" for part in PARTS}
