"""LG-FedAvg and Per-FedAvg: degenerate identities bit for bit, what is shared and sent, steps by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from rayfl.config import load
from rayfl.data import build_federation
from rayfl.errors import ConfigError
from rayfl.models import MODELS, ModelSpec
from rayfl.random import orders
from rayfl.servers.building import build
from rayfl.servers.checkpoint import Checkpoint, checkpoints
from rayfl.training.batches import Batches
from tests.algorithms.fakes import algorithm, clustered, setup

N = 5
TASKS = {
    "name": "tasks",
    "tasks": [{"labels": [0, 1, 2, 3, 4], "clients": 3}, {"labels": [5, 6, 7, 8, 9], "clients": 2}],
}
P = 64 * 6 + 6 + 6 * 10 + 10
FC1 = 64 * 6 + 6

Run = Callable[..., rayfl.Result]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    root: Path = tmp_path_factory.mktemp("runs")

    def call(name: str | dict[str, Any], *overrides: str, **sections: Any) -> rayfl.Result:
        base: dict[str, Any] = {
            "rounds": 3,
            "partition": TASKS,
            "model": {"name": "mlp", "hidden": [6]},
            "algorithm": name,
            "training": {"epochs": 2, "batch_size": 20, "lr": 0.1, "participation": 0.6, "engine": "loop"},
            "execution": {"backend": "inline", "block_size": 2},
            "output": {"root": str(root), "report": False, "tensorboard": False},
        }
        return rayfl.run({**base, **sections}, overrides)

    return call


def last(result: rayfl.Result) -> Checkpoint:
    return Checkpoint.load(checkpoints(result.path / "checkpoints")[-1])


def same_results(a: rayfl.Result, b: rayfl.Result) -> None:
    for column in (
        "train_loss",
        "accuracy_mean",
        "accuracy_worst10",
        "accuracy_var",
        "bytes_up",
        "bytes_down",
    ):
        assert a.rounds[column].tolist() == b.rounds[column].tolist(), column
    assert a.clients["accuracy_last"].tolist() == b.clients["accuracy_last"].tolist()


# --- LG-FedAvg -------------------------------------------------------------------------------------------


def test_no_local_layers_is_fedavg(run: Run):
    lg, fedavg = run({"name": "lg_fedavg", "local_layers": 0}), run("fedavg")
    assert last(lg).models.tobytes() == last(fedavg).models.tobytes()
    assert len(last(lg).state_rows) == 0
    same_results(lg, fedavg)


def test_all_layers_local_is_solo(run: Run):
    lg, solo = run({"name": "lg_fedavg", "local_layers": 2}), run({"name": "solo", "sampled": True})
    assert last(lg).state_clients.tolist() == last(solo).state_clients.tolist()
    assert last(lg).state_rows.tobytes() == last(solo).state_rows.tobytes()
    assert lg.summary["bytes_up"] == lg.summary["bytes_down"] == 0
    same_results(lg, solo)


def test_the_first_layers_stay_and_the_last_are_averaged(run: Run):
    """One round of everybody from the common start: what SOLO trains, divided and averaged by n_i."""
    lg = run({"name": "lg_fedavg", "local_layers": 1}, "rounds=1", "training.participation=1")
    alone = run("solo", "rounds=1")
    trained, sizes = last(alone).state_rows, alone.clients["n"].to_numpy()
    assert len(set(sizes.tolist())) > 1
    assert last(lg).state_rows.tobytes() == np.ascontiguousarray(trained[:, :FC1]).tobytes()
    mean = (sizes[:, None] * trained[:, FC1:].astype(np.float64)).sum(0) / sizes.sum()
    np.testing.assert_allclose(last(lg).models[0, FC1:], mean, rtol=1e-6, atol=1e-8)
    initial = ModelSpec.of(lg.config.model, (1, 8, 8), 10, lg.config.seed).initial()
    assert last(lg).models[0, :FC1].tolist() == initial[:FC1].tolist()  # nobody sends these
    for direction in ("bytes_up", "bytes_down"):
        assert lg.summary[direction] == N * 4 * (P - FC1)


def test_local_layers_outlive_the_rounds(run: Run):
    """A client's first layers change only when it trains."""
    one, three = (run("lg_fedavg", f"rounds={r}", "training.participation=0.2") for r in (1, 3))
    assert len(last(one).state_clients) == 1
    client = last(one).state_clients[0]
    states = dict(zip(last(three).state_clients.tolist(), last(three).state_rows, strict=True))
    assert 1 < len(states) < N
    # Drawn in the first round only, it has kept what it had then.
    assert (states[client] == last(one).state_rows[0]).all()
    assert three.summary["bytes_up"] == 3 * 4 * (P - FC1)


