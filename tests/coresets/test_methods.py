"""The comparison methods, each against numbers derived by hand or another way."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import minimize

from rayfl.coresets import Graph, betweenness, frank_wolfe, graphs, kmeans, scgiga, spectral, uniform, walks
from rayfl.coresets.base import Coreset, cluster_coreset, nearest_shares
from rayfl.errors import DataError

METHODS = {
    "scgiga": scgiga,
    "uniform": uniform,
    "kmeans": kmeans,
    "spectral": spectral,
    "frank_wolfe": frank_wolfe,
    "betweenness": betweenness,
}


@pytest.fixture(scope="module")
def mixture():
    return graphs.gaussian_mixture(400, 0)


@pytest.mark.parametrize("name", METHODS)
def test_one_signature(name, mixture):
    select = METHODS[name].select
    first, again = (select(mixture, 8, seed=2) for _ in range(2))
    assert 1 <= len(first) <= 8
    assert len(set(first.ids)) == len(first)
    assert first.weights.shape == first.ids.shape
    assert (first.weights > 0).all()
    assert first.normalised().estimate(np.ones(len(first))) == pytest.approx(1.0)
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.weights, again.weights)
    for wrong in (0, 401):
        with pytest.raises(DataError, match="references: got"):
            select(mixture, wrong)


def test_uniform_is_unbiased(mixture):
    f = np.arange(400.0)
    means = []
    for seed in range(300):
        drawn = uniform.select(mixture, 20, seed=seed)
        means.append(drawn.estimate(f[drawn.ids]))
    # standard error of one mean: 115.5 / sqrt(20) * sqrt(380 / 399) = 25.2; of 300: 1.46
    assert np.mean(means) == pytest.approx(199.5, abs=5)
    assert np.std(means) == pytest.approx(25.2, rel=0.15)


def test_spectral_recovers_planted_groups():
    graph = graphs.block_model([50, 150, 300], 0.3, 0.01, 0)
    chosen = spectral.select(graph, 3)
    shares = np.bincount(graph.groups[chosen.ids], chosen.weights)
    np.testing.assert_allclose(shares, [0.1, 0.3, 0.6], atol=0.005)


def test_kmeans_recovers_planted_groups():
    points = np.repeat(np.array([[0.0, 0], [20, 0], [0, 20]]), [10, 30, 60], axis=0)
    points = points + np.random.default_rng(0).normal(size=(100, 2))
    groups = np.repeat([0, 1, 2], [10, 30, 60])
    graph = graphs.knn_graph(points, 6, components=True)
    chosen = kmeans.select(graph, 3)
    np.testing.assert_allclose(np.bincount(groups[chosen.ids], chosen.weights), [0.1, 0.3, 0.6])
    for reference, group in zip(chosen.ids, groups[chosen.ids], strict=True):
        members = points[groups == group]
        distance = np.linalg.norm(members - members.mean(axis=0), axis=1)
        assert np.linalg.norm(points[reference] - members.mean(axis=0)) == pytest.approx(distance.min())


def test_kmeans_without_points_takes_rows_of_the_adjacency():
    graph = graphs.block_model([40, 60], 0.5, 0.01, 0)
    chosen = kmeans.select(graph, 2, seed=1)
    assert sorted(chosen.weights) == pytest.approx([0.4, 0.6])


def test_eigenvectors_are_those_of_the_normalised_adjacency(mixture):
    A = mixture.adjacency.toarray()
    root = 1 / np.sqrt(A.sum(axis=1))
    _, vectors = np.linalg.eigh(root[:, None] * A * root[None, :])
    found = spectral.eigenvectors(mixture, 3)
    overlap = np.abs(found.T @ vectors[:, ::-1][:, :3])
    np.testing.assert_allclose(overlap, np.eye(3), atol=1e-6)
    with pytest.raises(DataError, match="at most 399"):
        spectral.select(mixture, 400)


def test_cluster_coreset_by_hand():
    chosen = cluster_coreset(np.array([[0.0], [1.0], [5.0], [9.0], [6.0]]), np.array([7, 7, 3, 3, 3]))
    # cluster 3: 5, 9, 6 with mean 20/3: vertex 4; cluster 7: 0, 1 with mean 1/2: both as near, the first
    np.testing.assert_array_equal(chosen.ids, [4, 0])
    np.testing.assert_allclose(chosen.weights, [0.6, 0.4])


@pytest.mark.parametrize("count", [2, 70])
def test_nearest_shares_count_hops(count):
    n = 10 * count
    line = sp.diags_array([np.ones(n - 1), np.ones(n - 1)], offsets=[-1, 1]).tocsr()
    ids = np.arange(count) * 10 + 4  # four before and five after each are nearer to it, the fifth ties
    shares = nearest_shares(Graph(line), ids) * n
    assert shares.sum() == pytest.approx(n)
    np.testing.assert_allclose(shares, 10, atol=1)


def test_frank_wolfe_steps_as_campbell_and_broderick(mixture):
    power = 6
    P = np.linalg.matrix_power(graphs.lazy_walk(mixture).toarray(), power)
    n = len(P)
    norms = np.linalg.norm(P, axis=0)
    target, sigma = np.full(n, 1 / n), norms.sum() / n
    w = np.zeros(n)
    every = [*frank_wolfe.steps(mixture, 10, power=power)]
    for step in every:
        gain = (P / norms).T @ (target - P @ w)
        corner = np.zeros(n)
        v = int(gain.argmax())
        corner[v] = sigma / norms[v]
        way = P @ (corner - w)
        gamma = 1.0 if not w.any() else np.clip(way @ (target - P @ w) / (way @ way), 0, 1)
        w = (1 - gamma) * w + gamma * corner
        got = np.zeros(n)
        got[step.ids] = step.weights
        np.testing.assert_allclose(got, w, atol=1e-12)
        assert norms @ got == pytest.approx(sigma)  # feasible: sum ||P_v|| w_v = sigma
    errors = [np.linalg.norm(P[:, s.ids] @ s.weights - target) for s in every]
    assert (np.diff(errors) <= 1e-12).all()


def test_frank_wolfe_ends_near_the_optimum():
    graph = graphs.block_model([20, 40], 0.3, 0.1, 0)
    assert len(graph) == 60
    P = np.linalg.matrix_power(graphs.lazy_walk(graph).toarray(), 4)
    norms = np.linalg.norm(P, axis=0)
    corners = P * (norms.sum() / 60 / norms)

    def objective(x):
        return float(((corners @ x - 1 / 60) ** 2).sum())

    best = minimize(
        objective,
        np.full(60, 1 / 60),
        bounds=[(0, 1)] * 60,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
    ).fun
    found = frank_wolfe.select(graph, 60, power=4, own_weights=True)
    assert ((P[:, found.ids] @ found.weights - 1 / 60) ** 2).sum() < best + 2e-4


def test_frank_wolfe_weights_of_the_thesis_are_shares(mixture):
    chosen = frank_wolfe.select(mixture, 6)
    np.testing.assert_allclose(chosen.weights, nearest_shares(mixture, chosen.ids))
    assert chosen.weights.sum() == pytest.approx(1.0)


def test_betweenness_of_a_path_by_hand():
    # 0-1-2-3-4: pairs through 1: 3 (0 with 2, 3, 4); through 2: 4; through 3: 3
    line = sp.diags_array([np.ones(4), np.ones(4)], offsets=[-1, 1]).tocsr()
    np.testing.assert_allclose(betweenness.centrality(Graph(line)), [0, 3, 4, 3, 0])
    assert betweenness.select(Graph(line), 1).ids == [2]


@pytest.mark.parametrize("seed", range(3))
def test_betweenness_equals_networkx(seed):
    graph = graphs.random_graph(300, 4.0, seed)
    expected = nx.betweenness_centrality(nx.from_scipy_sparse_array(graph.adjacency), normalized=False)
    np.testing.assert_allclose(betweenness.centrality(graph), [expected[v] for v in range(len(graph))])


def test_betweenness_from_some_sources_is_unbiased():
    graph = graphs.random_graph(200, 4.0, 0)
    exact = betweenness.centrality(graph)
    some = np.mean([betweenness.centrality(graph, sources=50, seed=s) for s in range(40)], axis=0)
    assert np.abs(some - exact).sum() < 0.1 * exact.sum()
    with pytest.raises(DataError, match="sources"):
        betweenness.centrality(graph, sources=0)


def test_coreset_estimates():
    coreset = Coreset(np.array([4, 2]), np.array([0.2, 0.3]))
    assert coreset.estimate([10.0, 1.0]) == pytest.approx(2.3)
    np.testing.assert_allclose(coreset.normalised().weights, [0.4, 0.6])


def test_power_of_frank_wolfe_is_that_of_scgiga(mixture):
    X = walks.walk_vectors(mixture, "auto", 9)
    given_X = [*frank_wolfe.steps(mixture, 9, vectors=X)][-1]
    np.testing.assert_array_equal(given_X.ids, frank_wolfe.select(mixture, 9).ids)
