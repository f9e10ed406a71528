"""Tables of a study as text, and what may stand in them."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rayfl.statistics import Interval, mean_interval
from rayfl.study.claims import Judgement, judge, parse
from rayfl.study.page import _table_of
from rayfl.study.results import cell, title_of
from rayfl.study.tables import TextTable, _caption, claim_lines, claim_table, rank_table, unit_of

WILD = TextTable(
    ("method", "100 % & more_1"),
    (("[a] {x}^2 # $5", "~ 3 +- 1"), ("*b|c\\d", "two\nlines <b>")),
    caption="A caption.",
)


def test_markdown_has_a_line_a_row_and_keeps_bars_in_cells() -> None:
    lines = WILD.markdown().splitlines()
    assert lines[2:4] == [r"| [a] {x}^2 # $5 | ~ 3 +- 1 |", r"| \*b\|c\d | two lines &lt;b> |"]


def test_latex_escapes_what_means_something_to_it() -> None:
    lines = WILD.latex().splitlines()
    assert lines[3] == r"method & 100 \% \& more\_1 \\"
    assert lines[5] == r"{[}a] \{x\}\^{}2 \# \$5 & $\sim$ 3 $\pm$ 1 \\"
    assert lines[6] == r"{*}b$|$c\textbackslash{}d & two lines $<$b$>$ \\"
    text = re.sub(r"\\[{}]", "", WILD.latex())
    assert text.count("{") == text.count("}")


def test_minus_signs_are_no_hyphens_in_latex() -> None:
    table = TextTable(("claim", "value"), (("FedAvg-M.ari - B.ari > -0.5", "-2.0 ± 1.5"), ("k-means", "–")))
    lines = table.latex().splitlines()
    assert lines[4] == r"FedAvg-M.ari $-$ B.ari $>$ $-$0.5 & $-$2.0 $\pm$ 1.5 \\"
    assert lines[5] == r"k-means & -- \\"


def test_means_of_counts_have_a_digit_more_than_counts() -> None:
    assert cell(mean_interval([2, 3, 3]), "rounds_to_80") == "2.7 ± 1.4"
    assert cell(mean_interval([3, 3, 3]), "rounds_to_80") == "3"
    assert cell(mean_interval([1, 2]), "clusters", 3) == "1.5 ± 6.4 (2 of 3)"


def test_markdown_shows_every_character_of_names() -> None:
    names = ("_base_", "*A*", "__init__", "`a`", "Fed_Avg", "a*b", "2 * 3", "<b>x</b>")
    table = TextTable(("method",), tuple((name,) for name in names), caption="Differences to _base_ <b>x</b>")
    *rows, _, caption = table.markdown().splitlines()
    shown = [re.sub(r"\\(.)", r"\1", row[2:-2]).replace("&lt;", "<") for row in rows[2:]]
    assert shown == list(names)
    assert rows[2:7] == [r"| \_base\_ |", r"| \*A\* |", r"| \_\_init\_\_ |", r"| \`a\` |", "| Fed_Avg |"]
    assert rows[8] == "| 2 * 3 |"
    assert caption == r"Differences to \_base\_ &lt;b>x&lt;/b>"


def test_groups_have_a_title_with_their_unit() -> None:
    assert title_of("accuracy_group_12") == "accuracy of group 12 (%)"
    assert cell(mean_interval([81.25]), "accuracy_group_12") == "81.2"
    assert unit_of(parse("A.accuracy_group_1 - A.accuracy_group_0 > 0", ["A"], {})) == "points"


def test_claims_say_point_source_and_why_they_are_undecided() -> None:
    statement = parse("A.ari > 0.5", ["A"], {"partition.alpha": ["0.1"], "who": ["all"]})
    found = judge(statement, {"partition.alpha": "0.1", "who": "all"}, lambda m, p, c: {0: 0.4, 1: 0.7})
    table = claim_table([replace(found, source="a paper, Table 1", protocol="last round")])
    assert table.header == ("claim", "at", "verdict", "value", "95 % interval", "source")
    value, between = "0.55", "-1.36 to 2.46"
    source = "a paper, Table 1; last round"
    assert table.rows == (("A.ari > 0.5", "alpha 0.1, all", "undecided", value, between, source),)
    assert table.markdown().split("\n")[1] == "| --- | --- | --- | --: | --: | --- |"
    assert table.latex().startswith(r"\begin{tabular}{lllrrl}")
    found = judge(statement, {"partition.alpha": "0.1", "who": "all"}, lambda m, p, c: {0: 0.4})
    assert claim_table([found]).rows[0][2] == "undecided: one seed has no interval"


@pytest.mark.parametrize(
    ("claim", "unit", "value", "between"),
    [
        ("A.accuracy_mean > 10", "%", "12.35 %", "11.00 to 13.70 %"),
        (
            "A.accuracy_mean - B.local_accuracy_worst10 > 10",
            "points",
            "12.35 points",
            "11.00 to 13.70 points",
        ),
        ("A.bytes_up < 2 * B.bytes_up", "B", "12 B", "11 B to 14 B"),
        ("A.seconds < 100", "s", "12.3 s", "11.0 s to 13.7 s"),
        ("A.accuracy_var < 20", "", "12.35", "11.00 to 13.70"),
        ("A.rounds_to_80 < 20", "", "12.35", "11.00 to 13.70"),
        ("A.accuracy_mean - A.ari > 0", "", "12.35", "11.00 to 13.70"),
    ],
)
def test_claims_say_their_unit(claim: str, unit: str, value: str, between: str) -> None:
    statement = parse(claim, ["A", "B"], {})
    assert unit_of(statement) == unit
    judgement = Judgement(statement, {}, Interval(12.35, 11.0, 13.7, 3), "holds")
    table = claim_table([judgement])
    assert table.rows[0][3:5] == (value, between)
    assert table.values == {3: [12.35]}
    assert claim_lines([judgement]) == [f"{'holds':<10} {claim}: {value} ({between})"]


def test_pages_sort_cells_by_their_numbers_whatever_the_units() -> None:
    cells = ("3.04 MB", "999 kB", "–")
    text = TextTable(
        ("method", "bytes up"), tuple(zip("ABC", cells, strict=True)), 1, "", {1: [3.04e6, 999e3, None]}
    )
    table = _table_of(text, "results")
    assert table.columns[1].order == [3.04e6, 999e3, None]
    assert table.columns[1].values == list(cells)


@pytest.mark.parametrize(
    ("columns", "said"),
    [(["accuracy_mean", "ari"], True), (["accuracy_worst10"], True), (["local_accuracy_mean", "ari"], False)],
)
def test_a_table_says_whose_accuracies_it_has(columns: list[str], said: bool) -> None:
    report = SimpleNamespace(names=columns)
    study = SimpleNamespace(report=report, expected=(), methods={}, columns=columns)
    results: Any = SimpleNamespace(study=study, seeds=[0], versions={}, points=[{}], runs=(), errors={})
    assert ("accuracies are those of the served models" in _caption(results)) == said


def test_ranks_that_cannot_be_given_are_explained() -> None:
    ranks = {"accuracy_mean": {"A": 1.0, "B": 2.5, "C": 2.5}, "ari": dict.fromkeys("ABC", math.nan)}
    study = SimpleNamespace(report=SimpleNamespace(names=list(ranks)), methods=dict.fromkeys("ABC"))
    results: Any = SimpleNamespace(study=study, ranks=ranks.__getitem__, ranked=["A", "B", "C"])
    table = rank_table(results)
    assert table is not None
    assert table.rows[1] == ("B", "2.50", "–")
    assert table.caption.endswith("At no seed and point do all methods have ARI.")
    del ranks["ari"]
    study.report.names = ["accuracy_mean"]
    assert "At no seed" not in rank_table(results).caption  # type: ignore[union-attr]
    ranks["accuracy_mean"]["C"] = math.nan
    results.ranked = ["A", "B"]
    assert "Without methods that have no finished run: C." in rank_table(results).caption  # type: ignore[union-attr]
    results.ranked = ["A"]
    assert rank_table(results) is None


@pytest.mark.parametrize(
    ("names", "endings"),
    [
        ([{"lr": "0.1"}, {"lr": "0.2"}], ["0.1", "0.2"]),
        ([{"who": "α"}, {"who": "β"}], ["α", "β"]),
        ([{"who": "a|b"}, {"who": "a/b"}], ["1-a_b", "2-a_b"]),
        ([{}], [""]),
    ],
)
def test_every_point_has_figures_of_its_own(names: list[Any], endings: list[str]) -> None:
    figures = importlib.import_module("rayfl.study.figures")
    assert figures._endings(names) == endings


def test_labels_are_no_mathematics_in_figures() -> None:
    methods = importlib.import_module("rayfl.report.methods")
    drawn = pytest.importorskip("matplotlib.figure").Figure()
    axes = drawn.subplots()
    axes.plot([1], [1], label=methods.escaped(r"$\frac$ and $5"))
    axes.plot([1], [2], label=methods.escaped("_hidden"))
    legend = axes.legend()
    drawn.draw_without_rendering()
    assert len(legend.get_texts()) == 2


def test_long_labels_are_broken_into_lines_in_figures() -> None:
    """A label of a hundred characters in one line would leave no room for the axes."""
    methods = importlib.import_module("rayfl.report.methods")
    label = "a label of many words " * 4
    lines = methods.escaped(label).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= methods._LABEL_WIDTH
    assert " ".join(lines) == label.strip()


def test_signs_of_print_and_greek_letters_are_commands_in_latex() -> None:
    text = TextTable(("claim",), (("SOLO.x - FedAvg.x ≥ −5, μ 0.1 → α",),)).latex()
    assert r"SOLO.x $-$ FedAvg.x $\ge$ $-$5, $\mu$ 0.1 $\to$ $\alpha$" in text
    assert text.isascii()
