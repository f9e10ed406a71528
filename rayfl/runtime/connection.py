"""The connection to Ray, to a running cluster or a local one started here, and its free resources."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rayfl import plugins
from rayfl.config import Config
from rayfl.errors import ConfigError, RayflError, one_line
from rayfl.memory import free_memory
from rayfl.runtime import nodes
from rayfl.runtime.resources import Available, Node, PerActor
from rayfl.units import counted

_RELEASE_TIMEOUT = 5.0
"""Seconds to wait for CPUs and GPUs that are in use, for example by a run that is just ending."""

_NODES_TIMEOUT = 900.0
"""Seconds to wait for the nodes of an autoscaler."""

_CHECK_INTERVAL = 2.0
"""Seconds between two checks of the cluster's head, and timeout of each check."""

_REPORT_TRIES = 12
"""How often a new cluster is asked for the first report of its autoscaler, which comes after some seconds."""

_HEAD_SILENCE = 15.0
"""Seconds for which the head may be silent; a head whose state is kept in Redis may be restarting."""

_STORE_SHARE, _SHARED_MEMORY = 0.3, Path("/dev/shm")
"""The share of the free memory that Ray takes for its object store, and where the store is."""

_LONGEST_PATH = 40
"""Longest path of a folder for Ray's files: the path of a socket in it may have at most 107 characters."""


def connect(config: Config) -> None:
    """Connect to Ray at the address in the config or in the environment (a submitted job), or start it here.

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
        with _init_options() as options:
            if address is not None:
                ray.init(address=address, **options)
            elif "RAY_ADDRESS" in os.environ:
                ray.init(**options)
            else:
                _guard_token(Path.home() / ".ray" / "auth_token")
                # Ray's default is 15: next to another busy program, clients would get 3 % of a core.
                os.environ.setdefault("RAY_worker_niceness", "0")
                with _without_cluster_processes():
                    ray.init(address="local", include_dashboard=False, _temp_dir=short_folder(), **options)
    except Exception as error:  # Ray raises a bare Exception if it cannot start
        line = one_line(error) or type(error).__name__
        if address is not None or "RAY_ADDRESS" in os.environ:
            where = "RAY_ADDRESS" if address is None else "execution.address"
            raise ConfigError(where, line, _token_hint()) from None
        advice = "'rayfl doctor' shows what is there, execution.backend=inline runs without Ray"
        raise RayflError(f"Ray does not start on this machine: {line}; {advice}") from None
    _sent_plugins.append(_plugin_hashes())


_CLUSTER_METHODS = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node, each of which starts a process that one machine does not need: the autoscaler, the
log monitor, which sends the output of workers to the driver (rayfl turns that off), and the dashboard's head,
which without the dashboard only counts users. Ray has no setting for them. Metrics come from another process,
the agent of the node."""


@contextlib.contextmanager
def _without_cluster_processes() -> Iterator[None]:
    """In this context Ray starts without the processes of :data:`_CLUSTER_METHODS`.

    Each takes a second or two of a core, during which everything else waits, and 50 to 100 MB.
    """
    try:
        node: Any = importlib.import_module("ray._private.node").Node
    except (ImportError, AttributeError):  # Ray has moved it: all processes start
        yield
        return
    originals = {name: getattr(node, name) for name in _CLUSTER_METHODS if hasattr(node, name)}
    try:
        for name in originals:
            setattr(node, name, lambda node, **options: None)
        yield
    finally:
        for name, method in originals.items():
            setattr(node, name, method)


_sent_plugins: list[tuple[str, ...]] = []
"""The plug-ins that were sent with each connection made here, as hashes of their sources."""


def _plugin_hashes() -> tuple[str, ...]:
    return tuple(plugin.sha256 for plugin in plugins.travelling())


