"""The connection to Ray: to a running cluster or one that is started here, and what there is room for."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get

from rayfl import plugins
from rayfl.config import Config
from rayfl.errors import ConfigError, RayflError
from rayfl.memory import free_memory
from rayfl.runtime import nodes
from rayfl.runtime.processes import one_line
from rayfl.runtime.resources import Available, Node, PerActor

_RELEASE_TIMEOUT = 5.0
"""Seconds to wait for CPUs and GPUs that something else in the cluster holds, which may be about to end."""

_NODES_TIMEOUT = 900.0
"""Seconds to wait for the nodes of an autoscaler."""

_ASK = 2.0
"""Seconds between two looks whether the cluster's head is there, and for its answer."""

_HEAD_SILENCE = 15.0
"""Seconds for which the head may be silent: it may be started anew where it keeps its state elsewhere."""

_LONGEST = 40
"""Characters of a folder below which Ray's sockets may lie: the path of a socket has at most 107."""


def connect(config: Config) -> None:
    """Connect to Ray: as the config says, else as the environment (a submitted job), else start it here.

    Raises:
        ConfigError: if the cluster cannot be reached.
        RayflError: if Ray does not start.
    """
    if _connected():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = config.execution.address
    try:
        _reach(address or os.environ.get("RAY_ADDRESS", ""))
        with _options() as options:
            if address is not None:
                ray.init(address=address, **options)
            elif "RAY_ADDRESS" in os.environ:
                ray.init(**options)
            else:
                _guard_token(Path.home() / ".ray" / "auth_token")
                ray.init(address="local", include_dashboard=False, _temp_dir=short_folder(), **options)
    except Exception as error:  # Ray raises bare Exceptions where it cannot start
        line = one_line(error) or type(error).__name__
        if address is not None or "RAY_ADDRESS" in os.environ:
            where = "RAY_ADDRESS" if address is None else "execution.address"
            raise ConfigError(where, line, _token_hint()) from None
        advice = "'rayfl doctor' shows what is there, execution.backend=inline runs without Ray"
        raise RayflError(f"Ray does not start on this machine: {line}; {advice}") from None
    _brought.append(_travelling())


_brought: list[tuple[str, ...]] = []
"""Which plug-ins came with the connections that were made here: the hashes of their sources."""


def _travelling() -> tuple[str, ...]:
    return tuple(plugin.sha256 for plugin in plugins.travelling())


def _connected() -> bool:
    """Whether there is a connection that serves; one of rayfl's own without all plug-ins is given up.

    Raises:
        ConfigError: if the user has connected, and workers do not have the plug-ins.
    """
    if not ray.is_initialized():
        _brought.clear()
        return False
    if _brought:
        if _brought[-1] == _travelling():
            return True
        ray.shutdown()
        return False
    names = [plugin.module for plugin in plugins.loaded()]
    if names:
        try:
            ray.get(ray.remote(_import_all).options(num_cpus=0).remote(names))
        except (RayError, ImportError) as error:
            raise ConfigError(
                "plugins",
                f"Ray was connected without them ({one_line(error)})",
                "let rayfl connect, or: ray.init(runtime_env={'py_modules': ['my_method.py']})",
            ) from None
    return True


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


@contextlib.contextmanager
def _options() -> Iterator[dict[str, Any]]:
    """What ``ray.init`` is told: to be quiet, and the source that workers need."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not plugins.travelling():
        yield quiet
        return
    with tempfile.TemporaryDirectory(prefix="rayfl-plugins-") as folder:
        modules = [str(path) for path in plugins.pack(Path(folder))]
        yield {**quiet, "runtime_env": {"py_modules": modules, "env_vars": plugins.variables()}}


class Head:
    """The head of the cluster (its GCS). Where it is gone nothing starts any more, and after a minute Ray
    ends all processes."""

    def __init__(self) -> None:
        self.address = str(ray.get_runtime_context().gcs_address)
        self._answered = self._asked = time.monotonic()

    def silent(self) -> bool:
        """Whether it has not answered for so long that it is held to be gone."""
        now = time.monotonic()
        if now - self._asked > _ASK:
            self._asked = now
            with contextlib.suppress(ConnectionError):
                _reach(self.address, _ASK)
                self._answered = time.monotonic()
        return time.monotonic() - self._answered > _HEAD_SILENCE


def _reach(address: str, timeout: float = 10.0) -> None:
    """Ray itself tries an address at which nobody answers for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at {address} ({error})") from None


