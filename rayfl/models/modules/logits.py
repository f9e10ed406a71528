"""Networks that return more than logits."""

from __future__ import annotations

from torch import Tensor, nn


class Logits(nn.Module):
    """A network of transformers, which returns more than logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of images ``(B, C, H, W)``."""
        logits: Tensor = self.network(pixel_values=pixels).logits
        return logits
