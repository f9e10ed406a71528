"""From a study file to runs; everything that can be checked before a run is checked here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from rayfl.config.reading import bring_plugins
from rayfl.errors import ConfigError, DataError
from rayfl.evaluation import protocols
from rayfl.study import claims as claim_rules
from rayfl.study import searching, tables, tuning
from rayfl.study.claims import Judgement, Statement
from rayfl.study.file import Claim, Expected, StudyFile, shown
from rayfl.study.plan import PlannedRun, hashed_settings, place_of, plan, points
from rayfl.study.results import (
    MOST_GROUPS,
    Results,
    check_column,
    group_of,
    is_percentage,
    known_numbers,
    unit_of_column,
)
from rayfl.study.running import has_ended

_MOST_SECONDS = 60.0
"""Seconds for reading data before the first run; what is not read by then is checked by the run itself."""


@dataclass(frozen=True)
class Prepared:
    """A study that has been checked; nothing has been run.

    Attributes:
        study: the file.
        statements: its claims, including those of published figures, each with its source.
        candidates: settings that are tried first, if they are listed.
        runs: the planned runs with the settings of the file alone, before others are chosen.
    """

    study: StudyFile
    statements: tuple[tuple[Claim, Statement], ...]
    candidates: tuple[tuning.Candidate, ...]
    runs: tuple[PlannedRun, ...]

    @property
    def named(self) -> list[_Named]:
        """All numbers that tables and claims use."""
        named = [_Named("report.columns", name) for name in self.study.report.names]
        named += [
            _Named("expected.column", each.column, label)
            for each in self.study.expected
            for label in each.figures
        ]
        for claim, statement in self.statements:
            terms = sorted(statement.terms, key=lambda term: term.column)
            named += [_Named(f"claims: {claim.claim!r}", term.column, term.method) for term in terms]
        return named

    @property
    def held_out(self) -> str:
        """Which methods take samples from the clients of the others, in a line; empty if none does."""
        takes = {run.method: run.config.public_samples > 0 for run in self.runs}
        who = [label for label, some in takes.items() if some]
        if not who or len(who) == len(takes):
            return ""
        verb = "uses" if len(who) == 1 else "use"
        return (
            f"{', '.join(who)} {verb} training samples that the server holds out: in this study the clients "
            "of all methods are without them (data.server_share)"
        )

    @property
    def columns(self) -> list[str]:
        """All numbers that tables and claims use."""
        return list(dict.fromkeys(each.column for each in self.named))


@dataclass(frozen=True)
class _Named:
    """A number that a table or a claim uses.

    Attributes:
        where: the place in the file that names it.
        column: its name.
        method: the label of the method of which it is; None for all that have it.
    """

    where: str
    column: str
    method: str | None = None


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
    if study.tune is not None and study.tune.search == "optuna" and find_spec("optuna") is None:
        raise ConfigError("tune.search", "optuna is not installed", "pip install 'rayfl[optuna]'")
    tuned = [candidate.method for candidate in candidates] or searching.methods_to_search(study)
    if study.tune is not None and not tuned and len(study.methods) == len(study.all_methods):
        raise ConfigError("tune", "its settings change no run of any method", "leave it out, or name others")
    tuning.check_metric(study)
    _check_axes(study, runs)
    _check_methods(study, runs)
    study = _with_measured_columns(study, runs)
    prepared = Prepared(study, statements, candidates, runs)
    for each in prepared.named:
        if each.where == "report.columns" and "columns" not in study.report.model_fields_set:
            continue  # the default columns; some losses may have no accuracy
        configs = [run.config for run in runs if each.method in (None, run.method)]
        check_column(each.column, each.where, configs, each.method)
    _check_percentages(study)
    if check_data:
        checked = set()
        for run in runs:
            c = run.config
            parts = repr((c.data, c.partition, c.model, c.output.loggers, c.execution.device))
            if parts not in checked:
                check(c)
            checked.add(parts)
    return prepared


def _with_measured_columns(study: StudyFile, runs: Sequence[PlannedRun]) -> StudyFile:
    """The study with what its losses measure in place of the default columns, if no run has accuracies."""
    losses = {repr(run.config.loss): run.config.loss for run in runs}.values()
    if "columns" in study.report.model_fields_set or any(loss.accurate for loss in losses):
        return study
    measures = [name for loss in losses for name in protocols.measures_of(loss)]
    columns = (*(dict.fromkeys(measures) or ["loss_mean"]), "bytes_up")
    return study.model_copy(update={"report": study.report.model_copy(update={"columns": columns})})


def _check_percentages(study: StudyFile) -> None:
    """Refuse published figures that cannot be percentages where the column has these, and fractions.

    Raises:
        ConfigError
    """
    for published in study.expected:
        if not is_percentage(published.column):
            continue
        figures = [
            (label, figure)
            for label, at in published.figures.items()
            for figure in (at.values() if isinstance(at, Mapping) else [at])
        ]
        for label, figure in figures:
            if not 0 <= figure <= 100:
                what = f"{figure:g} is no percentage, which {published.column} is"
                raise ConfigError(f"expected: {label}", what, "expected 0 to 100")
        if len(figures) > 1 and all(0 < figure < 1 for _, figure in figures):
            what = f"all figures of {published.source!r} are below 1, but {published.column} is in percent"
            raise ConfigError("expected", what, "multiply them by 100")


def _check_methods(study: StudyFile, runs: Sequence[PlannedRun]) -> None:
    """Refuse two methods that have the same runs.

    Raises:
        ConfigError
    """
    if study.tune is not None:  # what is chosen for one need not be what another sets itself
        return
    settings: dict[str, list[str]] = {}
    for run in runs:
        if run.seed == study.seeds[0]:
            settings.setdefault(run.method, []).append(_settings_of(run))
    labels: dict[tuple[str, ...], str] = {}
    for label, of_runs in settings.items():
        other = labels.setdefault(tuple(of_runs), label)
        if other != label:
            remedy = "leave one out, or an override that replaces what differs"
            raise ConfigError("methods", f"{other} and {label} have the same settings", remedy)


def _check_axes(study: StudyFile, runs: Sequence[PlannedRun]) -> None:
    """Refuse an axis named like a number, and two points of an axis at which every method has the same runs.

    Raises:
        ConfigError
    """
    if len(study.methods) < len(study.all_methods):  # the points may differ for the others
        runs = plan(study.model_copy(update={"methods": study.all_methods, "seeds": study.seeds[:1]}))
    first_runs = (
        [(run, _settings_of(run)) for run in runs if run.seed == study.seeds[0]] if study.axes else []
    )
    for axis, at in study.axes.items():
        if axis in known_numbers():
            remedy = f"name the axis otherwise, such as {axis}_set"
            raise ConfigError(f"grid.{axis}", "tables have a number of this name", remedy)
        points_by_settings: dict[tuple[str, ...], str] = {}
        for point in at:
            settings = tuple(text for run, text in first_runs if run.point[axis] == point)
            if settings in points_by_settings:
                what = f"{points_by_settings[settings]} and {point} are the same for all methods"
                remedy = "leave one out: its settings change no number of a run, or are set elsewhere, too"
                raise ConfigError(f"grid.{axis}", what, remedy)
            points_by_settings[settings] = point


def _settings_of(run: PlannedRun) -> str:
    """The settings that determine a run's numbers, as text."""
    return json.dumps(hashed_settings(run.config, run.config.to_dict()), sort_keys=True)


