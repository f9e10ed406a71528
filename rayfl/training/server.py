"""Training at the servers: a server trains its model after averaging, on samples that it has.

FedDF (distillation from the clients' models) is a complete example in ``docs/your/method.md``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rayfl.data import Samples
from rayfl.models import ModelSpec
from rayfl.random import generator, key
from rayfl.training.reports import Reports

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rayfl.training.batches import Batches


@dataclass(frozen=True)
class AtServer:
    """A model right after averaging, and what its server knows.

    Attributes:
        spec: the model's layout.
        module: a module of that layout, in training mode, which holds the model.
        batches: turns samples into what the model takes.
        model: its index among the servers' models.
        clients: ids of the clients whose models were averaged ``(m,)``.
        weights: of these clients in the average ``(m,)``, not normalised.
        reports: what these clients reported, by name ``(m, ...)``.
        round: 0-based.
        seed: the run's seed.
    """

    spec: ModelSpec
    module: nn.Module
    batches: Batches
    model: int
    clients: NDArray[np.int64]
    weights: NDArray[np.float64]
    reports: Reports
    round: int
    seed: int

    def shuffled(self, samples: int, batch_size: int, epochs: int) -> Iterator[NDArray[np.int64]]:
        """Yield the positions ``(b,)`` of each batch in shuffled epochs; orders differ by model and round."""
        rng = generator(self.seed, "server training", self.round, self.model)
        for _ in range(epochs):
            order = rng.permutation(samples)
            for begin in range(0, samples, batch_size):
                yield order[begin : begin + batch_size]


class ServerTraining(ABC):
    """What a server does with its model after averaging: a frozen dataclass whose fields are its settings.

    A method returns one from :meth:`rayfl.algorithms.Algorithm.server_training`. It runs on a client actor,
    one task per model, after all averages of the round, for the models that clients have trained.
    """

    def prepare(self, samples: Samples, seed: int) -> ServerTraining:
        """The training, completed with what it needs from the server's data; called once, by the driver."""
        return self

    @abstractmethod
    def train(self, at: AtServer) -> None:
        """Train ``at.module``; clients continue with the model that it then holds.

        PyTorch's generator is seeded from the run's seed, the round and the model.
        """


@dataclass(frozen=True)
class ServerTrainingJob:
    """Train a model ``("model", 0)`` with the :class:`ServerTraining` ``("training", 0)``.

    Attributes:
        model, clients, weights, reports, round: as of :class:`AtServer`.
    """

    model: int
    clients: NDArray[np.int64]
    weights: NDArray[np.float64]
    reports: Reports
    round: int


def train_model(
    training: ServerTraining,
    job: ServerTrainingJob,
    model: torch.Tensor,
    spec: ModelSpec,
    batches: Batches,
    seed: int,
) -> NDArray[np.float32]:
    """The model ``(P,)`` after its server has trained it.

    Raises:
        FloatingPointError: if it is not finite.
    """
    from rayfl.training.loop import seeded  # deferred: it needs torch

    module = spec.build().to(batches.device).train()
    spec.load(module, model)
    at = AtServer(spec, module, batches, job.model, job.clients, job.weights, job.reports, job.round, seed)
    with seeded(key(seed, "server training", job.round, job.model)):
        training.train(at)
    vector = spec.flatten(module)
    if not np.isfinite(vector).all():
        raise FloatingPointError(f"{type(training).__name__}.train: the model is not finite any more")
    return vector
