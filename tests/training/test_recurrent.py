"""The batched embedding and LSTM equal the plain loop, for texts of any length and clients of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from rayfl.data import IGNORED, Samples
from rayfl.losses import CrossEntropy, Loss
from rayfl.models import MODELS, ModelSpec
from rayfl.training import NO_TERMS, LocalWork, Terms
from rayfl.training.batched import BatchedEngine, lstm_kernel
from rayfl.training.batched.network import BatchedNetwork, Unsupported, predictions
from rayfl.training.batched.parameters import THIN, Parameter, Sgd
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.loop import LoopEngine
from tests.training.bounds import Truth, rounding


class Plain(CrossEntropy):
    """With the mean of any loss of one's own."""

    def mean(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return Loss.mean(self, outputs, targets)


PLAIN = LocalWork(2, 5, 0.5)
SIZES = [11, 6, 4, 15, 7, 1]
LARGE = [40, 60, 33]


def texts(length: int, words: int, count: int = 60) -> Samples:
    """Texts of 2 to ``length + 1`` random words."""
    rng = np.random.default_rng(0)
    sequence = rng.integers(0, words, (count, length + 1))
    behind = np.arange(length) >= rng.integers(1, length + 1, count)[:, None]
    x = np.where(behind, 0, sequence[:, :-1]).astype(np.int32)
    targets = np.where(behind, IGNORED, sequence[:, 1:])
    topics = np.zeros(count, np.int64)
    vocabulary = tuple(f"w{i}" for i in range(words))
    return Samples(
        "texts", x, topics, x, topics, 1,
        targets_train=targets, targets_test=targets, vocabulary=vocabulary,
    )  # fmt: skip


def assert_equal(
    spec: ModelSpec,
    samples: Samples,
    work: LocalWork,
    together: int = 4,
    terms: Terms = NO_TERMS,
    sizes: Sequence[int] = SIZES,
) -> None:
    batches = Batches(samples, torch.device("cpu"))
    rng = np.random.default_rng(1)
    indices: list[NDArray[np.integer]] = [rng.choice(60, n, replace=False) for n in sizes]
    start = torch.from_numpy(np.stack([spec.initial(index=i % 2) for i in range(len(sizes))]))
    clients = range(10, 10 + len(sizes))
    truth = Truth.of(spec, batches, 0, work, 1, clients, indices, start, terms)
    assert (truth.moved > 0.01).all()
    for engine in (LoopEngine(spec, batches, 0), BatchedEngine(spec, batches, 0, clients_per_call=together)):
        truth.check(engine.train(work, 1, clients, indices, start, terms))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("depth", "embedding", "hidden", "length", "words"),
    [(1, 5, 7, 6, 20), (2, 6, 6, 9, 30), (3, 8, 4, 1, 11), (2, 3, 5, 4, 200)],
)
@pytest.mark.parametrize(
    "work", [PLAIN, LocalWork(2, 5, 0.2, momentum=0.5, weight_decay=0.01)], ids=["plain", "momentum-decay"]
)
def test_any_depth_and_any_ragged_clients_equal_the_loop(
    depth: int, embedding: int, hidden: int, length: int, words: int, work: LocalWork
) -> None:
    model = MODELS["lstm"](depth=depth, embedding=embedding, hidden=hidden)
    assert_equal(ModelSpec.of(model, (length,), words, 0), texts(length, words), work)


def test_a_batch_that_is_too_large_for_the_kernels_equals_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm_kernel, "forward", None)  # not called
    monkeypatch.setattr(lstm_kernel, "backward", None)
    model = MODELS["lstm"](depth=2, embedding=5, hidden=6)
    work = LocalWork(3, 60, 0.2, momentum=0.5)
    assert min(LARGE) > THIN
    assert_equal(ModelSpec.of(model, (7,), 20, 0), texts(7, 20), work, sizes=LARGE)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "change",
    [{"proximal": 0.1}, {"inner_lr": 0.2}, {"weight_decay": 0.1}, {"lr_alpha": 0.5, "lr_power": 1.0}],
    ids=str,
)
def test_the_terms_of_local_objectives_hold_for_words_too(change: dict[str, float]) -> None:
    spec = ModelSpec.of(MODELS["lstm"](embedding=4, hidden=5), (6,), 20, 0)
    rng = np.random.default_rng(2)
    offset = torch.from_numpy(rng.normal(0, 0.01, (len(SIZES), spec.P)).astype(np.float32))
    mask = torch.from_numpy((rng.random((len(SIZES), spec.P)) < 0.8).astype(np.float32))
    work = replace(PLAIN, **change)  # type: ignore[arg-type]
    assert_equal(spec, texts(6, 20), work, terms=Terms(offset=offset, mask=mask))


def test_the_engine_is_chosen_by_a_trial_on_words() -> None:
    spec = ModelSpec.of(MODELS["lstm"](embedding=4, hidden=5), (6,), 20, 0)
    assert choose_engine(spec)[0] == "batched"
    tied = ModelSpec.of(MODELS["lstm"](embedding=5, hidden=5, tied=True), (6,), 20, 0)
    name, why = choose_engine(tied)
    assert name == "vmap"
    assert "not batched: two layers share their weights" in why


def test_a_tied_model_learns_in_the_loop() -> None:
    spec = ModelSpec.of(MODELS["lstm"](embedding=5, hidden=5, tied=True), (6,), 20, 0)
    start = torch.from_numpy(spec.initial()[None])
    engine = LoopEngine(spec, Batches(texts(6, 20), torch.device("cpu")), 0)
    losses = []
    for r in range(8):
        block = engine.train(PLAIN, r, [0], [np.arange(40)], start)
        losses.append(block.losses[0])
        start = block.rows
    assert losses[-1] < losses[0]


