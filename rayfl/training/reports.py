"""What clients report after training, in addition to loss and steps: named functions of a trained block.

A method declares its reports (:meth:`rayfl.algorithms.Algorithm.reports`). They are computed where the models
were trained, and only the result is sent. q-FedAvg needs only the following one and :class:`UpdateLengths`::

    @dataclass(frozen=True)
    class StartLosses(ClientReport):
        floats = 1  # each client sends one number

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
from rayfl.data.base import pieces
from rayfl.data.server import ServerData
from rayfl.errors import DataError
from rayfl.models import ModelSpec

if TYPE_CHECKING:
    import torch

    from rayfl.training.batches import Batches
    from rayfl.training.forward import Forward

Reports = Mapping[str, NDArray[np.float64]]
"""The outcome of a round's reports by name, the first axis in the order of the cohort ``(M, ...)``."""

_FORWARD_SAMPLES = 500
"""Samples in a forward pass."""

_GROUP_SAMPLES = 1 << 13
"""Samples of several clients whose losses are computed together."""

_GROUP_NUMBERS = 1 << 17
"""Numbers in a group of rows: a few arrays of this size fit in a core's cache."""


@dataclass(frozen=True)
class Trained:
    """A block of B clients right after training.

    Attributes:
        spec: the model's layout.
        forward: computes the outputs of any model of that layout.
        batches: inputs and their scaling.
        rows: the trained models ``(B, P)``; the row of a client that failed is its start model.
        start: the models that the clients received ``(B, P)``.
        samples: the ids of each client's training samples.
        models: the servers' K models, ``(P,)`` each, if the report ``needs_models``.
    """

    spec: ModelSpec
    forward: Forward
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
        self.forward.load(model)
        return self._outputs(inputs)

    def mean_losses(self, rows: torch.Tensor) -> NDArray[np.float64]:
        """The mean loss of each client's model ``(B, P)`` on its own training samples ``(B,)``.

        Clients with the same model (one row, expanded) share forward passes.
        """
        if len(rows) and rows.stride(0) == 0:
            groups = list(self.samples.pieces(_GROUP_SAMPLES))
        else:
            groups = [slice(row, row + 1) for row in range(len(rows))]
        losses = np.full(len(rows), np.nan)
        for group in groups:
            losses[group] = self._mean_losses(rows[group.start], group)
        return losses

    def _mean_losses(self, model: torch.Tensor, clients: slice) -> NDArray[np.float64]:
        """The mean loss of one model ``(P,)`` on the samples of each of some clients, NaN without samples."""
        import torch

        values, offsets, loss = self.samples.values, self.samples.offsets, self.spec.loss
        sizes = self.samples.sizes[clients]
        means = np.full(len(sizes), np.nan)
        if not sizes.any():
            return means
        self.forward.load(model)
        outputs, targets = [], []
        for piece in pieces(offsets[1:], clients, self.batches.at_once(_FORWARD_SAMPLES)):
            inputs, target = self.batches.train(values[offsets[piece.start] : offsets[piece.stop]])
            outputs.append(self._outputs(inputs))
            targets.append(target)
        predicted, expected = torch.cat(outputs).double(), torch.cat(targets)
        if len(sizes) == 1:
            means[0] = float(loss.mean(predicted, expected))
        elif predicted.dim() == 2:
            sample_losses = loss.each(predicted, expected).cpu().numpy()
            sums = np.bincount(np.repeat(np.arange(len(sizes)), sizes), sample_losses, len(sizes))
            np.divide(sums, sizes, out=means, where=sizes > 0)
        else:  # texts: not every word has a target, and the loss averages over those that have
            ends = np.cumsum(sizes).tolist()
            for place, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if end > begin:
                    means[place] = float(loss.mean(predicted[begin:end], expected[begin:end]))
        return means

    def _outputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs of the loaded model on inputs ``(n, ...)``."""
        import torch

        size = self.batches.at_once(_FORWARD_SAMPLES)
        parts = [self.forward(inputs[k : k + size]) for k in range(0, len(inputs), size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def updates_of(rows: torch.Tensor, start: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """``w_i - w`` ``(B, P)``, 0 for running statistics, which are not updated by gradients."""
    updates = rows - start
    updates[:, spec.n_parameters :] = 0
    return updates


class ClientReport(ABC):
    """What the clients of a block report: a frozen dataclass, whose fields are its settings.

    Equal reports are sent to the workers once per run. Without :meth:`combine` the result should be small: it
    is returned with the block's losses. In what the algorithm receives, rows of failed clients are NaN.
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
        """The report of a block, ``(B, ...)``."""

    def combine(self, blocks: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
        """Merge the results of blocks, in the order of the cohort ``(M, ...)``; by default, concatenate.

        If the report is ``combined``, the rows of a failed client are computed from its start model.
        """
        return np.asarray(np.concatenate(blocks), np.float64)


@dataclass(frozen=True)
class UpdateLengths(ClientReport):
    """The length of each client's update, ``|w_i - w|``."""

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """The lengths ``(B,)``."""
        import torch

        rows, start, spec = trained.rows, trained.start, trained.spec
        # A few clients at a time, so that intermediate results fit in the cache.
        group = max(1, len(rows) if rows.is_cuda else _GROUP_NUMBERS // max(1, spec.P))
        lengths = [
            updates_of(rows[k : k + group], start[k : k + group], spec).double().norm(dim=1)
            for k in range(0, len(rows), group)
        ]
        return np.asarray(torch.cat(lengths).cpu().numpy())


@dataclass(frozen=True)
class Predictions(ClientReport):
    """The predictions of the trained models, one row per client (:func:`prediction_rows`)."""

    combined = True

    data: ServerData
    inputs: NDArray[np.generic] | None = field(default=None, compare=False)

    def prepare(self, samples: Samples, seed: int) -> Predictions:
        """The report, completed with inputs drawn from the server's data."""
        return replace(self, inputs=self.data.draw(samples, seed))

    def compute(self, trained: Trained) -> NDArray[np.floating]:
        """``(B, s * classes)``; each word of a text counts as a sample."""
        import torch

        assert self.inputs is not None
        predictions = []
        for row in trained.rows:
            x = trained.batches.inputs(self.inputs)  # a new copy: a network may change its input
            probabilities = torch.softmax(trained.outputs(row, x), dim=1).movedim(1, -1)
            predictions.append(probabilities.flatten(0, -2).cpu().numpy())
        return prediction_rows(np.stack(predictions), self.data.one_hot)


def prediction_rows(probabilities: NDArray[np.floating], one_hot: bool = False) -> NDArray[np.float32]:
    """The predictions of clients as rows to be compared.

    Args:
        probabilities: ``(B, samples, classes)``, of B clients.
        one_hot: return 1 at the most probable class (the first of equals) and 0 elsewhere, in place of the
            probabilities.

    Returns:
        ``(B, samples * classes)``.

    Raises:
        DataError: if probabilities are negative or not finite (logits, for example): their cosine would be
            no similarity.
    """
    if not (np.isfinite(probabilities).all() and (probabilities >= 0).all()):
        raise DataError("predictions have to be probabilities: finite and not negative")
    if one_hot:
        classes = probabilities.shape[-1]
        probabilities = np.eye(classes, dtype=np.float32)[probabilities.argmax(axis=-1)]
    return probabilities.reshape(len(probabilities), -1).astype(np.float32)
