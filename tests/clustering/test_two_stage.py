"""More clients than can be linked pair by pair: representatives, strangers, and the tree of everyone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.clustering import two_stage
from rayfl.clustering.cluster import cluster_signatures, refuse
from rayfl.clustering.config import Clustering
from rayfl.clustering.linkage import cut_at_threshold
from rayfl.clustering.proximity import pack, take
from rayfl.clustering.quality import adjusted_rand_index
from rayfl.errors import ConfigError
from rayfl.signatures.label_histogram import LabelHistogram
from rayfl.signatures.spectrum import Spectrum


def planted(sizes, noise=0.05, features=40, seed=0):
    """Signatures of ``sizes[k]`` clients near subspace k, in mixed order, and the truth."""
    rng = np.random.default_rng(seed)
    centres = np.linalg.qr(rng.normal(size=(len(sizes), features, 3)))[0]
    truth = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    scale = noise * rng.uniform(0.3, 1, (len(truth), 1, 1))
    moved = centres[truth] + scale * rng.normal(size=(len(truth), features, 3))
    return list(np.linalg.qr(moved)[0].astype(np.float32)), truth


def on_a_line(*points):
    return [np.array([1.0, point]) for point in points]


def tree(signatures, sampled, proximity="euclidean", block=4, **more):
    blocks = [pack(proximity, signatures[i : i + block]) for i in range(0, len(signatures), block)]
    sampled = np.array(sampled)
    representatives = take(blocks, sampled)
    answers = [two_stage.nearest(proximity, each, representatives) for each in blocks]
    return two_stage.link(proximity, "average", blocks, sampled, answers, **more)


def test_a_tree_by_hand():
    # 0 and 10 and 12 are sampled; their nearest are 10, 2 and 2 away, so the radius is
    # q75 + 1.5 (q75 - q25) = 6 + 1.5 * 4; 1 follows 0, 12.5 follows 12, 40 and 41 are strangers
    found = tree(on_a_line(0, 1, 10, 12, 12.5, 40, 41), [0, 2, 3])
    assert found.radius == pytest.approx(12)
    assert found.representatives == 4
    assert np.allclose(found.linkage[:4, 2], [0.5, 1, 1, 2])  # followers, then 10 and 12
    # then {0, 1} and {10, 12, 12.5}, and {40, 41} to both: representatives count with their followers
    assert found.linkage[4, 2] == pytest.approx((10 + 2 * 12) / 3)
    assert found.linkage[5, 2] == pytest.approx((2 * 40 + 30 + 2 * 28) / 5)
    assert found.linkage[:, 3].tolist() == [2, 2, 2, 3, 5, 7]
    assert cut_at_threshold(found.linkage, 11).tolist() == [0, 0, 1, 1, 1, 2, 2]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), clients=st.integers(2, 30))
def test_with_everyone_sampled_it_is_the_exact_way(seed, clients):
    points = np.random.default_rng(seed).random((clients, 3)) + 0.1
    signature = {"signature": "label_histogram", "n_clusters": max(1, clients // 4)}
    exact = cluster_signatures(Clustering.model_validate(signature), list(points))
    found = tree(list(points), range(clients))
    assert found.representatives == clients
    assert np.allclose(found.linkage[:, 2], exact.linkage[:, 2], rtol=1e-4)
    for beta in (0.2, 0.5):
        assert np.array_equal(
            cut_at_threshold(found.linkage, beta), cut_at_threshold(exact.linkage, beta)
        ) or np.any(np.abs(exact.linkage[:, 2] - beta) < 1e-4)


@pytest.mark.parametrize("how", [{}, {"n_clusters": 5}, {"threshold": 30.0}])
@pytest.mark.parametrize("proximity", ["principal_angle", "vector_angle_min"])
def test_planted_clusters_are_recovered_and_the_agreement_is_reported(how, proximity):
    signatures, truth = planted([150, 120, 90, 60, 30])
    if proximity == "vector_angle_min" and "threshold" in how:
        how = {"threshold": 45.0}
    exact = cluster_signatures(Clustering(proximity=proximity, **how), signatures, groups=truth)
    found = cluster_signatures(
        Clustering(proximity=proximity, exact_up_to=100, **how), signatures, groups=truth
    )
    assert exact.representatives is None
    assert exact.agreement is None
    assert 50 <= found.representatives <= 100
    assert found.ari == found.agreement == 1
    assert np.array_equal(found.labels, exact.labels)
    assert found.suggested == exact.suggested
    assert found.n_clusters == 5
    assert len(found.linkage) == 449
    assert found.curve.counts[0] == 450
    assert found.distances is None


def test_histograms_too():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, 300)
    labels = [rng.choice([2 * g, 2 * g + 1], 40) for g in truth]
    signatures = [LabelHistogram().compute(np.zeros((40, 1)), y) for y in labels]
    clustering = Clustering(signature=LabelHistogram(), exact_up_to=60, n_clusters=4)
    assert cluster_signatures(clustering, signatures, groups=truth).ari == 1


def test_clusters_that_the_sample_missed_are_found():
    signatures, truth = planted([500, 500, 3, 2], seed=1)
    missed = set(truth) - set(truth[two_stage.sample(1005, 80, seed=0)])
    assert missed  # or this test shows nothing
    found = cluster_signatures(Clustering(exact_up_to=80, threshold=30.0), signatures, groups=truth)
    assert found.ari == 1
    assert found.n_clusters == 4


def test_clients_alone_are_left_alone():
    signatures, truth = planted([300, 300, *[1] * 12])
    found = cluster_signatures(Clustering(exact_up_to=100, threshold=30.0), signatures, groups=truth)
    assert np.array_equal(found.labels[:, None] == found.labels, truth[:, None] == truth)


def test_too_many_strangers_widen_the_radius():
    signatures, _ = planted([1] * 200)
    found = cluster_signatures(Clustering(exact_up_to=40, threshold=0.5), signatures)
    assert found.radius > 10  # the nearest of 200 random subspaces are farther than that
    assert found.representatives <= 40
    assert found.n_clusters == 200  # all beyond the threshold, so everyone is alone nevertheless


def test_the_threshold_bounds_the_radius():
    signatures, truth = planted([200, 200])
    free = cluster_signatures(Clustering(exact_up_to=300, n_clusters=2), signatures, groups=truth)
    bound = cluster_signatures(Clustering(exact_up_to=300, threshold=free.radius * 0.9), signatures)
    assert bound.radius == pytest.approx(free.radius * 0.9)


def test_a_disagreement_is_reported():
    """Without structure a few representatives cannot tell what average linkage makes of everyone."""
    rng = np.random.default_rng(0)
    signatures = list(np.linalg.qr(rng.normal(size=(600, 12, 3)))[0].astype(np.float32))
    found = cluster_signatures(Clustering(exact_up_to=60, n_clusters=8), signatures)
    exact = cluster_signatures(Clustering(n_clusters=8), signatures)
    assert found.agreement < 0.5
    assert found.agreement == pytest.approx(adjusted_rand_index(found.labels, exact.labels), abs=0.1)


def test_the_same_seed_is_the_same_result_and_another_samples_others():
    signatures, _ = planted([150, 120, 90])
    clustering = Clustering(exact_up_to=60)
    first, second, other = (cluster_signatures(clustering, signatures, seed=s) for s in (1, 1, 2))
    assert np.array_equal(first.linkage, second.linkage)
    assert first.radius == second.radius
    assert not np.array_equal(first.linkage, other.linkage)
    assert np.array_equal(first.labels, other.labels)
    assert not np.array_equal(two_stage.sample(360, 60, 1), two_stage.sample(360, 60, 2))


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_the_blocks_do_not_matter(block):
    signatures, _ = planted([70, 50, 2])
    sampled = two_stage.sample(122, 40, seed=3)
    expected = tree(signatures, sampled, "principal_angle", 10_000)
    found = tree(signatures, sampled, "principal_angle", block)
    assert found.representatives == expected.representatives
    assert np.allclose(found.linkage[:, 2], expected.linkage[:, 2], atol=0.01)
    assert np.array_equal(cut_at_threshold(found.linkage, 30), cut_at_threshold(expected.linkage, 30))


def test_strangers_of_several_blocks_follow_leaders_of_earlier_ones(monkeypatch):
    monkeypatch.setattr(two_stage, "BLOCK", 2)
    points = [0, 0.1, 0.2, 0.3, 50, 70, 50.05, 70.05, 49.95, 90]
    found = tree(on_a_line(*points), range(4))
    assert found.representatives == 4 + 3
    assert cut_at_threshold(found.linkage, 1).tolist() == [0, 0, 0, 0, 1, 2, 1, 2, 1, 3]


def test_the_radius_widens_no_more_than_it_must():
    # it begins at 0.1; ten strangers, 1 apart, need 2 to have no more leaders than were sampled
    found = tree(on_a_line(0, 0.1, 0.2, 0.3, *range(100, 110)), range(4))
    assert 2 <= found.radius < 3
    assert found.representatives == 4 + 4


def test_the_sample_leaves_room_for_those_that_it_missed():
    assert len(two_stage.sample(1000, 100, 0)) == 50
    assert len(two_stage.sample(10**5, 30_000, 0)) == two_stage.REPRESENTATIVES
    assert two_stage.sample(5, 100, 0).tolist() == [0, 1, 2, 3, 4]


def test_a_sampled_client_follows_itself_even_if_another_is_as_near():
    assert tree(on_a_line(0, 0, 0, 5, 5), [0, 1, 3]).representatives == 3


def test_an_exchange_of_everyone_with_everyone_is_refused_beyond_the_exact_way():
    clustering = Clustering(signature=Spectrum(), exact_up_to=50)
    refuse(clustering, 50)
    with pytest.raises(ConfigError, match=r"exact_up_to: 51 clients.*spectrum.*at least 51.*subspace"):
        refuse(clustering, 51)
    with pytest.raises(ConfigError, match="51 clients"):
        cluster_signatures(clustering, [np.eye(3)] * 51)
    refuse(Clustering(grouping="planted", exact_up_to=2), 10**9)  # needs no distances


@pytest.mark.slow
def test_twenty_thousand_clients_agree_with_the_exact_way():
    signatures, truth = planted(range(600, 1400, 40), features=100)
    exact = cluster_signatures(Clustering(), signatures, groups=truth)
    found = cluster_signatures(Clustering(exact_up_to=1000), signatures, groups=truth)
    assert len(truth) > 19_000
    assert exact.ari == found.ari == found.agreement == 1
    assert np.array_equal(exact.labels, found.labels)
