"""The report of a run: what it says, and that it stands alone whatever is missing."""

import json
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rayfl.errors import RayflError
from rayfl.report.charts import COLOURS, Line, steps
from rayfl.report.files import RunFiles
from rayfl.report.html import write_report
from tests.report.reading import charts, choices, rows, text, titles, values

ALL = ["Over rounds", "Clients", "Map of clients", "Clusters", "Choice of threshold", "Communication"]


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
        "local_accuracy_mean": None, "validation_accuracy_mean": None, "common_accuracy_mean": None,
        "last_round": 3, "accuracy_mean_max": 90.0, "accuracy_mean_best_validation": None, "max_round": 2,
        "accuracy_client_best": (70 + 99 + 100 + 91) / 4,
        "finetuned_accuracy_mean": None,
        "newcomers_accuracy_mean": None,
        "newcomers_finetuned_accuracy_mean": None,
        "clusters": 2, "ari": 0.5, "bytes_up": 6300, "bytes_down": 2000, "seconds": 6.5,
    }  # fmt: skip
    assert headline == expected


def test_the_report_says_what_was_measured(run_dir: Path):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = path.read_text()
    table = rows(page)
    assert ["", "last evaluation (round 4)", "best"] in table
    assert ["Accuracy, mean over clients", "85.0 %", "90.0 % (round 3)"] in table
    assert ["Accuracy, mean of the worst 10 % of clients", "65.0 %", ""] in table
    assert ["Variance over clients, %²", "120.0", ""] in table
    assert ["clients – local servers", "signature", "5.00 kB", "0 B"] in table
    assert ["packages.torch", "2.13.0"] in table
    assert "clustering: {threshold: 3.5}" in page
    assert "<dt>sent up</dt><dd>6.30 kB</dd>" in page
    assert titles(page) == ALL
    assert "failures of clients" not in text(page)
    assert "Not in this report" not in text(page)


def test_clusters_against_groups(run_dir: Path):
    table = rows(write_report(run_dir).read_text())
    header = ["cluster", "clients", "mean accuracy", "lowest", "highest", "group 0", "group 1"]
    at = table.index(header)
    assert table[at + 1] == ["0", "2", "82.0 %", "65.0 %", "99.0 %", "2", "·"]
    assert table[at + 2] == ["5", "2", "88.0 %", "88.0 %", "88.0 %", "1", "1"]


def with_columns(run_dir: Path, **columns: object) -> None:
    """Columns of ``rounds.csv`` as newer versions write them; tested were rounds 0, 2 and 3 of 5."""
    frame = pd.read_csv(run_dir / "rounds.csv").assign(**columns)
    frame.to_csv(run_dir / "rounds.csv", index=False)


def test_estimates_from_a_few_clients_are_called_so_and_are_no_best(run_dir: Path):
    said = "Hollow points are estimates from 200 clients that represent all"
    assert said not in write_report(run_dir).read_text()
    with_columns(run_dir, estimated_from=[200, None, 200, None, None])
    page = write_report(run_dir).read_text()
    assert said in page
    assert ["Accuracy, mean over clients", "85.0 %", "85.0 % (round 4)"] in rows(page)  # 90 was an estimate
    option = charts(page)["Over rounds"]["option"]
    assert option["series"][1]["hollow"] == "estimated"
    assert option["dataset"][0]["source"]["estimated"] == [True, False, True, False, False]
    # A run that was stopped has none but estimates.
    with_columns(run_dir, estimated_from=[200, None, 200, 200, None])
    table = rows(write_report(run_dir).read_text())
    assert ["", "last evaluation (round 4), estimated from 200 clients", "best"] in table
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
    assert ["Test samples of a client, least to most", "20", ""] in table


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


