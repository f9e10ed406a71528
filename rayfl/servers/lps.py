"""The local parameter server (LPS): reduces what the clients of its clusters sent, by reference.

Importing this module must stay cheap: an LPS actor needs NumPy, but not torch or anything built on it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayfl.backend import Answer, Key, Objects
from rayfl.clients.partial import (
    LARGE,
    PIECE,
    Partial,
    Weight,
    added,
    joined,
    joined_weight,
    sum_piece,
    summed,
)
from rayfl.errors import ConfigError, type_of
from rayfl.server_step import Averaged, ServerStep

if TYPE_CHECKING:
    from rayfl.aggregation import Aggregation
    from rayfl.clients.ranges import Ranges
    from rayfl.training import Segments


_COLUMNS = 4096
"""Columns of a product with trained rows that are computed at a time."""

_THREADS = 4
"""Maximum threads that compute the pieces of a large model; with more, memory is the bottleneck."""


@dataclass(frozen=True)
class Reduced:
    """What the GPS learns about a reduced row, or a shard of one.

    Attributes:
        common: the sums of the common layers and their weight; with weight 0, the model's own parameters.
        weight: the total weight in the row: one number for all parameters, or one for each ``(P,)``.
        squares: the squared norm of each piece of the model's update, without running statistics; NaN if it
            was not needed.
    """

    common: Partial
    weight: Weight
    squares: NDArray[np.float64]

    @property
    def update_norm(self) -> float:
        """The norm of the model's update. The shards do not affect it, since ``fsum`` rounds once."""
        return math.sqrt(math.fsum(self.squares.tolist()))

    @classmethod
    def joined(cls, shards: Sequence[Reduced], ranges: Ranges) -> Reduced:
        """Combine the results for the shards of a row into the result for the row."""
        if len(shards) == 1:
            return shards[0]
        weight = joined_weight(
            [shard.weight for shard in shards], [place.stop - place.start for place in ranges]
        )
        common = joined([shard.common for shard in shards])
        return cls(common, weight, np.concatenate([shard.squares for shard in shards]))


MODEL: Key = ("model", 0)
"""The model of an LPS ``(P,)``; where there are several, ``("model", k)``."""

FACTS: Key = ("facts", 0)
"""What the GPS may learn: a :class:`Reduced` for each row number."""

VECTOR: Key = ("vector", 0)
"""The vector of the local objective that belongs to a model ``(Q,)``."""

VALUES: Key = ("values", 0)
"""Parameters of common layers, on the way to the GPS or back."""

SUM: Key = ("sum", 0)
"""The sum of several blocks' partial sums."""


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

    If models are sharded, the job covers one shard as if it were the whole model; ranges count from the start
    of the shard.

    It is sent with the current model, which is kept where nothing arrived; the partial sums of the blocks
    ``("sum", block)``, each a :class:`~rayfl.clients.partial.Partial`; the :data:`VECTOR`, if there is one;
    and the memory ``("memory", 0)`` of a server step, once there is one.

    Attributes:
        model: the number of the row.
        shared: the ranges of the model that the partial sums cover.
        common: the ranges that the GPS will average over clusters; within ``shared``.
        still: further partial sums that no block has sent (for absent or failed clients).
        members: how many clients the model has, if there is a vector; else None.
        optimizer: the server step, if any.
        needs_norm: whether the GPS needs the norm of the model's update.
        updates: whether the sums are of updates, which are added to the old model.
    """

    model: int
    shared: Segments
    common: Segments
    still: tuple[Partial, ...] = ()
    members: int | None = None
    optimizer: Optimizer | None = None
    needs_norm: bool = True
    updates: bool = False


@dataclass(frozen=True)
class CombineJob:
    """Several rows of ``A W`` from the trained models themselves, or the same shard of each row. Used if
    there are fewer trained models than sums, or if an aggregation rule is used.

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
        needs_norm, updates: as for :class:`ReduceJob`.
        rule: the aggregation rule; None for the weighted mean.
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
    needs_norm: bool = True
    updates: bool = False
    rule: Aggregation | None = None


