import numpy as np
import pytest
from scipy.spatial.distance import cdist, pdist, squareform

from rayfl.clustering import cosines
from rayfl.errors import DataError


def updates(clients, width, seed=0, scale=1e-3):
    """Rows as of clients in two groups: a common direction, one of the group, and noise."""
    random = np.random.default_rng(seed)
    directions = random.standard_normal((3, width))
    rows = directions[2] + 2 * directions[np.arange(clients) % 2] + random.standard_normal((clients, width))
    return (scale * rows).astype(np.float32)


def test_by_hand():
    left, right = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[4.0, 3.0], [-6.0, -8.0], [0.0, 1e-30]])
    assert cosines.norms(left).tolist() == [5, 0]
    expected = [[0.96, -1.0, 0.8], [0.0, 0.0, 0.0]]
    assert cosines.tile(left, right) == pytest.approx(np.array(expected), abs=1e-7)


@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e25])
def test_equals_double_precision_whatever_the_scale(scale):
    rows = updates(9, 3 * cosines.CHUNK + 17, scale=scale)
    similarities, lengths = cosines.condensed_cosines([rows[:4], rows[4:5], rows[5:]])
    exact = rows.astype(np.float64)
    assert np.abs(similarities - (1 - pdist(exact, "cosine"))).max() < 3e-7
    assert lengths == pytest.approx(np.linalg.norm(exact, axis=1), rel=1e-12)


def test_a_tile_of_two_blocks():
    rows = updates(7, 1000)
    expected = 1 - cdist(rows[:3].astype(np.float64), rows[3:].astype(np.float64), "cosine")
    assert np.abs(cosines.tile(rows[:3], rows[3:]) - expected).max() < 3e-7
    known = cosines.tile(rows[:3], rows[3:], cosines.norms(rows[:3]), cosines.norms(rows[3:]))
    assert (known == cosines.tile(rows[:3], rows[3:])).all()
    assert cosines.tile(rows, rows).max() <= 1


def test_no_more_than_two_blocks_at_a_time():
    rows, alive = updates(12, 50), []

    class Store:
        def __len__(self):
            return 4

        def __getitem__(self, k):
            alive.append(k)
            return rows[3 * k : 3 * k + 3]

    similarities, _ = cosines.condensed_cosines(Store())
    assert (similarities == cosines.condensed_cosines([rows[k : k + 3] for k in (0, 3, 6, 9)])[0]).all()
    # norms; then row by row, the block of the row being kept
    assert alive == [0, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3, 2, 3, 3]


def test_nobody_and_one():
    assert [part.shape for part in cosines.condensed_cosines([])] == [(0,), (0,)]
    assert [part.shape for part in cosines.condensed_cosines([np.ones((1, 3))])] == [(0,), (1,)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad):
    rows = updates(3, 5)
    rows[2, 1] = bad
    with pytest.raises(DataError, match="row 2 of the block is not finite"):
        cosines.condensed_cosines([rows])


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="rows of 3 and of 4 numbers"):
        cosines.tile(np.ones((1, 3)), np.ones((1, 4)))


def test_mean_norm_needs_no_vectors():
    rows = updates(10, 500, scale=1.0)
    weights = np.arange(1, 11)
    mean = np.average(rows.astype(np.float64), axis=0, weights=weights)
    similarities, lengths = cosines.condensed_cosines([rows])
    assert cosines.mean_norm(similarities, lengths, weights) == pytest.approx(np.linalg.norm(mean), rel=1e-6)
    # two opposite updates: only rounding is left
    pair = np.stack([rows[0], -rows[0]])
    left = cosines.mean_norm(*cosines.condensed_cosines([pair]), np.ones(2))
    assert left < 1e-3 * cosines.norms(pair)[0]


# ---- sketches


def structured(width):
    """Vectors that a bad projection gets wrong: spikes, sparse ones, constants, all alike, opposite."""
    random = np.random.default_rng(5)
    rows = np.zeros((12, width), np.float32)
    rows[0, 3] = rows[1, 4] = 1  # one number each, not the same
    rows[2, 3], rows[2, 4] = 1, 1  # cosine 0.71 to both
    rows[3, ::100], rows[4, 1::100] = 1, 1
    rows[5] = 1
    rows[6] = np.where(np.arange(width) % 2, 1, -1)
    rows[7] = -rows[5]
    rows[8] = rows[5] + 0.01 * random.standard_normal(width)
    rows[9:] = random.standard_normal((3, width))
    return rows


