"""Placement of actors on nodes: servers on permanent nodes, client actors packed or spread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfl.config import Config
from rayfl.errors import ConfigError
from rayfl.runtime import nodes
from rayfl.runtime.processes import alive
from rayfl.runtime.resources import PerActor, in_turn

_MARK_AMOUNT = 0.001
"""How much of a custom resource is reserved: almost nothing, because it only marks nodes."""


def packed(rooms: Mapping[str, int], count: int) -> list[str | None]:
    """A node for each actor, using as few nodes as possible; None for actors without room.

    Args:
        rooms: how many actors each node has room for.
        count: number of actors.
    """
    largest_first = sorted(rooms, key=lambda node: (-rooms[node], node))
    places: list[str | None] = [node for node in largest_first for _ in range(rooms[node])]
    return (places + [None] * count)[:count]


@dataclass(frozen=True)
class Placement:
    """Where the actors of a run are placed.

    Attributes:
        servers_on: a custom resource, or a label ``key=value``, of the nodes for servers; None for any node.
        clients: ``pack``, ``spread``, or ``auto`` for Ray's own choice.
        spread_servers: whether local servers are placed on as many nodes as possible.
    """

    servers_on: str | None = None
    clients: str = "auto"
    spread_servers: bool = False

    @classmethod
    def of(cls, config: Config) -> Placement:
        """The placement that a config asks for.

        Raises:
            ConfigError: if no node qualifies for servers, or if this one, where the driver runs, does not.
        """
        execution = config.execution
        placement = cls(execution.servers_on, execution.placement, execution.shard_models)
        placement._check_servers_on(ray.nodes(), ray.get_runtime_context().get_node_id())
        return placement

    def _check_servers_on(self, cluster_nodes: list[dict[str, Any]], this_node: str) -> None:
        if self.servers_on is None:
            return
        marked = [node["NodeID"] for node in cluster_nodes if node["Alive"] and self._is_marked(node)]
        key, equals, value = self.servers_on.partition("=")
        option = f"--labels={key}={value}" if equals else f"""--resources='{{"{key}": 1}}'"""
        if not marked:
            raise ConfigError(
                "execution.servers_on",
                f"no node of the cluster has {self.servers_on!r}",
                f"start those that stay with: ray start {option}",
            )
        if this_node not in marked:
            raise ConfigError(
                "execution.servers_on",
                f"the driver writes the run on this node, which does not have {self.servers_on!r}",
                "start the run on one that does (ray job submit has --entrypoint-resources and "
                "--entrypoint-label-selector)",
            )

    def _is_marked(self, node: Mapping[str, Any]) -> bool:
        key, equals, value = str(self.servers_on).partition("=")
        if equals:
            return bool(node.get("Labels", {}).get(key) == value)
        return bool(node["Resources"].get(key, 0) > 0)

    def servers(self) -> dict[str, Any]:
        """Ray's options for servers and remote tasks."""
        if self.servers_on is None:
            return {}
        key, equals, value = self.servers_on.partition("=")
        return {"label_selector": {key: value}} if equals else {"resources": {key: _MARK_AMOUNT}}

    def local_servers(self) -> dict[str, Any]:
        """Ray's options for LPS actors."""
        spread = {"scheduling_strategy": "SPREAD"} if self.spread_servers else {}
        return {**self.servers(), **spread}

    def of_clients(self, count: int, num_cpus: float, num_gpus: PerActor) -> list[dict[str, Any]]:
        """Ray's options for each of the client actors, given what is free now.

        If GPUs are shared by memory, an actor's share is computed for one node, so it is placed there.
        """
        options = {"num_cpus": num_cpus, "num_gpus": nodes.share_anywhere(num_gpus)}
        if num_gpus != "auto" and self.clients != "pack":
            spread = {"scheduling_strategy": "SPREAD"} if self.clients == "spread" else {}
            return [{**options, **spread}] * count
        free = nodes.free(num_gpus)
        rooms = {name: node.room(num_cpus, num_gpus) for name, node in free.items()}
        if self.clients == "pack":
            places = packed(rooms, count)
        else:
            names = sorted(rooms)
            turns = in_turn([rooms[name] for name in names], count)
            places = [None if turn is None else names[turn] for turn in turns]
        # Soft: if the node is gone (or full, where shares do not depend on it), Ray chooses another one.
        return [
            options
            if name is None
            else {
                **options,
                "num_gpus": free[name].share(num_gpus),
                "scheduling_strategy": NodeAffinitySchedulingStrategy(
                    name, True, _spill_on_unavailable=num_gpus != "auto"
                ),
            }
            for name in places
        ]

    def again(self, options: dict[str, Any], num_gpus: PerActor) -> dict[str, Any]:
        """Ray's options for an actor that replaces one with these options.

        If the node on which that one was placed is gone, the new one may come to any node, and its share of a
        GPU is one for all of them.
        """
        strategy = options.get("scheduling_strategy")
        if not isinstance(strategy, NodeAffinitySchedulingStrategy) or alive(strategy.node_id):
            return options
        others = {name: value for name, value in options.items() if name != "scheduling_strategy"}
        return {**others, "num_gpus": nodes.share_anywhere(num_gpus)}
