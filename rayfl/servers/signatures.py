"""One-shot clustering: signatures at the clients, the second step of an exchange, the remote tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.backend import RESULT, Backend, Key, Ref, Task
from rayfl.clients.jobs import RELATIONS, SIGNATURES, SignJob
from rayfl.clustering.cluster import (
    Clusters,
    cluster_signatures,
    embed,
    from_distances,
    from_representatives,
    refuse,
)
from rayfl.clustering.config import Clustering
from rayfl.clustering.memory import check_memory
from rayfl.clustering.proximity import BLOCK, Block, Distances, pack, place, take, tile
from rayfl.clustering.two_stage import nearest, sample
from rayfl.data import Federation, Samples
from rayfl.errors import ConfigError, RayflError
from rayfl.evaluation import Transfer
from rayfl.memory import free_memory
from rayfl.random import generator, key
from rayfl.training import LocalWork, raw_features


@dataclass(frozen=True)
class Trainee:
    """What clients train for signatures of trained models: a model, by reference, and round 0's work."""

    model: Ref
    work: LocalWork


@dataclass(frozen=True)
class Wanted:
    """Whose signatures are wanted.

    Attributes:
        ids: clients ``(n,)``.
        stages: the stage of the federation whose data each signature is of ``(n,)``.
        sends: whether the client sends it now; the servers have the others ``(n,)``.
        present: whether the client is present ``(n,)``; None: all are.
        heard: of an exchange, whether client i has received the signature of client j ``(n, n)``; None: all
            have.
    """

    ids: NDArray[np.int64]
    stages: NDArray[np.int64]
    sends: NDArray[np.bool_]
    present: NDArray[np.bool_] | None = None
    heard: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, ids: NDArray[np.int64], stages: NDArray[np.int64] | int = 0) -> Wanted:
        """Of clients that all send theirs now."""
        return cls(ids, np.broadcast_to(stages, ids.shape), np.ones(len(ids), np.bool_))

    def without(self, clients: Sequence[int]) -> Wanted:
        """The same without some clients."""
        left = ~np.isin(self.ids, clients)
        present = None if self.present is None else self.present[left]
        heard = None if self.heard is None else self.heard[np.ix_(left, left)]
        return Wanted(self.ids[left], self.stages[left], self.sends[left], present, heard)


class NoSignature(RayflError):
    """Clients that have no signature.

    Args:
        failures: why, by client id.
    """

    def __init__(self, failures: Mapping[int, RayflError]) -> None:
        self.failures = failures
        super().__init__(failures)

    def __str__(self) -> str:
        return str(self.failures[min(self.failures)])


def cluster_clients(
    backend: Backend,
    federation: Federation,
    clustering: Clustering,
    seed: int,
    round: int,
    block_size: int,
    tile_size: int = BLOCK,
    who: Wanted | None = None,
    trained: Trainee | None = None,
    whole: bool = False,
    again: bool = False,
) -> tuple[Clusters, list[Transfer]]:
    """Cluster clients by their signatures, which stay in the object store.

    Up to ``tile_size`` clients, and relations of an exchange, are one remote task. Otherwise the client
    actors, which have nothing else to do then, make the tiles of ``tile_size`` x ``tile_size`` clients (or,
    above ``exact_up_to``, find the nearest representatives), and one task links them.

    Args:
        backend: who does the work.
        federation: the clients' data.
        clustering: the settings.
        seed: the run's seed.
        round: the coming round, for the ledger.
        block_size: clients in a message.
        tile_size: see above.
        who: which clients, ascending; default: all, as they are at first.
        trained: for signatures of trained models: what the clients train.
        whole: return the distances and the tree too, for up to ``tile_size`` clients.
        again: whether everybody has the feature map from before.

    Returns:
        The clusters (labels in the order of ``who.ids``), and the bytes that the signatures cost.

    Raises:
        NoSignature: if clients have none.
        RayflError: before any signature is computed, if the clients are too many (see
            :func:`rayfl.clustering.cluster.refuse`).
    """
    who = Wanted.of(np.arange(federation.clients)) if who is None else who
    clients = len(who.ids)
    groups = None if federation.groups is None else federation.groups[who.ids]
    if not clustering.needs_signatures:
        return backend.get(backend.call(_cluster, clustering, groups, seed, clients, whole, None, 0)), []
    refuse(clustering, clients)
    signed = _sign(backend, federation, clustering, seed, round, block_size, who, trained, again)
    signatures, transfers = signed.refs, signed.transfers
    relations: list[Ref] = []
    if clustering.signature.needs_exchange:
        everyone: dict[Key, Ref] = {("signatures", block): ref for block, ref in enumerate(signatures)}
        costs = _costs(federation, signed.jobs)
        relations, _ = _collect(backend, "relate", signed.jobs, costs, everyone, RELATIONS)
        transfers = _exchanged(signed, round)
    if relations or clients <= tile_size:
        task = backend.call(
            _cluster,
            clustering,
            groups,
            seed,
            clients,
            whole,
            who.heard,
            len(signatures),
            *signatures,
            *relations,
        )
    else:
        if clustering.embedding.name != "none":  # one task sees all of them; what it returns is small
            signatures, block_size = [backend.call(_embed, clustering, seed, *signatures)], clients
        packed = _pack(backend, clustering, signatures, clients, block_size, tile_size)
        del signatures
        if clients <= clustering.exact_up_to:
            task = _link_tiles(backend, clustering, packed, groups, clients, tile_size)
        else:
            task = _link_representatives(backend, clustering, packed, groups, clients, seed)
    return backend.get(task), transfers


