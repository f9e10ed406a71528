"""MT-HFL's convolutional network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rayfl.models.base import Model, named, square_image

if TYPE_CHECKING:
    from torch import nn


class MthflCnn(Model):
    """MT-HFL's CNN for CIFAR-10: two 5x5 convolutions, two 2x2 poolings, 120, 84, classes.

    Ali, Arafa, section III; its *common layers* are ``conv1`` and ``conv2``. Decision: the paper does not
    print the numbers of channels; 6 and 16 (LeNet-5's) are the default.
    """

    name: Literal["mthfl_cnn"] = "mthfl_cnn"
    channels1: int = Field(6, ge=1, description="channels of the first convolution")
    channels2: int = Field(16, ge=1, description="channels of the second convolution")

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """``conv1``, ``conv2``, ``fc1``, ``fc2``, ``fc3``."""
        return {layer: (layer,) for layer in ("conv1", "conv2", "fc1", "fc2", "fc3")}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For square images of 16 to 128 pixels."""
        from torch import nn

        channels, side = square_image(self.name, shape, sides=range(16, 129))
        final_side = ((side - 4) // 2 - 4) // 2
        return named(
            ("conv1", nn.Conv2d(channels, self.channels1, 5)),
            ("relu1", nn.ReLU()),
            ("pool1", nn.MaxPool2d(2)),
            ("conv2", nn.Conv2d(self.channels1, self.channels2, 5)),
            ("relu2", nn.ReLU()),
            ("pool2", nn.MaxPool2d(2)),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(self.channels2 * final_side * final_side, 120)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(120, 84)),
            ("relu4", nn.ReLU()),
            ("fc3", nn.Linear(84, classes)),
        )
