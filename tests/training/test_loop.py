"""The plain loop, which faster engines are measured against, measured against torch.optim and by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.data import Samples
from rayfl.models import ModelSpec
from rayfl.random import key, orders
from rayfl.training import LocalWork
from rayfl.training.batches import Batches
from rayfl.training.loop import LoopEngine, seeded
from tests.training.bounds import rounding
from tests.training.conftest import make_samples, make_spec

WORK = LocalWork(epochs=2, batch_size=8, lr=0.05)
IMAGES = make_samples((1, 16, 16))
FEATURES = make_samples((6,), uint8=False)
MODELS = {
    "linear": (FEATURES, {}),
    "mlp": (IMAGES, {"hidden": (9, 7), "dropout": 0.5}),
    "mthfl_cnn": (IMAGES, {}),
    "subfedavg_cnn": (IMAGES, {}),  # BatchNorm
}
CLIENTS = {3: 24, 7: 13, 11: 5, 12: 16}  # id -> samples: whole batches, a short last one, fewer than one


def parts(clients: dict[int, int]) -> list[np.ndarray]:
    """Disjoint training samples of each client."""
    ends = np.cumsum([0, *clients.values()])
    return [np.arange(a, b) for a, b in itertools.pairwise(ends)]


def start_rows(spec: ModelSpec, count: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([spec.initial()] * count))


def reference(
    spec: ModelSpec,
    samples: Samples,
    work: LocalWork,
    seed: int,
    round: int,
    client: int,
    own: np.ndarray,
) -> tuple[np.ndarray, float]:
    """What everybody would write: nn.Module, CrossEntropyLoss, torch.optim.SGD."""
    x, y = Batches(samples, torch.device("cpu")).train(own)
    module = spec.build().train()
    optimizer = torch.optim.SGD(
        module.parameters(), lr=work.lr, momentum=work.momentum, weight_decay=work.weight_decay
    )
    order = orders(seed, round, [client], [len(own)], work.epochs)[0]
    torch.manual_seed(key(seed, "train", round, client) >> 1)  # dropout
    total = 0.0
    for epoch in order:
        for at in range(0, len(epoch), work.batch_size):
            batch = epoch[at : at + work.batch_size].copy()
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(module(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
    return spec.flatten(module), total / order.size


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.5},
        {"weight_decay": 0.01},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"batch_size": 1000},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_torch_optim_bit_for_bit(name, changes):
    samples, settings = MODELS[name]
    spec, work = make_spec(name, samples, **settings), replace(WORK, **changes)
    engine = LoopEngine(spec, Batches(samples, torch.device("cpu")), seed=5)
    indices = parts(CLIENTS)
    block = engine.train(work, 3, list(CLIENTS), indices, start_rows(spec, len(CLIENTS)))
    assert block.failures == {}
    for row, client in enumerate(CLIENTS):
        model, loss = reference(spec, samples, work, 5, 3, client, indices[row])
        assert block.rows[row].numpy().tobytes() == model.tobytes()
        assert block.losses[row] == pytest.approx(loss, rel=rounding(len(indices[row])))
        assert block.steps[row] == work.epochs * -(-len(indices[row]) // work.batch_size)
    assert len({row.numpy().tobytes() for row in block.rows}) == len(
        CLIENTS
    )  # they did learn different things


def test_one_sample():
    spec = make_spec("mlp", IMAGES, hidden=(5,))
    engine = LoopEngine(spec, Batches(IMAGES, torch.device("cpu")), 0)
    block = engine.train(WORK, 0, [4], [np.array([9])], start_rows(spec, 1))
    assert (
        block.rows[0].numpy().tobytes() == reference(spec, IMAGES, WORK, 0, 0, 4, np.array([9]))[0].tobytes()
    )
    assert block.steps.tolist() == [2]


@pytest.mark.parametrize("name", ["mlp", "subfedavg_cnn"])
def test_a_client_does_not_depend_on_its_block(name):
    """Neither on who else is in it, nor on the order, nor on what the engine did before."""
    samples, settings = MODELS[name]
    spec = make_spec(name, samples, **settings)
    work = replace(WORK, momentum=0.5)

    def train(clients: Sequence[int], engine: LoopEngine) -> dict[int, bytes]:
        own = dict(zip(CLIENTS, parts(CLIENTS), strict=True))
        block = engine.train(work, 1, clients, [own[c] for c in clients], start_rows(spec, len(clients)))
        return {
            c: row.numpy().tobytes() + loss.tobytes()
            for c, row, loss in zip(clients, block.rows, block.losses, strict=True)
        }

    def fresh() -> LoopEngine:
        return LoopEngine(spec, Batches(samples, torch.device("cpu")), 0)

    together, used = train(list(CLIENTS), fresh()), fresh()
    assert train(list(CLIENTS)[::-1], used) == together
    torch.manual_seed(99)
    for client in CLIENTS:
        assert train([client], used) == {client: together[client]}


def test_seed_and_round_matter_and_global_generators_are_left_alone():
    spec = make_spec("mlp", IMAGES, hidden=(5,), dropout=0.5)
    batches = Batches(IMAGES, torch.device("cpu"))

    def train(seed: int, round: int) -> bytes:
        rows = start_rows(spec, 1)
        return (
            LoopEngine(spec, batches, seed)
            .train(WORK, round, [0], [np.arange(20)], rows)
            .rows.numpy()
            .tobytes()
        )

    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert len({train(0, 0), train(1, 0), train(0, 1)}) == 3
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]  # noqa: NPY002


def test_the_rows_are_trained_from_their_own_start():
    spec = make_spec("linear", FEATURES)
    engine = LoopEngine(spec, Batches(FEATURES, torch.device("cpu")), 0)
    start = start_rows(spec, 2)
    start[1] = 0.5
    block = engine.train(replace(WORK, lr=1e-30), 0, [0, 1], parts({0: 9, 1: 9}), start)
    assert torch.equal(block.rows, start)  # lr so small that nothing moves: everybody kept its own start


def test_a_failure_leaves_the_others_and_its_own_start_alone():
    spec = make_spec("subfedavg_cnn", IMAGES)
    batches = Batches(IMAGES, torch.device("cpu"))
    clients, indices = list(CLIENTS), parts(CLIENTS)
    good = LoopEngine(spec, batches, 0).train(WORK, 0, clients, indices, start_rows(spec, 4))
    broken = [*indices]
    broken[1] = np.array([5, 10_000])  # no such sample
    block = LoopEngine(spec, batches, 0).train(WORK, 0, clients, broken, start_rows(spec, 4))
    assert list(block.failures) == [1]
    assert "IndexError" in block.failures[1]
    assert torch.equal(block.rows[1], torch.from_numpy(spec.initial()))
    for row in (0, 2, 3):
        assert torch.equal(block.rows[row], good.rows[row])
        assert block.losses[row] == good.losses[row]


def test_a_failure_in_the_middle_of_training_leaves_the_start_alone():
    """The last batch has a label that the model does not know: the steps before it must not show."""
    samples = replace(FEATURES, y_train=np.where(np.arange(80) == 30, 99, FEATURES.y_train))
    spec = make_spec("linear", samples)
    engine = LoopEngine(spec, Batches(samples, torch.device("cpu")), 0)
    block = engine.train(
        replace(WORK, batch_size=1), 0, [0, 1], [np.arange(31), np.arange(9)], start_rows(spec, 2)
    )
    assert list(block.failures) == [0]
    assert torch.equal(block.rows[0], torch.from_numpy(spec.initial()))
    assert not torch.equal(block.rows[1], block.rows[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_reported(bad):
    x = FEATURES.x_train.copy()
    x[3] = bad
    samples = replace(FEATURES, x_train=x)
    spec = make_spec("linear", samples)
    engine = LoopEngine(spec, Batches(samples, torch.device("cpu")), 0)
    block = engine.train(WORK, 0, [0, 1], [np.arange(8), np.arange(8, 16)], start_rows(spec, 2))
    assert list(block.failures) == [0]
    assert block.failures[0].strip().endswith("the training loss is nan; a smaller training.lr may help")
    assert torch.equal(block.rows[0], torch.from_numpy(spec.initial()))
    assert torch.isfinite(block.rows).all()


def test_a_model_that_diverges_in_its_last_step_is_reported():
    """The loss before the last step is finite, the model after it is not."""
    x = np.full((4, 6), 1e20, np.float32)
    samples = replace(FEATURES, x_train=np.concatenate([x, FEATURES.x_train]), y_train=np.zeros(84, np.int64))
    spec = make_spec("linear", samples)
    engine = LoopEngine(spec, Batches(samples, torch.device("cpu")), 0)
    rows = start_rows(spec, 1)
    rows.zero_()
    block = engine.train(LocalWork(1, 10, lr=1e20), 0, [0], [np.arange(4)], rows)
    assert list(block.failures) == [0]
    assert "the length of the trained model is" in block.failures[0]
    assert not rows.any()


ROUNDING = rounding(14, steps=2)  # sums over at most 14 samples

# --- a step by hand --------------------------------------------------------------------------------------


def softmax_step(
    w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray, lr: float
) -> tuple[np.ndarray, np.ndarray]:
    """One step of softmax regression in float64: the gradient is (p - onehot) x / n."""
    logits = x @ w.T + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return w - lr * p.T @ x / len(y), b - lr * p.mean(0)


def test_a_round_of_fedavg_with_two_clients_by_hand():
    """Two local steps at each client, then w = (n_1 w_1 + n_2 w_2) / (n_1 + n_2)."""
    spec = make_spec("linear", FEATURES)
    engine = LoopEngine(spec, Batches(FEATURES, torch.device("cpu")), 0)
    indices = [np.arange(6), np.arange(6, 20)]
    work = LocalWork(epochs=2, batch_size=100, lr=0.3)  # full batches: the order does not matter
    block = engine.train(work, 0, [0, 1], indices, start_rows(spec, 2))
    start = spec.initial().astype(np.float64)
    locals_ = []
    for own in indices:
        w, b = start[:24].reshape(4, 6), start[24:]
        for _ in range(2):
            w, b = softmax_step(w, b, FEATURES.x_train[own].astype(np.float64), FEATURES.y_train[own], 0.3)
        locals_.append(np.concatenate([w.ravel(), b]))
    np.testing.assert_allclose(block.rows.numpy(), np.stack(locals_), rtol=0, atol=ROUNDING)
    averaged = (6 * block.rows[0].double() + 14 * block.rows[1].double()) / 20
    np.testing.assert_allclose(
        averaged.numpy(), (6 * locals_[0] + 14 * locals_[1]) / 20, rtol=0, atol=ROUNDING
    )


def test_two_steps_with_momentum_and_decay_by_hand():
    """v1 = g1 + l w0, w1 = w0 - h v1; v2 = m v1 + g2 + l w1, w2 = w1 - h v2."""
    spec = make_spec("linear", FEATURES)
    engine = LoopEngine(spec, Batches(FEATURES, torch.device("cpu")), 0)
    work = LocalWork(epochs=2, batch_size=100, lr=0.3, momentum=0.5, weight_decay=0.1)
    block = engine.train(work, 0, [0], [np.arange(10)], start_rows(spec, 1))
    x, y = FEATURES.x_train[:10].astype(np.float64), FEATURES.y_train[:10]

    def gradient(v: np.ndarray) -> np.ndarray:
        w, b = softmax_step(v[:24].reshape(4, 6), v[24:], x, y, 1.0)
        return v - np.concatenate([w.ravel(), b])

    w0 = spec.initial().astype(np.float64)
    v1 = gradient(w0) + 0.1 * w0
    w1 = w0 - 0.3 * v1
    v2 = 0.5 * v1 + gradient(w1) + 0.1 * w1
    np.testing.assert_allclose(block.rows[0].numpy(), w1 - 0.3 * v2, rtol=0, atol=ROUNDING)


def test_generators_are_seeded_as_by_manual_seed_those_of_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.manual_seed_all", on_gpus.append)
    before = torch.get_rng_state()
    with seeded(2**63 + 7):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert on_gpus == [2**62 + 3]
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(2**62 + 3)))
