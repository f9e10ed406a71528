"""A run on two Ray nodes, of which one is lost for good at a given moment. Started by test_faults.py.

Usage: python -m tests.runtime.on_two_nodes CONFIG.yaml MOMENT [later]

MOMENT: ``start`` (before the first round), ``blocks`` (while clients train), ``reduce`` (all blocks are
done), ``tested`` (after a round), ``checkpoint`` (while one is written). With ``later`` another node comes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from rayfl.api import Result
from rayfl.config import load
from rayfl.events import BlockDone, Note, RoundDone, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.placement import Placement
from rayfl.runtime.ray_backend import RayBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint
from rayfl.servers.driver import Driver

_ROUND = 2
"""In which round (0-based) the node is lost."""


def main(path: str, moment: str, later: bool) -> None:
    config = load(Path(path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    stages, host = build(config)
    directory = RunDirectory.create(config)
    notes: list[str] = []
    lost: list[float] = []
    went_on: list[float] = []
    placement = Placement(spread_servers=config.execution.shard_models)
    backend = RayBackend(2, num_cpus=1, num_gpus=0, servers=2, placement=placement)

    def lose() -> None:
        if not lost:
            lost.append(time.monotonic())
            cluster.remove_node(other, allow_graceful=False)
            if later:
                cluster.add_node(num_cpus=1)

    def watch(event: RunEvent) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        if lost and not went_on and isinstance(event, RoundDone):
            went_on.append(time.monotonic())
        now = getattr(event, "round", None) == _ROUND
        trained = isinstance(event, BlockDone) and event.done == event.total
        moments = {
            "blocks": isinstance(event, BlockDone),
            "reduce": trained,
            "tested": isinstance(event, RoundDone),
        }
        if now and moments.get(moment):
            lose()

    save = Checkpoint.save

    def saving(self: Checkpoint, *given: Any) -> Path:
        if self.state.round == _ROUND:
            lose()
        return save(self, *given)

    if moment == "checkpoint":
        Checkpoint.save = saving  # type: ignore[method-assign]
    if moment == "start":
        lose()
    Driver(config, stages, backend, directory, host, watch).run()
    found = {
        "path": str(Result(directory.path).path),
        "notes": notes,
        "lost": len(lost),
        "actors": len(backend.pids()),
        "seconds": (went_on[0] if went_on else time.monotonic()) - lost[0],
    }
    backend.close()
    print(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "later" in sys.argv[3:])
