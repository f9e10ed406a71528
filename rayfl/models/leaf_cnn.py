"""The convolutional network of LEAF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rayfl.models.base import Model, named, square_image

if TYPE_CHECKING:
    from torch import nn


class LeafCnn(Model):
    """LEAF's CNN for FEMNIST: 5x5 convolutions with 32 and 64 channels, pooling, 2048, classes.

    Caldas et al. 2018; used by FLT (Jamali-Rad et al., Table 12). Decision: the table's 63 channels are
    a misprint of 64. Its printed 3,459,582 parameters are those of 3-channel images of 28 pixels, 62
    classes and a second convolution without padding, ``second_padding: 0``; LEAF's own network pads both.
    """

    name: Literal["leaf_cnn"] = "leaf_cnn"
    second_padding: int = Field(
        2, ge=0, le=2, description="padding of the second convolution: 2 in LEAF, 0 for FLT's count"
    )

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """``conv1``, ``conv2``, ``fc1``, ``fc2``."""
        return {layer: (layer,) for layer in ("conv1", "conv2", "fc1", "fc2")}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For square images of 12 to 128 pixels."""
        from torch import nn

        channels, side = square_image(self.name, shape, sides=range(12, 129))
        final_side = (side // 2 + 2 * self.second_padding - 4) // 2
        return named(
            ("conv1", nn.Conv2d(channels, 32, 5, padding=2)),
            ("relu1", nn.ReLU()),
            ("pool1", nn.MaxPool2d(2)),
            ("conv2", nn.Conv2d(32, 64, 5, padding=self.second_padding)),
            ("relu2", nn.ReLU()),
            ("pool2", nn.MaxPool2d(2)),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(64 * final_side * final_side, 2048)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(2048, classes)),
        )
