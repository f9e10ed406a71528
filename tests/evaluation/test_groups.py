"""Accuracy by group, its variance within and between, and the test samples that groups share."""

import numpy as np
import pytest

from rayfl.data.base import Ragged
from rayfl.evaluation import ByGroup, TestSets, metrics


def test_two_groups_by_hand():
    # Group 4: accuracies 50, 100 %, losses 0.5, 0.1; group 1: 25, 75 %, losses 2, 1; one client has no test.
    found = ByGroup.of([1, 4, 2, 3, 0], [1.0, 0.4, 16.0, 4.0, 0.0], [2, 4, 8, 4, 0], [4, 4, 1, 1, 7])
    assert [row["id"] for row in found.rows()] == [1, 4]
    assert found.rows()[1] == pytest.approx(
        {
            "id": 4,
            "clients": 2,
            "test_samples": 6,
            "accuracy_mean": 75.0,
            "accuracy_var": 625.0,
            "accuracy_se": 25.0,  # s = sqrt(1250), of two
            "loss_mean": 0.3,
        }
    )
    assert found.rows()[0]["accuracy_mean"] == 50.0
    assert found.within == pytest.approx(625.0)
    assert found.between == pytest.approx(12.5**2)


@pytest.mark.parametrize("weighted", [False, True])
def test_within_and_between_are_all_of_the_variance(weighted: bool):
    """The law of total variance, whatever the sizes of the groups and the weights of the clients."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 60, 200)
    correct, labels = rng.binomial(sizes, rng.random(200)), rng.choice(9, 200, p=rng.dirichlet(np.ones(9)))
    weights = rng.random(200) if weighted else np.ones(200)
    found = ByGroup.of(correct, np.zeros(200), sizes, labels, weights)
    percent, share = 100 * correct / sizes, weights / weights.sum()
    total = share @ (percent - share @ percent) ** 2
    assert found.within + found.between == pytest.approx(total)
    assert min(found.within, found.between) > 0
    if not weighted:
        assert total == pytest.approx(metrics.summary(correct, np.zeros(200), sizes)["accuracy_var"])
        for row in found.rows():
            its = labels == row["id"]
            expected = metrics.summary(correct[its], np.zeros(its.sum()), sizes[its])
            for name in ("accuracy_mean", "accuracy_var", "accuracy_se"):
                assert row[name] == pytest.approx(expected[name], nan_ok=True)


def test_one_group_and_one_client_a_group():
    one = ByGroup.of([1, 3], [0.0, 0.0], [4, 4], [2, 2])
    assert (one.within, one.between) == (625.0, 0.0)
    each = ByGroup.of([1, 3], [0.0, 0.0], [4, 4], [0, 1])
    assert (each.within, each.between) == (0.0, 625.0)
    assert np.isnan(each.accuracy_se).all()
    nobody = ByGroup.of([0], [0.0], [0], [0])
    assert nobody.rows() == []
    assert np.isnan([nobody.within, nobody.between]).all()


def test_shared_samples_count_once():
    """Twenty clients with the same ten images are no more certain than one of them."""
    tests = Ragged.of([np.arange(10)] * 20)
    sets = TestSets.of(tests, np.zeros(20), 100)
    assert sets.distinct.tolist() == [10]
    assert sets.effective == pytest.approx([10.0])
    assert sets.standard_error([80.0]) == pytest.approx([np.sqrt(80 * 20 / 10)])
    apart = TestSets.of(Ragged.of([np.arange(10), np.arange(10, 20)]), np.zeros(2), 100)
    assert apart.distinct.tolist() == [20]
    assert apart.effective == pytest.approx([20.0])


def test_samples_of_unequal_weight_by_hand():
    # Client 0 has images 0 and 1, client 1 image 1 (seen under another label: id 5 of 4 images).
    sets = TestSets.of(Ragged.of([np.array([0, 1]), np.array([5]), np.array([2])]), [3, 3, 8], 4)
    assert sets.distinct.tolist() == [2, 1]
    assert sets.effective == pytest.approx([1 / (0.25**2 + 0.75**2), 1.0])
    weighted = TestSets.of(Ragged.of([np.array([0, 1]), np.array([1])]), [3, 3], 4, [3.0, 1.0])
    assert weighted.effective == pytest.approx([1 / (0.375**2 + 0.625**2)])
    assert TestSets.of(Ragged.of([np.array([0])]), [0], 1).standard_error([100.0]) == [0.0]


def test_the_error_over_samples_is_that_of_a_simulation():
    """Clients of one model draw from 200 images; the mean varies from test set to test set by this much."""
    rng = np.random.default_rng(1)
    tests = Ragged.of([rng.choice(200, 30, replace=False) for _ in range(40)])
    share = np.bincount(tests.values, minlength=200) / (30 * 40)
    means = 100 * (rng.random((2000, 200)) < 0.7) @ share
    expected = TestSets.of(tests, np.zeros(40), 200).standard_error([70.0])[0]
    assert np.std(means) == pytest.approx(expected, rel=0.1)  # its own standard error is 1.6 %
