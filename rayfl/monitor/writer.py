"""Keeps ``status.json`` and ``log.jsonl`` of a run up to date, in a thread, from the run's events."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rayfl import files, plugins
from rayfl.errors import ClientError, RayflError
from rayfl.events import (
    Begun,
    BlockDone,
    CheckpointSaved,
    Clustered,
    Finished,
    Listener,
    Note,
    RoundDone,
    RunEvent,
    Stopped,
)
from rayfl.monitor.pace import Pace
from rayfl.monitor.status import RESULTS, Block, State, Status, Worker
from rayfl.rundir import clean

LOG = "log.jsonl"

MOST = 5_000_000
"""Most bytes of a log; together with the previous one, ``log.1.jsonl``, a run has at most twice as many."""

_WRITE_INTERVAL = 1.0
"""Seconds between two writes of the files, if something has happened."""

_SIGN_OF_LIFE = 5.0
"""Seconds between two writes if nothing has happened."""

_LONGEST_REASON = 300
"""Maximum characters of the reason why a run has failed."""

_MAX_NOTES = 5
"""Messages to the user in the status."""

_ROUND_COLUMNS = (
    "round",
    "seconds",
    "clients",
    "clusters",
    "train_loss",
    "accuracy_mean",
    "loss_mean",
    "estimated_from",
    "failures",
)
"""The columns of ``rounds.csv`` that the log contains."""

Export = Callable[[Status], None]
"""Exports a status, for example to Ray's metrics."""