@pytest.mark.parametrize(
    ("name", "layers", "shape"),
    [("lenet5", 3, (3, 32, 32)), ("mlp", 1, (5,)), ("linear", 0, (5,)), ("resnet9", 5, (3, 32, 32))],
)
def test_all_but_the_last_two_layers_are_local(name: str, layers: int, shape: tuple[int, ...]):
    """Table 3.20: LeNet-5 3 and 2. Of our ResNet-9 a residual block is a layer: 5 and 2.

    A network of two layers keeps one, a single layer is shared.
    """
    spec = ModelSpec.of(MODELS[name](), shape, 10, 0)
    assert algorithm("lg_fedavg").local(spec) == tuple(spec.segment(first=layers))


def test_statistics_of_local_layers_are_local_too():
    spec = ModelSpec.of(MODELS["lenet5"](batch_norm=True), (3, 32, 32), 10, 0)
    mine = {i for a, b in algorithm("lg_fedavg").local(spec) for i in range(a, b)}
    for name, place in zip(spec.names, spec.slices, strict=True):
        local = name.split(".")[0] in ("conv1", "norm1", "conv2", "norm2", "fc1")
        assert (set(range(place.start, place.stop)) <= mine) == local, name


def test_more_local_layers_than_there_are():
    config = load({"algorithm": {"name": "lg_fedavg", "local_layers": 3}})
    with pytest.raises(ConfigError, match="local_layers: mlp has 2 layers, not 3; use at most 2: fc1, fc2"):
        build(config)


