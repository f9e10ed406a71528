"""Losses of one's own: what ``each`` says is what clients train, in every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.data import Samples
from rayfl.errors import ConfigError
from rayfl.losses import LOSSES, Loss
from rayfl.losses.bce import BinaryCrossEntropy
from rayfl.losses.cross_entropy import CrossEntropy
from rayfl.losses.mse import MeanSquaredError
from rayfl.models import MODELS, ModelSpec
from rayfl.servers.building import check_loss, check_measures
from rayfl.training import LocalWork
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.loop import LoopEngine
from tests.training.conftest import make_samples
from tests.training.test_recurrent import texts


class Double(CrossEntropy):
    """Twice the cross-entropy; says nothing of a batch."""

    name: Literal["double"] = "double"  # type: ignore[assignment]

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * super().each(outputs, targets)


class Own(Loss):
    """Cross-entropy, written again."""

    name: Literal["own"] = "own"

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


class Huber(Loss):
    """Of numbers, which are not right or wrong."""

    name: Literal["huber"] = "huber"
    numeric: ClassVar[bool] = True

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(outputs, targets, reduction="none").mean(1)


class Inaccurate(Huber):
    name: Literal["inaccurate"] = "inaccurate"  # type: ignore[assignment]
    accurate: ClassVar[bool] = False


def test_numbers_are_not_right_or_wrong_by_themselves() -> None:
    def spec(loss: Loss) -> ModelSpec:
        return ModelSpec.of(MODELS["mlp"](hidden=[6]), (3,), 2, 0, loss=loss)

    with pytest.raises(
        ConfigError, match=r"huber.accurate: is True, and .* set accurate: ClassVar\[bool\] = False"
    ):
        check_loss(spec(Huber()))
    check_loss(spec(Inaccurate()))


class Tail(Huber):
    """Measures the share of large errors; each way of getting that wrong is refused before a run."""

    name: Literal["tail"] = "tail"  # type: ignore[assignment]
    accurate: ClassVar[bool] = False
    measures: ClassVar[dict[str, str]] = {"tail": "share of errors above 1"}
    wrong: str = ""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        large = ((outputs - targets).abs() > 1).double().mean(1, keepdim=True)
        return large[:, 0] if self.wrong == "sums" else large

    def measured(self, sums: Any, sizes: Any) -> Any:
        share = sums[:, 0] / sizes
        right = {"tail": share}
        answers = {
            "name": {"tails": share},
            "nothing": None,
            "scalar": {"tail": 0.5},
            "list": {"tail": [0.5, 1]},
        }
        return answers.get(self.wrong, right)


class Reserved(Tail):
    name: Literal["reserved"] = "reserved"  # type: ignore[assignment]
    measures: ClassVar[dict[str, str]] = {"accuracy": "of some kind"}


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (Tail(), ""),
        (Tail(wrong="sums"), r"tail.sums: returned a Tensor of float64 \(3,\); expected a tensor \(3, S\)"),
        (Tail(wrong="name"), r"tail.measured: returned the names \['tails'\]; expected a dictionary of tail"),
        (Tail(wrong="nothing"), r"tail.measured: returned nothing \(None\); expected a dictionary of tail"),
        (Tail(wrong="scalar"), "tail.measured: tail is a float for 2 clients; expected an array"),
        (Tail(wrong="list"), "tail.measured: tail is a list for 2 clients; expected an array"),
        (Reserved(), "reserved.measures: 'accuracy' is a number of rayfl; choose another name"),
    ],
)
def test_measures_are_tried_before_a_run(loss: Loss, line: str) -> None:
    spec = ModelSpec.of(MODELS["mlp"](hidden=[6]), (3,), 2, 0, loss=loss)
    if not line:
        return check_measures(spec)
    with pytest.raises(ConfigError, match=line):
        check_measures(spec)


def trained(loss: Loss, make: Callable[..., ModelSpec], samples: Samples) -> Tensor:
    """How far the plain loop moves in a step on all samples."""
    spec = make(loss)
    ids = np.arange(len(samples.x_train))
    engine = LoopEngine(spec, Batches(samples, torch.device("cpu")), 0)
    start = torch.from_numpy(spec.initial()).unsqueeze(0)
    return engine.train(LocalWork(1, len(ids), 0.1), 0, [0], [ids], start).rows - start


def images(loss: Loss) -> ModelSpec:
    return ModelSpec.of(MODELS["mlp"](hidden=[6]), (1, 3, 3), 4, 0, loss=loss)


def words(loss: Loss) -> ModelSpec:
    return ModelSpec.of(MODELS["lstm"](embedding=4, hidden=5), (12,), 20, 0, loss=loss)


def test_a_loss_that_changes_each_is_what_the_loop_trains() -> None:
    samples = make_samples((1, 3, 3))
    torch.testing.assert_close(
        trained(Double(), images, samples), 2 * trained(CrossEntropy(), images, samples), rtol=1e-4, atol=1e-7
    )
    assert choose_engine(images(Double()))[0] == "batched"
    assert Double(label_smoothing=0.1).for_tests() == Double()


def test_an_own_loss_of_words_leaves_out_what_is_no_word() -> None:
    samples = texts(12, 20)
    torch.testing.assert_close(
        trained(Own(), words, samples), trained(CrossEntropy(), words, samples), rtol=1e-4, atol=1e-7
    )
    assert choose_engine(words(Own()))[0] == "batched"


@pytest.mark.parametrize(
    "loss",
    [CrossEntropy(label_smoothing=0.1), MeanSquaredError(), BinaryCrossEntropy()],
    ids=lambda loss: loss.name,
)
def test_the_mean_of_a_batch_is_that_of_its_predictions(loss: Loss) -> None:
    assert loss.name in LOSSES
    rng = np.random.default_rng(0)
    outputs = torch.from_numpy(rng.standard_normal((9, 4)))
    targets = torch.from_numpy(rng.integers(0, 2, (9, 4)).astype(float) if loss.numeric else np.arange(9) % 4)
    torch.testing.assert_close(loss.mean(outputs, targets), Loss.mean(loss, outputs, targets))
