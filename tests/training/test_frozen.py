"""Frozen parts in the batched engine cost no gradient of their weights, and the others keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.models import MODELS, ModelSpec
from rayfl.models.modules.residual import Residual
from rayfl.training.batched import fused, layers, recurrent
from rayfl.training.batched.parameters import Parameter
from rayfl.training.batches import Batches
from rayfl.training.work import LocalWork
from tests.training.conftest import make_samples, stepwise
from tests.training.test_recurrent import texts
from tests.training.test_vmap import spec_of

WORK = LocalWork(epochs=2, batch_size=4, lr=0.05)
SIZES = [7, 4, 6]
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mlp": ("mlp", {"hidden": [16, 8]}, (1, 4, 4)),
    "wide": ("mlp", {"hidden": [70, 80]}, (1, 8, 8)),  # the compiled step
    "lenet5": ("lenet5", {}, (1, 28, 28)),
    "lenet5-bn": ("lenet5", {"batch_norm": True}, (1, 28, 28)),
    "leaf_cnn": ("leaf_cnn", {}, (1, 12, 12)),
    "lstm": ("lstm", {"embedding": 4, "hidden": 5, "depth": 2}, (6,)),
}


def case(name: str) -> tuple[ModelSpec, Batches]:
    model, settings, shape = CASES[name]
    if model == "lstm":
        samples = texts(6, 20)
        return ModelSpec.of(MODELS[model](**settings), shape, 20, 0), Batches(samples, torch.device("cpu"))
    samples = make_samples(shape, 60, 5)
    return ModelSpec.of(MODELS[model](**settings), shape, 5, 0), Batches(samples, torch.device("cpu"))


def trained(spec: ModelSpec, batches: Batches, work: LocalWork) -> torch.Tensor:
    start = torch.from_numpy(spec.initial()).expand(len(SIZES), -1)
    indices = [np.arange(n) + k for k, n in enumerate(SIZES)]
    block = stepwise(spec, batches, 0).train(work, 0, range(len(SIZES)), indices, start)
    assert not block.failures, block.failures
    assert (block.rows != start).any()
    return block.rows


def parts(spec: ModelSpec) -> list[tuple[tuple[int, int], ...]]:
    """The first tensor, the last one, every other one, and all but the first and the last ones."""
    places = [(s.start, s.stop) for s in spec.slices[: len(list(spec.outline().parameters()))]]
    return [tuple(places[:1]), tuple(places[-1:]), tuple(places[::2]), tuple(places[1:]), tuple(places[:-1])]


def masked(patch: pytest.MonkeyPatch) -> None:
    """As it was: all gradients are computed, and those of frozen parameters are thrown away."""
    original = Parameter.__init__

    def made(self: Any, *given: Any, **more: Any) -> None:
        original(self, *given, **more)
        self.held, self.frozen = self.frozen, False

    patch.setattr(Parameter, "__init__", made)
    for name in ("descend", "descend_product", "descend_rows"):
        plain = getattr(Parameter, name)

        def maybe(self: Any, *given: Any, plain: Callable[..., None] = plain) -> None:
            if not self.held:
                plain(self, *given)

        patch.setattr(Parameter, name, maybe)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_the_rest_keeps_its_bits(name: str, momentum: float) -> None:
    spec, batches = case(name)
    for frozen in parts(spec):
        work = replace(WORK, frozen=frozen, momentum=momentum, weight_decay=0.1)
        found = trained(spec, batches, work)
        with pytest.MonkeyPatch.context() as patch:
            masked(patch)
            assert torch.equal(found, trained(spec, batches, work))


def backward_passes(patch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The layers that go backward from now on, and whether they return a gradient."""
    found: list[tuple[str, bool]] = []
    kinds = [
        layers.Linear,
        layers.Conv2d,
        layers.BatchNorm,
        layers.ReLU,
        fused.ConvPoolReLU,
        recurrent.Lstm,
        recurrent.Embedding,
    ]
    for kind in kinds:
        plain = kind.backward

        def backward(self: Any, dy: Any, need_input: bool, plain: Any = plain) -> Any:
            found.append((type(self).__name__, need_input))
            return plain(self, dy, need_input)

        patch.setattr(kind, "backward", backward)
    return found


def steps(spec: ModelSpec, batches: Batches, frozen: tuple[tuple[int, int], ...]) -> set[tuple[str, bool]]:
    with pytest.MonkeyPatch.context() as patch:
        found = backward_passes(patch)
        trained(spec, batches, replace(WORK, frozen=frozen))
    return set(found)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "lenet5-bn", "lstm"])
def test_nothing_goes_back_below_the_lowest_layer_that_learns(name: str) -> None:
    """The head alone: neither convolutions nor the gradient of what they have found are computed."""
    spec, batches = case(name)
    body = ((0, spec.slices[len(list(spec.outline().parameters())) - 2].start),)
    assert steps(spec, batches, body) == {("Linear", False)}
    assert len(steps(spec, batches, ())) > 1


def test_a_frozen_head_passes_its_gradient_on_and_the_kernel_computes_no_weights() -> None:
    spec, batches = case("lenet5")
    conv1 = tuple(spec.segment(first=1))
    wanted: list[tuple[bool, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        kernel = fused.conv_kernels.backward

        def backward(*given: Any) -> None:
            wanted.append(given[-2:])
            kernel(*given)

        patch.setattr(fused.conv_kernels, "backward", backward)
        trained(spec, batches, replace(WORK, frozen=conv1))
        assert set(wanted) == {(False, True)}  # the second convolution alone
        wanted.clear()
        second = tuple(spec.segment(["conv2"])) if "conv2.weight" in spec.names else None
        if second is None:
            second = ((spec.slices[2].start, spec.slices[3].stop),)
        trained(spec, batches, replace(WORK, frozen=second))
        assert set(wanted) == {(True, False), (False, True)}


def norms(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Normalisations of images and of vectors, and a skip connection."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
        Residual(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 6),
        nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes),
    )  # fmt: skip


@pytest.mark.parametrize("which", range(12))
def test_each_tensor_alone(which: int) -> None:
    """A frozen weight beside a bias that learns, and a normalisation's factors."""
    samples = make_samples((1, 4, 4), 60, 3)
    spec, batches = spec_of(norms, (1, 4, 4)), Batches(samples, torch.device("cpu"))
    place = spec.slices[which]
    work = replace(WORK, frozen=((place.start, place.stop),))
    found = trained(spec, batches, work)
    with pytest.MonkeyPatch.context() as patch:
        masked(patch)
        assert torch.equal(found, trained(spec, batches, work))