def _connected() -> bool:
    """Whether there is a usable connection; a connection made by rayfl that lacks plug-ins is closed.

    Raises:
        ConfigError: if the user made the connection and its workers lack plug-ins.
    """
    if not ray.is_initialized():
        _sent_plugins.clear()
        return False
    if _sent_plugins:
        if _sent_plugins[-1] == _plugin_hashes():
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
def _init_options() -> Iterator[dict[str, Any]]:
    """The options of ``ray.init``: quiet logging, and the source that workers need."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not plugins.travelling():
        yield quiet
        return
    with tempfile.TemporaryDirectory(prefix="rayfl-plugins-") as folder:
        modules = [str(path) for path in plugins.pack(Path(folder))]
        yield {**quiet, "runtime_env": {"py_modules": modules, "env_vars": plugins.variables()}}


class Head:
    """The head of the cluster (its GCS). Without it nothing can start, and after a minute Ray ends all
    processes.
    """

    def __init__(self) -> None:
        self.address = str(ray.get_runtime_context().gcs_address)
        self._answered = self._asked = time.monotonic()

    def silent(self) -> bool:
        """Whether it has not answered for so long that it is considered lost."""
        now = time.monotonic()
        if now - self._asked > _CHECK_INTERVAL:
            self._asked = now
            with contextlib.suppress(ConnectionError):
                _reach(self.address, _CHECK_INTERVAL)
                self._answered = time.monotonic()
        return time.monotonic() - self._answered > _HEAD_SILENCE


def _reach(address: str, timeout: float = 10.0) -> None:
    """Check an address quickly; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at {address} ({error})") from None


def reachable(address: str) -> bool:
    """Whether something listens at ``host:port``."""
    try:
        _reach(address, _CHECK_INTERVAL)
    except ConnectionError:
        return False
    return True


def _token_hint() -> str:
    """A hint for the case that the address answers but Ray cannot connect."""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return "is the token (RAY_AUTH_TOKEN or ~/.ray/auth_token) that of the cluster?"
    return "if the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"


def _guard_token(path: Path) -> None:
    """Make the token that Ray keeps there readable only for this user; Ray itself leaves it readable for
    everyone.
    """
    with contextlib.suppress(OSError):  # the home folder is not writable; Ray reports that itself
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            path.chmod(0o600)
        else:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))