def sign_clients(
    backend: Backend,
    federation: Federation,
    clustering: Clustering,
    seed: int,
    round: int,
    block_size: int,
    who: Wanted,
    trained: Trainee | None = None,
) -> tuple[list[NDArray[np.float32]], list[Transfer]]:
    """The signatures of some clients, here, and the bytes that they cost; as :func:`cluster_clients`."""
    signed = _sign(backend, federation, clustering, seed, round, block_size, who, trained, False)
    return [signature for block in backend.get(signed.refs) for signature in block], signed.transfers


def check_clients(
    backend: Backend,
    federation: Federation,
    clustering: Clustering,
    seed: int,
    round: int,
    block_size: int,
    who: Wanted,
) -> None:
    """Compute signatures of data, and drop them.

    Raises:
        NoSignature: if clients have none.
    """
    if len(who.ids):
        _sign(backend, federation, clustering, seed, round, block_size, who, None, False)


@dataclass(frozen=True)
class _Signed:
    """Signatures of clients.

    Attributes:
        jobs: of blocks of clients.
        refs: the signatures of each block, by reference.
        floats: how many numbers each client sends ``(n,)``.
        who: whether it does, or the servers have them.
        transfers: the bytes of that.
    """

    jobs: list[SignJob]
    refs: list[Ref]
    floats: NDArray[np.int64]
    who: Wanted
    transfers: list[Transfer]


def _sign(
    backend: Backend,
    federation: Federation,
    clustering: Clustering,
    seed: int,
    round: int,
    block_size: int,
    who: Wanted,
    trained: Trainee | None,
    again: bool,
) -> _Signed:
    """The signatures of blocks of clients, and the bytes that they cost.

    Raises:
        NoSignature: if clients have none.
    """
    signature, known = clustering.signature, federation.samples
    sample = _public_sample(known, clustering.features.public_samples, seed)
    fitted = clustering.features.fit(sample, key(seed, "features"))
    extra: dict[Key, Ref] = {}
    work = None
    if signature.trained:
        if trained is None:
            raise ConfigError(
                "clustering.signature", f"{signature.name} is one of trained models", "use it in a run"
            )
        report = backend.put(signature.report().prepare(known, seed))
        extra, work = {("report", "signature"): report, ("model", 0): trained.model}, trained.work
    blocks = [slice(first, first + block_size) for first in range(0, len(who.ids), block_size)]
    jobs = [
        SignJob(who.ids[block], signature, fitted, seed, who.stages[block], block.start, work)
        for block in blocks
    ]
    refs, reports = _collect(backend, "sign", jobs, _costs(federation, jobs), extra, SIGNATURES)
    failures = {client: error for report in reports for client, error in report.failures.items()}
    if failures:
        raise NoSignature(failures)
    floats, sends = np.concatenate([report.floats for report in reports]), who.sends
    sent = 4 * int(floats[sends].sum())
    transfers = [Transfer(round, "client_lps", "up", "signature", sent)]
    if fitted.floats and not again:
        map_bytes = 4 * fitted.floats * int(sends.sum())
        transfers.append(Transfer(round, "client_lps", "down", "signature", map_bytes))
    if signature.trained:  # they send the model that they have received first
        transfers.append(Transfer(round, "client_lps", "down", "signature", sent))
    return _Signed(jobs, refs, floats, who, transfers)


