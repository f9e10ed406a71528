"""Training in one compiled call equals the plain loop, for the networks and the work that it covers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.codegen import get_host_cpu_features
from torch import nn

from rayfl.models import MODELS, Model, ModelSpec
from rayfl.training import LocalWork, Terms
from rayfl.training.batched import BatchedEngine, Unsupported, activation_kernels, client_kernel, compiled
from rayfl.training.batched.reading import read
from rayfl.training.batched.steps import StepPlan
from rayfl.training.batched.vectors import LANES, WIDE
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.guides import Guides
from rayfl.training.loop import LoopEngine
from tests.training.bounds import UNIT, Truth
from tests.training.conftest import make_samples, stepwise
from tests.training.test_terms import EXTRAS, OPTIONS, PLAIN, job, make_terms, make_work, train

CPU = torch.device("cpu")


def batch_norm(outputs: int, eps: float = 1e-5, momentum: float = 0.1) -> nn.Module:
    """A BatchNorm some of whose factors are negative, so that the least of the pixels wins a pooling."""
    module = nn.BatchNorm2d(outputs, eps, momentum)
    nn.init.uniform_(module.weight, -1.5, 1.5)
    nn.init.uniform_(module.bias, -0.5, 0.5)
    return module


def randomised(module: nn.Module) -> nn.Module:
    """A normalisation whose factors and summands are not 1 and 0."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -1.5, 1.5)
    return module


class Skip(nn.Sequential):
    """``x + f(x)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs and outputs of one shape."""
        inner: torch.Tensor = super().forward(x)
        return x + inner