def as_chosen(prepared: Prepared) -> list[PlannedRun]:
    """The runs with the settings that are chosen, if all candidates are finished and all searches ended."""
    labels = searching.methods_to_search(prepared.study)
    outcomes = [
        outcome for label in labels if (outcome := searching.remembered(prepared.study, label)) is not None
    ]
    if labels and len(outcomes) == len(labels):
        return plan(prepared.study, searching.chosen(prepared.study, outcomes))
    tried = [run for candidate in prepared.candidates for run in candidate.runs]
    if not tried or not all(has_ended(run) for run in tried):
        return list(prepared.runs)
    return plan(prepared.study, tuning.best(prepared.study, prepared.candidates))


def check_clients(runs: Iterable[PlannedRun]) -> None:
    """Divide the data of every dataset, partition and model once, for the first seed that needs it.

    So a combination that cannot be run is refused before the first run starts. Other seeds may still fail.
    After a minute the remaining combinations are not checked here; their runs check them.

    Raises:
        ConfigError, DataError: which run, and why.
    """
    from rayfl.servers.building import check_clustering, clustered, divide

    start, divided = time.monotonic(), dict[str, tuple[int, bool, tuple[int, ...]]]()
    for run in runs:
        c = run.config
        parts = repr((c.data, c.partition, c.model, c.loss, c.events, c.public_samples))
        if parts not in divided and time.monotonic() - start > _MOST_SECONDS:
            continue
        with _of_run(run):
            if parts not in divided:
                divided[parts] = clustered(divide(c)[0][0].federation)
            check_clustering(c, *divided[parts])


