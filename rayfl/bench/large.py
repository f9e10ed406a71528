"""Models with tens of millions of parameters: seconds per round compared with the plain loop, memory by
process.

``python -m rayfl.bench.large --help`` measures one model on Ray.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import psutil

from rayfl.bench.measure import running
from rayfl.bench.naive import NaiveFedAvg
from rayfl.bench.workloads import Workload


def workload(hidden: tuple[int, ...], cohort: int) -> Workload:
    """An MLP on grey images of 28 pixels; each client takes one step."""
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
    )


def measured(task: Workload, rounds: int, execution: dict[str, Any]) -> dict[str, Any]:
    """Seconds per round of both, and the memory of rayfl's processes in GB after the last round."""
    with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder:
        plain = NaiveFedAvg(task)
        try:
            theirs = [plain.round() for _ in range(rounds + 1)][1:]
        finally:
            plain.close()
        with running(task, Path(folder), execution) as rayfl:
            ours = [rayfl.round() for _ in range(rounds + 1)][1:]
            memory = by_process()
            parameters = rayfl.driver.host.spec.P
    return {
        "parameters": parameters,
        "cohort": task.cohort,
        "plain_seconds": statistics.median(theirs),
        "rayfl_seconds": statistics.median(ours),
        "gb": memory,
    }


def by_process() -> dict[str, list[float]]:
    """Memory in GB of this process and of the Ray processes that it started: private pages, and shared pages
    of the object store.
    """
    found: dict[str, list[float]] = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            full, line = process.memory_full_info(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        who = "driver" if process == me else line.split()[0].split("/")[-1]
        if who == "driver" or who.startswith("ray::_Host") or "ServerActor" in line or "raylet" in who:
            found.setdefault(who, []).append(round(full.uss / 1e9, 2))
            found.setdefault(f"{who}, shared", []).append(round((full.rss - full.uss) / 1e9, 2))
    return found


def main() -> None:
    """Measure one model; print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[5000, 4000], help="widths (23.97 million)")
    parser.add_argument("--cohort", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fan-in", type=int)
    options = parser.parse_args()
    task = workload(tuple(options.hidden), options.cohort)
    print(json.dumps(measured(task, options.rounds, {"fan_in": options.fan_in})))


if __name__ == "__main__":
    main()