class Chain(Model):
    """Layers one after another, by name."""

    name: str = "chain"
    parts: str
    layers: ClassVar[dict[str, tuple[str, ...]]] = {"first": ("0",), "last": ("1",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network."""
        conv, pool = nn.Conv2d, nn.MaxPool2d
        body: dict[str, Callable[[], list[nn.Module]]] = {
            "padding": lambda: [
                conv(3, 5, 3, padding=1), nn.ReLU(), pool(2), conv(5, 9, 3, padding=2), pool(2), nn.ReLU(),
                nn.Flatten(), nn.Linear(9 * 4 * 4, 7), nn.ReLU(),
            ],
            "no bias": lambda: [
                conv(3, 8, 3, bias=False), nn.ReLU(), pool(2), nn.Flatten(), nn.Linear(8 * 25, 6, bias=False),
                nn.ReLU(),
            ],
            "nested": lambda: [
                nn.Sequential(conv(3, 4, 5), nn.ReLU(), pool(2)), nn.Flatten(),
                nn.Sequential(nn.Linear(64, 11), nn.ReLU(), nn.Sequential(nn.Linear(11, 5))),
            ],
            "reused": lambda: [
                nn.Flatten(), nn.Linear(432, 9), relu := nn.ReLU(), nn.Linear(9, 8, bias=False), relu,
                nn.Linear(8, 7), relu,
            ],
            "wide": lambda: [nn.Flatten(), nn.Linear(432, 530), nn.ReLU(), nn.Linear(530, 6), nn.ReLU()],
            "norm": lambda: [  # 9 x 9 and 4 x 4 pixels
                conv(3, 6, 4), batch_norm(6), nn.ReLU(), pool(2),
                conv(6, 10, 3, padding=1, bias=False), batch_norm(10), pool(2), nn.ReLU(),
                nn.Flatten(), nn.Linear(40, 7), nn.ReLU(),
            ],
            "norm, then none": lambda: [  # more outputs than a vector has; 11 x 11 pixels
                conv(3, 9, (6, 6), padding=2), batch_norm(9, 1e-3, 0.3), nn.ReLU(), pool(2),
                conv(9, 4, 3), nn.ReLU(), pool(2), nn.Flatten(),
            ],
            "norm, narrow": lambda: [  # 3 x 3 pixels
                conv(3, 4, 3), nn.ReLU(), pool(2), conv(4, 5, 3), batch_norm(5), nn.ReLU(), pool(2),
                nn.Flatten(),
            ],
            "flat": lambda: [conv(3, 4, 3), nn.Tanh(), pool((10, 1)), conv(4, 5, 2, padding=1), nn.Flatten()],
            "narrow": lambda: [  # 10 x 3 pixels, and 12 x 5 behind
                conv(3, 4, 3), nn.Tanh(), pool((1, 3)), conv(4, 5, 3, padding=2), nn.Flatten(),
            ],
            "padding alone": lambda: [  # windows of nothing else
                conv(3, 4, 3), nn.Tanh(), conv(4, 5, 1, padding=1), nn.Flatten(),
            ],
            "tanh": lambda: [  # 10 x 10 and 5 x 5 pixels
                conv(3, 6, 3), nn.Tanh(), nn.AvgPool2d(2), conv(6, 9, 3, padding=1), nn.Sigmoid(),
                nn.AvgPool2d((2, 3)), nn.Flatten(), nn.Linear(18, 9), nn.Tanh(), nn.Linear(9, 8), nn.SiLU(),
            ],
            "alone": lambda: [  # more outputs than a vector has, twice; 11 x 11 pixels
                conv(3, 9, 3, padding=1), nn.LeakyReLU(0.2), conv(9, 17, 4, padding=1, bias=False), nn.ReLU(),
                pool((3, 2)), nn.ELU(0.7), nn.Flatten(), nn.Linear(17 * 15, 6), nn.ELU(),
            ],
            "pool": lambda: [  # before anything else; rows and columns that fill no window
                nn.LeakyReLU(-0.3), pool((5, 1)), nn.AvgPool2d((1, 5)), nn.Tanh(), nn.Flatten(),
                nn.Linear(12, 9), nn.LeakyReLU(0.1),
            ],
            "norms": lambda: [
                randomised(nn.BatchNorm2d(3, 1e-3, 0.3)), conv(3, 6, 3, bias=False), batch_norm(6), nn.ReLU(),
                conv(6, 12, 3, padding=1), randomised(nn.GroupNorm(3, 12)), nn.ReLU(), pool(2), nn.Flatten(),
                nn.Linear(300, 11), randomised(nn.BatchNorm1d(11)), nn.Tanh(),
                nn.Linear(11, 9), randomised(nn.LayerNorm(9)), nn.ReLU(),
            ],
            "skip": lambda: [
                conv(3, 9, 3, padding=1), batch_norm(9), nn.ReLU(),
                Skip(conv(9, 9, 3, padding=1, bias=False), nn.GroupNorm(3, 9), nn.Tanh(),
                     Skip(conv(9, 9, 3, padding=1), nn.Tanh()), batch_norm(9)),
                nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Skip(nn.Linear(9, 9), nn.ReLU()),
            ],
            "dropout": lambda: [  # of images, channels first, and of vectors; twice in a row
                nn.Dropout(0.1), conv(3, 6, 3), nn.ReLU(), pool(2), nn.Dropout(0.5),
                Skip(conv(6, 6, 3, padding=1), nn.Tanh(), nn.Dropout(0.3)), nn.Flatten(), nn.Dropout(0.2),
                nn.Dropout(0.4), nn.Linear(150, 9), nn.ReLU(), nn.Dropout(0.5),
            ],
            "late": lambda: [  # what needs no gradient comes first
                nn.Dropout(0.2), nn.LeakyReLU(0.3), pool(2), nn.Tanh(), nn.Flatten(), nn.ELU(),
                nn.Linear(108, 40), randomised(nn.GroupNorm(2, 40)), nn.ELU(),
            ],
            "oblong": lambda: [  # nothing is square; the first layer that learns is a GroupNorm
                randomised(nn.GroupNorm(1, 3)), conv(3, 4, 3, padding=1), nn.ReLU(), pool(2),
                conv(4, 6, 2), batch_norm(6), nn.ReLU(), pool(2), conv(6, 5, 1), nn.Tanh(),
                conv(5, 3, 2, padding=1), nn.AvgPool2d((2, 1)), pool((1, 3)), nn.Flatten(),
                nn.Linear(6, 16), randomised(nn.LayerNorm(16)), nn.Tanh(),
            ],
            "pooled twice": lambda: [conv(3, 4, 3), pool(2), nn.ReLU(), pool(2), nn.Flatten()],
            "norm, not affine": lambda: [
                conv(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), pool(2), nn.Flatten(),
            ],
        }  # fmt: skip
        front = nn.Sequential(*body[self.parts]())
        return nn.Sequential(front, nn.Linear(front(torch.zeros(2, *shape)).shape[1], classes))


CASES: dict[str, tuple[Model, tuple[int, ...]]] = {
    "linear": (MODELS["linear"](), (20,)),
    "mlp": (MODELS["mlp"](hidden=[17, 8]), (1, 4, 4)),
    "lenet5": (MODELS["lenet5"](), (1, 28, 28)),
    **{
        parts: (Chain(parts=parts), (3, 12, 12))
        for parts in (
            *("padding", "no bias", "nested", "reused", "wide", "norm", "norm, then none"),
            *("tanh", "alone", "pool", "norms", "skip", "dropout", "late"),
            "pooled twice",
        )
    },
    "lenet5-bn": (MODELS["lenet5"](batch_norm=True), (3, 32, 32)),
    "oblong": (Chain(parts="oblong"), (3, 10, 26)),
}
SIZES = [11, 6, 3, 16, 7]


def make_case(case: str) -> ModelSpec:
    model, shape = CASES[case]
    return ModelSpec.of(model, shape, 5, 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of clients that trained in compiled calls."""
    original, found = client_kernel.train, list[int]()

    def counted(network: Any, norms: Any, models: Any, *given: Any) -> None:
        found.append(len(models))
        original(network, norms, models, *given)

    monkeypatch.setattr(client_kernel, "train", counted)
    return found


def check(spec: ModelSpec, work: LocalWork, sizes: list[int], terms: Terms, *engines: Any) -> None:
    batches, *arguments = job(spec, sizes)
    truth = Truth.of(spec, batches, 0, work, *arguments, terms)
    assert (truth.moved > 0).all()
    for make in engines or (BatchedEngine,):
        truth.check(train(make, spec, work, sizes, terms, clients_per_call=3))


COVERED = [option for option, (changes, _) in OPTIONS.items() if "frozen" not in changes]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("extra", "option"),
    [
        (extra, option)
        for extra in EXTRAS
        for option in ("plain", *COVERED)
        if not ("momentum" in EXTRAS[extra] and "inner_lr" in OPTIONS.get(option, ({}, ()))[0])  # refused
    ],
)
@pytest.mark.parametrize(
    "case", ["mlp", *(pytest.param(c, marks=pytest.mark.slow) for c in ("skip", "padding", "norm"))]
)
def test_every_option_equals_the_loop(case: str, extra: str, option: str, calls: list[int]) -> None:
    changes, terms = OPTIONS.get(option, ({}, ()))
    spec = make_case(case)
    work = make_work(replace(PLAIN, batch_size=7), spec, {**changes, **EXTRAS[extra]})
    check(spec, work, SIZES, make_terms(terms, spec, SIZES))
    assert calls == [3, 2]


@pytest.mark.one_in(3)
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("case", "extra"),
    [
        *((case, "both") for case in CASES),
        *(
            pytest.param(case, "sgd", marks=[] if case in ("padding", "norms") else pytest.mark.slow)
            for case in CASES
        ),
    ],
)
def test_every_network_equals_the_loop(case: str, extra: str, calls: list[int]) -> None:
    """Also layer by layer."""
    check(make_case(case), replace(PLAIN, **EXTRAS[extra]), SIZES, Terms(), BatchedEngine, stepwise)
    assert sum(calls) == len(SIZES)
    assert choose_engine(make_case(case))[0] == "batched"


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    batch=st.integers(1, 32),
    hidden=st.lists(st.integers(1, 40), max_size=3),
    features=st.integers(1, 50),
    classes=st.integers(2, 9),
    momentum=st.sampled_from([0.0, 0.9]),
    mu=st.sampled_from([0.0, 0.1]),
)
def test_any_shape_and_any_ragged_clients(
    sizes: list[int], batch: int, hidden: list[int], features: int, classes: int, momentum: float, mu: float
) -> None:
    spec = ModelSpec.of(MODELS["mlp"](hidden=hidden), (features,), classes, 0)
    check(spec, LocalWork(2, batch, 0.005, momentum, 0.1, proximal=mu), sizes, Terms())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", ["mlp", "padding", "lenet5", "norm", "tanh", "norms", "skip", "dropout"])
