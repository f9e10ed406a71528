"""What clients report after training, in addition to loss and steps: named functions of a trained block.

A method declares its reports (:meth:`rayfl.algorithms.Algorithm.reports`). They are computed where the models
were trained, and only the result is sent. q-FedAvg needs just this one and :class:`UpdateLengths`::

    @dataclass(frozen=True)
    class StartLosses(ClientReport):
        def compute(self, trained: Trained) -> NDArray[np.floating]:
            return trained.mean_losses(trained.start)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfl.data import Ragged, Samples
from rayfl.data.server import ServerData
from rayfl.errors import DataError
from rayfl.models import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rayfl.training.batches import Batches

Reports = Mapping[str, NDArray[np.float64]]
"""The outcome of a round's reports by name, the first axis in the order of the cohort ``(M, ...)``."""

_AT_ONCE = 500
"""Samples in a forward pass."""


@dataclass(frozen=True)
class Trained:
    """A block of B clients right after training.

    Attributes:
        spec: the model's layout.
        module: a module of that layout, into which any model may be loaded.
        batches: inputs and their scaling.
        rows: the trained models ``(B, P)``; of a client that failed, the one that it started from.
        start: the models that the clients received ``(B, P)``.
        samples: the ids of each client's training samples.
        models: the servers' K models, ``(P,)`` each, if the report ``needs_models``.
    """

    spec: ModelSpec
    module: nn.Module
    batches: Batches
    rows: torch.Tensor
    start: torch.Tensor
    samples: Ragged
    models: Sequence[torch.Tensor] = ()

    def updates(self) -> torch.Tensor:
        """``w_i - w`` ``(B, P)``, see :func:`updates_of`."""
        return updates_of(self.rows, self.start, self.spec)

    def outputs(self, model: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The logits of a model ``(P,)`` on inputs ``(n, ...)``, as it is tested."""
        import torch

        module = self.module.eval()
        self.spec.load(module, model)
        with torch.inference_mode():
            parts = [module(inputs[k : k + _AT_ONCE]) for k in range(0, len(inputs), _AT_ONCE)]
            return torch.cat(parts)

    def mean_losses(self, rows: torch.Tensor) -> NDArray[np.float64]:
        """The mean loss of each client's model ``(B, P)`` on its own training samples ``(B,)``."""
        losses = np.full(len(rows), np.nan)
        for row, model in enumerate(rows):
            inputs, labels = self.batches.train(self.samples[row])
            if len(labels):
                losses[row] = float(self.spec.loss.mean(self.outputs(model, inputs).double(), labels))
        return losses


def updates_of(rows: torch.Tensor, start: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """``w_i - w`` ``(B, P)``, 0 for running statistics, which are not updated by gradients."""
    updates = rows - start
    updates[:, spec.n_parameters :] = 0
    return updates


class ClientReport(ABC):
    """What the clients of a block report: a frozen dataclass, whose fields are its settings.

    Equal reports are sent to the workers once per run. Without :meth:`combine` the result should be small: it
    is returned with the block's losses, and rows of failed clients are NaN.
    """

    needs_models: ClassVar[bool] = False
    """Whether it looks at the servers' models (:attr:`Trained.models`)."""

    combined: ClassVar[bool] = False
    """Whether the results of blocks are large and are merged by :meth:`combine` in a remote task."""

    floats: ClassVar[int] = 0
    """Numbers that each client sends for it; 0 if the server can compute it from the model that it receives.
    """

    def prepare(self, samples: Samples, seed: int) -> ClientReport:
        """The report, completed with what it needs from the server's data; called once, by the driver."""
        return self

    @abstractmethod
    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """Of a block: ``(B, ...)``."""

    def combine(self, blocks: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
        """Merge the results of blocks, in the order of the cohort ``(M, ...)``; by default, concatenate."""
        return np.asarray(np.concatenate(blocks), np.float64)


@dataclass(frozen=True)
class UpdateLengths(ClientReport):
    """The length of each client's update, ``|w_i - w|``."""

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """``(B,)``."""
        return np.asarray(trained.updates().double().norm(dim=1).cpu().numpy())


@dataclass(frozen=True)
class Predictions(ClientReport):
    """The predictions of the trained models, a row each (:func:`prediction_rows`)."""

    combined = True

    data: ServerData
    inputs: NDArray[np.generic] | None = field(default=None, compare=False)

    def prepare(self, samples: Samples, seed: int) -> Predictions:
        """With the inputs."""
        return replace(self, inputs=self.data.draw(samples, seed))

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """``(B, s * classes)``; each word of a text counts as a sample."""
        import torch

        assert self.inputs is not None
        x = trained.batches.inputs(self.inputs)
        found = []
        for row in trained.rows:
            probabilities = torch.softmax(trained.outputs(row, x), dim=1).movedim(1, -1)
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
        DataError: if they are negative or not finite (logits, for example): their cosine would be no
            similarity.
    """
    if not (np.isfinite(probabilities).all() and (probabilities >= 0).all()):
        raise DataError("predictions have to be probabilities: finite and not negative")
    if one_hot:
        classes = probabilities.shape[-1]
        probabilities = np.eye(classes, dtype=np.float32)[probabilities.argmax(axis=-1)]
    return probabilities.reshape(len(probabilities), -1).astype(np.float32)
