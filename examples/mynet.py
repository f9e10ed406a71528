"""A network: rayfl fills in ``shape`` and ``classes`` from the data."""

from __future__ import annotations

import torch
from torch import nn


class MyNet(nn.Module):
    """Two convolutions and a linear layer, for images.

    Args:
        shape: shape of a sample, (channels, height, width).
        classes: number of classes.
        width: channels of the convolutions.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(shape[0], width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, channels, height, width)
        """Logits (B, classes)."""
        logits: torch.Tensor = self.head(self.pool(self.body(self.stem(x))))
        return logits