# --- Per-FedAvg ------------------------------------------------------------------------------------------


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax regression; w ``(D + 1, C)``, the bias last."""
    x = np.column_stack([x, np.ones(len(x))])
    return x.T @ (softmax(x @ w) - np.eye(10)[y]) / len(x)


def test_a_round_by_numpy(run: Run):
    """Softmax regression, where a gradient is one line: the averaged model, and the adapted ones tested."""
    alpha, beta = 0.3, 0.2
    ran = run(
        {"name": "per_fedavg", "alpha": alpha, "beta": beta},
        "rounds=1",
        "training.participation=1",
        "training.epochs=1",
        "training.lr=77",
        model="linear",
    )
    config = ran.config
    samples = config.data.load(Path())
    part = config.partition
    federation = build_federation(
        samples, part, validation=part.validation, test_samples=part.test_samples, seed=config.seed
    )
    spec = ModelSpec.of(config.model, samples.shape, samples.classes, config.seed)
    batches = Batches(samples, torch.device("cpu"))

    def matrix(vector: np.ndarray) -> np.ndarray:
        v = vector.astype(np.float64)
        return np.vstack([v[:640].reshape(10, 64).T, v[640:]])

    def epoch(client: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        ids = federation.train[client]
        x, y = batches.train(ids)
        order = orders(config.seed, 0, [client], [len(ids)], 1)[0][0]
        steps = [order[at : at + 20] for at in range(0, len(order), 20)]
        return x.flatten(1).double().numpy(), y.numpy(), steps

    mean, odd = np.zeros((65, 10)), 0
    for client in range(N):
        w = matrix(spec.initial())
        x, y, b = epoch(client)
        odd += len(b) % 2
        pairs = list(zip(b[::2], [*b[1::2], *b[:1]][: len(b[::2])], strict=True))
        for first, second in pairs:
            ahead = w - alpha * gradient(w, x[first], y[first])
            w = w - beta * gradient(ahead, x[second], y[second])
        mean += len(y) * w
    assert odd  # a last batch without a partner is paired with the first
    mean /= federation.sizes.sum()
    np.testing.assert_allclose(matrix(last(ran).models[0]), mean, rtol=1e-4, atol=1e-6)
    assert ran.rounds["lr"].tolist() == [beta]

    losses, accuracies = [], []
    for client in range(N):
        w = mean.copy()
        x, y, b = epoch(client)
        for batch in b:
            w -= alpha * gradient(w, x[batch], y[batch])
        tests, labels = batches.test(federation.test[client])
        p = softmax(np.column_stack([tests.flatten(1).double().numpy(), np.ones(len(labels))]) @ w)
        losses.append(-np.log(p[np.arange(len(labels)), labels]).mean())
        accuracies.append(100 * (p.argmax(1) == labels.numpy()).mean())
    assert ran.rounds["loss_mean"][0] == pytest.approx(np.mean(losses), rel=1e-4)
    assert ran.clients["accuracy_last"].tolist() == pytest.approx(accuracies)


def test_looking_nowhere_is_fedavg_at_rate_beta(run: Run):
    per = run({"name": "per_fedavg", "alpha": 0, "beta": 0.05})
    fedavg = run("fedavg", "training.lr=0.05")
    assert last(per).models.tobytes() == last(fedavg).models.tobytes()
    same_results(per, fedavg)


def test_adaptation_is_for_the_test_alone(run: Run):
    """Testing in every round, which adapts every client, leaves the models alone."""
    often, once = (
        run({"name": "per_fedavg", "alpha": 0.1, "beta": 0.1}, f"evaluation.every={k}") for k in (1, 3)
    )
    assert last(often).models.tobytes() == last(once).models.tobytes()
    assert often.summary["accuracy_mean"] == once.summary["accuracy_mean"]
    assert often.summary["bytes_up"] == once.summary["bytes_up"] == 3 * 3 * 4 * P


def test_fine_tuning_is_a_longer_adaptation(run: Run):
    """Of one epoch it is the adaptation of every test, and not a step of training."""
    one, three = (
        run({"name": "per_fedavg", "alpha": 0.3, "beta": 0.05}, evaluation={"finetune_epochs": k})
        for k in (1, 3)
    )
    assert one.clients["accuracy_finetuned"].tolist() == one.clients["accuracy_last"].tolist()
    assert three.summary["finetuned_accuracy_mean"] > one.summary["finetuned_accuracy_mean"]


def test_the_work_of_the_thesis():
    """alpha 1e-2, beta 1e-3, whatever training.lr is; beta follows the schedule."""
    method = algorithm("per_fedavg")
    work = method.work(setup("per_fedavg", training={"lr": 0.5, "batch_size": 7}), clustered([0] * 6))
    assert (work.lr, work.inner_lr, work.momentum) == (1e-3, 1e-2, 0.0)
    adaptation = method.adaptation(setup("per_fedavg", training={"batch_size": 7}), clustered([0] * 6))
    assert adaptation is not None
    assert (adaptation.epochs, adaptation.batch_size, adaptation.lr) == (1, 7, 1e-2)
    assert (adaptation.inner_lr, adaptation.personal) == (0.0, ())
    falling = setup("per_fedavg", training={"schedule": "exponential", "decay": 0.5})
    assert method.work(falling, clustered([0] * 6, round=3)).lr == pytest.approx(1e-3 / 8)


def test_momentum_is_refused():
    with pytest.raises(
        ConfigError, match=r"training.momentum 0.5 makes no sense with per_fedavg; it must be 0"
    ):
        load({"algorithm": "per_fedavg", "training": {"momentum": 0.5}})
    load({"algorithm": "lg_fedavg", "training": {"momentum": 0.5}})
