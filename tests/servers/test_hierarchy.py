"""Local and global parameter servers, against loops written from the papers: MT-HFL (Ali and Arafa, 2024,
Algorithm 1) and HierFAVG (Liu et al., 2020, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rayfl.algorithms import Algorithm, GlobalStep, Hierarchy
from rayfl.algorithms.hierfavg import HierFAVG
from rayfl.algorithms.mt_hfl import MTHFL
from rayfl.api import Result, run
from rayfl.clients.partial import Partial, Weight
from rayfl.config import load
from rayfl.data.events import build_stages
from rayfl.data.held_out import hold_out
from rayfl.errors import ConfigError
from rayfl.events import Note
from rayfl.local.sgd import SGD
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.servers.global_step import gather, share
from rayfl.servers.lps import Reduced
from rayfl.servers.models import Blocks, Servers
from rayfl.servers.testing import local_losses, losses
from rayfl.training.batches import Batches

D, CLASSES, LR, EPOCHS = 64, 10, 0.5, 2
P = D * CLASSES + CLASSES
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2]  # tests/runs.py

Weighted = tuple[NDArray[np.float64], float]


class Data:
    """The clients' samples, and plain gradient descent on softmax regression in double precision."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config = load(settings)
        samples = hold_out(
            config.data.load(Path()), config.data.server_share, config.public_samples, config.seed
        )
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
        for _ in range(EPOCHS):
            w = w - LR * self.gradient(client, w)
        return w

    def gradient(self, client: int, w: NDArray[np.float64]) -> NDArray[np.float64]:
        """That of the mean loss of all of the client's samples ``(P,)``."""
        x, y = self.x[client], self.y[client]
        matrix, bias = w[: D * CLASSES].reshape(CLASSES, D), w[D * CLASSES :]
        logits = x @ matrix.T + bias
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        delta = (p / p.sum(axis=1, keepdims=True) - y) / len(x)
        return np.concatenate([(delta.T @ x).ravel(), delta.sum(axis=0)])


def mean(parts: Sequence[Weighted]) -> NDArray[np.float64]:
    return np.average([w for w, _ in parts], axis=0, weights=[n for _, n in parts])


def reference(
    data: Data,
    start: NDArray[np.float64],
    servers: Sequence[int],
    cohorts: Sequence[Sequence[int]],
    kappa: int | Sequence[int],
    weights: str = "participated",
    out: Container[tuple[int, int]] = (),
) -> NDArray[np.float64]:
    """The models ``(L, P)`` of the local servers; all layers are common.

    Args:
        data: the clients'.
        start: w_0.
        servers: of each client, its local server.
        cohorts: of each round, who trains.
        kappa: local rounds between two global ones, of all local servers or of each.
        weights: as ``hierarchy.weights``.
        out: (round, server) that miss a global round.
    """
    local = [start] * (max(servers) + 1)
    since = [0] * len(local)
    for t, cohort in enumerate(cohorts, 1):
        for k in range(len(local)):
            mine = [(data.local(i, local[k]), float(data.sizes[i])) for i in cohort if servers[i] == k]
            if mine:
                local[k] = mean(mine)
                since[k] += int(sum(n for _, n in mine))
        every = [kappa] * len(local) if isinstance(kappa, int) else kappa
        due = [k for k in range(len(local)) if t % every[k] == 0 and (t - 1, k) not in out]
        if len(due) > 1:
            held = [sum(n for n, s in zip(data.sizes, servers, strict=True) if s == k) for k in due]
            counts = held if weights == "population" else [since[k] for k in due]
            merged = mean([(local[k], n) for k, n in zip(due, counts, strict=True)])
            for k in due:
                local[k], since[k] = merged, 0
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


def with_cohorts(
    monkeypatch: pytest.MonkeyPatch, cohorts: Sequence[Sequence[int]], method: type[Algorithm] = MTHFL
) -> None:
    """Let these clients take part, round by round."""
    monkeypatch.setattr(
        method, "cohort", lambda self, setup, state, clients: (state, np.array(cohorts[state.round]))
    )


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


# --- client, edge, cloud ------------------------------------------------------------------------------------

EDGES = [0, 1, 2, 0, 1, 2, 0, 0, 1]


