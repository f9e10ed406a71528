import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import squareform

from rayfl.clustering import quality
from rayfl.clustering.bipartition import bipartition, is_correct, separation_gap


def as_printed(similarity):
    """Algorithm 1 of the paper, line by line; ties in the order of a stable sort."""
    m = len(similarity)
    order = np.argsort(-similarity.ravel(), kind="stable")
    clusters = [{i} for i in range(m)]
    for s in order:
        i1, i2 = int(s) // m, int(s) % m
        merged = set()
        for cluster in list(clusters):
            if i1 in cluster or i2 in cluster:
                merged |= cluster
                clusters.remove(cluster)
        clusters.append(merged)
        if len(clusters) == 2:
            return sorted(sorted(cluster) for cluster in clusters)
    raise AssertionError


def largest_cross(similarity, first):
    mask = np.isin(np.arange(len(similarity)), first)
    return similarity[np.ix_(mask, ~mask)].max()


def symmetric(m, seed, steps=None):
    random = np.random.default_rng(seed)
    values = random.uniform(-1, 1, m * (m - 1) // 2)
    if steps:
        values = np.round(values * steps) / steps  # many ties
    square = squareform(values)
    np.fill_diagonal(square, 1.0)
    return values, square


def test_by_hand():
    # clients 0 and 2 are alike, 1 and 3 too; across, 2 and 3 are most alike
    square = np.array([[1, 0.1, 0.9, 0.2], [0.1, 1, -0.5, 0.7], [0.9, -0.5, 1, 0.3], [0.2, 0.7, 0.3, 1]])
    halves = bipartition(squareform(square, checks=False), [0, 1, 2, 3])
    assert halves.first.tolist() == [0, 2]
    assert halves.second.tolist() == [1, 3]
    assert halves.cross == 0.3
    assert halves.gamma == pytest.approx(np.sqrt(0.35))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 24), st.integers(0, 10**6), st.sampled_from([None, 1, 3, 10]))
def test_equals_algorithm_1_as_printed_also_where_similarities_tie(m, seed, steps):
    values, square = symmetric(m, seed, steps)
    halves = bipartition(values, range(m))
    assert [halves.first.tolist(), halves.second.tolist()] == as_printed(square)
    assert halves.cross == largest_cross(square, halves.first)


@pytest.mark.parametrize("m", range(2, 9))
@pytest.mark.parametrize("steps", [None, 2])
def test_no_bipartition_is_better(m, steps):
    values, square = symmetric(m, 100 + m, steps)
    rest = range(1, m)
    best = min(
        largest_cross(square, [0, *some])
        for size in range(m - 1)
        for some in itertools.combinations(rest, size)
    )
    assert bipartition(values, range(m)).cross == best


def test_similarities_that_one_minus_a_would_not_tell_apart():
    values = np.array([1e-18, 3e-18, 2e-18])  # pairs 01, 02, 12; 1 - a is 1 for all
    assert bipartition(values, range(3)).first.tolist() == [0, 2]


def test_result_is_ids_and_does_not_depend_on_the_order_of_the_clients():
    """A published implementation returns positions within the cluster: splitting {5..9} re-used {0..4}."""
    square = symmetric(5, 3, steps=2)[1]
    ids = np.array([5, 6, 7, 8, 9])
    expected = as_printed(square)
    for order in itertools.permutations(range(5)):
        shuffled = squareform(square[np.ix_(order, order)], checks=False)
        halves = bipartition(shuffled, ids[list(order)])
        assert [halves.first.tolist(), halves.second.tolist()] == [[5 + i for i in c] for c in expected]
    again = bipartition(squareform(square[2:, 2:], checks=False), ids[2:])  # a cluster of the cluster
    assert sorted([*again.first, *again.second]) == [7, 8, 9]


def test_complete_linkage_is_the_authors_and_another_thing():
    # a chain 0 - 1 - 2 - 3, each like the next, and 4 a little like 3
    square = np.array(
        [
            [1.0, 0.9, 0.2, -0.4, -0.9],
            [0.9, 1.0, 0.8, 0.1, -0.8],
            [0.2, 0.8, 1.0, 0.7, -0.7],
            [-0.4, 0.1, 0.7, 1.0, 0.3],
            [-0.9, -0.8, -0.7, 0.3, 1.0],
        ]
    )
    values = squareform(square, checks=False)
    single, complete = (bipartition(values, range(5), linkage) for linkage in ("single", "complete"))
    assert (single.second.tolist(), single.cross) == ([4], 0.3)
    # 01 join, then 23; their least similar members -0.4, 4's to 23 -0.7: 4 stays alone
    assert (complete.second.tolist(), complete.cross) == ([4], 0.3)
    # 0 and 3 opposed: now 01 and 23 are further apart than 23 and 4, and the chain is cut at 0.8
    square[0, 3] = square[3, 0] = -0.95
    values = squareform(square, checks=False)
    assert bipartition(values, range(5)).second.tolist() == [4]
    complete = bipartition(values, range(5), "complete")
    assert (complete.first.tolist(), complete.second.tolist(), complete.cross) == ([0, 1], [2, 3, 4], 0.8)


@pytest.mark.parametrize(
    ("values", "ids", "message"),
    [([], [3], "two different"), ([0.5], [3, 3], "two different"), ([0.5, 0.1], [1, 2], "2 clients have 1")],
)
def test_refusals(values, ids, message):
    with pytest.raises(ValueError, match=message):
        bipartition(np.array(values), ids)


def test_separation_gap_is_taken_across_the_optimal_bipartition():
    # three groups of two; groups 0 and 1 are more alike than either is to 2
    groups = np.array([0, 0, 1, 1, 2, 2])
    between = np.array([[0.9, 0.6, -0.5], [0.6, 0.8, -0.4], [-0.5, -0.4, 0.7]])
    square = between[np.ix_(groups, groups)]
    values = squareform(square, checks=False)
    assert separation_gap(values, groups) == pytest.approx(0.7 - -0.4)
    assert quality.separation_gap(square, groups) == pytest.approx(0.7 - 0.6)
    halves = bipartition(values, range(6))
    assert is_correct(halves, groups)
    assert not is_correct(halves, np.array([0, 1, 0, 1, 0, 1]))
    assert np.isnan(separation_gap(values, np.arange(6)))


def test_a_correct_bipartition_without_a_positive_gap():
    """The converse of the paper's Remark 2: 0, 1, 2 are a chain, of one group; 3, 4 are another."""
    groups = np.array([0, 0, 0, 1, 1])
    square = np.array(
        [
            [1.0, 0.9, 0.1, 0.0, 0.0],
            [0.9, 1.0, 0.9, 0.2, 0.0],
            [0.1, 0.9, 1.0, 0.0, 0.0],
            [0.0, 0.2, 0.0, 1.0, 0.9],
            [0.0, 0.0, 0.0, 0.9, 1.0],
        ]
    )
    values = squareform(square, checks=False)
    assert is_correct(bipartition(values, range(5)), groups)
    assert separation_gap(values, groups) == pytest.approx(0.1 - 0.2)


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 12), st.integers(0, 10**6))
def test_a_positive_gap_means_a_correct_bipartition(m, seed):
    """Corollary 1, on planted groups with noise."""
    random = np.random.default_rng(seed)
    groups = random.integers(0, 3, m)
    square = np.where(groups[:, None] == groups[None, :], 0.5, -0.2) + squareform(
        random.normal(0, 0.3, m * (m - 1) // 2)
    )
    values = squareform(square, checks=False)
    gap = separation_gap(values, groups)
    assert np.isnan(gap) or gap <= 0 or is_correct(bipartition(values, range(m)), groups)
