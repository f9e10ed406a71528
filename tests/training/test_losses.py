"""Losses: every engine equals the plain loop, and the plain loop is PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rayfl.losses import LOSSES, CrossEntropy, Loss
from rayfl.models import MODELS, ModelSpec
from rayfl.training import LocalWork
from rayfl.training.batched.network import loss_of
from rayfl.training.batched.vmap import VmapNetwork
from rayfl.training.engine import choose_engine
from tests.training.test_batched import SGDS, assert_equal
from tests.training.test_recurrent import assert_equal as assert_words_equal
from tests.training.test_recurrent import texts

CASES: list[Loss] = [CrossEntropy(label_smoothing=0.2), LOSSES["mse"](), LOSSES["bce"]()]
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


def test_smoothed_words() -> None:
    spec = ModelSpec.of(MODELS["lstm"](embedding=4, hidden=5), (6,), 20, 0, CASES[0])
    assert_words_equal(spec, texts(6, 20), SGDS[1])


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
    numbers = torch.randint(0, 2, (6, 3), generator=generator).float()
    pairs = [
        (CrossEntropy(), nn.CrossEntropyLoss(), classes),
        (CASES[0], nn.CrossEntropyLoss(label_smoothing=0.2), classes),
        (CASES[1], nn.MSELoss(), numbers),
        (CASES[2], nn.BCEWithLogitsLoss(), numbers),
    ]
    for ours, theirs, targets in pairs:
        assert torch.equal(ours.mean(outputs, targets), theirs(outputs, targets))
        torch.testing.assert_close(ours.each(outputs, targets).mean(), theirs(outputs, targets))
        assert ours.each(outputs, targets).shape == (6,)
    assert CASES[0].for_tests() == CrossEntropy()


def _tested(loss: Loss, outputs: np.ndarray, targets: np.ndarray, cuts: list[int]) -> dict[str, np.ndarray]:
    """The measures of clients whose samples lie one client after the other."""
    sums = loss.sums(torch.from_numpy(outputs), torch.from_numpy(targets)).numpy()
    sizes = np.diff([0, *cuts, len(outputs)])
    return loss.measured(np.stack([part.sum(0) for part in np.split(sums, cuts)]), sizes)


def test_measures_of_regression_are_scikit_learns() -> None:
    from sklearn import metrics

    rng = np.random.default_rng(0)
    truth = (rng.standard_normal((30, 2)) * [1, 30] + [0, 200]).astype(np.float32)
    said = (truth + rng.standard_normal((30, 2)).astype(np.float32)).astype(np.float32)
    truth[20:25] = truth[20]  # all alike
    said[23:] = truth[23:]
    found = _tested(LOSSES["mse"](), said, truth, [11, 20, 23, 25, 29, 29])
    clients = np.split(truth, [11, 20, 23, 25, 29, 29]), np.split(said, [11, 20, 23, 25, 29, 29])
    for i, (y, z) in enumerate(zip(*clients, strict=True)):
        if i == 5:  # of nobody
            assert all(np.isnan(values[i]) for values in found.values())
            continue
        np.testing.assert_allclose(found["rmse"][i], metrics.root_mean_squared_error(y, z), rtol=1e-6)
        np.testing.assert_allclose(found["mae"][i], metrics.mean_absolute_error(y, z), rtol=1e-6)
        if len(y) > 1:
            np.testing.assert_allclose(found["r2"][i], metrics.r2_score(y, z), rtol=1e-5, atol=1e-7)
    assert np.isnan(found["r2"][6])  # one sample


def test_measures_of_several_labels_are_scikit_learns() -> None:
    from sklearn import metrics

    rng = np.random.default_rng(0)
    truth = (rng.random((40, 4)) < [0.5, 0.1, 0.9, 0.0]).astype(np.float32)
    said = (rng.standard_normal((40, 4)) + truth).astype(np.float32)
    loss, cuts = LOSSES["bce"](), [17, 18, 18]
    found = _tested(loss, said, truth, cuts)
    for i, (y, z) in enumerate(zip(np.split(truth, cuts), np.split(said > 0, cuts), strict=True)):
        if not len(y):
            assert all(np.isnan(values[i]) for values in found.values())
            continue
        ours = {name: values[i] / 100 for name, values in found.items()}
        np.testing.assert_allclose(ours["label_accuracy"], 1 - metrics.hamming_loss(y, z))
        for average in ("micro", "macro"):
            expected = metrics.f1_score(y, z, average=average, zero_division=0)
            np.testing.assert_allclose(ours[f"f1_{average}"], expected)
    right = loss.right(torch.from_numpy(said), torch.from_numpy(truth)).double().mean()
    assert float(right) == metrics.accuracy_score(truth, said > 0)
