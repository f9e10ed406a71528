"""What methods that cluster by signatures remember: who sent what, and who has raised a flag."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, TypeVar

from rayfl.algorithms.contract import ServerState, Setup, per_client
from rayfl.clustering.config import Clustering


@dataclass(frozen=True)
class OneShotState(ServerState):
    """The latest clustering, and what has changed since.

    Attributes:
        known: the round in which each client sent the signature that the servers have ``(N,)``; -1 for none.
        stale: clients whose data have changed since they sent it ``(N,)``.
        flags: clients that have raised a flag since the latest clustering ``(N,)``.
        losses, norms: training loss and norm of the update when a client last took part ``(N,)``; NaN before
            that, and if flags do not use them.
        threshold: beta of the latest clustering; None if it had no tree.
        again: whether the latest clustering was not the first.
    """

    known: NDArray[np.int64] = per_client(-1)
    stale: NDArray[np.bool_] = per_client(False)
    flags: NDArray[np.bool_] = per_client(False)
    losses: NDArray[np.float64] = per_client(np.nan)
    norms: NDArray[np.float64] = per_client(np.nan)
    threshold: float | None = None
    again: bool = False

    def sent(self, setup: Setup, newcomers: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """``known`` ``(N,)``, but -1 for clients that send their signature now.

        These are ``newcomers`` ``(n,)``, and present clients whose data have changed.
        """
        known = np.where(self.stale & (setup.sizes > 0), -1, self.known)
        if newcomers is not None:
            known[newcomers] = -1
        return known

    @property
    def have_feature_map(self) -> NDArray[np.bool_]:
        """Whether each client has received the feature map: it has sent a signature ``(N,)``."""
        return self.known >= 0

    def flagged(self, who: NDArray[np.int64]) -> Self:
        """The state in which these clients ``(n,)`` have raised a flag."""
        flags = self.flags.copy()
        flags[who] = True
        return replace(self, flags=flags)


OS = TypeVar("OS", bound=OneShotState, default=OneShotState)


def latest(setup: Setup, state: OneShotState) -> Clustering:
    """The settings of the latest clustering: signatures of newcomers are compared with its signatures."""
    return setup.clustering.again() if state.again else setup.clustering


def features_change(setup: Setup, state: OneShotState) -> bool:
    """Whether the next clustering uses other features than the latest one."""
    return state.clustered and setup.clustering.again().features != latest(setup, state).features


def risen(
    before: NDArray[np.float64], cohort: NDArray[np.int64], now: NDArray[np.float64], rise: float | None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Update the last known values of all clients, and find the clients whose value has risen.

    Args:
        before: ``(N,)``, NaN where unknown.
        cohort: ids ``(M,)``.
        now: the cohort's values ``(M,)``, NaN where unknown.
        rise: the fraction by which a value has to rise; None: never.

    Returns:
        The values ``(N,)``, and the ids of clients whose value has risen by more than ``rise``.
    """
    if rise is None:
        return before, np.empty(0, np.int64)
    updated = before.copy()
    updated[cohort] = np.where(np.isnan(now), before[cohort], now)
    return updated, cohort[now > (1 + rise) * before[cohort]]
