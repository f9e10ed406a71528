"""Runs that predict numbers and several labels: equal to a plain PyTorch loop on real data."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from sklearn import datasets, metrics
from torch import nn

import rayfl
from rayfl.display import Display, closing
from rayfl.errors import ConfigError, DataError
from rayfl.losses import Loss
from rayfl.models import ModelSpec
from rayfl.random import orders
from rayfl.report.compare import Comparison
from rayfl.report.files import RunFiles
from rayfl.servers.building import build
from rayfl.signatures.base import Signature
from tests.report.reading import rows

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


def diabetes() -> Arrays:
    """442 patients, 10 features; the progression of the disease, in units of its deviation."""
    x, y = datasets.load_diabetes(return_X_y=True)
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:350], order[350:]
    return x[train].astype(np.float32), y[train], x[test].astype(np.float32), y[test]


def digits() -> Arrays:
    """Is a digit odd, is it 5 or more, is it 0, 6, 8 or 9 (has a loop)?"""
    x, y = datasets.load_digits(return_X_y=True)
    labels = np.stack([y % 2 == 1, y >= 5, np.isin(y, [0, 6, 8, 9])], axis=1).astype(np.int64)
    x = (x / 16).astype(np.float32)
    return x[:1400], labels[:1400], x[1400:], labels[1400:]


CASES: dict[str, tuple[Callable[[], Arrays], type[nn.Module]]] = {
    "mse": (diabetes, nn.MSELoss),
    "bce": (digits, nn.BCEWithLogitsLoss),
}


def settings(tmp_path: Path, loss: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "rounds": 3,
        "loss": loss,
        "data": CASES[loss][0](),
        "partition": {"name": "iid", "clients": 5, "validation": 0},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"epochs": 2, "batch_size": 10, "lr": 0.05, "momentum": 0.5},
        "execution": {"backend": "inline", "block_size": 2},
        "output": {"root": str(tmp_path), "report": False, "tensorboard": False, "checkpoint_every": 1},
        **more,
    }


class MeanTarget(Signature):
    """The mean of a client's targets."""

    name: Literal["mean_target"] = "mean_target"
    proximities: ClassVar[tuple[str, ...]] = ("euclidean",)

    def compute(self, x: NDArray[np.floating], y: NDArray[Any], key: int = 0) -> NDArray[np.float32]:
        assert len(y) == len(x)
        return y.mean(axis=0).astype(np.float32)


def test_a_signature_of_numeric_targets(forgotten_parts: None, tmp_path: Path) -> None:
    given = settings(
        tmp_path, "mse", clustering={"signature": MeanTarget(), "n_clusters": 2, "proximity": "euclidean"}
    )
    proximity = rayfl.cluster(given, ["algorithm=pacfl"]).distances
    assert proximity is not None
    federation = build(rayfl.load(settings(tmp_path, "mse")))[0][0].federation
    targets = federation.samples.targets_train
    assert targets is not None
    means = np.array([targets[ids].mean() for ids in federation.train])
    assert proximity.to_numpy() == pytest.approx(np.abs(means[:, None] - means[None, :]), abs=1e-5)
    assert means.std() > 0


def plain(given: dict[str, Any], loss: nn.Module) -> tuple[ModelSpec, nn.Module, list[float]]:
    """FedAvg as a loop over clients, batches and tensors, with ``torch.optim.SGD``."""
    config = rayfl.load(given)
    stages, host = build(config)
    federation, spec = stages[0].federation, host.spec
    samples, work = federation.samples, config.training
    assert samples.targets_train is not None
    assert samples.scaling is not None
    x, y = torch.from_numpy(samples.scaling.apply(samples.x_train)), torch.from_numpy(samples.targets_train)
    vector, losses = spec.initial(), []
    for round in range(config.rounds):
        trained, means = [], []
        for client in range(federation.clients):
            mine = federation.train[client]
            module = spec.build()
            spec.load(module, vector)
            optimizer = torch.optim.SGD(module.parameters(), work.lr, momentum=work.momentum)
            total = 0.0
            for order in orders(config.seed, round, [client], [len(mine)], work.epochs)[0]:
                for at in range(0, len(mine), work.batch_size):
                    batch = mine[order[at : at + work.batch_size]]
                    optimizer.zero_grad()
                    value = loss(module(x[batch]), y[batch])
                    value.backward()
                    optimizer.step()
                    total += value.item() * len(batch)
            trained.append(spec.flatten(module).astype(np.float64))
            means.append(total / (len(mine) * work.epochs))
        vector = np.average(trained, axis=0, weights=federation.sizes).astype(np.float32)
        losses.append(float(np.average(means, weights=federation.sizes)))
    module = spec.build()
    spec.load(module, vector)
    return spec, module, losses


