"""``status.json``: what a run is doing, or how it ended."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from rayfl import files
from rayfl.machine import process_start
from rayfl.rundir import clean

FILE = "status.json"

_PADDED_BYTES = 8192
"""Bytes of the file, padded, so that the run's end can still be written to it when the disk is full."""

State = Literal["starting", "running", "stopped", "failed", "finished"]


@dataclass(frozen=True)
class Worker:
    """What a client actor did in the last round.

    Attributes:
        name: as Ray lists it: ``client:3``.
        blocks, clients: that it trained.
        seconds: that this took.
        memory: bytes of its process.
    """

    name: str
    blocks: int = 0
    clients: int = 0
    seconds: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class Block:
    """A block of clients: how many, the number of the first, the worker that trained it, and the seconds."""

    clients: int
    first: int
    worker: str
    seconds: float


RESULTS = ("accuracy_mean", "accuracy_worst10", "loss_mean", "estimated_from")
"""The columns of ``rounds.csv`` that tell the last test."""


@dataclass(frozen=True)
class Status:
    """The status of a run.

    Attributes:
        run: the name of its directory.
        state: what it does; ``why`` it stopped or failed, in a line.
        method, dataset: by name.
        rounds: planned; ``done`` are complete.
        host, pid: of the process that writes this; ``born``: when that process started
            (:func:`~rayfl.machine.process_start`).
        begun, updated: when the run began or went on, and when this was written (seconds since 1970).
        blocks, blocks_done: of the current round.
        actors_present, actors_wanted, actors_busy: client actors.
        workers: how many trained in the last round; ``slowest`` took longest, ``largest`` has most memory.
        slowest_block: of the last round.
        worker_memory, driver_memory: bytes of the client actors together, and of the driver.
        waiting: share of the client actors' time in the last round in which they did not train, between 0 and
            1: they had nothing to do, or tested.
        round_seconds: of the last round; ``remaining``: estimated seconds until the end.
        rounds_run, clients, steps: trained since ``begun``; ``steps_per_second`` of the last round.
        traffic: bytes since ``begun`` by tier and direction.
        train_loss, accuracy_mean, accuracy_worst10, loss_mean: the last known; ``estimated_from``: the number
            of clients whose tests they are estimated from, None if all were tested.
        failures: clients that failed since ``begun``.
        notes: the last messages to the user.
    """

    run: str
    state: State
    why: str = ""
    method: str = ""
    dataset: str = ""
    rounds: int = 0
    done: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    born: float | None = field(default_factory=lambda: process_start(os.getpid()))
    begun: float = field(default_factory=time.time)
    updated: float = 0.0
    blocks: int = 0
    blocks_done: int = 0
    actors_present: int = 0
    actors_wanted: int = 0
    actors_busy: int = 0
    workers: int = 0
    slowest: Worker | None = None
    largest: Worker | None = None
    slowest_block: Block | None = None
    worker_memory: int = 0
    driver_memory: int = 0
    waiting: float | None = None
    round_seconds: float | None = None
    remaining: float | None = None
    rounds_run: int = 0
    clients: int = 0
    steps: int = 0
    steps_per_second: float | None = None
    traffic: Mapping[str, int] = field(default_factory=dict)
    train_loss: float | None = None
    accuracy_mean: float | None = None
    accuracy_worst10: float | None = None
    loss_mean: float | None = None
    estimated_from: float | None = None
    failures: int = 0
    notes: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write it to a run directory; does nothing if that is not writable."""
        files.publish(folder / FILE, json.dumps(clean(asdict(self))) + "\n", _PADDED_BYTES)

    @classmethod
    def read(cls, folder: Path) -> Status | None:
        """Read the status of a run directory; None if there is none that this version can read."""
        try:
            values = json.loads((folder / FILE).read_text(encoding="utf-8"))
            known_values = {each.name: values[each.name] for each in fields(cls) if each.name in values}
            return _type_adapter().validate_python(known_values)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    @property
    def active(self) -> bool:
        """Whether the run was active when this was written; its process may have died since."""
        return self.state in ("starting", "running")

    @property
    def eta(self) -> float | None:
        """Estimated seconds until the end from now; None if unknown."""
        if self.remaining is None or not self.active:
            return None
        return max(0.0, self.remaining - max(0.0, time.time() - self.updated))


@cache
def _type_adapter() -> TypeAdapter[Status]:
    """Checks the types of a file's values: other programs have files of this name, too."""
    return TypeAdapter(Status)
