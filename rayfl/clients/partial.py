"""What a block of clients sends to its server: a part of a row of ``A W``.

Importing this module must stay cheap: an LPS actor needs NumPy, and neither torch nor anything built on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Weight = float | NDArray[np.float64]

Vector = NDArray[np.float64] | tuple[NDArray[np.float64], ...]
"""A vector ``(S,)``, or its pieces one after another."""

_SENT = 1 << 16
"""Numbers in a piece of a vector that is sent. Ray copies objects of more than a megabyte with six threads,
which slow training down when clients use every core."""


@dataclass(frozen=True)
class Partial:
    """A part of one row of ``A W``: ``total = sum_j a_j w_j`` over a block, and ``weight = sum_j a_j``.

    ``total`` covers the shared (not personal) parameters of the model, in float64: with whole-number weights
    the sums are exact to 2^-53, so how clients are grouped does not show in the float32 result.

    Attributes:
        total: ``(S,)``; a single number stands for S of them.
        weight: one number, or one for each parameter ``(S,)`` if clients leave some out.
        keep: the weight of the old model, ``sum_j b_j``.
        statistics: how many entries at the end are running statistics. These are averaged with weights ``a_j
            + b_j`` in ``total``: ``b_j`` may be negative, which would make a variance negative.
        extra: the sum of what clients add to the server's own vector ``(Q,)``, if there is one.
        scale: factor of the row's sums (except running statistics); the old model gets the remaining
            weight.
    """

    total: Vector
    weight: Weight
    keep: float = 0.0
    extra: Vector | None = None
    statistics: int = 0
    scale: float = 1.0

    def take(self, places: NDArray[np.int64]) -> Partial:
        """Some of its numbers ``(S',)``."""
        weight = self.weight[places] if isinstance(self.weight, np.ndarray) else self.weight
        return Partial(summed([self.total])[places], weight)

    def cut(self) -> Partial:
        """The same with long vectors in pieces, which are faster to send."""
        extra = None if self.extra is None else pieces(self.extra)
        return replace(self, total=pieces(self.total), extra=extra)


def added(partials: Sequence[Partial]) -> Partial:
    """The parts of several blocks, of the same row, as one: added in this order."""
    extras = [partial.extra for partial in partials if partial.extra is not None]
    weight: Weight = 0.0
    for partial in partials:
        weight = weight + partial.weight
    return Partial(
        summed([partial.total for partial in partials]),
        weight,
        keep=sum(partial.keep for partial in partials),
        extra=summed(extras) if extras else None,
        statistics=partials[0].statistics,
    ).cut()


def pieces(vector: Vector) -> tuple[NDArray[np.float64], ...]:
    """The pieces of a vector."""
    if isinstance(vector, tuple):
        return vector
    return tuple(vector[start : start + _SENT] for start in range(0, len(vector), _SENT))


def summed(vectors: Sequence[Vector]) -> NDArray[np.float64]:
    """The sum in the order of the vectors; those of one number add it everywhere."""
    columns = [pieces(vector) for vector in vectors]
    ends = np.cumsum([len(piece) for piece in columns[0]], dtype=np.int64).tolist()
    found = np.empty(ends[-1] if ends else 0)
    for at, (end, first) in enumerate(zip(ends, columns[0], strict=True)):
        total = found[end - len(first) : end]
        total[:] = first
        for parts in columns[1:]:  # piece by piece, so that what is added up stays in the cache
            total += parts[at] if len(parts) == len(ends) else parts[0]
    return found
