"""The kinds of charts that pages show, one function each; see :mod:`rayfl.report.page` for how they are used.

Every function returns a :class:`~rayfl.report.page.Chart`, which is an ECharts option as plain data. In
addition ``page.js`` reads:

- of an axis: ``format``, how its labels are written;
- of a series: ``tip``, the tooltip of a point: ``title`` (a column of its dataset), and ``rows`` of a label,
  a column and a format, or, on charts over a common axis, ``y``, the format, and the columns ``low`` and
  ``high``; ``mostDots``, the number of points up to which a line marks each; ``band``, two columns between
  which a custom series fills; ``interval``, an axis and two columns between which it draws a line at each
  point; ``hollow``, a column that marks estimates; ``colour``, the column by which points are coloured
  (``kind``: ``category``, or ``scale``, where larger is darker);
- of the option: ``caption``, a line below the chart; ``matrix``, the rows of a heat map; ``equal``, whether
  both axes have the same scale; ``height``, if the choices of a chart differ in it.

Colours are those of Okabe and Ito, which are safe for colour-blind readers. In matrices and scales dark means
similar, or large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayfl.report.page import Chart, Choice, Selector, plain, rounded, significant

SAFE_COLOURS = 7
"""Number of colours that colour-blind readers tell apart; beyond them series differ in dash or symbol."""
COLOURS = 14
"""Number of all colours; after that they repeat."""
DASHES = ("solid", "dashed", "dotted", [8, 3, 2, 3])
MOST_DOTS = 25
"""Lines with at most this many points mark each point."""
SHOWN_MATRIX = 150
"""Rows and columns of a matrix of clients; if there are more clients, evenly spaced ones are shown."""
SQUARE = 520
"""Height of a square matrix, CSS pixels."""
NAMED = 25
"""Rows or columns of a matrix that are labelled on its axes; tooltips name the others."""
MOST_LETTERS = 4
"""Longer names below a square matrix are turned, so that it stays square."""
RAMP = ["#08306b", "#08519c", "#2171b5", "#4292c6", "#6baed6", "#9ecae1", "#c6dbef", "#deebf7", "#f7fbff"]
"""Colour scale from dark to pale."""


@dataclass(frozen=True)
class Line:
    """A line of :func:`curves`, or a point of :func:`pareto`.

    Attributes:
        name: of what it shows.
        columns: with its points.
        hollow: the column that marks estimates.
        metrics: what its columns hold, if the chart offers a choice.
        place: which colour and dashes it has, so that the same thing looks the same in all charts of a page;
            None: its place among the lines of the chart.
    """

    name: str
    columns: Mapping[str, Sequence[Any]]
    hollow: str = ""
    metrics: Sequence[Metric] = ()
    place: int | None = None

    def look(self, among: int) -> tuple[str, int]:
        """The colour, and how often the safe colours were used up before it.

        Args:
            among: its place in the chart.
        """
        place = among if self.place is None else self.place
        return f"${place % COLOURS}", place // SAFE_COLOURS


@dataclass(frozen=True)
class Metric:
    """A quantity for an axis: a column of every line, its label and its format.

    ``low`` and ``high`` are the columns that bound a band, and ``band`` describes it.
    """

    column: str
    label: str
    format: str = "number:2"
    low: str = ""
    high: str = ""
    band: str = ""


def curves(
    lines: Sequence[Line], metrics: Sequence[Metric], xs: Sequence[Metric], alt: str, height: int = 340
) -> Chart:
    """Lines over a common axis, with bands; if there are several metrics or axes the reader selects one.

    Args:
        lines: beyond :data:`SAFE_COLOURS` of them, with another dash.
        metrics: the choices for the vertical axis; lines without the column are omitted there.
        xs: the choices for the horizontal axis.
        alt: a description for screen readers.
        height: CSS pixels.
    """
    wanted = {n for m in (*metrics, *xs) for n in (m.column, m.low, m.high) if n}
    wanted |= {line.hollow for line in lines if line.hollow}
    sources = [_columns(line, wanted) for line in lines]
    series: list[dict[str, Any]] = []
    for i, line in enumerate(lines):
        colour, repeated = line.look(i)
        series.append(
            {
                "type": "custom",
                "name": line.name,
                "datasetIndex": i,
                "renderItem": "band",
                "silent": True,
                "itemStyle": {"color": colour, "opacity": 0.16},
                "clip": True,
                "tooltip": {"show": False},
                "z": 1,
            }
        )
        series.append(
            {
                "type": "line",
                "name": line.name,
                "datasetIndex": i,
                "symbol": "circle",
                "symbolSize": 6,
                "mostDots": MOST_DOTS,
                "hollow": line.hollow,
                "connectNulls": True,
                "itemStyle": {"color": colour},
                "emphasis": {"focus": "series"},
                "blur": {"lineStyle": {"opacity": 0.25}},
                "lineStyle": {"color": colour, "width": 2, "type": DASHES[repeated % len(DASHES)]},
            }
        )

    def x_option(x: Metric) -> dict[str, Any]:
        counted = x.format == "number:0"  # nothing is before the first round, or after the last
        ends = {"min": "dataMin", "max": "dataMax"} if counted else {"min": None, "max": None}
        return {
            "xAxis": {"name": x.label, "format": x.format, **ends},
            "series": [{"encode": {"x": x.column}} for _ in series],
        }

    def y_option(metric: Metric) -> dict[str, Any]:
        bounds = [metric.low, metric.high] if metric.low else []
        band = {"encode": {"y": bounds or metric.column}, "band": bounds or None}
        line = {
            "encode": {"y": metric.column},
            "tip": {"y": metric.format, "low": metric.low, "high": metric.high},
        }
        return {
            "yAxis": {"name": metric.label, "format": metric.format},
            "series": [part for _ in lines for part in (band, line)],
            "caption": metric.band,
        }

    return Chart(
        {
            "dataset": [{"source": source} for source in sources],
            "xAxis": {"type": "value", "scale": True},
            "yAxis": {"type": "value", "scale": True},
            "tooltip": {"trigger": "axis"},
            "series": series,
        },
        alt,
        height,
        [
            Selector("metric", [Choice(m.label, y_option(m)) for m in metrics]),
            Selector("over", [Choice(x.label, x_option(x)) for x in xs]),
        ],
        [line.name for line in lines] if len(lines) > 1 else (),
        "curves",
    )


def _columns(line: Line, names: set[str]) -> dict[str, Sequence[Any]]:
    rows = len(next(iter(line.columns.values()), ()))
    return {name: line.columns.get(name, [None] * rows) for name in sorted(names)}


def box(
    groups: Mapping[str, ArrayLike], label: str, alt: str, format: str = "percent:1", what: str = "clients"
) -> Chart:
    """A box plot for each group: quartiles and median, with whiskers to the minimum and maximum.

    Args:
        groups: values ``(n,)`` by the group's name; NaN and groups without values are omitted.
        label: of the axis.
        alt: a description for screen readers.
        format: of a value.
        what: the members of a group are called this.
    """
    finite = {name: _finite(values) for name, values in groups.items()}
    finite = {name: values for name, values in finite.items() if len(values)}
    quantiles = [np.quantile(values, (0, 0.25, 0.5, 0.75, 1)) for values in finite.values()]
    names = ("least", "lower quartile", "median", "upper quartile", "most")
    source: dict[str, Sequence[Any]] = {
        "group": list(finite),
        what: [len(values) for values in finite.values()],
        **{name: significant([f[i] for f in quantiles]) for i, name in enumerate(names)},
        "mean": significant([values.mean() for values in finite.values()]),
    }
    rows = [[what, what, "number:0"], ["mean", "mean", format], *([n, n, format] for n in reversed(names))]
    option = _sideways_option(source, label, format, finite)
    option["series"] = [
        {
            "type": "boxplot",
            "encode": {"y": "group", "x": list(names), "tooltip": []},
            "itemStyle": {"color": "$soft", "borderColor": "$0", "borderWidth": 1.5},
            "boxWidth": [6, 22],
            "tip": {"title": "group", "rows": rows},
        },
        {
            "type": "scatter",
            "encode": {"y": "group", "x": "mean"},
            "symbol": "diamond",
            "symbolSize": 8,
            "itemStyle": {"color": "$1"},
            "silent": True,
            "tooltip": {"show": False},
        },
    ]
    option["caption"] = "Box: quartiles and median; whiskers: minimum and maximum; diamond: mean."
    return Chart(option, alt, _rows_height(finite, 34), name="boxes")


def bars(
    names: Sequence[str],
    values: Sequence[float | None],
    label: str,
    alt: str,
    format: str = "number:1",
    intervals: tuple[Sequence[float | None], Sequence[float | None]] | None = None,
) -> Chart:
    """A bar for each name, from top to bottom, with intervals from low to high if given."""
    source: dict[str, Sequence[Any]] = {"name": list(names), "value": list(values)}
    rows = [[label, "value", format]]
    series: list[dict[str, Any]] = [
        {
            "type": "bar",
            "encode": {"y": "name", "x": "value"},
            "itemStyle": {"color": "$0"},
            "barMaxWidth": 22,
            "tip": {"title": "name", "rows": rows},
        }
    ]
    if intervals is not None:
        source |= {"low": list(intervals[0]), "high": list(intervals[1])}
        rows += [["from", "low", format], ["to", "high", format]]
        series.append(_interval_series("x", "name", "value", "low", "high", sideways=True))
    option = _sideways_option(source, label, format, names)
    option["xAxis"]["scale"] = False  # the length of a bar is its value
    option["series"] = series
    return Chart(option, alt, _rows_height(names, 28), name="bars")


def histogram(values: ArrayLike, label: str, alt: str, edges: ArrayLike, format: str = "percent:0") -> Chart:
    """The number of values ``(n,)`` in each bin between ``edges`` ``(b + 1,)``; the last bin includes its
    right edge.
    """
    ends = np.asarray(edges, np.float64)
    counts, _ = np.histogram(_finite(values), ends)
    written = [_bin_label(a, b, format) for a, b in itertools.pairwise(ends.tolist())]
    return Chart(
        {
            "dataset": [{"source": {"between": written, "clients": counts.tolist()}}],
            "xAxis": {"type": "category", "name": label},
            "yAxis": {"type": "value", "name": "clients", "format": "number:0", "minInterval": 1},
            "tooltip": {"trigger": "item"},
            "series": [
                {
                    "type": "bar",
                    "encode": {"x": "between", "y": "clients"},
                    "itemStyle": {"color": "$0"},
                    "barCategoryGap": "8%",
                    "tip": {"title": "between", "rows": [["clients", "clients", "number:0"]]},
                }
            ],
        },
        alt,
        300,
        name="histogram",
    )


def _bin_label(low: float, high: float, format: str) -> str:
    """The label of a bin; for whole numbers those that it contains, ``5`` or ``1,290 to 1,299``."""
    if format != "number:0":
        return f"{low:g} to {high:g}"
    return f"{low:,.0f}" if high - low <= 1 else f"{low:,.0f} to {high - 1:,.0f}"


def whole_edges(values: ArrayLike, most: int = 20) -> NDArray[np.float64]:
    """Edges of at most ``most`` bins of equal width for whole numbers ``(n,)``."""
    finite = _finite(values)
    least, count = finite.min(), finite.max() - finite.min() + 1
    width = math.ceil(count / most)
    return np.asarray(least + width * np.arange(math.ceil(count / width) + 1), np.float64)


def round_edges(values: ArrayLike, about: int = 15) -> NDArray[np.float64]:
    """Edges of roughly ``about`` bins of equal width, at round numbers, for the values ``(n,)``."""
    finite = _finite(values)
    span = float(np.ptp(finite)) or abs(float(finite[0])) or 1.0
    exact = span / about
    power = 10.0 ** math.floor(math.log10(exact))
    width = next(step * power for step in (1, 2, 5, 10) if step * power >= exact * (1 - 1e-9))
    first, last = math.floor(finite.min() / width), math.floor(finite.max() / width) + 1
    return np.array([float(f"{width * i:.12g}") for i in range(first, last + 1)])


@dataclass(frozen=True)
class Colour:
    """How the points of a scatter plot are coloured: a column, its label, and the format of its values.

    ``kind`` is ``category``, or ``scale`` from ``least`` to ``most``, where larger is darker.
    """

    column: str
    label: str
    kind: Literal["category", "scale"] = "category"
    format: str = "text"
    least: float = 0.0
    most: float = 100.0

    @classmethod
    def scale(cls, column: str, label: str, format: str, values: ArrayLike) -> Colour:
        """A scale from the smallest to the largest of the values ``(n,)``."""
        finite = _finite(values)
        least, most = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        return cls(column, label, "scale", format, least, most if most > least else least + 1)


@dataclass(frozen=True)
class Points:
    """The points of a scatter plot.

    Attributes:
        source: the columns, or ``"@name"`` of a table in ``Page.data``.
        x, y: two of the columns.
        title: the column that names a point.
        tip: the rows of the tooltip: label, column, format.
        size: diameter of a point, CSS pixels.
    """

    source: Mapping[str, Sequence[Any]] | str
    x: Metric
    y: Metric
    title: str
    tip: Sequence[tuple[str, str, str]]
    size: int = 8


def scatter(points: Points, alt: str, colours: Sequence[Colour] = (), height: int = 380) -> Chart:
    """A point for each row; if there are several colourings the reader selects one."""
    series = _dot_series(points)
    series["encode"] = {"x": points.x.column, "y": points.y.column}
    selectors = [_colour_selector(colours)] if colours else []
    return Chart(
        {
            "dataset": [{"source": points.source}],
            "xAxis": {"type": "value", "scale": True, "name": points.x.label, "format": points.x.format},
            "yAxis": {"type": "value", "scale": True, "name": points.y.label, "format": points.y.format},
            "tooltip": {"trigger": "item"},
            "series": [series],
        },
        alt,
        height,
        selectors,
        name="scatter",
    )


def versus(
    source: str,
    columns: Mapping[str, Sequence[Any]],
    results: Sequence[Metric],
    title: str,
    tip: Sequence[tuple[str, str, str]],
    colours: Sequence[Colour],
    alt: str,
) -> Chart:
    """One result over another, a point for each row; the reader selects both. The diagonal is drawn.

    Args:
        source: ``"@name"`` of a table in ``Page.data``.
        columns: of that table.
        results: two or more with the same unit; at first the second is drawn over the first.
        title: the column that names a point.
        tip: the rows of the tooltip: label, column, format.
        colours: of the points, of which the reader selects one.
        alt: a description for screen readers.
    """
    series = _dot_series(Points(source, results[0], results[1], title, tip, 6))
    series["encode"] = {"x": results[0].column, "y": results[1].column}
    known = _finite([v for m in results for v in columns[m.column] if v is not None])
    ends = [float(known.min()), float(known.max())]
    diagonal = {
        "type": "line",
        "data": [[end, end] for end in rounded(ends, 4)],
        "symbol": "none",
        "silent": True,
        "animation": False,
        "lineStyle": {"color": "$quiet", "type": "dashed", "width": 1},
        "z": 1,
    }

    def choices(axis: Literal["x", "y"]) -> list[Choice]:
        return [
            Choice(m.label, {f"{axis}Axis": {"name": m.label}, "series": [{"encode": {axis: m.column}}]})
            for m in results
        ]

    axis = {"type": "value", "scale": True, "format": results[0].format}
    option = {
        "dataset": [{"source": source}],
        "xAxis": axis,
        "yAxis": dict(axis),
        "tooltip": {"trigger": "item"},
        "series": [series, diagonal],
    }
    selectors = [Selector("vertical", choices("y"), chosen=1), Selector("horizontal", choices("x"))]
    selectors += [_colour_selector(colours)] if colours else []
    return Chart(option, alt, 420, selectors, name="versus", width=720)


Ends = tuple[float, float, float]
"""A value, and the ends of its interval."""

_LETTER_WIDTH, _LINE_HEIGHT = 0.007, 0.05
"""Width and height of a label's letter, as fractions of a chart of 1,000 by 300 pixels."""

