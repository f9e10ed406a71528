import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.clustering.cluster import cluster_signatures
from rayfl.clustering.config import Clustering
from rayfl.clustering.proximity import relevance_matrix
from rayfl.errors import ConfigError, DataError
from rayfl.random import generator
from rayfl.signatures import spectrum as spectra
from rayfl.signatures.features.pca import PCA
from rayfl.signatures.spectrum import Spectrum

NONE = np.empty(0, np.int64)


def diagonal(*eigenvalues):
    """Samples whose Gram matrix X^T X / n is diagonal with these entries."""
    return np.diag(np.sqrt(np.array(eigenvalues, float) * len(eigenvalues)))


def relate_all(spectrum, clients):
    signatures = [spectrum.compute(x, NONE, key=i) for i, x in enumerate(clients)]
    rows = [spectrum.relate(x, own, signatures) for x, own in zip(clients, signatures, strict=True)]
    return signatures, rows


def naive_relevance(x_i, x_j, q):
    """Eqs. 1-4 of the paper, term by term, with full eigendecompositions."""
    gram_i, gram_j = x_i.T @ x_i / len(x_i), x_j.T @ x_j / len(x_j)
    lambda_i = np.linalg.eigh(gram_i)[0][::-1]
    v_j = np.linalg.eigh(gram_j)[1][:, ::-1]
    product = 1.0
    for k in range(q):
        lhat = np.linalg.norm(gram_i @ v_j[:, k])
        product *= min(lambda_i[k], lhat) / max(lambda_i[k], lhat)
    return product ** (1 / q)


def test_signature_holds_eigenvalues_above_eigenvectors():
    signature = Spectrum(q=2).compute(diagonal(1, 4, 2), NONE)
    assert np.allclose(signature, [[4, 2], [0, 0], [1, 0], [0, 1]])
    assert Spectrum(q=2).floats(signature) == 6  # the eigenvalues stay at home


def test_relevance_by_hand():
    # G_0 = diag(4, 2, 1), user 1 has the same axes in the order e0, e2, e1: lhat = (4, 1, 2),
    # l = (1, 1/2, 1/2), r = (1/4)^(1/3); with two eigenvectors (1/2)^(1/2).
    clients = [diagonal(4, 2, 1), diagonal(4, 1, 2)]
    _, rows = relate_all(Spectrum(q=3), clients)
    assert np.allclose(rows, [[1, 0.25 ** (1 / 3)], [0.25 ** (1 / 3), 1]])
    _, rows = relate_all(Spectrum(q=2), clients)
    assert np.allclose(rows, [[1, 0.5**0.5], [0.5**0.5, 1]])


def test_relevance_is_the_mean_of_both_directions():
    # r(0, 1): own (4, 1), lhat = (1, 4): 1/4. r(1, 0): own (9, 4), lhat = (4, 9): 4/9.
    _, rows = relate_all(Spectrum(q=2), [diagonal(4, 1), diagonal(4, 9)])
    assert np.isclose(rows[0][1], 1 / 4)
    assert np.isclose(rows[1][0], 4 / 9)
    assert np.isclose(relevance_matrix(rows)[0, 1], (1 / 4 + 4 / 9) / 2)


def test_tiny_eigenvalues_leave_the_product_and_its_root():
    # Alike in all that matters; the third eigenvectors are e2 and e3: l_3 = 1e-12 / 1e-9.
    clients = [diagonal(4, 2, 1e-9, 1e-12), diagonal(4, 2, 1e-12, 1e-9)]
    signatures, rows = relate_all(Spectrum(q=3), clients)
    assert [s.shape for s in signatures] == [(5, 2), (5, 2)]
    assert np.allclose(rows, 1)
    signatures, rows = relate_all(Spectrum(q=3, tiny=0), clients)
    assert signatures[0].shape == (5, 3)
    assert np.isclose(rows[0][1], 0.1)  # (1 * 1 * 1e-3)^(1/3)


def test_a_user_with_fewer_samples_than_q_is_compared_along_its_own():
    x = np.array([[2.0, 0, 0]])
    signatures, rows = relate_all(Spectrum(q=5), [x, diagonal(4, 1, 0.5)])
    assert signatures[0].shape == (4, 1)
    assert np.isclose(rows[0][1], 1)  # along e0, which is all it has
    assert np.isclose(rows[1][0], 1)


