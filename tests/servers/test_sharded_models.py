"""Models whose shards lie at several LPSs: the same bits, and nobody at the servers has a whole one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import rayfl
from rayfl.aggregation import AGGREGATIONS, Aggregation
from rayfl.algorithms import Algorithm, ServerState, Setup
from rayfl.algorithms.fedavgm import Momentum
from rayfl.algorithms.pacfl import PACFL
from rayfl.backend import Joined, Objects, laid_out, received
from rayfl.clients import host, jobs, partial, ranges
from rayfl.clients.partial import Partial, added
from rayfl.clients.ranges import Ranges
from rayfl.errors import ConfigError
from rayfl.server_step import Averaged, ServerStep, Vectors
from rayfl.servers import averaging, lps
from rayfl.servers.lps import FACTS, MODEL, CombineJob, LocalServer, Optimizer, Reduced, ReduceJob
from rayfl.training.server import AtServer, ServerTraining
from tests.runs import METHODS, assert_same

pytestmark = pytest.mark.usefixtures("forgotten_parts")

Vector = NDArray[np.float32]

MEDIAN = AGGREGATIONS["median"]()

MOMENTUM = Optimizer(Momentum(0.5, 1.5), np.array([10]), np.array([12]))

PIECE = 64
"""Numbers of a piece in these tests: the small models have several."""


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (partial, lps, ranges, host, jobs):
            patch.setattr(module, "PIECE", PIECE)
        yield


# --- ranges -------------------------------------------------------------------------------------------------


@given(size=st.integers(0, 1000), shards=st.integers(1, 9))
def test_ranges_are_whole_pieces_and_as_equal_as_may_be(size: int, shards: int) -> None:
    found = Ranges.of(size, shards)
    assert found.bounds[0] == 0
    assert found.bounds[-1] == size
    assert all(bound % PIECE == 0 for bound in found.bounds[:-1])
    assert len(found) == min(shards, max(1, -(-size // PIECE)))
    pieces = [-(-(place.stop - place.start) // PIECE) for place in found]
    assert max(pieces) - min(pieces) <= 1


@given(data=st.data(), size=st.integers(1, 600), shards=st.integers(1, 5))
def test_segments_are_the_same_in_their_ranges(data: Any, size: int, shards: int) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=6)))
    segments = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    found = Ranges.of(size, shards)
    covered = np.concatenate([np.arange(a, b) for a, b in segments])
    within = [
        np.concatenate([np.arange(a, b) + place.start for a, b in own] or [np.zeros(0, int)])
        for place, own in zip(found, found.within(segments), strict=True)
    ]
    assert np.concatenate(within).tolist() == covered.tolist()
    for mine, place in zip(within, found.among(segments), strict=True):
        assert covered[place].tolist() == mine.tolist()


def test_what_is_sent_apart_arrives_whole() -> None:
    model = np.arange(5.0)
    objects = {("model", 0): Joined((model[:2], model[2:])), ("model", 1): model, ("x", 0): Joined((model,))}
    names, values = laid_out(objects)
    assert len(values) == 4
    found = received(names, iter(values))
    assert [each.tolist() for each in found.values()] == 3 * [model.tolist()]
    assert found["model", 0] is not found["model", 0]  # only what is in use is whole
    names, values = laid_out({("model", 1): model})
    assert received(names, iter(values))["model", 1] is model


def test_a_client_that_failed_sends_nothing_for_an_empty_shard() -> None:
    """Zeros of one number stand for all; of no number there are none."""
    shared, extra = [slice(0, 0), slice(0, 5)], [slice(0, 0)] * 2
    failed, fine = Partial(np.zeros(1), 0.0), Partial(np.ones(5), 1.0)
    for one, other in zip(failed.split(shared, extra), fine.split(shared, extra), strict=True):
        both = added([one.cut(), other.cut()])
        assert partial.length(both.total) == partial.length(other.total)
        assert both.weight == 1.0


# --- one LPS by itself --------------------------------------------------------------------------------------


@given(
    shards=st.integers(2, 4),
    gap=st.sampled_from([0, 3, 40]),
    masks=st.sampled_from(["none", "some", "left out"]),
    keep=st.sampled_from([0.0, 2.5]),
    statistics=st.sampled_from([0, 3, 70]),
    step=st.booleans(),
    updates=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_shards_are_reduced_to_the_bits_of_the_whole(
    shards: int, gap: int, masks: str, keep: float, statistics: int, step: bool, updates: bool, seed: int
) -> None:
    """Personal and common layers, masks, kept parts, statistics, server steps, the server's vector."""
    rng = np.random.default_rng(seed)
    size = 4 * PIECE + 9
    shared = ((0, size),) if not gap else ((5, 100), (100 + gap, size - 2))
    covered = sum(b - a for a, b in shared)
    model = rng.standard_normal(size).astype(np.float32)
    memory = rng.standard_normal((1, covered - statistics))
    vector = rng.standard_normal(21).astype(np.float32)
    parts = [_part(rng, covered, masks, keep, statistics) for _ in range(3)]
    optimizer = Optimizer(Momentum(0.5, 1.5), np.array([3]), np.array([4])) if step else None
    common = ((0, 7), (PIECE - 3, PIECE + 30))

    def reduced(place: slice, own: Any, among: Any, some: list[Partial], bounds: list[slice]) -> Any:
        objects: dict[Any, Any] = {MODEL: model[place], ("vector", 0): vector[bounds[0]]}
        objects |= {("sum", number): each.cut() for number, each in enumerate(some)}
        if step:
            objects["memory", 0] = memory[:, bounds[1]]
        job = ReduceJob(3, own, among, members=4, optimizer=optimizer, updates=updates)
        return LocalServer().reduce(job, objects).objects

    cut = Ranges.of(size, shards)
    assert len(cut) == shards
    parameters = Ranges(tuple(min(bound, covered - statistics) for bound in cut.among(shared).bounds))
    split = [each.split([*cut.among(shared)], [*cut.evenly(21)]) for each in parts]
    one = reduced(slice(None), shared, common, parts, [slice(None), slice(None)])
    several = [
        reduced(place, own, among, [each[number] for each in split], [v, m])
        for number, (place, own, among, v, m) in enumerate(
            zip(cut, cut.within(shared), cut.within(common), cut.evenly(21), parameters, strict=True)
        )
    ]
    for key in (MODEL, ("vector", 0), *([("memory", 0)] if step else [])):
        whole = np.concatenate([each[key] for each in several], axis=-1)
        assert whole.tobytes() == one[key].tobytes(), key
    told: Reduced = one[FACTS][3]
    joined = Reduced.joined([each[FACTS][3] for each in several], cut)
    np.testing.assert_array_equal(np.broadcast_to(joined.weight, size), np.broadcast_to(told.weight, size))
    assert joined.update_norm == told.update_norm
    np.testing.assert_array_equal(joined.common.total, told.common.total)
    _same(joined.common.weight, told.common.weight, len(told.common.total))


