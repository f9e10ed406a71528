"""FLT and PCA+kM+HC: A by hand and by NumPy, its limits, planted groups, newcomers, stopped and resumed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import rayfl
from rayfl.algorithms import OneShotState, Regrouping, ServerState, Setup
from rayfl.algorithms.flt import FLT, FLTState
from rayfl.api import resume
from rayfl.clients.host import ClientHost
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.clustering.numbering import most_used
from rayfl.commands.cluster import cluster_without_training
from rayfl.commands.newcomers import assign_newcomers
from rayfl.config import load
from rayfl.data import DATASETS
from rayfl.errors import ConfigError, Interrupted
from rayfl.events import BlockDone, RunEvent
from rayfl.models.modules.conv_ae import ConvAE, weights_of
from rayfl.rundir import RunDirectory
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.driver import Driver
from tests.algorithms.fakes import (
    SIZES,
    FakeClients,
    algorithm,
    assert_same_state,
    clusters,
    plan_of,
    report,
    setup,
)

Matrix = NDArray[np.float64]

CHAIN = [
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 1, 0, 0],
    [0, 1, 1, 1, 0, 0],
    [0, 1, 1, 1, 0, 0],
    [0, 0, 0, 0, 1, 0],
    [0, 0, 0, 0, 0, 1],
]
"""Client 1 is related to 0, 2 and 3, which are not related to 0; 4 and 5 are related to nobody."""


class Related(FakeClients):
    """Clients whose graph is given."""

    def __init__(
        self, graph: Sequence[Sequence[int]] | Matrix, labels: Sequence[int] = (), **facts: Any
    ) -> None:
        super().__init__(labels=labels or list(range(len(graph))), **facts)
        self.graph = np.array(graph)

    def cluster(
        self,
        clustering: Clustering,
        clients: NDArray[np.int64] | None = None,
        known: NDArray[np.int64] | None = None,
        has_feature_map: bool | NDArray[np.bool_] = False,
    ) -> Clusters:
        self.asked.append("cluster")
        present = self.graph.any(axis=1)
        labels = np.where(present, self._labels, -1).tolist()
        return clusters(labels, graph=sp.csr_array(self.graph.astype(np.float32)), gamma=1.0)


def begun(s: Setup, clients: FakeClients, **settings: Any) -> Regrouping:
    method = algorithm("flt", **settings)
    found = method.recluster(s, method.begin(s), clients)
    assert found is not None
    return found


def averages(s: Setup, state: FLTState, trained: Matrix, old: Matrix) -> Matrix:
    """What each client's model becomes, by the method's A: ``(N, P)``."""
    method = algorithm("flt")
    plan = plan_of(method, s, state)
    weights = method.mix(s, state, plan, {}).weights.toarray()
    models = old.copy()
    heard = weights.sum(axis=1) > 0
    models[heard] = weights[heard] @ trained[plan.cohort] / weights[heard].sum(axis=1, keepdims=True)
    return np.asarray(models[state.assignment], np.float64)


def as_printed(
    graph: Matrix, sizes: NDArray[np.int64], cohort: Sequence[int], trained: Matrix, old: Matrix
) -> Matrix:
    """Case I: client j's next model is ``sum_i A_ij n_i w_i / sum_i A_ij n_i`` over sampled i, by loops."""
    new = old.copy()
    for j in range(len(graph)):
        weight, total = 0.0, np.zeros(trained.shape[1])
        for i in cohort:
            weight += graph[i, j] * sizes[i]
            total += graph[i, j] * sizes[i] * trained[i]
        if weight > 0:
            new[j] = total / weight
    return new


# --- by hand -------------------------------------------------------------------------------------------