def test_accuracy_by_planted_group_and_by_cluster(run_dir: Path):
    (run_dir / "groups.csv").write_text(GROUPS)
    parts = {"group_var_within": 3.375, "group_var_between": 3.0}
    with_columns(run_dir, **{name: [value] * 5 for name, value in parts.items()})
    page = write_report(run_dir).read_text()
    assert titles(page)[:3] == ["Over rounds", "Accuracy by planted group", "Accuracy by cluster"]
    table = rows(page)
    columns = ["clients", "test samples", "mean accuracy", "± clients", "± samples"]
    at = table.index(["group", *columns, "variance, %²", "test loss"])
    assert table[at + 1] == ["0", "3", "50", "84.0 %", "1.5", "5.2", "4.50", "0.6000"]
    assert table[at + 2] == ["1", "1", "20", "88.0 %", "–", "7.3", "0.00", "0.9000"]
    assert ["5", "2", "35", "88.0 %", "0.0", "5.5", "0.00", "0.7000"] in table
    assert (
        "Of the variance over all clients, 6.38 %², 3.38 lie within planted groups and 3.00 between" in page
    )
    chart = charts(page)["Accuracy by planted group"]
    assert chart["legend"] == ["group 0", "group 1"]
    assert chart["option"]["dataset"][1]["source"]["round"] == [1, 4]
    assert chart["option"]["dataset"][1]["source"]["accuracy_mean"] == [40, 88]
    assert [series["hollow"] for series in chart["option"]["series"][1::2]] == ["", ""]
    assert ["Variance within planted groups, %²", "3.4", ""] in table
    looks = [
        (series["itemStyle"]["color"], series["lineStyle"]["type"])
        for series in charts(page)["Accuracy by cluster"]["option"]["series"]
        if series["type"] == "line"
    ]
    assert looks == [("$0", "solid"), ("$5", "solid")]  # as clusters 0 and 5 on the map


def test_many_lines_differ_in_colour_or_dashes_and_have_the_colours_of_the_map() -> None:
    looks = [Line("a", {}, place=place).look(0) for place in range(16)]
    assert looks[6:9] == [("$6", 0), ("$7", 1), ("$8", 1)]
    assert looks[13:] == [("$13", 1), ("$0", 2), ("$1", 2)]
    assert len(set(looks)) == 16
    script = resources.files("rayfl.report").joinpath("page.js").read_text()
    assert f"const COLOURS = {COLOURS};" in script


def test_clients_that_left_do_not_count(run_dir: Path):
    """In the run's own numbers they do not either."""
    clients = pd.read_csv(run_dir / "clients.csv")
    clients.loc[0, "n"] = 0
    clients.to_csv(run_dir / "clients.csv", index=False)
    page = write_report(run_dir).read_text()
    assert "Last accuracy of 3 of 4 clients. Those that left (1) are not shown." in page
    assert "Histogram of clients by accuracy, mean 91.7 %" in page  # of 99, 88 and 88
    assert ["0", "1", "99.0 %", "99.0 %", "99.0 %", "1", "·"] in rows(page)


def test_estimates_of_groups_are_hollow(run_dir: Path):
    (run_dir / "groups.csv").write_text(GROUPS.replace("6.5,1.2,", "6.5,1.2,2"))
    option = charts(write_report(run_dir).read_text())["Accuracy by planted group"]["option"]
    assert option["series"][1]["hollow"] == "estimated"
    assert option["dataset"][0]["source"]["estimated"] == [True, False]


def change(run_dir: Path, name: str, **columns: object) -> None:
    """Set columns of a table of a run."""
    frame = pd.read_csv(run_dir / name).assign(**columns)
    frame.to_csv(run_dir / name, index=False)


