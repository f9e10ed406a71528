"""Where the time of a round is spent: by stage in one process, and by process on Ray."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from rayfl.bench.measure import running
from rayfl.bench.workloads import WORKLOADS, Workload
from rayfl.clients.host import ClientHost
from rayfl.servers import driver
from rayfl.servers.driver import Driver
from rayfl.servers.lps import LocalServer
from rayfl.training.batched import client_kernel
from rayfl.training.batched.engine import BatchedEngine
from rayfl.training.batched.layers import Chain, Layer, Linear
from rayfl.training.batched.network import BatchedNetwork, Network
from rayfl.training.batched.steps import StepPlan
from rayfl.training.batches import Batches

_WARM_UP = 5
"""Rounds before anything is measured."""

Places = Sequence[tuple[type | ModuleType, str]]
"""For methods the class and the name; for functions the module that calls them and the name."""


def stages() -> dict[str, Places]:
    """The functions of each stage; calls to functions of another stage count for that stage."""
    others = [kind for kind in _subclasses(Layer) if kind not in (Linear, Chain)]
    return {
        "all steps of clients in one compiled call": [(client_kernel, "train")],
        "linear layers, forward": [(Linear, "forward")],
        "linear layers, backward with the step": [(Linear, "backward")],
        "other layers": [(kind, name) for kind in others for name in ("forward", "backward")],
        "loss and its gradient": [(BatchedNetwork, "step")],
        "engine: steps, a step's samples": [(BatchedEngine, "train")],
        "samples of a call": [(Batches, "train")],
        "plan of the steps: shuffling": [(StepPlan, "__init__")],
        "models in and out, their lengths": [
            (BatchedNetwork, "load"),
            (Network, "store"),
            (Network, "lengths"),
        ],
        "weighted sums": [(ClientHost, "_products")],
        "client side: start models, reports": [(ClientHost, "train")],
        "local parameter server": [(LocalServer, "reduce"), (LocalServer, "combine")],
        "driver: tasks and their results": [(driver, "train")],
        "driver: cohort, plan, records": [(Driver, "round")],
    }


def _subclasses(kind: type) -> list[type]:
    """All subclasses."""
    direct: list[type] = kind.__subclasses__()
    return [descendant for child in direct for descendant in (child, *_subclasses(child))]


class Stopwatch:
    """Time of each stage, excluding the stages that it calls.

    Attributes:
        seconds: by stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._last = 0.0

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, wrapped so that its time counts for the stage."""

        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            self._add_time()
            self._stack.append(stage)
            try:
                return function(*args, **options)
            finally:
                self._add_time()
                self._stack.pop()

        return wrapper

    def _add_time(self) -> None:
        """Add the time since the last call to the stage on top of the stack."""
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._last
        self._last = now

    @contextmanager
    def watching(self, places: Mapping[str, Places]) -> Iterator[None]:
        """Context manager that times these methods."""
        originals = [
            (kind, name, kind.__dict__[name])
            for members in places.values()
            for kind, name in members
            if name in kind.__dict__
        ]
        stage_of = {(kind, name): stage for stage, members in places.items() for kind, name in members}
        try:
            for kind, name, function in originals:
                setattr(kind, name, self.timed(stage_of[kind, name], function))
            yield
        finally:
            for kind, name, function in originals:
                setattr(kind, name, function)


def by_stage(workload: Workload, rounds: int) -> dict[str, float]:
    """Median milliseconds of a round by stage, with everything in one process and one thread."""
    milliseconds: dict[str, list[float]] = {stage: [] for stage in stages()}
    with (
        tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder,
        running(workload, Path(folder), {"backend": "inline"}) as rayfl,
    ):
        for _ in range(_WARM_UP):
            rayfl.round()
        watch = Stopwatch()
        with watch.watching(stages()):
            for _ in range(rounds):
                watch.seconds.clear()
                rayfl.round()
                for stage, values in milliseconds.items():
                    values.append(1000 * watch.seconds[stage])
    return {stage: statistics.median(values) for stage, values in milliseconds.items()}


def by_process(workload: Workload, rounds: int) -> dict[str, float]:
    """Mean CPU milliseconds of a round on Ray by process, and the mean duration of the round."""
    with (
        tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder,
        running(workload, Path(folder), {}) as rayfl,
    ):
        for _ in range(_WARM_UP):
            rayfl.round()
        actors = set(rayfl.driver.backend.pids())
        cpu_before, start_time = by_process_now(actors), time.perf_counter()
        for _ in range(rounds):
            rayfl.round()
        seconds, cpu_after = time.perf_counter() - start_time, by_process_now(actors)
    milliseconds = {who: 1000 * (cpu_after[who] - cpu_before[who]) / rounds for who in cpu_after}
    return {**milliseconds, "all": sum(milliseconds.values()), "a round": 1000 * seconds / rounds}


def by_process_now(actors: set[int]) -> dict[str, float]:
    """CPU seconds so far of the driver (this process), the client actors, the LPSs and Ray."""
    seconds = {"driver": 0.0, "client actors": 0.0, "local parameter server": 0.0, "Ray itself": 0.0}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times, line = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        who = "Ray itself"
        if process == me:
            who = "driver"
        elif process.pid in actors:
            who = "client actors"
        elif "ServerActor" in line:
            who = "local parameter server"
        seconds[who] += times.user + times.system
    return seconds


def run(rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Both profiles of all workloads in milliseconds: one row per stage or process, one column per
    workload.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for workload in WORKLOADS.values():
        # Short rounds are repeated, so that every workload is measured for about as long.
        for where, measure in (("one process", by_stage), ("on Ray", by_process)):
            figures = measure(workload, rounds * max(1, 12_000 // workload.steps))
            if where == "one process":
                figures["all"] = sum(figures.values())
            for what, milliseconds in figures.items():
                row = rows.setdefault((where, what), {"where": where, "what": what})
                row[workload.name] = milliseconds
        say(f"{workload.name} profiled")
    return list(rows.values())
