"""The Ray backend: client actors with fractional resources, LPS actors, remote tasks, refs."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from threadpoolctl import threadpool_limits
from typing_extensions import override

from rayfl.errors import RayflError
from rayfl.runtime.backend import Backend, Ref, Task, longest_first
from rayfl.runtime.host import ClientHost
from rayfl.runtime.jobs import HostSpec, TrainJob
from rayfl.runtime.lps import LocalServer

IN_FLIGHT = 2
"""Tasks queued at an actor: one that runs and one that waits in its mailbox, so that it never idles."""

_TICK = 0.5
"""Seconds between two questions whether to stop."""

MAX_DEATHS = 20
"""Deaths of client actors after which a run gives up: something kills them again and again."""


def settle() -> None:
    """Have the garbage collector pass over all objects that there are now. For processes of rayfl's own."""
    gc.collect()
    gc.freeze()


class _HostActor(ClientHost):
    """A client actor: a :class:`ClientHost` in a process of its own, with one thread."""

    def __init__(self, stages: Any, host: HostSpec) -> None:
        torch.set_num_threads(1)
        threadpool_limits(1)
        super().__init__(stages, host)
        self._settled = False

    @override
    def train(self, job: TrainJob, *objects: Any) -> Any:
        answer = super().train(job, *objects)
        if not self._settled:
            # What the libraries have set up by now stays. Without this a tenth of the time of small steps
            # goes into looking through it for garbage, again and again.
            settle()
            self._settled = True
        return answer


class RayBackend(Backend):
    """Client and LPS actors on a Ray cluster that is already connected.

    Args:
        actors: number of client actors.
        num_cpus, num_gpus: what Ray reserves for each; may be fractions.
        servers: number of LPS actors (no CPU is reserved: they wait nearly always).
    """

    def __init__(self, actors: int, num_cpus: float, num_gpus: float, servers: int) -> None:
        self.actors = actors
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        server = ray.remote(LocalServer).options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
        self._servers = [server.remote() for _ in range(servers)]
        self._hosts: list[Any] = []
        self._deaths = 0

    @override
    def put(self, value: Any) -> Ref:
        return ray.put(value)

    @override
    def get(self, ref: Ref) -> Any:
        with plain_errors():
            return ray.get(ref)

    @override
    def start(self, stages: Ref, host: HostSpec) -> None:
        self._start = (stages, host)
        self._hosts = [self._new_host() for _ in range(self.actors)]

    def _new_host(self) -> Any:
        return ray.remote(_HostActor).options(**self._resources).remote(*self._start)

    @override
    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, list[Any]]]:
        free = deque(i for i in longest_first(tasks) if tasks[i].home is None)
        pinned: list[deque[int]] = [deque() for _ in self._hosts]
        for i in longest_first(tasks):
            home = tasks[i].home
            if home is not None:
                pinned[home % self.actors].append(i)
        running: list[deque[int]] = [deque() for _ in self._hosts]
        refs: dict[Any, tuple[int, int, list[Ref]]] = {}  # first ref -> actor, task, all refs

        def feed() -> None:
            for depth in range(IN_FLIGHT):
                for actor, queue in enumerate(running):
                    if len(queue) > depth:
                        continue
                    source = pinned[actor] or free
                    if source:
                        self._submit(tasks, source.popleft(), actor, running, refs)

        feed()
        while refs:
            ready, _ = ray.wait(list(refs), num_returns=1, fetch_local=False, timeout=_TICK)
            self.tick()
            if not ready:
                continue
            actor, index, answer = refs.pop(ready[0])
            try:
                first = self.get(answer[0])
            except RayActorError as error:
                lost = [index, *(i for a, i, _ in refs.values() if a == actor)]
                for key in [key for key, (a, _, _) in refs.items() if a == actor]:
                    del refs[key]
                self._replace(actor, error)
                running[actor].clear()
                for i in reversed(lost):
                    (free if tasks[i].home is None else pinned[actor]).appendleft(i)
                feed()
                continue
            running[actor].remove(index)
            feed()
            yield index, [first, *answer[1:]]

    def _submit(
        self,
        tasks: Sequence[Task],
        index: int,
        actor: int,
        running: list[deque[int]],
        refs: dict[Any, tuple[int, int, list[Ref]]],
    ) -> None:
        task = tasks[index]
        answer = getattr(self._hosts[actor], task.method).options(num_returns=task.returns).remote(*task.args)
        answer = [answer] if task.returns == 1 else answer
        running[actor].append(index)
        refs[answer[0]] = (actor, index, answer)

    def _replace(self, actor: int, error: RayActorError) -> None:
        """A worker died (killed, out of memory, its node lost): start another in its place."""
        self._deaths += 1
        if getattr(error, "actor_init_failed", False) or self._deaths > MAX_DEATHS:
            raise RayflError(
                f"client actors keep dying ({self._deaths} so far): {error}".split("\n")[0]
            ) from error
        self._hosts[actor] = self._new_host()

    @override
    def call(self, function: Callable[..., Any], *args: Any) -> Ref:
        # No CPU is reserved: the client actors hold them all, and wait while this runs.
        return ray.remote(function).options(num_cpus=0).remote(*args)

    @override
    def serve(self, server: int, method: str, *args: Any, returns: int = 1) -> list[Ref]:
        lps = self._servers[server % len(self._servers)]
        answer = getattr(lps, method).options(num_returns=returns).remote(*args)
        return [answer] if returns == 1 else list(answer)

    @override
    def pids(self) -> list[int]:
        return list(self.get([host.pid.remote() for host in self._hosts]))

    @override
    def close(self) -> None:
        for actor in [*self._hosts, *self._servers]:
            ray.kill(actor)
        self._hosts, self._servers = [], []


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what the remote code raised, not Ray's wrapper around it."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RayflError):
            raise error.cause from None
        raise
