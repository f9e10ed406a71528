"""Comparing runs."""

import html
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import rayfl
from rayfl.errors import ConfigError, RayflError
from rayfl.report.charts import curves
from rayfl.report.compare import Comparison, _difference_lines
from rayfl.report.files import RunFiles
from rayfl.report.html import METRICS, ROUNDS, line_of, write_report
from rayfl.statistics import mean_interval
from tests.report.reading import charts, choices, rows, titles
from tests.report.reading import text as text_of

MakeRun = Callable[[str], Path]


def test_one_row_a_run_in_the_order_given(make_run: MakeRun):
    first, second = make_run("b"), make_run("a")
    (second / "rounds.csv").unlink()
    table = Comparison.of([first, second]).runs
    assert table["run"].tolist() == ["b", "a"]
    assert table["accuracy_mean"].tolist() == [85.0, None]
    assert table["max_round"].tolist() == [2, None]
    assert table["bytes_up"].tolist() == [6300, 6300]


def test_equal_names_are_told_apart(make_run: MakeRun):
    table = Comparison.of([make_run("x/seed-0"), make_run("y/seed-0"), make_run("y/seed-1")]).runs
    assert table["run"].tolist() == ["x/seed-0", "y/seed-0", "seed-1"]
    runs = [make_run("before/runs/r"), make_run("after/runs/r"), make_run("z/r")]
    comparison = Comparison.of([*runs, runs[2]])
    names = ["before/runs/r", "after/runs/r", "z/r", "z/r (2)"]
    assert comparison.runs["run"].tolist() == names
    assert [group.name for group in comparison.groups] == names


def test_the_page_and_its_table(make_run: MakeRun, tmp_path: Path):
    runs = [make_run("one"), make_run("two")]
    page = Comparison.of(runs).write(tmp_path / "out" / "all.html")
    text = page.read_text()
    assert page == tmp_path / "out" / "all.html"
    assert [row[:2] for row in rows(text)][:3] == [
        ["run", "accuracy, last"],
        ["one", "85.0 %"],
        ["two", "85.0 %"],
    ]
    maps = ["Map of clients: one", "Map of clients: two"]
    assert titles(text) == ["Over rounds", "Accuracy against bytes", "Clients", *maps]
    chart = charts(text)["Over rounds"]
    assert chart["legend"] == ["one", "two"]
    assert chart["option"]["dataset"][1]["source"]["accuracy_mean"] == [60, None, 90, 85, None]
    csv = pd.read_csv(tmp_path / "out" / "all.csv")
    assert csv["accuracy_mean_max"].tolist() == [90.0, 90.0]


def test_a_folder_gets_comparison_html(make_run: MakeRun, tmp_path: Path):
    assert Comparison.of([make_run("one")]).write(tmp_path) == tmp_path / "comparison.html"


def test_a_place_that_cannot_be_written_is_one_line(make_run: MakeRun, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RayflError, match="file"):
        Comparison.of([make_run("one")]).write(tmp_path / "file" / "page.html")
    with pytest.raises(RayflError, match=r"^out: .*all.csv is the name of a table"):
        Comparison.of([make_run("two")]).write(tmp_path / "all.csv")


def test_unknown_columns_are_left_out_and_gaps_marked(make_run: MakeRun, tmp_path: Path):
    with_rounds, without = make_run("one"), make_run("two")
    (without / "rounds.csv").unlink()
    text = Comparison.of([with_rounds, without]).write(tmp_path / "c.html").read_text()
    assert rows(text)[2][:2] == ["two", "–"]
    for run in (with_rounds, without):
        for name in ("rounds.csv", "clients.csv", "clusters.json"):
            (run / name).unlink(missing_ok=True)
    page = Comparison.of([with_rounds, without]).write(tmp_path / "c.html").read_text()
    assert "worst 10 %" not in text_of(page)
    assert titles(page) == []


