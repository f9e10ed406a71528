"""The published angles between classes, on the real images (thesis 3.4 and chapter 5)."""

import numpy as np
import pytest
from scipy.spatial.distance import squareform

from rayfl.clustering.cluster import cluster_signatures
from rayfl.clustering.config import Clustering
from rayfl.clustering.proximity import condensed_distances
from rayfl.clustering.quality import adjusted_rand_index
from rayfl.signatures.subspace import Subspace

TROUSER, DRESS, BAG = 1, 3, 8


def class_signatures(dataset, p):
    x, y = dataset
    return [Subspace(p=p).compute(x[y == c] / np.float32(255), y[y == c]) for c in range(10)]


@pytest.mark.parametrize(
    ("proximity", "dress", "bag"),
    [("vector_angle_min", 22.45, 51.70), ("principal_angle", 17.83, 39.43)],
)
def test_fashion_mnist_angles(fashion, proximity, dress, bag):
    angles = squareform(condensed_distances(proximity, class_signatures(fashion, 3)))
    assert angles[TROUSER, DRESS] == pytest.approx(dress, abs=0.01)
    assert angles[TROUSER, BAG] == pytest.approx(bag, abs=0.01)


def test_fashion_mnist_classes_form_clothes_shoes_and_bags(fashion):
    clusters = cluster_signatures(Clustering(n_clusters=3), class_signatures(fashion, 3))
    assert clusters.labels.tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 2, 1]


@pytest.mark.slow
def test_cifar10_classes_form_vehicles_and_animals(cifar10):
    vehicles_animals = [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    signatures = class_signatures(cifar10, 5)
    for p in (2, 3, 5):
        leading = [signature[:, :p] for signature in signatures]
        for linkage in ("average", "complete"):
            clustering = Clustering(proximity="vector_angle_min", linkage=linkage, n_clusters=2)
            assert cluster_signatures(clustering, leading).labels.tolist() == vehicles_animals
        if p <= 3:
            clustering = Clustering(proximity="principal_angle", n_clusters=2)
            assert cluster_signatures(clustering, leading).labels.tolist() == vehicles_animals


@pytest.mark.parametrize("seed", range(3))
def test_clients_with_different_labels_are_told_apart(fashion, seed):
    x, y = fashion
    rng = np.random.default_rng(seed)
    truth = np.arange(24) % 4
    signatures = []
    for group in truth:
        own = rng.choice(np.flatnonzero(np.isin(y, (2 * group, 2 * group + 1))), 200, replace=False)
        signatures.append(Subspace(p=3).compute(x[own] / np.float32(255), y[own]))
    clusters = cluster_signatures(Clustering(), signatures, groups=truth)
    assert clusters.suggested
    assert clusters.n_clusters == 4
    assert clusters.ari == 1


def test_clients_of_one_distribution_are_one_cluster(fashion):
    x, y = fashion
    parts = np.random.default_rng(0).permutation(len(x))[:6000].reshape(30, 200)
    signatures = [Subspace(p=3).compute(x[part] / np.float32(255), y[part]) for part in parts]
    assert cluster_signatures(Clustering(), signatures).n_clusters == 1


@pytest.mark.slow
def test_representatives_agree_with_the_exact_way_on_real_images(fashion):
    """Clients of 60 images, whose clusters overlap: the exact way itself is far from the planted groups."""
    x, y = fashion
    rng = np.random.default_rng(0)
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (0, 9), (1, 8)]
    there = [np.flatnonzero(np.isin(y, pair)) for pair in pairs]
    signatures = []
    for group in rng.integers(0, len(pairs), 3000):
        own = rng.choice(there[group], 60, replace=False)
        signatures.append(Subspace(p=3).compute(x[own] / np.float32(255), y[own]))
    for how in ({"n_clusters": 7}, {"threshold": 6.0}):
        exact = cluster_signatures(Clustering(**how), signatures)
        found = cluster_signatures(Clustering(exact_up_to=400, **how), signatures)
        agreement = adjusted_rand_index(found.labels, exact.labels)
        assert agreement > 0.9
        assert found.agreement == pytest.approx(agreement, abs=0.05)
