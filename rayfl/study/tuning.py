"""Choose settings for every method on the clients' validation samples, before the study's own runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.errors import ConfigError, Damaged, nearest
from rayfl.evaluation import protocols
from rayfl.evaluation.metrics import METRICS
from rayfl.rundir import RunDirectory
from rayfl.study.file import Settings, StudyFile, Tune, overrides_of
from rayfl.study.plan import (
    PlannedRun,
    check_algorithm_settings,
    check_number,
    place_of,
    points,
    resolved,
    spoken,
    tuned_names,
)
from rayfl.study.results import better, known_numbers
from rayfl.study.running import directory_of, is_finished

Chosen = dict[tuple[str, str], Settings]
"""The chosen settings by method and point of the grid (:func:`~rayfl.study.plan.place_of`)."""


@dataclass(frozen=True)
class Candidate:
    """Settings to try for a method.

    Attributes:
        method: its label.
        settings: from the search space.
        runs: one per point of the grid and seed.
    """

    method: str
    settings: Settings
    runs: tuple[PlannedRun, ...]

    def score(self, metric: str, point: Mapping[str, str] | None = None) -> float:
        """The mean over runs; minus infinity if one of them failed, as it does when training diverges.

        Args:
            metric: of the validation samples.
            point: of the grid; None for all.
        """
        scores = [validation(run, metric) for run in self.at(point)]
        return -math.inf if any(math.isnan(value) for value in scores) else sum(scores) / len(scores)

    def at(self, point: Mapping[str, str] | None) -> list[PlannedRun]:
        """Its runs at a point of the grid; None for all."""
        return [run for run in self.runs if point is None or run.point == point]


def validation(run: PlannedRun, metric: str) -> float:
    """A number of a finished run's last evaluation on validation samples; NaN if it has none."""
    if not is_finished(run):
        return math.nan
    try:
        value = (RunDirectory(directory_of(run)).read_json("summary.json") or {}).get(f"validation_{metric}")
    except Damaged:
        return math.nan
    return float(value) if isinstance(value, int | float) else math.nan


def planned(
    study: StudyFile, label: str, point: Mapping[str, str], seed: int, settings: Settings
) -> PlannedRun:
    """The run that tries settings for a method; settings that the method itself sets are not tuned."""
    tune = study.tune
    assert tune is not None
    first = resolved(study, label, point, seed, (), overrides_of(settings))
    held_out = {} if first.partition.validation else {"partition.validation": tune.share}
    changes = [*overrides_of({**held_out, **tune.settings})]
    config = resolved(study, label, point, seed, changes, overrides_of(settings))
    return PlannedRun(label, point, seed, config, settings)


def candidates(study: StudyFile) -> list[Candidate]:
    """Every method with every combination of values that makes a difference to it.

    A single combination that changes its runs is tried, too: it has no rival, but may fail.

    Raises:
        ConfigError: for the first invalid run.
    """
    tune = study.tune
    if tune is None:
        return []
    metric = f"validation_{tune.metric}"
    if metric not in known_numbers():
        raise ConfigError(
            "tune.metric", f"no run has a number named {metric!r}", nearest(tune.metric, METRICS)
        )
    if better(metric) == "less":
        raise ConfigError(
            "tune.metric",
            f"lower values of {tune.metric} are better",
            "choose a metric for which higher values are better, such as accuracy_mean",
        )
    configs = [resolved(study, label, points(study)[0], study.seeds[0]) for label in study.all_methods]
    check_algorithm_settings("tune", tune.space, configs)
    if not tune.is_grid:
        return []
    tried = math.prod(map(len, tune.space.values())) * len(points(study)) * len(tune.seeds)
    check_number(tried * len(study.methods), "runs that choose settings")
    all_candidates = []
    for label in study.methods:
        space = {name: tune.space[name] for name in tuned_names(study, label)}
        combinations = [
            dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())
        ]
        seen: set[str] = set()
        of_method = []
        for settings in combinations:
            runs = tuple(
                planned(study, label, point, seed, settings)
                for point, seed in itertools.product(points(study), tune.seeds)
            )
            keys = " ".join(run.key for run in runs)
            if keys not in seen:
                of_method.append(Candidate(label, settings, runs))
            seen.add(keys)
        first = of_method[0]
        untuned = [planned(study, label, run.point, run.seed, {}).key for run in first.runs]
        makes_a_difference = len(of_method) > 1 or [run.key for run in first.runs] != untuned
        all_candidates += of_method if makes_a_difference else []
    return all_candidates