def change(run: Path, old: str, new: str) -> Path:
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new))
    return run


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("seed: 3", "seed: 4", "seed: 3 (one, same); 4 (two)"),
        ("name: digits", "name: svhn", "data: digits (one, same); svhn (two)"),
        ("clients: 4", "clients: 5", "partition.clients: 4 (one, same); 5 (two)"),
        (
            "name: label_skew, clients: 4",
            "name: shards, clients: 4, size: 9",
            "partition: label_skew (one, same); shards (two)",
        ),
        ("events: []", "events: [{round: 1}]", "events: [] (one, same); [{'round': 1}] (two)"),
    ],
)
def test_runs_over_different_clients_or_data_are_not_ranked(
    make_run: MakeRun, tmp_path: Path, old: str, new: str, line: str
):
    one, same, two = (
        change(make_run(name), "seed: 3", "seed: 3\nevents: []") for name in ("one", "same", "two")
    )
    runs = [one, same, change(two, old, new)]
    assert list(Comparison.of(runs[:2]).differences) == []
    assert "Not ranked" not in Comparison.of(runs[:2]).write(tmp_path / "a.html").read_text()
    assert list(Comparison.of(runs).differences) == [line]
    page = html.unescape(Comparison.of(runs).write(tmp_path / "b.html").read_text())
    assert page.index("Not ranked") < page.index(f"<li>{line}</li>") < page.index("<table")


def test_the_same_settings_over_other_contents(make_run: MakeRun):
    """A file that was changed; where it lies makes no difference."""
    one, two = make_run("one"), make_run("two")
    for run, data in ((one, "aa"), (two, "bb")):
        (run / "environment.json").write_text(json.dumps({"data": data}))
        change(run, "{name: digits}", f"{{name: npz, path: {run}/x.npz}}")
    assert list(Comparison.of([one, two]).differences) == ["contents of the dataset: aa (one); bb (two)"]
    (two / "environment.json").write_text(json.dumps({"data": "aa"}))
    assert list(Comparison.of([one, two]).differences) == []


def test_estimates_are_marked_and_no_best(make_run: MakeRun, tmp_path: Path):
    estimated, whole = make_run("one"), make_run("two")
    rounds = pd.read_csv(estimated / "rounds.csv").assign(estimated_from=[8, None, 8, 8, None])
    rounds.to_csv(estimated / "rounds.csv", index=False)
    table = Comparison.of([estimated, whole]).runs
    assert table["accuracy_mean_max"].tolist() == [None, 90.0]
    assert table["estimated_from"].tolist() == [8.0, None]
    page = Comparison.of([estimated, whole]).write(tmp_path / "c.html").read_text()
    row = dict(zip(*rows(page)[:2], strict=True))
    assert (row["accuracy, last"], row["worst 10 %"]) == ("≈ 85.0 %", "≈ 65.0 %")
    assert row["best round by test"] == "–"
    assert "≈ marks an estimate" in page
    assert "≈" not in text_of(Comparison.of([whole]).write(tmp_path / "d.html").read_text())


def test_a_comparison_of_regressions(make_run: MakeRun, tmp_path: Path):
    runs = [make_run("one"), make_run("two")]
    for run in runs:
        with (run / "config.yaml").open("a") as config:
            config.write("loss: {name: mse}\n")
        rounds = pd.read_csv(run / "rounds.csv").assign(accuracy_mean=None, rmse_mean=2.5)
        rounds.to_csv(run / "rounds.csv", index=False)
        clients = pd.read_csv(run / "clients.csv").assign(accuracy_last=None, rmse_last=[1.0, 2.0, 3.0, 4.0])
        clients.to_csv(run / "clients.csv", index=False)
    page = Comparison.of(runs).write(tmp_path / "c.html").read_text()
    assert ": rmse (root mean squared error), mae (mean absolute error) and r2 (" in page
    assert "ccuracy" not in text_of(page)
    assert charts(page)["Clients"]["option"]["dataset"][0]["source"]["mean"] == [2.5, 2.5]


