"""CFL's mathematics on updates of a real network, against the plain loop of experiments/cfl/gap.py."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import squareform

from experiments.cfl import gap
from rayfl.clustering import bipartition, cosines, quality


@pytest.fixture(scope="module")
def trained(real_data: Callable[[str], Path]):
    """Twenty clients in four groups with two labels swapped, after five rounds of FedAvg."""
    x, y = gap.read(real_data("fashion_mnist") / "fashion_mnist.npz")
    federation = gap.label_swap(x, y, clients=20, groups=4, samples=100, seed=0)
    _, table, updates = gap.federated(federation, gap.initial(0), 5, gap.Settings(), seed=0)
    return np.array([client.group for client in federation]), table, updates.numpy()


@pytest.mark.slow
def test_the_gap_opens_on_real_images(trained):
    """Figures 5 and 6: with 100 samples a client the bipartition is correct after five rounds, g > 0."""
    _, table, _ = trained
    last = table.iloc[-1]
    assert last["correct"] == 1
    assert last["gap"] > 0.2
    assert last["gap"] > table["gap"][0] + 0.2
    assert last["mean_norm"] < 0.75 * table["mean_norm"][0]
    assert last["max_norm"] > 0.9 * table["max_norm"][0]


def test_the_oracle_and_the_package_agree(trained):
    groups, table, updates = trained
    similarities, lengths = cosines.condensed_cosines([updates[:6], updates[6:14], updates[14:]])
    square = gap.cosines(torch.from_numpy(updates))
    assert np.abs(squareform(similarities) + np.eye(20) - square).max() < 3e-7
    halves = bipartition.bipartition(similarities, range(20))
    assert [halves.first.tolist(), halves.second.tolist()] == list(gap.bipartition(square))
    assert bipartition.is_correct(halves, groups)
    last = table.iloc[-1]
    assert halves.gamma == pytest.approx(last["gamma"], abs=1e-6)
    assert bipartition.separation_gap(similarities, groups) == pytest.approx(last["gap"], abs=1e-6)
    assert quality.separation_gap(square, groups) == pytest.approx(last["gap_all_groups"], abs=1e-6)
    assert lengths.max() == pytest.approx(last["max_norm"], rel=1e-6)
    assert cosines.mean_norm(similarities, lengths, np.ones(20)) == pytest.approx(last["mean_norm"], rel=1e-4)


def test_sketches_of_real_updates_give_a_correct_bipartition(trained):
    """P = 159,010 numbers to 1,024."""
    groups, _, updates = trained
    exact, _ = cosines.condensed_cosines([updates])
    small, _ = cosines.condensed_cosines([cosines.sketch(updates, 1024, seed=0)])
    assert np.sqrt(np.mean((small - exact) ** 2)) < 1.1 / np.sqrt(1024)
    assert bipartition.is_correct(bipartition.bipartition(small, range(20)), groups)


@pytest.mark.slow
def test_algorithm_5_finds_the_four_groups_and_stops(real_data: Callable[[str], Path]):
    x, y = gap.read(real_data("fashion_mnist") / "fashion_mnist.npz")
    federation = gap.label_swap(x, y, clients=20, groups=4, samples=100, seed=0)
    clusters, _ = gap.cfl(federation, gap.initial(0), 40, gap.Settings(), 0, eps1=0.12, eps2=0.35, gamma=0.0)
    assert sorted(clusters) == [tuple(range(g, 20, 4)) for g in range(4)]
