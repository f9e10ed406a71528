"""Self-contained interactive pages: plain data in Python, drawn by Apache ECharts in the browser.

A :class:`Page` has a title, facts and sections; a :class:`Section` a title, a note, charts and tables.
Charts come from :mod:`rayfl.report.charts`, one function for each kind; :func:`render` gives the page as
text. Nothing is loaded from elsewhere: script, style and data are in the file, which any browser opens.

    from rayfl.report.charts import Line, Metric, curves
    from rayfl.report.page import Column, Page, Section, Table, render

    seen = {"round": [1, 2, 3], "accuracy": [60, 70, 80], "low": [55, 66, 78], "high": [65, 74, 82]}
    metrics = [Metric("accuracy", "test accuracy (%)", "percent:1", low="low", high="high")]
    chart = curves([Line("FedAvg", seen)], metrics, [Metric("round", "round", "number:0")], alt="...")
    table = Table([Column("method", ["FedAvg"]), Column("accuracy", [80.0], "percent:1")])
    html = render(Page("My study", sections=[Section("Accuracy", "Mean of 3 seeds.", [chart], [table])]))

**Numbers** reach the page as columns (lists of equal length) and are formatted there by a *format*: ``text``,
``number:D`` and ``percent:D`` with D decimals, ``general`` (four significant digits), ``size`` (bytes) or
``duration`` (seconds). :data:`~rayfl.units.UNKNOWN` stands for None and NaN. Columns that several charts and
tables use are kept once in ``Page.data`` by a name, and referred to by :class:`Data`.

**Selectors** change a chart: each :class:`Choice` holds what it sets in the chart's option; the selected
choices are merged in the order of the selectors. Inside a choice the text ``{slider}`` stands for the value
of the slider's choice, or of the first list whose choices have values. :mod:`rayfl.report.charts` adds the
following to an ECharts option, which ``page.js`` interprets: ``$0`` to ``$6``, ``$ink``, ``$quiet`` and
``$line`` for colours of the light or dark page, and the keys ``format`` (of an axis), ``tip``, ``band``,
``interval``, ``hollow`` and ``colour`` (of a series), described there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from rayfl import files
from rayfl.units import UNKNOWN, duration, number, percent, size

DIGITS = 9
"""Significant digits of the numbers in a page's data; they are rounded to those shown when written."""

STATIC_ROWS = 100
"""Tables with at most this many rows are HTML; longer ones are built from the page's data."""


@dataclass(frozen=True)
class Data:
    """A column of ``Page.data``."""

    table: str
    column: str


@dataclass(frozen=True)
class Choice:
    """A choice: its name and what it sets in the chart's option; ``value`` replaces ``{slider}``."""

    label: str
    set: Mapping[str, Any] = field(default_factory=dict)
    value: str = ""


@dataclass(frozen=True)
class Selector:
    """A list or slider of choices for a chart; ``chosen`` is the initial choice."""

    label: str
    choices: Sequence[Choice]
    slider: bool = False
    chosen: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart as plain data.

    Attributes:
        option: of ECharts, with the additions that the module's docstring describes.
        alt: a description of the chart for screen readers.
        height: CSS pixels.
        selectors: at most one of them a slider.
        legend: names of series that can be switched off, in order.
        name: of the files when the chart is saved.
        width: at most this many CSS pixels; 0: the full width.
    """

    option: Mapping[str, Any]
    alt: str
    height: int = 320
    selectors: Sequence[Selector] = ()
    legend: Sequence[str] = ()
    name: str = "chart"
    width: int = 0


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        values: one per cell, or a reference to them.
        format: how they are written.
        order: sort keys, if not the values themselves; for texts that contain numbers.
        shares: in [0, 1]; shades the cells. None for no shade.
        right: whether the column is right-aligned; None: if ``format`` is not ``text``.
    """

    title: str
    values: Sequence[Any] | Data
    format: str = "text"
    order: Sequence[float | None] | None = None
    shares: Sequence[float | None] | None = None
    right: bool | None = None

    @property
    def numeric(self) -> bool:
        """Whether the column is right-aligned like numbers."""
        return self.format != "text" or self.order is not None if self.right is None else self.right


@dataclass(frozen=True)
class Table:
    """Columns of equal length, sortable by a click on a heading.

    Attributes:
        columns: the first names the row.
        caption: what the rows are, for screen readers and as the file's name.
        filter: whether rows can be searched; long tables always can.
        sortable: whether rows can be sorted.
        wrap: whether texts may wrap on narrow pages.
    """

    columns: Sequence[Column]
    caption: str = "table"
    filter: bool = False
    sortable: bool = True
    wrap: bool = False

    def texts(self) -> list[tuple[str, list[str]]]:
        """Headings and cells as text, for a table that contains its values."""
        return [
            (c.title, [formatted(value, c.format) for value in c.values])
            for c in self.columns
            if not isinstance(c.values, Data)
        ]

    @classmethod
    def of(cls, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, **more: Any) -> Table:
        """A table of texts; the columns after the first ``left`` are right-aligned."""
        columns = [[row[i] for row in rows] for i in range(len(header))]
        return cls(
            [Column(t, c, right=i >= left) for i, (t, c) in enumerate(zip(header, columns, strict=True))],
            **more,
        )