def test_orthogonal_data_are_irrelevant_and_so_are_empty_images():
    _, rows = relate_all(Spectrum(q=1), [diagonal(1, 0), diagonal(0, 1), np.zeros((3, 2))])
    assert np.allclose(rows, [[1, 0, 0], [0, 1, 0], [0, 0, 0]])


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), q=st.integers(1, 6), clients=st.integers(1, 5))
def test_matches_the_paper_term_by_term(seed, q, clients):
    rng = np.random.default_rng(seed)
    data = [rng.normal(size=(rng.integers(8, 30), 7)) * np.arange(1, 8) for _ in range(clients)]
    _, rows = relate_all(Spectrum(q=q), data)
    naive = [[naive_relevance(a, b, q) for b in data] for a in data]
    assert np.allclose(rows, naive, rtol=1e-3)


def test_the_block_size_does_not_matter(monkeypatch):
    rng = np.random.default_rng(0)
    clients = [rng.normal(size=(n, 6)) for n in (9, 3, 2, 8, 7)]
    _, rows = relate_all(Spectrum(q=4), clients)
    monkeypatch.setattr("rayfl.signatures.spectrum.BLOCK", 2)
    _, blocked = relate_all(Spectrum(q=4), clients)
    assert np.allclose(rows, blocked, atol=1e-12)


def test_signs_of_exchanged_vectors_do_not_matter():
    rng = np.random.default_rng(1)
    x, other = rng.normal(size=(20, 6)), rng.normal(size=(20, 6))
    spectrum = Spectrum(q=3)
    own, theirs = spectrum.compute(x, NONE), spectrum.compute(other, NONE)
    flipped = theirs * np.where(np.arange(7)[:, None] == 0, 1, [-1, 1, -1])
    assert np.allclose(spectrum.relate(x, own, [theirs]), spectrum.relate(x, own, [flipped]), atol=1e-12)


def test_noise_is_keyed_and_touches_the_vectors_only():
    x = np.random.default_rng(2).normal(size=(300, 200))
    clear = Spectrum(q=5).compute(x, NONE)
    noisy = [Spectrum(q=5, noise=0.1).compute(x, NONE, key=k) for k in (1, 1, 2)]
    assert np.array_equal(noisy[0], noisy[1])
    assert not np.allclose(noisy[0], noisy[2])
    assert np.array_equal(noisy[0][0], clear[0])
    assert np.isclose((noisy[0] - clear)[1:].std(), 0.1, rtol=0.1)


def test_bad_settings_and_data_are_refused():
    with pytest.raises(ConfigError):
        Spectrum(q=0)
    with pytest.raises(ConfigError):
        Spectrum(noise=-1)
    with pytest.raises(DataError):
        Spectrum().compute(np.empty((0, 3)), NONE)


# ---- real data: the paper's two experiments --------------------------------------------------------------

CLOTHES_SHOES_BAGS = ((0, 1, 2, 3, 4, 6), (5, 7, 9), (8,))
VEHICLES_ANIMALS = ((0, 1, 8, 9), (2, 3, 4, 5, 6, 7))


def pixels(images):
    return images / np.float32(255)


def task_users(y, tasks, counts, sizes, foreign, seed):
    """Sample indices of users who hold mostly the labels of their task, and the tasks ``(N,)``."""
    rng = generator(seed, "task users")
    users, groups = [], []
    for task, (own_labels, count, size) in enumerate(zip(tasks, counts, sizes, strict=True)):
        own = rng.permutation(np.flatnonzero(np.isin(y, own_labels)))
        other = rng.permutation(np.flatnonzero(~np.isin(y, own_labels)))
        for user in range(count):
            share = rng.uniform(*foreign) if isinstance(foreign, tuple) else foreign
            strangers = round(share * size)
            start = user * size
            users.append(
                np.concatenate([own[start : start + size - strangers], other[start : start + strangers]])
            )
            groups.append(task)
    return users, np.array(groups)


def within_and_across(rows, groups):
    similarity = relevance_matrix(rows)
    same = groups[:, None] == groups[None, :]
    other = ~np.eye(len(groups), dtype=bool)
    return similarity[same & other], similarity[~same]


def cluster(spectrum, clients, groups):
    signatures, rows = relate_all(spectrum, clients)
    clustering = Clustering(signature=spectrum, n_clusters=int(groups.max()) + 1)
    return rows, cluster_signatures(clustering, signatures, rows, groups)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("seed", "foreign"), list(enumerate([0.0, 0.04, 0.08, 0.12, 0.16, 0.2])))
