import pickle

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist, squareform

from rayfl.angles import principal_angle
from rayfl.clustering.proximity import (
    ANGLES,
    VECTOR_DISTANCES,
    condensed_distances,
    condensed_index,
    cross_distances,
    pack,
    relevance_distances,
    relevance_matrix,
    take,
    tile,
    write_tile,
)
from rayfl.errors import ConfigError, DataError
from rayfl.signatures.subspace import Subspace


def bases(rng, clients, features=9, most=4):
    """Orthonormal signatures with 1 to ``most`` columns."""
    return [
        np.linalg.qr(rng.normal(size=(features, rng.integers(1, most + 1))))[0].astype(np.float32)
        for _ in range(clients)
    ]


def naive(proximity, u, v):
    """The definitions for one pair, straight from the equations."""
    u, v = u.astype(np.float64), v.astype(np.float64)
    if proximity == "principal_angle":
        return np.degrees(scipy.linalg.subspace_angles(u, v).min())
    angles = [[np.degrees(np.arccos(min(1.0, abs(a @ b)))) for b in v.T] for a in u.T]
    if proximity == "vector_angle_min":
        return np.min(angles)
    few, many = sorted((u.shape[1], v.shape[1]))
    return sum(angles[k][k] for k in range(few)) * many / few


@pytest.mark.parametrize(
    ("proximity", "expected"),
    [("principal_angle", 30.0), ("vector_angle_sum", 30.0 + 60.0), ("vector_angle_min", 30.0)],
)
def test_angles_by_hand(proximity, expected):
    # u1 = e1, u2 = e2; v1 is 30 degrees from e1 towards e3, v2 is 60 degrees from e2 towards e4
    u = np.eye(4)[:, :2]
    v = np.array([[np.cos(np.pi / 6), 0], [0, np.cos(np.pi / 3)], [0.5, 0], [0, np.sin(np.pi / 3)]])
    assert np.allclose(condensed_distances(proximity, [u, v]), expected)


def test_equal_rank_and_any_rank_differ():
    # the same plane, vectors swapped: no principal angle, no smallest angle, but ranks at right angles
    u = np.eye(3)[:, :2]
    swapped = u[:, ::-1]
    assert condensed_distances("principal_angle", [u, swapped])[0] < 1e-5
    assert condensed_distances("vector_angle_min", [u, swapped])[0] == 0
    assert condensed_distances("vector_angle_sum", [u, swapped])[0] == 180


def test_sums_of_angles_are_comparable_between_ranks():
    """A client with one sample has one vector: it is no nearer to others than clients with three."""
    rng = np.random.default_rng(0)
    places = [np.linalg.qr(rng.normal(size=(200, 3)))[0] for _ in range(2)]
    three = [np.linalg.qr(place + 0.01 * rng.normal(size=place.shape))[0] for place in places * 2]
    alone = [u[:, :1] for u in three[:2]]
    square = squareform(condensed_distances("vector_angle_sum", [*three, *alone], vectors=3, block=2))
    group = np.arange(6) % 2
    same = group[:, None] == group
    assert square[~same].min() > 1.5 * square[same].max()
    # as few as they have in common, scaled to three; also where both have one
    angle = squareform(condensed_distances("vector_angle_sum", [u[:, :1] for u in (*three, *alone)]))
    assert np.allclose(square[4:], 3 * angle[4:], atol=1e-4)
    rows = cross_distances("vector_angle_sum", alone, three, vectors=3)
    assert np.allclose(rows, square[4:, :4], atol=1e-6)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 12),
    columns=st.integers(1, 20),
    proximity=st.sampled_from(sorted(ANGLES)),
)
def test_tiles_of_any_size_equal_the_double_loop(seed, clients, columns, proximity):
    signatures = bases(np.random.default_rng(seed), clients)
    expected = [
        naive(proximity, signatures[i], signatures[j]) for i in range(clients) for j in range(i + 1, clients)
    ]
    found = condensed_distances(proximity, signatures, block=columns)
    assert found.shape == (clients * (clients - 1) // 2,)
    # float32 columns have length 1 +- 1e-7 only: near 0 the angle is that of the arccos, near 90 it is exact
    assert np.allclose(found, expected, atol=0.05)
    far = np.array(expected) > 5
    assert np.allclose(found[far], np.array(expected)[far], atol=1e-4)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), proximity=st.sampled_from(sorted(ANGLES)))
