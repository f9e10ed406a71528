"""What a client keeps between rounds: one row of numbers, in which each part of the method has a range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from rayfl.errors import ConfigError, type_of
from rayfl.local import LocalObjective
from rayfl.models import ModelSpec
from rayfl.ordering import Ordering
from rayfl.training import Segments, length

if TYPE_CHECKING:
    import torch

StateRow = tuple[int, int] | None
"""Where a client's state lies: (the number of its object, row); None if it has none yet."""

Rows = TypeVar("Rows", "torch.Tensor", NDArray[np.float32])


def _size(part: LocalObjective | Ordering, hook: str, spec: ModelSpec) -> int:
    """How many numbers a hook of a user's part says that are kept.

    Raises:
        ConfigError: if it is no number of numbers.
    """
    found: object = getattr(part, hook)(spec)
    if not isinstance(found, int | np.integer) or isinstance(found, bool) or found < 0:
        what = f"returned {found}" if isinstance(found, float | int) else f"returned {type_of(found)}"
        raise ConfigError(f"{part.name}.{hook}", what, "expected a whole number, 0 or more")
    return int(found)


@dataclass(frozen=True)
class StateLayout:
    """Which range of the states ``(..., S)`` belongs to which part of the method.

    Attributes:
        layers: the ranges of the model that are the client's own; their values come first.
        objective_size: how many numbers the local objective keeps.
        order_size: how many the order of samples keeps.
    """

    layers: Segments = ()
    objective_size: int = 0
    order_size: int = 0

    @classmethod
    def of(
        cls, spec: ModelSpec, layers: Segments, local: LocalObjective, order: Ordering | None = None
    ) -> StateLayout:
        """The layout of a run; without ``order``, only the parts that a client's model consists of."""
        order_size = 0 if order is None else _size(order, "state_size", spec)
        _size(local, "server_size", spec)
        return cls(layers, _size(local, "state_size", spec), order_size)

    @property
    def size(self) -> int:
        """S."""
        return length(self.layers) + self.objective_size + self.order_size

    def own_layers(self, states: Rows) -> Rows:
        """The values of the client's own layers."""
        return states[..., : length(self.layers)]

    def objective(self, states: Rows) -> Rows:
        """What the local objective keeps."""
        first = length(self.layers)
        return states[..., first : first + self.objective_size]

    def order(self, states: Rows) -> Rows:
        """What the order of samples keeps."""
        first = length(self.layers) + self.objective_size
        return states[..., first : first + self.order_size]

    @staticmethod
    def joined(own_layers: torch.Tensor, objective: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Join the parts of states, each ``(B, ...)``."""
        import torch

        parts: Sequence[torch.Tensor] = [p for p in (own_layers, objective, order) if p.shape[1]]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim=1)
