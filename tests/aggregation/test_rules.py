"""Each rule by hand, against a reference written from its paper, and where it is another one."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import trim_mean

from rayfl.aggregation import AGGREGATIONS, Aggregation
from rayfl.config import load
from rayfl.errors import ConfigError
from tests.servers.serving import combine

Vectors = NDArray[np.float64]
rng = np.random.default_rng(0)
OLD = rng.standard_normal(7).astype(np.float32)


def rule_of(name: str, **settings: Any) -> Aggregation:
    return AGGREGATIONS[name](**settings)


def applied(rule: Aggregation, rows: Any, weights: Any = None, old: Any = None) -> NDArray[np.float32]:
    """What a server makes of clients' models ``(m, n)``, each of which is a block."""
    rows = np.asarray(rows, np.float32)
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, np.float64)
    old = np.zeros(rows.shape[1], np.float32) if old is None else old
    cut = [rows[i : i + 1] for i in range(len(rows))]
    parts = [weights[None, i : i + 1] for i in range(len(rows))]
    (new,), _ = combine(((0, rows.shape[1]),), (), [old], cut, weights=parts, rule=rule)
    return new


# --- by hand ---------------------------------------------------------------------------------------------


def test_the_median_of_each_parameter() -> None:
    """Of three the middle one, of four the mean of two; samples do not count."""
    rows = [[1, 50], [2, -50], [9, 4]]
    np.testing.assert_array_equal(applied(rule_of("median"), rows, [1, 1, 1000]), [2, 4])
    np.testing.assert_array_equal(applied(rule_of("median"), [*rows, [4, 8]], [1, 1, 1, 1000]), [3, 6])


def test_the_trimmed_mean_of_each_parameter() -> None:
    """A quarter of four values at each end is one; a quarter of three is none."""
    rows = [[1, 50], [2, -50], [9, 4], [4, 8]]
    rule = rule_of("trimmed_mean", share=0.25)
    np.testing.assert_array_equal(applied(rule, rows, [1, 1, 1, 1000]), [3, 6])
    np.testing.assert_array_equal(applied(rule, rows[:3]), np.array([12 / 3, 4 / 3], np.float32))


def test_a_share_of_a_number_is_not_rounded_down() -> None:
    """0.29 * 100 is 28.999999999999996."""
    rows = np.arange(100.0)[:, None] ** 2
    expected = (np.arange(29.0, 71) ** 2).mean()
    assert applied(rule_of("trimmed_mean", share=0.29), rows) == np.float32(expected)


def test_krum_takes_the_client_with_the_closest_neighbours() -> None:
    """Five clients, f = 1: the two closest count, so the scores are 10, 5, 6.25, 14.5 and 18529.25."""
    rows = np.array([[0.0], [1], [3], [4.5], [100]])
    assert applied(rule_of("krum", f=1), rows, [1, 1, 1, 1, 1000]) == 1
    assert applied(rule_of("krum", f=1, m=2), rows) == 2  # the mean of 1 and 3
    assert applied(rule_of("krum", f=1, m=3), rows) == np.float32(4 / 3)


def test_krum_takes_the_first_of_equal_ones() -> None:
    assert applied(rule_of("krum", f=0), [[1.0], [2], [3], [4]]) == 2


def test_the_geometric_median_takes_a_step_of_weiszfeld() -> None:
    """At 0, 0 and 6 the mean is 2: distances 2, 2, 4, so that 6 counts (1/4) / (5/4). From then on less."""
    rows = [[0.0], [0], [6]]
    assert applied(rule_of("geometric_median", iterations=1), rows) == np.float32(6 / 5)
    second = (1 / 4.8) / (2 / 1.2 + 1 / 4.8)
    assert applied(rule_of("geometric_median", iterations=2), rows) == pytest.approx(6 * second, rel=1e-6)
    assert applied(rule_of("geometric_median", iterations=100), rows) < 1e-4
    # With weight 4 of 6 the third is the median; nu stops what would divide by zero.
    assert applied(rule_of("geometric_median", iterations=100), rows, [1, 1, 4]) == pytest.approx(6, abs=1e-4)
    smooth = applied(rule_of("geometric_median", iterations=1, nu=10.0), rows)
    assert smooth == 2  # all distances count 10


