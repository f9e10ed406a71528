import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.clustering.numbering import match_ids
from rayfl.clustering.quality import adjusted_rand_index, separation_gap


def test_adjusted_rand_index_ignores_names():
    assert adjusted_rand_index(np.array([3, 3, 1, 1]), np.array([0, 0, 9, 9])) == 1
    # one of four placed wrongly: index 1, expected 1, maximum 2.5 -> 0
    assert adjusted_rand_index(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])) == 0


def test_separation_gap_by_hand():
    similarity = np.array([[1, 0.8, 0.1, 0.3], [0.8, 1, 0.2, 0.1], [0.1, 0.2, 1, 0.5], [0.3, 0.1, 0.5, 1]])
    assert np.isclose(separation_gap(similarity, np.array([0, 0, 1, 1])), 0.5 - 0.3)
    assert np.isclose(separation_gap(similarity, np.array([0, 1, 0, 1])), 0.1 - 0.8)
    assert np.isnan(separation_gap(similarity, np.zeros(4, int)))
    assert np.isnan(separation_gap(similarity, np.arange(4)))


def test_new_clusters_take_the_ids_of_those_they_overlap_most():
    old = np.array([0, 0, 0, 1, 1, 1])
    assert match_ids(np.array([1, 1, 1, 0, 0, 0]), old).tolist() == old.tolist()
    # cluster 0 splits: the larger part keeps the id, the other gets a fresh one
    assert match_ids(np.array([0, 1, 1, 2, 2, 2]), old).tolist() == [2, 0, 0, 1, 1, 1]
    assert match_ids(np.array([0, 1, 1, 2, 2, 2]), old, next_id=7).tolist() == [7, 0, 0, 1, 1, 1]
    # they merge: the id of the larger
    assert match_ids(np.zeros(5, int), np.array([0, 0, 4, 4, 4])).tolist() == [4] * 5
    # clients without an old cluster
    assert match_ids(np.array([0, 0, 1, 1]), np.array([5, -1, -1, -1])).tolist() == [5, 5, 6, 6]
    # a cluster of newcomers does not inherit an id that happens to be left over
    assert match_ids(np.array([0, 0, 0, 1]), np.array([5, 5, 9, -1])).tolist() == [5, 5, 5, 10]
    assert match_ids(np.array([0, 1]), np.array([-1, -1])).tolist() == [0, 1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12),
)
def test_matching_is_the_best_of_all_and_keeps_the_partition(pairs):
    new, old = np.array(pairs).T
    matched = match_ids(new, old)
    assert adjusted_rand_index(matched, new) == 1
    stays = int((matched == old).sum())
    names = [0, 1, 2, 3, -2, -3, -4, -5]  # a cluster may also keep no old id
    best = max(
        int((np.array(permutation)[new] == old).sum()) for permutation in itertools.permutations(names, 4)
    )
    assert stays == best
