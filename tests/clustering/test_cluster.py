import tracemalloc
import types

import numpy as np
import pytest
from pydantic import ValidationError

from rayfl.clustering.cluster import cluster_signatures
from rayfl.clustering.config import Clustering
from rayfl.clustering.grouping import shuffle_members
from rayfl.clustering.linkage import cut_at_threshold
from rayfl.clustering.memory import BYTES_PER_PAIR, check_memory
from rayfl.errors import ConfigError, DataError, RayflError
from rayfl.signatures.label_histogram import LabelHistogram
from rayfl.signatures.spectrum import Spectrum
from rayfl.signatures.subspace import Subspace

ANGLES = ("principal_angle", "vector_angle_sum", "vector_angle_min")


def planted_clients(groups=4, each=6, samples=60, features=30, seed=0):
    """Data of clients whose groups lie near different 3-dimensional subspaces, in mixed order."""
    rng = np.random.default_rng(seed)
    subspaces = [np.linalg.qr(rng.normal(size=(features, 3)))[0] for _ in range(groups)]
    truth = rng.permutation(np.repeat(np.arange(groups), each))
    energy = np.array([3.0, 2.0, 1.0])  # unequal, so that vectors have a rank
    data = [
        (rng.normal(size=(samples, 3)) * energy) @ subspaces[group].T
        + 0.05 * rng.normal(size=(samples, features))
        for group in truth
    ]
    return data, truth


def signatures_of(data, signature):
    return [signature.compute(x, np.zeros(len(x), int), key=i) for i, x in enumerate(data)]


# ---- settings --------------------------------------------------------------------------------------------


def test_defaults_are_pacfl():
    clustering = Clustering()
    assert clustering.signature == Subspace(p=3)
    assert clustering.measure == "principal_angle"
    assert clustering.needs_signatures
    assert not Clustering(grouping="planted").needs_signatures


