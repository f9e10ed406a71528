"""Execute the runs of a study: finished runs are reused, stopped ones resumed, the others started."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayfl.config import Config, load
from rayfl.config.text import parse
from rayfl.errors import ConfigError, Held, RayflError
from rayfl.events import RunEvent
from rayfl.inputs import Seen, check_unchanged
from rayfl.machine import handling_stops
from rayfl.remote import Remote, staging
from rayfl.remote import runs as published
from rayfl.rundir import RunDirectory
from rayfl.runtime.resources import Node
from rayfl.servers.checkpoint import checkpoints, round_of
from rayfl.study.plan import PlannedRun

_CHECK_SECONDS = 2.0
"""Seconds between two checks of whether another process has finished a run that this one needs, too."""


_ROOM_SECONDS = 3600.0
"""Seconds for which a run waits for room for its actors."""


@dataclass(frozen=True)
class Job:
    """A run to be executed, as it is sent to a separate process.

    Attributes:
        key: its hash.
        name: of its run directory.
        settings: its config as YAML.
        stop: a file that asks the run to stop as soon as it exists.
        inputs: the files and folders that it reads, as they were when the key was made.
    """

    key: str
    name: str
    settings: str
    stop: str
    inputs: Mapping[Path, Seen] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The resolved config."""
        return load(parse(self.settings))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        state: ``finished``, ``stopped`` or ``failed``.
        path: the run directory.
        error: the reason of a failure, one line.
    """

    state: str
    path: str
    error: str = ""


def name_of(run: PlannedRun) -> str:
    """The name of the run directory, the same for all studies; it ends with the hash."""
    return f"{run.config.data.name}-{run.config.algorithm.name}-seed{run.seed}-{run.key}"[-120:].lstrip("-.")


def directory_of(run: PlannedRun) -> Path:
    """The run's directory, which another study may have created under another name."""
    root = run.config.output.folder
    usual = root / name_of(run)
    if usual.is_dir() or not root.is_dir():
        return usual
    return min(root.glob(f"*-{run.key}"), default=usual)


def is_finished(run: PlannedRun) -> bool:
    """Whether the run's directory holds its result, with a summary and rounds that are whole.

    A run that was resumed with more rounds is another one, although its directory keeps the name.
    """
    return RunDirectory(directory_of(run)).rounds_finished() == run.config.rounds


def divergence_of(run: PlannedRun) -> str:
    """Why the run's training diverged, which it would do again; empty if it did not, or if it is finished.

    The run is not repeated until its directory is removed.
    """
    error = RunDirectory(directory_of(run)).divergence(run.config.rounds)
    return error if error and not is_finished(run) else ""


def has_ended(run: PlannedRun) -> bool:
    """Whether nothing is left to do: the run is finished, or its training diverged."""
    return is_finished(run) or bool(divergence_of(run))


def fetch(runs: Sequence[PlannedRun]) -> None:
    """Fetch runs that another machine has published on object storage into this machine's staging folder.

    Raises:
        DiskError: if the storage does not answer.
    """
    missing = {run.key: remote for run in runs if (remote := _remote_of(run)) is not None}
    names = {root: published(root) for root in {remote.root for remote in missing.values()}}
    for key, remote in missing.items():
        for name in names[remote.root]:
            if name.endswith(f"-{key}"):  # another study may have given it another name
                Remote(remote.root, name).fetch(staging(remote.root) / name)


