"""The report of a run: what it says, and that it stands alone whatever is missing."""

import base64
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from rayfl.errors import RayflError
from rayfl.report import figures
from rayfl.report.files import RunFiles
from rayfl.report.html import write_report

ALL = ["Accuracy over rounds", "Clients", "Clusters", "Choice of threshold", "Communication", "Loss"]


def rows(page: str) -> list[list[str]]:
    """The text of every table row."""
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[dh][^>]*>.*?</t[dh]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    ]


def images(page: str) -> list[str]:
    """Every inlined chart as SVG source, light and dark."""
    coded = re.findall(r'(?:src|srcset)="data:image/svg\+xml;base64,([^"]*)"', page)
    return [base64.b64decode(code).decode() for code in coded]


def titles(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_headline_by_hand(run_dir: Path):
    headline = RunFiles.read(run_dir).headline()
    expected = {
        "run": "run-1", "algorithm": "pacfl", "data": "digits", "partition": "label_skew", "model": "mlp",
        "seed": 3, "clients": 4, "rounds": 5,
        "accuracy_mean": 85.0, "accuracy_weighted": 86.0, "accuracy_median": 87.0,
        "accuracy_worst10": 65.0, "accuracy_best10": 99.0, "accuracy_var": 120.0, "loss_mean": 0.7,
        "accuracy_se": None, "accuracy_se_samples": None, "distinct_test_samples": None,
        "group_var_within": None, "group_var_between": None,
        "cluster_var_within": None, "cluster_var_between": None,
        "perplexity_mean": None, "estimated_from": None,
        "last_round": 3, "accuracy_mean_max": 90.0, "max_round": 2,
        "accuracy_client_best": (70 + 99 + 100 + 91) / 4,
        "finetuned_accuracy_mean": None,
        "clusters": 2, "ari": 0.5, "bytes_up": 6300, "bytes_down": 2000, "seconds": 6.5,
    }  # fmt: skip
    assert headline == expected


def test_the_report_says_what_was_measured(run_dir: Path):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = path.read_text()
    table = rows(page)
    assert ["", "last evaluation (round 3)", "best"] in table
    assert ["Accuracy, mean over clients", "85.0 %", "90.0 % (round 2)"] in table
    assert ["Accuracy, mean of the worst 10 % of clients", "65.0 %", ""] in table
    assert ["Variance over clients, %²", "120.0", ""] in table
    assert ["clients – local server", "signature", "5.00 kB", "0 B"] in table
    assert ["packages.torch", "2.13.0"] in table
    assert "clustering: {threshold: 3.5}" in page
    assert "<dt>sent up</dt><dd>6.30 kB</dd>" in page
    assert titles(page) == ALL
    assert "failed clients" not in page
    assert "Not in this report" not in page


def test_clusters_against_groups(run_dir: Path):
    table = rows(write_report(run_dir).read_text())
    header = ["cluster", "clients", "mean accuracy", "lowest", "highest", "group 0", "group 1"]
    at = table.index(header)
    assert table[at + 1] == ["0", "2", "82.0 %", "65.0 %", "99.0 %", "2", "·"]
    assert table[at + 2] == ["5", "2", "88.0 %", "88.0 %", "88.0 %", "1", "1"]


def with_columns(run_dir: Path, **columns: list[object]) -> None:
    """Columns of ``rounds.csv`` as newer versions write them; tested were rounds 0, 2 and 3 of 5."""
    frame = pd.read_csv(run_dir / "rounds.csv").assign(**columns)
    frame.to_csv(run_dir / "rounds.csv", index=False)


def test_estimates_from_a_few_clients_are_called_so_and_are_no_best(run_dir: Path, as_svg: None):
    said = "Hollow points are estimates from 200 clients that stand for all"
    assert said not in write_report(run_dir).read_text()
    with_columns(run_dir, estimated_from=[200, None, 200, None, None])
    page = write_report(run_dir).read_text()
    assert said in page
    assert ["Accuracy, mean over clients", "85.0 %", "85.0 % (round 3)"] in rows(page)  # 90 was an estimate
    assert sum("estimate from a few clients" in image for image in images(page)) == 2
    # A run that was stopped has none but estimates.
    with_columns(run_dir, estimated_from=[200, None, 200, 200, None])
    table = rows(write_report(run_dir).read_text())
    assert ["", "last evaluation (round 3), estimated from 200 clients", "best"] in table
    assert ["Accuracy, mean over clients", "≈ 85.0 %", "–"] in table
    assert "<dt>worst 10 % of clients</dt><dd>≈ 65.0 %</dd>" in (run_dir / "report.html").read_text()


def test_the_time_is_that_of_the_closing_table(run_dir: Path):
    assert RunFiles.read(run_dir).headline()["seconds"] == 6.5  # not finished: of the rounds
    (run_dir / "summary.json").write_text(json.dumps({"rounds": 5, "seconds": 99.5}))
    assert RunFiles.read(run_dir).headline()["seconds"] == 99.5
    (run_dir / "summary.json").write_text(json.dumps({"rounds": 3, "seconds": 99.5}))  # then resumed
    assert RunFiles.read(run_dir).headline()["seconds"] == 6.5


def test_the_best_is_one_since_the_last_event(run_dir: Path):
    with_columns(run_dir, stage=[0, 0, 0, 1, 1])
    headline = RunFiles.read(run_dir).headline()
    assert (headline["accuracy_mean_max"], headline["max_round"]) == (85.0, 3)
    with_columns(run_dir, stage=[0, 0, 0, 0, 1])  # and there was no test since
    assert RunFiles.read(run_dir).headline()["accuracy_mean_max"] is None


def test_standard_errors_and_what_was_tested_stand_beside_the_accuracy(run_dir: Path):
    columns = {"accuracy_se": 5.5, "accuracy_se_samples": 2.25, "distinct_test_samples": 1359}
    with_columns(run_dir, **{name: [value] * 5 for name, value in columns.items()})
    table = rows(write_report(run_dir).read_text())
    assert ["Its standard error over clients", "5.5 %", ""] in table
    assert ["Its standard error over test samples", "2.2 %", ""] in table
    assert ["Distinct test samples", "1,359", ""] in table
    assert ["Test samples of a client, least to most", "20 to 20", ""] in table


GROUPS = """\
round,kind,id,clients,test_samples,distinct_test_samples,accuracy_mean,accuracy_var,accuracy_se,\
accuracy_se_samples,loss_mean,estimated_from
0,group,0,3,60,50,60.0,9.0,2.1,6.5,1.2,
0,group,1,1,20,20,40.0,0.0,,9.5,2.2,
3,group,0,3,60,50,84.0,4.5,1.5,5.2,0.6,
3,group,1,1,20,20,88.0,0.0,,7.3,0.9,
3,cluster,0,2,40,30,82.0,2.0,1.0,6.0,0.7,
3,cluster,5,2,40,35,88.0,0.0,0.0,5.5,0.7,
"""


def test_accuracy_by_planted_group_and_by_cluster(run_dir: Path, as_svg: None):
    (run_dir / "groups.csv").write_text(GROUPS)
    parts = {"group_var_within": 3.375, "group_var_between": 3.0}
    with_columns(run_dir, **{name: [value] * 5 for name, value in parts.items()})
    page = write_report(run_dir).read_text()
    assert titles(page)[:3] == ["Accuracy over rounds", "Accuracy by planted group", "Accuracy by cluster"]
    table = rows(page)
    columns = ["clients", "test samples", "mean accuracy", "± clients", "± samples"]
    at = table.index(["group", *columns, "variance, %²", "test loss"])
    assert table[at + 1] == ["0", "3", "50", "84.0 %", "1.5", "5.2", "4.50", "0.6000"]
    assert table[at + 2] == ["1", "1", "20", "88.0 %", "–", "7.3", "0.00", "0.9000"]
    assert ["5", "2", "35", "88.0 %", "0.0", "5.5", "0.00", "0.7000"] in table
    assert (
        "Of the variance over all clients, 6.38 %², 3.38 lie within planted groups and 3.00 between" in page
    )
    assert sum("group 1" in image for image in images(page)) == 2  # its curve, on light and on dark pages
    assert ["Variance within planted groups, %²", "3.4", ""] in table


def test_clients_that_left_do_not_count(run_dir: Path):
    """In the run's own numbers they do not either."""
    clients = pd.read_csv(run_dir / "clients.csv")
    clients.loc[0, "n"] = 0
    clients.to_csv(run_dir / "clients.csv", index=False)
    page = write_report(run_dir).read_text()
    assert "Last accuracy of 3 of 4 clients. Those that left (1) are not shown." in page
    assert "Histogram of client accuracies, mean 91.7 %" in page  # of 99, 88 and 88
    assert ["0", "1", "99.0 %", "99.0 %", "99.0 %", "1", "·"] in rows(page)


def test_the_chosen_threshold_is_marked(run_dir: Path, as_svg: None):
    assert (
        sum("chosen: 2 clusters at 3.5" in image for image in images(write_report(run_dir).read_text())) == 2
    )


def test_the_page_stands_alone(run_dir: Path, as_svg: None):
    page = write_report(run_dir).read_text()
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', page)
    assert len(sources) == 2 * 5  # five charts, light and dark
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert not re.search(r"@import|url\(|<script|<link", page)
    for image in images(page):
        assert ElementTree.fromstring(image).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_run_gives_the_same_bytes_and_leaves_no_state(run_dir: Path, as_svg: None):
    before = dict(matplotlib.rcParams)
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir).read_bytes() == first
    assert dict(matplotlib.rcParams) == before
    assert sorted(
        path.name for path in run_dir.iterdir() if path.suffix not in (".yaml", ".json", ".csv")
    ) == ["report.html"]


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("config.yaml", set()),
        ("environment.json", set()),
        ("rounds.csv", {"Accuracy over rounds", "Loss"}),
        ("clients.csv", {"Clients"}),
        ("clusters.json", {"Choice of threshold"}),
        ("communication.csv", {"Communication"}),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_a_missing_or_broken_file_costs_only_its_part(run_dir: Path, name: str, gone: set[str], broken: bool):
    if broken:
        (run_dir / name).write_bytes(b"" if name.endswith("csv") else b"{: \xff")
    else:
        (run_dir / name).unlink()
    page = write_report(run_dir).read_text()
    assert set(ALL) - set(titles(page)) == gone
    reason = "unreadable" if broken else "not there"
    assert re.search(rf"Not in this report: {re.escape(name)} \({reason}[^<]*\)\.", page)


