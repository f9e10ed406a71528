"""The engines of networks: which they get, that both are measured, and the floor of their arithmetic."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayfl.bench import floor, networks
from rayfl.bench.saved import Rows
from rayfl.models import MODELS

CASES = {case.network: case for case in networks.CASES}


@pytest.mark.parametrize(
    ("network", "engine", "settings"),
    [
        ("skip", "batched", {"clients": 8, "samples": 2}),
        ("skip, 8 x 8 grey", "batched", {"clients": 8, "samples": 2}),
        ("W3: MLP", "batched", {"clients": 2}),
        ("W5a: LSTM", "batched", {"samples": 2, "classes": 30}),
        ("W5b: transformer", "vmap", {"samples": 2, "classes": 30}),
    ],
)
def test_both_engines_are_measured(network: str, engine: str, settings: dict[str, int]) -> None:
    case, lines = dataclasses.replace(CASES[network], **settings), list[str]()  # type: ignore[arg-type]
    row = networks.measure(case, 1, 1e9, lines.append, torch.device("cpu"))
    assert row["engine"] == engine
    assert row["ratio"] > 0
    assert row["floor_seconds"] == row["gflop"] > 0
    assert row["times_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"])
    assert lines[0].startswith(f"{network} 1/1: loop ")


def test_reduced_precision_is_measured_in_turns_with_float32() -> None:
    case, lines = dataclasses.replace(CASES["W3: MLP"], clients=2), list[str]()
    row = networks.measure(case, 1, 1e9, lines.append, torch.device("cpu"), "bf16")
    assert (row["engine"], row["reduced_engine"]) == ("batched", "vmap")
    assert row["reduced_ratio"] == pytest.approx(row["seconds"] / row["reduced_seconds"])
    assert "vmap in bf16" in lines[0]


def test_rows_of_another_precision_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a stopped process left may be of the other command."""
    known = [{"network": name} for name in CASES]
    monkeypatch.setattr(networks, "measure", lambda case, *_: {"network": case.network, "reduced_ratio": 1.0})
    monkeypatch.setattr(floor, "peak", lambda **_: 1e9)
    assert networks.run(1, saved=Rows(known)) == known
    rows = networks.run(1, saved=Rows(known), precision="bf16")
    assert rows == [{**row, "reduced_ratio": 1.0} for row in known]


def test_the_networks_are_what_the_table_says() -> None:
    assert {name: case.spec.n_parameters for name, case in CASES.items()} == {
        "W1: MLP": 166_447,
        "W2: LeNet-5": 44_426,
        "LeNet-5, BatchNorm": 44_470,
        "LeNet-5, tanh": 61_706,
        "PyTorch's MNIST example": 1_199_882,
        "PyTorch's tutorial": 62_006,
        "W3: MLP": 2_410,
        "W4a: ResNet-18, GroupNorm": 11_181_642,
        "W4b: ResNet-9, BatchNorm": 6_575_370,
        "W5a: LSTM": 711_818,
        "W5b: transformer": 713_482,
        "skip": 5354,
        "skip, 8 x 8 grey": 5066,
    }


def test_operations_by_hand() -> None:
    """MLP D-H-K: 2 B (D H + H K) forwards and for the weights, 2 B H K for the hidden layer's gradient."""
    case = dataclasses.replace(CASES["W3: MLP"], model=MODELS["mlp"](hidden=[7]), shape=(1, 2, 3), classes=5)
    assert floor.operations(case.spec, case.data(), 4) == 2 * 4 * (2 * (6 * 7 + 7 * 5) + 7 * 5)


def test_an_lstm_is_counted() -> None:
    """Its products too, which PyTorch may hide in one operation: at least 3 x 2 x 4 H (D + H) a word."""
    case: Any = dataclasses.replace(CASES["W5a: LSTM"], classes=30)
    words, layers, size = 2 * networks.LENGTH, 2, 64
    recurrent = 3 * 2 * words * layers * 4 * size * 2 * size
    last = 3 * 2 * words * size * 30
    assert 0.9 * (recurrent + last) < floor.operations(case.spec, case.data(), 2) < 1.1 * (recurrent + last)


def test_the_peak_is_a_speed() -> None:
    assert 1e8 < floor.peak(tries=1) < 1e13


@pytest.mark.parametrize(("convolution", "most"), [(10_000.0, 2 * 6**3), (1.0, 2 * 9 * 2 * 32 * 2 * 16**2)])
def test_the_peak_is_that_of_the_faster(
    convolution: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of matrices of side 6 takes a second; the convolution has 2 channels."""
    clock = [0.0]

    def taking(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(floor, "_SIDE", 6)
    monkeypatch.setattr(torch, "mm", lambda a, b: taking(1.0))
    monkeypatch.setattr(torch, "conv2d", lambda images, kernels, padding: taking(convolution))
    monkeypatch.setattr(floor, "time", SimpleNamespace(process_time=lambda: clock[0], perf_counter=None))
    assert floor.peak(tries=2) == most
