"""FLT's convolutional autoencoder: no classifier, but what turns images into short codes.

Jamali-Rad, Abdizadeh, Singh, "Federated learning with taskonomy for non-IID data", 2022, Table 13.
"""

from __future__ import annotations

import torch
from torch import nn

from rayfl.errors import DataError
from rayfl.models.base import named

LATENT = 128
"""The dimension e of a code."""


class ConvAE(nn.Module):
    """ConvAE of FLT's Table 13: 51,577 parameters for grey images of 28 x 28 pixels.

    Encoder: convolutions 3x3 with 16 and 4 channels, each with ReLU and pooling by two, and a linear map to
    the code, which is not rectified. Decoder: a linear map back, transposed convolutions 2x2 of stride two
    with 16 channels and ReLU, and with the image's channels and a sigmoid.

    Pooling comes before ReLU, which gives the same values at a quarter of the work.

    Args:
        shape: of an image ``(C, H, W)``; H and W are multiples of 4.
        latent: e.

    Raises:
        DataError: for other shapes.
    """

    def __init__(self, shape: tuple[int, ...], latent: int = LATENT) -> None:
        super().__init__()
        if len(shape) != 3 or shape[1] % 4 or shape[2] % 4 or min(shape) < 1:
            raise DataError(f"an autoencoder of images (C, H, W) needs sides divisible by 4, not {shape}")
        channels, height, width = shape
        grid = (4, height // 4, width // 4)
        self.encoder = named(
            ("conv1", nn.Conv2d(channels, 16, 3, padding=1)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(16, 4, 3, padding=1)),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("flatten", nn.Flatten()),
            ("fc", nn.Linear(grid[0] * grid[1] * grid[2], latent)),
        )
        self.decoder = named(
            ("fc", nn.Linear(latent, grid[0] * grid[1] * grid[2])),
            ("unflatten", nn.Unflatten(1, grid)),
            ("deconv1", nn.ConvTranspose2d(4, 16, 2, stride=2)),
            ("relu1", nn.ReLU()),
            ("deconv2", nn.ConvTranspose2d(16, channels, 2, stride=2)),
            ("sigmoid", nn.Sigmoid()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The reconstruction ``(n, C, H, W)`` in [0, 1] of images with pixels in [0, 1]."""
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]
