"""The clients of several runs on the same data: which method is best for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rayfl.report.charts import Colour, Line, Metric, box, pareto, versus
from rayfl.report.files import RunFiles, described_in, numbers, smaller_is_better
from rayfl.report.html import client_columns, map_section, result_of_clients, results_of
from rayfl.report.page import Chart, Column, Data, Section, Table, significant
from rayfl.statistics import Interval

TABLE = "clients"
"""The name of the columns in the page's data."""

MOST_ROWS = 10_000
"""The largest number of clients in the table."""

MOST_METHODS = 28
"""The largest number of methods in the table."""


class Methods(Protocol):
    """The runs of several methods; those of one method differ only in the seed."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the methods, all different, in the order in which they are drawn."""
        ...

    @property
    def comparable(self) -> bool:
        """Whether all methods have the same clients with the same data, so that one result may be better."""
        ...

    def runs(self, name: str) -> Iterable[RunFiles]:
        """The runs of a method that are finished."""
        ...

    def interval(self, name: str, column: str) -> Interval:
        """Mean and interval of a number of the summary over the runs of a method."""
        ...


@dataclass(frozen=True)
class Block:
    """Runs of several methods on the same clients: those of one seed, at one point of a grid.

    Attributes:
        place: what distinguishes it from other blocks, such as ``{"seed": "0"}``.
        runs: by method.
    """

    place: Mapping[str, str]
    runs: Mapping[str, RunFiles]


def trade_off(methods: Methods, where: str = "") -> tuple[str, Chart] | None:
    """The main result against the bytes sent, a point for each method.

    Args:
        methods: what is drawn.
        where: is added to the description for screen readers.

    Returns:
        The name of the result, and the chart; None if fewer than two methods have a result.
    """
    accuracy = Metric("result", "test accuracy, mean over clients (%)", "percent:1", "low", "high")
    if lines := _trade_off_points(methods, "accuracy"):
        return "accuracy", _trade_off_chart(methods, "accuracy", lines, accuracy, where)
    # Only now, since runs are read for it
    for result, about in described_in(run for name in methods.names for run in methods.runs(name)).items():
        if lines := _trade_off_points(methods, result):
            y = Metric("result", f"{about}, mean over clients", "number:4", "low", "high")
            return result, _trade_off_chart(methods, result, lines, y, where)
    return None


def _trade_off_points(methods: Methods, result: str) -> list[Line]:
    """A point for each method that has the result; empty if there are fewer than two."""
    points = []
    for place, name in enumerate(methods.names):
        of_result, up, down = (
            methods.interval(name, column) for column in (f"{result}_mean", "bytes_up", "bytes_down")
        )
        if of_result.n and up.n and down.n:
            low, high = (of_result.low, of_result.high) if of_result.bounded else (None, None)
            values = {"result": of_result.mean, "low": low, "high": high, "bytes": round(up.mean + down.mean)}
            points.append(Line(name, {column: [value] for column, value in values.items()}, place=place))
    return points if len(points) > 1 else []


def _trade_off_chart(methods: Methods, result: str, points: Sequence[Line], y: Metric, where: str) -> Chart:
    smaller = smaller_is_better(result)
    alt = ", ".join(filter(None, (f"{result.capitalize()} against bytes sent", where)))
    x, ranked = Metric("bytes", "bytes sent, up and down", "size"), methods.comparable and smaller is not None
    return pareto(points, x, y, alt, ranked=ranked, smaller=bool(smaller))


def clients_section(
    boxes: Chart | None, blocks: Iterable[Block], note: str = ""
) -> tuple[Section | None, dict[str, list[Any]]]:
    """The section about clients: box plots, one method against another, and a table of clients.

    Args:
        boxes: from :func:`boxes_of_clients`; None if no client has a result.
        blocks: with the same names in ``place``; only as many are read as fit into the table.
        note: above the charts.

    Returns:
        The section, None if no client has a result; and its data, for :data:`TABLE` of the page.
    """
    if boxes is None:
        return None, {}
    rows, methods, metric, full = _read(blocks)
    data = {name: values for name, values in rows.items() if any(v is not None for v in values)}
    numbered = enumerate(methods[:MOST_METHODS])
    shown = {_METHOD + str(i): name for i, name in numbered if _METHOD + str(i) in data}
    if metric is None or len(shown) < 2:
        return Section("Clients", note, [boxes]), {}
    places = [name for name in data if name.startswith(_PLACE)]
    several = [name for name in places if len(set(data[name])) > 1]
    facts = [
        ("client", "client", "text"),
        *((name, name.removeprefix(_PLACE), "text") for name in several),
        ("n", "training samples", "number:0"),
        ("group", "planted group", "text"),
    ]
    columns = [(name, title, format) for name, title, format in facts if name in data]
    results = [(name, title, metric.format) for name, title in shown.items()]
    table = Table(
        [
            Column(title, Data(TABLE, name), format, right=format != "text")
            for name, title, format in [*columns, *results]
        ],
        caption=f"clients: {metric.label}",
        filter=True,
    )
    kinds = [Colour(name, name.removeprefix(_PLACE)) for name in several]
    kinds += [Colour("group", "planted group")] if "group" in data else []
    kinds += [Colour.scale("n", "training samples", "number:0", data["n"])] if "n" in data else []
    chart = versus(
        f"@{TABLE}",
        data,
        [Metric(name, title, metric.format) for name, title in shown.items()],
        "client",
        [(title, name, format) for name, title, format in [*columns[1:], *results]],
        kinds,
        f"A point for each client: {metric.label} with one method over that with another",
    )
    said = (
        f"The second chart and the table: {metric.label}; clients above the diagonal do better with the "
        "method on the vertical axis."
        if metric.format.startswith("percent")
        else f"The second chart and the table: {metric.label}."
    )
    if full:
        said += f" They have the first {MOST_ROWS:,} clients only."
    if len(methods) > MOST_METHODS:
        said += f" They have the first {MOST_METHODS} methods only."
    return Section("Clients", f"{note} {said}".lstrip(), [boxes, chart], [table]), data