@pytest.mark.parametrize("loss", CASES)
def test_real_data_equal_a_plain_loop(loss: str, tmp_path: Path) -> None:
    given = settings(tmp_path, loss)
    result = rayfl.run(given)
    _, module, losses = plain(given, CASES[loss][1]())
    np.testing.assert_allclose(result.rounds["train_loss"], losses, rtol=1e-5)
    assert losses[-1] < 0.9 * losses[0]  # it learns
    federation = build(rayfl.load(given))[0][0].federation
    samples = federation.samples
    assert samples.scaling is not None
    assert samples.targets_test is not None
    with torch.no_grad():
        outputs = module(torch.from_numpy(samples.scaling.apply(samples.x_test))).numpy()
    expected: dict[str, list[float]] = {}
    for client in range(federation.clients):
        ids = federation.test[client]
        y, z = samples.targets_test[ids], outputs[ids]
        if loss == "mse":
            found = {
                "loss": metrics.mean_squared_error(y, z),
                "rmse": metrics.root_mean_squared_error(y, z),
                "mae": metrics.mean_absolute_error(y, z),
                "r2": metrics.r2_score(y, z),
            }
        else:
            found = {
                "accuracy": 100 * metrics.accuracy_score(y, z > 0),
                "label_accuracy": 100 * (1 - metrics.hamming_loss(y, z > 0)),
                "f1_micro": 100 * metrics.f1_score(y, z > 0, average="micro"),
                "f1_macro": 100 * metrics.f1_score(y, z > 0, average="macro"),
            }
        for name, value in found.items():
            expected.setdefault(name, []).append(value)
    for name, values in expected.items():
        np.testing.assert_allclose(result.rounds[f"{name}_mean"].iloc[-1], np.mean(values), rtol=1e-4)
        np.testing.assert_allclose(result.summary[f"{name}_mean"], np.mean(values), rtol=1e-4)
        if name != "loss":
            np.testing.assert_allclose(result.clients[f"{name}_last"], values, rtol=1e-4)
    assert (result.rounds["accuracy_mean"].isna().all()) == (loss == "mse")


def test_the_best_round_has_the_lowest_loss(tmp_path: Path) -> None:
    given = settings(tmp_path, "mse", partition={"name": "iid", "clients": 5, "validation": 0.2})
    result = rayfl.run(given, ["rounds=4", "training.lr=0.15", "evaluation.local=true"])
    rounds, found = result.rounds, result.summary
    for choice, column in (("validation", "validation_loss_mean"), ("test", "loss_mean")):
        best = int(rounds[column].argmin())
        assert found[f"round_best_{choice}"] == best + 1
        for metric in ("loss_mean", "rmse_mean", "r2_mean"):
            assert found[f"{metric}_best_{choice}"] == rounds[metric].iloc[best]
    assert found["local_loss_mean_best_test"] == rounds["local_loss_mean"].min()
    assert not any("accuracy" in name for name in found if "_best_" in name)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("loss", CASES)
def test_engines_agree_on_a_run(loss: str, engine: str, tmp_path: Path) -> None:
    fast, slow = (rayfl.run(settings(tmp_path, loss), [f"training.engine={e}"]) for e in ("auto", engine))
    np.testing.assert_allclose(fast.rounds["loss_mean"], slow.rounds["loss_mean"], rtol=1e-5)


METHODS: list[list[str]] = [
    ["algorithm={name: ifca, clusters: 2}"],
    ["algorithm=mt_hfl", "clustering.n_clusters=2", "hierarchy.common_layers=1"],
    ["algorithm={name: per_fedavg, alpha: 0.01, beta: 0.01}", "training.momentum=0"],
    ["algorithm=qfedavg"],
    ["algorithm=solo", "evaluation.finetune_epochs=1", "evaluation.local=true", "evaluation.common=true"],
    ["order=curriculum"],
    ["partition.validation=0.2"],
]
ALIKE: list[list[str]] = [
    ["algorithm=pacfl", "clustering.n_clusters=2"],
    ["algorithm=cfl"],
    ["algorithm={name: fedsem, clusters: 2}"],
    ["local=scaffold", "training.momentum=0"],
    ["sampling=curriculum", "training.participation=0.6"],
]
"""What takes the loss in the same places as others do."""


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "given", [*METHODS, *(pytest.param(each, marks=pytest.mark.slow) for each in ALIKE)], ids=" ".join
)
def test_methods_take_any_loss_and_go_on_where_they_stopped(given: list[str], tmp_path: Path) -> None:
    for loss in CASES:
        whole = rayfl.run(settings(tmp_path, loss), given)
        if "sampling=curriculum" in given:  # paced by the number of rounds
            continue
        first = rayfl.run(settings(tmp_path, loss), [*given, "rounds=2"])
        again = rayfl.resume(first.path, ["rounds=3"])
        assert again.summary["models_sha256"] == whole.summary["models_sha256"]
        left = [name for name in whole.rounds if name != "seconds"]
        assert again.rounds[left].equals(whole.rounds[left])
        assert again.clients.equals(whole.clients)