def test_rows_of_a_by_hand_on_the_graph():
    """Clients 2 and 3 have the same relatives and share a row; client 1 is in three of them."""
    s, method = setup("flt"), algorithm("flt")
    found = begun(s, Related(CHAIN))
    state = found.state
    assert state.assignment.tolist() == [0, 1, 2, 2, 3, 4]
    assert (state.models, state.clustered, found.parents.tolist()) == (5, True, [0] * 5)
    plan = plan_of(method, s, state)
    assert plan.cohort.tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.start.tolist() == plan.group.tolist() == [0, 1, 2, 2, 3, 4]
    assert method.mix(s, state, plan, {}).weights.toarray().tolist() == [
        [10, 20, 0, 0, 0, 0],
        [10, 20, 30, 40, 0, 0],
        [0, 20, 30, 40, 0, 0],
        [0, 0, 0, 0, 50, 0],
        [0, 0, 0, 0, 0, 60],
    ]


def test_rows_of_a_by_hand_on_clusters():
    s, method = setup("flt"), algorithm("flt", train_on="clusters")
    found = begun(s, Related(CHAIN, labels=[0, 0, 0, 1, 1, 2]), train_on="clusters")
    plan = plan_of(method, s, found.state)
    assert method.mix(s, found.state, plan, {}).weights.toarray().tolist() == [
        [10, 20, 30, 0, 0, 0],
        [0, 0, 0, 40, 50, 0],
        [0, 0, 0, 0, 0, 60],
    ]


def test_who_has_no_relative_in_the_cohort_keeps_its_model():
    s, method = setup("flt"), algorithm("flt")
    state = begun(s, Related(CHAIN)).state
    plan = method.plan(s, state, np.array([0, 4]))
    assert method.mix(s, state, plan, {}).weights.toarray().tolist() == [[10, 0]] * 2 + [
        [0, 0],
        [0, 50],
        [0, 0],
    ]


@given(st.integers(1, 12), st.floats(0, 1), st.floats(0.1, 1), st.integers(0, 10_000))
def test_any_graph_and_cohort_as_the_formula_has_it(clients, density, rho, seed):
    rng = np.random.default_rng(seed)
    half = np.triu(rng.random((clients, clients)) < density, 1)
    graph = (half | half.T | np.eye(clients, dtype=bool)).astype(np.float64)
    s = setup("flt", sizes=rng.integers(1, 50, clients).tolist(), training={"participation": rho})
    found = begun(s, Related(graph))
    state = found.state
    trained, old = rng.normal(size=(clients, 3)), rng.normal(size=(state.models, 3))
    cohort = plan_of(algorithm("flt"), s, state).cohort.tolist()
    expected = as_printed(graph, s.sizes, cohort, trained, old[state.assignment])
    np.testing.assert_allclose(averages(s, state, trained, old), expected, rtol=1e-12)


def test_the_disjoint_clusters_are_reported_beside_the_graph():
    found = begun(setup("flt"), Related(CHAIN, labels=[0, 0, 0, 0, 1, 2]))
    assert found.facts["disjoint"] == [0, 0, 0, 0, 1, 2]


def test_the_disjoint_clusters_keep_their_numbers():
    """Found again under other labels, client 3 gone and back: the largest overlap decides, and the number
    of a cluster that is no more is not given to another."""
    method, shown = algorithm("flt"), []
    s = setup("flt", clustering={"every": 1})
    state = method.begin(s)
    for t, labels in enumerate(
        ([0, 0, 1, 1, 2, 2], [1, 1, 2, -1, 0, 0], [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2])
    ):
        graph = np.array(CHAIN)
        graph[:, np.array(labels) < 0] = graph[np.array(labels) < 0] = 0
        found = method.recluster(s, dataclasses.replace(state, round=t), Related(graph, labels=labels))
        assert found is not None
        shown.append(found.facts["disjoint"])
        state = found.state
    assert shown == [[0, 0, 1, 1, 2, 2], [0, 0, 1, -1, 2, 2], [0, 0, 0, 0, 2, 2], [0, 0, 3, 3, 2, 2]]
    grown = method.grow(setup("flt", sizes=[*SIZES, 0, 0]), state)
    assert grown.disjoint.tolist() == [0, 0, 3, 3, 2, 2, -1, -1]


