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
from rayfl.backend import RESULT, Done, Joined, Key, Ref, Task, apart
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

Part = tuple[int, int]
"""A row of A, and a shard of its model."""

_COMBINED_NUMBERS = 1 << 23
"""Parameters of output models that one call of an LPS computes from trained rows (64 MB in double precision).
"""

_WAITING_NUMBERS = 1 << 29
"""Entries of a row's sums that may wait to be added: 2 GB in single precision."""


def most_waiting(parameters: int) -> int:
    """How many sums of a row may wait to be added, for a model with this many parameters."""
    return max(4, _WAITING_NUMBERS // max(1, parameters))


class Arriving:
    """The sums that blocks have sent in this round, by the row of A and the shard of the model that they
    belong to.

    If they are many or large, they are added while other blocks train, so that only few exist at any time.
    The order is that of the blocks, not of their arrival, as if all were added at the end.

    Args:
        servers: the servers.
        rows: for each block that sends sums, the rows of A that these belong to.
    """

    def __init__(self, servers: Servers, rows: Mapping[int, Iterable[int]]) -> None:
        self._servers = servers
        self._limit = math.inf if servers.blocks.fan_in else most_waiting(servers.spec.P)
        self._awaited: dict[Part, deque[int]] = {}
        for block in sorted(rows):
            for row in rows[block]:
                for shard in range(len(servers.ranges)):
                    self._awaited.setdefault((int(row), shard), deque()).append(block)
        self._arrived: dict[Part, dict[int, Ref]] = {part: {} for part in self._awaited}
        self._in_order: dict[Part, dict[Key, Ref]] = {part: {} for part in self._awaited}

    def take(self, done: Done) -> Done:
        """Take the sums that a block has sent; returns the rest of its result."""
        for (kind, part), ref in done.refs.items():
            if kind == "sum":
                assert isinstance(part, tuple)
                self._take(part, done.task, ref)
        return replace(done, refs={key: ref for key, ref in done.refs.items() if key[0] != "sum"})

    def _take(self, part: Part, sender: int, ref: Ref) -> None:
        arrived, awaited = self._arrived[part], self._awaited[part]
        arrived[sender] = ref
        while awaited and awaited[0] in arrived:
            block = awaited.popleft()
            self._in_order[part]["sum", block] = arrived.pop(block)
            if len(self._in_order[part]) > self._limit:
                self._in_order[part] = self._folded(part)

    def _folded(self, part: Part) -> dict[Key, Ref]:
        """Add the sums of a part that are next in order into one."""
        sums = self._in_order[part]
        refs = self._servers.backend.serve(self._servers.lps(*part), "add", None, sums, [SUM])
        return {next(iter(sums)): refs[SUM]}

    def by_part(self) -> dict[Part, dict[Key, Ref]]:
        """The sums of each part in the order of the blocks, when all have arrived."""
        return self._in_order


@dataclass(frozen=True)
class Averaging:
    """What the rows of A are multiplied by.

    Attributes:
        shared: the ranges of the model that clients send.
        common: the ranges that the GPS averages in this round.
        blocks: positions of each block in the cohort.
        trained: the result of each block.
        absent: how many absent clients count in each model; None if absent clients do not count.
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
        indices = list(models)
        return Optimizer(
            self.optimizer.step, self.optimizer.clients[indices], self.optimizer.members[indices]
        )


def reduce_sums(
    servers: Servers,
    averaging: Averaging,
    sums: Arriving,
    members: NDArray[np.int64] | None,
    rescaled: NDArray[np.float64] | None,
) -> list[Ref]:
    """Each LPS reduces its rows in the order of the blocks; returns what the GPS may learn, by reference, for
    each row and shard.

    ``members`` and ``rescaled`` have an entry for each model, ``(K,)``.
    """
    parts = _reduce_in_tree(servers, sums.by_part())
    shared, common = (servers.ranges.within(each) for each in (averaging.shared, averaging.common))
    facts = []
    for row in sorted({row for row, _ in parts}):
        corrections = []
        if averaging.absent is not None:
            corrections.append(Partial(np.zeros(1), 0.0, keep=float(averaging.absent[row])))
        if rescaled is not None and rescaled[row] != 1:
            corrections.append(Partial(np.zeros(1), 0.0, scale=float(rescaled[row])))
        keeps = [MODEL, FACTS]
        keeps += [VECTOR] * (members is not None)
        keeps += [("memory", 0)] * (averaging.optimizer is not None)
        models, memories = apart(servers.models[row]), _memory_shards(servers, averaging, row)
        vectors = None if members is None else apart(servers.vectors[row])
        shard_refs = []
        for shard, model in enumerate(models):
            job = ReduceJob(
                row,
                shared[shard],
                common[shard],
                tuple(corrections),
                None if members is None else int(members[row]),
                averaging.own_optimizer([row]),
                averaging.needs_norms,
                averaging.updates,
            )
            objects = {MODEL: model, **parts[row, shard]}
            if vectors is not None:
                objects[VECTOR] = vectors[shard]
            if memories is not None:
                objects["memory", 0] = memories[shard]
            shard_refs.append(servers.backend.serve(servers.lps(row, shard), "reduce", job, objects, keeps))
        servers.models[row] = Joined.of([each[MODEL] for each in shard_refs])
        if members is not None:
            servers.vectors[row] = Joined.of([each[VECTOR] for each in shard_refs])
        if averaging.optimizer is not None:
            _set_memory(servers, row, Joined.of([each["memory", 0] for each in shard_refs]))
        facts += [each[FACTS] for each in shard_refs]
    return facts


def _reduce_in_tree(servers: Servers, sums: dict[Part, dict[Key, Ref]]) -> dict[Part, dict[Key, Ref]]:
    """Reduce the sums of each part to at most ``fan_in`` for the LPS: client actors, idle by now, add
    neighbours level by level.
    """
    fan_in = servers.blocks.fan_in
    while fan_in and (wide := [part for part, some in sums.items() if len(some) > fan_in]):
        chunks = [
            (part, refs[first : first + fan_in])
            for part in wide
            for refs in [list(sums[part].values())]
            for first in range(0, len(refs), fan_in)
        ]
        tasks = [Task.calling(_sum_partials, *some, cost=float(len(some))) for _, some in chunks]
        sums = {**sums, **{part: {} for part in wide}}
        for (part, _), done in zip(chunks, servers.backend.run_in_order(tasks), strict=True):
            sums[part]["sum", len(sums[part])] = done.refs[RESULT]
    return sums


def _sum_partials(*partials: Partial) -> Partial:
    return added(partials)


def combine_rows(servers: Servers, mixing: Mixing, averaging: Averaging) -> list[Ref]:
    """The LPSs multiply A by the trained rows, or apply the aggregation rule to them, a few models per call;
    returns what the GPS may learn, by reference.
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
    size = max(1, _COMBINED_NUMBERS // max(1, servers.spec.P))
    shared, common = (servers.ranges.within(each) for each in (averaging.shared, averaging.common))
    facts = []
    for number, first in enumerate(range(0, len(filled), size)):
        chunk: list[int] = filled[first : first + size].tolist()
        dense = weights[chunk].toarray()
        dense_kept = None if kept is None else kept[chunk].toarray()
        needed_blocks = [b for b, block in enumerate(blocks) if dense[:, block].any()]
        job = CombineJob(
            averaging.shared,
            averaging.common,
            models=tuple(chunk),
            blocks=tuple(needed_blocks),
            weights=[dense[:, blocks[b]] for b in needed_blocks],
            kept=None if dense_kept is None else [dense_kept[:, blocks[b]] for b in needed_blocks],
            keep=keep[chunk],
            statistics=0,
            optimizer=averaging.own_optimizer(chunk),
            needs_norm=averaging.needs_norms,
            updates=averaging.updates,
            rule=averaging.rule,
        )
        keeps: list[Key] = [*(("model", k) for k in chunk), FACTS]
        keeps += [("memory", k) for k in chunk] * (averaging.optimizer is not None)
        models = {k: apart(servers.models[k]) for k in chunk}
        memories = {k: _memory_shards(servers, averaging, k) for k in chunk}
        shard_refs = []
        for shard, place in enumerate(servers.ranges):
            shard_job = replace(
                job,
                shared=shared[shard],
                common=common[shard],
                statistics=length_from(shared[shard], servers.spec.n_parameters - place.start),
            )
            objects: dict[Key, Ref] = {("model", k): models[k][shard] for k in chunk}
            objects.update({("rows", b): averaging.trained[b].refs[ROWS, shard] for b in needed_blocks})
            objects.update({("memory", k): refs[shard] for k, refs in memories.items() if refs is not None})
            shard_refs.append(
                servers.backend.serve(servers.lps(number, shard), "combine", shard_job, objects, keeps)
            )
        for k in chunk:
            servers.models[k] = Joined.of([each["model", k] for each in shard_refs])
            if averaging.optimizer is not None:
                _set_memory(servers, k, Joined.of([each["memory", k] for each in shard_refs]))
        facts += [each[FACTS] for each in shard_refs]
    return facts


def _memory_shards(servers: Servers, averaging: Averaging, model: int) -> tuple[Ref, ...] | None:
    """The shards of the memory of a server step for a model; None if there is none yet."""
    ref = servers.memories[model] if servers.memories else None
    if ref is None or averaging.optimizer is None:
        return None
    if len(servers.ranges) > 1 and not isinstance(ref, Joined):  # from a checkpoint
        n = servers.spec.n_parameters
        parameters = tuple((a, min(b, n)) for a, b in averaging.shared if a < n)
        ref = servers.put(servers.backend.get(ref), servers.ranges.among(parameters))
    return apart(ref)


def _set_memory(servers: Servers, model: int, memory: Ref) -> None:
    if not servers.memories:
        servers.memories = [None] * len(servers.models)
    servers.memories[model] = memory
