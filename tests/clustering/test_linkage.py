import tracemalloc

import numpy as np
import pytest
import scipy.cluster.hierarchy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from rayfl.clustering.grouping import members, random_clusters, shuffle_members, single, singletons
from rayfl.clustering.linkage import (
    build_linkage,
    clusters_over_threshold,
    cut_at_threshold,
    cut_into,
    number_by_first,
    suggest,
    threshold_for,
)
from rayfl.clustering.quality import adjusted_rand_index

METHODS = ("average", "weighted", "single", "complete", "ward")


def line(*points):
    return pdist(np.array(points, float)[:, None])


@pytest.mark.parametrize(
    ("method", "heights"),
    [
        ("single", [1, 2, 6]),
        ("complete", [1, 3, 9]),
        ("average", [1, 2.5, (9 + 8 + 6) / 3]),
        ("weighted", [1, 2.5, ((9 + 8) / 2 + 6) / 2]),
    ],
)
def test_merge_heights_by_hand(method, heights):
    # points 0, 1, 3, 9: first 0-1, then 3 joins, then 9
    assert np.allclose(build_linkage(line(0, 1, 3, 9), method)[:, 2], heights)


def test_cuts_by_hand():
    tree = build_linkage(line(9, 0, 1, 3), "single")  # the client at 9 has the smallest id
    assert cut_at_threshold(tree, 0.5).tolist() == [0, 1, 2, 3]
    assert cut_at_threshold(tree, 1.0).tolist() == [0, 1, 1, 2]
    assert cut_at_threshold(tree, 5.9).tolist() == [0, 1, 1, 1]
    assert cut_at_threshold(tree, 6.0).tolist() == [0, 0, 0, 0]
    assert cut_into(tree, 3).tolist() == [0, 1, 1, 2]


def test_curve_by_hand():
    curve = clusters_over_threshold(build_linkage(line(0, 1, 3, 9), "single"))
    assert curve.thresholds.tolist() == [0, 1, 2, 6]
    assert curve.counts.tolist() == [4, 3, 2, 1]
    curve = clusters_over_threshold(build_linkage(line(0, 0, 5), "single"))
    assert curve.thresholds.tolist() == [0, 5]
    assert curve.counts.tolist() == [2, 1]


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), clients=st.integers(1, 25), method=st.sampled_from(METHODS))
def test_cuts_agree_with_scipy_and_with_the_curve(seed, clients, method):
    points = np.random.default_rng(seed).normal(size=(clients, 2))
    tree = build_linkage(pdist(points), method)
    curve = clusters_over_threshold(tree)
    for threshold, count in zip(curve.thresholds, curve.counts, strict=True):
        labels = cut_at_threshold(tree, threshold)
        assert labels.max() + 1 == count
        if clients > 1:
            theirs = scipy.cluster.hierarchy.fcluster(tree, threshold, criterion="distance")
            assert adjusted_rand_index(labels, theirs) == 1
    for count in range(1, clients + 1):
        labels = cut_into(tree, count)
        assert labels.max() + 1 == count
        assert labels[0] == 0
        beta = threshold_for(tree, count) if clients > 1 else None
        if beta is not None:
            assert np.array_equal(cut_at_threshold(tree, beta), labels)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), method=st.sampled_from(METHODS))
def test_the_order_of_the_clients_does_not_matter(seed, method):
    rng = np.random.default_rng(seed)
    points, order = rng.normal(size=(15, 3)), rng.permutation(15)
    labels = cut_into(build_linkage(pdist(points), method), 4)
    shuffled = cut_into(build_linkage(pdist(points[order]), method), 4)
    assert np.array_equal(number_by_first(labels[order]), shuffled)


def test_degenerate_thresholds_are_fedavg_and_solo():
    tree = build_linkage(pdist(np.random.default_rng(0).normal(size=(20, 2))))
    assert np.array_equal(cut_at_threshold(tree, 1e9), single(20))
    assert np.array_equal(cut_at_threshold(tree, 0.0), singletons(20))


def test_ties_still_give_exactly_the_wanted_number():
    tree = build_linkage(line(0, 1, 2, 3), "single")  # all merges at height 1
    assert [cut_into(tree, k).max() + 1 for k in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert threshold_for(tree, 2) is None
    assert threshold_for(tree, 4) == 0.5


def test_one_client():
    tree = build_linkage(np.empty(0))
    assert cut_at_threshold(tree, 1.0).tolist() == [0]
    assert clusters_over_threshold(tree).counts.tolist() == [1]
    assert suggest(tree) == 1


def test_impossible_numbers_are_refused():
    tree = build_linkage(line(0, 1, 3))
    for count in (0, 4):
        with pytest.raises(ValueError, match="cannot form"):
            cut_into(tree, count)


def test_the_tree_proposes_the_number_at_its_largest_relative_gap():
    four = [0, 0.1, 0.2, 10, 10.1, 10.2, 20, 20.1, 20.2, 30.5, 30.6, 30.7]
    assert suggest(build_linkage(line(*four))) == 4
    assert suggest(build_linkage(line(*range(12)), "single")) == 1  # evenly spread: no gap
    with np.errstate(all="raise"):
        assert suggest(build_linkage(line(*[0] * 6))) == 1  # all alike
    assert suggest(build_linkage(line(0, 0.1, 10, 10.1))) == 2  # pairs: N/2 clusters
    assert suggest(build_linkage(line(*[0] * 5, *[7] * 5))) == 2  # equal members: heights 0
    assert suggest(build_linkage(line(0, 50))) == 1  # two clients show nothing


def test_four_planted_groups_stay_four():
    """A published implementation of PACFL searches on for a beta with at most three clusters."""
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), 10)
    tree = build_linkage(pdist(np.eye(4)[truth] * 30 + rng.normal(size=(40, 4))))
    labels = cut_at_threshold(tree, 12.0)
    assert labels.max() + 1 == 4
    assert adjusted_rand_index(labels, truth) == 1
    assert suggest(tree) == 4


