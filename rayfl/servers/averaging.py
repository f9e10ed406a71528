"""The LPSs multiply A by what clients have sent."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rayfl.aggregation import Aggregation
from rayfl.algorithms import Mixing
from rayfl.backend import RESULT, Done, Key, Ref, Task
from rayfl.clients.jobs import ROWS
from rayfl.clients.partial import Partial, added
from rayfl.servers.lps import (
    FACTS,
    MODEL,
    SUM,
    VECTOR,
    CombineJob,
    Optimizer,
    ReduceJob,
)
from rayfl.servers.mixing import check_rule
from rayfl.servers.models import Servers
from rayfl.training import Segments
from rayfl.training.work import length_from

_COMBINED = 1 << 23
"""Parameters of output models that one call of an LPS computes from trained rows (64 MB in double precision).
"""

_WAITING = 1 << 29
"""Entries of a row's sums that may wait to be added: 2 GB in single precision."""


def most_waiting(parameters: int) -> int:
    """How many sums of a row may wait to be added, for a model with this many parameters."""
    return max(4, _WAITING // max(1, parameters))


class Arriving:
    """The sums that blocks have sent in this round, by the row of A that they belong to.

    If they are many or large, they are added while other blocks train, so that only few exist at any time.
    The order is that of the blocks, not of their arrival, as if all were added at the end.

    Args:
        servers: where.
        rows: for each block that sends sums, their rows.
    """

    def __init__(self, servers: Servers, rows: Mapping[int, Iterable[int]]) -> None:
        self._servers = servers
        self._most = math.inf if servers.blocks.fan_in else most_waiting(servers.spec.P)
        self._awaited: dict[int, deque[int]] = {}
        for block in sorted(rows):
            for row in rows[block]:
                self._awaited.setdefault(int(row), deque()).append(block)
        self._here: dict[int, dict[int, Ref]] = {row: {} for row in self._awaited}
        self._in_order: dict[int, dict[Key, Ref]] = {row: {} for row in self._awaited}

    def take(self, done: Done) -> Done:
        """Take the sums that a block has sent; returns the rest of its result."""
        sums = {int(row): ref for (kind, row), ref in done.refs.items() if kind == "sum"}
        for row, ref in sums.items():
            here, awaited = self._here[row], self._awaited[row]
            here[done.task] = ref
            while awaited and awaited[0] in here:
                block = awaited.popleft()
                self._in_order[row]["sum", block] = here.pop(block)
                if len(self._in_order[row]) > self._most:
                    self._in_order[row] = self._added(row)
        return replace(done, refs={key: ref for key, ref in done.refs.items() if key[0] != "sum"})

    def _added(self, row: int) -> dict[Key, Ref]:
        """Add the sums of a row that are next in order into one."""
        some = self._in_order[row]
        found = self._servers.backend.serve(row, "add", None, some, [SUM])
        return {next(iter(some)): found[SUM]}

    def by_row(self) -> dict[int, dict[Key, Ref]]:
        """The sums of each row in the order of the blocks, when all have arrived."""
        return self._in_order


@dataclass(frozen=True)
class Averaging:
    """What the rows of A are multiplied by.

    Attributes:
        shared: the ranges of the model that clients send.
        common: the ranges that the GPS averages in this round.
        blocks: positions of each block in the cohort.
        trained: the result of each block.
        absent: how many clients of each model count although they did not take part; None if they do not.
        optimizer: the server step, if any, for all models.
        needs_norms: whether the GPS needs the norms of the models' updates.
        updates: whether the clients have sent updates instead of models.
        rule: the aggregation rule; None for the weighted mean.
    """

    shared: Segments
    common: Segments
    blocks: Sequence[slice]
    trained: Sequence[Done]
    absent: NDArray[np.int64] | None
    optimizer: Optimizer | None
    needs_norms: bool
    updates: bool = False
    rule: Aggregation | None = None

    def own_optimizer(self, models: Sequence[int]) -> Optimizer | None:
        """The server step for some models."""
        if self.optimizer is None:
            return None
        some = list(models)
        return Optimizer(self.optimizer.step, self.optimizer.clients[some], self.optimizer.members[some])


def reduce_sums(
    servers: Servers,
    averaging: Averaging,
    sums: Arriving,
    members: NDArray[np.int64] | None,
    rescaled: NDArray[np.float64] | None,
) -> list[Ref]:
    """Each LPS reduces its rows in the order of the blocks; returns by reference what the GPS may be told.

    ``members`` and ``rescaled`` have an entry for each model, ``(K,)``.
    """
    parts = _tree(servers, sums.by_row())
    facts = []
    for row in sorted(parts):
        still = []
        if averaging.absent is not None:
            still.append(Partial(np.zeros(1), 0.0, keep=float(averaging.absent[row])))
        if rescaled is not None and rescaled[row] != 1:
            still.append(Partial(np.zeros(1), 0.0, scale=float(rescaled[row])))
        job = ReduceJob(
            row,
            averaging.shared,
            averaging.common,
            tuple(still),
            None if members is None else int(members[row]),
            averaging.own_optimizer([row]),
            averaging.needs_norms,
            averaging.updates,
        )
        objects, keeps = {MODEL: servers.models[row], **parts[row]}, [MODEL, FACTS]
        if members is not None:
            objects[VECTOR] = servers.vectors[row]
            keeps.append(VECTOR)
        if averaging.optimizer is not None:
            objects.update(_memory(servers, row, 0))
            keeps.append(("memory", 0))
        found = servers.backend.serve(row, "reduce", job, objects, keeps)
        servers.models[row] = found[MODEL]
        if members is not None:
            servers.vectors[row] = found[VECTOR]
        if averaging.optimizer is not None:
            _remember(servers, row, found["memory", 0])
        facts.append(found[FACTS])
    return facts


def _tree(servers: Servers, sums: dict[int, dict[Key, Ref]]) -> dict[int, dict[Key, Ref]]:
    """Reduce the sums of each row to at most ``fan_in`` for the LPS: client actors, idle by now, add
    neighbours level by level.
    """
    most = servers.blocks.fan_in
    while most and (wide := [row for row, parts in sums.items() if len(parts) > most]):
        chunks = [
            (row, refs[first : first + most])
            for row in wide
            for refs in [list(sums[row].values())]
            for first in range(0, len(refs), most)
        ]
        tasks = [Task.calling(_added, *some, cost=float(len(some))) for _, some in chunks]
        sums = {**sums, **{row: {} for row in wide}}
        for (row, _), done in zip(chunks, servers.backend.run_in_order(tasks), strict=True):
            sums[row]["sum", len(sums[row])] = done.refs[RESULT]
    return sums


def _added(*partials: Partial) -> Partial:
    return added(partials)


def combine_rows(servers: Servers, mixing: Mixing, averaging: Averaging) -> list[Ref]:
    """The LPSs multiply A by the trained rows, or apply the aggregation rule to them, a few models per call;
    returns by reference what the GPS may be told.
    """
    if averaging.rule is not None:
        check_rule(mixing, averaging.rule)
    weights, blocks = mixing.weights.tocsr(), averaging.blocks
    keep: NDArray[np.float64] = np.zeros(weights.shape[0])
    kept = None if mixing.keep is None else mixing.keep.tocsr()
    if kept is not None:
        keep = np.asarray(kept.sum(axis=1), np.float64).ravel()
    if averaging.absent is not None:
        keep = keep + averaging.absent
    filled = np.flatnonzero(np.diff(weights.indptr))
    size = max(1, _COMBINED // max(1, servers.spec.P))
    facts = []
    for number, first in enumerate(range(0, len(filled), size)):
        some: list[int] = filled[first : first + size].tolist()
        dense = weights[some].toarray()
        theirs = None if kept is None else kept[some].toarray()
        wanted = [b for b, block in enumerate(blocks) if dense[:, block].any()]
        job = CombineJob(
            averaging.shared,
            averaging.common,
            models=tuple(some),
            blocks=tuple(wanted),
            weights=[dense[:, blocks[b]] for b in wanted],
            kept=None if theirs is None else [theirs[:, blocks[b]] for b in wanted],
            keep=keep[some],
            statistics=length_from(averaging.shared, servers.spec.n_parameters),
            optimizer=averaging.own_optimizer(some),
            needs_norm=averaging.needs_norms,
            updates=averaging.updates,
            rule=averaging.rule,
        )
        objects: dict[Key, Ref] = {("model", k): servers.models[k] for k in some}
        objects.update({("rows", b): averaging.trained[b].refs[ROWS] for b in wanted})
        keeps: list[Key] = [*(("model", k) for k in some), FACTS]
        if averaging.optimizer is not None:
            for k in some:
                objects.update(_memory(servers, k, k))
            keeps += [("memory", k) for k in some]
        found = servers.backend.serve(number, "combine", job, objects, keeps)
        for k in some:
            servers.models[k] = found["model", k]
            if averaging.optimizer is not None:
                _remember(servers, k, found["memory", k])
        facts.append(found[FACTS])
    return facts


def _memory(servers: Servers, model: int, number: int) -> dict[Key, Ref]:
    """The memory of a server step for a model, if there is any yet."""
    ref = servers.memories[model] if servers.memories else None
    return {} if ref is None else {("memory", number): ref}


def _remember(servers: Servers, model: int, memory: Ref) -> None:
    if not servers.memories:
        servers.memories = [None] * len(servers.models)
    servers.memories[model] = memory
