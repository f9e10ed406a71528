"""Claims: how they are read, and when they hold, fail, or stay undecided."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.errors import ConfigError
from rayfl.study.claims import Statement, Term, judge, overall, parse, point_of
from rayfl.study.tables import unit_of

LABELS = ("FedAvg", "PACFL", "PACFL, 2 clusters", "A-B.c")
AXES = {"partition.alpha": ["0.1", "1"], "case": ["label skew 20 %"]}


def read(text: str) -> Statement:
    return parse(text, LABELS, AXES)


def test_a_claim_becomes_a_sum_of_terms() -> None:
    found = read("PACFL.accuracy_mean - 0.5*FedAvg.accuracy_mean + 2 >= 10 + FedAvg.bytes_up")
    assert found.terms == (
        Term(1.0, "PACFL", {}, "accuracy_mean"),
        Term(-0.5, "FedAvg", {}, "accuracy_mean"),
        Term(-1.0, "FedAvg", {}, "bytes_up"),
    )
    assert (found.comparison, found.bound, found.constant) == (">=", 10.0, 2.0)


def test_signs_may_be_those_of_print() -> None:
    printed, typed = read("PACFL.ari − FedAvg.ari ≥ −3"), read("PACFL.ari - FedAvg.ari >= -3")
    assert (printed.terms, printed.comparison, printed.bound) == (typed.terms, ">=", -3.0)
    assert read("PACFL.ari ≤ 1").comparison == "<="


@pytest.mark.parametrize("text", ["FedAvg-TF.ari > 3", "PACFL, 3 clusters.ari > 3", "FedAvg_x.ari > 3"])
def test_a_misspelt_label_is_no_method(text: str) -> None:
    with pytest.raises(ConfigError, match=f"no method '{text.split('.')[0]}'"):
        read(text)


def test_what_is_equal_but_for_rounding_decides_nothing() -> None:
    base = [70.1, 71.3, 69.9, 70.7]
    near = [each + k * 1.4e-14 for each, k in zip(base, [1, 1, 2, 1], strict=True)]
    assert verdict("A.x - B.x > 0", A=near, B=base) == "fails"
    assert verdict("A.x - B.x >= 0", A=near, B=base) == "holds"
    assert verdict("A.x - 70.1 ~ 0 +- 1", A=[70.1, 70.1 + 1.4e-14, 70.1], B=base[:3]) == "holds"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("(PACFL.ari - FedAvg.ari) > 3", "parentheses cannot be read; write the sum without them"),
        ("PACFL.ari / 2 > 3", "multiply instead: 0.5"),
        ("2 PACFL.ari > 3", "a number and a method need"),
        ("FedAvg > PACFL", "the name of a number must follow 'FedAvg'; such as FedAvg.accuracy_mean"),
        ("0 * PACFL.ari > 3", "0 times 'PACFL' is nothing; leave it out"),
        ("PACFL.ari - PACFL.ari > 0", "its numbers cancel out: nothing is compared"),
        ("2 * PACFL.ari < 2 * PACFL.ari", "its numbers cancel out"),
    ],
)
def test_what_claims_cannot_say_has_another_form(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        read(text)


def test_a_number_that_is_named_twice_counts_twice() -> None:
    assert read("PACFL.ari + PACFL.ari - FedAvg.ari > 0").terms == (
        Term(2.0, "PACFL", {}, "ari"),
        Term(-1.0, "FedAvg", {}, "ari"),
    )
    assert read("PACFL.ari > FedAvg.ari - FedAvg.ari").methods == {"PACFL"}


def test_labels_may_be_anything_that_people_write() -> None:
    assert read("PACFL, 2 clusters.ari > 0").methods == {"PACFL, 2 clusters"}  # the longest that fits
    assert read('"PACFL, 2 clusters".ari > 0').methods == {"PACFL, 2 clusters"}
    assert read("'PACFL, 2 clusters'.ari > 0").methods == {"PACFL, 2 clusters"}
    assert read("A-B.c.ari < -1").terms == (Term(1.0, "A-B.c", {}, "ari"),)


def test_points_of_the_grid_stand_in_brackets() -> None:
    (term,) = read("PACFL[alpha=0.10, case=label skew 20 %].accuracy_mean ~ 77.3 +- 3").terms
    assert term.at == {"partition.alpha": "0.1", "case": "label skew 20 %"}


ODD_POINTS = {"partition.alpha": ["0.1", "1"], "case": ["a, b", "x]y", "p=q", "don't", "isn't"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('case="a, b", alpha=1.0', {"case": "a, b", "partition.alpha": "1"}),
        ("\"case\"='x]y'", {"case": "x]y"}),
        (" alpha = 1 , case = 'p=q' ", {"partition.alpha": "1", "case": "p=q"}),
        ("case=don't, alpha=1", {"case": "don't", "partition.alpha": "1"}),  # no quotes at the beginning
        ("case=p=q", {"case": "p=q"}),
    ],
)
def test_points_may_be_in_quotes(text: str, expected: dict[str, str]) -> None:
    (term,) = parse(f"A[{text}].ari > 0", ["A"], ODD_POINTS).terms
    assert term.at == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "'' is not a point of the grid"),
        ("alpha", "'alpha' is not a point of the grid"),
        ("alpha=1,", "'' is not a point of the grid"),
        ("case=a, b", "case has no point 'a'; valid: a, b, x]y"),
        ('case="a, b', "case has no point '\"a'"),
        ('case="a, b" c', "after case a comma or a bracket must follow"),
        ("alpha=1, partition.alpha=0.1", "partition.alpha is named twice"),
    ],
)
def test_wrong_points_are_refused_in_a_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"A[{text}].ari > 0", ["A"], ODD_POINTS)
    assert expected in str(caught.value)


@pytest.mark.parametrize("sign", ["+-", "±", "+/-"])
def test_a_figure_has_a_tolerance(sign: str) -> None:
    found = read(f"FedAvg.accuracy_mean ~ 77.3 {sign} 3e0")
    assert (found.comparison, found.bound, found.tolerance) == ("~", 77.3, 3.0)


@given(st.floats(-100, 100), st.floats(0.001, 100), st.sampled_from(LABELS))
def test_what_is_written_is_what_is_read(bound: float, factor: float, label: str) -> None:
    found = read(f'{factor!r} * "{label}".ari > {bound!r}')
    assert found.terms == (Term(factor, label, {}, "ari"),)
    assert found.bound == bound


def verdict(text: str, **values: list[float]) -> str:
    """Of values by method, one a seed."""

    def of(method: str, point: Mapping[str, str], column: str) -> Mapping[int, float]:
        return dict(enumerate(values[method]))

    return judge(parse(text, tuple(values), {}), {}, of).verdict


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("A.x > 10", [12, 13, 14], "holds"),  # 10.5 to 15.5
        ("A.x > 12", [12, 13, 14], "undecided"),
        ("A.x > 16", [12, 13, 14], "fails"),
        ("A.x < 16", [12, 13, 14], "holds"),
        ("A.x < 10", [12, 13, 14], "fails"),
        ("A.x ~ 13 +- 3", [12, 13, 14], "holds"),
        ("A.x ~ 13 +- 1", [12, 13, 14], "undecided"),
        ("A.x ~ 20 +- 2", [12, 13, 14], "fails"),
        ("A.x > 5", [5, 5, 5], "fails"),  # no spread, and not more
        ("A.x >= 5", [5, 5, 5], "holds"),
        ("A.x <= 5", [5, 5, 5], "holds"),
        ("A.x < 5", [5, 5, 5], "fails"),
        ("A.x > 0", [100], "undecided"),  # one seed
        ("A.x > 0", [], "undecided"),
        ("A.x > 0", [1, math.nan, 1], "undecided"),
        ("A.x > 0", [1, math.inf, 1], "undecided"),
    ],
)
def test_verdicts(text: str, values: list[float], expected: str) -> None:
    assert verdict(text, A=values) == expected


def test_numbers_on_the_left_are_part_of_the_value() -> None:
    """What is written is what is shown: the value, and the bound with which it is compared."""
    statement = read("FedAvg.ari - 10 > 3 + PACFL.ari")
    values = {"FedAvg": {0: 24.0, 1: 25.0}, "PACFL": {0: 10.0, 1: 10.0}}
    found = judge(statement, {}, lambda method, point, column: values[method])
    assert (found.interval.mean, found.verdict) == (4.5, "undecided")
    told = found.to_dict()
    assert (told["value"], told["comparison"], told["bound"]) == (4.5, ">", 3.0)
    assert "tolerance" not in told
    assert judge(read("FedAvg.ari ~ 24 +- 9"), {}, lambda m, p, c: values[m]).to_dict()["tolerance"] == 9
    assert unit_of(read("FedAvg.accuracy_mean > 3")) == "%"
    assert unit_of(read("FedAvg.accuracy_mean - 5 > 3")) == "points"


def test_differences_are_paired() -> None:
    seeds = [10.0, 50.0, 90.0]  # seeds differ far more than methods
    assert verdict("A.x - B.x > 1", A=[value + 2 for value in seeds], B=seeds) == "holds"


def test_wrong_verdicts_are_as_rare_as_they_say() -> None:
    """Where a claim is false by as little as possible it is said to hold in 2.5 % of studies."""
    draws = np.random.default_rng(1).normal(0.0, 1.0, (3000, 4))
    found = [verdict("A.x > 0", A=row.tolist()) for row in draws]
    assert found.count("holds") / len(found) == pytest.approx(0.025, abs=0.012)


def test_all_points_have_to_hold() -> None:
    assert overall(["holds", "holds"]) == "holds"
    assert overall(["holds", "undecided"]) == "undecided"
    assert overall(["holds", "undecided", "fails"]) == "fails"


def test_mistakes_in_a_claim_are_named() -> None:
    with pytest.raises(ConfigError, match="a column must follow 'FedAvg' without a space"):
        parse("FedAvg .accuracy_mean > 0", ["FedAvg"], {})
    with pytest.raises(ConfigError, match=r"partition.alpha is named twice"):
        parse("A[alpha=0.3,alpha=3].accuracy_mean > 0", ["A"], {"partition.alpha": ["0.3", "3"]})


def test_a_point_of_this_name_comes_before_one_of_the_same_number() -> None:
    axes = {"version": ["1.1", "1.10"]}
    for value in axes["version"]:
        assert point_of("version", value, axes, lambda what, remedy: ConfigError("x", what, remedy)) == value
    assert point_of("version", "1.100", axes, lambda what, remedy: ConfigError("x", what, remedy)) == "1.1"