def test_numbers_are_rounded_once(run_dir: Path):
    """78.35498 is 78.4, though 78.35, of two decimals, would be 78.3; and no digits are made up."""
    change(run_dir, "rounds.csv", loss_mean=[167098.344, None, 1e-7, 0.7, None])
    change(run_dir, "clients.csv", accuracy_last=[78.35498] * 4)
    page = write_report(run_dir).read_text()
    source = charts(page)["Over rounds"]["option"]["dataset"][0]["source"]
    assert source["loss_mean"] == [167098.344, None, 1e-7, 0.7, None]
    assert values(page)["data"]["clients"]["accuracy_last"] == [78.35498] * 4
    assert ["0", "2", "78.4 %", "78.4 %", "78.4 %", "2", "·"] in rows(page)
    boxes = choices(charts(page)["Clients"], "accuracy of")["by cluster"]["dataset"][0]["source"]
    assert boxes["median"] == [78.35498] * 2


LATE = [
    {"round": 0, "when": "before", "labels": [0, 0, 5, -1], "n_clusters": 2,
     "map": {"x": [0, 1, 2, None], "y": [0, 1, 0, None]}},
    {"round": 5, "when": "before", "labels": [0, 0, 5, 5], "n_clusters": 2, "newcomers": [3]},
    {"round": 5, "when": "before", "labels": [0, 0, 5, 0], "n_clusters": 2},
]  # fmt: skip


def test_clients_that_left_or_came_last_are_no_members(run_dir: Path):
    """Client 0 left after two rounds; client 3 joined after the last and was tested as a newcomer."""
    (run_dir / "clusters.json").write_text(json.dumps({"timeline": LATE}))
    with (run_dir / "config.yaml").open("a") as config:
        config.write("events: [{name: leave, round: 2}, {name: join, round: 5}]\n")
    late = [None, None, None, 50.0]
    change(
        run_dir,
        "clients.csv",
        n=[0, 10, 10, 10],
        accuracy_last=[65.0, 99.0, 88.0, None],
        newcomers_accuracy=late,
    )
    page = write_report(run_dir).read_text()
    assert "Those that joined after the last round (1) are in the table only." in page
    table = rows(page)
    at = table.index(["cluster", "clients", "mean accuracy", "lowest", "highest", "group 0", "group 1"])
    assert table[at + 1] == ["0", "1", "99.0 %", "99.0 %", "99.0 %", "1", "·"]
    assert table[at + 2] == ["5", "1", "88.0 %", "88.0 %", "88.0 %", "·", "1"]
    assert "Without 1 client that joined after the last round." in page
    at = table.index(["clustered", "who", "clusters", "ARI"])
    assert [row[:2] for row in table[at + 1 : at + 4]] == [
        ["before training", ""],
        ["before round 6", "1 newcomer"],
        ["before round 6", ""],
    ]
    data = values(page)["data"]["clients"]
    assert (data["cluster 0"], data["cluster 1"]) == ([0, 0, 5, None], [None, 0, 5, 5])
    drawn = [[x is not None for x in data[f"x{i}"]] for i in range(2)]
    assert drawn == [[True, True, True, False], [False, True, True, False]]
    assert "Without 1 client whose position is unknown: they joined later." in page


def test_a_method_without_clusters_has_none(run_dir: Path):
    """FedAvg has one model: that is not a cluster."""
    (run_dir / "clusters.json").write_text(json.dumps({"groups": [0, 0, 1, 0], "timeline": []}))
    change(run_dir, "rounds.csv", clusters=1, ari=None)
    change(run_dir, "clients.csv", cluster=0)
    page = write_report(run_dir).read_text()
    assert RunFiles.read(run_dir).headline()["clusters"] is None
    assert "<dt>clusters</dt>" not in page
    assert "Clusters" not in titles(page)
    assert "clusters" not in choices(charts(page)["Over rounds"], "metric")
    (run_dir / "labels.csv").write_text("client,class_0,class_1\n0,9,1\n1,8,2\n2,1,9\n3,5,5\n")
    colours = choices(charts(write_report(run_dir).read_text())["Map of clients"], "colour")
    assert list(colours) == ["planted group", "training samples", "accuracy, last"]