def test_all_layers_common_every_kappa_rounds():
    s, method = setup("flt", hierarchy={"common_layers": 1, "global_every": 2}), algorithm("flt")
    state = begun(s, Related(CHAIN)).state
    due = []
    for _ in range(4):
        plan, step = plan_of(method, s, state), method.global_step(s, state)
        assert step is not None
        assert step.layers[0][0] == ((0, 18),)
        due.append(step.due.tolist())
        state = method.end(s, state, plan, report(plan, state.models))
    assert due == [[t % 2 == 1] * state.models for t in range(4)]


# --- again, newcomers, drift ---------------------------------------------------------------------------


def test_the_model_that_most_members_used():
    used = most_used(np.array([2, 2, 2, 0, 0, 0, 4]), np.array([1, 3, 3, 5, 4, 5, 0]), 5)
    assert used.tolist() == [5, -1, 3, -1, 0]
    assert most_used(np.array([0, 0, 0, 0]), np.array([7, 2, 7, 2]), 1).tolist() == [2]  # a tie


def test_a_kind_of_client_goes_on_with_the_model_that_most_of_it_used():
    s, method = setup("flt", clustering={"every": 1}), algorithm("flt")
    state = begun(s, Related(CHAIN)).state
    state = dataclasses.replace(state, round=1)
    graph = np.eye(6, dtype=int)
    graph[:4, :4] = 1  # of clients 0, 1, 2, 3 two used model 2
    again = method.recluster(s, state, Related(graph))
    assert again is not None
    assert again.state.assignment.tolist() == [0, 0, 0, 0, 1, 2]
    assert again.parents.tolist() == [2, 3, 4]


@pytest.mark.parametrize("case", ["graph", "clusters"])
def test_fcr_runs_again_when_more_than_lambda_clients_raised_a_flag(case):
    s, method = setup("flt", clustering={"max_flags": 1}), algorithm("flt", train_on=case)
    clients = Related(CHAIN, labels=[0, 0, 0, 1, 1, 2])
    state = begun(s, clients, train_on=case).state
    state = method.drift(s, state, np.array([3]), clients)
    assert method.recluster(s, state, clients) is None
    state = method.drift(s, state, np.array([0]), clients)
    again = method.recluster(s, state, clients)
    assert again is not None
    assert not again.state.flags.any()
    assert again.state.assignment.tolist() == state.assignment.tolist()


CODES = [[[0.0, 0], [2, 0]], [[1, 1], [1, -1]], [[9, 0], [9, 0]], [[5, 0], [5, 0]], [[0, 8]], [[0.4, 0.1]]]
"""Means (1, 0), (1, 0), (9, 0), (5, 0), (0, 8) and (0.4, 0.1)."""


@pytest.mark.parametrize("case", ["graph", "clusters"])
def test_a_newcomer_counts_as_one_of_the_nearest_mean_code(case):
    """Clients 0 and 1 are related, 2 and 3 too (their mean is (7, 0)), 4 is not there; 5 comes."""
    graph = np.zeros((6, 6), int)
    graph[:2, :2] = graph[2:4, 2:4] = 1
    s = setup("flt", sizes=[10, 20, 30, 40, 0, 0])
    clients = Related(graph, labels=[0, 0, 1, 1, 0, 0], signatures=CODES)
    state = begun(s, clients, train_on=case).state
    assert state.models == 2
    s = setup("flt", sizes=[10, 20, 30, 40, 0, 60])
    method = algorithm("flt", train_on=case)
    joined = method.join(s, state, np.array([5]), clients).state
    assert joined.assignment.tolist() == [0, 0, 1, 1, 0, 0]
    assert np.flatnonzero(joined.flags).tolist() == [5]
    plan = plan_of(method, s, joined)
    columns = np.argsort(plan.cohort)
    weights = method.mix(s, joined, plan, {}).weights.toarray()[:, columns]
    assert weights.tolist() == [[10, 20, 0, 0, 60], [0, 0, 30, 40, 0]]


