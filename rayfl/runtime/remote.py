"""What Ray runs in processes of their own besides the clients: local parameter servers and remote tasks.

Like that of :mod:`rayfl.servers.lps`, its import must stay cheap: neither torch nor anything built on it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from rayfl.servers.lps import LocalServer

UNRECORDED: dict[str, Any] = {"enable_task_events": False}
"""Of all actors and tasks: Ray keeps records of the last 100,000 calls, 30 kB of memory for each round."""


class Whereabouts(NamedTuple):
    """Where a process runs: the id of its node, the node's name, and the process id."""

    node: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def whereabouts() -> Whereabouts:
    """Of the process that calls it."""
    import ray  # deferred: there it is imported already

    return Whereabouts(ray.get_runtime_context().get_node_id(), os.uname().nodename, os.getpid())


def kill(where: Whereabouts) -> None:
    """Kill a process of Ray's on this node; one that is stopped does not obey anything else."""
    with contextlib.suppress(psutil.Error):
        if "ray::" in " ".join(psutil.Process(where.pid).cmdline()):  # the number may be another's by now
            os.kill(where.pid, signal.SIGKILL)


class ServerActor(LocalServer):
    """An LPS actor."""

    def whereabouts(self) -> Whereabouts:
        """Says that the actor is ready, and where."""
        return whereabouts()

    def acknowledge(self, method: str, *args: Any) -> Any:
        """Nothing, which the driver can fetch to see that it is done; then what the method returns."""
        answer = getattr(self, method)(*args)
        return (None, *answer) if isinstance(answer, list | tuple) else (None, answer)


def acknowledge(function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
    """The same for a plain function."""
    return None, function(*args)