def short_folder(preferred: Path | None = None) -> str | None:
    """The folder for the files of a local Ray; None for Ray's default, if its path is short enough for
    sockets.

    University clusters often have a long TMPDIR, and home folders with characters that Ray does not accept.

    Raises:
        ConfigError: if there is no short folder.
    """
    default = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(default) <= _LONGEST_PATH and default.isascii():
        return None
    for folder in (preferred or Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")):
        if folder.is_dir() and os.access(folder, os.W_OK):
            return str(folder / f"rayfl-{os.getuid()}")
    raise ConfigError(
        "TMPDIR",
        f"{default!r} is too long for Ray's sockets, or not ASCII",
        "set RAY_TMPDIR to a short folder",
    )


def this_machine() -> Available:
    """The resources of this machine, with the object store that a Ray started here would get."""
    import torch

    gpus, memory = float(torch.cuda.device_count()), float(free_memory())
    node = Node(float(os.cpu_count() or 1), gpus, nodes.smallest_gpu() if gpus else None, memory)
    return Available((node,), memory, object_store(memory))


def object_store(memory: float) -> float:
    """Bytes that a Ray started here, with this much free memory, would take for its object store."""
    free = float(shutil.disk_usage(_SHARED_MEMORY).free) if _SHARED_MEMORY.is_dir() else math.inf
    return min(_STORE_SHARE * memory, free)


def this_cluster(gpus: PerActor = 0.0) -> Available:
    """The free resources of the connected Ray cluster, by node.

    Args:
        gpus: the share of a GPU for an actor.
    """
    by_node = list(ray.state.available_resources_per_node().values())
    stores = [node["object_store_memory"] for node in by_node if "object_store_memory" in node]
    memory = sum(node.get("memory", 0.0) for node in by_node)
    return Available(tuple(nodes.free(gpus).values()), memory, min(stores, default=None))


def available(config: Config) -> Available:
    """The resources that a run may use: this machine, or the free part of the connected Ray cluster.

    Resources of a previous run are released a moment after its actors end. So if the free part has no room
    for actors that the whole cluster could hold, this waits some seconds.
    """
    e = config.execution
    if e.backend == "inline":
        return this_machine()
    cluster = Available(tuple(nodes.whole(e.gpus_per_actor).values()), 0.0)
    wanted = cluster.room(e.cpus_per_actor, e.gpus_per_actor)
    if e.clients_per_actor is None:
        wanted = int(min(wanted, e.actors_wanted[1]))
    until = time.monotonic() + _RELEASE_TIMEOUT
    while (free := this_cluster(e.gpus_per_actor)).room(e.cpus_per_actor, e.gpus_per_actor) < wanted:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return replace(free, whole=cluster.nodes)


def prospect(config: Config) -> Available:
    """The resources that a run would have if it were alone, for a plan: the nodes of the cluster that the
    config or the environment names, otherwise this machine. For a cluster that starts nodes on demand, these
    are all nodes that its configuration allows, or, if that is not known here, as many as the smallest number
    of actors needs.

    Raises:
        ConfigError: if the cluster cannot be reached.
    """
    e = config.execution
    if e.backend == "inline" or (e.address is None and "RAY_ADDRESS" not in os.environ):
        return this_machine()
    connect(config)
    cluster_nodes = tuple(nodes.whole(e.gpus_per_actor).values())
    store = this_cluster(e.gpus_per_actor).store
    if not _autoscales():
        return Available(cluster_nodes, sum(node.memory for node in cluster_nodes), store)
    starts = "the cluster starts nodes when they are needed"
    largest = _configured_nodes(Path.home() / _BOOTSTRAP_FILE)
    if largest is not None:
        assumed = f"{starts}; this plan is for the most that its configuration allows"
    else:
        worker_node = max(
            cluster_nodes, key=lambda node: node.room(e.cpus_per_actor, e.gpus_per_actor), default=None
        )
        room = 0 if worker_node is None else worker_node.room(e.cpus_per_actor, e.gpus_per_actor)
        if worker_node is None or not room:  # so far there is only a head, which takes no work
            (worker_node,) = this_machine().nodes
            room = worker_node.room(e.cpus_per_actor, e.gpus_per_actor)
        count = -(-e.actors_wanted[0] // max(1, room))
        largest = max(cluster_nodes, (worker_node,) * count, key=len)
        assumed = f"{starts}; how many is not known here, this plan is for"
    cpus = counted(round(sum(node.cpus for node in largest)), "CPU")
    assumed = f"{assumed}: {counted(len(largest), 'node')} with {cpus} in all"
    return Available(largest, sum(node.memory for node in largest), store, assumed=assumed)


def _configured_nodes(path: Path) -> tuple[Node, ...] | None:
    """The nodes of a cluster at the maximum size in the autoscaler's configuration; None if that file is not
    here, or does not specify the resources of the nodes.
    """
    import yaml

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        kinds, max_workers = settings["available_node_types"], int(settings["max_workers"])
        workers: list[Node] = []
        for kind in kinds.values():
            workers += [_node_of(kind["resources"])] * min(
                max_workers, int(kind.get("max_workers", max_workers))
            )
        workers.sort(key=lambda node: (node.gpus, node.cpus), reverse=True)
        return _node_of(kinds[settings["head_node_type"]]["resources"]), *workers[:max_workers]
    except (OSError, KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError):
        return None


def _node_of(resources: Mapping[str, float]) -> Node:
    return Node(
        float(resources["CPU"]),
        float(resources.get("GPU", 0)),
        None,
        float(resources.get("memory", math.inf)),
    )


def refuse_without_gpus(config: Config) -> None:
    """Refuse ``execution.device: cuda`` on a cluster that has no GPU and cannot start a node with one.

    Raises:
        ConfigError
    """
    if config.execution.device == "cuda":
        if any(node.gpus for node in nodes.whole().values()) or _autoscales():
            return
        raise ConfigError(
            "execution.device", "Ray knows of no GPU here", "execution.device=auto takes what there is"
        )


def await_room(config: Config, say: Callable[[str], None], stop: threading.Event) -> None:
    """Wait until there is room for the actors in the config (of a range, the fewest; by default one).

    Other jobs may hold the cluster; an autoscaler is asked to start nodes.

    Args:
        config: of the run; ``execution.wait`` specifies how long.
        say: called with a line of text.
        stop: ends the wait.

    Raises:
        ConfigError: if other jobs still hold what the run needs.
    """
    e = config.execution
    wanted = _actors_needed(config)
    start_time, seconds, said = time.monotonic(), 0.0, False
    with _Demand(e.cpus_per_actor, nodes.share_anywhere(e.gpus_per_actor), wanted) as demand:
        while (room := this_cluster(e.gpus_per_actor).room(e.cpus_per_actor, e.gpus_per_actor)) < wanted:
            if not seconds:
                seconds = _usual_wait() if e.wait == "auto" else e.wait
            if stop.is_set() or time.monotonic() > start_time + seconds:
                break
            if seconds <= _RELEASE_TIMEOUT:
                stop.wait(0.2)
                continue
            if not said:
                fits = f"there is room for {room} of {wanted} actors"
                say(f"waiting for nodes: {fits} (at most {seconds:.0f} s)")
                said = True
            if demand.met():
                demand.withdraw()  # it holds the room that the actors are going to take
            else:
                demand.ask()
            stop.wait(1.0)
    if room < wanted and not stop.is_set():
        cluster = Available(tuple(nodes.whole(e.gpus_per_actor).values()), 0.0)
        if cluster.room(e.cpus_per_actor, e.gpus_per_actor) >= wanted:
            raise ConfigError(
                "execution.actors",
                f"other work holds the cluster: there is room for {room} of {counted(wanted, 'actor')}",
                "execution.wait=3600 waits up to an hour for it",
            )


def _actors_needed(config: Config) -> int:
    """The smallest number of actors with which a run can start, as far as the config says it."""
    e, clients = config.execution, getattr(config.partition, "clients", None)
    if e.clients_per_actor is not None and isinstance(clients, int):
        return -(-clients // e.clients_per_actor)
    return e.actors_wanted[0]


class _Demand:
    """What a run that waits asks of the cluster: a placement group with a bundle for each actor.

    Unlike a request for a size of the cluster (``ray.autoscaler.sdk.request_resources``), it is added to what
    other work uses, an autoscaler sums it over the runs that wait, and Ray removes it with this process.

    Args:
        cpus, gpus: of an actor.
        count: how many actors.
    """

    def __init__(self, cpus: float, gpus: float, count: int) -> None:
        self._bundles = [{"CPU": cpus} | ({"GPU": gpus} if gpus else {})] * count
        self._group: PlacementGroup | None = None

    def __enter__(self) -> _Demand:
        return self

    def __exit__(self, *_: object) -> None:
        self.withdraw()

    def ask(self) -> None:
        """Ask, unless this has been done."""
        if self._group is None:
            self._group = placement_group(self._bundles)

    def met(self) -> bool:
        """Whether there is room, which the group holds from then on."""
        return self._group is not None and bool(self._group.wait(0))

    def withdraw(self) -> None:
        """Release what the group holds, or no longer ask."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


_BOOTSTRAP_FILE = "ray_bootstrap_config.yaml"
"""Where ``ray up`` puts the autoscaler's configuration on the head node, below the home folder."""


def _usual_wait() -> float:
    """Seconds: an autoscaler needs minutes to start a node, an ended job a moment to release what it held."""
    return _NODES_TIMEOUT if _autoscales() else _RELEASE_TIMEOUT


def _autoscales() -> bool:
    """Whether this cluster has an autoscaler, which starts nodes for work: ``ray up``, KubeRay, a
    platform.
    """
    if (Path.home() / _BOOTSTRAP_FILE).is_file() or "KUBERAY_GEN_RAY_START_CMD" in os.environ:
        return True
    if is_autoscaler_v2():
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        found = [*status.active_nodes, *status.idle_nodes]
        return not _started_by_hand({node.ray_node_type_name for node in found})
    for _ in range(_REPORT_TRIES):
        status = _internal_kv_get(b"__autoscaling_status")  # the first version of the autoscaler writes it
        if not status:
            return False
        report = json.loads(status).get("autoscaler_report")
        if report is not None:
            return not _started_by_hand(report.get("active_nodes") or report.get("idle_nodes") or ())
        time.sleep(_CHECK_INTERVAL / 2)  # the cluster has just been started
    return True


def _started_by_hand(types: Collection[str]) -> bool:
    """Whether types of nodes are those of a cluster that was started by hand: ``ray start --head`` starts a
    monitor that cannot start nodes, and gives every node that it finds a separate type, named after the
    node's id.
    """
    return bool(types) and all(re.fullmatch("node_[0-9a-f]{56}", each) for each in types)


def ray_status() -> str:
    """One line on whether there is a Ray cluster to connect to; starts nothing."""
    if ray.is_initialized():
        resources = ray.cluster_resources()
        return f"connected: {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    address = os.environ.get("RAY_ADDRESS")
    return f"RAY_ADDRESS={address}" if address else "none running; 'rayfl run' starts a local one by itself"
