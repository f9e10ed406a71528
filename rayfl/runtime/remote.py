"""What Ray runs in processes other than client actors: local parameter servers and remote tasks.

Importing this module must stay cheap, as for :mod:`rayfl.servers.lps`: no torch, nor anything built on it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil

from rayfl.backend import Answer, Key, Names, received
from rayfl.memory import keep_freed
from rayfl.servers.lps import LocalServer

UNRECORDED: dict[str, Any] = {"enable_task_events": False}
"""Option of all actors and tasks: otherwise Ray records the last 100,000 calls, 30 kB of memory per round."""


def named(run: str, part: str) -> dict[str, str]:
    """Options of an actor that Ray lists as ``rayfl:<run>:<part>``, such as ``rayfl:t-seed0:client:3``.

    Each actor has its own namespace, so that a replacement for a dead actor, a resumed run or another run of
    the same name may use the same actor names.
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
    """The whereabouts of the calling process."""
    import ray  # deferred; it is already imported where this is called

    return Whereabouts(ray.get_runtime_context().get_node_id(), os.uname().nodename, os.getpid())


def kill(where: Whereabouts) -> None:
    """Kill a Ray process on this node by SIGKILL, the only signal that works on a stopped process."""
    with contextlib.suppress(psutil.Error):
        if "ray::" in " ".join(psutil.Process(where.pid).cmdline()):  # the process id may have been reused
            os.kill(where.pid, signal.SIGKILL)


class Call(NamedTuple):
    """A task in a message: the method, its job, the names of its objects, and the names of the results that
    it keeps.

    The objects are sent next to it, as :func:`~rayfl.backend.laid_out` orders them, and the results are
    returned in the order of their names.
    """

    method: str
    job: Any
    objects: Names
    keeps: tuple[Key, ...]


def carry_out(host: object, call: Call, values: Iterator[Any]) -> tuple[Any, list[Any]]:
    """Execute a call on a host with the next values as its objects; returns the report and the results to
    keep.
    """
    answer: Answer = getattr(host, call.method)(call.job, received(call.objects, values))
    return answer.report, [answer.objects[key] for key in call.keeps]


class ServerActor(LocalServer):
    """An LPS actor."""

    def __init__(self) -> None:
        keep_freed(all_of_it=True)

    def whereabouts(self) -> Whereabouts:
        """Where the actor runs; an answer means that it is ready."""
        return whereabouts()

    def perform(self, call: Call, *objects: Any) -> tuple[Any, ...]:
        """Execute a call; returns None, which the driver fetches to see that the call is done, and then the
        results to keep.
        """
        return None, *carry_out(self, call, iter(objects))[1]


def acknowledge(function: Callable[..., Any], *args: Any) -> tuple[None, Any]:
    """Call a plain function; returns None, as :meth:`ServerActor.perform` does, and the result."""
    return None, function(*args)
