"""The results of the runs of a study: one row per run, means with intervals, paired differences, ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rayfl.algorithms import Algorithm
from rayfl.config import Config
from rayfl.data.base import TestedOn
from rayfl.errors import ConfigError, Damaged, nearest
from rayfl.evaluation import protocols
from rayfl.evaluation.metrics import METRICS
from rayfl.local import OBJECTIVES
from rayfl.losses import LOSSES, Loss
from rayfl.report.compare import flat
from rayfl.rundir import RunDirectory
from rayfl.statistics import Difference, Interval, holm, mean_interval, mean_ranks, paired_difference
from rayfl.study.claims import axis_of, point_of
from rayfl.study.file import StudyFile, shown
from rayfl.study.plan import PlannedRun, points, spoken
from rayfl.study.running import directory_of, is_finished
from rayfl.units import UNKNOWN, counted, duration, number, size

if TYPE_CHECKING:
    import pandas as pd

MOST_GROUPS = 12
"""The largest number of planted groups that have their own columns."""

OTHERS = (
    "accuracy_se_samples",
    "group_var_within",
    "group_var_between",
    "cluster_var_within",
    "cluster_var_between",
    "perplexity_mean",
    "distinct_test_samples",
    "ari",
    "clusters",
    "fallbacks",
    "newcomers",
    "newcomers_bytes_up",
    "bytes_up",
    "bytes_down",
    "seconds",
)
"""Numbers of a run's summary in addition to the tests of :mod:`rayfl.evaluation.protocols`."""


def _has_late_newcomers(config: Config) -> bool:
    return any(event.name == "join" and event.round == config.rounds for event in config.events)


def _has_fallbacks(config: Config) -> bool:
    return type(config.algorithm).tested_with is not Algorithm.tested_with


_VALIDATION = "partition.validation=0.1", lambda config: config.partition.validation > 0

NEEDS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    ("newcomers", "an event {name: join, round: <the last>, clients: 5}", _has_late_newcomers),
    ("local_", "evaluation.local=true", lambda config: config.evaluation.local),
    ("common_", "evaluation.common=true", lambda config: config.evaluation.common),
    ("finetuned_", "evaluation.finetune_epochs=1", lambda config: config.evaluation.finetune_epochs > 0),
    ("validation_", *_VALIDATION),
    ("_best_validation", *_VALIDATION),
    ("validation_", "evaluation.validation=true", lambda config: config.evaluation.validation),
    ("_best_validation", "evaluation.validation=true", lambda config: config.evaluation.validation),
    ("fallbacks", "a method that may test a client with another cluster's model", _has_fallbacks),
)
"""Parts of names, what such numbers require, and whether a config has it."""


def known_facts() -> dict[str, list[str]]:
    """The means of what local objectives report about their clients, and the objectives that report each."""
    known: dict[str, list[str]] = {}
    for name, objective in OBJECTIVES.items():
        for fact in objective.facts:
            known.setdefault(f"{fact}_mean", []).append(name)
    return known


def known_numbers() -> frozenset[str]:
    """The names of all numbers that a run's summary may have."""
    measures = frozenset(f"{name}_mean" for loss in LOSSES.values() for name in loss.measures)
    return _known_numbers(measures, frozenset(known_facts()))  # a user may add losses at any time


@cache
def _known_numbers(measures: frozenset[str], facts: frozenset[str]) -> frozenset[str]:
    names, best = {*OTHERS, *measures, *facts}, ("round", "loss_mean", *protocols.BEST, *measures)
    for on, model in itertools.product(get_args(TestedOn), get_args(protocols.Tested)):
        prefix = protocols.prefix(on, model)
        names |= {f"{prefix}{name}" for name in (*METRICS, *measures)}
        if on != "validation" and model != "finetuned":
            for choice in ("validation", "test"):
                names |= {f"{prefix}{name}_best_{choice}" for name in best}
        if model != "local":
            names |= {f"{protocols.NEWCOMERS}{prefix}{name}" for name in (*METRICS, *measures)}
    return frozenset(names)


_SUGGESTED = ("accuracy_mean", "accuracy_worst10", "loss_mean", "bytes_up", "seconds", "rounds_to_80")
"""Numbers that are suggested if no known name is similar to the one given."""

