"""Accuracy by cluster and by planted group, and its variance within and between them.

For clients with weights ``w_i`` that sum to 1 (``1 / N`` each if all are tested), accuracies ``a_i`` and
groups ``g``, with ``W_g``, ``m_g`` and ``v_g`` a group's weight, mean and variance and ``m`` the mean of all,
the law of total variance states

    sum_i w_i (a_i - m)^2  =  sum_g W_g v_g  +  sum_g W_g (m_g - m)^2
          total            =      within     +       between

Both are small if a method serves all clients equally well. If it serves the clients of a group equally well,
but one group better than another, the variance within is small and the variance between is large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayfl.data.base import Ragged
from rayfl.evaluation.metrics import accuracy

_SAMPLES_AT_ONCE = 1 << 22
"""Test samples of clients that are counted at a time."""


@dataclass(frozen=True)
class ByGroup:
    """The tests of clients by group (``G`` groups, by ascending label). Build it with :meth:`of`.

    Attributes:
        ids: the labels ``(G,)``.
        weights: the share of each group, ``(G,)``; they sum to 1.
        clients: tested clients, ``(G,)``.
        test_samples: their test samples, ``(G,)``; shared samples count once per client.
        accuracy_mean, accuracy_var: over the clients of the group, percent and percent squared, ``(G,)``.
        accuracy_se: standard error of the mean over clients, ``(G,)``; NaN for one client.
        loss_mean: mean over clients of their mean loss, ``(G,)``.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float64]
    clients: NDArray[np.int64]
    test_samples: NDArray[np.int64]
    accuracy_mean: NDArray[np.float64]
    accuracy_var: NDArray[np.float64]
    accuracy_se: NDArray[np.float64]
    loss_mean: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        correct: ArrayLike,
        loss_sums: ArrayLike,
        sizes: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
    ) -> ByGroup:
        """Divide clients into groups.

        Args:
            correct: correctly classified test samples of each client, ``(n,)``.
            loss_sums: sum of each client's sample losses, ``(n,)``.
            sizes: test samples of each client, ``(n,)``; clients without test samples are ignored.
            labels: the group of each client, ``(n,)``.
            weights: how much each client counts, ``(n,)``; default: equally.
        """
        sizes_n = np.asarray(sizes, np.float64)
        weights_n = np.ones(len(sizes_n)) if weights is None else np.asarray(weights, np.float64)
        tested = (sizes_n > 0) & (weights_n > 0)
        ids, group = np.unique(np.asarray(labels, np.int64)[tested], return_inverse=True)
        values, size = accuracy(correct, sizes_n)[tested], sizes_n[tested]
        losses, share = np.asarray(loss_sums, np.float64)[tested] / size, weights_n[tested]
        share = share / share.sum()

        def total(of_n: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.bincount(group, of_n, len(ids)).astype(np.float64)

        weight_G, clients_G = total(share), np.bincount(group, minlength=len(ids))
        mean_G = total(share * values) / weight_G
        var_G = total(share * (values - mean_G[group]) ** 2) / weight_G
        squares_G = total(share**2) / weight_G**2  # 1 / n for n equal clients
        several = clients_G > 1
        se_G = np.full(len(ids), np.nan)
        se_G[several] = np.sqrt((var_G * squares_G)[several] / (1 - squares_G[several]))
        loss_G = total(share * losses) / weight_G
        return cls(ids, weight_G, clients_G, total(size).astype(np.int64), mean_G, var_G, se_G, loss_G)

    @property
    def within(self) -> float:
        """The variance within groups, percent squared; NaN without clients."""
        return float(self.weights @ self.accuracy_var) if len(self.ids) else float("nan")

    @property
    def between(self) -> float:
        """The variance between groups, percent squared; NaN without clients."""
        mean = self.weights @ self.accuracy_mean
        return float(self.weights @ (self.accuracy_mean - mean) ** 2) if len(self.ids) else float("nan")

    def rows(self) -> list[dict[str, float | int]]:
        """One row per group, with everything but the weights."""
        names = [name for name in vars(self) if name not in ("ids", "weights")]
        columns = {"id": self.ids, **{name: getattr(self, name) for name in names}}
        lists = [column.tolist() for column in columns.values()]
        return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


@dataclass(frozen=True)
class TestSets:
    """The union of the test samples of each group's clients. Build it with :meth:`of`.

    Clients share test samples: 100 clients with 200 each may have only 500 images in all, and one
    misclassified image lowers the accuracy of every client that has it. So an average over many clients may
    be less certain than it looks.

    Attributes:
        distinct: number of distinct test samples ``(G,)``, by ascending label.
        effective: the effective number of samples ``1 / sum_j u_j^2`` ``(G,)``, where ``u_j`` is the weight
            of sample j in the mean accuracy of the group, ``sum_j u_j = 1``.
    """

    __test__ = False  # pytest would collect it because of its name

    distinct: NDArray[np.int64]
    effective: NDArray[np.float64]

    @classmethod
    def of(cls, tests: Ragged, labels: ArrayLike, samples: int, weights: ArrayLike | None = None) -> TestSets:
        """Count the samples.

        Args:
            tests: the test samples of each client, ``n`` lists of (virtual) ids, none empty.
            labels: the group of each client, ``(n,)``.
            samples: size of the test set; the same image under other labels is one image.
            weights: how much each client counts, ``(n,)``; default: all the same.
        """
        names, group = np.unique(np.asarray(labels), return_inverse=True)
        weights_n = np.ones(len(group)) if weights is None else np.asarray(weights, np.float64)
        # The weight of one sample of a client
        share = weights_n / np.bincount(group, weights_n)[group] / tests.sizes
        u = np.zeros((len(names), samples))
        for chunk in tests.pieces(_SAMPLES_AT_ONCE):
            sizes = tests.sizes[chunk]
            values = tests.values[tests.offsets[chunk.start] : tests.offsets[chunk.stop]]
            np.add.at(u, (np.repeat(group[chunk], sizes), values % samples), np.repeat(share[chunk], sizes))
        return cls((u > 0).sum(axis=1).astype(np.int64), 1.0 / (u**2).sum(axis=1))

    def standard_error(self, accuracy_mean: ArrayLike) -> NDArray[np.float64]:
        """Standard error of mean accuracies over test samples, percent, ``(G,)``.

        How much a mean would vary if other test samples were drawn and the clients stayed: binomial, with the
        effective number of samples.

        Args:
            accuracy_mean: of each group in percent ``(G,)``.
        """
        p = np.asarray(accuracy_mean, np.float64)
        return np.asarray(np.sqrt(np.maximum(0.0, p * (100.0 - p)) / self.effective))
