"""Uniform sampling without replacement, as FedAvg's."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.random import generator
from rayfl.sampling.base import Candidates, Sampling


class Uniform(Sampling):
    """``max(1, round(rho N))`` clients, all equally likely (McMahan et al. 2017, Algorithm 1)."""

    name: Literal["uniform"] = "uniform"

    def cohort(self, candidates: Candidates) -> NDArray[np.int64]:
        """O(cohort) time and memory when it is small."""
        n, count = len(candidates.ids), candidates.count
        if count >= n:
            return candidates.ids
        rng = generator(candidates.seed, "cohort", candidates.round)
        return candidates.ids[np.sort(rng.choice(n, count, replace=False, shuffle=False))]
