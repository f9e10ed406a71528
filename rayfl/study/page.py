"""``study.html``: the interactive page about a study."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.report import page
from rayfl.report.across import TABLE, Block, boxes_of_clients, clients_section, maps_of_clients, trade_off
from rayfl.report.charts import Line, Metric, alternatives, bars, curves
from rayfl.report.compare import mean_line, seed_metrics
from rayfl.report.files import RunFiles
from rayfl.report.html import MOST_ROUNDS, ROUNDS, known, line_of, thinned
from rayfl.report.page import Chart, Choice, Column, Page, Section, Selector, Table, significant
from rayfl.statistics import LEVEL
from rayfl.study import tables
from rayfl.study.file import StudyFile
from rayfl.study.methods import MethodsAt
from rayfl.study.outcome import Study
from rayfl.study.plan import PlannedRun, spoken
from rayfl.study.results import Results, known_numbers, title_of, unit_of_column, written
from rayfl.study.running import directory_of, is_finished
from rayfl.study.tables import TextTable
from rayfl.units import UNKNOWN

_VERDICT_FACTS = {"holds": "claims hold", "fails": "claims fail", "undecided": "claims undecided"}

MOST_LINES = 28
"""The largest number of methods in one chart."""
MOST_NUMBERS = 400_000
"""About how many numbers the curves of all methods and points may have; evenly spaced rounds are drawn if
there are more."""

Point = Mapping[str, str]


def write_page(study: Study) -> Path:
    """Write ``study.html`` into the study's folder.

    Raises:
        DiskError
    """
    return page.write(study.folder / "study.html", page_of(study))


def page_of(study: Study) -> Page:
    """The page about a study."""
    results = study.results
    counts = {verdict: 0 for verdict in ("holds", "fails", "undecided")}
    for judgement in study.judgements:
        counts[judgement.verdict] += 1
    facts = [
        ("runs", f"{results.finished} of {len(results.runs)}"),
        ("methods", str(len(results.study.methods))),
        ("seeds", str(len(results.seeds))),
        *((_VERDICT_FACTS[verdict], str(count)) for verdict, count in counts.items() if count),
    ]
    clients, columns = _clients(results)
    maps, maps_data = _maps(results)
    sections = [
        _claims(study),
        *_results(results),
        _over_rounds(results),
        _numbers(results),
        _trade_off(results),
        clients,
        *maps,
        _choices(study),
        _runs(study),
    ]
    failed = [f"{title}: {error}" for title, error in study.failed.items()]
    notes = [("", [tables.main_table(results, tall=True).caption])]
    if failed:
        notes.insert(0, ("These runs failed:", failed))
    return Page(
        title=results.study.title or results.study.name,
        subtitle=" · ".join(filter(None, (results.study.name, _base_name(results.study)))),
        facts=facts,
        notes=notes,
        lead=_table_of(tables.main_table(results, tall=True), "results"),
        sections=[section for section in sections if section is not None],
        folded=[("Study file", (study.folder / "study.yaml").read_text(encoding="utf-8"))]
        if (study.folder / "study.yaml").is_file()
        else [],
        data={**({TABLE: columns} if columns else {}), **maps_data},
    )


def _table_of(text_table: TextTable, caption: str) -> Table:
    """A text table; cells are sorted by their numbers, or else by the number with which they begin."""
    columns = []
    for place, (title, right) in enumerate(zip(text_table.header, text_table.rights, strict=True)):
        values = [row[place] for row in text_table.rows]
        order = list(text_table.values.get(place, map(_leading_number, values)))
        numeric = right and any(number is not None for number in order)
        columns.append(Column(title, values, order=order if numeric else None, right=right))
    return Table(columns, caption=caption, wrap=True)


def _leading_number(text: str) -> float | None:
    try:
        return float(text.split()[0].replace(",", "")) if text and text != UNKNOWN else None
    except ValueError:
        return None


def _claims(study: Study) -> Section | None:
    if not study.judgements:
        return None
    note = (
        f"A claim holds if its whole {100 * LEVEL:.0f} % interval does, fails if none of it does, and is "
        "undecided otherwise."
    )
    return Section("Claims", note, (), [_table_of(tables.claim_table(study.judgements), "claims")])


def _results(results: Results) -> list[Section]:
    """Differences and ranks."""
    sections = []
    differences, ranks = tables.comparison_table(results), tables.rank_table(results)
    if differences is not None:
        caption = differences.caption
        sections.append(Section("Differences", caption, (), [_table_of(differences, "differences")]))
    if ranks is not None:
        sections.append(Section("Ranks", ranks.caption, (), [_table_of(ranks, "ranks")]))
    return sections


def _over_rounds(results: Results) -> Section | None:
    """Curves of every method, with bands over seeds; the reader chooses the point of the grid."""
    by_point: list[list[Line]] = []
    for point in results.points:
        lines = []
        for label in list(results.study.methods)[:MOST_LINES]:
            seed_lines = [line_of(run, "") for run in MethodsAt(results, point).runs(label)]
            seed_lines = [line for line in seed_lines if len(line.columns.get("round", ()))]
            lines.append(mean_line(label, seed_lines) if seed_lines else Line(label, {"round": []}))
        by_point.append(lines)
    longest = max(len(line.columns["round"]) for lines in by_point for line in lines)
    width = sum(len(line.columns) for lines in by_point for line in lines)
    most = min(MOST_ROUNDS, max(20, MOST_NUMBERS // max(1, width)))
    by_point = [[thinned(line, most) for line in lines] for lines in by_point]
    everything = [line for lines in by_point for line in lines]
    metrics, xs = seed_metrics(everything), known(ROUNDS, everything)
    if not metrics or not xs:
        return None
    alt = f"{metrics[0].label} over rounds, a line for each method"
    left_out = list(results.study.methods)[MOST_LINES:]
    note = f"Without {', '.join(left_out)}: a chart has {MOST_LINES} lines at most." if left_out else ""
    drawn = max(len(line.columns["round"]) for line in everything)
    if drawn < longest:
        note = f"{note} {drawn:,} of {longest:,} rounds are drawn, evenly spaced.".lstrip()
    if len(results.points) == 1:
        return Section("Over rounds", note, [curves(by_point[0], metrics, xs, alt, 400)])
    chart = _chart_by_point(results, by_point, metrics, xs, lambda m, x, lines: curves(lines, m, x, alt, 400))
    return Section("Over rounds", note, [chart])


def _chart_by_point(
    results: Results,
    by_point: Sequence[Sequence[Line]],
    metrics: Sequence[Metric],
    xs: Sequence[Metric],
    draw: Callable[[Sequence[Metric], Sequence[Metric], Sequence[Line]], Chart],
) -> Chart:
    """A chart whose lines change with the point of the grid: each has the columns of all points."""
    names = [_point_name(point) for point in results.points]
    merged: list[Line] = []
    for place, line in enumerate(by_point[0]):
        columns: dict[str, Any] = {}
        longest = max(len(next(iter(lines[place].columns.values()), ())) for lines in by_point)
        for number, lines in enumerate(by_point):
            for column, values in lines[place].columns.items():
                columns[f"{column} @{number}"] = [*values, *[None] * (longest - len(values))]
        hollow = next((lines[place].hollow for lines in by_point if lines[place].hollow), "")
        merged.append(Line(line.name, columns, f"{hollow} @{{slider}}" if hollow else ""))

    def with_slider(metric: Metric) -> Metric:
        ends = {"low": f"{metric.low} @{{slider}}" if metric.low else ""}
        ends["high"] = f"{metric.high} @{{slider}}" if metric.high else ""
        return replace(metric, column=f"{metric.column} @{{slider}}", **ends)

    wanted = {name for m in (*metrics, *xs) for name in (m.column, m.low, m.high) if name}
    wanted |= {line.hollow for lines in by_point for line in lines if line.hollow}
    chart = draw([with_slider(m) for m in metrics], [with_slider(x) for x in xs], merged)
    sources = [
        {name: values for name, values in line.columns.items() if name.rpartition(" @")[0] in wanted}
        for line in merged
    ]
    points = Selector("at", [Choice(name, value=str(number)) for number, name in enumerate(names)])
    option = {**chart.option, "dataset": [{"source": source} for source in sources]}
    return replace(chart, option=option, selectors=[points, *chart.selectors])


def _numbers(results: Results) -> Section | None:
    """Bars of every column of the table, with intervals."""
    charts: dict[str, Chart] = {}
    several = len(results.points) > 1
    for column in results.study.report.names:
        for point in results.points:
            intervals = {label: results.interval(label, point, column) for label in results.study.methods}
            if not any(interval.n for interval in intervals.values()):
                continue
            bounds = None
            if any(interval.bounded for interval in intervals.values()):
                bounds = (
                    [interval.low if interval.bounded else None for interval in intervals.values()],
                    [interval.high if interval.bounded else None for interval in intervals.values()],
                )
            name = title_of(column) + (f", {_point_name(point)}" if several else "")
            values = [interval.mean if interval.n else None for interval in intervals.values()]
            form = written(column)
            listing = "; ".join(f"{label} {form(i.mean)}" for label, i in intervals.items() if i.n)
            charts[name] = bars(
                list(intervals),
                values,
                title_of(column),
                f"{name}: {listing}",
                _column_format(column),
                bounds,
            )
    if not charts:
        return None
    several_seeds = len(results.seeds) > 1
    note = f"Means over seeds with {100 * LEVEL:.0f} % intervals." if several_seeds else "One seed."
    return Section("Methods side by side", note, [alternatives("number", charts)])


def _trade_off(results: Results) -> Section | None:
    drawn = {_point_name(p): trade_off(MethodsAt(results, p), _point_name(p)) for p in results.points}
    charts = {name: found[1] for name, found in drawn.items() if found is not None}
    if not charts:
        return None
    chart = alternatives("at", charts) if len(charts) > 1 else next(iter(charts.values()))
    result = next(found[0] for found in drawn.values() if found is not None)
    title = f"{result.capitalize()} against bytes"
    return Section(title, "After the last round; bytes of the whole run.", [chart])


def _clients(results: Results) -> tuple[Section | None, dict[str, list[Any]]]:
    charts = {}
    for point in results.points:
        methods = MethodsAt(results, point)
        groups = {label: methods.runs(label) for label in methods.names}
        chart = boxes_of_clients(groups, _point_name(point))
        if chart is not None:
            charts[_point_name(point)] = chart
    boxes = alternatives("at", charts) if len(charts) > 1 else next(iter(charts.values()), None)
    note = "Every client of every seed." if len(results.seeds) > 1 else ""
    return clients_section(boxes, _blocks(results), note)


def _blocks(results: Results) -> Iterator[Block]:
    """The runs of each seed and point, which have the same clients; those of the first seed first."""
    for seed, point in itertools.product(results.seeds, results.points):
        runs = {run.method: run for run in results.runs if run.seed == seed and run.point == point}
        place = {"seed": str(seed), **point}
        finished = {label: runs[label] for label in results.study.methods if label in runs}
        yield Block(
            place,
            {label: RunFiles.read(directory_of(run)) for label, run in finished.items() if is_finished(run)},
        )


def _maps(results: Results) -> tuple[list[Section], dict[str, dict[str, list[Any]]]]:
    """Maps of the clients by every method that clusters them, of its first finished run."""
    first = dict[str, PlannedRun]()
    for run in results.runs:  # seed by seed, point by point
        if run.method not in first and is_finished(run):
            first[run.method] = run
    named: dict[str, RunFiles] = {}
    for label in results.study.methods:
        if label in first:
            at = [_point_name(first[label].point)] if len(results.points) > 1 else []
            seed = [f"seed {first[label].seed}"] if len(results.seeds) > 1 else []
            named[", ".join([label, *at, *seed])] = RunFiles.read(directory_of(first[label]))
    return maps_of_clients(named)


def _base_name(study: StudyFile) -> str:
    """The name of the preset or file from which all runs start; empty if there is none."""
    return Path(study.base).name if isinstance(study.base, str) else ""


def _choices(study: Study) -> Section | None:
    """The settings that were tried."""
    if not study.tuned or study.results.study.tune is None:
        return None
    tune = study.results.study.tune
    names = list(tune.space)
    by_mean = tune.per == "method" and any(len(trial.get("at") or {}) for trial in study.tuned)
    scores: dict[str, list[float]] = {}
    for trial in study.tuned:
        scores.setdefault(repr((trial["method"], trial["settings"])), []).append(trial["score"])
    rows = [
        (
            trial["method"],
            _point_name(trial.get("at") or {}) or UNKNOWN,
            *(str(trial["settings"].get(name, UNKNOWN)) for name in names),
            _score([trial["score"]]),
            *([_score(scores[repr((trial["method"], trial["settings"]))])] if by_mean else []),
            "chosen" if trial.get("chosen") else "",
        )
        for trial in study.tuned
    ]
    metric = title_of(f"validation_{tune.metric}")
    header = ("method", "at", *names, metric, *([f"{metric}, mean over all points"] if by_mean else []), "")
    table = Table.of(header, rows, left=2, caption="settings that were tried", filter=len(rows) > 20)
    return Section("Choice of settings", "On validation samples of the clients.", (), [table])


def _score(scores: Sequence[float]) -> str:
    """Their mean; unknown if a run failed."""
    return f"{np.mean(scores):.2f}" if np.isfinite(scores).all() else UNKNOWN


def _runs(study: Study) -> Section:
    """All runs, to sort and to search."""
    frame, results = study.runs, study.results
    naming = ["method", *results.study.axes, "seed", "state"]
    reported = [name for name in results.study.report.names if name in frame]
    others = [str(name) for name in frame.columns if name not in (*naming, *reported, *_HIDDEN_COLUMNS)]
    columns = []
    for name in (*naming, *reported, *others):
        values = frame[name]
        is_result = name in reported or name in known_numbers()
        if values.dtype.kind in "fi":
            format = "text" if name == "seed" else _column_format(name, "general") if is_result else "general"
            numbers = significant(values)
            columns.append(Column(title_of(name) if is_result else name, numbers, format, right=True))
        else:
            columns.append(Column(name, [None if v != v or v is None else str(v) for v in values]))
    columns.append(Column("directory", [Path(path).name for path in frame["path"]]))
    return Section("Runs", "", (), [Table(columns, caption="runs", filter=True)])


_HIDDEN_COLUMNS = ("key", "path", "rayfl", "error")
"""Columns of ``runs.csv`` that the page omits."""


def _column_format(column: str, default: str = "number:2") -> str:
    """How numbers of a column are written on the page; ``default`` if they have no unit."""
    formats = {"bytes": "size", "seconds": "duration", "%": "percent:1"}
    return formats.get(unit_of_column(column), default)


def _point_name(point: Point) -> str:
    """``alpha 0.1, classes 2``."""
    return ", ".join(spoken(axis, name) for axis, name in point.items())
