"""Local and global parameter servers, against loops written from the papers: MT-HFL (Ali and Arafa, 2024,
Algorithm 1) and HierFAVG (Liu et al., 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rayfl.algorithms import GlobalStep
from rayfl.algorithms.mt_hfl import MTHFL
from rayfl.config import load
from rayfl.data.events import build_stages
from rayfl.runtime.backend import InlineBackend
from rayfl.runtime.checkpoint import Checkpoint, checkpoints
from rayfl.runtime.lps import Partial, Reduced, Weight
from rayfl.runtime.servers import Servers
from rayfl.runtime.session import Result, build, run
from rayfl.training import Batches

D, CLASSES, LR, EPOCHS = 64, 10, 0.5, 2
P = D * CLASSES + CLASSES
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2]  # tests/runtime/conftest.py

Weighted = tuple[NDArray[np.float64], float]


class Data:
    """The clients' samples, and plain gradient descent on softmax regression in double precision."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config = load(settings)
        samples = config.data.load(Path())
        part = config.partition
        (stage, *_) = build_stages(
            samples, part, (), validation=part.validation, test_samples=None, seed=config.seed, rounds=1
        )
        train = stage.federation.train
        batches = Batches(samples, torch.device("cpu"))
        pairs = [batches.train(ids) for ids in train]
        self.x = [x.reshape(len(x), D).double().numpy() for x, _ in pairs]
        self.y = [np.eye(CLASSES)[y.numpy()] for _, y in pairs]
        self.sizes = [len(x) for x in self.x]

    def local(self, client: int, w: NDArray[np.float64]) -> NDArray[np.float64]:
        """Local updates with all of the client's samples."""
        x, y = self.x[client], self.y[client]
        for _ in range(EPOCHS):
            matrix, bias = w[: D * CLASSES].reshape(CLASSES, D), w[D * CLASSES :]
            logits = x @ matrix.T + bias
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            delta = (p / p.sum(axis=1, keepdims=True) - y) / len(x)
            w = w - LR * np.concatenate([(delta.T @ x).ravel(), delta.sum(axis=0)])
        return w


def mean(parts: Sequence[Weighted]) -> NDArray[np.float64]:
    return np.average([w for w, _ in parts], axis=0, weights=[n for _, n in parts])


def reference(
    data: Data,
    start: NDArray[np.float64],
    servers: Sequence[int],
    cohorts: Sequence[Sequence[int]],
    kappa: int,
    weights: str = "participated",
) -> NDArray[np.float64]:
    """The models ``(L, P)`` of the local servers; all layers are common.

    Args:
        data: the clients'.
        start: w_0.
        servers: of each client, its local server.
        cohorts: of each round, who trains.
        kappa: local rounds between two global ones.
        weights: as ``hierarchy.weights``.
    """
    local = [start] * (max(servers) + 1)
    since = [0] * len(local)
    for t, cohort in enumerate(cohorts, 1):
        for k in range(len(local)):
            mine = [(data.local(i, local[k]), float(data.sizes[i])) for i in cohort if servers[i] == k]
            if mine:
                local[k] = mean(mine)
                since[k] += int(sum(n for _, n in mine))
        if t % kappa == 0:
            if weights == "population":
                since = [
                    sum(n for n, s in zip(data.sizes, servers, strict=True) if s == k)
                    for k in range(len(local))
                ]
            local, since = [mean(list(zip(local, since, strict=True)))] * len(local), [0] * len(local)
    return np.stack(local)


@pytest.fixture
def softmax(settings: dict[str, Any]) -> dict[str, Any]:
    """Softmax regression, whole gradients, all layers common."""
    return {
        **settings,
        "model": "linear",
        "training": {"epochs": EPOCHS, "batch_size": 1000, "lr": LR},
        "algorithm": "mt_hfl",
        "clustering": {"grouping": "planted"},
        "hierarchy": {"common_layers": "all", "global_every": 3},
    }


def last(result: Result) -> Checkpoint:
    return Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])


def with_cohorts(monkeypatch: pytest.MonkeyPatch, cohorts: Sequence[Sequence[int]]) -> None:
    """Let these clients take part, round by round."""
    monkeypatch.setattr(MTHFL, "cohort", lambda self, setup, state, clients: np.array(cohorts[state.round]))


COHORTS = [[0, 1, 2, 4, 5, 7], [0, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6]]
"""Of the three servers' clients 3, 2, 1, then 2, 3, 1, then 3, 3, 0."""


def gps_bytes(result: Result) -> dict[tuple[int, str], int]:
    sent = result.communication
    sent = sent[sent["tier"] == "lps_gps"]
    return {(int(r), str(d)): int(b) for r, d, b in sent[["round", "direction", "bytes"]].to_numpy()}


