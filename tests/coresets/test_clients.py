"""Clients as vertices."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy.sparse.csgraph import connected_components

from rayfl.coresets import clients
from rayfl.errors import DataError
from rayfl.evaluation import metrics


def population(n, seed=0, groups=6):
    """Label histograms in groups, and an accuracy that depends on group and histogram, with noise."""
    rng = np.random.default_rng(seed)
    group = rng.choice(groups, n, p=rng.dirichlet(np.full(groups, 3.0)))
    histograms = np.stack([rng.dirichlet(np.where(np.arange(groups) == g, 8.0, 0.6)) for g in group])
    accuracy = 60 + 30 * histograms @ rng.random(groups) + rng.normal(0, 2, n)
    return group, histograms, accuracy


def test_client_graph_from_vectors_is_the_neighbour_graph():
    graph = clients.client_graph(np.array([[0.0], [1.0], [10.0], [11.0]]), neighbours=1)
    np.testing.assert_array_equal(np.argwhere(graph.adjacency.toarray()), [[0, 1], [1, 0], [2, 3], [3, 2]])


def test_client_graph_from_clusters_joins_within_them():
    labels = np.array([0] * 25 + [1] * 3 + [2])
    graph = clients.client_graph(clusters=labels, neighbours=6)
    A = graph.adjacency.toarray()
    assert (A[labels[:, None] != labels[None, :]] == 0).all()
    assert connected_components(A)[0] == 3
    degrees = A.sum(axis=0)
    assert (degrees[:25] >= 5).all()
    assert (degrees[:25] <= 6).all()
    np.testing.assert_array_equal(degrees[25:], [2, 2, 2, 0])
    np.testing.assert_array_equal(np.unique(A), [0, 1])


def test_client_graph_from_both_joins_neighbours_of_a_cluster():
    points, labels = np.array([[0.0], [0.1], [5.0], [5.1], [9.0]]), np.array([0, 1, 0, 1, 2])
    A = clients.client_graph(points, clusters=labels, neighbours=3).adjacency.toarray()
    np.testing.assert_array_equal(np.argwhere(A), [[0, 2], [1, 3], [2, 0], [3, 1]])


@pytest.mark.parametrize("kinds", [1, 3])
def test_equal_clients_are_joined_evenly_and_many_stand_for_them(kinds):
    kind = np.arange(600) % kinds
    graph = clients.client_graph(np.eye(kinds)[kind])
    degrees = graph.adjacency.sum(axis=0)
    assert degrees.min() >= 10
    assert degrees.max() < 30  # without a draw the first few would be everybody's neighbours
    assert (kind[graph.adjacency.tocoo().row] == kind[graph.adjacency.tocoo().col]).all()
    coreset = clients.client_coreset(graph, 30)
    assert len(coreset) == 30
    np.testing.assert_allclose(
        np.bincount(kind[coreset.ids], coreset.weights), np.full(kinds, 1 / kinds), atol=0.02
    )


def test_the_whole_population_is_itself():
    _, histograms, _ = population(50)
    coreset = clients.client_coreset(clients.client_graph(histograms), 50)
    np.testing.assert_array_equal(coreset.ids, np.arange(50))
    np.testing.assert_array_equal(coreset.weights, np.full(50, 1 / 50))


def test_shares_of_planted_clusters():
    labels = np.repeat([0, 1, 2], [100, 300, 600])
    coreset = clients.client_coreset(clients.client_graph(clusters=labels), 40)
    assert len(coreset) == 40
    assert (np.diff(coreset.ids) > 0).all()
    np.testing.assert_allclose(np.bincount(labels[coreset.ids], coreset.weights), [0.1, 0.3, 0.6], atol=0.02)


def test_the_mean_accuracy_is_estimated_better_than_by_random_clients():
    mine, random = [], []
    for seed in range(5):
        _, histograms, accuracy = population(800, seed)
        chosen = clients.client_coreset(clients.client_graph(histograms), 60, seed=seed)
        mine.append((chosen.estimate(accuracy[chosen.ids]) - accuracy.mean()) ** 2)
        rng = np.random.default_rng(seed)
        for _ in range(40):
            some = rng.choice(800, 60, replace=False)
            random.append((accuracy[some].mean() - accuracy.mean()) ** 2)
    assert np.mean(mine) < np.mean(random) / 2


def test_participants_are_cheaper_and_still_representative():
    labels = np.repeat([0, 1, 2], [100, 300, 600])
    costs = np.random.default_rng(0).random(1000)
    graph = clients.client_graph(clusters=labels)
    dear = clients.client_coreset(graph, 40)
    cheap = clients.participants(graph, 40, costs, kappa=0.5)
    assert costs[cheap.ids].sum() < 0.5 * costs[dear.ids].sum()
    np.testing.assert_allclose(np.bincount(labels[cheap.ids], cheap.weights), [0.1, 0.3, 0.6], atol=0.08)
    there = np.arange(1000) % 2 == 0
    some = clients.participants(graph, 40, costs, kappa=0.5, eligible=there)
    assert there[some.ids].all()
    assert len(some) == 40


def test_does_not_depend_on_anything_but_its_arguments():
    _, histograms, _ = population(300)
    graph = clients.client_graph(histograms)
    a, b = (clients.client_coreset(graph, 20, seed=4) for _ in range(2))
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.weights, b.weights)


def test_weighted_summary_of_equal_weights_is_the_summary():
    rng = np.random.default_rng(0)
    sizes = rng.integers(5, 50, 40)
    correct = rng.binomial(sizes, 0.7)
    losses = rng.random(40) * sizes
    expected = metrics.summary(correct, losses, sizes)
    found = clients.weighted_summary(correct, losses, sizes, np.full(40, 1 / 40))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name


def test_weighted_summary_counts_a_client_as_often_as_it_stands_for():
    sizes, correct = np.array([10, 20, 40]), np.array([1, 10, 38])  # 10, 50, 95 %
    losses, times = np.array([20.0, 20.0, 8.0]), np.array([2, 6, 12])
    found = clients.weighted_summary(correct, losses, sizes, times / 20)
    expected = metrics.summary(*(np.repeat(x, times) for x in (correct, losses, sizes)))
    for name, value in expected.items():
        if name != "accuracy_se":  # three clients are not as certain as twenty
            assert found[name] == pytest.approx(value), name


def test_the_standard_error_of_an_estimate_by_hand():
    # 50 and 90 % with weights 1/4 and 3/4: mean 80, variance 300, sum of squared weights 5/8
    args = ([5, 9], [0.0, 0.0], [10, 10], np.array([0.25, 0.75]))
    s2 = 300 / (1 - 5 / 8)
    assert clients.weighted_summary(*args)["accuracy_se"] == pytest.approx(np.sqrt(s2 * 5 / 8))
    of_eight = clients.weighted_summary(*args, population=8)
    assert of_eight["accuracy_se"] == pytest.approx(np.sqrt(s2 * 5 / 8 * (1 - 2 / 8)))
    assert clients.weighted_summary(*args, population=2)["accuracy_se"] == 0.0
    one = clients.weighted_summary([5], [0.0], [10], np.array([1.0]))
    assert np.isnan(one["accuracy_se"])


def three_groups(N, seed):
    """Label histograms of N clients: groups of 50, 30 and 20 % with disjoint labels, little noise."""
    rng = np.random.default_rng(seed)
    group = np.repeat([0, 1, 2], [N // 2, round(0.3 * N), N - N // 2 - round(0.3 * N)])
    alpha = np.where(np.arange(9) // 3 == group[:, None], 20.0, 0.3)
    return group, np.stack([rng.dirichlet(a) for a in alpha])


@pytest.mark.parametrize(("N", "K"), [(20, 4), (20, 8), (30, 5), (60, 12), (400, 20)])
def test_small_groups_are_weighted_by_their_size(N, K):
    """With ten neighbours a group of four merges with the others: its weight was .02 in place of .2."""
    for seed in range(3):
        group, histograms = three_groups(N, seed)
        core = clients.evaluation_coreset(clients.client_graph(histograms), K, seed=seed)
        assert len(core) == K
        found = np.bincount(group[core.ids], core.weights, minlength=3)
        np.testing.assert_allclose(found, np.bincount(group) / N, atol=1e-12)


def test_equal_clients_share_their_weight_among_equal_references():
    kind = np.arange(600) % 3
    core = clients.evaluation_coreset(clients.client_graph(np.eye(3)[kind]), 30)
    per_kind = np.bincount(kind[core.ids])
    np.testing.assert_allclose(core.weights, 1 / 3 / per_kind[kind[core.ids]])


def test_clusters_of_the_graph_are_kept_with_fewer_neighbours():
    """Two equal clusters in the same place have equally many references, with fewer neighbours too."""
    cluster = np.arange(20) % 2
    for seed in range(5):
        graph = clients.client_graph(np.zeros((20, 2)), clusters=cluster, seed=seed)
        for K in (2, 4):
            assert cluster[clients.evaluation_coreset(graph, K, seed=seed).ids].sum() == K / 2


def test_the_whole_population_is_evaluated_as_it_is():
    _, histograms = three_groups(12, 0)
    core = clients.evaluation_coreset(clients.client_graph(histograms), 40)
    np.testing.assert_allclose(core.weights, np.full(12, 1 / 12))


def test_estimates_lie_within_their_standard_errors():
    """Groups of 50, 30, 20 % with accuracies of 86, 79, 20 %, as FedAvg's on the digits."""
    errors, bounds = [], []
    for seed in range(10):
        group, histograms = three_groups(20, seed)
        sizes = np.full(20, 100)
        correct = np.random.default_rng(seed).binomial(sizes, np.array([0.86, 0.79, 0.2])[group])
        truth = metrics.summary(correct, np.zeros(20), sizes)["accuracy_mean"]
        core = clients.evaluation_coreset(clients.client_graph(histograms), 8, seed=seed)
        some = correct[core.ids], np.zeros(8), sizes[core.ids], core.weights
        found = clients.weighted_summary(*some, population=20)
        errors.append(abs(found["accuracy_mean"] - truth))
        bounds.append(3 * found["accuracy_se"])
    assert (np.array(errors) < bounds).all()
    assert max(errors) < 5


