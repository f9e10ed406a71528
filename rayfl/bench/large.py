"""Models with tens of millions of parameters: seconds per round compared with the plain loop, memory by
process.

``python -m rayfl.bench.large --help`` measures one model, inline against the plain loop in one process, or on
Ray against the plain loop in two processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, get_args

import psutil

from rayfl.bench.measure import running
from rayfl.bench.naive import NaiveFedAvg
from rayfl.bench.workloads import Workload
from rayfl.evaluation.ledger import Direction, Tier

SECTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "pacfl": {"algorithm": "pacfl", "clustering": {"n_clusters": 2}},
}
"""Methods that are measured, and sections of their configs."""

WARM_UP = 2
"""Rounds that are not counted: until then processes ask the system for memory that they then keep."""


def workload(hidden: tuple[int, ...], cohort: int, method: str = "fedavg", servers: int = 2) -> Workload:
    """An MLP on grey images of 28 pixels; each client takes one step. ``servers`` is the number of LPSs."""
    return Workload(
        "large",
        f"MLP 784-{'-'.join(map(str, hidden))}-10",
        clients=2 * cohort,
        samples=20,
        cohort=cohort,
        shape=(1, 28, 28),
        classes=10,
        model={"name": "mlp", "hidden": list(hidden)},
        training={"epochs": 1, "batch_size": 20, "lr": 0.01},
        sections={**SECTIONS[method], "hierarchy": {"lps_actors": servers}},
    )


def measured(task: Workload, rounds: int, execution: dict[str, Any]) -> dict[str, Any]:
    """Seconds per round of rayfl and the plain loop, bytes of rayfl's last round, and memory by process."""
    with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder:
        plain = NaiveFedAvg(task, 1 if execution["backend"] == "inline" else 2)
        try:
            plain_seconds = [plain.round() for _ in range(WARM_UP + rounds)][WARM_UP:]
        finally:
            plain.close()
        with running(task, Path(folder), execution) as rayfl:
            rayfl_seconds = [rayfl.round() for _ in range(WARM_UP + rounds)][WARM_UP:]
            memory, ledger = by_process(), rayfl.driver.records.ledger
            parameters = rayfl.driver.host.spec.P
    traffic = {
        f"{tier}_{way}": ledger.total(round=WARM_UP + rounds - 1, tier=tier, direction=way)
        for tier in get_args(Tier)
        for way in get_args(Direction)
    }
    return {
        "parameters": parameters,
        "cohort": task.cohort,
        "plain_seconds": statistics.median(plain_seconds),
        "rayfl_seconds": statistics.median(rayfl_seconds),
        "ratio": statistics.median(plain_seconds) / statistics.median(rayfl_seconds),  # times faster
        "bytes": {link: count for link, count in traffic.items() if count},
        "gb": memory,
    }


def by_process() -> dict[str, list[float]]:
    """Memory in GB of this process and of Ray's processes below it: private pages, shared pages (of the
    object store), and the peak of both together."""
    gigabytes: dict[str, list[float]] = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            full, line = process.memory_full_info(), " ".join(process.cmdline())
            status = Path(f"/proc/{process.pid}/status").read_text().split()
        except (psutil.Error, OSError):
            continue
        who = "driver" if process == me else line.split()[0].split("/")[-1]
        if who == "driver" or who.startswith("ray::") or "raylet" in who:
            gigabytes.setdefault(who, []).append(round(full.uss / 1e9, 2))
            gigabytes.setdefault(f"{who}, shared", []).append(round((full.rss - full.uss) / 1e9, 2))
            gigabytes.setdefault(f"{who}, most", []).append(
                round(int(status[status.index("VmHWM:") + 1]) / 1e6, 2)
            )
    return gigabytes


def main() -> None:
    """Measure one model; print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[5000, 4000], help="widths (23.97 million)")
    parser.add_argument("--cohort", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fan-in", type=int)
    parser.add_argument("--shards", type=int, default=1, help="LPSs that share each model")
    parser.add_argument("--method", choices=list(SECTIONS), default="fedavg")
    parser.add_argument("--backend", choices=["ray", "inline"], default="ray")
    options = parser.parse_args()
    task = workload(tuple(options.hidden), options.cohort, options.method, options.shards)
    sharded = options.shards > 1
    execution = {"backend": options.backend, "fan_in": options.fan_in, "shard_models": sharded}
    print(json.dumps(measured(task, options.rounds, execution)))


if __name__ == "__main__":
    main()