@pytest.mark.parametrize("weights", ["participated", "population"])
def test_the_global_server_counts_what_was_trained_since_its_last_step(
    weights: str, softmax: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a local server of which nobody takes part in the last of the kappa rounds."""
    with_cohorts(monkeypatch, COHORTS)
    softmax["hierarchy"]["weights"] = weights
    result = run(softmax)
    models = last(result).models
    expected = reference(Data(softmax), load_initial(softmax), GROUPS, COHORTS, 3, weights)
    np.testing.assert_allclose(models, expected, rtol=0, atol=2e-6)
    assert (models == models[0]).all()
    assert gps_bytes(result) == {(2, "up"): 3 * 4 * P, (2, "down"): 3 * 4 * P}


def load_initial(settings: dict[str, Any]) -> NDArray[np.float64]:
    return build(load(settings))[1].spec.initial().astype(np.float64)


def test_a_server_sends_once_what_it_has_trained(
    softmax: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes part at LPS 2 in rounds 2 to 4: it sends after round 3, and nothing after round 6."""
    cohorts = [*COHORTS[:1], *COHORTS[2:] * 5]
    with_cohorts(monkeypatch, cohorts)
    result = run({**softmax, "rounds": 6})
    expected = reference(Data(softmax), load_initial(softmax), GROUPS, cohorts, 3)
    np.testing.assert_allclose(last(result).models, expected, rtol=0, atol=4e-6)
    down = {(t, "down"): 3 * 4 * P for t in (2, 5)}
    assert gps_bytes(result) == {(2, "up"): 3 * 4 * P, (5, "up"): 2 * 4 * P, **down}


def test_one_server_has_nothing_to_share(softmax: dict[str, Any]) -> None:
    """It is FedAvg, and the global server hears nothing."""
    alone = run({**softmax, "clustering": {"grouping": "single"}})
    assert last(alone).models.tobytes() == last(run(flat(softmax))).models.tobytes()
    assert gps_bytes(alone) == {}


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """The same by FedAvg, without the hierarchy."""
    left = {k: v for k, v in settings.items() if k not in ("clustering", "hierarchy")}
    return {**left, "algorithm": "fedavg"}


# --- the global step by hand: two servers, three numbers, the first two common ----------------------------

MODELS = np.array([[1, 2, 3], [5, 6, 7]], np.float32)
STEP = GlobalStep(((((0, 2),), np.zeros(2, np.int64)),), np.array([True, True]))


@pytest.fixture
def servers() -> Iterator[Servers]:
    backend = InlineBackend()
    made = Servers(backend, SimpleNamespace(P=3), None, block_size=lambda n: n)  # type: ignore[arg-type]
    made.models = list(MODELS)
    yield made
    backend.close()


def trained(*rows: tuple[list[float], Weight, Weight]) -> dict[int, Reduced]:
    """What the GPS learns: sums over the common numbers, their weights, and of all numbers."""
    return {k: Reduced(Partial(np.array(s), w), v, 0.0) for k, (s, w, v) in enumerate(rows)}


def test_weights_add_up_until_the_global_step(servers: Servers) -> None:
    """Server 0 with 2 samples, then server 1 with 1, then server 0 with 1: 3 and 1."""
    servers._gather(STEP, {0: Reduced(Partial(np.empty(0), 2.0), 2.0, 0.0)})
    servers._gather(STEP, {1: Reduced(Partial(np.empty(0), 1.0), 1.0, 0.0)})
    last = trained(([3.0, 4.0], 1.0, 1.0))
    servers._gather(STEP, last)
    assert servers.gathered.tolist() == [[[3], [1]]]
    assert servers._share(STEP, ((0, 2),), last) == (16, 16)
    # (3 * 3 + 1 * 5) / 4 and (3 * 4 + 1 * 6) / 4; the third number stays
    np.testing.assert_array_equal(servers.models, [[3.5, 4.5, 3], [3.5, 4.5, 7]])
    assert servers.gathered.tolist() == [[[0], [0]]]


def test_numbers_that_clients_leave_out_gather_weights_of_their_own(servers: Servers) -> None:
    """Sub-FedAvg: server 0 had number 0 kept by 2 samples before; now only number 1 is kept, by 3."""
    before = np.array([2.0, 0.0, 2.0])
    servers._gather(STEP, {0: Reduced(Partial(np.empty(0), before), before, 0.0)})
    now = np.array([0.0, 3.0, 0.0])
    last = trained(
        ([1.0, 12.0], now[:2], now), ([10.0, 12.0], 2.0, 2.0)
    )  # sums; models where the weight is 0
    servers._gather(STEP, last)
    servers._share(STEP, ((0, 2),), last)
    # number 0: (2 * 1 + 10) / 4; number 1: (12 + 12) / 5
    np.testing.assert_allclose(servers.models, [[3, 4.8, 3], [3, 4.8, 7]])


def test_a_server_that_is_not_due_keeps_what_it_gathered(servers: Servers) -> None:
    later = replace(STEP, due=np.array([True, False]))
    last = trained(([2.0, 4.0], 2.0, 2.0), ([10.0, 12.0], 2.0, 2.0))
    servers._gather(later, last)
    assert servers._share(later, ((0, 2),), last) == (0, 0)  # alone
    np.testing.assert_array_equal(servers.models, MODELS)
    assert servers.gathered.tolist() == [[[2], [2]]]


def test_clusters_that_come_of_one_divide_what_it_gathered(servers: Servers) -> None:
    servers.gathered = np.array([[[6.0], [4.0]]])
    servers.inherit(np.array([0, 1, 0]))
    assert servers.gathered.tolist() == [[[3], [4], [3]]]
