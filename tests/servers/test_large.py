"""Large models: pieces give the bits of the whole, and nowhere are there more copies than said."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

import rayfl
from rayfl.backend import Done, Key, Objects, Ref
from rayfl.clients import host, partial, ranges
from rayfl.clients.partial import Adding, Partial, added
from rayfl.models import MODELS, ModelSpec
from rayfl.servers import averaging, lps, rounds
from rayfl.servers.lps import MODEL, LocalServer, ReduceJob
from rayfl.training.batched import calls
from tests.runs import METHODS

Ranges = tuple[tuple[int, int], ...]
T = TypeVar("T")


PIECE = 64
"""Numbers of a piece in most of these tests."""


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial, "PIECE", PIECE)
        patch.setattr(lps, "PIECE", PIECE)
        yield


def whole(shared: Ranges, model: NDArray[np.float32], parts: Sequence[Partial]) -> NDArray[np.float32]:
    """The next model from whole arrays in double precision, as the formulas say."""
    covered = np.concatenate([np.arange(a, b) for a, b in shared])
    total, weight, last = np.zeros(len(covered)), np.zeros(len(covered)), parts[0].statistics
    for part in parts:
        total = total + np.asarray(part.total, np.float64) * part.factor
        weight = weight + part.weight
    keep = np.full(len(covered), sum(part.keep for part in parts))
    kept = keep.copy()
    kept[len(kept) - last :] = 0.0  # of running statistics that is in the total
    new, old = model.copy(), model[covered].astype(np.float64)
    averages = old.copy()
    if weight.any():
        np.divide(total + kept * old, weight + keep, out=averages, where=weight + keep > 0)
    new[covered] = averages
    return new


@given(
    size=st.sampled_from([1, 7, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5]),
    gap=st.sampled_from([0, 3, PIECE // 2]),
    parts=st.integers(1, 4),
    models=st.booleans(),
    weights=st.sampled_from(["one", "each"]),
    keep=st.sampled_from([0.0, 2.5]),
    statistics=st.integers(0, 3),
    cut=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pieces_give_the_bits_of_the_whole(
    size: int, gap: int, parts: int, models: bool, weights: str, keep: float, statistics: int, cut: bool,
    seed: int,
) -> None:  # fmt: skip
    """Sums or models of single clients, masks, kept parts, statistics, personal layers, cut or not."""
    statistics = min(statistics, size)
    rng = np.random.default_rng(seed)
    shared = ((0, size),) if not gap else ((1, 1 + size // 2), (1 + size // 2 + gap, 1 + size + gap))
    model = rng.standard_normal(shared[-1][1] + 2).astype(np.float32)
    sums = []
    for place in range(parts):
        row, a = rng.standard_normal(size).astype(np.float32), float(rng.integers(1, 100))
        row[rng.random(size) < 0.1] = -0.0
        if models:
            part = Partial(row, a, keep, statistics=statistics, factor=a)
        elif weights == "each":
            counts = rng.integers(0, 2, size).astype(np.float64)
            part = Partial(0.0 + a * row.astype(np.float64) * counts, counts * a, keep, statistics=statistics)
        else:
            part = Partial(0.0 + a * row.astype(np.float64), a, keep, statistics=statistics)
        sums.append(part.cut() if cut and place % 2 else part)
    plain = [part if not isinstance(part.total, tuple) else _joined(part) for part in sums]
    expected = whole(shared, model, plain)
    new = _reduced(shared, model, sums)
    assert new.tobytes() == expected.tobytes()
    adding = Adding()
    for part in sums:
        adding.add(part)
    assert _reduced(shared, model, [adding.partial()]).tobytes() == expected.tobytes()
    assert _reduced(shared, model, [added(sums)]).tobytes() == expected.tobytes()


def _joined(part: Partial) -> Partial:
    total = np.concatenate(part.total)
    return Partial(total, part.weight, part.keep, None, part.statistics, factor=part.factor)


def _reduced(
    shared: Ranges, model: NDArray[np.float32], parts: Sequence[Partial], needs_norm: bool = False
) -> NDArray[np.float32]:
    objects: dict[Key, Any] = {MODEL: model, **{("sum", place): part for place, part in enumerate(parts)}}
    job = ReduceJob(0, shared, (), needs_norm=needs_norm)
    new: NDArray[np.float32] = LocalServer().reduce(job, objects).objects[MODEL]
    return new


def test_the_model_of_one_client_is_its_sum() -> None:
    """Half as many bytes; of a client that failed nothing is taken."""
    row = np.array([1.5, -0.0, 3.0], np.float32)
    single = Partial(row, 2.0, factor=2.0)
    nobody = Partial(np.zeros(1), 0.0)
    other = Partial(np.array([1.0, 0.0, 4.0]), 1.0)
    for some in ([single, other], [nobody, single, other], [single, nobody, other]):
        np.testing.assert_array_equal(added(some).total[0], [4.0, 0.0, 10.0])
    assert not np.signbit(added([single]).total[0]).any()
    np.testing.assert_array_equal(_reduced(((0, 3),), row, [nobody]), row)


def test_a_factor_counts_whatever_the_precision() -> None:
    model = np.linspace(-1, 1, 3 * PIECE)
    parts = [Partial(model.astype(kind), 3.0, factor=3.0) for kind in (np.float64, np.float32)]
    for each in parts:
        np.testing.assert_allclose(np.concatenate(added([each]).total), 3 * model, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(np.concatenate(added(parts).total), 6 * model, rtol=1e-6, atol=1e-7)


def test_a_large_model_is_reduced_in_the_memory_of_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """From six clients' models: whole sums in double precision alone would be two more."""
    monkeypatch.setattr(partial, "PIECE", 1 << 16)
    monkeypatch.setattr(lps, "PIECE", 1 << 16)
    size, rng = 1 << 22, np.random.default_rng(0)
    model = rng.standard_normal(size, np.float32)
    parts = [Partial(rng.standard_normal(size, np.float32), 3.0, factor=3.0) for _ in range(6)]
    small = [Partial(np.ones(9), 1.0)]
    _reduced(((0, 9),), model[:9], small)
    tracemalloc.start()
    new = _reduced(((0, size),), model, parts)
    peak = tracemalloc.get_traced_memory()[1]
    adding = Adding()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for part in parts:
        adding.add(part)
    summed = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert new.nbytes <= peak < 1.6 * new.nbytes  # pieces of four threads are 0.5
    assert 2 * new.nbytes <= summed < 2.3 * new.nbytes
    np.testing.assert_allclose(new, np.mean([part.total for part in parts], axis=0), rtol=1e-4, atol=1e-6)


