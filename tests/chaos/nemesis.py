"""A nemesis: disturbs runs by faults drawn from a seed until they are finished, and compares what they give.

The one oracle is the same run, inline and undisturbed: tables and hash must be equal. An hour of it:

    python -m tests.chaos.nemesis --seconds 3600

prints, as JSON, the schedules run, the faults by kind, the methods covered, and the runs that differ.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rayfl import files
from rayfl.api import Result, resume, run
from rayfl.errors import DiskError, Interrupted, RayflError
from rayfl.events import Begun, RoundDone, RunEvent
from rayfl.runtime import processes
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.driver import Driver
from tests.runs import METHODS, TASKS, actors, assert_same

ROUNDS = 5

INLINE = ("interrupt", "crash", "full disk", "flipped bit", "two at once")
"""Faults of a run in this process."""

RAY = (
    "kill a client actor",
    "pause a client actor",
    "kill an LPS",
    "pause an LPS",
    "kill the driver",
    "fill the driver's disk",
    "interrupt",
)
"""Faults of a run on Ray. A process killed for lack of memory looks like any other that was killed."""

LOSE_NODE = "lose a node"
"""A fault on a Ray of several nodes: one goes for good, with all that is on it, and another comes."""


class Crash(BaseException):
    """The machine goes down."""


@dataclass
class Report:
    """What was done.

    Attributes:
        schedules: runs that were disturbed until they were finished.
        faults: how often each kind was injected.
        methods: schedules of each method.
        lines: runs that ended in a line that says how to go on, which was then done.
        different: method, backend and seed of the runs that were not equal, with the reason.
    """

    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    lines: int = 0
    different: list[str] = field(default_factory=list)


def settings(method: str, root: Path, backend: str, on_disk: bool = False) -> dict[str, Any]:
    """A small run of a method that writes checkpoints now and then; what clients keep may be in files."""
    execution: dict[str, Any] = {"backend": backend, "block_size": 2}
    if on_disk:
        execution["state_memory"] = 0.0
    if backend == "ray":
        execution |= {"actors": 2, "cpus_per_actor": 0.5}
    return {
        "name": "t",
        "rounds": ROUNDS,
        "seed": 3,
        "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"epochs": 2, "batch_size": 40, "lr": 0.05},
        **METHODS[method],
        "algorithm": METHODS[method].get("algorithm", method),
        "execution": execution,
        "output": {"root": str(root), "report": False, "tensorboard": False, "checkpoint_every": 2},
    }


@contextlib.contextmanager
def _disk(at: int, error: BaseException) -> Iterator[None]:
    """The disk fails at its change number ``at``; one that is full stays so."""
    before, count = files.watch, [0]

    def watch(action: str, path: Path) -> None:
        count[0] += 1
        if count[0] == at or (count[0] > at and isinstance(error, OSError) and action in ("write", "append")):
            raise error

    files.watch = watch
    try:
        yield
    finally:
        files.watch = before


@contextlib.contextmanager
def _stopping(at: int) -> Iterator[None]:
    """The run is asked to stop when it asks for the ``at``-th time: in any phase."""
    before, count = Driver._check_stop, [0]

    def check(self: Driver) -> None:
        count[0] += 1
        if count[0] == at:
            raise Interrupted

    Driver._check_stop = check  # type: ignore[method-assign]
    try:
        yield
    finally:
        Driver._check_stop = before  # type: ignore[method-assign]


def _flip(path: Path, draw: random.Random) -> None:
    """Another bit in one of the files of the newest checkpoint, if there is an older one that lacks it."""
    found = checkpoints(path / "checkpoints")
    if len(found) < 2:
        return
    own = {p for p in found[-1].iterdir() if p.stat().st_size}
    with contextlib.suppress(RayflError):  # it is damaged already
        own |= _rows(found[-1]) - _rows(found[-2])
    victim = draw.choice(sorted(own))
    data = bytearray(victim.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    victim.write_bytes(bytes(data))


def _rows(checkpoint: Path) -> set[Path]:
    """The files of rows of clients that a checkpoint needs."""
    stored = Checkpoint.load(checkpoint).stored.values()
    return {each.shards.path(shard) for each in stored for shard in each.files}


def _go_on(config: dict[str, Any], path: Path | None, listen: Callable[[RunEvent], None]) -> Result:
    return run(config, on_event=listen) if path is None else resume(path, on_event=listen)


def inline(method: str, seed: int, root: Path, report: Report) -> Result:
    """A run in this process, disturbed three times and then let be."""
    draw, config = random.Random(f"{method} {seed}"), settings(method, root, "inline", seed % 2 == 0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    paths: list[Path] = []

    def listen(event: RunEvent) -> None:
        if isinstance(event, Begun):
            paths.append(Path(event.path))

    def last() -> Path | None:
        return paths[-1] if paths and (paths[-1] / "config.yaml").is_file() else None

    for _ in range(3):
        fault = draw.choice(INLINE)
        report.faults[fault] += 1
        with contextlib.suppress(Crash, Interrupted, RayflError):
            if fault == "crash":
                with _disk(draw.randrange(2, 60), Crash()):
                    _go_on(config, last(), listen)
            elif fault == "full disk":
                with _disk(draw.randrange(2, 60), full):
                    _go_on(config, last(), listen)
            elif fault == "interrupt" or last() is None:
                with _stopping(draw.randrange(1, 40)):
                    _go_on(config, last(), listen)
            elif fault == "flipped bit":
                _flip(paths[-1], draw)
            else:
                two = [threading.Thread(target=_quietly, args=(paths[-1],)) for _ in range(2)]
                for thread in two:
                    thread.start()
                for thread in two:
                    thread.join()
    return _go_on(config, last(), listen)


def _quietly(path: Path) -> None:
    """One of two that resume the same run: the other one may hold it."""
    with contextlib.suppress(RayflError):
        resume(path)


class Nodes:
    """A Ray of two nodes, of which the second one can be lost."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        self._second = self._cluster.add_node(num_cpus=2)
        self._cluster.wait_for_nodes()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")

    def lose_one(self) -> None:
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = self._cluster.add_node(num_cpus=2)


