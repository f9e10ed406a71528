"""Algorithm 12: by hand, against the printed algorithm, its bounds, its costs."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.coresets import Graph, bounds, graphs, scgiga, uniform, walks
from rayfl.errors import DataError
from tests.coresets import oracle


def weighted_graph(n, seed, extra=0.3):
    """A connected graph with random weights, so that nothing ties."""
    rng = np.random.default_rng(seed)
    A = np.zeros((n, n))
    order = rng.permutation(n)
    for i in range(1, n):
        A[order[i], order[rng.integers(i)]] = rng.uniform(0.2, 1.0)
    A += np.triu(rng.uniform(0.2, 1.0, (n, n)) * (rng.random((n, n)) < extra), 1)
    return np.maximum(A, A.T)


def test_a_path_of_three_by_hand():
    # P = [[.5 .5 0] [.5 0 .5] [0 .5 .5]]: every column has norm 1/sqrt(2), b = 2/sqrt(6) for all.
    # One reference: w = b/sqrt(n)/||P_v|| = (2/sqrt 6)/sqrt 3 * sqrt 2 = 2/3 and J = 1 - 4/6.
    graph = Graph(sp.csr_array(np.array([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]])))
    one = [*scgiga.steps(graph, 1, vectors=walks.walk_vectors(graph, 1, 1))][-1]
    np.testing.assert_allclose(one.coreset.weights, [2 / 3])
    assert pytest.approx(1 / 3) == one.J
    # All three: P w = 1/3 has the solution w = 1/3 each.
    for seed in range(4):
        three = [*scgiga.steps(graph, 3, vectors=walks.walk_vectors(graph, 1, 3), seed=seed)][-1]
        assert sorted(three.coreset.ids) == [0, 1, 2]
        assert pytest.approx(1.0 - three.coreset.weights.sum(), abs=1e-9) == three.J
        assert three.J < 0.01


@pytest.mark.parametrize("kappa", [1.0, 0.7, 0.2])
@pytest.mark.parametrize("power", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_printed_algorithm(seed, power, kappa):
    A = weighted_graph(30, seed)
    costs = np.random.default_rng(seed + 100).random(30)
    order, weights = oracle.scgiga(A, power, 8, costs if kappa < 1 else np.zeros(30), kappa)
    found = scgiga.select(Graph(sp.csr_array(A)), 8, power=power, costs=costs, kappa=kappa)
    assert [*found.ids] == order
    np.testing.assert_allclose(found.weights, weights, rtol=1e-7)


def test_a_step_cut_to_one_equals_the_printed_algorithm_with_the_cut():
    # Costs far apart and a wide slack: a badly aligned first vertex, so that delta would exceed 1.
    cuts = 0
    for seed in range(30):
        A = weighted_graph(8, seed, extra=0.0)
        costs = np.random.default_rng(seed).random(8)
        graph = Graph(sp.csr_array(A))
        vectors = walks.walk_vectors(graph, 8, 3)
        steps = [*scgiga.steps(graph, 3, vectors=vectors, costs=costs, kappa=0.3)]
        cuts += any(step.cut for step in steps)
        order, weights = oracle.scgiga(A, 8, 3, costs, 0.3)
        assert [*steps[-1].coreset.ids] == order
        np.testing.assert_allclose(steps[-1].coreset.weights, weights, rtol=1e-7)
    assert cuts > 0


def test_kappa_one_ignores_costs_and_equal_costs_ignore_kappa():
    graph = Graph(sp.csr_array(weighted_graph(60, 1)))
    plain = scgiga.select(graph, 12, power=2)
    costs = np.random.default_rng(0).random(60)
    for other in (
        scgiga.select(graph, 12, power=2, costs=costs, kappa=1.0),
        scgiga.select(graph, 12, power=2, costs=np.full(60, 3.0), kappa=0.3),
    ):
        np.testing.assert_array_equal(other.ids, plain.ids)
        np.testing.assert_array_equal(other.weights, plain.weights)


def test_less_slack_costs_more_and_aligns_better():
    graph = graphs.gaussian_mixture(500, 0)
    costs = np.random.default_rng(0).random(len(graph))
    paid, J = [], []
    for kappa in (1.0, 0.8, 0.2):
        steps = [*scgiga.steps(graph, 14, vectors=walks.walk_vectors(graph, 8, 14), costs=costs, kappa=kappa)]
        paid.append(costs[steps[-1].coreset.ids].sum())
        J.append(steps[-1].J)
    assert paid[0] > 2 * paid[1] > 2 * paid[2]
    assert J[0] < J[2]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(4, 40),
    seed=st.integers(0, 10_000),
    power=st.integers(1, 6),
    kappa=st.sampled_from([1.0, 0.9, 0.5]),
    threshold=st.floats(0.3, 0.95),
)
def test_the_bounds_of_theorem_6_hold(n, seed, power, kappa, threshold):
    A = weighted_graph(n, seed)
    graph = Graph(sp.csr_array(A))
    rng = np.random.default_rng(seed)
    costs = rng.random(n)
    vectors = walks.walk_vectors(graph, power, 1)
    steps = [*scgiga.steps(graph, max(1, n // 2), costs=costs, kappa=kappa, vectors=vectors)]
    J = np.array([step.J for step in steps])
    norms = np.linalg.norm(np.linalg.matrix_power(oracle.lazy_walk(A), power), axis=0)
    eta2 = 1 - kappa**2 * (1 / np.sqrt(n) / norms).max() ** 2
    assert J[0] <= eta2 + 1e-9
    if not any(step.cut for step in steps):
        # J_{k+1} = J_k (1 - <a_k, a_kv>^2), so that J_K = J_1 prod ..., and the rate of the appendix
        contraction = np.cumprod([1.0 - step.alignment**2 for step in steps])
        np.testing.assert_allclose(J, contraction, atol=1e-9)
        for taken, value in enumerate(J, 1):
            assert value <= bounds.rate(vectors, kappa, taken) + 1e-9
    coreset = steps[-1].coreset
    assert bounds.residual(graph, coreset, power) ** 2 * n == pytest.approx(J[-1], abs=1e-9)
    assert coreset.weights.sum() == pytest.approx(1 - J[-1], abs=1e-9)
    assert (coreset.weights > 0).all()
    f = bounds.bandlimit(graph, rng.normal(size=n), threshold)
    for weighted in (coreset, coreset.normalised()):
        error = abs(weighted.estimate(f[weighted.ids]) - f.mean())
        assert error <= bounds.error_bound(graph, weighted, power, float(np.linalg.norm(f)), threshold) + 1e-9


def test_the_bound_can_fail_for_functions_off_the_graph():
    # Not band-limited: the walk's 1/lambda^l says nothing about it. So the bound above is not trivially true.
    graph = graphs.gaussian_mixture(300, 0)
    coreset = scgiga.select(graph, 40, power=30)
    f = np.zeros(len(graph))
    f[coreset.ids] = 1.0
    error = abs(coreset.estimate(f[coreset.ids]) - f.mean())
    assert error > bounds.error_bound(graph, coreset, 30, float(np.linalg.norm(f)), 0.999)


def test_bandlimit_keeps_what_is_smooth():
    graph = graphs.gaussian_mixture(200, 0)
    np.testing.assert_allclose(bounds.bandlimit(graph, np.ones(200), 0.99), 1.0)
    rough = np.random.default_rng(0).normal(size=200)
    assert np.linalg.norm(bounds.bandlimit(graph, rough, 0.9)) < np.linalg.norm(rough)
    np.testing.assert_allclose(bounds.bandlimit(graph, rough, 0.0), rough)


def test_beats_random_on_the_gaussian_mixture():
    mine, random = [], []
    for seed in range(6):
        graph = graphs.gaussian_mixture(1500, seed)
        f = (graph.groups == 0).astype(float)
        chosen = scgiga.select(graph, 30, seed=seed).normalised()
        mine.append((chosen.estimate(f[chosen.ids]) - f.mean()) ** 2)
        for draw in range(10):
            drawn = uniform.select(graph, 30, seed=100 * seed + draw)
            random.append((drawn.estimate(f[drawn.ids]) - f.mean()) ** 2)
    assert np.mean(mine) < np.mean(random) / 3


def test_planted_blocks_each_get_their_share():
    graph = graphs.block_model([100, 500, 400], 0.1, 0.001, 0)
    chosen = scgiga.select(graph, 60, power=16).normalised()
    shares = np.bincount(graph.groups[chosen.ids], chosen.weights, 3)
    np.testing.assert_allclose(shares, [0.1, 0.5, 0.4], atol=0.03)


def test_greedy_choices_are_nested_and_chosen_once():
    graph = graphs.gaussian_mixture(400, 0)
    few, many = (scgiga.select(graph, k, power=4) for k in (5, 20))
    np.testing.assert_array_equal(many.ids[:5], few.ids)
    assert len(set(many.ids)) == 20


def test_a_complete_graph_needs_one_reference():
    # Every column of P = (1 1^T - D)/(n-1) + I is 1/(n-1) off the vertex: with a few steps it is 1/n.
    graph = Graph(sp.csr_array(np.ones((12, 12)) - np.eye(12)))
    chosen = scgiga.select(graph, 5, power=12)
    assert len(chosen) == 1
    np.testing.assert_allclose(chosen.weights, [1.0])


def test_components_are_all_represented():
    graph = Graph(sp.csr_array(np.kron(np.eye(4), np.ones((5, 5)) - np.eye(5))), components=True)
    chosen = scgiga.select(graph, 4, power=20).normalised()
    assert sorted(chosen.ids // 5) == [0, 1, 2, 3]
    np.testing.assert_allclose(chosen.weights, 0.25)


def test_the_seed_decides_between_equals_and_nothing_else():
    ring = sp.diags_array([1.0, 1.0, 1.0, 1.0], offsets=[-1, 1, -29, 29], shape=(30, 30)).tocsr()
    graph = Graph(ring)
    starts = {int(scgiga.select(graph, 1, seed=seed, power=2).ids[0]) for seed in range(12)}
    assert len(starts) > 4
    again = [scgiga.select(graph, 7, seed=3, power=2) for _ in range(2)]
    np.testing.assert_array_equal(again[0].ids, again[1].ids)


def test_only_the_eligible_are_chosen():
    graph = graphs.gaussian_mixture(300, 0)
    eligible = np.arange(300) % 3 == 0
    chosen = scgiga.select(graph, 20, power=4, eligible=eligible)
    assert (chosen.ids % 3 == 0).all()
    assert len(chosen) == 20


def test_no_more_than_ten_steps_a_reference():
    graph = graphs.gaussian_mixture(300, 0)
    for kappa in (1.0, 0.05):
        taken = [
            *scgiga.steps(
                graph, 6, vectors=walks.walk_vectors(graph, 64, 6), costs=np.arange(300.0), kappa=kappa
            )
        ]
        assert len(taken) <= 60


@pytest.mark.parametrize(
    ("references", "arguments", "message"),
    [
        (0, {}, "references: got 0, expected 1 to 9"),
        (10, {}, "references: got 10"),
        (2, {"kappa": 0.0}, "kappa"),
        (2, {"kappa": 1.5}, "kappa"),
        (2, {"costs": [1.0] * 8 + [-2.0]}, "vertex 8 has -2.0"),
        (2, {"costs": [np.nan] * 9}, "vertex 0 has nan"),
        (2, {"costs": [1.0]}, "costs: shape"),
        (2, {"eligible": [False] * 9}, "0 true"),
        (2, {"power": -1}, "power: got -1"),
    ],
)
def test_refused(references, arguments, message):
    graph = Graph(sp.csr_array(weighted_graph(9, 0)))
    with pytest.raises(DataError, match=message) as caught:
        scgiga.select(graph, references, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_hundred_thousand_vertices_in_seconds():
    import time

    graph = graphs.gaussian_mixture(100_000, 0)
    begun = time.perf_counter()
    chosen = scgiga.select(graph, 200, power=1)
    assert time.perf_counter() - begun < 20
    assert len(chosen) == 200
