"""Search settings for a method with Tune; a search that has ended is remembered next to the runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfl import files
from rayfl.errors import ConfigError, Damaged
from rayfl.events import RoundDone, RunEvent
from rayfl.rundir import clean
from rayfl.study.file import Settings, StudyFile, Tune
from rayfl.study.plan import PlannedRun, contents_of, place_of, points, sources_of, tuned_names
from rayfl.study.running import Allocation, carry_out, job_of
from rayfl.study.tuning import Chosen, planned, validation

FOLDER = "searches"
"""The folder below ``output.root`` for the outcomes of searches."""


@dataclass(frozen=True)
class Work:
    """What a search tries for a method, as it is sent to the process of a trial.

    Attributes:
        study: the file.
        method: its label.
        stop: the file that asks runs to stop.
        execution: settings of ``execution``.
    """

    study: StudyFile
    method: str
    stop: str
    execution: Mapping[str, Any]

    @property
    def runs(self) -> int:
        """Number of runs of a trial, which are executed one after another."""
        return len(points(self.study)) * len(_tune_of(self.study).seeds)

    def __call__(self, trial: tuple[Settings, Callable[[dict[str, Any]], None]]) -> dict[str, Any]:
        """Try settings: train with them, and report the validation metric after every round with tests."""
        settings, report = trial
        tune = _tune_of(self.study)
        name = f"validation_{tune.metric}"
        scores: list[float] = []

        def watch(event: RunEvent) -> None:
            if isinstance(event, RoundDone) and event.row.get(name) is not None:
                report({name: float(event.row[name]), "done": 0})

        for point, seed in itertools.product(points(self.study), tune.seeds):
            try:
                run = planned(self.study, self.method, point, seed, settings)
            except ConfigError as error:  # of settings that are valid one by one, but not together
                outcome = {"state": "failed", "error": str(error)}
            else:
                outcome = carry_out(job_of(run, Path(self.stop), self.execution), watch)
            if outcome["state"] != "finished":
                return {name: -math.inf, "done": 1, "state": outcome["state"], "error": outcome["error"]}
            scores.append(validation(run, tune.metric))
        score = sum(scores) / len(scores)
        return {name: -math.inf if math.isnan(score) else score, "done": 1, "state": "finished"}


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search for a method.

    Attributes:
        method: its label.
        tried: per trial its ``settings``, ``score`` and ``state``: ``finished``, ``ended early`` (by ASHA),
            ``failed``, with its ``error``, or ``stopped``.
    """

    method: str
    tried: tuple[Mapping[str, Any], ...]

    @property
    def chosen(self) -> Settings | None:
        """The settings with the highest score; of equal ones the first. None if no trial has a score."""
        finished = [t for t in self.tried if t["state"] == "finished" and math.isfinite(t["score"])]
        return max(finished, key=lambda each: float(each["score"]))["settings"] if finished else None

    @property
    def ended(self) -> bool:
        """Whether nothing is left to try: it was neither stopped nor did it fail throughout."""
        return self.chosen is not None and all(each["state"] != "stopped" for each in self.tried)


def first_trials(study: StudyFile) -> list[PlannedRun]:
    """The runs of one trial of each search that remains, with the first values of the space."""
    remaining = [label for label in methods_to_search(study) if remembered(study, label) is None]
    if not remaining:
        return []
    tune = _tune_of(study)
    first = {name: _examples(values)[0] for name, values in tune.space.items()}
    return [
        planned(study, label, point, seed, first)
        for label in remaining
        for point, seed in itertools.product(points(study), tune.seeds)
    ]


def methods_to_search(study: StudyFile) -> list[str]:
    """The methods whose settings are drawn: those that use one of them and do not set it themselves.

    Raises:
        ConfigError: for the first invalid value.
    """
    tune = study.tune
    if tune is None or tune.is_grid:
        return []
    return [label for label in study.methods if _makes_a_difference(study, label)]


def _makes_a_difference(study: StudyFile, label: str) -> bool:
    tune = _tune_of(study)
    low = {name: _examples(values)[0] for name, values in tune.space.items()}
    first = _first_run(study, label, low).key
    keys = [
        _key_with(study, label, low, name, value)
        for name, values in tune.space.items()
        for value in _examples(values)[1:]
    ]
    return any(key != first for key in keys)


def _key_with(study: StudyFile, label: str, low: Settings, name: str, value: Any) -> str:
    """The key of the first run with another value of one setting."""
    try:
        return _first_run(study, label, {**low, name: value}).key
    except ConfigError:
        if isinstance(value, float) and _is_valid(study, label, {**low, name: round(value)}):
            what = f"is a whole number for {label}, but others would be drawn, such as {value:.3g}"
            raise ConfigError(f"tune: {name}", what, "use randint or choice") from None
        raise


def _is_valid(study: StudyFile, label: str, settings: Settings) -> bool:
    try:
        _first_run(study, label, settings)
    except ConfigError:
        return False
    return True


