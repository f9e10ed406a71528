"""The output of ``rayfl runs`` and ``rayfl top``, which show runs from another terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayfl.monitor import RunView, view
from rayfl.monitor.status import Status
from rayfl.remote import is_url
from rayfl.units import UNKNOWN, counted, duration, number, percent, size

_REMOTE_PAUSE = 5.0
"""Seconds between two reads of a run on object storage, where its status is up to ten seconds old."""

_COLOURS = {"starting": "cyan", "running": "green", "stopped": "yellow", "failed": "red", "finished": ""}


def _result(status: Status) -> str:
    """The accuracy; the test loss if there is none."""
    if status.accuracy_mean is None and status.loss_mean is not None:
        return f"loss {status.loss_mean:.4g}"
    mark = "" if status.estimated_from is None else "≈ "
    return f"{mark}{percent(status.accuracy_mean)}"


def _named_result(status: Status) -> str:
    text = _result(status)
    return f"test {text}" if text.startswith("loss") else f"accuracy {text}"


def runs_table(runs: Sequence[RunView], folder: Path | str) -> Text:
    """The table of ``rayfl runs``: one line per run; failed runs have a second line with the reason.

    The name comes last and is never wrapped, so that it can be copied.
    """
    headings = ("state", "rounds", "accuracy", "ETA", "begun", "method", "dataset", "run")
    cells = [
        (
            run.status.state,
            f"{run.status.done}/{run.status.rounds}",
            _result(run.status),
            duration(run.status.eta),
            time.strftime("%m-%d %H:%M", time.localtime(run.status.begun)),
            run.status.method,
            run.status.dataset,
            _shown_name(run.path, folder),
        )
        for run in runs
    ]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    lines = [Text(_padded(headings, widths), style="bold")]
    for run, row in zip(runs, cells, strict=True):
        s = run.status
        line = Text(_padded(row, widths))
        line.stylize(_COLOURS[s.state], 0, len(s.state))
        lines += [line, *([Text(f"  {s.why}", style="dim")] if s.why else [])]
    return Text("\n").join(lines)


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A line of a table; rounds, accuracy and ETA are aligned to the right."""
    pairs = enumerate(zip(cells, widths, strict=True))
    return "  ".join(
        cell.rjust(w) if 1 <= column <= 3 else cell.ljust(w) for column, (cell, w) in pairs
    ).rstrip()


def _shown_name(path: Path | str, folder: Path | str) -> str:
    """A run's name below the folder that was asked for."""
    if isinstance(path, str):
        return path.rpartition("/")[2]
    return str(path.relative_to(folder) if path != folder else path)


def screen(run: RunView) -> RenderableType:
    """What ``rayfl top`` shows of a run."""
    s = run.status
    head = Text.assemble((s.state, f"bold {_COLOURS[s.state]}"), f"  {s.method} on {s.dataset}  {run.path}")
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_row("", ProgressBar(total=max(1, s.rounds), completed=s.done, width=50))
    for name, text in lines(s):
        table.add_row(Text(name, style="bold"), Text(text))
    return Group(head, table, *(Text(f"  {note}", style="dim") for note in s.notes))


def lines(s: Status) -> list[tuple[str, str]]:
    """The facts of :func:`screen`, with their names."""
    age = time.time() - s.updated
    eta = "" if s.eta is None else f", ETA {duration(s.eta)}"
    facts = [("rounds", f"{s.done} of {s.rounds}{eta}")]
    if s.why:
        facts.append(("why", s.why))
    if s.round_seconds is not None:
        speed = f"{number(s.steps_per_second, 0)} client-steps a second"
        facts.append(("last round", f"{duration(s.round_seconds)}, {speed}"))
    if s.active and s.blocks:
        facts.append(("blocks", f"{s.blocks_done} of {s.blocks} of this round"))
    if s.actors_wanted:
        idle = "" if s.waiting is None else f"; {percent(100 * s.waiting, 0)} of their time not in training"
        present = f"{s.actors_present} of {s.actors_wanted} present"
        facts.append(("client actors", f"{s.actors_busy} busy, {present}{idle}"))
    if s.slowest is not None and s.slowest_block is not None:
        actor, block = s.slowest, s.slowest_block
        actor_text = f"{actor.name}, {duration(actor.seconds)} for {counted(actor.clients, 'client')}"
        which = f"{counted(block.clients, 'client')} from {block.first} on ({block.worker})"
        block_text = f"{duration(block.seconds)} for {which}"
        facts.append(("slowest actor", actor_text))
        facts.append(("slowest block", block_text))
    if s.largest is not None:
        facts.append(
            (
                "memory",
                f"driver {size(s.driver_memory)}, client actors {size(s.worker_memory)}, the largest "
                f"{size(s.largest.memory)} ({s.largest.name})",
            )
        )
    if s.traffic:
        sent = ", ".join(f"{name.replace('_', ' ')} {size(n)}" for name, n in s.traffic.items() if n)
        facts.append(("sent", sent or size(0)))
    loss = f"training loss {number(s.train_loss, 3)}"
    if s.accuracy_mean is not None:
        mark = "" if s.estimated_from is None else "≈ "
        loss += f", accuracy {mark}{percent(s.accuracy_mean)}, worst 10 % {mark}{percent(s.accuracy_worst10)}"
    elif s.loss_mean is not None:
        loss += f", test loss {number(s.loss_mean, 3)}"
    if s.train_loss is not None:
        facts.append(("model", loss))
    if s.failures:
        facts.append(("failures", counted(s.failures, "client")))
    who = f" by process {s.pid} on {s.host}" if s.pid else ""  # without a status file nobody knows
    facts.append(("written", f"{duration(max(0.0, age))} ago{who}"))
    return facts


def follow(path: Path | str, console: Console, wait: Callable[[float], None] = time.sleep) -> RunView:
    """Show a run until it ends: on a terminal as a screen that is updated, elsewhere as one line per round.

    Args:
        path: the run directory, or its URL.
        console: where to print.
        wait: called with the seconds between two reads of the run.
    """
    run, shown_rounds = view(path), -1
    pause = _REMOTE_PAUSE if is_url(path) else 1.0
    if console.is_terminal:
        with Live(screen(run), console=console, auto_refresh=False) as live:
            while run.status.active:
                wait(pause)
                run = view(path)
                live.update(screen(run), refresh=True)
        return run
    while True:
        s = run.status
        if s.done != shown_rounds or not s.active:
            shown_rounds = s.done
            eta = UNKNOWN if s.eta is None else duration(s.eta)
            why = f" ({s.why})" if s.why else ""
            console.print(
                f"{s.state}{why}  round {s.done}/{s.rounds}  {_named_result(s)}  ETA {eta}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        if not s.active:
            return run
        wait(pause)
        run = view(path)
