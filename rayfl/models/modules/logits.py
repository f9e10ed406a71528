"""Wrappers that make networks of transformers map samples to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Logits(nn.Module):
    """A classifier of images."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of images ``(B, C, H, W)``."""
        logits: Tensor = self.network(pixel_values=pixels).logits
        return logits


class TextLogits(nn.Module):
    """A classifier of texts; padding is masked."""

    def __init__(self, network: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.network, self.padding = network, padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of texts ``(B, L)``."""
        mask = None
        if self.padding is not None:
            first = torch.arange(tokens.shape[1], device=tokens.device) == 0  # never masked, for empty texts
            mask = ((tokens != self.padding) | first).to(torch.int64)
        logits: Tensor = self.network(input_ids=tokens, attention_mask=mask).logits
        return logits


class WordLogits(nn.Module):
    """A language model; it sees only earlier words, so the padding after a text needs no mask."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, vocabulary, L)`` of the word after each word of texts ``(B, L)``."""
        logits: Tensor = self.network(input_ids=tokens, use_cache=False).logits
        return logits.transpose(1, 2)