def test_a_comparison_of_losses_without_measures(make_run: MakeRun, tmp_path: Path):
    runs = [make_run("one"), make_run("two")]
    for run, loss in zip(runs, (0.00012345, 12345.6), strict=True):
        rounds = pd.read_csv(run / "rounds.csv").assign(accuracy_mean=None, loss_mean=loss)
        rounds.to_csv(run / "rounds.csv", index=False)
    table = {column.title: column.values for column in Comparison.of(runs).shown().columns}
    assert table["test loss"] == ["0.000123", "12,346"]
    assert "accuracy, last" not in table


def test_planted_groups_side_by_side(make_run: MakeRun, tmp_path: Path):
    one, two = make_run("one"), make_run("two")
    lines = ["round,kind,id,clients,accuracy_mean,accuracy_var,estimated_from"]
    for run, (a, b) in ((one, (91.0, 80.0)), (two, (70.0, 60.0))):
        more = ["0,group,0,3,10.0,1.0,", f"3,group,0,3,{a},1.25,", f"3,group,1,1,{b},0.0,1"]
        (run / "groups.csv").write_text("\n".join(lines + more))
    rounds = pd.read_csv(two / "rounds.csv").assign(accuracy_se=2.25, distinct_test_samples=1359)
    rounds.to_csv(two / "rounds.csv", index=False)
    page = Comparison.of([one, two]).write(tmp_path / "c.html").read_text()
    table = rows(page)
    assert table[2][:2] == ["two", "85.0 % ± 2.2"]
    assert ["run", "test samples", "group 0", "group 1"] in table
    assert ["two", "1,359", "70.0 % (1.2)", "≈ 60.0 % (0.0)"] in table
    change(two, "seed: 3", "seed: 4")
    assert "70.0 % (1.2)" not in Comparison.of([one, two]).write(tmp_path / "c.html").read_text()


def with_accuracy(run: Path, values: list[float | None], seed: int, **changes: str) -> Path:
    rounds = pd.read_csv(run / "rounds.csv").assign(accuracy_mean=values)
    rounds.to_csv(run / "rounds.csv", index=False)
    change(run, "seed: 3", f"seed: {seed}")
    for old, new in changes.items():
        change(run, f"{old}: pacfl" if old == "name" else "threshold: 3.5", new)
    return run


def test_runs_that_differ_in_the_seed_alone_are_grouped(make_run: MakeRun, tmp_path: Path):
    one = [with_accuracy(make_run(f"a{s}"), [50.0, None, 60.0 + s, 70.0 + 2 * s, None], s) for s in range(3)]
    two = [
        with_accuracy(make_run(f"b{s}"), [40.0, None, 50.0, 90.0, None], s, threshold="threshold: 8")
        for s in range(3)
    ]
    found = Comparison.of([*one, *two])
    assert found.differences == ()  # both have the same seeds
    assert [group.name for group in found.groups] == ["threshold 3.5", "threshold 8"]
    table = dict(found.shown().texts())
    assert table["clustering.threshold"] == ["3.5", "8"]
    assert table["seeds"] == ["3", "3"]
    half = mean_interval([70, 72, 74]).half
    assert table["accuracy, last"] == [f"72.0 % ± {half:.1f}", "90.0 % ± 0.0"]
    # Beside runs with several seeds, a single one has no ±: its standard error would be of another kind.
    lone = make_run("lone")
    with_accuracy(lone, [1.0, None, 2.0, 60.0, None], 0, threshold="threshold: 9")
    frame = pd.read_csv(lone / "rounds.csv").assign(accuracy_se=2.25)
    frame.to_csv(lone / "rounds.csv", index=False)
    mixed = dict(Comparison.of([*one, lone]).shown().texts())
    assert mixed["accuracy, last"] == [f"72.0 % ± {half:.1f}", "60.0 %"]
    page = found.write(tmp_path / "c.html").read_text()
    source = charts(page)["Over rounds"]["option"]["dataset"][0]["source"]
    assert source["accuracy_mean"] == [50, None, 61, 72, None]
    expected = mean_interval([70, 72, 74])
    assert source["accuracy_mean low"][3] == pytest.approx(expected.low, abs=1e-4)
    assert source["accuracy_mean high"][3] == pytest.approx(expected.high, abs=1e-4)
    assert titles(page)[-1] == "Each run"
    assert len(rows(page)) == 3 + 7 + 13  # groups, runs, and clients of each seed
    assert list(Comparison.of(two[:2] + one).differences) == ["seed: 0 (b0, a0); 1 (b1, a1); 2 (a2)"]


