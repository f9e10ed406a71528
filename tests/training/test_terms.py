"""Local objectives, offsets, masks and visits: every engine equals the loop, and the loop equals NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.models import MODELS, ModelSpec
from rayfl.random import orders
from rayfl.training import NO_TERMS, LocalWork, Terms, TrainedBlock
from rayfl.training.batched import BatchedEngine, calls
from rayfl.training.batched.vmap import VmapNetwork
from rayfl.training.batches import Batches
from rayfl.training.engine import Engine
from rayfl.training.loop import LoopEngine
from tests.training.bounds import Truth, rounding
from tests.training.conftest import make_samples, make_spec, stepwise
from tests.training.test_loop import softmax_step

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mlp": ("mlp", {"hidden": [16, 8], "dropout": 0.5}, (1, 4, 4)),
    "lenet5": ("lenet5", {}, (1, 28, 28)),
    "lenet5-bn": ("lenet5", {"batch_norm": True}, (1, 28, 28)),
    "leaf_cnn": ("leaf_cnn", {}, (1, 12, 12)),
}
PLAIN = LocalWork(epochs=2, batch_size=4, lr=0.02)
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # name -> changes of the work, terms
    "proximal": ({"proximal": 0.5}, ()),
    "offset": ({}, ("offset",)),
    "mask": ({}, ("mask",)),
    "visits": ({}, ("visits",)),
    "inner": ({"inner_lr": 0.05}, ()),
    "rate": ({"lr_alpha": 0.3, "lr_power": 0.75}, ()),
    "snapshot": ({"snapshot_epoch": 1}, ()),
    "frozen": ({"frozen": True, "phase": 1}, ()),
    "frozen-all": ({"frozen": True, "proximal": 0.5, "lr_alpha": 0.3}, ("offset", "mask", "visits")),
    "frozen-maml": ({"frozen": True, "inner_lr": 0.05}, ("offset", "mask")),
    "scaffold-prox": ({"proximal": 0.5, "lr_alpha": 0.3}, ("offset", "mask", "visits")),
    "maml-all": (
        {"proximal": 0.5, "lr_alpha": 0.3, "inner_lr": 0.05, "snapshot_epoch": 1},
        ("offset", "mask", "visits"),
    ),
    "maml-epochs": ({"inner_lr": 0.05, "snapshot_epoch": 1}, ("mask",)),
}
COMBINED = "frozen-all", "frozen-maml", "scaffold-prox", "maml-all"
"""Options that together include all others."""

EXTRAS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.1},
    "both": {"momentum": 0.5, "weight_decay": 0.1},
}


def make_work(work: LocalWork, spec: ModelSpec, changes: dict[str, Any]) -> LocalWork:
    """The work with these changes; of ``frozen`` models the first layer is."""
    frozen = tuple(spec.segment(first=1)) if changes.get("frozen") else ()
    return replace(work, **{**changes, "frozen": frozen})


def make_terms(names: tuple[str, ...], spec: ModelSpec, sizes: list[int], seed: int = 0) -> Terms:
    """Random terms; what they say of buffers must be ignored, so it is absurd."""
    rng = np.random.default_rng(seed)
    offset = rng.normal(0, 0.03, (len(sizes), spec.P)).astype(np.float32)
    mask = (rng.random((len(sizes), spec.P)) > 0.3).astype(np.float32)
    offset[:, spec.n_parameters :], mask[:, spec.n_parameters :] = 1e3, 0
    # Every other client takes many steps, the others few; batches of any length.
    visits = [
        [rng.integers(0, n, rng.integers(1, 7)) for _ in range(rng.integers(1, 3) + 6 * (c % 2))]
        for c, n in enumerate(sizes)
    ]
    return Terms(
        offset=torch.from_numpy(offset) if "offset" in names else None,
        mask=torch.from_numpy(mask) if "mask" in names else None,
        visits=visits if "visits" in names else None,
    )


def train(
    make: Callable[..., Engine], spec: ModelSpec, work: LocalWork, sizes: list[int], terms: Terms, **more: Any
) -> TrainedBlock:
    batches, *arguments = job(spec, sizes)
    block = make(spec, batches, 0, **more).train(work, *arguments, terms)
    assert not block.failures
    return block


def job(spec: ModelSpec, sizes: list[int]) -> tuple[Batches, int, range, list[Any], torch.Tensor]:
    """Batches, and a round, clients, their samples and start models."""
    samples = make_samples(spec.shape, 60, spec.classes)
    rng = np.random.default_rng(1)
    indices = [rng.choice(60, n, replace=False) for n in sizes]
    start = torch.from_numpy(np.tile(spec.initial(), (len(sizes), 1)))
    return Batches(samples, torch.device("cpu")), 1, range(10, 10 + len(sizes)), indices, start


def truth_of(spec: ModelSpec, work: LocalWork, sizes: list[int], terms: Terms) -> Truth:
    batches, *arguments = job(spec, sizes)
    return Truth.of(spec, batches, 0, work, *arguments, terms)


def assert_equal(
    spec: ModelSpec,
    work: LocalWork,
    sizes: list[int],
    terms: Terms,
    network: Any = None,
    together: int = 3,
) -> None:
    truth = truth_of(spec, work, sizes, terms)
    assert (truth.moved > 0).all()
    truth.check(train(LoopEngine, spec, work, sizes, terms))
    truth.check(train(BatchedEngine, spec, work, sizes, terms, network=network, clients_per_call=together))


def make_case(case: str) -> tuple[ModelSpec, list[int]]:
    name, config, shape = CASES[case]
    spec = ModelSpec.of(MODELS[name](**config), shape, 5, 0)
    return spec, {"leaf_cnn": [5, 2], "mlp": [11, 6, 3, 15, 8]}.get(case, [7, 4, 6])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("case", "extra"),
    [
        *(("mlp", extra) for extra in EXTRAS),
        ("lenet5-bn", "both"),
        pytest.param("lenet5", "sgd", marks=pytest.mark.slow),
    ],
)
def test_every_option_equals_the_loop(case: str, option: str, extra: str) -> None:
    changes, terms = OPTIONS[option]
    if "inner_lr" in changes and "momentum" in EXTRAS[extra]:
        with pytest.raises(ValueError, match="no momentum"):
            replace(PLAIN, **changes, **EXTRAS[extra])
        return
    spec, sizes = make_case(case)
    work = make_work(PLAIN, spec, {**changes, **EXTRAS[extra]})
    assert_equal(spec, work, sizes, make_terms(terms, spec, sizes))


@pytest.mark.parametrize("option", ["scaffold-prox", "maml-all"])
def test_a_large_model_equals_the_loop(option: str) -> None:
    changes, terms = OPTIONS[option]
    spec, sizes = make_case("leaf_cnn")
    work = replace(PLAIN, epochs=1, batch_size=2, **changes)
    assert_equal(spec, work, sizes, make_terms(terms, spec, sizes))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("option", OPTIONS)
def test_vmap_equals_the_loop(option: str) -> None:
    changes, terms = OPTIONS[option]
    samples = make_samples((1, 4, 4), 60, 5)
    spec, sizes = make_spec("mlp", samples, hidden=[9]), [11, 6, 3, 8]
    work = make_work(PLAIN, spec, {"weight_decay": 0.1, **changes})
    assert_equal(spec, work, sizes, make_terms(terms, spec, sizes), VmapNetwork(spec))


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    batch=st.integers(1, 9),
    epochs=st.integers(1, 3),
    together=st.integers(1, 7),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    proximal=st.sampled_from([0.0, 0.001, 1.0]),
    inner=st.sampled_from([0.0, 0.1]),
    alpha=st.sampled_from([0.0, 0.2]),
    snapshot=st.integers(0, 4),
    terms=st.sets(st.sampled_from(["offset", "mask", "visits"])),
)
def test_any_combination_equals_the_loop(
    sizes: list[int], batch: int, epochs: int, together: int, momentum: float, decay: float, proximal: float,
    inner: float, alpha: float, snapshot: int, terms: set[str],
) -> None:  # fmt: skip
    spec = ModelSpec.of(MODELS["mlp"](hidden=[7]), (1, 3, 3), 4, 0)
    work = LocalWork(
        epochs, batch, 0.01, 0.0 if inner else momentum, decay, proximal=proximal, inner_lr=inner,
        lr_alpha=alpha, snapshot_epoch=snapshot,
    )  # fmt: skip
    assert_equal(spec, work, sizes, make_terms(tuple(terms), spec, sizes), together=together)


# --- degenerate identities, bit for bit ------------------------------------------------------------------

ENGINES: list[Callable[..., Engine]] = [LoopEngine, BatchedEngine]


def assert_same(one: TrainedBlock, other: TrainedBlock) -> None:
    torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=0)
    assert one.losses.tolist() == other.losses.tolist()
    assert one.steps.tolist() == other.steps.tolist()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("extra", ["sgd", "both"])
@pytest.mark.parametrize("case", ["mlp", "lenet5-bn"])
@pytest.mark.parametrize("make", ENGINES)
def test_terms_that_say_nothing_change_nothing(make: Callable[..., Engine], case: str, extra: str) -> None:
    spec, sizes = make_case(case)
    work = replace(PLAIN, **EXTRAS[extra])
    plain = train(make, spec, work, sizes, Terms())
    rows = (len(sizes), spec.P)
    shuffled = orders(0, 1, range(10, 10 + len(sizes)), sizes, work.epochs)
    visits = [
        [e[at : at + work.batch_size] for e in order for at in range(0, len(e), work.batch_size)]
        for order in shuffled
    ]
    for terms in (
        Terms(offset=torch.zeros(rows)),
        Terms(mask=torch.ones(rows)),
        Terms(mask=torch.ones(rows, dtype=torch.bool)),
        Terms(visits=visits),
    ):
        assert_same(train(make, spec, work, sizes, terms), plain)
    assert_same(train(make, spec, replace(work, epochs=9), sizes, Terms(visits=visits)), plain)
    for changes in (
        {"lr_alpha": 0.0, "lr_power": 2.0},
        {"lr_alpha": 1.0, "lr_power": 0.0},
        *([{"proximal": 1e-30}] if extra == "sgd" else []),
    ):
        assert_same(train(make, spec, replace(work, **changes), sizes, Terms()), plain)


@pytest.mark.parametrize("make", [*ENGINES, stepwise])
def test_looking_ahead_by_nothing_is_sgd_on_the_second_batches(make: Callable[..., Engine]) -> None:
    spec, sizes = make_case("lenet5")
    visits = [[np.arange(n), np.arange(k % n, n)] * 2 for k, n in enumerate(sizes)]
    seconds = [own[1::2] for own in visits]
    ahead = train(make, spec, replace(PLAIN, inner_lr=1e-30), sizes, Terms(visits=visits))
    assert_same(ahead, train(make, spec, PLAIN, sizes, Terms(visits=seconds)))


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("case", ["mlp", "lenet5-bn"])
def test_a_snapshot_is_the_model_of_fewer_epochs(case: str, make: Callable[..., Engine]) -> None:
    spec = make_case(case)[0]
    sizes = [
        11,
        11,
        11,
    ]  # else who shares a step depends on the epochs, and padding on that: last bits differ
    work = replace(PLAIN, epochs=3, momentum=0.5)
    plain = train(make, spec, work, sizes, Terms())
    for epoch in (1, 2, 3, 4):
        block = train(make, spec, replace(work, snapshot_epoch=epoch), sizes, Terms())
        assert_same(block, plain)
        fewer = train(make, spec, replace(work, epochs=min(epoch, 3)), sizes, Terms())
        assert block.snapshots is not None
        torch.testing.assert_close(block.snapshots, fewer.rows, rtol=0, atol=0)


@pytest.mark.parametrize("make", ENGINES)
def test_buffers_have_no_gradient_and_no_mask(make: Callable[..., Engine]) -> None:
    spec, sizes = make_case("lenet5-bn")
    absurd = make_terms(("offset", "mask"), spec, sizes)
    assert absurd.offset is not None
    assert absurd.mask is not None
    offset, mask = absurd.offset.clone(), absurd.mask.clone()
    offset[:, spec.n_parameters :], mask[:, spec.n_parameters :] = 0, 1
    work = replace(PLAIN, momentum=0.5, proximal=1.0)
    block = train(make, spec, work, sizes, absurd)
    assert_same(block, train(make, spec, work, sizes, Terms(offset, mask)))
    assert (block.rows[:, spec.n_parameters :] != 0).any()


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("changes", [{"momentum": 0.9, "weight_decay": 0.1}, {"inner_lr": 0.1}], ids=str)
def test_what_is_masked_is_zero_from_start_to_end(make: Callable[..., Engine], changes: Any) -> None:
    spec, sizes = make_case("mlp")
    terms = make_terms(("offset", "mask"), spec, sizes)
    assert terms.mask is not None
    block = train(make, spec, replace(PLAIN, proximal=0.5, snapshot_epoch=1, **changes), sizes, terms)
    assert block.snapshots is not None
    for models in (block.rows, block.snapshots):
        assert (models[terms.mask == 0] == 0).all()
        assert (models[terms.mask == 1] != 0).any()


def test_a_clients_result_does_not_depend_on_its_company() -> None:
    """Up to rounding: the library's products may depend on where in memory a client's matrix begins."""
    spec, sizes = make_case("lenet5")
    rng = np.random.default_rng(0)
    visits = [[rng.integers(0, n, length) for length in (4, 6, 1)[: 1 + n % 3]] for n in sizes]
    terms = replace(make_terms(("offset", "mask"), spec, sizes), visits=visits)
    work = replace(PLAIN, proximal=0.5, lr_alpha=0.1)
    truth = truth_of(spec, work, sizes, terms)
    for together in (3, 2, 1):
        truth.check(train(BatchedEngine, spec, work, sizes, terms, clients_per_call=together))


# --- what is refused -------------------------------------------------------------------------------------


def test_calls_are_of_fewer_clients_the_more_a_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, sizes = make_spec("mlp", make_samples((20,), 60), hidden=[30]), [9, 8, 8, 7, 6, 5, 3]
    monkeypatch.setattr(calls, "CACHE_BYTES", 4 * spec.P)
    monkeypatch.setattr(calls, "SWEET_BYTES", 4 * spec.P * 9)
    found: list[list[int]] = []
    chunk = BatchedEngine._train_chunk

    def counted(self: BatchedEngine, block: Any, rows: Any) -> None:
        found[-1].append(len(rows))
        chunk(self, block, rows)

    monkeypatch.setattr(BatchedEngine, "_train_chunk", counted)
    sgd = LocalWork(2, 4, 0.05)
    for work, names in ((sgd, ()), (sgd, ("offset",)), (replace(sgd, proximal=0.1), ("offset",))):
        found.append([])
        terms = make_terms(names, spec, sizes)
        truth_of(spec, work, sizes, terms).check(train(BatchedEngine, spec, work, sizes, terms))
    # Weights alone: up to 8; with an offset, up to 4, about equally many; with the start models, up to 3.
    assert found == [[7], [4, 3], [3, 2, 2]]


def test_momentum_while_looking_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="no momentum"):
        LocalWork(1, 1, 0.1, momentum=0.5, inner_lr=0.1)


@pytest.mark.parametrize("make", ENGINES)
def test_terms_of_another_block_are_refused(make: Callable[..., Engine]) -> None:
    spec, sizes = make_case("mlp")
    one = make_terms(("offset", "mask", "visits"), spec, sizes[:1])
    for name in ("offset", "mask", "visits"):
        with pytest.raises(ValueError, match=name):
            train(make, spec, PLAIN, sizes, Terms(**{name: getattr(one, name)}))


@pytest.mark.parametrize("bad", [[-1], [4], []])
@pytest.mark.parametrize("make", ENGINES)
def test_visits_of_what_a_client_does_not_have_fail_alone(
    make: Callable[..., Engine], bad: list[int]
) -> None:
    samples = make_samples((1, 4, 4))
    spec = make_spec("mlp", samples, hidden=[5])
    start = torch.from_numpy(np.tile(spec.initial(), (3, 1)))
    before = start.clone()
    good = np.array([0, 3])
    terms = Terms(visits=[[good], [good, np.array(bad, np.intp)], [good]])
    engine = make(spec, Batches(samples, torch.device("cpu")), 0)
    indices = [np.arange(4), np.arange(4, 8), np.arange(8, 12)]
    block = engine.train(replace(PLAIN, snapshot_epoch=1), 0, [0, 1, 2], indices, start, terms)
    assert list(block.failures) == [1]
    assert "visits" in block.failures[1]
    assert block.snapshots is not None
    assert torch.equal(block.rows[1], before[1])
    assert torch.equal(block.snapshots[1], before[1])
    assert (block.rows[[0, 2]] != before[[0, 2]]).any(1).all()


@pytest.mark.parametrize("make", ENGINES)
def test_a_client_without_visits_stays_where_it_is(make: Callable[..., Engine]) -> None:
    samples = make_samples((1, 4, 4))
    spec = make_spec("mlp", samples, hidden=[5])
    start = torch.from_numpy(np.tile(spec.initial(), (2, 1)))
    before = start.clone()
    engine = make(spec, Batches(samples, torch.device("cpu")), 0)
    terms = Terms(visits=[[], [np.array([1])]])
    block = engine.train(PLAIN, 0, [0, 1], [np.arange(4), np.arange(4, 8)], start, terms)
    assert not block.failures
    assert torch.equal(block.rows[0], before[0])
    assert not torch.equal(block.rows[1], before[1])
    assert block.steps.tolist() == [0, 1]


# --- steps by hand ---------------------------------------------------------------------------------------

FEATURES = make_samples((6,), uint8=False)
BY_HAND: list[Callable[..., Engine]] = [
    LoopEngine,
    BatchedEngine,
    lambda spec, batches, seed: BatchedEngine(spec, batches, seed, VmapNetwork(spec)),
]


def gradient(v: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Of softmax regression, 4 classes and 6 features, in float64."""
    x, y = FEATURES.x_train[own].astype(np.float64), FEATURES.y_train[own]
    w, b = softmax_step(v[:24].reshape(4, 6), v[24:], x, y, 1.0)
    return v - np.concatenate([w.ravel(), b])


