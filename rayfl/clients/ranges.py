"""The ranges of a model that lie at different servers: its shards.

As in parameter servers (Li et al., OSDI 2014), the flat vector is cut into ranges of keys. What clients send
is cut in the same way, so that each part goes straight to the server of its range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from rayfl.clients.partial import PIECE

if TYPE_CHECKING:
    from rayfl.training import Segments

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True)
class Ranges:
    """Consecutive ranges of a vector.

    Attributes:
        bounds: where the ranges begin and end, from 0 to the vector's length; one more than there are ranges.
    """

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, size: int, shards: int) -> Ranges:
        """Cut a model of ``size`` numbers into at most ``shards`` ranges, as equal as possible. They consist
        of whole pieces, so that what servers compute piece by piece does not depend on the number of shards.
        """
        pieces = max(1, -(-size // PIECE))
        count = min(shards, pieces)
        return cls((*(PIECE * (pieces * place // count) for place in range(count)), size))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[slice]:
        return itertools.starmap(slice, itertools.pairwise(self.bounds))

    @property
    def largest(self) -> float:
        """The largest range, as a share of the vector."""
        most: int = max(place.stop - place.start for place in self)
        return most / max(1, self.bounds[-1])

    def split(self, values: NDArray[_Number]) -> list[NDArray[_Number]]:
        """Values of the vector ``(..., S)`` in each range: views."""
        return [values[..., place] for place in self]

    def within(self, segments: Segments) -> list[Segments]:
        """The parts of these segments in each range, counted from the start of the range."""
        return [
            tuple(
                (max(a, place.start) - place.start, min(b, place.stop) - place.start)
                for a, b in segments
                if a < place.stop and b > place.start
            )
            for place in self
        ]

    def among(self, segments: Segments) -> Ranges:
        """The same ranges as places in the concatenation of the segments."""
        return Ranges(tuple(sum(max(0, min(b, bound) - a) for a, b in segments) for bound in self.bounds))

    def evenly(self, size: int) -> Ranges:
        """The same number of ranges of another vector, with ``size`` numbers, as equal as possible."""
        return Ranges(tuple(size * place // len(self) for place in range(len(self) + 1)))
