"""Distances between the clients of a federation, and their average."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayfl.data.base import Federation
from rayfl.data.heterogeneity.base import Array, Measure, matrix
from rayfl.errors import DataError
from rayfl.random import generator
from rayfl.settings import Registry

MEASURES = Registry("measure", "rayfl.data.heterogeneity.measures", Measure)
"""The measures, by name."""


@dataclass(frozen=True)
class AverageDistance:
    """The average of a measure over pairs of different clients.

    Attributes:
        mean: over all pairs that were compared.
        within, across: over pairs of clients in the same planted group, and in different groups; None if
            there are no groups or no such pairs.
        clients, pairs: numbers of clients and pairs compared.
        sampled: whether these are only a part of all clients.
    """

    mean: float
    within: float | None
    across: float | None
    clients: int
    pairs: int
    sampled: bool


def draw_clients(federation: Federation, most: int | None, seed: int) -> NDArray[np.int64]:
    """Ids of at most ``most`` clients that have samples, drawn at random, ascending.

    All of them if there are no more than that, or if ``most`` is None.
    """
    present = np.flatnonzero(federation.sizes > 0)
    if most is None or len(present) <= most:
        return present
    return np.sort(generator(seed, "measured clients").permutation(present)[:most])


def distance_matrix(
    federation: Federation, measure: Measure, clients: NDArray[np.integer] | None = None, seed: int = 0
) -> Array:
    """The measure between all pairs of the given clients, by their training samples.

    Args:
        federation: N clients.
        measure: one of :data:`MEASURES` with its settings.
        clients: ids ``(m,)``, all with samples; None: all clients that have samples.
        seed: key of the draws (which samples of a client are used).

    Returns:
        ``(m, m)``, from the client of the row to that of the column, symmetric unless the measure is
        directed; the diagonal is 0, or 1 for a similarity.

    Raises:
        DataError: if the measure is not defined for a client's data.
    """
    if measure.labels_only and federation.samples.numeric:
        raise DataError(f"{measure.name} compares labels, and these samples have numbers to predict")
    ids = draw_clients(federation, None, seed) if clients is None else np.asarray(clients)
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked below
        return _require_finite(_pairwise_values(federation, measure, ids, seed), measure, ids)


def _pairwise_values(federation: Federation, measure: Measure, ids: NDArray[np.integer], seed: int) -> Array:
    common = measure.common(federation.samples, seed)
    summaries = [_client_summary(federation, measure, int(client), common, seed) for client in ids]
    values = np.full((len(ids), len(ids)), float(measure.similarity))
    for i, a in enumerate(summaries):
        for j in range(i + 1, len(ids)):
            values[i, j] = values[j, i] = measure.compare(a, summaries[j], common)
            if measure.directed:
                values[j, i] = measure.compare(summaries[j], a, common)
    return values


def _require_finite(values: Array, measure: Measure, ids: NDArray[np.integer]) -> Array:
    if not np.isfinite(values).all():
        i, j = np.argwhere(~np.isfinite(values))[0]
        raise DataError(
            f"measure {measure.name}: {values[i, j]} between clients {ids[i]} and {ids[j]}; the numbers in "
            "the data are too large for it, scale them down"
        )
    return values


def _client_summary(
    federation: Federation, measure: Measure, client: int, common: object, seed: int
) -> object:
    samples, ids = federation.samples, federation.train[client]
    if measure.samples is not None and len(ids) > measure.samples:
        ids = np.sort(generator(seed, "measured samples", client).permutation(ids)[: measure.samples])
    x = np.empty((len(ids), 0), np.float32) if measure.labels_only else matrix(samples.inputs("train", ids))
    try:
        return measure.summary(x, samples.labels("train", ids), samples.classes, common)
    except DataError as error:
        raise DataError(f"client {client}: {error}") from None


def average_distance(
    federation: Federation, measure: Measure, sampled: int | None = 100, seed: int = 0
) -> AverageDistance:
    """The average of a measure over pairs of clients: how different their data are.

    Args:
        federation: N clients.
        measure: one of :data:`MEASURES` with its settings.
        sampled: with more clients than this, this many are drawn at random and all their pairs are compared;
            None: all clients.
        seed: key of the draws.

    Raises:
        DataError: as :func:`distance_matrix`; or if there is only one client.
    """
    ids = draw_clients(federation, sampled, seed)
    return average(federation, ids, distance_matrix(federation, measure, ids, seed))


def average(federation: Federation, clients: NDArray[np.integer], values: Array) -> AverageDistance:
    """The averages of a matrix ``(m, m)`` between the given clients.

    Raises:
        DataError: if there is only one client.
    """
    if len(clients) < 2:
        raise DataError("a distance needs two clients, there is one; use more clients")
    i, j = np.triu_indices(len(clients), 1)
    pairs = (values[i, j] + values[j, i]) / 2
    within = across = None
    if federation.groups is not None:
        groups = federation.groups[clients]
        same = groups[i] == groups[j]
        within = float(pairs[same].mean()) if same.any() else None
        across = float(pairs[~same].mean()) if not same.all() else None
    sampled = len(clients) < int(np.count_nonzero(federation.sizes))
    return AverageDistance(float(pairs.mean()), within, across, len(clients), len(pairs), sampled)