def test_newcomers_contribute_to_all_that_their_like_contribute_to():
    """On the chain: like client 1, which is in three rows."""
    s = setup("flt", sizes=[*SIZES, 0])
    graph = np.zeros((7, 7), int)
    graph[:6, :6] = CHAIN
    codes = [[[float(i), 0]] for i in range(6)] + [[[1.2, 0]]]
    clients = Related(graph, signatures=codes)
    state = begun(s, clients).state
    s = setup("flt", sizes=[*SIZES, 70])
    method = algorithm("flt")
    state = method.join(s, state, np.array([6]), clients).state
    assert state.assignment.tolist() == [0, 1, 2, 2, 3, 4, 1]
    plan = method.plan(s, state, np.arange(7))
    weights = method.mix(s, state, plan, {}).weights.toarray()
    assert weights[:, plan.cohort.tolist().index(6)].tolist() == [70, 70, 70, 0, 0]


def test_who_comes_back_is_where_its_like_are_now():
    """Client 3 has left and comes back with other data: of its old relatives nothing is left."""
    s, method = setup("flt"), algorithm("flt")
    clients = Related(CHAIN, signatures=[[[0.0]], [[1]], [[2]], [[4.1]], [[4]], [[9]]])
    changed = method.drift(s, begun(s, clients).state, np.array([3]), clients)
    state = method.join(s, changed, np.array([3]), clients).state
    assert state.assignment.tolist() == [0, 1, 2, 3, 3, 4]
    weights = method.mix(s, state, method.plan(s, state, np.arange(6)), {}).weights.toarray()
    assert weights.tolist() == [  # the cohort is 0, 1, 2, 3, 4, 5
        [10, 20, 0, 0, 0, 0],
        [10, 20, 30, 0, 0, 0],
        [0, 20, 30, 0, 0, 0],
        [0, 0, 0, 40, 50, 0],
        [0, 0, 0, 0, 0, 60],
    ]


def test_newcomers_before_the_first_clustering_wait_for_it():
    s, method = setup("flt"), algorithm("flt")
    state = method.begin(s)
    assert method.join(s, state, np.array([5]), FakeClients()) is state


def test_scaffold_and_fednova_do_not_go_with_a_graph():
    assert FLT.objectives == ("sgd", "fedprox")
    with pytest.raises(ConfigError, match="scaffold"):
        rayfl.run({"algorithm": "flt", "local": "scaffold", "execution": {"backend": "inline"}})


# --- whole runs on real digits -------------------------------------------------------------------------

TASKS = [
    {"labels": [0, 1, 2, 3], "clients": 5},
    {"labels": [4, 5, 6], "clients": 4},
    {"labels": [7, 8, 9], "clients": 3},
]
GROUPS = [0] * 5 + [1] * 4 + [2] * 3
RAW = {"features": "identity", "embedding": "none"}
PLANE = {"features": "pca", "embedding": "none", "gamma": "auto"}
ENCODER = {"name": "conv_ae", "pretrain": {"dataset": "digits", "epochs": 10, "batch_size": 16}, "latent": 32}
Run = Callable[..., rayfl.Result]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Callable[..., dict[str, Any]]:
    root: Path = tmp_path_factory.mktemp("runs")

    def make(algorithm: Any, **sections: Any) -> dict[str, Any]:
        return {
            "rounds": 3,
            "partition": {"name": "tasks", "tasks": TASKS},
            "model": {"name": "mlp", "hidden": [6]},
            "algorithm": algorithm,
            "training": {"epochs": 1, "batch_size": 20, "lr": 0.1, "participation": 0.5, "engine": "loop"},
            "execution": {"backend": "inline"},
            "output": {"root": str(root), "report": False, "tensorboard": False, "checkpoint_every": 1},
            **sections,
        }

    return make


@pytest.fixture(scope="module")
def run(settings) -> Run:
    return lambda algorithm, **sections: rayfl.run(settings(algorithm, **sections))


def saved(result: rayfl.Result, kind: type[ServerState] | None = None) -> Checkpoint:
    return Checkpoint.load(checkpoints(result.path / "checkpoints")[-1], kind)


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


CASES = [{"name": "flt", "train_on": "graph"}, {"name": "flt", "train_on": "clusters"}]


@pytest.mark.parametrize("case", CASES, ids=["graph", "clusters"])
def test_with_everybody_related_it_is_fedavg_bit_for_bit(run, case):
    one = run(case, clustering={**RAW, "gamma": 1e9})
    flat = run("fedavg")
    assert one.summary["clusters"] == 1
    assert same(saved(one).models, saved(flat).models)
    assert one.summary["models_sha256"] == flat.summary["models_sha256"]