def test_clusters_of_a_part_are_named_by_client_id_not_by_position():
    """A published implementation of CFL splits {5..9} and trains {0..4} again."""
    part = np.array([5, 6, 7, 8, 9])
    labels = cut_into(build_linkage(line(0, 10, 0.1, 10.1, 0.2)), 2)
    assert [ids.tolist() for ids in members(labels, part)] == [[5, 7, 9], [6, 8]]
    assert [ids.tolist() for ids in members(labels)] == [[0, 2, 4], [1, 3]]


def test_random_clusters_are_even_and_keyed():
    labels = random_clusters(10, 3, seed=1)
    assert sorted(np.bincount(labels)) == [3, 3, 4]
    assert labels[0] == 0
    assert np.array_equal(labels, random_clusters(10, 3, seed=1))
    assert any(not np.array_equal(labels, random_clusters(10, 3, seed=s)) for s in range(2, 6))
    with pytest.raises(ValueError, match="cannot form"):
        random_clusters(3, 4, seed=0)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 999))
def test_shuffled_members_keep_the_sizes(sizes, seed):
    truth = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = shuffle_members(truth, seed)
    assert sorted(np.bincount(shuffled)) == sorted(sizes)


def test_shuffled_members_are_random():
    truth = np.repeat([0, 1], 50)
    scores = [adjusted_rand_index(shuffle_members(truth, seed), truth) for seed in range(20)]
    assert abs(np.mean(scores)) < 0.05


# ---- linkage in place, for many clients ------------------------------------------------------------------


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), clients=st.integers(2, 40), method=st.sampled_from(METHODS))
def test_the_chain_in_single_precision_is_scipys_tree(seed, clients, method):
    points = np.random.default_rng(seed).normal(size=(clients, 3))
    expected = build_linkage(pdist(points), method)
    found = build_linkage(pdist(points).astype(np.float32), method)
    assert np.allclose(found[:, 2], expected[:, 2], rtol=1e-4)
    assert (np.diff(found[:, 2]) >= 0).all()
    gaps = np.diff(expected[:, 2])
    for merge in np.flatnonzero(gaps > 1e-3):  # nearer heights may change their order
        cut = expected[merge, 2] + gaps[merge] / 2
        assert np.array_equal(cut_at_threshold(found, cut), cut_at_threshold(expected, cut))


@pytest.mark.parametrize("method", METHODS)
def test_the_chain_in_double_precision_is_scipys_tree_number_by_number(method):
    distances = pdist(np.random.default_rng(0).normal(size=(60, 4)))
    found = build_linkage(distances.copy(), method, np.ones(60, np.int64))
    expected = build_linkage(distances, method)
    assert np.array_equal(found[:, [0, 1, 3]], expected[:, [0, 1, 3]])
    assert np.allclose(found[:, 2], expected[:, 2], rtol=1e-12)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=9),
    method=st.sampled_from(METHODS),
)
def test_a_client_that_stands_for_several_counts_as_that_many_equal_ones(seed, sizes, method):
    points = np.random.default_rng(seed).normal(size=(len(sizes), 3))
    found = build_linkage(pdist(points), method, np.array(sizes))
    copies = build_linkage(pdist(np.repeat(points, sizes, axis=0)), method)[sum(sizes) - len(sizes) :]
    assert np.allclose(found[:, 2:], copies[:, 2:])


def test_the_chain_needs_no_second_copy_of_the_distances():
    distances = pdist(np.random.default_rng(0).normal(size=(1000, 3))).astype(np.float32)
    tracemalloc.start()
    build_linkage(distances)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < distances.nbytes / 2


def test_equal_clients_up_to_the_angles_accuracy_propose_nothing():
    """1e-4 degrees between copies is rounding, not a gap of infinite ratio over those at 0."""
    points = np.repeat([0.0, 3.0, 6.0, 50.0, 53.0, 56.0], 4)
    points[::4] += 1e-4  # of four copies one is that far off, and the others not at all
    assert suggest(build_linkage(line(*points))) == 6


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), clients=st.integers(2, 12), method=st.sampled_from(METHODS))
def test_the_chain_ends_where_many_distances_are_equal(seed, clients, method):
    distances = np.random.default_rng(seed).integers(1, 4, clients * (clients - 1) // 2).astype(np.float32)
    found = build_linkage(distances.copy(), method)
    assert scipy.cluster.hierarchy.is_valid_linkage(found)
    if method == "single":  # whose heights do not depend on which of several equal pairs merges first
        assert np.array_equal(found[:, 2], build_linkage(distances.astype(float), method)[:, 2])
