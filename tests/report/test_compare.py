"""Comparing runs."""

import html
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from rayfl.errors import RayflError
from rayfl.report import figures
from rayfl.report.compare import compare_table, differences, write_comparison
from rayfl.report.files import RunFiles
from rayfl.report.html import write_report
from tests.report.reading import charts, choices

MakeRun = Callable[[str], Path]


def test_one_row_a_run_in_the_order_given(make_run: MakeRun):
    first, second = make_run("b"), make_run("a")
    (second / "rounds.csv").unlink()
    table = compare_table([first, second])
    assert table["run"].tolist() == ["b", "a"]
    assert table["accuracy_mean"].tolist() == [85.0, None]
    assert table["max_round"].tolist() == [2, None]
    assert table["bytes_up"].tolist() == [6300, 6300]


def test_equal_names_are_told_apart(make_run: MakeRun):
    table = compare_table([make_run("x/seed-0"), make_run("y/seed-0"), make_run("y/seed-1")])
    assert table["run"].tolist() == ["x/seed-0", "y/seed-0", "seed-1"]


def test_the_page_and_its_table(make_run: MakeRun, tmp_path: Path):
    runs = [make_run("one"), make_run("two")]
    page = write_comparison(runs, tmp_path / "out" / "all.html")
    text = page.read_text()
    assert page == tmp_path / "out" / "all.html"
    assert "<td>one</td>" in text
    assert "<td>two</td>" in text
    assert text.count("<picture>") == 2
    assert "http" not in text
    csv = pd.read_csv(tmp_path / "out" / "all.csv")
    assert csv["accuracy_mean_max"].tolist() == [90.0, 90.0]


def test_a_folder_gets_comparison_html(make_run: MakeRun, tmp_path: Path):
    assert write_comparison([make_run("one")], tmp_path) == tmp_path / "comparison.html"


def test_unknown_columns_are_left_out_and_gaps_marked(make_run: MakeRun, tmp_path: Path):
    with_rounds, without = make_run("one"), make_run("two")
    (without / "rounds.csv").unlink()
    text = write_comparison([with_rounds, without], tmp_path / "c.html").read_text()
    assert '<td class="n">–</td>' in text
    for run in (with_rounds, without):
        for name in ("rounds.csv", "clients.csv", "clusters.json"):
            (run / name).unlink(missing_ok=True)
    text = write_comparison([with_rounds, without], tmp_path / "c.html").read_text()
    assert "worst 10 %" not in text
    assert "<picture>" not in text


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
    assert differences(runs[:2]) == []
    assert "Not ranked" not in write_comparison(runs[:2], tmp_path / "a.html").read_text()
    assert differences(runs) == [line]
    page = html.unescape(write_comparison(runs, tmp_path / "b.html").read_text())
    assert page.index("Not ranked") < page.index(f"<li>{line}</li>") < page.index("<table>")


def test_the_same_settings_over_other_contents(make_run: MakeRun):
    """A file that was changed; where it lies makes no difference."""
    one, two = make_run("one"), make_run("two")
    for run, data in ((one, "aa"), (two, "bb")):
        (run / "environment.json").write_text(json.dumps({"data": data}))
        change(run, "{name: digits}", f"{{name: npz, path: {run}/x.npz}}")
    assert differences([one, two]) == ["contents of the dataset: aa (one); bb (two)"]
    (two / "environment.json").write_text(json.dumps({"data": "aa"}))
    assert differences([one, two]) == []


def test_estimates_are_marked_and_no_best(make_run: MakeRun, tmp_path: Path):
    estimated, whole = make_run("one"), make_run("two")
    rounds = pd.read_csv(estimated / "rounds.csv").assign(estimated_from=[8, None, 8, 8, None])
    rounds.to_csv(estimated / "rounds.csv", index=False)
    table = compare_table([estimated, whole])
    assert table["accuracy_mean_max"].tolist() == [None, 90.0]
    assert table["estimated_from"].tolist() == [8.0, None]
    page = write_comparison([estimated, whole], tmp_path / "c.html").read_text()
    assert '<td class="n">≈ 85.0 %</td>' in page
    assert '<td class="n">≈ 65.0 %</td>' in page
    assert "≈ marks an estimate" in page
    assert "≈" not in write_comparison([whole], tmp_path / "d.html").read_text()


def test_planted_groups_side_by_side(make_run: MakeRun, tmp_path: Path):
    one, two = make_run("one"), make_run("two")
    lines = ["round,kind,id,clients,accuracy_mean,accuracy_var,estimated_from"]
    for run, (a, b) in ((one, (91.0, 80.0)), (two, (70.0, 60.0))):
        rows = ["0,group,0,3,10.0,1.0,", f"3,group,0,3,{a},1.25,", f"3,group,1,1,{b},0.0,1"]
        (run / "groups.csv").write_text("\n".join(lines + rows))
    rounds = pd.read_csv(two / "rounds.csv").assign(accuracy_se=2.25, distinct_test_samples=1359)
    rounds.to_csv(two / "rounds.csv", index=False)
    page = write_comparison([one, two], tmp_path / "c.html").read_text()
    assert '<td class="n">85.0 % ± 2.2</td>' in page
    cells = [
        "<td>two</td>",
        '<td class="n">1,359</td>',
        '<td class="n">70.0 % (1.2)</td>',
        '<td class="n">≈ 60.0 % (0.0)</td>',
    ]
    assert "".join(cells) in page
    change(two, "seed: 3", "seed: 4")
    assert "70.0 % (1.2)" not in write_comparison([one, two], tmp_path / "c.html").read_text()


def test_lines_of_many_runs_differ(make_run: MakeRun):
    evaluated = RunFiles.read(make_run("one")).evaluated()
    axes = Figure().add_subplot()
    figures.curves([(f"run {i}", evaluated) for i in range(20)], "accuracy_mean", "%")(axes, figures.LIGHT)
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 20
    assert axes.lines[0].get_ydata().tolist() == [60.0, 90.0, 85.0]


def test_a_missing_run_is_named(make_run: MakeRun, tmp_path: Path):
    with pytest.raises(RayflError, match="absent: no such run directory"):
        compare_table([make_run("one"), tmp_path / "absent"])


def test_perplexity_is_shown_where_a_run_has_one(make_run: MakeRun, tmp_path: Path):
    images, texts = make_run("one"), make_run("two")
    rounds = pd.read_csv(texts / "rounds.csv")
    rounds.assign(perplexity_mean=[50.0, None, 43.0, 36.5, None]).to_csv(texts / "rounds.csv", index=False)
    page = write_comparison([images, texts], tmp_path / "c.html").read_text()
    assert "Mean perplexity over clients" in page
    assert page.count("<picture>") == 3
    assert "perplexity" not in write_comparison([images], tmp_path / "d.html").read_text()
    for run, shown in ((texts, True), (images, False)):
        metrics = choices(charts(write_report(run).read_text())["Over rounds"], "metric")
        assert ("test perplexity, mean over clients" in metrics) is shown
