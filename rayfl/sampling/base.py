"""The contract of participant sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayfl.settings import Section


@dataclass(frozen=True)
class Candidates:
    """Who could take part in a round.

    Attributes:
        ids: the clients that are there, ascending ``(n,)``.
        count: how many are wanted.
        sizes: their training samples ``(n,)``.
        labels: the model that each uses ``(n,)``.
        round: 0-based.
        rounds: planned number.
        seed: the run's seed.
        losses: computes, if called, each candidate's mean training loss under its model ``(n,)``.
    """

    ids: NDArray[np.int64]
    count: int
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]
    round: int
    rounds: int
    seed: int
    losses: Callable[[], NDArray[np.float64]]


class Sampling(Section):
    """A way to choose a round's participants, by name; one a file in ``rayfl/sampling``."""

    name: str = ""

    def cohort(self, candidates: Candidates) -> NDArray[np.int64]:
        """The ids of the participants, ascending; at most ``candidates.count``, at least one."""
        raise NotImplementedError