@pytest.fixture
def cloud(softmax: dict[str, Any]) -> dict[str, Any]:
    """HierFAVG over three edges, whose clients are of all groups."""
    return {**flat(softmax), "algorithm": "hierfavg", "rounds": 4, "hierarchy": {"edges": EDGES}}


def test_hierfavg_is_the_papers_loop(cloud: dict[str, Any]) -> None:
    """kappa_1 = 2 whole gradients, kappa_2 = 2 edge aggregations, weights |D_i| and |D_l|."""
    config = load(cloud)
    assert (config.hierarchy.global_every, config.hierarchy.weights) == (2, "population")
    result = run(cloud)
    expected = reference(Data(cloud), load_initial(cloud), EDGES, [range(9)] * 4, 2, "population")
    np.testing.assert_allclose(last(result).models, expected, rtol=0, atol=4e-6)
    assert gps_bytes(result) == {(t, way): 3 * 4 * P for t in (1, 3) for way in ("up", "down")}
    models = sorted(path.name for path in (result.path / "models").iterdir())
    assert models == [f"model_0_edge_{e}.safetensors" for e in range(3)]


@pytest.mark.parametrize("weights", ["participated", "population"])
def test_every_server_may_have_its_own_kappa_and_miss_a_round(
    weights: str, cloud: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kappa 1, 2, 2; edge 1 is out in round 2 (from 0), so that edges 0 and 2 are alone or two."""
    cohorts = [*COHORTS, COHORTS[0]]
    with_cohorts(monkeypatch, cohorts, HierFAVG)
    cloud["hierarchy"] = {"edges": EDGES, "global_every": [1, 2], "weights": weights}
    cloud["events"] = [{"name": "outage", "round": 1, "servers": [1]}]
    result = run(cloud)
    out = [(1, 1)]
    expected = reference(Data(cloud), load_initial(cloud), EDGES, cohorts, [1, 2, 2], weights, out)
    np.testing.assert_allclose(last(result).models, expected, rtol=0, atol=4e-6)
    sent = gps_bytes(result)
    assert [sent.get((t, "down"), 0) // (4 * P) for t in range(4)] == [0, 2, 0, 3]


def test_an_outage_of_a_cluster_that_does_not_exist_is_noted(
    softmax: dict[str, Any],
) -> None:
    """How many clusters there will be is known when the outage begins, not before."""
    softmax["events"] = [{"name": "outage", "round": round, "servers": [0, 1, 7]} for round in (1, 2)]
    notes: list[str] = []
    run(softmax, on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    found = [text for text in notes if "outage" in text]
    assert [text.partition(";")[0] for text in found] == [
        f"round {round + 1}: there is no cluster 7, so the outage does not affect it" for round in (1, 2)
    ]


def same_models(first: Result, second: Result) -> bool:
    """Whether all models of both are one, bit for bit."""
    return len({row.tobytes() for run in (first, second) for row in last(run).models}) == 1


def test_one_edge_is_fedavg(cloud: dict[str, Any]) -> None:
    sampled = {**cloud, "training": {"epochs": 2, "lr": 0.1, "participation": 0.7}}
    assert same_models(run({**sampled, "hierarchy": {"edges": 1}}), run(flat(sampled)))


def loop(settings: dict[str, Any], **changes: Any) -> Result:
    """With the engine that trains a client to the same bits whatever its block is."""
    training = {"epochs": 2, "lr": 0.1, "engine": "loop", **changes.pop("training", {})}
    return run({**settings, **changes, "training": training})


def test_a_cloud_that_averages_every_round_is_fedavg(cloud: dict[str, Any]) -> None:
    every = loop(cloud, hierarchy={"edges": 4, "global_every": 1})
    plain = loop(flat(cloud))
    assert len(last(every).models) == 4
    assert same_models(every, plain)
    sampled = {"participation": 0.6}
    counted = {"edges": 4, "global_every": 1, "weights": "participated"}
    assert same_models(loop(cloud, hierarchy=counted, training=sampled), loop(flat(cloud), training=sampled))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("common", ["all", 1, "none"])
def test_clusters_crossed_with_edges(common: str | int, softmax: dict[str, Any]) -> None:
    """Each round all servers: what is common is one everywhere, what is not is the cluster's, as without
    edges, bit for bit. With kappa 2, after an odd round every server has a model of its own."""
    two_layers = {**softmax, "model": {"name": "mlp", "hidden": [6]}}
    hierarchy = {"common_layers": common, "global_every": 1}
    plain = loop(two_layers, hierarchy=hierarchy)
    crossed = loop(two_layers, hierarchy={**hierarchy, "edges": EDGES})
    assert last(crossed).models.shape == (9, last(plain).models.shape[1])
    np.testing.assert_array_equal(last(crossed).models, np.repeat(last(plain).models, 3, axis=0))
    assert crossed.summary["accuracy_mean"] == plain.summary["accuracy_mean"]
    seldom = loop(two_layers, hierarchy={**hierarchy, "edges": EDGES, "global_every": 2})
    assert len(np.unique(last(seldom).models, axis=0)) == 9


def test_clients_meet_the_models_of_their_edge(cloud: dict[str, Any]) -> None:
    """IFCA with one cluster is HierFAVG; with two clients compare both at their edge."""
    hierarchy = {**cloud["hierarchy"], "global_every": 3, "weights": "population"}
    alone = loop(cloud, algorithm={"name": "ifca", "clusters": 1}, hierarchy=hierarchy)
    edges = loop(cloud, hierarchy=hierarchy)
    assert last(alone).models.tobytes() == last(edges).models.tobytes()
    assert len(np.unique(last(edges).models, axis=0)) == 3
    stages, host = build(load(cloud))
    backend = InlineBackend()
    try:
        federation, who = stages[0].federation, np.arange(9)
        backend.start((federation,), host)
        servers = Servers(backend, host.spec, federation, blocks=Blocks(lambda n: n), edges=np.array(EDGES))
        servers.models = [host.spec.initial(index=i) for i in range(6)]  # two models at three edges
        both = losses(servers, who, federation.train, "train")
        for model in range(2):
            one = local_losses(servers, who, 0 * who + model, federation.train, "train", (), SGD())
            np.testing.assert_allclose(both[:, model], one, rtol=1e-6)
            servers.edge_count, servers.edges = 1, None
            place = 3 * model + np.array(EDGES)
            plain = local_losses(servers, who, place, federation.train, "train", (), SGD())
            servers.edge_count, servers.edges = 3, np.array(EDGES)
            np.testing.assert_array_equal(one, plain)
    finally:
        backend.close()


def test_edges_are_drawn_or_given(tmp_path: Path) -> None:
    drawn = Hierarchy(edges=4).place(10, 0)
    assert sorted(np.bincount(drawn).tolist()) == [2, 2, 3, 3]
    assert (
        drawn.tolist() == Hierarchy(edges=4).place(10, 0).tolist() != Hierarchy(edges=4).place(10, 1).tolist()
    )
    path = tmp_path / "places.csv"
    path.write_text("client,edge\n0,1\n1,0\n2,1\n")
    assert load({"algorithm": "pacfl"}, [f"hierarchy.edges={path}"]).hierarchy.place(3, 0).tolist() == [
        1,
        0,
        1,
    ]


def test_a_file_of_edges_is_read_by_client(tmp_path: Path) -> None:
    """Whatever the order of its rows; without a column of clients by row."""
    path = tmp_path / "places.csv"
    path.write_text("client, edge\n2, 1\n0, 2\n1, 0\n")
    assert Hierarchy(edges=path).place(3, 0).tolist() == [2, 0, 1]
    for clients, what in ((2, "has 3 rows for 2 clients"), (4, "has no row for client 3")):
        with pytest.raises(ConfigError, match=what):
            Hierarchy(edges=path).place(clients, 0)
    path.write_text("edge,client\n1,north\n0,south\n")
    assert Hierarchy(edges=path).place(2, 0, ["south", "north"]).tolist() == [0, 1]
    with pytest.raises(ConfigError, match="has no row for client west"):
        Hierarchy(edges=path).place(2, 0, ["south", "west"])
    path.write_text("edge\n1\n0\n")
    assert Hierarchy(edges=path).place(2, 0, ["south", "north"]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hierarchy": {"edges": 10}}, "hierarchy.edges: 10 edges for 9 clients; use fewer"),
        (
            {"hierarchy": {"edges": [0, 1]}},
            "hierarchy.edges: names the edges of 2 clients; the partition has 9",
        ),
        (
            {"hierarchy": {"edges": "nowhere.csv"}},
            "nowhere.csv cannot be read: No such file",
        ),
        ({"hierarchy": {"edges": __file__}}, "test_hierarchy.py needs a column 'edge' with numbers from 0"),
        (
            {"events": [{"name": "outage", "round": 1, "servers": [0, 3]}]},
            "events.0.servers: there is no edge 3; use 0 to 2",
        ),
        (
            {
                "algorithm": "fedavg",
                "hierarchy": {},
                "events": [{"name": "outage", "round": 1, "servers": [0]}],
            },
            "events.0: would do nothing with fedavg; ",
        ),
        (
            {
                "algorithm": "pacfl",
                "hierarchy": {},
                "events": [{"name": "outage", "round": 1, "servers": [0]}],
            },
            "events.0: an outage changes nothing where the global server averages nothing; set hierarchy.com",
        ),
    ],
)
def test_edges_that_do_not_fit(change: dict[str, Any], message: str, cloud: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(load({**cloud, **change}))
    assert message in str(caught.value)


# --- the global step by hand: two servers, three numbers, the first two common ----------------------------

MODELS = np.array([[1, 2, 3], [5, 6, 7]], np.float32)
STEP = GlobalStep(((((0, 2),), np.zeros(2, np.int64)),), np.array([True, True]))


@pytest.fixture
def servers() -> Iterator[Servers]:
    backend = InlineBackend()
    made = Servers(backend, SimpleNamespace(P=3), None, blocks=Blocks(lambda n: n))  # type: ignore[arg-type]
    made.models = list(MODELS)
    yield made
    backend.close()


def trained(*rows: tuple[list[float], Weight, Weight]) -> dict[int, Reduced]:
    """What the GPS learns: sums over the common numbers, their weights, and of all numbers."""
    return {k: Reduced(Partial(np.array(s), w), v, 0.0) for k, (s, w, v) in enumerate(rows)}


def test_weights_add_up_until_the_global_step(servers: Servers) -> None:
    """Server 0 with 2 samples, then server 1 with 1, then server 0 with 1: 3 and 1."""
    gather(servers, STEP, {0: Reduced(Partial(np.empty(0), 2.0), 2.0, 0.0)})
    gather(servers, STEP, {1: Reduced(Partial(np.empty(0), 1.0), 1.0, 0.0)})
    last = trained(([3.0, 4.0], 1.0, 1.0))
    gather(servers, STEP, last)
    assert servers.gathered.tolist() == [[[3], [1]]]
    assert share(servers, STEP, ((0, 2),), last) == (16, 16)
    # (3 * 3 + 1 * 5) / 4 and (3 * 4 + 1 * 6) / 4; the third number stays
    np.testing.assert_array_equal(servers.models, [[3.5, 4.5, 3], [3.5, 4.5, 7]])
    assert servers.gathered.tolist() == [[[0], [0]]]


def test_numbers_that_clients_leave_out_gather_weights_of_their_own(servers: Servers) -> None:
    """Sub-FedAvg: server 0 had number 0 kept by 2 samples before; now only number 1 is kept, by 3."""
    before = np.array([2.0, 0.0, 2.0])
    gather(servers, STEP, {0: Reduced(Partial(np.empty(0), before), before, 0.0)})
    now = np.array([0.0, 3.0, 0.0])
    last = trained(
        ([1.0, 12.0], now[:2], now), ([10.0, 12.0], 2.0, 2.0)
    )  # sums; models where the weight is 0
    gather(servers, STEP, last)
    share(servers, STEP, ((0, 2),), last)
    # number 0: (2 * 1 + 10) / 4; number 1: (12 + 12) / 5
    np.testing.assert_allclose(servers.models, [[3, 4.8, 3], [3, 4.8, 7]])


def test_a_server_that_is_not_due_keeps_what_it_gathered(servers: Servers) -> None:
    later = replace(STEP, due=np.array([True, False]))
    last = trained(([2.0, 4.0], 2.0, 2.0), ([10.0, 12.0], 2.0, 2.0))
    gather(servers, later, last)
    assert share(servers, later, ((0, 2),), last) == (0, 0)  # alone
    np.testing.assert_array_equal(servers.models, MODELS)
    assert servers.gathered.tolist() == [[[2], [2]]]


def test_clusters_that_come_of_one_divide_what_it_gathered(servers: Servers) -> None:
    servers.gathered = np.array([[[6.0], [4.0]]])
    servers.inherit(np.array([0, 1, 0]))
    assert servers.gathered.tolist() == [[[3], [4], [3]]]
