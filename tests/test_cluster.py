"""On a cluster: cluster.yaml, submitted jobs, nodes that an autoscaler starts, several nodes on one machine.

Every Ray here has a folder and ports of its own and is stopped by the ids of its processes: others may be
running on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "experiments" / "launch.py"
BIN = Path(sys.executable).parent
QUIET = ["output.report=false", "output.tensorboard=false"]


# -- cluster.yaml, against Ray's own validator ------------------------------------------------------------


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """What ``ray up`` makes of a config before it asks the cloud."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    full: dict[str, Any] = util.prepare_config(config)
    util.validate_config(full)
    return full


@pytest.fixture
def cluster() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return config


def test_cluster_yaml_is_valid_and_scales_gpu_nodes_from_zero(cluster: dict[str, Any]) -> None:
    full = prepared(cluster)
    head, gpu = full["available_node_types"]["head"], full["available_node_types"]["gpu"]
    assert full["head_node_type"] == "head"
    assert head["resources"]["GPU"] == 0
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, full["max_workers"])
    assert gpu["resources"]["GPU"] > 0
    (start,) = [c for c in full["head_start_ray_commands"] if "ray start" in c]
    assert "--num-gpus=0" in start
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start
    assert "--dashboard-host=127.0.0.1" in start  # jobs are code: the dashboard is not for everybody


def test_cluster_yaml_installs_the_package_from_what_it_mounts(cluster: dict[str, Any]) -> None:
    mounted = {Path(remote).name: ROOT / local for remote, local in cluster["file_mounts"].items()}
    assert all(local.exists() for local in mounted.values())
    assert {"rayfl", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= set(mounted)
    (install,) = [c for c in cluster["setup_commands"] if " -e " in c]
    assert "-c ~/rayfl/constraints.txt -e ~/rayfl" in install


def test_the_on_premise_lines_of_cluster_yaml_are_valid(cluster: dict[str, Any]) -> None:
    text = (ROOT / "cluster.yaml").read_text()
    lines = text.split("# -- on-premise\n")[1].split("# -- end")[0]
    replaced = yaml.safe_load(re.sub(r"^# ?", "", lines, flags=re.MULTILINE))
    for gone in ("available_node_types", "head_node_type"):
        del cluster[gone]
    full = prepared({**cluster, **replaced})
    assert full["provider"]["type"] == "local"
    assert full["max_workers"] == len(full["provider"]["worker_ips"])


# -- a Ray of our own -------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports: list[int] = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started; nobody else's."""
    with closing_tree(process.pid) as tree:
        process.send_signal(signal.SIGTERM)
        psutil.wait_procs(tree, timeout=8)


@contextmanager
def closing_tree(pid: int) -> Iterator[list[psutil.Process]]:
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    try:
        yield tree
    finally:
        for p in tree:
            if p.is_running():
                p.kill()
        psutil.wait_procs(tree, timeout=5)


class Head:
    """A head node started with ``ray start --head --block``, with token authentication."""

    def __init__(self, folder: Path, *options: str, dashboard: bool = False, **environment: str) -> None:
        gcs, client, agent, grpc, metrics, board = free_ports(6)
        self.address, self.dashboard = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{board}"
        hidden = ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH")
        self.environment = {k: v for k, v in os.environ.items() if k not in hidden} | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "a-token-for-this-test-only-0123456789",
            **environment,
        }
        command = [
            *(str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"),
            *(f"--port={gcs}", f"--ray-client-server-port={client}", f"--dashboard-port={board}"),
            *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"),
            *(f"--metrics-export-port={metrics}", f"--temp-dir={folder}", "--disable-usage-stats"),
            *("--object-store-memory=200000000", f"--include-dashboard={dashboard}", *options),
        ]
        self.log = folder / "head.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def run(self, *command: str, timeout: float = 90, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def wait(self, ready: str = "Ray runtime started") -> None:
        begun = time.monotonic()
        while ready not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - begun < 60, self.log.read_text()
            time.sleep(0.2)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for Ray: the paths of its sockets may have 107 characters at most."""
    folder = Path(tempfile.mkdtemp(prefix="rayfl-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