_TARGET_COLUMN = re.compile(r"(?P<prefix>(?:\w+_)?)(?P<what>rounds|bytes)_to_(?P<target>\d+(?:\.\d+)?)")
_GROUP_COLUMN = re.compile(r"(?P<prefix>local_|finetuned_|)accuracy_group_(?P<group>0|[1-9]\d*)")
_CLIENT_COLUMNS = {"local_": "local_accuracy_last", "finetuned_": "accuracy_finetuned"}
"""Columns of ``clients.csv`` with the accuracies of models other than those served."""

_LESS_IS_BETTER = ("loss", "perplexity", "var", "bytes", "seconds", "rounds_to", "_se")
"""Parts of the names of columns in which less is better."""

_UNRANKED = re.compile(r"(\w+_)?round_best_\w+|clusters|fallbacks|newcomers|distinct_test_samples")
"""Columns that describe a run; neither more nor less is better."""


def _error_measures() -> re.Pattern[str]:
    """The measures of losses that are errors, after any prefix."""
    names = sorted(name for loss in LOSSES.values() for name in loss.lower_is_better)
    return re.compile(rf"(\w+_)?({'|'.join(map(re.escape, names))})_mean(_best_\w+)?")


def _measure_of_a_loss() -> re.Pattern[str]:
    """The names of what losses measure in addition to accuracy, after any prefix."""
    names = sorted({name for loss in LOSSES.values() for name in loss.measures})
    return re.compile(rf"(\w+_)?(?P<measure>({'|'.join(map(re.escape, names))})_mean)(_best_\w+)?")


def _is_measured(column: str, loss: Loss) -> bool:
    """Whether tests with this loss give a number; those that no loss determines count as measured."""
    if "accuracy" in column or targets_accuracy(column):
        return loss.accurate
    match = _measure_of_a_loss().fullmatch(column)
    return match is None or match["measure"] in protocols.measures_of(loss)


def better(column: str) -> Literal["more", "less"] | None:
    """Whether more or less of a number is better; None where neither is."""
    if _UNRANKED.fullmatch(column) or column in known_facts():
        return None
    less = any(part in column for part in _LESS_IS_BETTER) or _error_measures().fullmatch(column)
    return "less" if less else "more"


@cache
def _tested_in_rounds() -> frozenset[str]:
    """The prefixes of the tests of ``rounds.csv``; clients fine-tune after the last round only."""
    models = [model for model in get_args(protocols.Tested) if model != "finetuned"]
    return frozenset(protocols.prefix(on, model) for on in get_args(TestedOn) for model in models)


def check_column(column: str, where: str, configs: Sequence[Config], method: str | None = None) -> None:
    """Refuse a column that no run has.

    Args:
        column: its name.
        where: the setting that names it.
        configs: of the runs.
        method: the label of their method; None if they are those of several methods.

    Raises:
        ConfigError
    """
    known_names = known_numbers()
    target = _TARGET_COLUMN.fullmatch(column)
    if target and target["prefix"] not in _tested_in_rounds():
        what = f"no run has {target['prefix']}accuracy_mean over its rounds"
        raise ConfigError(
            where, what, f"such as rounds_to_{target['target']}, local_rounds_to_{target['target']}"
        )
    if column not in known_names and target is None and group_of(column) is None:
        mean = f"{column}_mean"
        remedy = f"did you mean {mean!r}?" if mean in known_names else nearest(column, known_names)
        if target := re.fullmatch(r"\w*(rounds|bytes)_to", column):
            remedy = f"name an accuracy in %, such as {target[0]}_80"
        elif not remedy.startswith("did"):  # there are hundreds
            remedy = f"such as {', '.join(_SUGGESTED)}; a run's summary.json has all of them"
        raise ConfigError(where, f"no run has a number named {column!r}", remedy)
    if target and not 0 < float(target["target"]) <= 100:
        what = f"{column}: {target['target']} % is not a possible target"
        raise ConfigError(where, what, "choose one above 0 and at most 100")
    nobody = f"no run measures {column}" if method is None else f"no run of {method} measures {column}"
    for part, setting, has in NEEDS:
        if part in column and not any(map(has, configs)):
            place = "the study's settings" if method is None else f"settings, or to methods.{method}"
            raise ConfigError(where, nobody, f"add to {place}: {setting}")
    objectives = known_facts().get(column, ())
    if objectives and not any(column.removesuffix("_mean") in config.local.facts for config in configs):
        raise ConfigError(where, nobody, f"only with local.name={' or '.join(objectives)}")
    losses = {config.loss.name: config.loss for config in configs}
    if not any(_is_measured(column, loss) for loss in losses.values()):
        valid = [name for loss in losses.values() for name in protocols.measures_of(loss)]
        valid += ["accuracy_mean"] * any(loss.accurate for loss in losses.values())
        what = f"{nobody}, since the loss is {' or '.join(sorted(losses))}"
        raise ConfigError(where, what, f"such as {', '.join([*valid, 'loss_mean'])}")


