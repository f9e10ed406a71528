"""FedSoft: clients that start from mixtures of models. A loop written from the paper, what is asked and
counted, mixtures planted in digits, and how servers form a mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rayfl.algorithms import Plan
from rayfl.algorithms.fedsoft import FedSoft, FedSoftState
from rayfl.api import client_models
from rayfl.api import run as run_config
from rayfl.clients.jobs import Mixture
from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.servers import hooks
from tests.algorithms.fakes import SIZES, FakeClients, algorithm, setup
from tests.algorithms.test_identities import N, P, Ran, Run, run, same
from tests.servers.test_hierarchy import CLASSES, EPOCHS, LR, D, Data, last

__all__ = ["run"]

Vector = NDArray[np.float64]


class Counting(FakeClients):
    """Each client fits its first model best on half of its samples, and the second on the others."""

    def samples_by_model(self, clients: NDArray[np.int64], split: str) -> NDArray[np.int64]:
        self.asked.append(split)
        return np.stack([np.array(SIZES)[clients] // 2] * 2 + [0 * clients], axis=1)


def shared(shares: list[list[float]], **facts: Any) -> FedSoftState:
    rows = np.array(shares)
    return FedSoftState(1, rows.shape[1], rows.argmax(axis=1), clustered=True, shares=rows, **facts)


# --- against the paper's formulas ----------------------------------------------------------------------

MU = 0.3


def logits(data: Data, i: int, w: Vector) -> Vector:
    return data.x[i] @ w[: D * CLASSES].reshape(CLASSES, D).T + w[D * CLASSES :]


def shares_of(data: Data, i: int, centers: list[Vector], sigma: float) -> Vector:
    """u_k: on how many samples each center has the least loss."""
    found = [logits(data, i, c) for c in centers]
    losses = [np.log(np.exp(z).sum(axis=1)) - (z * data.y[i]).sum(axis=1) for z in found]
    counts = np.bincount(np.argmin(losses, axis=0), minlength=len(centers))
    u = np.maximum(counts / data.sizes[i], sigma)
    return u / u.sum()


def local(data: Data, i: int, centers: list[Vector], u: Vector) -> Vector:
    """Gradient descent on ``f_k(w) + (lambda / 2) sum_s u_ks |w - c_s|^2``, written out center by center."""
    w = np.average(centers, axis=0, weights=u)
    for _ in range(EPOCHS):
        z = logits(data, i, w)
        p = np.exp(z - z.max(axis=1, keepdims=True))
        delta = (p / p.sum(axis=1, keepdims=True) - data.y[i]) / len(data.x[i])
        pull = sum(MU * share * (w - c) for share, c in zip(u, centers, strict=True))
        w = w - LR * (np.concatenate([(delta.T @ data.x[i]).ravel(), delta.sum(axis=0)]) + pull)
    return w


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_it_is_the_papers_loop(settings: dict[str, Any], participation: float) -> None:
    given = {
        **settings,
        "model": "linear",
        "rounds": 4,
        "algorithm": {"name": "fedsoft", "clusters": 3, "every": 2},
        "local": {"name": "fedprox", "mu": MU},
        "training": {"epochs": EPOCHS, "batch_size": 1000, "lr": LR, "participation": participation},
    }
    result, config = run_config(given), load(given)
    data, method = Data(given), config.algorithm
    assert isinstance(method, FedSoft)
    from rayfl.servers.building import build, setup_of

    stages, host = build(config)
    s = setup_of(config, stages[0].federation, host.spec)
    centers = [host.spec.initial(index=k).astype(np.float64) for k in range(3)]
    begun, u = centers, np.empty((len(data.sizes), 3))
    for t in range(4):
        if t % 2 == 0:
            u = np.stack([shares_of(data, i, centers, 1e-4) for i in range(len(u))])
        drawn = method._center_weights(s, replace(method.begin(s), round=t, shares=u))
        trained = [local(data, i, centers, u[i]) for i in range(len(u))]
        centers = [np.average(trained, axis=0, weights=row) for row in drawn]
        if participation == 1:
            v = u * np.array(data.sizes)[:, None]
            np.testing.assert_allclose(drawn / drawn.sum(axis=1, keepdims=True), (v / v.sum(axis=0)).T)
        else:
            assert set(drawn.ravel()) == {0.0, 1.0}
            assert (drawn.sum(axis=1) == round(participation * len(u))).all()
    assert np.abs(np.array(centers) - begun).max() > 0.05
    found = last(result)
    np.testing.assert_allclose(found.models, centers, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(result.clients["cluster"], u.argmax(axis=1))
    columns = [f"share_{k}" for k in range(3)]
    np.testing.assert_allclose(result.clients[columns], u, atol=1e-12)
    for i, (_, tensors) in enumerate(client_models(result.path)):
        mine = np.concatenate([t.numpy().ravel() for t in tensors.values()])
        np.testing.assert_allclose(mine, np.average(found.models, axis=0, weights=u[i]), atol=1e-6)


def test_a_client_is_drawn_for_a_center_by_its_share_and_samples() -> None:
    s = setup("fedsoft", training={"participation": 1 / 6})
    state, counts = shared([[1.0, 0.2]] * 3 + [[0.0001, 1.0]] * 3), np.zeros((2, 6))
    method = algorithm("fedsoft")
    for t in range(400):
        drawn = method._center_weights(s, replace(state, round=t))
        assert drawn.sum(axis=1).tolist() == [1, 1]
        counts += drawn
    v = state.shares * np.array(SIZES)[:, None]
    np.testing.assert_allclose(counts / 400, (v / v.sum(axis=0)).T, atol=0.08)


# --- what is asked, and what it costs ------------------------------------------------------------------


def test_who_is_asked_when_and_what_is_downloaded() -> None:
    s, method, clients = setup("fedsoft"), algorithm("fedsoft", clusters=3, every=2), Counting()
    state = method.begin(s)
    found = method.recluster(s, state, clients)
    assert found is not None
    assert clients.asked == ["train"]  # never on test data
    np.testing.assert_allclose(found.state.shares, [[0.5 / 1.0001, 0.5 / 1.0001, 1e-4 / 1.0001]] * 6)
    state, cohort = method.cohort(s, found.state, clients)
    plan = method.plan(s, state, cohort)
    assert method.downloads(s, state, plan) == 0  # they have just received all centers
    state = replace(state, round=1)
    assert method.recluster(s, state, clients) is None
    assert method.downloads(s, state, plan) == 6 * 3
    joined = method.join(s, state, np.array([4]), clients)
    assert joined.told.tolist() == [0, 0, 0, 0, 1, 0]


def test_the_ledger_counts_the_centers_that_clients_mix(run: Run) -> None:
    ran = run({"name": "fedsoft", "clusters": 3, "every": 2}, "rounds=2", "training.participation=0.2")
    took = ran.result.rounds["clients"].tolist()
    down = [ran.bytes(round=t, direction="down") for t in range(2)]
    assert down == [4 * P * 3 * N, 4 * P * 3 * took[1]]
    up = [ran.bytes(round=t, direction="up") for t in range(2)]
    assert up == [4 * P * took[0] + 4 * 3 * N, 4 * P * took[1]]


# --- degenerate cases and planted mixtures -------------------------------------------------------------


def test_one_center_is_fedprox(run: Run) -> None:
    prox = run("fedavg", "local.name=fedprox", "local.mu=0.1")
    assert same(run({"name": "fedsoft", "clusters": 1}).models, prox.models)


MIXED = {
    "name": "tasks",
    "tasks": [{"labels": [0, 1, 2, 3, 4], "clients": 5}, {"labels": [5, 6, 7, 8, 9], "clients": 5}],
    "foreign": 0.3,
}


def test_planted_mixtures_are_found(run: Run) -> None:
    """Clients have 70 % of their samples from one distribution and 30 % from the other."""
    overrides = ["rounds=12", "evaluation.every=12", "local.mu=0.5", "training.epochs=2"]
    ran = run("fedsoft", *overrides, partition=MIXED)
    assert ran.summary["ari"] == 1
    shares = ran.result.clients[["share_0", "share_1"]].to_numpy()
    np.testing.assert_allclose(shares.max(axis=1), 0.7, atol=0.1)


# --- mixtures at the start of any method ---------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), models=st.integers(1, 5))
def test_a_mixture_is_the_weighted_mean(seed: int, models: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(models, 70_000 if seed % 50 == 0 else 7)).astype(np.float32)
    weights = random.dirichlet(np.ones(models))
    found = Mixture(tuple(range(models)), tuple(weights.tolist())).of(list(rows))
    wanted = weights @ rows.astype(np.float64)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_a_share_of_one_is_the_model_itself_bit_for_bit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """IFCA whose choices are written as shares."""
    from rayfl.algorithms import ServerState

    plain = run({"name": "ifca", "clusters": 3}, "evaluation.local=true")

    def rows(state: ServerState) -> sp.csr_array:
        n = len(state.assignment)
        return sp.csr_array((np.full(n, 2.5), (np.arange(n), state.assignment)), shape=(n, state.models))

    monkeypatch.setattr(ServerState, "served", property(rows))
    soft = run({"name": "ifca", "clusters": 3}, "evaluation.local=true")
    assert same(soft.models, plain.models)
    assert soft.result.rounds["accuracy_mean"].equals(plain.result.rounds["accuracy_mean"])


def test_a_start_that_is_no_mixture_is_refused() -> None:
    s, method = setup("fedsoft"), algorithm("fedsoft")
    cases = {
        "has shares that are negative": [[-1.0, 2.0]] * 6,
        "has no shares": [[0.0, 0.0]] * 6,
        r"expected models, or a scipy.sparse.csr_array \(6, 2\)": [[1.0, 1.0, 1.0]] * 6,
    }
    for message, shares in cases.items():
        state = replace(shared(shares), models=2)
        with pytest.raises(ConfigError, match=message):
            hooks.plan(method, s, state, np.arange(6))
    scaffold = replace(s, local=load({"algorithm": "scaffold"}).local)
    with pytest.raises(ConfigError, match="scaffold keeps a vector with each model"):
        hooks.plan(method, scaffold, shared([[0.5, 0.5]] * 6), np.arange(6))
    ready = hooks.plan(method, s, shared([[0.5, 0.5]] * 6), np.arange(6))
    assert isinstance(ready, Plan)


@pytest.fixture(scope="module")
def at_edges(run: Run) -> Ran:
    """Two edges with models of their own."""
    hierarchy = {"edges": 2, "global_every": 5, "common_layers": "all"}
    return run("mt_hfl", partition=MIXED, hierarchy=hierarchy, clustering={"grouping": "planted"})


def test_the_model_of_a_client_is_that_of_its_edge(at_edges: Ran) -> None:
    """``client_models`` gave the models of other edges."""
    models = at_edges.models
    assert len(np.unique(models, axis=0)) == 4
    config = at_edges.result.config
    edges = config.hierarchy.place(N, config.seed)
    clusters = at_edges.result.clients["cluster"].to_numpy()
    for client, tensors in client_models(at_edges.result.path):
        mine = np.concatenate([t.numpy().ravel() for t in tensors.values()])
        assert same(mine, models[2 * clusters[client] + edges[client]])
