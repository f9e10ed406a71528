"""Cache of one result that is valid as long as the arrays it was computed from are the same objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The latest result of a computation over all clients, whose inputs do not change in most rounds.

    Arrays are compared by identity: states and stages are frozen, so the same array has the same values.
    """

    def __init__(self) -> None:
        self._inputs: tuple[object, ...] | None = None
        self._result: T

    def of(self, make: Callable[[], T], *inputs: object) -> T:
        """The result of ``make``, which is called only if ``inputs`` differs from the last call.

        Args:
            make: computes the result.
            inputs: everything the result depends on; text and numbers are compared by value, all else by
                identity.
        """
        if self._inputs is None or not _same_inputs(self._inputs, inputs):
            self._result = make()
            self._inputs = inputs
        return self._result


def _same_inputs(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return len(before) == len(now) and all(
        a is b or (isinstance(a, str | int | float) and type(a) is type(b) and a == b)
        for a, b in zip(before, now, strict=True)
    )
