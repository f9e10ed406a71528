"""Clustering through a backend: in one task, in tiles, by way of representatives; on any workers the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from rayfl.api import run
from rayfl.backend import Backend
from rayfl.clients.jobs import SIGNATURES, HostSpec, SignatureJob
from rayfl.clustering.cluster import CURVE, Clusters, cluster_signatures
from rayfl.clustering.config import Clustering
from rayfl.clustering.linkage import Curve
from rayfl.clustering.proximity import BLOCK
from rayfl.config import load
from rayfl.data import Federation
from rayfl.errors import ConfigError, DataError, RayflError
from rayfl.evaluation import Transfer
from rayfl.runtime.inline import InlineBackend
from rayfl.runtime.ray_backend import RayBackend
from rayfl.servers import signatures
from rayfl.servers.building import build, servers_of, setup_of
from rayfl.servers.queries import ClientQueries
from rayfl.signatures.base import Signature
from rayfl.signatures.features.identity import Identity
from rayfl.signatures.spectrum import Spectrum
from rayfl.signatures.subspace import Subspace

TASKS = [
    {"labels": [0, 1, 2, 3], "clients": 14},
    {"labels": [4, 5, 6], "clients": 10},
    {"labels": [7, 8, 9], "clients": 7},
]
"""31 clients: neither blocks of 4 nor tiles of 6 divide them, or one another."""


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05}}


@contextmanager
def started(backend: Backend, settings: dict[str, Any]) -> Iterator[ClientQueries]:
    """What may be asked before training."""
    config = load(settings)
    stages, host = build(config)
    federation = stages[0].federation
    try:
        backend.start(backend.put((federation,)), host)
        servers = servers_of(config, host, backend, federation)
        state = config.algorithm.begin(setup_of(config, federation, host.spec))
        yield ClientQueries(config, servers, stages, state, lambda transfer: None)
    finally:
        backend.close()


def ask(
    clients: ClientQueries, clustering: Clustering, block_size: int = 4, tile_size: int = BLOCK
) -> tuple[Clusters, list[Transfer]]:
    """The clusters, and what was sent for them."""
    transfers: list[Transfer] = []
    clients.servers.block_size = lambda count: block_size
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signatures, "TILE", tile_size)
        return replace(clients, account=transfers.append).cluster(clustering), transfers


def clustered(
    backend: Backend, settings: dict[str, Any], clustering: Clustering, tile_size: int = BLOCK
) -> tuple[Clusters, list[Transfer]]:
    with started(backend, settings) as clients:
        return ask(clients, clustering, tile_size=tile_size)


def assert_same(first: Clusters, second: Clusters) -> None:
    """Equal in every bit; seconds aside."""
    assert first.labels.tolist() == second.labels.tolist()
    assert first.facts() == second.facts()
    assert first.ari == second.ari


EXACT = Clustering(n_clusters=3)
STAGED = Clustering(n_clusters=3, exact_up_to=16)


@pytest.mark.parametrize("proximity", ["principal_angle", "vector_angle_sum"])
def test_tiles_are_what_one_task_finds(proximity: str, settings: dict[str, Any]) -> None:
    clustering = Clustering(proximity=proximity, n_clusters=3)
    whole, sent = clustered(InlineBackend(), settings, clustering)
    tiled, sent_again = clustered(InlineBackend(), settings, clustering, tile_size=6)
    assert sent == sent_again
    assert tiled.labels.tolist() == whole.labels.tolist()
    assert tiled.ari == whole.ari
    assert whole.curve is not None
    assert tiled.curve is not None
    np.testing.assert_allclose(tiled.curve.thresholds, whole.curve.thresholds, atol=0.02)
    assert not np.array_equal(tiled.curve.thresholds, whole.curve.thresholds)  # single precision: tiles


@pytest.mark.parametrize("clustering", [EXACT, STAGED], ids=["exact", "two-stage"])
def test_blocks_of_any_size_come_in_order(clustering: Clustering, settings: dict[str, Any]) -> None:
    """What the tasks find is what one process finds that holds all signatures in the order of the ids."""
    backend = InlineBackend()
    with started(backend, settings) as clients:
        federation = clients.federation
        everyone = SignatureJob(
            np.arange(federation.clients),
            Subspace(),
            Identity().fit(np.zeros(0), 0),
            3,
            np.zeros(federation.clients, np.int64),
        )
        found = backend._host.signatures(everyone, {}).objects[SIGNATURES]
        expected = cluster_signatures(clustering, found, groups=federation.groups, seed=3)
        for block_size in (1, 3, 4, 9, 31, 40):
            for tile_size in (2, 6, 30):
                clusters, _ = ask(clients, clustering, block_size, tile_size)
                assert clusters.labels.tolist() == expected.labels.tolist()
                assert clusters.representatives == expected.representatives


@pytest.mark.ray
@pytest.mark.parametrize(
    ("clustering", "actors"),
    [pytest.param(EXACT, 3, marks=pytest.mark.slow, id="exact-3"), pytest.param(STAGED, 2, id="two-stage-2")],
)
def test_tiles_on_ray_are_those_inline(
    clustering: Clustering, actors: int, settings: dict[str, Any], ray_cluster: None
) -> None:
    inline, sent = clustered(InlineBackend(), settings, clustering, tile_size=6)
    backend = RayBackend(actors, num_cpus=0.5, num_gpus=0, servers=1)
    on_ray, sent_on_ray = clustered(backend, settings, clustering, tile_size=6)
    assert_same(inline, on_ray)
    assert sent == sent_on_ray
    assert (inline.representatives is not None) == (clustering is STAGED)


@pytest.mark.slow
@pytest.mark.ray
def test_a_whole_run_by_way_of_representatives_is_the_same_inline_and_on_ray(
    settings: dict[str, Any], ray_cluster: None
) -> None:
    staged = {**settings, "algorithm": "pacfl", "clustering": {"n_clusters": 3, "exact_up_to": 16}}
    inline = run(staged)
    execution = {**settings["execution"], "backend": "ray", "actors": 2, "cpus_per_actor": 0.5}
    on_ray = run({**staged, "execution": execution})
    assert inline.clusters == on_ray.clusters
    assert inline.summary["models_sha256"] == on_ray.summary["models_sha256"]
    entry = inline.clusters["timeline"][0]
    assert 8 <= entry["two_stage"]["representatives"] <= 16
    assert entry["two_stage"]["agreement"] > 0.5


class Refusing(InlineBackend):
    """Fails if a client is asked for anything."""

    def start(self, federation: Federation, host: HostSpec) -> None:
        """Nobody is needed."""

    def run(self, tasks: Any) -> Any:
        raise AssertionError("a client was asked")


@pytest.mark.parametrize(
    ("clustering", "free", "error", "message"),
    [
        (Clustering(signature=Spectrum(), exact_up_to=30), 10**9, ConfigError, "31 clients, and spectrum"),
        (EXACT, 9000, RayflError, "31 clients need .* up to 30 clients would fit"),
    ],
)
def test_what_cannot_be_is_refused_before_any_client_is_asked(
    clustering: Clustering,
    free: int,
    error: type[RayflError],
    message: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rayfl.clustering.cluster.free_memory", lambda: free)
    with pytest.raises(error, match=message):
        clustered(Refusing(), settings, clustering)


def test_the_linking_task_checks_the_memory_where_it_runs(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfl.servers.signatures.free_memory", lambda: 1800)
    with pytest.raises(RayflError, match="31 clients"):
        clustered(InlineBackend(), settings, EXACT, tile_size=6)


def test_an_exchange_is_one_task_whatever_the_tile(settings: dict[str, Any]) -> None:
    clustering = Clustering(signature=Spectrum(), n_clusters=3)
    whole, _ = clustered(InlineBackend(), settings, clustering)
    found, transfers = clustered(InlineBackend(), settings, clustering, tile_size=6)
    assert_same(whole, found)
    assert {t.direction for t in transfers} == {"up", "down"}


class OfOneKind(Signature):
    """A direction in as many dimensions as a client's most frequent label says: not comparable."""

    name: Literal["of_one_kind"] = "of_one_kind"
    proximities: ClassVar[tuple[str, ...]] = ("principal_angle",)

    def compute(self, x: Any, y: Any, key: int = 0) -> Any:
        return np.eye(20, dtype=np.float32)[: 10 + (np.bincount(y).argmax() > 3), :1]


