"""Where work is done: the same calls in this process (inline) or on a Ray cluster.

A *ref* is whatever a backend's :meth:`Backend.put` returns: with Ray an object reference, inline the value
itself. Code above passes refs along and never looks inside.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayfl.clients.jobs import HostSpec

Ref = Any

MESSAGE_WORK = 1e8
"""Parameters times samples that take a core some ten milliseconds: with less, sending shows."""

_SPARE = 4
"""Messages for each actor that leave enough to even out who is faster."""


@dataclass(frozen=True)
class Task:
    """A call of a :class:`~rayfl.clients.host.ClientHost` method.

    Attributes:
        method: its name.
        args: the message and then refs.
        cost: expected work in any unit; the longest tasks go first.
        returns: how many objects it returns; the first is fetched, the others stay where they are.
        home: the actor that must do it, or None for any.
        work: parameters times samples, if it is training or testing: tasks of little work share a message.
    """

    method: str
    args: tuple[Any, ...]
    cost: float
    returns: int = 1
    home: int | None = None
    work: float = math.inf


class Backend(ABC):
    """The room between the driver and whoever does the work."""

    actors: int
    tick: Callable[[], None] = staticmethod(lambda: None)
    """Called now and then while waiting; what it raises ends the wait."""
    say: Callable[[str], None] = staticmethod(lambda text: None)
    """Called with a line of text when something is wrong with a process."""

    @abstractmethod
    def put(self, value: Any) -> Ref:
        """Share a value."""

    @abstractmethod
    def get(self, ref: Ref) -> Any:
        """Fetch a value, or a list of values for a list of refs."""

    @abstractmethod
    def start(self, stages: Ref, host: HostSpec) -> None:
        """Start the client actors."""

    @abstractmethod
    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, list[Any]]]:
        """Do the tasks, in any order and on any actor.

        Yields, as they finish, (position in ``tasks``, [first value, ref, ref, ...]). A task whose actor died
        is done again elsewhere.
        """

    @abstractmethod
    def call(self, function: Callable[..., Any], *args: Any) -> Ref:
        """A remote task: call a plain function on values and refs."""

    @abstractmethod
    def serve(self, server: int, method: str, *args: Any, returns: int = 1) -> list[Ref]:
        """Call a :class:`LocalServer` method on LPS number ``server`` (modulo how many there are)."""

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
