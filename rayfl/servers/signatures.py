"""Signatures at the servers: which are needed, what they cost, and the remote tasks that cluster clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.backend import RESULT, Backend, Ref, Task
from rayfl.clients.jobs import SignatureJob
from rayfl.clustering.cluster import (
    Clusters,
    cluster_signatures,
    embed,
    from_distances,
    from_representatives,
)
from rayfl.clustering.config import Clustering
from rayfl.clustering.memory import check_memory
from rayfl.clustering.plane import MapMethod
from rayfl.clustering.proximity import BLOCK, Block, Distances, pack, take, tile, write_tile
from rayfl.clustering.two_stage import nearest, sample
from rayfl.errors import RayflError
from rayfl.evaluation import Transfer
from rayfl.memory import free_memory

TILE = BLOCK
"""Clients per tile of the distance matrix; one task computes a tile."""


@dataclass(frozen=True)
class SignatureRequest:
    """Which signatures are needed.

    Attributes:
        clustering: the settings.
        clients: ids ``(n,)``, ascending.
        stages: the stage of the federation whose data each signature describes ``(n,)``.
        sends: whether the client sends it now ``(n,)``; the servers already have the others.
        present: whether the client is present ``(n,)``.
        has_feature_map: whether the client already has the feature map ``(n,)``.
        received: for an exchange, whether client i has received the signature of client j ``(n, n)``; None:
            all have.
    """

    clustering: Clustering
    clients: NDArray[np.int64]
    stages: NDArray[np.int64]
    sends: NDArray[np.bool_]
    present: NDArray[np.bool_]
    has_feature_map: NDArray[np.bool_]
    received: NDArray[np.bool_] | None = None

    def without(self, clients: Collection[int]) -> SignatureRequest:
        """The same request without some clients."""
        remaining = ~np.isin(self.clients, list(clients))
        return replace(
            self,
            clients=self.clients[remaining],
            stages=self.stages[remaining],
            sends=self.sends[remaining],
            present=self.present[remaining],
            has_feature_map=self.has_feature_map[remaining],
            received=None if self.received is None else self.received[np.ix_(remaining, remaining)],
        )


@dataclass(frozen=True)
class Signatures:
    """The answer to a request, in blocks of clients.

    Attributes:
        request: the request that is answered.
        jobs: one per block.
        refs: the signatures of each block, by reference.
        floats: how many numbers each client sends ``(n,)``, without the clients that failed.
        map_floats: how many numbers the server sends to each client for the feature map.
        failures: client id -> why it has no signature.
    """

    request: SignatureRequest
    jobs: Sequence[SignatureJob]
    refs: Sequence[Ref]
    floats: NDArray[np.int64]
    map_floats: int
    failures: Mapping[int, RayflError]

    def transfers(self, round: int, exchanged: bool) -> list[Transfer]:
        """What the clients send and receive for the request.

        Args:
            round: the next round, for the ledger.
            exchanged: whether all signatures are sent to all clients, which return relations. Clients that
                have exchanged their signatures before send nothing more to each other.
        """
        sends, n = self.request.sends, len(self.request.clients)
        new, present = int(sends.sum()), int(self.request.present.sum())
        sent, everything = int(self.floats[sends].sum()), int(self.floats.sum())
        up, down = sent, self.map_floats * int((sends & ~self.request.has_feature_map).sum())
        # Such signatures are computed from a model that the clients receive first
        if self.request.clustering.signature.trained:
            down += sent
        if exchanged:
            up += new * (present - new) + n * new
            down += sent * (present - new) + everything * new - sent  # no client receives its own
        ledger_entries = [
            Transfer(round, "client_lps", "up", "signature", 4 * up),
            Transfer(round, "client_lps", "down", "signature", 4 * down),
        ]
        return [transfer for transfer in ledger_entries if transfer.bytes]


@dataclass(frozen=True)
class Grouping:
    """What the remote tasks need in order to make clusters from signatures or distances.

    Attributes:
        clustering: the settings.
        clients: how messages name them ``(n,)``: their numbers, or the user's ids.
        groups: their planted groups ``(n,)``, if known.
        seed: the run's seed.
        keep_distances: whether to return the distances and the tree too, if there are few enough clients.
        map: how to make the map that otherwise replaces the distances.
    """

    clustering: Clustering
    clients: NDArray[Any]
    groups: NDArray[np.int64] | None
    seed: int
    keep_distances: bool = False
    map: MapMethod = "mds"


def cluster_blocks(backend: Backend, grouping: Grouping, blocks: Sequence[Ref], size: int) -> Ref:
    """Cluster clients by their signatures, which stay in the object store.

    Up to ``TILE`` clients, and groupings without signatures, need one remote task. Otherwise the client
    actors, which are idle at this time, compute tiles of ``TILE`` x ``TILE`` distances (or, above
    ``exact_up_to``, find the nearest representatives), and one task links them.

    Args:
        backend: executes the work.
        grouping: settings and clients.
        blocks: the signatures; empty for groupings without signatures.
        size: clients per block.

    Returns:
        The :class:`~rayfl.clustering.cluster.Clusters`, by reference.
    """
    clustering, n = grouping.clustering, len(grouping.clients)
    if n <= TILE or not clustering.needs_signatures:
        return backend.call(_cluster_at_once, grouping, *blocks)
    if clustering.embedding.name != "none":  # one task reads all of them; its result is small
        blocks, size = [backend.call(_embed, grouping, *blocks)], n
    tasks = []
    for start in range(0, n, TILE):
        first, last = start // size, -(-min(start + TILE, n) // size)
        skipped = start - first * size
        ids = grouping.clients[start : start + TILE]
        tasks.append(Task.calling(_pack, clustering, ids, skipped, *blocks[first:last]))
    packed = _call_all(backend, tasks)
    if n <= clustering.exact_up_to:
        return _cluster_tiles(backend, grouping, packed)
    sampled = sample(n, clustering.exact_up_to, grouping.seed)
    representatives = backend.call(_take, sampled, *packed)
    tasks = [Task.calling(nearest, clustering.measure, block, representatives) for block in packed]
    nearby = _call_all(backend, tasks)
    return backend.call(_from_representatives, grouping, sampled, *packed, *nearby)


def cluster_relations(
    backend: Backend, grouping: Grouping, received: NDArray[np.bool_] | None, relations: Sequence[Ref]
) -> Ref:
    """Cluster clients by the relations of an exchange, in one remote task.

    If only one of two clients has received the other's signature, its relation is used for both directions.

    Args:
        backend: executes the work.
        grouping: settings and clients.
        received: see :class:`SignatureRequest`.
        relations: rows ``(B, n)``, one array per block.

    Returns:
        The :class:`~rayfl.clustering.cluster.Clusters`, by reference.
    """
    return backend.call(_from_relations, grouping, received, *relations)


def _call_all(backend: Backend, tasks: Sequence[Task]) -> list[Ref]:
    """The results of calls on the client actors, in the order of the calls."""
    return [done.refs[RESULT] for done in backend.run_in_order(tasks)]


def _cluster_tiles(backend: Backend, grouping: Grouping, packed: Sequence[Ref]) -> Ref:
    """The symmetric half of the tiles, then the tree of all clients."""
    measure = grouping.clustering.measure
    places = [(i, j) for i in range(len(packed)) for j in range(i, len(packed))]
    tasks = [
        Task.calling(tile, measure, packed[i], packed[j] if i != j else None, cost=1.0 + (i != j))
        for i, j in places
    ]
    tiles = _call_all(backend, tasks)
    return backend.call(_from_tiles, grouping, [(i * TILE, j * TILE) for i, j in places], *tiles)


# --- remote tasks: they get values where callers give references ----------------------------------------


def _cluster_at_once(grouping: Grouping, *blocks: list[NDArray[np.float32]]) -> Clusters:
    return _make_clusters(grouping, [signature for block in blocks for signature in block])


def _from_relations(
    grouping: Grouping, received: NDArray[np.bool_] | None, *blocks: NDArray[np.float64]
) -> Clusters:
    rows = [row for block in blocks for row in block]
    if received is not None:
        relations = np.stack(rows)
        rows = list(np.where(received, relations, relations.T))
    return _make_clusters(grouping, [], rows)


def _make_clusters(
    grouping: Grouping,
    signatures: Sequence[NDArray[np.float32]],
    relations: Sequence[NDArray[np.float64]] | None = None,
) -> Clusters:
    ids = grouping.clients
    clusters = cluster_signatures(
        grouping.clustering, signatures, relations, grouping.groups, grouping.seed, len(ids), ids
    )
    return clusters if grouping.keep_distances else clusters.without_distances(grouping.map, grouping.seed)


def _embed(grouping: Grouping, *blocks: list[NDArray[np.float32]]) -> Sequence[NDArray[np.floating]]:
    signatures = [signature for block in blocks for signature in block]
    return embed(grouping.clustering, signatures, grouping.seed, grouping.clients)


def _pack(
    clustering: Clustering, ids: NDArray[Any], skipped: int, *blocks: list[NDArray[np.float32]]
) -> Block:
    """The signatures of clients ``ids`` ``(m,)``, which follow the first ``skipped`` ones of the blocks."""
    signatures = [signature for block in blocks for signature in block][skipped : skipped + len(ids)]
    return pack(clustering.measure, signatures, ids, clustering.signature.vectors)


def _from_tiles(grouping: Grouping, corners: Sequence[tuple[int, int]], *tiles: Distances) -> Clusters:
    """Make clusters from tiles, by way of condensed distances."""
    n = len(grouping.clients)
    # In this process, because the tiles are already in the object store
    check_memory(n, free_memory(), tiles[0].itemsize)
    distances = np.empty(n * (n - 1) // 2, tiles[0].dtype)
    for (row, column), values in zip(corners, tiles, strict=True):
        write_tile(distances, n, row, column, values)
    clusters = from_distances(grouping.clustering, distances, grouping.groups)
    return clusters.without_distances(grouping.map, grouping.seed)


def _take(ids: NDArray[np.int64], *blocks: Block) -> Block:
    return take(blocks, ids)


def _from_representatives(grouping: Grouping, sampled: NDArray[np.int64], *objects: Any) -> Clusters:
    """Make clusters from packed signatures and the nearest representative of each client."""
    packed, nearby = objects[: len(objects) // 2], objects[len(objects) // 2 :]
    clustering, groups, seed = grouping.clustering, grouping.groups, grouping.seed
    return from_representatives(clustering, packed, sampled, nearby, groups, seed).without_distances()
