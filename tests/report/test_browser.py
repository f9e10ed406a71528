"""Pages in a real browser: they start without errors, and what can be clicked works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.cluster.hierarchy import linkage

from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.config import load
from rayfl.report.charts import Line, Metric, alternatives, box, curves, heatmap, histogram, pareto
from rayfl.report.clusterings import ClusteringResult
from rayfl.report.clusterings import page_of as clusters_page
from rayfl.report.compare import Comparison
from rayfl.report.html import write_report
from rayfl.report.page import Column, Page, Section, Table, formatted
from rayfl.report.page import write as write_page
from rayfl.report.partition import views
from rayfl.report.partition import write as write_partition

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (the dev extra)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: none on PATH")
ARGUMENTS = [f"--{name}" for name in ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run")]
ARGUMENTS += [f"--disable-{name}" for name in ("background-networking", "component-update", "sync")]
CLIENTS = 240


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """One tab for all tests: to start a browser takes seconds."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page()
        page.set_default_timeout(10_000)
        yield page
        browser.close()


@pytest.fixture
def wrong(tab: Any) -> Iterator[list[str]]:
    """What the browser complains of, and what a page asks of the network: nothing."""
    found: list[str] = []
    heard: dict[str, Callable[[Any], Any]] = {
        "console": lambda said: found.append(said.text) if said.type in ("error", "warning") else None,
        "pageerror": lambda error: found.append(str(error)),
        "request": lambda sent: None if sent.url.startswith(("file:", "data:")) else found.append(sent.url),
    }
    for name, listener in heard.items():
        tab.on(name, listener)
    yield found
    for name, listener in heard.items():
        tab.remove_listener(name, listener)
    assert found == []


def show(tab: Any, path: Path) -> None:
    """Open a page with all its charts."""
    tab.goto(path.as_uri())
    tab.evaluate("document.querySelectorAll('[data-chart]').forEach(rayfl.open)")
    assert tab.evaluate("rayfl.charts.length") == tab.evaluate("rayfl.page.charts.length") > 0