def test_weighted_summary_of_the_untested():
    found = clients.weighted_summary([0, 5], [0.0, 1.0], [0, 10], np.array([0.9, 0.1]))
    assert found["accuracy_mean"] == 50.0
    assert np.isnan(clients.weighted_summary([0], [0.0], [0], np.array([1.0]))["accuracy_mean"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clients.client_graph(), "neither vectors nor clusters"),
        (lambda: clients.client_graph(np.zeros((1, 3))), "1 clients"),
        (lambda: clients.client_graph(np.zeros((4, 3)), neighbours=0), "0 neighbours"),
        (lambda: clients.client_graph(np.zeros((4, 3)), clusters=[0, 1]), "clusters of shape"),
        (lambda: clients.client_graph(clusters=[0, 1, 2]), "no edges"),
        (lambda: clients.client_graph(np.eye(3), clusters=[0, 1, 2]), "no two are alike"),
        (lambda: clients.client_graph(np.full((4, 2), np.inf)), "not finite"),
        (lambda: clients.client_coreset(clients.client_graph(np.eye(9)), 0), "references: got 0"),
        (lambda: clients.evaluation_coreset(clients.client_graph(np.eye(9)), 0), "references: got 0"),
        (lambda: clients.evaluation_coreset(clients.client_graph(clusters=[0] * 9), 4), "no vectors"),
        (lambda: clients.client_coreset(clients.client_graph(np.eye(9)), 3, [-1.0] * 9, 0.5), "has -1.0"),
        (lambda: clients.client_coreset(clients.client_graph(np.eye(9)), 9, [-1.0] * 9, 0.5), "has -1.0"),
    ],
)
def test_refused(make, message):
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_ten_thousand_clients_take_seconds():
    _, histograms, _ = population(10_000)
    begun = time.perf_counter()
    coreset = clients.client_coreset(clients.client_graph(histograms), 200)
    assert time.perf_counter() - begun < 15  # about 3 on one core
    assert len(coreset) == 200
