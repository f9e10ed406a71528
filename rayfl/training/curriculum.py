"""Data curricula inside a client: scores, orders, pacing, and the samples that every step visits.

Vahidian's thesis, chapter 2: each sample has a score (higher = easier), samples are sorted by it, and local
step t trains on a batch of the first ``g(t)``. Vanilla training needs none of this: shuffled epochs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Family = Literal["exponential", "step", "root", "linear", "quadratic"]
Order = Literal["curriculum", "anti", "random"]

_T = TypeVar("_T", bound=np.generic)

PACINGS: dict[str, Callable[[NDArray[np.float64], float], NDArray[np.float64]]] = {
    "exponential": lambda u, b: b + (1 - b) * np.expm1(10 * u) / math.expm1(10),
    "step": lambda u, b: b + np.floor(u),
    "root": lambda u, b: b + (1 - b) * np.sqrt(u),
    "linear": lambda u, b: b + (1 - b) * u,
    "quadratic": lambda u, b: b + (1 - b) * u**2,
}
"""Table 2.1: ``g(t) / N`` for ``u = t / (a T)`` and b. Decision: the printed ``(N - b)`` reads ``N (1 - b)``,
with which ``g(0) = N b`` and ``g(a T) = N`` in every family."""


@dataclass(frozen=True)
class Pacing:
    """How much of the sorted data a step may draw from.

    Attributes:
        family: the name of one of :data:`PACINGS`.
        a: the fraction of the T steps after which all data are used.
        b: the fraction of the data used in the first step.

    Raises:
        ValueError: for an unknown family, or a or b outside (0, 1].
    """

    family: Family = "linear"
    a: float = 0.8
    b: float = 0.2

    def __post_init__(self) -> None:
        if self.family not in PACINGS:
            raise ValueError(f"pacing: {self.family!r} is not one of {', '.join(PACINGS)}")
        if not (0 < self.a <= 1 and 0 < self.b <= 1):
            raise ValueError(f"pacing: a = {self.a:g} and b = {self.b:g} must lie in (0, 1]")

    def fraction(self, progress: ArrayLike) -> NDArray[np.float64]:
        """``g(t) / N`` at ``progress = t / T`` ``(T,)``, at most 1; every family reaches 1 at ``progress =
        a``.
        """
        u = np.minimum(1.0, np.asarray(progress, np.float64) / self.a)
        return np.minimum(1.0, PACINGS[self.family](u, self.b))

    def available(self, steps: int, samples: int, batch_size: int) -> NDArray[np.int64]:
        """``g(t)`` for the steps t = 0, 1, ..., T - 1, ``(T,)``.

        Decision: rounded to the nearest number of samples, halves up, and at least one batch (or all N
        samples if there are fewer), since a step draws a whole batch. A value within 1e-12 (relative) of a
        half counts as a half: for N = 20, a = 0.8, b = 0.1, linear pacing gives 15.5 in step 6 of 10, which
        floating point turns into 15.499999999999998 under some orders of the operations.

        Args:
            steps: the budget T.
            samples: N.
            batch_size: B.
        """
        exact = samples * self.fraction(np.arange(steps) / max(1, steps))
        return np.maximum(np.floor(exact * (1 + 1e-12) + 0.5).astype(np.int64), min(batch_size, samples))


def loss_scores(losses: ArrayLike) -> NDArray[np.float64]:
    """``s_i = r_i / sum r``, ``r_i = 1 / loss_i`` (section 2.4.1): s_G, s_L or s_E, depending on which
    model's losses are given.

    For s_LG give the mean of the global and the local model's losses. A loss of zero, for which the score is
    unbounded, counts as the smallest normal number of single precision.

    Args:
        losses: loss of each sample ``(n,)``, or of several clients with equally many samples ``(B, n)``.

    Raises:
        ValueError: if a loss is negative or not finite.
    """
    values = np.asarray(losses, np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError("scores need losses that are finite and not negative")
    easiness = 1 / np.maximum(values, float(np.finfo(np.float32).tiny))
    totals = np.maximum(easiness.sum(axis=-1, keepdims=True), float(np.finfo(np.float64).tiny))
    scores: NDArray[np.float64] = easiness / totals
    return scores


def prediction_scores(predicted: ArrayLike, reference: ArrayLike) -> NDArray[np.float64]:
    """1 for samples whose predicted class equals the reference (easy), 0 for the others (hard), ``(n,)``.

    Args:
        predicted: predicted classes ``(n,)``.
        reference: true labels for s_G^pred and s_L^pred; the other model's predictions for s_LG^pred.
    """
    return np.equal(predicted, reference).astype(np.float64)


def arrange(scores: NDArray[np.floating], order: Order, draws: NDArray[np.float64]) -> NDArray[np.intp]:
    """Sample positions in the order in which they are introduced, ``(n,)``, or of several clients ``(B, n)``.

    Decision: equal scores are in random order, as scores by prediction have only two values.

    Args:
        scores: of each sample ``(n,)`` or ``(B, n)``, higher = easier.
        order: ``curriculum`` easy first, ``anti`` hard first, ``random`` regardless of the score.
        draws: a random number for each sample, of the same shape. With the same draws ``anti`` is
            ``curriculum`` backwards.

    Raises:
        ValueError: for another order.
    """
    if order == "random":
        return np.argsort(draws, axis=-1, kind="stable")
    if order not in ("curriculum", "anti"):
        raise ValueError(f"order: {order!r} is not one of curriculum, anti, random")
    hard_first: NDArray[np.intp] = np.lexsort((draws, scores), axis=-1)
    return hard_first if order == "anti" else hard_first[..., ::-1]


def alike(function: Callable[..., NDArray[_T]], *arrays: Sequence[NDArray[np.floating]]) -> list[NDArray[_T]]:
    """Apply a function to each client's arrays ``(n,)``, in one call for clients with equally many samples.

    Args:
        function: of arrays ``(B, n)``; returns one ``(B, ...)``.
        arrays: of each client; those of one client have the same length.
    """
    lengths = list(map(len, arrays[0]))
    if len(set(lengths)) == 1:
        return list(function(*map(side_by_side, arrays)))
    results: list[NDArray[_T]] = [np.empty(0)] * len(lengths)  # type: ignore[list-item]
    for n in sorted(set(lengths)):
        clients = [client for client, length in enumerate(lengths) if length == n]
        rows = function(*(side_by_side([argument[client] for client in clients]) for argument in arrays))
        for client, row in zip(clients, rows, strict=True):
            results[client] = row
    return results


def side_by_side(arrays: Sequence[NDArray[_T]]) -> NDArray[_T]:
    """Stack B arrays of one shape ``(n, ...)`` to ``(B, n, ...)``, faster than ``np.stack`` if B is large."""
    joined: NDArray[_T] = np.concatenate(arrays)
    return joined.reshape(len(arrays), *arrays[0].shape)


def cut(values: NDArray[_T], sizes: Sequence[int]) -> list[NDArray[_T]]:
    """Split ``values`` ``(n, ...)`` into consecutive views of these sizes, faster than ``np.split``."""
    stops = list(itertools.accumulate(sizes))
    return [values[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def visits(
    orders: Sequence[NDArray[np.intp]],
    available: Sequence[NDArray[np.int64]],
    batch_size: int,
    draws: Sequence[NDArray[np.float64]],
) -> Sequence[NDArray[np.intp]] | NDArray[np.intp]:
    """Draw a batch for each step, without replacement, from the first ``g(t)`` samples of the order.

    Args:
        orders: for each client the sample positions ``(n,)``, see :func:`arrange`.
        available: for each client ``g(t)`` of every step ``(T,)``, see :meth:`Pacing.available`.
        batch_size: B.
        draws: for each client ``T min(B, n)`` random numbers in [0, 1).

    Returns:
        For each client positions ``(T, min(B, n))``, for ``Terms.visits``; one array if all have equally many
        samples and steps.

    Raises:
        ValueError: if a ``g(t)`` is less than ``min(B, n)`` or more than n.
    """
    shapes = list(zip(map(len, orders), map(len, available), strict=True))
    if len(set(shapes)) == 1:
        return _visits(orders, available, batch_size, draws)
    batches: list[NDArray[np.intp]] = [np.empty((0, 0), np.intp)] * len(orders)
    for shape in sorted(set(shapes)):
        clients = [client for client, own in enumerate(shapes) if own == shape]
        steps = _visits(
            [orders[client] for client in clients],
            [available[client] for client in clients],
            batch_size,
            [draws[client] for client in clients],
        )
        for client, own in zip(clients, steps, strict=True):
            batches[client] = own
    return batches


def _visits(
    orders: Sequence[NDArray[np.intp]],
    available: Sequence[NDArray[np.int64]],
    batch_size: int,
    draws: Sequence[NDArray[np.float64]],
) -> NDArray[np.intp]:
    """:func:`visits` of clients with equally many samples and steps, ``(B, T, min(b, n))``."""
    rows, paces = side_by_side(orders), np.concatenate(available)
    samples = rows.shape[1]
    size = min(batch_size, samples)
    if ((paces < size) | (paces > samples)).any():
        raise ValueError(f"g(t) must lie between {size} and {samples}")
    steps = len(available[0])
    ranks = _ranks(paces, size, draws).reshape(len(rows), steps * size)
    return np.take_along_axis(rows, ranks, 1).reshape(len(rows), steps, size)


def _ranks(available: NDArray[np.int64], size: int, draws: Sequence[NDArray[np.float64]]) -> NDArray[np.intp]:
    """For every step ``size`` different numbers below ``g(t)``, ``(T, size)``.

    Floyd's sampling, all steps at once: the j-th draw is among the first g - size + j + 1 positions; if it
    was drawn already, the last of these positions is taken instead.
    """
    numbers = np.concatenate(draws).reshape(len(available), size)
    chosen = np.empty((len(available), size), np.intp)
    for j in range(size):
        last = available - size + j
        pick = np.floor(numbers[:, j] * (last + 1)).astype(np.intp)
        taken = (chosen[:, :j] == pick[:, None]).any(axis=1)
        chosen[:, j] = np.where(taken, last, pick)
    return chosen


def eligible(losses: Sequence[float] | NDArray[np.floating], count: int, order: Order) -> NDArray[np.intp]:
    """Client curriculum (section 2.6): the first ``count`` clients of the ranking by mean loss, ascending.

    Args:
        losses: mean loss of each client ``(N,)``; a higher loss means a lower score.
        count: how many the pacing over rounds allows.
        order: ``curriculum`` from the lowest loss, ``anti`` from the highest.

    Raises:
        ValueError: for any other order, including ``random``, which ranks nothing.
    """
    if order not in ("curriculum", "anti"):
        raise ValueError(f"order: {order!r} is not one of curriculum, anti")
    values = np.asarray(losses, np.float64)
    ranking = np.argsort(values if order == "curriculum" else -values, kind="stable")
    return np.sort(ranking[:count])
