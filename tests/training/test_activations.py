"""The memory that a batch takes, known before anything starts."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.models import MODELS, Model, ModelSpec
from rayfl.training import LocalWork
from rayfl.training.activations import batch_bytes, per_sample
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine
from tests.servers.test_large import most_at_once
from tests.training.conftest import make_samples

BATCH = 64


class Chain(Model):
    """Two layers, or one whose forward pass fails."""

    name: str = "chain"
    fails: bool = False
    layers: ClassVar[dict[str, tuple[str, ...]]] = {"first": ("0",), "last": ("2",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network."""
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(7 if self.fails else 3, classes))


def test_inputs_of_layers_are_counted_once_and_weights_are_not() -> None:
    """Four inputs of the first layer, and three of the second, which are also the outputs of ReLU."""
    assert per_sample(ModelSpec.of(Chain(), (4,), 2, 0)) == 4 + 3


def test_a_network_that_fails_is_left_to_the_run() -> None:
    assert per_sample(ModelSpec.of(Chain(fails=True), (4,), 2, 0)) == 0


def test_a_test_needs_no_gradients() -> None:
    assert batch_bytes(100, 10, 500) == 4 * 100 * 500
    assert batch_bytes(100, 400, 500) == 4 * 100 * 800


@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("lenet5", {}, (1, 28, 28)),
        ("lenet5", {"batch_norm": True}, (3, 32, 32)),
        ("mlp", {"hidden": [300]}, (300,)),
    ],
)
def test_a_batch_takes_about_what_is_said(
    name: str, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    spec = ModelSpec.of(MODELS[name](**settings), shape, 10, 0)
    engine = LoopEngine(spec, Batches(make_samples(shape, BATCH, 10), torch.device("cpu")), 0)

    def train() -> None:
        work = LocalWork(epochs=1, batch_size=BATCH, lr=0.01)
        engine.train(work, 0, [0], [np.arange(BATCH)], torch.from_numpy(spec.initial())[None])

    train()  # makes what stays
    models = 4 * 3 * spec.P  # its copy, its gradients, the result
    taken = most_at_once(train)[1] - models
    said = batch_bytes(per_sample(spec), BATCH, 0)
    assert 0.4 * said < taken < 1.5 * said
