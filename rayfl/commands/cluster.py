"""``rayfl cluster``: the clustering of a config before any training, for one or several one-shot methods."""

from __future__ import annotations

import json
import time
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

from rayfl import files
from rayfl.algorithms import OneShotClustered
from rayfl.backend import Backend
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.config import Config
from rayfl.data.events import Stage
from rayfl.errors import ConfigError, RayflError
from rayfl.evaluation import Transfer
from rayfl.rundir import clean
from rayfl.runtime import driving
from rayfl.runtime.connection import available, connect
from rayfl.servers import building
from rayfl.servers.building import block_rule
from rayfl.servers.models import Servers
from rayfl.servers.queries import Asking
from rayfl.servers.rounds import Round
from rayfl.servers.signatures import facts
from rayfl.units import size

_DRAWN = 2000
"""Clients up to which the matrix of distances is drawn."""

_LEAVES = 300
"""Leaves of the dendrogram that are drawn; of more clients the last merges."""


@dataclass(frozen=True)
class Alone:
    """One method's clusters.

    Attributes:
        method: its name.
        clustering: the settings.
        clusters: with distances and tree where the clients are few enough.
        groups: the planted groups ``(N,)``, if known.
        transfers: what the signatures cost.
        seconds: from the data in memory to the clusters.
    """

    method: str
    clustering: Clustering
    clusters: Clusters
    groups: NDArray[np.int64] | None
    transfers: tuple[Transfer, ...]
    seconds: float

    def bytes(self, direction: str) -> int:
        """Bytes that the clients sent (``up``) or received (``down``)."""
        return sum(t.bytes for t in self.transfers if t.direction == direction)

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        found: dict[str, Any] = clean(
            {
                "method": self.method,
                "clustering": self.clustering.model_dump(mode="json"),
                "n_clusters": self.clusters.n_clusters,
                "ari": self.clusters.ari,
                "bytes_up": self.bytes("up"),
                "bytes_down": self.bytes("down"),
                "seconds": self.seconds,
                "labels": self.clusters.labels,
                "groups": self.groups,
                **facts(self.clusters),
            }
        )
        return found


def cluster_alone(configs: Sequence[Config]) -> tuple[list[Alone], list[str]]:
    """Cluster the clients of each config, which differ in their methods, without training.

    Returns:
        What was found; and for each of several methods that was refused (its encoder's data are not there,
        say) a line that says why.

    Raises:
        ConfigError: if a method does not cluster once by signatures.
        RayflError: what the clustering of a single method refuses.
    """
    for config in configs:
        if not isinstance(config.algorithm, OneShotClustered):
            raise ConfigError(
                "algorithm",
                f"{config.algorithm.name} does not cluster before training",
                "name one that does with --beside, for instance pacfl",
            )
        building.check(config)
    if len(configs) == 1:
        return [_cluster(configs[0])], []
    found, refused = [], []
    for config in configs:
        try:
            found.append(_cluster(config))
        except RayflError as error:
            refused.append(f"{config.algorithm.name}: {error}")
    return found, refused


def _cluster(config: Config) -> Alone:
    stages, host = building.build(config)
    federation = stages[0].federation
    if config.execution.backend == "ray":
        connect(config)
    plan = driving.arithmetic(config, federation, host, available(config))
    backend = driving.make_backend(config, plan)
    try:
        backend.start(backend.put(tuple(stage.federation for stage in stages)), host)
        servers = Servers(
            backend,
            host.spec,
            federation,
            block_size=block_rule(config, federation, host),
            batch_size=config.evaluation.batch_size,
        )
        return _ask(config, backend, servers, stages)
    finally:
        backend.close()


def _ask(config: Config, backend: Backend, servers: Servers, stages: Sequence[Stage]) -> Alone:
    spec, federation = servers.spec, servers.federation
    servers.models = [backend.put(spec.initial())]
    transfers: list[Transfer] = []
    begun = time.perf_counter()

    def turn(round: int) -> Round:
        return Round.nobody(config.training.work(round, config.rounds), round)

    clients = Asking(servers, stages, 0, config.seed, 0, turn, transfers.append)
    clusters = clients.cluster(config.clustering, whole=True)
    seconds = time.perf_counter() - begun
    return Alone(
        config.algorithm.name, config.clustering, clusters, federation.groups, tuple(transfers), seconds
    )