def test_an_empty_directory_gives_a_page(tmp_path: Path):
    page = write_report(tmp_path).read_text()
    assert titles(page) == []
    assert ["No evaluation", "–", ""] in rows(page)
    assert all(value is None for name, value in RunFiles.read(tmp_path).headline().items() if name != "run")


def test_a_run_stopped_before_its_first_evaluation(run_dir: Path):
    (run_dir / "rounds.csv").write_text("round,seconds,train_loss,accuracy_mean\n0,2.0,1.5,\n1,3.0,,\n")
    (run_dir / "clients.csv").write_text("client,n,accuracy_last,accuracy_best\n0,10,,\n1,10,,\n")
    page = write_report(run_dir).read_text()
    assert titles(page) == ["Clusters", "Choice of threshold", "Communication", "Loss"]
    assert "nan" not in re.sub(r"<[^>]*>", "", page).lower()
    assert "<dt>time</dt><dd>5.0 s</dd>" in page


def test_without_planted_groups(run_dir: Path):
    clusters = json.loads((run_dir / "clusters.json").read_text())
    (run_dir / "clusters.json").write_text(json.dumps({**clusters, "groups": None}))
    clients = (run_dir / "clients.csv").read_text().splitlines()
    without = [re.sub(r"^(\d,10),\d", r"\1,", line) for line in clients]
    (run_dir / "clients.csv").write_text("\n".join(without))
    assert ["cluster", "clients", "mean accuracy", "lowest", "highest"] in rows(
        write_report(run_dir).read_text()
    )