def group_of(column: str) -> int | None:
    """The planted group whose accuracy a column gives: 3 for ``accuracy_group_3``; None for other columns."""
    match = _GROUP_COLUMN.fullmatch(column)
    return int(match["group"]) if match else None


def numbers_of(path: Path, columns: Sequence[str] = ()) -> dict[str, float]:
    """The numbers of a finished run: those of its summary, of its planted groups, and of target columns.

    Raises:
        Damaged
    """
    directory = RunDirectory(path)
    summary = directory.read_json("summary.json") or {}
    numbers = {name: float(v) for name, v in summary.items() if isinstance(v, int | float)}
    groups = summary.get("by_group") or []
    for group in groups if len(groups) <= MOST_GROUPS else []:
        if group.get("accuracy_mean") is not None:
            numbers[f"accuracy_group_{group['id']}"] = float(group["accuracy_mean"])
    for column in columns:
        match = _TARGET_COLUMN.fullmatch(column)
        if match:
            accuracy = f"{match['prefix']}accuracy_mean"
            spent = _spent_until(directory, match["what"], accuracy, float(match["target"]))
            if spent is not None:
                numbers[column] = spent
        match = _GROUP_COLUMN.fullmatch(column)
        if match and match["prefix"]:
            clients = directory.read_frame("clients.csv")
            accuracy, of_group = _CLIENT_COLUMNS[match["prefix"]], clients["group"] == int(match["group"])
            numbers[column] = (
                float(clients.loc[of_group, accuracy].mean()) if accuracy in clients else math.nan
            )
    return numbers


def targets_accuracy(column: str) -> bool:
    """Whether a column is ``rounds_to_80``, ``local_bytes_to_80`` or the like."""
    return _TARGET_COLUMN.fullmatch(column) is not None


def _spent_until(directory: RunDirectory, what: str, accuracy: str, target: float) -> float | None:
    """Rounds, or bytes sent up, until an accuracy first reached a target; NaN if it never did, None if it was
    not measured."""
    rounds = directory.read_frame("rounds.csv")
    if accuracy not in rounds or not rounds[accuracy].notna().any():
        return None
    reached = rounds.index[rounds[accuracy] >= target]
    if not len(reached):
        return math.nan
    until = rounds.loc[: reached[0]]
    return float(len(until) if what == "rounds" else until["bytes_up"].sum())


@dataclass(frozen=True)
class Comparison:
    """A method compared with the reference, at a point of the grid, in a column.

    Attributes:
        difference: method minus reference, paired over seeds.
        p: adjusted by Holm's method for all comparisons in the column.
    """

    method: str
    reference: str
    point: Mapping[str, str]
    column: str
    difference: Difference
    p: float


