import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rayfl.clustering.cluster import cluster_signatures
from rayfl.clustering.config import Clustering
from rayfl.clustering.embeddings.none import NoEmbedding
from rayfl.clustering.embeddings.umap import Umap
from rayfl.clustering.proximity import condensed_distances
from rayfl.data import DATASETS, PARTITIONS
from rayfl.errors import DataError
from rayfl.signatures.centroids import Centroids
from rayfl.signatures.features.conv_ae import ConvAEFeatures


def clouds(clients=30, groups=3, k=4, dim=6, seed=0):
    rng = np.random.default_rng(seed)
    places = 4 * rng.normal(size=(groups, k, dim))
    return [places[i % groups] + 0.3 * rng.normal(size=(k, dim)) for i in range(clients)]


def digest(points):
    return hashlib.sha256(np.concatenate(points).tobytes()).hexdigest()


def test_no_embedding_changes_nothing():
    points = clouds()
    assert NoEmbedding().embed(points, 1) is points
    assert Clustering().embedding == NoEmbedding()


def test_what_umap_cannot_embed_is_refused_before_it_is_imported():
    with pytest.raises(DataError, match="UMAP needs 5 points, there are 4; use embedding none"):
        Umap().embed([np.ones((2, 3))] * 2)
    with pytest.raises(DataError, match="UMAP needs 9 points"):
        Umap(dim=7).embed([np.ones((4, 30))] * 2)
    with pytest.raises(DataError, match="different shapes"):
        Umap().embed([np.ones((4, 3)), np.ones((4, 2))])
    alone = [np.ones((4, 3))]
    assert Umap().embed(alone) is alone  # there is nobody to be compared with


@pytest.mark.slow
def test_umap_keeps_groups_apart_and_clients_in_order():
    points = clouds()
    ragged = [p[: 1 + i % 4] if i % 6 == 5 else p for i, p in enumerate(points)]
    embedded = Umap().embed(ragged, key=3)
    assert [len(p) for p in embedded] == [len(p) for p in ragged]
    assert all(p.shape[1] == 2 for p in embedded)
    flt = Clustering.model_validate({"signature": "centroids", "embedding": "umap", "grouping": "graph"})
    assert cluster_signatures(flt, points, groups=np.arange(30) % 3, seed=1).ari == 1
    few = Umap(n_neighbors=15).embed([p[:1] for p in points[:6]], key=3)  # neighbours: 5 at most
    assert np.isfinite(np.concatenate(few)).all()
    same = Umap().embed([np.ones((2, 3))] * 4, key=1)
    assert np.isfinite(np.concatenate(same)).all()


@pytest.mark.slow
def test_umap_gives_the_same_bits_in_any_process_on_any_number_of_threads():
    program = (
        "from tests.clustering.test_embeddings import clouds, digest; "
        "from rayfl.clustering.embeddings.umap import Umap; "
        "print(digest(Umap().embed(clouds(), 3)), digest(Umap().embed(clouds(), 4)))"
    )
    found = []
    for threads in ("1", "2"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        found.append(done.stdout.split())
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.slow
def test_the_groups_of_flt_are_found_on_real_letters(
    real_data: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLT's scenario 4 in small: 120 clients, five groups of letters, an encoder that saw clothes only."""
    root = real_data("emnist_letters", "fashion_mnist")
    monkeypatch.setenv("RAYFL_DATA", str(root))
    samples = DATASETS["emnist"].model_validate({"name": "emnist", "split": "letters"}).load(root)
    tasks = [{"labels": list(range(5 * group, 5 * group + 5)), "clients": 24} for group in range(5)]
    partition = {"name": "tasks", "tasks": tasks, "sizes": "power", "min_samples": 50}
    assignment = PARTITIONS["tasks"].model_validate(partition).assign(samples, 0)
    encoder = ConvAEFeatures().fit(np.empty((0, 1, 28, 28), np.float32), 0)
    signatures = []
    for client, ids in enumerate(assignment.clients):
        codes = encoder.apply(samples.x_train[ids] / np.float32(255))
        signatures.append(Centroids().compute(codes, samples.y_train[ids], client))

    def found(**settings):
        flt = {"signature": "centroids", "embedding": "umap", "grouping": "graph", **settings}
        clustering = Clustering.model_validate(flt)
        return cluster_signatures(clustering, signatures, groups=assignment.groups)

    assert found(gamma=1.0, n_clusters=5).ari > 0.6
    assert found(gamma=0.5, n_clusters=5).ari > 0.8
    auto = found(gamma="auto")
    assert auto.ari > 0.9
    assert auto.n_clusters == 5
    assert 0.15 < auto.gamma < 0.6
    plain = found(embedding="none", grouping="hierarchical", n_clusters=5)
    assert plain.ari < auto.ari
    assert condensed_distances("min_distance", signatures).min() > 0