@pytest.mark.parametrize("offset", [1, 3, 50])
@pytest.mark.parametrize("rule", [None, MEDIAN])
def test_products_of_trained_rows_have_the_bits_of_the_whole(
    offset: int, rule: Aggregation | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared numbers that begin in the middle of a piece: a product's last bit depends on its columns."""
    for module in (partial, lps, ranges):
        monkeypatch.setattr(module, "PIECE", 1 << 16)
    size, rng = 2 << 16, np.random.default_rng(offset)
    shared = (((1 << 16) - offset, size),)
    model = rng.standard_normal(size).astype(np.float32)
    ties = rng.random((10, size - shared[0][0])) < 0.5
    rows = np.where(ties, np.float32(1), np.float32(1 + 2**-23)).astype(np.float32)
    weights = [np.full((1, 10), 0.1) * rng.integers(1, 3, (1, 10))]

    def combined(own: Any, model: Vector, rows: Vector) -> Any:
        job = CombineJob(own, (), (0,), (0,), weights, None, np.zeros(1), 0, MOMENTUM, rule=rule)
        return LocalServer().combine(job, {MODEL: model, ("rows", 0): rows}).objects

    cut = Ranges.of(size, 2)
    one = combined(shared, model, rows)
    several = [
        combined(own, model[place], rows[:, among])
        for place, own, among in zip(cut, cut.within(shared), cut.among(shared), strict=True)
    ]
    for key in (MODEL, ("memory", 0)):  # that of the server step is in double precision
        assert np.concatenate([each[key] for each in several], axis=-1).tobytes() == one[key].tobytes()


def _same(one: partial.Weight, other: partial.Weight, size: int) -> None:
    np.testing.assert_array_equal(np.broadcast_to(one, size), np.broadcast_to(other, size))


def _part(rng: np.random.Generator, size: int, masks: str, keep: float, statistics: int) -> Partial:
    a = float(rng.integers(1, 9))
    row = rng.standard_normal(size).astype(np.float32).astype(np.float64)
    extra = rng.standard_normal(21)
    if masks == "none":
        return Partial(a * row, a, keep, extra, statistics)
    kept = rng.integers(0, 2, size).astype(np.float64)
    if masks == "left out":  # a whole shard
        kept[: 2 * PIECE] = 0.0
    return Partial(a * row * kept, a * kept, keep, extra, statistics)


def test_the_norm_of_an_update_is_that_of_its_parameters() -> None:
    """Without running statistics, at the end, and what clients keep to themselves."""
    rng = np.random.default_rng(0)
    model = rng.standard_normal(3 * PIECE + 5).astype(np.float32)
    shared = ((10, len(model)),)
    new = rng.standard_normal(len(model) - 10).astype(np.float32)
    job = ReduceJob(0, shared, ())
    told = LocalServer().reduce(job, {MODEL: model, ("sum", 0): Partial(new, 1.0, statistics=7)}).objects
    way = (new.astype(np.float64) - model[10:])[:-7]
    np.testing.assert_allclose(told[FACTS][0].update_norm, np.sqrt((way**2).sum()), rtol=1e-14)


# --- runs ---------------------------------------------------------------------------------------------------


def sharded(settings: dict[str, Any], **execution: Any) -> dict[str, Any]:
    """The same with three LPSs that share every model."""
    hierarchy = {**settings.get("hierarchy", {}), "lps_actors": 3}
    execution = {**settings["execution"], "shard_models": True, **execution}
    return {**settings, "hierarchy": hierarchy, "execution": execution}


def made(settings: dict[str, Any], method: str) -> dict[str, Any]:
    return {**settings, "algorithm": method, **METHODS[method]}


LIKE_OTHERS = {
    "solo", "pca_km_hc", "random_clustering", "lg_fedavg", "fedsem", "flis_dc", "flis_hc", "fedprox",
    "fedavgm", "pacfl, scaffold", "mt_hfl", "pacfl",
}  # fmt: skip
"""Slow, because another method has their kind of models, states and sums."""


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=pytest.mark.slow) if m in LIKE_OTHERS else m for m in METHODS]
)
def test_a_run_with_shards_has_the_bits_of_one_without(method: str, settings: dict[str, Any]) -> None:
    plain = made(settings, method)
    assert_same(rayfl.run(plain), rayfl.run(sharded(plain)))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("method", ["fedavg", "pacfl", "mt_hfl, fednova", "mtl", "qfedavg", "fedadam"])
