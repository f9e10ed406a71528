"""Execute a study: choose settings, run, judge, write."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Unpack

from rayfl import files
from rayfl.config.text import NOT_YAML, dump, is_dump, parse
from rayfl.errors import ArgumentError, ConfigError, RayflError, nearest
from rayfl.rundir import clean
from rayfl.study import archive as archives
from rayfl.study import progress, searching, tuning
from rayfl.study.file import StudyFile, path_of, read, take
from rayfl.study.objects import plain_content
from rayfl.study.outcome import Study
from rayfl.study.plan import PlannedRun, place_of, plan, points
from rayfl.study.preparation import Prepared, check_clients, check_groups, judge, prepare
from rayfl.study.results import Results
from rayfl.study.running import (
    Allocation,
    Job,
    allocate,
    directory_of,
    divergence_of,
    fetch,
    interruptible,
    is_finished,
    job_of,
    on_ray,
    run_inline,
    stop_file,
    unfinished,
)
from rayfl.study.watching import Stage, Watch

COPY = "study.yaml"
"""The copy of the study file in the folder of its results, with what the command line changed."""

_LONGEST_FOLDER = 120
"""Characters of the name of a folder; file systems take 255 bytes."""


@dataclass
class Runner:
    """Executes runs, in this process or on Ray.

    Attributes:
        folder: for the file that asks runs to stop.
        inline: run everything in this process, one run after another.
        jobs: number of parallel runs; None to choose.
        watch: callbacks.
        begin: makes the folders of the study, before its first runs but after all that may refuse them.
        archive: a folder of finished runs to take from and to add to; None for none.
        errors: errors of failed runs by key; filled.
        stopped: whether runs were stopped; set.
        asked: whether the last stage was asked to stop, even if all of its runs had ended by then; set.
    """

    folder: Path
    inline: bool
    jobs: int | None
    watch: Watch
    begin: Callable[[], None]
    archive: Path | None = None
    errors: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    asked: bool = False

    def allocate(self, runs: int, first: PlannedRun) -> Allocation:
        """How runs share the machine or cluster; connects to Ray if needed."""
        if self.inline:
            return Allocation(1, 0)
        from rayfl.runtime.connection import connect, this_cluster

        connect(first.config)
        return allocate(runs, first.config, this_cluster().nodes, self.jobs)

    def run(self, title: str, runs: Sequence[PlannedRun], chosen_by: str = "") -> None:
        """Execute the runs that have not ended.

        Args:
            title: what they are.
            runs: which they are.
            chosen_by: the metric on validation samples by which they choose settings; empty: they do not.
        """
        fetch(runs)
        if self.archive is not None:
            archives.restore(runs, self.archive)
            archives.add(runs, self.archive)
        for run in runs:
            if error := divergence_of(run):
                again = f"to repeat it, remove {directory_of(run)}"
                archived = ", and its file from the archive" if self.archive is not None else ""
                self.errors[run.key] = f"{error} (an earlier attempt; {again}{archived})"
        missing = [] if self.stopped else unfinished(runs)
        check_clients(missing)
        self.begin()
        if not missing:
            return
        if self.archive is not None:
            _check_writable(self.archive)
        allocation = self.allocate(len(missing), missing[0])
        by_key = {run.key: run for run in missing}
        with stop_file(self.folder) as stop:
            self.watch.stoppable(stop.ask)
            self.watch.stage(Stage(title, missing, allocation, chosen_by))
            jobs = [job_of(run, stop.path, allocation.execution) for run in missing]
            with interruptible(stop.ask):
                if self.inline:
                    outcomes = run_inline(jobs, lambda key, event: self.watch.event(by_key[key], event))
                else:
                    outcomes = on_ray(
                        jobs,
                        allocation,
                        lambda key: self.watch.lost(by_key[key]),
                        lambda key: self._archive_run(by_key[key]),
                        stop.path.exists,
                    )
                self._record_outcomes(outcomes, by_key)
            self.asked = stop.path.exists()

    def _archive_run(self, run: PlannedRun) -> None:
        """Add a run to the archive while others go on, ignoring errors: :meth:`_record_outcomes` retries."""
        if self.archive is not None:
            with suppress(RayflError):
                archives.add([run], self.archive)

    def _record_outcomes(self, outcomes: Any, by_key: Mapping[str, PlannedRun]) -> None:
        for job, outcome in outcomes:
            assert isinstance(job, Job)
            if outcome.state == "finished" and not is_finished(by_key[job.key]):
                elsewhere = "it finished on a node that does not write to the same folder as this one"
                outcome = replace(outcome, state="failed", error=f"{outcome.path}: {elsewhere}")
            if outcome.state == "failed":
                self.errors[job.key] = outcome.error
            if self.archive is not None:
                archives.add([by_key[job.key]], self.archive)
            self.stopped = self.stopped or outcome.state == "stopped"
            self.watch.done(by_key[job.key], outcome)


class _Options(TypedDict, total=False):
    """What to take of a study file: see :func:`rayfl.study.read`."""

    size: str
    settings: Sequence[str]
    only: Sequence[str]
    seeds: str | int | Sequence[int] | None


def run_study(
    source: StudyFile | Mapping[str, Any] | Path | str,
    folder: Path | str | None = None,
    *,
    inline: bool = False,
    jobs: int | None = None,
    archive: Path | str | None = None,
    **options: Unpack[_Options],
) -> Study:
    """Run a study from Python, as ``rayfl study`` does.

    Args:
        source: a study file, its content, or what :func:`rayfl.study.read` returns. In content, the base may
            be a :class:`~rayfl.config.Config`, and settings may be objects, as for :func:`rayfl.run`.
        folder: for tables and figures; default: ``studies/<name>``.
        inline: run everything in this process, one run after another, without Ray.
        jobs: number of parallel runs; None to choose.
        archive: a folder of finished runs to take from and to add to.
        options: as for :func:`rayfl.study.read`: ``size`` (one that the file defines), ``settings``
            (overrides of all runs, such as ``["rounds=5"]``), ``only`` (labels of methods), ``seeds``
            (such as ``"0-9"`` or ``[0, 3]``).

    Returns:
        The study with its runs, table, claims and figures.

    Raises:
        ConfigError, DataError: before anything runs, in one line.
    """
    for option in options.keys() - _Options.__annotations__.keys():
        arguments = {*inspect.signature(run_study).parameters, *_Options.__annotations__} - {"options"}
        raise ArgumentError(option, "no such argument", nearest(option, arguments))
    check_parallel(inline, jobs)
    if isinstance(source, Mapping):
        study = take(plain_content(source), Path.cwd(), **options)
    elif not isinstance(source, StudyFile):
        study = read(source, **options)
    elif options:
        raise ConfigError(
            "source", "has been read already", f"give {' and '.join(options)} to rayfl.study.read"
        )
    else:
        study = source
    prepared = prepare(study)
    results_folder = folder_of(study) if folder is None else path_of("folder", folder, "a folder")
    check_folder(results_folder, study)
    archive_folder = None if archive is None else path_of("archive", archive, "a folder")
    with progress.in_notebook() as watch:
        return execute(prepared, results_folder, inline, jobs, watch, archive_folder)


def check_parallel(inline: bool, jobs: int | None) -> None:
    """Refuse a number of parallel runs that is invalid, or has no effect.

    Raises:
        ArgumentError
    """
    if not isinstance(inline, bool):
        raise ArgumentError("inline", f"got {inline!r:.60}", "expected true or false")
    if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
        raise ArgumentError("jobs", f"got {jobs!r:.60}", "expected a number of parallel runs, 1 or more")
    if inline and jobs not in (None, 1):
        raise ArgumentError(
            "jobs", f"{jobs} runs cannot be parallel in this process", "leave out jobs or inline"
        )


def check_folder(folder: Path, study: StudyFile) -> None:
    """Refuse a folder with the results of a study that has none of this one's methods, or in which the copy
    of the study file would replace another file: its source. A copy may be run where it is.

    Raises:
        ConfigError
    """
    others = _methods_in(folder, study)
    if others and not set(others) & set(study.all_methods):
        what = f"holds the results of another study (of {', '.join(others)[:60]})"
        raise ConfigError(str(folder), what, "give this one another name or folder, or remove that one")
    if study.source is None:
        return
    with suppress(OSError):
        is_copy = is_dump(study.source.read_text(encoding="utf-8"), study.content())
        if os.path.samefile(folder / COPY, study.source) and not is_copy:
            remedy = f"give another folder, or another name to {study.source}"
            raise ConfigError(str(folder), f"the results' {COPY} would replace the study file", remedy)


def _methods_in(folder: Path, study: StudyFile) -> list[str]:
    """The labels of the methods of the study whose results are in a folder; empty if there are none, or if
    that study has the same title."""
    content: Any = None
    with suppress(OSError, *NOT_YAML):
        if (folder / "claims.json").is_file():
            content = parse((folder / COPY).read_text(encoding="utf-8"), trusted=True)
    if not isinstance(content, dict) or not isinstance(content.get("methods"), dict):
        return []
    is_same = bool(study.title) and content.get("title") == study.title
    return [] if is_same else [*map(str, content["methods"])]


def check_places(prepared: Prepared, folder: Path, inline: bool, archive: Path | None) -> None:
    """Refuse folders of a study that cannot be made or written to, and a search without Ray.

    Raises:
        ConfigError
    """
    for each in (folder, *{run.config.output.folder for run in prepared.runs}, archive):
        if each is None:
            continue
        above = next(place for place in (each.absolute(), *each.absolute().parents) if place.exists())
        if not above.is_dir():
            raise ConfigError(str(each if above == each.absolute() else above), "is a file", "name a folder")
        if each != archive:
            _check_writable(above)
    if inline and searching.first_trials(prepared.study):
        raise ArgumentError("inline", "a search needs Ray", "list the values instead, or use Ray")


def folder_of(study: StudyFile) -> Path:
    """The default folder of a study's results.

    A part of a study, or the study with other seeds or settings, has its own folder, so that it never
    replaces the results of the whole: ``studies/figure_6-smoke-seeds0-rounds=5``.
    """
    asked = "-".join([study.name, *study.part])
    name = re.sub(r"[^\w.,=+-]+", "_", asked)
    if len(name) > _LONGEST_FOLDER or _merges(study.part):
        digest = hashlib.sha256(json.dumps(study.part).encode()).hexdigest()[:8]
        name = f"{name[: _LONGEST_FOLDER - 9]}-{digest}"
    return Path("studies") / name


def _merges(part: Sequence[str]) -> bool:
    """Whether parts of a study have names that may become equal to others' in the name of a folder."""
    return any(re.search(r"[^\w.,=+ -]", each) for each in part)


