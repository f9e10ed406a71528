"""A chain of layers with a skip connection."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Sequential):
    """A chain whose input is added to its output."""

    def forward(self, input: Tensor) -> Tensor:
        """``x + chain(x)`` for ``x`` of any shape."""
        output = input
        for module in self:
            output = module(output)
        return input + output
