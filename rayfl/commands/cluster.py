"""``rayfl cluster``: the clustering of a config before any training, for one or several one-shot methods."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfl import files, plugins
from rayfl.algorithms import OneShotClustered
from rayfl.config import Config, load
from rayfl.config.reading import names_first
from rayfl.data import Federation
from rayfl.errors import ConfigError, RayflError
from rayfl.evaluation import Transfer
from rayfl.given import shown_path
from rayfl.report import page
from rayfl.report.clusterings import ClusteringResult, draw, page_of
from rayfl.rundir import clean
from rayfl.runtime import driving
from rayfl.runtime.connection import available, connect
from rayfl.servers import building, hooks
from rayfl.servers.queries import ClientQueries


def cluster(
    config: Config | str | Path | Mapping[str, Any], overrides: Sequence[str] = (), **parts: Any
) -> ClusteringResult:
    """Cluster the clients of a config by their signatures, without training: ``rayfl cluster`` from Python.

    Args:
        config, overrides, parts: as for :func:`rayfl.run`.

    Raises:
        ConfigError: if a setting is wrong, or the method does not cluster once by signatures.
        RayflError: if the clustering fails.
    """
    plugins.refuse_while_importing()
    [result], _ = cluster_without_training([load(config, names_first(overrides), **parts)])
    return result


def cluster_without_training(configs: Sequence[Config]) -> tuple[list[ClusteringResult], list[str]]:
    """Cluster the clients of each config, which differ in their methods, without training.

    Returns:
        The clusters of each method; and, if there are several configs, a line for each method that failed
        (for example because its encoder's data are missing), with the reason.

    Raises:
        ConfigError: if a method does not cluster once by signatures.
        RayflError: if there is a single config, and its clustering fails.
    """
    for config in configs:
        if not isinstance(config.algorithm, OneShotClustered):
            raise ConfigError(
                "algorithm",
                f"{config.algorithm.name} does not cluster before training",
                "choose a method that does, for instance --beside pacfl",
            )
        if config.algorithm.shuffles:
            raise ConfigError(
                "algorithm",
                f"{config.algorithm.name} draws the members of its clusters at random",
                "choose the method whose clusters it shuffles, for instance mt_hfl",
            )
        building.check(config)
    if len(configs) == 1:
        return [_cluster(configs[0])], []
    results, failures = [], []
    for config in configs:
        try:
            results.append(_cluster(config))
        except RayflError as error:
            failures.append(f"{config.algorithm.name}: {error}")
    return results, failures


def _cluster(config: Config) -> ClusteringResult:
    stages, host = building.build(config)
    federation = stages[0].federation
    if config.execution.backend == "ray":
        connect(config)
    plan = driving.arithmetic(config, federation, host, available(config))
    backend = driving.make_backend(config, plan)
    transfers: list[Transfer] = []
    try:
        backend.start(backend.put(tuple(stage.federation for stage in stages)), host)
        servers = building.servers_of(config, host, backend, federation)
        servers.tolerate = 0  # all clients are shown, so none may fail
        state = hooks.begin(config.algorithm, building.setup_of(config, federation, host.spec, servers.edges))
        clients = ClientQueries(config, servers, stages[:1], state, transfers.append)
        start = time.perf_counter()
        clusters = clients.cluster(config.clustering, keep_distances=True)
        seconds = time.perf_counter() - start
    finally:
        backend.close()
    method, clustering = config.algorithm.name, config.clustering
    present, groups, names = np.flatnonzero(federation.sizes > 0), federation.groups, federation.names
    if len(present) < federation.clients:  # others join later
        groups, names = None if groups is None else groups[present], _ids(federation)[present]
    return ClusteringResult(
        method=method,
        clustering=clustering,
        clusters=clusters.only(present),
        groups=groups,
        transfers=tuple(transfers),
        seconds=seconds,
        names=names,
        map=config.output.map,
        seed=config.seed,
        title=title_of(config),
    )


def _ids(federation: Federation) -> NDArray[Any]:
    """The clients' ids as the user knows them ``(N,)``."""
    return np.arange(federation.clients) if federation.names is None else federation.names


def title_of(config: Config) -> str:
    """The title of the page: whose clients are clustered."""
    path = getattr(config.data, "path", None)
    data = "data" if isinstance(path, Path) and shown_path(path) == "data" else config.data.name
    return f"Clusters of {data}, {config.partition.name} partition, seed {config.seed}"


def write(results: Sequence[ClusteringResult], folder: Path, title: str) -> list[Path]:
    """Write a page and a JSON file for all methods, and a picture for each: distances, dendrogram, threshold.

    The numbers of a picture are in an .npz file next to it, in SciPy's format: ``distances`` (the condensed
    proximity matrix) and ``linkage`` (the tree), if the method has them.
    """
    files.make(folder, parents=True)
    paths = [folder / "clusters.json"]
    files.write(paths[0], json.dumps([_to_dict(result) for result in results], indent=1))
    for result in results:
        c, path = result.clusters, folder / f"{result.method}.png"
        with files.writing(path):
            draw(result.method, c, path)
        paths.append(path)
        arrays = {"distances": c.distances, "linkage": c.linkage}
        present = {name: values for name, values in arrays.items() if values is not None}
        if present:
            paths.append(path.with_suffix(".npz"))
            archive = io.BytesIO()
            np.savez_compressed(archive, **present)  # type: ignore[arg-type]
            files.write(paths[-1], archive.getvalue())
    return [*paths, page.write(folder / "index.html", page_of(results, title))]


def _to_dict(result: ClusteringResult) -> dict[str, Any]:
    content: dict[str, Any] = clean(
        {
            "method": result.method,
            "clustering": result.clustering.model_dump(mode="json"),
            "n_clusters": result.clusters.n_clusters,
            "ari": result.clusters.ari,
            "bytes_up": result.bytes("up"),
            "bytes_down": result.bytes("down"),
            "seconds": result.seconds,
            "labels": result.clusters.labels,
            **({} if result.names is None else {"names": result.names}),
            "groups": result.groups,
            **result.clusters.facts(),
        }
    )
    return content
