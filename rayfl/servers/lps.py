"""The local parameter server (LPS): reduces what the clients of its clusters sent, by reference.

Importing this module must stay cheap: an LPS actor needs NumPy, and neither torch nor anything built on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayfl.backend import Answer, Key, Objects
from rayfl.clients.partial import Partial, Vector, Weight, summed
from rayfl.server_step import Averaged, ServerStep

if TYPE_CHECKING:
    from rayfl.training import Segments


_PIECE = 4096
"""Columns of a product that are computed at a time, so that the sums stay in the cache."""


@dataclass(frozen=True)
class Reduced:
    """What the GPS is told about a reduced row.

    Attributes:
        common: the sum over the common layers and its weight; parameters of weight 0 are taken from the
            model.
        weight: the weight that took part in the row: one number, or one for each parameter ``(P,)``.
        moved: how far the model moved; running statistics are no part of the way.
    """

    common: Partial
    weight: Weight
    moved: float


MODEL: Key = ("model", 0)
"""The model of an LPS ``(P,)``; where there are several, ``("model", k)``."""

FACTS: Key = ("facts", 0)
"""What the GPS may be told: a :class:`Reduced` by the number of its row."""

VECTOR: Key = ("vector", 0)
"""The vector of the local objective that belongs to a model ``(Q,)``."""

VALUES: Key = ("values", 0)
"""What the GPS sends back."""


@dataclass(frozen=True)
class Optimizer:
    """The method's server step for some models.

    Attributes:
        step: what it does.
        clients: how many clients of each model took part ``(R,)``.
        members: how many clients each model has ``(R,)``.
    """

    step: ServerStep
    clients: NDArray[np.int64]
    members: NDArray[np.int64]


@dataclass(frozen=True)
class ReduceJob:
    """One row of ``A W``: the next :data:`MODEL` of a cluster, from partial sums.

    It is sent with the current model, which is kept where nothing arrived; the partial sums of the blocks
    ``("sum", block)``, each a :class:`~rayfl.clients.partial.Partial`; the :data:`VECTOR`, if there is one;
    and the memory ``("memory", 0)`` of a server step, once there is one.

    Attributes:
        model: the number of the row.
        shared: the ranges of the model that the partial sums cover.
        common: the ranges that the GPS will average over clusters; within ``shared``.
        still: parts that no block has sent.
        members: how many clients the model has, if there is a vector; else None.
        optimizer: the server step, if any.
    """

    model: int
    shared: Segments
    common: Segments
    still: tuple[Partial, ...] = ()
    members: int | None = None
    optimizer: Optimizer | None = None


@dataclass(frozen=True)
class CombineJob:
    """Several rows of ``A W`` from the trained models themselves, used if these are fewer than the sums.

    It is sent with the current models ``("model", k)``, the blocks' trained rows ``("rows", block)``
    ``(B, S)``, and the memories ``("memory", k)`` of a server step.

    Attributes:
        shared, common: as for :class:`ReduceJob`.
        models: the numbers of the rows ``(R,)``.
        blocks: the numbers of the blocks that take part.
        weights: for each block its part of A, ``(R, B)``.
        kept: for each block the weight of the old models that its clients keep ``(R, B)``; None for none.
        keep: the total weight of the old models ``(R,)``.
        statistics: how many entries at the end are running statistics, see
            :class:`~rayfl.clients.partial.Partial`.
        optimizer: the server step, if any.
    """

    shared: Segments
    common: Segments
    models: tuple[int, ...]
    blocks: tuple[int, ...]
    weights: Sequence[NDArray[np.float64]]
    kept: Sequence[NDArray[np.float64]] | None
    keep: NDArray[np.float64]
    statistics: int
    optimizer: Optimizer | None = None


class LocalServer:
    """Keeps nothing between calls, so a lost one is simply started again."""

    def reduce(self, job: ReduceJob, objects: Objects) -> Answer:
        """See :class:`ReduceJob`."""
        model = objects[MODEL]
        partials = [value for (kind, _), value in objects.items() if kind == "sum"]
        row = reduced_row(job.shared, [*partials, *job.still])
        new, fact, memory = _next(job, model, row, _own_step(job.optimizer, objects, 0, 0))
        found: dict[Key, Any] = {MODEL: new, FACTS: {job.model: fact}, ("memory", 0): memory}
        if job.members is not None:
            found[VECTOR] = accumulated(objects[VECTOR], job.members, partials)
        return Answer(None, found)

    def combine(self, job: CombineJob, objects: Objects) -> Answer:
        """See :class:`CombineJob`."""
        rows = combined_rows(job, [objects["rows", block] for block in job.blocks])
        found: dict[Key, Any] = {}
        facts: dict[int, Reduced] = {}
        for place, (k, row) in enumerate(zip(job.models, rows, strict=True)):
            step = _own_step(job.optimizer, objects, place, k)
            found["model", k], facts[k], found["memory", k] = _next(job, objects["model", k], row, step)
        return Answer(None, {**found, FACTS: facts})

    def upload(self, common: Segments, objects: Objects) -> Answer:
        """What an LPS sends to the GPS in a round in which it has trained nothing: its model's parameters."""
        return Answer(None, {VALUES: Partial(_take(objects[MODEL].astype(np.float64), common), 0.0)})

    def install(self, common: Segments, objects: Objects) -> Answer:
        """Put the common layers that the GPS broadcasts into a cluster's model."""
        new, values = np.array(objects[MODEL]), objects[VALUES]
        old = _take(objects[MODEL], common)
        _put(new, common, np.where(np.isnan(values), old, values))  # NaN: no client kept this parameter
        return Answer(None, {MODEL: new})


