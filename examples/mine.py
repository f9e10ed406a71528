"""A partition: a function that divides the training samples among clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def deal(labels: NDArray[np.int64], rng: np.random.Generator, clients: int = 6) -> list[NDArray[np.int64]]:
    """The positions of each client's samples: client 0 has the low labels, the last one the high ones.

    Args:
        labels: labels of the training samples (n,).
        rng: generator keyed by the run's seed.
        clients: number of clients.
    """
    order = np.lexsort((rng.random(len(labels)), labels))
    return np.array_split(order, clients)
