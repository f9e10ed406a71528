"""Running statistics of BatchNorm are averages over inputs: no weights that one steps along or away from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import rayfl
from rayfl.clients.host import partial_product
from rayfl.clients.jobs import HostSpec
from rayfl.clients.partial import Partial
from rayfl.config import load
from rayfl.models import MODELS, ModelSpec
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from tests.servers.serving import combine, reduce

SIZES = (12, 40)
SPEC = ModelSpec.of(MODELS["lenet5"](batch_norm=True), (1, 28, 28), 4, 0)
N = SPEC.n_parameters

Run = Callable[..., tuple[rayfl.Result, Checkpoint]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two clients with 12 and 40 grey images."""
    folder = tmp_path_factory.mktemp("statistics")
    draw = np.random.default_rng(0)
    y = np.repeat([0, 1, 2, 3], [6, 6, 20, 20])
    x = (draw.random((52, 28, 28, 1)) * 60 + 40 * y[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "made.npz", x_train=x, y_train=y, x_test=x[::4], y_test=y[::4])
    tasks = [{"labels": [0, 1], "clients": 1}, {"labels": [2, 3], "clients": 1}]

    def call(algorithm: Any, local: str = "sgd", *overrides: str) -> tuple[rayfl.Result, Checkpoint]:
        settings = {
            "rounds": 1,
            "data": {"name": "npz", "path": str(folder / "made.npz")},
            "partition": {"name": "tasks", "tasks": tasks, "validation": 0.0},
            "model": {"name": "lenet5", "batch_norm": True},
            "algorithm": algorithm,
            "local": local,
            "training": {"epochs": 1, "batch_size": 4, "lr": 0.05, "engine": "loop"},
            "execution": {"backend": "inline", "block_size": 1},
            "output": {"root": str(folder), "report": False, "tensorboard": False},
        }
        result = rayfl.run(settings, overrides)
        assert result.clients["n"].tolist() == list(SIZES)
        return result, Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])

    return call


def test_fednova_averages_them_as_fedavg_does(run: Run) -> None:
    """With 3 and 10 steps the small client counts more than n_i, and the model itself less than nothing: of
    a variance of 1 that falls in training more would be taken away than there is."""
    (_, fedavg), (result, fednova) = run("fedavg"), run("fedavg", "fednova")
    assert fednova.models[0, N:].tobytes() == fedavg.models[0, N:].tobytes()
    assert np.abs(fednova.models[0, :N] - fedavg.models[0, :N]).max() > 1e-3
    assert np.isfinite(result.rounds["loss_mean"]).all()


def test_also_where_the_servers_combine_trained_models(run: Run) -> None:
    center = {"name": "fedsem", "clusters": 1}
    (_, plain), (_, fednova) = run(center), run(center, "fednova")
    np.testing.assert_allclose(fednova.models[0, N:], plain.models[0, N:], rtol=1e-6)
    assert np.abs(fednova.models[0, :N] - plain.models[0, :N]).max() > 1e-3


def test_by_hand() -> None:
    """Client 0 counts 3 and leaves -1 in place, client 1 counts 1 and leaves 2; the last number is a
    statistic: (2 * 10 + 3 * 20) / 5. The others (3 w_0 + w_1 + w) / 5."""
    old, rows = np.array([5, 5, 1], np.float32), np.array([[1, 2, 10], [3, 4, 20]], np.float32)
    a, b = np.array([3.0, 1.0]), np.array([-1.0, 2.0])
    expected = [(3 + 3 + 5) / 5, (6 + 4 + 5) / 5, 16]
    parts = []
    for k in range(2):
        total, weight = partial_product(a[[k]], torch.from_numpy(rows[[k]]))
        total[2] = (a[k] + b[k]) * rows[k, 2]
        parts.append(Partial(total, weight, keep=b[k], statistics=1))
    new, reduced = reduce(((0, 3),), (), old, *parts)
    np.testing.assert_allclose(new, expected, rtol=1e-6)
    assert reduced.update_norm == pytest.approx(np.hypot(expected[0] - 5, expected[1] - 5))
    # Somebody absent counts 5 at the old model, in the statistic too.
    absent = Partial(np.zeros(1), 0.0, keep=5.0)
    new, _ = reduce(((0, 3),), (), old, *parts, absent)
    np.testing.assert_allclose(new, [(11 + 25) / 10, (15 + 25) / 10, (80 + 5) / 10], rtol=1e-6)
    job = {"weights": [a[None, :]], "kept": [b[None, :]], "keep": np.array([1.0 + 5.0]), "statistics": 1}
    (new,), _ = combine(((0, 3),), (), [old], [rows], **job)
    np.testing.assert_allclose(new, [(11 + 25) / 10, (15 + 25) / 10, (80 + 5) / 10], rtol=1e-6)


def test_updates_that_cfl_compares_are_those_of_the_parameters(run: Run) -> None:
    method = {"name": "cfl", "criteria": {"eps1": 0}}
    result, last = run(method)
    updates = np.asarray(last.update_rows, np.float64)
    assert not updates[:, N:].any()
    assert (np.abs(updates[:, :N]).max(axis=1) > 1e-3).all()
    moved = last.models[0].astype(np.float64) - spec_of(result).initial()
    assert np.abs(moved[N:]).max() > 0.1  # which would drown them
    row = pd.read_csv(result.path / "diagnostics.csv").iloc[0]
    assert row["mean_norm"] == pytest.approx(np.linalg.norm(moved[:N]), rel=1e-6)
    assert row["max_norm"] == pytest.approx(np.linalg.norm(updates, axis=1).max(), rel=1e-6)
    private, permuted = run({**method, "permute": True})
    assert private.summary["models_sha256"] == result.summary["models_sha256"]
    columns = ["mean_norm", "max_norm"]
    np.testing.assert_allclose(pd.read_csv(private.path / "diagnostics.csv")[columns].iloc[0], row[columns])
    assert not np.asarray(permuted.update_rows)[:, N:].any()


def spec_of(result: rayfl.Result) -> ModelSpec:
    """The layout, with the run's own initial model."""
    return build(load(result.config))[1].spec


def test_hidden_and_revealed() -> None:
    """Parameters among themselves, statistics among themselves."""
    host = HostSpec(SPEC, 3, "loop", permutes=True)
    rows = np.random.default_rng(0).random((2, SPEC.P)).astype(np.float32)
    permuted = host.permute(rows)
    assert (host.unpermute(permuted) == rows).all()
    assert (np.sort(permuted[:, :N]) == np.sort(rows[:, :N])).all()
    assert (permuted[:, :N] != rows[:, :N]).mean() > 0.9
    assert (permuted[:, N:] != rows[:, N:]).mean() > 0.5
    assert (host.unpermute(permuted[0]) == rows[0]).all()
