import itertools
import types

import numpy as np
import pytest
import scipy.cluster.hierarchy
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.spatial.distance import cdist, squareform

from rayfl.clustering.cluster import cluster_signatures, from_distances
from rayfl.clustering.config import Clustering
from rayfl.clustering.graph import (
    _phi,
    auto_gamma,
    graph_clusters,
    graph_linkage,
    threshold_graph,
)
from rayfl.clustering.linkage import cut_into
from rayfl.clustering.newcomers import nearest_cluster
from rayfl.clustering.proximity import condensed_distances, cross_distances, pack, tile
from rayfl.errors import ConfigError, DataError, RayflError
from rayfl.signatures.centroids import Centroids

MIN, MATCHING = "min_distance", "matching"


def graph_of(dense):
    """The graph of a symmetric 0/1 matrix with unit diagonal."""
    return threshold_graph(squareform(1.0 - np.asarray(dense, np.float64)), len(dense), 0.5)


def equal(labels):
    return labels[:, None] == labels[None, :]


def blocks(*sizes):
    """A union of cliques."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return (labels[:, None] == labels[None, :]).astype(float), labels


# ---- the smallest distance between points ----------------------------------------------------------------


def test_the_nearest_points_of_two_clients_count():
    a = np.array([[0.0, 0], [10, 0]])
    b = np.array([[13.0, 4], [50, 50], [0, 30]])  # nearest to (10, 0): 5
    c = np.array([[0.0, 1]])  # 1 from a, 13.3 from b
    assert np.allclose(condensed_distances(MIN, [a, b, c]), [5, 1, np.hypot(13, 3)])


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), clients=st.integers(2, 15), dim=st.integers(1, 9), block=st.integers(1, 6))
def test_any_blocks_give_what_pairs_give(seed, clients, dim, block):
    rng = np.random.default_rng(seed)
    points = [rng.normal(size=(rng.integers(1, 5), dim)) + 30 for _ in range(clients)]
    expected = [cdist(points[i], points[j]).min() for i in range(clients) for j in range(i + 1, clients)]
    assert np.allclose(condensed_distances(MIN, points, block=block), expected, atol=1e-9)
    assert np.allclose(condensed_distances(MIN, points, precise=False), expected, atol=1e-5)
    rows = cross_distances(MIN, points[:2], points)
    assert np.allclose(rows[0, 1:], expected[: clients - 1], atol=1e-9)
    assert rows[0, 0] == pytest.approx(0, abs=1e-6)


def by_permutations(a, b):
    """The authors' ``min_matching_distance``: every order of the larger set's points."""
    few, many = sorted((a, b), key=len)
    orders = itertools.permutations(range(len(many)), len(few))
    return min(np.sqrt(((few - many[list(order)]) ** 2).sum()) for order in orders) / len(few)


def test_matched_points_by_hand():
    a = np.array([[0.0, 0], [10, 0]])
    b = np.array([[13.0, 4], [0, 12]])  # 10,0 -> 13,4: 5; 0,0 -> 0,12: 12
    c = np.array([[0.0, 1]])  # of the larger set the nearer point counts, the other does not
    assert np.allclose(condensed_distances(MATCHING, [a, b, c]), [13 / 2, 1, 11])
    # the nearest pair (1 apart) is not part of the best matching: 2 + 2 = 4 against 1 + 9
    line = [np.array([[0.0], [3.0]]), np.array([[2.0], [5.0]])]
    assert np.allclose(condensed_distances(MATCHING, line), [np.sqrt(8) / 2])


@pytest.mark.parametrize("limit", [8, 2], ids=["at once", "by SciPy"])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), clients=st.integers(2, 9), dim=st.integers(1, 4), block=st.integers(1, 6))
def test_matched_points_are_those_of_the_best_permutation(limit, seed, clients, dim, block):
    rng = np.random.default_rng(seed)
    points = [rng.normal(size=(rng.integers(1, 6), dim)) + 30 for _ in range(clients)]
    pairs = itertools.combinations(range(clients), 2)
    expected = [by_permutations(points[i], points[j]) for i, j in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayfl.clustering.proximity.EXACT_MATCHING", limit)
        assert np.allclose(condensed_distances(MATCHING, points, block=block), expected, atol=1e-9)
        assert np.allclose(condensed_distances(MATCHING, points, precise=False), expected, atol=1e-5)
        rows = cross_distances(MATCHING, points[:2], points)
    assert np.allclose(rows[0, 1:], expected[: clients - 1], atol=1e-9)


def test_clients_with_a_point_in_common_are_at_no_distance():
    rng = np.random.default_rng(0)
    common = rng.normal(size=128) + 100
    points = [np.vstack([rng.normal(size=(4, 128)), common]) for _ in range(3)]
    assert condensed_distances(MIN, points).max() < 1e-5


@pytest.mark.parametrize("proximity", [MIN, MATCHING])
def test_many_products_are_put_together_in_order(monkeypatch, proximity):
    rng = np.random.default_rng(1)
    points = [rng.normal(size=(1 + i % 3, 2)) for i in range(40)]
    whole = tile(proximity, pack(proximity, points), precise=True)
    monkeypatch.setattr("rayfl.clustering.proximity.PRODUCT", (7, 11))
    upper = np.triu_indices(40, 1)
    assert np.allclose(tile(proximity, pack(proximity, points), precise=True)[upper], whole[upper])


@pytest.mark.parametrize("proximity", [MIN, MATCHING])
@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([np.ones((2, 3)), np.ones(3)], "client 8: .* needs finite points"),
        ([np.ones((2, 3)), np.empty((0, 3))], "client 8: .* needs finite points"),
        ([np.ones((2, 3)), np.full((1, 3), np.inf)], "client 8: .* needs finite points"),
        ([np.ones((2, 3)), np.ones((2, 4))], "client 8: its points have 4 features, client 7's have 3"),
    ],
)
def test_what_is_no_set_of_points_is_refused(proximity, points, message):
    with pytest.raises(DataError, match=message):
        pack(proximity, points, np.array([7, 8]))


# ---- the graph -------------------------------------------------------------------------------------------


def test_clients_are_related_up_to_gamma_and_to_themselves():
    """The printed Sign(A - gamma) would relate those that are far from each other."""
    distances = np.array([0.5, 2.0, 1.0, 3.0, 0.1, 1.5])  # 01 02 03 12 13 23
    graph = threshold_graph(distances, 4, 1.0)
    assert graph.toarray().tolist() == [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 1]]
    assert graph.has_sorted_indices
    assert threshold_graph(distances, 4, 0.0).toarray().tolist() == np.eye(4).tolist()
    assert threshold_graph(distances, 4, 3.0).toarray().tolist() == np.ones((4, 4)).tolist()
    assert threshold_graph(np.empty(0), 1, 1.0).toarray().tolist() == [[1]]


def test_the_tree_is_ward_s_on_all_rows():
    compared = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        clients = int(rng.integers(2, 14))
        kinds = rng.integers(0, max(2, clients // 2), clients)  # so that rows repeat
        between = np.triu(rng.random((clients, clients)) < rng.random())
        dense = ((between | between.T)[np.ix_(kinds, kinds)] | (kinds[:, None] == kinds)).astype(float)
        tree, expected = graph_linkage(graph_of(dense)), scipy.cluster.hierarchy.linkage(dense, "ward")
        assert scipy.cluster.hierarchy.is_valid_linkage(tree)
        distinct = len(np.unique(dense, axis=0))
        same = (dense[:, None] == dense).all(-1)
        assert np.array_equal(same, equal(cut_into(tree, distinct)))
        heights = expected[:, 2]
        if (np.isclose(heights[1:], heights[:-1]) & (heights[1:] > 1e-9)).any():
            continue  # of merges at equal heights either may come first, and what follows may differ
        compared += 1
        assert np.allclose(tree[:, 2], heights, atol=1e-5)
    assert compared > 100


def test_heights_of_a_union_of_cliques_by_hand():
    dense, _ = blocks(3, 2)
    # Rows (1 1 1 0 0) three times and (0 0 0 1 1) twice, sqrt(5) apart: Ward sqrt(2 3 2 / 5 * 5)
    assert np.allclose(graph_linkage(graph_of(dense))[:, 2], [0, 0, 0, np.sqrt(12)])


def test_cliques_are_found_in_any_order_and_their_number_is_proposed():
    dense, labels = blocks(9, 4, 7, 5)
    order = np.random.default_rng(0).permutation(25)
    found = graph_clusters(graph_of(dense[np.ix_(order, order)]))
    same = labels[order][:, None] == labels[order]
    assert np.array_equal(found[:, None] == found, same)
    assert graph_clusters(graph_of(dense), 2).max() == 1


def test_nobody_related_is_solo_and_everybody_is_fedavg():
    assert graph_clusters(graph_of(np.eye(6))).tolist() == list(range(6))
    assert graph_clusters(graph_of(np.ones((6, 6)))).tolist() == [0] * 6
    assert graph_clusters(graph_of(np.ones((1, 1)))).tolist() == [0]
    assert graph_clusters(graph_of(np.eye(6)), 3).max() == 2


def test_too_many_distinct_rows_for_the_memory_are_refused(monkeypatch):
    different, (dense, _) = graph_of(np.eye(6)), blocks(400, 400)
    two_rows = graph_of(dense)
    monkeypatch.setattr("rayfl.clustering.graph.free_memory", lambda: 100)
    with pytest.raises(RayflError, match="6 clients"):
        graph_linkage(different)
    assert graph_clusters(two_rows).max() == 1  # two distinct rows: nothing to hold


# ---- the automatic gamma ---------------------------------------------------------------------------------


def test_phi_by_hand():
    a = np.array([1, 1, 1, 0, 0, 0, 0, 0], bool)
    b = np.array([1, 1, 0, 1, 0, 0, 0, 0], bool)
    assert _phi(a, b) == pytest.approx((2 * 4 - 1 * 1) / np.sqrt(3 * 5 * 3 * 5))
    assert _phi(a, a) == pytest.approx(1)
    assert _phi(a, ~a) == pytest.approx(-1)
    assert _phi(a, np.ones(8, bool)) == 0


def planted(clients=60, groups=4, near=0.4, far=3.0, seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.arange(clients) % groups)
    i, j = np.triu_indices(clients, 1)
    scale = np.where(truth[i] == truth[j], near, far)
    return scale * rng.uniform(0.3, 1.0, len(i)), truth


def test_gamma_lies_between_the_groups():
    distances, truth = planted()
    gamma = auto_gamma(distances, 60)
    i, j = np.triu_indices(60, 1)
    within, across = distances[truth[i] == truth[j]], distances[truth[i] != truth[j]]
    assert np.quantile(within, 0.8) < gamma < across.min()
    clusters = from_distances(
        Clustering(signature=Centroids(), grouping="graph", gamma="auto"), distances, truth
    )
    assert clusters.ari == 1
    assert clusters.gamma == gamma
    assert auto_gamma(5 * distances, 60) == pytest.approx(5 * gamma)


def test_gamma_is_chosen_on_a_sample_of_many(monkeypatch):
    distances, truth = planted(200)
    monkeypatch.setattr("rayfl.clustering.graph.SAMPLE", 50)
    gamma = auto_gamma(distances, 200)
    i, j = np.triu_indices(200, 1)
    assert gamma < distances[truth[i] != truth[j]].min()
    ids = np.linspace(0, 199, 50).round().astype(int)
    assert gamma == auto_gamma(squareform(squareform(distances)[np.ix_(ids, ids)]), 50)


def test_without_groups_everybody_is_related():
    assert auto_gamma(np.full(15, 2.0), 6) == 2
    assert auto_gamma(np.empty(0), 1) == 0
    assert auto_gamma(np.zeros(15), 6) == 0  # which relates all of them


# ---- through the clustering ------------------------------------------------------------------------------


def clouds(groups=3, each=8, k=4, dim=6, seed=0):
    """Centroids of clients whose group shares a few places, one place at least for any two clients."""
    rng = np.random.default_rng(seed)
    places = 10 * rng.normal(size=(groups, k, dim))
    truth = rng.permutation(np.repeat(np.arange(groups), each))
    return [places[group] + 0.1 * rng.normal(size=(k, dim)) for group in truth], truth


FLT = {"signature": "centroids", "grouping": "graph"}


@pytest.mark.parametrize("proximity", [MIN, MATCHING])
@pytest.mark.parametrize("gamma", [1.0, "auto"])
@pytest.mark.parametrize("count", [None, 3])
def test_planted_groups_are_recovered(proximity, gamma, count):
    signatures, truth = clouds()
    asked = {**FLT, "proximity": proximity, "gamma": gamma, "n_clusters": count}
    clustering = Clustering.model_validate(asked)
    clusters = cluster_signatures(clustering, signatures, groups=truth)
    assert (clusters.ari, clusters.n_clusters, clusters.suggested) == (1, 3, count is None)
    assert clusters.graph.shape == (24, 24)
    same = truth[:, None] == truth
    assert not clusters.graph.toarray()[~same].any()
    assert clusters.threshold is None
    if gamma == 1.0:
        assert clusters.gamma == 1
        assert np.array_equal(clusters.graph.toarray(), same)


def test_other_groupings_have_no_graph_and_compare_centroids_as_well():
    signatures, truth = clouds()
    clusters = cluster_signatures(Clustering(signature=Centroids(), n_clusters=3), signatures, groups=truth)
    assert (clusters.graph, clusters.gamma, clusters.ari) == (None, None, 1)


def test_clients_may_have_different_numbers_of_centroids():
    signatures, truth = clouds()
    signatures = [s[: 1 + i % 4] if i % 5 == 0 else s for i, s in enumerate(signatures)]
    assert cluster_signatures(Clustering.model_validate(FLT), signatures, groups=truth).ari == 1


def test_a_graph_needs_all_pairs(monkeypatch):
    signatures, _ = clouds()
    clustering = Clustering.model_validate({**FLT, "exact_up_to": 20})
    with pytest.raises(ConfigError, match="a graph needs all pairs of the 24 clients"):
        cluster_signatures(clustering, signatures)
    free = types.SimpleNamespace(available=10)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(RayflError, match="24 clients"):
        cluster_signatures(Clustering.model_validate(FLT), signatures)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({**FLT, "threshold": 1.0}, "set gamma"),
        ({**FLT, "gamma": -1}, "gamma"),
        ({**FLT, "gamma": "automatic"}, "gamma"),
        ({"signature": "subspace", "embedding": "umap"}, "embedding 'umap' is for sets of points"),
        ({"signature": "subspace", "proximity": "min_distance"}, "cannot compare signatures 'subspace'"),
        ({"signature": "centroids", "proximity": "principal_angle"}, "valid: min_distance, matching"),
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValidationError, match=message):
        Clustering.model_validate(wrong)


# ---- newcomers -------------------------------------------------------------------------------------------


def test_newcomers_join_the_cluster_with_the_nearest_mean():
    old = [np.array([[0.0, 0], [2, 0]]), np.array([[1.0, 2]]), np.array([[9.0, 9]]), np.array([[3.0, 3]])]
    labels = np.array([4, 4, 7, -1])  # means (1, 1) and (9, 9); the last is in none
    new = [np.array([[2.0, 2], [4, 2]]), np.array([[8.0, 6], [7, 8]]), np.array([[5.0, 5]])]
    assert nearest_cluster(old, labels, new).tolist() == [4, 7, 4]  # the last is as near to both
    assert nearest_cluster(old, labels, []).tolist() == []
    with pytest.raises(ValueError, match="no cluster"):
        nearest_cluster(old, np.full(4, -1), new)


def test_newcomers_of_planted_groups_find_their_own():
    signatures, truth = clouds()
    found = nearest_cluster(signatures[:18], truth[:18], signatures[18:])
    assert found.tolist() == truth[18:].tolist()


def test_the_number_that_is_given_is_cut_from_the_same_tree():
    signatures, _ = clouds(groups=5, each=5)
    distances = condensed_distances(MIN, signatures)
    graph = threshold_graph(distances, 25, 1.0)
    for count in (1, 3, 5, 25):
        assert np.array_equal(graph_clusters(graph, count), cut_into(graph_linkage(graph), count))


@pytest.mark.parametrize("clients", [1, 2, 7, 50])
@pytest.mark.parametrize("gamma", [-1.0, 0.3, 2.0])
def test_graphs_are_the_dense_relation(clients: int, gamma: float) -> None:
    distances = np.random.default_rng(clients).random(clients * (clients - 1) // 2)
    graph = threshold_graph(distances, clients, gamma)
    graph.check_format()
    dense = squareform(distances, checks=False) if clients > 1 else np.zeros((1, 1))
    np.testing.assert_array_equal(graph.toarray(), (dense <= gamma) | np.eye(clients, dtype=bool))
    assert graph.has_sorted_indices
    assert (graph.indices.dtype, graph.dtype) == (np.int32, np.float32)


def test_a_graph_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes eight bytes for each related pair twice, which are known when gamma is."""
    distances = np.zeros(50 * 49 // 2)
    monkeypatch.setattr("rayfl.clustering.graph.free_memory", lambda: 8 * 2500)
    assert threshold_graph(distances, 50, 1.0).nnz == 2500
    monkeypatch.setattr("rayfl.clustering.graph.free_memory", lambda: 8 * 2500 - 1)
    with pytest.raises(
        RayflError, match=r"graph of 50 clients with gamma=1 has 2,500 entries and needs 20.0 kB"
    ):
        threshold_graph(distances, 50, 1.0)