def test_the_clients_of_a_regression(run_dir: Path):
    with (run_dir / "config.yaml").open("a") as config:
        config.write("loss: {name: mse}\n")
    change(run_dir, "rounds.csv", accuracy_mean=None, rmse_mean=[3.0, None, 2.0, 1.5, None])
    rmse = [1.5, 0.5, 2.25, 171.793]
    change(run_dir, "clients.csv", accuracy_last=None, accuracy_best=None, best_round=-1, rmse_last=rmse)
    page = write_report(run_dir).read_text()
    assert "Last rmse of 4 of 4 clients." in page
    assert "Histogram of clients by rmse, mean 44.011" in page
    header = ["client", "training samples", "test samples", "planted group", "cluster", "rmse, last"]
    assert header in rows(page)
    assert ["5", "2", "87.022", "2.250", "171.793", "1", "1"] in rows(page)
    assert "rmse, last" in choices(charts(page)["Map of clients"], "colour")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"state": "stopped"}, "The run was stopped after 5 of 1,200 rounds."),
        (
            {"state": "failed", "why": "the loss is NaN"},
            "The run failed after 5 of 1,200 rounds: the loss is NaN",
        ),
        ({"state": "running"}, "The run had not ended when this page was written, after 5 of 1,200 rounds."),
    ],
)
def test_a_run_that_did_not_finish_says_so(run_dir: Path, state: dict[str, str], said: str):
    assert "<dt>rounds</dt><dd>5</dd>" in write_report(run_dir).read_text()
    (run_dir / "status.json").write_text(json.dumps({"rounds": 1200, "done": 5, **state}))
    page = write_report(run_dir).read_text()
    assert f"<strong>{said}</strong>" in page
    assert "<dt>of 1,200 rounds</dt><dd>5</dd>" in page
    assert "<dt>clients</dt><dd>4</dd>" in page
    # The report of a finished run is written before its status is.
    (run_dir / "summary.json").write_text(json.dumps({"rounds": 1200}))
    assert "The run " not in write_report(run_dir).read_text()


def test_accuracies_of_other_models_and_samples_are_results(run_dir: Path):
    with_columns(run_dir, local_accuracy_mean=71.0, common_accuracy_mean=62.0)
    change(run_dir, "clients.csv", accuracy_finetuned=[90.0, 91.0, 92.0, 93.0])
    table = rows(write_report(run_dir).read_text())
    assert ["Accuracy, fine-tuned by each client", "91.5 %", ""] in table
    assert ["Accuracy of models as clients trained them", "71.0 %", ""] in table
    assert ["Accuracy on all test samples", "62.0 %", ""] in table


def test_where_nothing_is_sent_nothing_is_drawn(run_dir: Path):
    change(run_dir, "communication.csv", bytes=0)
    page = write_report(run_dir).read_text()
    assert "Nothing was sent." in page
    assert "Communication" not in charts(page)


def test_the_chosen_threshold_is_marked(run_dir: Path):
    series = charts(write_report(run_dir).read_text())["Choice of threshold"]["option"]["series"][0]
    assert series["markLine"]["data"] == [{"xAxis": 3.5, "name": "chosen: 2 clusters at 3.5"}]


def test_the_numbers_of_the_rounds_reach_the_page(run_dir: Path):
    chart = charts(write_report(run_dir).read_text())["Over rounds"]
    [dataset] = chart["option"]["dataset"]
    rounds = pd.read_csv(run_dir / "rounds.csv")
    assert dataset["source"]["round"] == [1, 2, 3, 4, 5]
    assert dataset["source"]["accuracy_mean"] == [60, None, 90, 85, None]
    for column in ("accuracy_worst10", "accuracy_var", "train_loss", "ari"):
        np.testing.assert_array_equal(np.array(dataset["source"][column], float), rounds[column])
    sent = 5000 + (rounds["bytes_up"] + rounds["bytes_down"]).cumsum()  # signatures come first
    assert dataset["source"]["bytes"] == sent.tolist()
    assert dataset["source"]["time"] == [2, 3, 4, 5.5, 6.5]
    metrics, over = choices(chart, "metric"), choices(chart, "over")
    worst = metrics["test accuracy, worst 10 % of clients (%)"]
    assert [series["encode"]["y"] for series in worst["series"]] == ["accuracy_worst10"] * 2
    assert next(iter(metrics.values()))["series"][0]["band"] == ["accuracy_worst10", "accuracy_best10"]
    assert over["bytes sent so far, up and down"]["series"][1]["encode"] == {"x": "bytes"}
    assert not [label for label in metrics if "perplexity" in label]  # this run has none


