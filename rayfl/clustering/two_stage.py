"""Clustering of more clients than a matrix of distances can hold: representatives first, then all clients.

1. A keyed random sample of the clients are *representatives*.
2. Every other client follows its nearest representative, at distance d. The *radius* is the distance that
   sampled clients usually have to their nearest neighbour among them. Clients farther than that from all
   representatives are *strangers*, for instance a small cluster that the sample missed. A stranger without a
   representative within the radius becomes one (leader clustering), so that no group, however small, is
   merged into one that is unlike it.
3. The representatives are linked exactly, each weighted by the number of its followers.
4. A follower joins its representative at height d. The result is a tree of all clients, which is cut like any
   other.

Representatives are members drawn at random, not medoids: average linkage compares members, and medoids are
nearer to one another than members are, so a threshold would mean something else.

This takes O(N R) distances for R representatives, computed in blocks of clients on any worker; the result
does not depend on the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.linkage import Array, Method, build_linkage, linkage_of, merge_members
from rayfl.clustering.proximity import BLOCK, Block, Distances, condensed_blocks, take, tile
from rayfl.random import generator

Ids = NDArray[np.int64]

REPRESENTATIVES = 4096
"""Number of clients sampled: for 100,000 clients about as many distances as between all pairs of 30,000."""

FENCE = 1.5
"""The radius is this many interquartile ranges above the third quartile of the nearest distances (Tukey)."""

WIDEN = 1.5
"""If a radius leaves more strangers without a representative than were sampled, it grows by this factor."""


@dataclass(frozen=True)
class Represented:
    """A tree of all clients, built through representatives.

    Attributes:
        linkage: SciPy's linkage matrix ``(N - 1, 4)``.
        representatives: their number R.
        radius: maximum distance of a client to its representative.
    """

    linkage: Array
    representatives: int
    radius: float


def sample(clients: int, max_representatives: int, seed: int) -> Ids:
    """The sampled representatives, ascending: ``REPRESENTATIVES`` of N clients.

    At most half of ``max_representatives``: the other half is kept for strangers.
    """
    count = max(1, min(REPRESENTATIVES, max_representatives // 2, clients))
    return np.sort(generator(seed, "representatives").choice(clients, count, replace=False)).astype(np.int64)


def nearest(proximity: str, block: Block, representatives: Block) -> tuple[Ids, Distances]:
    """For every client of a block the nearest representative (ties: the first), and its distance ``(B,)``."""
    values = tile(proximity, block, representatives)
    index = values.argmin(axis=1)
    return index.astype(np.int64), values[np.arange(block.size), index]


def link(
    proximity: str,
    method: Method,
    blocks: Sequence[Block],
    sampled: Ids,
    answers: Sequence[tuple[Ids, Distances]],
    threshold: float | None = None,
) -> Represented:
    """The tree of all N clients.

    Args:
        proximity, method: how signatures and groups are compared.
        blocks: the signatures of all clients, in order.
        sampled: the result of :func:`sample`.
        answers: :func:`nearest` for every block.
        threshold: beta, if one is given. The radius starts at no more than that; it may exceed it if too many
            clients would be left without a representative.
    """
    representative_of = sampled[np.concatenate([index for index, _ in answers])]
    distances = np.concatenate([distance for _, distance in answers])
    representative_of[sampled], distances[sampled] = sampled, 0.0
    radius = _usual_distance(proximity, take(blocks, sampled))
    radius = radius if threshold is None else min(radius, threshold)
    while True:
        strangers = np.flatnonzero(distances > radius)
        assigned = _assign_strangers(proximity, blocks, strangers, radius, len(sampled))
        if assigned is not None:
            break
        radius = max(radius * WIDEN, 1e-3 * float(distances.max()))
    representative_of[strangers], distances[strangers] = assigned

    everyone = np.arange(len(representative_of))
    representatives, sizes = np.unique(representative_of, return_counts=True)
    cuts = range(0, len(representatives), BLOCK)
    packed = [take(blocks, representatives[start : start + BLOCK]) for start in cuts]
    tree = build_linkage(condensed_blocks(proximity, packed), method, sizes)
    followers = everyone[representative_of != everyone]
    pairs = np.concatenate(
        [np.stack([followers, representative_of[followers]], axis=1), representatives[merge_members(tree)]]
    )
    heights = np.concatenate([distances[followers].astype(np.float64), tree[:, 2]])
    return Represented(linkage_of(pairs, heights, np.ones_like(everyone)), len(representatives), radius)


def _usual_distance(proximity: str, block: Block) -> float:
    """The distance within which a client usually has a neighbour; beyond it are outliers (Tukey)."""
    if block.size < 2:
        return 0.0
    values = tile(proximity, block, block)
    np.fill_diagonal(values, np.inf)
    low, high = np.quantile(values.min(axis=1), (0.25, 0.75))
    return float(high + FENCE * (high - low))


def _assign_strangers(
    proximity: str, blocks: Sequence[Block], strangers: Ids, radius: float, max_leaders: int
) -> tuple[Ids, Distances] | None:
    """The representative of every stranger, and the distance to it.

    A stranger within the radius of an earlier one that is a representative is assigned to it; otherwise it
    becomes a representative itself.

    None if more than ``max_leaders`` strangers would become representatives.
    """
    leader_of, distances = strangers.copy(), np.zeros(len(strangers), np.float32)
    leaders: list[int] = []
    for start in range(0, len(strangers), BLOCK):
        ids = strangers[start : start + BLOCK]
        block = take(blocks, ids)
        free = np.ones(len(ids), np.bool_)
        if leaders:
            index, distance = nearest(proximity, block, take(blocks, np.array(leaders)))
            near = np.flatnonzero(distance <= radius)
            leader_of[start + near], distances[start + near] = np.array(leaders)[index[near]], distance[near]
            free[near] = False
        pairwise = tile(proximity, block)
        for place in range(len(ids)):
            if not free[place]:
                continue
            follow = place + 1 + np.flatnonzero((pairwise[place] <= radius)[place + 1 :] & free[place + 1 :])
            leader_of[start + follow], distances[start + follow] = ids[place], pairwise[place, follow]
            free[follow] = False
            leaders.append(int(ids[place]))
        if len(leaders) > max_leaders:
            return None
    return leader_of, distances