def test_long_updates_are_shortened() -> None:
    """From (1, 1): (3, 4) of length 5 becomes (0.6, 0.8), (0, 0.5) stays; weights 3 and 1."""
    old = np.ones(2, np.float32)
    rows = old + np.array([[3, 4], [0, 0.5]])
    found = applied(rule_of("norm_clipping", bound=1.0), rows, [3, 1], old)
    np.testing.assert_allclose(found, [1 + 3 * 0.6 / 4, 1 + (3 * 0.8 + 0.5) / 4], rtol=1e-7)


# --- references from the papers --------------------------------------------------------------------------


def krum(rows: Vectors, f: int, m: int) -> Vectors:
    """Blanchard et al. 2017, Section 4."""
    n = len(rows)
    scores = []
    for i in range(n):
        far = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(far[: max(1, n - f - 2)]))
    best = sorted(range(n), key=lambda i: (scores[i], i))[:m]
    return np.asarray(rows[best].mean(axis=0))


def weiszfeld(rows: Vectors, weights: Vectors, nu: float, iterations: int) -> Vectors:
    """Pillutla et al. 2022, Algorithm 2, on the models themselves."""
    alpha = weights / weights.sum()
    z = alpha @ rows
    for _ in range(iterations):
        beta = alpha / np.maximum(nu, np.linalg.norm(rows - z, axis=1))
        z = beta @ rows / beta.sum()
    return np.asarray(z)


def clipped(rows: Vectors, weights: Vectors, old: Vectors, bound: float) -> Vectors:
    updates = rows - old
    factors = [1 / max(1.0, float(np.linalg.norm(u)) / bound) for u in updates]
    return np.asarray(old + np.average(updates * np.array(factors)[:, None], axis=0, weights=weights))