class LocalServer:
    """The LPS actor. It keeps no state between calls, so a lost actor can be started again."""

    def add(self, job: None, objects: Objects) -> Answer:
        """The :data:`SUM` of the blocks' parts ``("sum", block)``, added in this order."""
        return Answer(None, {SUM: added(list(objects.values()))})

    def reduce(self, job: ReduceJob, objects: Objects) -> Answer:
        """See :class:`ReduceJob`."""
        partials = [value for (kind, _), value in objects.items() if kind == "sum"]
        row = reduced_row([*partials, *job.still], _length(job.shared))
        next_model = _NextModel(
            job, objects[MODEL], row, _model_step(job.optimizer, objects, 0, job.model, 0)
        )

        def take(number: int, place: slice) -> None:
            next_model.take(place, row.piece(number, place))

        if next_model.trained:
            every_piece(row.size, take)
        new, fact, memory = next_model.done()
        outputs: dict[Key, Any] = {MODEL: new, FACTS: {job.model: fact}, ("memory", 0): memory}
        if job.members is not None:
            outputs[VECTOR] = accumulated(objects[VECTOR], job.members, partials)
        return Answer(None, outputs)

    def combine(self, job: CombineJob, objects: Objects) -> Answer:
        """See :class:`CombineJob`."""
        blocks = [objects["rows", block] for block in job.blocks]
        if job.rule is not None:
            return self._by_rule(job, job.rule, objects, blocks)
        product = _ProductRows(job, blocks)
        models = [
            _NextModel(job, objects["model", k], row, _model_step(job.optimizer, objects, place, k, k))
            for place, (k, row) in enumerate(zip(job.models, product.rows(), strict=True))
        ]

        def take(number: int, place: slice) -> None:
            for total, model in zip(product.piece(place), models, strict=True):
                if model.trained:
                    model.take(place, total)

        every_place(_places(job.shared), take)
        return self._answer(job, models)

    def _by_rule(
        self, job: CombineJob, rule: Aggregation, objects: Objects, blocks: Sequence[NDArray[np.float32]]
    ) -> Answer:
        """As :meth:`combine`, by an aggregation rule: one model at a time, so that few rows are in memory."""
        models = []
        for index, k in enumerate(job.models):
            old = objects["model", k]
            ruled = _RuledRow(job, rule, [part[[index]] for part in job.weights], blocks, old)
            model = _NextModel(job, old, ruled.row, _model_step(job.optimizer, objects, index, k, k))

            def put(number: int, piece: slice, ruled: _RuledRow = ruled, model: _NextModel = model) -> None:
                model.put(piece, ruled.piece(piece))

            if model.trained:
                every_place(_places(job.shared), put)
            models.append(model)
        return self._answer(job, models)

    def _answer(self, job: CombineJob, models: Sequence[_NextModel]) -> Answer:
        outputs: dict[Key, Any] = {}
        facts: dict[int, Reduced] = {}
        for k, model in zip(job.models, models, strict=True):
            outputs["model", k], facts[k], outputs["memory", k] = model.done()
        return Answer(None, {**outputs, FACTS: facts})

    def upload(self, common: Segments, objects: Objects) -> Answer:
        """What an LPS sends to the GPS in a round in which it has trained nothing: its model's parameters."""
        return Answer(None, {VALUES: Partial(_take_segments(objects[MODEL].astype(np.float64), common), 0.0)})

    def install(self, common: Segments, objects: Objects) -> Answer:
        """Put the common layers that the GPS broadcasts into a cluster's model."""
        new, values = np.array(objects[MODEL]), objects[VALUES]
        old = _take_segments(objects[MODEL], common)
        # NaN: no client kept this parameter
        _put_segments(new, common, np.where(np.isnan(values), old, values))
        return Answer(None, {MODEL: new})


@dataclass(frozen=True)
class Row:
    """A row of ``A W``, whose sums ``sum_j a_j w_j`` ``(S,)`` come in pieces.

    Attributes:
        weight: ``sum_j a_j``, one number for all parameters or one for each.
        keep: the weight of the old model.
        kept_statistics: the part of ``keep`` that counts for running statistics, see
            :class:`~rayfl.clients.partial.Partial`.
        statistics: number of running statistics, at the end of the row.
        trained: whether any client contributes to the row (for a shard: to any shard of the row).
    """

    weight: Weight
    keep: float
    kept_statistics: float
    statistics: int
    trained: bool


@dataclass(frozen=True)
class _SummedRow(Row):
    """A row from the blocks' partial sums, added in this order, not in the order of arrival; all except the
    running statistics are multiplied by ``scale``."""

    partials: Sequence[Partial]
    scale: float
    size: int

    def piece(self, number: int, place: slice) -> NDArray[np.float64]:
        """The sums at a place."""
        total = np.empty(place.stop - place.start)
        sum_piece(total, self.partials, number)
        if self.scale != 1:
            total[: max(0, self.size - self.statistics - place.start)] *= self.scale
        return total