def _exchanged(signed: _Signed, round: int) -> list[Transfer]:
    """The bytes of signatures that everybody receives from the others, and of the relations that come back.

    Of two clients that have exchanged theirs before, nothing more is sent.
    """
    sends, clients = signed.who.sends, len(signed.who.ids)
    new, present = int(sends.sum()), clients
    if signed.who.present is not None:
        present = int(signed.who.present.sum())
    fresh, everything = int(signed.floats[sends].sum()), int(signed.floats.sum())
    down = fresh * (present - new) + everything * new - fresh  # nobody receives its own
    relations = new * (present - new) + clients * new
    first, *rest = signed.transfers
    return [
        replace(first, bytes=first.bytes + 4 * relations),
        *rest,
        Transfer(round, "client_lps", "down", "signature", 4 * down),
    ]


def _costs(federation: Federation, jobs: Sequence[SignJob]) -> list[float]:
    return [float(federation.sizes[job.clients].sum()) for job in jobs]


def _embed(
    clustering: Clustering, seed: int, *parts: list[NDArray[np.float32]]
) -> Sequence[NDArray[np.floating]]:
    return embed(clustering, [signature for part in parts for signature in part], seed)


def _pack(
    backend: Backend,
    clustering: Clustering,
    signatures: Sequence[Ref],
    clients: int,
    block_size: int,
    tile_size: int,
) -> list[Ref]:
    """The signatures of ``tile_size`` clients each, side by side."""
    measure, vectors = clustering.measure, clustering.signature.vectors
    calls = []
    for start in range(0, clients, tile_size):
        first, last = start // block_size, -(-min(start + tile_size, clients) // block_size)
        skip = start - first * block_size
        calls.append((1.0, _pack_block, (measure, vectors, start, skip, tile_size, *signatures[first:last])))
    return _spread(backend, calls)


def _pack_block(
    measure: str, vectors: int | None, start: int, skip: int, count: int, *parts: list[NDArray[np.float32]]
) -> Block:
    signatures = [signature for part in parts for signature in part]
    return pack(measure, signatures[skip : skip + count], start, vectors)


def _link_tiles(
    backend: Backend,
    clustering: Clustering,
    packed: Sequence[Ref],
    groups: NDArray[np.int64] | None,
    clients: int,
    tile_size: int,
) -> Ref:
    """The symmetric half of the tiles, then the tree of all clients."""
    at = [(i, j) for i in range(len(packed)) for j in range(i, len(packed))]
    calls = [
        (1.0 + (i != j), tile, (clustering.measure, packed[i], packed[j] if i != j else None)) for i, j in at
    ]
    tiles = _spread(backend, calls)
    corners = [(i * tile_size, j * tile_size) for i, j in at]
    return backend.call(_from_tiles, clustering, groups, clients, corners, *tiles)