def test_from_python(make_run: MakeRun, tmp_path: Path):
    one = [with_accuracy(make_run(f"a{s}"), [50.0, None, 60.0, 70.0 + 2 * s, None], s) for s in range(3)]
    two = with_accuracy(make_run("b"), [40.0, None, 50.0, 90.0, None], 0, threshold="threshold: 8")
    for run in (*one, two):
        (run / "summary.json").write_text('{"rounds": 5}')
    comparison = rayfl.compare([*one, rayfl.Result(two)])
    assert repr(comparison) == "Comparison(4 runs, 2 groups)"
    assert comparison.runs["accuracy_mean"].tolist() == [70, 72, 74, 90]
    table = comparison.table.set_index(["column", "clustering.threshold"])
    expected = mean_interval([70, 72, 74])
    row = table.loc[("accuracy_mean", 3.5)]
    assert row[["mean", "low", "high"]].tolist() == pytest.approx([72, expected.low, expected.high])
    assert (row["group"], row["seeds"]) == ("threshold 3.5", 3)
    alone = table.loc[("accuracy_mean", 8)]
    assert alone[["low", "high"]].isna().all()
    assert alone["seeds"] == 1
    assert not {"run", "seed", "algorithm"} & set(table.index.get_level_values(0))
    shown = comparison._repr_html_()
    assert "<td>threshold 8</td>" not in shown
    assert "<td>8</td>" in shown
    assert "Not ranked." in shown
    assert "seed: 0 (a0, b); 1 (a1); 2 (a2)" in shown
    page = comparison.write(str(tmp_path / "here.html"))
    assert page == tmp_path / "here.html"
    assert page.is_file()
    assert page.with_suffix(".csv").is_file()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "compare: no runs; name two or more"),
        (["done"], "done is one run; name two or more"),
        (["done", "stopped"], "stopped: is not finished; resume with: rayfl resume"),
        (["done", "absent"], "absent: no such directory"),
    ],
)
def test_from_python_bad_runs_are_refused(
    make_run: MakeRun, tmp_path: Path, names: list[str], message: str
) -> None:
    (make_run("done") / "summary.json").write_text('{"rounds": 5}')
    make_run("stopped")
    with pytest.raises(ConfigError, match=message):
        rayfl.compare([tmp_path / name for name in names])


def test_the_same_run_twice_is_no_second_seed(make_run: MakeRun):
    runs = [with_accuracy(make_run(f"a{i}"), [50.0] * 5, seed=0) for i in range(2)]
    assert [len(group.runs) for group in Comparison.of(runs).groups] == [1, 1]


def test_settings_that_follow_from_the_method_are_no_columns(make_run: MakeRun):
    one, two = make_run("one"), make_run("two")
    for old, new in (("pacfl", "cfl"), ("threshold: 3.5", "threshold: 9"), ("name: mlp", "name: lenet5")):
        change(two, old, new)
    table = dict(Comparison.of([one, two]).shown().texts())
    assert list(table)[:3] == ["method", "model.name", "accuracy, last"]
    assert table["method"] == ["pacfl", "cfl"]


