"""Every model: the right outputs, and as many parameters as the papers' tables give."""

import pytest
import torch
from torch import nn

from rayfl.errors import ConfigError
from rayfl.models import MODELS
from rayfl.models.base import Model
from rayfl.models.flat import ModelSpec
from rayfl.models.leaf_cnn import LeafCnn
from rayfl.models.lenet5 import LeNet5
from rayfl.models.linear import Linear
from rayfl.models.mlp import Mlp
from rayfl.models.mthfl_cnn import MthflCnn
from rayfl.models.mthfl_mlp import MthflMlp
from rayfl.models.resnet9 import ResNet9
from rayfl.models.subfedavg_cnn import SubFedAvgCnn

GREY28, GREY32, COLOUR28, COLOUR32 = (1, 28, 28), (1, 32, 32), (3, 28, 28), (3, 32, 32)


def conv(inputs: int, outputs: int, kernel: int) -> int:
    return inputs * outputs * kernel * kernel + outputs


def fc(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


COUNTS = [
    (Linear(), (64,), 10, 650),
    (Linear(), (1, 8, 8), 10, 650),
    (Mlp(), GREY28, 47, fc(784, 200) + fc(200, 47)),
    (Mlp(dropout=0.5), GREY28, 62, 169_462),  # FLT, Table 11
    (Mlp(hidden=(32, 16)), (20,), 3, 21 * 32 + 33 * 16 + 17 * 3),
    (Mlp(hidden=()), (20,), 3, 63),
    (MthflMlp(), GREY28, 10, fc(784, 32) + fc(32, 10)),
    (LeNet5(), GREY28, 10, 44_426),
    (LeNet5(), COLOUR32, 10, 62_006),
    (LeNet5(), COLOUR28, 10, 44_426 + 2 * 6 * 25),
    (LeNet5(), GREY32, 10, 62_006 - 2 * 6 * 25),
    (LeNet5(), COLOUR32, 40, 62_006 + 30 * 85),  # MIX-4
    (LeNet5(batch_norm=True), COLOUR32, 10, 62_006 + 2 * (6 + 16)),
    (MthflCnn(), COLOUR32, 10, 62_006),
    (MthflCnn(channels1=8, channels2=4), (3, 16, 16), 5, 608 + 804 + 4 * 120 + 120 + fc(120, 84) + 425),
    (LeafCnn(), GREY28, 62, 6_603_710),  # LEAF
    (LeafCnn(second_padding=0), COLOUR28, 62, 3_459_582),  # FLT, Table 12
    (SubFedAvgCnn(), GREY28, 10, conv(1, 10, 5) + conv(10, 20, 5) + 60 + fc(320, 50) + fc(50, 10)),
    (
        ResNet9(),
        COLOUR32,
        100,
        conv(3, 64, 3) + 3 * conv(128, 128, 3) - conv(128, 128, 3)
        + conv(64, 128, 3) + conv(128, 256, 3) + conv(256, 512, 3) + 2 * conv(512, 512, 3)
        + 2 * (64 + 128 + 2 * 128 + 256 + 512 + 2 * 512) + fc(512, 100),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "shape", "classes", "count"), COUNTS, ids=lambda value: str(value)[:40])
def test_outputs_and_parameter_count(model: Model, shape: tuple[int, ...], classes: int, count: int):
    module = model.build(shape, classes)
    assert sum(parameter.numel() for parameter in module.parameters()) == count
    assert module(torch.zeros(2, *shape)).shape == (2, classes)
    assert ModelSpec.of(model, shape, classes, seed=0).n_parameters == count


def test_a_transfer_of_resnet9_costs_what_the_thesis_says():
    spec = ModelSpec.of(ResNet9(), COLOUR32, 100, seed=0)
    assert int(spec.nbytes * 8 / 1e4) / 100 == 211.88  # Mbit, chapter 3.4


def test_all_models_are_found_by_name():
    assert list(MODELS) == [
        "leaf_cnn", "lenet5", "linear", "lstm", "mlp", "module", "mthfl_cnn", "mthfl_mlp", "resnet9",
        "subfedavg_cnn", "timm", "torchvision", "transformers",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (LeNet5(), (1, 30, 30)),
        (LeNet5(), (1, 28, 32)),
        (LeNet5(), (4, 28, 28)),
        (LeNet5(), (784,)),
        (LeafCnn(), (1, 8, 8)),
        (MthflCnn(), (3, 15, 15)),
        (SubFedAvgCnn(), (784,)),
        (ResNet9(), (3, 28, 28)),
        (ResNet9(), (3, 64, 64)),
        (Mlp(), ()),
        (Linear(), (0,)),
    ],
)
def test_an_unsuitable_shape_is_refused(model: Model, shape: tuple[int, ...]):
    with pytest.raises(ConfigError, match=r"\(.*\).*;"):
        model.build(shape, 10)


def test_the_refusal_says_what_would_be_right():
    with pytest.raises(ConfigError) as error:
        LeNet5().build((1, 8, 8), 10)
    assert str(error.value) == (
        "model.name: 'lenet5' does not suit samples of shape (1, 8, 8); "
        "it takes square images of 28 or 32 pixels with 1 or 3 channels"
    )


@pytest.mark.parametrize("side", [12, 13, 28, 32])
def test_leaf_cnn_takes_any_side(side: int):
    assert LeafCnn().build((2, side, side), 5)(torch.zeros(1, 2, side, side)).shape == (1, 5)


@pytest.mark.parametrize("side", [32, 40, 63])
def test_resnet9_takes_sides_up_to_63(side: int):
    assert ResNet9().build((3, side, side), 5)(torch.zeros(1, 3, side, side)).shape == (1, 5)


def test_models_are_chains_of_standard_layers():
    known = (
        nn.Linear,
        nn.Conv2d,
        nn.MaxPool2d,
        nn.ReLU,
        nn.GroupNorm,
        nn.BatchNorm2d,
        nn.Dropout,
        nn.Flatten,
    )
    for model, shape, classes, _ in COUNTS:
        for module in model.build(shape, classes).modules():
            assert isinstance(module, (nn.Sequential, *known))


def test_resnet9_adds_the_identity():
    module = ResNet9().build(COLOUR32, 10)
    block = module.get_submodule("block3")
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.rand(2, 128, 16, 16)
    assert torch.equal(block(x), x)


def test_mlp_by_hand():
    module = Mlp(hidden=(2,)).build((2,), 2)
    with torch.no_grad():
        module.get_parameter("fc1.weight").copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        module.get_parameter("fc1.bias").copy_(torch.tensor([1.0, 1.0]))
        module.get_parameter("fc2.weight").copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        module.get_parameter("fc2.bias").copy_(torch.tensor([0.0, 10.0]))
    # hidden: relu(2 + 1, -3 + 1) = (3, 0)
    assert module(torch.tensor([[2.0, 3.0]])).tolist() == [[3.0, 19.0]]


def test_dropout_only_when_asked():
    def kinds(model: Model) -> list[str]:
        return [type(module).__name__ for module in model.build((4,), 2).children()]

    assert kinds(Mlp()) == ["Flatten", "Linear", "ReLU", "Linear"]
    assert kinds(Mlp(dropout=0.5)) == ["Flatten", "Linear", "ReLU", "Dropout", "Linear"]
