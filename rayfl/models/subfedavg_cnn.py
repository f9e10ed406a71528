"""Sub-FedAvg's network for MNIST and EMNIST."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rayfl.models.base import Model, named, square_image

if TYPE_CHECKING:
    from torch import nn


class SubFedAvgCnn(Model):
    """Sub-FedAvg's CNN for MNIST and EMNIST: 5x5 convolutions (10, 20) with BatchNorm, 50, classes.

    Vahidian's thesis, chapter 4, experimental setup. The text prints 30,900 parameters; the network that
    it describes has 21,900 at 10 classes, 60 of them the scales and shifts of BatchNorm.
    """

    name: Literal["subfedavg_cnn"] = "subfedavg_cnn"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """``conv1``, ``conv2`` (each with its normalisation), ``fc1``, ``fc2``."""
        return {"conv1": ("conv1", "norm1"), "conv2": ("conv2", "norm2"), "fc1": ("fc1",), "fc2": ("fc2",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For square images of 16 to 128 pixels."""
        from torch import nn

        channels, side = square_image(self.name, shape, sides=range(16, 129))
        final_side = ((side - 4) // 2 - 4) // 2
        return named(
            ("conv1", nn.Conv2d(channels, 10, 5)),
            ("norm1", nn.BatchNorm2d(10)),
            ("relu1", nn.ReLU()),
            ("pool1", nn.MaxPool2d(2)),
            ("conv2", nn.Conv2d(10, 20, 5)),
            ("norm2", nn.BatchNorm2d(20)),
            ("relu2", nn.ReLU()),
            ("pool2", nn.MaxPool2d(2)),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(20 * final_side * final_side, 50)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(50, classes)),
        )