class _Server:
    """Where sums are added; notes how many are there at once."""

    def __init__(self, parameters: int, fan_in: int | None = None) -> None:
        self.spec = ModelSpec.of(MODELS["mlp"](hidden=(2,)), (4,), 2, 0)
        self.backend, self.blocks, self.most = self, _Blocks(fan_in), 0
        self.ranges = ranges.Ranges((0, 5))

    def lps(self, row: int, shard: int) -> int:
        return row

    def serve(self, row: int, method: str, job: None, objects: Objects, keeps: Any) -> dict[Key, Ref]:
        assert method == "add"
        self.most = max(self.most, len(objects))
        found: dict[Key, Ref] = dict(LocalServer().add(job, objects).objects)
        return found


class _Blocks:
    def __init__(self, fan_in: int | None) -> None:
        self.fan_in = fan_in


@hypothesis_settings(max_examples=30)
@given(order=st.permutations(range(9)), seed=st.integers(0, 99))
def test_sums_are_added_in_the_order_of_the_blocks_whatever_that_of_their_arrival(
    order: list[int], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "most_waiting", lambda parameters: 3)
        rng, server = np.random.default_rng(seed), _Server(10)
        rows = {block: [block % 2] for block in range(9)}
        parts = [Partial(rng.standard_normal(5) * 10.0 ** rng.integers(-9, 9, 5), 1.0) for _ in rows]
        arriving = averaging.Arriving(server, rows)  # type: ignore[arg-type]
        for block in order:
            rest = arriving.take(Done(block, None, {("sum", (block % 2, 0)): parts[block], ("other", 0): 7}))
            assert rest.refs == {("other", 0): 7}
        assert server.most <= 4
        for (row, _), found in arriving.by_part().items():
            assert len(found) <= 3
            flat = added([parts[block] for block in range(row, 9, 2)])
            assert added(list(found.values())).total[0].tobytes() == flat.total[0].tobytes()


