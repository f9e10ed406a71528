"""Pacing against numbers worked out by hand, orders, draws, and a curriculum through the engine."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import torch

from rayfl.random import generator
from rayfl.training import LocalWork, Terms
from rayfl.training.batched import BatchedEngine
from rayfl.training.batches import Batches
from rayfl.training.curriculum import (
    PACINGS,
    Pacing,
    alike,
    arrange,
    eligible,
    loss_scores,
    prediction_scores,
    visits,
)
from rayfl.training.loop import LoopEngine
from tests.training.conftest import make_samples, make_spec

# N = 100, T = 10, a = 0.8, b = 0.2: t / (a T) is t / 8; from step 8 on all samples are used.
E10 = math.e**10
BY_HAND = {
    "linear": [20, 30, 40, 50, 60, 70, 80, 90, 100, 100],
    "quadratic": [20, 21.25, 25, 31.25, 40, 51.25, 65, 81.25, 100, 100],
    "root": [20 + 80 * math.sqrt(t / 8) for t in range(8)] + [100, 100],
    "step": [20, 20, 20, 20, 20, 20, 20, 20, 100, 100],
    "exponential": [20 + 80 / (E10 - 1) * (math.e ** (10 * t / 8) - 1) for t in range(8)] + [100, 100],
}


@pytest.mark.parametrize("family", PACINGS)
def test_pacing_by_hand(family):
    pacing = Pacing(family, a=0.8, b=0.2)
    exact = [100 * pacing.fraction(t / 10) for t in range(10)]
    np.testing.assert_allclose(exact, BY_HAND[family], rtol=1e-12)
    found = pacing.available(10, 100, batch_size=5)
    assert found.tolist() == [math.floor(value + 0.5) for value in BY_HAND[family]]
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize("family", ["linear", "quadratic", "step"])
def test_halves_are_rounded_up(family):
    """Against fractions, which are exact: in floating point a half may be a little less than one."""
    halves = 0
    for n, steps, (a, b) in product((20, 50, 75, 250), (10, 24, 60), ((4, 1), (4, 2), (10, 5), (5, 1))):
        a_, b_ = Fraction(a, 10 if a == 10 else 5), Fraction(b, 10)
        found = Pacing(family, float(a_), float(b_)).available(steps, n, batch_size=1)
        for t in range(steps):
            u = min(Fraction(1), Fraction(t, steps) / a_)
            g = {"linear": b_ + (1 - b_) * u, "quadratic": b_ + (1 - b_) * u**2, "step": b_ + math.floor(u)}
            exact = n * min(Fraction(1), g[family])
            halves += exact.denominator == 2
            assert found[t] == math.floor(exact + Fraction(1, 2)), (n, steps, a_, b_, t)
    assert halves > 20


def test_pacing_in_plain_numbers():
    """20 + 80 / (e^10 - 1) (e^5 - 1) = 20.54 at half way; 20 + 80 sqrt(1/2) = 76.57; 20 + 80 / 4 = 40."""
    half = 0.4  # of T, where a T = 0.8 T
    assert 100 * Pacing("exponential").fraction(half) == pytest.approx(20.5354, abs=1e-4)
    assert 100 * Pacing("root").fraction(half) == pytest.approx(76.5685, abs=1e-4)
    assert 100 * Pacing("quadratic").fraction(half) == pytest.approx(40)
    assert 100 * Pacing("linear").fraction(half) == pytest.approx(60)
    assert 100 * Pacing("step").fraction(half) == pytest.approx(20)


@pytest.mark.parametrize("family", PACINGS)
def test_the_cap_and_the_floor(family):
    """A tiny a is over at once and overflows nothing; b N of less than a batch is a batch; b = 1 is all."""
    assert Pacing(family, a=1e-6).available(5, 40, 10).tolist()[1:] == [40] * 4
    assert Pacing(family, b=0.01).available(5, 40, 10)[0] == 10
    assert Pacing(family, b=0.01).available(5, 4, 10).tolist() == [4] * 5
    assert Pacing(family, b=1.0).available(5, 40, 10).tolist() == [40] * 5
    assert Pacing(family).available(0, 40, 10).tolist() == []


@pytest.mark.parametrize(("a", "b"), [(0, 0.2), (1.1, 0.2), (0.8, 0), (0.8, 2)])
def test_bad_pacings(a, b):
    with pytest.raises(ValueError, match="pacing"):
        Pacing(a=a, b=b)
    with pytest.raises(ValueError, match="not one of exponential"):
        Pacing("cubic")  # type: ignore[arg-type]


def test_scores_by_hand():
    """Losses 1, 2, 4: 1/loss = 1, 0.5, 0.25, of 1.75."""
    np.testing.assert_allclose(loss_scores([1.0, 2.0, 4.0]), [4 / 7, 2 / 7, 1 / 7])
    assert loss_scores([0.5, 0.0]).argmax() == 1
    assert np.isfinite(loss_scores([0.0, 0.0])).all()
    assert loss_scores([]).tolist() == []
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            loss_scores([1.0, bad])
    assert prediction_scores([1, 2, 3], [1, 0, 3]).tolist() == [1, 0, 1]


def draws(*ids: int, count: int) -> np.ndarray:
    return generator(0, "draws", *ids).random(count)


def test_orders():
    scores = np.array([0.1, 0.4, 0.2, 0.3])
    assert arrange(scores, "curriculum", draws(count=4)).tolist() == [1, 3, 2, 0]
    assert arrange(scores, "anti", draws(count=4)).tolist() == [0, 2, 3, 1]
    random = {tuple(arrange(scores, "random", draws(i, count=4)).tolist()) for i in range(200)}
    assert len(random) == 24
    assert arrange(scores, "random", np.array([0.3, 0.1, 0.9, 0.2])).tolist() == [1, 3, 0, 2]
    with pytest.raises(ValueError, match="vanilla"):
        arrange(scores, "vanilla", draws(count=4))  # type: ignore[arg-type]


def test_equal_scores_are_in_random_order():
    scores = np.array([0.0, 1.0, 1.0, 0.0])
    found = {tuple(arrange(scores, "curriculum", draws(i, count=4)).tolist()) for i in range(50)}
    assert found == {(1, 2, 0, 3), (1, 2, 3, 0), (2, 1, 0, 3), (2, 1, 3, 0)}


def test_clients_with_equally_many_samples_score_and_sort_as_alone():
    """Bit for bit: sums over 1, 7 and 300 losses, ties, and a client without samples."""
    sizes = (300, 7, 1, 300, 0, 7, 300)
    losses = [generator(0, "losses", i).random(n).round(2) for i, n in enumerate(sizes)]
    ties = [draws(i, count=n) for i, n in enumerate(sizes)]
    scores = alike(loss_scores, losses)
    orders = alike(lambda s, own: arrange(s, "curriculum", own), scores, ties)
    for i in range(len(sizes)):
        assert scores[i].tolist() == loss_scores(losses[i]).tolist()
        assert orders[i].tolist() == arrange(scores[i], "curriculum", ties[i]).tolist()


def test_anti_is_curriculum_backwards_ties_included():
    scores = np.array([0.0, 1.0, 1.0, 0.0, 0.5, 1.0])
    for i in range(20):
        easy, hard = (arrange(scores, order, draws(i, count=6)) for order in ("curriculum", "anti"))
        assert easy.tolist() == hard[::-1].tolist()


def batches_of(order, available, size, *ids: int) -> list[np.ndarray]:
    """The batches of one client."""
    numbers = draws(*ids, count=len(available) * min(size, len(order)))
    (found,) = visits([np.asarray(order)], [np.asarray(available, np.int64)], size, [numbers])
    return found


def test_every_step_draws_from_what_is_available_without_replacement():
    order = generator(0, "order").permutation(50)
    available = Pacing(a=0.5, b=0.1).available(40, 50, 10)
    batches = batches_of(order, available, 10, 3, 7)
    assert len(batches) == 40
    for g, batch in zip(available, batches, strict=True):
        assert len(set(batch.tolist())) == 10
        assert set(batch.tolist()) <= set(order[:g].tolist())
    assert sorted(batches[0].tolist()) == sorted(order[:10].tolist())
    again = batches_of(order, available, 10, 3, 7)
    assert all((a == b).all() for a, b in zip(batches, again, strict=True))
    other = batches_of(order, available, 10, 4, 7)
    assert any((a != b).any() for a, b in zip(batches, other, strict=True))


def test_all_batches_are_equally_likely():
    """Of the first five samples all ten pairs, 600 times of 6000 each (standard deviation 23)."""
    batches = batches_of(np.arange(9), np.full(6000, 5), 2)
    counts = Counter(tuple(sorted(batch.tolist())) for batch in batches)
    assert set(counts) == set(combinations(range(5), 2))
    assert max(abs(count - 600) for count in counts.values()) < 5 * 23


def test_fewer_samples_than_a_batch():
    batches = batches_of(np.array([2, 0, 1]), [3, 3], 10)
    assert [sorted(batch.tolist()) for batch in batches] == [[0, 1, 2]] * 2
    assert len(batches_of(np.array([], np.intp), [], 10)) == 0


def test_clients_of_a_block_do_not_see_each_other():
    """Different sizes, numbers of steps and widths together are as one by one."""
    orders = [generator(0, "order", n).permutation(n) for n in (50, 3, 17, 0, 4)]
    available = [Pacing().available(t, n, 10) for t, n in ((25, 50), (5, 3), (10, 17), (0, 0), (5, 4))]
    numbers = [
        draws(i, count=len(g) * min(10, len(order)))
        for i, (g, order) in enumerate(zip(available, orders, strict=True))
    ]
    together = visits(orders, available, 10, numbers)
    for i, own in enumerate(together):
        alone = batches_of(orders[i], available[i], 10, i)
        assert [batch.tolist() for batch in own] == [batch.tolist() for batch in alone]
        assert len(own) == len(available[i])


@pytest.mark.parametrize("available", [[4], [11]])
def test_impossible_paces(available):
    with pytest.raises(ValueError, match=r"g\(t\)"):
        batches_of(np.arange(10), available, 5)


def test_client_curriculum():
    losses = [3.0, 1.0, 2.0, 1.0, 9.0]
    assert eligible(losses, 2, "curriculum").tolist() == [1, 3]
    assert eligible(losses, 2, "anti").tolist() == [0, 4]
    assert eligible(losses, 9, "anti").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="random"):
        eligible(losses, 2, "random")


def test_easy_samples_first_through_the_engine():
    """Ten samples, two steps of 5: the first takes the five easiest, as training on them alone."""
    samples = make_samples((6,), uint8=False)
    spec = make_spec("linear", samples)
    order = arrange(np.arange(10.0), "curriculum", draws(count=10))
    assert order.tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    batches = batches_of(order, Pacing("step", a=1.0, b=0.5).available(2, 10, 5), 5)
    engine = LoopEngine(spec, Batches(samples, torch.device("cpu")), 0)
    start = torch.from_numpy(np.tile(spec.initial(), (2, 1)))
    work = LocalWork(epochs=2, batch_size=5, lr=0.1)
    terms = Terms(visits=[batches, [np.arange(5), np.arange(5)]])
    block = engine.train(work, 0, [0, 1], [np.arange(10), np.arange(5, 10)], start, terms)
    torch.testing.assert_close(block.rows[0], block.rows[1])


@pytest.mark.parametrize("inner_lr", [0.0, 0.05])
def test_visits_in_one_array_are_those_of_each_client(inner_lr):
    """Clients with equally many samples and steps have one array, which trains as their own arrays do."""
    samples = make_samples((6,), uint8=False)
    spec = make_spec("linear", samples)
    orders = [generator(0, "order", client).permutation(11) for client in range(3)]
    paces = [Pacing().available(5, 11, 4)] * 3
    found = visits(orders, paces, 4, [draws(client, count=20) for client in range(3)])
    assert isinstance(found, np.ndarray)
    assert found.shape == (3, 5, 4)
    start = torch.from_numpy(np.tile(spec.initial(), (3, 1)))
    work, indices = LocalWork(1, 4, 0.1, inner_lr=inner_lr), list(np.split(np.arange(33), 3))
    rows = []
    for terms in (Terms(visits=found), Terms(visits=list(found)), Terms(visits=[list(own) for own in found])):
        engine = BatchedEngine(spec, Batches(samples, torch.device("cpu")), 0, clients_per_call=2)
        block = engine.train(work, 0, [4, 5, 6], indices, start, terms)
        assert block.steps.tolist() == [3 if inner_lr else 5] * 3
        rows.append(block.rows)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    wrong = found.copy()
    wrong[1, 0, 0] = 11
    failed = engine.train(work, 0, [4, 5, 6], indices, start, Terms(visits=wrong)).failures
    assert list(failed) == [1]
    assert "of 11 samples" in failed[1]
