"""Progress of a study: a bar over the rounds of all runs with the remaining time, a line for every run."""

from __future__ import annotations

import contextlib
import html
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rayfl import notebook
from rayfl.errors import Damaged
from rayfl.rundir import RunDirectory
from rayfl.study.plan import PlannedRun
from rayfl.study.running import Outcome, directory_of, is_finished, rounds_done
from rayfl.study.watching import Stage, Watch
from rayfl.units import duration, percent

_TICK = 1.0
"""Seconds between two checks of the run directories."""

_QUIET = 300.0
"""Without a progress bar: seconds of silence after which a line says how far the runs are."""


class Screen(Protocol):
    """Where progress is shown.

    Attributes:
        has_bar: whether there is a bar, which shows the remaining time.
    """

    has_bar: bool

    def line(self, text: str) -> None:
        """Show a line that stays.

        Raises:
            BrokenPipeError: if nobody reads it.
        """

    def begin(self, what: str, done: int, total: int) -> None:
        """Begin a bar of ``total`` rounds or trials (``what``), of which some are done."""

    def advance(self, done: int, text: str, left: float | None) -> None:
        """Show how far the bar is, in numbers and as text, and how many seconds are left, if known."""

    def end(self) -> None:
        """Remove the bar."""


class Terminal:
    """Plain lines, and on a terminal a bar below them.

    Args:
        console: where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console, self.has_bar = console, console.is_terminal
        self._progress: Progress | None = None
        self._task: Any = None

    def line(self, text: str) -> None:
        """Show a line that stays."""
        self._console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    def begin(self, what: str, done: int, total: int) -> None:
        """Begin a bar, on a terminal."""
        if not self.has_bar:
            return
        self._progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {what}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            transient=True,
            speed_estimate_period=600,
        )
        self._task = self._progress.add_task("", total=total, completed=done)
        self._progress.start()

    def advance(self, done: int, text: str, left: float | None) -> None:
        """Show how far the bar is; it estimates itself how much time is left."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, description=text)

    def end(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Notebook:
    """A bar in a notebook, above the newest lines.

    Args:
        show: replaces what is shown by other HTML.
    """

    has_bar = True

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._lines: list[str] = []
        self._bar, self._what, self._total = "", "rounds", 1

    def line(self, text: str) -> None:
        """Show a line until others follow."""
        self._lines.append(text)
        self._draw()

    def begin(self, what: str, done: int, total: int) -> None:
        """Begin a bar."""
        self._what, self._total = what, total
        self.advance(done, "", None)

    def advance(self, done: int, text: str, left: float | None) -> None:
        """Show how far the bar is."""
        parts = [text, f"{done:,} of {self._total:,} {self._what}", left and f"ETA {duration(left)}"]
        said = html.escape(" · ".join(part for part in parts if part))
        self._bar = f"{notebook.bar(done, self._total)} {said}<br>"
        self._draw()

    def end(self) -> None:
        """Remove the bar."""
        self._bar = ""
        self._draw()

    def _draw(self) -> None:
        lines = "<br>".join(html.escape(text) for text in self._lines[-notebook.SHOWN_NOTES :])
        self._show(f"<div>{self._bar}{lines}</div>")


@contextlib.contextmanager
def in_notebook() -> Iterator[Watch]:
    """Callbacks that show progress if this is a notebook, else do nothing."""
    show = notebook.output()
    if show is None:
        yield Watch()
        return
    with StudyDisplay(Notebook(show)) as display:
        yield display.watch


class StudyDisplay:
    """Shows the progress of a study.

    The runs have their own processes, possibly on other nodes; their progress is read from their directories.

    Args:
        screen: where to show it.
        clock: returns seconds since an arbitrary time.
    """

    def __init__(self, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        self.screen, self._clock = screen, clock
        self.watch = Watch(
            stage=self._begin,
            done=self._report_outcome,
            lost=self._report_lost,
            tried=self._report_trial,
            stoppable=self._remember_how_to_stop,
        )
        self._stage: Stage | None = None
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
        self.screen.end()

    def _remember_how_to_stop(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        if self._output_closed:  # during an earlier stage that had no run left to stop
            stop()

    def _begin(self, stage: Stage) -> None:
        self.close()
        runs, allocation = stage.runs, stage.allocation
        self._stage, self._reported, self._finished = stage, set(), 0
        self._paths = {run.key: directory_of(run) for run in runs}
        self._rounds_before, self._first_progress = sum(map(rounds_done, self._paths.values())), None
        parallel = f", {allocation.jobs} at a time" if allocation.jobs > 1 else ""
        actors = f", {allocation.actors} client actors each" if allocation.actors else ""
        todo = f": {len(runs)} to do" if runs else ""
        self._print(f"{stage.title}{todo}{parallel}{actors}")
        if stage.trials:
            self._first_progress = 0, self._clock()
            self.screen.begin("trials", 0, stage.trials)
        if not runs:
            return
        self.screen.begin("rounds", self._rounds_before, self._total_rounds)
        self._closing.clear()
        self._thread = threading.Thread(target=self._follow, name="rayfl-study-progress", daemon=True)
        self._thread.start()

    @property
    def _total_rounds(self) -> int:
        return sum(run.config.rounds for run in self._stage.runs) if self._stage is not None else 0

    def _follow(self) -> None:
        while not self._closing.wait(_TICK):
            self._update()

    def _update(self) -> None:
        assert self._stage is not None
        finished, rounds, runs = [], 0, self._stage.runs
        for run in runs:
            path = self._paths[run.key]
            rounds += run.config.rounds if run.key in self._reported else rounds_done(path)
            if run.key not in self._reported and is_finished(run):
                finished.append(run)
        if self._first_progress is None and rounds > self._rounds_before:
            self._first_progress = rounds, self._clock()
        left = self._seconds_left(rounds, self._total_rounds)
        for run in finished:
            self._reported.add(run.key)
            self._finished += 1
            result = _result_text(self._paths[run.key], self._stage.chosen_by)
            self._print(f"{self._finished}/{len(runs)}  {run.title}: {result}{self._and_left(left)}")
        self.screen.advance(rounds, f"{self._finished}/{len(runs)} runs", left)
        if not self.screen.has_bar and self._clock() - self._printed >= _QUIET:
            self._print(f"{rounds:,} of {self._total_rounds:,} rounds{self._and_left(left)}")

    def _seconds_left(self, done: int, total: int) -> float | None:
        """The remaining time; None while it is unknown, and at the end.

        It is estimated from the rounds after the first new one was seen: before that, processes were started
        and data were read.
        """
        baseline, since = self._first_progress or (done, 0.0)
        if done <= baseline or done >= total:
            return None
        return (total - done) * (self._clock() - since) / (done - baseline)

    def _and_left(self, seconds: float | None) -> str:
        """The end of a line; empty where a bar shows it."""
        return "" if seconds is None or self.screen.has_bar else f"; about {duration(seconds)} left"

    def _report_outcome(self, run: PlannedRun, outcome: Outcome) -> None:
        if outcome.state == "failed":
            self._print(f"{run.title}: failed: {outcome.error}")

    def _report_lost(self, run: PlannedRun) -> None:
        self._print(f"{run.title}: its process died; another process continues the run")

    def _report_trial(self, trial: Mapping[str, Any]) -> None:
        if self._stage is None or trial["state"] == "stopped":
            return
        self._finished += 1
        total = self._stage.trials
        left = self._seconds_left(self._finished, total)
        self._print(f"{self._finished}/{total}  {_trial_text(trial)}{self._and_left(left)}")
        self.screen.advance(self._finished, "", left)

    def _print(self, text: str) -> None:
        self._printed = self._clock()
        if self._output_closed:
            return
        try:
            self.screen.line(text)
        except BrokenPipeError:  # as in ``rayfl study ... | head``
            self._output_closed = True
            with contextlib.suppress(OSError):
                print("the output was closed: stopping", file=sys.stderr, flush=True)
            self._stop()


def _trial_text(trial: Mapping[str, Any]) -> str:
    """``training.lr=0.02: 81.20 on validation samples``."""
    values = trial["settings"].items()
    settings = ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values
    )
    if trial["state"] == "failed":
        return f"{settings}: failed: {trial.get('error', 'for an unknown reason')}"
    early = ", ended early" if trial["state"] == "ended early" else ""
    score = f"{trial['score']:.2f}" if math.isfinite(trial["score"]) else "no result"
    return f"{settings}: {score} on validation samples{early}"


def _result_text(path: Path, chosen_by: str) -> str:
    """The result of a run: its accuracy, or loss; if settings are chosen, only what they are chosen by.

    Args:
        path: the run directory.
        chosen_by: that metric, on validation samples; empty: none are chosen.
    """
    try:
        summary = RunDirectory(path).read_json("summary.json") or {}
    except Damaged:
        return "done"
    prefix, on = ("validation_", " on validation samples") if chosen_by else ("", "")
    measured = [name for name in ("accuracy_mean", "loss_mean") if summary.get(name) is not None]
    name = chosen_by or (measured or ["accuracy_mean"])[0]
    value = summary.get(f"{prefix}{name}")
    if value is None:
        return "done"
    amount = percent(value) if "accuracy" in name else f"{value:.4g}"
    return f"{name.removesuffix('_mean')} {amount}{on} in {duration(summary.get('seconds'))}"