@given(m=st.integers(1, 12), seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_rules_are_those_of_the_papers(m: int, seed: int, scale: float) -> None:
    draw = np.random.default_rng(seed)
    rows = (scale * draw.standard_normal((m, 7))).astype(np.float32)
    weights = draw.integers(1, 90, m).astype(np.float64)
    exact, old = rows.astype(np.float64), OLD.astype(np.float64)
    close = {"rtol": 1e-5, "atol": 1e-6 * scale}

    def found(name: str, **settings: Any) -> NDArray[np.float32]:
        return applied(rule_of(name, **settings), rows, weights, OLD)

    np.testing.assert_allclose(found("mean"), np.average(exact, axis=0, weights=weights), **close)
    np.testing.assert_allclose(found("median"), np.median(exact, axis=0), **close)
    np.testing.assert_allclose(found("trimmed_mean", share=0.3), trim_mean(exact, 0.3, axis=0), **close)
    f = max(0, (m - 3) // 2)
    np.testing.assert_allclose(found("krum", f=f), krum(exact, f, 1), **close)
    np.testing.assert_allclose(found("krum", f=f, m=3), krum(exact, f, 3), **close)
    for iterations in (1, 3, 8):
        wanted = weiszfeld(exact, weights, 1e-6, iterations)
        np.testing.assert_allclose(found("geometric_median", iterations=iterations), wanted, **close)
    wanted = clipped(exact, weights, old, 2.0)
    np.testing.assert_allclose(found("norm_clipping", bound=2.0), wanted, rtol=1e-5, atol=1e-6)


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    rows, weights = rng.standard_normal((6, 3)), np.array([1.0, 2, 3, 1, 2, 3])

    def cost(z: Vectors) -> float:
        return float(weights @ np.linalg.norm(rows - z, axis=1))

    least = minimize(cost, rows.mean(axis=0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    found = applied(rule_of("geometric_median", iterations=200), rows, weights)
    np.testing.assert_allclose(found, least.x, atol=1e-5)


# --- identities ------------------------------------------------------------------------------------------

RULES = {
    "mean": rule_of("mean"),
    "median": rule_of("median"),
    "trimmed_mean": rule_of("trimmed_mean", share=0.4),
    "krum": rule_of("krum", f=0),
    "multi_krum": rule_of("krum", f=0, m=9),
    "geometric_median": rule_of("geometric_median", iterations=8),
    "norm_clipping": rule_of("norm_clipping", bound=1e9),
}


def test_all_rules_are_tried() -> None:
    assert {rule.name for rule in RULES.values()} == set(AGGREGATIONS.own)


@pytest.mark.parametrize("name", RULES)
def test_one_client_or_equal_ones_are_what_they_are(name: str) -> None:
    row = rng.standard_normal((1, 7)).astype(np.float32)
    assert applied(RULES[name], row, [17], OLD).tobytes() == row.tobytes()
    same = applied(RULES[name], np.repeat(row, 5, axis=0), [17, 3, 4, 1, 9], OLD)
    assert same.tobytes() == row.tobytes()


def test_rules_that_take_all_are_the_mean_of_all() -> None:
    """Bit for bit: nothing trimmed, all chosen; nothing shortened, and a smoothing beyond all distances, are
    the weighted mean."""
    rows, weights = rng.standard_normal((6, 7)).astype(np.float32), np.arange(1.0, 7)
    plain = applied(rule_of("mean"), rows)
    for same in (rule_of("trimmed_mean", share=0.0), rule_of("krum", f=1, m=6), rule_of("krum", f=0, m=99)):
        assert applied(same, rows, weights).tobytes() == plain.tobytes()
    weighted = applied(rule_of("mean"), rows, weights)
    assert applied(rule_of("norm_clipping", bound=1e9), rows, weights).tobytes() == weighted.tobytes()
    smooth = applied(rule_of("geometric_median", nu=1e9), rows, weights)
    np.testing.assert_allclose(smooth, weighted, rtol=1e-6)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median"])
def test_rules_move_with_the_models(name: str) -> None:
    """What all clients and the model are moved by, the result is moved by; the order plays no part."""
    rows, shift = rng.standard_normal((6, 7)), rng.standard_normal(7)
    rule = RULES[name] if name != "multi_krum" else rule_of("krum", f=1, m=3)
    before = applied(rule, rows, old=OLD)
    after = applied(rule, rows + shift, old=(OLD + shift).astype(np.float32))
    np.testing.assert_allclose(after, before + shift, atol=1e-5)
    np.testing.assert_allclose(applied(rule, rows[::-1], old=OLD), before, atol=1e-6)


@pytest.mark.parametrize("value", [1e30, -1e30, np.inf, np.nan])
def test_a_minority_moves_the_result_little(value: float) -> None:
    """Any two of seven; the mean goes anywhere."""
    good = rng.standard_normal((7, 4))
    rules = [
        rule_of("median"),
        rule_of("trimmed_mean", share=0.3),
        rule_of("krum", f=2),
        rule_of("krum", f=2, m=4),
        rule_of("geometric_median", iterations=100),
    ]
    for bad in combinations(range(7), 2):
        rows, others = good.copy(), np.delete(good, bad, axis=0)
        rows[list(bad)] = value
        for rule in rules:
            found = applied(rule, rows)
            assert (found >= others.min(axis=0) - 1).all(), rule
            assert (found <= others.max(axis=0) + 1).all(), rule
    assert not (np.abs(applied(rule_of("mean"), rows)) < 1e20).any()


# --- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["aggregation=trimmed_mean", "aggregation.share=0.5"],
            "aggregation.share: got 0.5; expected a numb",
        ),
        (
            ["aggregation=trimmed_mean", "aggregation.share=-0.1"],
            "aggregation.share: got -0.1; expected a nu",
        ),
        (["aggregation=krum", "aggregation.f=-1"], "aggregation.f: got -1"),
        (["aggregation=krum", "aggregation.m=0"], "aggregation.m: got 0"),
        (["aggregation=geometric_median", "aggregation.nu=0"], "aggregation.nu: got 0"),
        (["aggregation=norm_clipping", "aggregation.bound=0"], "aggregation.bound: got 0"),
        (["aggregation=mediam"], "no aggregation named 'mediam'; did you mean 'median'?"),
        (["aggregation=median", "algorithm=solo"], "'median' makes no sense with solo; it must be 'mean'"),
        (["aggregation=median", "algorithm=qfedavg"], "'median' makes no sense with qfedavg; it must be"),
        (
            ["aggregation=krum", "local=scaffold", "algorithm=pacfl"],
            "objective 'scaffold', whose clients add",
        ),
        (
            ["aggregation=krum", "algorithm=mtl"],
            "'mtl', whose clients count in the average when they are abs",
        ),
        (
            ["aggregation=krum", "algorithm=sub_fedavg"],
            "'sub_fedavg', whose clients leave parameters out of ",
        ),
        (
            ["aggregation=krum", "local=fednova", "algorithm=ifca"],
            "'fednova', whose clients keep a part of t",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, given)
    assert str(caught.value).startswith("aggregation")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_krum_needs_so_many_clients() -> None:
    """n >= 2 f + 3, unless none is malicious."""
    rule_of("krum", f=2).check(7)
    rule_of("krum", f=0).check(1)
    with pytest.raises(
        ConfigError, match=r"aggregation.f: 2 needs 7 clients \(2 f \+ 3\), but 6 .* at most 1"
    ):
        rule_of("krum", f=2).check(6)
