"""The global step: the GPS averages layers over the LPSs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rayfl.algorithms import GlobalStep
from rayfl.backend import Joined, apart
from rayfl.clients.partial import Partial, joined
from rayfl.servers.lps import MODEL, VALUES, Reduced, merge
from rayfl.servers.models import Servers
from rayfl.training import Segments, length


def gather(servers: Servers, step: GlobalStep, facts: Mapping[int, Reduced]) -> None:
    """Add the weight of each model in this round to its weight in the next global step."""
    weights = np.zeros((len(servers.models), 1))
    if any(np.ndim(fact.weight) for fact in facts.values()):
        weights = np.zeros((len(servers.models), servers.spec.P))
    for row, fact in facts.items():
        weights[row] = fact.weight
    earlier = (
        servers.gathered if servers.gathered.size else np.zeros((len(step.layers), len(servers.models), 1))
    )
    servers.gathered = earlier + weights


def share(
    servers: Servers, step: GlobalStep, sent: Segments, facts: Mapping[int, Reduced]
) -> tuple[int, int]:
    """Average layers over the LPSs that take part and send them back; returns the bytes up and down.

    An LPS that is alone in its group has nothing to share and keeps its gathered weight.

    Args:
        step: which layers, LPSs and weights.
        sent: the ranges that the LPSs send (the union of all layers).
        facts: results of the LPSs whose clients took part in this round, by row.
    """
    up = down = 0
    shards = servers.ranges.within(sent)
    uploads = {row: fact.common for row, fact in facts.items()}
    gathered = servers.gathered.copy()
    for layer, (segments, groups) in enumerate(step.layers):
        size, numbers = 4 * length(segments), _parameter_indices(segments)
        places = np.searchsorted(_parameter_indices(sent), numbers)
        for group in np.unique(groups[step.due]):
            rows = np.flatnonzero(step.due & (groups == group))
            weights = gathered[layer, rows] if step.weights is None else step.weights[rows, None]
            senders = rows[weights.any(axis=1)].tolist()
            if len(rows) == 1 or not senders:
                continue
            for row in senders:
                if row not in uploads:
                    uploads[row] = _uploaded(servers, row, shards)
            sums = [uploads[row].take(places) for row in senders]
            merged = merge(sums, [w[numbers] if len(w) > 1 else w for w in weights[weights.any(axis=1)]])
            if merged is not None:
                _install(servers, rows.tolist(), segments, merged)
            up, down = up + size * len(senders), down + size * len(rows)
            if step.weights is None:
                gathered[layer, rows] = 0
    servers.gathered = gathered
    return up, down


def _uploaded(servers: Servers, row: int, sent: Sequence[Segments]) -> Partial:
    """The ranges ``sent`` (one entry per shard) of a model that was not trained in this round."""
    refs = [
        servers.backend.serve(servers.lps(row, shard), "upload", sent[shard], {MODEL: model}, [VALUES])[
            VALUES
        ]
        for shard, model in enumerate(apart(servers.models[row]))
        if sent[shard]
    ]
    return joined(servers.backend.get(refs))


def _install(servers: Servers, rows: Sequence[int], segments: Segments, merged: NDArray[np.float32]) -> None:
    """Write the averaged ranges into these models."""
    by_shard = servers.ranges.within(segments)
    values = [servers.backend.put(each) for each in servers.ranges.among(segments).split(merged)]
    for row in rows:
        models = list(apart(servers.models[row]))
        for shard, ranges in enumerate(by_shard):
            if ranges:
                objects = {MODEL: models[shard], VALUES: values[shard]}
                refs = servers.backend.serve(servers.lps(row, shard), "install", ranges, objects, [MODEL])
                models[shard] = refs[MODEL]
        servers.models[row] = Joined.of(models)


def union(step: GlobalStep) -> Segments:
    """The ranges of all layers of a global step, ascending."""
    return tuple(sorted(segment for segments, _ in step.layers for segment in segments))


def _parameter_indices(segments: Segments) -> NDArray[np.int64]:
    """The indices of the parameters that the ranges cover, ascending."""
    return np.concatenate([np.arange(a, b) for a, b in segments])
