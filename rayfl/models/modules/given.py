"""A network that a user has given from Python, read from its file."""

from __future__ import annotations

import torch
from torch import nn


def load(path: str) -> nn.Module:
    """The saved network with its weights, which are the same for every initialisation."""
    with torch.device("cpu"):
        module = torch.load(path, map_location="cpu", weights_only=False)
    assert isinstance(module, nn.Module)
    return module