def test_fashion_mnist_tasks_are_found_in_six_of_six_runs(fashion, seed, foreign):
    x, y = fashion
    users, groups = task_users(y, CLOTHES_SHOES_BAGS, (5, 3, 2), (2000, 1000, 500), foreign, seed)
    rows, clusters = cluster(Spectrum(q=5), [pixels(x[user]) for user in users], groups)
    within, across = within_and_across(rows, groups)
    assert clusters.ari == 1
    assert 0.95 < within.mean() < 1  # the paper's figure is 0.97
    assert 0.28 < across.mean() < 0.48


def test_fashion_mnist_tasks_are_found_when_users_differ_in_foreign_labels(fashion):
    x, y = fashion
    users, groups = task_users(y, CLOTHES_SHOES_BAGS, (5, 3, 2), (2000, 1000, 500), (0.0, 0.2), 0)
    _, clusters = cluster(Spectrum(q=5), [pixels(x[user]) for user in users], groups)
    assert clusters.ari == 1


@pytest.mark.slow
def test_slight_noise_keeps_the_tasks_and_heavy_noise_destroys_them(fashion):
    x, y = fashion
    users, groups = task_users(y, CLOTHES_SHOES_BAGS, (5, 3, 2), (2000, 1000, 500), 0.1, 0)
    clients = [pixels(x[user]) for user in users]
    assert cluster(Spectrum(noise=0.01), clients, groups)[1].ari == 1
    assert cluster(Spectrum(noise=3.0), clients, groups)[1].ari < 0.7


SLOW = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
def test_cifar10_tasks_are_found_through_pca(cifar10, seed):
    x, y = cifar10
    public = generator(seed, "public").choice(len(x), 2000, replace=False)
    phi = PCA().fit(pixels(x[public]))
    users, groups = task_users(y, VEHICLES_ANIMALS, (5, 5), (2000, 2000), 0.1, seed)
    rows, clusters = cluster(Spectrum(q=5), [phi.apply(pixels(x[user])) for user in users], groups)
    within, across = within_and_across(rows, groups)
    assert clusters.ari == 1
    assert within.mean() > 0.96
    assert across.mean() < 0.45  # 0.31 with ImageNet features


def test_relating_a_block_is_relating_each_client(monkeypatch):
    """Of users with many, few and no eigenvalues, whether the eigenvectors of all are kept or not."""
    rng = generator(0, "users")
    clients = [rng.random((n, 6)) for n in (9, 2, 1, 4, 30)] + [np.zeros((3, 6))]
    spectrum = Spectrum(q=3)
    signatures, rows = relate_all(spectrum, clients)
    assert [own.shape[1] for own in signatures] == [3, 2, 1, 3, 3, 0]
    pairs = list(zip(clients, signatures, strict=True))
    monkeypatch.setattr("rayfl.signatures.spectrum.BLOCK", 4)
    for kept in (1 << 20, 0):
        monkeypatch.setattr("rayfl.signatures.spectrum.KEPT", kept)
        found = spectrum.relate_all(iter(pairs), signatures)
        np.testing.assert_allclose(found, rows, rtol=1e-14)
    np.testing.assert_array_equal(found[-1], 0)
    np.testing.assert_array_equal(found[:, -1], 0)
    assert (found[:-1, :-1] > 0).all()


@pytest.mark.parametrize("samples", [1, 4, 6, 9])
def test_decomposed_samples_measure_the_same_lengths(samples, monkeypatch):
    """Among many users one product takes the place of two, if a user has fewer samples than dimensions."""
    rng = np.random.default_rng(samples)
    clients = [rng.standard_normal((samples, 6)) for _ in range(5)]
    gram = clients[0].T @ clients[0] / samples
    half = spectra._length_preserving_gram(clients[0])
    if samples > 6:
        assert half is None
    else:
        assert half.shape == (samples, 6)
        np.testing.assert_allclose(half.T @ half, gram @ gram, atol=1e-12)
    found = []
    for many in (0, 10**9):
        monkeypatch.setattr(spectra, "MANY", many)
        found.append(np.stack(relate_all(Spectrum(q=3), clients)[1]))
    np.testing.assert_allclose(*found, rtol=1e-11)
    assert np.isfinite(found[0]).all()
