"""The local parameter server (LPS): reduces what its clusters' clients sent, by reference.

Importing this module must stay cheap: an LPS actor needs NumPy, and neither torch nor anything built on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rayfl.clients.partial import Partial, Vector, Weight, summed

if TYPE_CHECKING:
    from rayfl.training import Segments


_PIECE = 4096
"""Columns of a product that are made at once, so that what is added up stays in the cache."""


@dataclass(frozen=True)
class Reduced:
    """What the GPS learns of a reduced row.

    Attributes:
        common: the sum over the common layers and its weight; numbers of weight 0 are the model's own.
        weight: what took part in the row: of all numbers, or of each in the model ``(P,)``.
        moved: how far the model moved; running statistics are no part of the way.
    """

    common: Partial
    weight: Weight
    moved: float


class LocalServer:
    """Keeps nothing between calls, so a lost one is simply started again."""

    def reduce(
        self, shared: Segments, common: Segments, model: NDArray[np.float32], *partials: Partial
    ) -> tuple[NDArray[np.float32], Reduced]:
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
        total, weight = summed([p.total for p in partials]), _weight(partials)
        last = partials[0].statistics
        keep = sum(p.keep for p in partials)
        clients = sum(p.keep for p in partials if p.statistics)
        scale = math.prod(p.scale for p in partials)
        if scale != 1:
            rest = float(weight) * (1 - scale)  # a single number: no client leaves parameters out
            keep, clients, weight = keep + rest, clients + rest, weight * scale
            total[: len(total) - last] *= scale
        return _next(shared, common, model, total, weight, _old(total, last, keep, clients), last)

    def combine(
        self,
        shared: Segments,
        common: Segments,
        weights: Sequence[NDArray[np.float64]],
        kept: Sequence[NDArray[np.float64]] | None,
        keep: NDArray[np.float64],
        statistics: int,
        models: int,
        *objects: NDArray[np.float32],
    ) -> list[Any]:
        """Several rows of ``A W`` from the trained models themselves, where those are fewer than the sums.

        Args:
            shared, common: as for :meth:`reduce`.
            weights: for each block its part of A, ``(R, B)``.
            kept: for each block how much of the old models its clients leave in place ``(R, B)``; None for
                nothing.
            keep: the weight of the old models in all ``(R,)``.
            statistics: how many of the last numbers are running statistics, see :class:`Partial`.
            models: R; the first so many objects are the old models ``(P,)``,
            objects: and the rest the blocks' trained rows ``(B, S)``.

        Returns:
            R new models, then the list of their :class:`Reduced`.
        """
        old, blocks = objects[:models], objects[models:]
        total, clients = np.zeros((models, _length(shared))), np.zeros(models)
        counted, rows = _delivered(weights, blocks)
        end = total.shape[1] - (statistics if kept is not None else 0)
        for first in range(0, end, _PIECE):
            piece = slice(first, min(first + _PIECE, end))
            total[:, piece] = counted @ _columns(rows, piece)
        weight = counted.sum(axis=1)
        if kept is not None and statistics:
            counts, rows = _delivered([w + k for w, k in zip(weights, kept, strict=True)], blocks, weights)
            total[:, end:] = counts @ _columns(rows, slice(end, None))
            clients = sum((k.sum(axis=1) for k in kept), clients)
        parts = []
        for r in range(models):
            old_weight = _old(total[r], statistics, float(keep[r]), float(clients[r]))
            row = shared, common, old[r], total[r], float(weight[r]), old_weight, statistics
            parts.append(_next(*row))
        return [*(new for new, _ in parts), [reduced for _, reduced in parts]]

    def accumulate(
        self, vector: NDArray[np.float32], members: int, *partials: Partial
    ) -> NDArray[np.float32]:
        """The server's own vector beside a model: ``c + (sum over the cohort) / members`` (SCAFFOLD)."""
        extras = [partial.extra for partial in partials if partial.extra is not None]
        assert len(extras) == len(partials)
        total = summed(extras)
        new: NDArray[np.float32] = (vector + total / max(1, members)).astype(np.float32)
        return new

    def upload(self, common: Segments, model: NDArray[np.float32]) -> Partial:
        """What an LPS sends to the GPS in a round in which it has trained nothing: its model's numbers."""
        return Partial(_take(model.astype(np.float64), common), 0.0)

    def install(
        self, common: Segments, model: NDArray[np.float32], values: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The GPS broadcasts the common layers: put them into a cluster's model."""
        new, old = np.array(model), _take(model, common)
        _put(new, common, np.where(np.isnan(values), old, values))  # NaN: nobody kept this number
        return new


def _delivered(
    weights: Sequence[NDArray[np.float64]],
    blocks: Sequence[NDArray[np.float32]],
    by: Sequence[NDArray[np.float64]] | None = None,
) -> tuple[NDArray[np.float64], list[NDArray[np.float32]]]:
    """Weights ``(R, m)`` and rows of the m clients that count (``by`` whom, if not by these weights): one
    that failed may hold anything, NaN too, of which not even nothing may be taken."""
    used = [part.any(axis=0) for part in by or weights]
    counted = np.concatenate([part[:, u] for part, u in zip(weights, used, strict=True)], axis=1)
    return counted, [rows[i] for rows, u in zip(blocks, used, strict=True) for i in np.flatnonzero(u)]


def _columns(rows: Sequence[NDArray[np.float32]], piece: slice) -> NDArray[np.float64]:
    """Some columns of all rows, in double precision ``(m, ...)``."""
    return np.stack([row[piece] for row in rows]).astype(np.float64) if rows else np.zeros((0, 1))


@dataclass(frozen=True)
class _Old:
    """How much of the old model stays: ``weight`` in the denominator, ``counts`` of each number ``(S,)``."""

    weight: float
    counts: Weight


def _old(total: NDArray[np.float64], statistics: int, keep: float, clients: float) -> _Old:
    """Of ``keep`` the part of the ``clients`` is in the total of the running statistics already."""
    if not (statistics and clients):
        return _Old(keep, keep)
    counts = np.full(len(total), keep)
    counts[-statistics:] -= clients
    return _Old(keep, counts)


def _next(
    shared: Segments,
    common: Segments,
    model: NDArray[np.float32],
    total: NDArray[np.float64],
    weight: Weight,
    old: _Old,
    statistics: int,
) -> tuple[NDArray[np.float32], Reduced]:
    """The new model from the sums of its row; where the weight is zero the old numbers stay."""
    new = np.array(model, dtype=np.float32)
    if not np.any(weight):
        return new, Reduced(Partial(_take(model.astype(np.float64), common), 0.0), 0.0, 0.0)
    if old.weight:
        total = total + old.counts * _take(model.astype(np.float64), shared)
        weight = weight + old.weight
    if isinstance(weight, np.ndarray):
        averages = _take(model.astype(np.float64), shared)
        np.divide(total, weight, out=averages, where=weight > 0)
    else:
        averages = total / weight
    _put(new, shared, averages.astype(np.float32))
    way = _take(new.astype(np.float64) - model, shared)
    moved = float(np.linalg.norm(way[: len(way) - statistics]))
    sent = weight
    if isinstance(weight, np.ndarray):
        total, kept = np.where(weight > 0, total, averages), weight
        weight = np.zeros(len(model))
        _put(weight, shared, kept)
        sent = _take(weight, common)
    if common:
        full = model.astype(np.float64)
        _put(full, shared, total)
        total = _take(full, common)
    return new, Reduced(Partial(total if common else total[:0], sent), weight, moved)


def merge(partials: Sequence[Partial], weights: Sequence[Weight]) -> NDArray[np.float32] | None:
    """The GPS's step: the common layers averaged over LPSs.

    Args:
        partials: what the LPSs sent; sums of this round, or where their weight is 0 the models themselves.
        weights: of the LPSs in the average, of all numbers or of each ``(C,)``. Where an LPS counts with the
            weight that took part in this round, its sum enters as it is: the average rounds only once.

    Returns:
        ``(C,)`` float32, or None if no LPS has any weight. A number of weight 0 is NaN.
    """
    whole = sum(weights)
    if not np.any(whole):
        return None
    totals: list[Vector] = []
    for partial, weight in zip(partials, weights, strict=True):
        wanted, own = np.broadcast_arrays(np.asarray(weight, np.float64), partial.weight)
        scale = np.divide(wanted, own, out=wanted.copy(), where=own != 0)
        totals.append(summed([partial.total]) * scale)
    with np.errstate(invalid="ignore"):
        return (summed(totals) / whole).astype(np.float32)


def _weight(partials: Sequence[Partial]) -> Weight:
    weight: Weight = 0.0
    for partial in partials:
        weight = weight + partial.weight
    return weight


def _length(segments: Segments) -> int:
    return sum(b - a for a, b in segments)


def _put(vector: NDArray[np.floating], segments: Segments, values: NDArray[np.floating]) -> None:
    at = 0
    for a, b in segments:
        vector[a:b] = values[at : at + b - a]
        at += b - a


def _take(vector: NDArray[Any], segments: Segments) -> NDArray[Any]:
    return np.concatenate([vector[a:b] for a, b in segments]) if segments else vector[:0]