_LONGEST_LABEL = 30
"""Letters of a label; the legend has the whole name."""

_SIDES = ("right", "left", "top", "bottom")


def _last_value(line: Line, metric: Metric) -> Ends:
    """The last value of a line, and the ends of its interval, or that value; NaN if it has none."""
    columns = [line.columns.get(name) for name in (metric.column, metric.low, metric.high)]
    values = [math.nan if not values or values[-1] is None else float(values[-1]) for values in columns]
    value, low, high = values
    return value, value if math.isnan(low) else low, value if math.isnan(high) else high


def _label_sides(names: Sequence[str], xs: Sequence[Ends], ys: Sequence[Ends]) -> list[str]:
    """On which side of its point each label has room; empty if on none, since the legend has all names."""

    def shares(values: Sequence[Ends]) -> list[float]:
        ends = [end for each in values for end in each if not math.isnan(end)]
        least, most = (min(ends), max(ends)) if ends else (0.0, 1.0)
        return [(each[0] - least) / ((most - least) or 1.0) for each in values]

    taken: list[tuple[float, float, float, float]] = []
    points = list(zip(shares(xs), shares(ys), strict=True))
    taken += [(u - 0.008, v - 0.025, u + 0.008, v + 0.025) for u, v in points]
    sides = []
    for name, (u, v) in zip(names, points, strict=True):
        wide, side = _LETTER_WIDTH * min(len(name), _LONGEST_LABEL), ""
        for side in _SIDES:
            left = {"right": u + 0.01, "left": u - 0.01 - wide}.get(side, u - wide / 2)
            middle = v + {"top": 0.06, "bottom": -0.06}.get(side, 0.0)
            box = (left, middle - _LINE_HEIGHT / 2, left + wide, middle + _LINE_HEIGHT / 2)
            inside = box[0] >= -0.05 and box[2] <= 1.05
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                break
        else:
            side = ""
        sides.append(side)
    return sides


