"""What a round costs as the population grows: CPU time of the driver and of the other processes, memory,
start-up.

``python -m rayfl.bench.population --help`` measures one population in this process.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from rayfl.bench.measure import PeakMemory, Rayfl, running
from rayfl.bench.profile import by_process_now
from rayfl.bench.workloads import Workload
from rayfl.clients.host import ClientHost
from rayfl.evaluation import EvaluationPlan
from rayfl.servers.lps import LocalServer

CASES = (
    (10_000, 1000, 0),
    (10_000, 1000, 1),
    (100_000, 1000, 0),
    (100_000, 1000, 1),
    (1_000_000, 1000, 0),
    (1_000_000, 10_000, 0),
)
"""Number of clients, clients per round, and rounds between tests of all clients (0: never)."""

_NEVER = 1_000_000


def workload(clients: int, cohort: int = 1000, every: int = 0, tests: int = 1) -> Workload:
    """W3's model and clients.

    Args:
        clients: N.
        cohort: clients per round.
        every: rounds between two tests of all clients; 0: no tests.
        tests: test samples per client.
    """
    return Workload(
        f"population-{clients}",
        f"{cohort:,} of {clients:,} clients a round",
        clients=clients,
        samples=20,
        cohort=cohort,
        shape=(1, 8, 8),
        classes=10,
        model={"name": "mlp", "hidden": [32]},
        training={"epochs": 1, "batch_size": 20, "lr": 0.05},
        sections={"evaluation": {"every": every or _NEVER}},
        tests=tests,
    )


def run(rounds: int = 20) -> list[dict[str, Any]]:
    """Measure each of :data:`CASES` in a separate process: see :func:`measured`."""
    rows = []
    for clients, cohort, every in CASES:
        options = ["--cohort", cohort, "--every", every, "--rounds", rounds]
        command = [sys.executable, "-m", "rayfl.bench.population", clients, *options]
        process = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
        # Ray may print messages before the JSON
        lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
        rows.append(json.loads(lines[-1]))
    return rows


def measured(task: Workload, rounds: int, execution: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Start a run and time some rounds.

    Returns:
        CPU seconds of the start (without writing the data), of a round by process (inline: of the driver's
        code and of the code of clients and LPSs), of a checkpoint and of the final tables; the driver's share
        of a round's CPU time, and that of planning tests; the median seconds of a round; and the memory of
        the process tree in GB during one more round and while everything is written.
    """
    task.config(folder)
    start_time = time.process_time()
    with running(task, folder, execution) as rayfl:
        rayfl.round()
        start = time.process_time() - start_time
        cpu_before, planned, seconds = _cpu(rayfl), _planning_cpu[0], []
        for _ in range(rounds):
            seconds.append(rayfl.round())
        cpu_after, planned = _cpu(rayfl), _planning_cpu[0] - planned
        # Not while rounds are timed: sampling the memory takes CPU time of this process
        with PeakMemory() as peak:
            rayfl.round()
            start_time = time.process_time()
            rayfl.driver.checkpoint(rayfl.state)
            saving = time.process_time() - start_time
            start_time = time.process_time()
            rayfl.driver.records.write_tables(rayfl.state)
            tables = time.process_time() - start_time
    cpu_seconds = {who: (cpu_after[who] - cpu_before[who]) / rounds for who in cpu_after}
    return {
        "clients": task.clients,
        "cohort": task.cohort,
        "tested every": task.sections["evaluation"]["every"] % _NEVER,
        "backend": execution["backend"],
        "start_cpu": start,
        "checkpoint_cpu": saving,
        "tables_cpu": tables,
        **{f"{who}_cpu": value for who, value in cpu_seconds.items()},
        "driver_percent": 100 * cpu_seconds["driver"] / sum(cpu_seconds.values()),
        "test_plans_percent": 100 * planned / rounds / sum(cpu_seconds.values()),
        "round_seconds": statistics.median(seconds),
        "memory_gb": peak.gb,
    }


_host_cpu, _planning_cpu = [0.0], [0.0]
"""CPU seconds that this process has spent in the code of clients and LPSs (inline backend), and for plans of
tests."""


def _count_cpu(kind: type, name: str, into: list[float]) -> None:
    method = getattr(kind, name)

    def timed(*args: Any, **named: Any) -> Any:
        begun = time.process_time()
        try:
            return method(*args, **named)
        finally:
            into[0] += time.process_time() - begun

    bound = inspect.ismethod(method)  # a class method
    setattr(kind, name, staticmethod(timed) if bound else timed)


def _cpu(rayfl: Rayfl) -> dict[str, float]:
    """CPU seconds so far: of the driver, and of all other processes."""
    if rayfl.driver.config.execution.backend == "ray":
        return by_process_now(set(rayfl.driver.backend.pids()))
    times = psutil.Process().cpu_times()
    return {"driver": times.user + times.system - _host_cpu[0], "clients and servers": _host_cpu[0]}


def main() -> None:
    """Measure one population; print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", type=int)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument(
        "--every", type=int, default=0, help="rounds between two tests of all clients (0: no tests)"
    )
    parser.add_argument("--tests", type=int, default=1, help="test samples of a client")
    parser.add_argument("--samples", type=int, default=20, help="training samples of a client")
    parser.add_argument("--sharded", action="store_true", help="the data stay in files")
    parser.add_argument("--block-size", default="auto", help="clients in a block")
    parser.add_argument("--fan-in", type=int, help="blocks of which an actor sends one sum")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--backend", default="ray", choices=("ray", "inline"))
    parser.add_argument("--folder", type=Path, help="folder in which the data are kept for the next time")
    options = parser.parse_args()
    _count_cpu(EvaluationPlan, "of", _planning_cpu)
    if options.backend == "inline":
        for name in ("train", "evaluate"):
            _count_cpu(ClientHost, name, _host_cpu)
        for name in ("reduce", "combine"):
            _count_cpu(LocalServer, name, _host_cpu)
    task = workload(options.clients, options.cohort, options.every, options.tests)
    task = replace(task, samples=options.samples, sharded=options.sharded)
    with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder:
        data_folder = options.folder or Path(folder)
        execution = {"backend": options.backend, "block_size": options.block_size, "fan_in": options.fan_in}
        print(json.dumps(measured(task, options.rounds, execution, data_folder)))


if __name__ == "__main__":
    main()
