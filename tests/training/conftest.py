"""Small data and models for training."""

from __future__ import annotations

from typing import Any

import numpy as np

from rayfl.data import Samples
from rayfl.models import MODELS, ModelSpec
from rayfl.training.batched import BatchedEngine


def make_samples(shape: tuple[int, ...], n: int = 80, classes: int = 4, uint8: bool = True) -> Samples:
    rng = np.random.default_rng(0)
    x: Any = rng.integers(0, 256, (n, *shape)).astype(np.uint8)
    if not uint8:
        x = rng.standard_normal((n, *shape)).astype(np.float32)
    y = rng.integers(0, classes, n)
    return Samples("made", x, y, x[:20].copy(), y[:20].copy(), classes)


def make_spec(name: str, samples: Samples, seed: int = 0, **settings: Any) -> ModelSpec:
    return ModelSpec.of(MODELS[name](**settings), samples.shape, samples.classes, seed)


def stepwise(*args: Any, **more: Any) -> BatchedEngine:
    """The batched engine, layer by layer also where it would train clients in one compiled call."""
    engine = BatchedEngine(*args, **more)
    engine.compiled = None
    return engine
