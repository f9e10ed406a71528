"""The cosines of all updates of 1,000 clients: seconds and memory, in a run of CFL.

::

    python experiments/cfl/cosines_1000.py
    python experiments/cfl/cosines_1000.py --backend inline

Two rounds of CFL on Fashion-MNIST with 60 samples per client and an MLP 784-78-10 (P = 62,020). The
separation gap needs the cosines of all N clients after every round. The N updates have N P parameters, 248
MB. No process should hold all of them: they are in the object store in blocks, each tile of the matrix reads
two blocks of 128, and the driver receives N x N numbers (8 MB). With ``inline`` there is only one process,
which has to hold them. The driver runs in this process, not in an actor as in ``rayfl run``.

The script prints, and writes to ``cosines.csv``, for every kind of process its private memory (without mapped
files such as the object store) before the first round, while cosines are computed, and at its peak. It also
prints the seconds of every call, and how far a sample of the cosines is from NumPy's in double precision,
computed from the updates in the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
from numpy.typing import NDArray

from rayfl.backend import Backend
from rayfl.config import load
from rayfl.events import BlockDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.connection import connect
from rayfl.runtime.inline import InlineBackend
from rayfl.runtime.ray_backend import RayBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.driver import Driver
from rayfl.servers.queries import ClientQueries

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame


def own_bytes(pid: int) -> int:
    """Memory of a process without mapped files: Linux counts pages of the object store as private as long
    as no other process has read them.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if "RssAnon" in line), 0)


class Watch(threading.Thread):
    """Samples the private memory of this process and its descendants."""

    def __init__(self, pause: float = 0.2) -> None:
        super().__init__(daemon=True)
        self.pause, self.stopped = pause, threading.Event()
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        me = psutil.Process()
        while not self.stopped.wait(self.pause):
            for process in [me, *me.children(recursive=True)]:
                try:
                    name = "driver" if process == me else process.name()
                    own = own_bytes(process.pid)
                except (psutil.Error, OSError):
                    continue
                self.rows.append(
                    {"time": time.perf_counter(), "process": name, "pid": process.pid, "own": own}
                )

    def peaks(self, start: float, stop: float) -> pd.Series[int]:
        """The largest process of every kind, in MB, between two times."""
        frame = pd.DataFrame(self.rows)
        within = frame[(frame["time"] >= start) & (frame["time"] <= stop)]
        kinds = within["process"].str.replace(r"^ray::(\w+).*", r"ray::\1", regex=True)
        return (within.groupby(kinds)["own"].max() / 1e6).round(0).astype(int)


def work(options: argparse.Namespace) -> None:
    calls: list[tuple[float, float]] = []
    latest: list[NDArray[np.float64]] = []
    original = ClientQueries.cosines

    def timed(self: ClientQueries, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        begun = time.perf_counter()
        similarities = original(self, clients)
        calls.append((begun, time.perf_counter()))
        latest[:] = [similarities]
        return similarities

    ClientQueries.cosines = timed  # type: ignore[method-assign]
    watch = Watch()
    watch.start()
    config = load(
        {
            "name": "cosines",
            "rounds": 2,
            "data": "fashion_mnist",
            "partition": {
                "name": "relabelled",
                "clients": options.clients,
                "samples": 60_000 // options.clients,
                "test_samples": 20,
            },
            "model": {"name": "mlp", "hidden": [78]},
            "algorithm": {"name": "cfl", "criteria": {"eps1": 0}, "gap": True},
            "training": {"epochs": 1, "batch_size": 20, "lr": 0.05},
            "evaluation": {"every": 2},
            "execution": {"backend": options.backend, "actors": options.actors},
            "output": {"root": str(options.out), "report": False, "tensorboard": False},
        }
    )
    directory = RunDirectory.create(config)
    stages, host = build(config)
    backend: Backend = InlineBackend()
    if options.backend == "ray":
        connect(config)
        backend = RayBackend(options.actors, num_cpus=0.5, num_gpus=0, servers=1)
    trained: list[float] = []

    def listen(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.done == 1:
            trained.append(time.perf_counter())

    try:
        Driver(config, stages, backend, directory, host, listen).run()
    finally:
        backend.close()
    end = time.perf_counter()
    watch.stopped.set()
    watch.join()
    table = pd.DataFrame(
        {
            "before": watch.peaks(0, trained[0]),
            "cosines": watch.peaks(*calls[-1]),
            "peak": watch.peaks(0, end),
        }
    )
    table.to_csv(options.out / "cosines.csv")
    checkpoint = Checkpoint.load(checkpoints(directory.path / "checkpoints")[-1])
    random = np.random.default_rng(0)
    sample = np.sort(random.choice(options.clients, min(200, options.clients), replace=False))
    rows = np.stack([checkpoint.update_rows[c : c + 1][0] for c in sample.tolist()]).astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    error = np.abs(latest[0][np.ix_(sample, sample)] - rows @ rows.T).max()
    size = rows.shape[1]
    print(f"{options.clients} clients, P = {size}, all updates {4e-6 * options.clients * size:.0f} MB")
    print("seconds of every call:", [round(stop - start, 1) for start, stop in calls])
    print("own memory of the largest process of a kind, MB:")
    print(table.to_string())
    print(f"largest error of {len(sample)} x {len(sample)} cosines against NumPy: {error:.1e}")


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--clients", type=int, default=1000),
        frame.option("--actors", type=int, default=2),
        frame.option("--backend", choices=["ray", "inline"], default="ray"),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, out="runs/cosines"))
