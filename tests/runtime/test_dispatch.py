"""Which actors are taken for hung: slow ones are not, whatever their number. With a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rayfl.backend import Task
from rayfl.errors import RayflError
from rayfl.runtime import dispatch, processes
from rayfl.runtime.dispatch import Crew, Dispatch
from rayfl.runtime.processes import Deadlines, Deaths, Process


class Machine:
    """In place of Ray: actors that answer after some seconds of its clock, unless they are killed before."""

    def __init__(self, takes: Callable[[int], float], kill: float = 0.0) -> None:
        self.now, self.killed, self._takes, self._kill = 0.0, 0, takes, kill
        self._ends: dict[object, float] = {}
        self._free: dict[int, float] = {}
        self.monotonic = lambda: self.now

    def actor(self, place: int) -> Any:
        self._free[place] = self.now

        def perform(calls: Sequence[Any]) -> object:
            begun = max(self._free[place], self.now)
            self._free[place] = begun + self._takes(place)
            return self._answer(self._free[place])

        method = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=perform))
        return SimpleNamespace(
            perform=method, whereabouts=SimpleNamespace(remote=lambda: self._answer(self.now))
        )

    def _answer(self, end: float) -> object:
        ref = object()
        self._ends[ref] = end
        return ref

    def wait(self, refs: Sequence[object], num_returns: int = 1, timeout: float = 0, **more: Any) -> Any:
        ready = [ref for ref in refs if self._ends[ref] <= self.now]
        if not ready:
            self.now += timeout
        return ready[:num_returns], []

    def get(self, ref: object) -> Any:
        return [None]

    def kill(self, process: Process) -> None:
        self.killed += 1
        self.now += self._kill


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def run(
        actors: int,
        tasks: int,
        takes: Callable[[int], float],
        given: float | None = None,
        kill: float = 0.0,
    ) -> Machine:
        machine = Machine(takes, kill)
        for module in (dispatch, processes):
            monkeypatch.setattr(module, "ray", machine)
            monkeypatch.setattr(module.time, "monotonic", machine.monotonic)
        monkeypatch.setattr(Process, "kill", lambda process: machine.kill(process))
        monkeypatch.setattr(Process, "drop", lambda process: None)
        crew = Crew(actors, machine.actor, Deaths(), lambda text: None)
        deadlines = Deadlines(given, lambda text: None)
        work = [Task("train", None, cost=1.0, home=i) for i in range(tasks)]
        done = list(Dispatch(work, crew, deadlines, list).run(lambda: None))
        assert sorted(one.task for one in done) == list(range(tasks))
        return machine

    return run


def test_slow_actors_are_not_taken_for_hung_however_many_there_are(
    carried_out: Callable[..., Machine],
) -> None:
    """Blocks of one and a half times what is always allowed: one actor is killed, and all get more time."""
    machine = carried_out(24, 48, lambda place: 1.5 * processes._LEAST_DEADLINE)
    assert machine.killed == 1
    assert carried_out(24, 48, lambda place: 3 * processes._LEAST_DEADLINE).killed <= 3


def test_a_hung_actor_is_replaced(carried_out: Callable[..., Machine]) -> None:
    hung = [3]

    def takes(place: int) -> float:
        if place not in hung:
            return 10.0
        hung.remove(place)
        return 1e9

    machine = carried_out(8, 16, takes)
    assert machine.killed == 1
    assert machine.now < 2 * processes._LEAST_DEADLINE


def test_an_actor_that_has_answered_meanwhile_is_not_killed(carried_out: Callable[..., Machine]) -> None:
    """Killing one may take long: the answer of another one comes in that time."""
    first = [1e9, 310.0]
    machine = carried_out(2, 2, lambda place: first.pop(0) if first else 10.0, kill=400.0)
    assert machine.killed == 1


def test_new_kinds_of_work_get_time_by_the_pace_of_others() -> None:
    deadlines = Deadlines(None, lambda text: None)
    deadlines.measured("train", 40.0, cost=2, work=1000.0)
    assert deadlines.seconds("adapt", cost=5, work=3000.0) == 20 * 40 * 3
    assert deadlines.seconds("train", cost=1, work=3000.0) == 20 * 40 / 2
    deadlines.measured("adapt", 30.0, cost=5, work=3000.0)
    assert deadlines.seconds("adapt", cost=5, work=3000.0) == 20 * 30


def test_work_that_never_ends_says_what_gives_it_more_time(carried_out: Callable[..., Machine]) -> None:
    with pytest.raises(RayflError, match=r"6 client actors in a row did not answer .*execution\.deadline"):
        carried_out(2, 2, lambda place: 1e9, given=5.0)
