"""The batched and vmap engines equal the plain loop, for every model and option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from rayfl.data import Samples
from rayfl.errors import ConfigError
from rayfl.models import MODELS, Model, ModelSpec
from rayfl.models._own import OwnNetwork
from rayfl.training import LocalWork
from rayfl.training.batched import BatchedEngine, Unsupported, layers
from rayfl.training.batched.network import BatchedNetwork
from rayfl.training.batched.steps import StepPlan
from rayfl.training.batched.vmap import VmapNetwork
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.loop import LoopEngine
from rayfl.training.work import DIVERGED
from tests.training.bounds import Truth
from tests.training.conftest import stepwise
from tests.training.test_terms import job, make_terms

CASES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("linear", {}, (20,)),
    ("mlp", {"hidden": [30]}, (20,)),
    ("mlp", {"hidden": [16, 8], "dropout": 0.5}, (1, 4, 4)),
    ("lenet5", {}, (1, 28, 28)),
    ("lenet5", {}, (3, 32, 32)),
    ("lenet5", {"batch_norm": True}, (1, 28, 28)),
    ("mthfl_cnn", {}, (3, 32, 32)),
    ("mthfl_mlp", {}, (1, 8, 8)),
    ("subfedavg_cnn", {}, (1, 28, 28)),
    ("leaf_cnn", {}, (1, 12, 12)),
    ("resnet9", {}, (3, 32, 32)),
]
SGDS = [LocalWork(2, 4, 0.05), LocalWork(2, 4, 0.02, momentum=0.5, weight_decay=0.01)]
# Convolutions decide by thousands of pixels which way a gradient takes. With few samples and steps rounding
# hardly ever changes a decision, and the bound is sharp.
SMALL: dict[str, tuple[list[int], int]] = {"leaf_cnn": ([5, 2], 2), "resnet9": ([2, 1], 1)}


def random_samples(
    shape: tuple[int, ...], count: int, classes: int, seed: int = 0, numeric: bool = False
) -> Samples:
    rng = np.random.default_rng(seed)
    if len(shape) == 3:
        x: NDArray[Any] = rng.integers(0, 256, (count, *shape)).astype(np.uint8)
    else:
        x = rng.standard_normal((count, *shape)).astype(np.float32)
    if numeric:
        numbers, y = rng.integers(0, 2, (count, classes)).astype(np.float32), np.zeros(count, np.int64)
        return Samples("random", x, y, x[:1], y[:1], 1, targets_train=numbers, targets_test=numbers[:1])
    y = rng.integers(0, classes, count)
    return Samples("random", x, y, x[:1], y[:1], classes)


def assert_equal(
    spec: ModelSpec, work: LocalWork, sizes: list[int], network: Any = None, together: int | None = 3
) -> None:
    """Ragged clients trained by both engines end as near the truth as float32 can: see bounds.py."""
    samples = random_samples(spec.shape, 60, spec.classes, numeric=spec.loss.numeric)
    batches = Batches(samples, torch.device("cpu"))
    rng = np.random.default_rng(1)
    indices = [rng.choice(60, n, replace=False) for n in sizes]
    start = torch.from_numpy(np.tile(spec.initial(), (len(sizes), 1)))
    ids = range(10, 10 + len(sizes))
    truth = Truth.of(spec, batches, 0, work, 1, ids, indices, start)
    assert (truth.moved > 0).all()
    for make in (LoopEngine, BatchedEngine, stepwise):
        engine = make(spec, batches, 0) if make is LoopEngine else make(spec, batches, 0, network, together)
        truth.check(engine.train(work, 1, ids, indices, start))


LARGE = ("resnet9", "mthfl_cnn", "subfedavg_cnn")
"""Momentum and decay lie in no layer: the other models show them too."""


def _is_long(name: str, work: LocalWork) -> bool:
    """Smaller networks with residuals are in test_reading.py."""
    return name == "resnet9" or (work.momentum > 0 and name in LARGE)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("name", "settings", "shape", "work"),
    [
        pytest.param(*case, work, marks=[pytest.mark.slow] if _is_long(case[0], work) else [])
        for case in CASES
        for work in SGDS
    ],
)
def test_every_model_equals_the_loop(
    name: str, settings: dict[str, Any], shape: tuple[int, ...], work: LocalWork
) -> None:
    spec = ModelSpec.of(MODELS[name](**settings), shape, 7, 0)
    sizes, epochs = SMALL.get(name, ([23, 10, 4, 31, 7] if len(shape) == 1 else [6, 3, 1, 4], 2))
    if settings.get("batch_norm") or name == "subfedavg_cnn":
        sizes = [6, 4, 2]  # a batch of one has no variance worth the name
    assert_equal(spec, replace(work, epochs=epochs), sizes)


def test_the_cases_cover_all_models() -> None:
    # Texts are in test_recurrent.py, networks from outside in test_vmap.py.
    calculating = {n for n, m in MODELS.items() if not m.tokens and not issubclass(m, OwnNetwork)}
    assert {name for name, _, _ in CASES} == calculating


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    batch=st.integers(2, 12),
    epochs=st.integers(1, 3),
    hidden=st.integers(1, 40),
    features=st.integers(1, 50),
    classes=st.integers(2, 9),
    together=st.integers(1, 8),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_any_shape_and_any_ragged_clients(
    sizes: list[int], batch: int, epochs: int, hidden: int, features: int, classes: int, together: int,
    momentum: float, decay: float,
) -> None:  # fmt: skip
    spec = ModelSpec.of(MODELS["mlp"](hidden=[hidden]), (features,), classes, 0)
    assert_equal(spec, LocalWork(epochs, batch, 0.005, momentum, decay), sizes, together=together)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("name", "settings", "shape"), [c for c in CASES if c[0] in ("linear", "mthfl_mlp", "lenet5")]
)
@pytest.mark.parametrize("work", SGDS, ids=["plain", "momentum-decay"])
def test_vmap_equals_the_loop(
    name: str, settings: dict[str, Any], shape: tuple[int, ...], work: LocalWork
) -> None:
    spec = ModelSpec.of(MODELS[name](**settings), shape, 7, 0)
    sizes = [6, 4, 2] if settings.get("batch_norm") else [6, 3, 1, 4]
    assert_equal(spec, work, sizes, VmapNetwork(spec))


class Wavy(Model):
    """Computes something that has no batched counterpart."""

    name: str = "wavy"
    draws: bool = False

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"fc": ("0",), "out": ("2",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        middle = nn.RReLU() if self.draws else nn.Softplus()
        return nn.Sequential(nn.Linear(shape[0], 8), middle, nn.Linear(8, classes))


class Stack(Model):
    """Layers one after another, on images of one channel and 12 x 12 pixels."""

    name: str = "stack"
    parts: str

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"first": ("0",), "rest": tuple(map(str, range(1, len(self._parts()) + 1)))}

    def _parts(self) -> list[nn.Module]:
        first, second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, padding=1)
        tail = [nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
        middle: dict[str, list[nn.Module]] = {
            "dropout after pooling": [nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.4), second, *tail],
            "dropout between convolutions": [nn.ReLU(), nn.Dropout(0.4), second, *tail],
            "GroupNorm": [nn.GroupNorm(2, 4), nn.ReLU(), second, nn.GroupNorm(3, 6, affine=False), *tail],
            "BatchNorm": [nn.BatchNorm2d(4), nn.ReLU(), second, nn.BatchNorm2d(6, affine=False), *tail],
            "norms of vectors": [nn.Flatten(), nn.BatchNorm1d(400), nn.GroupNorm(4, 400)],
        }
        return [first, *middle[self.parts]]

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        body = nn.Sequential(*self._parts())
        body.append(nn.Linear(body.eval()(torch.zeros(1, *shape)).shape[1], classes))
        return body.train()


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "parts",
    ["dropout after pooling", "dropout between convolutions", "GroupNorm", "BatchNorm", "norms of vectors"],
)
def test_layouts_and_padding_in_memory_change_nothing(parts: str) -> None:
    """Convolutions of a CPU leave channels last; dropout draws in the order of dimensions all the same."""
    spec = ModelSpec.of(Stack(parts=parts), (1, 12, 12), 3, 0)
    for together in (1, 3):
        assert_equal(spec, LocalWork(2, 4, 0.02, momentum=0.5), [6, 3, 8], together=together)


def test_what_has_no_counterpart_goes_to_vmap_and_then_to_the_loop() -> None:
    tanh = ModelSpec.of(Wavy(), (6,), 3, 0)
    with pytest.raises(Unsupported, match="it calls softplus"):
        BatchedNetwork(tanh)
    name, why = choose_engine(tanh)
    assert name == "vmap"
    assert "not batched: it calls softplus" in why
    assert_equal(tanh, SGDS[1], [5, 7, 3], VmapNetwork(tanh))
    name, why = choose_engine(ModelSpec.of(Wavy(draws=True), (6,), 3, 0))
    assert name == "loop"
    assert "not vmap: 1 draws random numbers" in why


def test_a_wanted_engine_that_cannot_is_refused() -> None:
    spec = ModelSpec.of(Wavy(), (6,), 3, 0)
    with pytest.raises(ConfigError, match=r"training\.engine: batched does not cover this model.*softplus"):
        choose_engine(spec, "batched")
    assert choose_engine(spec, "loop")[0] == "loop"
    assert choose_engine(ModelSpec.of(MODELS["lenet5"](), (1, 28, 28), 10, 0)) == (
        "batched",
        "a trial agrees with the plain loop",
    )


def test_a_wrong_engine_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is there to refuse an engine that does not equal the loop on this machine."""
    spec = ModelSpec.of(MODELS["mlp"](hidden=[5]), (6,), 3, 0)
    original = BatchedNetwork.step

    def wrong(self: Any, x: Any, y: Any, weights: Any, step: Any) -> Any:
        return original(self, x, y, weights * 1.01, step)

    monkeypatch.setattr(BatchedNetwork, "step", wrong)
    name, why = choose_engine(spec)
    assert name == "vmap"
    assert "not batched" in why