def test_the_clients_reach_the_page_as_users_know_them(run_dir: Path):
    clients = pd.read_csv(run_dir / "clients.csv").assign(name=["ann", "bob", "cy", "di"])
    clients.to_csv(run_dir / "clients.csv", index=False)
    page = write_report(run_dir).read_text()
    data = values(page)["data"]["clients"]
    assert data["client"] == ["ann", "bob", "cy", "di"]
    assert data["best_round"] == [3, 4, 3, 3]  # from 1
    for column in ("n", "group", "cluster", "accuracy_last", "accuracy_best"):
        assert data[column] == clients[column].tolist()
    header = [
        "client",
        "training samples",
        "test samples",
        "planted group",
        "cluster",
        "accuracy, last",
        "best",
    ]
    at = rows(page).index([*header, "best round"])
    assert rows(page)[at + 1] == ["ann", "10", "20", "0", "0", "65.0 %", "70.0 %", "3"]
    kinds = choices(charts(page)["Clients"], "accuracy of")
    assert list(kinds) == ["all clients", "by planted group", "by cluster", "by size"]
    box = kinds["by cluster"]["dataset"][0]["source"]
    assert (box["group"], box["clients"], box["least"], box["median"]) == (
        ["0", "5"],
        [2, 2],
        [65, 88],
        [82, 88],
    )


def test_of_many_rounds_some_are_drawn_with_those_that_were_tested(run_dir: Path):
    count = 5000
    rounds = pd.DataFrame({"round": range(count), "train_loss": 1.0, "bytes_up": 1, "bytes_down": 1})
    rounds["accuracy_mean"] = np.where(np.arange(count) % 1250 == 7, 50.0, np.nan)
    rounds.to_csv(run_dir / "rounds.csv", index=False)
    page = write_report(run_dir).read_text()
    source = charts(page)["Over rounds"]["option"]["dataset"][0]["source"]
    assert len(source["round"]) <= 1004
    tested = [r for r, a in zip(source["round"], source["accuracy_mean"], strict=True) if a is not None]
    assert tested == [8, 1258, 2508, 3758]
    assert source["bytes"][-1] == 5000 + 2 * count  # sums are of all rounds
    assert f"{len(source['round']):,} of 5,000 rounds are drawn" in page


def test_long_tables_are_shown_page_by_page_from_the_same_data(run_dir: Path):
    many = pd.DataFrame({"client": range(300), "n": 10, "accuracy_last": np.linspace(0, 100, 300)})
    many.to_csv(run_dir / "clients.csv", index=False)
    page = write_report(run_dir).read_text()
    [table] = [each for each in values(page)["tables"] if each["caption"] == "clients"]
    assert [column["values"] for column in table["columns"]] == [
        {"table": "clients", "column": name} for name in ("client", "n", "accuracy_last")
    ]
    assert len(values(page)["data"]["clients"]["client"]) == 300


