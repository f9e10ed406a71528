"""The Ray backend: client actors with fractional resources, LPS actors, remote tasks, refs."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from threadpoolctl import threadpool_limits
from typing_extensions import override

from rayfl.errors import RayflError
from rayfl.runtime.backend import Backend, Ref, Task, bundles
from rayfl.runtime.host import ClientHost
from rayfl.runtime.jobs import HostSpec, TrainJob
from rayfl.runtime.remote import ServerActor, acknowledge

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


class _Call(NamedTuple):
    """A task in a message: the method, what goes to it by value, how many objects, and what it returns."""

    method: str
    message: tuple[Any, ...]
    objects: int
    returns: int


class _HostActor(ClientHost):
    """A client actor: a :class:`ClientHost` in a process of its own, with one thread."""

    def __init__(self, stages: Any, host: HostSpec) -> None:
        torch.set_num_threads(1)
        threadpool_limits(1)
        super().__init__(stages, host)
        self._settled = False

    def perform(self, calls: Sequence[_Call], *objects: Any) -> Any:
        """Do several tasks; the first values of all, then what else each returns, in their order."""
        firsts: list[Any] = []
        rest: list[Any] = []
        at = 0
        for call in calls:
            answer = getattr(self, call.method)(*call.message, *objects[at : at + call.objects])
            at += call.objects
            first, *more = answer if call.returns > 1 else [answer]
            firsts.append(first)
            rest += more
        return [firsts, *rest] if rest else firsts

    @override
    def train(self, job: TrainJob, *objects: Any) -> Any:
        answer = super().train(job, *objects)
        if not self._settled:
            # What the libraries have set up by now stays. Without this a tenth of the time of small steps
            # goes into looking through it for garbage, again and again.
            settle()
            self._settled = True
        return answer


class _Pending(NamedTuple):
    """A call whose end nobody has seen yet: how it is made, the refs of its results, whether it is done, and
    how often it was lost."""

    submit: Callable[[], list[Ref]]
    results: list[Ref]
    done: Ref
    lost: int = 0


class RayBackend(Backend):
    """Client and LPS actors on a Ray cluster that is already connected.

    Calls of servers and remote tasks are done again here when their process dies. Ray could do that itself,
    but for as long as a result lives it would keep all that the result was made of: a model is made of the
    last one and of sums of the clients, so nothing would ever be freed.

    Args:
        actors: number of client actors.
        num_cpus, num_gpus: what Ray reserves for each; may be fractions.
        servers: number of LPS actors (no CPU is reserved: they wait nearly always).
    """

    def __init__(self, actors: int, num_cpus: float, num_gpus: float, servers: int) -> None:
        self.actors = actors
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        server = ray.remote(ServerActor).options(num_cpus=0, max_restarts=-1, max_task_retries=0)
        self._servers = [server.remote() for _ in range(servers)]
        self._hosts: list[Any] = []
        self._deaths = 0
        self._pending: deque[_Pending] = deque()
        self._instead: dict[Ref, Ref] = {}  # results that were lost -> those of the second try

    @override
    def put(self, value: Any) -> Ref:
        return ray.put(value)

    @override
    def get(self, ref: Ref) -> Any:
        self._settle()
        with plain_errors():
            return ray.get(self._current(ref) if isinstance(ref, list) else self._current([ref])[0])

    def _current(self, args: Sequence[Any]) -> list[Any]:
        """The same with results of a second try in place of those that were lost."""
        if not self._instead:
            return list(args)
        return [self._instead.get(a, a) if isinstance(a, ray.ObjectRef) else a for a in args]

    def _submit(self, submit: Callable[[], list[Ref]]) -> list[Ref]:
        done, *results = submit()
        self._pending.append(_Pending(submit, results, done))
        return results

    def _settle(self) -> None:
        """Wait for all calls of servers and remote tasks, and make those again whose process died."""
        most = 0  # one death may take many calls with it: it counts once
        while self._pending:
            submit, results, done, lost = call = self._pending.popleft()
            try:
                with plain_errors():
                    ray.get(done)
            except RayError as error:
                if not _died(error):
                    raise
                if lost == most:
                    most += 1
                    self._count_death(error)
                done, *again = submit()
                self._instead.update(zip(results, again, strict=True))
                self._pending.appendleft(call._replace(done=done, lost=lost + 1))

    @override
    def start(self, stages: Ref, host: HostSpec) -> None:
        self._start = (stages, host)
        self._hosts = [self._new_host() for _ in range(self.actors)]

    def _new_host(self) -> Any:
        return ray.remote(_HostActor).options(**self._resources).remote(*self._start)

    @override
    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, list[Any]]]:
        anybody: list[int] = []
        own: list[list[int]] = [[] for _ in self._hosts]
        for i, task in enumerate(tasks):
            (anybody if task.home is None else own[task.home % self.actors]).append(i)
        free = deque(_bundled(tasks, anybody, self.actors))
        pinned = [deque(_bundled(tasks, mine, 1)) for mine in own]
        running = [0] * self.actors
        sent: dict[Any, tuple[int, list[int], list[Ref]]] = {}  # first ref -> actor, tasks, the other refs

        def feed() -> None:
            for depth in range(IN_FLIGHT):
                for actor in range(self.actors):
                    source = pinned[actor] or free
                    if running[actor] <= depth and source:
                        bundle = source.popleft()
                        first, *rest = self._send([tasks[i] for i in bundle], actor)
                        sent[first] = actor, bundle, rest
                        running[actor] += 1

        self._settle()
        feed()
        while sent:
            ready, _ = ray.wait(list(sent), num_returns=1, fetch_local=False, timeout=_TICK)
            self.tick()
            if not ready:
                continue
            actor, bundle, rest = sent.pop(ready[0])
            try:
                with plain_errors():
                    firsts = ray.get(ready[0])
            except RayActorError as error:
                lost = [bundle, *(b for a, b, _ in sent.values() if a == actor)]
                sent = {ref: what for ref, what in sent.items() if what[0] != actor}
                self._replace(actor, error)
                running[actor] = 0
                for bundle in reversed(lost):
                    (free if tasks[bundle[0]].home is None else pinned[actor]).appendleft(bundle)
                feed()
                continue
            running[actor] -= 1
            feed()
            for i, first in zip(bundle, firsts, strict=True):
                count = tasks[i].returns - 1
                yield i, [first, *rest[:count]]
                rest = rest[count:]

    def _send(self, tasks: Sequence[Task], actor: int) -> list[Ref]:
        calls = [_Call(t.method, t.args[:1], len(t.args) - 1, t.returns) for t in tasks]
        refs = self._current([ref for task in tasks for ref in task.args[1:]])
        count = 1 + sum(task.returns - 1 for task in tasks)
        answer = self._hosts[actor].perform.options(num_returns=count).remote(calls, *refs)
        return [answer] if count == 1 else list(answer)

    def _replace(self, actor: int, error: RayActorError) -> None:
        """A worker died (killed, out of memory, its node lost): start another in its place."""
        self._count_death(error)
        self._hosts[actor] = self._new_host()

    def _count_death(self, error: Exception) -> None:
        self._deaths += 1
        if getattr(error, "actor_init_failed", False) or self._deaths > MAX_DEATHS:
            raise RayflError(f"actors keep dying ({self._deaths} so far): {error}".split("\n")[0]) from error

    @override
    def call(self, function: Callable[..., Any], *args: Any) -> Ref:
        # No CPU is reserved: the client actors hold them all, and wait while this runs.
        task = ray.remote(acknowledge).options(num_cpus=0, max_retries=0, num_returns=2)
        return self._submit(lambda: task.remote(function, *self._current(args)))[0]

    @override
    def serve(self, server: int, method: str, *args: Any, returns: int = 1) -> list[Ref]:
        lps = self._servers[server % len(self._servers)].acknowledge.options(num_returns=1 + returns)
        return self._submit(lambda: lps.remote(method, *self._current(args)))

    @override
    def pids(self) -> list[int]:
        return list(self.get([host.pid.remote() for host in self._hosts]))

    @override
    def close(self) -> None:
        for actor in [*self._hosts, *self._servers]:
            ray.kill(actor)
        self._hosts, self._servers = [], []
        self._pending.clear()


def _bundled(tasks: Sequence[Task], some: Sequence[int], actors: int) -> list[list[int]]:
    """Which of some tasks are sent together."""
    return [[some[i] for i in bundle] for bundle in bundles([tasks[i] for i in some], actors)]


def _died(error: Exception) -> bool:
    """Whether the process that should have answered is gone, or that of something it depends on."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, RayActorError | WorkerCrashedError | OutOfMemoryError)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what the remote code raised, not Ray's wrapper around it; say in a line that a node was lost."""
    try:
        yield
    except (RayTaskError, ObjectLostError) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RayflError):
            raise cause from None
        if isinstance(cause, ObjectLostError):
            what = "a node was lost, and with it results of the round"
            raise RayflError(f"{what}; 'rayfl resume' goes on from the last checkpoint") from error
        raise
