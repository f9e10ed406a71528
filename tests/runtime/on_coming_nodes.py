"""A run whose nodes come and go: begun on one, then on two, then on one again. Started by test_elastic.py.

Usage: python -m tests.runtime.on_coming_nodes CONFIG.yaml
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from rayfl.api import Result
from rayfl.config import load
from rayfl.events import Note, RoundDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.connection import available
from rayfl.runtime.driving import arithmetic, make_backend
from rayfl.runtime.ray_backend import RayBackend
from rayfl.servers.building import build
from rayfl.servers.driver import Driver

_COMES, _GOES = 1, 4
"""After which rounds (0-based)."""


def main(path: str) -> None:
    config = load(Path(path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    stages, host = build(config)
    directory = RunDirectory.create(config)
    plan = arithmetic(config, stages[0].federation, host, available(config))
    backend = make_backend(config, plan)
    assert isinstance(backend, RayBackend)
    notes, used, other = [*plan.lines()], [], []

    def watch(event: RunEvent) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        if not isinstance(event, RoundDone):
            return
        used.append(len(event.worker_seconds))
        crew = backend._crew
        assert crew is not None
        if event.round == _COMES:
            other.append(cluster.add_node(num_cpus=2))
            while len(crew.present) < 3:
                crew.greet()
                time.sleep(0.2)
        if event.round == _GOES:
            there = [
                one.where.pid for one in crew.members if one.where and one.where.node == other[0].node_id
            ]
            assert len(there) == 2
            processes = [psutil.Process(pid) for pid in there]
            cluster.remove_node(other[0], allow_graceful=False)
            psutil.wait_procs(processes)

    Driver(config, stages, backend, directory, host, watch).run()
    present = len(backend.pids())
    backend.close()
    found = {"path": str(Result(directory.path).path), "notes": notes, "used": used, "present": present}
    print(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
