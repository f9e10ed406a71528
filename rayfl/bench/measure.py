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

Say = Callable[[str], None]


class Configured(Protocol):
    """What rayfl runs."""

    def config(self, folder: Path, **execution: Any) -> Config:
        """The config of an endless run, with its data and runs in ``folder``."""


class Measured(Plain, Configured, Protocol):
    """What rayfl and the plain loop run."""

    @property
    def name(self) -> str:
        """For tables."""

    @property
    def about(self) -> str:
        """What it stands for."""

    @property
    def steps(self) -> int:
        """Client-steps (optimizer steps of one client) in a round."""


_TURN = 0.5
"""Seconds that the plain loop works before it is rayfl's turn, if a round does not take longer."""


def tree_memory() -> float:
    """Memory of this process and all below it in GB: proportional set size, shared pages counted once."""
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
    """The highest :func:`tree_memory` while it is open, looked at a few times a second."""

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
    """A running rayfl driver that does one round at a time.

    Attributes:
        driver, state: the driver and where it is.
        busy: seconds that each worker trained in the last round.
    """

    driver: Driver
    state: Any
    busy: dict[int, float]

    def round(self) -> float:
        """One round; its seconds."""
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
    """Start rayfl on a workload, in this process and with its actors on Ray, and stop it in the end.

    Args:
        workload: what to run.
        folder: for data and runs.
        execution: the section of the config.
        mark: called with the name of each step that is done.
    """
    config = workload.config(folder, **execution)
    mark("writing data")
    stages, host = build(config)
    mark("data, engine's trial")
    if config.execution.backend == "ray":
        connect(config)
        mark("Ray's own start")
    plan = arithmetic(config, stages[0].federation, host, available(config))
    backend = make_backend(config, plan)
    busy: dict[int, float] = {}

    def listen(event: RunEvent) -> None:
        if isinstance(event, RoundDone):
            busy.clear()
            busy.update(event.worker_seconds)

    driver = Driver(config, stages, backend, RunDirectory.create(config), host, listen)
    try:
        rayfl = Rayfl(driver, driver.start(), busy)
        mark("servers, first models")
        yield rayfl
        for model in driver.servers.models:  # Ray complains of calls that are still under way
            backend.get(model)
    finally:
        backend.close()


def measure(workload: Measured, rounds: int, execution: dict[str, Any], say: Say = print) -> dict[str, Any]:
    """Rounds of rayfl and of the plain loop in turns, the first of each left out.

    A turn takes the plain loop about half a second: with tiny rounds it is several in a row, as in a real
    run, not one at a time with caches and processes that the other side has put to sleep.

    Returns:
        Medians of seconds a round and client-steps per second of both, the median of the paired ratios
        (plain loop / rayfl: above 1 rayfl is faster), utilisation of the client actors, peak memory in GB.
    """
    with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder:
        naive = NaiveFedAvg(workload)
        base = tree_memory()
        try:
            with running(workload, Path(folder), execution) as rayfl:
                naive.round(), rayfl.round()
                turn = range(max(1, round(_TURN / naive.round())))
                pairs, used = [], []
                for number in range(rounds):
                    theirs = statistics.fmean(naive.round() for _ in turn)
                    ours, busy = 0.0, 0.0
                    for _ in turn:
                        ours += rayfl.round() / len(turn)
                        busy += sum(rayfl.busy.values()) / len(turn)
                    pairs.append((theirs, ours))
                    used.append(busy / (rayfl.driver.backend.actors * ours))
                    say(f"{workload.name} {number + 1}/{rounds}: plain {theirs:.3f} s, rayfl {ours:.3f} s")
                with PeakMemory() as peak:  # not while rounds are timed: looking takes a quarter of a core
                    for _ in range(4 * len(turn)):
                        rayfl.round()
        finally:
            naive.close()
    theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "workload": workload.name,
        "about": workload.about,
        "rounds": rounds,
        "client_steps_a_round": workload.steps,
        "plain_seconds": theirs,
        "rayfl_seconds": ours,
        "plain_steps_per_second": workload.steps / theirs,
        "rayfl_steps_per_second": workload.steps / ours,
        "ratio": statistics.median(t / o for t, o in pairs),
        "ratios": [t / o for t, o in pairs],
        "utilisation": statistics.median(used),
        "memory_gb": peak.gb - base,
        "plain_memory_gb": base,
        "engine": rayfl.driver.host.engine,
    }
