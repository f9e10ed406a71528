"""The backend without Ray: everything in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from rayfl.backend import (
    Activity,
    Answer,
    Backend,
    Done,
    Joined,
    Key,
    Objects,
    Received,
    Ref,
    Task,
    longest_first,
    whole,
)
from rayfl.clients.host import ClientHost
from rayfl.clients.jobs import HostSpec
from rayfl.clients.partial import LARGE
from rayfl.files import OnDisk
from rayfl.linalg import libraries
from rayfl.memory import give_back, keep_freed
from rayfl.servers.lps import LocalServer


class InlineBackend(Backend):
    """Executes everything in this process, one task after another, the longest first."""

    def __init__(self) -> None:
        self.actors = 1
        self._server = LocalServer()
        self._large = False
        self._threads = torch.get_num_threads()
        self._limits = libraries().limit(limits=1)
        torch.set_num_threads(1)  # as in the actors, because sums depend on the number of threads

    @override
    def put(self, value: Any) -> Ref:
        return value

    @override
    def stored(self, path: Path, ref: Ref | None = None) -> Ref:
        return OnDisk(path)

    @override
    def held(self, ref: Ref) -> int:
        return 0 if isinstance(ref, OnDisk) else int(ref.nbytes)

    @override
    def get(self, ref: Ref) -> Any:
        return [_whole(each) for each in ref] if isinstance(ref, list) else _whole(ref)

    @override
    def start(self, stages: Ref, host: HostSpec) -> None:
        self._large = host.spec.P >= LARGE
        keep_freed(self._large)
        self._host = ClientHost(stages, host)

    @override
    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        for place in longest_first(tasks):
            task = tasks[place]
            answer: Answer = getattr(self._host, task.method)(task.job, _values(task.objects))
            self.tick()
            yield Done(place, answer.report, {key: answer.objects[key] for key in task.keeps}, "inline")

    @override
    def call(self, function: Callable[..., Any], *args: Any) -> Ref:
        return function(*map(_value, args))

    @override
    def serve(
        self, server: int, method: str, job: Any, objects: Objects, keeps: Sequence[Key]
    ) -> dict[Key, Ref]:
        answer: Answer = getattr(self._server, method)(job, _values(objects))
        return {key: answer.objects[key] for key in keeps}

    @override
    def mark(self) -> int:
        return 0

    @override
    def forget(self, mark: int = 0) -> None:
        pass

    @override
    def hurry(self) -> None:
        pass

    @override
    def activity(self) -> Activity:
        return Activity(1, 1, 1)

    @override
    def pids(self) -> list[int]:
        return [self._host.pid()]

    @override
    def close(self) -> None:
        torch.set_num_threads(self._threads)
        self._limits.restore_original_limits()
        if self._large:
            give_back()


def _value(ref: Ref) -> Any:
    return ref.read() if isinstance(ref, OnDisk) else ref


def _whole(ref: Ref) -> Any:
    return whole(ref.shards) if isinstance(ref, Joined) else _value(ref)


def _values(objects: Objects) -> Objects:
    return Received({key: _value(ref) for key, ref in objects.items()})
