"""The interface to the processes that do the work: this one (inline), or actors of a Ray cluster.

A *ref* is what :meth:`Backend.put` returns (an object reference with Ray, the value itself inline), or a
:class:`Joined`. Code outside the backends passes refs along and never looks inside.
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
"""Parameters times samples that take one core about ten milliseconds; with less work in a message, the time
to send it is noticeable."""

_MESSAGES_PER_ACTOR = 4
"""Messages per actor, enough to balance the load between fast and slow actors."""


Key = tuple[str, int | str | tuple[int, int]]
"""The kind of an object and its index, ``("model", 3)``; for one of its shards, ``("sum", (3, 0))``."""

Objects = Mapping[Key, Any]
"""Objects by key: refs in the driver, the values themselves in the process that does the work."""


@dataclass(frozen=True, eq=False)
class Joined:
    """A ref to an array whose shards, along its last axis, are in different places; the receiver gets the
    whole array.
    """

    shards: tuple[Ref, ...]

    @staticmethod
    def of(shards: Sequence[Ref]) -> Ref:
        """A ref to the array with these shards; a single shard is the array itself."""
        return shards[0] if len(shards) == 1 else Joined(tuple(shards))


Names = tuple[tuple[Key, int], ...]
"""Keys of objects, each with the number of shards that are sent; 0 if the object is not sharded."""


def apart(ref: Ref) -> tuple[Ref, ...]:
    """The refs to the shards of an array; an array without shards counts as one shard."""
    return ref.shards if isinstance(ref, Joined) else (ref,)


def laid_out(objects: Objects) -> tuple[Names, list[Ref]]:
    """The names of objects, and the refs to send, in the same order."""
    names = tuple((key, len(ref.shards) if isinstance(ref, Joined) else 0) for key, ref in objects.items())
    return names, [shard for ref in objects.values() for shard in apart(ref)]


class Received(Mapping[Key, Any]):
    """Objects in the process that uses them. An object sent in shards is joined at each access, so that only
    those in use exist as a whole.

    Args:
        objects: by key; an object in shards is a :class:`Joined` of values.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __getitem__(self, key: Key) -> Any:
        value = self._objects[key]
        return whole(value.shards) if isinstance(value, Joined) else value

    def __iter__(self) -> Iterator[Key]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


def received(names: Names, values: Iterator[Any]) -> Objects:
    """The objects with these names; the inverse of :func:`laid_out`, from the values that were sent."""
    objects = {
        key: Joined(tuple(next(values) for _ in range(shards))) if shards else next(values)
        for key, shards in names
    }
    return Received(objects) if any(shards for _, shards in names) else objects


def whole(shards: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The array ``(..., S)`` with these shards, cut along its last axis."""
    return np.concatenate(shards, axis=-1)


@dataclass(frozen=True)
class Task:
    """A call of a :class:`~rayfl.clients.host.ClientHost` method.

    Attributes:
        method: its name.
        job: the message, its first argument.
        objects: further input of the method, passed by reference.
        keeps: the objects of its :class:`Answer` that stay where they were made, and are passed by reference.
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
    """The result of a task, as the process that did it returns it.

    Attributes:
        report: what the driver fetches.
        objects: by key; may stay in the process that made them.
    """

    report: Any = None
    objects: Objects = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A task that is done.

    Attributes:
        task: its index in the list of tasks.
        report: what it reports.
        refs: to the objects that it keeps.
        worker: the name of the actor that did it: ``client:3``.
    """

    task: int
    report: Any
    refs: Objects
    worker: str = ""


class Activity(NamedTuple):
    """How many client actors are running, how many are wanted, and how many of them have work."""

    present: int
    wanted: int
    busy: int


class Backend(ABC):
    """The interface between the driver and the processes that do the work."""

    actors: int
    tick: Callable[[], None] = staticmethod(lambda: None)
    """Called regularly while waiting; an error that it raises ends the wait."""
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
        """Bytes of this process's memory that a shared array takes; 0 if in the object store or in a file."""

    @abstractmethod
    def get(self, ref: Ref) -> Any:
        """Fetch a value, or a list of values for a list of refs."""

    @abstractmethod
    def start(self, stages: Ref, host: Any) -> None:
        """Start the client actors, each a :class:`~rayfl.clients.host.ClientHost` of these arguments."""

    @abstractmethod
    def run(self, tasks: Sequence[Task]) -> Iterator[Done]:
        """Do the tasks, in any order and on any actor.

        Yields them as they finish. A task whose actor died is repeated on another actor.
        """

    def run_in_order(self, tasks: Sequence[Task]) -> list[Done]:
        """Do the tasks and return their results, in the order of the tasks."""
        return sorted(self.run(tasks), key=lambda done: done.task)

    @abstractmethod
    def call(self, function: Callable[..., Any], *args: Any) -> Ref:
        """A remote task: call a plain function on values and refs."""

    @abstractmethod
    def serve(
        self, server: int, method: str, job: Any, objects: Objects, keeps: Sequence[Key]
    ) -> dict[Key, Ref]:
        """Call a method of :class:`~rayfl.servers.lps.LocalServer` on LPS number ``server`` modulo the number
        of LPS actors; arguments as of a :class:`Task`. Returns refs to the objects that it keeps."""

    @abstractmethod
    def mark(self) -> int:
        """How many calls of servers and remote tasks have been made, for :meth:`forget`."""

    @abstractmethod
    def forget(self, mark: int = 0) -> None:
        """Do not repeat calls made since this mark if their results are lost: no one will ask for them."""

    @abstractmethod
    def hurry(self) -> None:
        """The run has been asked to stop: do not wait long for a process that does not answer."""

    @abstractmethod
    def activity(self) -> Activity:
        """The current activity of the client actors."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Process ids of the client actors that are ready."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


def longest_first(tasks: Sequence[Task]) -> list[int]:
    """Indices of the tasks by falling cost; ties keep their order."""
    return sorted(range(len(tasks)), key=lambda i: (-tasks[i].cost, i))


def bundles(tasks: Sequence[Task], actors: int) -> list[list[int]]:
    """Group tasks into messages, in the order of sending.

    There is at least one message per actor, if there are enough tasks, and just one per actor if all tasks
    together are little work. Grouping changes no result: each task is done as if it were sent alone.

    Args:
        tasks: those that the same actors may do.
        actors: number of these actors.

    Returns:
        The indices of the tasks of each message.
    """
    order = longest_first(tasks)
    worth = sum(min(1.0, task.work / MESSAGE_WORK) for task in tasks)
    count = min(
        len(tasks), actors if worth <= actors else max(_MESSAGES_PER_ACTOR * actors, math.ceil(worth))
    )
    if count == len(tasks):
        return [[i] for i in order]
    messages: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, index) for index in range(count)]
    for i in order:
        load, index = loads[0]
        heapq.heapreplace(loads, (load + tasks[i].cost, index))
        messages[index].append(i)
    return sorted(messages, key=lambda bundle: (-sum(tasks[i].cost for i in bundle), bundle))
