"""How rayfl scales with clients, actors and nodes: seconds per round, memory, and a plot.

::

    python experiments/scaling/scaling.py experiments/scaling/clients.yaml
    python experiments/scaling/scaling.py experiments/scaling/actors.yaml --values 1,2,4,8
    python experiments/scaling/scaling.py experiments/scaling/nodes.yaml

Each value runs in a separate process, on random images (as in ``rayfl bench``), without tests. A file names
what varies (``over: clients | actors | nodes``), the values, and the workload of ``rayfl bench`` that defines
the rest. ``nodes`` starts that many Ray nodes on this machine with ``cpus_per_node`` CPUs each: this shows
the overhead of rayfl, not the benefit of more hardware. On a real cluster use ``over: actors`` with
``execution: {address: auto}``.

``--out`` (default: scaling-<over>) gets ``scaling.csv`` (one row per value) and ``scaling.png``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import yaml

matplotlib.use("Agg")
OVER = ("clients", "actors", "nodes")


def read(path: Path) -> dict[str, Any]:
    """A config file of this experiment.

    Raises:
        SystemExit: with one line, if a required setting is missing or wrong.
    """
    from rayfl.bench.workloads import WORKLOADS

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(settings, dict) or settings.get("over") not in OVER:
        raise SystemExit(f"{path}: 'over' must be one of {', '.join(OVER)}")
    if settings.get("workload") not in WORKLOADS:
        raise SystemExit(f"{path}: 'workload' must be one of {', '.join(WORKLOADS)}")
    return settings


def measure(settings: dict[str, Any], value: int) -> dict[str, Any]:
    """Run one value in this process: seconds to the first round, median seconds per round, peak memory."""
    import ray
    from ray.cluster_utils import Cluster

    from rayfl.bench.measure import PeakMemory, running
    from rayfl.bench.workloads import WORKLOADS

    start_time = time.perf_counter()
    task = WORKLOADS[settings["workload"]]
    execution, cluster = dict(settings.get("execution", {})), None
    if settings["over"] == "clients":
        cohort = min(value, int(settings.get("cohort", task.cohort)))
        task = dataclasses.replace(task, clients=value, cohort=cohort)
    elif settings["over"] == "actors":
        execution["actors"] = value
        if "address" not in execution:
            ray.init(
                num_cpus=max(value, 1), include_dashboard=False, log_to_driver=False, logging_level="error"
            )
    else:
        cpus = int(settings.get("cpus_per_node", 1))
        head = {"num_cpus": cpus, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(value - 1):
            cluster.add_node(num_cpus=cpus)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        execution["actors"] = value * cpus
    with (
        tempfile.TemporaryDirectory(prefix="rayfl-scaling-") as folder,
        PeakMemory() as peak,
        running(task, Path(folder), execution) as rayfl,
    ):
        first = rayfl.round()
        startup = time.perf_counter() - start_time - first
        seconds = [rayfl.round() for _ in range(int(settings.get("rounds", 10)))]
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()
    median = statistics.median(seconds)
    return {
        settings["over"]: value,
        "round_seconds": median,
        "client_steps_per_second": task.steps / median,
        "startup_seconds": startup,
        "memory_gb": peak.gb,
    }


def plot(frame: pd.DataFrame, over: str, title: str, path: Path) -> None:
    """Plot seconds per round, client-steps per second and memory over what varies."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title)
    columns = ("round_seconds", "client_steps_per_second", "memory_gb")
    names = ("seconds a round (median)", "client-steps per second", "peak memory, GB")
    for ax, column, name in zip(axes, columns, names, strict=True):
        ax.plot(frame[over], frame[column], marker="o")
        ax.set_xlabel(over)
        ax.set_title(name)
        ax.set_xscale("log", base=10 if over == "clients" else 2)
        ax.set_xticks(frame[over], [f"{value:,}" for value in frame[over]])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--values", default="", help="other values than the file's, separated by commas")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = read(arguments.config)
    if arguments.one is not None:
        print(json.dumps(measure(settings, arguments.one)))
        return
    over = settings["over"]
    try:
        values = [int(v) for v in arguments.values.split(",")] if arguments.values else settings["values"]
    except ValueError:
        raise SystemExit(f"--values {arguments.values}: expected whole numbers separated by commas") from None
    rows = []
    for value in values:
        command = [sys.executable, __file__, str(arguments.config), "--one", str(value)]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(process.stdout.strip().splitlines()[-1]))
        print(
            "  ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in rows[-1].items())
        )
    out = arguments.out or Path(f"scaling-{over}")
    out.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows)
    frame.to_csv(out / "scaling.csv", index=False)
    plot(frame, over, f"{settings['workload']} over {over}", out / "scaling.png")
    print(f"written: {out / 'scaling.csv'}, {out / 'scaling.png'}")


if __name__ == "__main__":
    main()
