"""``rayfl cluster``: the same clusters as a run finds, side by side, without training."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from matplotlib.figure import Figure
from rich.console import Console
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
from scipy.spatial.distance import pdist, squareform

import rayfl
from rayfl.clustering.cluster import Clusters, Excerpt
from rayfl.clustering.linkage import number_by_first
from rayfl.commands.cluster import cluster_without_training, title_of, write
from rayfl.config import load
from rayfl.errors import ConfigError
from rayfl.report.clusterings import _draw_matrix, show
from tests.report.reading import titles, values

CLUSTERS = {"clustering": {"n_clusters": 3}}


@pytest.mark.parametrize("method", ["pacfl", "mt_hfl", "flis_hc"])
def test_as_a_run_finds_them(method: str, settings: dict[str, Any]) -> None:
    config = load({**settings, **CLUSTERS, "algorithm": method})
    (alone,), refused = cluster_without_training([config])
    result = rayfl.run(config)
    assert refused == []
    assert alone.clusters.labels.tolist() == result.clusters["timeline"][0]["labels"]
    assert alone.clusters.ari == result.clusters["timeline"][0]["ari"] == 1.0
    sent = result.communication
    signatures = sent[(sent["kind"] == "signature") & (sent["direction"] == "up")]["bytes"].sum()
    assert alone.bytes("up") == signatures > 0


def test_from_python(settings: dict[str, Any], tmp_path: Path) -> None:
    found = rayfl.cluster({**settings, **CLUSTERS}, ["algorithm=pacfl"])
    clients, matrix = found.clients, found.distances
    assert clients["client"].tolist() == list(range(len(clients)))
    assert clients["cluster"].tolist() == clients["group"].tolist()
    assert matrix is not None
    np.testing.assert_array_equal(squareform(matrix.to_numpy()), found.clusters.distances)
    assert matrix.index.tolist() == matrix.columns.tolist() == clients["client"].tolist()
    assert found.write(tmp_path / "c.html").read_text().count("<title>Clusters of digits") == 1
    shown = found._repr_html_()
    assert "3 clusters by pacfl, agreement with the planted groups (ARI) 1.00" in shown
    assert "<th>group 2</th>" in shown
    with pytest.raises(ConfigError, match="fedavg does not cluster before training"):
        rayfl.cluster(settings, ["algorithm=fedavg"])


def test_clients_that_join_later_are_not_shown(settings: dict[str, Any], tmp_path: Path) -> None:
    """With ids between those of the others."""
    joins = [{"name": "join", "round": 1, "clients": [1, 4]}]
    config = load({**settings, **CLUSTERS, "algorithm": "pacfl", "events": joins})
    found = rayfl.cluster(config)
    present = [i for i in range(9) if i not in (1, 4)]
    assert found.clients["client"].tolist() == present
    assert found.clients["cluster"].tolist() == found.clients["group"].tolist()
    assert found.distances is not None
    assert found.distances.index.tolist() == present
    paths = write([found], tmp_path / "out", title_of(config))
    content = json.loads(paths[0].read_text())
    assert (content[0]["names"], content[0]["labels"]) == (present, found.clients["cluster"].tolist())


def test_a_graph_and_an_excerpt_of_some_clients() -> None:
    graph = scipy.sparse.csr_array(np.ones((3, 3)))
    excerpt = Excerpt(np.array([0, 2]), np.array([0.5]))
    places = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    alone = Clusters(np.array([0, 1, 0]), 2, graph=graph, places=places, excerpt=excerpt)
    ids = np.array([1, 3, 6])
    again = alone.among(ids, 8).only(ids)
    assert again.labels.tolist() == [0, 1, 0]
    assert again.graph is not None
    assert again.graph.toarray().tolist() == np.ones((3, 3)).tolist()
    assert again.places is not None
    assert again.places.tolist() == places.tolist()
    assert again.excerpt is not None
    assert again.excerpt.clients.tolist() == [0, 2]


def test_the_files_say_what_was_found(settings: dict[str, Any], tmp_path: Path) -> None:
    configs = [load({**settings, **CLUSTERS, "algorithm": name}) for name in ("pacfl", "mt_hfl")]
    found, _ = cluster_without_training(configs)
    paths = write(found, tmp_path / "out", title_of(configs[0]))
    names = ["clusters.json", "pacfl.png", "pacfl.npz", "mt_hfl.png", "mt_hfl.npz", "index.html"]
    assert [p.name for p in paths] == names
    title = f"Clusters of digits, {configs[0].partition.name} partition, seed {configs[0].seed}"
    assert f"<title>{title}" in paths[-1].read_text()
    with np.load(paths[2]) as arrays:
        distances, tree = arrays["distances"], arrays["linkage"]
    cut = number_by_first(fcluster(tree, 3, "maxclust"))
    assert cut.tolist() == found[0].clusters.labels.tolist()
    np.testing.assert_allclose(tree, linkage(distances, "average"))
    content = json.loads(paths[0].read_text())
    assert [entry["method"] for entry in content] == ["pacfl", "mt_hfl"]
    assert content[0]["labels"] == content[0]["groups"]  # numbered alike, since clients are in group order
    assert np.diff(content[0]["curve"]["n_clusters"]).max() <= 0  # a larger threshold, never more clusters
    assert [entry["clustering"]["signature"]["name"] for entry in content] == ["subspace", "spectrum"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths if p.suffix == ".png")


def test_the_page_has_maps_and_matrices_in_the_order_of_the_dendrogram(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    (found,), _ = cluster_without_training([load({**settings, **CLUSTERS, "algorithm": "pacfl"})])
    named = replace(found, names=np.array([f"c{i}" for i in range(9)]))
    page = write([named], tmp_path / "out", "Clusters")[-1].read_text()
    assert titles(page) == ["pacfl", "Clients"]
    data = values(page)["data"]["clients"]
    assert data["client"][:2] == ["c0", "c1"]
    assert data["pacfl cluster"] == found.clusters.labels.tolist()
    tree, distances = found.clusters.linkage, found.clusters.distances
    assert tree is not None
    assert distances is not None
    [matrix] = [chart["option"] for chart in values(page)["charts"] if chart["name"] == "matrix"]
    order = leaves_list(tree)
    assert matrix["xAxis"]["data"] == matrix["yAxis"]["data"] == [f"c{i}" for i in order]
    np.testing.assert_allclose(
        matrix["matrix"], squareform(distances)[np.ix_(order, order)], atol=0.051
    )  # as shown
    places = np.array([data["pacfl x"], data["pacfl y"]]).T
    apart = squareform(pdist(places))
    same = np.equal.outer(found.clusters.labels, found.clusters.labels)
    assert apart[same].max() < apart[~same].min()  # the planted groups lie apart


def test_the_table_has_a_line_a_method(settings: dict[str, Any]) -> None:
    found, _ = cluster_without_training([load({**settings, **CLUSTERS, "algorithm": "pacfl"})])
    console = Console(record=True, width=120)
    show(found, console)
    text = console.export_text()
    assert re.search(r"pacfl +│ subspace", text)
    assert "1.00" in text


def test_one_of_several_may_be_refused(settings: dict[str, Any]) -> None:
    fits = load({**settings, **CLUSTERS, "algorithm": "pacfl"})
    too_many = load({**settings, "clustering": {"n_clusters": 10}, "algorithm": "pacfl"})
    found, refused = cluster_without_training([fits, too_many])
    assert len(found) == 1
    assert refused[0].startswith("pacfl: clustering.n_clusters: 10 clusters of 9 clients; use at most 9")
    with pytest.raises(ConfigError, match="10 clusters of 9 clients; use"):
        cluster_without_training([too_many])


def test_methods_that_cluster_later_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cfl does not cluster before training"):
        cluster_without_training([load({**settings, "algorithm": "cfl"})])


def test_clusters_with_random_members_are_refused(settings: dict[str, Any]) -> None:
    """The clusters that it shuffles were shown as its own."""
    with pytest.raises(ConfigError, match="random_clustering draws the members of its clusters at random"):
        cluster_without_training([load({**settings, **CLUSTERS, "algorithm": "random_clustering"})])


def test_a_single_client_is_drawn_without_a_tree(settings: dict[str, Any], tmp_path: Path) -> None:
    config = load({**settings, "algorithm": "pacfl", "partition": {"name": "iid", "clients": 1}})
    found, _ = cluster_without_training([config])
    assert found[0].clusters.labels.tolist() == [0]
    assert write(found, tmp_path, "Clusters")[1].read_bytes().startswith(b"\x89PNG")


def test_the_matrix_names_the_clients_in_its_order(settings: dict[str, Any]) -> None:
    (alone,), _ = cluster_without_training([load({**settings, **CLUSTERS, "algorithm": "pacfl"})])
    clusters = alone.clusters
    axes = Figure().subplots()
    _draw_matrix(axes, clusters)
    shown = [int(tick.get_text()) for tick in axes.get_xticklabels()]
    assert sorted(shown) == list(range(len(clusters.labels)))
    assert (np.diff(clusters.labels[shown]) >= 0).all()
