"""Measure the workloads: rayfl and the plain loop interleaved in one run, medians and ratios."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from rayfl.bench.naive import NaiveFedAvg, Plain
from rayfl.config import Config
from rayfl.events import RoundDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.connection import available, connect
from rayfl.runtime.driving import arithmetic, make_backend
from rayfl.servers.building import build
from rayfl.servers.driver import Driver
from rayfl.training import ahead

Say = Callable[[str], None]


class Configured(Protocol):
    """A workload that rayfl can run."""

    def config(self, folder: Path, **execution: Any) -> Config:
        """The config of a run without a last round, with its data and runs in ``folder``."""


class Measured(Plain, Configured, Protocol):
    """A workload that rayfl and the plain loop can both run."""

    @property
    def name(self) -> str:
        """For tables."""

    @property
    def about(self) -> str:
        """What it represents."""

    @property
    def steps(self) -> int:
        """Client-steps (optimizer steps of one client) in a round."""


_TURN_SECONDS = 0.5
"""Seconds that the plain loop works before it is rayfl's turn (at least one round)."""


def tree_memory() -> float:
    """Memory of this process and its descendants in GB: proportional set size, which counts shared pages
    once.
    """
    total = 0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss)
        except (psutil.Error, OSError):
            continue
    return total / 1e9


class PeakMemory:
    """The highest :func:`tree_memory` while the context is open, sampled a few times per second."""

    def __enter__(self) -> PeakMemory:
        self.gb, self._stop = tree_memory(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.3):
            self.gb = max(self.gb, tree_memory())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.gb = max(self.gb, tree_memory())


@dataclass
class Rayfl:
    """A running rayfl driver that runs one round at a time.

    Attributes:
        driver, state: the driver and the current state.
        worker_seconds: seconds that each worker trained in the last round.
        trained: how many clients trained in each round so far.
    """

    driver: Driver
    state: Any
    worker_seconds: dict[str, float]
    trained: list[int]

    @property
    def keeping(self) -> int:
        """How many clients have state or an update that is kept between rounds."""
        servers = self.driver.servers
        return max(len(servers.states), len(servers.updates))

    def round(self) -> float:
        """Run one round; returns its seconds."""
        begun = time.perf_counter()
        self.state = self.driver.round(self.state)
        return time.perf_counter() - begun


@contextmanager
def running(
    workload: Configured,
    folder: Path,
    execution: dict[str, Any],
    mark: Callable[[str], None] = lambda step: None,
) -> Iterator[Rayfl]:
    """Context manager: start rayfl on a workload, with the driver in this process and the actors on Ray.

    Args:
        workload: what to run.
        folder: for data and runs.
        execution: the section of the config.
        mark: called with the name of each completed step.
    """
    ahead.begin()
    config = workload.config(folder, **execution)
    mark("writing data")
    stages, host = build(config)
    mark("data, engine's trial")
    if config.execution.backend == "ray":
        connect(config)
        mark("Ray's own start")
    plan = arithmetic(config, stages[0].federation, host, available(config))
    backend = make_backend(config, plan)
    worker_seconds: dict[str, float] = {}
    trained: list[int] = []

    def listen(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            trained.append(int(event.row["clients"]))
            worker_seconds.clear()
            worker_seconds.update(event.worker_seconds)

    driver = Driver(config, stages, backend, RunDirectory.create(config), host, listen)
    try:
        rayfl = Rayfl(driver, driver.start(), worker_seconds, trained)
        mark("servers, first models")
        yield rayfl
        for model in driver.servers.models:  # Ray logs an error for calls that are still under way
            backend.get(model)
    finally:
        backend.close()


_EXECUTION: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {"device": "cuda", "gpus_per_actor": 0.5, "actors": 2},
}
"""Settings of ``execution`` for rayfl by device; the plain loop has two processes."""


def _warm_up(rayfl: Rayfl) -> None:
    """Run rounds until every actor has trained: one that was slow to start takes part later, and its first
    block takes half a second.
    """
    trained: set[str] = set()
    for _ in range(_MOST_WARM_UP):
        rayfl.round()
        trained.update(rayfl.worker_seconds)
        if len(trained) >= rayfl.driver.backend.actors:
            return


_MOST_WARM_UP = 5
"""At most this many rounds before the first that counts: with few blocks an actor may never train."""


def measure(
    workload: Measured, rounds: int, execution: dict[str, Any], say: Say = print, device: str = "cpu"
) -> dict[str, Any]:
    """Measure rounds of rayfl and of the plain loop in turns; first rounds are not counted.

    A turn of the plain loop takes about half a second. If rounds are short a turn has several in a row, as in
    a real run, so that caches are warm and processes awake. ``device``, ``cpu`` or ``cuda``, is that of both.

    Returns:
        For both, median seconds per round and client-steps per second; the median of the paired ratios (plain
        loop / rayfl: above 1 rayfl is faster); utilisation of the client actors; peak memory in GB.
    """
    with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder:
        naive = NaiveFedAvg(workload, device=device)
        base = tree_memory()
        try:
            with running(workload, Path(folder), {**execution, **_EXECUTION[device]}) as rayfl:
                naive.round()
                _warm_up(rayfl)
                turn = range(max(1, round(_TURN_SECONDS / naive.round())))
                pairs, utilisation = [], []
                for number in range(rounds):
                    plain_s = statistics.fmean(naive.round() for _ in turn)
                    rayfl_s, busy_seconds = 0.0, 0.0
                    for _ in turn:
                        rayfl_s += rayfl.round() / len(turn)
                        busy_seconds += sum(rayfl.worker_seconds.values()) / len(turn)
                    pairs.append((plain_s, rayfl_s))
                    utilisation.append(busy_seconds / (rayfl.driver.backend.actors * rayfl_s))
                    say(
                        f"{workload.name} {number + 1}/{rounds}: plain {plain_s:.3f} s, rayfl {rayfl_s:.3f} s"
                    )
                with PeakMemory() as peak:  # not while rounds are timed: sampling takes a quarter of a core
                    for _ in range(4 * len(turn)):
                        rayfl.round()
        finally:
            naive.close()
    plain_s, rayfl_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "workload": workload.name,
        "about": workload.about,
        "rounds": rounds,
        "client_steps_a_round": workload.steps,
        "plain_seconds": plain_s,
        "rayfl_seconds": rayfl_s,
        "plain_steps_per_second": workload.steps / plain_s,
        "rayfl_steps_per_second": workload.steps / rayfl_s,
        "ratio": statistics.median(t / o for t, o in pairs),
        "ratios": [t / o for t, o in pairs],
        "utilisation": statistics.median(utilisation),
        "memory_gb": peak.gb - base,
        "plain_memory_gb": base,
        "engine": rayfl.driver.host.engine,
    }