def test_parts_are_chosen_by_name():
    clustering = Clustering.model_validate(
        {"signature": {"name": "spectrum", "q": 7}, "features": "pca", "n_clusters": 3}
    )
    assert clustering.signature == Spectrum(q=7)
    assert clustering.measure == "relevance"
    assert Clustering.model_validate({"signature": "label_histogram"}).measure == "euclidean"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 5.0, "n_clusters": 2}, "both given"),
        ({"proximity": "relevance"}, "cannot compare signatures 'subspace'.*principal_angle"),
        ({"signature": "spectrum", "proximity": "cosine"}, "valid: relevance"),
        ({"proximity": "principle_angle"}, "did you mean 'principal_angle'"),
        ({"grouping": "planted", "n_clusters": 2}, "no meaning"),
        ({"grouping": "random", "threshold": 2.0}, "no meaning"),
        ({"linkage": "median"}, "linkage"),
        ({"threshold": -1.0}, "greater than or equal to 0"),
        ({"n_clusters": 0}, "greater than or equal to 1"),
        ({"signature": "subspaces"}, "signature"),
        ({"every": -1}, "every"),
        ({"signature": "predictions", "features": "pca"}, "do not look at them; use features identity"),
        ({"signature": "label_histogram", "features": "pca"}, "would do nothing"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Clustering.model_validate(settings)


# ---- clustering ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proximity", ANGLES)
@pytest.mark.parametrize("how", [{}, {"n_clusters": 4}])
def test_planted_clusters_are_recovered(proximity, how):
    data, truth = planted_clients()
    clustering = Clustering(proximity=proximity, **how)
    clusters = cluster_signatures(clustering, signatures_of(data, clustering.signature), groups=truth)
    assert clusters.ari == 1
    assert clusters.n_clusters == 4
    assert clusters.suggested == (not how)
    # the threshold that is reported gives the same clusters when it is asked for
    again = Clustering(proximity=proximity, threshold=clusters.threshold)
    repeated = cluster_signatures(again, signatures_of(data, clustering.signature))
    assert np.array_equal(repeated.labels, clusters.labels)
    assert repeated.ari is None
    assert not repeated.suggested


def test_the_given_threshold_is_the_one_that_is_used():
    """A published implementation of PACFL overwrites beta until three clusters are left."""
    data, truth = planted_clients(groups=6)
    clustering = Clustering(threshold=10.0)
    clusters = cluster_signatures(clustering, signatures_of(data, Subspace()), groups=truth)
    assert clusters.threshold == 10.0
    assert clusters.n_clusters == 6
    assert np.array_equal(clusters.labels, cut_at_threshold(clusters.linkage, 10.0))


def test_per_class_signatures_of_different_widths_are_recovered():
    data, truth = planted_clients()
    rng = np.random.default_rng(1)
    signature = Subspace(p=2, per_class=True)
    labels = [rng.integers(0, rng.integers(1, 4), len(x)) for x in data]
    signatures = [signature.compute(x, y) for x, y in zip(data, labels, strict=True)]
    assert len({s.shape for s in signatures}) > 1
    for proximity in ("principal_angle", "vector_angle_min"):
        clustering = Clustering(signature=signature, proximity=proximity, n_clusters=4)
        assert cluster_signatures(clustering, signatures, groups=truth).ari == 1


def test_sums_of_angles_do_not_count_classes():
    """Two clients with five classes, ten degrees apart in each, are nearer than two with one, forty apart."""
    turn = np.radians([10.0] * 5 + [40.0])
    first, second = np.eye(12)[:, ::2], np.zeros((12, 6))
    for k, angle in enumerate(turn):
        second[2 * k, k], second[2 * k + 1, k] = np.cos(angle), np.sin(angle)
    signatures = [first[:, :5], second[:, :5], first[:, 5:], second[:, 5:]]
    clustering = Clustering(
        signature=Subspace(p=1, per_class=True), proximity="vector_angle_sum", threshold=20.0
    )
    found = cluster_signatures(clustering, [s.astype(np.float32) for s in signatures])
    assert found.labels.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("proximity", ANGLES)
def test_huge_and_tiny_thresholds_are_fedavg_and_solo(proximity):
    data, _ = planted_clients()
    signatures = signatures_of(data, Subspace())
    one = cluster_signatures(Clustering(proximity=proximity, threshold=1e6), signatures)
    alone = cluster_signatures(Clustering(proximity=proximity, threshold=0.0), signatures)
    assert np.array_equal(one.labels, np.zeros(24))
    assert np.array_equal(alone.labels, np.arange(24))
    assert one.curve.counts[0] == 24
    assert one.curve.counts[-1] == 1


def test_ids_follow_the_smallest_client_and_the_clients_order_does_not_matter():
    data, _ = planted_clients()
    signatures = signatures_of(data, Subspace())
    labels = cluster_signatures(Clustering(n_clusters=4), signatures).labels
    first = [int(np.flatnonzero(labels == cluster)[0]) for cluster in range(4)]
    assert first == sorted(first)
    order = np.random.default_rng(2).permutation(24)
    shuffled = cluster_signatures(Clustering(n_clusters=4), [signatures[i] for i in order]).labels
    same = labels[order][:, None] == labels[order][None, :]
    assert np.array_equal(same, shuffled[:, None] == shuffled[None, :])


def test_relations_are_clustered_by_relevance():
    data, truth = planted_clients(groups=3)
    spectrum = Spectrum(q=3)
    signatures = signatures_of(data, spectrum)
    relations = [spectrum.relate(x, own, signatures) for x, own in zip(data, signatures, strict=True)]
    clustering = Clustering(signature=spectrum, n_clusters=3)
    assert cluster_signatures(clustering, signatures, relations, truth).ari == 1
    with pytest.raises(DataError, match="relations of all 18 clients, not of 0"):
        cluster_signatures(clustering, signatures)


def test_label_histograms_are_clustered():
    x = np.zeros((20, 2))
    labels = [np.repeat(classes, 10) for classes in ([0, 1], [5, 9], [0, 1], [9, 5], [2, 3])]
    signatures = [LabelHistogram().compute(x, y) for y in labels]
    clusters = cluster_signatures(Clustering(signature=LabelHistogram(), threshold=0.1), signatures)
    assert clusters.labels.tolist() == [0, 1, 0, 1, 2]


def test_groupings_without_signatures():
    truth = np.array([2, 2, 0, 1, 0, 1])
    planted = cluster_signatures(Clustering(grouping="planted"), [], groups=truth)
    assert planted.labels.tolist() == [0, 0, 1, 2, 1, 2]
    assert planted.ari == 1
    assert planted.distances is None
    one = cluster_signatures(Clustering(grouping="single"), [], clients=3)
    assert (one.labels.tolist(), one.n_clusters) == ([0, 0, 0], 1)
    assert cluster_signatures(Clustering(grouping="singletons"), [], clients=3).labels.tolist() == [0, 1, 2]
    even = cluster_signatures(Clustering(grouping="random", n_clusters=3), [], seed=4, clients=9)
    assert np.bincount(even.labels).tolist() == [3, 3, 3]
    shuffled = cluster_signatures(Clustering(grouping="random"), [], groups=truth, seed=4)
    assert np.array_equal(shuffled.labels, shuffle_members(truth, 4))


def test_one_client_is_one_cluster():
    signature = Subspace().compute(np.eye(3), np.zeros(3, int))
    for how in ({}, {"threshold": 1.0}, {"n_clusters": 1}):
        assert cluster_signatures(Clustering(**how), [signature]).labels.tolist() == [0]


def test_what_cannot_be_met_is_refused_in_one_line():
    signatures = [np.eye(3)[:, :1]] * 2
    with pytest.raises(ConfigError, match=r"clustering.n_clusters: 3 clusters of 2 clients; use at most 2"):
        cluster_signatures(Clustering(n_clusters=3), signatures)
    with pytest.raises(ConfigError, match="needs the true groups"):
        cluster_signatures(Clustering(grouping="planted"), signatures)
    with pytest.raises(ConfigError, match=r"or set clustering\.n_clusters"):
        cluster_signatures(Clustering(grouping="random"), signatures)
    with pytest.raises(DataError, match="2 signatures of 3 clients; expected"):
        cluster_signatures(Clustering(), signatures, clients=3)
    with pytest.raises(DataError, match="no clients"):
        cluster_signatures(Clustering(grouping="single"), [])


def test_too_many_clients_for_the_memory_are_refused_with_the_figures():
    with pytest.raises(RayflError, match=r"100,000 clients need 100 GB, 8\.00 GB are free") as caught:
        check_memory(100_000, 8 * 10**9, BYTES_PER_PAIR)
    fits = int(str(caught.value).split("up to ")[1].split(" ")[0].replace(",", ""))
    check_memory(fits, 8 * 10**9, BYTES_PER_PAIR)
    with pytest.raises(RayflError):
        check_memory(fits + 2, 8 * 10**9, BYTES_PER_PAIR)


def test_memory_is_checked_before_the_distances(monkeypatch):
    data, _ = planted_clients()
    free = types.SimpleNamespace(available=100)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(RayflError, match="24 clients"):
        cluster_signatures(Clustering(), signatures_of(data, Subspace()))


@pytest.mark.parametrize("proximity", ["principal_angle", "relevance"])
def test_the_memory_that_is_asked_for_is_enough(proximity):
    clients = 1500
    rng = np.random.default_rng(0)
    signatures = [rng.normal(size=(9, 2)) for _ in range(clients)]
    relations = [rng.random(clients) for _ in range(clients)]
    if proximity == "relevance":
        clustering, per_pair = Clustering(signature=Spectrum(), n_clusters=2), BYTES_PER_PAIR
    else:
        clustering, per_pair = Clustering(n_clusters=2), BYTES_PER_PAIR
    tracemalloc.start()
    cluster_signatures(clustering, signatures, relations)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pairs = clients * (clients - 1) // 2
    tiles = 60e6 if proximity == "principal_angle" else 0  # the same for any number of clients
    assert peak < per_pair * pairs + tiles
