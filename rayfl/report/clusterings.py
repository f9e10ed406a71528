"""Views of clusterings made without training: a table, and a picture of each clustering."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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
from rayfl.clustering.plane import LEAST, METHODS, MapMethod, plane
from rayfl.evaluation import Transfer
from rayfl.report import maps
from rayfl.report.charts import Colour, Metric, Points, client_map, heatmap, spaced
from rayfl.report.html import MOST_GROUPS, threshold_chart
from rayfl.report.page import Chart, Column, Data, Page, Section, rounded, write
from rayfl.report.page import Table as PageTable
from rayfl.units import UNKNOWN, counted, size

_MOST_DRAWN = 2000
"""With at most this many clients the distance matrix is drawn."""

_MOST_NAMED = 30
"""With at most this many clients the axes of the distance matrix show their numbers."""

_DRAWN_LEAVES = 300
"""Leaves of the dendrogram that are drawn; with more clients only the last merges are."""

_ROOMY = 90
"""Columns of a terminal on which the table has room for the time, too."""

_MOST_LISTED = 12
"""With at most this many planted groups members are listed, for this many clusters."""


@dataclass(frozen=True)
class ClusteringResult:
    """One method's clusters, from :func:`rayfl.cluster`; a notebook shows them as a table.

    Attributes:
        method: its name.
        clustering: the settings.
        clusters: with distances and tree if there are few enough clients.
        groups: the planted groups ``(N,)``, if known.
        names: the clients' ids ``(N,)``, if they are the user's own, or clients are missing who join later.
        map: how their map is made, by the config.
        seed: of the config.
        transfers: what the signatures cost.
        seconds: from the data in memory to the clusters.
        title: whose clients they are.
    """

    method: str
    clustering: Clustering
    clusters: Clusters
    groups: NDArray[np.int64] | None
    transfers: tuple[Transfer, ...]
    seconds: float
    names: NDArray[Any] | None = None
    map: MapMethod = "mds"
    seed: int = 0
    title: str = ""

    @property
    def clients(self) -> pd.DataFrame:
        """One row per client that is present from the start: its id, its planted group if there are any, and
        its cluster.
        """
        ids = np.arange(len(self.clusters.labels)) if self.names is None else self.names
        groups = {} if self.groups is None else {"group": self.groups}
        return pd.DataFrame({"client": ids, **groups, "cluster": self.clusters.labels})

    @property
    def distances(self) -> pd.DataFrame | None:
        """The distances between the clients' signatures, or 0 and 1 for related and other clients, by their
        ids; None if there are none, or too many clients to keep them.
        """
        matrix = _distance_matrix(self.clusters, most=None)
        ids = self.clients["client"]
        return None if matrix is None else pd.DataFrame(matrix, index=ids, columns=ids.rename(None))

    def write(self, path: Path | str) -> Path:
        """Write the page about the clusters, as ``rayfl cluster`` does: map, distances, dendrogram, table."""
        return write(Path(path), page_of([self], self.title or f"Clusters by {self.method}"))

    def _repr_html_(self) -> str:
        """For notebooks: the number of clusters, and what is known of each."""
        found, ari = self.clusters, self.clusters.ari
        agreement = "" if ari is None else f", agreement with the planted groups (ARI) {ari:.2f}"
        table = pd.DataFrame(dict(_cluster_table(self).texts())).to_html(index=False)
        title = html.escape(self.title or self.method)
        return f"<b>{title}</b>: {counted(found.n_clusters, 'cluster')} by {self.method}{agreement}{table}"

    def bytes(self, direction: str) -> int:
        """Bytes that the clients sent (``up``) or received (``down``)."""
        return sum(t.bytes for t in self.transfers if t.direction == direction)


def page_of(results: Sequence[ClusteringResult], title: str) -> Page:
    """A page about clusterings of the same clients by several methods."""
    first = results[0]
    names = _names(first)
    clients: dict[str, list[Any]] = {"client": names}
    if first.groups is not None:
        clients["group"] = first.groups.tolist()
    for result in results:
        clients[f"{result.method} cluster"] = [None if i < 0 else i for i in result.clusters.labels.tolist()]
    sections = [_method_section(result, clients) for result in results]
    columns = [Column("client", Data("clients", "client"), right=False)]
    columns += [
        Column("planted group" if name == "group" else name, Data("clients", name), right=True)
        for name in clients
        if name == "group" or name.endswith(" cluster")
    ]
    sections.append(Section("Clients", "", tables=[PageTable(columns, caption="clients", filter=True)]))
    return Page(
        title,
        f"{counted(len(names), 'client')}, clustered by their signatures before any training",
        lead=_overview(results),
        sections=sections,
        data={"clients": clients},
    )


def _names(result: ClusteringResult) -> list[str]:
    count = len(result.clusters.labels)
    return list(map(str, range(count) if result.names is None else result.names.tolist()))


def _overview(results: Sequence[ClusteringResult]) -> PageTable:
    return PageTable(
        [
            Column("method", [result.method for result in results]),
            Column("clusters", [result.clusters.n_clusters for result in results], "number:0"),
            Column(
                "agreement with planted groups (ARI)", [result.clusters.ari for result in results], "number:2"
            ),
            Column("threshold", [_threshold(result.clusters) for result in results], "general"),
            Column("up", [result.bytes("up") for result in results], "size"),
            Column("down", [result.bytes("down") for result in results], "size"),
            Column("time", [result.seconds for result in results], "duration"),
        ],
        caption="methods",
    )


def _threshold(clusters: Clusters) -> float | None:
    return clusters.gamma if clusters.gamma is not None else clusters.threshold


def _method_section(result: ClusteringResult, clients: dict[str, list[Any]]) -> Section:
    """The map of a method's clients, their distances, and the choice of the threshold; adds their
    positions.
    """
    clusters, method = result.clusters, result.method
    distances = _distance_matrix(clusters)
    if distances is None:
        places, meaning = (
            maps.together([clusters.labels]),
            "being in the same cluster; distances are not kept",
        )
    else:
        map_method = result.map if len(distances) >= LEAST else "mds"
        places = maps.spread(plane(distances, map_method, result.seed))
        meaning = f"{_distance_meaning(result)}, by {METHODS[map_method]}"
    charts = []
    column = f"{method} cluster"
    tip = [("cluster", column, "text")]
    colours = [Colour(column, "cluster")]
    if "group" in clients:
        tip.append(("planted group", "group", "text"))
        colours.append(Colour("group", "planted group"))
    note = counted(clusters.n_clusters, "cluster")
    note += " (the tree's own proposal)" if clusters.suggested else ""
    if places is not None:
        for axis, values in zip("xy", places.T, strict=True):
            clients[f"{method} {axis}"] = rounded(values, maps.DIGITS)
        x, y = (Metric(f"{method} {axis}", axis) for axis in "xy")
        dot_size = 12 if len(places) <= 100 else 8 if len(places) <= 1000 else 4
        points = Points("@clients", x, y, "client", tip, dot_size)
        charts.append(client_map(points, colours, (), f"Map of {len(places):,} clients of {method}: {note}"))
        note += f". On the map clients are placed by {meaning}"
    if distances is not None:
        charts.append(_distance_chart(result, distances))
        note += ". In the matrix they are in the order of the dendrogram" * (clusters.linkage is not None)
        note += "; dark: alike"
    proximity = result.clustering.proximity
    curve = threshold_chart(clusters.facts()["curve"], _threshold(clusters), clusters.n_clusters, proximity)
    if curve is not None:
        charts.append(curve)
    return Section(method, note + ".", charts, [_cluster_table(result)], beside=True)


def _distance_meaning(result: ClusteringResult) -> str:
    if result.clusters.distances is None:
        return maps.RELATED
    return maps.between_signatures(result.clustering.proximity)


def _distance_matrix(clusters: Clusters, most: int | None = _MOST_DRAWN) -> NDArray[np.float64] | None:
    """Distances ``(N, N)``, or 0 and 1 for a graph; None if there are none, or more than ``most`` clients."""
    if most is not None and len(clusters.labels) > most:
        return None
    if clusters.distances is not None:
        return np.asarray(squareform(clusters.distances))
    if clusters.graph is not None:
        return np.asarray(1.0 - (clusters.graph.toarray() > 0))
    return None


def _distance_chart(result: ClusteringResult, distances: NDArray[np.float64]) -> Chart:
    clusters = result.clusters
    order = clusters.order()
    drawn = order[spaced(len(order))]
    names = _names(result)
    labels = [names[i] for i in drawn]
    what = _distance_meaning(result)
    if len(drawn) < len(order):
        what += f", {len(drawn)} of {len(order):,} clients"
    matrix = distances[np.ix_(drawn, drawn)]
    return heatmap(matrix, labels, labels, f"Matrix of {what}, alike is dark", dark="low", label=what)


def _cluster_table(result: ClusteringResult) -> PageTable:
    """Sizes of the clusters, and how many of their clients come from each planted group."""
    labels = result.clusters.labels
    clusters, sizes = np.unique(labels[labels >= 0], return_counts=True)
    columns = [
        Column("cluster", clusters.tolist(), "number:0"),
        Column("clients", sizes.tolist(), "number:0"),
    ]
    if result.groups is not None and len(np.unique(result.groups)) <= MOST_GROUPS:
        for group in np.unique(result.groups).tolist():
            counts = [int((result.groups[labels == i] == group).sum()) for i in clusters.tolist()]
            shares = [n / total if n else None for n, total in zip(counts, sizes.tolist(), strict=True)]
            texts = [f"{n:,}" if n else "·" for n in counts]
            columns.append(Column(f"group {group}", texts, order=counts, shares=shares))
    return PageTable(columns, caption=f"clusters of {result.method}")


def show(results: Sequence[ClusteringResult], out: Console) -> None:
    """Print a table with a line per method, and the contents of clusters that are not planted groups."""
    table = Table(title="clusters before training")
    for heading in ("method", "signature"):
        table.add_column(heading)
    roomy = out.width >= _ROOMY
    for heading in ("clusters", "ARI", "threshold", "up", "down", *(("time",) if roomy else ())):
        table.add_column(heading, justify="right")
    for result in results:
        c = result.clusters
        number = f"{c.n_clusters}{' (proposed)' if c.suggested else ''}"
        threshold = _threshold(c)
        table.add_row(
            result.method,
            result.clustering.signature.name,
            number,
            UNKNOWN if c.ari is None else f"{c.ari:.2f}",
            UNKNOWN if threshold is None else f"{threshold:.4g}",
            size(result.bytes("up")),
            size(result.bytes("down")),
            *((f"{result.seconds:.1f} s",) if roomy else ()),
        )
    out.print(table)
    for result in results:
        wrong = result.clusters.ari is not None and result.clusters.ari < 1
        if wrong and result.groups is not None and len(np.unique(result.groups)) <= _MOST_LISTED:
            out.print(_members(result.method, result.clusters.labels, result.groups))


def _members(method: str, labels: NDArray[np.integer], planted: NDArray[np.int64]) -> Table:
    """Which planted groups the clusters hold, for the largest clusters."""
    clusters, sizes = np.unique(labels, return_counts=True)
    groups = np.unique(planted)
    table = Table(title=f"{method}: clients of each planted group in each cluster")
    table.add_column("cluster", justify="right")
    for group in groups:
        table.add_column(f"group {group}", justify="right")
    largest = clusters[np.argsort(-sizes, kind="stable")][:_MOST_LISTED]
    for label in largest.tolist():
        members = planted[labels == label]
        table.add_row(str(label), *(str(int((members == group).sum())) for group in groups))
    if len(clusters) > len(largest):
        table.caption = f"and {len(clusters) - len(largest)} smaller clusters"
    return table


def draw(method: str, clusters: Clusters, path: Path) -> None:
    """Write a picture: the distances, the dendrogram, the number of clusters over the threshold."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    ari = "" if clusters.ari is None else f", ARI {clusters.ari:.2f}"
    figure.suptitle(f"{method}: {clusters.n_clusters} clusters{ari}")
    for axes, view in zip(figure.subplots(1, 3), (_draw_matrix, _draw_tree, _draw_curve), strict=True):
        missing = view(axes, clusters)
        if missing:
            axes.axis("off")
            axes.text(0.5, 0.5, missing, ha="center", va="center", wrap=True)
    figure.savefig(path, dpi=110)