@dataclass(frozen=True)
class Row:
    """The sums of a row of ``A W``.

    Attributes:
        total: ``sum_j a_j w_j`` ``(S,)``; of running statistics see
            :class:`~rayfl.clients.partial.Partial`.
        weight: ``sum_j a_j``, one number or one for each parameter.
        keep: the weight of the old model.
        kept_statistics: the part of it that counts for running statistics.
        statistics: how many entries at the end are running statistics.
    """

    total: NDArray[np.float64]
    weight: Weight
    keep: float
    kept_statistics: float
    statistics: int


def reduced_row(shared: Segments, partials: Sequence[Partial]) -> Row:
    """A row from the blocks' parts, summed in this order regardless of the order of arrival."""
    total, weight = summed([p.total for p in partials]), _weight(partials)
    last = partials[0].statistics
    keep = sum(p.keep for p in partials)
    clients = sum(p.keep for p in partials if p.statistics)
    scale = math.prod(p.scale for p in partials)
    if scale != 1:
        rest = float(weight) * (1 - scale)  # a scalar: no client leaves parameters out
        keep, clients, weight = keep + rest, clients + rest, weight * scale
        total[: len(total) - last] *= scale
    return Row(total, weight, keep, keep - clients, last)


def combined_rows(job: CombineJob, blocks: Sequence[NDArray[np.float32]]) -> list[Row]:
    """The rows of a job from the trained rows of its blocks, each ``(B, S)``."""
    count = len(job.models)
    total, clients = np.zeros((count, _length(job.shared))), np.zeros(count)
    counted, rows = _delivered(job.weights, blocks)
    end = total.shape[1] - (job.statistics if job.kept is not None else 0)
    for first in range(0, end, _PIECE):
        piece = slice(first, min(first + _PIECE, end))
        total[:, piece] = counted @ _columns(rows, piece)
    weight = counted.sum(axis=1)
    if job.kept is not None and job.statistics:
        both = [w + k for w, k in zip(job.weights, job.kept, strict=True)]
        counts, rows = _delivered(both, blocks, job.weights)
        total[:, end:] = counts @ _columns(rows, slice(end, None))
        clients = sum((k.sum(axis=1) for k in job.kept), clients)
    return [
        Row(total[r], float(weight[r]), float(job.keep[r]), float(job.keep[r] - clients[r]), job.statistics)
        for r in range(count)
    ]


def accumulated(
    vector: NDArray[np.float32], members: int, partials: Sequence[Partial]
) -> NDArray[np.float32]:
    """The server's vector ``(Q,)`` for a model: ``c + (sum over the cohort) / members`` (SCAFFOLD)."""
    extras = [partial.extra for partial in partials if partial.extra is not None]
    assert len(extras) == len(partials)
    new: NDArray[np.float32] = (vector + summed(extras) / max(1, members)).astype(np.float32)
    return new


def _delivered(
    weights: Sequence[NDArray[np.float64]],
    blocks: Sequence[NDArray[np.float32]],
    by: Sequence[NDArray[np.float64]] | None = None,
) -> tuple[NDArray[np.float64], list[NDArray[np.float32]]]:
    """Weights ``(R, m)`` and rows of the clients with a nonzero weight (selected by ``by`` if given). Rows of
    failed clients may contain NaN and are dropped, since 0 * NaN is NaN.
    """
    used = [part.any(axis=0) for part in by or weights]
    counted = np.concatenate([part[:, u] for part, u in zip(weights, used, strict=True)], axis=1)
    return counted, [rows[i] for rows, u in zip(blocks, used, strict=True) for i in np.flatnonzero(u)]


