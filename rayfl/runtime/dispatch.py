"""Distributes tasks to client actors, and repeats them on other actors when an actor dies or hangs.

Work is sent only to actors that have answered. An actor that dies is replaced by a new one, which gets work
once it has answered. If it never does (its node is gone, and there is no other) the remaining actors continue
without it. A crew of variable size works the same way: Ray is asked for the largest number immediately and
places the actors as nodes join.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from rayfl.backend import Done, Ref, Task, bundles, laid_out
from rayfl.errors import RayflError, one_line
from rayfl.runtime.processes import TICK, Deadlines, Deaths, Process, Silence, died, plain_errors
from rayfl.runtime.remote import Call

IN_FLIGHT = 2
"""Messages per actor: one that it works on and one that waits in its mailbox, so that it is never idle."""

_MAX_LOST = 5
"""After this many actors have died while working on one message, its work is considered the cause."""

_MISSING_AFTER = 10.0
"""Seconds after which an actor that has not answered counts as missing."""

_NO_ACTOR_TIMEOUT = 900.0
"""Seconds to wait for a client actor if there is none at all."""


@dataclass
class _Message:
    """Tasks that are sent together.

    Attributes:
        tasks: their indices in the list of tasks.
        home: the actor that they are pinned to; None for any.
        lost: how many actors have died while working on it.
    """

    tasks: list[int]
    home: int | None
    lost: int = 0


@dataclass
class _Sent:
    """A message that was sent.

    Attributes:
        message: what was sent.
        slot: that of the actor.
        rest: the refs of its results except the first.
        silence: for how long the actor has worked on it.
    """

    message: _Message
    slot: int
    rest: list[Ref]
    silence: Silence = field(default_factory=Silence)


class Crew:
    """The client actors, one per slot.

    Args:
        size: the largest number of actors; there may be room for fewer.
        new: asks Ray for an actor for this slot.
        deaths: counts actors that die.
        say: called with a line of text.
    """

    def __init__(
        self, size: int, new: Callable[[int], Any], deaths: Deaths, say: Callable[[str], None]
    ) -> None:
        self._new_actor, self.deaths, self._say = new, deaths, say
        self.members = [self._process(slot) for slot in range(size)]
        self._lost: set[int] = set()  # slots whose actor died and whose new actor has not answered
        self._reported: set[int] = set()  # those that were reported

    def _process(self, slot: int) -> Process:
        return Process.of(f"client actor {slot}", self._new_actor(slot))

    @property
    def present(self) -> list[int]:
        """The slots of the actors that have answered."""
        return [slot for slot, process in enumerate(self.members) if process.where is not None]

    @property
    def coming(self) -> list[Ref]:
        """The pending first answers."""
        return [process.hello for process in self.members if process.where is None]

    @property
    def likely(self) -> int:
        """How many actors are present or will be soon; at least one."""
        return max(1, sum(not self.missing(slot) for slot in range(len(self.members))))

    def missing(self, slot: int) -> bool:
        """Whether the actor of this slot has not answered for so long that it may never do so."""
        process = self.members[slot]
        return process.where is None and time.monotonic() - process.begun > _MISSING_AFTER

    def replace(self, slot: int, error: Exception | None) -> None:
        """Ask for a new actor, because one has died, or is killed here after a timeout (``error`` is None).

        Raises:
            RayflError: if actors keep dying.
        """
        old = self.members[slot]
        if error is None:
            old.kill()
        old.drop()
        if old.where is not None:
            self._lost.add(slot)
        if error is not None:  # after a timeout, the limit on lost messages applies
            self.deaths.one(error, None if old.where is None else old.where.node)
        self.members[slot] = self._process(slot)

    def greet(self) -> None:
        """Record which actors have answered; report those that are missing or back.

        Raises:
            RayflError: if there has been no actor for a long time.
        """
        for slot, process in enumerate(self.members):
            late = self.missing(slot) and slot not in self._lost
            try:
                ready = process.greet()
            except RayError as error:
                if not died(error):
                    raise
                self.replace(slot, error)
                continue
            if ready:
                self._lost.discard(slot)
                if late or slot in self._reported:
                    self._reported.discard(slot)
                    how = "has joined" if late else "is back"
                    self._say(f"{process} {how}: {len(self.present)} are present")
        missing = {slot for slot in self._lost if self.missing(slot)}
        if missing - self._reported:
            self._reported |= missing
            remaining = len(self.present)
            what = f"continuing with {remaining}" if remaining else "none is left, waiting for room for one"
            self._say(f"client actors lost: {what}")
        waited = time.monotonic() - max(process.begun for process in self.members)
        if not self.present and waited > _NO_ACTOR_TIMEOUT:
            raise RayflError(
                f"no client actor could be started for {_NO_ACTOR_TIMEOUT / 60:.0f} minutes; check that the "
                "cluster has a node with room for one ('ray status')"
            )


class Dispatch:
    """Executes tasks on a crew, in any order.

    Args:
        tasks: what to do.
        crew: the actors.
        deadlines: how long an actor may be silent.
        current: replaces refs of lost results by those of the second attempt.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        crew: Crew,
        deadlines: Deadlines,
        current: Callable[[Sequence[Any]], list[Any]],
    ) -> None:
        self._tasks, self._crew, self._deadlines, self._current_refs = tasks, crew, deadlines, current
        size = len(crew.members)
        homes: dict[int | None, list[int]] = {}
        for i, task in enumerate(tasks):
            homes.setdefault(None if task.home is None else task.home % size, []).append(i)
        self._unpinned: deque[_Message] = deque()
        self._pinned: list[deque[_Message]] = [deque() for _ in range(size)]
        for home, numbers in homes.items():
            groups = bundles([tasks[i] for i in numbers], crew.likely if home is None else 1)
            self._queue(home).extend(_Message([numbers[i] for i in bundle], home) for bundle in groups)
        self._in_flight: dict[Ref, _Sent] = {}

    @property
    def busy(self) -> int:
        """How many actors have work."""
        return len({sent.slot for sent in self._in_flight.values()})

    def _queue(self, home: int | None) -> deque[_Message]:
        return self._unpinned if home is None else self._pinned[home]

    def run(self, tick: Callable[[], None]) -> Iterator[Done]:
        """Execute the tasks; yields each when it finishes.

        Args:
            tick: called regularly while waiting; an error that it raises ends the wait.
        """
        looked = time.monotonic()
        self._crew.greet()
        while self._in_flight or self._unpinned or any(self._pinned):
            self._feed()
            waited_for = [*self._in_flight, *self._crew.coming]
            ready, _ = ray.wait(waited_for, num_returns=1, fetch_local=False, timeout=TICK)
            tick()
            if not ready or ready[0] not in self._in_flight or time.monotonic() - looked > TICK:
                looked = time.monotonic()
                self._crew.greet()
                self._replace_silent()
            if ready and ready[0] in self._in_flight:
                yield from self._finish(ready[0])

    def _feed(self) -> None:
        """Send work to the actors that have answered: one message to each of them, then a second one."""
        waiting = [0] * len(self._crew.members)
        for sent in self._in_flight.values():
            waiting[sent.slot] += 1
        for slot, queue in enumerate(self._pinned):
            if queue and self._crew.missing(slot):
                self._unpinned.extend(queue)
                queue.clear()
        present = self._crew.present
        for depth in range(IN_FLIGHT):
            for slot in present:
                source = self._pinned[slot] or self._unpinned
                if waiting[slot] <= depth and source:
                    self._send(source.popleft(), slot)
                    waiting[slot] += 1

    def _send(self, message: _Message, slot: int) -> None:
        tasks = [self._tasks[i] for i in message.tasks]
        layouts = [laid_out(task.objects) for task in tasks]
        calls = [
            Call(task.method, task.job, names, task.keeps)
            for task, (names, _) in zip(tasks, layouts, strict=True)
        ]
        refs = self._current_refs([ref for _, some in layouts for ref in some])
        count = 1 + sum(len(task.keeps) for task in tasks)
        answer = self._crew.members[slot].actor.perform.options(num_returns=count).remote(calls, *refs)
        first, *rest = [answer] if count == 1 else list(answer)
        self._in_flight[first] = _Sent(message, slot, rest)

    def _finish(self, first: Ref) -> Iterator[Done]:
        """Take finished work; if the actor has died, its work is queued again."""
        slot = self._in_flight[first].slot
        try:
            with plain_errors():
                values = ray.get(first)
        except RayError as error:
            if not died(error):
                raise
            self._requeue(slot, error)
            return
        done = self._in_flight.pop(first)
        self._crew.deaths.none()
        method, cost, work = self._work_of(done.message)
        self._deadlines.measured(method, done.silence.seconds, cost, work)
        for ref, sent in self._in_flight.items():  # the actor now works on the next message
            if sent.slot == slot:
                self._in_flight[ref].silence = Silence()
        self._feed()
        rest = iter(done.rest)
        for i, report in zip(done.message.tasks, values, strict=True):
            yield Done(i, report, {key: next(rest) for key in self._tasks[i].keeps}, f"client:{slot}")

    def _requeue(self, slot: int, error: Exception | None) -> None:
        """Handle a dead actor: its messages are queued again, the one that it worked on first.

        Raises:
            RayflError: if actors keep dying, in general or over the same work.
        """
        messages = {ref: sent.message for ref, sent in self._in_flight.items() if sent.slot == slot}
        for ref in messages:
            del self._in_flight[ref]
        foremost = next(iter(messages.values()), None)
        if foremost is not None:
            foremost.lost += 1
            if foremost.lost > _MAX_LOST:
                raise RayflError(_fatal_message(foremost, self._tasks, error)) from error
        for message in reversed(messages.values()):
            self._queue(message.home).appendleft(message)
        self._crew.replace(slot, error)

    def _work_of(self, message: _Message) -> tuple[str, float, float]:
        """The method of the work, its cost in a unit of this method, and in a unit that all methods share."""
        tasks = [self._tasks[i] for i in message.tasks]
        return tasks[0].method, sum(task.cost for task in tasks), sum(task.work for task in tasks)

    def _replace_silent(self) -> None:
        """Kill the actors that have worked on a message for too long."""
        foremost: dict[int, tuple[Ref, _Sent]] = {}
        for ref, sent in self._in_flight.items():
            foremost.setdefault(sent.slot, (ref, sent))
        for slot, (ref, sent) in foremost.items():
            method, cost, work = self._work_of(sent.message)
            allowed = self._deadlines.seconds(method, cost, sent.message.lost, work)
            if sent.silence.seconds >= allowed and ray.wait([ref], timeout=0, fetch_local=False)[0]:
                continue  # it has answered while others were replaced
            if self._deadlines.over(sent.silence, allowed, self._crew.members[slot]):
                self._deadlines.missed(method, sent.message.lost)
                self._requeue(slot, None)


def _fatal_message(message: _Message, tasks: Sequence[Task], error: Exception | None) -> str:
    """The message if one actor after another dies over the same work."""
    clients = [int(c) for i in message.tasks for c in getattr(tasks[i].job, "clients", ())]
    whose = "" if not clients else f" of clients {min(clients)} to {max(clients)}"
    if error is None:
        return (
            f"{message.lost} client actors in a row did not answer in time over the same work{whose}; if it "
            "is only slow, a smaller execution.block_size takes less time; execution.deadline gives more"
        )
    last = one_line(error)
    return (
        f"{message.lost} client actors in a row died over the same work{whose} (the last: {last}); if "
        "memory is short, fewer execution.actors or a smaller execution.block_size need less"
    )