@dataclass(frozen=True)
class Results:
    """The runs of a study, as far as they exist.

    Attributes:
        study: the file.
        runs: planned.
        columns: read in addition to the numbers of every summary.
        errors: error of each failed run, by its key.
    """

    study: StudyFile
    runs: Sequence[PlannedRun]
    columns: Sequence[str]
    errors: Mapping[str, str]

    @cached_property
    def _numbers(self) -> dict[tuple[str, str, int], dict[str, float]]:
        numbers: dict[tuple[str, str, int], dict[str, float]] = {}
        by_key: dict[str, dict[str, float]] = {}
        for run in self.runs:
            if run.key not in by_key and is_finished(run):
                try:
                    by_key[run.key] = numbers_of(directory_of(run), self.columns)
                except Damaged:
                    continue
            if run.key in by_key:
                numbers[run.method, _point_key(run.point), run.seed] = by_key[run.key]
        return numbers

    @cached_property
    def _by_point(self) -> dict[tuple[str, str], dict[int, dict[str, float]]]:
        """The numbers of all runs, by method and point and then by seed; empty if there are none."""
        by_point: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
        for run in self.runs:
            place = _point_key(run.point)
            numbers = self._numbers.get((run.method, place, run.seed), {})
            by_point.setdefault((run.method, place), {})[run.seed] = numbers
        return by_point

    @cached_property
    def _runs_by_point(self) -> dict[tuple[str, str], list[PlannedRun]]:
        runs: dict[tuple[str, str], list[PlannedRun]] = {}
        for run in self.runs:
            runs.setdefault((run.method, _point_key(run.point)), []).append(run)
        return runs

    @property
    def points(self) -> list[dict[str, str]]:
        """The points of the grid."""
        return points(self.study)

    def point(self, at: Mapping[str, Any]) -> dict[str, str]:
        """The point of the grid that a user names: ``{"alpha": 0.1}``; on other axes the first.

        Raises:
            ConfigError: if the grid has no such axis or point.
        """
        axes = {axis: list(names) for axis, names in self.study.axes.items()}

        def fail(what: str, remedy: str) -> ConfigError:
            return ConfigError("at", what, remedy)

        chosen = {}
        for name, value in at.items():
            axis = axis_of(str(name), axes, fail)
            chosen[axis] = point_of(axis, shown(value), axes, fail)
        return {axis: chosen.get(axis, names[0]) for axis, names in axes.items()}

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, sorted."""
        return sorted({run.seed for run in self.runs})

    @cached_property
    def versions(self) -> dict[str, str]:
        """The version of rayfl that began each finished run, by key; new versions do not repeat runs."""
        versions = {}
        for run in self.runs:
            if (run.method, _point_key(run.point), run.seed) in self._numbers and run.key not in versions:
                with contextlib.suppress(Damaged, KeyError, TypeError):
                    environment = RunDirectory(directory_of(run)).read_json("environment.json") or {}
                    versions[run.key] = str(environment["versions"]["rayfl"])
        return versions

    @cached_property
    def finished(self) -> int:
        """Number of finished runs."""
        return len(self._numbers)

    def values(self, method: str, point: Mapping[str, str], column: str) -> dict[int, float]:
        """A number of the runs by seed; NaN if a run lacks it, failed, or has not been run."""
        runs = self._by_point.get((method, _point_key(point)), {})
        return {seed: numbers.get(column, math.nan) for seed, numbers in runs.items()}

    def never(self, method: str, point: Mapping[str, str], column: str) -> list[PlannedRun]:
        """The finished runs of a method that never reached the target of a column (``rounds_to_80``)."""
        if not targets_accuracy(column):
            return []
        by_seed = self._by_point.get((method, _point_key(point)), {})
        runs = self._runs_at(method, point, True)
        return [run for run in runs if math.isnan(by_seed[run.seed].get(column, 0.0))]

    def least(self, method: str, point: Mapping[str, str], column: str) -> float | None:
        """The rounds that the runs of a method exceed if none reached a column's target, or None."""
        match, never = _TARGET_COLUMN.fullmatch(column), self.never(method, point, column)
        if match is None or match["what"] != "rounds" or len(never) < max(2, len(self.seeds)):
            return None
        return float(min(run.config.rounds for run in never))

    def _runs_at(self, method: str, point: Mapping[str, str], finished: bool) -> list[PlannedRun]:
        """The runs of a method at a point of the grid that are finished, or that are not."""
        place = _point_key(point)
        runs = self._runs_by_point.get((method, place), [])
        return [run for run in runs if ((method, place, run.seed) in self._numbers) == finished]

    def why_without(
        self, method: str, point: Mapping[str, str], named: Mapping[str, str], column: str
    ) -> str:
        """Which runs of a method have failed, are not finished, or never reached the target of a column:
        ``1 of 3 runs failed (FedAvg)``; empty if there are none.

        Args:
            method: its label.
            point: of the grid.
            named: the part of the point that the text names.
            column: name of a number.
        """
        lacking = self._runs_at(method, point, False)
        all_runs = counted(len(lacking) + len(self._runs_at(method, point, True)), "run")
        failed = sum(run.key in self.errors for run in lacking)
        whose = ", ".join([method, *(spoken(axis, name) for axis, name in named.items())])
        texts = [f"{failed} of {all_runs} failed"] if failed else []
        if (others := len(lacking) - failed) > 0:
            texts.append(f"{others} of {all_runs} {'is' if others == 1 else 'are'} not finished")
        if never := len(self.never(method, point, column)):
            texts.append(f"{never} of {all_runs} never reached it")
        return f"{' and '.join(texts)} ({whose})" if texts else ""

    def interval(self, method: str, point: Mapping[str, str], column: str) -> Interval:
        """The mean over seeds, with its interval."""
        return mean_interval(list(self.values(method, point, column).values()))

    @property
    def reference(self) -> str:
        """The method with which the others are compared."""
        return self.study.report.reference or next(iter(self.study.methods))

    def comparisons(self, column: str) -> list[Comparison]:
        """All methods compared with the reference, at every point of the grid."""
        comparisons = []
        for point in self.points:
            base = self.values(self.reference, point, column)
            for method in self.study.methods:
                if method == self.reference:
                    continue
                values = self.values(method, point, column)
                seeds = sorted(set(base) & set(values))
                difference = paired_difference([values[s] for s in seeds], [base[s] for s in seeds])
                comparisons.append(Comparison(method, self.reference, point, column, difference, math.nan))
        adjusted = holm([each.difference.p for each in comparisons])
        return [
            Comparison(c.method, c.reference, c.point, c.column, c.difference, float(p))
            for c, p in zip(comparisons, adjusted, strict=True)
        ]

    @property
    def ranked(self) -> list[str]:
        """The methods that have a finished run."""
        finished = {method for method, _, _ in self._numbers}
        return [method for method in self.study.methods if method in finished]

    def ranks(self, column: str) -> dict[str, float]:
        """The mean rank of every method over seeds and points of the grid, 1 for the best.

        Methods none of whose runs is finished are not ranked. Of the others, seeds with a missing run do not
        count; a run that never reached a target ranks last. NaN for methods that are not ranked, and for
        numbers for which neither more nor less is :func:`better`.
        """
        methods = self.ranked
        places = [(point, seed) for point in self.points for seed in self.seeds]
        blocks = [
            [self._value_to_rank(method, point, seed, column) for method in methods] for point, seed in places
        ]
        if better(column) is None or not blocks:
            return dict.fromkeys(self.study.methods, math.nan)
        ranks = dict(zip(methods, mean_ranks(blocks, better(column) == "more").tolist(), strict=True))
        return {method: ranks.get(method, math.nan) for method in self.study.methods}

    def _value_to_rank(self, method: str, point: Mapping[str, str], seed: int, column: str) -> float:
        value = self._numbers.get((method, _point_key(point), seed), {}).get(column)
        if value is None:  # not finished, or not measured
            return math.nan
        return math.inf if math.isnan(value) and targets_accuracy(column) else value

    def frame(self) -> pd.DataFrame:
        """``runs.csv``, one row per run: its place, settings that differ or were chosen, its numbers."""
        import pandas as pd

        chosen = {name for run in self.runs for name in run.chosen}
        differing = _settings_to_show([run.config.to_dict() for run in self.runs], chosen)
        rows = []
        for run, settings in zip(self.runs, differing, strict=True):
            path = directory_of(run)
            numbers = self._numbers.get((run.method, _point_key(run.point), run.seed), {})
            state = "finished" if is_finished(run) else "failed" if run.key in self.errors else "missing"
            rows.append(
                {
                    "method": run.method,
                    **self.study.values_of(run.point),
                    "seed": run.seed,
                    "state": state,
                    **{name: value for name, value in settings.items() if name not in run.point},
                    **{name: value for name, value in numbers.items() if name not in run.point},
                    "key": run.key,
                    "path": str(path),
                    "rayfl": self.versions.get(run.key),
                    **({"error": self.errors[run.key]} if run.key in self.errors else {}),
                }
            )
        return pd.DataFrame(rows)


