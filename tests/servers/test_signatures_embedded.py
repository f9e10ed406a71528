"""A joint embedding through a backend: in one task, and before the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from rayfl.clustering.config import Clustering
from rayfl.clustering.embeddings.base import Embedding
from rayfl.runtime.inline import InlineBackend
from rayfl.signatures.centroids import Centroids
from tests.servers.test_signatures import ask, started

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
    clustering = Clustering(signature=Centroids(), grouping="graph", gamma="auto", n_clusters=3)
    clustering = clustering.model_copy(update={"embedding": Whitened()})
    with started(InlineBackend(), {**settings, "partition": partition}) as clients:
        whole, sent = ask(clients, clustering, block_size)
        tiled, sent_again = ask(clients, clustering, block_size, tile_size=6)
    assert sent == sent_again
    assert sent[0].bytes == 4 * 31 * 5 * 64  # as the clients send them
    assert tiled.labels.tolist() == whole.labels.tolist()
    assert tiled.gamma == pytest.approx(whole.gamma, rel=1e-5)  # tiles are in single precision
    assert tiled.graph is not None
    assert whole.graph is not None
    assert abs(tiled.graph - whole.graph).nnz <= 2  # pairs at gamma itself
    found = whole.facts()
    assert found["graph"] == {"gamma": whole.gamma, "relatives": (whole.graph.nnz - 31) / 31}
    assert found["curve"] is None
