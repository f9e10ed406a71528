"""FLIS (DC) and (HC): similarities, averages and choices by hand; limits; newcomers; planted tasks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import squareform
from sklearn.metrics import adjusted_rand_score, homogeneity_score

import rayfl
from rayfl.algorithms import OneShotState, ServerState
from rayfl.algorithms.flis_dc import InferenceSimilarities
from rayfl.clustering.predictions import clustering_error, joint_clusters
from rayfl.config import load
from rayfl.data import DATASETS, Ragged, Samples
from rayfl.data.held_out import hold_out
from rayfl.data.server import ServerData
from rayfl.errors import ConfigError, DataError
from rayfl.models import MODELS, ModelSpec
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.training.batches import Batches
from rayfl.training.forward import Forward
from rayfl.training.reports import Predictions, Trained
from tests.algorithms.fakes import FakeClients, algorithm, plan_of, report, setup
from tests.algorithms.test_identities import GROUPS, TASKS, N, P, Ran, Run, run, same, same_curves

__all__ = ["run"]

SIMILAR = np.array(
    [
        [1.0, 0.9, 0.2, 0.1, 0.6, 0.0],
        [0.9, 1.0, 0.3, 0.1, 0.8, 0.0],
        [0.2, 0.3, 1.0, 0.7, 0.1, 0.0],
        [0.1, 0.1, 0.7, 1.0, 0.2, 0.0],
        [0.6, 0.8, 0.1, 0.2, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    ]
)


# --- FLIS (DC) by hand -----------------------------------------------------------------------------------


def test_rows_of_a_by_hand():
    """beta = 0.7: {0, 1}, {0, 1, 4}, {2, 3}, {2, 3}, {1, 4}, {5}, each weighed by n_j; clusters overlap."""
    s, method = setup("flis_dc"), algorithm("flis_dc", beta=0.7)
    state = method.begin(s)
    plan = plan_of(method, s, state)
    assert plan.start.tolist() == [0] * 6
    mixing = method.mix(s, state, plan, {"similarities": SIMILAR})
    assert mixing.weights.toarray().tolist() == [
        [10, 20, 0, 0, 0, 0],
        [10, 20, 0, 0, 50, 0],
        [0, 0, 30, 40, 0, 0],
        [0, 0, 30, 40, 0, 0],
        [0, 20, 0, 0, 50, 0],
        [0, 0, 0, 0, 0, 60],
    ]
    after = method.end(s, state, plan, report(plan, 6))
    assert after.models == 6
    assert after.assignment.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_next_round_by_hand():
    """Three of six take part, from what they chose; their cluster models take the place of the old six."""
    s = setup("flis_dc", training={"participation": 0.5})
    method = algorithm("flis_dc", beta=0.7)
    clients = FakeClients({"validation": [[9, 9, 1, 9, 9, 9], [9, 9, 2, 3, 9, 9]] * 3})
    state = ServerState(1, 6, np.arange(6))
    cohort = np.array([0, 1, 4])
    state = method.select(s, state, cohort, clients)
    plan = method.plan(s, state, cohort)
    assert plan.start.tolist() == [2, 2, 2]
    assert method.downloads(s, state, plan) == 3 * 6
    mixing = method.mix(s, state, plan, {"similarities": SIMILAR[np.ix_(cohort, cohort)]})
    assert mixing.parents.tolist() == [2, 2, 2]
    assert mixing.weights.toarray().tolist() == [[10, 20, 0], [10, 20, 50], [0, 20, 50]]
    after = method.end(s, state, plan, report(plan, 3))
    assert after.models == 3
    assert after.assignment.tolist() == [0, 1, 0, 0, 2, 0]


@pytest.mark.parametrize("selection", ["validation", "test", "train"])
def test_models_are_chosen_on_held_out_data_unless_told_otherwise(selection: str):
    """The thesis prints test data. The three parts disagree here."""
    losses = {"train": [[1, 2, 3]] * 6, "validation": [[3, 1, 2]] * 6, "test": [[2, 3, 1]] * 6}
    clients = FakeClients(losses)
    assert algorithm("flis_dc").selection == "validation"
    method = algorithm("flis_dc", selection=selection)
    state = method.select(setup("flis_dc"), ServerState(1, 3, np.zeros(6, int)), np.arange(6), clients)
    assert clients.asked == [selection]
    assert set(state.assignment.tolist()) == {{"train": 0, "validation": 1, "test": 2}[selection]}


def test_a_client_with_nothing_held_out_chooses_on_its_training_data():
    nothing = [np.nan] * 2
    clients = FakeClients({"validation": [[1, 2], nothing, [2, 1]], "train": [[9, 8]] * 3})
    s = setup("flis_dc", sizes=[9, 2, 9])
    state = algorithm("flis_dc").select(s, ServerState(1, 2, np.zeros(3, int)), np.arange(3), clients)
    assert state.assignment.tolist() == [0, 1, 1]


def test_newcomers_of_dc_choose_among_the_models_there_are():
    """Published code failed here with an undefined name."""
    clients = FakeClients({"validation": [[2, 1, 3]] * 6})
    s, method = setup("flis_dc"), algorithm("flis_dc")
    state = ServerState(2, 3, np.array([0, 1, 2, 0, 0, 0]))
    found = method.join(s, state, np.array([4, 5]), clients)
    assert found.assignment.tolist() == [0, 1, 2, 0, 1, 1]
    fresh = method.begin(s)
    assert method.join(s, fresh, np.array([5]), clients).assignment.tolist() == [0] * 6


# --- predictions -----------------------------------------------------------------------------------------


def trained(spec: Any, module: Any, batches: Any, rows: torch.Tensor) -> Trained:
    return Trained(
        spec, Forward(spec, module), batches, rows, torch.zeros_like(rows), Ragged.of([[]] * len(rows))
    )


def test_similarities_against_numpy():
    """The cosine of softmax outputs of two linear models on the server's samples."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 5)).astype(np.float32)
    samples = Samples("made", x, np.arange(40) % 3, x, np.arange(40) % 3, 3, x_server=x[:20])
    spec = ModelSpec.of(MODELS["linear"](), samples.shape, samples.classes, 0)
    rows = rng.standard_normal((4, spec.P)).astype(np.float32)
    found = {}
    for one_hot in (False, True):
        report = InferenceSimilarities(ServerData(samples=15, one_hot=one_hot)).prepare(samples, 7)
        inputs = report.inputs
        assert inputs is not None
        assert len({tuple(row) for row in inputs}) == 15
        assert all((row == x[:20]).all(axis=1).any() for row in inputs)
        batches = Batches(samples, torch.device("cpu"))
        blocks = [
            report.compute(trained(spec, spec.build(), batches, torch.from_numpy(part)))
            for part in (rows[:3], rows[3:])
        ]
        found[one_hot] = report.combine(blocks)
        predictions = []
        for row in rows.astype(np.float64):
            scores = inputs @ row[:15].reshape(3, 5).T + row[15:]
            soft = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            predictions.append((np.eye(3)[scores.argmax(1)] if one_hot else soft).ravel())
        b = np.array(predictions)
        lengths = np.linalg.norm(b, axis=1)
        np.testing.assert_allclose(found[one_hot], b @ b.T / np.outer(lengths, lengths), atol=1e-6)
    assert not np.allclose(found[False], found[True])


