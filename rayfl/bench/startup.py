"""Start-up time: of commands that compute nothing, and of a run until its first round is done."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayfl.bench.measure import Measured, running
from rayfl.bench.naive import NaiveFedAvg
from rayfl.bench.own import OwnWorkload
from rayfl.bench.workloads import WORKLOADS, Workload

COMMANDS = ("list", "run digits-demo training.lrr=1", "--help", "--version")
"""A list, a mistake, the help, and the version."""

BACKENDS = {"ray": "Ray", "inline": "inline"}

IMPORTS = {
    "the command's process": "rayfl.api",
    "the driver": "rayfl.servers.driver, rayfl.runtime.ray_backend",
    "a worker": "rayfl.clients.host",
    "a server (LPS)": "rayfl.runtime.remote",
    "PyTorch alone": "torch",
    "Ray alone": "ray",
}
"""What the processes of a run on Ray import before they do anything else."""


def commands(tries: int = 5) -> list[dict[str, Any]]:
    """CPU seconds of commands, the median of several tries."""
    return [
        {"rayfl": line, "cpu_seconds": _cpu_seconds(["-m", "rayfl.cli", *line.split()], tries)}
        for line in COMMANDS
    ]


def imports(tries: int = 3) -> list[dict[str, Any]]:
    """CPU seconds of what the processes of a run on Ray import."""
    return [
        {"imports of": what, "cpu_seconds": _cpu_seconds(["-c", f"import {modules}"], tries)}
        for what, modules in IMPORTS.items()
    ]


def first_rounds() -> list[dict[str, Any]]:
    """Seconds from the start of a process to the end of its first round, minus the time of the second
    round.
    """
    return [
        {
            "workload": w.name,
            "plain": sum(_in_new_process(w, "plain").values()),
            "rayfl": sum(_in_new_process(w, "ray").values()),
        }
        for w in WORKLOADS.values()
    ]


def steps() -> list[dict[str, Any]]:
    """Where the seconds of :func:`first_rounds` go: on Ray, and inline without and with Numba's cache."""
    columns: dict[str, dict[str, float]] = {}
    workload = WORKLOADS["W2"]
    with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as cache:
        columns["Ray"] = _in_new_process(workload, "ray")
        for backend in ("ray", "inline"):
            empty = {"NUMBA_CACHE_DIR": f"{cache}/{backend}"}
            columns[f"{BACKENDS[backend]}, compiling"] = _in_new_process(workload, backend, empty)
        columns["inline"] = _in_new_process(workload, "inline", empty)
    every = dict.fromkeys(step for column in columns.values() for step in column)
    return [{"step": step, **{name: column.get(step) for name, column in columns.items()}} for step in every]


def _cpu_seconds(arguments: Sequence[str], tries: int) -> float:
    """User and system seconds of a Python process, the median of several tries.

    The first try is not counted: it compiles the modules to bytecode, as pip does when it installs them.
    """
    cpu_seconds = []
    with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(tries + 1):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], capture_output=True, check=False, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(cpu_seconds[1:])


def own_first_rounds(workload: OwnWorkload, backend: str) -> dict[str, float]:
    """Seconds to the first round of a config: ``plain_startup`` and ``rayfl_startup``."""
    return {
        "plain_startup": sum(_in_new_process(workload, "plain").values()),
        "rayfl_startup": sum(_in_new_process(workload, backend).values()),
    }


def _in_new_process(
    workload: Workload | OwnWorkload, side: str, environment: Mapping[str, str] | None = None
) -> dict[str, float]:
    """The seconds of each step, measured in a new process.

    Args:
        workload: what to run.
        side: ``ray``, ``inline`` or ``plain``.
        environment: variables to set.
    """
    what = workload.name if isinstance(workload, Workload) else json.dumps(asdict(workload))
    command = [sys.executable, "-m", "rayfl.bench.startup", side, what, str(time.time())]
    env = {**os.environ, **(environment or {})}
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    step_seconds: dict[str, float] = json.loads(process.stdout.strip().splitlines()[-1])
    return step_seconds


def _in_this_process(side: str, workload: Measured, begun: float) -> dict[str, float]:
    """The seconds of each step since ``begun``; for the first round, its time minus that of the second."""
    step_seconds: dict[str, float] = {}

    def mark(step: str) -> None:
        step_seconds[step] = time.time() - begun - sum(step_seconds.values())

    mark("imports")
    if side == "plain":
        naive = NaiveFedAvg(workload)
        mark("processes")
        naive.round()
        mark("first round")
        naive.round()
        mark("second round")
        naive.close()
    else:
        with (
            tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder,
            running(workload, Path(folder), {"backend": side}, mark) as rayfl,
        ):
            rayfl.round()
            mark("first round")
            rayfl.round()
            mark("second round")
    step_seconds["first round"] -= step_seconds.pop("second round")
    return step_seconds


if __name__ == "__main__":
    what = WORKLOADS[sys.argv[2]] if sys.argv[2] in WORKLOADS else OwnWorkload(**json.loads(sys.argv[2]))
    print(json.dumps(_in_this_process(sys.argv[1], what, float(sys.argv[3]))))
