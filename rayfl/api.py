"""rayfl from Python: ``rayfl.run(config)``, ``rayfl.resume(path)``, and what a run has left behind."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl import plugins
from rayfl.config import CHANGEABLE, Config, changes, load
from rayfl.config.kinds import KINDS
from rayfl.data.events import client_number
from rayfl.data.scaling import Scaling
from rayfl.errors import ConfigError, DataError, DiskError, RayflError
from rayfl.events import Begun, Listener, Note, RunEvent
from rayfl.rundir import RunDirectory
from rayfl.runtime.connection import connect
from rayfl.runtime.driving import drive, drive_on_ray
from rayfl.servers.building import build, check
from rayfl.servers.driver import Driver, Interrupted, tensors_of

if TYPE_CHECKING:
    import pandas as pd
    import torch


@dataclass(frozen=True)
class Result:
    """A finished (or stopped) run, read from its directory.

    Attributes:
        path: the run directory.
    """

    path: Path

    @property
    def config(self) -> Config:
        """The resolved config."""
        return RunDirectory(self.path).config

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row a round."""
        return RunDirectory(self.path).read_frame("rounds.csv")

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Accuracy by planted group and by cluster: one row each in every round with tests."""
        return RunDirectory(self.path).read_frame("groups.csv")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row a client: size, group, cluster, accuracy last and best."""
        return RunDirectory(self.path).read_frame("clients.csv")

    @cached_property
    def communication(self) -> pd.DataFrame:
        """Bytes by round, tier, direction and kind."""
        return RunDirectory(self.path).read_frame("communication.csv")

    @cached_property
    def clusters(self) -> dict[str, Any]:
        """Planted groups, and the clusters over time."""
        return dict(RunDirectory(self.path).read_json("clusters.json"))

    def client_model(self, client: int | str, finetuned: bool = False) -> dict[str, torch.Tensor]:
        """The model that a client was tested with last, see :func:`client_models`."""
        return next(client_models(self.path, [client], finetuned))[1]

    @cached_property
    def scaling(self) -> Scaling:
        """How the models take inputs: ``result.scaling.apply(x)`` of inputs as the dataset stores them."""
        return Scaling.from_dict(RunDirectory(self.path).read_json("normalisation.json"))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The closing numbers; empty if the run is not finished."""
        return dict(RunDirectory(self.path).read_json("summary.json") or {})


def run(
    config: Config | str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    on_event: Listener = lambda event: None,
    changed: Sequence[str] | None = None,
    **parts: Any,
) -> Result:
    """Run a config to the end.

    Args:
        config: a :class:`~rayfl.config.Config`, a preset's name, a YAML file, or a mapping.
        overrides: dotted settings such as ``"rounds=5"``.
        on_event: called with everything that happens, see :mod:`rayfl.events`. An error that it raises stops
            the run with a checkpoint, and is raised here; it is not called again.
        changed: what the name of the run directory says of the settings, such as ``["lr=0.1"]``; by default
            those of ``overrides`` and ``parts`` that are not as in ``config``.
        parts: objects in place of sections, see :func:`~rayfl.config.load`.

    Raises:
        ConfigError, DataError: before anything starts, in one line.
        Interrupted: after SIGINT or SIGTERM; the run can be resumed.
    """
    plugins.refuse_while_importing()
    resolved = load(config, overrides, **parts)
    check(resolved)
    if resolved.execution.backend == "ray":
        connect(resolved)  # first: where Ray does not start no run directory is left behind
    if changed is None:
        changed = changes(resolved, config, [*overrides, *parts])
    directory = RunDirectory.create(resolved, changed)
    try:
        return _execute(resolved, directory, on_event)
    except RayflError as error:
        refused = isinstance(error, ConfigError | DataError | DiskError)
        resumable = (directory.path / "checkpoints").is_dir() or str(directory.path) in str(error)
        if directory.is_empty() and (refused or not resumable):
            shutil.rmtree(directory.path, ignore_errors=True)  # nothing was trained
        raise


def resume(
    path: Path | str,
    overrides: Sequence[str] = (),
    on_event: Listener = lambda event: None,
    changed_plugins: bool = False,
) -> Result:
    """Go on with a stopped run, bit for bit as if it had not stopped.

    Args:
        path: the run directory.
        overrides: settings to change: ``rounds``, ``execution.*`` and ``output.*`` (but its root) only.
        on_event: as in :func:`run`.
        changed_plugins: go on with plug-ins that have changed since the run began, as they are now.

    Raises:
        ConfigError: if it is not a run, another setting is changed, or a plug-in has changed.
    """
    directory = RunDirectory.open(path)
    changed = directory.changed_plugins()
    if changed and not changed_plugins:
        raise ConfigError(
            f"plug-in {changed[0].given}",
            "has changed since the run began",
            f"--changed-plugins goes on with it as it is; as it was it lies in {directory.path}/plugins",
        )
    for plugin in changed:
        plugins.restore(plugin, plugin.folder, KINDS.values())
        on_event(Note(f"plug-in {plugin.given} has changed since the run began"))
    for text in overrides:
        if text.split("=")[0].split(".")[0].strip() not in CHANGEABLE:
            raise ConfigError(
                text, "cannot be changed in a resumed run", "rounds, execution.* and output.* can"
            )
    begun = directory.config
    config = load(begun, overrides)
    if config.output.root != begun.output.root:
        raise ConfigError(
            "output.root",
            "cannot be changed in a resumed run",
            "move the run directory first",
        )
    finished = directory.read_json("summary.json")
    if finished is not None and finished.get("rounds", 0) >= config.rounds:
        on_event(Note(f"all {config.rounds} rounds are complete; nothing to resume"))
        return Result(directory.path)
    check(config)
    if changed:
        directory.write_plugins()
    return _execute(config, directory, on_event)


def client_models(
    path: Path | str, clients: Sequence[int | str] | None = None, finetuned: bool = False
) -> Iterator[tuple[int | str, dict[str, torch.Tensor]]]:
    """Rebuild the models with which clients of a run were tested last: those of ``accuracy_last``.

    That is the server's model with what the client has of its own (layers, a mask, a whole model), after the
    training that comes before a test (Per-FedAvg). All of it is in the newest checkpoint, and the data. A run
    that was stopped was last tested some rounds before it; a run on a GPU trained there what is trained here
    again on what this machine has.

    Args:
        path: the run directory.
        clients: ids, the user's own where the partition has such; None for all that are there in the end.
        finetuned: the models of ``accuracy_finetuned``, after ``evaluation.finetune_epochs``.

    Yields:
        The client's id (the user's own, if there is one) and its model, tensors by their names in the module,
        as in ``models/*.safetensors``; in the order of the clients' numbers.

    Raises:
        ConfigError: if it is no run, or one without fine-tuning; or there is no such client.
        RayflError: if there is no checkpoint yet, or a client was not there.
    """
    import torch

    from rayfl.runtime.inline import InlineBackend

    directory = RunDirectory.open(path)
    config = directory.config
    if finetuned and not config.evaluation.finetune_epochs:
        raise ConfigError(str(path), "clients did not fine-tune", "that takes evaluation.finetune_epochs")
    stages, host = build(config, directory.scaling)
    directory.verify(stages)
    if not torch.cuda.is_available():
        host = replace(host, device="cpu")
    backend = InlineBackend()
    try:
        driver = Driver(config, stages, backend, directory, host)
        names = stages[0].federation.names
        known = {} if names is None else {name: i for i, name in enumerate(names.tolist())}
        numbers = None if clients is None else [client_number(c, known, str(path)) for c in clients]
        for client, row in driver.tested_models(numbers, finetuned):
            yield (client if names is None else str(names[client])), tensors_of(host.spec, row)
    finally:
        backend.close()


def _execute(config: Config, directory: RunDirectory, on_event: Listener) -> Result:
    stop = threading.Event()
    with _heeded(on_event, stop) as listen:
        listen(Begun(directory.path))
        with directory.locked():
            if config.execution.backend == "ray":
                connect(config)  # before the signals: ray.init puts a handler of its own for SIGTERM
            with _signals(stop):
                if config.execution.backend == "inline":
                    drive(config, directory, listen, stop.is_set)
                else:
                    drive_on_ray(config, directory, listen, stop)
    return Result(directory.path)


@contextlib.contextmanager
def _heeded(on_event: Listener, stop: threading.Event) -> Iterator[Listener]:
    """A callback whose first error stops the run in good order and is raised when it has ended."""
    errors: list[Exception] = []

    def listen(event: RunEvent) -> None:
        if errors:
            return
        try:
            on_event(event)
        except Exception as error:
            errors.append(error)
            stop.set()

    try:
        yield listen
    except (Interrupted, RayflError) as error:
        if errors:
            raise errors[0] from (None if isinstance(error, Interrupted) else error)
        raise
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP ask for a checkpoint and an orderly end; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
