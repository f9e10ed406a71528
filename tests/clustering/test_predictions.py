import numpy as np
import pytest
from scipy.spatial.distance import squareform

from rayfl.clustering import predictions
from rayfl.clustering.linkage import number_by_first
from rayfl.clustering.quality import adjusted_rand_index
from rayfl.errors import DataError
from rayfl.training.reports import prediction_rows

# three clients, two samples, two classes
PROBABILITIES = np.array([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.7, 0.3]], [[0.4, 0.6], [0.1, 0.9]]])


def test_similarity_by_hand():
    soft = predictions.inference_similarities(prediction_rows(PROBABILITIES))
    first, second, third = [0.9, 0.1, 0.2, 0.8], [0.6, 0.4, 0.7, 0.3], [0.4, 0.6, 0.1, 0.9]
    expected = [
        np.dot(first, second) / np.sqrt(1.50 * 1.10),
        np.dot(first, third) / np.sqrt(1.50 * 1.34),
        np.dot(second, third) / np.sqrt(1.10 * 1.34),
    ]
    assert soft == pytest.approx(np.array(expected), abs=1e-6)
    # the printed numerator, ||B_i o B_j||_F, has no unit diagonal
    assert np.linalg.norm(np.multiply(first, first)) / 1.5 < 0.75


def test_one_hot_similarity_is_the_share_of_samples_on_which_both_agree():
    hard = prediction_rows(PROBABILITIES, one_hot=True)
    assert hard.tolist() == [[1, 0, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert predictions.inference_similarities(hard) == pytest.approx(np.array([0.5, 0.5, 0.0]))
    assert prediction_rows(np.full((1, 1, 3), 1 / 3), one_hot=True).tolist() == [[1, 0, 0]]  # ties: the first


@pytest.mark.parametrize("bad", [-0.1, np.nan, np.inf])
def test_logits_are_refused(bad):
    with pytest.raises(DataError, match="probabilities"):
        prediction_rows(np.array([[[bad, 1.0]]]))


def test_blocks_do_not_matter():
    random = np.random.default_rng(0)
    rows = prediction_rows(random.dirichlet(np.ones(10), (20, 300)))
    whole = predictions.inference_similarities(rows)
    assert np.abs(whole - predictions.inference_similarities(rows, block=7)).max() < 5e-7


def test_joint_clusters_overlap():
    similarities = np.array([0.9, 0.2, 0.7])  # 01, 02, 12
    joint = predictions.joint_clusters(similarities, 0.7)
    assert joint.tolist() == [[True, True, False], [True, True, True], [False, True, True]]


def test_beta_0_is_fedavg_and_beta_1_is_solo():
    random = np.random.default_rng(1)
    rows = prediction_rows(random.dirichlet(np.ones(10), (6, 50)))
    rows[4] = rows[2]
    similarities = predictions.inference_similarities(rows)
    alike = np.eye(6, dtype=bool)
    alike[2, 4] = alike[4, 2] = True  # two that predict alike are one also for beta = 1
    assert predictions.joint_clusters(similarities, 0.0).all()
    assert (predictions.joint_clusters(similarities, 1.0) == alike).all()
    assert predictions.disjoint_clusters(similarities, 0.0).tolist() == [0] * 6
    assert predictions.disjoint_clusters(similarities, 1.0).tolist() == [0, 1, 2, 3, 2, 4]
    opposed = prediction_rows(np.array([[[1.0, 0.0]], [[0.0, 1.0]]]))  # A = 0
    assert predictions.joint_clusters(predictions.inference_similarities(opposed), 0.0).all()
    assert predictions.disjoint_clusters(predictions.inference_similarities(opposed), 0.0).tolist() == [0, 0]


def test_equal_predictions_are_together_for_beta_1_whatever_the_rounding():
    similarities = np.array([1 - 2e-7, 0.999, 0.999])
    assert predictions.joint_clusters(similarities, 1.0).sum(axis=1).tolist() == [2, 2, 1]
    assert predictions.disjoint_clusters(similarities, 1.0).tolist() == [0, 0, 1]


def test_average_and_complete_linkage_by_hand():
    similarities = np.array([0.9, 0.2, 0.7])
    # average: {0, 1} and 2 are (0.2 + 0.7) / 2 = 0.45 alike; complete: 0.2
    assert predictions.disjoint_clusters(similarities, 0.45).tolist() == [0, 0, 0]
    assert predictions.disjoint_clusters(similarities, 0.46).tolist() == [0, 0, 1]
    assert predictions.disjoint_clusters(similarities, 0.21, "complete").tolist() == [0, 0, 1]


def test_planted_groups_are_recovered():
    random = np.random.default_rng(2)
    groups = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
    concentration = np.ones((3, 10))
    concentration[[0, 1, 2], [0, 1, 2]] = 10  # each group's models prefer a class
    rows = prediction_rows(np.stack([random.dirichlet(concentration[g], 200) for g in groups]))
    similarities = predictions.inference_similarities(rows)
    labels = predictions.disjoint_clusters(similarities, 0.6)
    assert adjusted_rand_index(labels, groups) == 1
    assert (labels == number_by_first(groups)).all()
    joint = predictions.joint_clusters(similarities, 0.6)
    assert predictions.clustering_error(joint, groups) == (0, 0)
    everyone, nobody = (predictions.joint_clusters(similarities, beta) for beta in (0.0, 1.0))
    assert predictions.clustering_error(everyone, groups) == (27, 0)  # 36 pairs, 3 in each of 3 groups
    assert predictions.clustering_error(nobody, groups) == (0, 9)


def test_clustering_error_by_hand():
    groups = np.array([0, 0, 1, 1])
    together = squareform(np.array([0, 1, 0, 0, 0, 1])).astype(bool)  # 02 wrongly, 23 rightly, 01 not
    np.fill_diagonal(together, True)
    assert predictions.clustering_error(together, groups) == (1, 1)