def _point_key(point: Mapping[str, str]) -> str:
    return json.dumps(dict(point), sort_keys=True)


_NOT_COMPARED = ("seed", "name", "output", "execution", "plugins")
"""Settings that are not compared: how a run is named, written and executed."""


def _settings_to_show(configs: Sequence[Mapping[str, Any]], chosen: Collection[str]) -> list[dict[str, Any]]:
    """For each config, by dotted path: the settings that are not the same in all of them, and those in
    ``chosen``.
    """
    flattened = [flat({k: v for k, v in c.items() if k not in _NOT_COMPARED}) for c in configs]
    names = list(dict.fromkeys(name for settings in flattened for name in settings))
    missing = object()
    differ = [
        name
        for name in names
        if name in chosen
        or any(settings.get(name, missing) != flattened[0].get(name, missing) for settings in flattened)
    ]
    return [{name: _cell(settings.get(name)) for name in differ} for settings in flattened]


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def unit_of_column(column: str) -> str:
    """The unit of a column's numbers: ``%``, ``bytes``, ``seconds``, ``rounds``; empty without one."""
    if "bytes" in column:
        return "bytes"
    if column == "seconds":
        return "seconds"
    if "rounds_to_" in column:
        return "rounds"
    return "%" if title_of(column).partition(",")[0].endswith("(%)") else ""


