"""The ranges of a model that lie at different servers: its shards.

As in parameter servers (Li et al., OSDI 2014), the flat vector is cut into ranges of keys. What clients send
is cut likewise, so that each part goes straight to the server of its range.
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
        bounds: where they begin and end, from 0 to the vector's length; as many as there are ranges, and one.
    """

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, size: int, shards: int) -> Ranges:
        """A model of P numbers in at most this many shards, as equal as may be, of whole pieces: what servers
        compute piece by piece does not depend on how many there are.
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
        """What of these segments lies in each range, counted from its beginning."""
        return [
            tuple(
                (max(a, place.start) - place.start, min(b, place.stop) - place.start)
                for a, b in segments
                if a < place.stop and b > place.start
            )
            for place in self
        ]

    def among(self, segments: Segments) -> Ranges:
        """The same ranges of the numbers that the segments cover, one after another."""
        return Ranges(tuple(sum(max(0, min(b, bound) - a) for a, b in segments) for bound in self.bounds))

    def evenly(self, size: int) -> Ranges:
        """As many ranges of another vector, as equal as may be."""
        return Ranges(tuple(size * place // len(self) for place in range(len(self) + 1)))
