"""A device without enough memory for a call gets half as many clients, and the result stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayfl.data import Samples
from rayfl.models import MODELS, ModelSpec
from rayfl.training import LocalWork
from rayfl.training.batched.engine import BatchedEngine, _plan_width
from rayfl.training.batched.network import BatchedNetwork
from rayfl.training.batches import Batches
from tests.training.conftest import stepwise

SPEC = ModelSpec.of(MODELS["mlp"](hidden=(4,)), (6,), 3, 0)
CLIENTS = 12


class Narrow(BatchedNetwork):
    """A network that has room for ``room`` clients only."""

    room = 3

    def load(self, models, rows, sgd, *terms):  # type: ignore[no-untyped-def]
        if len(rows) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        super().load(models, rows, sgd, *terms)


@pytest.fixture
def engine() -> Callable[[int | None], BatchedEngine]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 6)).astype(np.float32), rng.integers(0, 3, 60)
    batches = Batches(Samples("random", x, y, x, y, 3), torch.device("cpu"))

    def make(room: int | None) -> BatchedEngine:
        if room is None:
            return stepwise(SPEC, batches, 0, clients_per_call=3)
        network = Narrow(SPEC)
        network.room = room
        return BatchedEngine(SPEC, batches, 0, network, clients_per_call=CLIENTS)

    return make


def train(engine: BatchedEngine):  # type: ignore[no-untyped-def]
    indices = [np.arange(5 * c, 5 * c + 5) for c in range(CLIENTS)]
    start = torch.from_numpy(np.tile(SPEC.initial(), (CLIENTS, 1)))
    return engine.train(LocalWork(2, 2, 0.1), 0, list(range(CLIENTS)), indices, start)


def test_half_as_many_clients_until_they_fit(engine) -> None:
    narrow = engine(3)
    block = train(narrow)
    assert narrow.clients_per_call == 3  # 12, 6, 3: and from then on it starts with 3
    assert block.failures == {}
    assert torch.equal(block.rows, train(engine(None)).rows)


def test_a_plan_as_long_as_a_large_client_trains_is_of_few(engine, monkeypatch) -> None:
    """It has a place for every client in every batch of the largest one."""
    calls: list[int] = []
    attempt = BatchedEngine._attempt

    def watched(self, block, rows):
        calls.append(len(rows))
        return attempt(self, block, rows)

    whole = train(engine(CLIENTS))
    monkeypatch.setattr("rayfl.training.batched.engine._PLAN_ENTRIES", 5 * 12)  # two epochs of 3 batches of 2
    monkeypatch.setattr(BatchedEngine, "_attempt", watched)
    few = train(engine(CLIENTS))
    assert calls == [5, 5, 2]
    assert torch.equal(few.rows, whole.rows)


def test_a_plan_is_as_wide_as_the_data_or_the_visits() -> None:
    sizes, work = np.array([5, 3]), LocalWork(2, 10**6, 0.1)
    assert _plan_width(work, sizes, None) == 2 * 5
    assert _plan_width(replace(work, inner_lr=0.1, batch_size=2), sizes, None) == 2 * 2 * 2
    assert _plan_width(work, sizes, np.zeros((2, 4, 7), np.intp)) == 7
    assert _plan_width(work, sizes, [[np.arange(2), np.arange(4)], []]) == 4


def test_a_device_without_room_for_one_says_so(engine) -> None:
    none = engine(0)
    block = train(none)
    assert none.clients_per_call == 1
    assert sorted(block.failures) == list(range(CLIENTS))
    assert "out of memory" in block.failures[0]


def test_models_are_copied_to_where_the_last_ones_were(engine) -> None:
    """New memory for a large model costs more than the copy; the result is that of a fresh engine."""
    used = engine(None)
    train(used)
    before = {name: value.data_ptr() for name, value in used.network._values.items()}
    again = train(used)
    assert {name: value.data_ptr() for name, value in used.network._values.items()} == before
    assert torch.equal(again.rows, train(engine(None)).rows)
