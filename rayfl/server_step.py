"""Steps of a server after averaging, such as a server optimizer, with vectors that are stored with the model.

Importing this module must stay cheap: an LPS actor needs NumPy, but neither torch nor anything built on it.
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
        old: the parameters before the round ``(n,)``.
        mean: the average of the parameters that clients sent ``(n,)``.
        clients: number of clients that sent theirs.
        members: number of clients of the model.
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
    """Base class of server steps: frozen dataclasses of settings; the LPS applies them to each trained model.

    Its vectors are stored with the model: in checkpoints, and for both halves of a cluster that is split.

    Attributes:
        elementwise: whether each new entry depends only on the entries of ``averaged`` and ``vectors`` at the
            same index, as in Adam, but not with a norm or with noise. Then a model may be divided among
            several servers (``execution.shard_models``), and :meth:`apply` is called for each shard.
    """

    elementwise: ClassVar[bool] = False

    def vectors(self) -> Mapping[str, float]:
        """Names of the vectors that are stored with a model, and the value with which each is initialised."""
        return {}

    @abstractmethod
    def apply(self, averaged: Averaged, vectors: Vectors) -> tuple[NDArray[np.float64], Vectors]:
        """The model's new parameters ``(n,)``, and the vectors for the next round."""
