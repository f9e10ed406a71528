"""Modules that allow a recurrent network for words to be an ``nn.Sequential``."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override


class States(nn.LSTM):
    """``nn.LSTM`` that returns only the states of its last layer, so that it fits into ``nn.Sequential``."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """``(batch, L, features)`` to ``(batch, L, hidden)``."""
        states: torch.Tensor = super().forward(x)[0]
        return states


class ClassesSecond(nn.Module):
    """``(batch, L, classes)`` to ``(batch, classes, L)``, as PyTorch's cross-entropy takes them."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)
