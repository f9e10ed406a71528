"""What the servers must see of trained models before they can average them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rayfl.data import Samples
from rayfl.models import ModelSpec
from rayfl.training.batches import Batches


@dataclass(frozen=True)
class Trained:
    """What a worker has after training a block of B clients.

    Attributes:
        spec: the model's layout.
        module: a module of that layout, to be loaded with whatever is wanted.
        batches: inputs and their scaling.
        rows: the trained models ``(B, P)``.
        models: the servers' K models, ``(P,)`` each, if the observation ``needs_models``.
    """

    spec: ModelSpec
    module: nn.Module
    batches: Batches
    rows: torch.Tensor
    models: Sequence[torch.Tensor]


class Observation(ABC):
    """Computed where the models were trained; only its outcome travels.

    Observations are frozen dataclasses: equal ones are sent to the workers once a run.
    """

    needs_models: ClassVar[bool] = False

    def prepare(self, samples: Samples, seed: int) -> Observation:
        """The observation with what it needs of the server's data; called once, by the driver."""
        return self

    @abstractmethod
    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """Of a block: ``(B, ...)``."""

    def combine(self, blocks: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
        """Of all blocks, for the driver: by default one after the other, ``(M, ...)``."""
        return np.asarray(np.concatenate(blocks), np.float64)


@dataclass(frozen=True)
class Distances(Observation):
    """The squared Euclidean distance from each trained model to each of the servers' (FedSEM's E-step)."""

    needs_models = True

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """``(B, K)``."""
        squares: NDArray[np.float64] = (
            torch.stack([(trained.rows - model).double().square().sum(1) for model in trained.models], dim=1)
            .cpu()
            .numpy()
        )
        return squares
