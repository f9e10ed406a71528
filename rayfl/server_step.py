"""What a server does with a model after averaging: a server optimizer, with vectors that it keeps beside it.

Importing this module must stay cheap: an LPS actor needs NumPy, and neither torch nor anything built on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Vectors = Mapping[str, NDArray[np.float64]]
"""Vectors ``(n,)`` by name."""


@dataclass(frozen=True)
class Averaged:
    """A model right after averaging: its n parameters that clients share, without running statistics.

    Attributes:
        old: before the round ``(n,)``.
        mean: the average of what clients sent ``(n,)``.
        clients: how many delivered.
        members: how many clients the model has.
        model: its index: with E edges, model k at edge e is ``k E + e``. Noise depends on it, so that no two
            models get the same.
    """

    old: NDArray[np.float64]
    mean: NDArray[np.float64]
    clients: int
    members: int
    model: int = 0

    @property
    def update(self) -> NDArray[np.float64]:
        """The average of the updates, Delta ``(n,)``."""
        return self.mean - self.old


class ServerStep(ABC):
    """A frozen dataclass whose fields are its settings; applied by the LPS to each model that was trained.

    What it keeps follows the model: into checkpoints, and to both halves of a cluster that is split.

    Attributes:
        elementwise: whether each new number follows from the old number and the mean at its place alone, as
            in Adam, but not with a norm or with noise. Then a model may lie at several servers
            (``execution.shard_models``), and :meth:`apply` is given its shards one by one.
    """

    elementwise: ClassVar[bool] = False

    def vectors(self) -> Mapping[str, float]:
        """Names of the vectors that are kept beside a model, and the number that each is filled with."""
        return {}

    @abstractmethod
    def apply(self, averaged: Averaged, vectors: Vectors) -> tuple[NDArray[np.float64], Vectors]:
        """The parameters ``(n,)`` with which the model goes on, and the vectors of the next round."""