def _token_hint() -> str:
    """What may be wrong where something answers and Ray still does not get in."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return "is the token (RAY_AUTH_TOKEN or ~/.ray/auth_token) that of the cluster?"
    return "if the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"


def _guard_token(path: Path) -> None:
    """Let nobody else read the token that Ray keeps there; Ray itself leaves it open to everybody."""
    with contextlib.suppress(OSError):  # a home that cannot be written: Ray says so itself
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            path.chmod(0o600)
        else:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))


def short_folder(preferred: Path | None = None) -> str | None:
    """Where a Ray that is started here puts its files: None for its own choice, if sockets can lie there.

    Clusters of universities often have a long TMPDIR, and homes with letters that Ray does not take.

    Raises:
        ConfigError: if there is no short folder at all.
    """
    own = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(own) <= _LONGEST and own.isascii():
        return None
    for folder in (preferred or Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")):
        if folder.is_dir() and os.access(folder, os.W_OK):
            return str(folder / f"rayfl-{os.getuid()}")
    raise ConfigError(
        "TMPDIR", f"{own!r} is too long for Ray's sockets, or not ASCII", "set RAY_TMPDIR to a short folder"
    )


def this_machine() -> Available:
    """What this machine has."""
    import torch

    gpus = float(torch.cuda.device_count())
    node = Node(float(os.cpu_count() or 1), gpus, nodes.smallest_gpu() if gpus else None)
    return Available((node,), float(free_memory()))


def this_cluster(gpus: PerActor = 0.0) -> Available:
    """What the connected Ray cluster has free, node by node.

    Args:
        gpus: what an actor gets of a GPU.
    """
    each = list(ray.state.available_resources_per_node().values())
    stores = [node["object_store_memory"] for node in each if "object_store_memory" in node]
    memory = sum(node.get("memory", 0.0) for node in each)
    return Available(tuple(nodes.free(gpus).values()), memory, min(stores, default=None))


def available(config: Config) -> Available:
    """What a run may use: this machine, or what the connected Ray cluster has free.

    What actors of a run before held comes back a moment after they end, so where the free part has no room
    for the actors that the whole cluster could hold, this waits for it for some seconds.
    """
    e = config.execution
    if e.backend == "inline":
        return this_machine()
    whole = Available(tuple(nodes.whole(e.gpus_per_actor).values()), 0.0)
    wanted = whole.room(e.cpus_per_actor, e.gpus_per_actor)
    if e.clients_per_actor is None:
        wanted = int(min(wanted, e.actors_wanted[1]))
    until = time.monotonic() + _RELEASE_TIMEOUT
    while (free := this_cluster(e.gpus_per_actor)).room(e.cpus_per_actor, e.gpus_per_actor) < wanted:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return free


def await_room(config: Config, say: Callable[[str], None], stop: threading.Event) -> None:
    """Wait until there is room for the actors that the config names (the fewest of a range), or for one.

    Other jobs may hold the cluster, or an autoscaler may have to start nodes, which is asked to.

    Args:
        config: the run; ``execution.wait`` says how long.
        say: called with a line of text.
        stop: ends the wait.
    """
    e = config.execution
    wanted = e.actors_wanted[0]
    seconds = e.wait if e.wait != "auto" else (_NODES_TIMEOUT if _autoscales() else _RELEASE_TIMEOUT)
    share = nodes.share_anywhere(e.gpus_per_actor)
    bundle = {"CPU": e.cpus_per_actor} | ({"GPU": share} if share else {})
    until, told = time.monotonic() + seconds, False
    while (room := this_cluster(e.gpus_per_actor).room(e.cpus_per_actor, e.gpus_per_actor)) < wanted:
        if stop.is_set() or time.monotonic() > until:
            break
        if not told and seconds > _RELEASE_TIMEOUT:
            request_resources(bundles=[bundle] * wanted)
            say(f"waiting for nodes: there is room for {room} of {wanted} actors (at most {seconds:.0f} s)")
            told = True
        stop.wait(0.2 if seconds <= _RELEASE_TIMEOUT else 1.0)
    if told:
        request_resources(bundles=[])  # the actors hold the nodes from now on; later they may go


def _autoscales() -> bool:
    """Whether something starts nodes for this cluster when there is work: ``ray up``, KubeRay, a platform."""
    if (Path.home() / "ray_bootstrap_config.yaml").is_file() or "KUBERAY_GEN_RAY_START_CMD" in os.environ:
        return True
    return bool(_internal_kv_get(b"__autoscaling_status"))  # written by every monitor of Ray's


def ray_status() -> str:
    """Whether a Ray cluster is there to connect to, in a line; starts nothing."""
    if ray.is_initialized():
        resources = ray.cluster_resources()
        return f"connected: {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    address = os.environ.get("RAY_ADDRESS")
    return f"RAY_ADDRESS={address}" if address else "none running; 'rayfl run' starts a local one by itself"
