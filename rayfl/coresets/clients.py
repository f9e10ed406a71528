"""The federation's clients as vertices: a few of them, weighted, represent all.

The graph joins clients that are alike (neighbours in the space of signatures or label histograms, or members
of one cluster); a client's accuracy is a function on it that varies little between neighbours. Two uses:

- evaluation: test K clients instead of all (:func:`evaluation_coreset`), and estimate the population's
  metrics from their weights (:func:`weighted_summary`);
- participation: let K cheap clients take part that together represent all (:func:`participants`).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import cdist

from rayfl.coresets import scgiga
from rayfl.coresets.base import Coreset, Weights, check_references
from rayfl.coresets.graphs import Graph, knn_graph
from rayfl.coresets.walks import Power, walk_vectors
from rayfl.errors import DataError
from rayfl.evaluation.metrics import METRICS, accuracy
from rayfl.random import generator

_CLIENTS_AT_ONCE = 4096
"""Clients whose distances to all references are in memory at a time."""

_DISTANCE_TOLERANCE = 1e-9
"""Distances that differ by less are equal."""

_TIE_SHIFT = 1e-5
"""How far identical clients are moved apart, relative to the spread of all: less than any real difference."""

FILL = 5_000_000
"""Maximum number of non-zero entries of ``P^l`` here, so that a choice takes a second or two."""

NEIGHBOURS = 10
"""Neighbours of a client in the graph; :func:`evaluation_coreset` may use fewer."""


def client_graph(
    vectors: ArrayLike | None = None,
    *,
    clusters: ArrayLike | None = None,
    neighbours: int = NEIGHBOURS,
    seed: int = 0,
) -> Graph:
    """The relatedness graph of N clients; it need not be connected.

    Args:
        vectors: what is known of each client, ``(N, d)``: signature vectors or label histograms. Clients
            near to each other are joined; ties are broken at random.
        clusters: cluster of each client ``(N,)``. With ``vectors``: only clients of one cluster are joined.
            Without ``vectors``: each client is joined with ``neighbours`` random others of its cluster (a
            circulant graph in a random order), since nothing else is known of them.
        neighbours: minimum number of others that a client is joined with, if there are as many.
        seed: of the random order, and of the choice among ties.

    Raises:
        DataError: if neither or mismatched arguments are given, there are fewer than two clients, or no two
            of them are joined.
    """
    if vectors is None and clusters is None:
        raise DataError("client graph: neither vectors nor clusters are given")
    count = len(np.asarray(clusters if vectors is None else vectors))
    if count < 2 or neighbours < 1:
        raise DataError(f"client graph: {count} clients, {neighbours} neighbours; expected at least 2 and 1")
    labels = np.zeros(count, np.int64) if clusters is None else np.asarray(clusters)
    if labels.shape != (count,):
        raise DataError(f"client graph: clusters of shape {labels.shape}, expected ({count},)")
    if vectors is None:
        return Graph(_circulants(labels, neighbours, seed), groups=labels, components=True)
    points = np.asarray(vectors, np.float64).reshape(count, -1)
    distinct_points = _with_tie_breakers(points, seed)
    rows: list[NDArray[np.integer]] = []
    columns: list[NDArray[np.integer]] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        if len(members) > 1:
            subgraph = knn_graph(distinct_points[members], min(neighbours, len(members) - 1), components=True)
            edges = subgraph.adjacency.tocoo()
            rows.append(members[edges.row])
            columns.append(members[edges.col])
    if not rows:
        raise DataError(
            f"client graph: each of the {count} clients is a cluster of its own; no two are alike"
        )
    ends = np.concatenate(rows), np.concatenate(columns)
    A = sp.csr_array((np.ones(len(ends[0])), ends), shape=(count, count))
    return Graph(A, points, None if clusters is None else labels, components=True)


def _with_tie_breakers(points: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """The points with two more small random coordinates, so that identical points have different neighbours.

    Otherwise many clients with the same histogram would all be joined with the first few of them, and those
    alone would represent all.
    """
    scale = float(points.std()) or 1.0
    draws = generator(seed, "client ties").random((len(points), 2))
    return np.concatenate([points, _TIE_SHIFT * scale * draws], axis=1)


def _circulants(labels: NDArray[np.integer], neighbours: int, seed: int) -> sp.csr_array:
    """Within each cluster a ring in random order, and chords of random lengths, the same for all."""
    rows: list[NDArray[np.integer]] = [np.empty(0, np.int64)]
    columns: list[NDArray[np.integer]] = [np.empty(0, np.int64)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        ring = members[generator(seed, "client ring", int(members[0])).permutation(len(members))]
        half = len(ring) // 2  # the greatest distance on the ring
        chords = 1 + generator(seed, "client chords", int(members[0])).permutation(max(0, half - 1)) + 1
        for offset in [1, *chords[: -(-neighbours // 2) - 1]] if half else []:
            rows.append(ring)
            columns.append(np.roll(ring, offset))
    ends = np.concatenate(rows + columns), np.concatenate(columns + rows)
    A = sp.csr_array((np.ones(len(ends[0])), ends), shape=(len(labels), len(labels)))
    A.sum_duplicates()
    A.data[:] = 1.0
    return A


def client_coreset(
    graph: Graph,
    references: int,
    costs: ArrayLike | None = None,
    kappa: float = 1.0,
    *,
    seed: int = 0,
    power: Power = "auto",
) -> Coreset:
    """K clients to test, with weights that sum to 1.

    Args:
        graph: of :func:`client_graph`.
        references: K; if it is N or more, all clients with weight 1 / N.
        costs: what testing each client costs, ``(N,)``, at least 0.
        kappa: slack in (0, 1]; 1: costs are ignored.
        seed: decides between equally good clients.
        power: steps of the walk; ``auto``: just enough for K clients to cover all.

    Returns:
        Clients by ascending id.

    Raises:
        DataError: if an argument is out of range.
    """
    return _choose_clients(graph, references, costs, kappa, seed, power, None)


def evaluation_coreset(graph: Graph, references: int, *, seed: int = 0) -> Coreset:
    """K clients to test in place of all, chosen on the graph; weights count the clients nearest to each.

    A reference represents N / K clients, so its neighbourhood must not be larger: with ten neighbours, a
    group of four clients among twenty merges with the others and loses its weight. Here each client has
    ``N / 2K`` neighbours (2 to 10), and a reference's weight is the share of the clients that lie nearest to
    it, clients at equal distances divided equally. Groups are then weighted by their true sizes as soon as
    each of them has a reference.

    Args:
        graph: of :func:`client_graph`, made from vectors.
        references: K; if it is N or more, all clients with weight 1 / N.
        seed: decides between equally good clients.

    Returns:
        Clients by ascending id, with weights that sum to 1.

    Raises:
        DataError: if the graph has no vectors, or K is below 1.
    """
    points = graph.points
    if points is None:
        raise DataError("evaluation coreset: the graph of clients has no vectors to measure distances by")
    neighbours = int(np.clip(round(len(graph) / (2 * max(1, references))), 2, NEIGHBOURS))
    near = graph
    if neighbours != NEIGHBOURS:
        near = client_graph(points, clusters=graph.groups, neighbours=neighbours)
    ids = client_coreset(near, references, seed=seed).ids
    return Coreset(ids, _shares_by_distance(points, ids))


def _shares_by_distance(points: NDArray[np.float64], ids: NDArray[np.int64]) -> Weights:
    """The share of the points ``(N, d)`` that are nearest to each of those in ``ids``, ``(K,)``, sum 1."""
    shares = np.zeros(len(ids))
    for first in range(0, len(points), _CLIENTS_AT_ONCE):
        distances = cdist(points[first : first + _CLIENTS_AT_ONCE], points[ids])
        nearest = distances <= distances.min(axis=1, keepdims=True) + _DISTANCE_TOLERANCE
        shares += (nearest / nearest.sum(axis=1, keepdims=True)).sum(axis=0)
    return shares / len(points)


def participants(
    graph: Graph,
    references: int,
    costs: ArrayLike,
    kappa: float = 0.5,
    *,
    eligible: ArrayLike | None = None,
    seed: int = 0,
    power: Power = "auto",
) -> Coreset:
    """K clients to take part in a round: representative, and cheap as far as ``kappa`` allows.

    Args:
        graph: of :func:`client_graph`.
        references: K.
        costs: of each client's participation, ``(N,)``, at least 0, in any unit (seconds, bytes, joules).
            Costs that grow with each participation make the choice change from round to round.
        kappa: slack in (0, 1]: a client whose alignment is at least kappa times the best may be taken because
            it is cheaper.
        eligible: which clients are present, ``(N,)`` (bool); absent clients are represented, too.
        seed: decides between equally good and cheap clients.
        power: as in :func:`client_coreset`.

    Returns:
        Clients by ascending id, with weights that sum to 1: the share of the clients that each represents.

    Raises:
        DataError: if an argument is out of range.
    """
    return _choose_clients(graph, references, costs, kappa, seed, power, eligible)


def _choose_clients(
    graph: Graph,
    references: int,
    costs: ArrayLike | None,
    kappa: float,
    seed: int,
    power: Power,
    eligible: ArrayLike | None,
) -> Coreset:
    scgiga.check_choice(len(graph), costs, kappa, eligible)
    if references >= len(graph) and eligible is None:
        n = len(graph)
        return Coreset(np.arange(n), np.full(n, 1.0 / n))
    count = min(references, len(graph))
    check_references(graph, count)
    vectors = walk_vectors(graph, power, count, seed, fill_limit=FILL, smooth=False)
    all_steps = scgiga.steps(
        graph, count, seed=seed, costs=costs, kappa=kappa, eligible=eligible, vectors=vectors
    )
    chosen = deque(all_steps, maxlen=1).pop().coreset.normalised()
    order = np.argsort(chosen.ids)
    return Coreset(chosen.ids[order], chosen.weights[order])


def weighted_summary(
    correct: ArrayLike,
    loss_sums: ArrayLike,
    sizes: ArrayLike,
    weights: Weights,
    population: int | None = None,
) -> dict[str, float]:
    """The population's metrics estimated from tested clients: ``rayfl.evaluation.metrics.summary``, weighted.

    Each tested client represents a share ``weights`` of the population. With equal weights and a number of
    clients divisible by 20 the metrics are those of ``summary``; otherwise the tenths are cut exactly, not
    rounded to whole clients, and a median that is not unique is the middle of its interval.

    Args:
        correct: correctly classified test samples of each tested client, ``(K,)``.
        loss_sums: sum of its sample losses, ``(K,)``.
        sizes: its test samples, ``(K,)``; clients without test samples are ignored.
        weights: of :func:`evaluation_coreset`, ``(K,)``.
        population: N, of which the K were taken.

    Returns:
        The metrics of ``summary``. ``accuracy_se`` is the expected error of ``accuracy_mean`` if the K had
        been drawn at random from the N, ``sqrt(s^2 sum(w^2) (1 - K / N))`` with the weighted variance
        ``s^2 = sum(w (a - mean)^2) / (1 - sum(w^2))``. The error of representative clients is smaller, unless
        a group of clients has no member among them.
    """
    sizes_K, weights_K = np.asarray(sizes, np.float64), np.asarray(weights, np.float64)
    percent_K = accuracy(correct, sizes_K)
    tested = sizes_K > 0
    if not tested.any() or weights_K[tested].sum() <= 0:
        return dict.fromkeys(METRICS, float("nan"))
    share = weights_K[tested] / weights_K[tested].sum()
    values, size = percent_K[tested], sizes_K[tested]
    losses = np.asarray(loss_sums, np.float64)[tested] / size
    mean = share @ values
    var, squares = share @ (values - mean) ** 2, share @ share
    left_out = 1.0 if population is None else max(0.0, 1.0 - len(values) / population)
    result = (
        mean,
        share @ (values * size) / (share @ size),
        _mean_between(values, share, 0.5, 0.5),
        _mean_between(values, share, 0.0, 0.1),
        _mean_between(values, share, 0.9, 1.0),
        var,
        np.sqrt(var * squares / (1 - squares) * left_out) if squares < 1 else np.nan,
        share @ losses,
    )
    return {name: float(value) for name, value in zip(METRICS, result, strict=True)}


def _mean_between(values: Weights, share: Weights, low: float, high: float) -> float:
    """Mean over the part of the population between two quantiles; a quantile if they are equal."""
    order = np.argsort(values, kind="stable")
    upto = np.minimum(np.cumsum(share[order]), 1.0)
    upto[-1] = 1.0
    if low == high:
        left = int(np.searchsorted(upto, low - 1e-12))
        right = min(int(np.searchsorted(upto, low + 1e-12, side="right")), len(values) - 1)
        return float((values[order][left] + values[order][right]) / 2)
    start = np.concatenate([[0.0], upto[:-1]])
    inside = np.maximum(np.minimum(upto, high) - np.maximum(start, low), 0.0)
    return float(inside @ values[order] / inside.sum())