def test_a_client_does_not_depend_on_who_trains_with_it(case: str) -> None:
    """Bit for bit, however many samples the others have."""
    spec = make_case(case)
    work = replace(PLAIN, momentum=0.5, weight_decay=0.1, proximal=0.2, snapshot_epoch=1)
    batches, round, ids, indices, start = job(spec, SIZES)
    terms = make_terms(("offset", "mask"), spec, SIZES)
    assert terms.offset is not None
    assert terms.mask is not None
    together = BatchedEngine(spec, batches, 0).train(work, round, ids, indices, start, terms)
    assert together.snapshots is not None
    for c in range(len(SIZES)):
        row = slice(c, c + 1)
        own = Terms(offset=terms.offset[row], mask=terms.mask[row])
        alone = BatchedEngine(spec, batches, 0).train(
            work, round, ids[row], indices[row], start[row].clone(), own
        )
        assert torch.equal(alone.rows[0], together.rows[c])
        assert alone.snapshots is not None
        assert torch.equal(alone.snapshots[0], together.snapshots[c])
        assert alone.losses[0] == together.losses[c]


def test_what_it_does_not_cover_is_done_layer_by_layer(calls: list[int]) -> None:
    spec = make_case("mlp")
    batches, *arguments = job(spec, [40, 40])
    other = torch.from_numpy(np.tile(spec.initial(index=1), (2, 1)))
    guides = Guides((other,), lambda own, others, targets: own.outputs.square().sum(1))
    engine = BatchedEngine(spec, batches, 0)
    assert engine.compiled is not None
    for work, terms, batch in (
        (replace(PLAIN, frozen=tuple(spec.segment(first=1))), Terms(), 4),
        (PLAIN, Terms(guides=guides), 4),
        (replace(PLAIN, batch_size=33), Terms(), 33),
    ):
        assert not engine.compiled.covers(work, terms, StepPlan(0, 0, [0], np.array([batch]), work))
    for work in (replace(PLAIN, batch_size=33), replace(PLAIN, frozen=tuple(spec.segment(first=1)))):
        engine.train(work, *arguments)
        truth = Truth.of(spec, batches, 0, work, *arguments)
        truth.check(engine.train(work, *arguments))
    assert calls == []
    engine.train(replace(PLAIN, batch_size=32), *arguments)
    assert calls == [2]