class Monitor:
    """Publishes the progress of a run; a listener of its events that passes them on.

    The run only puts events into a queue. A thread of this process handles them once a second. Errors in that
    thread never end the run.

    Args:
        status: of the run when it starts or is resumed.
        folder: the run directory; the caller holds its lock.
        listen: called with every event.
        exports: called in the thread whenever the status has changed.
    """

    def __init__(
        self, status: Status, folder: Path, listen: Listener, exports: Sequence[Export] = ()
    ) -> None:
        self._status, self._folder, self._listen = status, folder, listen
        self._exports = list(exports)
        self._pace = Pace(time.time)
        self._workers: dict[str, Worker] = {}
        self._slowest_block: Block | None = None
        self._last_block: BlockDone | None = None
        self._events: queue.SimpleQueue[tuple[float, RunEvent]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rayfl-monitor", daemon=True)

    def __call__(self, event: RunEvent) -> None:
        """Record an event and pass it on."""
        self._events.put((time.time(), event))
        self._listen(event)

    def __enter__(self) -> Monitor:
        self._log(time.time(), "started", {"host": self._status.host, "pid": self._status.pid})
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Record how the run has ended."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(Exception):
            self._handle_events()
        state, why = _final_state(error)
        self._status = replace(self._status, state=state, why=why, remaining=None, actors_busy=0)
        facts = {"why": why} if why else {}
        if error is not None and state == "failed" and not isinstance(error, RayflError):
            facts["traceback"] = "".join(traceback.format_exception(error))
        elif isinstance(error, ClientError):
            facts["traceback"] = error.cause
        self._log(time.time(), state, facts, "error" if state == "failed" else "info")
        self._write()

    def _follow(self) -> None:
        wrote = time.monotonic()
        while not self._ended.wait(_WRITE_INTERVAL):
            try:
                if self._handle_events() or time.monotonic() - wrote > _SIGN_OF_LIFE:
                    wrote = time.monotonic()
                    self._write()
            except Exception as error:  # an error here must not affect the run
                self._log(time.time(), "monitor", {"text": f"{type(error).__name__}: {error}"}, "error")

    def _handle_events(self) -> bool:
        """Process the events in the queue; returns whether there were any."""
        lines: list[str] = []
        taken = False
        with contextlib.suppress(queue.Empty):
            while True:
                when, event = self._events.get_nowait()
                taken = True
                lines += [_line(when, *about) for about in self._handle(event, when)]
        self._record_progress()
        self._append(lines)
        return taken

    def _write(self) -> None:
        remaining = self._pace.remaining(self._status.rounds) if self._status.active else None
        self._status = replace(self._status, remaining=remaining, updated=time.time())
        self._status.write(self._folder)
        for export in list(self._exports):
            try:
                export(self._status)
            except Exception as error:
                self._exports.remove(export)
                self._log(time.time(), "monitor", {"text": f"{type(error).__name__}: {error}"}, "error")

    def _log(self, when: float, event: str, facts: Mapping[str, Any], level: str = "info") -> None:
        self._append([_line(when, event, facts, "driver", level)])

    def _append(self, lines: Sequence[str]) -> None:
        if lines:
            files.log(self._folder / LOG, "".join(lines), MOST)

    def _handle(self, event: RunEvent, when: float) -> list[tuple[str, Mapping[str, Any], str]]:
        """Update the status from an event; returns the entries for the log, each (event, facts, worker)."""
        status = self._status
        match event:
            case Note(text=text):
                self._status = replace(status, notes=(*status.notes, text)[-_MAX_NOTES:])
                return [("note", {"text": text}, "driver")]
            case BlockDone():
                self._add_block(event)
            case Clustered():
                facts = {"round": event.round, "clusters": event.n_clusters, "ari": event.ari}
                return [("clustered", {**facts, "seconds": event.seconds}, "driver")]
            case RoundDone():
                return self._add_round(event, when)
            case CheckpointSaved(rounds=rounds):
                self._status = replace(status, done=max(rounds, status.done))
                return [("checkpoint", {"rounds": rounds}, "driver")]
            case Finished(summary=summary):
                known = {name: summary[name] for name in RESULTS if summary.get(name) is not None}
                if known:
                    known = {"estimated_from": None, **known}  # all clients are tested at the end
                self._status = replace(status, done=int(summary.get("rounds", status.done)), **known)
            case Stopped(rounds=rounds):
                self._status = replace(status, done=rounds)
            case Begun():
                pass
        return []

    def _add_block(self, event: BlockDone) -> None:
        worker = self._workers.get(event.worker, Worker(event.worker))
        self._workers[event.worker] = Worker(
            event.worker,
            worker.blocks + 1,
            worker.clients + event.clients,
            worker.seconds + event.seconds,
            event.memory,
        )
        if self._slowest_block is None or event.seconds > self._slowest_block.seconds:
            self._slowest_block = Block(event.clients, event.first, event.worker, event.seconds)
        self._last_block = event

    def _record_progress(self) -> None:
        """Record the last block only; there may be thousands per second."""
        event, self._last_block = self._last_block, None
        if event is not None:
            self._status = replace(
                self._status,
                state="running",
                blocks=event.total,
                blocks_done=event.done,
                actors_present=event.present,
                actors_wanted=event.wanted,
                actors_busy=event.busy,
            )

    def _add_round(self, event: RoundDone, when: float) -> list[tuple[str, Mapping[str, Any], str]]:
        self._record_progress()
        status, row, workers = self._status, event.row, list(self._workers.values())
        self._pace.round(event.round + 1, row["seconds"], when)
        measures: dict[str, Any] = {name: row.get(name) for name in RESULTS} if event.tested else {}
        seconds = max(float(row["seconds"]), 1e-9)
        busy = sum(worker.seconds for worker in workers)
        actors = max(status.actors_present, len(workers), 1)
        self._status = replace(
            status,
            state="running",
            rounds=event.rounds,
            done=event.round + 1,
            blocks_done=status.blocks,
            actors_busy=0,
            workers=len(workers),
            slowest=max(workers, key=lambda worker: worker.seconds, default=None),
            largest=max(workers, key=lambda worker: worker.memory, default=None),
            slowest_block=self._slowest_block,
            worker_memory=sum(worker.memory for worker in workers),
            driver_memory=event.memory,
            waiting=min(1.0, max(0.0, 1.0 - busy / (actors * seconds))),
            round_seconds=seconds,
            rounds_run=status.rounds_run + 1,
            clients=status.clients + int(row["clients"]),
            steps=status.steps + event.steps,
            steps_per_second=event.steps / seconds,
            traffic={name: status.traffic.get(name, 0) + n for name, n in event.traffic.items()},
            train_loss=row["train_loss"],
            failures=status.failures + int(row["failures"]),
            **measures,
        )
        self._workers, self._slowest_block = {}, None
        facts = {name: row[name] for name in _ROUND_COLUMNS if row.get(name) is not None}
        worker_entries = [
            ("worker", {"round": event.round, **{k: v for k, v in asdict(w).items() if k != "name"}}, w.name)
            for w in workers
        ]
        return [("round", {**facts, "steps": event.steps}, "driver"), *worker_entries]


def _line(when: float, event: str, facts: Mapping[str, Any], worker: str, level: str = "info") -> str:
    """A line of the log."""
    time_ = datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds")
    entry = {"time": time_, "level": level, "worker": worker, "event": event, **facts}
    return json.dumps(clean(entry), separators=(",", ":")) + "\n"


def _final_state(error: BaseException | None) -> tuple[State, str]:
    """The final state of a run that raised this error, and the reason."""
    if error is None:
        return "finished", ""
    # SystemExit is how Ray Tune ends a trial early
    if type(error).__name__ == "Interrupted" or isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped", ""
    if isinstance(error, ClientError):
        fault = None if error.diverged else plugins.fault_of(error, error.cause)
        text = str(error) if fault is None else f"{error.where}: {fault.line}"
    elif isinstance(error, RayflError):
        text = str(error)
    else:
        fault = plugins.fault_of(error)
        text = f"{type(error).__name__}: {error}" if fault is None else fault.line
    return "failed", " ".join(text.split())[:_LONGEST_REASON]
