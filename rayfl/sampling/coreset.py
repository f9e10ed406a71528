"""Participants that represent all clients at low cost: SCGIGA on the graph of the clients.

Vahidian's thesis, chapter 6, Algorithm 12.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.random import generator, key
from rayfl.sampling.base import Candidates, Sampling


class CoresetSampling(Sampling):
    """A coreset of the clients takes part, chosen on a graph that joins clients with similar data.

    For the graph all clients send their label histograms once, and again after every event.

    A client's cost is its number of samples (local time and energy grow with it), times a random factor
    between 1 and ``1 + spread`` that is drawn in every round, so that different clients represent the others.
    ``kappa`` sets how much less representative a cheaper client may be; at 1 costs are ignored.
    """

    classes_only: ClassVar[bool] = True

    name: Literal["coreset"] = "coreset"
    kappa: float = Field(
        0.5, gt=0, le=1, description="slack for cheaper clients (kappa); 1: costs are ignored"
    )
    spread: float = Field(1.0, ge=0, description="how much a client's cost varies between rounds")

    def cohort(self, candidates: Candidates) -> NDArray[np.int64]:
        """``max(1, round(rho N))`` present clients; if the coreset is smaller, the rest are drawn."""
        if candidates.count >= len(candidates.ids):
            return candidates.ids
        from rayfl.coresets.clients import participants  # deferred: it imports scikit-learn

        rng = generator(candidates.seed, "participation costs", candidates.round)
        costs = candidates.sizes * (1 + self.spread * rng.random(len(candidates.ids)))
        chosen = participants(
            candidates.relatedness(),
            candidates.count,
            costs,
            self.kappa,
            seed=key(candidates.seed, "coreset", candidates.round) % 2**32,
        )
        others = np.setdiff1d(np.arange(len(candidates.ids)), chosen.ids)
        drawn = rng.choice(others, candidates.count - len(chosen), replace=False)
        return np.sort(candidates.ids[np.concatenate([chosen.ids, drawn])])
