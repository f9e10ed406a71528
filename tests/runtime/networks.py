"""Networks whose training draws random numbers and keeps running statistics."""

from __future__ import annotations

import torch
from torch import nn


class Mixed(nn.Module):
    """BatchNorm, GroupNorm, dropout and a skip connection, for 8 x 8 pixels: trained in a compiled call."""

    stride = 1

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(shape[0], 4, 3, stride=self.stride)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.batch, self.groups = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(36, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.batch(self.first(x))), 2 // self.stride)
        x = x + self.dropout(nn.functional.silu(self.groups(self.second(x))))
        return self.last(torch.flatten(x, 1))  # type: ignore[no-any-return]


class Strided(Mixed):
    """As :class:`Mixed`, with a stride, which no kernel has: trained layer by layer for several clients."""

    stride = 2