MOST_MAPS = 6
"""The largest number of methods with a map."""
MOST_PLACES = 30_000
"""The largest number of clients on all maps of a page, but for the first map."""


def maps_of_clients(runs: Mapping[str, RunFiles]) -> tuple[list[Section], dict[str, dict[str, list[Any]]]]:
    """A section with a map of the clients for each run that clusters them, and the tables of the page's data
    to which the maps refer.

    Args:
        runs: by the name of their method; the first that have a map are drawn, up to :data:`MOST_MAPS` and
            :data:`MOST_PLACES`.
    """
    sections: list[Section] = []
    placed = 0
    tables: dict[str, dict[str, list[Any]]] = {}
    for name, run in runs.items():
        full = len(sections) == MOST_MAPS or (sections and placed + len(run.clients) > MOST_PLACES)
        if full or not run.clustered:
            continue
        columns, table = client_columns(run), f"map {len(sections)}"
        metric = result_of_clients([run])
        wanted = {"client", "n", "group", *([metric.column] if metric else [])}
        columns = {column: values for column, values in columns.items() if column in wanted}
        section = map_section(run, columns, table, f"Map of clients: {name}") if columns else None
        if section is not None:
            sections.append(section)
            tables[table] = columns
            placed += len(run.clients)
    return sections, tables


_PLACE, _METHOD = "at ", "method "
"""How the names of columns begin that hold places, and results of methods, which are numbered: a method's own
name may be anything."""


def _read(blocks: Iterable[Block]) -> tuple[dict[str, list[Any]], list[str], Metric | None, bool]:
    """The columns, the methods, the result, and whether clients are left out."""
    rows: dict[str, list[Any]] = {}
    methods: list[str] = []
    metric: Metric | None = None
    length = 0
    for block in blocks:
        runs = _with_same_clients(block.runs)
        first = next(iter(runs.values()), None)
        metric = metric or result_of_clients(list(runs.values()))
        if first is None or metric is None:
            continue
        count = min(len(first.clients), MOST_ROWS - length)
        if count:
            methods += [name for name in runs if name not in methods]
            found: dict[str, Sequence[Any]] = {"client": _names(first)[:count]}
            found |= {_PLACE + name: [value] * count for name, value in block.place.items()}
            for name in ("n", "group"):
                values = numbers(first.clients, name)
                found |= {} if values is None else {name: significant(values[:count])}
            for i, name in enumerate(methods[:MOST_METHODS]):
                values = results_of(runs[name], metric) if name in runs else None
                found |= {} if values is None else {_METHOD + str(i): significant(values[:count], 4)}
            for name in {**rows, **found}:
                rows.setdefault(name, [None] * length).extend(found.get(name, [None] * count))
            length += count
        if count < len(first.clients):
            return rows, methods, metric, True
    return rows, methods, metric, False


def _with_same_clients(runs: Mapping[str, RunFiles]) -> dict[str, RunFiles]:
    """The runs whose clients have the same samples as those of the first one."""
    known = {name: run for name, run in runs.items() if "client" in run.clients}
    if not known:
        return {}
    first = next(iter(known.values()))
    return {
        name: run
        for name, run in known.items()
        if len(run.clients) == len(first.clients)
        and run.environment.get("clients") == first.environment.get("clients")
    }


def _names(run: RunFiles) -> list[str]:
    """The clients' ids as users know them."""
    frame = run.clients
    return [str(name) for name in frame["name" if "name" in frame else "client"]]


def boxes_of_clients(groups: Mapping[str, Sequence[RunFiles]], where: str = "") -> Chart | None:
    """A box plot of the clients of each group of runs, by name; None if no client has a result.

    Args:
        groups: runs by the name of the group.
        where: is added to the description for screen readers.
    """
    metric = result_of_clients([run for runs in groups.values() for run in runs])
    if metric is None:
        return None
    results = {name: [results_of(run, metric) for run in runs] for name, runs in groups.items()}
    measured = {name: [each for each in arrays if each is not None] for name, arrays in results.items()}
    values = {name: np.concatenate(arrays) for name, arrays in measured.items() if arrays}
    alt = ", ".join(filter(None, (f"Box plots of clients: {metric.label}", where)))
    return box(values, metric.label, alt, metric.format)
