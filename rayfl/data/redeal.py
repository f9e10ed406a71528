"""Draws new samples for clients whose data change, from samples that no client has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayfl.data.partitions._dealing import apportion

Counts = NDArray[np.int64]


def spread(total: int, weights: NDArray[np.float64], limits: Counts) -> Counts:
    """Divide ``total`` into integers in proportion to ``weights``, none above its limit.

    What exceeds a limit is distributed over the other entries in the same way. If only entries of weight zero
    are below their limits, the sum is smaller than ``total``.

    Args:
        total: the sum.
        weights: ``(S,)``, not negative.
        limits: ``(S,)``.
    """
    dealt = np.zeros(len(weights), np.int64)
    for _ in range(len(weights) + 1):  # every pass but the last fills an entry to its limit
        open_weights = np.where(dealt < limits, weights, 0.0)
        remaining = total - int(dealt.sum())
        if remaining == 0 or open_weights.sum() <= 0:
            break
        dealt = np.minimum(dealt + apportion(remaining, open_weights), limits)
    return dealt


def max_flow_counts(sizes: Counts, allowed: NDArray[np.bool_], supply: Counts) -> Counts:
    """Number of samples of each stratum for every client, so that as few samples as possible are missing.

    Computed as a maximum flow from clients to strata (Dinic 1970).

    Args:
        sizes: number of samples that each client needs ``(D,)``.
        allowed: strata that it may have ``(D, S)``.
        supply: number of samples of each stratum ``(S,)``.

    Returns:
        ``(D, S)`` with row sums up to ``sizes`` and column sums up to ``supply``.
    """
    from scipy.sparse import coo_array  # deferred: workers do without it
    from scipy.sparse.csgraph import maximum_flow

    clients, strata = allowed.shape
    source, sink = 0, 1 + clients + strata
    rows, columns = np.nonzero(allowed)
    heads = np.concatenate([np.full(clients, source), 1 + rows, 1 + clients + np.arange(strata)])
    tails = np.concatenate([1 + np.arange(clients), 1 + clients + columns, np.full(strata, sink)])
    capacity = np.concatenate([sizes, np.minimum(sizes[rows], supply[columns]), supply])
    graph = coo_array((capacity.astype(np.int32), (heads, tails)), shape=(sink + 1, sink + 1)).tocsr()
    flow = maximum_flow(graph, source, sink).flow.tocsr()
    between: Counts = flow[1 : 1 + clients, 1 + clients : sink].toarray().astype(np.int64)
    return np.maximum(between, 0)


def redeal(
    current_lists: Sequence[NDArray[np.integer]],
    weights: NDArray[np.float64],
    strata: NDArray[np.int64],
    free: NDArray[np.bool_],
    reuse: NDArray[np.bool_],
    rng: np.random.Generator,
) -> tuple[list[NDArray[np.int64]], Counts]:
    """Give clients as many samples as they had, from other strata.

    The clients first give back their own samples, and each keeps those that fit its new strata. The rest is
    drawn from the free samples. Clients with ``reuse`` choose last and get their new strata in full: they
    share samples that are not free with the clients that have them.

    Args:
        current_lists: the samples that each client has now, D lists.
        weights: proportions of the strata among the new samples of each client ``(D, S)``; zero: none. If a
            stratum has too few free samples (for clients with ``reuse``: too few in total), more are taken
            from the others.
        strata: the stratum of every sample ``(n,)``.
        free: mask of the samples that no client has ``(n,)``, including those of ``current_lists``.
        reuse: which clients may also get samples that others have ``(D,)``.
        rng: draws the samples, and the order in which the clients choose.

    Returns:
        The new lists, and the number of samples that each client lacks ``(D,)``.
    """
    sizes = np.array([len(part) for part in current_lists], np.int64)
    supply = np.bincount(strata[free], minlength=weights.shape[1])
    totals = np.bincount(strata, minlength=weights.shape[1])
    counts = np.zeros(weights.shape, np.int64)
    wanted = counts.copy()
    order, remaining = rng.permutation(len(current_lists)), supply.copy()
    for client in order[~reuse[order]].tolist():
        counts[client] = spread(int(sizes[client]), weights[client], remaining)
        remaining -= counts[client]
    exclusive = ~reuse
    if (counts[exclusive].sum(axis=1) < sizes[exclusive]).any():
        best = max_flow_counts(sizes[exclusive], weights[exclusive] > 0, supply)
        if best.sum() > counts.sum():
            counts[exclusive], remaining = best, supply - best.sum(axis=0)
    for client in order[reuse[order]].tolist():
        wanted[client] = spread(int(sizes[client]), weights[client], totals)
        counts[client] = np.minimum(wanted[client], remaining)
        remaining -= counts[client]

    lists = _draw(current_lists, counts, strata, free, rng)
    short = sizes - counts.sum(axis=1)
    for client in np.flatnonzero((short > 0) & reuse).tolist():
        extra = wanted[client] - counts[client]
        not_held = np.ones(len(strata), bool)
        not_held[lists[client]] = False
        (borrowed,) = _draw([np.empty(0, np.int64)], extra[None], strata, not_held, rng)
        lists[client] = np.concatenate([lists[client], borrowed])
        short[client] -= len(borrowed)
    return lists, short


def _draw(
    current_lists: Sequence[NDArray[np.integer]],
    counts: Counts,
    strata: NDArray[np.int64],
    free: NDArray[np.bool_],
    rng: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Draw ``counts`` ``(D, S)`` free samples, each at most once; a client keeps its own first."""
    available = free.copy()
    lists: list[NDArray[np.int64]] = []
    missing = counts.copy()
    for client, part in enumerate(current_lists):
        shuffled = rng.permutation(np.asarray(part, np.int64))
        shuffled = shuffled[available[shuffled]]  # not samples that it shares with others
        grouped = shuffled[np.argsort(strata[shuffled], kind="stable")]
        rank = _ranks(strata[grouped])
        kept = grouped[rank < counts[client, strata[grouped]]]
        available[kept] = False
        missing[client] -= np.bincount(strata[kept], minlength=counts.shape[1])
        lists.append(kept)
    pool = rng.permutation(np.flatnonzero(available))
    pool = pool[np.argsort(strata[pool], kind="stable")]
    starts = np.searchsorted(strata[pool], np.arange(counts.shape[1]))
    for client in np.flatnonzero(missing.any(axis=1)).tolist():
        wanted = np.flatnonzero(missing[client])
        parts = [pool[starts[s] : starts[s] + missing[client, s]] for s in wanted.tolist()]
        starts[wanted] += missing[client, wanted]
        lists[client] = np.concatenate([lists[client], *parts])
    return lists


def _ranks(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of each entry among the entries of equal value; ``values`` must be sorted."""
    starts = np.searchsorted(values, values)
    ranks: NDArray[np.int64] = np.arange(len(values)) - starts
    return ranks