def test_server_data_of_every_source():
    digits = hold_out(DATASETS["digits"]().load(None), 0.1, 0, 0)
    assert digits.x_server is not None
    own = ServerData(samples=50).draw(digits, 0)
    assert len(own) == 50
    assert all((digits.x_server == x).all(axis=tuple(range(1, x.ndim + 1))).any() for x in own)
    assert len(ServerData(samples=10**6).draw(digits, 0)) == len(digits.x_server)
    assert (ServerData(samples=50).draw(digits, 0) == own).all()
    assert (ServerData(samples=50).draw(digits, 1) != own).any()
    noise = ServerData(source="noise", samples=50).draw(digits, 0)
    assert noise.shape == own.shape
    assert noise.dtype == own.dtype
    assert abs(noise.astype(float).mean() / 255 - 0.5) < 0.05 or noise.dtype.kind == "f"


def test_server_data_of_another_dataset_and_where_it_lies(tmp_path):
    digits = DATASETS["digits"]().load(None)
    shape = {"x_train": (3, 7, 7), "x_test": (5, 7, 7)}
    small = {key: np.full(size, 9, np.uint8) for key, size in shape.items()}
    np.savez(tmp_path / "usps.npz", **small, y_train=np.arange(3), y_test=np.arange(5))
    found = ServerData(source="usps", samples=4, root=tmp_path).draw(digits, 0)
    assert found.shape == (4, 1, 8, 8)
    assert (found[:, :, :7, :7] == 9).all()
    for name in ("npz", "leaf"):  # a name alone does not say which file
        with pytest.raises(ConfigError, match=f"no server data '{name}'"):
            ServerData(source=name)