@pytest.mark.parametrize(
    ("method", "kind", "fan_in"),
    [
        ("fedavg", "loop", None),
        ("fedavg", "batched", None),
        ("fedavg", "batched", 2),
        ("pacfl", "batched", None),
        ("fedprox", "loop", None),
        ("mt_hfl, fednova", "batched", None),
    ],
)
def test_a_run_of_large_models_has_the_bits_of_any_other(
    method: str, kind: str, fan_in: int | None, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that train one by one, sums that are added early."""
    monkeypatch.setattr(calls, "CACHE_BYTES", 1)
    monkeypatch.setattr(calls, "MEMORY_BYTES", 1)
    counted = [0]
    one_by_one = host.ClientHost._train_one_by_one

    def counting(self: host.ClientHost, job: Any, objects: Objects) -> Any:
        counted[0] += 1
        return one_by_one(self, job, objects)

    monkeypatch.setattr(host.ClientHost, "_train_one_by_one", counting)
    run = _runner(method, kind, fan_in, settings)
    usual = run()
    assert counted == [0]
    monkeypatch.setattr(host, "LARGE", 1)
    monkeypatch.setattr(averaging, "most_waiting", lambda parameters: 2)
    monkeypatch.setattr(rounds, "LARGE", 1)
    assert run() == usual
    assert counted[0] > 3


def _runner(
    method: str, kind: str, fan_in: int | None, settings: dict[str, Any]
) -> Callable[[], tuple[Any, ...]]:
    made = {"algorithm": method, **METHODS[method]}
    training = {**settings["training"], **made.get("training", {}), "engine": kind}
    execution = {**settings["execution"], "block_size": 2, "fan_in": fan_in}

    def run() -> tuple[Any, ...]:
        found = rayfl.run({**settings, **made, "training": training, "execution": execution})
        tables = found.rounds.drop(columns=["seconds"], errors="ignore")
        return found.summary["models_sha256"], tables.to_csv()

    return run


@pytest.mark.parametrize(("block", "most"), [(1, 1.9), pytest.param(5, 3.8, marks=pytest.mark.slow)])
def test_a_block_takes_no_more_memory_than_said(
    block: int, most: float, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of the model, without the two that stay (to test with, to train): the trained model and, of
    several clients, the sum in double precision."""
    monkeypatch.setattr(calls, "CACHE_BYTES", 1)
    monkeypatch.setattr(calls, "MEMORY_BYTES", 1)
    monkeypatch.setattr(host, "LARGE", 1)
    train, found = host.ClientHost.train, []

    def measured(self: host.ClientHost, job: Any, objects: Objects) -> Any:
        if job.round == 0:
            return train(self, job, objects)  # makes what stays
        answer, grown = most_at_once(lambda: train(self, job, objects))
        found.append((len(job.clients), grown / 4 / self.spec.P))
        return answer

    monkeypatch.setattr(host.ClientHost, "train", measured)
    training = {**settings["training"], "participation": 1.0, "engine": "batched"}
    execution = {**settings["execution"], "block_size": block}
    model = {"name": "mlp", "hidden": [900, 700]}
    rayfl.run({**settings, "rounds": 2, "model": model, "training": training, "execution": execution})
    copies = [grown for clients, grown in found if (clients > 1) == (block > 1)]
    assert 0.9 < min(copies) <= max(copies) < most


def most_at_once(call: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and the most bytes of tensors and of NumPy's arrays that it added.

    Allocations are counted: the memory of the process would tell what its libraries take too, which differs
    between machines.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tracemalloc.start()
        answer = call()
        arrays = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    tensors = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return answer, arrays + max(0, int(tensors.max(initial=0)))


def test_a_client_that_fails_alone_is_left_out_of_a_streamed_block(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayfl.training.loop import LoopEngine

    train = LoopEngine._train_client

    def broken(self: LoopEngine, work: Any, indices: Any, plan: Any, vector: Any, *rest: Any) -> float:
        loss = train(self, work, indices, plan, vector, *rest)
        if len(indices) == sizes[0]:
            vector.fill_(float("nan"))
            raise RuntimeError("no such pixel")
        return loss

    training = {**settings["training"], "participation": 1.0, "engine": "loop"}
    execution = {**settings["execution"], "block_size": 4, "tolerate_failures": 9}
    sizes = rayfl.run({**settings, "training": training}).clients["n"].tolist()
    monkeypatch.setattr(LoopEngine, "_train_client", broken)
    found = []
    for large in (1 << 40, 1):
        monkeypatch.setattr(host, "LARGE", large)
        found.append(rayfl.run({**settings, "training": training, "execution": execution}))
    assert found[0].summary["models_sha256"] == found[1].summary["models_sha256"]
    assert found[0].rounds["failures"].tolist() == found[1].rounds["failures"].tolist()
    assert found[0].rounds["failures"].min() > 0
