"""The local parameter server: kept models, masks, dense rows, vectors, common layers; against NumPy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.clients.host import partial_product
from rayfl.clients.partial import Partial
from rayfl.servers.lps import accumulated, merge
from tests.servers.serving import combine, install, reduce

ALL = ((0, 6),)
rng = np.random.default_rng(0)
W = rng.standard_normal((5, 6)).astype(np.float32)
OLD = rng.standard_normal(6).astype(np.float32)
A = np.array([3.0, 1.0, 4.0, 1.0, 5.0])


def test_part_of_the_old_model_is_kept() -> None:
    """FedNova: (sum_j a_j w_j + b w) / (sum_j a_j + b), b from two blocks, one of them negative."""
    parts = [
        Partial(A[:2] @ W[:2].astype(np.float64), 4.0, keep=2.5),
        Partial(A[2:] @ W[2:].astype(np.float64), 10.0, keep=-0.5),
    ]
    new, _ = reduce(ALL, (), OLD, *parts)
    np.testing.assert_allclose(new, (A @ W + 2.0 * OLD) / 16.0, rtol=1e-6)


def test_keeping_everything_or_nothing() -> None:
    one = Partial(W[0].astype(np.float64) * 2, 2.0)
    np.testing.assert_array_equal(reduce(ALL, (), OLD, one)[0], W[0])
    nobody = Partial(np.zeros(6), 0.0, keep=3.0)
    np.testing.assert_array_equal(reduce(ALL, (), OLD, nobody)[0], OLD)


def test_each_number_is_averaged_over_those_who_kept_it() -> None:
    """Sub-FedAvg: (A (M * W)) / (A M); a number that nobody kept stays."""
    kept = (rng.random((5, 6)) < 0.5).astype(np.float32)
    kept[:, 2] = 0
    kept[:, 3] = 1
    parts = [
        Partial(*partial_product(A[s], torch.from_numpy(W[s]), torch.from_numpy(kept[s])))
        for s in (slice(0, 2), slice(2, 5))
    ]
    new, reduced = reduce(ALL, ((1, 4),), OLD, *parts)
    expected = OLD.copy()
    for p in range(6):
        if kept[:, p].any():
            expected[p] = (A * kept[:, p] * W[:, p]).sum() / (A * kept[:, p]).sum()
    np.testing.assert_allclose(new, expected, rtol=1e-6)
    assert new[2] == OLD[2]
    np.testing.assert_allclose(reduced.common.weight, (A[:, None] * kept).sum(0)[1:4])
    # The GPS does not touch what nobody kept, and averages the rest over two such clusters.
    other = Partial(np.array([10.0, 0.0, 10.0]), np.array([5.0, 0.0, 5.0]))
    merged = merge([reduced.common, other], [reduced.common.weight, other.weight])
    assert merged is not None
    installed = install(((1, 4),), new, merged)
    assert installed[2] == OLD[2]
    weight = (A * kept[:, 1]).sum()
    total = (A * kept[:, 1] * W[:, 1]).sum()
    assert installed[1] == pytest.approx((total + 10) / (weight + 5), rel=1e-6)


def test_how_far_a_model_moved() -> None:
    """Also where only some numbers are shared; a model that nobody trained did not."""
    one = Partial(np.array([1.0, 2.0]), 1.0)
    model = np.array([9, 1, 0, 9], np.float32)
    assert reduce(((1, 3),), (), model, one)[1].update_norm == 2.0
    assert reduce(((1, 3),), (), model, Partial(np.zeros(2), 0.0))[1].update_norm == 0.0


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    kept=st.booleans(),
    common=st.sampled_from([(), ((0, 6),), ((1, 3), (4, 5))]),
)
def test_trained_rows_give_what_sums_give(
    labels: list[int], cut: int, kept: bool, common: tuple[tuple[int, int], ...]
) -> None:
    """One row a cluster, whole numbers: ``combine`` and ``reduce`` agree bit for bit."""
    m, k = len(labels), 4
    draw = np.random.default_rng(m + cut)
    rows = draw.standard_normal((m, 6)).astype(np.float32)
    old = draw.standard_normal((k, 6)).astype(np.float32)
    weights = np.zeros((k, m))
    weights[labels, np.arange(m)] = draw.integers(1, 500, m)
    keep = draw.integers(0, 9, k).astype(np.float64) * kept * (weights.sum(1) > 0)
    blocks = [s for s in (slice(0, min(cut, m)), slice(min(cut, m), m)) if s.start < s.stop]
    parts = [weights[:, s] for s in blocks]
    new, facts = combine(ALL, common, old, [rows[s] for s in blocks], weights=parts, keep=keep)
    for row in range(k):
        sums = [Partial(*partial_product(weights[row, s], torch.from_numpy(rows[s]))) for s in blocks]
        sums[0] = Partial(sums[0].total, sums[0].weight, keep[row])
        model, fact = reduce(ALL, common, old[row], *sums)
        assert new[row].tobytes() == model.tobytes()
        assert facts[row].update_norm == fact.update_norm
        np.testing.assert_allclose(facts[row].common.total, fact.common.total, rtol=1e-12)
        assert facts[row].common.weight == fact.common.weight


def test_who_failed_is_left_out_of_dense_rows_too() -> None:
    """Whatever its row holds."""
    rows = W.copy()
    rows[1] = np.nan
    weights = np.array([[3.0, 0, 4, 0, 0], [0, 0, 0, 1, 5]])
    new, _ = combine(ALL, (), [OLD, OLD], [rows], weights=[weights])
    np.testing.assert_allclose(new[0], (3 * W[0] + 4 * W[2]) / 7, rtol=1e-6)
    np.testing.assert_allclose(new[1], (W[3] + 5 * W[4]) / 6, rtol=1e-6)


def test_overlapping_rows() -> None:
    """FLIS (DC): a client may count in several models, and models in the old one's place if it in none."""
    weights = np.array([[1.0, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    parts = [weights[:, :2], weights[:, 2:]]
    new, _ = combine(ALL, (), [OLD, OLD, OLD], [W[:2], W[2:]], weights=parts)
    np.testing.assert_allclose(new[0], W[:2].mean(0), rtol=1e-6)
    np.testing.assert_allclose(new[1], W[:3].mean(0), rtol=1e-6)
    np.testing.assert_array_equal(new[2], OLD)


def test_a_vector_beside_the_model_moves_by_its_members_share() -> None:
    """SCAFFOLD: c + (sum over the cohort of c_i+ - c_i) / N."""
    parts = [Partial(np.zeros(6), 1.0, extra=np.array([1.0, 2])), Partial(np.zeros(6), 1.0, extra=np.ones(2))]
    new = accumulated(np.array([10, 20], np.float32), 4, parts)
    assert new.tolist() == [10.5, 20.75]
    assert new.dtype == np.float32


def test_long_sums_travel_in_pieces_and_add_up_to_the_same() -> None:
    """In the order of the blocks, whatever is in pieces; one number stands for as many as there are."""
    rng = np.random.default_rng(5)
    size, shared = 200_000, ((0, 200_000),)
    model = rng.standard_normal(size).astype(np.float32)
    extras = [rng.standard_normal(size) for _ in range(3)]
    whole = [Partial(rng.standard_normal(size), float(k + 1), extra=extras[k]) for k in range(3)]
    parts = [partial.cut() for partial in whole]
    for sent in (parts[0].total, parts[0].extra):
        assert isinstance(sent, tuple)
        assert max(piece.nbytes for piece in sent) < 2**20
    absent = Partial(np.zeros(1), 0.0, keep=2.0)
    new, _ = reduce(shared, (), model, *parts, absent)
    again, _ = reduce(shared, (), model, *whole, absent)
    total = whole[0].total + whole[1].total + whole[2].total
    assert new.tobytes() == ((total + 2 * model.astype(np.float64)) / 8).astype(np.float32).tobytes()
    assert new.tobytes() == again.tobytes()
    vector = accumulated(model, 4, parts)
    assert vector.tobytes() == (model + (extras[0] + extras[1] + extras[2]) / 4).astype(np.float32).tobytes()


@pytest.mark.parametrize("module", ["servers.lps", "runtime.remote"])
def test_a_server_needs_no_torch(module: str) -> None:
    """Which takes 0.25 GB of memory, and a second to import."""
    code = f"import sys, rayfl.{module}; print(sorted({{'torch', 'ray', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
