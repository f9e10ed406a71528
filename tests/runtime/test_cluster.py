"""On a cluster: cluster.yaml, submitted jobs, nodes that an autoscaler starts, several nodes on one machine.

Every Ray here has a folder and ports of its own and is stopped by the ids of its processes: others may be
running on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
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
    # A link that leads nowhere on the head ends Ray's autoscaler there.
    linked = [path.readlink() for path in (ROOT / "rayfl").rglob("*") if path.is_symlink()]
    assert {link.name for link in linked} <= set(mounted)
    assert {"rayfl", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= set(mounted)
    assert not any(remote.startswith("~/rayfl/") for remote in cluster["file_mounts"])  # hides the package
    (install,) = [c for c in cluster["setup_commands"] if " -e " in c]
    assert "-c ~/checkout/constraints.txt -e ~/checkout" in install


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

    def __init__(
        self, folder: Path, *options: str, port: int = 0, dashboard: bool = False, **environment: str
    ) -> None:
        spare, client, agent, grpc, metrics, board = free_ports(6)
        gcs = port or spare
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
            assert time.monotonic() - begun < 240, self.log.read_text()
            time.sleep(0.2)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for Ray: the paths of its sockets may have 107 characters at most."""
    folder = Path(tempfile.mkdtemp(prefix="rayfl-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def started(head: Head) -> Iterator[Head]:
    try:
        head.wait()
        yield head
    finally:
        kill_tree(head.process)


def demo(folder: Path, rounds: int, *more: str) -> list[str]:
    return ["run", "digits-demo", f"rounds={rounds}", f"output.root={folder}", *QUIET, *more]


def only_run(folder: Path) -> Path:
    (config,) = folder.glob("*/config.yaml")
    return config.parent


def models_sha256(folder: Path) -> str:
    return str(json.loads((only_run(folder) / "summary.json").read_text())["models_sha256"])


@pytest.fixture
def inline_sha256(tmp_path: Path) -> Callable[[int], str]:
    """The models of the same run in one process."""

    def run(rounds: int) -> str:
        arguments = demo(tmp_path / "inline", rounds, "execution.backend=inline")
        subprocess.run([sys.executable, str(LAUNCH), *arguments], check=True, cwd=ROOT, capture_output=True)
        return models_sha256(tmp_path / "inline")

    return run


# -- the launcher -----------------------------------------------------------------------------------------


def test_the_launcher_is_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(LAUNCH), "run", "digits-demo", "rond=3"]
    wrong = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.splitlines() == ["error: rond: no such setting; did you mean 'rounds'?"]


@pytest.mark.parametrize(
    ("cluster", "given", "expected"), [(0, "", None), (1, "", "auto"), (1, "x:1", "x:1")]
)
def test_the_launcher_takes_the_cluster_that_ray_up_made(
    cluster: int, given: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cluster:
        (tmp_path / "ray_bootstrap_config.yaml").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", given)
    if not given:
        monkeypatch.delenv("RAY_ADDRESS")
    seen = []
    monkeypatch.setattr("rayfl.cli.main", lambda: seen.append(os.environ.get("RAY_ADDRESS")))
    runpy.run_path(str(LAUNCH), run_name="__main__")
    assert seen == [expected]


# -- jobs, nodes ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ray
def test_submitted_jobs_finish_fail_and_stop_as_they_should(
    short_path: Path, tmp_path: Path, inline_sha256: Callable[[int], str]
) -> None:
    ray = str(BIN / "ray")
    with started(Head(short_path, "--num-cpus=2", dashboard=True)) as head:

        def submit(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
            target = ["--address", head.dashboard, "--working-dir", ".", *options]
            return head.run(
                ray, "job", "submit", *target, "--", "python", "experiments/launch.py", *arguments
            )

        unknown = head.run(
            ray, "job", "list", "--address", head.dashboard, RAY_AUTH_TOKEN="not-the-token-" * 3
        )
        assert unknown.returncode != 0

        wrong = submit("run", "digits-demo", "rond=3")
        assert wrong.returncode == 1
        assert "error: rond: no such setting; did you mean 'rounds'?" in wrong.stdout
        assert "exit code 2" in wrong.stdout

        endless = submit(*demo(tmp_path / "jobs", 5000), options=("--no-wait", "--submission-id=endless"))
        assert endless.returncode == 0
        rows = wait_for_rounds(tmp_path / "jobs", 3)
        assert head.run(ray, "job", "stop", "--address", head.dashboard, "endless").returncode == 0
        log = head.run(ray, "job", "logs", "--address", head.dashboard, "endless").stdout
        run = only_run(tmp_path / "jobs")
        assert "round   3/5000  loss" in log
        assert f"resume with: rayfl resume {run}" in log

    rows = (run / "rounds.csv").read_text().count("\n") - 1
    resume = [str(BIN / "rayfl"), "resume", str(run), f"rounds={rows + 2}", "execution.backend=inline"]
    subprocess.run(resume, check=True, capture_output=True)
    assert models_sha256(tmp_path / "jobs") == inline_sha256(rows + 2)


def wait_for_rounds(folder: Path, rounds: int, timeout: float = 60) -> int:
    begun = time.monotonic()
    while True:
        found = [path.read_text().count("\n") - 1 for path in folder.glob("*/rounds.csv")]
        if found and found[0] >= rounds:
            return found[0]
        assert time.monotonic() - begun < timeout, "the job does not get on"
        time.sleep(0.2)


HOLDS = """
import ray, time

@ray.remote(num_cpus=1, num_gpus=1)
class Work:
    def begin(self):
        return "holds a node"

ray.init(log_to_driver=False, logging_level="ERROR")
work = Work.remote()
print(ray.get(work.begin.remote()), flush=True)
time.sleep(600)
"""
"""Other work, for which the autoscaler starts a node, and which does not end."""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("busy", [False, True])
def test_a_run_waits_for_gpu_nodes_that_the_autoscaler_starts(
    busy: bool, short_path: Path, tmp_path: Path, inline_sha256: Callable[[int], str]
) -> None:
    """Ray's fake provider starts real nodes on this machine; a GPU is a number. If other work holds a node,
    the run gets another one, although the cluster as a whole would be large enough.
    """
    (port,) = free_ports(1)
    gpu = {"CPU": 1, "GPU": 1, "object_store_memory": 200_000_000}
    defaults = Path(pytest.importorskip("ray").__file__).parent / "autoscaler" / "local" / "defaults.yaml"
    config = {
        **yaml.safe_load(defaults.read_text()),
        "cluster_name": "fake",
        "max_workers": 2,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"127.0.0.1:{port}",
            "disable_node_updaters": True,
            "use_node_id_as_ip": True,  # or nodes that have started count as pending
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1, "GPU": 0}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": gpu, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
    }
    bootstrap = short_path / "ray_bootstrap_config.yaml"
    bootstrap.write_text(json.dumps(config))
    options = ("--num-cpus=1", "--num-gpus=0", f"--autoscaling-config={bootstrap}")
    environment = {"HOME": str(short_path), "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    actors, share = (1, 1) if busy else (2, 0.5)
    with (
        started(Head(short_path, *options, port=port, **environment)) as head,
        contextlib.ExitStack() as stack,
    ):
        if busy:
            variables = {**head.environment, "RAY_ADDRESS": head.address}
            command = [sys.executable, "-c", HOLDS]
            other = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
            stack.callback(other.kill)
            assert other.stdout is not None
            assert other.stdout.readline() == "holds a node\n"
        settings = [f"execution.actors={actors}", f"execution.gpus_per_actor={share}"]
        arguments = demo(tmp_path / "runs", 3, *settings)
        result = head.run(sys.executable, str(LAUNCH), *arguments, timeout=300, RAY_ADDRESS=head.address)
    assert result.returncode == 0, result.stderr
    assert f"waiting for nodes: there is room for 0 of {actors} actors" in result.stdout
    assert f"on {actors} client actor" in result.stdout
    assert "1 GPU" in result.stdout
    assert models_sha256(tmp_path / "runs") == inline_sha256(3)


TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
import ray, rayfl

node = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 200_000_000}
cluster = Cluster(initialize_head=True, head_node_args=node)
try:
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    busy = []
    watch = lambda event: busy.append(event.worker_seconds) if isinstance(event, rayfl.RoundDone) else None
    rayfl.run("digits-demo", sys.argv[1:], watch)
    print("workers", len(busy[-1]), "nodes", sum(node["Alive"] for node in ray.nodes()))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_two_nodes_and_fractions_of_gpus_give_the_same_bits_as_one_process(
    tmp_path: Path, inline_sha256: Callable[[int], str]
) -> None:
    """Four actors of one CPU and a quarter of a GPU do not fit on one of these nodes: they are on both."""
    arguments = ["rounds=3", f"output.root={tmp_path / 'runs'}", *QUIET]
    arguments += ["execution.gpus_per_actor=0.25", "execution.actors=4"]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-for-this-test-only-0123456789"}
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_NODES, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        if process.poll() is None:
            kill_tree(process)
    assert process.returncode == 0, output
    assert "workers 4 nodes 2" in output
    assert models_sha256(tmp_path / "runs") == inline_sha256(3)


def test_an_address_without_a_ray_is_one_line(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    arguments = demo(tmp_path / "runs", 1, f"execution.address=127.0.0.1:{port}")
    command = [sys.executable, str(LAUNCH), *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: execution.address: nothing answers at 127.0.0.1:{port} (")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
