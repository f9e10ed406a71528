"""Client actors that come and go with their nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayfl.api import Result, run
from rayfl.config import load
from rayfl.errors import ConfigError, RayflError
from rayfl.runtime import processes
from rayfl.runtime.processes import Deaths
from rayfl.runtime.resources import Available, Node, ResourcePlan, plan_resources
from tests.runs import assert_same

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("actors", "message"),
    [
        ("4-2", r"actors: 4-2 is not a range; did you mean 2-4\?"),
        ("0-2", "execution.actors"),
        ("2-", "execution.actors"),
        ("2-4, execution.clients_per_actor=3", "cannot be a range if clients_per_actor is set"),
    ],
)
def test_a_range_that_is_none_is_refused(actors: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({}, [f"execution.actors={actors}".split(", ")[0], *actors.split(", ")[1:]])


def planned(actors: str, cpus: float) -> ResourcePlan:
    config = load({}, [f"execution.actors={actors}", "execution.block_size=1"])
    return plan_resources(config, 100, 1, 1000, 10**6, Available((Node(cpus, 0),), memory=64e9))


def test_a_range_takes_what_there_is_and_no_fewer_than_its_least() -> None:
    assert (planned("2-64", 8).actors, planned("2-64", 8).most_actors) == (8, 64)
    assert (planned("2-4", 8).actors, planned("2-4", 8).most_actors) == (4, 4)
    assert planned("2-640", 8).most_actors == 100  # there are so many blocks
    assert planned("2", 8).most_actors == 2
    assert "up to 64 as nodes join" in " ".join(planned("2-64", 8).lines())
    with pytest.raises(ConfigError, match="2 actors of 1 CPU need 2, there are 1"):
        planned("2-64", 1)


@pytest.mark.parametrize(
    ("actors", "free", "whole", "said"),
    [
        (
            "2-64",
            0,
            1,
            r"the cluster has 1, of which other work holds 1; execution.actors=1 with .*wait=3600",
        ),
        ("8", 1, 4, r"holds 3; .*execution.actors=1 would fit now; execution.actors=4 with execution.wait"),
        ("2-64", 0, 0, "there are 0"),
    ],
)
def test_what_other_work_holds_is_not_missing(actors: str, free: int, whole: int, said: str) -> None:
    """The cluster has fewer CPUs than the run needs, and these are taken, too."""
    config = load({}, [f"execution.actors={actors}", "execution.block_size=1"])
    there = Available((Node(free, 0),), memory=64e9, whole=(Node(whole, 0),))
    with pytest.raises(ConfigError, match=said):
        plan_resources(config, 100, 1, 1000, 10**6, there)


def test_one_process_waits_for_no_nodes() -> None:
    config = load({}, ["execution.actors=2-64", "execution.block_size=1", "execution.backend=inline"])
    plan = plan_resources(config, 100, 1, 1000, 10**6, Available((Node(8, 0),), memory=64e9))
    assert (plan.actors, plan.most_actors) == (1, 1)


def test_actors_that_die_with_their_node_are_one_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(
        "ray.nodes", lambda: [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}]
    )
    deaths = Deaths()
    for _ in range(10 * processes.MAX_DEATHS):
        deaths.one(None, "b")
    for _ in range(processes.MAX_DEATHS - 1):
        deaths.one(None, "a")
    with pytest.raises(RayflError, match="keep dying"):
        deaths.one(None, "a")


@pytest.mark.ray
@pytest.mark.slow
def test_nodes_that_come_are_used_and_those_that_go_are_not_missed(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings |= {"rounds": 8, "execution": {"backend": "inline", "block_size": 1}}
    file = tmp_path / "config.yaml"
    execution = {**settings["execution"], "backend": "ray", "actors": "1-3"}
    file.write_text(yaml.safe_dump({**settings, "execution": execution}))
    command = [sys.executable, "-m", "tests.runtime.on_coming_nodes", str(file)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert "up to 3 as nodes join" in " ".join(found["notes"])
    assert found["used"][:2] == [1, 1]
    assert found["used"][2:5] == [3, 3, 3]
    assert (found["used"][-1], found["present"]) == (1, 1)
    assert_same(run(settings), Result(Path(found["path"])))
