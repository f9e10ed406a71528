"""``execution.gpus_per_actor=auto``: GPUs of different sizes get actors by memory. No GPU is needed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from rayfl.api import Result, run
from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.runtime import nodes
from rayfl.runtime.placement import Placement
from rayfl.runtime.resources import Available, Node, in_turn, plan_resources
from tests.runs import assert_same

ROOT = Path(__file__).parents[2]

SMALL, LARGE = 28 * "aa", 28 * "bb"
"""Two nodes: a GPU of 16 GB, and two of 80 GB."""


@pytest.mark.parametrize(
    ("gb", "actors"), [(None, 1), (4, 1), (8, 1), (15.9, 1), (16, 2), (24, 3), (40, 5), (56, 7), (80, 10)]
)
def test_there_is_an_actor_for_every_8_gb_and_one_at_least(gb: float | None, actors: int) -> None:
    """Also for sevenths, which Ray rounds to four digits: with 0.1429 there is no room for the seventh."""
    node = Node(100, 1, None if gb is None else 1e9 * gb)
    assert node.room(1, "auto") == actors
    assert round(1e4 * node.share("auto")) * actors <= 10_000
    assert node.share(0.25) == 0.25


def test_a_node_without_gpus_or_with_few_cpus_has_no_room_for_more() -> None:
    assert Node(8, 0).room(1, "auto") == 0
    assert Node(3, 2, 80e9).room(1, "auto") == 3
    assert Node(3, 2, 80e9).room(1, 0) == 3


def test_actors_are_put_on_the_nodes_in_turn() -> None:
    assert in_turn([1, 3, 0], 6) == [0, 1, 1, 1, None, None]
    assert in_turn([2, 2], 3) == [0, 1, 0]
    assert in_turn([], 1) == [None]


def planned(available: Available, *overrides: str) -> Any:
    config = load({"training": {"participation": 1.0}}, ["execution.gpus_per_actor=auto", *overrides])
    return plan_resources(config, 1600, 100, 1000, 10**6, available)


def test_the_plan_counts_what_is_reserved_on_each() -> None:
    both = Available((Node(8, 1, 16e9), Node(8, 2, 80e9)), 1e12)
    plan = planned(both)
    assert (plan.actors, plan.gpus) == (10, pytest.approx(2 * 0.5 + 8 * 0.1))
    assert planned(both, "execution.actors=2").gpus == pytest.approx(0.6)
    with pytest.raises(ConfigError, match=r"11 actors of 8\.00 GB .* each do not fit: .* room for 10; .*=10"):
        planned(both, "execution.actors=11")
    with pytest.raises(ConfigError, match=r"there is no GPU; execution\.gpus_per_actor=0"):
        planned(Available((Node(8, 0),), 1e12))


def test_the_fraction_or_auto_and_nothing_else() -> None:
    assert load({}, ["execution.gpus_per_actor=auto"]).execution.gpu_share == 1.0
    for wrong in ("automatic", "-1"):
        with pytest.raises(ConfigError, match=r"execution\.gpus_per_actor"):
            load({}, [f"execution.gpus_per_actor={wrong}"])


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray reports them, one with the custom resource; nobody is asked."""
    resources = {SMALL: {"CPU": 8.0, "GPU": 1.0, nodes.GPU_GB: 16.0}, LARGE: {"CPU": 4.0, "GPU": 2.0}}
    there = [{"NodeID": name, "Alive": True, "Resources": each} for name, each in resources.items()]
    monkeypatch.setattr("ray.nodes", lambda: there)
    monkeypatch.setattr("ray.state.available_resources_per_node", lambda: resources)
    monkeypatch.setattr(nodes, "_known_gpu_bytes", {LARGE: 80e9})


@pytest.mark.usefixtures("two_nodes")
def test_each_actor_goes_to_the_node_of_its_share() -> None:
    assert nodes.whole("auto") == {SMALL: Node(8, 1, 16e9), LARGE: Node(4, 2, 80e9)}
    assert nodes.whole()[LARGE] == Node(4, 2)
    options = Placement().of_clients(7, 1, "auto")
    where = [getattr(each.get("scheduling_strategy"), "node_id", None) for each in options]
    assert where == [SMALL, LARGE, SMALL, LARGE, LARGE, LARGE, None]
    assert [each["num_gpus"] for each in options] == [0.5, 0.1, 0.5, 0.1, 0.1, 0.1, 0.5]
    packed = Placement(clients="pack").of_clients(5, 1, "auto")
    assert [each["num_gpus"] for each in packed] == [0.1, 0.1, 0.1, 0.1, 0.5]


@pytest.mark.usefixtures("two_nodes")
def test_an_actor_that_comes_to_another_node_gets_another_share(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement()
    _, large, *_, anywhere = placement.of_clients(7, 1, "auto")
    assert placement.again(large, "auto") == large
    assert placement.again(anywhere, "auto") == anywhere
    left = [each for each in ray.nodes() if each["NodeID"] == SMALL]
    monkeypatch.setattr("ray.nodes", lambda: left)
    assert placement.again(large, "auto") == {"num_cpus": 1, "num_gpus": 0.5}


def test_the_driver_of_the_gpus_is_asked_and_may_not_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nodes.smallest_gpu() is None
    program = tmp_path / "nvidia-smi"
    for said, expected in (("81559\n24564\n", 24564 * 2**20), ("No devices were found", None), ("", None)):
        program.write_text(f"#!/bin/sh\nprintf '{said}'\n")
        program.chmod(0o755)
        assert nodes.smallest_gpu() == expected


TWO_SIZES = """
import sys
import ray
from ray.cluster_utils import Cluster
from rayfl.api import run
from rayfl.config import load

head = {"num_cpus": 2, "num_gpus": 1, "resources": {"gpu_gb": 16}, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(num_cpus=4, num_gpus=1, resources={"gpu_gb": 24})
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
try:
    free = []

    def watch(event):
        if type(event).__name__ == "RoundDone":
            left = ray.state.available_resources_per_node()
            free.append(sorted(round(node.get("GPU", 0.0), 4) for node in left.values()))

    path = run(load(sys.argv[1]), on_event=watch).path
    print("\\n" + str(path) + "\\n" + str(free[0]))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_nodes_with_gpus_of_two_sizes_get_two_and_three_actors(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """With Ray's logical GPUs: the clients train on CPUs, with the bits of one process."""
    execution = {"backend": "ray", "gpus_per_actor": "auto", "device": "cpu", "block_size": 1}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**settings, "execution": execution}))
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-c", TWO_SIZES, str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    path, free = done.stdout.splitlines()[-2:]
    assert json.loads(free) == [0.0, 0.0001]  # two halves; three thirds, rounded down
    assert json.loads((Path(path) / "environment.json").read_text())["resources"]["actors"] == 5
    execution = {"backend": "inline", "block_size": 1}
    assert_same(run({**settings, "execution": execution}), Result(Path(path)))