def reduced_row(partials: Sequence[Partial], size: int) -> _SummedRow:
    """A row of ``size`` numbers from the blocks' partial sums."""
    weight: Weight = 0.0
    for partial in partials:
        weight = weight + partial.weight
    keep = sum(p.keep for p in partials)
    clients = sum(p.keep for p in partials if p.statistics)
    scale = math.prod(p.scale for p in partials)
    if scale != 1:
        rest = float(weight) * (1 - scale)  # a scalar: no client leaves parameters out
        keep, clients, weight = keep + rest, clients + rest, weight * scale
    trained = bool(np.any(weight)) or any(partial.elsewhere for partial in partials)
    return _SummedRow(weight, keep, keep - clients, partials[0].statistics, trained, partials, scale, size)


class _ProductRows:
    """Rows of ``A W`` from the trained rows of their blocks, each ``(B, S)``."""

    def __init__(self, job: CombineJob, blocks: Sequence[NDArray[np.float32]]) -> None:
        self._job = job
        self._weights, self._rows = _nonzero_rows(job.weights, blocks)
        count = len(job.models)
        # Running statistics have other weights.
        self._statistic_sums: NDArray[np.float64] = np.zeros((count, 0))
        self._clients_keep: NDArray[np.float64] = np.zeros(count)
        if job.kept is not None and job.statistics:
            total_weights = [w + k for w, k in zip(job.weights, job.kept, strict=True)]
            counts, rows = _nonzero_rows(total_weights, blocks, job.weights)
            self._statistic_sums = counts @ _columns(rows, slice(_length(job.shared) - job.statistics, None))
            self._clients_keep = sum((k.sum(axis=1) for k in job.kept), self._clients_keep)
        self._statistics_start = _length(job.shared) - self._statistic_sums.shape[1]

    def rows(self) -> list[Row]:
        """The weights of the rows, which are known before the sums."""
        keep, statistics = self._job.keep, self._job.statistics
        return [
            Row(float(weight), float(kept), float(kept - clients_keep), statistics, bool(weight))
            for weight, kept, clients_keep in zip(
                self._weights.sum(axis=1), keep, self._clients_keep, strict=True
            )
        ]

    def piece(self, place: slice) -> NDArray[np.float64]:
        """The sums of all rows at a place ``(R, ...)``."""
        total = np.empty((len(self._job.models), place.stop - place.start))
        for first in range(place.start, min(place.stop, self._statistics_start), _COLUMNS):
            last = min(first + _COLUMNS, place.stop, self._statistics_start)
            product = self._weights @ _columns(self._rows, slice(first, last))
            total[:, first - place.start : last - place.start] = product
        if place.stop > self._statistics_start:
            first = max(place.start, self._statistics_start)
            total[:, first - place.start :] = self._statistic_sums[
                :, first - self._statistics_start : place.stop - self._statistics_start
            ]
        return total


