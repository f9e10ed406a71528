"""Comparing runs."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from rayfl.errors import RayflError
from rayfl.report import figures
from rayfl.report.compare import compare_table, write_comparison
from rayfl.report.files import RunFiles
from rayfl.report.html import write_report

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
    assert "Perplexity over rounds" in write_report(texts).read_text()
    assert "erplexity" not in write_report(images).read_text()
