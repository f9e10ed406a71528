"""What a block of clients sends to its server: a part of a row of ``A W``.

Importing this module must stay cheap: an LPS actor needs NumPy, but not torch or anything built on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Weight = float | NDArray[np.float64]

Vector = NDArray[np.floating] | tuple[NDArray[np.floating], ...]
"""A vector ``(S,)``, or its pieces one after another."""

PIECE = 1 << 16
"""Numbers in a piece of a vector. Pieces are added up one after the other, so that they stay in the cache and
no more than one of the result is needed in double precision. They are sent one by one: Ray copies objects of
more than a megabyte with six threads, which slow training down when clients use every core."""

LARGE = 1 << 22
"""Models with at least this many parameters avoid copies: the clients of a block train one by one, and
sums are added while other blocks train.
"""


@dataclass(frozen=True)
class Partial:
    """A part of one row of ``A W``: ``sum_j a_j w_j`` over a block, and ``weight = sum_j a_j``.

    The sum is ``factor * total``; it covers the shared (not personal) parameters of the model, in float64:
    with whole-number weights the sums are exact to 2^-53, so how clients are grouped does not show in the
    float32 result.

    Attributes:
        total: ``(S,)`` in float64, or one number that stands for S equal ones; for a block of one client the
            model itself, in float32: half as many bytes.
        weight: one number, or one for each parameter ``(S,)`` if clients leave some out.
        keep: the weight of the old model, ``sum_j b_j``.
        statistics: how many entries at the end are running statistics. These are averaged with weights ``a_j
            + b_j`` in ``total``: ``b_j`` may be negative, which would make a variance negative.
        extra: the sum of what clients add to the server's own vector ``(Q,)``, if there is one.
        scale: factor of the row's sums (except running statistics); the old model gets the remaining
            weight.
        factor: multiplies ``total`` only: ``a_j``, if ``total`` is the model of client j.
        elsewhere: for a shard: whether clients take part in the row, even if only in other shards.
    """

    total: Vector
    weight: Weight
    keep: float = 0.0
    extra: Vector | None = None
    statistics: int = 0
    scale: float = 1.0
    factor: float = 1.0
    elsewhere: bool = False

    def take(self, places: NDArray[np.int64]) -> Partial:
        """The numbers at these places ``(S',)``."""
        weight = self.weight[places] if isinstance(self.weight, np.ndarray) else self.weight
        return Partial(summed([self])[places], weight)

    def split(self, shared: Sequence[slice], extra: Sequence[slice]) -> list[Partial]:
        """Cut into shards.

        Args:
            shared: the place of each shard among the S numbers.
            extra: the place of each shard in :attr:`extra`.
        """
        assert not isinstance(self.total, tuple), "shards first, then pieces"
        assert not isinstance(self.extra, tuple), "shards first, then pieces"
        first = shared[-1].stop - self.statistics  # running statistics begin there
        takes_part = bool(np.any(self.weight))
        return [
            replace(
                self,
                total=self.total[: place.stop - place.start] if len(self.total) == 1 else self.total[place],
                weight=self.weight[place] if isinstance(self.weight, np.ndarray) else self.weight,
                extra=None if self.extra is None else self.extra[extra_place],
                statistics=max(0, place.stop - max(first, place.start)),
                elsewhere=takes_part,
            )
            for place, extra_place in zip(shared, extra, strict=True)
        ]

    def cut(self) -> Partial:
        """The same with long vectors in pieces, which are faster to send."""
        extra = None if self.extra is None else pieces(self.extra)
        return replace(self, total=pieces(self.total), extra=extra)


class Adding:
    """Adds parts of the same row in one buffer, in the order in which they are given.

    Args:
        size: of the sum, S, if several parts will come: the buffer is allocated now, and every part is added
            to it. Otherwise the first part is kept as it is until there is a second.
    """

    def __init__(self, size: int | None = None) -> None:
        self._sum: Partial | None = None
        self._buffer: NDArray[np.float64] | None = None if size is None else np.empty(size)

    def add(self, partial: Partial) -> None:
        """Add a part."""
        earlier, buffer = self._sum, self._buffer
        parts = [partial] if earlier is None else [earlier, partial]
        if earlier is None and buffer is None:
            self._sum = partial
            return
        if buffer is None or (len(buffer) == 1 and earlier is not None):
            buffer = self._buffer = summed(parts)
        else:
            for number, place in enumerate(range(0, len(buffer), PIECE)):
                piece = buffer[place : place + PIECE]
                if earlier is None:
                    sum_piece(piece, parts, number)
                else:
                    _add_piece(piece, partial, number)
        self._sum = _summed_partial(buffer, parts)

    def partial(self) -> Partial:
        """The sum of the parts, if there were any."""
        assert self._sum is not None, "nothing was added"
        return self._sum


def added(partials: Sequence[Partial]) -> Partial:
    """Add the parts of several blocks of the same row, in this order."""
    return _summed_partial(summed(partials), partials).cut()


def _summed_partial(total: NDArray[np.float64], partials: Sequence[Partial]) -> Partial:
    """The sum of parts, with this total."""
    extras = [partial.extra for partial in partials if partial.extra is not None]
    weight: Weight = 0.0
    for partial in partials:
        weight = weight + partial.weight
    return Partial(
        total,
        weight,
        keep=sum(partial.keep for partial in partials),
        extra=summed([Partial(extra, 0.0) for extra in extras]) if extras else None,
        statistics=partials[0].statistics,
        elsewhere=any(partial.elsewhere for partial in partials),
    )


def joined(shards: Sequence[Partial]) -> Partial:
    """Join the shards of a part; the weight of the old model is left out."""
    if len(shards) == 1:
        return shards[0]
    weight = joined_weight([shard.weight for shard in shards], [length(shard.total) for shard in shards])
    return Partial(np.concatenate([summed([shard]) for shard in shards]), weight)


def joined_weight(weights: Sequence[Weight], sizes: Sequence[int]) -> Weight:
    """The weight of all shards, which have these sizes; one number if the weight is the same in all."""
    numbers = {float(weight) for weight in weights if not isinstance(weight, np.ndarray)}
    if len(numbers) == 1 and not any(isinstance(weight, np.ndarray) for weight in weights):
        return numbers.pop()
    per_parameter: NDArray[np.float64] = np.concatenate(
        [np.full(size, weight) for weight, size in zip(weights, sizes, strict=True)]
    )
    return per_parameter


def pieces(vector: Vector) -> tuple[NDArray[np.floating], ...]:
    """The pieces of a vector."""
    if isinstance(vector, tuple):
        return vector
    return tuple(vector[start : start + PIECE] for start in range(0, len(vector), PIECE))


def length(vector: Vector) -> int:
    """The length of the vector."""
    return sum(map(len, vector)) if isinstance(vector, tuple) else len(vector)


def summed(partials: Sequence[Partial]) -> NDArray[np.float64]:
    """The sum of ``factor * total`` in the order of the parts ``(S,)``; a part with a single number adds it
    everywhere."""
    total = np.empty(max(length(partial.total) for partial in partials))
    for start in range(0, len(total), PIECE):
        sum_piece(total[start : start + PIECE], partials, start // PIECE)
    return total


def sum_piece(into: NDArray[np.float64], partials: Sequence[Partial], number: int) -> None:
    """Write piece ``number`` of the sum of ``factor * total`` over the parts, in their order, to ``into``
    ``(n,)``.
    """
    first, *rest = partials
    piece = _piece(first, number)
    if piece.dtype == np.float64 and first.factor == 1:
        into[:] = piece
    else:
        np.multiply(piece, first.factor, out=into, dtype=np.float64)
        into += 0.0  # turns -0 into 0, like a sum that begins with zero
    for partial in rest:
        _add_piece(into, partial, number)


def _add_piece(into: NDArray[np.float64], partial: Partial, number: int) -> None:
    piece = _piece(partial, number)
    plain = piece.dtype == np.float64 and partial.factor == 1
    into += piece if plain else np.multiply(piece, partial.factor, dtype=np.float64)


def _piece(partial: Partial, number: int) -> NDArray[np.floating]:
    """Piece ``number`` of ``total``; a single number is its only piece."""
    total = partial.total
    if isinstance(total, tuple):
        return total[number if len(total) > 1 else 0]
    return total if len(total) == 1 else total[number * PIECE : (number + 1) * PIECE]