@pytest.mark.parametrize("projection", ["sparse", "gaussian"])
@pytest.mark.parametrize("make", [structured, lambda width: updates(12, width)])
def test_errors_of_sketches_are_as_stated(projection, make):
    rows, dimension, draws = make(300), 256, 300
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    exact = np.clip(1 - pdist(rows.astype(np.float64), "cosine"), -1, 1)
    pairs = np.triu_indices(len(rows), 1)
    inner, angles = [], []
    for seed in range(draws):
        small = cosines.sketch(unit, dimension, seed, projection)
        inner.append((small @ small.T)[pairs])
        angles.append(cosines.condensed_cosines([small])[0])
    inner, angles = np.array(inner), np.array(angles)
    bound = np.sqrt((1 + exact**2) / dimension)
    # the mean of the draws is right to within bound / sqrt(draws), the worst of 66 pairs to 4.5 of that
    assert (np.abs(inner.mean(axis=0) - exact) < 4.5 * bound / np.sqrt(draws)).all()
    assert np.mean((inner - exact) ** 2 / bound**2) < 1.2
    if projection == "gaussian":
        assert np.mean((inner - exact) ** 2 / bound**2) > 0.8
    assert np.sqrt(np.mean((angles - exact) ** 2)) < 1.1 / np.sqrt(dimension)
    assert np.abs(angles - exact).max() < cosines.sketch_error(12, dimension) / 2
    alike = exact > 0.999
    assert np.abs(angles - exact)[:, alike].max(initial=0) < 0.001  # (1 - a^2) / sqrt(q)


def test_a_sketch_is_linear_and_the_same_for_everyone():
    rows = updates(6, 2 * cosines.CHUNK + 5)
    whole = cosines.sketch(rows, 64, seed=3)
    parts = np.vstack([cosines.sketch(rows[:2], 64, seed=3), cosines.sketch(rows[2:], 64, seed=3)])
    assert (whole == parts).all()
    assert np.abs(cosines.sketch(rows.mean(axis=0, keepdims=True), 64, 3) - whole.mean(axis=0)).max() < 1e-6
    assert not np.allclose(whole, cosines.sketch(rows, 64, seed=4))


def test_the_sparse_projection_has_its_entries_where_it_should():
    width, dimension = 50, 32
    matrix = cosines.sketch(np.eye(width, dtype=np.float32), dimension, 0)
    parts = matrix.reshape(width, cosines.NONZEROS, -1)
    assert ((parts != 0).sum(axis=2) == 1).all()
    assert np.unique(np.abs(matrix[matrix != 0])) == pytest.approx(1 / np.sqrt(8))
    assert 0.4 < (matrix[matrix != 0] > 0).mean() < 0.6
    assert len({tuple(row) for row in matrix.tolist()}) == width


@pytest.mark.parametrize("projection", ["sparse", "gaussian"])
def test_no_two_numbers_of_a_row_are_projected_alike(projection):
    rows = np.zeros((3, 2 * cosines.CHUNK + 4), np.float32)
    rows[np.arange(3), [3, cosines.CHUNK + 3, 2 * cosines.CHUNK + 3]] = 1
    assert np.abs(cosines.condensed_cosines([cosines.sketch(rows, 512, 0, projection)])[0]).max() < 0.3


@pytest.mark.parametrize(("dimension", "projection"), [(0, "gaussian"), (12, "sparse"), (0, "sparse")])
def test_sketch_refuses(dimension, projection):
    with pytest.raises(ValueError, match="multiple of 8"):
        cosines.sketch(np.ones((1, 5)), dimension, 0, projection)


def test_sketch_error_solves_its_equation():
    error = cosines.sketch_error(1000, 4096, failure=0.01)
    e = error / (2 + error)
    assert 2 * 1000**2 * np.exp(-4096 * (e**2 / 4 - e**3 / 6)) == pytest.approx(0.01, rel=1e-6)
    assert cosines.sketch_error(1000, 16384) < error < cosines.sketch_error(100_000, 4096)
    assert cosines.sketch_error(1000, 100) == np.inf


def test_sketches_still_separate_the_groups():
    rows = updates(40, 20_000)
    similarities = squareform(cosines.condensed_cosines([cosines.sketch(rows, 256, 0)])[0])
    same = np.arange(40)[:, None] % 2 == np.arange(40) % 2
    assert similarities[same & ~np.eye(40, dtype=bool)].min() > similarities[~same].max()
