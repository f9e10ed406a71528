import numpy as np
import pytest
import threadpoolctl

from rayfl.errors import DataError
from rayfl.signatures.centroids import Centroids
from rayfl.signatures.features.client_pca import ClientPCA

NONE = np.zeros(0, np.int64)


def ordered(points):
    return points[np.lexsort(points.T[::-1])]


def test_two_heaps_have_two_means():
    x = np.array([[0.0, 0], [0, 2], [10, 1], [10, 3], [10, 5]])
    centroids = Centroids(k=2).compute(x, NONE, key=7)
    assert centroids.dtype == np.float32
    assert np.allclose(ordered(centroids), [[0, 1], [10, 3]])
    assert Centroids(k=2).floats(centroids) == 4


def test_there_are_no_more_centroids_than_distinct_samples():
    x = np.array([[3.0, 1], [2, 2], [3, 1], [3, 1]])
    assert np.allclose(ordered(Centroids(k=5).compute(x, NONE)), [[2, 2], [3, 1]])
    assert Centroids(k=2).compute(x, NONE).shape == (2, 2)
    assert Centroids(k=1).compute(x, NONE).tolist() == [[2.75, 1.25]]


def test_k_is_the_same_whatever_the_labels():
    """FLT's authors set k to the true number of the client's classes."""
    x = np.random.default_rng(0).normal(size=(40, 6))
    one, many = (Centroids().compute(x, y, key=3) for y in (np.zeros(40, int), np.arange(40)))
    assert one.shape == (5, 6)
    assert np.array_equal(one, many)


def test_the_key_decides_and_the_number_of_threads_does_not():
    x = np.random.default_rng(1).normal(size=(3000, 20))
    found = []
    for threads in (1, 2):
        with threadpoolctl.threadpool_limits(threads):
            found.append(Centroids().compute(x, NONE, key=2**63 + 5))
    assert np.array_equal(*found)
    assert not np.array_equal(found[0], Centroids().compute(x, NONE, key=6))


def test_more_restarts_are_no_worse():
    x = np.random.default_rng(2).normal(size=(200, 3))

    def inertia(restarts):
        centroids = Centroids(restarts=restarts).compute(x, NONE, key=1)
        return ((x[:, None] - centroids) ** 2).sum(-1).min(1).sum()

    assert inertia(20) <= inertia(1) + 1e-6


def test_data_without_centroids_are_refused():
    with pytest.raises(DataError):
        Centroids().compute(np.empty((0, 3)), NONE)
    with pytest.raises(DataError, match="NaN"):
        Centroids().compute(np.full((2, 3), np.nan), NONE)


def test_every_client_has_its_own_principal_axes():
    x = np.array([[5.0, 1, 0], [5, -1, 0], [5, 0, 3], [5, 0, -3]])  # about (5, 0, 0), most on axis 2
    features = ClientPCA(dim=3).fit(np.empty((0, 3))).apply(x)
    assert np.allclose(features, [[0, 1, 0], [0, -1, 0], [3, 0, 0], [-3, 0, 0]])
    assert np.allclose(ClientPCA(dim=3).fit(np.empty((0, 3))).apply(x + 100), features)  # no common origin
    assert ClientPCA(dim=2).fit(np.empty((0, 3))).apply(x[:1]).tolist() == [[0, 0]]