REFUSED: dict[str, list[str]] = {
    "loss.name: 'cross_entropy' is a loss for classes (integers": ["loss=cross_entropy"],
    "partition: 'dirichlet' needs classes": ["partition={name: dirichlet, clients: 4}"],
    "partition: 'label_skew' needs classes": ["partition={name: label_skew}"],
    "algorithm: 'flis_dc' needs classes": ["algorithm={name: flis_dc, beta: 0.5}"],
    "local: 'sub_fedavg' needs classes": ["algorithm=sub_fedavg"],
    "evaluation: 'evaluation' needs classes": ["evaluation.coreset=4"],
    "sampling: 'coreset' needs classes": ["sampling=coreset", "training.participation=0.5"],
    "order: 'curriculum' needs classes": ["order={name: curriculum, score: global_prediction}"],
    "events.0: 'drift' needs classes": ["events=[{name: drift, round: 1, fraction: 0.5, kind: new_classes}]"],
    "clustering.signature: 'subspace' needs classes": [
        "algorithm=pacfl", "clustering.n_clusters=2", "clustering.signature.per_class=true"
    ],
    "clustering.signature: 'predictions' needs classes": [
        "algorithm=pacfl", "clustering.n_clusters=2", "clustering.signature=predictions",
        "clustering.proximity=cosine",
    ],
    "loss.name: 'bce' takes labels 0 and 1; the data have ": ["loss=bce"],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_needs_classes_is_refused_in_a_line(message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rayfl.run(settings(tmp_path, "mse"), REFUSED[message])
    text = str(caught.value)
    assert text.startswith(message)
    assert "\n" not in text
    assert not list(tmp_path.glob("t-*"))


def test_a_loss_of_numbers_on_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'mse' is a loss for numbers .*; digits has classes .*; use one of cr"
    ):
        rayfl.run({**settings(tmp_path, "mse"), "data": "digits"})


def test_a_table_with_several_targets(tmp_path: Path) -> None:
    x, y, *_ = diabetes()
    rows = np.column_stack([x, y, 2 * y + 1])
    names = [*(f"f{i}" for i in range(10)), "low", "high"]
    path = tmp_path / "t.csv"
    np.savetxt(path, rows, delimiter=",", header=",".join(names), comments="")
    data = {"name": "table", "path": str(path), "targets": ["low", "high"], "test_fraction": 0.2}
    result = rayfl.run({**settings(tmp_path, "mse"), "data": data})
    assert result.summary["r2_mean"] == result.rounds["r2_mean"].iloc[-1]
    for change, message in {
        "data.label=low": "data.label: either this or data.targets names what to predict",
        "data.targets=[low, low]": "names a column twice",
        "data.targets=[lov]": "has no column 'lov'",
    }.items():
        with pytest.raises((ConfigError, DataError), match=message):
            rayfl.run({**settings(tmp_path, "mse"), "data": data}, [change])


def test_what_is_said_of_a_run_without_accuracies(tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with Display(console, "t") as display:
        given = settings(tmp_path, "mse")
        given["output"] |= {"report": True, "tensorboard": True}
        result = rayfl.run(given, on_event=display)
    console.print(closing([result.summary]))
    text = console.export_text()
    assert "rmse" in text
    assert "test loss" in text
    assert "accuracy" not in text
    page = (result.path / "report.html").read_text()
    assert "mean rmse" in page
    assert "mean accuracy" not in page
    other = rayfl.run(settings(tmp_path, "mse"), ["seed=1"])
    table = Comparison.of([result.path, other.path]).runs
    assert table["rmse_mean"].tolist() == [result.summary["rmse_mean"], other.summary["rmse_mean"]]
    Comparison.of([result.path, other.path]).write(tmp_path / "both.html")
    assert "rmse" in (tmp_path / "both.html").read_text()


def header_of(page: str, first: str) -> list[str]:
    """The headings of the page's table whose first column is called so."""
    return next(row for row in rows(page) if row[:1] == [first])


def test_a_regression_shows_what_every_protocol_measures(tmp_path: Path) -> None:
    given = settings(tmp_path, "mse")
    given["output"] |= {"report": True}
    tests = {"validation": True, "common": True, "local": True, "finetune_epochs": 1}
    more = {"evaluation": tests, "partition.validation": 0.2}
    join = {"name": "join", "round": given["rounds"], "clients": 1}
    result = rayfl.run({**given, "events": [join]}, [f"{k}={json.dumps(v)}" for k, v in more.items()])
    clients, summary = result.clients, result.summary
    columns = {
        "rmse_mean": "rmse_last",
        "common_rmse_mean": "common_rmse_last",
        "validation_rmse_mean": "validation_rmse_last",
        "local_rmse_mean": "local_rmse_last",
        "common_local_rmse_mean": "common_local_rmse_last",
        "finetuned_rmse_mean": "rmse_finetuned",
        "newcomers_rmse_mean": "newcomers_rmse",
        "newcomers_finetuned_rmse_mean": "newcomers_finetuned_rmse",
    }
    for name, column in columns.items():
        assert summary[name] == pytest.approx(clients[column].mean(), rel=1e-9), name
    # IID clients are all tested on the common test set, and newcomers get the only model.
    assert len({summary[name] for name in columns}) == 5
    headline = RunFiles.read(result.path).headline()
    shown = [name for name in columns if name != "common_local_rmse_mean"]
    assert {name: headline[name] for name in shown} == {name: pytest.approx(summary[name]) for name in shown}
    titles = {column.title for column in Comparison.of([result.path]).shown().columns}
    said = {"rmse, local models", "rmse, common test set", "rmse, fine-tuned", "rmse, newcomers, fine-tuned"}
    assert said <= titles
    page = (result.path / "report.html").read_text()
    for text in (*said, "root mean squared error, local models, mean over clients"):
        assert text in page
    assert {"rmse, local models", "rmse, validation samples", "rmse, newcomers"} <= set(
        header_of(page, "client")
    )
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(closing([summary]))
    assert "rmse, newcomers, fine-tuned" in console.export_text()


class Absolute(Loss):
    """Has no accuracy, and measures nothing else."""

    name: Literal["absolute"] = "absolute"
    numeric: ClassVar[bool] = True
    accurate: ClassVar[bool] = False

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).abs().mean(1)


def test_a_loss_that_measures_nothing_else_is_told_of_every_client(
    forgotten_parts: None, tmp_path: Path
) -> None:
    given = settings(tmp_path, "mse")
    given["output"] |= {"report": True}
    tests = {"common": True, "local": True, "finetune_epochs": 1}
    join = {"name": "join", "round": given["rounds"], "clients": 1}
    result = rayfl.run({**given, "evaluation": tests, "events": [join]}, loss=Absolute())
    clients, summary = result.clients, result.summary
    columns = {
        "loss_mean": "loss_last",
        "common_loss_mean": "common_loss_last",
        "local_loss_mean": "local_loss_last",
        "finetuned_loss_mean": "loss_finetuned",
        "newcomers_loss_mean": "newcomers_loss",
        "newcomers_finetuned_loss_mean": "newcomers_finetuned_loss",
    }
    for name, column in columns.items():
        assert summary[name] == pytest.approx(clients[column].mean(), rel=1e-6), name
    page = (result.path / "report.html").read_text()
    assert {"loss, last", "loss, local models", "loss, newcomers"} <= set(header_of(page, "client"))
    assert "loss, fine-tuned" in page
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(closing([summary]))
    assert "loss, fine-tuned" in console.export_text()


@pytest.mark.parametrize(
    ("targets", "remedy"),
    [
        (lambda y: y.astype(float), r"if these are classes, store integers: y.astype\(np.int64\)"),
        (lambda y: np.eye(3)[y], r"one of which is 1, store their numbers: y.argmax\(axis=1\)"),
        (lambda y: y + 0.5, "use one of bce, mse"),
        (lambda y: np.eye(3)[y] + np.eye(3)[0], "use one of bce, mse"),
    ],
)
def test_numbers_that_look_like_classes_are_called_so(targets: Any, remedy: str, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((60, 4), np.float32), np.arange(60) % 3
    settings = {"rounds": 1, "output": {"root": str(tmp_path)}, "execution": {"backend": "inline"}}
    with pytest.raises(ConfigError, match=remedy):
        rayfl.run(settings, data=(x, targets(y), x, targets(y)))