def _draw_matrix(axes: Any, c: Clusters) -> str | None:
    """Draw the distance matrix; returns the reason if there is none."""
    axes.set_title("distances, clients by cluster")
    if c.distances is None or len(c.labels) > _MOST_DRAWN:
        return "too many clients to draw, or no distances"
    order = np.argsort(c.labels, kind="stable")
    image = axes.imshow(squareform(c.distances)[np.ix_(order, order)], cmap="viridis")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    names = order.tolist() if len(order) <= _MOST_NAMED else []
    for axis in (axes.xaxis, axes.yaxis):  # the numbers of the clients, not their places in the matrix
        axis.set_ticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("client" if names else f"{len(order):,} clients")
    return None


def _draw_tree(axes: Any, c: Clusters) -> str | None:
    axes.set_title("dendrogram")
    if c.linkage is None:
        return "this grouping has no tree"
    if not len(c.linkage):
        return "a single client"
    dendrogram(c.linkage, ax=axes, no_labels=True, truncate_mode="lastp", p=_DRAWN_LEAVES, color_threshold=0)
    if c.threshold is not None and np.isfinite(c.threshold):
        axes.axhline(c.threshold, linestyle="--", color="tab:red", linewidth=1)
    return None


def _draw_curve(axes: Any, c: Clusters) -> str | None:
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
