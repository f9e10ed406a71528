"""Super-clusters of classes, and the partitions inside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.clustering.cluster import cluster_signatures
from rayfl.clustering.config import Clustering
from rayfl.data import DATASETS, PARTITIONS, Assignment, Partition, Samples, build_federation
from rayfl.data.heterogeneity.base import matrix
from rayfl.data.heterogeneity.super_clusters import class_angles, class_super_clusters, largest_gap
from rayfl.data.partitions._super_clusters import share_clients
from rayfl.errors import ConfigError, DataError
from rayfl.signatures.subspace import Subspace

PLANTED = ((0, 1, 4), (2, 3))
"""Which classes of :func:`planted` are alike."""


def planted(each: int = 60, features: int = 12, noise: float = 0.02) -> Samples:
    """Five classes; the data of 0, 1 and 4 lie near one direction, those of 2 and 3 near another."""
    rng = np.random.default_rng(0)
    directions = np.eye(features)[[0, 0, 1, 1, 0]]
    directions += 0.05 * rng.standard_normal(directions.shape)
    y = np.repeat(np.arange(5), each)
    x = directions[y] * rng.uniform(0.5, 1, (len(y), 1)) + noise * rng.standard_normal((len(y), features))
    order = rng.permutation(len(y))
    x, y = x[order].astype(np.float32), y[order]
    return Samples("planted", x, y, x, y, 5)


def make(name: str, **fields: Any) -> Partition:
    return PARTITIONS[name](**fields)


def refusal(partition: Partition, samples: Samples) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        partition.assign(samples, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- classes --------------------------------------------------------------------------------------------


def test_planted_super_clusters_are_found_in_every_way() -> None:
    samples = planted()
    assert class_super_clusters(samples, p=1).clusters == PLANTED
    for proximity in ("vector_angle_min", "principal_angle", "vector_angle_sum"):
        for linkage in ("average", "complete", "single"):
            found = class_super_clusters(samples, 1, proximity, linkage, n=2)  # type: ignore[arg-type]
            assert found.clusters == PLANTED
    assert class_super_clusters(samples, p=1, threshold=30).clusters == PLANTED
    assert class_super_clusters(samples, p=1, threshold=0).clusters == ((0,), (1,), (2,), (3,), (4,))
    assert class_super_clusters(samples, p=1, threshold=90).clusters == ((0, 1, 2, 3, 4),)
    assert class_super_clusters(samples, p=1, per_class=10).clusters == PLANTED


def test_angles_between_classes_are_those_of_an_svd() -> None:
    samples = planted()
    present, angles = class_angles(samples, p=2, proximity="principal_angle")
    assert present == (0, 1, 2, 3, 4)
    bases = [np.linalg.svd(samples.x_train[samples.y_train == c].T.astype(float))[0][:, :2] for c in range(5)]
    for i in range(5):
        for j in range(5):
            smallest = np.degrees(scipy.linalg.subspace_angles(bases[i], bases[j]).min())
            assert angles[i, j] == pytest.approx(smallest, abs=1e-4)


def test_the_largest_gap_by_hand() -> None:
    # Five classes merged at 1, 2, 8 and 9: two clusters after the merge at 8 (next: 9/8), three after the
    # one at 2 (8/2), four after the one at 1 (2/1).
    tree = np.column_stack([np.zeros(4), np.zeros(4), [1.0, 2.0, 8.0, 9.0], np.zeros(4)])
    assert largest_gap(tree) == 3
    assert largest_gap(tree[:1]) == 2


def test_classes_without_samples_belong_to_none() -> None:
    samples = planted()
    keep = samples.y_train != 1
    fewer = Samples("fewer", samples.x_train[keep], samples.y_train[keep], samples.x_test, samples.y_test, 5)
    found = class_super_clusters(fewer, p=1)
    assert found.clusters == ((0, 4), (2, 3))
    assert found.classes == (0, 2, 3, 4)


def test_super_clusters_that_cannot_be_are_refused() -> None:
    samples = planted()
    with pytest.raises(ConfigError, match="6 super-clusters of 5 classes; use 1 to 5"):
        class_super_clusters(samples, n=6)
    with pytest.raises(ConfigError, match="give one of them"):
        class_super_clusters(samples, n=2, threshold=3.0)
    x = np.where(samples.y_train[:, None] == 2, np.float32(0), samples.x_train)
    with pytest.raises(DataError, match="all samples of class 2 are zero"):
        class_super_clusters(Samples("dark", x, samples.y_train, x, samples.y_train, 5))
    words = np.zeros((300, 4), np.int32)
    texts = Samples("texts", words, samples.y_train, words, samples.y_train, 5, vocabulary=("a",))
    with pytest.raises(DataError, match="compares numbers, texts holds words"):
        class_super_clusters(texts)


# --- partitions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"p": 1}, {"p": 1, "n_super_clusters": 2}, {"p": 1, "threshold": 30}, {"super_clusters": PLANTED}],
)
@pytest.mark.parametrize("name", ["sc_niid", "sc_dirichlet"])
def test_every_client_has_one_super_cluster_and_nothing_is_lost(name: str, fields: dict[str, Any]) -> None:
    samples = planted()
    assignment = make(name, clients=10, **fields).assign(samples, 3)
    assert assignment.groups is not None
    np.testing.assert_array_equal(assignment.groups, [0] * 6 + [1] * 4)  # 180 and 120 samples
    for part, group in zip(assignment.clients, assignment.groups, strict=True):
        assert set(samples.y_train[part].tolist()) <= set(PLANTED[group])
    np.testing.assert_array_equal(np.sort(np.concatenate(assignment.clients)), np.arange(300))


def test_two_shards_of_a_super_cluster() -> None:
    samples = planted()
    assignment = make("sc_niid", clients=10, super_clusters=PLANTED).assign(samples, 0)
    seen = np.array([np.bincount(samples.y_train[part], minlength=5) for part in assignment.clients])
    # 180 samples in 12 shards and 120 in 8: all have 15, and 15 divides the 60 of a class.
    assert set(seen.ravel().tolist()) <= {0, 15, 30}
    np.testing.assert_array_equal(seen.sum(axis=1), 30)


def test_rho_is_a_fraction_of_the_super_clusters_labels() -> None:
    samples = planted(each=80)
    assignment = make("sc_niid", clients=10, rho=0.5, super_clusters=((0, 1, 2, 3), (4,))).assign(samples, 0)
    seen = np.array([np.bincount(samples.y_train[part], minlength=5) for part in assignment.clients])
    np.testing.assert_array_equal((seen[:8] > 0).sum(axis=1), 2)  # half of four labels
    np.testing.assert_array_equal((seen[8:] > 0).sum(axis=1), 1)  # one at least
    np.testing.assert_array_equal(seen.sum(axis=0), 80)


def test_dirichlet_inside_a_super_cluster_is_as_skewed_as_alpha_says() -> None:
    samples = planted(each=400)

    def skew(alpha: float) -> float:
        partition = make("sc_dirichlet", clients=10, alpha=alpha, super_clusters=PLANTED, attempts=1000)
        parts = partition.assign(samples, 0).clients
        shares = [np.bincount(samples.y_train[part], minlength=5) / len(part) for part in parts]
        return float(np.max(shares, axis=1).mean())

    assert skew(1e5) == pytest.approx((6 / 3 + 4 / 2) / 10, abs=0.02)
    assert skew(0.05) > 0.7


@given(clients=st.integers(1, 60), sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=8))
def test_clients_are_shared_in_proportion(clients: int, sizes: list[int]) -> None:
    if clients < len(sizes):
        with pytest.raises(DataError, match="or more"):
            share_clients(clients, sizes)
        return
    counts = np.array(share_clients(clients, sizes))
    assert counts.sum() == clients
    assert counts.min() >= 1
    quotas = clients * np.array(sizes) / sum(sizes)
    if quotas.min() >= 1:
        assert np.abs(counts - quotas).max() < 1 + 1e-9


def test_shared_clients_by_hand() -> None:
    assert share_clients(100, [20_000, 30_000]) == [40, 60]
    assert share_clients(3, [1, 1, 1000]) == [1, 1, 1]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_seeds_decide_the_draws_and_not_the_super_clusters(seed: int) -> None:
    samples = planted(each=20)
    partition = make("sc_niid", clients=5, p=1)
    first, again, *others = (partition.assign(samples, s) for s in (seed, seed, *range(seed + 1, seed + 6)))
    assert equal(first, again)
    assert not all(equal(first, other) for other in others)  # two seeds may draw the same
    for other in others:
        np.testing.assert_array_equal(first.groups, other.groups)  # type: ignore[arg-type]


def equal(one: Assignment, other: Assignment) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one.clients, other.clients, strict=True))


def test_a_federation_tests_clients_on_their_super_cluster() -> None:
    samples = planted()
    partition = make("sc_niid", clients=10, p=1)
    federation = build_federation(samples, partition, validation=0.1, test_samples="auto", seed=0)
    assert federation.groups is not None
    for test, group in zip(federation.test, federation.groups, strict=True):
        assert set(samples.y_test[test].tolist()) <= set(PLANTED[group])


def test_impossible_requests_are_refused_in_one_line() -> None:
    samples = planted(each=6)
    assert "use fewer" in refusal(make("sc_niid", clients=31, super_clusters=PLANTED), samples)
    assert "1 clients for 2 super-clusters; use 2 or more" in refusal(
        make("sc_niid", clients=1, super_clusters=PLANTED), samples
    )
    many = refusal(make("sc_niid", clients=10, shards_per_client=4, super_clusters=PLANTED), samples)
    assert "6 clients with 4 shards need 24 samples, there are 18" in many
    assert "(super-cluster [0, 1, 4])" in many
    beyond = make("sc_niid", clients=4, super_clusters=((0, 1, 4), (2, 3, 7)))
    assert "7 is not a label of this data; labels lie in range(5)" in refusal(beyond, samples)
    forgotten = make("sc_niid", clients=4, super_clusters=((0, 1), (2, 3)))
    assert "label 4 is in none (1 such labels)" in refusal(forgotten, samples)
    six = Samples("six", samples.x_train, samples.y_train, samples.x_test, samples.y_test, 6)
    nobody = make("sc_niid", clients=4, super_clusters=((0, 1, 4), (2, 3, 5)))
    assert "label 5 has no training sample; leave it out" in refusal(nobody, six)
    assert "partition.n_super_clusters: 9 super-clusters of 5 classes" in refusal(
        make("sc_niid", clients=20, n_super_clusters=9), samples
    )
    scarce = make("sc_niid", clients=28, rho=1, super_clusters=PLANTED)
    assert "label 0 has 6 samples for 17 clients" in refusal(scarce, samples)
    dark = Samples("dark", np.zeros_like(samples.x_train), samples.y_train, samples.x_test, samples.y_test, 5)
    assert "state the labels of each in partition.super_clusters" in refusal(make("sc_niid", clients=4), dark)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="super_clusters and threshold are given; one of them says"):
        make("sc_niid", super_clusters=PLANTED, threshold=3)
    with pytest.raises(ConfigError, match="each in one super-cluster"):
        make("sc_dirichlet", super_clusters=((0, 1), (1, 2)))
    with pytest.raises(ConfigError, match="must have a label"):
        make("sc_dirichlet", super_clusters=((0, 1), ()))


# --- real data ------------------------------------------------------------------------------------------

TROUSER, DRESS, BAG = 1, 3, 8


def test_fashion_mnist(real_data: Callable[..., Path]) -> None:
    samples = DATASETS["fashion_mnist"]().load(real_data("fashion_mnist"))
    _, angles = class_angles(samples, p=3)
    assert angles[TROUSER, DRESS] == pytest.approx(22.45, abs=0.01)  # printed: 22.47
    assert angles[TROUSER, BAG] == pytest.approx(51.70, abs=0.01)
    three = class_super_clusters(samples, 3, "principal_angle", n=3, per_class=1000)
    assert three.clusters == ((0, 1, 2, 3, 4, 6), (5, 7, 9), (8,))  # clothes, shoes, bags


def test_cifar10(real_data: Callable[..., Path]) -> None:
    samples = DATASETS["cifar10"]().load(real_data("cifar10"))
    found = class_super_clusters(samples, per_class=500)  # the number is the tree's own
    assert found.clusters == ((0, 1, 8, 9), (2, 3, 4, 5, 6, 7))  # thesis Table 5.7


@pytest.mark.slow
def test_pacfl_finds_one_cluster_for_each_dataset_of_a_mix(real_data: Callable[..., Path]) -> None:
    sources = ("cifar10", "emnist_letters", "fashion_mnist", "usps")
    samples = DATASETS["mix"](sources=sources).load(real_data(*sources))
    assert samples.name.endswith("(MIX-4 with svhn replaced by emnist_letters)")
    partition = make("domains", clients_per_domain=(31, 25, 27, 14), samples=500)
    federation = build_federation(samples, partition, validation=0.1, test_samples="auto", seed=0)
    signatures = [
        Subspace(p=2).compute(matrix(samples.inputs("train", ids)), samples.labels("train", ids))
        for ids in federation.train
    ]
    clusters = cluster_signatures(
        Clustering(proximity="vector_angle_min"), signatures, groups=federation.groups
    )
    assert clusters.suggested  # the number of clusters is the tree's own
    assert clusters.n_clusters == 4
    assert clusters.ari == 1