@pytest.mark.parametrize("option", ["maml-all", "scaffold-prox", "visits"])
def test_dropout_with_options_equals_the_loop(option: str, calls: list[int]) -> None:
    """Each pass of a step draws; a client alone in every call."""
    changes, terms = OPTIONS[option]
    spec = make_case("dropout")
    check(spec, make_work(PLAIN, spec, changes), SIZES, make_terms(terms, spec, SIZES))
    assert calls == [1] * len(SIZES)


def test_many_draws_are_made_step_by_step(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    spec = make_case("dropout")
    one = train(BatchedEngine, spec, PLAIN, SIZES, Terms())
    assert calls == [1] * len(SIZES)
    monkeypatch.setattr(compiled, "_DRAWS", 1000)
    other = train(BatchedEngine, spec, PLAIN, SIZES, Terms())
    assert len(calls) == len(SIZES)
    torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=1e-5)


def test_a_wrong_kernel_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trial, although layer by layer the engine is right."""
    original = client_kernel.train

    def wrong(network: Any, norms: Any, models: Any, *given: Any) -> None:
        original(network, norms, models, *given)
        models *= np.float32(1.01)

    monkeypatch.setattr(client_kernel, "train", wrong)
    name, why = choose_engine(make_case("mlp"))
    assert name == "vmap"
    assert "not batched" in why


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [
        ("resnet9", (3, 32, 32), {}),
        ("leaf_cnn", (1, 12, 12), {}),
    ],
)
def test_other_networks_are_trained_layer_by_layer(name: str, shape: Any, config: dict[str, Any]) -> None:
    spec = ModelSpec.of(MODELS[name](**config), shape, 5, 0)
    assert BatchedEngine(spec, job(spec, [2])[0], 0).compiled is None


@pytest.mark.parametrize("parts", ["norm, narrow", "norm, not affine", "flat", "narrow", "padding alone"])
def test_other_normalisations_and_sizes_are_trained_layer_by_layer(parts: str, calls: list[int]) -> None:
    spec = ModelSpec.of(Chain(parts=parts), (3, 12, 12), 5, 0)
    engine = BatchedEngine(spec, job(spec, [2])[0], 0)
    assert engine.compiled is None
    assert engine.forward._compiled is None
    check(spec, replace(PLAIN, batch_size=6), SIZES, Terms())
    assert calls == []


def test_one_that_diverges_spoils_nobody() -> None:
    """Neither who trains after it in the same memory nor, with other numbers of samples, in the next call."""
    spec = make_case("padding")
    batches, round, ids, indices, start = job(spec, SIZES)
    work = replace(PLAIN, momentum=0.5)
    right = BatchedEngine(spec, batches, 0).train(work, round, ids, indices, start)
    spoilt = start.clone()
    spoilt[1] = float("nan")
    engine = BatchedEngine(spec, batches, 0)
    for _ in range(2):
        found = engine.train(work, round, ids, indices, spoilt)
        assert list(found.failures) == [1]
        assert "nan" in found.failures[1]
        others = [0, 2, 3, 4]
        assert torch.equal(found.rows[others], right.rows[others])


def test_both_ways_of_a_client_are_near_each_other() -> None:
    """Some rounds of a run may take one, others the other: to rounding they are one."""
    spec = make_case("lenet5")
    work = replace(PLAIN, momentum=0.9, weight_decay=0.01)
    one, other = (train(make, spec, work, SIZES, Terms()) for make in (BatchedEngine, stepwise))
    torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [[5, 0, 0], [0, 0]])
@pytest.mark.parametrize("case", ["mlp", "dropout"])
def test_clients_without_samples_stay_where_they_are(case: str, sizes: list[int], masked: bool) -> None:
    """Alone in a call or not; but for their mask."""
    spec = make_case(case)
    batches, *given = job(spec, sizes)
    start = given[-1]
    held = torch.arange(len(sizes) * spec.P).view(len(sizes), -1) % 3 > 0
    terms = Terms(mask=held) if masked else Terms()
    for together in (1, 3):
        block = BatchedEngine(spec, batches, 0, clients_per_call=together).train(PLAIN, *given, terms)
        assert block.failures == {}
        for c, n in enumerate(sizes):
            expected = start[c] if terms.mask is None else start[c] * terms.mask[c]
            assert torch.equal(block.rows[c], expected) is (n == 0)
            assert bool(block.steps[c]) is bool(n)


class Misfit(Chain):
    """Layers that do not fit together, or the images."""

    parts: str = "linear"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network."""
        if self.parts == "linear":
            front: list[nn.Module] = [nn.Flatten(), nn.Linear(432, 6), nn.ReLU(), nn.Linear(50, 8)]
            return nn.Sequential(nn.Sequential(*front), nn.Linear(8, classes))
        front = [nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
        if self.parts == "norm":
            front = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(9), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(nn.Sequential(*front), nn.Linear(100, classes))


@pytest.mark.parametrize("parts", ["linear", "convolution", "norm"])
def test_layers_that_do_not_fit_fail_as_in_the_loop(parts: str) -> None:
    """They are refused before any kernel sees them."""
    spec = ModelSpec.of(Misfit(parts=parts), (3, 12, 12), 5, 0)
    batches, *given = job(spec, [3, 2])
    assert list(LoopEngine(spec, batches, 0).train(PLAIN, *given).failures) == [0, 1]
    with pytest.raises(Unsupported, match="its forward pass cannot be read: "):
        BatchedEngine(spec, batches, 0)
    assert choose_engine(spec)[0] == "loop"


def test_memory_is_that_of_the_longest_batch() -> None:
    spec = make_case("lenet5")
    engine = BatchedEngine(spec, job(spec, [1])[0], 0)
    assert engine.compiled is not None
    alone = {}
    for n in (3, 20, 7, 3):
        _, *given = job(spec, [n])
        rows = engine.train(replace(PLAIN, batch_size=32, momentum=0.5), *given).rows
        assert torch.equal(rows, alone.setdefault(n, rows))  # whatever memory was made before
        assert [batch for batch, _ in engine.compiled._memory.values()] == [
            3 if n == 3 and len(alone) == 1 else 20
        ]


@pytest.mark.parametrize("make", [BatchedEngine, stepwise])
def test_each_client_is_pulled_towards_its_own_start(make: Any) -> None:
    spec = make_case("mlp")
    batches, *given, start = job(spec, SIZES)
    start = torch.from_numpy(np.stack([spec.initial(index=k) for k in range(len(start))]))
    work = replace(PLAIN, proximal=0.5)
    truth = Truth.of(spec, batches, 0, work, *given, start)
    truth.check(make(spec, batches, 0).train(work, *given, start))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES)
