"""What was computed of large arrays is kept for as long as it is asked of the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The latest result of a computation over all clients, which most rounds would only do again.

    States, stages and what hangs on them are frozen: the same array has the same values.
    """

    def __init__(self) -> None:
        self._asked: tuple[object, ...] | None = None
        self._found: T

    def of(self, make: Callable[[], T], *asked: object) -> T:
        """What ``make`` gives, called only if it is ``asked`` of other objects than the last time.

        Args:
            make: computes it.
            asked: all that the result depends on; arrays and the like are the same if they are one object,
                text and numbers if they are equal.
        """
        if self._asked is None or not _same(self._asked, asked):
            self._found = make()
            self._asked = asked
        return self._found


def _same(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return len(before) == len(now) and all(
        a is b or (isinstance(a, str | int | float) and type(a) is type(b) and a == b)
        for a, b in zip(before, now, strict=True)
    )