_OF_GROUPS = ("ari", "group_var_within", "group_var_between")
"""Numbers that only clients of planted groups give."""


def check_groups(prepared: Prepared) -> None:
    """Refuse numbers of planted groups, and perplexities, that no run has; only studies that use such numbers
    are checked.

    The groups are those after the last event, for the first seed. After a minute nothing is refused.

    Raises:
        ConfigError, DataError: where the number is named, or which run cannot be given its data.
    """
    from rayfl.servers.building import divide

    named = {number: each.where for each in prepared.named if (number := group_of(each.column)) is not None}
    agreements = [each for each in prepared.named if each.column in _OF_GROUPS]
    perplexities = [each for each in prepared.named if each.column == "perplexity_mean"]
    if not named and not agreements and not perplexities:
        return
    start, divided = time.monotonic(), set[str]()
    known, most, tasks = set[int](), 0, set[str]()
    for run in prepared.runs:
        c = run.config
        parts = repr((c.data, c.partition, c.events, c.rounds))
        if parts in divided:
            continue
        if time.monotonic() - start > _MOST_SECONDS:
            return
        divided.add(parts)
        with _of_run(run):
            federation = divide(c)[0][-1].federation
        groups = federation.groups
        tasks.add(federation.samples.task)
        of_run = set() if groups is None else set(groups.tolist())
        most = max(most, len(of_run))
        known |= of_run if len(of_run) <= MOST_GROUPS else set()
    for each in agreements if not most else ():
        what = f"no run measures {each.column}: its clients are of no planted groups"
        raise ConfigError(each.where, what, "leave it out, or plant some")
    for each in perplexities if "words" not in tasks else ():
        what = f"no run measures {each.column}: its data are no texts whose next words are predicted"
        raise ConfigError(each.where, what, "leave it out")
    for number, where in named.items():
        if number not in known:
            valid = ", ".join(f"accuracy_group_{group}" for group in sorted(known))
            few = (
                f"{most} planted groups; at most {MOST_GROUPS} have numbers" if most else "no planted groups"
            )
            raise ConfigError(where, f"no client is in group {number}", f"valid: {valid}" if known else few)


@contextmanager
def _of_run(run: PlannedRun) -> Iterator[None]:
    """Context manager: name the run in errors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{run.title}: {error.where}", error.what, error.remedy) from None
    except DataError as error:
        raise DataError(f"{run.title}: {error}") from None


def _statements(study: StudyFile) -> list[tuple[Claim, Statement]]:
    axes = {axis: list(at) for axis, at in study.axes.items()}
    statements = []
    for published in study.expected:
        for claim in _figure_claims(study, published):
            statement = claim_rules.parse(claim.claim, study.methods, axes)
            _refuse_foregone(study, claim, statement)
            statements.append((claim, statement))
    seen: list[object] = []
    for claim in study.claims:
        named = [_check_at(claim, axis, point, axes) for axis, point in claim.at.items()]
        for axis in named:
            if named.count(axis) > 1:
                raise ConfigError(f"claims: {claim.claim!r}: at", f"names {axis} twice", "leave one out")
        statement = claim_rules.parse(claim.claim, study.methods, axes)
        for axis, point in _at(claim, axes).items():
            if all(term.at.get(axis, point) != point for term in statement.terms):
                what = f"{axis} is {statement.terms[0].at[axis]} in brackets"
                raise ConfigError(f"claims: {claim.claim!r}: at", what, "leave it out of at or of the claim")
        _refuse_fraction(statement)
        _refuse_mixed_units(statement)
        whole = (replace(statement, text=""), _at(claim, axes), claim.source, claim.protocol)
        if whole in seen:
            raise ConfigError(f"claims: {claim.claim!r}", "is given twice", "leave one out")
        seen.append(whole)
        _refuse_foregone(study, claim, statement)
        statements.append((claim, statement))
    return statements


def _refuse_fraction(statement: Statement) -> None:
    """Refuse a claim that an accuracy, which is in percent, is above or near a number between 0 and 1.

    Raises:
        ConfigError
    """
    term = statement.terms[0]
    alone = len(statement.terms) == 1 and term.factor == 1 and not statement.constant
    high = statement.comparison in (">", ">=", "~") and 0 < statement.bound < 1
    if alone and high and "accuracy" in term.column and is_percentage(term.column):
        what = f"{term.column} is in percent, and {statement.bound:g} is below 1 %"
        raise ConfigError(f"claims: {statement.text!r}", what, f"such as {100 * statement.bound:g}")


def _refuse_mixed_units(statement: Statement) -> None:
    """Refuse plain sums of percentages, bytes, seconds and rounds; with factors they may be weighed.

    Raises:
        ConfigError
    """
    units = {term.column: unit_of_column(term.column) for term in statement.terms}
    plain = all(abs(term.factor) == 1 for term in statement.terms)
    if plain and all(units.values()) and len(set(units.values())) > 1:
        what = " and ".join(f"{column} ({unit})" for column, unit in units.items())
        remedy = "give the numbers of one a factor, such as 0.001 * A.seconds"
        raise ConfigError(f"claims: {statement.text!r}", f"compares {what}", remedy)


def _at(claim: Claim, axes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The points at which a claim must hold, by axis; they have been checked."""
    at = {}
    for name, point in claim.at.items():
        axis = claim_rules.axis_of(name, axes, ConfigError)
        at[axis] = claim_rules.point_of(axis, shown(point), axes, ConfigError)
    return at