@dataclass(frozen=True)
class Section:
    """A part of the page: a title, a note, charts, tables; ``beside`` puts charts side by side."""

    title: str
    note: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    beside: bool = False


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title, subtitle: at the top.
        facts: names and values of the few numbers below them.
        notes: paragraphs above the sections; a list if there is a heading.
        lead: a table below the facts.
        sections: in order.
        folded: titles and texts or tables that are closed at first, such as the configuration.
        missing: what could not be read, listed at the foot.
        data: columns by table and name, referred to by :class:`Data` and by ``"@table"`` as source of a
            chart's dataset.
    """

    title: str
    subtitle: str = ""
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[tuple[str, Sequence[str]]] = ()
    lead: Table | None = None
    sections: Sequence[Section] = ()
    folded: Sequence[tuple[str, str | Table]] = ()
    missing: Sequence[str] = ()
    data: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


def render(page: Page) -> str:
    """The page as one HTML file without references to other files."""
    return _Writer(page).text()


def write(path: Path, page: Page) -> Path:
    """Write the page to a file, replacing it atomically.

    Raises:
        DiskError
    """
    files.write(path, render(page))
    return path


def formatted(value: Any, format: str = "text") -> str:
    """A value as ``page.js`` writes it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return UNKNOWN
    kind, _, digits = format.partition(":")
    match kind:
        case "text":
            return str(value)
        case "number":
            return number(float(value), int(digits))
        case "percent":
            return percent(value, int(digits))
        case "general":
            return _general(float(value))
        case "size":
            return size(value)
        case "duration":
            return duration(value)
    raise ValueError(f"no format {format!r}")


def _general(value: float) -> str:
    """Four significant digits: ``0.1235``, ``12,350``, ``1.235e-7``."""
    shown = float(f"{value:.4g}")
    if shown and not 1e-4 <= abs(shown) < 1e15:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{shown:,.7f}".rstrip("0").rstrip(".")


def rounded(values: Any, digits: int) -> list[Any]:
    """Numbers rounded to the ``digits`` decimals that are shown; whole ones as integers, None for NaN and
    infinity.
    """
    return [_json_number(v) for v in np.round(np.asarray(values, np.float64), digits).tolist()]


def significant(values: Any, digits: int = DIGITS) -> list[Any]:
    """As :func:`rounded`, but to significant digits, for numbers of any size; whole ones stay as they are."""
    array = np.array(values, np.float64)
    usual = (np.abs(array) > 1e-9) & (
        np.abs(array) < 10.0 ** (digits - 1)
    )  # powers of ten up to 1e22 are exact
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(array[usual]))))
    array[usual] = np.round(array[usual] * scale) / scale
    rare = ~usual & np.isfinite(array) & (array != np.floor(array))
    array[rare] = [float(f"{v:.{digits}g}") for v in array[rare].tolist()]
    return [_json_number(v) for v in array.tolist()]


def _json_number(value: float) -> float | None:
    """As JSON has it: None for NaN and infinity, whole numbers as integers."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, whole floats as integers, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)) or (isinstance(value, Sequence) and not isinstance(value, str)):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return _json_number(value)
    return value


@cache
def _template() -> jinja2.Template:
    """Compiled once a process: that takes as long as filling it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("page.html")


class _Writer:
    """Numbers the charts and tables of a page, and collects their data."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.charts: list[dict[str, Any]] = []
        self.tables: list[dict[str, Any]] = []

    def text(self) -> str:
        body = _template().render(
            page=self.page,
            chart=self._chart,
            table=self._table,
            is_table=lambda part: isinstance(part, Table),
            anchor=_anchor,
            style=Markup(_asset("page.css")),
            scripts=[Markup(_asset(name)) for name in ("vendor/echarts.min.js", "page.js")],
            values=self._data_json,
        )
        return body

    def _chart(self, chart: Chart) -> int:
        self.charts.append(asdict(chart))
        return len(self.charts) - 1

    def _table(self, table: Table) -> dict[str, Any]:
        """What the template needs of a table; the cells of long tables are part of the page's data."""
        columns = [self._column_values(column) for column in table.columns]
        count = len(columns[0]) if columns else 0
        long = count > STATIC_ROWS
        keys = [None if c.order is None else c.order for c in table.columns]
        facts = {
            "caption": table.caption,
            "filter": table.filter or long,
            "sortable": table.sortable,
            "columns": [
                {"title": c.title, "format": c.format, "numeric": c.numeric,
                 **({"values": asdict(c.values) if isinstance(c.values, Data) else c.values,
                     "order": c.order, "shares": c.shares} if long else {})}
                for c in table.columns
            ],
        }  # fmt: skip
        self.tables.append(facts)
        rows = []
        for i in range(0 if long else count):
            row = []
            for c, values, key in zip(table.columns, columns, keys, strict=True):
                order = key[i] if key is not None else values[i] if c.format != "text" else None
                share = None if c.shares is None else c.shares[i]
                row.append({"text": formatted(values[i], c.format), "order": plain(order), "share": share})
            rows.append(row)
        return {
            "number": len(self.tables) - 1,
            "rows": rows,
            "facts": facts,
            "wrap": table.wrap,
            "count": count,
        }

    def _column_values(self, column: Column) -> Sequence[Any]:
        where = column.values
        return self.page.data[where.table][where.column] if isinstance(where, Data) else where

    def _data_json(self) -> Markup:
        """All data of the page as JSON that is safe within HTML."""
        content = {"data": self.page.data, "charts": self.charts, "tables": self.tables}
        text = json.dumps(plain(content), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _anchor(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())