def _overlap(box: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def pareto(
    lines: Sequence[Line], x: Metric, y: Metric, alt: str, *, ranked: bool = True, smaller: bool = False
) -> Chart:
    """A point for each line's last row, with intervals on both axes; a line joins the Pareto front.

    Args:
        lines: methods, each with the columns of ``x`` and ``y``, and of their intervals; a smaller ``x`` is
            better.
        x, y: the axes.
        alt: a description for screen readers.
        ranked: whether the points can be compared; without it there is no front.
        smaller: whether a smaller ``y`` is better, as of errors, and not a larger one.
    """
    tip = [[m.label, m.column, m.format] for m in (y, x)]
    places = _label_sides(
        [line.name for line in lines],
        [_last_value(line, x) for line in lines],
        [_last_value(line, y) for line in lines],
    )
    series: list[dict[str, Any]] = []
    for i, line in enumerate(lines):
        colour, repeated = line.look(i)
        dot = {
            "type": "scatter",
            "name": line.name,
            "datasetIndex": i,
            "symbolSize": 13,
            "z": 3,
            "encode": {"x": x.column, "y": y.column},
            "itemStyle": {"color": colour},
            "label": {
                "show": bool(places[i]),
                "position": places[i],
                "color": "$ink",
                "backgroundColor": "$page",
                **(
                    {"width": 7 * _LONGEST_LABEL, "overflow": "truncate"}
                    if len(line.name) > _LONGEST_LABEL
                    else {}
                ),
            },
            "symbol": ("circle", "diamond", "triangle", "rect")[repeated % 4],
            "tip": {"rows": tip},
        }
        series.append(dot)
        for axis, metric in (("x", x), ("y", y)):
            if metric.low:
                interval = _interval_series(axis, x.column, y.column, metric.low, metric.high)
                series.append({**interval, "name": line.name, "datasetIndex": i})
    last = [{name: [values[-1]] for name, values in line.columns.items() if len(values)} for line in lines]
    caption = ""
    front = pareto_front(
        [(row[x.column][0], row[y.column][0]) for row in last if {x.column, y.column} <= set(row)], smaller
    )
    if ranked and len(front) > 1:
        series.append(
            {
                "type": "line",
                "data": front,
                "symbol": "none",
                "silent": True,
                "step": "end",
                "z": 0,
                "tooltip": {"show": False},
                "lineStyle": {"color": "$quiet", "width": 1, "type": "dashed"},
            }
        )
        caption = "Dashed: the Pareto front (no other point is better in both)."
    elif ranked and front:
        best = next(i for i, row in enumerate(last) if [row[x.column][0], row[y.column][0]] == front[0])
        caption = f"No other point is better than {lines[best].name} in either."
    return Chart(
        {
            "dataset": [{"source": source} for source in last],
            "xAxis": {"type": "value", "scale": True, "name": x.label, "format": x.format},
            "yAxis": {"type": "value", "scale": True, "name": y.label, "format": y.format},
            "tooltip": {"trigger": "item"},
            "series": series,
            "caption": caption,
        },
        alt,
        380,
        legend=[line.name for line in lines],
        name="pareto",
    )


def pareto_front(points: Sequence[tuple[Any, Any]], smaller: bool = False) -> list[list[float]]:
    """The Pareto front: the points for which no other has a smaller first and a larger second coordinate.

    Args:
        points: pairs of coordinates; those without one are left out.
        smaller: whether a smaller second coordinate is better, and not a larger one.
    """
    sign = 1 if smaller else -1
    ordered = sorted((x, sign * y) for x, y in points if x is not None and y is not None)
    front: list[list[float]] = []
    for x, y in ordered:
        if not front or y < sign * front[-1][1]:
            front.append([x, sign * y])
    return front


@dataclass(frozen=True)
class Frame:
    """A step of the slider of :func:`client_map`: its label, and the suffix of its columns."""

    label: str
    suffix: str


def client_map(
    points: Points, colours: Sequence[Colour], frames: Sequence[Frame], alt: str, height: int = 460
) -> Chart:
    """Clients in the plane, coloured as selected, with a slider over time.

    Args:
        points: their columns; if clients move, the names of ``x`` and ``y`` contain ``{slider}``.
        colours: a column with ``{slider}`` in its name changes with the slider.
        frames: the steps in time; empty if nothing changes.
        alt: a description for screen readers.
        height: CSS pixels.
    """
    series = _dot_series(points)
    series["encode"] = {"x": points.x.column, "y": points.y.column}
    axis = {"type": "value", "scale": True, "axisLabel": {"show": False}, "splitLine": {"show": False}}
    option: dict[str, Any] = {
        "dataset": [{"source": points.source}],
        "xAxis": axis,
        "yAxis": axis,
        "tooltip": {"trigger": "item"},
        "animationDurationUpdate": 600,
        "equal": True,
        "series": [series],
    }
    selectors = [_colour_selector(colours)]
    if frames:
        places = {"series": [{"encode": dict(series["encode"])}]}
        steps = [Choice(frame.label, places, frame.suffix) for frame in frames]
        selectors.append(Selector("time", steps, slider=True, chosen=len(frames) - 1))
    return Chart(option, alt, height, selectors, name="map")


def heatmap(
    values: ArrayLike,
    rows: Sequence[str],
    columns: Sequence[str],
    alt: str,
    dark: Literal["low", "high"] = "high",
    label: str = "",
) -> Chart:
    """A matrix of colours, the first row at the top.

    Args:
        values: ``(R, C)``; NaN is left empty.
        rows, columns: their names.
        alt: a description for screen readers.
        dark: which end is dark: ``low`` for distances, so that similar is dark; ``high`` for shares.
        label: of the values, with their unit.
    """
    matrix = np.asarray(values, np.float64)
    finite = matrix[np.isfinite(matrix)]
    least, most = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    digits = max(0, 2 - math.floor(math.log10(max(abs(least), abs(most), 1e-12))))
    axis = {"type": "category", "splitLine": {"show": False}, "axisTick": {"show": False}}
    square = matrix.shape[0] == matrix.shape[1]
    upright = {"rotate": 90} if square and max(map(len, columns), default=0) > MOST_LETTERS else {}
    return Chart(
        {
            "matrix": [rounded(row, digits) for row in matrix],
            "xAxis": {**axis, "data": list(columns), "axisLabel": {**_axis_labels(columns), **upright}},
            "yAxis": {**axis, "data": list(rows), "inverse": True, "axisLabel": _axis_labels(rows)},
            "visualMap": {
                "type": "continuous",
                "min": least,
                "max": most if most > least else least + 1,
                "calculable": True,
                "orient": "horizontal",
                "left": 0,
                "bottom": 0,
                "itemHeight": 140,
                "itemWidth": 12,
                "precision": digits,
                "inRange": {"color": RAMP if dark == "low" else RAMP[::-1]},
            },
            "tooltip": {"trigger": "item"},
            "series": [{"type": "heatmap", "name": label, "progressive": 0, "animation": False}],
            "caption": label,
        },
        alt,
        SQUARE if square else min(620, max(260, 120 + 14 * len(rows))),
        width=SQUARE + 60 if square else 0,
        name="matrix",
    )


def _axis_labels(names: Sequence[str]) -> dict[str, Any]:
    """Labels of an axis, as many as fit."""
    some = {"show": True, "hideOverlap": True, "interval": -(-len(names) // NAMED) - 1}
    return {**some, "width": 80, "overflow": "truncate"}


def sankey(links: Sequence[tuple[str, str, float]], alt: str, format: str = "size") -> Chart:
    """A Sankey diagram from left to right: source, target, amount."""
    nodes = list(dict.fromkeys(name for source, target, _ in links for name in (source, target)))
    # At the right edge: labels to the left of the nodes
    ends = set(nodes) - {source for source, _, _ in links}
    return Chart(
        {
            "tooltip": {"trigger": "item"},
            "series": [
                {
                    "type": "sankey",
                    "format": format,
                    "nodeGap": 14,
                    "nodeWidth": 14,
                    "draggable": False,
                    "data": [
                        {
                            "name": name,
                            "itemStyle": {"color": f"${i % COLOURS}"},
                            "label": {"position": "left" if name in ends else "right", "color": "$ink"},
                        }
                        for i, name in enumerate(nodes)
                    ],
                    "links": [{"source": s, "target": t, "value": v} for s, t, v in links if v > 0],
                    "lineStyle": {"color": "source", "opacity": 0.28, "curveness": 0.5},
                    "label": {"color": "$ink"},
                    "emphasis": {"focus": "adjacency"},
                    "left": 4,
                    "right": 4,
                    "top": 8,
                    "bottom": 8,
                }
            ],
        },
        alt,
        300,
        name="traffic",
    )


def steps(
    x: ArrayLike, y: ArrayLike, names: tuple[str, str], alt: str, chosen: tuple[float, str] | None = None
) -> Chart:
    """A step function: each ``y`` holds from its ``x`` to the next, the last one for all above.

    Args:
        x, y: ``(K,)``, ``x`` ascending.
        names: of the axes.
        alt: a description for screen readers.
        chosen: an ``x`` to be marked, and its label.
    """
    places, counts = np.asarray(x, np.float64), np.asarray(y, np.float64)
    end = 1.06 * max(float(places[-1]), 0.0 if chosen is None else chosen[0])
    places, counts = np.append(places, end), np.append(counts, counts[-1])
    series: dict[str, Any] = {
        "type": "line",
        "step": "end",
        "showSymbol": False,
        "encode": {"x": "x", "y": "y"},
        "lineStyle": {"color": "$0", "width": 2},
        "itemStyle": {"color": "$0"},
        "name": names[1],
        "tip": {"y": "number:0", "low": "", "high": ""},
    }
    if chosen is not None:
        series["markLine"] = {
            "symbol": "none",
            "silent": True,
            "data": [{"xAxis": chosen[0], "name": chosen[1]}],
            "lineStyle": {"color": "$1", "type": "dashed", "width": 1.5},
            "label": {
                "formatter": "{b}",
                "color": "$1",
                "position": "end",
                # In the right half the text ends at the line, so that it is not cut off
                "align": "right" if chosen[0] > (places[0] + end) / 2 else "left",
            },
        }
    many = counts.max() >= 100
    return Chart(
        {
            "dataset": [{"source": {"x": [float(f"{v:.6g}") for v in places], "y": plain(counts)}}],
            "xAxis": {"type": "value", "name": names[0], "format": "general", "scale": True},
            "yAxis": {
                "type": "log" if many else "value",
                "name": names[1],
                "format": "number:0",
                "minInterval": 1,
            },
            "tooltip": {"trigger": "axis"},
            "series": [series],
        },
        alt,
        300,
        name="threshold",
    )


def alternatives(label: str, charts: Mapping[str, Chart]) -> Chart:
    """Several charts in one place, of which the reader selects one; their own selectors are omitted."""
    choices = [
        Choice(name, {**chart.option, "alt": chart.alt, "height": chart.height})
        for name, chart in charts.items()
    ]
    first = next(iter(charts.values()))
    return Chart({}, first.alt, first.height, [Selector(label, choices)], name=first.name, width=first.width)


def spaced(count: int, most: int = SHOWN_MATRIX) -> NDArray[np.intp]:
    """At most ``most`` evenly spaced positions among ``count``."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).astype(np.intp))


def _dot_series(points: Points) -> dict[str, Any]:
    return {
        "type": "scatter",
        "symbolSize": points.size,
        "itemStyle": {"color": "$0", "opacity": 0.8},
        "tip": {"title": points.title, "rows": [list(row) for row in points.tip]},
    }


def _colour_selector(colours: Sequence[Colour]) -> Selector:
    return Selector(
        "colour",
        [
            Choice(
                c.label,
                {
                    "series": [
                        {
                            "colour": {
                                "by": c.column,
                                "label": c.label,
                                "kind": c.kind,
                                "format": c.format,
                                "least": c.least,
                                "most": c.most,
                            }
                        }
                    ]
                },
            )
            for c in colours
        ],
    )


def _interval_series(
    axis: str, x: str, y: str, low: str, high: str, sideways: bool = False
) -> dict[str, Any]:
    across = {"x": [low, high], "y": x if sideways else y} if axis == "x" else {"x": x, "y": [low, high]}
    return {
        "type": "custom",
        "renderItem": "interval",
        "clip": True,
        "interval": [axis, low, high],
        "encode": across,
        "silent": True,
        "itemStyle": {"color": "$ink"},
        "z": 4,
        "tooltip": {"show": False},
    }


_ROW_LETTERS = 26
"""Letters of a row's name that fit beside a chart; longer names take several lines."""


def _most_lines(names: Iterable[str]) -> int:
    """The number of lines of the longest name."""
    return max((math.ceil(len(name) / _ROW_LETTERS) for name in names), default=1)


def _sideways_option(
    source: Mapping[str, Sequence[Any]], label: str, format: str, names: Iterable[str]
) -> dict[str, Any]:
    several = {"axisLabel": {"overflow": "break", "lineHeight": 13}} if _most_lines(names) > 1 else {}
    return {
        "dataset": [{"source": source}],
        "xAxis": {"type": "value", "name": label, "format": format, "scale": True},
        "yAxis": {
            "type": "category",
            "inverse": True,
            "axisTick": {"show": False},
            "splitLine": {"show": False},
            **several,
        },
        "tooltip": {"trigger": "item"},
    }


def _rows_height(names: Collection[str], each: int) -> int:
    """The height of a chart with a row for each name, ``each`` high if names are short."""
    return min(1200, max(160, 80 + max(each, 4 + 13 * _most_lines(names)) * len(names)))


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64).ravel()
    finite: NDArray[np.float64] = array[np.isfinite(array)]
    return finite
