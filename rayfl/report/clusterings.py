"""Views of clusterings that were found before any training: a table, and a picture for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.cluster.hierarchy import dendrogram
from scipy.spatial.distance import squareform

from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.data.base import Names
from rayfl.evaluation import Transfer
from rayfl.units import size

_DRAWN = 2000
"""Clients up to which the matrix of distances is drawn."""

_LEAVES = 300
"""Leaves of the dendrogram that are drawn; of more clients the last merges."""

_LISTED = 12
"""Planted groups up to which, and clusters of which, the members are listed."""


@dataclass(frozen=True)
class ClusteringResult:
    """One method's clusters.

    Attributes:
        method: its name.
        clustering: the settings.
        clusters: with distances and tree where the clients are few enough.
        groups: the planted groups ``(N,)``, if known.
        names: the user's ids of the clients ``(N,)``, if there are any.
        transfers: what the signatures cost.
        seconds: from the data in memory to the clusters.
    """

    method: str
    clustering: Clustering
    clusters: Clusters
    groups: NDArray[np.int64] | None
    transfers: tuple[Transfer, ...]
    seconds: float
    names: Names | None = None

    def bytes(self, direction: str) -> int:
        """Bytes that the clients sent (``up``) or received (``down``)."""
        return sum(t.bytes for t in self.transfers if t.direction == direction)


def show(results: Sequence[ClusteringResult], out: Console) -> None:
    """Print a table, a line a method; and where clusters are not the planted groups, what they hold."""
    table = Table(title="clusters before training")
    for heading in ("method", "clusters", "ARI", "threshold", "up", "down", "seconds"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for result in results:
        c = result.clusters
        number = f"{c.n_clusters}{' (proposed)' if c.suggested else ''}"
        beta = c.gamma if c.gamma is not None else c.threshold
        table.add_row(
            result.method,
            number,
            "-" if c.ari is None else f"{c.ari:.2f}",
            "-" if beta is None else f"{beta:.4g}",
            size(result.bytes("up")),
            size(result.bytes("down")),
            f"{result.seconds:.1f}",
        )
    out.print(table)
    for result in results:
        wrong = result.clusters.ari is not None and result.clusters.ari < 1
        if wrong and result.groups is not None and len(np.unique(result.groups)) <= _LISTED:
            out.print(_members(result.method, result.clusters.labels, result.groups))


def _members(method: str, labels: NDArray[np.integer], planted: NDArray[np.int64]) -> Table:
    """Which planted groups the clusters hold, for the largest clusters."""
    clusters, sizes = np.unique(labels, return_counts=True)
    groups = np.unique(planted)
    table = Table(title=f"{method}: clients of each planted group in each cluster")
    table.add_column("cluster", justify="right")
    for group in groups:
        table.add_column(f"group {group}", justify="right")
    largest = clusters[np.argsort(-sizes, kind="stable")][:_LISTED]
    for label in largest.tolist():
        inside = planted[labels == label]
        table.add_row(str(label), *(str(int((inside == group).sum())) for group in groups))
    if len(clusters) > len(largest):
        table.caption = f"and {len(clusters) - len(largest)} smaller clusters"
    return table


def draw(method: str, clusters: Clusters, path: Path) -> None:
    """Write a picture: the distances, the dendrogram, the number of clusters over the threshold."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    ari = "" if clusters.ari is None else f", ARI {clusters.ari:.2f}"
    figure.suptitle(f"{method}: {clusters.n_clusters} clusters{ari}")
    for axes, view in zip(figure.subplots(1, 3), (_matrix, _tree, _curve), strict=True):
        missing = view(axes, clusters)
        if missing:
            axes.axis("off")
            axes.text(0.5, 0.5, missing, ha="center", va="center", wrap=True)
    figure.savefig(path, dpi=110)


def _matrix(axes: Any, c: Clusters) -> str | None:
    """The matrix of distances; or why there is none, as for the other two."""
    axes.set_title("distances, clients by cluster")
    if c.distances is None or len(c.labels) > _DRAWN:
        return "too many clients to draw, or no distances"
    order = np.argsort(c.labels, kind="stable")
    image = axes.imshow(squareform(c.distances)[np.ix_(order, order)], cmap="viridis")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return None


def _tree(axes: Any, c: Clusters) -> str | None:
    axes.set_title("dendrogram")
    if c.linkage is None:
        return "this grouping has no tree"
    if not len(c.linkage):
        return "a single client"
    dendrogram(c.linkage, ax=axes, no_labels=True, truncate_mode="lastp", p=_LEAVES, color_threshold=0)
    if c.threshold is not None and np.isfinite(c.threshold):
        axes.axhline(c.threshold, linestyle="--", color="tab:red", linewidth=1)
    return None


def _curve(axes: Any, c: Clusters) -> str | None:
    axes.set_title("number of clusters over the threshold")
    if c.curve is None:
        return "this grouping has no tree"
    axes.step(c.curve.thresholds, c.curve.counts, where="post")
    if c.curve.counts.max() >= 100:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("threshold")
    if c.threshold is not None and np.isfinite(c.threshold):
        axes.axvline(c.threshold, linestyle="--", color="tab:red", linewidth=1)
    return None