def test_cross_distances_are_the_rows_of_the_condensed_form(seed, proximity):
    signatures = bases(np.random.default_rng(seed), 9)
    square = squareform(condensed_distances(proximity, signatures))
    assert np.allclose(cross_distances(proximity, signatures[6:], signatures[:6]), square[6:, :6], atol=1e-6)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), proximity=st.sampled_from(sorted(ANGLES)))
def test_signs_do_not_matter(seed, proximity):
    rng = np.random.default_rng(seed)
    signatures = bases(rng, 6)
    flipped = [u * rng.choice([-1, 1], size=u.shape[1]) for u in signatures]
    assert np.allclose(
        condensed_distances(proximity, signatures), condensed_distances(proximity, flipped), atol=1e-5
    )


def test_principal_angle_depends_on_the_span_only():
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(10, 3)))[0] for _ in range(2))
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    skew = rng.normal(size=(3, 3)) + 3 * np.eye(3)
    angle = condensed_distances("principal_angle", [u, v])[0]
    assert np.isclose(condensed_distances("principal_angle", [u @ turn, v])[0], angle)
    assert np.isclose(condensed_distances("principal_angle", [u @ skew, v])[0], angle)
    assert not np.isclose(
        condensed_distances("vector_angle_min", [u @ turn, v])[0],
        condensed_distances("vector_angle_min", [u, v])[0],
        atol=0.5,
    )


def test_stacked_class_subspaces_are_compared_by_their_span():
    # The columns of a per-class signature are not orthogonal: without taking their span the "cosine"
    # exceeds 1 and every pair of clients would be 0 degrees apart.
    rng = np.random.default_rng(1)
    x = rng.random((60, 12))
    y = np.arange(60) % 3
    signature = Subspace(p=1, per_class=True).compute(x, y)
    assert np.linalg.svd(signature, compute_uv=False)[0] > 1.5
    one = np.zeros((12, 1))
    one[0] = 1
    span = scipy.linalg.orth(signature.astype(np.float64))
    expected = np.degrees(np.arccos(np.linalg.norm(span[0])))
    assert np.isclose(condensed_distances("principal_angle", [signature, one])[0], expected, atol=1e-3)


@settings(deadline=None)
@given(st.integers(2, 30))
def test_condensed_index_follows_scipy(clients):
    pairs = clients * (clients - 1) // 2
    i, j = np.triu_indices(clients, k=1)
    assert np.array_equal(condensed_index(clients, i, j), np.arange(pairs))
    assert np.array_equal(condensed_index(clients, j, i), np.arange(pairs))


def test_vector_distances_by_hand():
    histograms = [np.array([1.0]), np.array([0.0, 1.0]), np.array([0.5, 0.5, 0.0])]
    assert np.allclose(condensed_distances("euclidean", histograms), [2**0.5, 0.5**0.5, 0.5**0.5])
    assert np.allclose(condensed_distances("cosine", histograms), [1, 1 - 0.5**0.5, 1 - 0.5**0.5])
    for proximity in VECTOR_DISTANCES:
        square = squareform(condensed_distances(proximity, histograms))
        assert np.allclose(cross_distances(proximity, histograms[2:], histograms[:2]), square[2:, :2])
        assert condensed_distances(proximity, histograms[:1]).shape == (0,)


def test_relevance_is_the_mean_of_both_directions_with_a_unit_diagonal():
    rows = [np.array([0.9, 0.2, 0.4]), np.array([0.4, 0.8, 0.6]), np.array([0.6, 0.8, 1.0])]
    assert np.allclose(relevance_matrix(rows), [[1, 0.3, 0.5], [0.3, 1, 0.7], [0.5, 0.7, 1]])
    assert np.allclose(relevance_distances(rows), [0.7, 0.5, 0.3])


def test_what_does_not_fit_is_refused():
    u = np.eye(4)[:, :2]
    with pytest.raises(ConfigError, match="did you mean 'principal_angle'"):
        condensed_distances("principle_angle", [u, u])
    with pytest.raises(ConfigError, match="relations"):
        condensed_distances("relevance", [u, u])
    with pytest.raises(DataError, match="client 1: its signature has 3 features, client 0's has 4"):
        condensed_distances("principal_angle", [u, np.eye(3)])
    with pytest.raises(DataError, match="client 1"):
        condensed_distances("vector_angle_min", [u, np.empty((4, 0))])
    with pytest.raises(DataError, match="different shapes"):
        condensed_distances("euclidean", [u, np.eye(3)])
    with pytest.raises(DataError, match="client 1"):
        condensed_distances("cosine", [np.ones(2), np.zeros(2)])
    with pytest.raises(DataError, match="client 9: its signature has 3 features, client 7's has 4"):
        pack("principal_angle", [u, np.eye(3)], np.array([7, 9]))
    with pytest.raises(DataError, match="client 9: its points have 3 features, client 7's have 4"):
        pack("min_distance", [u.T, np.eye(3)], np.array([7, 9]))
    with pytest.raises(DataError, match="client 9: its signature is zero"):
        pack("cosine", [np.ones(2), np.zeros(2)], np.array([7, 9]))
    with pytest.raises(DataError, match="2 relations"):
        relevance_matrix([np.ones(2), np.ones(3)])


