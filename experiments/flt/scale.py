"""Seconds of FLT's one-shot part for many clients, compared with loops over pairs.

::

    RAYFL_DATA=... python experiments/flt/scale.py --clients 2400

Clients hold EMNIST's letters in five groups of five. Measured in one process: encoding, k-means, UMAP of all
centroids, the smallest distances of all pairs, the graph and Ward's tree. For comparison, the usual double
loop over pairs with a loop over centroids is timed on some pairs and extrapolated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.cluster import embed
from rayfl.clustering.config import Clustering
from rayfl.clustering.graph import auto_gamma, graph_clusters, threshold_graph
from rayfl.clustering.proximity import BLOCK, condensed_distances
from rayfl.clustering.quality import adjusted_rand_index
from rayfl.data import DATASETS, PARTITIONS, data_root
from rayfl.random import key
from rayfl.signatures.features.conv_ae import ConvAEFeatures
from rayfl.training.batches import raw_features

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

GROUPS, LABELS = 5, 5


def pair_loops(points: Sequence[NDArray[np.floating]], pairs: int = 1000) -> float:
    """Seconds of loops over all ordered pairs of clients and of centroids, extrapolated from ``pairs``
    pairs.
    """
    clients = len(points)
    start_time = time.perf_counter()
    for pair in range(pairs):
        first, second = points[pair % clients], points[(pair * 7 + 1) % clients]
        smallest = float("inf")
        for one in first:
            for other in second:
                smallest = min(smallest, float(np.linalg.norm(one - other)))
    return (time.perf_counter() - start_time) / pairs * clients * clients


def work(options: argparse.Namespace) -> None:
    """Time every step."""
    samples = DATASETS["emnist"].model_validate({"name": "emnist", "split": "letters"}).load(data_root())
    tasks = [
        {"labels": list(range(LABELS * g, LABELS * (g + 1))), "clients": options.clients // GROUPS}
        for g in range(GROUPS)
    ]
    assignment = PARTITIONS["tasks"].model_validate({"tasks": tasks}).assign(samples, 0)
    clients = len(assignment.clients)
    clustering = Clustering.model_validate(
        {"signature": "centroids", "features": "conv_ae", "embedding": "umap", "grouping": "graph"}
    )
    with timed("pretraining of the encoder, or reading it"):
        encoder = clustering.features.fit(np.empty((0, *samples.shape), np.float32), key(0, "features"))
    with timed(f"encoding of {sum(map(len, assignment.clients)):,} images of {clients:,} clients"):
        codes = [encoder.apply(raw_features(samples.x_train[ids])) for ids in assignment.clients]
    with timed("k-means"):
        centroids = [clustering.signature.compute(x, samples.y_train, i) for i, x in enumerate(codes)]
    if options.fine_tune:
        tuned = ConvAEFeatures(fine_tune=options.fine_tune).fit(
            np.empty((0, *samples.shape), np.float32), key(0, "features")
        )
        tuned.apply(raw_features(samples.x_train[assignment.clients[0]]))  # imports and compilation
        start_time = time.perf_counter()
        for client, ids in enumerate(list(assignment.clients)[:20]):
            tuned.apply(raw_features(samples.x_train[ids]), client)
        print(f"{(time.perf_counter() - start_time) / 20 * clients:8.1f} s  fine-tuning (from 20 clients)")
    with timed("UMAP, with import and compilation"):
        points = embed(clustering, centroids, 0)
    with timed("UMAP again"):
        points = embed(clustering, centroids, 0)
    with timed("distances of all pairs"):
        distances = condensed_distances("min_distance", points, precise=clients <= BLOCK)
    with timed("gamma auto"):
        gamma = auto_gamma(distances, clients)
    for threshold in (gamma, 1.0):
        with timed(f"graph at gamma {threshold:.2f}"):
            graph = threshold_graph(distances, clients, threshold)
        with timed("Ward's tree and its cut"):
            labels = graph_clusters(graph)
        ari = adjusted_rand_index(labels, assignment.groups) if assignment.groups is not None else np.nan
        rows = len(np.unique(graph.indptr[1:] - graph.indptr[:-1]))
        print(f"            {labels.max() + 1} clusters, ARI {ari:.2f}; relatives differ in {rows} numbers")
    print(f"{pair_loops(points):8.1f} s  loops over pairs and centroids (from 1,000 pairs)")


@contextmanager
def timed(what: str) -> Iterator[Any]:
    """Context manager that prints the seconds of its body."""
    begun = time.perf_counter()
    yield
    print(f"{time.perf_counter() - begun:8.1f} s  {what}", flush=True)


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--clients", type=int, default=2400),
        frame.option("--fine-tune", type=int, default=0, help="epochs (J), timed on 20 clients"),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS))
