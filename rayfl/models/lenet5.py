"""LeNet-5 as the thesis uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rayfl.models.base import Model, named, square_image

if TYPE_CHECKING:
    from torch import nn


class LeNet5(Model):
    """LeNet-5: two unpadded 5x5 convolutions (6, 16) with pooling, then 120, 84 and the classes.

    Vahidian's thesis, Table 3.17 (400 features before the linear layers on 32x32 images, 256 on 28x28);
    with ``batch_norm`` after each convolution for Sub-FedAvg (Hy), chapter 4.
    """

    name: Literal["lenet5"] = "lenet5"
    batch_norm: bool = Field(False, description="batch normalisation after each convolution (Sub-FedAvg)")

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """``conv1``, ``conv2`` (each with its normalisation), ``fc1``, ``fc2``, ``fc3``."""
        norms = [("norm1",), ("norm2",)] if self.batch_norm else [(), ()]
        return {
            "conv1": ("conv1", *norms[0]),
            "conv2": ("conv2", *norms[1]),
            "fc1": ("fc1",),
            "fc2": ("fc2",),
            "fc3": ("fc3",),
        }

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For images of 28 or 32 pixels with 1 or 3 channels."""
        from torch import nn

        channels, side = square_image(self.name, shape, sides=(28, 32), channels=(1, 3))
        final_side = ((side - 4) // 2 - 4) // 2
        return named(
            ("conv1", nn.Conv2d(channels, 6, 5)),
            ("norm1", nn.BatchNorm2d(6)) if self.batch_norm else None,
            ("relu1", nn.ReLU()),
            ("pool1", nn.MaxPool2d(2)),
            ("conv2", nn.Conv2d(6, 16, 5)),
            ("norm2", nn.BatchNorm2d(16)) if self.batch_norm else None,
            ("relu2", nn.ReLU()),
            ("pool2", nn.MaxPool2d(2)),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(16 * final_side * final_side, 120)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(120, 84)),
            ("relu4", nn.ReLU()),
            ("fc3", nn.Linear(84, classes)),
        )
