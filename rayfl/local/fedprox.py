"""FedProx: a proximal term keeps local models near the global one. Li et al., MLSys 2020, Algorithm 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from rayfl.local.base import LocalObjective
from rayfl.training import LocalWork


class FedProx(LocalObjective):
    """The local loss plus ``(mu / 2) |w - w_global|^2``; mu = 0 is plain SGD, bit for bit."""

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0, description="weight of the proximal term (mu)")

    def work(self, work: LocalWork) -> LocalWork:
        """The gradient gets ``mu (w - w_global)``."""
        return replace(work, proximal=self.mu)
