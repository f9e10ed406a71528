"""Measure clustering at scale: seconds and memory of ``cluster_signatures`` over the number of clients.

The signatures are synthetic: every client's subspace lies near that of its planted cluster. For comparison,
the usual double loop over pairs is timed on some pairs and extrapolated. Every size runs in a separate
process, so that its peak memory can be measured; the peak includes the signatures and about 0.1 GB of
imports.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rayfl.units import duration, size

if TYPE_CHECKING:
    from rayfl.clustering.cluster import Clusters

FEATURES, VECTORS, CLUSTERS = 784, 3, 20

SPREAD = 0.6
"""How far the clusters' subspaces are from a common one: 21 to 38 degrees from one another."""
NOISE = 0.008
"""How far clients are from their cluster: 6 to 18 degrees from one another."""

BESIDE = 10_000
"""The number of clients at which two-stage clustering is compared with exact clustering, client by client."""
SHARE = 25
"""Clients per sampled representative in that comparison; the same ratio as at 100,000 clients."""


def planted(
    clients: int, noise: float = NOISE, seed: int = 0
) -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
    """Signatures ``(784, 3)`` of clients in 20 clusters, the largest 20 times the smallest, and the true
    labels.
    """
    rng = np.random.default_rng(seed)
    common = _orthonormal(rng.standard_normal((FEATURES, VECTORS)))
    directions = _orthonormal(rng.standard_normal((CLUSTERS, FEATURES, VECTORS)))
    bases = _orthonormal(common + SPREAD * directions)
    share = np.arange(1, CLUSTERS + 1) / (CLUSTERS * (CLUSTERS + 1) / 2)
    truth = rng.permutation(np.searchsorted(np.cumsum(share), (np.arange(clients) + 0.5) / clients))
    signatures: list[NDArray[np.float32]] = []
    for start in range(0, clients, 1024):
        groups = truth[start : start + 1024]
        scale = noise * rng.uniform(0.2, 1.0, (len(groups), 1, 1))
        moved = bases[groups] + scale * rng.standard_normal((len(groups), FEATURES, VECTORS))
        signatures.extend(_orthonormal(moved).astype(np.float32))
    return signatures, truth.astype(np.int64)


def double_loop(signatures: Sequence[NDArray[np.float32]], pairs: int = 3000) -> float:
    """Seconds of the double loop over all pairs of signatures ``(D, p)``, extrapolated from the first
    ``pairs`` pairs.
    """
    clients = len(signatures)
    done = 0
    start_time = time.perf_counter()
    for i in range(clients):
        for j in range(i + 1, clients):
            cosines = np.linalg.svd(signatures[i].T @ signatures[j], compute_uv=False)
            np.degrees(np.arccos(np.clip(cosines[0], -1.0, 1.0)))
            done += 1
            if done == pairs:
                break
        if done == pairs:
            break
    return (time.perf_counter() - start_time) / max(done, 1) * (clients * (clients - 1) / 2)


def run(
    sizes: Sequence[int] = (1000, 10_000, 30_000, 100_000),
    compared_clients: int | None = BESIDE,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Measure.

    Args:
        sizes: numbers of clients; above ``Clustering.exact_up_to`` the clustering is two-stage.
        compared_clients: the number of clients at which both are compared; None: no comparison.
        say: called with one line per result.

    Returns:
        One row per size: ``clients``, ``way`` (exact or two-stage), ``seconds``, ``peak_gb``,
        ``signatures_gb`` (the part of the peak that the signatures take), ``double_loop_seconds``
        (extrapolated), ``n_clusters``, ``ari`` (against the planted clusters); for two-stage clustering also
        ``representatives`` and ``agreement`` (ARI against exact clustering: an estimate, or at
        ``compared_clients`` over all of them).
    """
    plans: list[tuple[Callable[..., dict[str, Any]], int]] = [(measure, clients) for clients in sizes]
    if compared_clients is not None:
        plans.append((measure_beside, compared_clients))
    rows = []
    for function, clients in plans:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            row = fresh.submit(function, clients).result()
        say(
            f"{row['clients']:,} clients, {row['way']}: {duration(row['seconds'])}, "
            f"{size(1e9 * row['peak_gb'])}, ARI {row['ari']:.3f}; "
            f"the double loop {duration(row['double_loop_seconds'])}"
        )
        rows.append(row)
    return rows


def measure(clients: int) -> dict[str, Any]:
    """One row of :func:`run`, in this process."""
    from rayfl.clustering.cluster import cluster_signatures
    from rayfl.clustering.config import Clustering

    signatures, truth = planted(clients)
    loop = double_loop(signatures)
    return _row(clients, cluster_signatures(Clustering(), signatures, groups=truth), loop)


def measure_beside(clients: int) -> dict[str, Any]:
    """Compare two-stage with exact clustering, at a number of clients for which the exact one is feasible."""
    from rayfl.clustering.cluster import cluster_signatures
    from rayfl.clustering.config import Clustering
    from rayfl.clustering.quality import adjusted_rand_index

    signatures, truth = planted(clients)
    loop = double_loop(signatures)
    staged = Clustering(exact_up_to=2 * clients // SHARE)
    row = _row(clients, cluster_signatures(staged, signatures, groups=truth), loop)
    exact = cluster_signatures(Clustering(exact_up_to=clients), signatures)
    sampled = cluster_signatures(staged, signatures)
    return {**row, "agreement": adjusted_rand_index(sampled.labels, exact.labels)}


def _row(clients: int, clusters: Clusters, loop: float) -> dict[str, Any]:
    return {
        "clients": clients,
        "way": "exact" if clusters.representatives is None else "two-stage",
        "seconds": clusters.seconds,
        "peak_gb": _peak_memory() / 1e9,
        "signatures_gb": clients * FEATURES * VECTORS * 4 / 1e9,
        "double_loop_seconds": loop,
        "n_clusters": clusters.n_clusters,
        "ari": clusters.ari,
        "representatives": clusters.representatives,
        "agreement": clusters.agreement,
    }


def _orthonormal(bases: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.qr(bases)[0], np.float64)


def _peak_memory() -> int:
    """Peak resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, getrusage may report the peak of the parent process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
