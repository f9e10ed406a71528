"""Random sampling: K vertices, each as likely as any other, with weights 1 / K."""

from __future__ import annotations

import numpy as np

from rayfl.coresets.base import Coreset, check_references
from rayfl.coresets.graphs import Graph
from rayfl.random import generator


def select(graph: Graph, references: int, *, seed: int = 0) -> Coreset:
    """K different vertices drawn uniformly.

    Raises:
        DataError: if K is not from 1 to n.
    """
    check_references(graph, references)
    ids = generator(seed, "uniform coreset").choice(len(graph), references, replace=False)
    return Coreset(ids.astype(np.int64), np.full(references, 1.0 / references))