@pytest.mark.parametrize("case", CASES, ids=["graph", "clusters"])
def test_with_nobody_related_everyone_is_alone_bit_for_bit(run, case):
    alone = run(case, clustering={**RAW, "gamma": 0.0})
    solo = run({"name": "solo", "sampled": True})
    last, states = saved(alone), saved(solo)
    assert last.state.assignment.tolist() == list(range(12))
    trained = states.state_clients
    assert 6 < len(trained) < 12  # half of them in each of three rounds
    assert same(last.models[trained], states.state_rows)
    untouched = np.setdiff1d(np.arange(12), trained)
    assert (last.models[untouched] == saved(run("fedavg", rounds=1, training={"lr": 1e-30})).models).all()


def test_a_round_on_an_overlapping_graph_against_numpy(run):
    """Neighbouring groups share a digit. What clients train is what SOLO's do."""
    ring = [{"labels": [g, (g + 1) % 5], "clients": 3} for g in range(5)]
    partition = {"name": "tasks", "tasks": ring}
    training = {"epochs": 1, "batch_size": 20, "lr": 0.1, "engine": "loop"}
    one = {"rounds": 1, "partition": partition, "training": training}
    last = saved(run("flt", clustering={**RAW, "gamma": 1.1}, **one), FLTState)
    state = last.state
    offsets, columns = state.relatives.indptr, state.relatives.indices
    graph = np.zeros((15, 15))
    for j, kind in enumerate(state.assignment):
        graph[j, columns[offsets[kind] : offsets[kind + 1]]] = 1
    assert (graph == graph.T).all()
    assert graph.diagonal().all()
    assert 15 < graph.sum() < 225
    assert ((graph @ graph > 0) & (graph == 0)).any(), "some share a relative without being related"
    trained = saved(run("solo", **one)).state_rows.astype(np.float64)
    sizes = build(load(run("solo", **one).config.to_dict()))[0][0].federation.sizes
    expected = as_printed(graph, sizes, range(15), trained, trained)
    np.testing.assert_allclose(last.models[state.assignment], expected, rtol=2e-6, atol=1e-7)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> Path:
    """A folder for the encoder, so that it is trained once."""
    return Path(tmp_path_factory.mktemp("data"))


@pytest.fixture
def data(encoders, monkeypatch) -> Path:
    monkeypatch.setenv("RAYFL_DATA", str(encoders))
    return encoders


MANY = [{**task, "clients": clients} for task, clients in zip(TASKS, (15, 10, 8), strict=True)]
FOUND = {"features": ENCODER, "gamma": "auto"}
OF_MANY = [0] * 15 + [1] * 10 + [2] * 8


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("features", ["pca", ENCODER], ids=["pca", "conv_ae"])
@pytest.mark.parametrize("count", [3, None])
def test_planted_groups_are_found(settings, data, features, count, seed):
    """With UMAP; gamma is chosen, the number of clusters given or proposed."""
    clustering = {"features": features, "gamma": "auto", "n_clusters": count}
    partition = {"name": "tasks", "tasks": MANY}
    config = load(settings("flt", seed=seed, partition=partition, clustering=clustering))
    (found,), _ = cluster_without_training([config])
    assert found.clusters.labels.tolist() == OF_MANY
    assert found.clusters.ari == 1.0
    graph = found.clusters.graph.toarray()
    within = np.equal.outer(OF_MANY, OF_MANY)
    assert graph[within].mean() > 5 * graph[~within].mean(), "some relatives may be of other groups"


