import numpy as np
import pytest
import scipy.linalg
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.clustering.config import SIGNATURES
from rayfl.errors import DataError
from rayfl.linalg import fix_signs, leading_eigenpairs
from rayfl.signatures.base import sample_matrix
from rayfl.signatures.label_histogram import LabelHistogram
from rayfl.signatures.subspace import Subspace


def labels(n):
    return np.zeros(n, np.int64)


def test_all_signatures_are_found_and_declare_how_they_compare():
    found = SIGNATURES
    assert {"subspace", "spectrum", "label_histogram"} <= set(found)
    assert all(part.proximities for part in found.values())


def test_axis_aligned_data_give_the_axes_in_order_of_energy():
    # columns of D: energies 9 along axis 1, 4 along axis 2, 1 along axis 0
    x = np.array([[0, 3, 0], [0, 0, -2], [1, 0, 0]], np.float32)
    assert np.allclose(Subspace(p=2).compute(x, labels(3)), [[0, 0], [1, 0], [0, 1]])


def test_a_single_sample_gives_its_direction_and_one_column():
    u = Subspace(p=3).compute(np.array([[3.0, 4.0]]), labels(1))
    assert u.shape == (2, 1)
    assert np.allclose(u[:, 0], [0.6, 0.8])


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), d=st.integers(1, 40), p=st.integers(1, 6))
def test_equals_the_svd_up_to_sign(seed, n, d, p):
    x = np.random.default_rng(seed).normal(size=(n, d))
    u = Subspace(p=p).compute(x, labels(n))
    expected = np.linalg.svd(x.T, full_matrices=False)[0][:, :p]
    assert u.dtype == np.float32
    assert u.shape == expected.shape
    assert np.allclose(u.T @ u, np.eye(u.shape[1]), atol=1e-5)
    projector = expected @ expected.T
    gaps = np.linalg.svd(x, compute_uv=False)
    if len(gaps) <= p or gaps[p - 1] - gaps[p] > 1e-2 * gaps[0]:  # else the span itself is ill-posed
        assert np.allclose(u @ u.T, projector, atol=1e-4)


def test_both_gram_matrices_give_the_same_vectors():
    rng = np.random.default_rng(0)
    tall = rng.normal(size=(30, 12)) * np.arange(12, 0, -1)
    wide = np.linalg.qr(tall, mode="r")  # x^T x is the same: 12 samples, and 13 with a zero sample
    values, vectors = leading_eigenpairs(tall, 4, 1e-10)
    padded = np.hstack([wide, np.zeros((12, 1))])  # 12 samples of 13 features
    other_values, other_vectors = leading_eigenpairs(padded, 4, 1e-10)
    assert np.allclose(values, other_values)
    assert np.allclose(np.vstack([vectors, np.zeros(4)]), other_vectors)


def test_columns_are_fewer_where_samples_repeat():
    x = np.tile(np.random.default_rng(0).normal(size=(2, 9)), (5, 1))
    assert Subspace(p=4).compute(x, labels(10)).shape == (9, 2)


def test_sign_and_order_of_the_samples_do_not_matter():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 20))
    u = Subspace().compute(x, labels(50))
    assert np.allclose(u, Subspace().compute(x[rng.permutation(50)], labels(50)), atol=1e-6)
    assert np.allclose(u, Subspace().compute(-x, labels(50)), atol=1e-6)


def test_signs_are_fixed_by_the_largest_entry_and_ties_by_the_first():
    vectors = np.array([[0.6, -0.5, 1.0], [-0.8, 0.5 + 1e-12, 0.0]])
    fixed = fix_signs(vectors)
    assert np.array_equal(fixed[:, 0], [-0.6, 0.8])
    assert fixed[0, 1] == 0.5  # the second is larger by rounding only
    assert np.array_equal(fixed[:, 2], [1.0, 0.0])


def test_per_class_puts_the_vectors_of_each_class_side_by_side():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(40, 10)), np.repeat([7, 2], 20)
    stacked = Subspace(p=3, per_class=True).compute(x, y)
    assert stacked.shape == (10, 6)
    assert np.array_equal(stacked[:, :3], Subspace(p=3).compute(x[y == 2], labels(20)))
    assert np.array_equal(stacked[:, 3:], Subspace(p=3).compute(x[y == 7], labels(20)))
    assert Subspace().floats(stacked) == 60


def test_the_number_of_blas_threads_changes_no_bit():
    x = np.random.default_rng(3).normal(size=(700, 300))
    results = []
    for threads in (1, 2):
        with threadpoolctl.threadpool_limits(threads, "blas"):
            results.append(leading_eigenpairs(x, 5, 1e-10))
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 3)), "all samples are zero"),
        (np.empty((0, 3)), "n >= 1"),
        (np.full((2, 3), np.nan), "NaN"),
        (np.ones((2, 3, 3)), r"\(n, D\)"),
    ],
)
def test_data_without_a_subspace_are_refused(x, message):
    with pytest.raises(DataError, match=message):
        Subspace().compute(x, labels(len(x)))


def test_sample_matrix_is_float64():
    assert sample_matrix(np.ones((2, 2), np.uint8)).dtype == np.float64


def test_label_histogram_holds_the_shares_of_the_classes():
    histogram = LabelHistogram().compute(np.zeros((4, 2)), np.array([0, 2, 2, 2]))
    assert np.array_equal(histogram, np.array([0.25, 0, 0.75], np.float32))
    assert LabelHistogram().floats(histogram) == 3
    with pytest.raises(DataError):
        LabelHistogram().compute(np.zeros((0, 2)), labels(0))


def test_real_images_fewer_than_pixels_match_scipy(fashion):
    x, y = fashion
    x, y = x[:200] / np.float32(255), y[:200]
    u = Subspace(p=3).compute(x, y)
    expected = scipy.linalg.svd(x.T.astype(np.float64), full_matrices=False)[0][:, :3]
    assert np.allclose(np.abs((u * expected).sum(axis=0)), 1, atol=1e-6)