def test_noise_for_numbers_and_words():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 4)).astype(np.float32)
    features = Samples("made", x, np.zeros(30, int), x, np.zeros(30, int), 2)
    noise = ServerData(source="noise", samples=400).draw(features, 0)
    assert noise.dtype == np.float32
    assert abs(noise.std() - 1) < 0.1
    words = rng.integers(0, 12, (30, 6)).astype(np.int32)
    texts = Samples("made", words, np.zeros(30, int), words, np.zeros(30, int), 12)
    noise = ServerData(source="noise", samples=400).draw(texts, 0)
    assert noise.dtype == np.int32
    assert set(np.unique(noise)) == set(range(12))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (
            {"algorithm": {"name": "flis_dc", "server_data": {"source": "digit"}}},
            "algorithm.server_data.source",
        ),
        (
            {"algorithm": "flis_hc", "clustering": {"signature": {"data": {"source": "digit"}}}},
            "clustering.signature.data.source",
        ),
    ],
)
def test_unknown_server_data_are_refused_before_anything_starts(settings: dict[str, Any], where: str):
    with pytest.raises(ConfigError, match=f"{where}: no server data 'digit'; did you mean 'digits'") as error:
        load(settings)
    assert "\n" not in str(error.value)


def test_server_data_of_another_shape_are_refused():
    x = np.zeros((9, 5), np.float32)
    made = Samples("made", x, np.zeros(9, int), x, np.zeros(9, int), 2)
    with pytest.raises(DataError, match=r"server data digits: samples .* are not like the run's"):
        ServerData(source="digits").draw(made, 0)


def test_words_count_as_samples():
    """Outputs (n, classes, L) of a model of texts: L predictions a sample, each a row of its own."""

    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.p[None, :, None].expand(len(x), 3, 4)

    class Spec:
        def load(self, module: Constant, row: torch.Tensor) -> None:
            module.p.data = row

    class Plain:
        def inputs(self, x: Any) -> torch.Tensor:
            return torch.from_numpy(x)

        def at_once(self, usual: int) -> int:
            return usual

    rows = torch.tensor([[0.0, 9, 0], [0, 9, 1], [9, 0, 0]])
    report = Predictions(ServerData(one_hot=True), np.zeros((5, 4), np.int64))
    found = report.compute(trained(Spec(), Constant(), Plain(), rows))
    assert found.shape == (3, 5 * 4 * 3)
    assert (found[0] == np.tile([0, 1, 0], 20)).all()
    assert (found[2] == np.tile([1, 0, 0], 20)).all()


# --- whole runs ----------------------------------------------------------------------------------------


SHARED = "data.server_share=2500"
"""What FLIS holds out by default: others train on the same data if told to."""


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_dc_with_beta_of_zero_is_fedavg(run: Run, participation: float):
    """Every one of the n cluster models is FedAvg's."""
    overrides = [f"training.participation={participation}", SHARED]
    dc, flat = run({"name": "flis_dc", "beta": 0.0}, *overrides), run("fedavg", *overrides)
    assert len(dc.models) == round(participation * N)
    for model in dc.models:
        assert same(model, flat.models[0])
    same_curves(dc, flat)


def test_dc_with_beta_of_one_averages_nobody(run: Run):
    """Each model is that of its participant: after one round they are SOLO's."""
    dc, solo = run({"name": "flis_dc", "beta": 1.0}, "rounds=1"), run("solo", "rounds=1", SHARED)
    assert same(dc.models, solo.states)


def test_hc_with_threshold_of_one_is_fedavg_and_of_zero_solo(run: Run):
    one, flat = run("flis_hc", "clustering.threshold=1"), run("fedavg", SHARED)
    assert same(one.models, flat.models)
    same_curves(one, flat)
    alone, solo = run("flis_hc", "clustering.threshold=0"), run("solo", SHARED)
    assert alone.assignment.tolist() == list(range(N))
    assert same(alone.models, solo.states)
    same_curves(alone, solo)