def test_a_run_on_the_graph_found(run, data):
    """Case I: clients' relatives are mostly of their own group, and the disjoint clusters are told."""
    result = run(CASES[0], rounds=1, partition={"name": "tasks", "tasks": MANY}, clustering=FOUND)
    entry = result.clusters["timeline"][0]
    assert entry["disjoint"] == OF_MANY
    assert len(set(entry["labels"])) > 3, "sets of relatives are no clusters, and are not scored as such"
    assert entry["ari"] == result.summary["ari"] == 1.0
    assert result.rounds["ari"].tolist() == [1.0]
    state = saved(result, FLTState).state
    offsets, columns = state.relatives.indptr, state.relatives.indices
    kinds = [columns[start:end] for start, end in itertools.pairwise(offsets)]
    of, groups = [kinds[kind] for kind in state.assignment], np.array(OF_MANY)
    assert all(client in related for client, related in enumerate(of))
    assert entry["graph"]["relatives"] == pytest.approx(np.mean([len(related) - 1 for related in of]))
    own = [(groups[related] == groups[client]).mean() for client, related in enumerate(of)]
    assert np.mean(own) > 0.8


def test_pca_km_hc_finds_planted_groups_and_averages_in_them(run):
    """With one PCA for all, of the server's."""
    data = {"name": "digits", "server_share": 0.1}
    result = run("pca_km_hc", data=data, clustering={"n_clusters": 3, "features": "pca"})
    assert saved(result).state.assignment.tolist() == GROUPS
    oracle = run("pacfl", data=data, clustering={"grouping": "planted"})
    assert same(saved(result).models, saved(oracle).models)


def test_pca_km_hc_is_the_papers(run):
    """The PCA is each client's: the server needs and sends nothing; k centroids in e dimensions come back."""
    result = run("pca_km_hc", rounds=1, clustering={"n_clusters": 3})
    sent = result.communication[result.communication["kind"] == "signature"]
    assert sent["direction"].tolist() == ["up"]
    assert sent["bytes"].sum() == 12 * 5 * 128 * 4
    assert result.config.clustering.features.name == "client_pca"
    assert result.config.public_samples == 0


def test_clusters_found_are_those_that_train(run, data):
    """Case II on the planted groups is FedAvg in each of them."""
    partition = {"name": "tasks", "tasks": MANY}
    found = run(CASES[1], rounds=2, partition=partition, clustering=FOUND)
    oracle = run("pacfl", rounds=2, partition=partition, clustering={"grouping": "planted"})
    assert same(saved(found).models, saved(oracle).models)


def test_bytes_by_hand(run, data):
    """The encoder down and 5 centroids of 32 numbers up; FLT, Table 6: M W_enc + k M e + 2 rho M W T."""
    result = run("flt", clustering=FOUND)
    frame = result.communication
    sent = frame[frame["kind"] == "signature"].set_index("direction")["bytes"]
    weights = (16 * 1 * 9 + 16) + (4 * 16 * 9 + 4) + (32 * 4 * 2 * 2 + 32)  # conv3x3-16, conv3x3-4, fc
    assert sent["up"] == 12 * 5 * 32 * 4
    assert sent["down"] == 12 * weights * 4
    p = 64 * 6 + 6 + 6 * 10 + 10
    models = frame[frame["kind"] == "model"].groupby("direction")["bytes"].sum()
    assert models["up"] == models["down"] == 3 * 6 * p * 4


# --- events --------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=["graph", "clusters"])
def test_fcr_runs_again_in_fine_tune_mode(settings, data, case, monkeypatch):
    """FLT, Algorithm 3: the first time one encoder for all, later each client's own, fine-tuned; newcomers
    are compared by codes like those that the clusters were found by. The decoder goes with the encoder."""
    encoder = {**ENCODER, "fine_tune_again": 1}
    seen: list[tuple[int, int]] = []
    signatures = ClientHost.signatures

    def watched(self, job, *objects):
        seen.append((len(job.clients), job.features.fine_tune))
        return signatures(self, job, *objects)

    monkeypatch.setattr(ClientHost, "signatures", watched)
    clustering = {"features": encoder, "gamma": "auto", "every": 2}
    events = [{"name": "join", "round": t, "clients": 1} for t in (1, 3)]
    execution = {"backend": "inline", "block_size": 100}
    result = rayfl.run(settings(case, rounds=4, events=events, clustering=clustering, execution=execution))
    assert seen == [(1, 0), (1, 0), (10, 0), (11, 0), (11, 1), (12, 1)]  # two later clients, to be sure
    sent = result.communication
    sent = sent[(sent["kind"] == "signature") & (sent["direction"] == "down")].set_index("round")["bytes"]
    whole = sum(np.size(w) for w in weights_of(ConvAE((1, 8, 8), 32)).values())
    assert sent.to_dict() == {0: 10 * 4 * whole, 1: 4 * whole, 3: 4 * whole}
    first = {**encoder, "fine_tune": 1, "fine_tune_again": None}
    config = load(settings(case, clustering={**clustering, "features": first}))
    (alone,), _ = cluster_without_training([config])
    assert alone.clusters.gamma != result.clusters["timeline"][0]["graph"]["gamma"]