def by_hand(make: Callable[..., Engine], work: LocalWork, terms: Terms = NO_TERMS) -> np.ndarray:
    """One client with samples 0 to 9, from the initial model."""
    spec = make_spec("linear", FEATURES)
    start = torch.from_numpy(spec.initial()[None])
    engine = make(spec, Batches(FEATURES, torch.device("cpu")), 0)
    block = engine.train(work, 0, [0], [np.arange(10)], start, terms)
    assert not block.failures
    return block.rows[0].numpy()


ROUNDING = rounding(10, 4)  # sums over ten samples, at most four of their gradients
W0 = make_spec("linear", FEATURES).initial().astype(np.float64)
ALL = np.arange(10)
FULL = LocalWork(epochs=2, batch_size=100, lr=0.3)  # two steps over all samples: their order does not matter


@pytest.mark.parametrize("make", BY_HAND)
def test_proximal_by_hand(make: Callable[..., Engine]) -> None:
    """w1 = w0 - h g(w0); w2 = w1 - h (g(w1) + mu (w1 - w0))."""
    w1 = W0 - 0.3 * gradient(W0, ALL)
    w2 = w1 - 0.3 * (gradient(w1, ALL) + 0.7 * (w1 - W0))
    np.testing.assert_allclose(by_hand(make, replace(FULL, proximal=0.7)), w2, rtol=0, atol=ROUNDING)
    # With momentum and decay, all of it goes through the velocity.
    v1 = gradient(W0, ALL) + 0.1 * W0
    w1 = W0 - 0.3 * v1
    v2 = 0.5 * v1 + gradient(w1, ALL) + 0.1 * w1 + 0.7 * (w1 - W0)
    work = replace(FULL, proximal=0.7, momentum=0.5, weight_decay=0.1)
    np.testing.assert_allclose(by_hand(make, work), w1 - 0.3 * v2, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("make", BY_HAND)
def test_a_tiny_proximal_term_is_not_lost_in_rounding(make: Callable[..., Engine]) -> None:
    """From large weights, with eta mu = 1e-5, the model must not drift by 400 steps' rounding."""
    spec = make_spec("linear", FEATURES)
    start = torch.full((1, spec.P), 100.0)
    engine = make(spec, Batches(FEATURES, torch.device("cpu")), 0)
    work = LocalWork(epochs=400, batch_size=100, lr=1e-9, proximal=1e4)
    engine.train(work, 0, [0], [ALL], start)
    np.testing.assert_allclose(start.numpy(), 100.0, rtol=1e-7)


@pytest.mark.parametrize("make", BY_HAND)
def test_offset_by_hand(make: Callable[..., Engine]) -> None:
    """SCAFFOLD: y <- y - h (g(y) - c_i + c); with momentum the offset goes through the velocity."""
    c = np.random.default_rng(0).normal(size=28)
    w1 = W0 - 0.3 * (gradient(W0, ALL) + c)
    w2 = w1 - 0.3 * (gradient(w1, ALL) + c)
    terms = Terms(offset=torch.tensor(c[None], dtype=torch.float32))
    np.testing.assert_allclose(by_hand(make, FULL, terms), w2, rtol=0, atol=ROUNDING)
    v2 = 0.5 * (gradient(W0, ALL) + c) + gradient(w1, ALL) + c
    np.testing.assert_allclose(
        by_hand(make, replace(FULL, momentum=0.5), terms), w1 - 0.3 * v2, rtol=0, atol=ROUNDING
    )


@pytest.mark.parametrize("make", BY_HAND)
def test_mask_by_hand(make: Callable[..., Engine]) -> None:
    """m w0 is where training starts: the gradient is taken there."""
    m = (np.arange(28) % 3 > 0).astype(np.float64)
    w1 = m * (m * W0 - 0.3 * gradient(m * W0, ALL))
    w2 = m * (w1 - 0.3 * gradient(w1, ALL))
    terms = Terms(mask=torch.tensor(m[None], dtype=torch.float32))
    np.testing.assert_allclose(by_hand(make, FULL, terms), w2, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("make", BY_HAND)
def test_per_fedavg_by_hand(make: Callable[..., Engine]) -> None:
    """Three batches: the first with the second, the third with the first again; losses of the second ones."""
    first, second, third = np.array([0, 1, 2]), np.array([5, 3]), np.array([9, 8, 7, 6])
    ahead = W0 - 0.2 * gradient(W0, first)
    w1 = W0 - 0.3 * gradient(ahead, second)
    ahead = w1 - 0.2 * gradient(w1, third)
    w2 = w1 - 0.3 * gradient(ahead, first)
    work = replace(FULL, inner_lr=0.2)
    terms = Terms(visits=[[first, second, third]])
    np.testing.assert_allclose(by_hand(make, work, terms), w2, rtol=0, atol=ROUNDING)
    # A single batch an epoch is paired with itself.
    w1 = W0 - 0.3 * gradient(W0 - 0.2 * gradient(W0, ALL), ALL)
    w2 = w1 - 0.3 * gradient(w1 - 0.2 * gradient(w1, ALL), ALL)
    np.testing.assert_allclose(by_hand(make, work), w2, rtol=0, atol=ROUNDING)
    # The mask holds in the look-ahead too, weight decay acts on w, not on w'.
    m = (np.arange(28) % 3 > 0).astype(np.float64)
    w0 = m * W0
    ahead = m * (w0 - 0.2 * gradient(w0, ALL))
    w1 = m * (w0 - 0.3 * (gradient(ahead, ALL) + 0.1 * w0))
    terms = Terms(mask=torch.tensor(m[None], dtype=torch.float32))
    work = replace(work, epochs=1, weight_decay=0.1)
    np.testing.assert_allclose(by_hand(make, work, terms), w1, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("make", BY_HAND)
def test_the_rate_falls_inside_the_round(make: Callable[..., Engine]) -> None:
    """eta_i = eta (1 + alpha i)^-b: 0.3, then 0.3 / 1.5^2."""
    w1 = W0 - 0.3 * gradient(W0, ALL)
    w2 = w1 - 0.3 / 1.5**2 * gradient(w1, ALL)
    np.testing.assert_allclose(
        by_hand(make, replace(FULL, lr_alpha=0.5, lr_power=2.0)), w2, rtol=0, atol=ROUNDING
    )


@pytest.mark.parametrize("make", BY_HAND)
def test_losses_of_visits_are_weighted_by_batch_size(make: Callable[..., Engine]) -> None:
    """With a learning rate of nearly zero the losses are those of the start model."""
    spec = make_spec("linear", FEATURES)

    def losses(own: list[int]) -> float:
        logits = FEATURES.x_train[own].astype(np.float64) @ W0[:24].reshape(4, 6).T + W0[24:]
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return -float(logits[np.arange(len(own)), FEATURES.y_train[own]].sum())

    visits = [[np.array([0, 1, 2, 3, 4]), np.array([2]), np.array([7, 2])]]
    start = torch.from_numpy(spec.initial()[None])
    engine = make(spec, Batches(FEATURES, torch.device("cpu")), 0)
    block = engine.train(replace(FULL, lr=1e-30), 0, [0], [ALL], start, Terms(visits=visits))
    assert block.losses[0] == pytest.approx((losses([0, 1, 2, 3, 4]) + losses([2]) + losses([7, 2])) / 8)
    assert block.steps[0] == 3


@pytest.mark.parametrize("engine", [LoopEngine, BatchedEngine])
def test_what_is_frozen_stays_and_the_rest_moves(engine: Callable[..., Engine]) -> None:
    """The rest as if the frozen values were constants: a step of a network without its first layer."""
    spec, sizes = make_case("mlp")
    samples = make_samples((1, 4, 4), 60, 5)
    batches = Batches(samples, torch.device("cpu"))
    indices = [np.arange(n) for n in sizes]
    start = torch.from_numpy(spec.initial()).expand(len(sizes), -1)
    first = spec.mask(first=1)
    work = replace(PLAIN, frozen=tuple(spec.segment(first=1)), weight_decay=0.1, momentum=0.5)
    made = engine(spec, batches, 0)
    block = made.train(work, 0, range(len(sizes)), indices, start)
    assert not block.failures
    moved = (block.rows != start).numpy()
    assert not moved[:, first].any()
    assert moved[:, ~first].mean() > 0.5
    other = made.train(replace(work, phase=1), 0, range(len(sizes)), indices, start)
    assert not torch.equal(other.rows, block.rows)  # another order of samples


@pytest.mark.parametrize(
    ("frozen", "message"),
    [(((0, 5),), "a part of"), (((0, 10**9),), "nothing is left to train")],
)
@pytest.mark.parametrize("engine", [LoopEngine, BatchedEngine])
def test_parts_that_cannot_be_frozen(
    engine: Callable[..., Engine], frozen: tuple[tuple[int, int], ...], message: str
) -> None:
    spec, _ = make_case("mlp")
    batches = Batches(make_samples((1, 4, 4), 60, 5), torch.device("cpu"))
    start = torch.from_numpy(spec.initial())[None]
    with pytest.raises(ValueError, match=message):
        engine(spec, batches, 0).train(replace(PLAIN, frozen=frozen), 0, [0], [np.arange(4)], start)
