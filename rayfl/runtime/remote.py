"""What Ray runs in processes of their own besides the clients: local parameter servers and remote tasks.

Like that of :mod:`rayfl.servers.lps`, its import must stay cheap: neither torch nor anything built on it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil

from rayfl.backend import Answer, Key
from rayfl.servers.lps import LocalServer

UNRECORDED: dict[str, Any] = {"enable_task_events": False}
"""Of all actors and tasks: Ray keeps records of the last 100,000 calls, 30 kB of memory for each round."""


def named(run: str, part: str) -> dict[str, str]:
    """Options of an actor that Ray lists as ``rayfl:<run>:<part>``, such as ``rayfl:t-seed0:client:3``.

    Each is alone in its namespace: an actor that replaces a dead one, a resumed run and another run of this
    name are called the same and never refused.
    """
    return {"name": f"rayfl:{run}:{part}", "namespace": f"rayfl-{uuid.uuid4().hex}"}


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


class Call(NamedTuple):
    """A task in a message: the method, its job, the names of its objects, and those of what it keeps.

    The objects travel beside it, in the order of their names; so does what it keeps on the way back.
    """

    method: str
    job: Any
    objects: tuple[Key, ...]
    keeps: tuple[Key, ...]


def carry_out(host: object, call: Call, values: Iterator[Any]) -> tuple[Any, list[Any]]:
    """Do a call on a host, with the next of these values as its objects: the report, and what it keeps."""
    answer: Answer = getattr(host, call.method)(call.job, {key: next(values) for key in call.objects})
    return answer.report, [answer.objects[key] for key in call.keeps]


class ServerActor(LocalServer):
    """An LPS actor."""

    def whereabouts(self) -> Whereabouts:
        """Says that the actor is ready, and where."""
        return whereabouts()

    def perform(self, call: Call, *objects: Any) -> tuple[Any, ...]:
        """Nothing, which the driver can fetch to see that it is done; then what the call keeps."""
        return None, *carry_out(self, call, iter(objects))[1]


def acknowledge(function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
    """Nothing, as above, and what a plain function returns."""
    return None, function(*args)
