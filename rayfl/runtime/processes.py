"""The Ray processes of a run, as the driver sees them: present, silent, or dead.

Every failure that Ray reports has one of three outcomes: the process is dead and its work is repeated
(:func:`died`); results are lost with their node, and the driver goes back to a checkpoint
(:class:`~rayfl.errors.ResultsLost`); or the run ends in one line (:func:`plain_errors`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfl.backend import Ref
from rayfl.errors import RayflError, ResultsLost, one_line
from rayfl.runtime.remote import Whereabouts, kill

TICK = 0.5
"""Seconds between two checks of whether to stop."""

MAX_DEATHS = 20
"""After this many deaths without any completed work in between, a run gives up."""

_FIRST_REPORT = 30.0
"""Seconds of silence after which it is reported for the first time; then after twice, four times, ... as
long.
"""

_LEAST_DEADLINE = 300.0
"""Seconds of silence that are always allowed, unless ``execution.deadline`` says otherwise."""

_TIMES_LONGEST = 20.0
"""Work may take this many times as long as the slowest work of its size so far."""

_HURRIED_DEADLINE = 10.0
"""Seconds of silence that are allowed after the run was asked to stop."""

_DEATH_ERRORS = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, TaskCancelledError)
"""What Ray raises if the process that should answer is gone. Not all of them are RayActorErrors."""

_FULL_ERRORS = {
    ObjectStoreFullError: "the object store is full; give Ray more memory (ray start --object-store-memory) "
    "or train fewer clients a round",
    OutOfDiskError: "the disk to which Ray spills objects is full; free some space or set RAY_TMPDIR",
}


def died(error: Exception) -> bool:
    """Whether the process that should answer, or one that it depends on, is gone."""
    return isinstance(error.cause if isinstance(error, RayTaskError) else error, _DEATH_ERRORS)


def _last_error(text: str) -> str:
    """The error at the end of a traceback of Ray's, with its file and line."""
    lines = text.strip().splitlines()
    places = re.findall(r'^ *File "([^"<]+)", line (\d+)', text, re.MULTILINE)
    where = ":".join(places[-1]) + ": " if places else ""
    return where + (one_line(lines[-1]) if lines else "")


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what the remote code raised instead of Ray's wrapper, and Ray's own failures in one line.

    Raises:
        RayflError: in place of Ray's errors.
        ResultsLost: if an object was lost with its node.
        RayError: if a process died; see :func:`died`.
    """
    try:
        yield
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RayflError):
            raise cause from None
        if died(error):
            raise
        if isinstance(cause, ObjectLostError):
            raise ResultsLost("a node was lost, and with it results of the round") from error
        for kind, text in _FULL_ERRORS.items():
            if isinstance(cause, kind):
                raise RayflError(text) from error
        if isinstance(error, RayTaskError) and not isinstance(cause, RayError):
            raise
        raise RayflError(f"Ray failed ({type(cause).__name__}): {one_line(cause)}") from error


@dataclass
class Process:
    """An actor.

    Attributes:
        name: for messages.
        actor: its handle.
        hello: its first answer, by reference: its whereabouts.
        where: that answer, once it has arrived.
        begun: when the actor was requested.
    """

    name: str
    actor: Any
    hello: Ref
    where: Whereabouts | None = None
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, name: str, actor: Any) -> Process:
        """An actor that has just been requested or restarted."""
        return cls(name, actor, actor.whereabouts.remote())

    def __str__(self) -> str:
        return self.name if self.where is None else f"{self.name} ({self.where})"

    def greet(self) -> bool:
        """Whether the actor has answered.

        Raises:
            RayError: if it died first.
        """
        if self.where is None and ray.wait([self.hello], timeout=0, fetch_local=False)[0]:
            with plain_errors():
                self.where = ray.get(self.hello)
        return self.where is not None

    def kill(self) -> None:
        """End the process even if it is stopped (SIGSTOP), which Ray's own kill cannot do."""
        if self.where is None:
            return
        if self.where.node == ray.get_runtime_context().get_node_id():
            kill(self.where)
            return
        there = NodeAffinitySchedulingStrategy(self.where.node, soft=False)
        ray.remote(kill).options(num_cpus=0, scheduling_strategy=there, max_retries=0).remote(self.where)

    def drop(self) -> None:
        """Release the actor; it will not be used again."""
        with contextlib.suppress(RayError):  # the actor or its node may be gone
            ray.kill(self.actor)


