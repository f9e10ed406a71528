import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist, pdist

from rayfl.clustering.linkage import build_linkage, cut_at_threshold
from rayfl.clustering.newcomers import cluster_newcomers, extend, newcomer_rows
from rayfl.clustering.proximity import condensed_distances


def points(*values):
    return np.array(values, float)[:, None]


def rows(old, new):
    return np.hstack([cdist(new, old), cdist(new, new)])


@settings(deadline=None)
@given(old=st.integers(1, 10), new=st.integers(1, 6), seed=st.integers(0, 999))
def test_extending_equals_computing_anew(old, new, seed):
    everyone = np.random.default_rng(seed).normal(size=(old + new, 3))
    extended = extend(pdist(everyone[:old]), rows(everyone[:old], everyone[old:]))
    assert np.allclose(extended, pdist(everyone))


@pytest.mark.parametrize("newcomers", [1, 3])
@pytest.mark.parametrize("proximity", ["principal_angle", "vector_angle_sum", "vector_angle_min"])
def test_rows_of_signatures_extend_to_the_full_proximity_matrix(proximity, newcomers):
    rng = np.random.default_rng(0)
    signatures = [np.linalg.qr(rng.normal(size=(12, 3)))[0].astype(np.float32) for _ in range(9)]
    old, new = signatures[:-newcomers], signatures[-newcomers:]
    extended = extend(condensed_distances(proximity, old), newcomer_rows(proximity, old, new))
    assert np.allclose(extended, condensed_distances(proximity, signatures), atol=1e-6)


@pytest.mark.parametrize("measure", ["cosine", "euclidean", "principal_angle"])
def test_of_newcomers_that_all_failed_there_are_no_rows(measure):
    """They trained for their signatures, say; such signatures are vectors, others are matrices."""
    rng = np.random.default_rng(0)
    old = list(np.linalg.qr(rng.normal(size=(4, 12, 3)))[0])
    if measure != "principal_angle":
        old = [matrix[:, 0] for matrix in old]
    assert newcomer_rows(measure, old, []).shape == (0, 4)


def place(old, old_labels, new, threshold, **more):
    extended = extend(pdist(old), rows(old, new))
    return cluster_newcomers(extended, np.array(old_labels), threshold, **more).tolist()


def test_a_newcomer_joins_its_like_and_a_stranger_founds_a_cluster():
    old = points(0, 1, 10, 11)
    assert place(old, [0, 0, 1, 1], points(10.5), 3.0) == [0, 0, 1, 1, 1]
    assert place(old, [0, 0, 1, 1], points(50), 3.0) == [0, 0, 1, 1, 2]
    assert place(old, [0, 0, 1, 1], points(50, 0.5, 51, 90), 3.0) == [0, 0, 1, 1, 2, 0, 2, 3]


def test_old_clients_keep_their_ids_whatever_they_are():
    """A published implementation numbers all clusters anew when a client joins."""
    old = points(10, 11, 0, 1)
    assert place(old, [7, 7, 3, 3], points(-1, 30), 3.0) == [7, 7, 3, 3, 3, 8]
    assert place(old, [7, 7, 3, 3], points(30), 3.0, next_id=12) == [7, 7, 3, 3, 12]


def test_a_bridge_does_not_merge_old_clusters():
    old = points(0, 1, 5, 6)
    tree = build_linkage(pdist(points(0, 1, 5, 6, 2.8)), "single")
    assert cut_at_threshold(tree, 2.3).max() == 0  # the new tree joins all five
    assert place(old, [0, 0, 1, 1], points(2.8), 2.3, linkage="single") == [0, 0, 1, 1, 0]
    assert place(old, [0, 0, 1, 1], points(3.2), 2.3, linkage="single") == [0, 0, 1, 1, 1]


@settings(deadline=None)
@given(seed=st.integers(0, 999), linkage=st.sampled_from(["single", "average", "complete"]))
def test_a_place_does_not_depend_on_who_else_comes(seed, linkage):
    """In one tree of all, newcomers may bridge clusters, or draw one another away from theirs."""
    rng = np.random.default_rng(seed)
    old, new = rng.normal(size=(8, 2)), rng.normal(size=(5, 2))
    labels = cut_at_threshold(build_linkage(pdist(old), linkage), 1.2).tolist()
    found = place(old, labels, new, 1.2, linkage=linkage)
    for newcomer in range(5):
        alone = place(old, labels, new[[newcomer]], 1.2, linkage=linkage)[8]
        assert found[8 + newcomer] == alone or min(found[8 + newcomer], alone) > max(labels)


def test_nobody_new_changes_nothing():
    old = points(0, 1, 10)
    assert place(old, [0, 0, 1], points(), 3.0) == [0, 0, 1]


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="not those of 3 old clients"):
        extend(np.zeros(1), np.zeros((1, 4)))
