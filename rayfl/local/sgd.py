"""Plain SGD on the client's own loss: FedAvg's local work."""

from __future__ import annotations

from typing import Literal

from rayfl.local.base import LocalObjective


class SGD(LocalObjective):
    """E epochs of mini-batch SGD on the client's own loss (McMahan et al. 2017)."""

    name: Literal["sgd"] = "sgd"