def test_kernels_stay_within_their_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each array lie NaN, which they neither overwrite nor let into any result."""
    behind = []

    def guarded(size: int) -> Any:
        whole = np.full(size + 999, np.nan, np.float32)
        whole[:size] = 0
        behind.append(whole[size:])
        return whole[:size]

    spec = make_case(case)
    model, x = torch.from_numpy(spec.initial()), torch.randn(37, *spec.shape)
    right = train(BatchedEngine, spec, PLAIN, SIZES, Terms())
    outputs = _after(BatchedEngine(spec, Batches(make_samples(spec.shape), CPU), 0), model, x)
    monkeypatch.setattr(compiled, "_zeros", guarded)
    found = train(BatchedEngine, spec, PLAIN, SIZES, Terms())
    engine = BatchedEngine(spec, Batches(make_samples(spec.shape), CPU), 0)
    assert torch.equal(found.rows, right.rows)
    assert torch.equal(_after(engine, model, x), outputs)
    assert behind
    assert np.isnan(behind).all()


def test_a_mask_says_only_where_weights_are_held() -> None:
    spec = make_case("padding")
    terms = make_terms(("mask",), spec, SIZES)
    assert terms.mask is not None
    for make in (BatchedEngine, stepwise, LoopEngine):
        one, other = (train(make, spec, PLAIN, SIZES, Terms(mask=m)) for m in (terms.mask, 0.3 * terms.mask))
        assert torch.equal(one.rows, other.rows)


def test_looking_ahead_by_less_than_float32_can_say() -> None:
    spec = make_case("mlp")
    tiny, small = (
        train(BatchedEngine, spec, replace(PLAIN, inner_lr=a), SIZES, Terms()) for a in (1e-46, 1e-30)
    )
    assert torch.equal(tiny.rows, small.rows)
    assert tiny.losses.tolist() == small.losses.tolist()


# --- forward passes --------------------------------------------------------------------------------------


class Dropped(Model):
    """A network with dropout, of which tests see nothing."""

    name: str = "dropped"
    layers: ClassVar[dict[str, tuple[str, ...]]] = {"conv": ("0",), "last": ("6",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network."""
        conv = nn.Conv2d(shape[0], 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5)
        return nn.Sequential(*conv, nn.Flatten(), nn.Dropout(0.9), nn.Linear(6 * 25, classes))