# ---- tiles -----------------------------------------------------------------------------------------------


def family(rng, clients, vectors, noise, features=60):
    """Bases of ``vectors`` columns at ``noise`` (about radians) from a common one."""
    common = np.linalg.qr(rng.normal(size=(features, vectors)))[0]
    moved = common + noise * rng.normal(size=(clients, features, vectors)) / features**0.5
    return list(np.linalg.qr(moved)[0].astype(np.float32))


def by_svd(signatures):
    """Smallest principal angles of all pairs in float64, of the float32 columns' own spans."""
    spans = [np.linalg.qr(s.astype(np.float64))[0] for s in signatures]
    pairs = zip(*np.triu_indices(len(spans), k=1), strict=True)
    largest = [np.linalg.svd(spans[i].T @ spans[j], compute_uv=False)[0] for i, j in pairs]
    return np.degrees(np.arccos(np.minimum(largest, 1.0)))


@pytest.mark.parametrize("vectors", [1, 2, 3, 4])
@pytest.mark.parametrize("noise", [1e-4, 1e-2, 0.03, 0.3, 3.0])
def test_angles_in_single_precision_are_those_of_an_svd_in_double(vectors, noise):
    rng = np.random.default_rng(vectors)
    signatures = family(rng, 30, vectors, noise) + family(rng, 30, vectors, noise)
    expected = by_svd(signatures)
    assert np.allclose(condensed_distances("principal_angle", signatures), expected, rtol=0, atol=1e-4)
    found = condensed_distances("principal_angle", signatures, precise=False)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 0.005


def test_single_precision_alone_would_not_do_near_zero(monkeypatch):
    signatures = family(np.random.default_rng(0), 60, 3, 1e-4)
    expected = by_svd(signatures)
    monkeypatch.setattr("rayfl.clustering.proximity.NEAR", 0.0)
    found = condensed_distances("principal_angle", signatures, precise=False)
    assert np.abs(found - expected).max() > 0.01


@pytest.mark.parametrize("proximity", ["vector_angle_sum", "vector_angle_min"])
@pytest.mark.parametrize("noise", [1e-4, 0.03, 0.3])
def test_vector_angles_in_single_precision_are_those_in_double(proximity, noise):
    signatures = family(np.random.default_rng(1), 40, 3, noise)
    exact = condensed_distances(proximity, signatures)
    found = condensed_distances(proximity, signatures, precise=False)
    assert np.abs(found - exact).max() < (0.015 if proximity == "vector_angle_sum" else 0.005)


def test_one_small_angle_among_large_ones_is_exact_in_their_sum():
    rng = np.random.default_rng(2)
    first = rng.normal(size=60)
    signatures = []
    for _ in range(40):
        columns = np.column_stack([first + 1e-5 * rng.normal(size=60), rng.normal(size=(60, 2))])
        signatures.append(np.linalg.qr(columns)[0].astype(np.float32))
    exact = condensed_distances("vector_angle_sum", signatures)
    assert exact.min() > 100
    assert np.abs(condensed_distances("vector_angle_sum", signatures, precise=False) - exact).max() < 0.005


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    equal=st.sampled_from([(), (0, 1), (1, 2), (0, 1, 2)]),
    shape=st.sampled_from([(3, 3), (3, 5), (5, 3), (2, 3), (2, 2), (1, 3), (4, 4)]),
)
def test_the_closed_form_is_the_largest_singular_value_also_where_some_coincide(seed, equal, shape):
    rng = np.random.default_rng(seed)
    size = min(shape)
    values = np.sort(rng.random((50, size)))[:, ::-1]
    for place_ in equal:
        values[:, min(place_, size - 1)] = values[:, min(equal[0], size - 1)]
    left = np.linalg.qr(rng.normal(size=(50, shape[0], size)))[0]
    right = np.linalg.qr(rng.normal(size=(50, shape[1], size)))[0]
    products = (left * values[:, None, :]) @ right.swapaxes(1, 2)
    expected = np.degrees(np.arccos(np.minimum(values.max(axis=1), 1)))
    assert np.abs(principal_angle(products) - expected).max() < 1e-4