def search(
    study: StudyFile,
    label: str,
    allocation: Allocation,
    stop: Path,
    watch: Callable[[Mapping[str, Any]], None] = lambda trial: None,
) -> SearchOutcome:
    """Draw settings and try them, in parallel.

    Args:
        study: the file.
        label: of the method.
        allocation: how trials share the machine or cluster.
        stop: the file that asks the trials to stop.
        watch: called with every trial that has ended, while others go on; it must not raise.
    """
    from rayfl.runtime import trials

    tune = _tune_of(study)
    metric = f"validation_{tune.metric}"
    work = Work(study, label, str(stop.absolute()), allocation.execution)
    rounds = max(planned(study, label, p, tune.seeds[0], {}).config.rounds for p in points(study))
    how = trials.Search(
        space=tune.space,
        metric=metric,
        samples=tune.samples,
        optuna=tune.search == "optuna",
        asha=tune.scheduler == "asha",
        rounds=rounds * work.runs + 1,
        seed=tune.seeds[0],
    )
    room = trials.Room(gpus=allocation.gpus, actors=allocation.actors, jobs=allocation.jobs)
    used = tuned_names(study, label)

    def trial_of(drawn: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
        state = report.get("state") or ("failed" if "error" in report else "ended early")
        score = float(report.get(metric, -math.inf))
        error = {"error": str(report["error"])} if report.get("error") else {}
        return {"settings": {name: drawn[name] for name in used}, "score": score, "state": state, **error}

    tried = trials.search(
        work, how, room, Path.cwd(), stop.exists, lambda drawn, report: watch(trial_of(drawn, report))
    )
    return SearchOutcome(label, tuple(trial_of(drawn, report) for drawn, report in tried))


def remember(study: StudyFile, outcome: SearchOutcome) -> None:
    """Keep the outcome of a search that has ended.

    ASHA ends trials early depending on what other trials have reported by then. So a second search could
    choose other settings, and the study could not reuse the runs of the first one.

    Raises:
        DiskError
    """
    path = _outcome_file(study, outcome.method)
    files.make(path.parent, parents=True)
    tried = [{**trial, "score": _finite_or_none(trial["score"])} for trial in outcome.tried]
    files.write(path, json.dumps(clean({"method": outcome.method, "tried": tried}), indent=1) + "\n")


def remembered(study: StudyFile, label: str) -> SearchOutcome | None:
    """The outcome of an earlier search for the same method among the same settings; None if there is none."""
    try:
        record = json.loads(_outcome_file(study, label).read_text(encoding="utf-8"))
        tried = [
            {**trial, "score": -math.inf if trial["score"] is None else float(trial["score"])}
            for trial in record["tried"]
        ]
        outcome = SearchOutcome(label, tuple(tried))
        return outcome if outcome.ended else None
    except (OSError, Damaged, ValueError, TypeError, KeyError):
        return None  # a damaged file counts as missing: the search is repeated


def chosen(study: StudyFile, outcomes: Iterable[SearchOutcome]) -> Chosen:
    """What searches chose, for every point of the grid; a method whose trials all failed has no entry."""
    return {
        (outcome.method, place_of(point)): outcome.chosen
        for outcome in outcomes
        for point in points(study)
        if outcome.chosen is not None
    }


def _outcome_file(study: StudyFile, label: str) -> Path:
    """The file of a search, named by a hash of the runs that it executes and the settings that it draws."""
    tune = _tune_of(study)
    runs = [planned(study, label, point, seed, {}) for point in points(study) for seed in tune.seeds]
    settings = tune.model_dump(include={"space", "metric", "samples", "search", "scheduler"})
    hashed = [[run.key for run in runs], settings]
    if named := _named_hashes(study, label, runs):
        hashed.append(named)
    key = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]
    return runs[0].config.output.folder / FOLDER / f"{key}.json"


def _named_hashes(study: StudyFile, label: str, runs: Sequence[PlannedRun]) -> list[str]:
    """The hashes of files and plug-ins that values in the space name, except for those of ``runs``."""
    space = _tune_of(study).space
    low = {name: _examples(values)[0] for name, values in space.items()}
    configs = [
        _first_run(study, label, {**low, name: value}).config
        for name, values in space.items()
        for value in _examples(values)
        if not isinstance(value, bool | int | float | None)  # numbers name nothing
    ]
    hashes = {digest for config in configs for digest in (*sources_of(config), *contents_of(config))}
    return sorted(hashes.difference(*((*sources_of(r.config), *contents_of(r.config)) for r in runs[:1])))


def _first_run(study: StudyFile, label: str, settings: Settings) -> PlannedRun:
    return planned(study, label, points(study)[0], _tune_of(study).seeds[0], settings)


def _examples(values: Any) -> list[Any]:
    """The values of a list; two values of a range, of which the second is no whole number unless all are."""
    kind, parameters = ("choice", values) if isinstance(values, list) else next(iter(values.items()))
    if kind == "choice":
        return list(parameters)
    low, high = parameters
    if kind == "randint":
        return [low, high - 1]
    inside = low * (high / low) ** _INSIDE if kind == "loguniform" else low + _INSIDE * (high - low)
    return [low, inside]


_INSIDE = (math.sqrt(5) - 1) / 2
"""Where in a range the second value lies that is tried: irrational, so not at a whole number."""


def _finite_or_none(score: float) -> float | None:
    return score if math.isfinite(score) else None


def _tune_of(study: StudyFile) -> Tune:
    assert study.tune is not None
    return study.tune
