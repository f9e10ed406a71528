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
    """Clients with a low loss take part first; more clients become eligible over the rounds.

    A client's loss is the mean over its training samples, under the model with which it is tested: the
    server's model with the client's own layers or mask (Sub-FedAvg), or its own model (MTL), once it has
    taken part. All clients are ranked by loss, and the first K(t) are eligible, which grows by ``pacing``.

    - ``cohorts: sweep`` (the thesis): the eligible clients are shuffled and cut into cohorts of ``max(1,
      round(rho N))`` clients, which take part one after another, one cohort per round. Then all clients are
      ranked again. Decisions: t counts rounds, and K(t) is that of the round in which the sweep begins, so a
      run costs as much as without a curriculum; the last cohort of a sweep may be smaller.
    - ``cohorts: draw``: all clients are ranked in every round, and one cohort is drawn from the eligible.

    As long as not all clients are eligible, a ranking costs a forward pass over the training data of all.
    """

    name: Literal["curriculum"] = "curriculum"
    order: Literal["curriculum", "anti"] = Field(
        "curriculum", description="clients of low loss first, or of high loss (anti)"
    )
    cohorts: Literal["sweep", "draw"] = Field(
        "sweep",
        description="sweep: all eligible clients take part, one cohort per round; draw: one cohort "
        "drawn from them",
    )
    pacing: Family = Field("linear", description="how the number of eligible clients grows (pacing)")
    a: float = Field(0.8, gt=0, le=1, description="fraction of the rounds until all are eligible (a)")
    b: float = Field(0.2, gt=0, le=1, description="fraction of the clients eligible in the first round (b)")

    def asked(self, clients: int, count: int, round: int, rounds: int) -> int:
        """All clients, as long as not all are eligible; then none."""
        return clients if self._eligible_count(clients, count, round, rounds) < clients else 0

    def cohort(self, candidates: Candidates) -> NDArray[np.int64]:
        """All eligible clients, shuffled (``sweep``), or one cohort drawn from them (``draw``)."""
        c, n = candidates, len(candidates.ids)
        allowed = self._eligible_count(n, c.count, c.round, c.rounds)
        pool = c.ids if allowed == n else c.ids[eligible(c.losses(), allowed, self.order)]
        rng = generator(c.seed, "cohort", c.round)
        if self.cohorts == "sweep":
            return rng.permutation(pool)
        return np.sort(rng.choice(pool, min(c.count, len(pool)), replace=False, shuffle=False))

    def _eligible_count(self, clients: int, count: int, round: int, rounds: int) -> int:
        """How many clients are eligible, K(t)."""
        paces = Pacing(self.pacing, self.a, self.b).available(rounds, clients, count)
        return int(paces[min(round, rounds - 1)])
