"""A dataset: a function that returns arrays. rayfl checks them before anything starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def load(samples: int = 600, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Points of three Gaussians in six dimensions: inputs (n, 6), classes (n,)."""
    rng = np.random.default_rng(seed)
    y = np.arange(samples) % 3
    x = rng.normal(size=(samples, 6)) + 2 * np.eye(6)[y]
    return x.astype(np.float32), y.astype(np.int64)