def execute(
    prepared: Prepared,
    folder: Path,
    inline: bool = False,
    jobs: int | None = None,
    watch: Watch | None = None,
    archive: Path | None = None,
) -> Study:
    """Execute a study and write its results.

    Args:
        prepared: the study.
        folder: for its tables, figures and page; runs are below their ``output.root``.
        inline: run everything in this process, without Ray.
        jobs: number of parallel runs; None to choose.
        watch: callbacks.
        archive: a folder of finished runs to take from and to add to (:mod:`rayfl.study.archive`).

    Raises:
        ConfigError, DataError: if the clients of a run cannot be given their data, before anything runs.
        DiskError
    """
    check_places(prepared, folder, inline, archive)
    check_groups(prepared)
    others = {run.config.output.folder for run in prepared.runs}
    if archive is not None and not _holds_first_runs(prepared, archive):
        others.add(archive)

    @cache
    def begin() -> None:
        """Before the runs, so that a disk that cannot be written fails then."""
        files.make(folder, parents=True)
        files.write(folder / COPY, dump(prepared.study.content()))
        for each in others:
            files.make(each, parents=True)
            _check_writable(each)

    runner = Runner(folder.absolute(), inline, jobs, watch or Watch(), begin, archive)
    study = prepared.study
    chosen: tuning.Chosen = {}
    tuned: list[dict[str, Any]] = []
    if study.tune is not None:
        chosen, tuned = _choose_settings(prepared, runner)
        runner.begin()  # all trials may have ended before
        files.write(folder / "tuned.json", json.dumps(clean(_without_infinities(tuned)), indent=1) + "\n")
        if runner.stopped:  # what the study itself would run is not known yet: no tables, no verdicts
            return Study(folder, Results(study, (), prepared.columns, runner.errors), (), tuple(tuned), True)
        tuning.check_measured(study.tune, tuned)
        tuning.check_chosen(study, tuned, chosen)
    runs = plan(study, chosen)
    runner.run("runs", runs)
    results = Results(study, runs, prepared.columns, runner.errors)
    executed = Study(folder, results, tuple(judge(prepared, results)), tuple(tuned), runner.stopped)
    from rayfl.study.writing import write  # deferred: it needs Matplotlib

    write(executed)
    return executed


