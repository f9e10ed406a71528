"""Compare runs: a table of what differs and of the results, and their curves.

Runs that differ only in the seed are one *group*, with means and 95 % intervals over its seeds.
"""

from __future__ import annotations

import html
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rayfl import files
from rayfl.errors import ArgumentError
from rayfl.report.across import TABLE, Block, boxes_of_clients, clients_section, maps_of_clients, trade_off
from rayfl.report.charts import Line, Metric, curves
from rayfl.report.files import TESTS_AT_THE_END, TESTS_IN_ROUNDS, RunFiles
from rayfl.report.html import (
    MOST_GROUPS,
    ROUNDS,
    known,
    line_of,
    offered,
    thinned,
)
from rayfl.report.page import Column, Page, Section, Table, rounded, significant, write
from rayfl.statistics import LEVEL, Interval, mean_interval
from rayfl.units import UNKNOWN, counted, duration, number, size, three_digits, uncertain

if TYPE_CHECKING:
    from rayfl.report.methods import MethodPlots

_STORAGE_SETTINGS = ("data.root", "data.path")
"""Settings of a dataset that specify where it is stored, not what it is."""
_IGNORED_SETTINGS = ("name", "seed", "plugins", "execution", "output", "paper")
"""Settings and sections that do not affect results, or over which results are averaged."""
_METHOD_SECTIONS = ("aggregation", "algorithm", "clustering", "hierarchy", "local", "order", "sampling")
"""Sections that depend on the method; differences that follow from the method are not listed."""
MOST_SETTINGS = 12
"""The largest number of columns for settings; if there are more differences, the first are shown."""
FEW_SETTINGS = 4
"""With more settings that differ than this, the page shows the results before them."""
_NOT_RANKED = (
    "Not ranked. These runs do not have the same clients with the same data, so a higher accuracy may come "
    "from easier data. They differ in:"
)
BAND = f"Band: {100 * LEVEL:.0f} % interval of the mean over seeds (Student's t)."


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed.

    Attributes:
        name: what distinguishes it from the other groups.
        settings: its values of the settings that differ between groups, by dotted name.
        runs: in the order given; and their ``rows``, see :meth:`rayfl.report.files.RunFiles.headline`.
    """

    name: str
    settings: Mapping[str, Any]
    runs: tuple[RunFiles, ...]
    rows: tuple[Mapping[str, Any], ...]

    def interval(self, column: str) -> Interval:
        """Mean over the runs and its interval."""
        return mean_interval([math.nan if row.get(column) is None else row[column] for row in self.rows])

    @property
    def estimated(self) -> bool:
        """Whether the last evaluation of a run was an estimate from a few clients."""
        return any(row.get("estimated_from") is not None for row in self.rows)

    @property
    def changed_code(self) -> list[str]:
        """Names of plug-ins, or ``rayfl``, of which the runs had different versions."""
        codes = [run.code for run in self.runs]
        names = dict.fromkeys(name for code in codes for name in code)
        return [name for name in names if len({code[name] for code in codes if name in code}) > 1]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs side by side; runs that differ only in the seed are one group. See :func:`rayfl.compare`.

    Attributes:
        files: the runs that were read, in the order given.
        runs: one row per run, with the columns of :meth:`rayfl.report.files.RunFiles.headline`; ``run`` is
            the directory's name, with those of its parents where two are equal.
        groups: runs that differ only in the seed.
        differences: why accuracies of these runs cannot be compared, one line for each difference in dataset,
            partition, events or seeds, with the runs that have each value; empty if all groups have the same
            seeds, and runs with the same seed have the same clients with the same data.
    """

    files: tuple[RunFiles, ...]
    runs: pd.DataFrame
    groups: tuple[Group, ...]
    differences: tuple[str, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Comparison:
        """Read run directories, finished or not.

        Raises:
            RayflError: if a run directory does not exist.
        """
        run_files = tuple(RunFiles.read(Path(path)) for path in paths)
        runs = _frame(run_files)
        groups = _groups(run_files, runs)
        return cls(run_files, runs, groups, tuple(_data_differences(runs["run"].tolist(), run_files, groups)))

    def __repr__(self) -> str:
        """How many runs and groups; their contents would fill a screen."""
        return f"Comparison({counted(len(self.files), 'run')}, {counted(len(self.groups), 'group')})"

    def _repr_html_(self) -> str:
        """For notebooks: the table, and why accuracies cannot be compared."""
        table = pd.DataFrame(dict(self.shown().texts())).to_html(index=False)
        notes = [" ".join([_NOT_RANKED, "; ".join(self.differences)])] if self.differences else []
        return table + "".join(f"<p>{html.escape(note)}</p>" for note in (*notes, self.caption()))

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per group and numeric column of :attr:`runs`: settings that differ, mean over seeds, and
        its 95 % interval (Student's t), which a single run does not have.
        """
        rows = []
        for column in _numeric_columns(self.runs):
            for group in self.groups:
                interval = group.interval(column)
                bounds = (interval.low, interval.high) if interval.bounded else (None, None)
                values = {"mean": interval.mean, "low": bounds[0], "high": bounds[1], "seeds": interval.n}
                rows.append({"group": group.name, **group.settings, "column": column, **values})
        return pd.DataFrame(rows)

    @property
    def plot(self) -> MethodPlots:
        """Figures, a curve or box for each group: ``comparison.plot.accuracy()``."""
        from rayfl.report.methods import MethodPlots

        return MethodPlots(_Groups(self))

    @property
    def seeds(self) -> bool:
        """Whether some runs differ only in the seed."""
        return any(len(group.runs) > 1 for group in self.groups)

    @property
    def settings(self) -> list[str]:
        """The settings that differ between groups, by dotted name."""
        return list(dict.fromkeys(name for group in self.groups for name in group.settings))

    @property
    def _needs_run_names(self) -> bool:
        """Whether settings are not enough to tell the groups apart."""
        return not self.settings or any(group.name != _group_name(group.settings) for group in self.groups)

    @property
    def naming(self) -> int:
        """Number of the first columns of :meth:`shown` that name the rows together."""
        return self._needs_run_names + len(self.settings)

    def shown(self) -> Table:
        """The table that ``rayfl compare`` shows: one row per group, with the settings that differ and the
        results, without empty columns.
        """
        settings = self.settings
        columns = []
        if self._needs_run_names:
            columns.append(Column("run", [group.name for group in self.groups]))
        for name in settings:
            values = [group.settings.get(name) for group in self.groups]
            numeric = [isinstance(v, (int, float)) and not isinstance(v, bool) for v in values]
            order = [
                float(v) if ok and v is not None else None for v, ok in zip(values, numeric, strict=True)
            ]
            texts = [UNKNOWN if v is None else _shortened(v) for v in values]
            title = "method" if name == "algorithm.name" else name
            columns.append(Column(title, texts, order=order if any(numeric) else None))
        if self.seeds:
            columns.append(Column("seeds", [len(group.runs) for group in self.groups], "number:0"))
        shown = [
            ("accuracy_mean", "accuracy, last", _percent if self.seeds else _percent_of_clients),
            ("accuracy_mean_best_validation", "best round by validation", _percent),
            ("accuracy_mean_max", "best round by test", _percent),
            ("accuracy_worst10", "worst 10 %", _percent),
            ("accuracy_var", "variance, %²", _decimals(1)),
            ("local_accuracy_mean", "local models", _percent),
            ("common_accuracy_mean", "common test set", _percent),
            ("finetuned_accuracy_mean", "fine-tuned", _percent),
            ("newcomers_accuracy_mean", "newcomers", _percent),
            ("newcomers_finetuned_accuracy_mean", "newcomers, fine-tuned", _percent),
            *((f"{name}_mean", name, _significant) for name in self.measures),
            *(
                (f"{test}{name}_mean", f"{name}, {where}", _significant)
                for name in dict.fromkeys(name for run in self.files for name in run.described)
                for test, where in {**TESTS_IN_ROUNDS, **TESTS_AT_THE_END}.items()
            ),
            *([] if self._has_results else [("loss_mean", "test loss", _significant)]),
            ("perplexity_mean", "perplexity", _decimals(1)),
            ("clusters", "clusters", _count),
            ("ari", "ARI", _decimals(2)),
            ("bytes_up", "sent up", lambda group, column: size(group.interval(column).mean)),
            ("bytes_down", "sent down", lambda group, column: size(group.interval(column).mean)),
            ("seconds", "time", lambda group, column: duration(group.interval(column).mean)),
        ]
        for column, title, written in shown:
            if self._has(column):
                order = rounded([group.interval(column).mean for group in self.groups], 6)
                columns.append(Column(title, [written(group, column) for group in self.groups], order=order))
        return Table(columns, caption="comparison")

    @property
    def _has_results(self) -> bool:
        """Whether there are accuracies, or measures of a loss."""
        return bool(self.measures) or self._has("accuracy_mean")

    def _has(self, column: str) -> bool:
        return column in self.runs and bool(self.runs[column].notna().any())

    @property
    def measures(self) -> list[str]:
        """The additional measures of the runs' losses, by name."""
        return list(dict.fromkeys(name for run in self.files for name in run.measures))

    def caption(self) -> str:
        """What the numbers of :meth:`shown` are."""
        accurate = self._has("accuracy_mean")
        descriptions = {name: text for run in self.files for name, text in run.measures.items()}
        measures = [f"{name} ({text})" for name, text in descriptions.items()]
        measured = _listed([*(["accuracy"] if accurate else []), *measures]) or "loss"
        text = (
            "Results are means over clients, each on its own test samples with the model that it would "
            f"use, at the last evaluation: {measured}."
        )
        if accurate:
            text += (
                " The best round by test is chosen among those in which all clients were tested, on these "
                "same test samples, so its accuracy is biased upwards."
            )
        if self.seeds:
            text += (
                f" Means over seeds, ± half of their {100 * LEVEL:.0f} % interval (Student's t; a single run "
                "has none)."
            )
        elif accurate:
            text += " ± is the standard error over clients."
        for group in self.groups:
            if group.changed_code:
                changed = _listed(group.changed_code)
                text += f" Runs of {group.name} differ in more than the seed: in versions of {changed}."
        estimates = self.runs.get("estimated_from")
        if estimates is not None and estimates.notna().any():
            text += " ≈ marks an estimate from a few clients, which never counts as best."
        return text

    def write(self, out: Path | str) -> Path:
        """Write the comparison as a self-contained page, and :attr:`runs` as a CSV file next to it.

        Args:
            out: the HTML file, or a folder, in which it becomes ``comparison.html``.

        Returns:
            The path of the page.

        Raises:
            ArgumentError: if ``out`` is the name of a table (``.csv``).
            DiskError: if it cannot be written.
        """
        out = Path(os.path.expanduser(out))
        path = out / "comparison.html" if out.is_dir() else out
        if path.suffix == ".csv":
            raise ArgumentError(
                "out", f"{out} is the name of a table", "name a page, such as comparison.html"
            )
        files.make(path.parent, parents=True)
        files.write(path.with_suffix(".csv"), self.runs.to_csv(index=False))
        return write(path, page_of(self))


@dataclass(frozen=True)
class _Groups:
    """The groups of a comparison, as :class:`~rayfl.report.across.Methods`."""

    comparison: Comparison

    @property
    def names(self) -> list[str]:
        """The names of the groups."""
        return [group.name for group in self.comparison.groups]

    @property
    def comparable(self) -> bool:
        """Whether accuracies can be compared."""
        return not self.comparison.differences

    def runs(self, name: str) -> tuple[RunFiles, ...]:
        """The runs of a group."""
        return self._group(name).runs

    def interval(self, name: str, column: str) -> Interval:
        """Mean and interval of a number over the runs of a group."""
        return self._group(name).interval(column)

    def _group(self, name: str) -> Group:
        return next(group for group in self.comparison.groups if group.name == name)


def page_of(comparison: Comparison) -> Page:
    """The page about a comparison."""
    notes = []
    if comparison.differences:
        notes.append((_NOT_RANKED, list(comparison.differences)))
    notes.append(("", [comparison.caption()]))
    lines = [
        thinned(mean_line(group.name, [line_of(run, "") for run in group.runs]))
        for group in comparison.groups
    ]
    count = len(comparison.groups)
    clients, columns = _clients(comparison)
    first_runs = {}
    for group in comparison.groups:
        run = group.runs[0]
        seed = f", seed {run.setting('seed')}" if len(group.runs) > 1 else ""
        first_runs[f"{group.name}{seed}"] = run
    maps, tables = maps_of_clients(first_runs)
    return Page(
        title="Comparison",
        subtitle=f"{counted(len(comparison.files), 'run')}"
        + (f" in {counted(count, 'group')} that differ in more than the seed" if comparison.seeds else ""),
        notes=notes,
        lead=_results_first(comparison.shown(), comparison.naming),
        sections=[
            section
            for section in (
                _over_rounds(lines),
                _trade_off(comparison),
                clients,
                *maps,
                _by_planted_group(comparison),
                _each_run(comparison),
            )
            if section is not None
        ],
        data={**({TABLE: columns} if columns else {}), **tables},
    )


def _results_first(table: Table, naming: int) -> Table:
    """The table; if there are many naming columns, all but the first follow the results."""
    first = naming if naming <= FEW_SETTINGS else 1
    columns = table.columns
    return replace(table, columns=[*columns[:first], *columns[naming:], *columns[first:naming]])


# --- groups ---------------------------------------------------------------------------------------------


def _frame(runs: Sequence[RunFiles]) -> pd.DataFrame:
    rows = [run.headline() for run in runs]
    for name, row in zip(_different_names([run.path for run in runs]), rows, strict=True):
        row["run"] = name
    return pd.DataFrame(rows, dtype=object) if rows else pd.DataFrame(columns=["run"])


def _different_names(paths: Sequence[Path]) -> list[str]:
    """The names of run directories, with as many parents as tell them apart.

    A directory that is given again has a number.
    """
    resolved = [path.resolve() for path in paths]
    names = [path.name for path in resolved]
    for depth in range(2, 1 + max((len(path.parts) for path in resolved), default=0)):
        directories = {*zip(names, resolved, strict=True)}
        again = {name for name, times in Counter(name for name, _ in directories).items() if times > 1}
        names = [
            Path(*path.parts[-depth:]).as_posix() if name in again else name
            for name, path in zip(names, resolved, strict=True)
        ]
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[place] = f"{name} ({seen[name]})"
    return names


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name; lists are not taken apart."""
    settings: dict[str, Any] = {}
    for name, value in config.items():
        settings |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return settings


def _numeric_columns(runs: pd.DataFrame) -> list[str]:
    """The columns with numbers, without the seed, over which results are averaged."""
    frame = runs.drop(columns="seed", errors="ignore").infer_objects()
    return [str(name) for name in frame.select_dtypes("number").columns]


def _groups(runs: Sequence[RunFiles], frame: pd.DataFrame) -> tuple[Group, ...]:
    configs = [
        {
            k: v
            for k, v in flat(run.config).items()
            if k.split(".")[0] not in _IGNORED_SETTINGS and k not in _STORAGE_SETTINGS
        }
        for run in runs
    ]
    shown = _differing_settings(configs)
    members: dict[str, list[int]] = {}
    seen: dict[tuple[str, str], int] = {}
    for i, (run, config) in enumerate(zip(runs, configs, strict=True)):
        key = repr(sorted(config.items(), key=lambda item: item[0])) if config else f"unknown {i}"
        again = seen.get((key, repr(run.setting("seed"))), 0)  # the same run given twice is not another seed
        seen[key, repr(run.setting("seed"))] = again + 1
        members.setdefault(f"{again} {key}", []).append(i)
    rows = frame.to_dict("records")
    values = [{name: configs[indices[0]].get(name) for name in shown} for indices in members.values()]
    names = [_group_name(settings) for settings in values]
    if len(runs) > 1 and len(members) == 1:
        names = [str(rows[0]["algorithm"])]
    return tuple(
        Group(
            name if names.count(name) == 1 and name else " + ".join(str(rows[i]["run"]) for i in indices),
            settings,
            tuple(runs[i] for i in indices),
            tuple({str(k): v for k, v in rows[i].items()} for i in indices),
        )
        for indices, settings, name in zip(members.values(), values, names, strict=True)
    )


def _differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that differ, the method first, without settings that follow from the method."""
    differing = []
    for name in dict.fromkeys(name for config in configs for name in config):
        values: dict[str, set[str]] = {}
        for config in configs:
            if name in config:
                method = str(config.get("algorithm.name")) if name.split(".")[0] in _METHOD_SECTIONS else ""
                values.setdefault("" if name == "algorithm.name" else method, set()).add(repr(config[name]))
        if any(len(different) > 1 for different in values.values()):
            differing.append(name)
    return sorted(differing, key=lambda name: name != "algorithm.name")[:MOST_SETTINGS]


def _group_name(settings: Mapping[str, Any]) -> str:
    """``pacfl, threshold 6``."""
    words = []
    for name, value in settings.items():
        if value is not None:
            last = name.split(".")[-1]
            words.append(_shortened(value) if last == "name" else f"{last} {_shortened(value)}")
    return ", ".join(words)


def _shortened(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def mean_line(name: str, lines: Sequence[Line]) -> Line:
    """The mean of lines over the rounds that all of them have, with 95 % intervals.

    Args:
        name: of the line.
        lines: from :func:`rayfl.report.html.line_of`, one per seed.

    Returns:
        The same columns; if there are several lines, also ``<column> low`` and ``<column> high`` for all
        columns except the axes.
    """
    frames = [pd.DataFrame(line.columns).set_index("round") for line in lines]
    shared = frames[0].index
    for frame in frames[1:]:
        shared = shared.intersection(frame.index)
    names = [c for c in frames[0].columns if all(c in frame for frame in frames)]
    columns: dict[str, Any] = {"round": shared.tolist()}
    axes = {metric.column for metric in ROUNDS}
    for column in names:
        values = np.array(
            [frame.loc[shared, column].to_numpy(np.float64, na_value=np.nan) for frame in frames]
        )
        mean = values.mean(axis=0)
        if column == "estimated":
            columns[column] = (mean > 0).tolist()
            continue
        columns[column] = rounded(mean, 0) if column == "bytes" else significant(mean)
        if len(lines) > 1 and column not in axes:
            half = values.std(axis=0, ddof=1) * _half_width(len(lines))
            columns |= {f"{column} low": significant(mean - half), f"{column} high": significant(mean + half)}
    return Line(name, columns, "estimated" if "estimated" in columns else "", offered(lines))


def _half_width(n: int) -> float:
    """Half of the interval of the mean of ``n`` values, in units of their standard deviation."""
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, n - 1)) / math.sqrt(n)


# --- parts of the page ----------------------------------------------------------------------------------


def seed_metrics(lines: Sequence[Line]) -> list[Metric]:
    """The metrics that some of :func:`mean_line`'s lines have, with their bands."""
    banded = [
        Metric(m.column, m.label, m.format, f"{m.column} low", f"{m.column} high", BAND)
        for m in offered(lines)
    ]
    return known(banded, lines)


def _over_rounds(lines: Sequence[Line]) -> Section | None:
    metrics = seed_metrics(lines)
    if not metrics:
        return None
    alt = f"{metrics[0].label} over rounds, a line for each of {len(lines)} runs or groups of runs"
    return Section("Over rounds", "", [curves(lines, metrics, known(ROUNDS, lines), alt, 400)])


def _trade_off(comparison: Comparison) -> Section | None:
    drawn = trade_off(_Groups(comparison))
    if drawn is None:
        return None
    result, chart = drawn
    title = f"{result.capitalize()} against bytes"
    return Section(title, "At the last evaluation; bytes of the whole run.", [chart])


def _clients(comparison: Comparison) -> tuple[Section | None, dict[str, list[Any]]]:
    groups = comparison.groups
    boxes = boxes_of_clients({group.name: group.runs for group in groups})
    note = "Every client of every seed." if any(len(group.runs) > 1 for group in groups) else ""
    return clients_section(boxes, [] if comparison.differences else _blocks(groups), note)


def _blocks(groups: Sequence[Group]) -> list[Block]:
    """The runs of each seed, which have the same clients."""
    seeds = dict.fromkeys(str(run.setting("seed")) for group in groups for run in group.runs)
    return [
        Block(
            {"seed": seed},
            {
                group.name: run
                for group in groups
                for run in reversed(group.runs)
                if str(run.setting("seed")) == seed
            },
        )
        for seed in seeds
    ]


def _by_planted_group(comparison: Comparison) -> Section | None:
    """Standard errors of the accuracies, and accuracies in each planted group; one row per run."""
    same = not comparison.differences and len({repr(run.setting("seed")) for run in comparison.files}) < 2
    last = [run.last_groups("group") if same else pd.DataFrame() for run in comparison.files]
    ids = sorted({i for groups in last if len(groups) for i in groups["id"].tolist()})
    ids = ids if len(ids) <= MOST_GROUPS and comparison._has("accuracy_mean") else []
    shown = [
        ("accuracy_se_samples", "± samples", "number:1"),
        ("distinct_test_samples", "test samples", "number:0"),
        ("group_var_within", "within, %²", "number:1"),
        ("group_var_between", "between, %²", "number:1"),
    ]
    present = [
        entry for entry in shown if entry[0] in comparison.runs and comparison.runs[entry[0]].notna().any()
    ]
    if not present and not ids:
        return None
    columns = [Column("run", comparison.runs["run"].tolist())]
    columns += [Column(title, comparison.runs[name].tolist(), format) for name, title, format in present]
    rows = [{} if groups.empty else {row["id"]: row for row in groups.to_dict("records")} for groups in last]
    for i in ids:
        texts = [_group_text(groups[i]) if i in groups else UNKNOWN for groups in rows]
        columns.append(
            Column(
                f"group {i}",
                texts,
                order=[groups[i]["accuracy_mean"] if i in groups else None for groups in rows],
            )
        )
    note = (
        "± samples is the standard error of the mean over the distinct test samples, which clients may share."
    )
    if any(name == "group_var_within" for name, _, _ in present):
        note += " The variance over all clients is that within planted groups plus that between them."
    note += (
        " For each planted group: mean accuracy, and in brackets the variance over its clients, %²."
        * bool(ids)
    )
    return Section("How certain, and for whom", note, tables=[Table(columns, caption="planted groups")])


def _group_text(row: Mapping[Any, Any]) -> str:
    """Mean and variance of a group: ``91.0 % (4.7)``."""
    estimate = row["estimated_from"] == row["estimated_from"]  # not NaN
    return f"{uncertain(row['accuracy_mean'], None, estimate)} ({number(row['accuracy_var'], 1)})"


def _each_run(comparison: Comparison) -> Section | None:
    """One row per run, if the first table has one per group."""
    if not comparison.seeds:
        return None
    names = {id(run): group.name for group in comparison.groups for run in group.runs}
    shown = [
        ("seed", "seed", "text"),
        ("accuracy_mean", "accuracy, last", "percent:1"),
        ("accuracy_mean_best_validation", "best by validation", "percent:1"),
        ("accuracy_mean_max", "best by test", "percent:1"),
        ("accuracy_worst10", "worst 10 %", "percent:1"),
        *((f"{name}_mean", name, "number:3") for name in comparison.measures),
        *([] if comparison._has_results else [("loss_mean", "test loss", "number:4")]),
        ("clusters", "clusters", "number:0"),
        ("ari", "ARI", "number:2"),
        ("bytes_up", "up", "size"),
        ("bytes_down", "down", "size"),
        ("seconds", "time", "duration"),
    ]
    columns = [
        Column("run", comparison.runs["run"].tolist()),
        Column("group", [names[id(run)] for run in comparison.files]),
        *(
            Column(title, comparison.runs[name].tolist(), format, right=True)
            for name, title, format in shown
            if name in comparison.runs and comparison.runs[name].notna().any()
        ),
    ]
    return Section("Each run", "", tables=[Table(columns, caption="runs", filter=len(comparison.files) > 10)])


# --- numbers --------------------------------------------------------------------------------------------


def _percent(group: Group, column: str) -> str:
    """The mean with half of its interval over seeds, which a single run does not have."""
    interval = group.interval(column)
    error = interval.half if interval.bounded else None
    best = column in ("accuracy_mean_max", "accuracy_mean_best_validation")  # never an estimate
    return uncertain(interval.mean, error, group.estimated and not best)


def _percent_of_clients(group: Group, column: str) -> str:
    """The accuracy of a single run, with its standard error over clients."""
    return uncertain(group.interval(column).mean, group.rows[0].get("accuracy_se"), group.estimated)


def _significant(group: Group, column: str) -> str:
    """A number whose size depends on the data, with three significant digits."""
    interval = group.interval(column)
    if interval.mean != interval.mean:
        return UNKNOWN
    text = three_digits(interval.mean)
    return f"{text} ± {interval.half:.2g}" if interval.bounded else text


def _decimals(digits: int) -> Callable[[Group, str], str]:
    def written(group: Group, column: str) -> str:
        interval = group.interval(column)
        text = number(interval.mean, digits)
        return f"{text} ± {number(interval.half, digits)}" if interval.bounded and text != UNKNOWN else text

    return written


def _count(group: Group, column: str) -> str:
    mean = group.interval(column).mean
    return number(mean, 0 if mean == round(mean) else 1) if mean == mean else UNKNOWN


def _data_differences(names: Sequence[str], runs: Sequence[RunFiles], groups: Sequence[Group]) -> list[str]:
    lines = []
    for section in ("data", "partition"):
        settings = [run.setting(section) for run in runs]
        lines += _difference_lines(names, section, [_get(setting, "name") for setting in settings]) or [
            line
            for key in sorted(
                {key for setting in settings if isinstance(setting, Mapping) for key in setting}
            )
            if f"{section}.{key}" not in _STORAGE_SETTINGS
            for line in _difference_lines(
                names, f"{section}.{key}", [_get(setting, key) for setting in settings]
            )
        ]
    lines += _difference_lines(names, "events", [run.setting("events") for run in runs])
    if len({frozenset(repr(run.setting("seed")) for run in group.runs) for group in groups}) > 1:
        lines += _difference_lines(names, "seed", [run.setting("seed") for run in runs])
    if lines:
        return lines
    # Partitions may draw label maps from the seed; these are part of the fingerprint.
    for seed in dict.fromkeys(repr(run.setting("seed")) for run in runs):
        same_seed = [i for i, run in enumerate(runs) if repr(run.setting("seed")) == seed]
        for key, what in (("data", "contents of the dataset"), ("clients", "the clients' samples")):
            lines += _difference_lines(
                [names[i] for i in same_seed], what, [runs[i].environment.get(key) for i in same_seed]
            )
    return lines


def _get(settings: Any, key: str) -> Any:
    return settings.get(key) if isinstance(settings, Mapping) else None


def _difference_lines(names: Sequence[str], what: str, values: Sequence[Any]) -> list[str]:
    """A line if the values differ. None is ignored: an older version may not have written the setting."""
    runs_of: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        if value is not None:
            runs_of.setdefault(str(value), []).append(name)
    if len(runs_of) < 2:
        return []
    return [
        f"{what}: " + "; ".join(f"{_shortened(text)} ({_some_names(of)})" for text, of in runs_of.items())
    ]


def _listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _some_names(names: Sequence[str]) -> str:
    """Names of runs; if there are many, the first ones and how many more there are."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


_MOST_NAMES = 4
"""The largest number of runs that a line names."""
