"""The cost of client states, with SCAFFOLD: bytes written by each checkpoint, and memory.

::

    python experiments/scaling/states.py --clients 2000 --cohort 50 --rounds 200 --every 10

Runs inline, in this process; an MLP 64-1333-10 has 99,985 parameters. ``--memory`` is
``execution.state_memory``, the share of the memory beyond which states are written to disk.

``--store GB`` runs on Ray, with two client actors and an object store of that size, which spills to disk by
itself. ``peak_memory_all_mb`` is then the memory of all processes together, including Ray's: their
proportional set size, with the pages of the object store counted once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_HIDDEN = 1333
"""Units of the hidden layer, with 75 parameters each and 10 biases of the outputs: 99,985 in all."""


def _status_bytes(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _written_bytes() -> int:
    """Bytes that this process has written so far."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))
    return int(line.split()[1])


def _start_ray(store: float) -> None:
    """Start Ray on this machine with an object store of ``store`` GB."""
    import ray

    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=int(store * 1e9),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run rounds and checkpoints."""
    from rayfl.bench.measure import PeakMemory, running
    from rayfl.bench.population import workload

    model = {"name": "mlp", "hidden": [_HIDDEN]}
    sections = {"local": "scaffold", "evaluation": {"every": 1_000_000}}
    task = dataclasses.replace(workload(options.clients, options.cohort), model=model, sections=sections)
    execution: dict[str, Any] = {"backend": "inline"}
    if options.memory is not None:
        execution["state_memory"] = options.memory
    if options.store is not None:
        execution = {"backend": "ray", "actors": 2}
        _start_ray(options.store)
    checkpoints, peak_own, cpu = [], 0, []
    with PeakMemory() as peak, running(task, folder, execution) as rayfl:
        start = _status_bytes("RssAnon")
        for number in range(1, options.rounds + 1):
            rayfl.round()
            peak_own = max(peak_own, _status_bytes("RssAnon"))
            if number % options.every == 0:
                written_before, start_time = _written_bytes(), time.process_time()
                rayfl.driver.checkpoint(rayfl.state)
                checkpoints.append(_written_bytes() - written_before)
                cpu.append(time.process_time() - start_time)
                peak_own = max(peak_own, _status_bytes("RssAnon"))
        states, path = rayfl.driver.servers.states, rayfl.driver.run_dir.path
        size = rayfl.driver.host.spec.n_parameters * 4
        on_disk = {
            (file.stat().st_ino): file.stat().st_size
            for file in (path / "checkpoints").rglob("*")
            if file.is_file()
        }
    return {
        "clients": options.clients,
        "cohort": options.cohort,
        "rounds": options.rounds,
        "every": options.every,
        "with_state": len(states),
        "states_mb": len(states) * size / 1e6,
        "changed_mb_between_checkpoints": options.every * options.cohort * size / 1e6,
        "checkpoint_mb": [round(each / 1e6, 1) for each in checkpoints],
        "checkpoint_cpu_seconds": [round(each, 2) for each in cpu],
        "checkpoint_mb_all": sum(checkpoints) / 1e6,
        "disk_mb": sum(on_disk.values()) / 1e6,
        "start_own_memory_mb": start / 1e6,
        "peak_own_memory_mb": peak_own / 1e6,
        "peak_memory_all_mb": peak.gb * 1e3,
        "peak_memory_with_files_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def main() -> None:
    """Measure, and print as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--memory", type=float, default=None)
    parser.add_argument("--store", type=float, default=None, help="on Ray; GB of its object store")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the run lies; default: a temporary folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        json.dump(measure(options, Path(folder)), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