def check_metric(study: StudyFile) -> None:
    """Refuse to choose by a number that the runs of a method do not measure.

    Raises:
        ConfigError
    """
    tune = study.tune
    if tune is None:
        return
    for label in study.methods:
        config = planned(study, label, points(study)[0], tune.seeds[0], {}).config
        if not config.evaluation.validation:
            raise ConfigError(
                "tune",
                f"{label} has evaluation.validation=false, so nothing is measured to choose by",
                "remove that setting, or leave tune out",
            )
        measured = protocols.columns(("validation",), ("served",), config.loss)
        if f"validation_{tune.metric}" not in measured:
            names = [name.removeprefix("validation_") for name in measured if better(name) == "more"]
            what = f"runs of {label} measure no {tune.metric}: its loss is {config.loss.name}"
            raise ConfigError(
                "tune.metric", what, f"choose {' or '.join(names)}" if names else "leave tune out"
            )


def check_measured(tune: Tune, tried: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a method some of whose trials have finished, but none with a known score.

    Args:
        tune: of the study.
        tried: see :func:`trial_records`.

    Raises:
        ConfigError
    """
    for label in dict.fromkeys(trial["method"] for trial in tried):
        finished = [trial for trial in tried if trial["method"] == label and trial["state"] == "finished"]
        if finished and not any(math.isfinite(trial["score"]) for trial in finished):
            raise ConfigError(
                "tune.metric",
                f"{label}: validation_{tune.metric} is unknown in all runs that finished",
                "hold out more samples by partition.validation, or name another metric",
            )


def best(study: StudyFile, tried: Sequence[Candidate]) -> Chosen:
    """The settings with the highest score for every method; of equal ones the first.

    A method without a finished candidate has no entry (:func:`check_chosen`).
    """
    tune = study.tune
    assert tune is not None
    chosen: Chosen = {}
    for label, point in itertools.product({c.method: None for c in tried}, points(study)):
        of_method = [candidate for candidate in tried if candidate.method == label]
        scores = [each.score(tune.metric, point if tune.per == "point" else None) for each in of_method]
        if max(scores) > -math.inf:
            chosen[label, place_of(point)] = of_method[scores.index(max(scores))].settings
    return chosen


def check_chosen(study: StudyFile, tried: Sequence[Mapping[str, Any]], chosen: Chosen) -> None:
    """Refuse a method of which all trials have failed: untuned, it would not be compared fairly.

    Args:
        study: the file.
        tried: see :func:`trial_records`.
        chosen: what was chosen among them.

    Raises:
        ConfigError
    """
    for label, point in itertools.product({trial["method"]: None for trial in tried}, points(study)):
        if (label, place_of(point)) not in chosen:
            by_point = study.tune is not None and study.tune.per == "point"
            where = "".join(f", {spoken(axis, name)}" for axis, name in point.items()) * by_point
            what = f"{label}{where}: no combination of values has runs that all finished"
            raise ConfigError("tune", what, "change the values")


def trial_records(study: StudyFile, tried: Sequence[Candidate]) -> list[dict[str, Any]]:
    """For ``tuned.json``: what was tried, and its score at every point of the grid."""
    tune = study.tune
    assert tune is not None
    return [
        {
            "method": candidate.method,
            **({"at": point} if point else {}),
            "settings": candidate.settings,
            "score": candidate.score(tune.metric, point),
            "state": "finished" if all(map(is_finished, candidate.at(point))) else "failed",
            "paths": [str(directory_of(run)) for run in candidate.at(point)],
        }
        for candidate in tried
        for point in points(study)
    ]