@pytest.mark.parametrize("source", ["dataset", "noise"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_hc_recovers_planted_tasks(run: Run, source: str, one_hot: bool):
    ran = run(
        "flis_hc",
        "rounds=1",
        "training.epochs=5",
        "clustering.n_clusters=3",
        f"clustering.signature.data={{source: {source}, one_hot: {one_hot}}}",
    )
    assert ran.assignment.tolist() == GROUPS
    assert ran.summary["ari"] == 1.0


def test_dc_clusters_are_the_planted_tasks(run: Run, monkeypatch: pytest.MonkeyPatch):
    """The participants' similarities, as the server sees them: no false pair in the first round."""
    seen = []
    original = InferenceSimilarities.combine

    def combine(self: InferenceSimilarities, blocks: Any) -> np.ndarray:
        seen.append(original(self, blocks))
        return seen[-1]

    monkeypatch.setattr(InferenceSimilarities, "combine", combine)
    ran = run({"name": "flis_dc", "beta": 0.5}, "rounds=4", "training.epochs=5")
    together = joint_clusters(squareform(seen[0], checks=False), 0.5)
    assert clustering_error(together, np.array(GROUPS)) == (0, 0)
    # Nobody takes a model that a client of another task takes.
    assert homogeneity_score(GROUPS, ran.assignment) == 1.0
    assert (
        ran.summary["accuracy_mean"] > run("fedavg", "rounds=4", "training.epochs=5").summary["accuracy_mean"]
    )


def test_bytes(run: Run):
    """DC: all n models of the last round down, one up. HC: everybody's first model up and w_0 down, once."""
    dc = run({"name": "flis_dc", "beta": 0.5}, "training.participation=0.4")
    assert dc.bytes(direction="up") == 3 * 4 * P * 4
    assert dc.bytes(direction="down") == (1 + 4 + 4) * 4 * P * 4
    hc = run("flis_hc", "clustering.n_clusters=3")
    assert hc.bytes(kind="signature", direction="up") == N * P * 4
    assert hc.bytes(kind="signature", direction="down") == N * P * 4
    assert hc.bytes(kind="model") == 2 * 3 * N * P * 4


def joined(run: Run, algorithm: Any, **sections: Any) -> tuple[Ran, Ran]:
    """A run in which the last client of each task joins after round 2, and the clusters before that."""
    events = [{"name": "join", "round": 2, "clients": 1, "group": group} for group in (0, 1, 2)]
    sections = {"training": {"epochs": 5, "batch_size": 20, "lr": 0.1}, **sections}
    return (
        run(algorithm, "rounds=4", events=events, **sections),
        run(algorithm, "rounds=2", events=[{**e, "round": 1} for e in events], **sections),
    )


@pytest.mark.parametrize("threshold", [0.4, 0.5])
def test_newcomers_of_hc_extend_the_matrix(run: Run, threshold: float):
    """They train from w_0 like the others did, and are placed with the same threshold; nobody else moves."""
    ran, _ = joined(run, "flis_hc", clustering={"threshold": threshold})
    groups = ran.result.clusters["groups"]
    before, after = ran.result.clusters["timeline"]
    assert (before["round"], after["round"]) == (0, 2)
    assert before["labels"][:7] == after["labels"][:7]
    assert adjusted_rand_score(groups, after["labels"]) == 1.0
    assert after["newcomers"] == [7, 8, 9]
    assert ran.summary["ari"] == 1.0


def test_a_newcomers_place_does_not_depend_on_when_it_comes(run: Run):
    """Its signature is a function of its data and w_0, not of what has been trained meanwhile."""
    late, early = joined(run, "flis_hc", clustering={"threshold": 0.5})
    assert late.assignment.tolist() == early.assignment.tolist()
    of_late, of_early = (
        Checkpoint.load(checkpoints(ran.result.path / "checkpoints")[-1], OneShotState).state
        for ran in (late, early)
    )
    assert of_late.threshold == of_early.threshold == 0.5


def test_a_newcomer_like_nobody_founds_a_cluster(run: Run):
    events = [{"name": "join", "round": 2, "clients": 2, "group": 2}]  # all of the task
    ran = run(
        "flis_hc",
        "rounds=4",
        events=events,
        training={"epochs": 5, "batch_size": 20, "lr": 0.1},
        clustering={"threshold": 0.5},
    )
    assert ran.result.clusters["timeline"][0]["labels"][:8] == GROUPS[:8]
    assert ran.assignment.tolist() == GROUPS
    assert len(ran.models) == 3


def test_newcomers_of_dc_train_and_are_tested(run: Run):
    ran, _ = joined(run, {"name": "flis_dc", "beta": 0.5})
    assert homogeneity_score(ran.result.clusters["groups"], ran.assignment) == 1.0
    assert ran.result.rounds["clients"].tolist() == [7, 7, 10, 10]
    assert ran.result.clients["accuracy_last"].notna().all()


def test_a_failing_client_is_left_out_and_spoils_nothing(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Client 3's model is not finite: the server must not look at it."""
    from rayfl.training.loop import LoopEngine

    original = LoopEngine.train

    def train(self: Any, work: Any, round: int, clients: Any, indices: Any, start: Any, *rest: Any) -> Any:
        block = original(self, work, round, clients, indices, start, *rest)
        failures = dict(block.failures)
        for row, client in enumerate(clients):
            if client == 3 and len(clients) > 1 and rest:  # not while it signs
                block.rows[row] = float("nan")
                failures[row] = "Traceback\nValueError: boom"
        return dataclasses.replace(block, failures=failures)

    monkeypatch.setattr(LoopEngine, "train", train)
    execution = {"backend": "inline", "tolerate_failures": 1, "block_size": 5}
    for name in ({"name": "flis_dc", "beta": 0.5}, {"name": "fedsem", "clusters": 3}):
        ran = run(name, execution=execution, partition=TASKS)
        assert ran.result.rounds["failures"].tolist() == [1, 1, 1]
        assert np.isfinite(ran.models).all()
        assert ran.summary["accuracy_mean"] > 60
    assert isinstance(ran.result, rayfl.Result)
