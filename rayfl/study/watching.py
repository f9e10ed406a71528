"""What a study says while it is executed, for those who show its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.events import RunEvent
from rayfl.study.plan import PlannedRun
from rayfl.study.running import Allocation, Outcome


@dataclass(frozen=True)
class Stage:
    """A part of a study.

    Attributes:
        title: what is done.
        runs: that are missing; empty for a search, which draws its settings while it goes on.
        allocation: how they share the machine or cluster.
        chosen_by: the metric on validation samples by which these runs choose settings; empty: they do not.
        trials: the number of settings that a search draws; 0 for others.
    """

    title: str
    runs: Sequence[PlannedRun]
    allocation: Allocation
    chosen_by: str = ""
    trials: int = 0


@dataclass(frozen=True)
class Watch:
    """Callbacks for the progress of a study.

    Attributes:
        stage: called with every stage that starts.
        done: called with every run that has ended.
        lost: called with every run whose process died; another process continues it.
        tried: called with every trial of a search that has ended: its ``settings``, ``score``, ``state`` and
            perhaps ``error``, as in :class:`~rayfl.study.searching.SearchOutcome`.
        event: called with the events of runs in this process.
        stoppable: called before ``stage``, with a function that stops the runs of that stage.
    """

    stage: Callable[[Stage], None] = lambda stage: None
    done: Callable[[PlannedRun, Outcome], None] = lambda run, outcome: None
    lost: Callable[[PlannedRun], None] = lambda run: None
    tried: Callable[[Mapping[str, Any]], None] = lambda trial: None
    event: Callable[[PlannedRun, RunEvent], None] = lambda run, event: None
    stoppable: Callable[[Callable[[], None]], None] = lambda stop: None