def _refuse_foregone(study: StudyFile, claim: Claim, statement: Statement) -> None:
    """Refuse a claim on which no run has any influence: it can never hold at some point of the grid, or it
    holds at every point whatever the runs give.

    Raises:
        ConfigError
    """
    percentages = all(map(is_percentage, statement.columns))
    at, verdicts = _at(claim, {axis: list(names) for axis, names in study.axes.items()}), set[str]()
    for point in points(study):
        if any(point[axis] != name for axis, name in at.items()):
            continue
        terms = claim_rules.summed(statement.terms, point)
        if terms and not percentages:
            verdicts.add("undecided")
            continue
        low = statement.constant + sum(min(0.0, 100 * term.factor) for term in terms)
        high = statement.constant + sum(max(0.0, 100 * term.factor) for term in terms)
        verdicts.add(claim_rules.verdict_of(statement, low, high))
        if "fails" in verdicts:
            where = f"claims: {statement.text!r}" + (f" at {place_of(point)}" if not terms else "")
            raise ConfigError(where, "can never hold", _between(low, high))
    if verdicts == {"holds"}:
        raise ConfigError(f"claims: {statement.text!r}", "holds whatever the runs give", _between(low, high))


def _between(low: float, high: float) -> str:
    if low == high:
        return "its numbers cancel out"
    return f"its percentages add up to between {low:g} and {high:g}"


def _check_at(claim: Claim, axis: str, point: Any, axes: Mapping[str, Sequence[str]]) -> str:
    """Refuse an axis or a point that the grid lacks; returns the axis."""

    def fail(what: str, remedy: str) -> ConfigError:
        return ConfigError(f"claims: {claim.claim!r}: at", what, remedy)

    known = claim_rules.axis_of(axis, axes, fail)
    claim_rules.point_of(known, shown(point), axes, fail)
    return known


def _figure_claims(study: StudyFile, expected: Expected) -> list[Claim]:
    """A claim for each published figure that has a tolerance."""
    if expected.within is None:
        return []
    claims = []
    for label, value in expected.figures.items():
        for point in points(study):
            figure = tables.figure_at(value, point) if isinstance(value, Mapping) else value
            if figure is not None:
                about = {"source": expected.source, "protocol": expected.protocol}
                claims.append(Claim(claim=expected.claim(label, figure), at=dict(point), **about))
    return claims


def judge(prepared: Prepared, results: Results) -> list[Judgement]:
    """The verdicts on every claim at every point of the grid where it should hold."""
    axes = {axis: list(at) for axis, at in prepared.study.axes.items()}
    judgements = []
    for claim, statement in prepared.statements:
        fixed = set.intersection(*(set(term.at) for term in statement.terms))
        at = _at(claim, axes)
        judged = set()
        for point in points(prepared.study):
            if any(point[axis] != name for axis, name in at.items()):
                continue
            varying = {axis: name for axis, name in point.items() if axis not in fixed}
            if place_of(varying) in judged:
                continue
            judged.add(place_of(varying))
            judgement = claim_rules.judge(
                statement, point, results.values, results.why_without, results.least
            )
            judgements.append(
                Judgement(
                    statement,
                    varying,
                    judgement.interval,
                    judgement.verdict,
                    judgement.why,
                    claim.source,
                    claim.protocol,
                )
            )
    return judgements
