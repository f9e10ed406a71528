"""Progress of a study: a bar over the rounds of all runs with the remaining time, a line for every run."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rayfl.errors import Damaged
from rayfl.rundir import RunDirectory
from rayfl.study.plan import PlannedRun
from rayfl.study.running import Allocation, Outcome, directory_of, is_finished, rounds_done
from rayfl.study.study import Watch
from rayfl.units import duration, percent

_TICK = 1.0
"""Seconds between two checks of the run directories."""

_QUIET = 300.0
"""Without a progress bar: seconds of silence after which a line says how far the runs are."""


class StudyDisplay:
    """Shows the progress of a study: with a bar on a terminal, elsewhere as plain lines.

    The runs have their own processes, possibly on other nodes; their progress is read from their directories.

    Args:
        console: where to print.
        clock: returns seconds since an arbitrary time.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self._clock = console, clock
        self.watch = Watch(
            self._begin, self._report_outcome, self._report_lost, stoppable=self._remember_how_to_stop
        )
        self._runs: list[PlannedRun] = []
        self._paths: dict[str, Path] = {}
        self._reported: set[str] = set()
        self._finished = 0
        self._rounds_before = 0
        self._printed = 0.0
        """When the last line was printed."""
        self._first_progress: tuple[int, float] | None = None
        """The rounds that were complete when the first new one was seen, and when that was."""
        self._output_closed = False
        self._stop: Callable[[], None] = lambda: None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> StudyDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the progress bar and print the remaining lines."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._update()
            self._thread = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _remember_how_to_stop(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        if self._output_closed:  # during an earlier stage that had no run left to stop
            stop()

    def _begin(self, title: str, runs: Sequence[PlannedRun], allocation: Allocation) -> None:
        self.close()
        self._runs, self._reported, self._finished = list(runs), set(), 0
        self._paths = {run.key: directory_of(run) for run in runs}
        self._rounds_before, self._first_progress = sum(map(rounds_done, self._paths.values())), None
        parallel = f", {allocation.jobs} at a time" if allocation.jobs > 1 else ""
        actors = f", {allocation.actors} client actors each" if allocation.actors else ""
        todo = f": {len(runs)} to do" if runs else ""
        self._print(f"{title}{todo}{parallel}{actors}")
        if not runs:
            return
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("  {task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
                TimeElapsedColumn(),
                TextColumn("left:"),
                TimeRemainingColumn(elapsed_when_finished=False),
                console=self.console,
                transient=True,
                speed_estimate_period=600,
            )
            total = sum(run.config.rounds for run in runs)
            self._task = self._progress.add_task(
                f"0/{len(runs)} runs", total=total, completed=self._rounds_before
            )
            self._progress.start()
        self._closing.clear()
        self._thread = threading.Thread(target=self._follow, name="rayfl-study-progress", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._closing.wait(_TICK):
            self._update()

    def _update(self) -> None:
        finished, rounds = [], 0
        for run in self._runs:
            path = self._paths[run.key]
            rounds += run.config.rounds if run.key in self._reported else rounds_done(path)
            if run.key not in self._reported and is_finished(run):
                finished.append(run)
        if self._first_progress is None and rounds > self._rounds_before:
            self._first_progress = rounds, self._clock()
        for run in finished:
            self._reported.add(run.key)
            self._finished += 1
            done = f"{self._finished}/{len(self._runs)}"
            self._print(
                f"{done}  {run.title}: {_result_text(self._paths[run.key])}{self._remaining_time(rounds)}"
            )
        if self._progress is not None:
            text = f"{self._finished}/{len(self._runs)} runs"
            self._progress.update(self._task, completed=rounds, description=text)
        elif self._clock() - self._printed >= _QUIET:
            total = sum(run.config.rounds for run in self._runs)
            self._print(f"{rounds:,} of {total:,} rounds{self._remaining_time(rounds)}")

    def _remaining_time(self, rounds: int) -> str:
        """The remaining time of all runs as text; empty on a terminal, whose progress bar shows it.

        It is estimated from the rounds after the first new one was seen: before that, processes were started
        and data were read.
        """
        total = sum(run.config.rounds for run in self._runs)
        baseline, since = self._first_progress or (rounds, 0.0)
        if self._progress is not None or rounds <= baseline or rounds >= total:
            return ""
        of_round = (self._clock() - since) / (rounds - baseline)
        return f"; about {duration((total - rounds) * of_round)} left"

    def _report_outcome(self, run: PlannedRun, outcome: Outcome) -> None:
        if outcome.state == "failed":
            self._print(f"{run.title}: failed: {outcome.error}")

    def _report_lost(self, run: PlannedRun) -> None:
        self._print(f"{run.title}: its process died; another process continues the run")

    def _print(self, text: str) -> None:
        self._printed = self._clock()
        if self._output_closed:
            return
        try:
            self.console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)
        except BrokenPipeError:  # as in ``rayfl study ... | head``
            self._output_closed = True
            with contextlib.suppress(OSError):
                print("the output was closed: stopping", file=sys.stderr, flush=True)
            self._stop()


def _result_text(path: Any) -> str:
    try:
        summary = RunDirectory(path).read_json("summary.json") or {}
    except Damaged:
        return "done"
    held_out = summary.get("validation_accuracy_mean")  # by which settings are chosen
    validation = "" if held_out is None else f" ({percent(held_out)} on validation samples)"
    return (
        f"accuracy {percent(summary.get('accuracy_mean'))}{validation} in {duration(summary.get('seconds'))}"
    )
