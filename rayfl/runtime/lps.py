"""The local parameter server (LPS): reduces the partial products of its clusters, by reference.

Importing this module must stay cheap: an LPS actor needs NumPy, and neither torch nor anything built on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rayfl.training import Segments


@dataclass(frozen=True)
class Partial:
    """A part of one row of ``A W``: ``total = sum_j a_j w_j`` over a block, and ``weight = sum_j a_j``.

    ``total`` covers the shared (not personal) numbers of the model, in float64: with whole-number weights
    the sums are exact to 2^-53, so how clients are grouped does not show in the float32 result.
    """

    total: NDArray[np.float64]
    weight: float


class LocalServer:
    """Keeps nothing between calls, so a lost one is simply started again."""

    def reduce(
        self, shared: Segments, common: Segments, model: NDArray[np.float32], *partials: Partial
    ) -> tuple[NDArray[np.float32], Partial]:
        """One row of ``A W``: the next model of a cluster.

        Args:
            shared: the ranges of the model that the partials cover.
            common: the ranges that the GPS will average over clusters; within ``shared``.
            model: the current model ``(P,)``; kept where nothing arrived.
            partials: the blocks' parts, summed in this order whatever the order of arrival.

        Returns:
            The new model ``(P,)`` float32; and for the GPS the *sum* over the common ranges with its weight,
            so that averaging averages rounds only once.
        """
        weight = sum(p.weight for p in partials)
        new = np.array(model, dtype=np.float32)
        if weight == 0:
            return new, Partial(np.zeros(_length(common)), 0.0)
        total = np.zeros(len(partials[0].total))
        for partial in partials:
            total += partial.total
        _put(new, shared, (total / weight).astype(np.float32))
        full = np.zeros(len(model)) if common else total
        if common:
            _put(full, shared, total)
        return new, Partial(_take(full, common), weight)

    def install(
        self, common: Segments, model: NDArray[np.float32], values: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The GPS broadcasts the common layers: put them into a cluster's model."""
        new = np.array(model)
        _put(new, common, values)
        return new


def merge(partials: list[Partial]) -> NDArray[np.float32] | None:
    """The GPS's step: the common layers averaged over the clusters by the weight that took part in each.

    Returns:
        ``(C,)`` float32, or None if no cluster delivered anything.
    """
    weight = sum(p.weight for p in partials)
    if weight == 0:
        return None
    total = np.zeros(len(partials[0].total))
    for partial in partials:
        total += partial.total
    return (total / weight).astype(np.float32)


def _length(segments: Segments) -> int:
    return sum(b - a for a, b in segments)


def _put(vector: NDArray[np.floating], segments: Segments, values: NDArray[np.floating]) -> None:
    at = 0
    for a, b in segments:
        vector[a:b] = values[at : at + b - a]
        at += b - a


def _take(vector: NDArray[np.float64], segments: Segments) -> NDArray[np.float64]:
    return np.concatenate([vector[a:b] for a, b in segments]) if segments else vector[:0]