DRIFT = {"name": "drift", "round": 2, "kind": "permuted_labels", "clients": [0, 1]}
MOVE = {"name": "drift", "round": 2, "kind": "group", "to": 2, "clients": [0], "reuse": True}
JOIN = {"name": "join", "round": 2, "clients": [4, 11]}


@pytest.mark.parametrize("case", CASES, ids=["graph", "clusters"])
def test_a_client_that_moves_to_another_group_is_found_there(run, case):
    clustering = {**PLANE, "max_flags": 0, "n_clusters": 3}
    result = run(case, rounds=4, events=[MOVE], clustering=clustering)
    first, second = result.clusters["timeline"]
    assert (first["round"], second["round"]) == (0, 2)
    key = "disjoint" if case["train_on"] == "graph" else "labels"
    moved = [2, *GROUPS[1:]]
    for entry, groups in ((first, GROUPS), (second, moved)):
        pairs = set(zip(entry[key], groups, strict=True))
        assert len(pairs) == len({label for label, _ in pairs}) == 3, "a cluster a group"


@pytest.mark.parametrize("case", [*CASES, "pca_km_hc"], ids=["graph", "clusters", "pca_km_hc"])
def test_newcomers_find_their_group(run, case):
    clustering = {"n_clusters": 3, **(PLANE if case != "pca_km_hc" else {"features": "pca"})}
    last = saved(run(case, rounds=4, events=[JOIN], clustering=clustering)).state
    for newcomer, group in ((4, 0), (11, 2)):
        like = [last.assignment[c] for c in range(12) if GROUPS[c] == group and c != newcomer]
        assert last.assignment[newcomer] in like


def test_newcomers_are_in_the_history_of_the_clusters(run):
    result = run(CASES[0], rounds=4, events=[JOIN], clustering={**PLANE, "n_clusters": 3})
    first, joined = result.clusters["timeline"]
    assert (first["round"], joined["round"], joined["newcomers"]) == (0, 2, [4, 11])
    assert joined["labels"] == saved(result).state.assignment.tolist()
    clusters = joined["disjoint"]
    assert len(set(zip(clusters, GROUPS, strict=True))) == len(set(clusters)) == 3, "newcomers are in one too"
    assert joined["ari"] == 1.0
    old = [c for c in range(12) if c not in (4, 11)]
    assert [joined["labels"][c] for c in old] == [first["labels"][c] for c in old]


@pytest.mark.parametrize("case", CASES, ids=["graph", "clusters"])
@pytest.mark.parametrize(
    ("signature", "gamma"),
    [("subspace", 8.0), ("label_histogram", 0.5), ("predictions", 0.4), ("spectrum", 0.3)],
)
def test_newcomers_by_signatures_that_are_no_codes(run, case, signature, gamma):
    """They have no mean to be near to (their shapes are others): they extend the distances."""
    clustering = {"features": "identity", "embedding": "none", "gamma": gamma, "signature": signature}
    training = {"epochs": 5, "batch_size": 20, "lr": 0.1}
    proximity = {"subspace": "principal_angle", "label_histogram": "euclidean", "predictions": "cosine"}
    clustering["proximity"] = proximity.get(signature, "relevance")
    result = run(case, rounds=3, events=[JOIN], clustering=clustering, training=training)
    state = saved(result, FLTState).state
    for newcomer, group in ((4, 0), (11, 2)):
        like = [state.assignment[c] for c in range(12) if GROUPS[c] == group and c != newcomer]
        assert state.assignment[newcomer] in like
    if case["train_on"] == "graph":
        columns, offsets = state.relatives.indices, state.relatives.indptr
        assert len(offsets) == state.models + 1
        for newcomer in (4, 11):
            kind = state.assignment[newcomer]
            assert newcomer in columns[offsets[kind] : offsets[kind + 1]]


