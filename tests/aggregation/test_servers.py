"""Rules at a local server: running statistics, updates, failures, long models, what the GPS is told, and
rules that return what they must not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Literal

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray

from rayfl.aggregation import AGGREGATIONS, Aggregation
from rayfl.algorithms import Mixing
from rayfl.clients.partial import LARGE, PIECE
from rayfl.errors import ConfigError
from rayfl.servers.lps import merge
from rayfl.servers.mixing import check_rule
from tests.servers.serving import combine

ALL = ((0, 6),)
ONES = np.ones((1, 5))
RULES = {
    "median": AGGREGATIONS["median"](),
    "trimmed_mean": AGGREGATIONS["trimmed_mean"](share=0.3),
    "krum": AGGREGATIONS["krum"](f=1, m=2),
    "geometric_median": AGGREGATIONS["geometric_median"](),
    "norm_clipping": AGGREGATIONS["norm_clipping"](bound=1.0),
}
rng = np.random.default_rng(0)
W = rng.standard_normal((5, 6)).astype(np.float32)
OLD = rng.standard_normal(6).astype(np.float32)


def one(rule: Aggregation, rows: Any, **job: Any) -> NDArray[np.float32]:
    """The next model of clients that form one block."""
    job = {"weights": [np.ones((1, len(rows)))], **job}
    return combine(ALL, (), [OLD], [np.asarray(rows, np.float32)], rule=rule, **job)[0][0]


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """No registry knows the rules of these tests afterwards."""
    yield
    for name in [name for name in AGGREGATIONS if name.startswith("bad_")]:
        AGGREGATIONS.withdraw(name)


@pytest.mark.parametrize("name", RULES)
def test_blocks_do_not_matter(name: str) -> None:
    """Bit for bit: however the clients are cut into blocks, and however many models a call makes."""
    weights = np.array([[3.0, 1, 4, 1, 5], [0, 2, 1, 2, 0], [0, 0, 0, 0, 0]])
    whole, _ = combine(ALL, (), [OLD] * 3, [W], weights=[weights], rule=RULES[name])
    cut = [slice(0, 1), slice(1, 4), slice(4, 5)]
    parts, facts = combine(
        ALL, (), [OLD] * 3, [W[s] for s in cut], weights=[weights[:, s] for s in cut], rule=RULES[name]
    )
    assert [model.tobytes() for model in parts] == [model.tobytes() for model in whole]
    for k in range(2):
        alone, _ = combine(ALL, (), [OLD], [W], weights=[weights[[k]]], rule=RULES[name])
        assert alone[0].tobytes() == whole[k].tobytes()
    np.testing.assert_array_equal(whole[2], OLD)  # nobody contributed
    assert facts[2].update_norm == 0


def test_the_second_row_is_of_its_own_clients() -> None:
    weights = np.array([[3.0, 1, 4, 1, 5], [0, 2, 1, 2, 0]])
    (_, second), _ = combine(ALL, (), [OLD] * 2, [W], weights=[weights], rule=RULES["median"])
    np.testing.assert_allclose(second, np.median(W[1:4], axis=0), rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_who_failed_is_left_out(name: str) -> None:
    """Whatever its row holds; the servers have set its weight to 0."""
    rows = W.copy()
    rows[2] = np.nan
    found = one(RULES[name], rows, weights=[np.array([[3.0, 1, 0, 1, 5]])])
    left = one(RULES[name], W[[0, 1, 3, 4]], weights=[np.array([[3.0, 1, 1, 5]])])
    assert found.tobytes() == left.tobytes()


@pytest.mark.parametrize("name", RULES)
def test_running_statistics(name: str) -> None:
    """Two at the end: they play no part in distances and are combined as parameters are."""
    rows = np.abs(W)
    rows[:, 4:] *= 1e6
    found = one(RULES[name], rows, statistics=2)
    short, _ = combine(((0, 4),), (), [OLD], [rows[:, :4]], weights=[ONES], rule=RULES[name])
    np.testing.assert_array_equal(found[:4], short[0][:4])
    assert (found[4:] >= np.minimum(rows[:, 4:].min(axis=0), OLD[4:])).all()
    if name in ("median", "trimmed_mean"):
        assert found.tobytes() == one(RULES[name], rows).tobytes()


@pytest.mark.parametrize("name", RULES)
def test_a_client_whose_statistics_are_no_numbers(name: str) -> None:
    rows = np.abs(W)
    rows[3, 5] = np.nan
    found = one(RULES[name], rows, statistics=2)
    assert np.isfinite(found).all()
    if RULES[name].reweighs:
        assert found.tobytes() == one(RULES[name], np.delete(rows, 3, axis=0), statistics=2).tobytes()


class Beyond(Aggregation):
    """Twice as far as the mean: a rule that leaves the range of what clients send."""

    name: Literal["bad_beyond"] = "bad_beyond"

    def combine(self, values, weights, old):  # type: ignore[no-untyped-def]
        return old + 2 * (values.mean(axis=0) - old)


def test_variances_do_not_become_negative() -> None:
    rows, old = np.abs(W), np.full(6, 9.0, np.float32)
    (found,), _ = combine(ALL, (), [old], [rows], weights=[ONES], statistics=2, rule=Beyond())
    assert (found[:4] < 0).all()
    np.testing.assert_array_equal(found[4:], rows[:, 4:].min(axis=0))


@pytest.mark.parametrize("name", RULES)
def test_updates_are_those_of_the_model(name: str) -> None:
    """A client that sends w_j - s_j counts as w + (w_j - s_j); statistics are sent as they are."""
    updates = np.concatenate([W[:, :4] - OLD[:4], W[:, 4:]], axis=1)
    found = one(RULES[name], updates, statistics=2, updates=True)
    np.testing.assert_allclose(found, one(RULES[name], W, statistics=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_part_of_the_model_and_what_the_gps_is_told(name: str) -> None:
    """Layers 1 to 2 and 4 stay with the clients. The GPS averages by samples, whatever the rule."""
    shared, common, weights = ((0, 1), (3, 4), (5, 6)), ((3, 4), (5, 6)), np.array([[3.0, 1, 4, 1, 5]])
    rows = W[:, [0, 3, 5]]
    (new,), facts = combine(shared, common, [OLD], [rows], weights=[weights], rule=RULES[name])
    np.testing.assert_array_equal(new[[1, 2, 4]], OLD[[1, 2, 4]])
    (short,), _ = combine(((0, 3),), (), [OLD[[0, 3, 5]]], [rows], weights=[weights], rule=RULES[name])
    np.testing.assert_array_equal(new[[0, 3, 5]], short)
    assert facts[0].common.weight == facts[0].weight == 14
    merged = merge([facts[0].common], [14.0])
    np.testing.assert_allclose(merged, new[[3, 5]], rtol=1e-6)
    assert facts[0].update_norm == pytest.approx(np.linalg.norm(new - OLD), rel=1e-6)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [3 * PIECE + 17, LARGE + 5])
def test_long_models_are_made_of_pieces(name: str, size: int) -> None:
    """In threads where they are large: the same bits every time, and what NumPy makes of them whole."""
    if size > LARGE and name in ("trimmed_mean", "norm_clipping"):
        pytest.skip("as the others")
    draw = np.random.default_rng(1)
    rows, old = draw.standard_normal((5, size), np.float32), np.zeros(size, np.float32)
    first, again = (
        combine(((0, size),), (), [old], [rows], weights=[ONES], rule=RULES[name])[0][0] for _ in range(2)
    )
    assert first.tobytes() == again.tobytes()
    exact = rows.astype(np.float64)
    weights, keep = RULES[name].reweigh(exact @ exact.T, np.ones(5))
    part = exact[weights > 0]
    whole = RULES[name].combine(part, weights[weights > 0], old.astype(np.float64))
    whole = whole * weights.sum() / (weights.sum() + keep)
    np.testing.assert_allclose(first, whole, rtol=1e-5, atol=1e-6)


def test_nothing_but_infinity_is_no_number() -> None:
    """As with the mean; a server does not invent a model."""
    assert not np.isfinite(one(RULES["krum"], np.full((3, 6), np.inf))).any()


class Bad(Aggregation):
    name: Literal["bad_weights"] = "bad_weights"
    what: str = ""

    def reweigh(self, gram, weights):  # type: ignore[no-untyped-def]
        return {
            "an array": weights,
            "short": (weights[1:], 0.0),
            "negative": (-weights, 9.0),
            "nothing": (weights * 0, 0.0),
            "NaN": (weights * np.nan, 0.0),
            "whole": (weights, 0.0),
        }[self.what]

    def combine(self, values, weights, old):  # type: ignore[no-untyped-def]
        return values


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "an array",
            r"bad_weights.reweigh: returned an array of float64 \(5,\); expected weights",
        ),
        ("short", r"bad_weights.reweigh: returned weights of shape \(4,\)"),
        ("negative", r"bad_weights.reweigh: returned weights that are negative, not finite, or all zero"),
        ("nothing", r"bad_weights.reweigh: returned weights that are negative, not finite, or all zero"),
        ("NaN", r"bad_weights.reweigh: returned weights that are negative, not finite, or all zero"),
        ("whole", r"bad_weights.combine: returned float64 \(5, 6\); expected an array of floats \(6,\)"),
    ],
)
def test_a_rule_that_returns_something_else_is_one_line(what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one(Bad(what=what), W)


@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        (Mixing(sp.csr_array([[1.0, 2.0]]), keep=sp.csr_array([[0.5, 0]])), "keeps a part of the old model"),
        (Mixing(sp.csr_array([[3.0, -1.0]])), "negative weights"),
        (Mixing(sp.csr_array([[3.0, 1.0]])), "1 needs 5 clients"),
    ],
)
def test_matrices_that_mean_nothing_to_a_rule(mixing: Mixing, message: str) -> None:
    assert check_rule(mixing, AGGREGATIONS["mean"]()) is mixing
    with pytest.raises(ConfigError, match=message):
        check_rule(mixing, AGGREGATIONS["krum"](f=1))


def test_a_rule_needs_no_torch() -> None:
    """A local server does without."""
    names = ", ".join(f"rayfl.aggregation.{rule.__module__.split('.')[-1]}" for rule in RULES.values())
    code = f"import sys, {names}; print(sorted({{'torch', 'ray', 'scipy', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
