"""FedProx, by hand and at its limits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.local.conftest import ROUND, SIZES, Problem


def test_two_clients_by_hand(problem: Problem):
    """Two rounds of two full-batch steps on loss + mu/2 |w - w_global|^2, averaged by n_i."""
    w, mu = problem.start(), 0.8
    for t in range(2):
        local = [
            problem.sgd(w, i, problem.batches(i, t, 2, 100), extra=lambda v, w=w: mu * (v - w))
            for i in (0, 1)
        ]
        w = np.average(local, axis=0, weights=SIZES)
    ran = problem.run("rounds=2", local={"name": "fedprox", "mu": mu})
    np.testing.assert_allclose(ran.model, w, rtol=0, atol=2 * ROUND)
    assert np.abs(ran.model - problem.run("rounds=2").model).max() > 1e-3  # not just FedAvg


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_mu_of_zero_is_fedavg_bit_for_bit(problem: Problem, momentum: float):
    overrides = "rounds=3", "training.batch_size=7", f"training.momentum={momentum}"
    zero = problem.run(*overrides, local={"name": "fedprox", "mu": 0.0})
    assert zero.summary["models_sha256"] == problem.run(*overrides).summary["models_sha256"]


def test_the_larger_mu_the_nearer_to_the_start(problem: Problem):
    start = problem.start()
    moved = [
        np.linalg.norm(problem.run(f"local.mu={mu}", local={"name": "fedprox"}).model - start)
        for mu in (0.0, 0.5, 2.0)
    ]
    assert moved[0] > moved[1] > moved[2]