@pytest.mark.parametrize("tile_size", [BLOCK, 2])
def test_a_signature_that_fits_no_other_is_named_by_its_client(
    tile_size: int, settings: dict[str, Any]
) -> None:
    """By its id, also where other clients than the first ones are clustered."""
    asked = np.array([2, 5, 11, 16])
    with started(InlineBackend(), settings) as clients, pytest.MonkeyPatch.context() as patched:
        patched.setattr(signatures, "TILE", tile_size)
        clients.servers.block_size = lambda count: 3
        with pytest.raises(DataError, match=r"client 16: its signature has 11 features, client (2|11)'s"):
            clients.cluster(Clustering(signature=OfOneKind(), n_clusters=2), asked)


def test_a_long_curve_is_thinned_where_clusters_are_many() -> None:
    counts = np.arange(5000, 0, -1)
    clusters = Clusters(np.zeros(5000, np.int64), 1, curve=Curve(np.arange(5000.0), counts))
    curve = clusters.facts()["curve"]
    assert len(curve["threshold"]) == len(curve["n_clusters"]) <= 2 * CURVE
    assert curve["threshold"][0] == 0
    assert curve["n_clusters"][-CURVE:] == list(range(CURVE, 0, -1))
    points = dict(zip(np.arange(5000.0).tolist(), counts.tolist(), strict=True))
    assert all(points[t] == n for t, n in zip(curve["threshold"], curve["n_clusters"], strict=True))
    short = Clusters(np.zeros(3, np.int64), 1, curve=Curve(np.arange(3.0), np.array([3, 2, 1])))
    assert short.facts()["curve"] == {"threshold": [0, 1, 2], "n_clusters": [3, 2, 1]}
