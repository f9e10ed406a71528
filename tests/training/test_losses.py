"""Losses: every engine equals the plain loop, and the plain loop is PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rayfl.losses import CrossEntropy, Loss
from rayfl.models import MODELS, ModelSpec
from rayfl.training import LocalWork
from rayfl.training.batched.network import loss_of
from rayfl.training.batched.vmap import VmapNetwork
from rayfl.training.engine import choose_engine
from tests.training.test_batched import SGDS, assert_equal

CASES: list[Loss] = [CrossEntropy(label_smoothing=0.2)]
SIZES = [23, 10, 4, 31, 7]


class Focal(Loss):
    """A user's own: focal loss of classes (Lin et al. 2017)."""

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        of_class = functional.log_softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
        return -((1 - of_class.exp()) ** 2) * of_class


def spec_of(loss: Loss, name: str = "mlp", **settings: Any) -> ModelSpec:
    shape = (1, 28, 28) if name == "lenet5" else (20,)
    return ModelSpec.of(MODELS[name](**settings), shape, 3, 0, loss)


@pytest.mark.parametrize("loss", [*CASES, Focal()], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("work", SGDS, ids=["sgd", "momentum"])
def test_engines_equal_the_loop(loss: Loss, work: LocalWork) -> None:
    spec = spec_of(loss, hidden=[16])
    assert_equal(spec, work, SIZES)
    assert_equal(spec, work, SIZES, VmapNetwork(spec))
    assert choose_engine(spec)[0] == "batched"


@pytest.mark.parametrize("loss", CASES, ids=lambda loss: type(loss).__name__)
def test_convolutions_and_one_output(loss: Loss) -> None:
    assert_equal(spec_of(loss, "lenet5"), SGDS[0], [6, 3, 1])
    if loss.numeric:
        one = ModelSpec.of(MODELS["linear"](), (20,), 1, 0, loss)
        assert_equal(one, SGDS[0], SIZES)


@pytest.mark.parametrize("loss", [*CASES, CrossEntropy(), Focal()], ids=lambda loss: type(loss).__name__)
def test_gradients_by_hand_are_those_of_autograd(loss: Loss) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 5, 4, generator=generator)
    y = torch.randint(0, 4, (3, 5), generator=generator)
    if loss.numeric:
        y = torch.randint(0, 2, (3, 5, 4), generator=generator).float()
    weights = torch.tensor([[0.2] * 5, [0.25] * 4 + [0.0], [1.0] + [0.0] * 4])
    with torch.no_grad():
        losses, delta = loss_of(loss, outputs, y, weights)
    for client in range(3):
        leaf, count = outputs[client].double().requires_grad_(), int((weights[client] > 0).sum())
        targets = y[client].double() if loss.numeric else y[client]
        mean = loss.mean(leaf[:count], targets[:count])
        mean.backward()
        np.testing.assert_allclose(losses[client], mean.detach(), rtol=1e-6)
        np.testing.assert_allclose(delta[client], leaf.grad, atol=1e-7)


def test_losses_are_those_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(6, 3, generator=generator)
    classes = torch.randint(0, 3, (6,), generator=generator)
    pairs = [
        (CrossEntropy(), nn.CrossEntropyLoss(), classes),
        (CASES[0], nn.CrossEntropyLoss(label_smoothing=0.2), classes),
    ]
    for ours, theirs, targets in pairs:
        assert torch.equal(ours.mean(outputs, targets), theirs(outputs, targets))
        torch.testing.assert_close(ours.each(outputs, targets).mean(), theirs(outputs, targets))
        assert ours.each(outputs, targets).shape == (6,)
    assert CASES[0].for_tests() == CrossEntropy()