class _RuledRow:
    """A row by an aggregation rule, from the trained rows of the clients that have a nonzero weight in it.

    Args:
        job: the job.
        rule: reduces the clients' rows.
        weights: for each block its part of this row of A, ``(1, B)``.
        blocks: their trained rows, each ``(B, S)``.
        model: the old model ``(P,)``.

    Attributes:
        row: its weight, known before the parameters; at the GPS the total weight of the clients counts.
    """

    def __init__(
        self,
        job: CombineJob,
        rule: Aggregation,
        weights: Sequence[NDArray[np.float64]],
        blocks: Sequence[NDArray[np.float32]],
        model: NDArray[np.float32],
    ) -> None:
        counted, self._rows = _nonzero_rows(weights, blocks)
        weight = float(counted.sum())
        self.row = Row(weight, 0.0, 0.0, job.statistics, bool(weight))
        self._rule, self._updates, self._old = rule, job.updates, _take_segments(model, job.shared)
        self._statistics_start = len(self._old) - job.statistics  # running statistics begin there
        self._weights, self._keep = counted[0], 0.0
        if rule.reweighs and len(self._weights):
            self._reweigh()

    def _reweigh(self) -> None:
        """The first stage of the rule: replace the weights, and keep only rows with a nonzero weight."""
        gram, weights = self._gram(), np.zeros(len(self._weights))
        finite = np.isfinite(gram.diagonal())
        finite &= np.isfinite(_columns(self._rows, slice(self._statistics_start, None))).all(axis=1)
        if not finite.any():  # the result is not finite, like that of a mean
            return
        reweighed = self._rule.reweigh(gram[np.ix_(finite, finite)], self._weights[finite])
        weights[finite], self._keep = _checked_weights(self._rule, reweighed, int(finite.sum()))
        used = np.flatnonzero(weights)
        row_views = [view[i : i + 1] for view in self._rows for i in range(len(view))]
        self._weights, self._rows = weights[used], [row_views[i] for i in used.tolist()]

    def _gram(self) -> NDArray[np.float64]:
        """Inner products of the updates ``(m, m)``, computed piece by piece with one thread per piece, so
        that the order of summation is the same on any machine.
        """
        from rayfl.linalg import one_thread  # deferred: it imports SciPy, which few rules need

        def of_piece(start: int) -> NDArray[np.float64]:
            total = np.zeros((len(self._weights), len(self._weights)))
            for part in _parts(slice(start, min(start + PIECE, self._statistics_start))):
                updates = _columns(self._rows, part)
                if not self._updates:
                    updates -= self._old[part]
                with np.errstate(over="ignore", invalid="ignore"):  # what clients send may not be finite
                    total += updates @ updates.T
            return total

        gram = np.zeros((len(self._weights), len(self._weights)))
        starts, together = range(0, self._statistics_start, PIECE), _thread_count(self._statistics_start)
        with one_thread(), ThreadPoolExecutor(together) as threads:
            for first in range(0, len(starts), together):  # so that few products wait to be added
                for product in threads.map(of_piece, starts[first : first + together]):
                    gram += product
        return gram

    def piece(self, place: slice) -> NDArray[np.float64]:
        """The new parameters at a place."""
        parameters = np.empty(place.stop - place.start)
        if not len(self._weights):  # the old model has all the weight
            parameters[:] = self._old[place]
            return parameters
        for part in _parts(place):
            parameters[part.start - place.start : part.stop - place.start] = self._combined(part)
        return parameters

    def _combined(self, place: slice) -> NDArray[np.float64]:
        values, old = _columns(self._rows, place), self._old[place].astype(np.float64)
        statistics = max(0, self._statistics_start - place.start)  # where they begin
        if self._updates:
            values[:, :statistics] += old[:statistics]
        least, most = _min_max(values[:, statistics:], old[statistics:])
        with np.errstate(over="ignore", invalid="ignore"):
            combined = np.array(self._rule.combine(values, self._weights, old))
        if combined.shape != old.shape or combined.dtype.kind != "f":
            what = f"returned {combined.dtype} {combined.shape}"
            raise ConfigError(f"{self._rule.name}.combine", what, f"expected an array of floats {old.shape}")
        if not np.isfinite(combined).all() and np.isfinite(values).all() and np.isfinite(old).all():
            what = "returned numbers that are not finite, of numbers that are"
            raise ConfigError(f"{self._rule.name}.combine", what)
        if self._keep:
            weight = float(self._weights.sum())
            combined = (weight * combined + self._keep * old) / (weight + self._keep)
        combined[statistics:] = np.clip(combined[statistics:], least, most)
        return combined


def _parts(place: slice) -> Iterator[slice]:
    """Cut a place into parts of at most :data:`_COLUMNS` columns."""
    for first in range(place.start, place.stop, _COLUMNS):
        yield slice(first, min(first + _COLUMNS, place.stop))


