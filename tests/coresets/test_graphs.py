"""Graphs, walks, and what they refuse."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from rayfl.coresets import Graph, graphs, walks
from rayfl.errors import DataError


def path(n):
    return sp.diags_array([np.ones(n - 1), np.ones(n - 1)], offsets=[-1, 1]).tocsr()


def test_lazy_walk_of_a_path_by_hand():
    # degrees 1 2 1, d_max 2: the ends stay with 1/2, the middle never stays
    P = graphs.lazy_walk(Graph(path(3))).toarray()
    np.testing.assert_allclose(P, [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])


def test_lazy_walk_counts_self_loops_and_weights():
    A = np.array([[1.0, 2.0], [2.0, 0.0]])  # degrees 3 and 2: (A - D)/3 + I
    np.testing.assert_allclose(
        graphs.lazy_walk(Graph(sp.csr_array(A))).toarray(), [[1 / 3, 2 / 3], [2 / 3, 1 / 3]]
    )


@pytest.mark.parametrize("power", [1, 2, 3, 5, 40])
def test_powers_are_symmetric_and_doubly_stochastic(power):
    graph = graphs.gaussian_mixture(300, 0)
    P = graphs.lazy_walk(graph)
    power_l = graphs.walk_power(P, power)
    dense = power_l if isinstance(power_l, np.ndarray) else power_l.toarray()
    np.testing.assert_allclose(dense, np.linalg.matrix_power(P.toarray(), power), atol=1e-12)
    np.testing.assert_allclose(dense, dense.T, atol=1e-12)
    np.testing.assert_allclose(dense.sum(axis=0), 1.0)
    assert dense.min() >= -1e-15


def test_smooth_vectors_have_the_inner_products_of_the_power():
    graph = graphs.gaussian_mixture(400, 1)
    P = graphs.lazy_walk(graph).toarray()
    X = walks.walk_vectors(graph, 200, 5, fill_limit=1000)
    assert isinstance(X, np.ndarray)
    assert X.shape[1] < 200
    exact = np.linalg.matrix_power(P, 400)
    assert np.abs(X @ X.T - exact).max() < 0.05**2  # what was left out has lambda^l below 0.05
    norms = np.sqrt(np.diag(exact))
    np.testing.assert_allclose(walks.column_norms(X), norms, rtol=0.02)


@pytest.mark.parametrize("dense", [False, True])
def test_inner_products(dense):
    graph = graphs.gaussian_mixture(300, 1)
    P3 = np.linalg.matrix_power(graphs.lazy_walk(graph).toarray(), 3)
    X = P3 if dense else sp.csr_array(P3)
    np.testing.assert_allclose(walks.inner_products(X, 7), (P3 @ P3)[7], atol=1e-14)
    np.testing.assert_allclose(walks.column_norms(X), np.linalg.norm(P3, axis=0))


def test_inner_products_of_a_thin_column_and_of_a_full_one():
    star = np.zeros((200, 200))
    star[0, 1:] = star[1:, 0] = 1.0
    P = graphs.lazy_walk(Graph(sp.csr_array(star)))
    for vertex in (0, 5):  # 200 entries and 2
        np.testing.assert_allclose(walks.inner_products(P, vertex), (P @ P).toarray()[vertex], atol=1e-15)


def test_covering_power_is_where_the_trace_falls_to_two_a_reference():
    graph = graphs.gaussian_mixture(600, 2)
    P = graphs.lazy_walk(graph)
    eigenvalues = np.linalg.eigvalsh(P.toarray())
    for references in (5, 20, 80):
        traces = {power: (eigenvalues ** (2 * power)).sum() for power in walks.POWERS}
        expected = min(power for power, trace in traces.items() if trace <= 2 * references)
        found = walks.covering_power(P, references)
        assert abs(walks.POWERS.index(found) - walks.POWERS.index(expected)) <= 1  # the trace is an estimate


def test_the_bound_on_the_number_of_eigenvalues():
    P = graphs.lazy_walk(graphs.gaussian_mixture(600, 2))
    eigenvalues = np.linalg.eigvalsh(P.toarray())
    for power in (8, 50, 300):
        count = (np.abs(eigenvalues) ** power > walks.NEGLIGIBLE).sum()
        assert count <= 1.2 * walks.eigenvalues_at_most(P, power) <= 12 * count


def test_auto_takes_fewer_steps_where_memory_ends():
    graph = graphs.gaussian_mixture(600, 2)
    wide = walks.walk_vectors(graph, "auto", 5)
    tight = walks.walk_vectors(graph, "auto", 5, fill_limit=25_000, smooth=False)
    assert 10_000 < tight.nnz < 30_000 < np.count_nonzero(wide)


def test_fill_is_about_the_number_of_entries():
    P = graphs.lazy_walk(graphs.gaussian_mixture(2000, 2))
    assert walks.fill(P, 3) == pytest.approx(graphs.walk_power(P, 3).nnz, rel=0.2)


def test_knn_graph_of_points_on_a_line():
    A = graphs.knn_graph(np.array([[0.0], [1.0], [2.5], [4.5]]), 1).adjacency.toarray()
    np.testing.assert_array_equal(A, path(4).toarray())  # 0-1, 1's nearest is 0, 2's is 1, 3's is 2


def test_knn_graph_of_equal_points_has_no_self_loops():
    graph = graphs.knn_graph(np.zeros((30, 2)), 5, components=True)
    assert graph.adjacency.diagonal().sum() == 0
    assert set(graph.adjacency.data) == {1.0}


def test_planted_graphs():
    mixture = graphs.gaussian_mixture(2000, 3)
    np.testing.assert_allclose(np.bincount(mixture.groups) / len(mixture), [0.2, 0.3, 0.5], atol=0.01)
    means = [mixture.points[mixture.groups == g].mean(axis=0) for g in range(3)]
    np.testing.assert_allclose(means, [[1, -3], [-3, 2], [3, 0]], atol=0.2)
    sizes = [100, 500, 400]
    blocks = graphs.block_model(sizes, 0.1, 0.01, 3)
    member = np.eye(3)[blocks.groups]
    edges = member.T @ (blocks.adjacency @ member)
    expected = np.outer(sizes, sizes) * (0.09 * np.eye(3) + 0.01)
    np.testing.assert_allclose(edges, expected, rtol=0.15)
    assert (blocks.adjacency.diagonal() == 0).all()
    tree = graphs.preferential_tree(500, 3)
    assert tree.adjacency.nnz == 2 * 499  # connected (checked) with n - 1 edges: a tree
    assert tree.adjacency.sum(axis=0).max() > 15
    thin = graphs.random_graph(1000, 6.0, 3)
    assert thin.adjacency.nnz / len(thin) == pytest.approx(6.0, rel=0.1)


@pytest.mark.parametrize("make", [graphs.gaussian_mixture, graphs.preferential_tree])
def test_graphs_depend_on_the_seed_alone(make):
    a, b, c = make(300, 1).adjacency, make(300, 1).adjacency, make(300, 2).adjacency
    assert (a != b).nnz == 0
    assert a.shape != c.shape or (a != c).nnz > 0


def test_triangle_numbers_every_pair_once():
    i, j = graphs._triangle(np.arange(10))
    assert [*zip(i, j, strict=True)] == [(a, b) for a in range(5) for b in range(a)]


def test_ego_graph_from_a_file(tmp_path):
    file = tmp_path / "edges.txt.gz"
    with gzip.open(file, "wt") as out:
        out.write("10 20\n20 10\n20 30\n7 8\n")
    np.testing.assert_array_equal(graphs.ego_graph(file).adjacency.toarray(), path(3).toarray())


def test_facebook(request):
    from tests.conftest import _source

    source = _source()
    if source is None or not (source / "facebook").is_dir():
        pytest.skip("no real data: no facebook folder")
    graph = graphs.ego_graph(source / "facebook" / "facebook_combined.txt.gz")
    assert (len(graph), graph.adjacency.nnz // 2) == (4039, 88234)


def bad(matrix, **settings):
    return lambda: Graph(sp.csr_array(np.array(matrix, float)), **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bad(np.zeros((3, 3))), "3 vertices and no edges"),
        (bad(np.zeros((0, 0))), "0 vertices and no edges"),
        (bad(np.eye(3)), "3 vertices and no edges"),
        (bad(np.ones((2, 3))), "square"),
        (bad([[0, -1], [-1, 0]]), "negative or non-finite"),
        (bad([[0, np.nan], [np.nan, 0]]), "negative or non-finite"),
        (bad([[0, 1], [0, 0]]), "not symmetric"),
        (bad(np.kron(np.eye(2), [[0, 1], [1, 0]])), "2 components, the largest with 2 of 4"),
        (lambda: graphs.knn_graph(np.zeros((3, 2)), 3), "n > neighbours"),
        (lambda: graphs.knn_graph(np.full((9, 2), np.nan), 3), "not finite"),
        (
            lambda: graphs.ego_graph(Path("/no/such/file")),
            "two vertex numbers per line",
        ),
        (lambda: walks.walk_vectors(Graph(path(3)), 0, 1), "power: got 0"),
        (lambda: graphs.random_graph(1, 2.0, 0), "random graph: n = 1, degree 2"),
        (lambda: graphs.random_graph(10, 12.0, 0), "random graph: n = 10, degree 12"),
        (lambda: graphs.preferential_tree(1, 0), "preferential tree: 1 vertices"),
    ],
)
def test_refused(make, message):
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("torn", [slice(0, 20), slice(11, 13)])
def test_a_torn_file_of_edges_is_refused(tmp_path, torn):
    packed = gzip.compress(b"0 1\n1 2\n" * 50)
    broken = packed[torn] if torn.start == 0 else packed[: torn.start] + b"\xff\xff" + packed[torn.stop :]
    (tmp_path / "edges.gz").write_bytes(broken)
    with pytest.raises(DataError, match="two vertex numbers per line") as caught:
        graphs.ego_graph(tmp_path / "edges.gz")
    assert "\n" not in str(caught.value)


def test_components_are_accepted_when_said():
    graph = Graph(sp.csr_array(np.kron(np.eye(2), [[0.0, 1.0], [1.0, 0.0]])), components=True)
    assert connected_components(graph.adjacency)[0] == 2
    kept, ids = graphs.largest_component(path(4) * sp.csr_array(1.0 - np.eye(4, k=2) - np.eye(4, k=-2)))
    assert len(ids) == kept.shape[0] == 4
