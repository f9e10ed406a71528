"""The contract of participant sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rayfl.settings import Section

if TYPE_CHECKING:
    from rayfl.coresets.graphs import Graph


@dataclass(frozen=True)
class Candidates:
    """Who could take part in a round.

    Attributes:
        ids: the present clients, ascending ``(n,)``.
        count: how many to choose.
        sizes: their training samples ``(n,)``.
        labels: the model that each uses ``(n,)``.
        round: 0-based.
        rounds: planned number.
        seed: the run's seed.
        losses: computes each candidate's mean training loss under the model that it would start from
            ``(n,)``; costs a forward pass, so call it only if needed.
        relatedness: makes the graph of the candidates, in which clients with similar data are neighbours.
    """

    ids: NDArray[np.int64]
    count: int
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]
    round: int
    rounds: int
    seed: int
    losses: Callable[[], NDArray[np.float64]]
    relatedness: Callable[[], Graph]


class Sampling(Section):
    """A way to choose a round's participants, by name; one per file in ``rayfl/sampling``."""

    name: str = ""

    def asked(self, clients: int, count: int, round: int, rounds: int) -> int:
        """How many clients download their model before the choice, to evaluate it on their own data.

        Args:
            clients: how many are present.
            count: how many to choose.
            round, rounds: the round, 0-based, and the planned number of rounds.
        """
        return 0

    def cohort(self, candidates: Candidates) -> NDArray[np.int64]:
        """The ids of the participants ``(n,)``, at least one.

        If more than ``candidates.count`` are returned, they form a sweep: ``count`` of them take part in each
        round, in this order (the last cohort may be smaller), before new ones are chosen.
        """
        raise NotImplementedError
