"""Events of a run: ``rayfl.run(config, on_event=watch)`` calls ``watch`` with each of them.

>>> def watch(event: rayfl.RunEvent) -> None:
...     match event:
...         case rayfl.RoundDone(round=round, row=row) if event.tested:
...             print(round, row["accuracy_mean"])
...         case rayfl.Finished(summary=summary):
...             print(summary["models_sha256"])

A run begins with :class:`Begun` and ends with :class:`Finished` or :class:`Stopped`, unless it fails. Events
come in order and in the process that called ``rayfl.run``, on Ray too. If results are lost with a node, or
the driver dies, the rounds since the last checkpoint are repeated and reported again, with the same numbers.

An error that a callback raises stops the run with a checkpoint and is then raised by ``rayfl.run``; ``rayfl
resume`` goes on. (Events of another kind, clients that join, leave or drift, are in ``rayfl.data.events``.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunEvent:
    """Base class of all events; later versions may have more kinds."""


@dataclass(frozen=True)
class Begun(RunEvent):
    """The run directory exists; also when a run is resumed.

    Attributes:
        path: the run directory; its config is ``rayfl.Result(path).config``.
    """

    path: Path


@dataclass(frozen=True)
class Note(RunEvent):
    """A message for people: resources, the engine, lost work that is repeated, clients that failed."""

    text: str


@dataclass(frozen=True)
class BlockDone(RunEvent):
    """Progress within a round: a block of clients has been trained.

    Attributes:
        round: 0-based.
        done, total: blocks of the round.
        worker: the actor that trained it, as Ray lists it: ``client:3``.
        clients, first: number of clients, and the index of the first one.
        seconds: training time of the block.
        memory: bytes of the worker's process.
        present, wanted, busy: number of client actors that are present, wanted, busy; updated twice a second.
    """

    round: int
    done: int
    total: int
    worker: str = ""
    clients: int = 0
    first: int = 0
    seconds: float = 0.0
    memory: int = 0
    present: int = 1
    wanted: int = 1
    busy: int = 1


@dataclass(frozen=True)
class Clustered(RunEvent):
    """Clients have been clustered: at the start, again, or because a cluster was split.

    Attributes:
        round: 0-based.
        when: ``before`` the round or ``after`` it.
        n_clusters: number of clusters with present clients.
        ari: agreement with the planted groups (adjusted Rand index); None if there are none.
        seconds: duration of the clustering.
        facts: what the method reports about it, such as ``threshold``; as in ``clusters.json``, which also
            has the cluster of each client.
    """

    round: int
    when: str
    n_clusters: int
    ari: float | None
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundDone(RunEvent):
    """A round is complete and recorded.

    Attributes:
        round: 0-based.
        rounds: planned number of rounds.
        row: the row of ``rounds.csv``; columns about tests exist only if clients were tested.
        worker_seconds: training time of each worker process, by host and process id (``host:1234``).
        measures: the columns of ``row`` that the loss adds, such as ``rmse_mean``.
        steps: local steps of all clients.
        traffic: bytes by tier and direction: ``client_lps_up``, ``lps_gps_down``, ...
        memory: bytes of the driver's process.
    """

    round: int
    rounds: int
    row: Mapping[str, Any]
    worker_seconds: Mapping[str, float] = field(default_factory=dict)
    measures: tuple[str, ...] = ()
    steps: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict)
    memory: int = 0

    @property
    def tested(self) -> bool:
        """Whether clients were tested after this round."""
        return self.row.get("loss_mean") is not None

    @property
    def results(self) -> dict[str, float]:
        """What tests gave besides accuracy: what the loss measures, and the perplexity; if there is nothing
        else, the test loss.
        """
        names = {name: name.removesuffix("_mean") for name in (*self.measures, "perplexity_mean")}
        found = {shown: self.row[name] for name, shown in names.items() if self.row.get(name) is not None}
        if not found and self.tested and self.row.get("accuracy_mean") is None:
            found["test loss"] = self.row["loss_mean"]
        return found

    @property
    def curves(self) -> dict[str, float]:
        """The numbers of the round that are worth plotting, by name; estimates as ``estimated/<name>``."""
        estimated, tests = self.row.get("estimated_from") is not None, (*_TEST_COLUMNS, *self.measures)
        return {
            f"estimated/{name}" if estimated and name.startswith(tests) else name: float(value)
            for name in (*CURVES, *self.measures)
            if (value := self.row.get(name)) is not None
        }


CURVES = (
    "train_loss",
    "accuracy_mean",
    "accuracy_worst10",
    "accuracy_var",
    "loss_mean",
    "perplexity_mean",
    "validation_accuracy_mean",
    "local_accuracy_mean",
    "common_accuracy_mean",
    "ari",
    "clusters",
)
"""Columns of ``rounds.csv`` that loggers draw."""

_TEST_COLUMNS = ("accuracy", "loss_mean", "perplexity", "validation", "common")
"""Prefixes of the columns that may be estimates."""


@dataclass(frozen=True)
class CheckpointSaved(RunEvent):
    """A checkpoint was written; the run can be resumed from it.

    Attributes:
        rounds: completed rounds.
        path: of the checkpoint; older ones may have been removed.
    """

    rounds: int
    path: Path


@dataclass(frozen=True)
class Stopped(RunEvent):
    """The run ends before its last round; it can be resumed.

    Attributes:
        rounds: completed rounds in the newest checkpoint.
        path: the run directory.
        repeats: whether a resumed run would end with the same error, such as diverging training.
    """

    rounds: int
    path: Path
    repeats: bool = False


@dataclass(frozen=True)
class Finished(RunEvent):
    """All rounds are complete and everything is written.

    Attributes:
        summary: the final numbers, as in ``summary.json``.
        path: the run directory.
    """

    summary: Mapping[str, Any]
    path: Path

    @property
    def numbers(self) -> dict[str, float]:
        """The entries of the summary that are single numbers, by name."""
        numbers = {k: v for k, v in self.summary.items() if isinstance(v, int | float)}
        return {name: float(value) for name, value in numbers.items()}


Listener = Callable[[RunEvent], None]
"""A callback that is called with every event."""
