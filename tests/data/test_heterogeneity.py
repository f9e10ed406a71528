"""Measures between the data of clients: by hand, against other implementations, and on federations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data import DATASETS, PARTITIONS, Federation, Ragged, Samples, build_federation, data_root
from rayfl.data.heterogeneity.base import Measure
from rayfl.data.heterogeneity.distances import (
    MEASURES,
    average,
    average_distance,
    distance_matrix,
    draw_clients,
)
from rayfl.data.heterogeneity.measures._gaussian import Gaussian
from rayfl.data.heterogeneity.measures.emd_classes import transport_cost
from rayfl.data.heterogeneity.measures.kl import kl_divergence
from rayfl.errors import DataError
from rayfl.settings import summary

EVERYONE = {
    "bhattacharyya",
    "cka",
    "emd",
    "emd_classes",
    "kl",
    "mmd",
    "principal_angle",
    "vector_angle_min",
    "vector_angle_sum",
}


def make(name: str, **fields: Any) -> Measure:
    return MEASURES[name](**fields)


def federation_of(
    parts: list[np.ndarray], labels: list[np.ndarray] | None = None, groups: list[int] | None = None
) -> Federation:
    """One client for each array of samples ``(n, D)``; all of one class unless labels are given."""
    x = np.concatenate(parts).astype(np.float32)
    y = np.zeros(len(x), np.int64) if labels is None else np.concatenate(labels).astype(np.int64)
    samples = Samples("made up", x, y, x, y, int(y.max()) + 1)
    ids = np.split(np.arange(len(x)), np.cumsum([len(part) for part in parts])[:-1])
    lists = Ragged.of(ids)
    nothing = Ragged.of([np.empty(0, np.int32)] * len(parts))
    return Federation(samples, lists, nothing, lists, None if groups is None else np.array(groups))


def between(measure: Measure, *parts: np.ndarray, labels: list[np.ndarray] | None = None) -> float:
    return float(distance_matrix(federation_of(list(parts), labels), measure)[0, 1])


def test_all_measures_are_found_and_described() -> None:
    assert set(MEASURES) >= EVERYONE
    for name, measure in MEASURES.items():
        assert len(summary(measure)) > 20, name
        assert all(field.description for key, field in measure.model_fields.items() if key != "name"), name


# --- labels ---------------------------------------------------------------------------------------------


def test_emd_by_hand() -> None:
    nothing = np.zeros((2, 1))
    labels = [np.array([0, 1]), np.array([1, 2])]  # (1/2, 1/2, 0) and (0, 1/2, 1/2)
    assert between(make("emd"), nothing, nothing, labels=labels) == pytest.approx(0.5)
    # In order: half a unit of mass goes from 0 to 2, the largest distance there is.
    assert between(make("emd", ground="order"), nothing, nothing, labels=labels) == pytest.approx(0.5)
    neighbours = [np.array([0, 0]), np.array([1, 1])]
    with_a_third = [*neighbours, np.array([2, 2])]
    matrix = distance_matrix(federation_of([nothing] * 3, with_a_third), make("emd"))
    np.testing.assert_allclose(matrix, 1 - np.eye(3))
    ordered = distance_matrix(federation_of([nothing] * 3, with_a_third), make("emd", ground="order"))
    np.testing.assert_allclose(ordered, np.abs(np.subtract.outer(range(3), range(3))) / 2)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 8))
def test_emd_is_scipys_and_the_transport_problems(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(classes), 2)
    ordered = make("emd", ground="order").compare(p, q, None)
    theirs = scipy.stats.wasserstein_distance(range(classes), range(classes), p, q)
    assert ordered == pytest.approx(theirs / (classes - 1), abs=1e-9)
    apart = np.abs(np.subtract.outer(range(classes), range(classes))) / (classes - 1)
    assert transport_cost(p, q, apart) == pytest.approx(ordered, abs=1e-7)
    halved = make("emd").compare(p, q, None)
    assert transport_cost(p, q, 1 - np.eye(classes)) == pytest.approx(halved, abs=1e-7)


def test_emd_of_classes_moves_labels_as_far_as_their_angle() -> None:
    # Classes along (1, 0), at 30 degrees from it, and along (0, 1). Client 0 has the first only, client 1
    # the second, client 2 halves of the first and the third.
    rows = {0: [1.0, 0.0], 1: [np.cos(np.pi / 6), 0.5], 2: [0.0, 1.0]}
    labels = [np.array([0, 0]), np.array([1, 1]), np.array([0, 2])]
    parts = [np.array([rows[label] for label in own.tolist()]) for own in labels]
    matrix = distance_matrix(federation_of(parts, labels), make("emd_classes", p=1))
    assert matrix[0, 1] == pytest.approx(30 / 90, abs=1e-5)
    assert matrix[0, 2] == pytest.approx(0.5, abs=1e-5)  # half of it by 90 degrees
    assert matrix[1, 2] == pytest.approx((30 / 2 + 60 / 2) / 90, abs=1e-5)


# --- inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["principal_angle", "vector_angle_min", "vector_angle_sum"])
def test_angles_by_hand(name: str) -> None:
    turned = np.radians(25)
    a = np.outer([1.0, 2.0, 3.0], [1.0, 0.0, 0.0])
    b = np.outer([2.0, 1.0], [np.cos(turned), np.sin(turned), 0.0])
    assert between(make(name, p=1), a, b) == pytest.approx(25, abs=1e-4)
    assert between(make(name, p=1), a, -b) == pytest.approx(25, abs=1e-4)  # vectors have no sign
    assert between(make(name, p=1), a, a[:1]) == pytest.approx(0, abs=1e-4)


def test_the_three_angles_differ_as_defined() -> None:
    # Singular vectors e1, e2 (lengths 2, 1) and e2, e1: same span; equal ranks are orthogonal.
    a = np.diag([2.0, 1.0, 0.0])[:2]
    b = np.diag([1.0, 2.0, 0.0])[:2]
    assert between(make("principal_angle", p=2), a, b) == pytest.approx(0, abs=1e-4)
    assert between(make("vector_angle_min", p=2), a, b) == pytest.approx(0, abs=1e-4)
    assert between(make("vector_angle_sum", p=2), a, b) == pytest.approx(180, abs=1e-4)


def test_cka_is_the_alignment_of_the_kernels_between_features() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((30, 8)), rng.random((20, 8))

    def kernel(samples: np.ndarray) -> np.ndarray:
        centre = np.eye(8) - 1 / 8
        return np.asarray(centre @ samples.T @ samples @ centre)

    k, m = kernel(a), kernel(b)
    expected = (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())
    assert between(make("cka"), a, b) == pytest.approx(expected, abs=1e-5)
    assert between(make("cka"), a, 3 * a[::-1] + 1) == pytest.approx(1, abs=1e-5)  # order, scale, brightness
    left, right = np.eye(8)[:2] - np.eye(8)[2:4], np.eye(8)[4:6] - np.eye(8)[6:]
    assert between(make("cka"), left, right) == pytest.approx(0, abs=1e-6)


def normal(mean: float, variance: float) -> Gaussian:
    return Gaussian.of(np.array([mean]), np.array([[variance]]))


@pytest.mark.parametrize(
    ("m1", "v1", "m2", "v2"), [(0, 1, 0, 1), (0, 1, 2, 1), (1, 0.5, -1, 3), (0, 4, 0, 1)]
)
def test_gaussian_measures_are_the_integrals(m1: float, v1: float, m2: float, v2: float) -> None:
    p, q = scipy.stats.norm(m1, np.sqrt(v1)), scipy.stats.norm(m2, np.sqrt(v2))
    kl = scipy.integrate.quad(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), -30, 30)[0]
    overlap = scipy.integrate.quad(lambda x: np.sqrt(p.pdf(x) * q.pdf(x)), -30, 30)[0]
    a, b = normal(m1, v1), normal(m2, v2)
    assert kl_divergence(a, b) == pytest.approx(kl, abs=1e-6)
    assert make("kl", symmetric=False).compare(a, b, None) == pytest.approx(kl, abs=1e-6)
    both = (kl_divergence(a, b) + kl_divergence(b, a)) / 2
    assert make("kl").compare(a, b, None) == make("kl").compare(b, a, None) == pytest.approx(both)
    assert make("bhattacharyya").compare(a, b, None) == pytest.approx(-np.log(overlap), abs=1e-6)


def test_gaussian_measures_of_independent_coordinates_add_up() -> None:
    means, variances = np.array([[0.0, 1.0], [2.0, -1.0]]), np.array([[1.0, 2.0], [0.5, 3.0]])
    a, b = (Gaussian.of(mean, np.diag(variance)) for mean, variance in zip(means, variances, strict=True))
    for name in ("kl", "bhattacharyya"):
        one, two = ([normal(means[i, k], variances[i, k]) for k in range(2)] for i in range(2))
        singly = [make(name).compare(p, q, None) for p, q in zip(one, two, strict=True)]
        assert make(name).compare(a, b, None) == pytest.approx(sum(singly))


def test_gaussians_are_fitted_in_common_coordinates() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((200, 5)), rng.standard_normal((300, 5)) + 1
    fitted = [Gaussian.of(x.mean(axis=0), np.cov(x.T)) for x in (a, b)]
    assert between(make("kl", ridge=0), a, b) == pytest.approx(make("kl").compare(*fitted, None), rel=1e-4)
    turn = np.linalg.qr(rng.standard_normal((5, 5)))[0]  # the divergence does not depend on the coordinates
    assert between(make("kl", ridge=0, dimensions=5), a @ turn, b @ turn) == pytest.approx(
        make("kl").compare(*fitted, None), rel=1e-3
    )
    lonely = between(make("bhattacharyya"), a, b[:1])  # one sample has no covariance of its own
    assert np.isfinite(lonely)
    assert lonely > 0


def test_a_directed_measure_has_a_matrix_that_is_not_symmetric() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(0, scale, (200, 2)) for scale in (1.0, 3.0, 1.5)]
    federation = federation_of(parts)
    there, both = (distance_matrix(federation, make("kl", symmetric=each)) for each in (False, True))
    assert there[0, 1] != pytest.approx(there[1, 0], rel=0.1)
    np.testing.assert_allclose((there + there.T) / 2, both, rtol=1e-9)
    for measure in (make("kl", symmetric=False), make("kl")):  # does not depend on who is the first client
        forward, backward = (average_distance(federation_of(p), measure).mean for p in (parts, parts[::-1]))
        assert forward == pytest.approx(backward, rel=1e-9)


@pytest.mark.parametrize("name", ["kl", "bhattacharyya"])
def test_data_without_variance_have_no_normal_distribution(name: str) -> None:
    same = np.ones((4, 3))
    with pytest.raises(DataError, match=f"measure {name}: all samples are the same and have no variance"):
        between(make(name), same, same)
    many = np.random.default_rng(0).random((2, 50, 3))
    with pytest.raises(DataError, match=r"client 0: .*1 samples in 3 dimensions cannot be inverted"):
        between(make(name, ridge=0), many[0][:1], many[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["cka", "mmd"])
def test_numbers_that_are_too_large_are_refused_and_not_averaged(name: str) -> None:
    parts = np.random.default_rng(0).random((2, 10, 4)) * 3e38
    with pytest.raises(DataError, match=f"measure {name}: .*too large for it, scale them down"):
        between(make(name), *parts)


def test_mmd_is_the_double_sum_over_the_kernel() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((12, 3)), rng.random((9, 3)) + 0.3

    def mean_kernel(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.mean([[np.exp(-((u - v) ** 2).sum() / 0.7) for v in y] for u in x]))

    expected = np.sqrt(mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b))
    assert between(make("mmd", bandwidth=0.7), a, b) == pytest.approx(expected, abs=1e-4)
    assert between(make("mmd", bandwidth=0.7), a, a) == pytest.approx(0, abs=1e-3)
    far = between(make("mmd", bandwidth=1e-3), np.zeros((4, 2)), np.ones((4, 2)))
    assert far == pytest.approx(np.sqrt(2), abs=1e-4)
    # m is the median of the squared distances: 0 and 3 on a line, and 1 between them: 1, 4 and 9.
    points = federation_of([np.array([[0.0], [3.0]]), np.array([[1.0]])])
    assert make("mmd").common(points.samples, 0) == pytest.approx(4)


# --- what holds for all ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(EVERYONE))
def test_matrices_are_symmetric_and_equal_clients_are_at_distance_nothing(name: str) -> None:
    rng = np.random.default_rng(1)
    data = [rng.random((25, 6)) * scale for scale in (1, 1, 2)]
    labels = [rng.integers(0, 4, 25) for _ in range(3)]
    federation = federation_of([*data, data[0]], [*labels, labels[0]])
    matrix = distance_matrix(federation, make(name))
    np.testing.assert_array_equal(matrix, matrix.T)
    nearest = 1.0 if MEASURES[name].similarity else 0.0
    np.testing.assert_array_equal(np.diag(matrix), nearest)
    assert matrix[0, 3] == pytest.approx(nearest, abs=1e-3)
    off = matrix[np.triu_indices(3, 1)]
    assert (off < 1).all() if MEASURES[name].similarity else (off > 0).all()
    np.testing.assert_array_equal(matrix[1:3, 1:3], distance_matrix(federation, make(name), np.array([1, 2])))


@pytest.mark.parametrize("name", sorted(EVERYONE - {"emd", "emd_classes"}))
def test_words_have_no_angles(name: str) -> None:
    words = np.zeros((4, 3), np.int32)
    y = np.zeros(4, np.int64)
    texts = Samples("texts", words, y, words, y, 1, vocabulary=("a",))
    lists = Ragged.of([np.array([0, 1]), np.array([2, 3])])
    with pytest.raises(DataError, match=f"measure {name} compares numbers, texts holds words"):
        distance_matrix(Federation(texts, lists, lists, lists), make(name))
    assert distance_matrix(Federation(texts, lists, lists, lists), make("emd"))[0, 1] == 0


@pytest.mark.parametrize("name", ["principal_angle", "cka"])
def test_a_client_without_light_is_named(name: str) -> None:
    with pytest.raises(DataError, match=f"client 1: measure {name}: all samples"):
        between(make(name), np.ones((2, 3)) * np.arange(3), np.zeros((2, 3)))


def test_averages_by_hand() -> None:
    values = np.array([[0.0, 1, 2, 3], [1, 0, 4, 5], [2, 4, 0, 6], [3, 5, 6, 0]])
    nothing = np.zeros((1, 1))
    federation = federation_of([nothing] * 4, groups=[0, 0, 1, 1])
    found = average(federation, np.arange(4), values)
    assert found.mean == 21 / 6
    assert found.within == (1 + 6) / 2
    assert found.across == (2 + 3 + 4 + 5) / 4
    assert (found.clients, found.pairs, found.sampled) == (4, 6, False)
    part = average(federation, np.array([0, 1]), values[:2, :2])
    assert (part.mean, part.within, part.across, part.sampled) == (1, 1, None, True)
    with pytest.raises(DataError, match="a distance needs two clients"):
        average(federation, np.array([0]), values[:1, :1])


def test_of_many_clients_some_are_drawn() -> None:
    federation = federation_of([np.full((1, 1), k) for k in range(300)])
    drawn = draw_clients(federation, 40, 7)
    assert len(np.unique(drawn)) == 40
    assert (np.diff(drawn) > 0).all()
    np.testing.assert_array_equal(drawn, draw_clients(federation, 40, 7))
    assert not np.array_equal(drawn, draw_clients(federation, 40, 8))
    np.testing.assert_array_equal(draw_clients(federation, None, 7), np.arange(300))
    found = average_distance(federation, make("emd"), sampled=40)
    assert (found.clients, found.pairs, found.sampled) == (40, 780, True)


def test_what_is_drawn_of_a_client_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    federation = federation_of([rng.random((50, 4)) for _ in range(5)])
    measure = make("mmd", samples=10, bandwidth=1.0)
    whole = distance_matrix(federation, measure)
    np.testing.assert_array_equal(
        whole[np.ix_([1, 4], [1, 4])], distance_matrix(federation, measure, np.array([1, 4]))
    )


def test_partitions_of_digits_rank_as_they_should() -> None:
    samples = DATASETS["digits"]().load(data_root())

    def distance(measure: Measure, name: str, **fields: Any) -> float:
        partition = PARTITIONS[name](clients=20, **fields)
        federation = build_federation(samples, partition, validation=0, test_samples="auto", seed=0)
        return average_distance(federation, measure).mean

    for name in sorted(EVERYONE):
        sign = -1 if MEASURES[name].similarity else 1
        iid, skewed = (sign * distance(make(name), partition) for partition in ("iid", "label_skew"))
        assert iid < skewed, name
    # Labels of one super-cluster only: the measure that knows how far classes are apart grows.
    skew = distance(make("emd_classes"), "label_skew", rho=0.2)
    assert skew < distance(make("emd_classes"), "sc_niid", n_super_clusters=3)
