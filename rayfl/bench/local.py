"""What local objectives and orders of samples cost compared with plain SGD on shuffled samples, on W1.

All variants run in one process tree and take turns round by round, so that other load on the machine affects
them equally. Each has its own client actors, which are idle while the others work. In addition to seconds,
the CPU time of the tree is reported, which other processes hardly affect.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from rayfl.bench.measure import running
from rayfl.bench.workloads import WORKLOADS, Workload

VARIANTS: Mapping[str, dict[str, Any]] = {
    "sgd": {},
    "fedprox": {"local": "fedprox"},
    "scaffold": {"local": "scaffold"},
    "curriculum": {"order": "curriculum"},
}
"""Sections of the config; the first is what the others are compared with."""

WARM_UP = 2
"""Rounds that are not counted: the first compiles; in the second some clients have state for the first time.
"""


def run(
    rounds: int = 7,
    workload: Workload = WORKLOADS["W1"],
    execution: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Measure.

    Args:
        rounds: measured rounds of each variant.
        workload: what they run.
        execution: the ``execution`` section; by default one actor per core for each variant.
        say: called with one line per round.

    Returns:
        One row per variant: median ``seconds`` per round; the median of the paired ratios to the first
        variant's round of the same turn (``ratio``, above 1: slower), and the smallest (``least``) and
        largest (``most``) of them; ``steps_per_second``; and ``cpu_seconds`` and ``cpu_ratio`` for CPU time.
    """
    if execution is None:
        cores = os.cpu_count() or 1
        execution = {"actors": cores, "cpus_per_actor": 1 / len(VARIANTS)}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rayfl-bench-")))
        drivers = {
            name: stack.enter_context(
                running(dataclasses.replace(workload, sections=sections), folder, dict(execution))
            )
            for name, sections in VARIANTS.items()
        }
        for number in range(WARM_UP + rounds):
            for name, driver in drivers.items():
                cpu_before = tree_cpu()
                duration = driver.round()
                if number >= WARM_UP:
                    seconds[name].append(duration)
                    cpu_seconds[name].append(tree_cpu() - cpu_before)
            if number >= WARM_UP:
                turn = ", ".join(f"{name} {durations[-1]:.3f}" for name, durations in seconds.items())
                say(f"{workload.name} {number + 1 - WARM_UP}/{rounds}: {turn} s")
    rows = []
    for name, durations in seconds.items():
        ratios, cpu_ratios = _ratios(seconds, name), _ratios(cpu_seconds, name)
        rows.append(
            {
                "workload": workload.name,
                "variant": name,
                "rounds": rounds,
                "seconds": statistics.median(durations),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "steps_per_second": workload.steps / statistics.median(durations),
                "cpu_seconds": statistics.median(cpu_seconds[name]),
                "cpu_ratio": statistics.median(cpu_ratios),
            }
        )
    return rows


def tree_cpu() -> float:
    """CPU seconds of this process and its descendants so far."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _ratios(measured: Mapping[str, list[float]], name: str) -> list[float]:
    """The ratios to the first variant, turn by turn."""
    first = next(iter(measured.values()))
    return [own / max(base, 1e-9) for own, base in zip(measured[name], first, strict=True)]
