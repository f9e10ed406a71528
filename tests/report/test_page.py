"""The toolkit: what is written into a page, and how."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import numpy as np
import pytest

import rayfl
from rayfl.report import charts, page
from rayfl.report.charts import Line, Metric, pareto
from rayfl.report.page import Column, Data, Page, Section, Table
from tests.report.reading import rows, titles, values

PACKAGE = Path(rayfl.__file__).parent


def test_the_example_of_the_docstring() -> None:
    assert page.__doc__ is not None
    code = "\n".join(line[4:] for line in page.__doc__.splitlines() if line.startswith("    "))
    space: dict[str, str] = {}
    exec(code, space)
    assert titles(space["html"]) == ["Accuracy"]
    assert ["FedAvg", "80.0 %"] in rows(space["html"])
    [chart] = values(space["html"])["charts"]
    assert chart["option"]["dataset"][0]["source"]["low"] == [55, 66, 78]


def test_what_belongs_to_pages_is_installed_with_the_package() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    [listed] = re.findall(r"\[tool.setuptools.package-data\]\nrayfl = \[(.*?)\]", text)
    patterns = re.findall(r'"(.*?)"', listed)
    files = [path.relative_to(PACKAGE) for path in (PACKAGE / "report").rglob("*") if path.is_file()]
    assert Path("report/vendor/echarts.min.js") in files
    shipped = [path for path in files if any(fnmatch.fnmatch(str(path), each) for each in patterns)]
    missing = [path for path in files if path.suffix not in (".py", ".pyc") and path not in shipped]
    assert missing == []


@pytest.mark.parametrize(
    ("value", "format", "text"),
    [
        (None, "text", "–"),
        (float("nan"), "number:1", "–"),
        ("", "text", ""),
        (0.12345, "general", "0.1235"),
        (12.0, "number:0", "12"),
        (61.25, "percent:1", "61.2 %"),
        (1234567, "size", "1.23 MB"),
        (90, "duration", "1 min 30 s"),
    ],
)
def test_formats(value: object, format: str, text: str) -> None:
    assert page.formatted(value, format) == text


def test_data_are_short_and_whole() -> None:
    assert page.rounded([1.0, 2.3461, np.nan, np.inf], 2) == [1, 2.35, None, None]
    values = [0.0001234567, 123456.789, 1234567.0, 0.0, -np.inf, np.nan]
    assert page.significant(values, 3) == [0.000123, 123000, 1234567, 0, None, None]
    assert page.plain({"a": np.array([1.0, np.inf]), "b": (np.int64(3), "x"), "c": True}) == {
        "a": [1, None], "b": [3, "x"], "c": True,
    }  # fmt: skip


def test_short_tables_are_html_and_long_ones_data() -> None:
    kept = {"clients": {"id": list(range(300)), "accuracy": [50.0] * 300}}
    long = Table(
        [
            Column("client", Data("clients", "id")),
            Column("accuracy", Data("clients", "accuracy"), "percent:1"),
        ]
    )
    short = Table([Column("a", ["x"]), Column("b", ["1.5 kB"], order=[1500.0], shares=[0.5])])
    text = page.render(Page("t", sections=[Section("s", tables=[long, short])], data=kept))
    assert values(text)["tables"][0]["columns"][1]["values"] == {"table": "clients", "column": "accuracy"}
    assert rows(text) == [["client", "accuracy"], ["a", "b"], ["x", "1.5 kB"]]
    assert '<td class="n" data-v="1500" style="--share: 20.0%">1.5 kB</td>' in text


def test_every_line_has_the_columns_of_every_metric() -> None:
    lines = [Line("one", {"round": [1], "a": [2]}), Line("two", {"round": [1, 2], "b": [3, 4]})]
    found = charts.curves(lines, [Metric("a", "A"), Metric("b", "B")], [Metric("round", "round")], "")
    assert [each["source"] for each in found.option["dataset"]] == [
        {"a": [2], "b": [None], "round": [1]},
        {"a": [None, None], "b": [3, 4], "round": [1, 2]},
    ]


def test_boxes_by_hand() -> None:
    [dataset] = charts.box({"one": [1, 2, 3, 4, 5, np.nan], "none": [np.nan]}, "", "").option["dataset"]
    assert dataset["source"]["group"] == ["one"]
    names = ("least", "lower quartile", "median", "upper quartile", "most", "mean", "clients")
    assert [dataset["source"][name] for name in names] == [[1], [2], [3], [4], [5], [3], [5]]


def test_bins_of_whole_numbers_are_equally_wide() -> None:
    """Each says which numbers it holds, and no number is in two of them."""
    sizes = [1290, 1291, 1294, 1350]
    edges = charts.whole_edges(sizes)
    assert set(np.diff(edges)) == {4}
    [dataset] = charts.histogram(sizes, "", "", edges, "number:0").option["dataset"]
    assert dataset["source"]["between"][:2] == ["1,290 to 1,293", "1,294 to 1,297"]
    assert dataset["source"]["clients"][:2] == [2, 1]
    assert sum(dataset["source"]["clients"]) == 4
    few = charts.histogram([4, 6], "", "", charts.whole_edges([4, 6]), "number:0").option["dataset"][0]
    assert few["source"] == {"between": ["4", "5", "6"], "clients": [1, 0, 1]}


@pytest.mark.parametrize("values", [[0.01, 0.02, 0.9], [171.793] * 3, [-4.0, 5.0], [0.0, 0.0], [1e-9, 2e-9]])
def test_bins_end_at_round_numbers(values: list[float]) -> None:
    edges = charts.round_edges(values)
    assert edges[0] <= min(values)
    assert max(values) < edges[-1]
    assert 2 <= len(edges) <= 20
    np.testing.assert_allclose(np.diff(edges), edges[1] - edges[0])


def test_the_front_is_what_no_other_beats() -> None:
    points = [(1.0, 10.0), (2.0, 9.0), (3.0, 30.0), (3.0, 20.0), (2.5, 12.0), (None, 99.0)]
    assert charts.pareto_front(points) == [[1.0, 10.0], [2.5, 12.0], [3.0, 30.0]]


@pytest.mark.parametrize(("dark", "first"), [("low", charts.RAMP[0]), ("high", charts.RAMP[-1])])
def test_dark_is_alike(dark: str, first: str) -> None:
    option = charts.heatmap([[0, 2], [2, 0]], ["a", "b"], ["a", "b"], "", dark).option  # type: ignore[arg-type]
    assert option["matrix"] == [[0, 2], [2, 0]]
    assert option["visualMap"]["inRange"]["color"][0] == first
    assert (option["visualMap"]["min"], option["visualMap"]["max"]) == (0, 2)


def test_names_in_a_trade_off_do_not_lie_on_one_another() -> None:
    """Two methods at one place are named on two sides; one at the right edge, to the left of its point."""
    columns = [{"x": [x], "y": [y], "low": [y - 20], "high": [y + 20]} for x, y in PLACES]
    lines = [Line(name, each) for name, each in zip(("A", "B", "long name " * 9, "C"), columns, strict=True)]
    chart = pareto(
        lines, Metric("x", "bytes", "size"), Metric("y", "accuracy", "percent:1", "low", "high"), ""
    )
    labels = [series["label"] for series in chart.option["series"] if series["type"] == "scatter"]
    assert [label["position"] for label in labels] == ["right", "left", "left", "right"]
    crowd = pareto(
        [Line(str(i), columns[0]) for i in range(9)], Metric("x", "", "size"), Metric("y", "", "size"), ""
    )
    shown = [s["label"]["show"] for s in crowd.option["series"] if s["type"] == "scatter"]
    assert shown == [True] * 4 + [False] * 5


def test_a_front_is_drawn_only_where_there_is_one() -> None:
    def drawn(*places: tuple[float, float], **options: bool) -> tuple[bool, str]:
        lines = [Line(name, {"x": [x], "y": [y]}) for name, (x, y) in zip("AB", places, strict=True)]
        option = pareto(lines, Metric("x", ""), Metric("y", ""), "", **options).option
        return any(series["type"] == "line" for series in option["series"]), option["caption"]

    assert drawn((1, 10), (2, 20)) == (True, "Dashed: the Pareto front (no other point is better in both).")
    assert drawn((2, 10), (1, 20)) == (False, "No other point is better than B in either.")
    assert drawn((1, 10), (2, 20), ranked=False) == (False, "")
    assert drawn((1, 20), (2, 10), smaller=True)[0]
    assert drawn((1, 10), (2, 20), smaller=True) == (False, "No other point is better than A in either.")


PLACES = [(2.5, 80), (2.5, 80), (9, 90), (2, 20)]
