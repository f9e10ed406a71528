"""The scenarios of the papers as presets: who gets which of the real samples."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq

from rayfl.config import load
from rayfl.data import Assignment, Samples
from tests.conftest import RealData


def assigned(preset: str, folder: Any) -> tuple[Samples, Assignment, Any]:
    config = load(preset)
    samples = config.data.load(folder)
    return samples, config.partition.assign(samples, config.seed), config


def flat(assignment: Assignment) -> np.ndarray:
    return np.concatenate(assignment.clients)


def test_scenario_1(real_data: RealData) -> None:
    samples, found, _ = assigned("flt-scenario1", real_data("fashion_mnist"))
    assert len(found.clients) == 100
    assert {len(part) for part in found.clients} == {600}
    assert found.groups is not None
    assert np.bincount(found.groups).tolist() == [20] * 5
    for part, group in zip(found.clients, found.groups.tolist(), strict=True):
        assert set(samples.y_train[part].tolist()) == {2 * group, 2 * group + 1}
    assert np.array_equal(np.sort(flat(found)), np.arange(60_000))


def test_scenario_2(real_data: RealData) -> None:
    samples, found, config = assigned("flt-scenario2", real_data("fashion_mnist"))
    assert {len(part) for part in found.clients} == {600}
    sets = [set(task.labels) for task in config.partition.tasks]
    assert all(len(a & b) == 1 for a, b in pairwise([*sets, sets[0]]))
    assert found.groups is not None
    for part, group in zip(found.clients, found.groups.tolist(), strict=True):
        assert set(samples.y_train[part].tolist()) == sets[group]
    assert np.array_equal(np.sort(flat(found)), np.arange(60_000))


@pytest.mark.parametrize(
    ("preset", "clients", "least"),
    [("flt-scenario4-small", 240, 60), ("flt-scenario4-mlp", 2400, 6), ("flt-scenario4-cnn", 600, 25)],
)
def test_scenario_4_spends_the_samples_of_each_cluster_exactly(
    real_data: RealData, preset: str, clients: int, least: int
) -> None:
    samples, found, _ = assigned(preset, real_data("emnist_letters"))
    assert len(found.clients) == clients
    assert found.groups is not None
    members = clients // 5
    assert np.bincount(found.groups).tolist() == [members] * 5
    sizes = np.array([len(part) for part in found.clients])
    for cluster in range(5):
        labels = range(5 * cluster, 5 * cluster + 5)
        own = np.concatenate([found.clients[i] for i in np.flatnonzero(found.groups == cluster)])
        # All of the cluster's samples, and each once.
        np.testing.assert_array_equal(np.sort(own), np.flatnonzero(np.isin(samples.y_train, labels)))

        # Algorithm 4: alpha + exp(beta m^delta), beta from the sum, here with delta = 2.
        ranks = np.arange(1, members + 1, dtype=float)
        total = len(own)
        beta = brentq(lambda b, r=ranks, n=total: (least + np.exp(b * r**2)).sum() - n, 0, 10 / members**1.5)
        expected = least + np.exp(beta * ranks**2)
        assert abs(sizes[found.groups == cluster] - expected).max() < 1.01
    assert sizes.min() >= least
    assert sizes.max() > 5 * least
    # Shuffled before they are dealt: most clients see all letters of their cluster.
    kinds = [len(np.unique(samples.y_train[part])) for part in found.clients]
    assert np.mean(kinds) > 4


def test_cfl_label_swap(real_data: RealData) -> None:
    samples, found, _ = assigned("cfl-label-swap", real_data("fashion_mnist"))
    assert len(np.unique(flat(found))) == 20 * 300
    assert found.label_maps is not None
    moved = found.label_maps[1:] != np.arange(10)
    assert moved.sum(axis=1).tolist() == [2, 2, 2, 2]
    assert moved.sum(axis=0).max() == 1
    assert samples.label_maps is None


def test_cfl_congruent(real_data: RealData) -> None:
    samples, found, _ = assigned("cfl-congruent", real_data("fashion_mnist"))
    assert [sorted(set(samples.y_train[part].tolist())) for part in found.clients] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert [len(part) for part in found.clients] == [30_000, 30_000]
