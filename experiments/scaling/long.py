"""A long run: memory of its processes and size of its checkpoints over the rounds. Neither may grow.

    python experiments/scaling/long.py --rounds 5000 --out runs/long

Two client actors, tiny rounds, a local Ray. Every 500 rounds ``long.csv`` gets a row for each process with
its memory (proportional set size) and its open files, and a row each for the newest checkpoint, the history
that checkpoints share, and the logs of Ray. Started again, it continues.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

import rayfl
from rayfl.events import Begun, RoundDone, RunEvent

KINDS = {
    "ray::_HostActor": "client actor",
    "ray::ServerActor": "LPS",
    "ray::DriverActor": "driver",
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
    "log_monitor": "log monitor",
    "runtime_env/agent": "environment agent",
    "dashboard": "dashboard",
    "ray::": "idle worker",
}
"""Kinds of processes by a part of their command line; the first match counts."""

CONFIG: dict[str, Any] = {
    "name": "long",
    "data": {"name": "synthetic", "features": 8, "samples": 2000, "test_size": 400},
    "partition": {"name": "domains", "clients": 40},
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": "mt_hfl",
    "clustering": {"n_clusters": 3},
    "hierarchy": {"common_layers": 1, "global_every": 5},
    "training": {"epochs": 1, "batch_size": 10, "lr": 0.05, "participation": 0.5},
    "execution": {"backend": "ray", "actors": 2, "cpus_per_actor": 0.5},
}
"""Clusters, a hierarchy, partial participation: everything that could leave something behind in a round."""


def processes() -> Iterator[tuple[str, float, int]]:
    """For this process and its descendants: kind, memory in MB, open files."""
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            line = " ".join(process.cmdline())
            kind = "rayfl" if process == me else next((k for w, k in KINDS.items() if w in line), "other")
            yield kind, process.memory_full_info().pss / 1e6, process.num_fds()
        except psutil.Error:  # the process has just ended
            continue


def size(*folders: Path) -> float:
    """Size of the files below a folder in MB."""
    return sum(p.stat().st_size for f in folders for p in f.rglob("*") if p.is_file()) / 1e6


def logs() -> Path:
    """The folder of Ray's logs."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def main() -> None:
    """Start the run, or resume it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--every", type=int, default=500, help="rounds between two rows, and checkpoints")
    parser.add_argument("--out", type=Path, default=Path("runs/long"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table, runs = options.out / "long.csv", sorted(options.out.glob("long-*/config.yaml"))
    path = [run.parent for run in runs]

    def write(rows: Sequence[tuple[Any, ...]]) -> None:
        with table.open("a", newline="") as file:
            csv.writer(file).writerows(rows)

    def listen(event: RunEvent) -> None:
        if isinstance(event, Begun):
            path.append(Path(event.path))
        if not isinstance(event, RoundDone) or (event.round + 1) % options.every != 10 % options.every:
            return
        done, folder = event.round + 1, path[-1] / "checkpoints"
        measurements: list[tuple[int, str, float, Any]] = [(done, *row) for row in processes()]
        measurements += [
            (done, "newest checkpoint", size(*sorted(folder.glob("round-*"))[-1:]), ""),
            (done, "history of checkpoints", size(folder / "history"), ""),
            (done, "logs of Ray", size(logs()), ""),
            (done, "seconds a round", event.row["seconds"], ""),
        ]
        write(measurements)
        print(f"{done} rounds, {sum(row[2] for row in measurements[:-4]):.0f} MB", flush=True)

    if not table.exists():
        write([("round", "what", "MB", "open files")])
    output = {"root": str(options.out), "checkpoint_every": options.every, "report": False}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    changes = [f"rounds={options.rounds}"]
    if path:
        rayfl.resume(path[-1], changes, listen)
    else:
        rayfl.run({**CONFIG, "output": output}, changes, listen)


if __name__ == "__main__":
    main()