FORWARD = {**CASES, "dropout": (Dropped(), (3, 12, 12)), "large": (MODELS["mlp"](hidden=[300]), (1, 20, 20))}


@pytest.mark.parametrize("case", FORWARD)
def test_outputs_are_those_of_the_module(case: str) -> None:
    model, shape = FORWARD[case]
    spec = ModelSpec.of(model, shape, 5, 0)
    engine = BatchedEngine(spec, Batches(make_samples(shape), CPU), 0)
    tested = engine.forward._compiled
    assert tested is not None
    exact = spec.build().double().eval()
    generator = torch.Generator().manual_seed(0)
    for n in (1, 9, 10, 11, 32, 33, 100, 2):
        model_, x = torch.from_numpy(spec.initial(index=n)), torch.randn(n, *shape, generator=generator)
        model_[spec.n_parameters :] = torch.rand(spec.P - spec.n_parameters, generator=generator) + 0.5
        before = model_.clone()
        spec.load(exact, model_)
        truth = exact(x.double()).detach()
        assert tested.covers(x) == (case not in ("large", "wide") or n <= 32)
        for found in (tested.outputs(model_, x), _after(engine, model_, x)):
            assert found.shape == truth.shape
            assert not found.requires_grad
            error = float((found - truth).abs().max())
            assert error < 400 * UNIT * float(truth.abs().max() + 1), n
        assert torch.equal(model_, before)