def show(found: Sequence[Alone], out: Console) -> None:
    """A table, a line a method."""
    table = Table(title="clusters before training")
    for heading in ("method", "clusters", "ARI", "threshold", "up", "down", "seconds"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for alone in found:
        c = alone.clusters
        number = f"{c.n_clusters}{' (proposed)' if c.suggested else ''}"
        beta = c.gamma if c.gamma is not None else c.threshold
        table.add_row(
            alone.method,
            number,
            "-" if c.ari is None else f"{c.ari:.2f}",
            "-" if beta is None else f"{beta:.4g}",
            size(alone.bytes("up")),
            size(alone.bytes("down")),
            f"{alone.seconds:.1f}",
        )
    out.print(table)
    for alone in found:
        wrong = alone.clusters.ari is not None and alone.clusters.ari < 1
        if wrong and alone.groups is not None and len(np.unique(alone.groups)) <= 12:
            _contingency(alone, out)


def _contingency(alone: Alone, out: Console) -> None:
    """Which planted groups the clusters hold, for the largest clusters."""
    assert alone.groups is not None
    labels, sizes = np.unique(alone.clusters.labels, return_counts=True)
    groups = np.unique(alone.groups)
    table = Table(title=f"{alone.method}: clients of each planted group in each cluster")
    table.add_column("cluster", justify="right")
    for group in groups:
        table.add_column(f"group {group}", justify="right")
    largest = labels[np.argsort(-sizes, kind="stable")][:12]
    for label in largest.tolist():
        inside = alone.groups[alone.clusters.labels == label]
        table.add_row(str(label), *(str(int((inside == group).sum())) for group in groups))
    if len(labels) > len(largest):
        table.caption = f"and {len(labels) - len(largest)} smaller clusters"
    out.print(table)


def write(found: Sequence[Alone], folder: Path) -> list[Path]:
    """A JSON file for all methods, and for each a picture: distances, dendrogram, clusters over threshold.

    The numbers of a picture are in an .npz file beside it, as SciPy has them: ``distances`` (the condensed
    proximity matrix) and ``linkage`` (the tree), where there are such.
    """
    files.make(folder, parents=True)
    paths = [folder / "clusters.json"]
    files.write(paths[0], json.dumps([alone.to_dict() for alone in found], indent=1))
    for alone in found:
        path = folder / f"{alone.method}.png"
        draw(alone, path)
        paths.append(path)
        c = alone.clusters
        arrays = {"distances": c.distances, "linkage": c.linkage}
        known = {name: values for name, values in arrays.items() if values is not None}
        if known:
            paths.append(path.with_suffix(".npz"))
            np.savez_compressed(paths[-1], **known)  # type: ignore[arg-type]
    return paths


def draw(alone: Alone, path: Path) -> None:
    """The picture of one method."""
    c = alone.clusters
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    title = f"{alone.method}: {c.n_clusters} clusters" + ("" if c.ari is None else f", ARI {c.ari:.2f}")
    figure.suptitle(title)
    matrix, tree, curve = figure.subplots(1, 3)
    matrix.set_title("distances, clients by cluster")
    if c.distances is not None and len(c.labels) <= _DRAWN:
        order = np.argsort(c.labels, kind="stable")
        image = matrix.imshow(squareform(c.distances)[np.ix_(order, order)], cmap="viridis")
        figure.colorbar(image, ax=matrix, shrink=0.8)
        for axis in (matrix.xaxis, matrix.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
    else:
        _nothing(matrix, "too many clients to draw, or no distances")
    tree.set_title("dendrogram")
    if c.linkage is not None and len(c.linkage):
        dendrogram(c.linkage, ax=tree, no_labels=True, truncate_mode="lastp", p=_LEAVES, color_threshold=0)
        cut = c.threshold
        if cut is not None and np.isfinite(cut):
            tree.axhline(cut, linestyle="--", color="tab:red", linewidth=1)
    else:
        _nothing(tree, "this grouping has no tree" if c.linkage is None else "a single client")
    curve.set_title("number of clusters over the threshold")
    if c.curve is not None:
        curve.step(c.curve.thresholds, c.curve.counts, where="post")
        if c.curve.counts.max() >= 100:
            curve.set_yscale("log")
        else:
            curve.yaxis.set_major_locator(MaxNLocator(integer=True))
        curve.set_xlabel("threshold")
        if c.threshold is not None and np.isfinite(c.threshold):
            curve.axvline(c.threshold, linestyle="--", color="tab:red", linewidth=1)
    else:
        _nothing(curve, "this grouping has no tree")
    figure.savefig(path, dpi=110)


def _nothing(axes: Any, why: str) -> None:
    axes.axis("off")
    axes.text(0.5, 0.5, why, ha="center", va="center", wrap=True)
