"""What a study will need, before anything starts: runs, hours, gigabytes."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms import ServerState
from rayfl.config import Config
from rayfl.errors import Interrupted, RayflError
from rayfl.rundir import RunDirectory
from rayfl.runtime.connection import available
from rayfl.runtime.driving import arithmetic, make_backend
from rayfl.runtime.resources import Node
from rayfl.servers.building import build, check
from rayfl.servers.checkpoint import Checkpoint
from rayfl.servers.driver import Driver
from rayfl.servers.rounds import Round
from rayfl.study import archive as archives
from rayfl.study import searching
from rayfl.study.file import StudyFile
from rayfl.study.plan import PlannedRun
from rayfl.study.running import allocate, directory_of, fetch, is_finished, rounds_kept, unfinished
from rayfl.units import counted, duration, size


@dataclass(frozen=True)
class Estimate:
    """What remains to be done, and what it needs.

    Attributes:
        runs: number of runs of the study.
        finished: runs that are finished.
        diverged: runs whose training diverged, which are not repeated.
        begun: runs that will be resumed.
        rounds: rounds that remain.
        seconds: of work, over all runs.
        jobs: number of parallel runs on this machine.
        disk: bytes of run directories that will be added.
        memory: bytes of all processes at the same time.
        how: how the seconds were estimated.
    """

    runs: int
    finished: int
    diverged: int
    begun: int
    rounds: int
    seconds: float
    jobs: int
    disk: float
    memory: float
    how: str

    def lines(self) -> list[str]:
        """The estimate as text."""
        missing = self.runs - self.finished - self.diverged
        diverged = f"{self.diverged} diverged, " if self.diverged else ""
        lines = [
            f"{self.runs} runs: {self.finished} finished, {diverged}{self.begun} to resume, "
            f"{missing - self.begun} new; {self.rounds:,} rounds"
        ]
        if missing:
            parallel = f"{duration(self.seconds / self.jobs)} with {self.jobs} at a time"
            lines.append(f"about {duration(self.seconds)} of work, {parallel} ({self.how})")
            lines.append(f"about {size(self.disk)} of disk, {size(self.memory)} of memory")
        return lines


@dataclass(frozen=True)
class _Cost:
    """What a run of a kind costs.

    Attributes:
        once: seconds of the start, and the additional seconds of the first round, in which many methods
            cluster the clients, and kernels are compiled.
        of_round: seconds of each round, with its share of the tests.
        disk: bytes of a run directory, whatever its number of rounds.
        disk_of_round: bytes that each round adds.
    """

    once: float = 0.0
    of_round: float = 0.0
    disk: float = 0.0
    disk_of_round: float = 0.0


def estimate(
    runs: Sequence[PlannedRun],
    jobs: int | None = None,
    archive: Path | None = None,
    watch: Callable[[str], object] = lambda text: None,
) -> Estimate:
    """Look at existing runs, and time the second round of each kind of run whose speed is not known yet.

    A round may train few clients and test thousands: here only a few are tested, and the time is scaled.
    After a minute no further kind is timed; those that are left count as the mean of those of their method,
    or of all, if none of their method was timed.

    Args:
        runs: of the study.
        jobs: number of parallel runs; by default as many as fit.
        archive: a folder of finished runs, which are unpacked.
        watch: is told what is timed.
    """
    fetch(runs)
    if archive is not None:
        archives.restore(runs, archive)
    by_key = {run.key: run for run in runs}
    finished = [run for run in by_key.values() if is_finished(run)]
    missing = unfinished(runs)
    costs, how = _costs_of_kinds(finished, missing, watch)
    seconds = disk = 0.0
    for run in missing:
        cost, done = costs[_speed_key(run)], rounds_kept(directory_of(run))
        seconds += cost.once * (done == 0) + cost.of_round * (run.config.rounds - done)
        disk += cost.disk * (done == 0) + cost.disk_of_round * (run.config.rounds - done)
    parallel = allocate(len(missing), missing[0].config, [_this_machine()], jobs).jobs if missing else 1
    peak = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds = sum(run.config.rounds - rounds_kept(directory_of(run)) for run in missing)
    begun = sum(bool(rounds_kept(directory_of(run))) for run in missing)
    return Estimate(
        len(by_key),
        len(finished),
        len(by_key) - len(finished) - len(missing),
        begun,
        rounds,
        seconds,
        min(parallel, max(1, len(missing))),
        disk,
        peak * parallel,
        ", ".join(how) or "nothing is left",
    )


def _this_machine() -> Node:
    return Node(os.cpu_count() or 1, 0.0)


def estimate_search(
    study: StudyFile, jobs: int | None = None, watch: Callable[[str], object] = lambda text: None
) -> list[str]:
    """What the searches of a study need, as text; empty if it has none that remains.

    One trial of each method is timed, with the first values of the space, and stands for all; some trials may
    end early.

    Args:
        study: the file.
        jobs: number of parallel runs; by default as many as fit.
        watch: is told what is timed.
    """
    runs = searching.first_trials(study)
    if study.tune is None or not runs:
        return []
    costs, how = _costs_of_kinds([], runs, watch)
    each = [(costs[_speed_key(run)], run.config.rounds) for run in runs]
    samples = study.tune.samples
    seconds = samples * sum(cost.once + cost.of_round * rounds for cost, rounds in each)
    disk = samples * sum(cost.disk + cost.disk_of_round * rounds for cost, rounds in each)
    parallel = min(samples, allocate(samples, runs[0].config, [_this_machine()], jobs).jobs)
    rounds = samples * sum(rounds for _, rounds in each)
    return [
        f"at most {counted(samples * len(runs), 'run')}; {rounds:,} rounds",
        f"about {duration(seconds)} of work, {duration(seconds / parallel)} with {parallel} at a time "
        f"({', '.join(how)}, with the first values of each setting)",
        f"about {size(disk)} of disk",
    ]


_TIMING_SECONDS = 60.0
"""After this long no further kind of run is timed, so that a large study is estimated soon as well."""


_WARM_UP_SECONDS = 10.0
"""If timing the first kind of run took no longer, it is timed again: other runs of a process start faster."""


def _costs_of_kinds(
    finished: Sequence[PlannedRun], missing: Sequence[PlannedRun], watch: Callable[[str], object]
) -> tuple[dict[str, _Cost], list[str]]:
    """The cost of each kind of run, by :func:`_speed_key`, and how it is known."""
    costs, by_method, kinds = dict[str, _Cost](), defaultdict[str, list[_Cost]](list), dict[str, PlannedRun]()
    for run in finished:
        if (key := _speed_key(run)) not in costs and (cost := _recorded_cost(run)) is not None:
            costs[key] = cost
            by_method[run.method].append(cost)
    recorded = bool(costs)
    for run in missing:
        if (key := _speed_key(run)) not in costs:
            kinds.setdefault(key, run)
    failures, timed, start = list[str](), 0, time.perf_counter()
    for key, run in _each_method_first(kinds):
        if (timed or failures) and time.perf_counter() - start > _TIMING_SECONDS:
            break
        watch(f"a round of {run.method} is timed ({timed + len(failures) + 1} of {len(kinds)})")
        begun = time.perf_counter()
        costs[key], error = _timed_cost(run)
        if not (timed or failures or error) and time.perf_counter() - begun < _WARM_UP_SECONDS:
            costs[key], error = _timed_cost(run)  # the first run of a process imports and compiles for all
        if error:
            failures.append(f"a round of {run.method} failed and is not counted: {error}")
            continue
        timed += 1
        by_method[run.method].append(costs[key])
    everything = [cost for own in by_method.values() for cost in own]
    left = [key for key in kinds if key not in costs]
    for key in left:
        costs[key] = _mean(by_method[kinds[key].method] or everything)
    which = f"{timed} of {len(kinds)} kinds of runs" if left else "each method"
    others = "; the others count as their mean" if left else ""
    what = f"an estimate: a round of {which} was timed, with tests of {_TESTED} clients{others}"
    how = [what] * bool(timed)
    if left and not everything:
        how = [f"{counted(len(left), 'further kind')} of runs not timed and not counted"]
    return costs, [*dict.fromkeys(failures), *["finished runs"] * recorded, *how]


def _each_method_first(kinds: Mapping[str, PlannedRun]) -> list[tuple[str, PlannedRun]]:
    """The first kind of run of each method, then the last of each, then the others.

    Grids often go from small to large, so the mean of these two is nearer to that of all.
    """
    of_method = defaultdict[str, list[str]](list)
    for key, run in kinds.items():
        of_method[run.method].append(key)
    turns = dict[str, int]()
    for own in of_method.values():
        turns |= {key: turn for turn, key in enumerate(own[:1] + own[1:][-1:] + own[1:-1])}
    return sorted(kinds.items(), key=lambda kind: turns[kind[0]])


def _mean(costs: Sequence[_Cost]) -> _Cost:
    if not costs:
        return _Cost()
    return _Cost(*(statistics.fmean(each) for each in zip(*map(astuple, costs), strict=True)))


def _speed_key(run: PlannedRun) -> str:
    """What determines the cost of a run: method, model, data, clients, settings of work and tests, the parts
    that are named, and what is written.
    """
    c = run.config
    parts = (c.loss.name, c.local.name, c.order.name, c.sampling.name, c.aggregation.name, c.hierarchy)
    grouping = (c.clustering.signature.name, c.clustering.features.name, c.clustering.grouping)
    t, clients = c.training, c.partition.model_dump(exclude={"alpha"})
    work = (t.epochs, t.batch_size, t.participation, t.engine, t.precision)
    o = c.output
    written = (o.checkpoint_every, o.keep_checkpoints, o.report, o.tensorboard)
    return repr((run.method, c.model, c.data, work, clients, c.evaluation, parts, grouping, written))


def _recorded_cost(run: PlannedRun) -> _Cost | None:
    """The cost of a run that is finished; None if it comes from an archive, which has no models, and perhaps
    the times of another machine.
    """
    directory = RunDirectory(directory_of(run))
    if not (directory.path / "checkpoints").is_dir():
        return None
    total = float((directory.read_json("summary.json") or {}).get("seconds") or 0.0)
    seconds = directory.read_frame("rounds.csv")["seconds"].tolist() if directory.rounds_complete() else [0.0]
    of_round = statistics.fmean(seconds[1:] or seconds)
    growing = float(sum(file.stat().st_size for file in _growing(directory.path))) / len(seconds)
    fixed = _folder_bytes(directory.path) - growing * len(seconds)
    return _Cost(max(0.0, total - of_round * len(seconds)), of_round, fixed, growing)


def _growing(folder: Path) -> list[Path]:
    """The files of a run that are longer after more rounds."""
    names = ("rounds.csv", "groups.csv", "communication.csv", "log.jsonl*", "events.out.*")
    return [file for name in (*names, "checkpoints/history/*") for file in folder.glob(name)]


def _timed_cost(run: PlannedRun) -> tuple[_Cost, str]:
    """The cost, measured in two rounds in a directory that is deleted afterwards; or why there is no
    estimate.

    Raises:
        KeyboardInterrupt: if it was stopped by a signal.
    """
    folder = Path(tempfile.mkdtemp(prefix="rayfl-estimate-"))
    try:
        c = run.config
        output = c.output.model_copy(update={"root": folder})
        execution = c.execution.model_copy(update={"backend": "inline"})
        tests = c.evaluation.model_copy(update={"every": 1})
        changed = {"output": output, "execution": execution, "evaluation": tests, "events": ()}
        return _cost_of_two_rounds(c.model_copy(update=changed), c.evaluation.every), ""
    except Interrupted:  # a signal ends the whole estimate, not only this run
        raise KeyboardInterrupt from None
    except RayflError as error:
        return _Cost(), " ".join(str(error).split())
    except (Exception, SystemExit) as error:  # from the user's own method or network
        return _Cost(), f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_TESTED = 16
"""Clients that are tested to estimate how long the test of all takes."""


class _SamplingDriver(Driver):
    """A driver that tests a few of the clients.

    Attributes:
        seconds: how long the tests took.
        share: number of clients that each tested client stands for.
    """

    seconds, share = 0.0, 1.0

    def _evaluate(self, state: ServerState, this_round: Round) -> tuple[ServerState, dict[str, float | None]]:
        start = time.perf_counter()
        evaluated = super()._evaluate(state, this_round)
        self.seconds += time.perf_counter() - start
        return evaluated

    def _tested_clients(self, state: ServerState) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        everyone = self.setup.present
        if self.config.evaluation.coreset is not None or len(everyone) <= _TESTED:
            return super()._tested_clients(state)
        self.share = len(everyone) / _TESTED
        sampled = everyone[np.linspace(0, len(everyone) - 1, _TESTED).astype(np.int64)]
        return sampled, np.full(_TESTED, 1 / _TESTED)


def _cost_of_two_rounds(config: Config, every: int) -> _Cost:
    """Run the first two rounds; the second stands for all later ones.

    Args:
        config: of a run in this process that tests after every round.
        every: rounds between two tests of the run that is estimated.
    """
    check(config)
    start = time.perf_counter()
    stages, host = build(config)
    backend = make_backend(config, arithmetic(config, stages[0].federation, host, available(config)))
    directory = RunDirectory.create(config)
    driver = _SamplingDriver(config, stages, backend, directory, host)
    grown = list[int]()
    try:
        state = driver.start()
        once, rounds = time.perf_counter() - start, []
        for _ in range(min(2, config.rounds)):
            start, driver.seconds = time.perf_counter(), 0.0
            state = driver.round(state)
            rounds.append(time.perf_counter() - start - driver.seconds)
            saved = driver.checkpoint(state)
            driver.records.write_tables(state)
            grown.append(sum(file.stat().st_size for file in _growing(directory.path)))
    finally:
        backend.close()
    of_tests = driver.seconds * driver.share / every
    once += max(0.0, rounds[0] - rounds[-1])
    tables = sum(file.stat().st_size for file in directory.path.iterdir() if file.is_file())
    tables -= sum(file.stat().st_size for file in _growing(directory.path) if file.parent == directory.path)
    disk = tables + _page_bytes(config, tables) + _bytes_of_models(config, directory.path, driver, saved)
    disk_of_round = (grown[-1] - grown[0] if len(grown) > 1 else grown[0]) + _bytes_of_events(config)
    return _Cost(once, rounds[-1] + of_tests, float(disk), float(disk_of_round))


def _bytes_of_models(config: Config, run: Path, driver: Driver, saved: Checkpoint) -> float:
    """The models and the checkpoints that lie in the directory of a finished run.

    Clients with a state of their own, such as SCAFFOLD's, are counted as often as they will have trained.
    """
    every = config.output.checkpoint_every
    kept = min(config.output.keep_checkpoints, -(-config.rounds // every) if every else 1)
    models, trained = saved.models.nbytes, len(saved.state_clients)
    everyone = len(driver.setup.present)
    share = min(everyone, trained * config.rounds / min(2, config.rounds)) / trained if trained else 1.0
    newest = sorted((run / "checkpoints").glob("round-*"))[-1]
    states, shared = max(0, _folder_bytes(newest) - models), _folder_bytes(run / "checkpoints" / "clients")
    return models + kept * (models + states * share) + shared * share


def _page_bytes(config: Config, tables: int) -> int:
    """About the size of the report: its fixed part, and the table of clients."""
    from rayfl.report import page

    return len(page.render(page.Page("")).encode()) + tables if config.output.report else 0


def _bytes_of_events(config: Config) -> int:
    """About what each round adds to the log and to the events of TensorBoard."""
    return _LOG_BYTES + (_TENSORBOARD_BYTES if config.output.tensorboard else 0)


_LOG_BYTES, _TENSORBOARD_BYTES = 500, 400
"""Bytes of a round in ``log.jsonl`` and in TensorBoard's events, as seen in many runs."""


def _folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
