import numpy as np
import pytest

from rayfl.clustering import cosines
from rayfl.clustering.permutation import permutation, permute, restore


@pytest.fixture
def updates():
    return np.random.default_rng(0).standard_normal((8, 50_001)).astype(np.float32)


def test_restore_undoes_permute_bit_for_bit(updates):
    sent = permute(updates, 7)
    assert (sent[3] == permute(updates[3], 7)).all()
    assert not np.allclose(sent, updates)
    assert (restore(sent, 7) == updates).all()
    assert (restore(sent[3], 7) == updates[3]).all()
    assert not (restore(sent, 8) == updates).all()
    assert (sent == updates[:, permutation(50_001, 7)]).all()
    assert sorted(permutation(5, 1).tolist()) == [0, 1, 2, 3, 4]


def test_the_average_is_bit_equal(updates):
    """Eq. 46: a weighted mean is taken number by number, so nothing is rounded otherwise."""
    weights = np.array([[1, 2, 3, 4, 5, 6, 7, 8]], np.float32) / 36

    def one_after_another(rows):
        total = np.zeros(rows.shape[1], np.float32)
        for weight, row in zip(weights[0], rows, strict=True):
            total += weight * row
        return total

    def summed(rows):
        return (weights[0][:, None] * rows).sum(axis=0)

    def product_in_double_precision(rows):
        return (weights.astype(np.float64) @ rows.astype(np.float64)).astype(np.float32)[0]

    for server in (one_after_another, summed, product_in_double_precision):
        assert (restore(server(permute(updates, 3)), 3) == server(updates)).all()


def test_norms_and_cosines_are_the_same_up_to_rounding_only(updates):
    plain, hidden = (cosines.condensed_cosines([rows]) for rows in (updates, permute(updates, 3)))
    assert np.abs(plain[0] - hidden[0]).max() < 3e-7
    assert plain[1] == pytest.approx(hidden[1], rel=1e-12)
    assert (plain[0] != hidden[0]).any()  # which is why nothing more is promised
