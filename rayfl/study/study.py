"""A study from its file to its results: refuse first, then choose settings, run, judge, write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl import files
from rayfl.config.reading import bring_plugins
from rayfl.config.text import dump
from rayfl.errors import ConfigError
from rayfl.events import RunEvent
from rayfl.rundir import clean
from rayfl.study import claims as claim_rules
from rayfl.study import tables, tuning
from rayfl.study.claims import Judgement, Statement, Verdict, overall
from rayfl.study.file import Claim, StudyFile, read, take
from rayfl.study.plan import PlannedRun, place_of, plan, points
from rayfl.study.results import Results, check_columns
from rayfl.study.running import (
    Job,
    Outcome,
    Shares,
    interruptible,
    job_of,
    on_ray,
    run_inline,
    shares,
    stop_file,
    unfinished,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Prepared:
    """A study that has been checked: nothing has been run.

    Attributes:
        study: the file.
        statements: its claims, those of published figures among them, each with where it comes from.
        candidates: settings that are tried first, if they are listed.
        runs: as they would be with the settings of the file alone.
    """

    study: StudyFile
    statements: tuple[tuple[Claim, Statement], ...]
    candidates: tuple[tuning.Candidate, ...]
    runs: tuple[PlannedRun, ...]

    @property
    def columns(self) -> list[str]:
        """All numbers that tables and claims speak of."""
        claimed = [column for _, statement in self.statements for column in sorted(statement.columns)]
        expected = [each.column for each in self.study.expected]
        return list(dict.fromkeys([*self.study.report.names, *expected, *claimed]))


def prepare(study: StudyFile, check_data: bool = True) -> Prepared:
    """Check everything that can be checked before anything runs.

    Raises:
        ConfigError, DataError: one line.
    """
    from rayfl.servers.building import check

    bring_plugins({"plugins": study.plugins})
    statements = tuple(_statements(study))
    runs = tuple(plan(study))
    candidates = tuple(tuning.candidates(study))
    if study.tune is not None and not candidates:
        _first_point(study)
    found = Prepared(study, statements, candidates, runs)
    configs = [run.config for run in runs]
    check_columns(study.report.names, "report.columns", configs)
    check_columns([each.column for each in study.expected], "expected.column", configs)
    for claim, statement in statements:
        check_columns(sorted(statement.columns), f"claims: {claim.claim!r}", configs)
    if check_data:
        seen = set()
        for run in runs:
            c = run.config
            parts = repr((c.data, c.partition, c.model, c.output.loggers, c.execution.device))
            if parts not in seen:
                check(c)
            seen.add(parts)
    return found


def _first_point(study: StudyFile) -> None:
    """Refuse a search over settings that no method has: try its first values."""
    tune = study.tune
    assert tune is not None
    settings = {}
    for name, values in tune.space.items():
        given = values if isinstance(values, list) else next(iter(values.values()))
        settings[name] = given[0]
    for label in study.methods:
        tuning.planned(study, label, points(study)[0], tune.seeds[0], settings)


def _statements(study: StudyFile) -> list[tuple[Claim, Statement]]:
    axes = {axis: list(at) for axis, at in study.axes.items()}
    found = []
    for each in study.expected:
        found += [
            (claim, claim_rules.parse(claim.claim, study.methods, axes)) for claim in _expected(study, each)
        ]
    for claim in study.claims:
        for axis, point in claim.at.items():
            _check_at(claim, axis, point, axes)
        found.append((claim, claim_rules.parse(claim.claim, study.methods, axes)))
    return found


def _check_at(claim: Claim, axis: str, point: Any, axes: Mapping[str, Sequence[str]]) -> None:
    def fail(what: str, remedy: str) -> ConfigError:
        return ConfigError(f"claims: {claim.claim!r}: at", what, remedy)

    claim_rules.point_of(claim_rules.axis_of(axis, axes, fail), _text(point), axes, fail)


def _text(point: Any) -> str:
    return (
        f"{point:g}"
        if isinstance(point, float)
        else json.dumps(point)
        if isinstance(point, bool)
        else str(point)
    )


def _expected(study: StudyFile, expected: Any) -> list[Claim]:
    """A claim for each published figure that has a tolerance."""
    if expected.within is None:
        return []
    found = []
    for label, value in expected.figures.items():
        for point in points(study):
            figure = tables.figure_at(value, point) if isinstance(value, Mapping) else value
            if figure is not None:
                name = label if label.replace("_", "").isalnum() else f'"{label}"'
                text = f"{name}.{expected.column} ~ {figure:g} +- {expected.within:g}"
                about = {"source": expected.source, "protocol": expected.protocol}
                found.append(Claim(claim=text, at=dict(point), **about))
    return found


@dataclass(frozen=True)
class Study:
    """A study that has been run, as far as it got.

    Attributes:
        folder: where its tables, figures and page lie.
        results: of its runs.
        judgements: of its claims, one a point of the grid.
        tuned: what was tried to choose settings, and how it did.
        stopped: whether it was stopped before the last run.
    """

    folder: Path
    results: Results
    judgements: tuple[Judgement, ...]
    tuned: tuple[Mapping[str, Any], ...] = ()
    stopped: bool = False

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row a run: method, point of the grid, seed, settings that differ, all numbers."""
        return self.results.frame()

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row a method, point and column: mean and 95 % interval."""
        return tables.tidy(self.results)

    @property
    def claims(self) -> list[dict[str, Any]]:
        """Every claim at every point of the grid: verdict, value, interval."""
        return [each.to_dict() for each in self.judgements]

    @property
    def verdict(self) -> Verdict:
        """Of all claims together: ``fails`` if one fails, ``holds`` if all hold."""
        return overall(each.verdict for each in self.judgements) if self.judgements else "holds"

    @property
    def failed(self) -> dict[str, str]:
        """By title why runs failed."""
        errors = self.results.errors
        return {run.title: errors[run.key] for run in self.results.runs if run.key in errors}

    def _repr_html_(self) -> str:
        """For notebooks: the table, and the claims."""
        import pandas as pd

        main = tables.main_table(self.results)
        html = pd.DataFrame(list(main.rows), columns=list(main.header)).to_html(index=False)
        if self.judgements:
            said = tables.claim_table(self.judgements)
            html += pd.DataFrame(list(said.rows), columns=list(said.header)).to_html(index=False)
        return f"{html}<p>{main.caption}</p>"


@dataclass(frozen=True)
class Watch:
    """Who is told how a study goes.

    Attributes:
        stage: called with what begins, and the runs that are to be done.
        done: called with every run that has ended.
        lost: called with every run whose process died, and which goes on in another one.
        event: called with the events of runs in this process.
    """

    stage: Callable[[str, Sequence[PlannedRun], Shares], None] = lambda title, runs, shares: None
    done: Callable[[PlannedRun, Outcome], None] = lambda run, outcome: None
    lost: Callable[[PlannedRun], None] = lambda run: None
    event: Callable[[PlannedRun, RunEvent], None] = lambda run, event: None


@dataclass
class Runner:
    """Carries out runs, in this process or on Ray.

    Attributes:
        folder: for the file that asks runs to stop.
        inline: whether everything is done in this process, one run after another.
        jobs: runs side by side; None to choose.
        watch: who is told.
        errors: by key why runs failed; filled.
        stopped: whether it was stopped; set.
    """

    folder: Path
    inline: bool
    jobs: int | None
    watch: Watch
    errors: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    def shares(self, runs: int, first: PlannedRun) -> Shares:
        """How runs share what there is; connects to Ray where it is needed."""
        if self.inline:
            return Shares(1, 0)
        from rayfl.runtime.connection import connect, this_cluster

        connect(first.config)
        there = this_cluster()
        return shares(runs, first.config, len(there.nodes), there.cpus, there.gpus, self.jobs)

    def run(self, title: str, runs: Sequence[PlannedRun]) -> None:
        """Do those that are not there yet."""
        missing = unfinished(runs)
        if not missing or self.stopped:
            return
        shared = self.shares(len(missing), missing[0])
        self.watch.stage(title, missing, shared)
        by_key = {run.key: run for run in missing}
        with stop_file(self.folder) as stop:
            jobs = [job_of(run, stop, shared.execution) for run in missing]
            if self.inline:
                found = run_inline(jobs, lambda key, event: self.watch.event(by_key[key], event))
                self._take(found, by_key)
            else:
                with interruptible(stop.touch):
                    found = on_ray(jobs, shared, lambda key: self.watch.lost(by_key[key]))
                    self._take(found, by_key)

    def _take(self, found: Any, by_key: Mapping[str, PlannedRun]) -> None:
        for job, outcome in found:
            assert isinstance(job, Job)
            if outcome.state == "failed":
                self.errors[job.key] = outcome.error
            self.stopped = self.stopped or outcome.state == "stopped"
            self.watch.done(by_key[job.key], outcome)


def run_study(
    source: StudyFile | Mapping[str, Any] | Path | str,
    settings: Sequence[str] = (),
    size: str = "",
    seeds: str = "",
    folder: Path | str | None = None,
    inline: bool = False,
    jobs: int | None = None,
) -> Study:
    """Run a study from Python: what ``rayfl study`` does.

    Args:
        source: a study file, or what it holds.
        settings: of all runs, such as ``"rounds=5"``.
        size: one of the sizes that the file names.
        seeds: in place of the file's, such as ``"0-9"``.
        folder: for tables and figures; ``studies/<name>`` if left out.
        inline: everything in this process, one run after another, without Ray.
        jobs: runs side by side; None to choose.

    Raises:
        ConfigError, DataError: before anything runs, in one line.
    """
    study = source if isinstance(source, StudyFile) else _read(source, size, settings, seeds)
    prepared = prepare(study)
    return execute(prepared, Path(folder) if folder else folder_of(study, size), inline, jobs)


def _read(
    source: Mapping[str, Any] | Path | str, size: str, settings: Sequence[str], seeds: str
) -> StudyFile:
    if isinstance(source, Mapping):
        return take(source, Path.cwd(), size, settings, (), seeds)
    return read(source, size, settings, (), seeds)


def folder_of(study: StudyFile, size: str = "") -> Path:
    """Where the results of a study lie unless something else is said."""
    return Path("studies") / "-".join(filter(None, (study.name, size)))


def execute(
    prepared: Prepared,
    folder: Path,
    inline: bool = False,
    jobs: int | None = None,
    watch: Watch | None = None,
) -> Study:
    """Carry out a study and write its results.

    Args:
        prepared: what is to be done.
        folder: for its tables, figures and page; runs lie below their ``output.root``.
        inline: do everything in this process, without Ray.
        jobs: runs side by side; None to choose.
        watch: who is told; nobody if left out.

    Raises:
        DiskError
    """
    files.make(folder, parents=True)
    runner = Runner(folder.absolute(), inline, jobs, watch or Watch())
    study = prepared.study
    chosen: tuning.Chosen = {}
    tuned: list[dict[str, Any]] = []
    if study.tune is not None:
        chosen, tuned = _tune(prepared, runner)
        files.write(folder / "tuned.json", json.dumps(clean(_finite(tuned)), indent=1) + "\n")
    runs = plan(study, chosen)
    runner.run("runs", runs)
    results = Results(study, runs, prepared.columns, runner.errors)
    found = Study(folder, results, tuple(judge(prepared, results)), tuple(tuned), runner.stopped)
    write(found)
    return found


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(value) for value in values]
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _tune(prepared: Prepared, runner: Runner) -> tuple[tuning.Chosen, list[dict[str, Any]]]:
    study = prepared.study
    assert study.tune is not None
    if study.tune.is_grid:
        runner.run("choosing settings", [run for each in prepared.candidates for run in each.runs])
        chosen = tuning.best(study, prepared.candidates)
        tried = tuning.told(study, prepared.candidates)
    else:
        chosen, tried = _search(study, runner)
    for each in tried:
        at = place_of(each.get("at") or {})
        each["chosen"] = chosen.get((each["method"], at)) == each["settings"]
    return chosen, tried


def _search(study: StudyFile, runner: Runner) -> tuple[tuning.Chosen, list[dict[str, Any]]]:
    """Let Tune draw points for every method, one method after another."""
    from rayfl.runtime.trials import Room, Search, search

    tune = study.tune
    assert tune is not None
    if runner.inline:
        raise ConfigError("--inline", "a search needs Ray", "list the values instead, or leave --inline out")
    chosen: tuning.Chosen = {}
    tried: list[dict[str, Any]] = []
    metric = f"validation_{tune.metric}"
    for label in study.methods:
        first = plan(study)[0]
        shared = runner.shares(tune.samples, first)
        own = [run for run in plan(study) if run.method == label]
        runner.watch.stage(f"settings of {label}, {tune.samples} drawn", [], shared)
        room = Room(gpus=shared.gpus, actors=shared.actors, jobs=shared.jobs)
        with stop_file(runner.folder) as stop, interruptible(stop.touch):
            work = tuning.Searched(study, label, str(stop.absolute()), shared.execution)
            how = Search(
                tune.space,
                metric,
                tune.samples,
                tune.search == "optuna",
                tune.scheduler == "asha",
                max(run.config.rounds for run in own) * work.runs + 1,
                tune.seeds[0],
            )
            found = search(work, how, room, Path.cwd())
            runner.stopped = runner.stopped or stop.exists()
        scored = [(settings, float(told.get(metric, -math.inf)), told) for settings, told in found]
        whole = [entry for entry in scored if entry[2].get("state") == "finished"]
        if whole:
            winner = max(whole, key=lambda entry: entry[1])[0]
            chosen |= {(label, place_of(point)): winner for point in points(study)}
        tried += [
            {"method": label, "settings": settings, "score": score, "state": told.get("state", "ended early")}
            for settings, score, told in scored
        ]
    return chosen, tried


def judge(prepared: Prepared, results: Results) -> list[Judgement]:
    """Every claim at every point of the grid where it is to hold."""
    axes = {axis: list(at) for axis, at in prepared.study.axes.items()}
    found = []
    for claim, statement in prepared.statements:
        fixed = {axis for term in statement.terms for axis in term.at}
        fail = ConfigError  # checked before
        at = {
            claim_rules.axis_of(a, axes, fail): claim_rules.point_of(
                claim_rules.axis_of(a, axes, fail), _text(p), axes, fail
            )
            for a, p in claim.at.items()
        }
        seen = set()
        for point in points(prepared.study):
            if any(point[axis] != name for axis, name in at.items()):
                continue
            shown = {axis: name for axis, name in point.items() if axis not in fixed}
            if place_of(shown) in seen:
                continue
            seen.add(place_of(shown))
            own = claim_rules.judge(statement, point, results.values)
            found.append(
                Judgement(statement, shown, own.interval, own.verdict, own.why, claim.source, claim.protocol)
            )
    return found


def write(study: Study) -> list[Path]:
    """All results into the study's folder; the paths."""
    from rayfl.study.figures import write_figures
    from rayfl.study.page import write_page

    results, folder = study.results, study.folder
    main = tables.main_table(results)
    others = [tables.comparison_table(results), tables.rank_table(results)]
    if study.judgements:
        others.append(tables.claim_table(study.judgements))
    shown = [main, *(each for each in others if each is not None)]
    title = results.study.title or results.study.name
    contents = {
        "study.yaml": dump(results.study.model_dump(mode="json")),
        "runs.csv": study.runs.to_csv(index=False),
        "table.csv": study.table.to_csv(index=False),
        "table.md": f"# {title}\n\n" + "\n".join(each.markdown() for each in shown),
        "table.tex": "\n".join(each.latex() for each in shown),
        "claims.json": json.dumps(clean({"verdict": study.verdict, "claims": study.claims}), indent=1) + "\n",
    }
    written = []
    for name, text in contents.items():
        files.write(folder / name, text)
        written.append(folder / name)
    return [*written, *write_figures(results, folder / "figures"), write_page(study)]