def _holds_first_runs(prepared: Prepared, archive: Path) -> bool:
    """Whether the first runs of a study are all in an archive, so that it may be one that is only read."""
    tune = prepared.study.tune
    tried = [run for candidate in prepared.candidates for run in candidate.runs]
    return (tune is None or tune.is_grid) and archives.holds(tried or prepared.runs, archive)


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            str(folder), "cannot be written to", "name another folder, or change its permissions"
        )


def _without_infinities(values: Any) -> Any:
    if isinstance(values, list):
        return [_without_infinities(value) for value in values]
    if isinstance(values, dict):
        return {key: _without_infinities(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _choose_settings(prepared: Prepared, runner: Runner) -> tuple[tuning.Chosen, list[dict[str, Any]]]:
    study = prepared.study
    assert study.tune is not None
    if study.tune.is_grid:
        tried_runs = [run for each in prepared.candidates for run in each.runs]
        runner.run("choosing settings", tried_runs, study.tune.metric)
        runner.stopped = runner.stopped or runner.asked
        chosen = tuning.best(study, prepared.candidates)
        tried = tuning.trial_records(study, prepared.candidates)
    else:
        chosen, tried = _search_settings(study, runner)
    for each in tried:
        places = [each["at"]] if each.get("at") else points(study)  # a search chooses for all points together
        each["chosen"] = any(
            chosen.get((each["method"], place_of(point))) == each["settings"] for point in places
        )
    return chosen, tried


def _search_settings(study: StudyFile, runner: Runner) -> tuple[tuning.Chosen, list[dict[str, Any]]]:
    """Draw settings for one method after another; searches that have ended before are not repeated."""
    assert study.tune is not None
    outcomes = []
    for label in searching.methods_to_search(study):
        if runner.stopped:
            break
        outcome = searching.remembered(study, label)
        if outcome is None:
            runner.begin()
            first = next(run for run in plan(study) if run.method == label)
            allocation = runner.allocate(study.tune.samples, first)
            with stop_file(runner.folder) as stop, interruptible(stop.ask):
                runner.watch.stoppable(stop.ask)
                title = f"settings of {label}, {study.tune.samples} drawn"
                runner.watch.stage(Stage(title, (), allocation, study.tune.metric, study.tune.samples))
                outcome = searching.search(study, label, allocation, stop.path, runner.watch.tried)
                runner.stopped = runner.stopped or stop.path.exists()
            if outcome.ended and not runner.stopped:
                searching.remember(study, outcome)
        outcomes.append(outcome)
    tried = [{"method": each.method, **trial} for each in outcomes for trial in each.tried]
    return searching.chosen(study, outcomes), tried
