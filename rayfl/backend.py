"""Where work is done: the same calls in this process (inline) or on a Ray cluster.

A *ref* is whatever a backend's :meth:`Backend.put` returns: with Ray an object reference, inline the value
itself; or it is :class:`Joined`. Code above passes refs along and never looks inside.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ref = Any

MESSAGE_WORK = 1e8
"""Parameters times samples that take a core some ten milliseconds: with less, sending shows."""

_SPARE = 4
"""Messages for each actor that leave enough to even out who is faster."""


Key = tuple[str, int | str | tuple[int, int]]
"""What an object is, and which one of its kind: ``("model", 3)``, or a shard of it: ``("sum", (3, 0))``."""

Objects = Mapping[Key, Any]
"""Objects by their names; refs, or where the work is done what these refer to."""


@dataclass(frozen=True, eq=False)
class Joined:
    """A ref to an array whose shards, along its last axis, are at different places: whoever is sent it gets
    the whole.
    """

    shards: tuple[Ref, ...]

    @staticmethod
    def of(shards: Sequence[Ref]) -> Ref:
        """The array that has these shards; a single one is the array."""
        return shards[0] if len(shards) == 1 else Joined(tuple(shards))


Names = tuple[tuple[Key, int], ...]
"""Objects by name, and in how many shards each travels; 0 for those that have none."""


def apart(ref: Ref) -> tuple[Ref, ...]:
    """The shards of an array; what has none is its only one."""
    return ref.shards if isinstance(ref, Joined) else (ref,)


def laid_out(objects: Objects) -> tuple[Names, list[Ref]]:
    """What objects are called, and what travels, in this order."""
    names = tuple((key, len(ref.shards) if isinstance(ref, Joined) else 0) for key, ref in objects.items())
    return names, [shard for ref in objects.values() for shard in apart(ref)]


class Received(Mapping[Key, Any]):
    """Objects where they are used. One that came in shards is joined each time it is asked for, so that no
    more of them exist at once than are in use.

    Args:
        objects: by name; those in shards are :class:`Joined` values.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __getitem__(self, key: Key) -> Any:
        found = self._objects[key]
        return whole(found.shards) if isinstance(found, Joined) else found

    def __iter__(self) -> Iterator[Key]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


def received(names: Names, values: Iterator[Any]) -> Objects:
    """The objects, from what has travelled."""
    found = {
        key: Joined(tuple(next(values) for _ in range(shards))) if shards else next(values)
        for key, shards in names
    }
    return Received(found) if any(shards for _, shards in names) else found


