"""What clients report: losses and lengths of updates, of many clients as of each alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.data import Ragged, Samples
from rayfl.data.scaling import Scaling
from rayfl.data.server import ServerData
from rayfl.models import MODELS, ModelSpec
from rayfl.training.batches import Batches
from rayfl.training.forward import Forward
from rayfl.training.reports import Predictions, Trained, UpdateLengths
from tests.training.conftest import make_samples, make_spec
from tests.training.test_batched import random_samples
from tests.training.test_recurrent import texts
from tests.training.test_vmap import Own

SIZES = (7, 0, 4, 30, 5)
"""Samples of the clients; one has none."""


def trained(spec: ModelSpec, samples: Samples, sizes: Sequence[int], rows: torch.Tensor) -> Trained:
    """A block of clients that all received the same model."""
    ids = np.split(np.arange(sum(sizes)) % len(samples.x_train), np.cumsum(sizes)[:-1])
    batches = Batches(samples, torch.device("cpu"))
    start = torch.from_numpy(spec.initial()).expand(len(sizes), -1)
    return Trained(spec, Forward(spec, spec.build()), batches, rows, start, Ragged.of(ids))


@pytest.mark.parametrize("kind", ["numbers", "words"])
def test_the_losses_of_a_model_are_those_of_every_client_alone(kind: str) -> None:
    if kind == "numbers":
        samples = make_samples((1, 3, 3))
        spec = make_spec("mlp", samples, hidden=[6])
    else:
        samples = texts(6, 20)
        spec = ModelSpec.of(MODELS["lstm"](embedding=4, hidden=5), (6,), 20, 0)
    block = trained(spec, samples, SIZES, torch.empty(len(SIZES), spec.P))
    together, each = block.mean_losses(block.start), block.mean_losses(block.start.contiguous())
    np.testing.assert_allclose(together, each, rtol=1e-6)
    assert np.isnan(together).tolist() == [size == 0 for size in SIZES]
    module = spec.build().eval()
    spec.load(module, block.start[0])
    for row in np.flatnonzero(SIZES).tolist():
        x, y = block.batches.train(block.samples[row])
        assert float(spec.loss.mean(module(x).double(), y)) == pytest.approx(together[row], rel=1e-6)


class InPlace(nn.Module):
    """Changes its inputs."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(shape[0], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mul_(2.0))


def test_the_servers_samples_stay_as_they_are_stored() -> None:
    """Floats were scaled in place: again for every block, and every round."""
    samples = random_samples((4,), 20, 3)
    samples = replace(samples, scaling=Scaling(1.0, (0.5,) * 4, (2.0,) * 4))
    spec = ModelSpec.of(Own(module=InPlace, settings={}), (4,), 3, 0)
    block = trained(spec, samples, (5, 5), torch.from_numpy(spec.initial()).expand(2, -1))
    stored = samples.x_train.copy()
    shared = stored.copy()
    shared.flags.writeable = False  # as in Ray's object store
    report = Predictions(ServerData(), shared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, about arrays that cannot be written to
        first, second = report.compute(block), report.compute(block)
    assert np.array_equal(first, second)
    assert np.array_equal(first[0], first[1])  # equal models
    assert np.array_equal(shared, stored)


def test_clients_with_the_same_model_share_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples((1, 3, 3))
    spec = make_spec("linear", samples)
    block = trained(spec, samples, (20,) * 300, torch.empty(300, spec.P))
    calls: list[int] = []
    block.forward.module.register_forward_hook(lambda module, given, found: calls.append(len(found)))
    losses = block.mean_losses(block.start)
    assert sum(calls) == 300 * 20
    assert len(calls) < 10
    assert np.isfinite(losses).all()


def test_the_lengths_of_updates_do_not_depend_on_the_other_clients() -> None:
    samples = make_samples((1, 28, 28))
    spec = make_spec("mlp", samples, hidden=[64])
    rows = torch.randn(40, spec.P, generator=torch.Generator().manual_seed(0))
    lengths = UpdateLengths().compute(trained(spec, samples, (1,) * 40, rows))
    for row in (0, 3, 39):
        update = rows[row].numpy() - spec.initial()
        assert lengths[row] == pytest.approx(np.linalg.norm(update.astype(np.float64)), rel=1e-12)
        alone = trained(spec, samples, (1,), rows[row : row + 1])
        assert UpdateLengths().compute(alone) == lengths[row]
