"""ResNet-9 with group normalisation."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Literal

from rayfl.models.base import Model, named, square_image

if TYPE_CHECKING:
    from torch import nn

    from rayfl.models.modules.residual import Residual


class ResNet9(Model):
    """ResNet-9 with GroupNorm (32 groups), of PACFL for CIFAR-100.

    Vahidian's thesis, Table 3.18. Decision: where the table prints the classifier's input as
    "block 4 + block 5" it must be block 5 + block 6 (the only sum whose shapes agree, and what the
    authors' code computes). With 100 classes a transfer costs 211.9 Mbit, as the thesis says.
    """

    name: Literal["resnet9"] = "resnet9"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """``block1`` to ``block6`` of the table and ``classifier``."""
        blocks = {f"block{i}": (f"block{i}",) for i in range(1, 7)}
        return {**blocks, "classifier": ("classifier",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For square images of 32 to 63 pixels."""
        from torch import nn

        channels, _ = square_image(self.name, shape, sides=range(32, 64))
        return named(
            ("block1", named(*_convolution(1, channels, 64))),
            ("block2", named(*_convolution(1, 64, 128), ("pool", nn.MaxPool2d(2)))),
            ("block3", _residual(128)),
            ("block4", named(*_convolution(1, 128, 256), ("pool", nn.MaxPool2d(2)))),
            ("block5", named(*_convolution(1, 256, 512), ("pool", nn.MaxPool2d(2)))),
            ("block6", _residual(512)),
            ("pool", nn.MaxPool2d(4)),
            ("flatten", nn.Flatten()),
            ("classifier", nn.Linear(512, classes)),
        )


def _convolution(i: int, inputs: int, outputs: int) -> list[tuple[str, nn.Module]]:
    """The ``i``-th convolution of a block, 3x3 and padded, with its normalisation and activation."""
    from torch import nn

    return [
        (f"conv{i}", nn.Conv2d(inputs, outputs, 3, padding=1)),
        (f"norm{i}", nn.GroupNorm(32, outputs)),
        (f"relu{i}", nn.ReLU()),
    ]


def _residual(width: int) -> Residual:
    """Two convolutions of equal width, bridged by the identity."""
    from rayfl.models.modules.residual import Residual

    return Residual(OrderedDict(_convolution(1, width, width) + _convolution(2, width, width)))