def test_the_page_stands_alone(run_dir: Path):
    page = write_report(run_dir).read_text()
    assert "default-src 'none'" in page
    tags = re.findall(r"<[a-z][^>]*>", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    assert not [tag for tag in tags if re.search(r'(src|srcset|href)="[^#]', tag)]
    assert not re.search(r"@import|url\(|<link|<script src", page)
    assert len(page) < 2e6


def test_the_same_run_gives_the_same_bytes(run_dir: Path):
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir).read_bytes() == first
    assert sorted(
        path.name for path in run_dir.iterdir() if path.suffix not in (".yaml", ".json", ".csv")
    ) == ["report.html"]


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("config.yaml", set()),
        ("environment.json", set()),
        ("rounds.csv", {"Over rounds"}),
        ("clients.csv", {"Clients", "Map of clients"}),
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
    assert titles(page) == [
        "Over rounds",
        "Clusters",
        "Choice of threshold",
        "Communication",
    ]
    assert list(choices(charts(page)["Over rounds"], "metric")) == ["training loss, mean over participants"]
    assert "nan" not in text(page).lower()
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


def test_of_many_clusters_the_largest_are_drawn_and_all_are_listed(run_dir: Path):
    labels = [0, 0, 0, *range(1, 60)]
    (run_dir / "clusters.json").write_text(json.dumps({"timeline": [{"round": 0, "labels": labels}]}))
    page = write_report(run_dir).read_text()
    at = rows(page).index(["cluster", "clients"])
    assert rows(page)[at + 1] == ["0", "3"]
    assert len(rows(page)[at + 2 :]) > 58
    assert "(the chart: the 40 largest of 60 clusters)" in page
    assert len(charts(page)["Clusters"]["option"]["dataset"][0]["source"]["name"]) == 40


def test_failures_are_not_hidden(run_dir: Path):
    lines = (run_dir / "rounds.csv").read_text().splitlines()
    failures = ["failures", "0", "2", "0", "1", ""]
    (run_dir / "rounds.csv").write_text("\n".join(map(",".join, zip(lines, failures, strict=True))))
    assert "<dt>failures of clients</dt><dd>3</dd>" in write_report(run_dir).read_text()


def test_only_traffic_before_training(run_dir: Path):
    lines = (run_dir / "communication.csv").read_text().splitlines()
    (run_dir / "communication.csv").write_text("\n".join(lines[:2]))
    page = write_report(run_dir).read_text()
    assert "Before training: 5.00 kB" in page
    assert charts(page)["Communication"]["option"]["series"][0]["type"] == "sankey"


def test_the_threshold_curve_reaches_past_the_chosen_one():
    chart = steps(np.arange(4.0), np.arange(4, 0, -1.0), ("threshold", "clusters"), "", (8.0, "chosen"))
    assert chart.option["dataset"][0]["source"] == {"x": [0, 1, 2, 3, 8.48], "y": [4, 3, 2, 1, 1]}


def test_who_sends_what(run_dir: Path):
    page = write_report(run_dir).read_text()
    found = [chart for chart in values(page)["charts"] if chart["name"] == "traffic"]
    assert found[0]["option"]["series"][0]["links"] == [
        {"source": "from clients", "target": "model", "value": 1000},
        {"source": "from local servers", "target": "model", "value": 2300},
        {"source": "from clients", "target": "signature", "value": 5000},
    ]
    option = charts(page)["Communication"]["option"]
    assert option["dataset"][0]["source"]["total"] == [2000, 2000]


def test_text_from_files_is_escaped(run_dir: Path):
    (run_dir / "config.yaml").write_text("algorithm: {name: '<script>alert(1)</script>'}\n")
    page = write_report(run_dir).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


def test_text_in_the_data_of_charts_does_not_end_the_script(run_dir: Path):
    clients = pd.read_csv(run_dir / "clients.csv").assign(name=["</script><b>", "<!--", "c", "d"])
    clients.to_csv(run_dir / "clients.csv", index=False)
    page = write_report(run_dir).read_text()
    assert values(page)["data"]["clients"]["client"][:2] == ["</script><b>", "<!--"]
    assert "</script><b>" not in page


def test_no_such_run(tmp_path: Path):
    with pytest.raises(RayflError, match="no such run directory"):
        write_report(tmp_path / "absent")