def _min_max(
    values: NDArray[np.float64], old: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The minimum and maximum of the clients' and the old values, ignoring NaN."""
    return np.fmin(np.fmin.reduce(values, axis=0), old), np.fmax(np.fmax.reduce(values, axis=0), old)


def _checked_weights(rule: Aggregation, returned: Any, count: int) -> tuple[NDArray[np.float64], float]:
    """Check what a rule's first stage returned: weights of ``count`` clients, and that of the old model.

    Raises:
        ConfigError: if these have another type or shape, or are no valid weights.
    """
    where, expected = f"{rule.name}.reweigh", f"expected weights ({count},) and that of the old model"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ConfigError(where, f"returned {type_of(returned)}", expected)
    try:
        weights, keep = np.asarray(returned[0], np.float64), float(returned[1] or 0.0)  # or None for nothing
    except (TypeError, ValueError):
        raise ConfigError(
            where, f"returned {type_of(returned[0])} and {type_of(returned[1])}", expected
        ) from None
    if weights.shape != (count,):
        raise ConfigError(where, f"returned weights of shape {weights.shape}", expected)
    total = float(weights.sum()) + keep
    if not (np.isfinite(total) and (weights >= 0).all() and keep >= 0 and total > 0):
        raise ConfigError(where, "returned weights that are negative, not finite, or all zero", expected)
    return weights, keep


def _thread_count(size: int) -> int:
    """How many threads work on a vector of this size."""
    return 1 if size < LARGE else min(_THREADS, os.cpu_count() or 1)


def every_piece(size: int, do: Callable[[int, slice], None]) -> None:
    """Call a function for each piece of a vector, in any order.

    Args:
        size: of the vector; if it is large, several threads are used (the client actors are idle meanwhile).
        do: called with the number and the place of each piece.
    """
    every_place([slice(start, min(start + PIECE, size)) for start in range(0, size, PIECE)], do)


def every_place(places: Sequence[slice], do: Callable[[int, slice], None]) -> None:
    """As :func:`every_piece`, for given places."""
    size = places[-1].stop if places else 0
    if size < LARGE:
        for number, place in enumerate(places):
            do(number, place)
        return
    with ThreadPoolExecutor(_thread_count(size)) as threads:
        list(threads.map(do, range(len(places)), places))


def accumulated(
    vector: NDArray[np.float32], members: int, partials: Sequence[Partial]
) -> NDArray[np.float32]:
    """The server's vector ``(Q,)`` for a model: ``c + (sum over the cohort) / members`` (SCAFFOLD)."""
    extras = [partial.extra for partial in partials if partial.extra is not None]
    assert len(extras) == len(partials)
    total = summed([Partial(extra, 0.0) for extra in extras])
    new: NDArray[np.float32] = (vector + total / max(1, members)).astype(np.float32)
    return new


def _nonzero_rows(
    weights: Sequence[NDArray[np.float64]],
    blocks: Sequence[NDArray[np.float32]],
    by: Sequence[NDArray[np.float64]] | None = None,
) -> tuple[NDArray[np.float64], list[NDArray[np.float32]]]:
    """Weights ``(R, m)`` and rows of the clients with a nonzero weight (selected by ``by`` if given). Rows of
    failed clients may contain NaN and are dropped, since 0 * NaN is NaN. The rows are views ``(n, S)``: one
    for each block that is used as a whole, otherwise one per row.
    """
    used = [part.any(axis=0) for part in by or weights]
    counted = np.concatenate([part[:, u] for part, u in zip(weights, used, strict=True)], axis=1)
    views: list[NDArray[np.float32]] = []
    for rows, u in zip(blocks, used, strict=True):
        views += [rows] if u.all() else [rows[i : i + 1] for i in np.flatnonzero(u).tolist()]
    return counted, views


def _columns(rows: Sequence[NDArray[np.float32]], piece: slice) -> NDArray[np.float64]:
    """Some columns of all rows, in double precision ``(m, ...)``."""
    if not rows:
        return np.zeros((0, 1))
    return np.concatenate([view[:, piece] for view in rows], dtype=np.float64)


class _ModelStep(NamedTuple):
    """A server step for one model: number of participants, number of members, the model's index, and the
    memory ``(V, n)``.
    """

    step: ServerStep
    clients: int
    members: int
    model: int
    memory: NDArray[np.float64] | None


def _model_step(
    optimizer: Optimizer | None, objects: Objects, index: int, model: int, memory_number: int
) -> _ModelStep | None:
    """The server step of the model at ``index`` in the optimizer, with the memory ``memory_number``."""
    if optimizer is None:
        return None
    clients, members = int(optimizer.clients[index]), int(optimizer.members[index])
    return _ModelStep(optimizer.step, clients, members, model, objects.get(("memory", memory_number)))


class _NextModel:
    """A model of the next round, built from the pieces of its row. Parameters with zero weight keep their old
    values.

    No other array of the model's size is allocated, except for a server step (which needs all parameters at
    the same time) and for what the GPS receives.

    Args:
        job: the job.
        model: the old model ``(P,)``.
        row: its row of ``A W``.
        model_step: the server step, if any.

    Attributes:
        trained: whether any client contributes; if not, pieces need not be taken.
    """

    def __init__(
        self, job: ReduceJob | CombineJob, model: NDArray[np.float32], row: Row, model_step: _ModelStep | None
    ) -> None:
        self._job, self._model, self._row, self._step = job, model, row, model_step
        self._size = _length(job.shared)
        self.trained = row.trained
        self._weight = row.weight + row.keep if row.keep else row.weight
        replaces_all = self.trained and self._size == len(model)
        self._new = np.empty_like(model, np.float32) if replaces_all else np.array(model, np.float32)
        self._averages = np.empty(self._size) if model_step is not None else None
        self._totals = np.empty(self._size) if job.common else None

    def take(self, place: slice, total: NDArray[np.float64]) -> None:
        """Store a piece of the row, given its sums ``total``, which may be changed in place."""
        parts = _model_ranges(self._job.shared, place)
        old = _take_segments(self._model, parts)
        if self._row.keep or self._job.updates:
            total += self._old_weight(place) * old.astype(np.float64)
        weight = self._weight[place] if isinstance(self._weight, np.ndarray) else self._weight
        if isinstance(weight, np.ndarray):
            averages = old.astype(np.float64)
            np.divide(total, weight, out=averages, where=weight > 0)
            total = _sums_or_averages(total, averages, weight)
        else:
            averages = total / weight
        self._store(place, averages, total)

    def put(self, place: slice, averages: NDArray[np.float64]) -> None:
        """Store a piece of the row that is already averaged."""
        self._store(place, averages, averages * self._weight)

    def _store(self, place: slice, averages: NDArray[np.float64], total: NDArray[np.float64]) -> None:
        if self._averages is None:
            _put_segments(self._new, _model_ranges(self._job.shared, place), averages)
        else:
            self._averages[place] = averages
        if self._totals is not None:
            self._totals[place] = total

    def _old_weight(self, place: slice) -> float | NDArray[np.float64]:
        """The weight of the old model in a piece; updates of clients are added to the whole old model."""
        row, statistics = self._row, self._size - self._row.statistics
        keep: Weight = row.keep
        if self._job.updates:
            keep = keep + (row.weight[place] if isinstance(row.weight, np.ndarray) else row.weight)
        if place.stop <= statistics or (row.kept_statistics == row.keep and not self._job.updates):
            return keep
        counts = np.zeros(place.stop - place.start) + keep
        counts[max(0, statistics - place.start) :] = row.kept_statistics
        return counts

    def done(self) -> tuple[NDArray[np.float32], Reduced, NDArray[np.float64] | None]:
        """The model, what the GPS learns, and the memory of the server step."""
        job, model_step, statistics = self._job, self._step, self._row.statistics
        memory = None if model_step is None else _step_memory(model_step, self._size - statistics)
        if not self.trained:
            common = _take_segments(self._model.astype(np.float64), job.common)
            return self._new, Reduced(Partial(common, 0.0), 0.0, np.zeros(1)), memory
        totals: NDArray[np.float64] | None = self._totals
        if model_step is not None and self._averages is not None:
            old = _take_segments(self._model.astype(np.float64), job.shared)
            averages, memory = _apply_step(model_step, old, self._averages, statistics)
            _put_segments(self._new, job.shared, averages)
            totals = (
                None if totals is None else _sums_or_averages(averages * self._weight, averages, self._weight)
            )
        weight: Weight = self._weight
        if isinstance(weight, np.ndarray):
            weight = np.zeros(len(self._model))
            _put_segments(weight, job.shared, np.asarray(self._weight))
        sent_weight = _take_segments(weight, job.common) if isinstance(weight, np.ndarray) else weight
        return self._new, Reduced(Partial(self._common(totals), sent_weight), weight, self._squares()), memory

    def _common(self, totals: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """The sums of the common layers."""
        if totals is None:
            return np.empty(0)
        full = self._model.astype(np.float64)
        _put_segments(full, self._job.shared, totals)
        return _take_segments(full, self._job.common)

    def _squares(self) -> NDArray[np.float64]:
        """See :attr:`Reduced.squares`; parameters that clients do not share have not changed."""
        if not self._job.needs_norm:
            return np.full(1, math.nan)
        statistics = _model_ranges(self._job.shared, slice(self._size - self._row.statistics, self._size))
        starts = range(0, len(self._model), PIECE)
        squares = np.zeros(len(starts))
        for number, start in enumerate(starts):
            place = slice(start, start + PIECE)
            change = np.subtract(self._new[place], self._model[place], dtype=np.float64)
            for a, b in statistics:
                change[max(0, a - start) : max(0, b - start)] = 0.0
            squares[number] = np.square(change, out=change).sum()
        return squares


def _step_memory(model_step: _ModelStep, n: int) -> NDArray[np.float64]:
    """The memory of a server step ``(V, n)``, or its initial value."""
    if model_step.memory is not None:
        return model_step.memory
    return np.repeat(np.array(list(model_step.step.vectors().values()), np.float64)[:, None], n, axis=1)


def _apply_step(
    model_step: _ModelStep, old: NDArray[np.float64], averages: NDArray[np.float64], statistics: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The parameters after the server step, and its memory; running statistics, at the end, are plain
    averages.
    """
    n = len(old) - statistics
    start, memory = model_step.step.vectors(), _step_memory(model_step, n)
    averaged = Averaged(old[:n], averages[:n], model_step.clients, model_step.members, model_step.model)
    answer: object = model_step.step.apply(averaged, dict(zip(start, memory, strict=True)))
    where, expected = f"{type(model_step.step).__name__}.apply", f"expected a model ({n},) and its vectors"
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        raise ConfigError(where, f"returned {type_of(answer)}", expected)
    stepped, vectors = answer
    for name, values in (("model", stepped), *((name, vectors.get(name)) for name in start)):
        if np.shape(values) != (n,):
            raise ConfigError(where, f"{name}: returned {type_of(values)}", expected)
    if not np.isfinite(stepped).all() and np.isfinite(averages).all() and np.isfinite(old).all():
        raise ConfigError(where, "returned numbers that are not finite, of numbers that are")
    new_memory = np.stack([vectors[name] for name in start]) if start else np.empty((0, n))
    return np.concatenate([stepped, averages[n:]]), new_memory


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
    total_weight = sum(weights)
    if not np.any(total_weight):
        return None
    totals: list[Partial] = []
    for partial, weight in zip(partials, weights, strict=True):
        target_weight, sum_weight = np.broadcast_arrays(np.asarray(weight, np.float64), partial.weight)
        scale = np.divide(target_weight, sum_weight, out=target_weight.copy(), where=sum_weight != 0)
        totals.append(Partial(summed([partial]) * scale, 0.0))
    with np.errstate(invalid="ignore"):
        return (summed(totals) / total_weight).astype(np.float32)


def _places(shared: Segments) -> list[slice]:
    """The places of the shared parameters of each piece of the model. Products and rules process these pieces
    however the model is sharded, since the last bit of a product depends on the columns computed together."""
    places, offset = dict[int, slice](), 0
    for a, b in shared:
        for piece in range(a // PIECE, -(-b // PIECE)):
            first, last = max(a, piece * PIECE) - a + offset, min(b, (piece + 1) * PIECE) - a + offset
            places[piece] = slice(places[piece].start if piece in places else first, last)
        offset += b - a
    return list(places.values())


def _length(segments: Segments) -> int:
    return sum(b - a for a, b in segments)


def _sums_or_averages(
    totals: NDArray[np.float64], averages: NDArray[np.float64], weight: Weight
) -> NDArray[np.float64]:
    """The sums; if each parameter has its own weight, the averages where that weight is zero."""
    return np.where(weight > 0, totals, averages) if isinstance(weight, np.ndarray) else totals


def _model_ranges(segments: Segments, place: slice) -> Segments:
    """The ranges of the model that correspond to a place in the concatenated segments."""
    ranges, offset = [], 0
    for a, b in segments:
        first, last = max(place.start - offset, 0), min(place.stop - offset, b - a)
        if first < last:
            ranges.append((a + first, a + last))
        offset += b - a
    return tuple(ranges)


def _put_segments(vector: NDArray[np.floating], segments: Segments, values: NDArray[np.floating]) -> None:
    offset = 0
    for a, b in segments:
        vector[a:b] = values[offset : offset + b - a]
        offset += b - a


def _take_segments(vector: NDArray[Any], segments: Segments) -> NDArray[Any]:
    if len(segments) == 1:  # without a copy: for a large model every pass over the parameters takes time
        return vector[slice(*segments[0])]
    return np.concatenate([vector[a:b] for a, b in segments]) if segments else vector[:0]