def test_equal_spans_are_at_0_and_right_angles_at_90():
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    for products, expected in (
        (np.eye(3), 0),
        (turn, 0),
        (np.diag([1.0, 1.0, 0.2]), 0),
        (np.zeros((3, 3)), 90),
        (np.diag([0.5, 0.0, 0.0]), 60),
    ):
        assert abs(principal_angle(products[None])[0] - expected) < 0.01


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 14),
    block=st.integers(1, 16),
    proximity=st.sampled_from(sorted(ANGLES)),
    data=st.data(),
)
def test_tiles_in_any_order_are_the_condensed_form_bit_for_bit(seed, clients, block, proximity, data):
    signatures = bases(np.random.default_rng(seed), clients)
    starts = list(range(0, clients, block))
    blocks = [pack(proximity, signatures[start : start + block]) for start in starts]
    corners = [(i, j) for i in range(len(blocks)) for j in range(i, len(blocks))]
    distances = np.full(clients * (clients - 1) // 2, np.nan, np.float32)
    for i, j in data.draw(st.permutations(corners)):
        values = tile(proximity, blocks[i], blocks[j] if j > i else None)
        write_tile(distances, clients, starts[i], starts[j], values)
    assert np.array_equal(distances, condensed_distances(proximity, signatures, False, block))
    exact = condensed_distances(proximity, signatures)
    assert np.abs(distances - exact).max(initial=0) < 0.02


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 12),
    block=st.integers(1, 13),
    proximity=st.sampled_from(sorted(VECTOR_DISTANCES)),
)
def test_vector_distances_in_tiles_are_those_of_all(seed, clients, block, proximity):
    rng = np.random.default_rng(seed)
    histograms = [rng.random(rng.integers(1, 6)) + 0.01 for _ in range(clients)]
    rows = np.array([np.pad(h, (0, 6 - len(h))) for h in histograms])
    for precise, close in ((True, 1e-12), (False, 1e-6)):
        found = condensed_distances(proximity, histograms, precise, block)
        assert np.allclose(found, pdist(rows, proximity) if clients > 1 else [], rtol=0, atol=close)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), clients=st.integers(1, 12), block=st.integers(1, 13))
def test_relevance_in_tiles_is_that_of_the_whole_matrix(seed, clients, block):
    rows = list(np.random.default_rng(seed).random((clients, clients)))
    expected = squareform(1.0 - relevance_matrix(rows), checks=False)
    assert np.array_equal(relevance_distances(rows, block=block), expected)
    assert np.allclose(relevance_distances(rows, False, block), expected, atol=1e-7)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 14),
    block=st.integers(1, 15),
    proximity=st.sampled_from(["principal_angle", "vector_angle_sum", "euclidean"]),
    data=st.data(),
)
def test_a_part_of_the_blocks_is_that_part_of_the_distances(seed, clients, block, proximity, data):
    rng = np.random.default_rng(seed)
    if proximity == "euclidean":
        signatures = [rng.random(rng.integers(1, 6)) + 0.01 for _ in range(clients)]
    else:
        signatures = bases(rng, clients)
    packed = [pack(proximity, signatures[i : i + block]) for i in range(0, clients, block)]
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, clients - 1), min_size=1))))
    part = take(packed, ids)
    assert part.size == len(ids)
    whole = squareform(condensed_distances(proximity, signatures)) if clients > 1 else np.zeros((1, 1))
    found = tile(proximity, part, part, precise=True)
    off = ~np.eye(len(ids), dtype=bool)
    assert np.allclose(found[off], whole[np.ix_(ids, ids)][off], atol=1e-5)


@pytest.mark.parametrize("name", ["principal_angle", "vector_angle_min", "min_distance", "euclidean"])
def test_a_block_that_travels_is_the_same_to_the_last_bit(name: str) -> None:
    """Arrays in another order than C's lose it on the way, and their products round differently."""
    rng = np.random.default_rng(3)
    count = 1 if name == "euclidean" else 3
    signatures = [np.linalg.qr(rng.normal(size=(64, count)))[0].astype(np.float32) for _ in range(6)]
    block = pack(name, signatures)
    assert all(vectors.flags.c_contiguous for _, vectors in block.parts)
    np.testing.assert_array_equal(tile(name, block), tile(name, pickle.loads(pickle.dumps(block))))