def test_what_stands_behind_the_end_of_a_text_counts_in_nothing() -> None:
    spec = ModelSpec.of(MODELS["lstm"](embedding=4, hidden=5), (6,), 20, 0)
    samples = texts(6, 20)
    assert samples.targets_train is not None
    other = np.where(samples.targets_train == IGNORED, 7, samples.x_train).astype(np.int32)
    assert not np.array_equal(other, samples.x_train)
    start, ends = torch.from_numpy(spec.initial()[None]), []
    given = PLAIN, 0, [0], [np.arange(30)], start
    truth = Truth.of(spec, Batches(samples, torch.device("cpu")), 0, *given)
    for x in (samples.x_train, other):
        batches = Batches(replace(samples, x_train=x), torch.device("cpu"))
        for make in (LoopEngine, BatchedEngine):
            block = make(spec, batches, 0).train(*given)
            truth.check(block)
            ends.append(block.rows)
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])


def test_every_word_of_a_batch_has_the_same_weight() -> None:
    # Client 0: two texts with 3 and 1 words to predict; client 1: one text with 2, then padding.
    y = torch.tensor([[[4, 5, 6], [7, -100, -100]], [[8, 9, -100], [1, 1, 1]]])
    targets, weights = predictions(y, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    expected = [[1 / 4, 1 / 4, 1 / 4, 1 / 4, 0, 0], [1 / 2, 1 / 2, 0, 0, 0, 0]]
    np.testing.assert_allclose(weights, expected)
    assert targets[0, :4].tolist() == [4, 5, 6, 7]
    labels, plain = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]])
    assert predictions(labels, plain) == (labels, plain)


@pytest.mark.parametrize("change", [{}, {"inner_lr": 0.2}, {"momentum": 0.5}], ids=str)
@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(label_smoothing=0.1), Plain()], ids=str)
def test_a_batch_with_nothing_to_predict_changes_nothing(loss: Loss, change: dict[str, float]) -> None:
    """Client 0 visits such texts between others, client 1 only the others, client 2 only such texts."""
    spec = ModelSpec.of(MODELS["lstm"](embedding=4, hidden=5), (6,), 20, 0, loss)
    samples, work = texts(6, 20), replace(PLAIN, **change)  # type: ignore[arg-type]
    targets = np.array(samples.targets_train)
    targets[:20] = IGNORED
    batches = Batches(replace(samples, targets_train=targets), torch.device("cpu"))
    indices = [np.arange(40)] * 3
    silent, others = np.arange(20).reshape(4, 5), np.arange(20, 40).reshape(4, 5)
    mixed = np.concatenate([silent[:2], others[:2], silent[2:], others[2:]])
    start = torch.from_numpy(np.stack([spec.initial()] * 3))
    if change.get("momentum"):  # a batch without a gradient moves on with the velocity
        mixed = np.concatenate([silent, others])
    terms = Terms(visits=[mixed, others, silent])
    for make in (LoopEngine, BatchedEngine):
        block = make(spec, batches, 0).train(work, 0, [0, 1, 2], indices, start, terms)
        assert not block.failures
        torch.testing.assert_close(block.rows[0], block.rows[1])
        assert not torch.equal(block.rows[1], start[1])
        assert torch.equal(block.rows[2], start[2])
        assert block.losses[2] == 0
        assert block.losses[0] == pytest.approx(block.losses[1] / 2)


def test_one_step_by_autograd() -> None:
    """Apart from both engines: w - eta grad of the mean cross-entropy of the words, for the same batch."""
    spec, samples = ModelSpec.of(MODELS["lstm"](embedding=3, hidden=4), (5,), 9, 0), texts(5, 9)
    module = spec.build()
    x, y = torch.from_numpy(samples.x_train[:4]).long(), torch.from_numpy(samples.targets_train[:4])  # type: ignore[index]
    logits = module(x).transpose(1, 2).reshape(-1, 9)
    known = y.flatten() != IGNORED
    loss = functional.nll_loss(torch.log_softmax(logits, 1)[known], y.flatten()[known])
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.3 * parameter.grad
    start = torch.from_numpy(spec.initial()[None])
    engine = BatchedEngine(spec, Batches(samples, torch.device("cpu")), 0)
    block = engine.train(LocalWork(1, 4, 0.3), 0, [0], [np.arange(4)], start)
    assert block.losses[0] == pytest.approx(loss.item(), rel=rounding(20))
    np.testing.assert_allclose(
        block.rows[0], spec.flatten(module), atol=rounding(20)
    )  # four texts of five words


@pytest.mark.parametrize("sgd", [Sgd(0.1), Sgd(0.1, weight_decay=0.5), Sgd(0.1, momentum=0.9)], ids=str)
def test_a_word_that_comes_twice_moves_by_both_gradients(sgd: Sgd) -> None:
    value = torch.ones(2, 3, 1)  # two clients, three words
    parameter = Parameter(value, sgd)
    rows, gradient = torch.tensor([0, 2, 2, 4]), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    parameter.descend_rows(rows, gradient)
    dense = torch.tensor([[[1.0], [0.0], [5.0]], [[0.0], [4.0], [0.0]]])
    torch.testing.assert_close(value, 1 - 0.1 * (dense + sgd.weight_decay))


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(5, 4, max_norm=1.0),
        nn.Embedding(5, 4, scale_grad_by_freq=True),
        nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 4, batch_first=True)),
    ],
)
def test_what_has_no_counterpart_is_refused(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec.of(MODELS["lstm"](embedding=4, hidden=4), (3,), 5, 0)
    monkeypatch.setattr(ModelSpec, "outline", lambda self: module)
    with pytest.raises(Unsupported):
        BatchedNetwork(spec)
