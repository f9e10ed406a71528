"""The result of every method, and the checks and shares that the methods have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.csgraph import dijkstra

from rayfl.coresets.graphs import Graph
from rayfl.errors import DataError

Ids = NDArray[np.int64]
Weights = NDArray[np.float64]


@dataclass(frozen=True)
class Coreset:
    """A weighted subset S of the vertices.

    Attributes:
        ids: the chosen vertices in the order in which they were chosen, ``(|S|,)``, each once.
        weights: ``w_s > 0`` of each, ``(|S|,)``. They sum to 1, except for Algorithm 12 and Frank-Wolfe,
            which also determine the sum.
    """

    ids: Ids
    weights: Weights

    def __len__(self) -> int:
        return len(self.ids)

    def estimate(self, values: ArrayLike) -> float:
        """``sum_s w_s f(s)``, the estimate of the mean of f over all vertices (equation 6.1).

        Args:
            values: f at ``ids``, ``(|S|,)``: the only vertices where f has to be known.
        """
        return float(self.weights @ np.asarray(values, np.float64))

    def normalised(self) -> Coreset:
        """A copy with weights that sum to 1, so that the mean of a constant is estimated exactly."""
        return Coreset(self.ids, self.weights / self.weights.sum())


def check_references(graph: Graph, references: int) -> None:
    """Refuse a number of references that the graph does not have.

    Raises:
        DataError: if it is not from 1 to n.
    """
    if not 1 <= references <= len(graph):
        raise DataError(f"references: got {references}, expected 1 to {len(graph)}, the number of vertices")


def cluster_coreset(embedding: NDArray[np.float64], labels: NDArray[np.integer]) -> Coreset:
    """One reference per cluster: the member nearest to the cluster's mean, weighted by the cluster's share.

    That is how the thesis weights the references of the clustering methods (section 6.6.2).

    Args:
        embedding: positions of the vertices ``(n, d)``.
        labels: cluster of each vertex ``(n,)``.
    """
    _, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), embedding.shape[1]))
    np.add.at(sums, index, embedding)
    distances = ((embedding - (sums / counts[:, None])[index]) ** 2).sum(axis=1)
    return nearest_members(labels, distances)


def nearest_members(labels: NDArray[np.integer], distances: NDArray[np.floating]) -> Coreset:
    """One reference per cluster, weighted by the cluster's share: the member with the least distance.

    Args:
        labels: cluster of each vertex ``(n,)``.
        distances: of each vertex to the middle of its cluster ``(n,)``; ties: the first vertex.
    """
    _, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((distances, index))
    first = order[np.searchsorted(index[order], np.arange(len(counts)))]
    return Coreset(first.astype(np.int64), counts / counts.sum())


def nearest_shares(graph: Graph, ids: Ids) -> Weights:
    """The share of the vertices that are nearest to each reference, in hops, ``(|S|,)``, sum 1.

    The thesis' weights for methods that choose vertices but form no clusters. Vertices that reach no
    reference are ignored.
    """
    _, _, source = dijkstra(
        graph.adjacency, indices=ids, unweighted=True, min_only=True, return_predecessors=True
    )
    nearest = source[source >= 0]
    counts = (nearest[:, None] == ids[None, :]).sum(axis=0) if len(ids) < 64 else _count_by_id(nearest, ids)
    return np.asarray(counts / counts.sum(), np.float64)


def _count_by_id(nearest: NDArray[np.integer], ids: Ids) -> NDArray[np.int64]:
    counts = np.zeros(int(ids.max()) + 1, np.int64)
    np.add.at(counts, nearest, 1)
    return counts[ids]