def test_running_statistics_in_shards(method: str, settings: dict[str, Any]) -> None:
    layers = nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10)
    plain = {**made(settings, method), "model": nn.Sequential(*layers)}
    assert_same(rayfl.run(plain), rayfl.run(sharded(plain)))


@pytest.mark.parametrize("fan_in", [None, 2])
def test_large_models_in_shards(
    fan_in: int | None, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that train one by one, sums that are added early or in a tree, pieces in threads."""
    plain = made(settings, "fedavg")
    plain["execution"] = {**plain["execution"], "fan_in": fan_in}
    usual = rayfl.run(plain)
    for module in (host, lps):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(averaging, "most_waiting", lambda parameters: 2)
    assert_same(usual, rayfl.run(sharded(plain)))


@pytest.mark.parametrize("rule", ["median", {"name": "trimmed_mean", "share": 0.2}])
def test_rules_for_each_number_in_shards(rule: Any, settings: dict[str, Any]) -> None:
    plain = {**settings, "aggregation": rule}
    assert_same(rayfl.run(plain), rayfl.run(sharded(plain)))


def test_rows_are_sent_as_they_lie(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays with gaps would be copied into messages, and again at the LPS, past the object store."""
    train, seen = host.ClientHost.train, []

    def watched(self: host.ClientHost, job: Any, objects: Objects) -> Any:
        answer = train(self, job, objects)
        seen.extend(rows.flags.c_contiguous for (kind, _), rows in answer.objects.items() if kind == "rows")
        return answer

    monkeypatch.setattr(host.ClientHost, "train", watched)
    rayfl.run(sharded({**settings, "aggregation": "median"}, block_size=4))
    assert len(seen) > 3
    assert all(seen)


def test_one_lps_has_no_other_to_share_with(settings: dict[str, Any]) -> None:
    alone = {**settings, "execution": {**settings["execution"], "shard_models": True}}
    with pytest.raises(ConfigError, match=r"hierarchy\.lps_actors: is 1, and execution\.shard_models"):
        rayfl.run({**alone, "hierarchy": {"lps_actors": 1}})


def test_a_rule_for_whole_models_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"execution\.shard_models: .*'krum' compares whole models"):
        rayfl.run(sharded({**settings, "aggregation": "krum"}))


