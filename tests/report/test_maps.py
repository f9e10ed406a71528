"""Clients in the plane."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.cluster.hierarchy import leaves_list
from scipy.sparse import csr_array
from scipy.spatial.distance import pdist, squareform

import rayfl
import rayfl.report
from rayfl.clustering.cluster import Clusters
from rayfl.clustering.config import Clustering
from rayfl.clustering.plane import EXCERPT, FULL, LEAST, Excerpt, classical, plane
from rayfl.commands.cluster import cluster_without_training
from rayfl.config import load
from rayfl.report import maps
from rayfl.report.clusterings import ClusteringResult, page_of
from rayfl.report.files import RunFiles
from rayfl.report.page import render
from tests.report.reading import charts, text, values
from tests.runs import TASKS


@pytest.mark.parametrize("count", [7, FULL + 100])
def test_points_of_the_plane_are_found_again(count: int) -> None:
    points = np.random.default_rng(0).normal(size=(count, 2)) * [3, 1]
    distances = squareform(pdist(points))
    np.testing.assert_allclose(squareform(pdist(classical(distances))), distances, atol=1e-8)
    assert np.abs(plane(distances)).max() == 1
    one, two = plane(np.zeros((1, 1))), classical([[0, 2], [2, 0]])
    assert one.tolist() == [[0, 0]]
    np.testing.assert_allclose(two, [[1, 0], [-1, 0]], atol=1e-12)


def test_principal_components_are_the_map_of_euclidean_distances() -> None:
    rows = np.random.default_rng(1).normal(size=(12, 5))
    found = maps.principal(rows)
    np.testing.assert_allclose(np.abs(found), np.abs(classical(squareform(pdist(rows)))), atol=1e-8)


def test_clients_in_the_same_place_are_laid_around_it() -> None:
    found = maps.spread(np.array([[0.0, 0.0]] * 5 + [[1.0, 0.0]] * 5 + [[np.nan, 0.0]]))
    assert np.isnan(found[-1]).all()
    apart = squareform(pdist(found[:-1]))
    assert apart[np.triu_indices(10, 1)].min() > 0.01
    assert apart[:5, :5].max() < apart[:5, 5:].min()


def test_maps_are_turned_to_lie_on_one_another() -> None:
    one = np.random.default_rng(2).normal(size=(9, 2))
    turned = 0.5 * one @ np.array([[0.0, -1.0], [1.0, 0.0]]) + [3, 4]
    np.testing.assert_allclose(maps.aligned(turned, one), one, atol=1e-12)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1], ""),
        ([0, 0, 1, 1], [5, 5, 2, 2], ""),  # other numbers, the same clusters
        ([0, 0, 1, 1], [0, 0, 0, 0], "1 merged, 2 clients moved"),
        ([0, 0, 0, 0], [0, 0, 1, 1], "1 split off, 2 clients moved"),
        ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1], "1 clients moved"),
        ([0, -1, 1], [0, 0, -1], "1 joined, 1 left"),
    ],
)
def test_what_happened_to_the_clusters(before: list[int], after: list[int], words: str) -> None:
    assert maps.change(np.array(before), np.array(after)) == words.replace("1 clients", "1 client")


def settings(root: Path, **output: str) -> dict[str, Any]:
    return {
        "rounds": 2,
        "partition": {"name": "tasks", "tasks": TASKS},
        "model": {"name": "mlp", "hidden": [12]},
        "algorithm": "pacfl",
        "clustering": {"n_clusters": 3},
        "execution": {"backend": "inline"},
        "output": {"root": str(root), "tensorboard": False, **output},
    }


@pytest.mark.slow
def test_umap_keeps_near_clients_near(tmp_path: Path) -> None:
    rows = np.concatenate([np.random.default_rng(g).normal(size=(20, 30)) * 0.3 + 3 * g for g in range(4)])
    distances, groups = squareform(pdist(rows)), np.repeat(range(4), 20)
    found = plane(distances, "umap", 1)
    assert (found == plane(distances, "umap", 1)).all()
    assert np.abs(found).max() == 1
    assert (groups[squareform(pdist(found) + 0.0).argsort(axis=1)[:, 1:10]] == groups[:, None]).all()
    # Clients at the same place, at two places, and as few as there may be.
    pair = np.kron(1 - np.eye(2), np.ones((8, 8)))
    for awkward in (np.zeros((9, 9)), pair, squareform(pdist(rows[:LEAST]))):
        assert np.isfinite(plane(awkward, "umap")).all()

    result = rayfl.run(settings(tmp_path, map="umap"))
    [entry] = result.clusters["timeline"]
    assert entry["map"]["by"] == "umap"
    assert "distances between signatures, by UMAP" in (result.path / "report.html").read_text()
    same = rayfl.run(settings(tmp_path))
    assert same.summary["models_sha256"] == result.summary["models_sha256"]  # a map is only looked at
    assert same.clusters["timeline"][0]["map"]["x"] != entry["map"]["x"]

    [one], _ = cluster_without_training([load(settings(tmp_path, map="umap"))])
    assert "by UMAP" in render(page_of([one], "one"))


def test_angles_are_in_degrees() -> None:
    assert maps.between_signatures("cosine") == "distance between signatures (cosine)"
    clusters = Clusters(np.array([0, 0, 1]), 2, distances=np.array([1.0, 2.0, 3.0]))
    settings = Clustering(proximity="principal_angle")
    page = render(page_of([ClusteringResult("pacfl", settings, clusters, None, (), 0.1)], "one"))
    assert "distance between signatures (principal_angle, in degrees)" in page


def test_a_graph_has_no_measure_of_distances() -> None:
    settings = Clustering(proximity=None)
    clusters = Clusters(np.array([0, 0, 1]), 2, distances=np.array([1.0, 2.0, 3.0]))
    page = render(page_of([ClusteringResult("flt", settings, clusters, None, (), 0.1)], "one"))
    assert "distance between signatures" in page
    assert "None" not in text(page)


def test_umap_makes_no_map_of_too_few_clients() -> None:
    few = Clusters(np.zeros(LEAST - 1, np.int64), 1, distances=np.arange(1.0, 7.0))
    assert few.without_distances("umap").placed_by == "mds"
    nobody = few.without_distances("umap").without_distances("umap")
    assert nobody.distances is None


@pytest.mark.parametrize("clients", [1, 2, 7, EXCERPT, EXCERPT + 1, 331])
def test_an_excerpt_has_the_distances_of_its_clients(clients: int) -> None:
    rng = np.random.default_rng(clients)
    distances = pdist(rng.normal(size=(clients, 3)))
    order = rng.permutation(clients)
    found = Excerpt.of(distances, order)
    assert len(found.clients) == min(clients, EXCERPT)
    assert [i for i in order if i in set(found.clients)] == found.clients.tolist()
    expected = squareform(distances)[np.ix_(found.clients, found.clients)]
    np.testing.assert_array_equal(squareform(found.distances) if clients > 1 else [[0.0]], expected)


def test_an_excerpt_of_a_graph_says_who_is_related() -> None:
    ends = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], float)
    found = Clusters(np.array([0, 0, 1]), 2, graph=csr_array(ends)).without_distances()
    assert found.excerpt is not None
    assert found.excerpt.distances.tolist() == [0, 1, 1]
    # Of five clients two have not joined
    among = found.among(np.array([0, 2, 4]), 5)
    assert among.excerpt is not None
    assert among.excerpt.clients.tolist() == [0, 2, 4]


def test_a_damaged_excerpt_is_left_out(tmp_path: Path) -> None:
    pd.DataFrame({"client": [0, 1]}).to_csv(tmp_path / "clients.csv", index=False)
    for kept in ({"clients": [0, 2], "distances": [1.0]}, {"clients": [0, 1], "distances": []}, {}):
        entry = {"round": -1, "labels": [0, 1], "excerpt": kept}
        (tmp_path / "clusters.json").write_text(json.dumps({"timeline": [entry]}))
        assert maps.matrix_of(RunFiles.read(tmp_path)) is None


def test_a_run_keeps_a_map_of_its_signatures(tmp_path: Path) -> None:
    result = rayfl.run(settings(tmp_path))
    [entry] = result.clusters["timeline"]
    assert entry["map"]["by"] == "mds"
    assert len(entry["map"]["x"]) == len(entry["map"]["y"]) == 9
    page = (result.path / "report.html").read_text()
    assert "distances between signatures" in page
    data = values(page)["data"]["clients"]
    apart = squareform(pdist(np.array([data["x"], data["y"]]).T))
    same = np.equal.outer(entry["labels"], entry["labels"])
    assert apart[same].max() < apart[~same].min()
    labels = pd.read_csv(result.path / "labels.csv")
    assert labels.filter(like="class_").sum(axis=1).tolist() == result.clients["n"].tolist()
    # The matrix beside it: the distances themselves, in the order of the dendrogram.
    [cut], _ = cluster_without_training([load(settings(tmp_path))])
    assert cut.clusters.distances is not None
    assert cut.clusters.linkage is not None
    matrix = maps.matrix_of(RunFiles.read(result.path))
    assert matrix is not None
    assert matrix.clients == leaves_list(cut.clusters.linkage).tolist()
    expected = squareform(cut.clusters.distances)[np.ix_(matrix.clients, matrix.clients)]
    np.testing.assert_allclose(matrix.distances, expected, atol=0.006 * expected.max())
    assert "Matrix of distance between signatures" in page
    clusters = json.loads((result.path / "clusters.json").read_text())
    for each in clusters["timeline"]:
        del each["map"], each["excerpt"]
    (result.path / "clusters.json").write_text(json.dumps(clusters))  # as of a method without signatures
    run = RunFiles.read(result.path)
    found = maps.map_of(run, maps.steps_of(run))
    assert found is not None
    assert found.meaning.startswith("shares of labels")


def test_the_slider_goes_through_the_clusterings(make_run: Callable[[str], Path]) -> None:
    run = make_run("one")
    entries = [
        {"round": -1, "labels": [0, 0, 5, 5], "n_clusters": 2},
        {"round": 0, "when": "after", "labels": [0, 0, 5, 5], "n_clusters": 2},
        {"round": 2, "when": "before", "labels": [0, 0, 0, 0], "n_clusters": 1},
        {"round": 3, "when": "after", "labels": [0, 1, 1, 1], "n_clusters": 2},
    ]
    (run / "clusters.json").write_text(json.dumps({"timeline": entries}))
    page = rayfl.report.write_report(run).read_text()
    [_, slider] = charts(page)["Map of clients"]["selectors"]
    assert [choice["label"] for choice in slider["choices"]] == [
        "before training: 2 clusters",
        "before round 3: 1 cluster, 1 merged, 2 clients moved",
        "after round 4: 2 clusters, 1 split off, 1 client moved",
    ]
    data = values(page)["data"]["clients"]
    assert [data[f"cluster {i}"] for i in range(3)] == [[0, 0, 5, 5], [0, 0, 0, 0], [0, 1, 1, 1]]
