"""``ray up``, runs that lose links and nodes, and ``ray down``, on machines of the tests' own (machines.py).

In this order: each test takes the cluster as the one before has left it.
"""

from __future__ import annotations

import time

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.machines import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

CLIENTS = ("-f", r"^ray::.*([hH]ost|[cC]lient)")
"""The processes of client actors, for ``pkill``."""


def test_a_submitted_run_has_the_bits_of_one_process_and_is_fetched(cluster: Cluster) -> None:
    expected = cluster.inline
    run = cluster.submit("execution.actors=3")
    assert run.finished() == expected
    assert "on 3 client actors" in run.output
    fetched = cluster.desk.home / "runs"
    cluster.at_desk("rsync-down", cluster.config, "~/runs/", str(fetched))
    (summary,) = fetched.rglob("summary.json")
    assert summary.read_bytes() == (run.directory / "summary.json").read_bytes()


def test_a_run_goes_on_over_a_link_that_is_cut_for_thirty_seconds(cluster: Cluster) -> None:
    run = cluster.submit("execution.actors=3")
    run.reached(3)
    cluster.plug(cluster.first, "down")
    time.sleep(30)
    cluster.plug(cluster.first, "up")
    assert run.finished() == cluster.inline
    # Ray may have given the node up in that time; then its autoscaler starts it anew.
    until(lambda: cluster.nodes() == 3, "the node is back")


def test_a_run_goes_on_without_a_node_whose_raylet_is_killed(cluster: Cluster) -> None:
    run = cluster.submit("execution.actors=3")
    run.reached(3)
    cluster.second.run("pkill", "-KILL", "-x", "raylet")
    # The run says so only if no other actor is there within ten seconds; it may even have ended before.
    assert run.finished() == cluster.inline
    until(lambda: cluster.nodes() == 3, "the autoscaler starts the node again")


def test_a_node_that_joins_late_is_used_and_one_whose_link_is_cut_for_good_is_not_missed(
    cluster: Cluster,
) -> None:
    run = cluster.submit("execution.actors=1-6")
    run.reached(3)
    others = (cluster.head, cluster.first, cluster.second)
    for machine in others:  # the round waits for them, and so for the node
        machine.run("pkill", "-STOP", *CLIENTS)
    cluster.start(cluster.late)
    until(lambda: "on late) has joined" in " ".join(run.output.split()), "it joins")
    for machine in others:
        machine.run("pkill", "-CONT", *CLIENTS)
    used = run.rounds()
    run.reached(used + 2)
    cluster.plug(cluster.first, "down")
    assert run.finished() == cluster.inline
    cluster.plug(cluster.first, "up")


def test_ray_down_leaves_no_ray_behind(cluster: Cluster) -> None:
    cluster.late.run("bash", "-c", ". ~/.bashrc; ray stop")
    until(lambda: cluster.nodes() == 3, "all nodes of ray up are there")
    cluster.at_desk("down", "-y", cluster.config)
    for machine in (cluster.head, cluster.first, cluster.second):
        until(lambda m=machine: not m.processes("raylet"), f"no Ray on {machine.name}")  # type: ignore[misc]
    assert not cluster.head.processes("gcs_server")