def test_many_clusters_are_cut_to_the_largest(run_dir: Path, as_svg: None):
    labels = [0, 0, 0, *range(1, 100)]
    (run_dir / "clusters.json").write_text(json.dumps({"timeline": [{"round": 0, "labels": labels}]}))
    page = write_report(run_dir).read_text()
    table = rows(page)
    at = table.index(["cluster", "clients"])
    assert table[at + 1] == ["0", "3"]
    assert sum(len(row) == 2 and row[1] == "1" for row in table) == 39
    assert "The 40 largest of 100 clusters." in page
    assert "cluster, largest first" in "".join(images(page))


def test_failures_are_not_hidden(run_dir: Path):
    lines = (run_dir / "rounds.csv").read_text().splitlines()
    failures = ["failures", "0", "2", "0", "1", ""]
    (run_dir / "rounds.csv").write_text("\n".join(map(",".join, zip(lines, failures, strict=True))))
    assert "<dt>failed clients</dt><dd>3</dd>" in write_report(run_dir).read_text()


def test_only_traffic_before_training(run_dir: Path):
    lines = (run_dir / "communication.csv").read_text().splitlines()
    (run_dir / "communication.csv").write_text("\n".join(lines[:2]))
    page = write_report(run_dir).read_text()
    assert "Before training: 5.00 kB" in page
    assert len(images(page)) == 2 * 4


@pytest.mark.parametrize("count", [4, 5000])
def test_the_threshold_curve_reaches_past_the_chosen_one(count: int):
    thresholds, counts = np.arange(count, dtype=float), np.arange(count, 0, -1.0)
    axes = Figure().add_subplot()
    figures.threshold_curve(thresholds, counts, 2.0 * count, 1)(axes, figures.LIGHT)
    x, y = (np.asarray(part) for part in axes.lines[0].get_data())
    assert x[-1] > 2 * count
    assert y[-1] == 1
    assert len(x) <= 2001
    assert (count - x[:-1] == y[:-1]).all()  # every point shown is a point of the curve
    assert y[0] == count


def test_text_from_files_is_escaped(run_dir: Path):
    (run_dir / "config.yaml").write_text("algorithm: {name: '<script>alert(1)</script>'}\n")
    page = write_report(run_dir).read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_no_such_run(tmp_path: Path):
    with pytest.raises(RayflError, match="no such run directory"):
        write_report(tmp_path / "absent")