def whole(shards: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The array ``(..., S)`` with these shards, cut along its last axis."""
    return np.concatenate(shards, axis=-1)


@dataclass(frozen=True)
class Task:
    """A call of a :class:`~rayfl.clients.host.ClientHost` method.

    Attributes:
        method: its name.
        job: the message.
        objects: what else the method gets, by reference.
        keeps: the objects of its :class:`Answer` that stay where they were made, and travel by reference.
        cost: expected work in any unit; the longest tasks go first.
        home: the actor that must do it, or None for any.
        work: parameters times samples, if it is training or testing: tasks of little work share a message.
    """

    method: str
    job: Any
    objects: Objects = field(default_factory=dict)
    keeps: tuple[Key, ...] = ()
    cost: float = 1.0
    home: int | None = None
    work: float = math.inf

    @classmethod
    def calling(cls, function: Callable[..., Any], *args: Any, cost: float = 1.0) -> Task:
        """The call of a plain function on values and refs; its :data:`RESULT` is kept."""
        objects: dict[Key, Ref] = {("argument", place): arg for place, arg in enumerate(args)}
        return cls("call", function, objects, (RESULT,), cost)


RESULT: Key = ("result", 0)
"""What a plain function returns."""


@dataclass(frozen=True)
class Answer:
    """What a process answers.

    Attributes:
        report: what the driver fetches.
        objects: what may stay where it was made.
    """

    report: Any = None
    objects: Objects = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A task that is done.

    Attributes:
        task: its place in the list of tasks.
        report: what it reports.
        refs: what it keeps, by reference.
        worker: who did it, as its actor is named: ``client:3``.
    """

    task: int
    report: Any
    refs: Objects
    worker: str = ""


class Activity(NamedTuple):
    """How many client actors there are, of how many wanted, and how many of them have work."""

    present: int
    wanted: int
    busy: int


class Backend(ABC):
    """The interface between the driver and the processes that do the work."""

    actors: int
    tick: Callable[[], None] = staticmethod(lambda: None)
    """Called now and then while waiting; what it raises ends the wait."""
    say: Callable[[str], None] = staticmethod(lambda text: None)
    """Called with a line of text when something is wrong with a process."""

    @abstractmethod
    def put(self, value: Any) -> Ref:
        """Share a value."""

    @abstractmethod
    def stored(self, path: Path, ref: Ref | None = None) -> Ref:
        """Share the array in an ``.npy`` file, which stays there as long as the result is used.

        Args:
            path: of the file.
            ref: to the same array, if it is shared already.
        """

    @abstractmethod
    def held(self, ref: Ref) -> int:
        """Bytes of this process's memory that a shared array takes; 0 where the object store has it."""

    @abstractmethod
    def get(self, ref: Ref) -> Any:
        """Fetch a value, or a list of values for a list of refs."""

    @abstractmethod
    def start(self, stages: Ref, host: Any) -> None:
        """Start the client actors, each a :class:`~rayfl.clients.host.ClientHost` of these arguments."""

    @abstractmethod
    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        """Do the tasks, in any order and on any actor.

        Yields them as they finish. A task whose actor died is done again elsewhere.
        """

    def run_in_order(self, tasks: Sequence[Task]) -> list[Done]:
        """Do the tasks; what came of each, in their order."""
        return sorted(self.run(tasks), key=lambda done: done.task)

    @abstractmethod
    def call(self, function: Callable[..., Any], *args: Any) -> Ref:
        """A remote task: call a plain function on values and refs."""

    @abstractmethod
    def serve(
        self, server: int, method: str, job: Any, objects: Objects, keeps: Sequence[Key]
    ) -> dict[Key, Ref]:
        """Call a method of :class:`~rayfl.servers.lps.LocalServer` on LPS number ``server`` (modulo how many
        there are), as a :class:`Task` is one of a client; what it keeps."""

    @abstractmethod
    def mark(self) -> int:
        """How many calls of servers and remote tasks have been made, for :meth:`forget`."""

    @abstractmethod
    def forget(self, mark: int = 0) -> None:
        """Calls made since this mark are not made again if they are lost: no one will ask for the results."""

    @abstractmethod
    def hurry(self) -> None:
        """The run has been asked to stop: do not wait long for a process that does not answer."""

    @abstractmethod
    def activity(self) -> Activity:
        """Of the client actors, now."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids of the client actors that are ready."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


def longest_first(tasks: Sequence[Task]) -> list[int]:
    """Positions of the tasks by falling cost; ties in their own order."""
    return sorted(range(len(tasks)), key=lambda i: (-tasks[i].cost, i))


def bundles(tasks: Sequence[Task], actors: int) -> list[list[int]]:
    """Which tasks are sent together, in the order of sending: for every actor one at least, if there are so
    many, and no more than that where all of them together are little work.

    Who shares a message changes no number: each task is done as if it came alone.

    Args:
        tasks: those that one set of actors may do.
        actors: how many.
    """
    order = longest_first(tasks)
    worth = sum(min(1.0, task.work / MESSAGE_WORK) for task in tasks)
    count = min(len(tasks), actors if worth <= actors else max(_SPARE * actors, math.ceil(worth)))
    if count == len(tasks):
        return [[i] for i in order]
    found: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, at) for at in range(count)]
    for i in order:
        load, at = loads[0]
        heapq.heapreplace(loads, (load + tasks[i].cost, at))
        found[at].append(i)
    return sorted(found, key=lambda bundle: (-sum(tasks[i].cost for i in bundle), bundle))
