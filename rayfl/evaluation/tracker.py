"""Best and last accuracy of every client, kept separately so that reports cannot confuse them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayfl.data.base import TestedOn
from rayfl.evaluation.metrics import Score, Scores


@dataclass(frozen=True)
class BestLast:
    """The best and last accuracy of each client over the evaluations so far.

    A new tracker is started when clients come, go or change, because accuracies on other data cannot be
    compared.

    Attributes:
        last: accuracy at the client's latest evaluation, percent, ``(N,)``; NaN before the first.
        best: its highest accuracy in evaluations that tested all clients, percent, ``(N,)``; NaN before the
            first.
        best_round: the first round that reached it, ``(N,)``; -1 before the first.
    """

    last: NDArray[np.float64]
    best: NDArray[np.float64]
    best_round: NDArray[np.int64]

    @classmethod
    def start(cls, clients: int) -> BestLast:
        """Nothing evaluated yet, for ``clients`` clients."""
        return cls(np.full(clients, np.nan), np.full(clients, np.nan), np.full(clients, -1, np.int64))

    def update(self, round: int, ids: ArrayLike, accuracy: ArrayLike, estimate: bool = False) -> BestLast:
        """The tracker after an evaluation; this one is not changed.

        Args:
            round: the round of the evaluation.
            ids: the clients evaluated, each once ``(n,)``.
            accuracy: their accuracies in percent ``(n,)``; NaN (no test samples) changes nothing.
            estimate: whether only these clients were tested, to estimate the result for all. That changes
                only ``last``: a client that is tested more often than others would reach a higher best.

        Raises:
            ValueError: if a client is named twice or the lengths differ.
        """
        ids_, accuracy_ = np.asarray(ids, np.int64), np.asarray(accuracy, np.float64)
        if ids_.shape != accuracy_.shape or len(np.unique(ids_)) != len(ids_):
            raise ValueError("one accuracy for each client, each client once")
        tested = ~np.isnan(accuracy_)
        ids_, accuracy_ = ids_[tested], accuracy_[tested]
        last, best, best_round = self.last.copy(), self.best.copy(), self.best_round.copy()
        last[ids_] = accuracy_
        better = ~(accuracy_ <= best[ids_]) & (not estimate)  # true also if there is no best yet
        best[ids_[better]] = accuracy_[better]
        best_round[ids_[better]] = round
        return BestLast(last, best, best_round)


@dataclass(frozen=True)
class LocalTests:
    """The test of each client's own model right after its latest local training.

    Attributes:
        round: of that training ``(N,)``; -1 for clients that have not trained yet.
        scores: by the data that they were tested on, each of N clients.
    """

    round: NDArray[np.int64]
    scores: Scores

    @classmethod
    def start(cls, clients: int, on: Sequence[TestedOn], sums: int = 0) -> LocalTests:
        """No client has trained yet; a score has S ``sums``."""
        return cls(np.full(clients, -1, np.int64), {data: Score.zeros(clients, sums) for data in on})

    def update(self, round: int, ids: NDArray[np.int64], scores: Scores) -> LocalTests:
        """The tests after a round in which these clients trained ``(n,)``; this object is not changed."""
        rounds, new_scores = self.round.copy(), {on: score.copy() for on, score in self.scores.items()}
        rounds[ids] = round
        for on, score in new_scores.items():
            score.put(ids, scores[on])
        return LocalTests(rounds, new_scores)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The arrays that a checkpoint stores."""
        arrays: dict[str, NDArray[np.generic]] = {"local.round": self.round}
        for on, score in self.scores.items():
            arrays |= {f"local.{on}.{name}": values for name, values in score._asdict().items()}
        return arrays

    def restored(self, arrays: Mapping[str, Any]) -> LocalTests:
        """The inverse of :meth:`arrays`; older checkpoints do not have these arrays."""
        if "local.round" not in arrays:
            return self
        scores = {on: Score(*(arrays[f"local.{on}.{name}"] for name in Score._fields)) for on in self.scores}
        return LocalTests(arrays["local.round"], scores)
