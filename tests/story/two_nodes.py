"""Two Ray nodes on this machine, of which the second sees an empty folder in place of a given one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ray.util import get_node_ip_address


@contextlib.contextmanager
def two_nodes(rayfl: str, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A cluster of two nodes with one CPU each; needs root, for a mount namespace.

    Args:
        rayfl: the command; Python and Ray are those beside it.
        folder: what the second node does not see.
        environment: in which Ray is started.

    Yields:
        The environment for rayfl, in which the cluster is found.

    Raises:
        RuntimeError: if a node does not start.
    """
    python = Path(rayfl).parent / "python"
    ray = f"{shlex.quote(str(python))} -m ray.scripts.scripts"
    with socket.socket() as free, socket.socket() as other:
        for each in (free, other):
            each.bind(("127.0.0.1", 0))
        port, client = free.getsockname()[1], other.getsockname()[1]
    address = f"{get_node_ip_address()}:{port}"
    own = {
        **environment,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": address,
    }
    options = "--num-cpus=1 --num-gpus=0 --object-store-memory=200000000 --disable-usage-stats --block"
    # Nodes are told apart by their addresses: a driver belongs to the one that has its own.
    first = (
        f"{ray} start --head --port={port} --ray-client-server-port={client} "
        f"--include-dashboard=false {options}"
    )
    second = (
        f"mount -t tmpfs none {shlex.quote(str(folder.resolve()))} && "
        f"{ray} start --address={address} --node-ip-address=127.0.0.2 {options}"
    )
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as log:
        try:
            for command in (["sh", "-c", first], ["unshare", "--mount", "sh", "-c", second]):
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        env={k: v for k, v in own.items() if k != "RAY_ADDRESS"},
                    )
                )
                _await(len(processes), processes[-1], python, own)
            yield own
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{error}:\n{log.read().decode()}") from None
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _await(
    nodes: int, process: subprocess.Popen[bytes], python: Path, environment: Mapping[str, str]
) -> None:
    """Wait until this number of nodes is there."""
    count = (
        "import ray, time; ray.init(log_to_driver=False, logging_level='error')\n"
        f"while sum(node['Alive'] for node in ray.nodes()) < {nodes}: time.sleep(0.1)"
    )
    for _ in range(10):
        if process.poll() is not None:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not subprocess.run(
                [python, "-c", count], capture_output=True, timeout=200, env=environment
            ).returncode:
                return
    raise RuntimeError(f"node {nodes} did not start")
