import numpy as np
import pytest

from rayfl.bench import cluster
from rayfl.clustering.proximity import condensed_distances


def test_planted_signatures_are_orthonormal_and_lie_in_clusters():
    signatures, truth = cluster.planted(420)
    assert all(s.shape == (784, 3) and s.dtype == np.float32 for s in signatures)
    assert max(np.abs(s.T @ s - np.eye(3)).max() for s in signatures) < 1e-5
    assert np.bincount(truth).tolist() == [2 * (k + 1) for k in range(20)]
    i, j = np.triu_indices(420, k=1)
    angles = condensed_distances("principal_angle", signatures)
    assert angles[truth[i] == truth[j]].min() > 2
    assert angles[truth[i] == truth[j]].max() < 20
    assert angles[truth[i] != truth[j]].min() > 35
    again, same = cluster.planted(420)
    assert np.array_equal(truth, same)
    assert np.array_equal(signatures[7], again[7])


def test_the_double_loop_is_extrapolated_from_the_pairs_that_were_timed(monkeypatch):
    signatures, _ = cluster.planted(40)
    times = iter([0.0, 3.0, 0.0, 3.0])
    monkeypatch.setattr(cluster.time, "perf_counter", lambda: next(times))
    assert cluster.double_loop(signatures, pairs=100) == pytest.approx(3.0 / 100 * 780)
    assert cluster.double_loop(signatures, pairs=5000) == pytest.approx(3.0)  # there are 780


@pytest.mark.slow
def test_every_size_is_a_row_of_a_process_of_its_own():
    ballast = np.ones(300_000_000 // 8)  # of this process, so none of a row's memory
    lines: list[str] = []
    first, second = cluster.run((60, 300), compared_clients=None, say=lines.append)
    assert ballast.any()
    assert (first["clients"], first["way"], second["clients"]) == (60, "exact", 300)
    assert second["ari"] == 1
    assert 0.05 < second["peak_gb"] < 0.35
    assert second["signatures_gb"] == pytest.approx(300 * 784 * 3 * 4 / 1e9)
    assert second["double_loop_seconds"] > 10 * first["double_loop_seconds"] > 0
    assert len(lines) == 2
    assert "300 clients, exact" in lines[1]


def test_the_two_ways_are_compared_client_by_client():
    row = cluster.measure_beside(1500)
    assert row["way"] == "two-stage"
    assert row["representatives"] >= 1500 // cluster.SHARE
    assert row["agreement"] == row["ari"] == 1
