"""The cost of client state: 10,000 clients, 1,000 per round, with SCAFFOLD's control variates and without.

::

    python experiments/baselines/client_state.py --clients 10000 --rounds 15 --out runs/client-state

W3 of ``rayfl bench``: 20 samples of 8 x 8 per client, an MLP 64-32-10, so that a control variate has 2,410
parameters. After ``--rounds`` timed rounds, further rounds follow until every client has taken part. Each
objective runs in a separate process, and its checkpoint is read in another one.
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

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

OBJECTIVES = ("sgd", "scaffold")
MOST = 400
"""The largest number of rounds in which all clients have to take part."""


def measure(
    objective: str, clients: int, rounds: int, execution: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Run in this process: seconds per round, memory, and a checkpoint in ``folder``."""
    from rayfl.bench.measure import PeakMemory, running, tree_memory
    from rayfl.bench.population import workload

    task = dataclasses.replace(workload(clients), sections={"local": objective})
    task.config(folder)  # makes the data
    with PeakMemory() as peak, running(task, folder, execution) as rayfl:
        first = rayfl.round()
        memory_before = tree_memory()
        seconds = [rayfl.round() for _ in range(rounds - 1)]
        states = rayfl.driver.servers.states
        held = len(states)
        while 0 < len(states) < clients and rayfl.state.round < MOST:
            seconds.append(rayfl.round())
            states = rayfl.driver.servers.states
        memory_after = tree_memory()
        start_time = time.perf_counter()
        rayfl.driver.checkpoint(rayfl.state)
        saving = time.perf_counter() - start_time
        path = rayfl.driver.run_dir.path
    written = sum(file.stat().st_size for file in (path / "checkpoints").rglob("*") if file.is_file())
    return {
        "objective": objective,
        "clients": clients,
        "rounds": rayfl.state.round,
        "first_round_seconds": first,
        "round_seconds": statistics.median(seconds[: rounds - 1]),
        "round_seconds_with_all": statistics.median(seconds[-(rounds - 1) :]),
        f"with_state_after_{rounds}": held,
        "with_state": len(states),
        "state_mb": len(states) * rayfl.driver.host.spec.n_parameters * 4 / 1e6,
        "memory_gb": peak.gb,
        "grown_mb": (memory_after - memory_before) * 1e3,
        "checkpoint_mb": written / 1e6,
        "checkpoint_seconds": saving,
        "path": str(path),
    }


def resume(path: Path) -> dict[str, Any]:
    """Resume the run from its checkpoint and run one round."""
    from rayfl.rundir import RunDirectory
    from rayfl.runtime.connection import connect, this_cluster, this_machine
    from rayfl.runtime.driving import arithmetic, make_backend
    from rayfl.servers.building import build
    from rayfl.servers.driver import Driver

    directory = RunDirectory.open(path)
    config = directory.config
    stages, host = build(config)
    inline = config.execution.backend == "inline"
    if not inline:
        connect(config)
    available = this_machine() if inline else this_cluster()
    backend = make_backend(config, arithmetic(config, stages[0].federation, host, available))
    driver = Driver(config, stages, backend, directory, host, lambda event: None)
    try:
        start_time = time.perf_counter()
        state = driver.start()
        started = time.perf_counter() - start_time
        held = len(driver.servers.states)
        start_time = time.perf_counter()
        driver.round(state)
        return {
            "resume_seconds": started,
            "resumed": held,
            "next_round_seconds": time.perf_counter() - start_time,
        }
    finally:
        backend.close()


def _in_new_process(task: str, *arguments: str) -> dict[str, Any]:
    """Run a part in a separate process."""
    command = [sys.executable, __file__, "--task", task, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray may print messages, too
    return dict(json.loads(lines[-1]))


def work(options: argparse.Namespace) -> None:
    """Measure each objective in separate processes."""
    execution = {"backend": "inline"} if options.inline else {}
    if options.task == "measure":
        objective, folder = options.given
        figures = measure(objective, options.clients, options.rounds, execution, Path(folder))
        print(json.dumps(figures))
        return
    if options.task == "resume":
        print(json.dumps(resume(Path(options.given[0]))))
        return
    rows = []
    shared = ["--clients", str(options.clients), "--rounds", str(options.rounds)]
    for objective in OBJECTIVES:
        with tempfile.TemporaryDirectory(prefix="rayfl-state-") as folder:
            inline = ["--inline"] * options.inline
            row = _in_new_process("measure", *shared, *inline, "--with", objective, folder)
            row |= _in_new_process("resume", *shared, "--with", row.pop("path"))
            rows.append(row)
            print(", ".join(f"{key} {_text(value)}" for key, value in row.items()), flush=True)
    pd.DataFrame(rows).to_csv(options.out / "client-state.csv", index=False)
    print(f"written: {options.out}/client-state.csv")


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--clients", type=int, default=10_000),
        frame.option("--rounds", type=int, default=15, help="timed rounds, before all have state"),
        frame.option("--inline", action="store_true", help="in one process, without Ray"),
        frame.option("--task", default="", help=argparse.SUPPRESS),
        frame.option("--with", dest="given", nargs="*", default=[], help=argparse.SUPPRESS),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, out="runs/client-state"))
