"""Best and last accuracy of each client."""

import numpy as np
import pytest

from rayfl.evaluation.tracker import BestLast

NAN = np.nan


def test_best_and_last_by_hand():
    start = BestLast.start(3)
    first = start.update(0, [0, 2], [50.0, 70.0])
    second = first.update(5, [2, 0], [60.0, 55.0])
    third = second.update(9, [0], [55.0])  # a tie: the earlier round stays
    assert np.array_equal(third.last, [55.0, NAN, 60.0], equal_nan=True)
    assert np.array_equal(third.best, [55.0, NAN, 70.0], equal_nan=True)
    assert third.best_round.tolist() == [5, -1, 0]


def test_an_update_leaves_the_old_tracker_alone():
    start = BestLast.start(2)
    first = start.update(0, [0, 1], [50.0, 50.0])
    first.update(1, [0, 1], [80.0, 10.0])
    assert np.isnan(start.last).all()
    assert np.isnan(start.best).all()
    assert start.best_round.tolist() == [-1, -1]
    assert first.last.tolist() == first.best.tolist() == [50.0, 50.0]


def test_unknown_accuracy_changes_nothing():
    tracker = BestLast.start(2).update(0, [0, 1], [0.0, NAN]).update(1, [0], [NAN])
    assert np.array_equal(tracker.last, [0.0, NAN], equal_nan=True)
    assert tracker.best_round.tolist() == [0, -1]


def test_an_estimate_is_no_best():
    """Clients that are tested in place of all would otherwise have more chances than others."""
    tracker = BestLast.start(2).update(0, [0, 1], [50.0, 50.0]).update(1, [0], [80.0], estimate=True)
    assert tracker.last.tolist() == [80.0, 50.0]
    assert tracker.best.tolist() == [50.0, 50.0]
    assert tracker.best_round.tolist() == [0, 0]


@pytest.mark.parametrize(("ids", "values"), [([1, 1], [1.0, 2.0]), ([0, 1], [1.0])])
def test_ambiguous_updates_are_refused(ids: list[int], values: list[float]):
    with pytest.raises(ValueError, match="each client"):
        BestLast.start(2).update(0, ids, values)