def _after(engine: BatchedEngine | LoopEngine, model: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    engine.forward.load(model)
    return engine.forward(x)


@pytest.mark.parametrize("make", [BatchedEngine, LoopEngine])
def test_training_does_not_change_the_loaded_model(make: Any) -> None:
    for case in ("lenet5", "wide"):
        spec = make_case(case)
        batches, *given = job(spec, [9, 4])
        engine = make(spec, batches, 0)
        x, model = torch.randn(40, *spec.shape), torch.from_numpy(spec.initial(index=5))
        before = _after(engine, model, x)
        assert not engine.train(PLAIN, *given).failures
        assert torch.equal(engine.forward(x), before)


@pytest.mark.parametrize("case", ["lenet5", "lenet5-bn", "mlp"])
def test_no_samples_have_no_outputs(case: str) -> None:
    spec = make_case(case)
    for make in (BatchedEngine, LoopEngine):
        engine = make(spec, job(spec, [2])[0], 0)
        assert _after(engine, torch.from_numpy(spec.initial()), torch.zeros(0, *spec.shape)).shape == (0, 5)


def test_large_layers_are_left_to_the_library() -> None:
    """Convolutions with large windows and many products before a BatchNorm or alone; many linear weights."""
    for outputs, window, hidden, front, trained, tested, always in (
        (12, 5, 50, "norm", True, True, True),
        (70, 6, 2, "alone", False, False, False),
        (12, 9, 50, "norm", False, True, True),  # the BatchNorm of tests is part of the convolution
        (12, 5, 900, "norm", True, True, False),
        (12, 8, 50, "alone", True, True, True),
        (12, 9, 50, "alone", False, True, True),
        (7, 9, 50, "alone", True, True, True),
        (12, 15, 50, "alone", False, False, False),
        (4, 15, 50, "alone", True, True, True),
    ):
        spec = ModelSpec.of(
            Large(outputs=outputs, window=window, hidden=hidden, front=front), (3, 32, 32), 5, 0
        )
        engine = BatchedEngine(spec, Batches(make_samples((3, 32, 32)), CPU), 0)
        assert (engine.compiled is not None) is trained
        assert (engine.forward._compiled is not None) is tested
        if engine.forward._compiled is not None:
            assert engine.forward._compiled.covers(torch.zeros(32, 3, 32, 32))
            assert engine.forward._compiled.covers(torch.zeros(33, 3, 32, 32)) is always


def test_a_batch_of_one_has_no_variance(calls: list[int]) -> None:
    """A BatchNorm of vectors fails with it, as in the loop, for the client that it belongs to."""
    spec = make_case("norms")
    batches, *given = job(spec, [7, 8])
    found = BatchedEngine(spec, batches, 0).train(replace(PLAIN, batch_size=6), *given)
    loop = LoopEngine(spec, batches, 0).train(replace(PLAIN, batch_size=6), *given)
    assert list(found.failures) == list(loop.failures) == [0]
    assert "more than" in found.failures[0]
    assert calls == [1]


class Large(Model):
    """A convolution of 32 x 32 pixels, and a hidden layer."""

    name: str = "large"
    outputs: int
    window: int
    hidden: int
    front: str
    layers: ClassVar[dict[str, tuple[str, ...]]] = {"conv": ("0", "1"), "fc": ("5",), "last": ("7",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The network."""
        conv = nn.Conv2d(3, self.outputs, self.window)
        behind = (
            (nn.BatchNorm2d(self.outputs), nn.ReLU()) if self.front == "norm" else (nn.Identity(), nn.Tanh())
        )
        pool = nn.MaxPool2d(2)
        first = nn.Linear(self.outputs * ((33 - self.window) // 2) ** 2, self.hidden)
        body = conv, *behind, pool, nn.Flatten(), first, nn.ReLU()
        return nn.Sequential(*body, nn.Linear(self.hidden, classes))


@pytest.mark.parametrize("case", ["lenet5", "padding"])
def test_a_forward_pass_is_the_same_after_any_other(case: str) -> None:
    spec = make_case(case)
    engine = BatchedEngine(spec, Batches(make_samples(spec.shape), CPU), 0)
    x = torch.randn(40, *spec.shape, generator=torch.Generator().manual_seed(1))
    model, other = (torch.from_numpy(spec.initial(index=k)) for k in (0, 1))
    first = _after(engine, model, x)
    _after(engine, other, 1e6 * x.flip(0))
    for n in (1, 9, 3):  # a few samples lie in memory in another order than many
        _after(engine, other, 1e6 * x[:n])
        assert torch.equal(_after(engine, model, x), first)
    engine.train(LocalWork(1, 10, 0.1), 0, [0], [np.arange(20)], other[None])
    assert torch.equal(_after(engine, model, x), first)
    assert not torch.equal(_after(engine, other, x), first)
    assert torch.isnan(_after(engine, torch.full_like(model, torch.nan), x)).all()


@pytest.mark.parametrize("case", CASES)
def test_no_layer_hides_a_nan(case: str) -> None:
    """Neither ReLU nor the maximum of a pooling; here of one weight of the first layer."""
    spec = make_case(case)
    engine = BatchedEngine(spec, Batches(make_samples(spec.shape), CPU), 0)
    model = torch.from_numpy(spec.initial())
    model[0] = torch.nan
    exact = spec.build().eval()
    spec.load(exact, model)
    for n in (3, 30):
        x = torch.randn(n, *spec.shape, generator=torch.Generator().manual_seed(1))
        found = _after(engine, model, x)
        assert torch.equal(found.isnan(), exact(x).isnan())
        assert found.isnan().any()


@pytest.mark.parametrize("case", ["lenet5", "padding", "no bias", "nested", "lenet5-bn"])
def test_interleaved_samples_have_the_same_outputs(case: str) -> None:
    """To the last bit: a sample's convolutions do not depend on how it lies in memory, nor on the others."""
    spec = make_case(case)
    forward = compiled.CompiledForward(spec, read(spec, training=False))
    assert forward._interleaved == sum(isinstance(layer, nn.Conv2d) for layer in spec.build().modules())
    model, x = torch.from_numpy(spec.initial(index=1)), torch.randn(203, *spec.shape)
    found = [forward.outputs(model, x[:n]) for n in (203, 80, 41, 16, 9, 1)]
    forward._interleaved = 0
    for outputs in found:
        assert torch.equal(outputs, forward.outputs(model, x[: len(outputs)]))


@pytest.mark.slow
def test_the_width_of_registers_changes_no_bit(tmp_path: Path) -> None:
    """Without AVX-512, as far as Numba knows, vectors are half as wide."""
    if WIDE == LANES:
        pytest.skip("this processor has no AVX-512")
    few = ",".join(f for f in get_host_cpu_features().split(",") if "avx512" not in f)
    code = (
        "import torch; from rayfl.training.batched import vectors, compiled, reading;"
        "from tests.training.test_client_kernel import make_case;"
        "spec = make_case('lenet5'); torch.manual_seed(0);"
        "forward = compiled.CompiledForward(spec, reading.read(spec, training=False));"
        "outputs = forward.outputs(torch.from_numpy(spec.initial()), torch.randn(45, *spec.shape));"
        "print(vectors.WIDE, outputs.numpy().tobytes().hex())"
    )
    told = []
    for features in ({}, {"NUMBA_CPU_FEATURES": few}):
        environment = {**os.environ, **features, "NUMBA_CACHE_DIR": str(tmp_path)}
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert not found.returncode, found.stderr
        told.append(found.stdout.split())
    assert [wide for wide, _ in told] == [str(WIDE), str(LANES)]
    assert told[0][1] == told[1][1]


def test_other_samples_are_left_to_the_module() -> None:
    spec = make_case("lenet5")
    engine = BatchedEngine(spec, Batches(make_samples((1, 28, 28)), CPU), 0)
    model = torch.from_numpy(spec.initial())
    with pytest.raises(RuntimeError, match="shape"):
        _after(engine, model, torch.zeros(3, 1, 20, 20))
    other = ModelSpec.of(MODELS["resnet9"](), (3, 32, 32), 5, 0)
    batches = Batches(make_samples((3, 32, 32)), CPU)
    start, x = torch.from_numpy(other.initial()), torch.ones(2, 3, 32, 32)
    exact = other.build().eval()
    other.load(exact, start)
    for make in (LoopEngine, BatchedEngine):
        plain = make(other, batches, 0)
        assert plain.forward._compiled is None
        assert torch.equal(_after(plain, start, x), exact(x))


def test_labels_beyond_the_outputs_are_refused() -> None:
    """The kernel would read and write beside its arrays."""
    spec = make_case("mlp")
    engine = BatchedEngine(spec, job(spec, [2])[0], 0)
    assert engine.compiled is not None
    plan, start = StepPlan(0, 0, [0], np.array([2]), PLAIN), torch.from_numpy(spec.initial())[None]
    for wrong in (-1, 5):
        samples = torch.zeros(2, *spec.shape), torch.tensor([0, wrong])
        with pytest.raises(ValueError, match="the network has 5 outputs"):
            engine.compiled.train(plan, PLAIN, start.clone(), Terms(), False, samples)


def test_samples_may_lie_in_memory_in_any_order() -> None:
    """The kernel copies a sample as a block, so its numbers must be made to follow each other."""
    spec = make_case("mlp")
    engine = BatchedEngine(spec, job(spec, [12])[0], 0)
    assert engine.compiled is not None
    plan, start = StepPlan(0, 0, [0], np.array([12]), PLAIN), torch.from_numpy(spec.initial())[None]
    x, y = torch.randn(12, *spec.shape, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 5
    transposed = x.permute(*range(x.ndim - 1, -1, -1)).contiguous().permute(*range(x.ndim - 1, -1, -1))
    assert not transposed.is_contiguous()
    models = []
    for samples in (x, transposed):
        models.append(start.clone())
        engine.compiled.train(plan, PLAIN, models[-1], Terms(), False, (samples, y))
    assert torch.equal(*models)
    assert not torch.equal(models[0], start)


def test_activations_keep_their_digits_near_zero_and_far_from_it() -> None:
    x = np.concatenate([-np.logspace(-12, 1.5, 500), [0], np.logspace(-12, 1.5, 500)]).astype(np.float32)
    exact = torch.from_numpy(x).double().requires_grad_()
    functions: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
        activation_kernels.TANH: torch.tanh,
        activation_kernels.ELU: nn.ELU(0.7),
        activation_kernels.SIGMOID: torch.sigmoid,
        activation_kernels.SILU: nn.SiLU(),
        activation_kernels.LEAKY_RELU: nn.LeakyReLU(0.7),
        activation_kernels.RELU: torch.relu,
    }
    y, dx, ones = np.empty_like(x), np.empty_like(x), np.ones_like(x)
    far = np.array([np.nan, -1000, -100, 100, 1000], np.float32)
    for number, function in functions.items():
        activation_kernels.forward(number, np.float32(0.7), x, y)
        activation_kernels.backward(number, np.float32(0.7), x, y, ones, dx)
        truth = function(exact)
        (slope,) = torch.autograd.grad(truth.sum(), exact)
        np.testing.assert_allclose(y, truth.detach().numpy(), rtol=8 * UNIT, atol=1e-37)
        np.testing.assert_allclose(dx, slope.numpy(), rtol=8 * UNIT, atol=32 * UNIT)
        activation_kernels.forward(number, np.float32(0.7), far, y)
        np.testing.assert_allclose(y[: len(far)], function(torch.from_numpy(far)).numpy(), atol=1e-30)
