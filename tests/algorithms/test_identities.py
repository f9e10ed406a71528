"""Whole runs, inline, on real digits: degenerate cases are equal bit for bit, planted clusters are found,
bytes are what one counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import rayfl
from rayfl.data import build_federation
from rayfl.models import ModelSpec
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.training import LocalWork
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine

TASKS = {
    "name": "tasks",
    "tasks": [
        {"labels": [0, 1, 2, 3, 4], "clients": 5},
        {"labels": [5, 6, 7], "clients": 3},
        {"labels": [8, 9], "clients": 2},
    ],
    "foreign": 0.1,
}
GROUPS = [0] * 5 + [1] * 3 + [2] * 2
P = 64 * 6 + 6 + 6 * 10 + 10
FC1 = 64 * 6 + 6
N = 10

Run = Callable[..., "Ran"]


class Ran:
    """A finished run and its last checkpoint."""

    def __init__(self, result: rayfl.Result) -> None:
        self.result, self.summary = result, result.summary
        self.last = Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])
        self.models, self.states = self.last.models, self.last.state_rows
        self.assignment = self.last.state.assignment

    def bytes(self, **where: Any) -> int:
        frame = self.result.communication
        for column, value in where.items():
            frame = frame[frame[column] == value]
        return int(frame["bytes"].sum())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    root: Path = tmp_path_factory.mktemp("runs")

    def call(algorithm: str, *overrides: str, **sections: Any) -> Ran:
        base: dict[str, Any] = {
            "rounds": 3,
            "partition": TASKS,
            "model": {"name": "mlp", "hidden": [6]},
            "algorithm": algorithm,
            "training": {"epochs": 1, "batch_size": 20, "lr": 0.1, "momentum": 0.5},
            "execution": {"backend": "inline"},
            "output": {"root": str(root), "report": False, "tensorboard": False},
        }
        # Methods cut their blocks differently, and only the plain loop promises a client the same bits in
        # any company; the batched engine equals it up to rounding (tests/training/test_batched.py).
        return Ran(rayfl.run({**base, **sections}, ["training.engine=loop", *overrides]))

    return call


@pytest.fixture(scope="module")
def fedavg(run) -> Ran:
    return run("fedavg")


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def same_curves(a: Ran, b: Ran) -> None:
    """What was measured round by round, to the last digit.

    Not so the test loss: clients of one model share forward passes, and the size of a matrix product shows
    in its last bits.
    """
    exact = ["clients", "lr", "train_loss", "accuracy_mean", "accuracy_worst10", "accuracy_var"]
    pd.testing.assert_frame_equal(a.result.rounds[exact], b.result.rounds[exact], check_exact=True)
    np.testing.assert_allclose(a.result.rounds["loss_mean"], b.result.rounds["loss_mean"], rtol=1e-6)


# --- degenerate identities -----------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_mt_hfl_with_all_layers_common_every_round_is_fedavg(run, participation):
    overrides = [f"training.participation={participation}"]
    flat = run("fedavg", *overrides)
    tree = run("mt_hfl", *overrides, "hierarchy.common_layers=all", "clustering.n_clusters=3")
    assert tree.models.shape == (3, P)
    for model in tree.models:
        assert same(model, flat.models[0])
    same_curves(tree, flat)


def test_and_it_is_not_when_the_global_server_acts_less_often(run, fedavg):
    tree = run("mt_hfl", "hierarchy={common_layers: all, global_every: 2}", "clustering.n_clusters=3")
    assert not same(tree.models[0], fedavg.models[0])


def test_after_a_global_round_all_clusters_share_the_common_layers_only(run):
    tree = run("mt_hfl", "hierarchy={common_layers: 1, global_every: 3}", "clustering.n_clusters=3")
    assert same(tree.models[0, :FC1], tree.models[1, :FC1])
    assert same(tree.models[0, :FC1], tree.models[2, :FC1])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not np.isclose(tree.models[i, FC1:], tree.models[j, FC1:]).any()
    tree = run("mt_hfl", "hierarchy={common_layers: 1, global_every: 2}", "clustering.n_clusters=3")
    assert not np.isclose(tree.models[0, :FC1], tree.models[1, :FC1]).all()  # round 3 was local again


def test_no_common_layers_is_plain_clustered_training(run):
    tree = run("mt_hfl", "hierarchy.common_layers=none", "clustering.n_clusters=3")
    oracle = run("pacfl", "clustering.grouping=planted")
    assert same(tree.models, oracle.models)
    same_curves(tree, oracle)


def test_pacfl_with_a_huge_threshold_is_fedavg(run, fedavg):
    one = run("pacfl", "clustering.threshold=1e6")
    assert same(one.models, fedavg.models)
    assert one.summary["models_sha256"] == fedavg.summary["models_sha256"]
    same_curves(one, fedavg)
    assert same(run("pacfl", "clustering.grouping=single").models, fedavg.models)


def test_pacfl_with_a_threshold_of_zero_is_solo(run):
    alone, solo = run("pacfl", "clustering.threshold=0"), run("solo")
    assert alone.assignment.tolist() == list(range(N))
    assert solo.last.state_clients.tolist() == list(range(N))
    assert same(alone.models, solo.states)
    same_curves(alone, solo)
    assert same(run("pacfl", "clustering.grouping=singletons").models, solo.states)


def test_one_client_is_everything_at_once(run):
    one = {"partition": {"name": "iid", "clients": 1}}
    flat = run("fedavg", **one)
    assert same(run("solo", **one).states, flat.models)
    assert same(run("pacfl", "clustering.threshold=1", **one).models, flat.models)


def test_one_round_of_fedavg_is_the_weighted_mean_of_the_engine(run):
    """The whole path, from the data to the checkpoint, against the engine and NumPy alone."""
    ran = run("fedavg", "rounds=1")
    config = ran.result.config
    samples = config.data.load(Path())
    part = config.partition
    federation = build_federation(
        samples, part, validation=part.validation, test_samples=part.test_samples, seed=config.seed
    )
    spec = ModelSpec.of(config.model, samples.shape, samples.classes, config.seed)
    rows = torch.from_numpy(np.stack([spec.initial()] * N))
    work = LocalWork(epochs=1, batch_size=20, lr=0.1, momentum=0.5)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = LoopEngine(spec, Batches(samples, torch.device("cpu")), config.seed)
    block = engine.train(work, 0, list(range(N)), list(federation.train), rows)
    torch.set_num_threads(before)
    trained, sizes = block.rows.numpy().astype(np.float64), federation.sizes
    mean = (sizes[:, None] * trained).sum(0) / sizes.sum()
    np.testing.assert_allclose(ran.models[0], mean, rtol=1e-6, atol=1e-8)
    assert ran.result.rounds["train_loss"][0] == pytest.approx(np.average(block.losses, weights=sizes))


# --- clusters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mt_hfl", "pacfl"])
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_tasks_are_recovered(run, name, seed):
    ran = run(name, "rounds=1", "clustering.n_clusters=3", f"seed={seed}")
    assert ran.summary["ari"] == 1.0
    assert ran.assignment.tolist() == GROUPS
    assert ran.result.clusters["groups"] == GROUPS
    assert ran.result.clusters["timeline"][0]["labels"] == GROUPS


def test_planted_grouping(run):
    ran = run("pacfl", "clustering.grouping=planted")
    assert ran.assignment.tolist() == GROUPS
    assert ran.summary["ari"] == 1.0
    assert ran.bytes(kind="signature") == 0


def test_random_clustering_keeps_the_sizes(run):
    ran = run("random_clustering", "clustering.n_clusters=3", "seed=1")
    assert sorted(np.bincount(ran.assignment)) == [2, 3, 5]
    assert ran.summary["ari"] < 0.5
    tree = run("mt_hfl", "clustering.n_clusters=3", "seed=1")
    assert ran.bytes() == tree.bytes()  # what it costs is the same, what it is worth is not
    assert not same(ran.models, tree.models)


def test_clustering_again_continues_from_the_old_models(run):
    """The clusters are the same each time, and signatures that have not changed are not sent again."""
    once = run("pacfl", "clustering.n_clusters=3")
    again = run("pacfl", "clustering.n_clusters=3", "clustering.every=1")
    assert same(once.models, again.models)
    assert len(again.result.clusters["timeline"]) == 3
    assert again.bytes(kind="signature") == once.bytes(kind="signature")


# --- bytes by hand: 4 a number -------------------------------------------------------------------------


def test_bytes_of_fedavg(run, fedavg):
    for direction in ("up", "down"):
        assert fedavg.bytes(direction=direction) == 3 * N * P * 4
    assert fedavg.bytes(tier="lps_gps") == 0
    few = run("fedavg", "training.participation=0.4")
    assert few.bytes(direction="up") == few.bytes(direction="down") == 3 * 4 * P * 4
    assert fedavg.summary["bytes_up"] == 3 * N * P * 4
    assert fedavg.result.rounds["bytes_up"].tolist() == [N * P * 4] * 3


def test_solo_sends_nothing(run):
    ran = run("solo")
    assert ran.bytes() == ran.summary["bytes_up"] == ran.summary["bytes_down"] == 0
    assert ran.result.rounds[["bytes_up", "bytes_down"]].to_numpy().sum() == 0


def test_bytes_of_pacfl(run):
    """N clients send p = 3 vectors of 64 numbers, once."""
    ran = run("pacfl", "clustering.n_clusters=3")
    assert (
        ran.bytes(kind="signature") == ran.bytes(kind="signature", direction="up", round=0) == N * 3 * 64 * 4
    )
    assert ran.bytes(kind="model") == 2 * 3 * N * P * 4
    assert ran.bytes(tier="lps_gps") == 0


def test_bytes_of_mt_hfl(run):
    """q = 5 eigenvectors up, everybody's down to all others, N relevances up; common layers of 3 clusters."""
    ran = run("mt_hfl", "clustering.n_clusters=3", "hierarchy.global_every=2")
    assert ran.bytes(kind="signature", direction="up") == (N * 5 * 64 + N * N) * 4
    assert ran.bytes(kind="signature", direction="down") == N * ((N - 1) * 5 * 64) * 4
    assert ran.bytes(kind="model", tier="client_lps") == 2 * 3 * N * P * 4
    for direction in ("up", "down"):  # one global round of three: after the second
        assert ran.bytes(tier="lps_gps", direction=direction) == 3 * FC1 * 4
        assert ran.bytes(tier="lps_gps", direction=direction, round=1) == 3 * FC1 * 4
    total = ran.result.communication.groupby("direction")["bytes"].sum()
    assert (ran.summary["bytes_up"], ran.summary["bytes_down"]) == (total["up"], total["down"])


# --- it learns -----------------------------------------------------------------------------------------


def test_learning_from_the_right_neighbours_beats_random_ones(run):
    settings = ["rounds=8", "clustering.n_clusters=3", "hierarchy.common_layers=none", "evaluation.every=8"]
    settings.append("training.engine=batched")
    right = [run("mt_hfl", *settings, f"seed={s}").summary["accuracy_mean"] for s in range(3)]
    wrong = [run("random_clustering", *settings, f"seed={s}").summary["accuracy_mean"] for s in range(3)]
    assert np.mean(right) > np.mean(wrong) + 5
    assert min(right) > 70


def test_an_lps_without_participants_sends_nothing_up(run):
    one = run("mt_hfl", "training.participation=0.1", "hierarchy.common_layers=1", "clustering.n_clusters=3")
    assert one.bytes(tier="lps_gps", direction="up") == 3 * 4 * FC1  # three rounds, one LPS in each
    assert one.bytes(tier="lps_gps", direction="down") == 3 * 4 * FC1 * 3