def test_one_trial_may_meet_a_kink(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is away from the loop in the first trial alone is taken."""
    spec = ModelSpec.of(MODELS["mlp"](hidden=[5]), (6,), 3, 0)
    original, calls = BatchedEngine.train, []

    def once(self: Any, *args: Any, **more: Any) -> Any:
        calls.append(self)
        block = original(self, *args, **more)
        return replace(block, rows=block.rows * 1.01) if len(calls) == 1 else block

    monkeypatch.setattr(BatchedEngine, "train", once)
    assert choose_engine(spec)[0] == "batched"
    assert len(calls) == 4  # in a trial it trains in one compiled call, and layer by layer


def test_a_diverging_client_fails_alone() -> None:
    spec = ModelSpec.of(MODELS["mlp"](hidden=[5]), (6,), 3, 0)
    batches = Batches(random_samples((6,), 40, 3), torch.device("cpu"))
    indices = [np.arange(0, 10), np.arange(10, 20), np.arange(20, 30)]
    start = torch.from_numpy(np.tile(spec.initial(), (3, 1)))
    start[1] *= 1e25
    before = start.clone()
    block = BatchedEngine(spec, batches, 0).train(SGDS[0], 0, [4, 5, 6], indices, start)
    assert list(block.failures) == [1]
    assert "smaller training.lr" in block.failures[1]
    assert torch.equal(block.rows[1], before[1])
    assert (block.rows[[0, 2]] != before[[0, 2]]).any(dim=1).all()
    assert torch.equal(start, before)


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_a_clients_result_does_not_depend_on_its_company(name: str) -> None:
    """Not even in the last bit on the CPU, so blocks may be cut in any way."""
    shape = (1, 28, 28)
    spec = ModelSpec.of(MODELS[name](), shape, 5, 0)
    batches = Batches(random_samples(shape, 60, 5), torch.device("cpu"))
    rng = np.random.default_rng(1)
    indices = [rng.choice(60, n, replace=False) for n in (20, 20, 20, 20, 20)]
    start = torch.from_numpy(np.tile(spec.initial(), (5, 1)))
    engine = BatchedEngine(spec, batches, 0, None, 4)
    together = engine.train(SGDS[1], 2, range(5), indices, start.clone()).rows
    alone = engine.train(SGDS[1], 2, [3], indices[3:4], start[3:4].clone()).rows
    torch.testing.assert_close(alone[0], together[3], rtol=0, atol=0)


@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=6),
    batch=st.integers(1, 9),
    epochs=st.integers(1, 3),
)
def test_a_step_plan_visits_every_sample_once_an_epoch(sizes: list[int], batch: int, epochs: int) -> None:
    counts = np.array(sorted(sizes, key=lambda n: -(-n // batch), reverse=True))
    plan = StepPlan(0, 0, range(len(counts)), counts, LocalWork(epochs, batch, 0.1))
    firsts = np.cumsum(counts) - counts
    for c, n in enumerate(counts.tolist()):
        visited = [
            plan.places[t, c, : plan.counts[t, c]].tolist() for t in range(plan.passes) if plan.counts[t, c]
        ]
        assert plan.totals[c] == len(visited) == epochs * -(-n // batch)
        per_epoch = [v for v in visited]
        for e in range(epochs):
            epoch = per_epoch[e * -(-n // batch) : (e + 1) * -(-n // batch)]
            assert sorted(p for step in epoch for p in step) == list(range(firsts[c], firsts[c] + n))
    for t in range(plan.passes):
        assert (plan.counts[t, : plan.active[t]] > 0).all()
        assert (plan.counts[t, plan.active[t] :] == 0).all()
        sums = plan.weights[t, : plan.active[t]].sum(1)
        np.testing.assert_allclose(sums, 1, rtol=1e-5)


@pytest.mark.parametrize("engine", [LoopEngine, BatchedEngine])
def test_start_models_are_left_as_they_are(engine: Any) -> None:
    """One expanded to all clients gives what a copy each gives, bit for bit; who failed is where it began."""
    spec = ModelSpec.of(MODELS["mlp"](hidden=[9]), (1, 4, 4), 7, 0)
    batches = Batches(random_samples(spec.shape, 60, spec.classes), torch.device("cpu"))
    indices = [np.arange(7 * c, 7 * c + 9) for c in range(4)]
    indices.append(np.array([61]))  # there is no such sample
    one = torch.from_numpy(spec.initial())
    work = replace(SGDS[1], snapshot_epoch=1)
    shared, copied = (
        engine(spec, batches, 0).train(work, 2, range(5), indices, start)
        for start in (one.expand(5, -1), one.repeat(5, 1))
    )
    assert torch.equal(one, torch.from_numpy(spec.initial()))
    assert list(shared.failures) == list(copied.failures) == [4]
    assert torch.equal(shared.rows, copied.rows)
    assert torch.equal(shared.rows[4], one)
    assert not torch.equal(shared.rows[0], one)
    assert shared.snapshots is not None
    assert copied.snapshots is not None
    assert torch.equal(shared.snapshots, copied.snapshots)


@pytest.mark.parametrize("lr", [100.0, 1000.0])
@pytest.mark.parametrize("name", ["lenet5", "mlp"])
def test_engines_agree_on_who_has_diverged(name: str, lr: float) -> None:
    """Near the end of float32 what overflows depends on the order of operations; the bound is far below.

    With lr 1000 three of the LeNets end with losses of 1e31: finite numbers in one engine, NaN in another.
    """
    settings = {"batch_norm": True} if name == "lenet5" else {"hidden": [16]}
    spec = ModelSpec.of(MODELS[name](**settings), (1, 28, 28), 5, 0)
    sizes = [4, 5, 6, 7, 8, 9] * 4
    batches, *arguments = job(spec, sizes)
    terms = make_terms(("mask",), spec, sizes)
    engines = [LoopEngine(spec, batches, 0), BatchedEngine(spec, batches, 0)]
    if name == "mlp":
        engines.append(BatchedEngine(spec, batches, 0, VmapNetwork(spec)))
    blocks = [engine.train(LocalWork(1, 4, lr), *arguments, terms) for engine in engines]
    assert len({tuple(sorted(block.failures)) for block in blocks}) == 1
    for block in blocks:
        assert 0 < len(block.failures) < len(sizes) or name == "mlp"
        assert all("smaller training.lr" in text for text in block.failures.values())
        assert (block.losses <= DIVERGED).all()
        assert (block.rows.norm(dim=1) <= DIVERGED).all()


@pytest.mark.parametrize("inner_lr", [0.0, 0.01])
def test_steps_are_as_wide_as_the_data_not_as_the_batch_size(inner_lr):
    """Also where a batch of 2^31 - 1 places would not fit into any memory."""
    sizes = np.array([7, 7, 3])
    plans = []
    for batch_size in (7, 2**31 - 1):
        work = LocalWork(epochs=2, batch_size=batch_size, lr=0.1, inner_lr=inner_lr)
        plans.append(StepPlan(0, 0, [4, 5, 6], sizes, work))
    for name in ("places", "counts", "weights", "totals", "seen"):
        np.testing.assert_array_equal(*(getattr(plan, name) for plan in plans))


class Normed(Model):
    """A LayerNorm without bias, whose weights begin between ``-most`` and ``most``, or at one."""

    name: str = "normed"
    most: float
    layers: ClassVar[dict[str, tuple[str, ...]]] = {"first": ("0", "1"), "last": ("3",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """For vectors."""
        norm = nn.LayerNorm(8, bias=False)
        if self.most:
            nn.init.uniform_(norm.weight, -self.most, self.most)
        return nn.Sequential(nn.Linear(shape[0], 8), norm, nn.Tanh(), nn.Linear(8, classes))


@pytest.mark.parametrize("make", [BatchedEngine, stepwise])
def test_a_layer_norm_without_bias_equals_the_loop(make: Any) -> None:
    spec = ModelSpec.of(Normed(most=1.5), (6,), 3, 0)
    batches, *given = job(spec, [9, 4])
    truth = Truth.of(spec, batches, 0, LocalWork(3, 4, 0.05), *given)
    truth.check(make(spec, batches, 0).train(LocalWork(3, 4, 0.05), *given))


def test_a_trial_notices_weights_that_begin_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hardly move in a trial, so that from there an engine that ignores them would pass."""
    spec = ModelSpec.of(Normed(most=0), (6,), 3, 0)
    assert choose_engine(spec)[0] == "batched"
    forward = layers.Norm.forward

    def wrong(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
        forward(self, x, step)
        found: torch.Tensor = self._hat.clone()
        return found

    monkeypatch.setattr(layers.Norm, "forward", wrong)
    name, why = choose_engine(spec)
    assert name != "batched"
    assert "not batched: " in why
    assert "away from the plain loop in a trial" in why
