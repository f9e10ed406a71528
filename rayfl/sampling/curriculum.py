"""Client curriculum: clients on whose data the model does well take part first.

Vahidian's thesis, section 2.6.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.random import generator
from rayfl.sampling.base import Candidates, Sampling
from rayfl.training.curriculum import Family, Pacing, eligible


class ClientCurriculum(Sampling):
    """A client's loss is the mean over its training samples, under the model that it would receive.

    In every round all clients are ranked by it; pacing over the rounds says how many of the ranking are
    eligible, and the participants are drawn from those, all equally likely. It costs a forward pass over
    everybody's training data a round.
    """

    name: Literal["curriculum"] = "curriculum"
    order: Literal["curriculum", "anti"] = Field(
        "curriculum", description="clients of low loss first, or of high loss (anti)"
    )
    pacing: Family = Field("linear", description="how the part of the clients that is eligible grows")
    a: float = Field(0.8, gt=0, le=1, description="fraction of the rounds until all are eligible (a)")
    b: float = Field(0.2, gt=0, le=1, description="fraction of the clients eligible in the first round (b)")

    def cohort(self, candidates: Candidates) -> NDArray[np.int64]:
        """Drawn from those who are eligible in this round, at least as many as are wanted."""
        n = len(candidates.ids)
        available = Pacing(self.pacing, self.a, self.b).available(candidates.rounds, n, candidates.count)
        pool = eligible(
            candidates.losses(), int(available[min(candidates.round, len(available) - 1)]), self.order
        )
        rng = generator(candidates.seed, "cohort", candidates.round)
        chosen = rng.choice(len(pool), min(candidates.count, len(pool)), replace=False, shuffle=False)
        return candidates.ids[np.sort(pool[chosen])]