def test_results_come_before_many_settings(make_run: MakeRun, tmp_path: Path):
    one, two = make_run("one"), make_run("two")
    many = "{name: mlp, a: 2, b: 2, c: 2, d: 2, e: 2}"
    for run, model in ((one, many.replace("2", "1")), (two, many)):
        change(run, "{name: mlp}", model)
    header = rows(Comparison.of([one, two]).write(tmp_path / "c.html").read_text())[0]
    assert header[:2] == ["model.a", "accuracy, last"]
    assert header[-4:] == ["model.b", "model.c", "model.d", "model.e"]


def test_lines_of_many_runs_differ(make_run: MakeRun):
    line = line_of(RunFiles.read(make_run("one")), "")
    series = [
        each
        for each in curves([line] * 20, METRICS[:1], ROUNDS[:1], "").option["series"]
        if each["type"] == "line"
    ]
    assert len({(each["lineStyle"]["color"], str(each["lineStyle"]["type"])) for each in series}) == 20


def test_a_missing_run_is_named(make_run: MakeRun, tmp_path: Path):
    with pytest.raises(RayflError, match="absent: no such run directory"):
        Comparison.of([make_run("one"), tmp_path / "absent"])


def test_perplexity_is_shown_where_a_run_has_one(make_run: MakeRun, tmp_path: Path):
    images, texts = make_run("one"), make_run("two")
    rounds = pd.read_csv(texts / "rounds.csv")
    rounds.assign(perplexity_mean=[50.0, None, 43.0, 36.5, None]).to_csv(texts / "rounds.csv", index=False)
    page = Comparison.of([images, texts]).write(tmp_path / "c.html").read_text()
    assert "test perplexity, mean over clients" in choices(charts(page)["Over rounds"], "metric")
    for run, shown in ((texts, True), (images, False)):
        metrics = choices(charts(write_report(run).read_text())["Over rounds"], "metric")
        assert ("test perplexity, mean over clients" in metrics) is shown


def test_a_difference_of_many_runs_names_the_first() -> None:
    names = [f"run-{i}" for i in range(9)]
    (line,) = _difference_lines(names, "partition.alpha", [0.1] * 3 + [0.3] * 6)
    assert line == "partition.alpha: 0.1 (run-0, run-1, run-2); 0.3 (run-3, run-4, run-5 and 3 more)"


def test_seeds_of_changed_code_are_told(make_run: MakeRun):
    """An average over versions of a method is no average over seeds."""
    runs = [with_accuracy(make_run(str(seed)), [50.0] * 5, seed) for seed in (0, 1)]
    for run, digest in zip(runs, "ab", strict=True):
        entry = {"module": "my_method", "sha256": digest}
        (run / "plugins.json").write_text(json.dumps({"plugins": [entry]}))
    compared = Comparison.of(runs)
    assert len(compared.groups) == 1
    assert "differ in more than the seed: in versions of my_method." in compared.caption()
    (runs[1] / "plugins.json").write_text((runs[0] / "plugins.json").read_text())
    assert "more than the seed" not in Comparison.of(runs).caption()
    for run, version in zip(runs, ("0.1.0", "0.2.0"), strict=True):
        (run / "environment.json").write_text(json.dumps({"versions": {"rayfl": version}}))
    assert Comparison.of(runs).groups[0].changed_code == ["rayfl"]


def test_the_best_round_by_validation_is_beside_that_by_test(make_run: MakeRun) -> None:
    """The best round is the third by accuracy on test data, and the last by accuracy on validation data."""
    run = make_run("one")
    rounds = pd.read_csv(run / "rounds.csv").assign(validation_accuracy_mean=[50.0, None, 70.0, 80.0, None])
    rounds.to_csv(run / "rounds.csv", index=False)
    row = RunFiles.read(run).headline()
    assert (row["accuracy_mean_max"], row["accuracy_mean_best_validation"]) == (90, 85)
    shown = dict(zip(*rows(Comparison.of([run]).write(run / "c.html").read_text())[:2], strict=True))
    assert (shown["best round by validation"], shown["best round by test"]) == ("85.0 %", "90.0 %")
