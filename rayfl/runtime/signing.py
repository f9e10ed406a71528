"""One-shot clustering: signatures at the clients, the second step of an exchange, the remote task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.cluster import Clusters, cluster_signatures
from rayfl.clustering.config import Clustering
from rayfl.data import Federation
from rayfl.evaluation import Transfer
from rayfl.random import generator, key
from rayfl.runtime.backend import Backend, Ref, Task
from rayfl.runtime.jobs import SignJob
from rayfl.training import raw_features


def cluster_clients(
    backend: Backend, federation: Federation, clustering: Clustering, seed: int, round: int, block_size: int
) -> tuple[Clusters, list[Transfer]]:
    """Cluster all clients by their signatures, which stay in the object store.

    Returns:
        The clusters, and the bytes that the signatures cost (4 a number).
    """
    if not clustering.needs_signatures:
        task = backend.call(_cluster, clustering, federation.groups, seed, federation.clients, 0)
        return backend.get(task), []
    public = _public_sample(federation, clustering.features.public_samples, seed)
    fitted = clustering.features.fit(public, key(seed, "features"))
    ids = np.arange(federation.clients)
    blocks = [ids[start : start + block_size] for start in range(0, len(ids), block_size)]
    jobs = [SignJob(block, clustering.signature, fitted, seed) for block in blocks]
    costs = [float(federation.sizes[block].sum()) for block in blocks]
    signatures, floats = _collect(backend, "sign", jobs, costs, ())
    relations: list[Ref] = []
    down = answers = 0
    if clustering.signature.needs_exchange:
        relations, answers = _collect(backend, "relate", jobs, costs, signatures)
        down = floats * federation.clients
    task = backend.call(
        _cluster,
        clustering,
        federation.groups,
        seed,
        federation.clients,
        len(signatures),
        *signatures,
        *relations,
    )
    up = floats + answers
    transfers = [Transfer(round, "client_lps", "up", "signature", 4 * up)]
    if down:
        transfers.append(Transfer(round, "client_lps", "down", "signature", 4 * down))
    return backend.get(task), transfers


def _collect(
    backend: Backend, method: str, jobs: Sequence[SignJob], costs: Sequence[float], extra: Sequence[Ref]
) -> tuple[list[Ref], int]:
    """Run one job a block; the refs of the results in the order of the blocks, and the numbers sent."""
    tasks = [Task(method, (job, *extra), cost, returns=2) for job, cost in zip(jobs, costs, strict=True)]
    refs: list[Ref] = [None] * len(tasks)
    floats = 0
    for index, (count, ref) in backend.run(tasks):
        refs[index] = ref
        floats += count
    return refs, floats


def _public_sample(federation: Federation, count: int, seed: int) -> NDArray[np.float32]:
    """What the server may look at to fit a feature map: images of the test split, no client's own data."""
    x = federation.samples.x_test
    draw = generator(seed, "public sample").choice(len(x), min(count, len(x)), replace=False)
    return raw_features(x[np.sort(draw)])


def _cluster(
    clustering: Clustering,
    groups: NDArray[np.int64] | None,
    seed: int,
    clients: int,
    blocks: int,
    *objects: Any,
) -> Clusters:
    """The remote task ``cluster_signatures``: references in, clusters out."""
    signatures = [signature for block in objects[:blocks] for signature in block]
    relations = [row for block in objects[blocks:] for row in block]
    clusters = cluster_signatures(clustering, signatures, relations or None, groups, seed, clients=clients)
    return replace(clusters, distances=None, linkage=None)  # N^2 numbers that the driver has no use for


def facts(clusters: Clusters) -> dict[str, Any]:
    """How the clusters were found, for ``clusters.json``: the cut, and the whole beta -> number curve."""
    curve = clusters.curve
    return {
        "threshold": clusters.threshold,
        "suggested": clusters.suggested,
        "curve": None
        if curve is None
        else {"threshold": curve.thresholds.tolist(), "n_clusters": curve.counts.tolist()},
    }