class Silence:
    """How long an answer has been awaited."""

    def __init__(self) -> None:
        self._begun, self._next_report = time.monotonic(), _FIRST_REPORT

    @property
    def seconds(self) -> float:
        """Seconds waited so far."""
        return time.monotonic() - self._begun

    def word(self) -> bool:
        """Whether it is time for another message; the intervals grow."""
        due = self.seconds >= self._next_report
        while self.seconds >= self._next_report:
            self._next_report *= 2
        return due


class Deadlines:
    """How long processes may be silent.

    Args:
        fixed: seconds; None: twenty times the longest duration of such work so far, but at least five
            minutes. For a kind of work that has never been completed it assumes the pace of other work.
        say: called with a line of text.
    """

    def __init__(self, fixed: float | None, say: Callable[[str], None]) -> None:
        self.fixed, self._say = fixed, say
        self._longest: dict[str, float] = {}
        self._pace = 0.0  # the longest duration per unit of work, of any kind
        self._missed: dict[str, int] = {}  # how often work of a kind was lost since some was completed
        self.hurried = False  # whether the run has been asked to stop

    def measured(self, method: str, seconds: float, cost: float = 1.0, work: float = 0.0) -> None:
        """Record how long work has taken.

        Args:
            method: its kind.
            seconds: the duration.
            cost: in a unit of this kind of work.
            work: in a unit that all kinds share; 0 if unknown.
        """
        self._longest[method] = max(self._longest.get(method, 0.0), seconds / max(cost, 1e-9))
        self._missed.pop(method, None)
        if work > 0:
            self._pace = max(self._pace, seconds / work)

    def missed(self, method: str, lost: int) -> None:
        """Record that work was given up because its process was silent, though it may just be slow.

        Args:
            method: its kind.
            lost: how often this very work had been lost before.
        """
        self._missed[method] = max(self._missed.get(method, 0), lost) + 1

    def seconds(self, method: str, cost: float = 1.0, lost: int = 0, work: float = 0.0) -> float:
        """The time allowed for such work, doubled each time that it was lost before, because it may just be
        slow. Unless the time is given, this applies to all work of that kind until some of it is completed.

        Args:
            method, cost, work: as for :meth:`measured`.
            lost: how often this very work was lost.
        """
        allowed = self.fixed
        if allowed is None:
            lost = max(lost, self._missed.get(method, 0))
            usual = self._longest[method] * cost if method in self._longest else self._pace * work
            allowed = max(_LEAST_DEADLINE, _TIMES_LONGEST * usual)
        return (min(allowed, _HURRIED_DEADLINE) if self.hurried else allowed) * 2.0**lost

    def over(self, silence: Silence, allowed: float, process: object) -> bool:
        """Whether a silence has lasted too long; reports that, and before that how long it has lasted."""
        silent = f"{process} has been silent for {silence.seconds:.0f} s"
        if silence.seconds >= allowed:
            self._say(f"{silent}: it is killed, and its work is repeated")
            return True
        if silence.word():
            self._say(f"{silent}; after {allowed:.0f} s it is killed, and its work repeated")
        return False


def alive(node: str) -> bool:
    """Whether Ray considers a node alive; a lost node never returns under the same id."""
    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


class Deaths:
    """Counts deaths of processes, and gives up if there are many without any progress."""

    def __init__(self) -> None:
        self._count = 0
        self._nodes: set[str] = set()

    def none(self) -> None:
        """Work was completed: reset the count."""
        self._count = 0

    def one(self, error: Exception | None, node: str | None = None) -> None:
        """A process died, or was killed because it did not answer (None).

        Args:
            error: the error that reported the death.
            node: of the process; all deaths with one node count once.

        Raises:
            RayflError: if an actor cannot even start, or too many have died.
        """
        if node is not None and node in self._nodes:
            return
        if node is not None and not alive(node):
            self._nodes.add(node)
        self._count += 1
        if getattr(error, "actor_init_failed", False):
            raise RayflError(f"an actor cannot start: {_last_error(str(error))}") from error
        if self._count > MAX_DEATHS:
            why = "they did not answer" if error is None else one_line(error)
            raise RayflError(f"actors keep dying ({self._count} so far): {why}") from error
        if self._count > 1:  # an unreachable node counts as alive until Ray notices
            time.sleep(min(0.05 * 2**self._count, 5.0))
