"""The resources of the nodes of the connected Ray cluster: CPUs, GPUs, memory, and GPU memory."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping
from dataclasses import replace

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfl.runtime.remote import UNRECORDED
from rayfl.runtime.resources import Node, PerActor

GPU_GB = "gpu_gb"
"""The custom resource that says how many GB the smallest GPU of a node has: ``ray start --resources``."""

_ANSWER_TIMEOUT = 60.0
"""Seconds for a node to answer how large its GPUs are."""


def whole(gpus: PerActor = 0.0) -> dict[str, Node]:
    """All resources of the nodes, by node id.

    Args:
        gpus: the share of a GPU for an actor; nodes are asked for their GPU memory only if this is ``auto``.
    """
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return _nodes(alive, gpus)


def free(gpus: PerActor = 0.0) -> dict[str, Node]:
    """The free resources of the nodes, by node id."""
    all_nodes = whole(gpus)
    available = ray.state.available_resources_per_node()
    return {
        name: replace(
            all_nodes[name],
            cpus=resources.get("CPU", 0.0),
            gpus=resources.get("GPU", 0.0),
            memory=resources.get("memory", math.inf),
        )
        for name, resources in available.items()
        if name in all_nodes
    }


def share_anywhere(gpus: PerActor) -> float:
    """The fraction of a GPU for an actor whose node is not known yet: as on the smallest GPU."""
    if gpus != "auto":
        return gpus
    return max((node.share(gpus) for node in whole(gpus).values() if node.gpus), default=1.0)


def _nodes(resources: Mapping[str, Mapping[str, float]], gpus: PerActor) -> dict[str, Node]:
    sizes = _gpu_bytes(resources) if gpus == "auto" else {}
    return {
        name: Node(each.get("CPU", 0.0), each.get("GPU", 0.0), sizes.get(name), each.get("memory", math.inf))
        for name, each in resources.items()
    }


_known_gpu_bytes: dict[str, float | None] = {}
"""For each node that was asked, bytes of its smallest GPU; None if unknown. Ray never reuses node ids."""


def _gpu_bytes(resources: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """Bytes of the smallest GPU of each node with GPUs, from its custom resource or from its answer."""
    with_gpus = {name: each for name, each in resources.items() if each.get("GPU", 0.0)}
    silent = [name for name, each in with_gpus.items() if GPU_GB not in each and name not in _known_gpu_bytes]
    if silent:
        ask = ray.remote(num_cpus=0, max_retries=0, **UNRECORDED)(smallest_gpu)
        strategies = {name: NodeAffinitySchedulingStrategy(name, soft=False) for name in silent}
        answers = {
            name: ask.options(scheduling_strategy=place).remote() for name, place in strategies.items()
        }
        for name, answer in answers.items():
            try:
                _known_gpu_bytes[name] = ray.get(answer, timeout=_ANSWER_TIMEOUT)
            except (RayError, GetTimeoutError):
                _known_gpu_bytes[name] = None
    return {
        name: 1e9 * each[GPU_GB] if GPU_GB in each else _known_gpu_bytes[name]
        for name, each in with_gpus.items()
    }


def smallest_gpu() -> float | None:
    """Bytes of the smallest GPU of this machine, from NVIDIA's driver; None if it does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_TIMEOUT / 2, check=True
        )
        return min(float(line) for line in process.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