def test_no_lps_gets_more_than_its_shard(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the model nor of what clients send, and each does its share."""
    seen: list[int] = []
    reduce = LocalServer.reduce

    def watched(self: LocalServer, job: ReduceJob, objects: Objects) -> Any:
        sizes = [len(objects[MODEL])]
        sizes += [partial.length(each.total) for (kind, _), each in objects.items() if kind == "sum"]
        assert len(set(sizes)) == 1
        seen.append(sizes[0])
        return reduce(self, job, objects)

    monkeypatch.setattr(LocalServer, "reduce", watched)
    size = 64 * 6 + 6 + 60 + 10  # eight pieces, the last one of 12
    rayfl.run(sharded({**settings, "model": {"name": "mlp", "hidden": [6]}, "rounds": 2}))
    assert seen == 2 * [2 * PIECE, 3 * PIECE, size - 5 * PIECE]


@pytest.mark.parametrize("method", ["fedadam", "mt_hfl, scaffold", "pacfl"])
def test_a_run_continues_with_or_without_shards(method: str, settings: dict[str, Any]) -> None:
    plain = {**made(settings, method), "rounds": 4}
    expected = rayfl.run(plain)
    for begun, then in ((plain, "true"), (sharded(plain), "false")):
        half = rayfl.run({**begun, "rounds": 2})
        changes = ["rounds=4", f"execution.shard_models={then}"]
        assert_same(expected, rayfl.resume(half.path, changes))


def test_personal_layers_in_shards_of_their_own(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such a shard clients send nothing, whether they fail or not, in a tree or not."""
    from rayfl.training.loop import LoopEngine

    train = LoopEngine._train_client

    def broken(self: LoopEngine, work: Any, indices: Any, plan: Any, vector: Any, *rest: Any) -> float:
        if len(indices) == largest:
            raise RuntimeError("no such pixel")
        return train(self, work, indices, plan, vector, *rest)

    plain = made(settings, "lg_fedavg")
    plain["training"] = {**settings["training"], "engine": "loop"}
    largest = int(rayfl.run(plain).clients["n"].max())
    monkeypatch.setattr(LoopEngine, "_train_client", broken)
    for fan_in in (None, 2):
        execution = {**settings["execution"], "tolerate_failures": 2, "block_size": 1, "fan_in": fan_in}
        tree = {**plain, "execution": execution}
        whole = rayfl.run(tree)
        assert whole.rounds["failures"].sum() > 0
        assert_same(whole, rayfl.run(sharded(tree)))


@dataclass(frozen=True)
class Move(ServerTraining):
    """Adds a half to every parameter."""

    def train(self, at: AtServer) -> None:
        with torch.no_grad():
            for parameter in at.module.parameters():
                parameter += 0.5


class Shifted(PACFL):
    name: Literal["pacfl", "shifted"] = "shifted"
    defaults: ClassVar[Mapping[str, Any]] = PACFL.defaults

    def server_training(self, setup: Setup, state: ServerState) -> ServerTraining | None:
        return Move()


def test_a_model_that_the_server_trains_is_in_shards_again(settings: dict[str, Any]) -> None:
    plain = {**settings, "algorithm": Shifted(), "clustering": {"n_clusters": 3}}
    assert_same(rayfl.run(plain), rayfl.run(sharded(plain)))


@dataclass(frozen=True)
class Clipped(ServerStep):
    """Moves by no more than 1."""

    def apply(self, averaged: Averaged, vectors: Vectors) -> tuple[NDArray[np.float64], Vectors]:
        return averaged.old + averaged.update / max(1.0, float(np.linalg.norm(averaged.update))), {}


class Careful(Algorithm):
    name: Literal["careful"] = "careful"

    def server_step(self, setup: Setup, state: ServerState) -> ServerStep:
        return Clipped()


def test_a_step_that_needs_a_whole_model_is_refused(settings: dict[str, Any]) -> None:
    careful = {**settings, "algorithm": Careful()}
    rayfl.run(careful)
    with pytest.raises(ConfigError, match=r"execution\.shard_models: Clipped of careful is not elementwise"):
        rayfl.run(sharded(careful))


def test_a_client_that_fails_leaves_no_shard(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayfl.training.loop import LoopEngine

    train = LoopEngine._train_client

    def broken(self: LoopEngine, work: Any, indices: Any, plan: Any, vector: Any, *rest: Any) -> float:
        loss = train(self, work, indices, plan, vector, *rest)
        if len(indices) == largest:
            vector.fill_(float("nan"))
            raise RuntimeError("no such pixel")
        return loss

    largest = int(rayfl.run(settings).clients["n"].max())
    monkeypatch.setattr(LoopEngine, "_train_client", broken)
    execution = {**settings["execution"], "tolerate_failures": 2, "block_size": 1}
    training = {**settings["training"], "engine": "loop"}
    plain = {**settings, "execution": execution, "training": training}
    whole = rayfl.run(plain)
    assert whole.rounds["failures"].sum() > 0
    assert_same(whole, rayfl.run(sharded(plain)))
