"""Methods with a server step or a client report of their own, against loops written from the papers: FedAvgM,
FedAdam (Reddi et al. 2021, Algorithms 1 and 2) and q-FedAvg (Li et al. 2020, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rayfl.algorithms import ALGORITHMS
from rayfl.algorithms.fedadam import Adam
from rayfl.algorithms.fedavgm import Momentum
from rayfl.api import run
from rayfl.clients.partial import Partial
from rayfl.server_step import Averaged
from rayfl.servers.lps import MODEL, LocalServer, Optimizer, ReduceJob
from tests.servers.test_hierarchy import CLASSES, LR, D, Data, last, load_initial, mean, with_cohorts

Vector = NDArray[np.float64]

COHORTS = [[0, 1, 2, 4, 5, 7], [0, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6], [0, 8]]


@pytest.fixture
def softmax(settings: dict[str, Any]) -> dict[str, Any]:
    """Softmax regression, whole gradients, four rounds."""
    training = {"epochs": 2, "batch_size": 1000, "lr": LR}
    return {**settings, "model": "linear", "training": training, "rounds": len(COHORTS)}


def local_mean(data: Data, cohort: list[int], w: Vector) -> Vector:
    return mean([(data.local(i, w), float(data.sizes[i])) for i in cohort])


def fedavgm(data: Data, w: Vector, beta: float, eta: float) -> Vector:
    v = np.zeros_like(w)
    for cohort in COHORTS:
        v = beta * v + local_mean(data, cohort, w) - w
        w = w + eta * v
    return w


def fedadam(data: Data, w: Vector, beta1: float, beta2: float, tau: float, eta: float) -> Vector:
    m, v = np.zeros_like(w), np.full_like(w, tau**2)
    for cohort in COHORTS:
        delta = local_mean(data, cohort, w) - w
        m, v = beta1 * m + (1 - beta1) * delta, beta2 * v + (1 - beta2) * delta**2
        w = w + eta * m / (np.sqrt(v) + tau)
    return w


def loss(data: Data, i: int, w: Vector) -> float:
    logits = data.x[i] @ w[: D * CLASSES].reshape(CLASSES, D).T + w[D * CLASSES :]
    logits = logits - logits.max(axis=1, keepdims=True)
    return float((np.log(np.exp(logits).sum(axis=1)) - (logits * data.y[i]).sum(axis=1)).mean())


def qfedavg(data: Data, w: Vector, q: float) -> Vector:
    for cohort in COHORTS:
        above, below = np.zeros_like(w), 0.0
        for i in cohort:
            p, f = data.sizes[i], loss(data, i, w)
            step = (w - data.local(i, w)) / LR
            above += p * f**q * step
            below += p * (q * f ** (q - 1) * (step @ step) + f**q / LR)
        w = w - above / below
    return w


CASES: dict[str, tuple[dict[str, Any], Callable[[Data, Vector], Vector]]] = {
    "fedavgm": ({"beta": 0.8, "server_lr": 0.7}, lambda data, w: fedavgm(data, w, 0.8, 0.7)),
    "fedadam": (
        {"beta1": 0.6, "beta2": 0.9, "tau": 0.01, "server_lr": 0.02},
        lambda data, w: fedadam(data, w, 0.6, 0.9, 0.01, 0.02),
    ),
    "qfedavg": ({"q": 2.0}, lambda data, w: qfedavg(data, w, 2.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_papers_loop(name: str, softmax: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with_cohorts(monkeypatch, COHORTS, ALGORITHMS[name])
    given, expected = CASES[name]
    result = run({**softmax, "algorithm": {"name": name, **given}})
    found, start = last(result).models, load_initial(softmax)
    wanted = expected(Data(softmax), start)
    assert np.abs(wanted - start).max() > 0.05
    np.testing.assert_allclose(found, wanted[None], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "neutral"), [("fedavgm", {"beta": 0.0}), ("qfedavg", {"q": 0.0})])
def test_without_its_idea_it_is_fedavg(
    name: str, neutral: dict[str, Any], softmax: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("fedavg", name):
        with_cohorts(monkeypatch, COHORTS, ALGORITHMS[method])
    fedavg = last(run({**softmax, "algorithm": "fedavg"})).models
    found = last(run({**softmax, "algorithm": {"name": name, **neutral}})).models
    np.testing.assert_allclose(found, fedavg, rtol=0, atol=1e-6)


def test_a_loss_that_clients_send_is_in_the_ledger(softmax: dict[str, Any]) -> None:
    sent = run({**softmax, "algorithm": "qfedavg"}).communication
    reports = sent[sent["kind"] == "report"]
    assert reports["bytes"].tolist() == [4 * 9] * len(COHORTS)
    assert set(reports["direction"]) == {"up"}


def test_the_steps_by_hand() -> None:
    averaged = Averaged(np.array([1.0, 1.0]), np.array([2.0, 0.0]), 3, 6)
    new, kept = Momentum(0.5, 2.0).apply(averaged, {"v": np.array([4.0, 0.0])})
    assert (new.tolist(), kept["v"].tolist()) == ([7.0, -1.0], [3.0, -1.0])
    zeros = {"m": np.zeros(2), "v": np.zeros(2)}
    new, kept = Adam(0.0, 0.0, 1.0, 1.0).apply(averaged, zeros)
    assert (new.tolist(), kept["m"].tolist(), kept["v"].tolist()) == ([1.5, 0.5], [1, -1], [1, 1])


def test_what_a_server_keeps_follows_its_model_and_its_checkpoint(softmax: dict[str, Any]) -> None:
    """One (V, P) for each model, as long as the model."""
    kept = last(run({**softmax, "algorithm": "fedadam"})).memories
    assert kept.shape == (1, 2, D * CLASSES + CLASSES)
    assert (kept[0, 1] > 0).all()
    assert np.abs(kept[0, 0]).max() > 0


def test_a_server_keeps_something_also_where_nobody_delivered() -> None:
    """Of a model whose clients all failed in its first round; a checkpoint writes it."""
    optimizer = Optimizer(Momentum(0.5, 1.0), np.array([0]), np.array([2]))
    job = ReduceJob(0, ((0, 3),), (), optimizer=optimizer)
    model = np.array([1, 2, 3], np.float32)
    objects = {MODEL: model, ("sum", 0): Partial(np.zeros(3), 0.0)}
    found = LocalServer().reduce(job, objects).objects
    assert found[MODEL].tolist() == [1, 2, 3]
    assert found["memory", 0].tolist() == [[0, 0, 0]]


# --- when they fail, as their docstrings say ----------------------------------------------------------------


def test_momentum_lengthens_steps() -> None:
    """Equal updates in every round: the steps approach ``1 / (1 - beta)`` times FedAvg's."""
    step, kept = Momentum(0.9, 1.0), {"v": np.zeros(2)}
    averaged = Averaged(np.zeros(2), np.array([1.0, -2.0]), 3, 6)
    for _ in range(200):
        new, kept = step.apply(averaged, kept)
    np.testing.assert_allclose(new, [10, -20], rtol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_steps_of_adam_do_not_follow_the_updates(factor: float) -> None:
    """Updates that are a hundred times as long make steps of the same length, about eta."""
    step = Adam(0.9, 0.99, 1e-3, 0.01)
    kept = dict.fromkeys("mv", np.zeros(2))
    averaged = Averaged(np.zeros(2), factor * np.array([1.0, -2.0]), 3, 6)
    for _ in range(2000):
        new, kept = step.apply(averaged, kept)
    np.testing.assert_allclose(new, [0.01, -0.01], rtol=2e-3)


def test_a_larger_q_makes_shorter_steps(softmax: dict[str, Any]) -> None:
    data, start = Data(softmax), load_initial(softmax)
    lengths = [np.linalg.norm(qfedavg(data, start, q) - start) for q in (0.0, 1.0, 5.0, 20.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0] / 2
