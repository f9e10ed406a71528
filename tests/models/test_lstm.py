"""The network for texts: its size, what it predicts from what, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from rayfl.errors import ConfigError
from rayfl.models import ModelSpec
from rayfl.models.lstm import Lstm


def test_size_by_hand() -> None:
    spec = ModelSpec.of(Lstm(embedding=5, hidden=7, depth=2), (6,), 20, 0)
    table, first, second, last = 20 * 5, 4 * 7 * (5 + 7 + 2), 4 * 7 * (7 + 7 + 2), 20 * 7 + 20
    assert table + first + second + last == spec.P
    assert spec.layers == {
        "embedding": [(0, table)],
        "lstm": [(table, table + first + second)],
        "fc1": [(table + first + second, spec.P)],
    }
    assert ModelSpec.of(Lstm(embedding=7, hidden=7, tied=True), (6,), 20, 0).P == (
        20 * 7 + 2 * 4 * 7 * 16 + 20
    )


def test_a_word_is_predicted_from_those_before_it_alone() -> None:
    module = ModelSpec.of(Lstm(embedding=5, hidden=7), (6,), 20, 0).build()
    words = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    logits = module(words)
    assert logits.shape == (3, 20, 6)
    changed = words.clone()
    changed[:, 3] = (words[:, 3] + 1) % 20
    differs = (module(changed) != logits).any(dim=1)
    assert differs.tolist() == [[False] * 3 + [True] * 3] * 3


def test_tied_weights_are_one_tensor() -> None:
    spec = ModelSpec.of(Lstm(embedding=4, hidden=4, tied=True), (3,), 9, 0)
    module = spec.build()
    spec.load(module, np.arange(spec.P, dtype=np.float32))
    assert torch.equal(module.fc1.weight, module.embedding.weight)  # type: ignore[union-attr, arg-type]
    assert "fc1.weight" not in spec.names


def test_examples_are_texts_with_ends() -> None:
    model = Lstm()
    x, targets = model.example((6,), 20, 50, np.random.default_rng(0))
    assert (x.shape, x.dtype) == ((50, 6), np.int32)
    assert (targets[:, 0] >= 0).all()
    assert (targets == -100).any()
    logits = ModelSpec.of(model, (6,), 20, 0).build()(torch.from_numpy(x).long())
    assert torch.isfinite(functional.cross_entropy(logits, torch.from_numpy(targets)))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="tied needs embedding equal to hidden, not 4 and 5"):
        Lstm(embedding=4, hidden=5, tied=True)
    with pytest.raises(ConfigError):
        Lstm(depth=0)
