"""Servers on the nodes that stay, client actors packed or spread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayfl.errors import ConfigError
from rayfl.runtime.placement import Placement, packed

NODES: list[dict[str, Any]] = [
    {"NodeID": "a", "Alive": True, "Resources": {"CPU": 4, "stays": 1}, "Labels": {"role": "server"}},
    {"NodeID": "b", "Alive": True, "Resources": {"CPU": 8}, "Labels": {"role": "client"}},
    {"NodeID": "c", "Alive": False, "Resources": {"CPU": 8, "gone": 1}, "Labels": {}},
]


def test_packed_actors_are_on_as_few_nodes_as_possible() -> None:
    assert packed({"a": 2, "b": 4, "c": 1}, 5) == ["b", "b", "b", "b", "a"]
    assert packed({"a": 1, "b": 1}, 4) == ["a", "b", None, None]  # those that come later: anywhere
    assert packed({}, 1) == [None]


def test_packed_actors_have_the_node_with_most_room_and_may_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = 28 * "aa", 28 * "bb"
    free = {a: {"CPU": 1.0}, b: {"CPU": 2.0}}
    there = [{"NodeID": name, "Alive": True, "Resources": each} for name, each in free.items()]
    monkeypatch.setattr("ray.nodes", lambda: there)
    monkeypatch.setattr("ray.state.available_resources_per_node", lambda: free)
    plain = {"num_cpus": 1, "num_gpus": 0}
    options = Placement(clients="pack").of_clients(4, 1, 0)
    assert [each["scheduling_strategy"].node_id for each in options[:3]] == [b, b, a]
    assert all(each["scheduling_strategy"].soft for each in options[:3])
    assert options[3] == plain
    spread = Placement(clients="spread").of_clients(2, 1, 0)
    assert spread == 2 * [{**plain, "scheduling_strategy": "SPREAD"}]
    assert Placement().of_clients(2, 1, 0) == [plain, plain]


@pytest.mark.parametrize("mark", ["stays", "role=server"])
def test_servers_go_where_the_mark_is(mark: str) -> None:
    Placement(mark)._check_servers_on(NODES, "a")
    with pytest.raises(
        ConfigError, match=r"execution\.servers_on: the driver writes the run on this node, which"
    ):
        Placement(mark)._check_servers_on(NODES, "b")


@pytest.mark.parametrize("mark", ["gone", "role=other"])
def test_a_mark_that_no_node_has_is_refused(mark: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"no node of the cluster has '{mark}'; start those that stay with"
    ):
        Placement(mark)._check_servers_on(NODES, "a")


def test_ray_takes_these_options() -> None:
    spread = {"scheduling_strategy": "SPREAD"}
    assert Placement("stays", spread_servers=True).local_servers() == {
        "resources": {"stays": 0.001},
        **spread,
    }
    assert Placement("stays", spread_servers=True).servers() == {"resources": {"stays": 0.001}}
    assert Placement("stays").servers() == {"resources": {"stays": 0.001}}
    assert Placement("role=server").servers() == {"label_selector": {"role": "server"}}
    assert Placement().servers() == {}


TWO_NODES = """
import ray
from ray.cluster_utils import Cluster
from rayfl.runtime.placement import Placement
from rayfl.runtime.ray_backend import RayBackend

stays = {"num_cpus": 1, "resources": {"stays": 1}, "labels": {"role": "server"}, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=stays)
try:
    cluster.add_node(num_cpus=8)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    for mark in ("stays", "role=server"):
        for spread in (False, True):
            backend = RayBackend(1, 1, 0, 4, placement=Placement(mark, spread_servers=spread))
            where = {ray.get(each.hello).node for each in (backend._servers[0], backend._new_server(1))}
            where.add(backend.get(backend.call(lambda: ray.get_runtime_context().get_node_id())))
            print(where == {cluster.head_node.node_id})
            backend.close()
    backend = RayBackend(1, 1, 0, 4, placement=Placement(spread_servers=True))
    servers = [backend._servers[0], *(backend._new_server(place) for place in (1, 2, 3))]
    print(len({ray.get(each.hello).node for each in servers}) == 2)
    backend.close()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_ray_places_servers_and_tasks_there() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", TWO_NODES]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line in ("True", "False")] == 5 * ["True"]
