"""How time and memory grow with the population when the cohort stays the same."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rayfl.bench.measure import PeakMemory, running
from rayfl.bench.workloads import Workload

SIZES = (10_000, 100_000)


def workload(clients: int) -> Workload:
    """W3's model and clients, 1,000 a round out of ``clients``."""
    return Workload(
        f"population-{clients}",
        f"1,000 of {clients:,} clients a round",
        clients=clients,
        samples=20,
        cohort=1000,
        shape=(1, 8, 8),
        classes=10,
        model={"name": "mlp", "hidden": [32]},
        training={"epochs": 1, "batch_size": 20, "lr": 0.05},
    )


def run(sizes: tuple[int, ...] = SIZES, rounds: int = 20) -> list[dict[str, Any]]:
    """Measure each population in a process of its own.

    Returns:
        For each: seconds from the start of the process to the first round and a round's median seconds, both
        without making the data; peak memory of the process tree in GB (data, Ray and workers included).
    """
    rows = []
    for clients in sizes:
        command = [
            sys.executable,
            "-m",
            "rayfl.bench.population",
            str(clients),
            str(rounds),
            str(time.time()),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines = [
            line for line in done.stdout.splitlines() if line.startswith("{")
        ]  # Ray may have its say, too
        rows.append(json.loads(lines[-1]))
    return rows


def _measure(clients: int, rounds: int, begun: float) -> dict[str, Any]:
    task = workload(clients)
    with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder:
        making = time.time()
        task.config(Path(folder))
        making = time.time() - making
        with PeakMemory() as peak, running(task, Path(folder), {}) as rayfl:
            rayfl.round()
            first = time.time() - begun - making
            seconds = [rayfl.round() for _ in range(rounds)]
    usual = statistics.median(seconds)
    return {
        "clients": clients,
        "cohort": task.cohort,
        "startup_seconds": first - usual,
        "round_seconds": usual,
        "memory_gb": peak.gb,
    }


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