def test_a_newcomer_of_a_new_kind_is_related_to_itself_alone():
    """Newcomers that found a cluster train for themselves; what was known of them before is void. They take
    the number of a kind of client that has no members left."""
    s, method = setup("flt"), algorithm("flt")
    state = method.drift(s, begun(s, Related(CHAIN)).state, np.array([0, 3, 5]), FakeClients())

    class Strangers(FLT):
        def find(self, *args):
            return np.array([1, 5, 5])

    clients = Related(CHAIN)
    joined = Strangers().join(s, state, np.array([0, 3, 5]), clients)
    assert joined.state.assignment.tolist() == [1, 1, 2, 0, 3, 0]
    assert joined.parents.tolist() == [1, 1, 2, 3, 4]  # of 1, 2 and 4 each has one of those: the first
    weights = method.mix(s, joined.state, method.plan(s, joined.state, np.arange(6)), {}).weights.toarray()
    cohort = method.plan(s, joined.state, np.arange(6)).cohort
    assert weights[:, np.argsort(cohort)].tolist() == [
        [0, 0, 0, 40, 0, 60],
        [10, 20, 30, 0, 0, 0],
        [10, 20, 30, 0, 0, 0],
        [0, 0, 0, 0, 50, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_newcomers_after_the_run(run, tmp_path):
    clustering = PLANE
    result = run("flt", rounds=4, clustering=clustering)
    samples = DATASETS["digits"]().load(Path())
    ids = np.flatnonzero(np.isin(samples.y_test, [7, 8, 9]))
    x, y = samples.x_test[ids], samples.y_test[ids]
    half = len(ids) // 2
    np.savez(tmp_path / "new.npz", x_train=x[:half], y_train=y[:half], x_test=x[half:], y_test=y[half:])
    frame = assign_newcomers(result.path, tmp_path / "new.npz", epochs=1)
    assert frame["cluster"][0] in saved(result).state.assignment[9:]


# --- the same whatever happens -------------------------------------------------------------------------


def interrupted(settings: dict[str, Any], round: int) -> Path:
    """A run that is stopped in a round, after its training and before it is complete."""
    config = load(settings)
    directory = RunDirectory.create(config)
    stages, host = build(config)
    trained: list[bool] = []

    def watch(event: RunEvent) -> None:
        if isinstance(event, BlockDone) and event.round == round and event.done == event.total:
            trained.append(True)

    backend = InlineBackend()
    try:
        with pytest.raises(Interrupted):
            Driver(config, stages, backend, directory, host, watch, lambda: bool(trained)).run()
    finally:
        backend.close()
    return directory.path


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES[0], id="graph"),
        pytest.param(CASES[1], id="clusters", marks=pytest.mark.slow),
        pytest.param("pca_km_hc", marks=pytest.mark.slow),
    ],
)
def test_stopped_and_resumed_through_drift_and_newcomers(settings, case):
    clustering = {"every": 3, "max_flags": 3, "n_clusters": 3}
    if case != "pca_km_hc":
        clustering |= PLANE
    whole = settings(case, rounds=6, events=[DRIFT, JOIN], clustering=clustering)
    expected = rayfl.run(whole)
    assert {entry["round"] for entry in expected.clusters["timeline"]} >= {0, 2, 3}
    kind = OneShotState if case == "pca_km_hc" else FLTState
    first = saved(expected, kind)
    for round in (1, 2, 4):
        again = resume(interrupted(whole, round))
        assert again.summary["models_sha256"] == expected.summary["models_sha256"], round
        assert again.clusters == expected.clusters, round
        second = saved(again, kind)
        assert same(first.models, second.models), round
        assert_same_state(first.state, second.state)
