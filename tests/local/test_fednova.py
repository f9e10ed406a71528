"""FedNova: weights by hand, Equation 7 in NumPy, equal steps are FedAvg."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from rayfl.algorithms import Setup
from rayfl.algorithms.fedavg import FedAvg
from rayfl.errors import ConfigError
from rayfl.local import OBJECTIVES
from rayfl.local.base import accumulated
from rayfl.ordering import Arrival, Ordering
from rayfl.training import LocalWork, Training
from tests.local.conftest import ETA, ROUND, SIZES, P, Problem


def weights(sizes: list[int], rows: list[int], **training: float) -> tuple[np.ndarray, np.ndarray]:
    found = OBJECTIVES["fednova"]().weights(
        np.array(sizes), np.array(rows), Training.model_validate({"epochs": 1, "batch_size": 10, **training})
    )
    assert found[1] is not None
    return found[0], found[1]


def test_weights_by_hand():
    """n = 30, 10: tau = 3, 1, tau_eff = 3/4 * 3 + 1/4 * 1 = 2.5. Client 0 counts 30 * 2.5 / 3 = 25 and
    leaves 5 of its 30 with the model; client 1 counts 10 * 2.5 / 1 = 25 and takes 15."""
    a, b = weights([30, 10], [0, 0])
    np.testing.assert_allclose(a, [25, 25])
    np.testing.assert_allclose(b, [5, -15])


def test_weights_with_momentum_by_hand():
    """rho = 1/2: a of 2 steps is [1.5, 1], |a| = 2.5; of one step 1. tau_eff = (20 * 2.5 + 10) / 30 = 2."""
    a, b = weights([20, 10], [0, 0], momentum=0.5)
    np.testing.assert_allclose(a, [20 * 2 / 2.5, 10 * 2])
    np.testing.assert_allclose(a + b, [20, 10])


def test_weights_are_normalised_within_each_model():
    a, b = weights([30, 10, 50, 30, 10], [0, 0, 1, 2, 2])
    np.testing.assert_allclose(a, [25, 25, 50, 25, 25])
    np.testing.assert_allclose(b, [5, -15, 0, 5, -15])


def test_clients_that_failed_do_not_count_in_tau_eff():
    """Of n = 30, 10, 20 the last failed: the weights of the first two are those of a round of two."""
    a, b = weights([30, 10, 20], [0, 0, 0])
    two, left = weights([30, 10], [0, 0])
    scale = OBJECTIVES["fednova"]().rescaled(a[:2], b[:2])
    np.testing.assert_allclose(scale * a[:2], two)
    np.testing.assert_allclose(a[:2] + b[:2], two + left)
    assert OBJECTIVES["sgd"]().rescaled(a, b) == 1


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
def test_equal_steps_count_exactly_n(momentum: float):
    """Also where the sums of tau_eff would round."""
    a, b = weights([7, 10, 3, 9], [0, 0, 0, 0], momentum=momentum, epochs=7)
    assert a.tolist() == [7, 10, 3, 9]
    assert b.tolist() == [0, 0, 0, 0]


def test_accumulated_gradients_by_hand():
    """The closed form of the paper, one step after another, and what unit gradients add up to."""
    tau, rho = np.arange(9), 0.7
    closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    np.testing.assert_allclose(accumulated(tau, rho), closed, atol=1e-12)
    assert accumulated(tau, 0.0).tolist() == tau.tolist()
    for alpha, power in ((0.0, 1.0), (0.5, 0.75)):
        w = velocity = 0.0
        for t in range(8):
            velocity = rho * velocity + 1.0
            w -= (1 + alpha * t) ** -power * velocity
        assert accumulated(np.array([8]), rho, alpha, power)[0] == pytest.approx(-w)
    assert accumulated(np.zeros(3, np.int64), 0.5).tolist() == [0, 0, 0]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_two_clients_by_hand(problem: Problem, momentum: float):
    """w <- w - eta tau_eff sum_i p_i d_i, d_i = (w - w_i) / (eta |a_i|): 30 and 12 samples in tens make 6 and
    4 steps in two epochs."""
    w, p = problem.start(), np.array(SIZES) / sum(SIZES)
    for t in range(2):
        batches = [problem.batches(i, t, 2, 10) for i in (0, 1)]
        local = [problem.sgd(w, i, batches[i], momentum=momentum) for i in (0, 1)]
        a = np.zeros(2)
        for i, tau in enumerate((6, 4)):
            assert len(batches[i]) == tau
            a[i] = sum(momentum ** (k - j) for k in range(tau) for j in range(k + 1))
        d = [(w - local[i]) / (ETA * a[i]) for i in (0, 1)]
        w = w - ETA * (p @ a) * (p[0] * d[0] + p[1] * d[1])
    overrides = "rounds=2", "training.batch_size=10", f"training.momentum={momentum}"
    ran = problem.run(*overrides, local="fednova")
    np.testing.assert_allclose(ran.model, w, rtol=0, atol=2 * ROUND)
    assert np.abs(ran.model - problem.run(*overrides).model).max() > 1e-3


class Tens(FedAvg):
    """Batches of ten, whatever the section ``training`` says."""

    name: Literal["in_tens"] = "in_tens"

    def work(self, setup: Setup, state: Any) -> LocalWork:
        return replace(super().work(setup, state), batch_size=10)


def test_steps_are_those_of_the_round(problem: Problem):
    nova = problem.run("rounds=2", "training.batch_size=100", algorithm=Tens(), local="fednova")
    tens = problem.run("rounds=2", "training.batch_size=10", local="fednova")
    assert nova.summary["models_sha256"] == tens.summary["models_sha256"]


class FirstTen(Ordering):
    """One step an epoch, on a client's first ten samples."""

    name: Literal["first_ten"] = "first_ten"

    def visits(self, arrival: Arrival) -> list[list[np.ndarray]]:
        return [[np.arange(10)] * arrival.work.epochs for _ in arrival.clients]


def test_an_order_with_other_numbers_of_steps_is_refused(problem: Problem):
    """The weights count 6 and 4 steps in two epochs, where the order has two."""
    settings = "rounds=1", "training.batch_size=10"
    problem.run(*settings, order=FirstTen())
    with pytest.raises(ConfigError, match="order: takes 2 local steps with 30 samples") as refused:
        problem.run(*settings, order=FirstTen(), local="fednova")
    assert "counts 6, as many as shuffled batches take" in str(refused.value)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_equal_steps_are_fedavg_bit_for_bit(problem: Problem, momentum: float):
    overrides = "rounds=3", "training.batch_size=100", f"training.momentum={momentum}"
    nova = problem.run(*overrides, local="fednova")
    assert nova.summary["models_sha256"] == problem.run(*overrides).summary["models_sha256"]
    assert nova.bytes("up") == 3 * 2 * P * 4