def _from_tiles(
    clustering: Clustering,
    groups: NDArray[np.int64] | None,
    clients: int,
    corners: Sequence[tuple[int, int]],
    *tiles: Distances,
) -> Clusters:
    """The remote task: tiles into condensed form, and that into clusters."""
    check_memory(clients, free_memory(), tiles[0].itemsize)  # here: the tiles are in the object store already
    distances = np.empty(clients * (clients - 1) // 2, tiles[0].dtype)
    for (row, column), values in zip(corners, tiles, strict=True):
        place(distances, clients, row, column, values)
    return _lean(from_distances(clustering, distances, groups))


def _link_representatives(
    backend: Backend,
    clustering: Clustering,
    packed: Sequence[Ref],
    groups: NDArray[np.int64] | None,
    clients: int,
    seed: int,
) -> Ref:
    """The nearest representative of everyone, then the tree by way of representatives."""
    sampled = sample(clients, clustering.exact_up_to, seed)
    representatives = backend.call(_take, sampled, *packed)
    answers = _spread(
        backend, [(1.0, nearest, (clustering.measure, block, representatives)) for block in packed]
    )
    return backend.call(
        _from_representatives, clustering, groups, seed, sampled, len(packed), *packed, *answers
    )


def _take(ids: NDArray[np.int64], *blocks: Block) -> Block:
    return take(blocks, ids)


def _from_representatives(
    clustering: Clustering,
    groups: NDArray[np.int64] | None,
    seed: int,
    sampled: NDArray[np.int64],
    blocks: int,
    *objects: Any,
) -> Clusters:
    """The remote task: blocks and who is nearest to whom into clusters."""
    return _lean(from_representatives(clustering, objects[:blocks], sampled, objects[blocks:], groups, seed))


def _spread(
    backend: Backend, calls: Sequence[tuple[float, Callable[..., Any], tuple[Any, ...]]]
) -> list[Ref]:
    """Do (cost, function, arguments) on the client actors; the refs of the results, in order."""
    tasks = [Task.calling(function, *args, cost=cost) for cost, function, args in calls]
    return [done.refs[RESULT] for done in backend.run_in_order(tasks)]


def _collect(
    backend: Backend,
    method: str,
    jobs: Sequence[SignJob],
    costs: Sequence[float],
    objects: Mapping[Key, Ref],
    wanted: Key,
) -> tuple[list[Ref], list[Any]]:
    """Run one job a block: what is wanted of each, by reference, and the reports, in this order."""
    tasks = [Task(method, job, objects, (wanted,), cost=cost) for job, cost in zip(jobs, costs, strict=True)]
    done = backend.run_in_order(tasks)
    return [one.refs[wanted] for one in done], [one.report for one in done]


def _public_sample(samples: Samples, count: int, seed: int) -> NDArray[np.float32]:
    """What the server looks at to fit a feature map: samples that no client has."""
    x = samples.public(count, generator(seed, "public sample"))
    return raw_features(x, len(samples.vocabulary), samples.scaling)


def _cluster(
    clustering: Clustering,
    groups: NDArray[np.int64] | None,
    seed: int,
    clients: int,
    whole: bool,
    heard: NDArray[np.bool_] | None,
    blocks: int,
    *objects: Any,
) -> Clusters:
    """The remote task ``cluster_signatures``: references in, clusters out.

    Of two clients of which one has not received the other's signature, the relation that is known counts for
    both directions.
    """
    signatures = [signature for block in objects[:blocks] for signature in block]
    relations = [row for block in objects[blocks:] for row in block]
    if relations and heard is not None:
        both = np.stack(relations)
        relations = list(np.where(heard, both, both.T))
    found = cluster_signatures(clustering, signatures, relations or None, groups, seed, clients=clients)
    return found if whole else _lean(found)


def _lean(clusters: Clusters) -> Clusters:
    """Without the N^2 numbers that the driver has no use for."""
    return replace(clusters, distances=None, linkage=None)


CURVE = 1000
"""Steps of the beta -> number curve that are written for each of its halves: few clusters, and many."""


def facts(clusters: Clusters) -> dict[str, Any]:
    """How the clusters were found, for ``clusters.json``: the cut, and the beta -> number curve.

    Of a graph gamma and the mean number of a client's relatives.

    The curve is whole up to ``CURVE`` clusters; of its steps to more, at most ``CURVE`` are kept.
    """
    found: dict[str, Any] = {"threshold": clusters.threshold, "suggested": clusters.suggested, "curve": None}
    if clusters.curve is not None:
        thresholds, counts = clusters.curve.thresholds, clusters.curve.counts
        many = int((counts > CURVE).sum())
        kept = np.r_[: many : max(1, -(-many // CURVE)), many : len(counts)]
        found["curve"] = {"threshold": thresholds[kept].tolist(), "n_clusters": counts[kept].tolist()}
    if clusters.graph is not None:
        clients = int((clusters.labels >= 0).sum())
        relatives = (clusters.graph.nnz - clients) / clients
        found["graph"] = {"gamma": clusters.gamma, "relatives": relatives}
    if clusters.representatives is not None:
        found["two_stage"] = {
            "representatives": clusters.representatives,
            "radius": clusters.radius,
            "agreement": clusters.agreement,
        }
    return found
