"""rayfl from Python: ``rayfl.run(config)``, ``rayfl.resume(path)``, ``rayfl.compare(results)``."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl import plugins
from rayfl.config import BLOCK_SETTINGS, CHANGEABLE, Config, changes, load
from rayfl.config.kinds import KINDS
from rayfl.config.reading import continued, names_first
from rayfl.errors import (
    ClientError,
    ConfigError,
    Damaged,
    DataError,
    DiskError,
    Held,
    Interrupted,
    RayflError,
)
from rayfl.events import Begun, Finished, Listener, Note, RoundDone, RunEvent
from rayfl.machine import handling_stops
from rayfl.monitor import Monitor, Status
from rayfl.monitor.status import RESULTS
from rayfl.notebook import listener
from rayfl.results import Result, client_models
from rayfl.rundir import RunDirectory
from rayfl.runtime.connection import connect
from rayfl.runtime.driving import drive, drive_on_ray
from rayfl.runtime.metrics import exports
from rayfl.servers.building import check, device_of
from rayfl.training import ahead

if TYPE_CHECKING:
    from rayfl.report.compare import Comparison

__all__ = ["Result", "client_models", "compare", "resume", "run"]


def run(
    config: Config | str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    on_event: Listener | None = None,
    changed: Sequence[str] | None = None,
    **parts: Any,
) -> Result:
    """Run a config to the end.

    Args:
        config: a :class:`~rayfl.config.Config`, a preset's name, a YAML file, or a mapping.
        overrides: dotted settings such as ``"rounds=5"``.
        on_event: called with each event of the run, see :mod:`rayfl.events`. If it raises an error, the run
            stops with a checkpoint and the error is raised here; it is not called again. Default: show the
            progress in notebooks, and nothing elsewhere.
        changed: the settings to include in the name of the run directory, such as ``["lr=0.1"]``; by default
            those of ``overrides`` and ``parts`` that differ from ``config``.
        parts: objects in place of sections, see :func:`~rayfl.config.load`.

    Returns:
        The result, read from the run directory.

    Raises:
        ConfigError, DataError: if a setting or the data are wrong; nearly always before anything starts.
        ClientError: if a client's training failed, for example because it diverged.
        RayflError: the base of these; also if the run could not go on for another reason.
        Interrupted: after SIGINT, SIGTERM or SIGHUP; the run can be resumed.
    """
    plugins.refuse_while_importing()
    overrides = names_first(overrides)
    resolved = load(config, overrides, **parts)
    check(resolved)
    if resolved.execution.backend == "ray":
        connect(resolved)  # first, so that no run directory is left if Ray does not start
    if changed is None:
        changed = changes(resolved, config, [*overrides, *parts])
    directory = RunDirectory.create(resolved, changed)
    try:
        return _execute(resolved, directory, on_event or listener())
    except RayflError as error:
        refused = isinstance(error, ConfigError | DataError | DiskError)
        resumable = (directory.path / "checkpoints").is_dir() or str(directory.path) in str(error)
        if directory.is_empty() and (refused or not resumable) and not isinstance(error, Held):
            directory.discard()  # nothing was trained
        raise


def run_once(config: Config, name: str, on_event: Listener = lambda event: None) -> Result:
    """Run a config in the directory ``name`` below ``output.root``, or continue the run in that directory.

    Args:
        config: resolved; may differ from that of an existing run only in ``execution`` and ``output``.
        name: of the run directory; must be unique to the config, for example contain a hash of it.
        on_event: as in :func:`run`.

    Raises:
        Held: if another process is running it.
        ConfigError: if it has been resumed with another number of rounds.
        ConfigError, DataError, Interrupted: as :func:`run`.
    """
    path, remote = config.output.folder / name, config.output.remote(name)
    if remote is not None and remote.files():
        remote.fetch(path)
    if not (path / "config.yaml").is_file():
        check(config)
        if config.execution.backend == "ray":
            connect(config)
        return _execute(config, RunDirectory.create_as(config, name), on_event)
    recorded_config = RunDirectory.open(path).config
    if recorded_config.rounds != config.rounds:
        raise ConfigError(
            "rounds",
            f"{path} was resumed with {recorded_config.rounds:,} rounds, but this run has {config.rounds:,}",
            "move that directory to another folder",
        )
    execution = config.execution.model_dump(mode="json")
    settings = [f"execution.{key}={json.dumps(value)}" for key, value in execution.items()]
    return resume(path, settings, on_event)


def resume(
    path: Result | Path | str,
    overrides: Sequence[str] = (),
    on_event: Listener | None = None,
    changed_plugins: bool = False,
) -> Result:
    """Resume a stopped run; the result has the same bits as a run without a stop.

    Args:
        path: the run directory, or its result.
        overrides: settings to change: only ``rounds``, ``execution.*`` (except ``block_size``,
            ``clients_per_actor`` and ``fan_in``) and ``output.*`` (except its root).
        on_event: as in :func:`run`.
        changed_plugins: resume although plug-ins have changed since the run started.

    Raises:
        ConfigError: if it is not a run, another setting is changed, or a plug-in has changed.
        Damaged: if a folder or pipe is where the run writes a file.
    """
    on_event = on_event or listener()
    directory = RunDirectory.open(path.path if isinstance(path, Result) else path)
    directory.renew()
    changed = directory.changed_plugins()
    if changed and not changed_plugins:
        old = (
            "install the old version"
            if changed[0].installed  # the run has no copy of it
            else f"the old one is in {directory.path}/plugins"
        )
        raise ConfigError(
            f"plug-in {changed[0].given}",
            f"has changed since the run began{directory.changed_files(changed[0])}",
            f"--changed-plugins resumes with the new one; {old}",
        )
    for plugin in changed:
        plugins.restore(plugin, plugin.folder, directory.path, KINDS.values(), changed=True)
        what = directory.changed_files(plugin)
        on_event(Note(f"plug-in {plugin.given} has changed since the run began{what}"))
    overrides = names_first(overrides)
    for text in overrides:
        if text.split("=")[0].split(".")[0].strip() not in CHANGEABLE:
            if Path(text).is_dir():
                raise ConfigError(text, "one run at a time can be resumed", f"resume {directory.path} alone")
            raise ConfigError(
                text, "cannot be changed in a resumed run", "rounds, execution.* and output.* can"
            )
    recorded_config = directory.config_with(changed)
    config = continued(recorded_config, overrides)
    if config.output.root != recorded_config.output.root:
        raise ConfigError(
            "output.root",
            "cannot be changed in a resumed run",
            "move the run directory first",
        )
    _check_execution(recorded_config, config, on_event)
    directory.check_files()
    finished = directory.rounds_finished()
    if finished > config.rounds:
        what = f"is {config.rounds:,}, but {finished:,} rounds are complete"
        raise ConfigError("rounds", what, "expected more, to continue the run")
    if finished == config.rounds:
        on_event(Note(f"all {config.rounds} rounds are complete; nothing to resume"))
        directory.republish()  # the last try may have failed
        return Result(directory.path)
    if finished and not (directory.path / "checkpoints").is_dir():
        raise directory.without_checkpoint()  # it would begin again, in place of the results that are there
    directory.check_writable()
    check(config)
    if changed:
        on_event = _saving_plugins(directory, on_event)
    return _execute(config, directory, on_event)


def compare(runs: Iterable[Result | Path | str]) -> Comparison:
    """Compare finished runs, as ``rayfl compare`` does.

    Args:
        runs: two or more results or run directories.

    Returns:
        What a notebook shows as a table; its ``write("comparison.html")`` writes the page.

    Raises:
        ConfigError: if there are fewer than two runs, or one does not exist or is not finished.
    """
    from rayfl.report.compare import Comparison

    if isinstance(runs, (str, Path, Result)):
        runs = [runs]
    results = [run if isinstance(run, Result) else Result(RunDirectory.open(run).path) for run in runs]
    if len(results) < 2:
        what = f"{results[0].path} is one run" if results else "no runs"
        raise ConfigError("compare", what, "name two or more; rayfl report shows one")
    for result in results:
        if not result.summary:
            directory = RunDirectory(result.path)
            if error := directory.divergence(directory.config.rounds):
                raise ConfigError(str(result.path), f"did not finish: {error}", "leave it out")
            raise ConfigError(str(result.path), "is not finished", f"resume with: {directory.resume}")
    return Comparison.of([result.path for result in results])


_DEVICES = {"cpu": "CPUs", "cuda": "GPUs", "auto": "a GPU where there is one"}


def _check_execution(recorded: Config, config: Config, say: Listener) -> None:
    """Refuse execution settings that would change results without notice; report a change of the device.

    Raises:
        ConfigError
    """
    for name in BLOCK_SETTINGS:
        was, now = (json.dumps(getattr(each.execution, name)) for each in (recorded, config))
        if now != was:
            what = f"is {now}, but the run was begun with {was}, and other sums round differently"
            raise ConfigError(f"execution.{name}", what, "leave it out, or begin a new run")
    was, now = device_of(recorded), device_of(config)
    if now != was:
        trained = f"clients trained on {_DEVICES[was]}, and now train on {_DEVICES[now]}"
        say(Note(f"{trained}: these round differently, so the last bits of results may differ"))


def _saving_plugins(directory: RunDirectory, on_event: Listener) -> Listener:
    """Save the plug-ins of this process with the run once they have completed a round or the run.

    Until then the run's models come from the old plug-ins, which are still needed to read the run.
    """
    kept = False

    def listen(event: RunEvent) -> None:
        nonlocal kept
        if not kept and isinstance(event, RoundDone | Finished):
            directory.write_plugins()
            kept = True
        on_event(event)

    return listen


def _execute(config: Config, directory: RunDirectory, on_event: Listener) -> Result:
    if config.execution.device != "cuda":
        ahead.begin()
    stop = threading.Event()
    with _stopping_on_error(on_event, stop) as heeded:
        heeded(Begun(directory.path))
        with (
            directory.locked(lambda text: heeded(Note(text))),
            directory.publishing(),
            Monitor(_status(config, directory), directory.path, heeded, exports(config)) as listen,
        ):
            if config.execution.backend == "ray":
                connect(config)  # before the signals: ray.init installs its own handler for SIGTERM
            with _recording_divergence(directory, config.rounds), _stopping_on_signals(stop):
                if config.execution.backend == "inline":
                    drive(config, directory, listen, stop.is_set)
                else:
                    drive_on_ray(config, directory, listen, stop)
    return Result(directory.path)


@contextlib.contextmanager
def _recording_divergence(directory: RunDirectory, rounds: int) -> Iterator[None]:
    """Record in the run directory that training diverged, so that a study does not repeat it in vain."""
    directory.forget_divergence()  # it is tried again
    try:
        yield
    except ClientError as error:
        if error.diverged:
            with contextlib.suppress(DiskError):
                directory.write_divergence(rounds, error)
        raise


def _status(config: Config, directory: RunDirectory) -> Status:
    """The status of a run that starts or resumes, with the last known results."""
    return Status(
        run=directory.path.name,
        state="starting",
        method=config.algorithm.name,
        dataset=config.data.name,
        rounds=config.rounds,
        done=directory.rounds_complete(),
        **_last_results(directory),
    )


def _last_results(directory: RunDirectory) -> dict[str, Any]:
    """What the last test of a run gave, for its status; nothing if the table of rounds is damaged, which the
    run itself repairs or refuses.
    """
    if not directory.rounds_complete():
        return {}
    with contextlib.suppress(Damaged, KeyError, TypeError, ValueError):
        rounds = directory.read_frame("rounds.csv")
        tested = rounds[rounds["loss_mean"].notna()]
        last = tested.iloc[-1].to_dict() if len(tested) else {}
        return {name: float(last[name]) for name in RESULTS if last.get(name) == last.get(name, math.nan)}
    return {}


@contextlib.contextmanager
def _stopping_on_error(on_event: Listener, stop: threading.Event) -> Iterator[Listener]:
    """Yield a callback whose first error stops the run with a checkpoint and is raised at the end."""
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
def _stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP stop the run with a checkpoint; a second one interrupts immediately."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with handling_stops(handle):
        yield
