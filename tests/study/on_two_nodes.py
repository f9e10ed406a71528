"""A study on two Ray nodes, one of which is lost for good in mid-study. Started by test_trials.py.

Usage: python -m tests.study.on_two_nodes FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from rayfl.study import Watch, execute, prepare, take
from rayfl.study.plan import PlannedRun
from rayfl.study.running import Outcome
from tests.study.test_trials import RUNS, hashes


def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    other = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    ended: list[str] = []

    def done(run: PlannedRun, outcome: Outcome) -> None:
        if not ended:  # the runs that are under way now have actors on the other node
            cluster.remove_node(other, allow_graceful=False)
        ended.append(outcome.state)

    study = take(RUNS, folder, settings=[f"output.root={folder / 'runs'}"])
    found = execute(prepare(study), folder / "out", watch=Watch(done=done))
    said = {"ended": ended, "failed": found.failed, "hashes": hashes(found)}
    (folder / "said.json").write_text(json.dumps(said))  # Ray prints lines of its own
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
