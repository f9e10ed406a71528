"""The Ray backend: client actors with fractional resources, LPS actors, remote tasks, refs.

Failures are handled as follows:

- A process dies: others repeat its work, see :mod:`rayfl.runtime.dispatch`.
- A process hangs (it is stopped, or its disk does not answer): the silence is reported, and after a deadline
  the process is killed.
- Results are lost with their node: :class:`~rayfl.errors.ResultsLost`; the driver repeats the rounds.
- Any other error from Ray ends the run in one line, see :mod:`rayfl.runtime.processes`.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayError
from typing_extensions import override

from rayfl.backend import (
    Activity,
    Answer,
    Backend,
    Done,
    Joined,
    Key,
    Objects,
    Ref,
    Task,
    apart,
    laid_out,
    whole,
)
from rayfl.clients.host import ClientHost
from rayfl.clients.jobs import HostSpec, TrainJob
from rayfl.clients.partial import LARGE
from rayfl.files import OnDisk
from rayfl.linalg import libraries
from rayfl.memory import keep_freed
from rayfl.runtime.dispatch import Crew, Dispatch
from rayfl.runtime.placement import Placement
from rayfl.runtime.processes import TICK, Deadlines, Deaths, Process, Silence, died, plain_errors
from rayfl.runtime.remote import (
    UNRECORDED,
    Call,
    ServerActor,
    Whereabouts,
    acknowledge,
    carry_out,
    named,
    whereabouts,
)
from rayfl.runtime.resources import PerActor

_REMOTE_TASK = ray.remote(num_cpus=0, max_retries=0, num_returns=2, **UNRECORDED)(acknowledge)
"""A remote task. Ray never frees a remote function, so one serves all."""


def _references(keys: dict[Any, Any]) -> list[int]:
    """The number of references to each key, including those of this function."""
    return [sys.getrefcount(key) for key in keys]


_ONLY_KEY = _references({object(): None})[0]
"""What :func:`_references` counts for an object to which nothing but the dictionary refers."""


def _unreferenced(keys: dict[Any, Any]) -> list[Any]:
    """The keys to which nothing but the dictionary refers. (Ray's refs cannot be referred to weakly.)"""
    return [key for key, count in zip(keys, _references(keys), strict=True) if count <= _ONLY_KEY]


def settle() -> None:
    """Exclude all current objects from garbage collection (``gc.freeze``). Only for processes that rayfl
    owns.
    """
    gc.collect()
    gc.freeze()


class _HostActor(ClientHost):
    """A client actor: a :class:`ClientHost` in a separate process with one thread."""

    def __init__(self, stages: Any, host: HostSpec) -> None:
        torch.set_num_threads(1)
        libraries().limit(limits=1)
        keep_freed(host.spec.P >= LARGE)
        super().__init__(stages, host)
        self._settled = False

    def whereabouts(self) -> Whereabouts:
        """Where the actor runs; an answer means that it is ready."""
        return whereabouts()

    def perform(self, calls: Sequence[Call], *objects: Any) -> Any:
        """Execute several tasks.

        Args:
            calls: the tasks.
            objects: those of the first call, then those of the second, ...

        Returns:
            The reports of all calls, then the results that each keeps, in the same order.
        """
        reports: list[Any] = []
        results: list[Any] = []
        values = iter(objects)
        for call in calls:
            report, objects_kept = carry_out(self, call, values)
            reports.append(report)
            results += objects_kept
        return [reports, *results] if results else reports

    @override
    def train(self, job: TrainJob, objects: Objects) -> Answer:
        answer = super().train(job, objects)
        if not self._settled:
            # The objects that libraries have created by now stay alive. Without this, garbage collection
            # would scan them again and again, which takes a tenth of the time of small steps.
            settle()
            self._settled = True
        return answer


class _PendingCall(NamedTuple):
    """A call that is not known to have finished.

    Attributes:
        number: its position among all calls.
        submit: submits it (again).
        results: the refs of its results.
        done: the ref that is ready when the call is done.
        server: the LPS that executes it; None for a remote task.
        lost: how often it was lost.
    """

    number: int
    submit: Callable[[], list[Ref]]
    results: list[Ref]
    done: Ref
    server: int | None
    lost: int = 0


class RayBackend(Backend):
    """Client and LPS actors on a Ray cluster that is already connected.

    Calls of servers and remote tasks are repeated here if their process dies. Ray's own retries would keep
    the inputs of every result alive for as long as the result exists: a model depends on the previous one and
    on sums from the clients, so nothing would ever be freed.

    Args:
        actors: maximum number of client actors; those without room start when there is room.
        num_cpus, num_gpus: what Ray reserves for each client actor; may be fractions. ``num_gpus`` may be
            ``auto``: a fraction that depends on the GPU's memory.
        servers: maximum number of LPS actors (no CPU is reserved: they wait nearly always).
        deadline: seconds for which a process may be silent; None: derived from how long such work has taken.
        run: the name of the run, used in the names of actors and tasks.
        placement: the nodes on which actors are placed.
    """

    def __init__(
        self,
        actors: int,
        num_cpus: float,
        num_gpus: PerActor,
        servers: int,
        deadline: float | None = None,
        run: str = "run",
        placement: Placement = Placement(),  # noqa: B008 (it is frozen)
    ) -> None:
        self.actors, self._run, self._placement = actors, run, placement
        self._num_cpus, self._num_gpus = num_cpus, num_gpus
        options = {
            **UNRECORDED,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": 0,
            **placement.local_servers(),
        }
        self._server_options, self._server_count = options, servers
        self._servers = {0: self._new_server(0)}  # the others start when they have something to do
        self._crew: Crew | None = None
        self._dispatch: Dispatch | None = None
        self._deaths = Deaths()
        self.deadlines = Deadlines(deadline, lambda text: self.say(text))
        self._pending: deque[_PendingCall] = deque()
        self._call_count = 0
        self._replacements: dict[Ref, Ref] = {}  # lost results in use -> those of the second attempt

    @override
    def put(self, value: Any) -> Ref:
        with plain_errors():
            return ray.put(value)

    @override
    def stored(self, path: Path, ref: Ref | None = None) -> Ref:
        # Not the path: client actors on other nodes may not see this disk.
        return self.put(OnDisk(path).read()) if ref is None else ref

    @override
    def held(self, ref: Ref) -> int:
        return 0

    @override
    def get(self, ref: Ref) -> Any:
        self._await_calls()
        wanted = ref if isinstance(ref, list) else [ref]
        refs = self._current_refs([shard for each in wanted for shard in apart(each)])
        unfinished = list(dict.fromkeys(refs))
        with plain_errors():
            while unfinished:  # not all at once, so that stop requests are noticed
                _, unfinished = ray.wait(unfinished, num_returns=len(unfinished), timeout=TICK)
                self.tick()
            fetched = iter(ray.get(refs))
        values = [
            whole([next(fetched) for _ in each.shards]) if isinstance(each, Joined) else next(fetched)
            for each in wanted
        ]
        return values if isinstance(ref, list) else values[0]

    def _current_refs(self, args: Sequence[Any]) -> list[Any]:
        """The same refs, with lost results replaced by those of the second attempt."""
        if not self._replacements:
            return list(args)
        return [self._replacements.get(a, a) if isinstance(a, ray.ObjectRef) else a for a in args]

    def _submit(self, submit: Callable[[], list[Ref]], server: int | None) -> list[Ref]:
        self._drop_finished()
        done, *results = submit()
        self._pending.append(_PendingCall(self._call_count, submit, results, done, server))
        self._call_count += 1
        return results

    def _drop_finished(self) -> None:
        """Drop the finished calls, and with them references to their inputs."""
        while self._pending and ray.wait([self._pending[0].done], timeout=0, fetch_local=False)[0]:
            try:
                ray.get(self._pending[0].done)
            except RayError:
                return  # _await_calls handles it
            self._pending.popleft()

    @override
    def mark(self) -> int:
        return self._call_count

    @override
    def forget(self, mark: int = 0) -> None:
        self._pending = deque(call for call in self._pending if call.number < mark)

    @override
    def hurry(self) -> None:
        self.deadlines.hurried = True

    def _await_calls(self) -> None:
        """Wait for all calls of servers and remote tasks, and repeat those whose process died."""
        self._complete_calls()
        # Each replacement may be a model, so only those are kept whose lost result is still referred to.
        for lost in _unreferenced(self._replacements):
            del self._replacements[lost]

    def _complete_calls(self) -> None:
        most_lost = 0  # many calls may be lost with one death, which counts once
        while self._pending:
            call, error = self._pending[0], None
            try:
                if self._await_answer(call):
                    with plain_errors():
                        ray.get(call.done)
                    self._pending.popleft()
                    self._deaths.none()
                    continue
            except RayError as raised:
                if not died(raised):
                    raise
                # Drop the traceback: its frames refer to the error, and this frame to the call: a cycle.
                error = raised.with_traceback(None)
            if call.lost == most_lost:
                most_lost += 1
                self._deaths.one(error)
            if call.server is not None:
                server = self._servers[call.server]
                self._servers[call.server] = Process.of(server.name, server.actor)  # Ray has restarted it
            done, *new_results = call.submit()
            self._replacements.update(zip(call.results, new_results, strict=True))
            self._pending[0] = call._replace(done=done, lost=call.lost + 1)

    def _await_answer(self, call: _PendingCall) -> bool:
        """Wait for the end of a call; false if it was silent for too long and was abandoned."""
        server = None if call.server is None else self._servers[call.server]
        silence = Silence()
        while not ray.wait([call.done], timeout=TICK, fetch_local=False)[0]:
            self.tick()
            if server is not None:
                server.greet()
            allowed = self.deadlines.seconds("call", lost=call.lost)
            if self.deadlines.over(silence, allowed, server or "a remote task"):
                if server is None:
                    ray.cancel(call.done, force=True)
                else:
                    server.kill()
                return False
        self.deadlines.measured("call", silence.seconds)
        return True

    @override
    def start(self, stages: Ref, host: HostSpec) -> None:
        actor = ray.remote(_HostActor)
        places = self._placement.of_clients(self.actors, self._num_cpus, self._num_gpus)
        started = set[int]()

        def new(slot: int) -> Any:
            if slot in started:
                places[slot] = self._placement.again(places[slot], self._num_gpus)
            started.add(slot)
            options = {**UNRECORDED, **named(self._run, f"client:{slot}"), **places[slot]}
            actor_host = replace(host, gpu_fraction=options["num_gpus"])
            return actor.options(**options).remote(stages, actor_host)

        self._crew = Crew(self.actors, new, self._deaths, lambda text: self.say(text))

    @override
    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        assert self._crew is not None, "start comes first"
        self._await_calls()
        self._dispatch = Dispatch(tasks, self._crew, self.deadlines, self._current_refs)
        return self._dispatch.run(self.tick)

    @override
    def call(self, function: Callable[..., Any], *args: Any) -> Ref:
        # No CPU is reserved: the client actors hold them all and are idle while this runs.
        name = f"rayfl:{self._run}:{getattr(function, '__name__', 'task')}"
        task = _REMOTE_TASK.options(name=name, **self._placement.servers())
        return self._submit(lambda: task.remote(function, *self._current_refs(args)), None)[0]

    @override
    def serve(
        self, server: int, method: str, job: Any, objects: Objects, keeps: Sequence[Key]
    ) -> dict[Key, Ref]:
        names, object_refs = laid_out(objects)
        slot, call = server % self._server_count, Call(method, job, names, tuple(keeps))
        if slot not in self._servers:
            self._servers[slot] = self._new_server(slot)
        lps = self._servers[slot].actor.perform.options(num_returns=1 + len(keeps))
        refs = self._submit(lambda: lps.remote(call, *self._current_refs(object_refs)), slot)
        return dict(zip(keeps, refs, strict=True))

    def _new_server(self, slot: int) -> Process:
        options = {**self._server_options, **named(self._run, f"lps:{slot}")}
        return Process.of(f"LPS actor {slot}", ray.remote(ServerActor).options(**options).remote())

    @override
    def activity(self) -> Activity:
        present = len(self._crew.present) if self._crew is not None else 0
        return Activity(present, self.actors, 0 if self._dispatch is None else self._dispatch.busy)

    @override
    def pids(self) -> list[int]:
        assert self._crew is not None, "start comes first"
        return [process.where.pid for process in self._crew.members if process.where is not None]

    @override
    def close(self) -> None:
        for process in [*(self._crew.members if self._crew else ()), *self._servers.values()]:
            process.drop()
        self._crew, self._dispatch, self._servers = None, None, {}
        self._pending.clear()
