"""The contract of an order of samples; the default is FedAvg's: all of them, reshuffled in every epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rayfl.errors import ConfigError, type_of
from rayfl.models import ModelSpec
from rayfl.settings import Section
from rayfl.training import LocalWork, Visits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arrival:
    """What the clients of a block have when a round begins.

    Attributes:
        spec: the model's layout.
        work: the round's work.
        round: 0-based.
        seed: the run's seed.
        clients: ids ``(B,)``.
        sizes: their training samples ``(B,)``.
        models: the models that they received ``(B, P)``.
        same: clients with the same number received equal models ``(B,)``.
        state: what :meth:`Ordering.keep` kept ``(B, S)``; zeros for a client that never took part.
        fresh: which clients never took part ``(B,)``.
        logits: computes the outputs ``(n, C)`` of a model ``(P,)``, and the targets ``(n,)``, on the training
            samples of the clients at the given rows of the block, one client after the other; for texts
            ``(n, C, L)`` and ``(n, L)``.
    """

    spec: ModelSpec
    work: LocalWork
    round: int
    seed: int
    clients: NDArray[np.int64]
    sizes: NDArray[np.int64]
    models: torch.Tensor
    same: NDArray[np.int64]
    state: torch.Tensor
    fresh: NDArray[np.bool_]
    logits: Callable[[torch.Tensor, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


class Ordering(Section):
    """A way to order a client's samples, chosen by name; one per file in ``rayfl/ordering``."""

    name: str = ""

    def check(self, spec: ModelSpec) -> None:
        """Refuse settings that do not fit the model, before anything starts.

        Raises:
            ConfigError
        """

    def state_size(self, spec: ModelSpec) -> int:
        """S: numbers that a client keeps between rounds for this order."""
        return 0

    def visits(self, arrival: Arrival) -> Sequence[Visits] | NDArray[np.intp] | None:
        """For each client the positions among its samples that every local step visits; None: shuffled."""
        return None

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        """What clients keep of their trained models ``(B, P)``: ``(B, S)``."""
        return rows[:, :0]


def visits_of(order: Ordering, arrival: Arrival) -> Sequence[Visits] | NDArray[np.intp] | None:
    """The answer of :meth:`Ordering.visits`.

    Raises:
        ConfigError: unless it has an entry for each of the B clients, or is None.
    """
    answer: object = order.visits(arrival)
    count = len(arrival.clients)
    if answer is None or (isinstance(answer, list | tuple | np.ndarray) and len(answer) == count):
        return answer
    where, expected = f"{order.name}.visits", f"expected one entry for each of the {count} clients, or None"
    raise ConfigError(where, f"returned {type_of(answer)}", expected)


def kept_by(order: Ordering, rows: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """The answer of :meth:`Ordering.keep` for trained models ``(B, P)``: ``(B, S)``.

    Raises:
        ConfigError: if it has another shape.
    """
    answer: object = order.keep(rows)
    expected = (len(rows), order.state_size(spec))
    if not isinstance(answer, type(rows)) or tuple(answer.shape) != expected:
        what, remedy = f"returned {type_of(answer)}", f"expected a tensor {expected}, by state_size"
        raise ConfigError(f"{order.name}.keep", what, remedy)
    return answer