def _remote_of(run: PlannedRun) -> Remote | None:
    """Where a run may be published; None if it is finished here, or is kept on this machine only."""
    return None if is_finished(run) else run.config.output.remote(directory_of(run).name)


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs that have not ended, each once: equal configs are one run."""
    by_key = {run.key: run for run in runs}
    return [run for run in by_key.values() if not has_ended(run)]


def job_of(run: PlannedRun, stop: Path, execution: Mapping[str, Any]) -> Job:
    """What is sent to the process of a run.

    Args:
        run: planned.
        stop: the file that asks it to stop.
        execution: settings of ``execution`` that depend on the number of parallel runs.
    """
    configured_root = run.config.output.root
    root = configured_root.absolute() if isinstance(configured_root, Path) else configured_root
    config = run.config.model_copy(
        update={
            "execution": run.config.execution.model_copy(update=dict(execution)),
            "output": run.config.output.model_copy(update={"root": root}),
        }
    )
    return Job(run.key, directory_of(run).name, config.to_yaml(), str(stop), run.inputs)


class _StopAsked(Exception):
    """The study is being stopped."""


def carry_out(job: Job, watch: Callable[[RunEvent], None] = lambda event: None) -> dict[str, Any]:
    """Start a run, or resume it; returns an :class:`Outcome` as a mapping."""
    from rayfl import api
    from rayfl.errors import Interrupted

    def listen(event: RunEvent) -> None:
        watch(event)
        if os.path.exists(job.stop):
            raise _StopAsked

    path = ""
    try:
        config = job.config
        path = str(config.output.folder / job.name)
        deadline = time.monotonic() + _ROOM_SECONDS
        while True:
            if os.path.exists(job.stop):
                raise _StopAsked
            try:
                check_unchanged(job.inputs)  # else the key would not be that of what the run reads
                api.run_once(config, job.name, listen)
                return asdict(Outcome("finished", path))
            except Held:  # another study has begun it
                time.sleep(_CHECK_SECONDS)
                if error := RunDirectory(Path(path)).divergence(config.rounds):
                    return asdict(Outcome("failed", path, error))
            except ConfigError as refused:
                # Parallel runs have taken all room, for example after the loss of a node.
                crowded = config.execution.backend == "ray" and refused.where == "execution.actors"
                if not crowded or time.monotonic() > deadline:
                    raise
                time.sleep(_CHECK_SECONDS)
    except (_StopAsked, Interrupted):
        return asdict(Outcome("stopped", path))
    except RayflError as error:
        return asdict(Outcome("failed", path, " ".join(str(error).split())))
    except (Exception, SystemExit) as error:  # from the user's own method or network
        line = " ".join(str(error).split())
        return asdict(Outcome("failed", path, f"{type(error).__name__}: {line}"))


def run_inline(jobs: Sequence[Job], watch: Callable[[str, RunEvent], None]) -> Iterator[tuple[Job, Outcome]]:
    """One run after another in this process, without Ray; the first one that is stopped is the last."""
    for job in jobs:
        outcome = Outcome(**carry_out(job, lambda event, key=job.key: watch(key, event)))  # type: ignore[misc]
        yield job, outcome
        if outcome.state == "stopped":
            return


@dataclass(frozen=True)
class Allocation:
    """How runs share a machine or a cluster.

    Attributes:
        jobs: number of parallel runs.
        actors: client actors of each; 0 if a run does all its work in its driver process.
        gpus: share of a GPU for such a driver process.
    """

    jobs: int
    actors: int
    gpus: float = 0.0

    @property
    def execution(self) -> dict[str, Any]:
        """Settings of every run."""
        if self.actors:
            return {"backend": "ray", "actors": self.actors, "wait": _ROOM_SECONDS}
        return {"backend": "inline"}


def allocate(runs: int, config: Config, nodes: Sequence[Node], jobs: int | None) -> Allocation:
    """How runs share the machine or cluster.

    A run with one actor per core loses time whenever it waits for its slowest client. So as many runs as
    there are cores run in parallel, each in one process. With at most half as many, each gets client actors.
    On several nodes a run always has actors: its driver stays here and writes.

    Args:
        runs: number of runs.
        config: of one of them; the number of actors that it names is kept.
        nodes: of the cluster.
        jobs: number of parallel runs that the user wants; None to choose.
    """
    e = config.execution
    room = max(1, sum(node.room(e.cpus_per_actor, e.gpu_share) for node in nodes))
    named_actors = e.actors if isinstance(e.actors, int) else None
    parallel = jobs or max(1, min(runs, room // (named_actors or 1)))
    actors = named_actors or max(1, room // max(1, min(parallel, runs)))
    if e.backend == "inline" or (actors == 1 and len(nodes) == 1 and e.clients_per_actor is None):
        return Allocation(parallel, 0, e.gpu_share)
    return Allocation(parallel, actors)


def on_ray(
    jobs: Sequence[Job],
    allocation: Allocation,
    lost: Callable[[str], None] = lambda key: None,
    ended: Callable[[str], None] = lambda key: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Job, Outcome]]:
    """Parallel runs, each a trial of Ray Tune; Ray is connected already.

    Args:
        jobs: the runs.
        allocation: how many run in parallel.
        lost: called with the key of a run whose process died; another process continues it.
        ended: called with the key of a run as soon as it has ended; it must not raise.
        stopping: returns whether the runs have been asked to stop.

    Yields:
        Each run with its outcome, when all have ended.
    """
    from rayfl.runtime.trials import Room, run_trials

    room = Room(gpus=allocation.gpus, actors=allocation.actors, jobs=allocation.jobs)
    for place, outcome in run_trials(
        carry_out,
        list(jobs),
        room,
        Path.cwd(),
        lambda place: lost(jobs[place].key),
        lambda place: ended(jobs[place].key),
        stopping,
    ):
        if set(outcome) == {"error"}:
            yield jobs[place], Outcome("failed", "", str(outcome["error"]))
        else:
            yield jobs[place], Outcome(**outcome)


@contextlib.contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP call ``stop``; a second signal raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop()
        # Not print, which fails if the signal interrupts it; and now, since Ray may end this process. After
        # SIGHUP the terminal may be gone.
        with contextlib.suppress(OSError):
            os.write(2, b"stopping: runs write a checkpoint, and the same command resumes the study\n")

    with handling_stops(handle):
        yield


class StopFile:
    """The file that asks the runs of this process to stop: they look for it at every event.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f".stop-{os.getpid()}"
        self._lock, self._open = threading.RLock(), True  # a signal may come while the lock is held

    def ask(self) -> None:
        """Ask the runs to stop; does nothing once they have ended."""
        with self._lock:
            if self._open:
                self.path.touch()

    def close(self) -> None:
        """Remove the file."""
        with self._lock:
            self._open = False
            self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def stop_file(folder: Path) -> Iterator[StopFile]:
    """The file that asks the runs of this process to stop; removed at the end."""
    stop = StopFile(folder)
    stop.path.unlink(missing_ok=True)
    try:
        yield stop
    finally:
        stop.close()


def rounds_kept(path: Path) -> int:
    """Number of rounds that a run does not repeat if it is resumed: those in its newest checkpoint."""
    with contextlib.suppress(OSError):
        return max(map(round_of, checkpoints(path / "checkpoints")), default=0)
    return 0


def rounds_done(path: Path) -> int:
    """Number of complete rounds of a run, according to its directory; 0 if that cannot be read."""
    with contextlib.suppress(OSError, ConfigError):
        return RunDirectory(path).rounds_complete()
    return 0
