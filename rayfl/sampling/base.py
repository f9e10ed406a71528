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
        losses: computes, if called, each candidate's mean training loss under the model that it would start
            from ``(n,)``.
        relatedness: makes, if called, the graph of the candidates, whose neighbours have similar data.
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
        """How many clients evaluate their model on their own data before the choice, and download it for
        that.

        Args:
            clients: how many are present.
            count: how many to choose.
            round, rounds: 0-based, and the planned number.
        """
        return 0

    def cohort(self, candidates: Candidates) -> NDArray[np.int64]:
        """The ids of the participants ``(n,)``, at least one.

        If there are more than ``candidates.count``, they form a sweep: ``count`` of them take part in each
        round, in this order (the last cohort may be smaller), before new ones are chosen.
        """
        raise NotImplementedError
