"""A joint embedding through a backend: in one task, and before the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from rayfl.clustering.config import Clustering
from rayfl.clustering.embeddings.base import Embedding
from rayfl.config import load
from rayfl.runtime.inline import InlineBackend
from rayfl.servers.building import build
from rayfl.servers.signatures import cluster_clients, facts
from rayfl.signatures.centroids import Centroids

TASKS = [
    {"labels": [0, 1, 2, 3], "clients": 14},
    {"labels": [4, 5, 6], "clients": 10},
    {"labels": [7, 8, 9], "clients": 7},
]


class Whitened(Embedding):
    """Every coordinate by its spread over all clients: what one tile alone could not know."""

    name: Literal["whitened"] = "whitened"

    def embed(
        self, signatures: Sequence[NDArray[np.floating]], key: int = 0
    ) -> Sequence[NDArray[np.floating]]:
        """The points divided by the standard deviation of all."""
        assert len(signatures) == 31
        spread = np.concatenate(signatures).std(axis=0) + 0.1
        return [points / spread for points in signatures]


@pytest.mark.parametrize("block_size", [4, 31])
def test_tiles_see_what_all_signatures_make_together(settings: dict[str, Any], block_size: int) -> None:
    partition = {"name": "tasks", "tasks": TASKS, "foreign": 0.05}
    stages, host = build(load({**settings, "partition": partition}))
    federation = stages[0].federation
    clustering = Clustering(signature=Centroids(), grouping="graph", gamma="auto", n_clusters=3)
    clustering = clustering.model_copy(update={"embedding": Whitened()})
    backend = InlineBackend()
    try:
        backend.start(backend.put((federation,)), host)
        whole, sent = cluster_clients(backend, federation, clustering, 3, 0, block_size)
        tiled, sent_again = cluster_clients(backend, federation, clustering, 3, 0, block_size, tile_size=6)
    finally:
        backend.close()
    assert sent == sent_again
    assert sent[0].bytes == 4 * 31 * 5 * 64  # as the clients send them
    assert tiled.labels.tolist() == whole.labels.tolist()
    assert tiled.gamma == pytest.approx(whole.gamma, rel=1e-5)  # tiles are in single precision
    assert tiled.graph is not None
    assert whole.graph is not None
    assert abs(tiled.graph - whole.graph).nnz <= 2  # pairs at gamma itself
    found = facts(whole)
    assert found["graph"] == {"gamma": whole.gamma, "relatives": (whole.graph.nnz - 31) / 31}
    assert found["curve"] is None