def _fill_disk(process: psutil.Process) -> None:
    """No file of the process grows beyond some bytes any more."""
    process.rlimit(psutil.RLIMIT_FSIZE, (100, 100))


def on_ray(method: str, seed: int, root: Path, report: Report, nodes: Nodes | None) -> Result:
    """A run on Ray that is already started, disturbed once in nearly every round."""
    draw, config = random.Random(f"{method} {seed}"), settings(method, root, "ray", seed % 2 == 0)
    if nodes is not None:
        config["execution"]["placement"] = "spread"
    kinds = RAY if nodes is None else (*RAY, LOSE_NODE)
    faults = {r: draw.choice(kinds) for r in range(ROUNDS - 1)}
    others = actors("ServerActor") | actors("_HostActor") | actors("DriverActor")

    def strike(kind: str, blow: Callable[[psutil.Process], None]) -> None:
        found = sorted(actors(kind) - others, key=lambda process: process.pid)
        if found:
            with contextlib.suppress(psutil.Error):
                blow(draw.choice(found))

    def listen(event: RunEvent) -> None:
        if not isinstance(event, RoundDone):
            return
        fault = faults.pop(event.round, None)
        if fault is None:
            return
        report.faults[fault] += 1
        verb, _, whom = fault.partition(" ")
        if fault == "interrupt":
            signal.raise_signal(signal.SIGTERM)
        elif fault == LOSE_NODE:
            assert nodes is not None
            nodes.lose_one()
        else:
            kind = "DriverActor" if "driver" in whom else "ServerActor" if "LPS" in whom else "_HostActor"
            blows = {"pause": psutil.Process.suspend, "kill": psutil.Process.kill, "fill": _fill_disk}
            strike(kind, blows[verb])

    # A process that is paused is replaced after some seconds instead of minutes.
    config["execution"]["deadline"] = 12.0
    path: Path | None = None
    for _ in range(2 * ROUNDS):
        try:
            return _go_on(config, path, listen)
        except Interrupted:
            pass
        except RayflError as error:  # as a driver that is killed while it stops: the line says how to go on
            if "rayfl resume" not in str(error) and not isinstance(error, DiskError):
                raise
            report.lines += 1
        path = max(root.glob("t-*"), key=lambda p: p.stat().st_mtime)
    raise AssertionError("it does not come to an end")


def schedule(method: str, backend: str, seed: int, report: Report, nodes: Nodes | None = None) -> None:
    """Disturb one run by one seed's faults, and compare."""
    root = Path(tempfile.mkdtemp(prefix="nemesis-"))
    report.schedules += 1
    report.methods[method] += 1
    try:
        expected = run(settings(method, root / "expected", "inline"))
        if backend == "inline":
            found = inline(method, seed, root / "found", report)
        else:
            found = on_ray(method, seed, root / "found", report, nodes)
        assert_same(expected, found)
    except Exception as error:
        why = str(error) if isinstance(error, AssertionError) else traceback.format_exc()[-2000:]
        report.different.append(f"{method}, {backend}, seed {seed}: {why[:2000]}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb runs for a while, and print what came of it.")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--backends", default="inline,ray")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report, until, seed = Report(), time.monotonic() + given.seconds, given.seed
    nodes = Nodes() if "ray" in given.backends else None
    try:
        while time.monotonic() < until:
            for method in METHODS:
                for backend in given.backends.split(","):
                    if time.monotonic() < until:
                        schedule(method, backend, seed, report, nodes)
            seed += 1
    finally:
        print(json.dumps(vars(report), indent=1))


if __name__ == "__main__":
    processes.MAX_DEATHS = 50
    main()