def _columns(rows: Sequence[NDArray[np.float32]], piece: slice) -> NDArray[np.float64]:
    """Some columns of all rows, in double precision ``(m, ...)``."""
    return np.stack([row[piece] for row in rows]).astype(np.float64) if rows else np.zeros((0, 1))


class _OwnStep(NamedTuple):
    """A server step for one model: number of participants, number of members, and its memory ``(V, n)``."""

    step: ServerStep
    clients: int
    members: int
    memory: NDArray[np.float64] | None


def _own_step(optimizer: Optimizer | None, objects: Objects, place: int, model: int) -> _OwnStep | None:
    if optimizer is None:
        return None
    clients, members = int(optimizer.clients[place]), int(optimizer.members[place])
    return _OwnStep(optimizer.step, clients, members, objects.get(("memory", model)))


def _next(
    job: ReduceJob | CombineJob, model: NDArray[np.float32], row: Row, own: _OwnStep | None
) -> tuple[NDArray[np.float32], Reduced, NDArray[np.float64] | None]:
    """The new model from the sums of its row, and the memory of a server step; parameters of weight zero keep
    their value.
    """
    shared, common, total, weight = job.shared, job.common, row.total, row.weight
    memory = None if own is None else _kept(own, len(total) - row.statistics)
    new = np.array(model, dtype=np.float32)
    if not np.any(weight):
        return new, Reduced(Partial(_take(model.astype(np.float64), common), 0.0), 0.0, 0.0), memory
    if row.keep:
        counts: Weight = row.keep
        if row.statistics and row.kept_statistics != row.keep:
            counts = np.full(len(total), row.keep)
            counts[-row.statistics :] = row.kept_statistics
        total = total + counts * _take(model.astype(np.float64), shared)
        weight = weight + row.keep
    if isinstance(weight, np.ndarray):
        averages = _take(model.astype(np.float64), shared)
        np.divide(total, weight, out=averages, where=weight > 0)
    else:
        averages = total / weight
    if own is not None:
        averages, memory = _stepped(own, _take(model.astype(np.float64), shared), averages, row.statistics)
        total = averages * weight
    _put(new, shared, averages)
    way = _take(np.subtract(new, model, dtype=np.float64), shared)
    moved = float(np.linalg.norm(way[: len(way) - row.statistics]))
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
    return new, Reduced(Partial(total if common else total[:0], sent), weight, moved), memory


def _kept(own: _OwnStep, n: int) -> NDArray[np.float64]:
    """The memory of a server step ``(V, n)``, or its initial value."""
    if own.memory is not None:
        return own.memory
    return np.repeat(np.array(list(own.step.vectors().values()), np.float64)[:, None], n, axis=1)


def _stepped(
    own: _OwnStep, old: NDArray[np.float64], averages: NDArray[np.float64], statistics: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The parameters after the server step, and its memory; running statistics, at the end, are plain
    averages.
    """
    n = len(old) - statistics
    start, memory = own.step.vectors(), _kept(own, n)
    averaged = Averaged(old[:n], averages[:n], own.clients, own.members)
    stepped, vectors = own.step.apply(averaged, dict(zip(start, memory, strict=True)))
    kept = np.stack([vectors[name] for name in start]) if start else np.empty((0, n))
    return np.concatenate([stepped, averages[n:]]), kept


def merge(partials: Sequence[Partial], weights: Sequence[Weight]) -> NDArray[np.float32] | None:
    """The GPS's step: the common layers averaged over LPSs.

    Args:
        partials: what the LPSs sent; sums of this round, or, if the weight is 0, the models themselves.
        weights: of the LPSs in the average: one number, or one for each parameter ``(C,)``. If the weight of
            an LPS equals the weight of its sum, the sum is added as it is, so that the result is rounded
            once.

    Returns:
        ``(C,)`` float32, or None if no LPS has any weight. Parameters of weight 0 are NaN.
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
    if len(segments) == 1:  # without a copy: for a large model every pass over the parameters takes time
        return vector[slice(*segments[0])]
    return np.concatenate([vector[a:b] for a, b in segments]) if segments else vector[:0]