def written(column: str) -> Callable[[float], str]:
    """The function that writes a column's numbers as text."""
    if (unit := unit_of_column(column)) in ("bytes", "seconds"):
        return size if unit == "bytes" else duration
    counts = column in ("clusters", "fallbacks", "newcomers", "distinct_test_samples")
    if counts or "rounds_to_" in column or "round_best_" in column:
        return _count
    digits = 1 if "accuracy" in column else 2
    return lambda value: number(float(value), digits)


def _count(value: float) -> str:
    """Whole numbers as they are; their means with one decimal: ``2.7``."""
    return number(float(value), 0 if float(value).is_integer() else 1)


_TITLES = {
    "accuracy_mean": "mean accuracy (%)",
    "accuracy_weighted": "accuracy weighted by test samples (%)",
    "accuracy_median": "median accuracy (%)",
    "accuracy_worst10": "worst 10 % (%)",
    "accuracy_best10": "best 10 % (%)",
    "accuracy_var": "variance (%²)",
    "loss_mean": "loss",
    "perplexity_mean": "perplexity",
    "pruned_weights_mean": "pruned weights (%)",
    "pruned_channels_mean": "pruned channels (%)",
    "ari": "ARI",
    "bytes_up": "sent up",
    "bytes_down": "sent down",
    "seconds": "time",
}

_PREFIXES = {
    protocols.NEWCOMERS: "newcomers",
    "common_": "on all test samples",
    "validation_": "on validation samples",
    "local_": "models as clients trained them",
    "finetuned_": "fine-tuned",
}

_ENDINGS = {
    "_best_validation": "best round by validation",
    "_best_test": "best round by the test data themselves",
}


def is_percentage(column: str) -> bool:
    """Whether a column's numbers are between 0 and 100 %."""
    return title_of(column).partition(",")[0].endswith("(%)")  # without the qualifiers


def title_of(column: str) -> str:
    """A column as text: which number, of which model, on which data, after which round."""
    qualifiers: list[str] = []
    rest = column
    for prefix, words in _PREFIXES.items():
        if rest.startswith(prefix):
            qualifiers, rest = [*qualifiers, words], rest.removeprefix(prefix)
    for ending, words in _ENDINGS.items():
        if rest.endswith(ending):
            qualifiers, rest = [*qualifiers, words], rest.removesuffix(ending)
    title = _TITLES.get(rest, rest.replace("_", " "))
    if (group := group_of(rest)) is not None:
        title = f"accuracy of group {group} (%)"
    if target := _TARGET_COLUMN.fullmatch(rest):
        title = f"{target['what']} to {target['target']} %"
    return ", ".join([title, *qualifiers])


def cell(interval: Interval, column: str, seeds: int = 0, never: int = 0) -> str:
    """``77.3 ± 2.1``; a dash if there is no number; without an interval if there is one seed.

    Args:
        interval: of the known numbers.
        column: their column.
        seeds: planned number of seeds; fewer are shown as in ``12 ± 3 (2 of 3)``.
        never: how many runs never reached the column's target: ``12 (1 of 3, 2 never)``, ``never``.
    """
    if not interval.n:
        return (
            UNKNOWN if not never else "never" if never == seeds else f"{UNKNOWN} ({never} of {seeds} never)"
        )
    form = written(column)
    also = f", {never} never" if never else ""
    fewer = f" ({interval.n} of {seeds}{also})" if interval.n < seeds else ""
    if not interval.bounded or interval.half == 0:
        return form(interval.mean) + fewer
    return f"{form(interval.mean)} ± {form(interval.half)}{fewer}"
