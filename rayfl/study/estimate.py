"""What a study will need, before anything starts: runs, hours, gigabytes."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms import ServerState
from rayfl.config import Config
from rayfl.errors import Interrupted, RayflError
from rayfl.rundir import RunDirectory
from rayfl.runtime.connection import available
from rayfl.runtime.driving import arithmetic, make_backend
from rayfl.servers.building import build, check
from rayfl.servers.driver import Driver
from rayfl.servers.rounds import Round
from rayfl.study import archive as archives
from rayfl.study.plan import PlannedRun
from rayfl.study.running import allocate, directory_of, fetch, is_finished, rounds_done
from rayfl.units import duration, size


@dataclass(frozen=True)
class Estimate:
    """What remains to be done, and what it needs.

    Attributes:
        runs: number of runs of the study.
        there: runs that are finished.
        begun: runs that will be resumed.
        rounds: rounds that remain.
        seconds: of work, over all runs.
        jobs: number of parallel runs on this machine.
        disk: bytes of run directories that will be added.
        memory: bytes of all processes at the same time.
        how: how the seconds were estimated.
    """

    runs: int
    there: int
    begun: int
    rounds: int
    seconds: float
    jobs: int
    disk: float
    memory: float
    how: str

    def lines(self) -> list[str]:
        """The estimate as text."""
        left = self.runs - self.there
        found = [
            f"{self.runs} runs: {self.there} finished, {self.begun} to resume, {left - self.begun} new; "
            f"{self.rounds:,} rounds"
        ]
        if left:
            side = f"{duration(self.seconds / self.jobs)} with {self.jobs} at a time"
            found.append(f"about {duration(self.seconds)} of work, {side} ({self.how})")
            found.append(f"about {size(self.disk)} of disk, {size(self.memory)} of memory")
        return found


@dataclass(frozen=True)
class _Cost:
    """What a run of a kind costs.

    Attributes:
        once: seconds of the start, and the additional seconds of the first round, in which many methods
            cluster the clients, and kernels are compiled.
        of_round: seconds of each round, with its share of the tests.
        disk: bytes of the run directory.
    """

    once: float = 0.0
    of_round: float = 0.0
    disk: float = 0.0


def estimate(runs: Sequence[PlannedRun], jobs: int | None = None, archive: Path | None = None) -> Estimate:
    """Look at existing runs, and time the second round of every method whose speed is not known yet.

    A round may train few clients and test thousands: here only a few are tested, and the time is scaled. Runs
    in the ``archive`` are unpacked.
    """
    fetch(runs)
    if archive is not None:
        archives.restore(runs, archive)
    by_key = {run.key: run for run in runs}
    there = [run for run in by_key.values() if is_finished(run)]
    left = [run for run in by_key.values() if not is_finished(run)]
    known: dict[str, _Cost] = {}
    for run in there:
        known.setdefault(_kind(run), _measured(RunDirectory(directory_of(run))))
    timed = 0
    untimed: list[str] = []
    for run in left:
        if _kind(run) not in known:
            known[_kind(run)], error = _timed(run)
            timed += not error
            untimed += [f"a round of {run.method} failed and is not counted: {error}"] * bool(error)
    seconds = disk = 0.0
    for run in left:
        cost, done = known[_kind(run)], rounds_done(directory_of(run))
        seconds += cost.once * (done == 0) + cost.of_round * (run.config.rounds - done)
        disk += cost.disk
    cpus = os.cpu_count() or 1
    side = allocate(len(left), left[0].config, 1, cpus, 0, jobs).jobs if left else 1
    peak = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    how = [*untimed]
    how += [f"an estimate: a round of each method was timed, with tests of {_FEW} clients"] * bool(timed)
    how += ["finished runs"] * bool(there)
    rounds = sum(run.config.rounds - rounds_done(directory_of(run)) for run in left)
    begun = sum(bool(rounds_done(directory_of(run))) for run in left)
    return Estimate(
        len(by_key),
        len(there),
        begun,
        rounds,
        seconds,
        min(side, max(1, len(left))),
        disk,
        peak * side,
        ", ".join(how) or "nothing is left",
    )


def _kind(run: PlannedRun) -> str:
    """What determines the speed of a run: method, model, data, clients, and settings of work and tests."""
    c = run.config
    t, clients = c.training, c.partition.model_dump(exclude={"alpha"})
    work = (t.epochs, t.batch_size, t.participation, t.engine, t.precision)
    return repr((run.method, c.model, c.data, work, clients, c.evaluation))


def _measured(directory: RunDirectory) -> _Cost:
    """The cost of a run that is finished."""
    total = float((directory.read_json("summary.json") or {}).get("seconds") or 0.0)
    rounds = directory.read_frame("rounds.csv")["seconds"].tolist() if directory.rounds_complete() else [0.0]
    of_round = statistics.fmean(rounds[1:] or rounds)
    return _Cost(max(0.0, total - of_round * len(rounds)), of_round, float(_bytes(directory.path)))


def _timed(run: PlannedRun) -> tuple[_Cost, str]:
    """The cost, measured in two rounds in a directory that is deleted afterwards; or why there is no
    estimate.

    Raises:
        KeyboardInterrupt: if it was stopped by a signal.
    """
    folder = Path(tempfile.mkdtemp(prefix="rayfl-estimate-"))
    try:
        c = run.config
        output = c.output.model_copy(update={"root": folder, "report": False})
        execution = c.execution.model_copy(update={"backend": "inline"})
        tests = c.evaluation.model_copy(update={"every": 1})
        changed = {"output": output, "execution": execution, "evaluation": tests, "events": ()}
        return _of_two_rounds(c.model_copy(update=changed), c.evaluation.every), ""
    except Interrupted:  # a signal ends the whole estimate, not only this run
        raise KeyboardInterrupt from None
    except RayflError as error:
        return _Cost(), " ".join(str(error).split())
    except (Exception, SystemExit) as error:  # from the user's own method or network
        return _Cost(), f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_FEW = 16
"""Clients that are tested to estimate how long the test of all takes."""


class _Sampling(Driver):
    """A driver that tests a few of the clients.

    Attributes:
        seconds: how long the tests took.
        share: number of clients that each tested client stands for.
    """

    seconds, share = 0.0, 1.0

    def _evaluate(self, state: ServerState, this_round: Round) -> tuple[ServerState, dict[str, float | None]]:
        begun = time.perf_counter()
        found = super()._evaluate(state, this_round)
        self.seconds += time.perf_counter() - begun
        return found

    def _tested(self, state: ServerState) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        everyone = self.setup.present
        if self.config.evaluation.coreset is not None or len(everyone) <= _FEW:
            return super()._tested(state)
        self.share = len(everyone) / _FEW
        few = everyone[np.linspace(0, len(everyone) - 1, _FEW).astype(np.int64)]
        return few, np.full(_FEW, 1 / _FEW)


def _of_two_rounds(config: Config, every: int) -> _Cost:
    """Run the first two rounds; the second stands for all later ones.

    Args:
        config: of a run in this process that tests after every round.
        every: rounds between two tests of the run that is estimated.
    """
    check(config)
    begun = time.perf_counter()
    stages, host = build(config)
    backend = make_backend(config, arithmetic(config, stages[0].federation, host, available(config)))
    directory = RunDirectory.create(config)
    driver = _Sampling(config, stages, backend, directory, host)
    try:
        state = driver.start()
        once, rounds = time.perf_counter() - begun, []
        for _ in range(min(2, config.rounds)):
            begun, driver.seconds = time.perf_counter(), 0.0
            state = driver.round(state)
            rounds.append(time.perf_counter() - begun - driver.seconds)
        driver.checkpoint(state)
    finally:
        backend.close()
    of_tests = driver.seconds * driver.share / every
    once += max(0.0, rounds[0] - rounds[-1])
    return _Cost(once, rounds[-1] + of_tests, float(_bytes(directory.path)))


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
