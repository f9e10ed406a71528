"""Accuracy over clients: its mean and its fairness.

The unit of all accuracies is percent, of variances percent squared. A client without test samples has no
accuracy (NaN) and is ignored in all metrics.

For texts, where a model predicts every next word of a sample, predictions are counted instead of samples:
sizes are numbers of words, accuracies shares of correctly predicted words, and losses are per word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayfl.data.base import TestedOn

METRICS = (
    "accuracy_mean",
    "accuracy_weighted",
    "accuracy_median",
    "accuracy_worst10",
    "accuracy_best10",
    "accuracy_var",
    "accuracy_se",
    "loss_mean",
)


class Score(NamedTuple):
    """The test results of n clients.

    Attributes:
        correct: number of right predictions ``(n,)``.
        losses: sum of the losses of all predictions ``(n,)``; in nats for classes.
        sums: further measures of the loss: :meth:`rayfl.losses.Loss.sums`, summed over samples ``(n, S)``.
    """

    correct: NDArray[np.int64]
    losses: NDArray[np.float64]
    sums: NDArray[np.float64]

    @classmethod
    def zeros(cls, clients: int, sums: int = 0) -> Score:
        """The scores of clients that were not tested, with S ``sums`` each."""
        return cls(np.zeros(clients, np.int64), np.zeros(clients), np.zeros((clients, sums)))

    def put(self, places: NDArray[np.integer] | slice, scores: Score) -> None:
        """Write the scores of the clients ``places`` ``(m,)``, in place."""
        for target, source in zip(self, scores, strict=True):
            target[places] = source

    def of(self, clients: NDArray[np.integer], count: int) -> Score:
        """Scores of ``count`` clients, of which ``clients`` ``(n,)`` were tested; zeros for the others."""
        full_score = Score.zeros(count, self.sums.shape[1])
        full_score.put(clients, self)
        return full_score

    @classmethod
    def joined(cls, scores: Sequence[Score]) -> Score:
        """Concatenate the scores of several sets of clients."""
        return cls(*(np.concatenate(columns) for columns in zip(*scores, strict=True)))

    def take(self, clients: NDArray[np.integer]) -> Score:
        """The scores of the ``clients`` ``(m,)``."""
        return Score(self.correct[clients], self.losses[clients], self.sums[clients])

    def copy(self) -> Score:
        """A copy that shares no memory."""
        return Score(self.correct.copy(), self.losses.copy(), self.sums.copy())


Scores = Mapping[TestedOn, Score]
"""Scores by the data that the clients were tested on."""


def accuracy(correct: ArrayLike, sizes: ArrayLike) -> NDArray[np.float64]:
    """Accuracy of each client in percent, ``(N,)``.

    Args:
        correct: correctly classified test samples of each client, ``(N,)``.
        sizes: test samples of each client, ``(N,)``; where it is 0 the accuracy is NaN.

    Raises:
        ValueError: if a client has more correct samples than samples.
    """
    correct_N, sizes_N = np.asarray(correct, np.float64), np.asarray(sizes, np.float64)
    if correct_N.shape != sizes_N.shape or (correct_N < 0).any() or (correct_N > sizes_N).any():
        raise ValueError("correct counts must lie between 0 and the test sizes, one of each for a client")
    percent_N = np.full(sizes_N.shape, np.nan)
    np.divide(100.0 * correct_N, sizes_N, out=percent_N, where=sizes_N > 0)
    return percent_N


def perplexity(loss_sums: ArrayLike, sizes: ArrayLike) -> NDArray[np.float64]:
    """Perplexity of each client, ``(N,)``: ``exp`` of its mean loss per word, at best 1.

    Guessing uniformly among V words gives V.

    Args:
        loss_sums: sum of the losses of each client's words in nats, ``(N,)``.
        sizes: their number, ``(N,)``; where it is 0 the perplexity is NaN.
    """
    sizes_N = np.asarray(sizes, np.float64)
    mean_N = np.full(sizes_N.shape, np.nan)
    np.divide(np.asarray(loss_sums, np.float64), sizes_N, out=mean_N, where=sizes_N > 0)
    with np.errstate(over="ignore"):
        perplexity_N: NDArray[np.float64] = np.exp(mean_N)
    return perplexity_N


def summary(correct: ArrayLike, loss_sums: ArrayLike, sizes: ArrayLike) -> dict[str, float]:
    """The metrics of a round over clients.

    Args:
        correct: correctly classified test samples of each client, ``(N,)``.
        loss_sums: sum of each client's sample losses, ``(N,)``.
        sizes: test samples of each client, ``(N,)``.

    Returns:
        - ``accuracy_mean``: unweighted mean over clients (the papers' "average final local test accuracy over
          all clients");
        - ``accuracy_weighted``: weighted by test size, so that each tested sample counts equally;
        - ``accuracy_median``: median over clients;
        - ``accuracy_worst10``, ``accuracy_best10``: mean over the tenth of the clients with the lowest
          and the highest accuracy, rounded down but at least one client;
        - ``accuracy_var``: population variance over clients in percent squared, FLT's fairness;
        - ``accuracy_se``: standard error of ``accuracy_mean`` over clients, ``s / sqrt(N)`` with the sample
          deviation ``s``: how much the mean would vary if other clients of the same kind were drawn. Clients
          that share test samples are not independent, so it is then too small. NaN for a single client;
        - ``loss_mean``: mean over clients of the client's mean loss.

        All NaN if no client has test samples.
    """
    sizes_N = np.asarray(sizes, np.float64)
    percent_N = accuracy(correct, sizes_N)
    tested = sizes_N > 0
    if not tested.any():
        return dict.fromkeys(METRICS, float("nan"))
    ranked = np.sort(percent_N[tested])
    tenth = max(1, len(ranked) // 10)
    values = (
        ranked.mean(),
        np.average(percent_N[tested], weights=sizes_N[tested]),
        np.median(ranked),
        ranked[:tenth].mean(),
        ranked[-tenth:].mean(),
        ranked.var(),
        ranked.std(ddof=1) / np.sqrt(len(ranked)) if len(ranked) > 1 else np.nan,
        (np.asarray(loss_sums, np.float64)[tested] / sizes_N[tested]).mean(),
    )
    return {name: float(value) for name, value in zip(METRICS, values, strict=True)}
