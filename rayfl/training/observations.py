"""What the servers must see of trained models before they can average them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rayfl.data import Samples
from rayfl.data.server import ServerData
from rayfl.errors import DataError
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
        """``(B, K)``; of the parameters, without running statistics."""
        rows, n = trained.rows[:, : trained.spec.n_parameters], trained.spec.n_parameters
        squares: NDArray[np.float64] = (
            torch.stack(
                [(rows - m[:n].to(rows.device)).double().square().sum(1) for m in trained.models], dim=1
            )
            .cpu()
            .numpy()
        )
        return squares


@dataclass(frozen=True)
class Predicting(Observation):
    """The predictions of the trained models, a row each (:func:`prediction_rows`)."""

    data: ServerData
    inputs: NDArray[np.generic] | None = field(default=None, compare=False)

    def prepare(self, samples: Samples, seed: int) -> Predicting:
        """With the inputs."""
        return replace(self, inputs=self.data.draw(samples, seed))

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """``(B, s * classes)``; each word of a text counts as a sample."""
        assert self.inputs is not None
        x = trained.batches.inputs(self.inputs)
        module = trained.module.eval()
        found = []
        for row in trained.rows:
            trained.spec.load(module, row)
            with torch.inference_mode():
                logits = torch.cat([module(x[k : k + 500]) for k in range(0, len(x), 500)])
            probabilities = torch.softmax(logits, dim=1).movedim(1, -1)
            found.append(probabilities.flatten(0, -2).cpu().numpy())
        return prediction_rows(np.stack(found), self.data.one_hot)


def prediction_rows(probabilities: NDArray[np.floating], one_hot: bool = False) -> NDArray[np.float32]:
    """The predictions of clients as rows to be compared.

    Args:
        probabilities: ``(B, samples, classes)``, of B clients.
        one_hot: 1 at the most probable class (the first of equals), 0 elsewhere; else as they are.

    Returns:
        ``(B, samples * classes)``.

    Raises:
        DataError: if they are not finite or negative (logits, say), whose cosine is no similarity.
    """
    if not (np.isfinite(probabilities).all() and (probabilities >= 0).all()):
        raise DataError("predictions have to be probabilities: finite and not negative")
    if one_hot:
        classes = probabilities.shape[-1]
        probabilities = np.eye(classes, dtype=np.float32)[probabilities.argmax(axis=-1)]
    return probabilities.reshape(len(probabilities), -1).astype(np.float32)
