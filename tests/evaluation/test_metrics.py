"""Metrics over clients, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from rayfl.evaluation.metrics import METRICS, accuracy, perplexity, summary


def test_four_clients_by_hand():
    # accuracies 50, 100, 25, 75 %; losses 0.5, 0.1, 2, 1 a sample
    result = summary(correct=[1, 4, 2, 3], loss_sums=[1.0, 0.4, 16.0, 4.0], sizes=[2, 4, 8, 4])
    assert result == pytest.approx(
        {
            "accuracy_mean": 62.5,
            "accuracy_weighted": 100 * 10 / 18,
            "accuracy_median": 62.5,
            "accuracy_worst10": 25.0,
            "accuracy_best10": 100.0,
            "accuracy_var": (12.5**2 + 37.5**2 + 37.5**2 + 12.5**2) / 4,
            "accuracy_se": math.sqrt((12.5**2 + 37.5**2 + 37.5**2 + 12.5**2) / 3 / 4),
            "loss_mean": 0.9,
        }
    )
    assert tuple(result) == METRICS


def test_worst_and_best_tenth_are_not_swapped():
    # Regression: published code reports the top tenth as the bottom one. 20 clients: 1 %, ..., 20 %.
    result = summary(np.arange(1, 21), np.zeros(20), np.full(20, 100))
    assert result["accuracy_worst10"] == pytest.approx(1.5)
    assert result["accuracy_best10"] == pytest.approx(19.5)


def test_a_tenth_is_rounded_down_but_at_least_one():
    result = summary(np.arange(19), np.zeros(19), np.full(19, 100))
    assert (result["accuracy_worst10"], result["accuracy_best10"]) == (0.0, 18.0)


def test_clients_without_test_samples_count_in_nothing():
    with_empty = summary([0, 1, 0, 3], [0.0, 1.0, 0.0, 2.0], [0, 2, 0, 4])
    assert with_empty == summary([1, 3], [1.0, 2.0], [2, 4])
    assert with_empty["accuracy_mean"] == 62.5
    assert np.array_equal(accuracy([0, 1], [0, 2]), [math.nan, 50.0], equal_nan=True)


def test_no_test_samples_at_all():
    result = summary([0], [0.0], [0])
    assert tuple(result) == METRICS
    assert all(math.isnan(value) for value in result.values())


@pytest.mark.parametrize(("correct", "sizes"), [([3], [2]), ([-1], [2]), ([1], [0]), ([1, 1], [2])])
def test_impossible_counts_are_refused(correct: list[int], sizes: list[int]):
    with pytest.raises(ValueError, match="between 0 and the test sizes"):
        accuracy(correct, sizes)


def test_one_client_has_no_standard_error():
    assert math.isnan(summary([3], [0.0], [4])["accuracy_se"])


def test_perplexity_by_hand():
    # 3 words at ln 8 each, 4 words at 0, none, and words that overflow
    result = perplexity([3 * math.log(8), 0.0, 0.0, 1e6], [3, 4, 0, 1])
    np.testing.assert_allclose(result, [8.0, 1.0, math.nan, math.inf])