def check_every_look(tab: Any) -> None:
    """Wide and narrow, light and dark: nothing is wider than the window, and charts follow the scheme."""
    seen = set()
    for width in (1280, 500):
        for scheme in ("light", "dark"):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            seen.add(picture(tab.locator("figure").first))
    assert len(seen) == 4
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(color_scheme="light")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with clients that move from cluster to cluster."""
    path = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    first, last = rng.integers(0, 3, CLIENTS), rng.integers(0, 4, CLIENTS)
    x, y = rng.normal(size=(2, CLIENTS))
    rounds = np.arange(6)
    pd.DataFrame(
        {
            "round": rounds, "seconds": 1.5, "accuracy_mean": 50.0 + 5 * rounds, "accuracy_best10": 90.0,
            "accuracy_worst10": 30.0, "loss_mean": 2.0 - rounds / 10, "bytes_up": 1e6, "bytes_down": 2e6,
        }
    ).to_csv(path / "rounds.csv", index=False)  # fmt: skip
    pd.DataFrame(
        {
            "client": np.arange(CLIENTS), "name": [f"writer-{i}" for i in range(CLIENTS)], "best_round": 3,
            "n": rng.integers(5, 90, CLIENTS), "group": first, "cluster": last,
            "accuracy_last": rng.uniform(20, 100, CLIENTS),
        }
    ).to_csv(path / "clients.csv", index=False)  # fmt: skip
    entries = [
        {"round": -1, "labels": first.tolist(), "n_clusters": 3, "map": {"x": x.tolist(), "y": y.tolist()},
         "curve": {"threshold": [0.0, 1.0, 2.0], "n_clusters": [9, 3, 1]}, "threshold": 1.5},
        {"round": 3, "when": "after", "labels": last.tolist(), "n_clusters": 4},
    ]  # fmt: skip
    (path / "clusters.json").write_text(json.dumps({"timeline": entries, "groups": first.tolist()}))
    lines = [f"{r},client_lps,{way},model,{1000 * (r + 1)}" for r in range(6) for way in ("up", "down")]
    (path / "communication.csv").write_text("\n".join(["round,tier,direction,kind,bytes", *lines]))
    (path / "config.yaml").write_text("algorithm: {name: ifca}\n")
    (path / "environment.json").write_text("{}")
    return write_report(path)


def figure(page: Any, title: str) -> Any:
    return (
        page.locator("section", has=page.get_by_role("heading", name=title, exact=True))
        .locator("figure")
        .first
    )


def picture(chart: Any) -> str:
    return str(chart.evaluate("(f) => { f.chart.chart.getZr().flush(); return f.chart.chart.getDataURL(); }"))


def option(chart: Any, expression: str) -> Any:
    return chart.evaluate(f"(f) => {{ const o = f.chart.chart.getOption(); return {expression}; }}")


@pytest.fixture
def page(tab: Any, wrong: list[str], report: Path) -> Any:
    """The tab with the report of a run; the tests change different parts of it."""
    if tab.url != report.as_uri():
        show(tab, report)
    return tab


def test_a_report_at_every_width_light_and_dark(page: Any) -> None:
    check_every_look(page)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert before == "rgb(255, 255, 255)"
    switch = page.get_by_role("button", name="switch between light and dark")
    switch.click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    switch.click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before


def test_metric_and_axis_are_chosen(page: Any) -> None:
    chart = figure(page, "Over rounds")
    assert option(chart, "o.yAxis[0].name") == "test accuracy, mean over clients (%)"
    assert "Band: mean of the worst 10 %" in chart.inner_text()
    before = picture(chart)
    chart.locator("[data-selector=metric]").select_option("test loss, mean over clients")
    assert option(chart, "o.yAxis[0].name") == "test loss, mean over clients"
    assert option(chart, "o.series[1].encode.y") == "loss_mean"
    assert "Band: " not in chart.inner_text()
    assert picture(chart) != before
    chart.locator("[data-selector=over]").select_option("bytes sent so far, up and down")
    assert option(chart, "o.series[1].encode.x") == "bytes"
    chart.locator(".canvas").focus()
    chart.page.keyboard.press("ArrowRight")
    assert "3.00 MB" in chart.page.locator("#spoken").text_content()


def test_the_slider_moves_the_map(page: Any) -> None:
    chart = figure(page, "Map of clients")
    slider = chart.get_by_role("slider")
    assert "after round 4: 4 clusters" in chart.inner_text()
    after = picture(chart)
    slider.focus()
    chart.page.keyboard.press("ArrowLeft")
    assert "before training: 3 clusters" in chart.inner_text()
    chart.page.wait_for_timeout(700)  # the change is animated
    assert picture(chart) != after
    chart.locator("[data-selector=colour]").select_option("accuracy, last")
    assert "accuracy, last: " in chart.inner_text()


def test_tables_sort_and_filter(page: Any, report: Path) -> None:
    table = page.locator("section#clients [data-table]")
    clients = pd.read_csv(report.with_name("clients.csv"))
    assert f"1 to 20 of {CLIENTS}" in table.inner_text()
    heading = table.get_by_role("columnheader", name="accuracy, last")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    first = table.locator("tbody tr").first
    ranked = clients.sort_values("accuracy_last")
    assert first.inner_text().split()[0] == ranked["name"].iloc[0]
    heading.get_by_role("button").click()
    assert first.inner_text().split()[0] == ranked["name"].iloc[-1]
    table.get_by_role("button", name="next").click()
    assert first.inner_text().split()[0] == ranked["name"].iloc[-21]
    table.get_by_role("searchbox").fill("accuracy, last < 50 cluster = 2")
    kept = clients[(clients["accuracy_last"] < 50) & (clients["cluster"] == 2)].sort_values("accuracy_last")
    several = f"1 to 20 of {len(kept)}" if len(kept) > 20 else f"{len(kept)} of {CLIENTS} rows"
    assert several in table.inner_text()
    assert [row.split()[0] for row in table.locator("tbody tr").all_inner_texts()] == kept["name"].tolist()[
        ::-1
    ]
    table.get_by_role("searchbox").fill("writer-17")
    assert table.locator("tbody tr").count() == 11  # 17 and 170 to 179


def test_numbers_are_written_as_in_python(page: Any) -> None:
    numbers = [
        0,
        1,
        12.345,
        61.25,
        61.75,
        -2.5,
        3.5,
        0.05,
        999.4,
        999.5,
        1234567.0,
        5e9,
        59.94,
        59.95,
        3600,
        7325.0,
    ]
    formats = ["number:0", "number:2", "percent:1", "size", "duration", "text", "general"]
    for format in formats:
        found = page.evaluate("([n, f]) => n.map((v) => rayfl.written(v, f))", [[*numbers, None], format])
        shown = [n if format != "text" or n != int(n) else int(n) for n in numbers]
        assert found == [formatted(value, format) for value in [*shown, None]]
    for value in (0.000123456, 1.23456e-7, -4.5678e16):
        assert page.evaluate("(v) => rayfl.written(v, 'general')", value) == formatted(value, "general")


def drawn(tab: Any, path: Path, *charts: Any, title: str = "drawn") -> Any:
    """A page with these charts in a section; the first of them."""
    show(tab, write_page(path / "page.html", Page("page", sections=[Section(title, charts=charts)])))
    return figure(tab, title)


ROUND, ACCURACY = Metric("round", "round", "number:0"), Metric("accuracy", "accuracy (%)", "percent:1")


def extent(chart: Any, axis: str) -> list[float]:
    """The ends of an axis."""
    found: list[float] = chart.evaluate(
        "(f, axis) => f.chart.chart.getModel().getComponent(axis).axis.scale.getExtent()", axis
    )
    return found


def test_thousands_separators_in_a_filter(tab: Any, wrong: list[str], tmp_path: Path) -> None:
    table = Table([Column("client", list(range(20_000)), "number:0")])
    line = Line("one", {"round": [1, 2], "accuracy": [1, 2]})
    section = Section("clients", charts=[curves([line], [ACCURACY], [ROUND], "")], tables=[table])
    show(tab, write_page(tmp_path / "page.html", Page("page", sections=[section])))
    tab.get_by_role("searchbox").fill("client > 19,989")
    assert "10 of 20,000 rows" in tab.locator("[data-table]").inner_text()


@pytest.mark.parametrize(
    ("accuracy", "low", "high"),
    [([81.0, 99.6], -20.0, 130.0), ([97.2, 97.2], None, None), ([4.0, 99.9], None, None)],
)
def test_axes_end_where_numbers_do(
    tab: Any, wrong: list[str], tmp_path: Path, accuracy: list[float], low: float | None, high: float | None
) -> None:
    """Accuracies within 0 and 100 %, rounds with the first and the last, whatever ECharts finds round."""
    columns = {"round": [1, 2003], "accuracy": accuracy, "low": [low] * 2, "high": [high] * 2}
    metric = Metric("accuracy", "accuracy (%)", "percent:1", *(("low", "high") if low else ()))
    chart = drawn(tab, tmp_path, curves([Line("one", columns)], [metric], [ROUND], ""))
    assert extent(chart, "xAxis") == [1, 2003]
    ends = extent(chart, "yAxis")
    assert 0 <= ends[0] < accuracy[0]
    assert ends[1] == 100


def test_names_of_methods_are_not_filled_in(tab: Any, wrong: list[str], tmp_path: Path) -> None:
    name = "{slider} $1 {a} {b}"
    one = Line(name, {"x": [1.0], "y": [2.0]})
    other = Line("other", {"x": [3.0], "y": [4.0]})
    metrics = [Metric(axis, axis, "number:1") for axis in "xy"]
    chart = drawn(tab, tmp_path, pareto([one, other], *metrics, ""))
    assert name in chart.inner_text()
    assert option(chart, "o.series[0].label.formatter({})") == name
    matrix = heatmap([[0, 1], [1, 0]], [name, "b"], [name, "b"], "")
    assert option(drawn(tab, tmp_path, matrix), "o.xAxis[0].data[0]") == name


def test_long_names_beside_a_narrow_chart_keep_their_ends(tab: Any, wrong: list[str], tmp_path: Path) -> None:
    names = [f"Sub-FedAvg (Un) with a long name, variant {number}" for number in (1, 2)]
    tab.set_viewport_size({"width": 500, "height": 900})
    chart = drawn(tab, tmp_path, box({name: [1.0, 2.0] for name in names}, "values", ""))
    shown = [option(chart, f"o.yAxis[0].axisLabel.formatter('{name}')") for name in names]
    assert shown == ["Sub-FedA…ariant 1", "Sub-FedA…ariant 2"]
    assert option(chart, "o.yAxis[0].axisLabel.formatter('FedAvg')") == "FedAvg"
    tab.set_viewport_size({"width": 1280, "height": 900})


def test_a_lone_point_among_long_lines_is_marked(tab: Any, wrong: list[str], tmp_path: Path) -> None:
    rounds = list(range(1, 101))
    long = Line("long", {"round": rounds, "accuracy": [50.0] * 100})
    rare = Line("rare", {"round": rounds, "accuracy": [*[None] * 98, 60.0, None]})
    single = Line("single", {"round": [3], "accuracy": [70.0]})
    chart = drawn(tab, tmp_path, curves([long, rare, single], [ACCURACY], [ROUND], ""))
    shown = option(chart, "o.series.filter((s) => s.type === 'line').map((s) => s.showSymbol)")
    assert shown == [False, True, True]


def test_arrow_keys_go_to_known_values(tab: Any, wrong: list[str], tmp_path: Path) -> None:
    columns = {"round": list(range(1, 9)), "accuracy": [None, None, None, 41.0, None, None, None, 42.0]}
    lines = [Line("nothing", {"round": [1], "accuracy": [None]}), Line("one", columns)]
    chart = drawn(tab, tmp_path, curves(lines, [ACCURACY], [ROUND], ""))
    chart.locator(".canvas").focus()
    said = []
    for _ in range(2):
        tab.keyboard.press("ArrowRight")
        said.append(tab.locator("#spoken").text_content())
    assert ["41.0 %" in said[0], "42.0 %" in said[1]] == [True, True]


def test_each_choice_has_a_height_of_its_own(tab: Any, wrong: list[str], tmp_path: Path) -> None:
    few = histogram([1, 2, 2], "values", "", [1, 2, 3], "number:0")
    many = box({str(i): [1.0, 2.0] for i in range(20)}, "values", "")
    chart = drawn(tab, tmp_path, alternatives("show", {"few": few, "many": many}))
    assert chart.evaluate("(f) => f.chart.chart.getHeight()") == few.height
    assert chart.evaluate("(f) => f.chart.current.height ?? null") is None  # ECharts would use all of it
    chart.locator("[data-selector=show]").select_option("many")
    assert chart.locator(".canvas").evaluate("(c) => c.clientHeight") == many.height > few.height


def test_printing(tab: Any, wrong: list[str], tmp_path: Path) -> None:
    """Every chart is drawn at once, at the width of paper and in light colours, whatever the screen shows."""
    line = Line("one", {"round": [1, 2], "accuracy": [50.0, 60.0]})
    charts = [curves([line], [ACCURACY], [ROUND], "") for _ in range(9)]
    path = write_page(tmp_path / "page.html", Page("page", sections=[Section("drawn", charts=charts)]))
    tab.emulate_media(color_scheme="dark")
    tab.goto(path.as_uri())
    opened = tab.evaluate("rayfl.charts.length")
    facts = """() => {
      dispatchEvent(new Event("beforeprint"));
      const last = rayfl.charts.at(-1), line = last.chart.getOption().series[1].lineStyle.color;
      const printed = document.querySelectorAll(".printed");
      const data = printed[8].getContext("2d").getImageData(0, 0, 1360, 680).data;
      const blue = (i) => data[i] === 0 && data[i + 1] === 114 && data[i + 2] === 178;
      let count = 0;
      for (let i = 0; i < data.length; i += 4) count += blue(i);
      const found = [rayfl.charts.length, printed.length, last.chart.getWidth(), line, count > 500];
      dispatchEvent(new Event("afterprint"));
      return [...found, last.chart.getWidth() > 680, last.chart.getOption().series[1].lineStyle.color];
    }"""
    assert tab.evaluate(facts) == [9, 9, 680, "#0072B2", True, True, "#56B4E9"]
    assert tab.locator(".printed").count() == 0
    assert opened < 9
    tab.emulate_media(color_scheme="dark", media="print")
    style = "(name) => getComputedStyle(document.documentElement)[name]"
    assert tab.evaluate(style, "printColorAdjust") == "exact"
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(31, 35, 40)"
    tab.emulate_media(color_scheme="light", media="screen")


def test_the_other_pages_at_every_width(tab: Any, wrong: list[str], report: Path, tmp_path: Path) -> None:
    """Comparison, partition and clusterings; and the selectors of the latter."""
    other = Path(shutil.copytree(report.parent, tmp_path / "other"))
    (other / "config.yaml").write_text("algorithm: {name: fedavg}\n")
    show(tab, Comparison.of([report.parent, other]).write(tmp_path / "comparison.html"))
    check_every_look(tab)
    chart = (
        tab.locator("section", has=tab.get_by_role("heading", name="Clients", exact=True))
        .locator("figure")
        .nth(1)
    )
    before = picture(chart)
    chart.locator("[data-selector=horizontal]").select_option(index=1)
    assert picture(chart) != before
    [found] = views(
        load({"name": "p", "data": "digits"}, ["partition={name: iid, clients: 6}"]), ["emd", "cka"]
    )
    show(tab, write_partition(found, tmp_path / "partition")[-1])
    check_every_look(tab)
    chart = figure(tab, "Distances")
    before = picture(chart)
    chart.locator("[data-selector=measure]").select_option("cka")
    assert picture(chart) != before
    distances = np.array([1.0, 2.0, 3.0])
    clusters = Clusters(np.array([0, 0, 1]), 2, distances=distances, linkage=linkage(distances, "average"))
    result = ClusteringResult("pacfl", Clustering(), clusters, np.array([0, 0, 1]), (), 0.1)
    show(tab, write_page(tmp_path / "clusters.html", clusters_page([result], "clusters")))
    check_every_look(tab)
