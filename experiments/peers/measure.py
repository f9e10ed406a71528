"""One measurement: a system's client script is started, watched from outside, and stopped."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from systems import HERE, System

_READ_INTERVAL = 0.05
"""Seconds between two reads of the file of marks."""


@dataclass(frozen=True)
class Limits:
    """How long to measure.

    Attributes:
        warm_up: rounds that are left out in addition to the first, which belongs to the start-up.
        rounds: least number of rounds that are timed.
        seconds: least time that they take together, up to ``most`` rounds.
        most: largest number of rounds that are timed.
        patience: seconds after which the measurement ends with the rounds timed so far; if there are none,
            it fails after twice as many.
        memory: least number of seconds for which memory is watched.
    """

    warm_up: int = 1
    rounds: int = 3
    seconds: float = 10.0
    most: int = 200
    patience: float = 900.0
    memory: float = 2.0


def measure(system: System, folder: Path, limits: Limits, threads: int = 1) -> dict[str, Any]:
    """Run a system on the task in ``folder``; ``threads`` are those of systems with a single process.

    Returns:
        ``rounds`` (seconds of each timed round), their median ``seconds``, ``startup`` (seconds from the
        start of the process to the end of the first round, minus a round), ``cpu_seconds`` per round of all
        processes, ``memory_gb`` (largest proportional set size of all processes in rounds after the timed
        ones), and ``load`` of the machine before; or ``error``.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        marks, log = Path(scratch) / "marks", Path(scratch) / "log"
        start_time = time.time()
        with log.open("wb") as output:
            process = subprocess.Popen(
                system.command(),
                cwd=scratch,
                env=environment(system, folder, marks, threads),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            result = _watch(psutil.Process(process.pid), marks, start_time, limits)
        except _Ended as error:
            text = log.read_text(errors="replace").strip().splitlines()
            result = {"error": str(error), "log": text[-15:]}
        finally:
            _stop(process)
    return {"load": load, **result}


def environment(system: System, folder: Path, marks: Path, threads: int) -> dict[str, str]:
    """The variables for a client script."""
    return {
        **os.environ,
        "PYTHONPATH": "" if system.own else f"{HERE.parents[1]}{os.pathsep}{HERE}",
        "RAY_ADDRESS": "local",
        "RAY_worker_niceness": "0",
        "PEERS_TASK": str(folder),
        "PEERS_MARKS": str(marks),
        "PEERS_THREADS": str(threads),
        **system.environment,
    }


class _Ended(Exception):
    """The client script ended, or took too long."""


def _watch(process: psutil.Process, marks: Path, begun: float, limits: Limits) -> dict[str, Any]:
    """Wait until enough rounds are timed, then watch memory during further rounds."""
    first = limits.warm_up + 1
    times = _wait(process, marks, begun, first, limits.patience)
    tree = _tree(process)
    cpu_before = _cpu(tree)
    while True:
        times = _wait(process, marks, begun, len(times) + 1, limits.patience)
        timed = len(times) - first
        elapsed = times[-1] - times[first - 1]
        if timed >= limits.most or (timed >= limits.rounds and elapsed >= limits.seconds):
            break
        if timed and time.time() - begun > limits.patience:
            break
    cpu_seconds = _cpu(tree) - cpu_before
    rounds = [b - a for a, b in zip(times[first - 1 :], times[first:], strict=False)]
    median = statistics.median(rounds)
    peak, until = 0.0, time.time() + min(max(limits.memory, 1.5 * median), 30.0)
    while time.time() < until:  # not while rounds are timed: watching takes a part of a core
        peak = max(peak, sum(map(_pss, _tree(process))))
        time.sleep(0.2)
    return {
        "seconds": median,
        "rounds": rounds,
        "startup": times[0] - begun - median,
        "cpu_seconds": cpu_seconds / len(rounds),
        "memory_gb": peak / 1e9,
        "processes": len(tree),
    }


def _wait(process: psutil.Process, marks: Path, begun: float, count: int, patience: float) -> list[float]:
    """The times of at least ``count`` complete rounds.

    Raises:
        _Ended: if the script ends before, or takes more than twice ``patience`` seconds.
    """
    while True:
        # Check first whether it has ended: it may mark a round and end between the two checks.
        ended = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        times = [float(line) for line in marks.read_text().split()] if marks.exists() else []
        if len(times) >= count:
            return times
        if ended:
            raise _Ended(f"ended after {len(times)} rounds")
        if time.time() - begun > 2 * patience:
            raise _Ended(f"{len(times)} rounds in {time.time() - begun:.0f} s")
        time.sleep(_READ_INTERVAL)


def _tree(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def _cpu(tree: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in tree:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _pss(process: psutil.Process) -> float:
    """Memory of a process; pages that several share are divided among them."""
    with contextlib.suppress(psutil.Error, OSError):
        return float(process.memory_full_info().pss)
    return 0.0


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and all below it."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        tree = _tree(psutil.Process(process.pid))
    for signal in ("terminate", "kill"):
        for descendant in tree:
            with contextlib.suppress(psutil.Error):
                getattr(descendant, signal)()
        psutil.wait_procs(tree, timeout=5)
    process.wait()
